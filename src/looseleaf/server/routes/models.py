"""`GET /v1/models`."""

from __future__ import annotations

from fastapi import APIRouter

from looseleaf.server.callers import AnyCaller
from looseleaf.server.context import Context, ServerContext
from looseleaf.server.schemas.models import ModelAnswer, ModelList

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def list_models(context: Context, _: AnyCaller) -> ModelList:
    """The one model that is served."""
    return ModelList(data=[_model(context)])


@router.get("/v1/models/{name:path}")
async def get_model(name: str, context: Context, _: AnyCaller) -> ModelAnswer:
    """The served model; 404 for any other name."""
    context.check_model(name)
    return _model(context)


def _model(context: ServerContext) -> ModelAnswer:
    max_model_len = context.engine.engine.max_model_tokens
    return ModelAnswer(id=context.model_name, created=context.created, max_model_len=max_model_len)

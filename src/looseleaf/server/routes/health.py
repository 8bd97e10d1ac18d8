"""`GET /health`: is the engine alive? Never waits for a step."""

from __future__ import annotations

from fastapi import APIRouter

from looseleaf.server.context import Context
from looseleaf.server.errors import ApiError
from looseleaf.server.schemas.models import HealthAnswer

router = APIRouter(tags=["operation"])


@router.get("/health")
async def get_health(context: Context) -> HealthAnswer:
    """200 while requests are taken; 503 if the engine's thread died."""
    failure = context.engine.failure
    if failure is not None:
        raise ApiError(f"the engine died: {type(failure).__name__}: {failure}", status=503, code="engine_dead")
    engine = context.engine.engine
    return HealthAnswer(model=context.model_name, num_running=engine.num_running, num_waiting=engine.num_waiting)

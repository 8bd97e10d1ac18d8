"""`/v1/models`, `/health`, `/metrics`, and `/dashboard`: one page without outside assets."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, Response

from looseleaf.server.context import AnyCaller, Context, ServerContext
from looseleaf.server.errors import ApiError

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"

router = APIRouter(tags=["operation"])


@router.get("/v1/models")
async def list_models(context: Context, _: AnyCaller) -> dict[str, Any]:
    """The one model that is served."""
    return {"object": "list", "data": [_model(context)]}


@router.get("/v1/models/{name:path}")
async def get_model(name: str, context: Context, _: AnyCaller) -> dict[str, Any]:
    """The served model; 404 for any other name."""
    context.check_model(name)
    return _model(context)


@router.get("/health")
async def get_health(context: Context) -> dict[str, Any]:
    """200 while requests are taken; 503 if the engine's thread died. Never waits for a step."""
    failure = context.engine.failure
    if failure is not None:
        raise ApiError(f"the engine died: {type(failure).__name__}: {failure}", status=503, code="engine_dead")
    engine = context.engine.engine
    load = {"num_running": engine.num_running, "num_waiting": engine.num_waiting}
    return {"status": "ok", "model": context.model_name, **load}


@router.get("/metrics")
async def get_metrics(request: Request, context: Context) -> Response:
    """All metrics, in the format that the `Accept` header asks for."""
    exposition = await run_in_threadpool(context.metrics.expose, request.headers.get("accept", ""))
    return Response(exposition.body, headers={"content-type": exposition.content_type})


@router.get("/dashboard", response_class=HTMLResponse)
async def get_dashboard() -> HTMLResponse:
    """The page; it asks for statistics, pins and their quota, health and metrics every two seconds."""
    return HTMLResponse(_page(), headers={"content-security-policy": _POLICY})


@cache
def _page() -> str:
    return files("looseleaf.server").joinpath("dashboard.html").read_text("utf-8")


def _model(context: ServerContext) -> dict[str, Any]:
    """`max_model_len`: most tokens of prompt and answer together."""
    served = {"id": context.model_name, "object": "model", "created": context.created, "owned_by": "looseleaf"}
    return {**served, "max_model_len": context.engine.engine.max_model_tokens}

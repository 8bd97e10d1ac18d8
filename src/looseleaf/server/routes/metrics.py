"""`GET /metrics`: Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from looseleaf.server.context import Context

router = APIRouter(tags=["operation"])


@router.get("/metrics")
async def get_metrics(request: Request, context: Context) -> Response:
    """All metrics, in the format that the `Accept` header asks for."""
    exposition = context.metrics.expose(request.headers.get("accept", ""))
    return Response(exposition.body, headers={"content-type": exposition.content_type})

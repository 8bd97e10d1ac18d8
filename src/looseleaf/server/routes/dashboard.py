"""`GET /dashboard`: one page without outside assets."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import HTMLResponse

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"

router = APIRouter(tags=["operation"])


@router.get("/dashboard", response_class=HTMLResponse)
async def get_dashboard() -> HTMLResponse:
    """The page; it asks `/v1/cache/stats`, `/v1/pins` and `/health` every two seconds."""
    return HTMLResponse(_page(), headers={"content-security-policy": _POLICY})


@cache
def _page() -> str:
    return files("looseleaf.server").joinpath("dashboard.html").read_text("utf-8")

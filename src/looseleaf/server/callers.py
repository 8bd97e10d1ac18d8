"""Dependencies of the routes that need to know who calls."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from looseleaf.server.auth import Caller, identify, refuse_unless_admin
from looseleaf.server.context import Context


def get_caller(request: Request, context: Context) -> Caller:
    """The caller of `request`; 401 where keys are in use and none fits."""
    return identify(request.headers.get("authorization"), context.settings)


AnyCaller = Annotated[Caller, Depends(get_caller)]


def get_admin(caller: AnyCaller) -> Caller:
    """The caller, if it may change what the cache keeps; else 403."""
    refuse_unless_admin(caller)
    return caller


AdminCaller = Annotated[Caller, Depends(get_admin)]

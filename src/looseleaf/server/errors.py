"""Errors in the shape of the OpenAI API, `{"error": {message, type, param, code}}`, for everything that can go wrong.

Errors of looseleaf carry their numbers along in `error.details`, so that a program need not read the message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from looseleaf.errors import (
    CapacityError,
    ConfigError,
    DuplicateRequest,
    LifecycleError,
    LooseleafError,
    OutOfBlocks,
    PromptTooLong,
    RequestError,
    UnknownPin,
    UnknownRequest,
    UnknownSession,
)  # fmt: skip

_MAX_SHOWN_PROBLEMS = 3

# The first class that fits decides, so special ones stand before general ones.
_STATUS_OF_ERROR: Mapping[type[LooseleafError], int] = {
    DuplicateRequest: 409,
    RequestError: 400,
    ConfigError: 400,
    PromptTooLong: 400,
    OutOfBlocks: 503,
    CapacityError: 409,
    UnknownPin: 404,
    UnknownRequest: 404,
    UnknownSession: 404,
    LifecycleError: 503,
}

_TYPE_OF_STATUS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
}


class ApiError(Exception):
    """An error as it goes out: HTTP status, headers, and the fields of the body's `error` object."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        details: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        kind = _TYPE_OF_STATUS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
        if details:
            self.error["details"] = details


def answer_for(error: Exception) -> ApiError:
    """`error` as it goes out. Of what nobody foresaw the client learns the type only."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, LooseleafError):
        status = next((status for kind, status in _STATUS_OF_ERROR.items() if isinstance(error, kind)), 500)
        details = {
            name: value
            for name, value in vars(error).items()
            if name not in ("facts", "hint") and isinstance(value, (int, float, str))
        }
        return ApiError(str(error), status=status, code=error.code, details=details)
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    if isinstance(error, HTTPException):
        code = {404: "unknown_route", 405: "method_not_allowed"}.get(error.status_code)
        return ApiError(error.detail, status=error.status_code, code=code, headers=error.headers)
    return ApiError(f"internal error: {type(error).__name__}", status=500, code="internal_error")


def _validation_error(error: RequestValidationError) -> ApiError:
    """All problems in one message; the first one's field is the `param`."""
    problems = error.errors()
    first = problems[0]
    if first["type"] == "json_invalid":
        return ApiError(f"the body is no JSON: {first['msg']}", code="invalid_json")
    if first["loc"] == ("body",):
        message = "the body must be a JSON object\nhint: send it with `Content-Type: application/json`"
        return ApiError(message, code="invalid_body")
    shown = []
    for problem in problems[:_MAX_SHOWN_PROBLEMS]:
        where = ".".join(str(part) for part in problem["loc"][1:])  # the first part is "body", "query" or "header"
        shown.append(f"{where}: {problem['msg'].removeprefix('Value error, ')}")
    if len(problems) > len(shown):
        shown.append(f"and {len(problems) - len(shown)} more")
    return ApiError("; ".join(shown), code="invalid_value", param=str(first["loc"][1]))


def install_error_handlers(app: FastAPI) -> None:
    """Make every error of `app` leave in the OpenAI shape."""

    async def on_error(request: Request, error: Exception) -> Response:
        answer = answer_for(error)
        if answer.error["code"] in ("unknown_route", "method_not_allowed"):
            answer.error["message"] += f": {request.method} {request.url.path}"
        content = json.dumps({"error": answer.error})  # unlike JSONResponse this takes lone surrogates
        return Response(content, answer.status, headers=answer.headers, media_type="application/json")

    for kind in (LooseleafError, ApiError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)

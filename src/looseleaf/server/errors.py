"""Errors in the shape of the OpenAI API: `{"error": {message, type, param, code}}`, for everything that can
go wrong.

Errors of looseleaf carry their numbers along in `error.details`, so that a program need not read the message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from looseleaf.errors import (
    ConfigError,
    DuplicateRequest,
    LifecycleError,
    LooseleafError,
    OutOfBlocks,
    PinQuotaExceeded,
    PromptTooLong,
    RequestError,
    UnknownPin,
    UnknownRequest,
)

CLIENT_LEFT_STATUS = 499
_MAX_SHOWN_PROBLEMS = 3

# The first class that fits decides, so special ones stand before general ones.
_STATUS_OF_ERROR: tuple[tuple[type[LooseleafError], int], ...] = (
    (DuplicateRequest, 409),
    (RequestError, 400),
    (ConfigError, 400),
    (PromptTooLong, 400),
    (PinQuotaExceeded, 409),
    (OutOfBlocks, 503),
    (UnknownPin, 404),
    (UnknownRequest, 404),
    (LifecycleError, 503),
)

_TYPE_OF_STATUS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
}


class ApiError(Exception):
    """A refusal that only exists at the HTTP edge (authentication, an unknown model, an unsupported
    field)."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})


@dataclass(frozen=True)
class ErrorAnswer:
    """One error as it goes out: HTTP status and the body's `error` object."""

    status: int
    error: dict[str, Any]

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": self.error}


def error_answer(
    message: str, status: int, *, code: str | None = None, param: str | None = None, details: object = None
) -> ErrorAnswer:
    """Build an error; its `type` follows from the status. `details` is left out if None."""
    kind = _TYPE_OF_STATUS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    if details:
        error["details"] = details
    return ErrorAnswer(status, error)


def answer_for(error: LooseleafError) -> ErrorAnswer:
    """The answer for an error of looseleaf: its status, its stable code, its numbers."""
    status = next((status for kind, status in _STATUS_OF_ERROR if isinstance(error, kind)), 500)
    details = {
        name: value
        for name, value in vars(error).items()
        if name not in ("facts", "hint") and isinstance(value, (int, float, str))
    }
    return error_answer(str(error), status, code=error.code, details=details)


def error_response(answer: ErrorAnswer, headers: Mapping[str, str] | None = None) -> Response:
    """The HTTP response of an error."""
    content = json.dumps(answer.body())
    return Response(content, answer.status, headers=dict(headers or {}), media_type="application/json")


def _validation_answer(error: RequestValidationError) -> ErrorAnswer:
    problems = error.errors()
    if problems and problems[0]["loc"] == ("body",) and problems[0]["type"] != "json_invalid":
        message = "the body must be a JSON object\nhint: send it with `Content-Type: application/json`"
        return error_answer(message, 400, code="invalid_body")
    shown = []
    for problem in problems[:_MAX_SHOWN_PROBLEMS]:
        where = ".".join(str(part) for part in problem["loc"] if part != "body")
        shown.append(f"{where}: {problem['msg']}" if where else str(problem["msg"]))
    if len(problems) > len(shown):
        shown.append(f"and {len(problems) - len(shown)} more")
    path = [str(part) for part in problems[0]["loc"] if part != "body"] if problems else []
    is_json = bool(problems) and problems[0]["type"] == "json_invalid"
    code = "invalid_json" if is_json else "invalid_value"
    return error_answer("; ".join(shown), 400, code=code, param=None if is_json or not path else path[0])


def install_error_handlers(app: FastAPI) -> None:
    """Make every error of `app` leave in the OpenAI shape."""

    async def on_looseleaf_error(_: Request, error: Exception) -> Response:
        if not isinstance(error, LooseleafError):
            raise error
        return error_response(answer_for(error))

    async def on_api_error(_: Request, error: Exception) -> Response:
        if not isinstance(error, ApiError):
            raise error
        return error_response(
            error_answer(error.message, error.status, code=error.code, param=error.param), error.headers
        )

    async def on_validation_error(_: Request, error: Exception) -> Response:
        if not isinstance(error, RequestValidationError):
            raise error
        return error_response(_validation_answer(error))

    async def on_http_exception(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            raise error
        message = str(error.detail)
        code = None
        if error.status_code == 404:
            message, code = f"no route {request.method} {request.url.path}", "unknown_route"
        elif error.status_code == 405:
            message, code = f"{request.url.path} does not take {request.method}", "method_not_allowed"
        return error_response(error_answer(message, error.status_code, code=code), error.headers)

    async def on_bug(_: Request, error: Exception) -> Response:
        return error_response(error_answer(f"internal error: {type(error).__name__}", 500, code="internal_error"))

    app.add_exception_handler(LooseleafError, on_looseleaf_error)
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(Exception, on_bug)

"""What the routes work with: one frozen object per app, and who calls. Both are found through the request."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from looseleaf.core.manager import CacheManager
from looseleaf.engine.async_engine import AsyncEngine
from looseleaf.engine.tokenizer import Tokenizer
from looseleaf.server.auth import Caller, RequestDirectory, identify
from looseleaf.server.errors import ApiError
from looseleaf.server.past_turns import PastTurns
from looseleaf.server.request_pins import RequestPins
from looseleaf.server.settings import ServerSettings
from looseleaf.telemetry import Metrics


@dataclass(frozen=True)
class ServerContext:
    """The objects behind one app. `bytes_per_block`: memory behind a block of `cache`; `cache_clock`: the clock that
    `cache` reads; `created`: Unix seconds."""

    engine: AsyncEngine
    cache: CacheManager
    tokenizer: Tokenizer
    model_name: str
    metrics: Metrics
    settings: ServerSettings
    bytes_per_block: int
    request_pins: RequestPins
    past_turns: PastTurns
    directory: RequestDirectory
    cache_clock: Callable[[], float]
    created: int

    @property
    def no_past_turns(self) -> PastTurns:
        """For requests that take nothing from the cache: their prompts are what the template says."""
        return PastTurns(self.tokenizer, self.cache.plan.block_tokens, 0)

    def unix_seconds(self, cache_seconds: float) -> float:
        """A time of the cache's clock as Unix time, in milliseconds' precision."""
        return round(time.time() - self.cache_clock() + cache_seconds, 3)

    def check_model(self, name: str | None) -> None:
        """Accept the served model's name, or none.

        Raises:
            ApiError: 404 `model_not_found`.
        """
        if name not in (None, self.model_name):
            message = f"the model {name!r} does not exist here; this server has {self.model_name!r}"
            raise ApiError(message, status=404, code="model_not_found", param="model")


def get_context(request: Request) -> ServerContext:
    """The context of the app that got `request`."""
    context: ServerContext = request.app.state.context
    return context


Context = Annotated[ServerContext, Depends(get_context)]


def get_caller(request: Request, context: Context) -> Caller:
    """The caller of `request`; 401 where keys are in use and none fits."""
    return identify(request.headers.get("authorization"), context.settings)


AnyCaller = Annotated[Caller, Depends(get_caller)]


def get_admin(caller: AnyCaller) -> Caller:
    """The caller, if it may change what the cache keeps; 403 if an admin key is set and the caller does not have it."""
    if not caller.is_admin:
        message = "this route needs the admin key\nhint: send `Authorization: Bearer ADMIN_KEY`"
        raise ApiError(message, status=403, code="admin_key_required")
    return caller


AdminCaller = Annotated[Caller, Depends(get_admin)]

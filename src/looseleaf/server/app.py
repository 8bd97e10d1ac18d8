"""The app: routes over one engine and one cache."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from looseleaf.core.manager import CacheManager
from looseleaf.engine.async_engine import AsyncEngine
from looseleaf.engine.tokenizer import Tokenizer
from looseleaf.server.auth import RequestDirectory
from looseleaf.server.context import ServerContext
from looseleaf.server.errors import install_error_handlers
from looseleaf.server.past_turns import PastTurns
from looseleaf.server.request_pins import RequestPins
from looseleaf.server.routes import ROUTERS
from looseleaf.server.settings import ServerSettings
from looseleaf.telemetry import Metrics


def create_app(
    engine: AsyncEngine,
    cache: CacheManager,
    tokenizer: Tokenizer,
    model_name: str,
    metrics: Metrics,
    settings: ServerSettings | None = None,
    *,
    bytes_per_block: int,
    cache_clock: Callable[[], float] = time.monotonic,
) -> FastAPI:
    """The ASGI app. `engine` runs over `cache`, each block of which stands for `bytes_per_block`, and reports to
    `metrics`; it is started with the app and stopped with it. Several apps in one process do not know of each other."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        engine.start()
        try:
            yield
        finally:
            await run_in_threadpool(engine.stop)

    settings = settings or ServerSettings()
    # No docs pages: they load scripts from elsewhere into an origin where keys are typed in. /openapi.json is there.
    app = FastAPI(title="looseleaf", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.context = ServerContext(
        engine=engine,
        cache=cache,
        tokenizer=tokenizer,
        model_name=model_name,
        metrics=metrics,
        settings=settings,
        bytes_per_block=bytes_per_block,
        request_pins=RequestPins(cache, cache_clock),
        past_turns=PastTurns(tokenizer, cache.plan.block_tokens, settings.remembered_tokens),
        directory=RequestDirectory(),
        cache_clock=cache_clock,
        created=int(time.time()),
    )
    metrics.watch(engine.engine)
    install_error_handlers(app)
    for router in ROUTERS:
        app.include_router(router)
    return app

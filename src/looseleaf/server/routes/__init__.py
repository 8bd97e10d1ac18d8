"""One file per topic; each has a `router`."""

from __future__ import annotations

from looseleaf.server.routes import cache, generation, operation, pins

ROUTERS = (generation.router, pins.router, cache.router, operation.router)

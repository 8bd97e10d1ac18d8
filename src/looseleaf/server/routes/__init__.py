"""One file per topic; each has a `router`."""

from __future__ import annotations

from looseleaf.server.routes import cache, explain, generation, operation, pins, sessions

ROUTERS = (generation.router, pins.router, sessions.router, explain.router, cache.router, operation.router)

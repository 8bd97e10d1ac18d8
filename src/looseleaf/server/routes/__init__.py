"""One file per topic; each has a `router`. `ROUTERS` lists them in the order in which paths are tried."""

from __future__ import annotations

from fastapi import APIRouter

from looseleaf.server.routes import (
    cache,
    chat,
    completions,
    dashboard,
    health,
    metrics,
    models,
    pins,
    requests,
)

ROUTERS: tuple[APIRouter, ...] = tuple(
    topic.router for topic in (models, completions, chat, pins, cache, requests, health, metrics, dashboard)
)

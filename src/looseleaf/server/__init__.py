"""The HTTP server: the OpenAI API, and looseleaf's own routes for pins and the cache."""

from __future__ import annotations

from looseleaf.server.app import create_app
from looseleaf.server.settings import ApiKey, ServerSettings

__all__ = ["ApiKey", "ServerSettings", "create_app"]

"""Numbers for operators: Prometheus metrics of cache and engine."""

from __future__ import annotations

from looseleaf.telemetry.metrics import EngineLoad, Metrics

__all__ = ["EngineLoad", "Metrics"]

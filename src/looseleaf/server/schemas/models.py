"""Answers of the routes about models and health."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class ModelAnswer(BaseModel):
    """A served model. `max_model_len`: most tokens of prompt and answer together."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "looseleaf"
    max_model_len: int


class ModelList(BaseModel):
    """Served models."""

    object: Literal["list"] = "list"
    data: list[ModelAnswer]


class HealthAnswer(BaseModel):
    """State of the engine."""

    status: Literal["ok"] = "ok"
    model: str
    num_running: int
    num_waiting: int

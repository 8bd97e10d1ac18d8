"""Fixtures of the model tests: tiny models and runners on them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hf_models import FAMILIES, tiny_model
from transformers import PreTrainedModel
from transformers.utils import logging

from looseleaf.hf.runner import HFRunner

logging.set_verbosity_error()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny matrices gain nothing from two threads, and lose much when others use the machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models() -> dict[str, PreTrainedModel]:
    """One model per family for reference runs; runners get copies of their own by `tiny_model`."""
    return {family: tiny_model(family) for family in FAMILIES}


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def plain(family: str, models: dict[str, PreTrainedModel]) -> PreTrainedModel:
    """The model as transformers runs it."""
    return models[family]


@pytest.fixture(scope="session")
def runner(family: str) -> Iterator[HFRunner]:
    """The same weights, served from blocks of 8 tokens."""
    with HFRunner.load(tiny_model(family), num_blocks=160, block_tokens=8, num_threads=1) as loaded:
        yield loaded

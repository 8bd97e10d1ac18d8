"""Fixtures of the command line's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cli_kit import LETTERS, MEMORY, RunCli, Running, running
from typer.testing import CliRunner, Result

from looseleaf.cli.build import LoadedModel
from looseleaf.cli.main import app
from looseleaf.testing.fake_runner import FakeRunner
from looseleaf.testing.fake_tokenizer import FakeTokenizer


@pytest.fixture
def cli() -> RunCli:
    """Call the command line: `cli("serve", "--help")`. stdout and stderr are kept apart."""

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, list(arguments))

    return run


@pytest.fixture
def fake_model() -> Iterator[LoadedModel]:
    """A fake model with memory for 512 tokens; at the end no step has read a wrong block."""
    num_blocks = MEMORY.num_pages * MEMORY.blocks_per_page
    runner = FakeRunner(num_blocks, MEMORY.block_tokens, alphabet=LETTERS)
    yield LoadedModel("fake", runner, FakeTokenizer(), num_blocks, 8 * MEMORY.block_tokens)
    assert runner.mismatches == []


@pytest.fixture
def server(fake_model: LoadedModel) -> Iterator[Running]:
    """A server over the fake model, without keys."""
    with running(fake_model) as started:
        yield started

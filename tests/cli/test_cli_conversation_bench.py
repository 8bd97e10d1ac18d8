"""The bench of conversations, on a fake model: what it says of each turn is what the server did."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from cli_kit import LETTERS, MEMORY, running

from looseleaf.cli.build import LoadedModel
from looseleaf.server import ServerSettings
from looseleaf.testing.fake_runner import FakeRunner
from looseleaf.testing.pair_tokenizer import PairTokenizer

BENCH = Path(__file__).parents[2] / "bench" / "conversation_reuse.py"
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"day": 1, "place": "here"}'}}
MESSAGES = [
    {"role": "system", "content": "you answer briefly and politely."},
    {"role": "user", "content": "what will the weather do?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "name": "look", "content": "rain in the morning"},
    {"role": "assistant", "content": "it will rain in the morning."},
    {"role": "user", "content": "and later on?"},
]


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("conversation_reuse", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["conversation_reuse"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["conversation_reuse"]


def play(bench: ModuleType, name: str) -> Sequence[Any]:
    """All turns in one style, on a model whose tokens its tokenizer would not choose."""
    style = bench.STYLES[name]
    num_blocks = 64
    runner = FakeRunner(num_blocks, MEMORY.block_tokens, vocab_size=PairTokenizer.vocab_size, alphabet=LETTERS)
    model = LoadedModel("fake", runner, PairTokenizer(), num_blocks, 8 * MEMORY.block_tokens)
    settings = ServerSettings() if style.remembers else ServerSettings(remembered_tokens=0)
    with running(model, settings) as server, httpx.Client(base_url=server.url) as http:
        turns = list(bench.play(http, MESSAGES, style, 32, MEMORY.block_tokens))
    assert runner.mismatches == []
    assert [turn.turn for turn in turns] == [1, 2, 3]
    assert [turn.role for turn in turns] == ["user", "tool", "user"]
    return turns


def test_unchanged_answers_lose_nothing(bench: ModuleType) -> None:
    """Answers that come back as they were, with a call behind them, hit with all whole blocks of the turn before."""
    turns = play(bench, "unchanged")
    assert [turn.lost_tokens for turn in turns] == [0, 0, 0]
    assert [turn.cached_tokens for turn in turns] == [turn.could_tokens for turn in turns]
    assert bench.totals(turns)["lost_by_cause"] == {}


@pytest.mark.parametrize(
    ("name", "causes"),
    [("unchanged, text", {"diverged"}), ("recorded", {"message_edited"}), ("clock", {"message_edited"})],
)
def test_losses_have_a_cause(bench: ModuleType, name: str, causes: set[str]) -> None:
    """What is lost is told with its cause and a sentence: tokens that are not remembered, answers that are others than
    those given, a first message that changes."""
    turns = play(bench, name)
    lossy = [turn for turn in turns if turn.lost_tokens]
    assert lossy
    assert all(turn.message for turn in lossy)
    assert set(bench.totals(turns)["lost_by_cause"]) <= causes | {"never_seen", "below_one_block"}


def test_tools_are_read_from_calls(bench: ModuleType) -> None:
    """Each tool that is called is described by the arguments it was given."""
    (tool,) = bench.tools_of(MESSAGES)
    assert tool["function"]["name"] == "look"
    assert tool["function"]["parameters"]["properties"] == {"day": {"type": "integer"}, "place": {"type": "string"}}

"""What all sides of `serving.py` have in common: workloads as JSON, and one loop that serves them and reads the clock.

Only the standard library: this runs in the interpreters of the peers too.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

RESULT = "SERVING-RESULT "
"""Before each answer of a side on its standard output, where libraries print too."""


@dataclass(frozen=True)
class Turn:
    """Tokens that come in, behind all that the conversation has so far, and how many go out."""

    tokens: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Workload:
    """`conversations` are lists of turns; `num_clients` of them are under way at once, None: all from the start."""

    name: str
    conversations: list[list[Turn]]
    num_clients: int | None = None

    def to_json(self) -> dict[str, Any]:
        """As `from_json` takes it."""
        turns = [[[turn.tokens, turn.max_tokens] for turn in turns] for turns in self.conversations]
        return {"name": self.name, "conversations": turns, "num_clients": self.num_clients}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Workload:
        """What `to_json` gave."""
        conversations = [[Turn(*turn) for turn in turns] for turns in fields["conversations"]]
        return cls(fields["name"], conversations, fields["num_clients"])


@dataclass(frozen=True)
class Progress:
    """New tokens of one request. `num_cached_tokens` of its prompt, where the side tells."""

    request_id: str
    token_ids: list[int]
    is_finished: bool
    num_cached_tokens: int | None = None


class Side(Protocol):
    """An engine that is measured."""

    def submit(self, request_id: str, tokens: list[int], max_tokens: int) -> None:
        """Queue a prompt; exactly `max_tokens` tokens are generated, greedily."""

    def step(self) -> list[Progress]:
        """Wait for the next tokens."""


@dataclass
class _Conversation:
    turns: list[Turn]
    number: int = 0
    tokens: list[int] = field(default_factory=list)
    submitted: float = 0.0
    first_token: float | None = None


def serve(side: Side, workload: Workload, label: str) -> dict[str, Any]:
    """Serve a workload to its end; what was counted and timed. A turn continues with what was generated before it."""
    left = deque(_Conversation(turns) for turns in workload.conversations)
    running: dict[str, _Conversation] = {}
    first_token_seconds, request_seconds, cached_tokens = [], [], []
    num_prompt_tokens = num_output_tokens = num_requests = 0
    start = time.perf_counter()

    def submit(conversation: _Conversation) -> None:
        nonlocal num_prompt_tokens, num_requests
        turn = conversation.turns[conversation.number]
        conversation.tokens += turn.tokens
        conversation.number += 1
        request_id = f"{label}-{num_requests}"
        num_requests += 1
        num_prompt_tokens += len(conversation.tokens)
        conversation.submitted, conversation.first_token = time.perf_counter(), None
        running[request_id] = conversation
        side.submit(request_id, conversation.tokens, turn.max_tokens)

    num_at_once = workload.num_clients or len(left)
    while left and len(running) < num_at_once:
        submit(left.popleft())
    while running:
        for progress in side.step():
            now = time.perf_counter()
            conversation = running[progress.request_id]
            conversation.tokens = conversation.tokens + progress.token_ids
            num_output_tokens += len(progress.token_ids)
            if progress.token_ids and conversation.first_token is None:
                conversation.first_token = now
                first_token_seconds.append(now - conversation.submitted)
            if progress.is_finished:
                del running[progress.request_id]
                request_seconds.append(now - conversation.submitted)
                if progress.num_cached_tokens is not None:
                    cached_tokens.append(progress.num_cached_tokens)
                if conversation.number < len(conversation.turns):
                    submit(conversation)
                elif left:
                    submit(left.popleft())
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "requests": num_requests,
        "prompt_tokens": num_prompt_tokens,
        "output_tokens": num_output_tokens,
        "cached_tokens": sum(cached_tokens) if len(cached_tokens) == num_requests else None,
        "first_token_seconds": first_token_seconds,
        "request_seconds": request_seconds,
    }


def answer(side: Side) -> None:
    """Serve the workloads that come as lines of JSON on standard input, until it ends; tell when ready."""
    print(RESULT + json.dumps({"ready": True}), flush=True)
    for number, line in enumerate(sys.stdin):
        workload = Workload.from_json(json.loads(line))
        print(RESULT + json.dumps(serve(side, workload, f"{workload.name}-{number}")), flush=True)

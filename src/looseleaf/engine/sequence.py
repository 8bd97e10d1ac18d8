"""One request inside the engine: its tokens, what it holds, and the text that waits to be given out."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from looseleaf.core.lease import Lease
from looseleaf.engine.detokenizer import Detokenizer, TextPiece
from looseleaf.engine.draws import UniformDraws
from looseleaf.engine.request import GenerationRequest, Usage
from looseleaf.engine.sampling import SamplingRow, TokenLogprobs
from looseleaf.engine.stop import StopMatcher
from looseleaf.engine.tokenizer import Tokenizer
from looseleaf.ids import Int32Array

_NO_TOKENS = np.zeros(0, np.int32)
_NUM_PROMPT_TAIL_TOKENS = 8


class GivenOut(NamedTuple):
    """What the text buffer gives out: tokens, their text and their log-probabilities (empty if not asked for)."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    is_stopped: bool = False

    def joined(self, later: GivenOut) -> GivenOut:
        """This and then `later`, as one."""
        text, token_ids = self.text + later.text, self.token_ids + later.token_ids
        return GivenOut(text, token_ids, self.logprobs + later.logprobs, self.is_stopped or later.is_stopped)


NOTHING = GivenOut()


class OutputText:
    """Generated tokens on their way out: text, tokens and log-probabilities are held back together or not at all."""

    __slots__ = ("_detokenizer", "_logprobs", "_stops", "_tokens")

    def __init__(self, tokenizer: Tokenizer, prompt_tail: AbstractSequence[int], stops: tuple[str, ...]) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_tail)
        self._stops = StopMatcher(stops)
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    def push(self, token_id: int, logprobs: TokenLogprobs | None) -> GivenOut:
        """Add a token; what may be given out now."""
        self._tokens.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        piece = self._detokenizer.push(token_id)
        if piece is None:
            return NOTHING
        given, is_stopped = self._stops.push(piece)
        return self._take(given, is_stopped)

    def flush(self) -> GivenOut:
        """Give out all that is held: the sequence has ended. An open character may complete a stop string still."""
        piece = self._detokenizer.flush() or TextPiece(0, "")
        given, is_stopped = self._stops.push(piece)
        if not is_stopped:
            rest = self._stops.flush()
            given = TextPiece(given.num_tokens + rest.num_tokens, given.text + rest.text)
        return self._take(given, is_stopped)

    def _take(self, piece: TextPiece, is_stopped: bool) -> GivenOut:
        num_tokens, text = piece
        if num_tokens == 0 and not is_stopped:
            return NOTHING
        given = GivenOut(text, tuple(self._tokens[:num_tokens]), tuple(self._logprobs[:num_tokens]), is_stopped)
        del self._tokens[:num_tokens], self._logprobs[:num_tokens]
        return given


@dataclass(frozen=True)
class Wait:
    """What a waiting request waits for: that `leader` commits the first `num_tokens` tokens, which both share.
    `num_found_tokens` of them were in the cache when it began to wait."""

    leader: Sequence
    num_tokens: int
    num_found_tokens: int


class Sequence:
    """State of one request; made at `add`, owned by the engine's thread from the next step on.

        prompt and generated tokens          [0 ............ num_prompt_tokens ............ num_tokens)
        K and V are in blocks and committed  [0 .... lease.num_committed_tokens)

    It owns a `lease` exactly while it runs: one that waits owns no blocks. `last_token`: the newest token, which the
    next decode step computes. `is_counted`: its look-up is in the cache's statistics already. `is_decoding`: all tokens
    but the last one are computed, so each step computes one more. `arrival`: number in order of arrival.

    `plain_row`: its sampling row if that is the same at each position (greedy), else None.
    `samples`: requests with the same prompt that go on from this one's prefill; each has it as `lead` and neither waits
    nor runs by itself. `wait`: see `sharing`. `preempted_at`: known and committed tokens at the last preemption.
    """

    __slots__ = (
        "_buffer", "_draws", "added_seconds", "admitted_seconds", "arrival", "is_aborted", "is_counted",
        "is_decoding", "last_token", "lead", "lease", "num_cached_tokens", "num_prompt_tokens", "num_tokens", "output",
        "plain_row", "preempted_at", "request", "request_id", "samples", "wait",
    )  # fmt: skip

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer, now_seconds: float) -> None:
        params = request.params
        prompt = request.prompt_tokens
        self.request = request
        self.request_id = request.request_id
        self.added_seconds = now_seconds
        self.admitted_seconds: float | None = None
        self.lease: Lease | None = None
        self.num_prompt_tokens = self.num_tokens = len(prompt)
        self.last_token = int(prompt[-1])
        self.num_cached_tokens = self.arrival = 0
        self.samples: list[Sequence] = []
        self.lead: Sequence | None = None
        self.wait: Wait | None = None
        self.preempted_at = (-1, -1)
        self.is_decoding = self.is_aborted = self.is_counted = False
        self.output = OutputText(tokenizer, prompt[-_NUM_PROMPT_TAIL_TOKENS:].tolist(), params.stop)
        self._buffer = prompt
        self._draws = UniformDraws(secrets.randbits(63) if params.seed is None else params.seed)
        plain_greedy = params.is_greedy and not params.needs_history
        self.plain_row = SamplingRow(params, 0.0, _NO_TOKENS, _NO_TOKENS) if plain_greedy else None

    @property
    def tokens(self) -> Int32Array:
        """Prompt and generated tokens, int32 [num_tokens]; a view."""
        return self._buffer[: self.num_tokens]

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def usage(self) -> Usage:
        """Tokens of this request up to now."""
        return Usage(self.num_prompt_tokens, self.num_cached_tokens, self.num_output_tokens)

    @property
    def held(self) -> Lease:
        """The lease of a running request."""
        if self.lease is None:
            raise RuntimeError(f"request {self.request_id!r} is in a step without a lease")
        return self.lease

    @property
    def has_progressed(self) -> bool:
        """True if it was never preempted, or has a token or a committed token more than it had then."""
        num_tokens, num_committed = self.preempted_at
        return self.num_tokens > num_tokens or self.held.num_committed_tokens > num_committed

    def note_preemption(self) -> None:
        """Remember how far it had come, before it gives back its blocks."""
        num_tokens, num_committed = self.preempted_at
        self.preempted_at = (max(num_tokens, self.num_tokens), max(num_committed, self.held.num_committed_tokens))

    def give_back(self) -> None:
        """Release the lease: it runs no more."""
        self.held.release()
        self.lease = None
        self.is_decoding = False

    def append(self, token_id: int) -> None:
        """Add a generated token (its K and V are not computed yet)."""
        if self.num_tokens == len(self._buffer):
            self._buffer = np.concatenate((self._buffer, np.empty(max(64, self.num_tokens // 2), np.int32)))
        self._buffer[self.num_tokens] = self.last_token = token_id
        self.num_tokens += 1

    def sampling_row(self) -> SamplingRow:
        """How the token at position `num_tokens` is to be drawn: the same whatever ran in between."""
        if self.plain_row is not None:
            return self.plain_row
        params = self.request.params
        uniform = 0.0 if params.is_greedy else self._draws.at(self.num_tokens)
        prompt, generated = _NO_TOKENS, _NO_TOKENS
        if params.needs_history:
            prompt, generated = np.split(self.tokens, [self.num_prompt_tokens])
        return SamplingRow(params, uniform, prompt, generated)

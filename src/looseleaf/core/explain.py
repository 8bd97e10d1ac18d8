"""Why a request hit or missed: one reason, in numbers and in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from looseleaf.core.forgotten import CLEARED, EXPENDED, OVER_QUOTA, ForgottenBlock
from looseleaf.core.namespaces import Tenancy
from looseleaf.core.tokens import TOKEN_BYTES, unpack_tokens
from looseleaf.core.tree import Node, PrefixTree
from looseleaf.ids import Namespace

Reason: TypeAlias = Literal[
    "full_hit", "never_seen", "evicted", "other_namespace", "diverged", "below_one_block", "window_cut", "not_admitted",
    "cleared", "skipped",
]  # fmt: skip

NUM_SHOWN_TOKENS = 8
"""Token ids that are told on both sides of a divergence."""

SESSION_POLICY = "session"
"""Told instead of the policy's name for what was evicted since its session had ended or replaced it."""

QUOTA_POLICY = "quota"
"""Told instead of the policy's name for what was evicted since its namespace was over its quota."""


@dataclass(frozen=True)
class Explanation:
    """Why a request hit or missed, as of its first look-up.

    `num_evicted_tokens`: tokens behind the hit that had been cached and were evicted, whole blocks: what the eviction
    cost. `first_missed_token`: position of the first token that had to be computed though it might have hit; None if
    nothing was missed. `num_shared_tokens`: tokens in common with something stored, whole blocks or not. `reason` is
    about the first miss. `num_pinned_tokens`: tokens of the hit that pins kept. `by_rung`: the hit's tokens by the rung
    of reuse that gave them. Of what was evicted: `evicted_seconds_ago` from the look-up, by which `policy` ("session":
    its session had ended or replaced it; "quota": its namespace was over its own), and `pressure`, the blocks evicted
    between then and the look-up. `stored_tokens`, `asked_tokens`: up to 8 token ids from `first_missed_token` on, as
    they are stored and as they were asked for, if these differ. (What is stored may be another client's of the same
    namespace.) `session`: the request's.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_shared_tokens: int
    first_missed_token: int | None
    reason: Reason
    message: str
    num_evicted_tokens: int = 0
    num_pinned_tokens: int = 0
    by_rung: Mapping[str, int] = field(default_factory=dict)
    evicted_seconds_ago: float | None = None
    policy: str = ""
    pressure: int | None = None
    stored_tokens: tuple[int, ...] = ()
    asked_tokens: tuple[int, ...] = ()
    session: str | None = None


@dataclass(slots=True)
class Finding:
    """What a look-up found out, as it is kept: an `Explanation` that is not put in words yet.

    `num_lost_tokens`: whole blocks behind the hit that were there once (evicted, cleared, cut by a window). `why`: what
    the sentence names: the policy, the group of a window, the request that was forked. `stored`, `asked`: packed.
    """

    reason: Reason
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_shared_tokens: int = 0
    first_missed_token: int | None = 0
    at_seconds: float = 0.0
    num_lost_tokens: int = 0
    num_pinned_tokens: int = 0
    num_in_flight_tokens: int = 0
    lost_at_seconds: float | None = None
    pressure: int | None = None
    why: str = ""
    stored: bytes = b""
    asked: bytes = b""
    session: str | None = None

    def explain(self, block_tokens: int) -> Explanation:
        """In words, for blocks of so many tokens."""
        is_evicted = self.reason == "evicted"
        rungs = {"exact": self.num_cached_tokens - self.num_in_flight_tokens, "in_flight": self.num_in_flight_tokens}
        return Explanation(
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_shared_tokens=self.num_shared_tokens,
            first_missed_token=self.first_missed_token,
            reason=self.reason,
            message=f"{self.num_cached_tokens} of {self.num_prompt_tokens} tokens {self._sentence(block_tokens)}.",
            num_evicted_tokens=self.num_lost_tokens if is_evicted else 0,
            num_pinned_tokens=self.num_pinned_tokens,
            by_rung={rung: count for rung, count in rungs.items() if count or rung == "exact"},
            evicted_seconds_ago=self._lost_seconds_ago() if is_evicted else None,
            policy=self.why if is_evicted else "",
            pressure=self.pressure if is_evicted else None,
            stored_tokens=tuple(unpack_tokens(self.stored).tolist()),
            asked_tokens=tuple(unpack_tokens(self.asked).tolist()),
            session=self.session,
        )

    def _lost_seconds_ago(self) -> float | None:
        return None if self.lost_at_seconds is None else self.at_seconds - self.lost_at_seconds

    def _sentence(self, block_tokens: int) -> str:
        cached, first = self.num_cached_tokens, self.first_missed_token
        if self.reason == "skipped":
            return "reused: the request asked to skip the cache"
        if self.reason == "full_hit":
            if self.why:
                return f"shared with request {self.why!r}, from which it was forked"
            return "reused: all whole blocks were cached, and at least one token is always computed"
        if self.reason == "below_one_block":
            if self.num_prompt_tokens <= block_tokens:
                return f"reused: a prompt needs {block_tokens + 1} tokens to reuse a block of {block_tokens}"
            return f"reused: {first} tokens are shared with a stored prompt, less than one block of {block_tokens}"
        if self.reason == "window_cut":
            known = cached + self.num_lost_tokens
            why = f"group {self.why!r} has let go of what lies before token {known}"
            return f"reused: {known} tokens of it are stored, but {why}"
        if self.reason in ("evicted", "cleared"):
            told = f"reused: the block at token {cached} was {self.reason} {self._lost_seconds_ago():.1f} s ago"
            if self.reason == "cleared":
                return told
            if self.why == SESSION_POLICY:
                return f"{told}, since its session had ended or replaced it"
            if self.why == QUOTA_POLICY:
                return f"{told}, since its namespace stored more than its quota"
            return f"{told} by policy {self.why!r}, and {self.pressure} blocks since"
        if self.reason == "other_namespace":
            what = f"what follows token {cached}" if cached else "its beginning"
            return f"reused: {what} is stored in another namespace, which is never shared"
        if self.reason == "diverged":
            return f"reused: the prompt differs from what is stored at token {first}"
        return f"reused: nothing behind token {cached} was computed before"


def common_tokens(ours: bytes, theirs: bytes) -> int:
    """Tokens that two packed runs have in common at their beginnings."""
    length = min(len(ours), len(theirs))
    difference = int.from_bytes(ours[:length], "little") ^ int.from_bytes(theirs[:length], "little")
    if difference == 0:
        return length // TOKEN_BYTES
    return ((difference & -difference).bit_length() - 1) // (8 * TOKEN_BYTES)


@dataclass(slots=True)
class Nearest:
    """The stored continuation that has most in common with a block: its first so many tokens. None: nothing is stored
    there."""

    node: Node | None
    num_tokens: int


def nearest_continuation(tree: PrefixTree, node: Node, namespace: Namespace, block: bytes) -> Nearest:
    """That of a node's newest continuations in a namespace that begins most like `block`; the newest of those that
    begin alike."""
    continuations = tree.continuations(node, namespace)
    best, num_best = None, 0
    for key in tree.newest_alike(node, namespace, block[:TOKEN_BYTES]):
        num_tokens = common_tokens(block, key)
        if num_tokens > num_best:
            best, num_best = continuations[key], num_tokens
    if best is None and continuations:
        best = continuations[next(reversed(continuations))]
    return Nearest(best, num_best)


@dataclass(frozen=True)
class WindowCut:
    """A look-up was cut back from `num_known_blocks` stored blocks, since layer group `group` has let go of what it
    would need to go on from there."""

    group: str
    num_known_blocks: int


@dataclass(frozen=True)
class Lost:
    """What is remembered of the next block, which was stored once: `block`. Since then `pressure` blocks were evicted;
    `policy` is the name of the one that evicts."""

    block: ForgottenBlock
    pressure: int
    policy: str


def explain_lookup(
    tree: PrefixTree,
    node: Node,
    data: bytes,
    tenancy: Tenancy,
    cut: WindowCut | None,
    lost: Lost | None,
    at_seconds: float,
) -> Finding:
    """Why a look-up of packed tokens, stored as `tenancy` says, ended at the end of `node`. Read-only. Of what other
    namespaces store it tells no more than that they do.

    Evidence is weighed in this order: everything usable hit; too short to hit; a window was gone; the next block was
    stored and forgotten; it differs from what is stored there; it is stored in another namespace; nothing is known of
    it.
    """
    size = tree.block_bytes
    block_tokens, num_tokens = size // TOKEN_BYTES, len(data) // TOKEN_BYTES
    num_cached, num_usable_blocks = node.end * block_tokens, (num_tokens - 1) // block_tokens
    namespace = tenancy.at(node.end)
    if node.end == num_usable_blocks:
        is_short = num_usable_blocks == 0
        reason: Reason = "below_one_block" if is_short else "full_hit"
        num_shared = num_cached + nearest_continuation(tree, node, namespace, data[node.end * size :]).num_tokens
        return Finding(reason, num_tokens, num_cached, num_shared, 0 if is_short else None, at_seconds)
    if cut is not None:
        num_known = cut.num_known_blocks * block_tokens
        found = Finding("window_cut", num_tokens, num_cached, num_known, num_cached, at_seconds, why=cut.group)
        found.num_lost_tokens = num_known - num_cached
        return found
    block = data[node.end * size : (node.end + 1) * size]
    nearest = nearest_continuation(tree, node, namespace, block)
    shared = num_cached + nearest.num_tokens
    found = Finding("never_seen", num_tokens, num_cached, shared, num_cached, at_seconds)
    if lost is not None:
        cause = lost.block.cause
        found.reason = "cleared" if cause == CLEARED else "evicted"
        found.why = {EXPENDED: SESSION_POLICY, OVER_QUOTA: QUOTA_POLICY}.get(cause, lost.policy)
        found.lost_at_seconds = lost.block.at_seconds
        found.pressure = lost.pressure
        return found
    if tree.is_elsewhere(node, block, namespace):
        found.reason = "other_namespace"
        return found
    if num_cached and nearest.node is not None:
        found.reason = "diverged"
    elif nearest.num_tokens > 1:  # one token may be the mark with which every prompt begins
        found.reason = "below_one_block"
    else:
        return found
    assert nearest.node is not None  # something is in common, or something is stored
    at, length = nearest.num_tokens * TOKEN_BYTES, NUM_SHOWN_TOKENS * TOKEN_BYTES
    found.stored = nearest.node.tokens[at : at + length]
    found.asked = data[shared * TOKEN_BYTES :][:length]
    found.first_missed_token = shared
    return found

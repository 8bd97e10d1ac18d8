"""Why a request hit or missed: one reason, in numbers and in a sentence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeAlias

from looseleaf.core.forgotten import EVICTED, ForgottenTable
from looseleaf.core.namespaces import Tenancy
from looseleaf.core.tokens import TOKEN_BYTES
from looseleaf.core.tree import Node, PrefixTree

Reason: TypeAlias = Literal[
    "full_hit", "never_seen", "evicted", "other_namespace", "diverged", "below_one_block", "window_cut", "not_admitted",
    "cleared", "skipped",
]  # fmt: skip

MAX_COMPARED_SIBLINGS = 32
"""Stored continuations, newest first, among which the nearest one is looked for."""


@dataclass(frozen=True)
class Explanation:
    """Why a request hit or missed, as of its first look-up.

    `num_evicted_tokens`: tokens behind the hit that had been cached and were evicted, whole blocks: what the eviction
    cost. `first_missed_token`: position of the first token that had to be computed though it might have hit; None if
    nothing was missed. `num_shared_tokens`: tokens in common with something stored, whole blocks or not. `reason` is
    about the first miss. `num_pinned_tokens`: tokens of the hit that pins kept.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_shared_tokens: int
    first_missed_token: int | None
    reason: Reason
    message: str
    num_evicted_tokens: int = 0
    num_pinned_tokens: int = 0


def common_tokens(ours: bytes, theirs: bytes) -> int:
    """Tokens that two packed runs have in common at their beginnings."""
    length = min(len(ours), len(theirs))
    difference = int.from_bytes(ours[:length], "little") ^ int.from_bytes(theirs[:length], "little")
    if difference == 0:
        return length // TOKEN_BYTES
    return ((difference & -difference).bit_length() - 1) // (8 * TOKEN_BYTES)


def nearest_continuation(continuations: Iterable[bytes], block: bytes) -> int:
    """Most tokens that `block` shares with the beginning of one of the stored continuations."""
    first = block[:TOKEN_BYTES]
    return max((common_tokens(block, other) for other in continuations if other.startswith(first)), default=0)


def skipped(num_prompt_tokens: int) -> Explanation:
    """The explanation of a request that asked not to reuse anything."""
    return Explanation(
        num_prompt_tokens,
        0,
        0,
        0,
        "skipped",
        f"0 of {num_prompt_tokens} tokens reused: the request asked to skip the cache.",
    )


def forked(num_tokens: int, num_shared_tokens: int, parent_id: str) -> Explanation:
    """The explanation of a fork, which shares its parent's full blocks."""
    message = f"{num_shared_tokens} of {num_tokens} tokens shared with request {parent_id!r}, from which it was forked."
    return Explanation(num_tokens, num_shared_tokens, num_shared_tokens, None, "full_hit", message)


@dataclass(frozen=True)
class WindowCut:
    """A look-up was cut back from `num_known_blocks` stored blocks, since layer group `group` has let go of what it
    would need to go on from there."""

    group: str
    num_known_blocks: int


def explain_lookup(
    tree: PrefixTree,
    forgotten: ForgottenTable,
    node: Node,
    data: bytes,
    tenancy: Tenancy,
    cut: WindowCut | None,
    now_seconds: float,
) -> Explanation:
    """Why a look-up of packed tokens, stored as `tenancy` says, ended at the end of `node`. Read-only. Of what other
    namespaces store it tells no more than that they do.

    Evidence is weighed in this order: everything usable hit; too short to hit; a window was gone; the next block was
    stored and forgotten; it differs from what is stored there; it is stored in another namespace; nothing is known of
    it.
    """
    num_cached_blocks = node.end
    size = tree.block_bytes
    block_tokens = size // TOKEN_BYTES
    num_tokens = len(data) // TOKEN_BYTES
    num_cached = num_cached_blocks * block_tokens
    num_usable_blocks = (num_tokens - 1) // block_tokens
    block = data[num_cached_blocks * size : (num_cached_blocks + 1) * size]
    namespace = tenancy.at(num_cached_blocks)
    continuations = tree.continuations(node, namespace)
    num_beyond = nearest_continuation(islice(reversed(continuations), MAX_COMPARED_SIBLINGS), block)
    shared = num_cached + num_beyond
    head = f"{num_cached} of {num_tokens} tokens reused"

    def answer(reason: Reason, why: str, first_missed: int | None) -> Explanation:
        return Explanation(num_tokens, num_cached, shared, first_missed, reason, f"{head}: {why}.")

    if num_usable_blocks == 0:
        return answer(
            "below_one_block", f"a prompt needs {block_tokens + 1} tokens to reuse a block of {block_tokens}", 0
        )
    if num_cached_blocks == num_usable_blocks:
        return answer("full_hit", "all whole blocks were cached, and at least one token is always computed", None)
    if cut is not None:
        num_known = cut.num_known_blocks * block_tokens
        why = f"{num_known} tokens of it are stored, but group {cut.group!r} has let go of what lies before token "
        text = f"{head}: {why}{num_known}."
        return Explanation(num_tokens, num_cached, num_known, num_cached, "window_cut", text)
    lost = forgotten.look_up(node, block, tenancy.borders)
    if lost is not None:
        cause: Reason = "evicted" if lost.cause == EVICTED else "cleared"
        age_seconds = now_seconds - lost.at_seconds
        return answer(cause, f"the block at token {num_cached} was {cause} {age_seconds:.1f} s ago", num_cached)
    if tree.is_elsewhere(node, block, namespace):
        what = f"what follows token {num_cached}" if num_cached else "its beginning"
        why = f"{what} is stored in another namespace, which is never shared"
        return answer("other_namespace", why, num_cached)
    if num_cached_blocks == 0 and num_beyond > 1:  # one token may be the mark with which every prompt begins
        why = f"{num_beyond} tokens are shared with a stored prompt, less than one block of {block_tokens}"
        return answer("below_one_block", why, num_beyond)
    if num_cached_blocks and continuations:
        return answer("diverged", f"the prompt differs from what is stored at token {shared}", shared)
    return answer("never_seen", f"nothing behind token {num_cached} was computed before", num_cached)

"""The event stream: enough to rebuild the prefix tree elsewhere. Nothing is buffered; without a listener nothing is
built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from looseleaf.ids import Int32Array, Int64Array, Namespace


@dataclass(frozen=True)
class BlocksStored:
    """A run of logical blocks became reusable behind the one that has `parent_key` (None: at the root).

    keys: int64 [n], they stand for each block and all before it, within this process. blocks: int32 [n, num_lanes], ids
    in the lanes of `group`, or in all lanes if that is empty. token_ids: int32 [n * block_tokens]. With a `group`, the
    run was known already and that group, which had let go of it, holds it again.
    """

    namespace: Namespace
    parent_key: int | None
    keys: Int64Array
    blocks: Int32Array
    token_ids: Int32Array
    group: str = ""


@dataclass(frozen=True)
class BlocksRemoved:
    """Logical blocks are not reusable any more, in one `group` or (empty) at all; `cause` is "evicted" or "cleared".

    What is removed at all is removed once, whatever a group had let go of before.
    """

    namespace: Namespace
    keys: Int64Array
    cause: str
    group: str = ""


@dataclass(frozen=True)
class BlocksMoved:
    """Blocks have other ids now: int32 [n] each. What they hold, and who holds them, is unchanged."""

    from_blocks: Int32Array
    to_blocks: Int32Array


@dataclass(frozen=True)
class PinChanged:
    """A pin was "made" or "refused" for want of quota, or it ended: "unpinned", "expired", or "lapsed" (an automatic
    one that does not pay any more). `num_tokens`: what it asks for."""

    pin_id: str
    change: str
    namespace: Namespace
    owner: str
    level: str
    num_tokens: int


CacheEvent: TypeAlias = BlocksStored | BlocksRemoved | BlocksMoved | PinChanged
EventListener: TypeAlias = Callable[[CacheEvent], None]

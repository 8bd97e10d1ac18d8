"""The event stream: enough to rebuild the prefix tree elsewhere. Nothing is buffered; without a listener nothing is
built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from looseleaf.ids import Int32Array, Namespace


@dataclass(frozen=True)
class BlocksStored:
    """A run of blocks became reusable behind `parent_block` (None: at the root). `token_ids` int32 [blocks *
    block_tokens]."""

    namespace: Namespace
    parent_block: int | None
    blocks: Int32Array
    token_ids: Int32Array


@dataclass(frozen=True)
class BlocksRemoved:
    """Blocks are not reusable any more; `cause` is "evicted" or "cleared". A block is stored once, so it is removed
    once."""

    namespace: Namespace
    blocks: Int32Array
    cause: str


CacheEvent: TypeAlias = BlocksStored | BlocksRemoved
EventListener: TypeAlias = Callable[[CacheEvent], None]

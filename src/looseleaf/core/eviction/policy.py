"""The contract of an eviction policy: a small plug-in over opaque ids in logical time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol


class EvictionPolicy(Protocol):
    """Chooses which stored run of blocks goes next.

    An id stands for one node of the prefix tree: a run of blocks that all have the same history. `now` is logical
    time, it never goes back. Only evictable leaves are *offered*; the policy answers with one of these. It modifies
    nothing but itself, reads no clock, and finds its victim through a structure that it maintains, never by a scan.

    The caller guarantees: `insert` comes first and `forget` last for each id; `offer` and `withdraw` alternate.
    """

    name: ClassVar[str]

    def insert(self, node_id: int, now: int) -> None:
        """A node was stored: its first use."""
        ...

    def hit(self, node_ids: Sequence[int], now: int) -> None:
        """A request reuses these nodes, root first: one more use of each."""
        ...

    def release(self, node_ids: Sequence[int], now: int) -> None:
        """A request that used these nodes has ended; not a further use."""
        ...

    def split(self, node_id: int, upper_id: int) -> None:
        """The node was cut in two; `upper_id` is the new first part and inherits the history."""
        ...

    def offer(self, node_id: int, depth_blocks: int) -> None:
        """The node may be evicted from now on; its last block lies at `depth_blocks` (ties: deepest first)."""
        ...

    def withdraw(self, node_id: int) -> None:
        """The node may not be evicted any more."""
        ...

    def victim(self) -> int | None:
        """The offered node to evict next, None if none is offered. The node stays offered."""
        ...

    def forget(self, node_id: int) -> None:
        """The node is gone (evicted or cleared); its id is never used again."""
        ...

    def offered(self) -> Iterable[int]:
        """All offered ids, for the integrity check."""
        ...

"""S3-FIFO: three first-in-first-out queues; most one-hit wonders leave through a small one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar

from looseleaf.core.eviction.policy import StoredRun, Use
from looseleaf.core.eviction.queues import QueuePolicy

SMALL, MAIN = 0, 1

SMALL_SHARE = 0.1
"""Share of the pool from which on the small queue gives the victims."""

MAX_USES = 3


class S3FIFOPolicy(QueuePolicy):
    """A small queue, a main one, a ghost of keys (Yang et al., "FIFO queues are all you need", SOSP 2023).

    New runs enter the small queue; from its front those used twice or more go on to the main queue, others out, and
    their key is remembered in the ghost, which keeps as many blocks as the main queue may. What returns while its key
    is there enters the main queue, where a run goes round once for each of its last three uses. What can't be evicted
    when it comes to the front of the small queue, since runs lie behind it or a request holds it, goes on to the main
    queue too: if it stayed, a long conversation would fill the small queue with what must not go.
    """

    name: ClassVar[str] = "s3fifo"
    uses_keys: ClassVar[bool] = True
    queue_names: ClassVar[tuple[str, ...]] = ("small", "main")

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._ghost: OrderedDict[int, int] = OrderedDict()
        self._ghost_blocks = 0

    def insert(self, node_id: int, run: StoredRun, use: Use) -> None:
        """Small, or main if it was there not long ago."""
        known = self._ghost.pop(run.key, 0)
        self._ghost_blocks -= known
        self.add(node_id, run, MAIN if known else SMALL)

    def hit(self, node_ids: Sequence[int], use: Use) -> None:
        """Counts to three; nothing moves."""
        for node_id in node_ids:
            run = self.runs[node_id]
            run.uses = min(run.uses + 1, MAX_USES)

    def victim(self) -> int | None:
        """O(log runs), amortised: a run leaves the small queue once, and goes round in the main one once per use."""
        while True:
            small, main = self.front(SMALL), self.front_offered(MAIN)
            if small is not None and (main is None or self.queue_blocks[SMALL] >= SMALL_SHARE * self.num_blocks):
                run = self.runs[small]
                if run.depth_blocks is not None and run.uses <= 1:
                    return small
                run.uses = 0 if run.uses > 1 else run.uses
                self.move(small, MAIN, self.back())
            elif main is None or self.runs[main].uses == 0:
                return main
            else:
                self.runs[main].uses -= 1
                self.move(main, MAIN, self.back())

    def shorten(self, node_id: int, num_blocks: int, key: int) -> None:
        """Remembers what went."""
        if self.runs[node_id].queue == SMALL:
            self._remember(key, num_blocks)
        super().shorten(node_id, num_blocks, key)

    def forget(self, node_id: int, key: int | None) -> None:
        """Remembers what was evicted from the small queue."""
        run = self.runs[node_id]
        if run.queue == SMALL and key is not None:
            self._remember(key, run.num_blocks)
        super().forget(node_id, key)

    def resize(self, num_blocks: int) -> None:
        """The shares follow."""
        super().resize(num_blocks)
        self._bound_ghost()

    def _remember(self, key: int, num_blocks: int) -> None:
        self._ghost_blocks += num_blocks - self._ghost.pop(key, 0)
        self._ghost[key] = num_blocks
        self._bound_ghost()

    def _bound_ghost(self) -> None:
        while self._ghost_blocks > (1 - SMALL_SHARE) * self.num_blocks:
            self._ghost_blocks -= self._ghost.popitem(last=False)[1]

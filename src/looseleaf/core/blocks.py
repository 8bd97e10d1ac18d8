"""Who holds each block and which blocks are stored in the prefix tree: the states FREE, ACTIVE and CACHED."""

from __future__ import annotations

import numpy as np

from looseleaf.core.pages import PagePool
from looseleaf.ids import Int32Array


class BlockLedger:
    """Reference counts in one array, over a `PagePool`.

        FREE    no holder, not stored: the pool may give it out
        ACTIVE  held by at least one lease
        CACHED  no holder, stored in the prefix tree

    Every method takes int32 block ids [n] that are distinct within the call and works on the array as a whole.
    Counters are kept by the transitions and checked by `check_integrity`.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        num_blocks = pool.num_pages * pool.blocks_per_page
        self.num_blocks = num_blocks
        self.refs = np.zeros(num_blocks, dtype=np.int32)
        self.stored = np.zeros(num_blocks, dtype=np.bool_)
        self.num_active_blocks = 0
        self.num_cached_blocks = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken at once."""
        return self.pool.num_free_blocks

    def take(self, num_blocks: int, after: int | None = None) -> Int32Array:
        """FREE → ACTIVE: `num_blocks` blocks with one holder, int32 [num_blocks]. The caller has checked that they
        exist."""
        blocks = self.pool.take(num_blocks, after)
        self.refs[blocks] = 1
        self.num_active_blocks += num_blocks
        return blocks

    def hold(self, blocks: Int32Array) -> None:
        """One more holder for stored or held blocks; CACHED ones become ACTIVE."""
        counts = self.refs[blocks]
        woken = len(blocks) - int(np.count_nonzero(counts))
        self.refs[blocks] = counts + 1
        self.num_active_blocks += woken
        self.num_cached_blocks -= woken

    def drop(self, blocks: Int32Array) -> None:
        """One holder less; blocks without any become CACHED if they are stored, FREE if not."""
        counts = self.refs[blocks] - 1
        self.refs[blocks] = counts
        idle = blocks[counts == 0]
        if len(idle) == 0:
            return
        kept = self.stored[idle]
        num_kept = int(np.count_nonzero(kept))
        self.num_active_blocks -= len(idle)
        self.num_cached_blocks += num_kept
        if num_kept < len(idle):
            self.pool.give_back(idle[~kept])

    def store(self, blocks: Int32Array) -> None:
        """Note that held blocks are now in the prefix tree."""
        self.stored[blocks] = True

    def forget(self, blocks: Int32Array) -> int:
        """Note that blocks left the prefix tree; those without a holder become FREE. Returns how many did."""
        self.stored[blocks] = False
        idle = blocks[self.refs[blocks] == 0]
        self.num_cached_blocks -= len(idle)
        self.pool.give_back(idle)
        return len(idle)

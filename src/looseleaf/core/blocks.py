"""Who holds each block and which blocks are stored in the prefix tree: the states FREE, ACTIVE and CACHED."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from looseleaf.core.pages import PagePool
from looseleaf.ids import Int32Array


class BlockLedger:
    """Reference counts in one array, over a `PagePool`.

        FREE    no holder, not stored: the pool may give it out
        ACTIVE  held by at least one lease
        CACHED  no holder, stored in the prefix tree

    A CACHED block may be *protected* by a hard pin: it is not evictable then. Every method takes int32 block ids [n]
    that are distinct within the call and works on the array as a whole. Counters are kept by the transitions and
    checked by `check_integrity`.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        num_blocks = pool.num_pages * pool.blocks_per_page
        self.num_blocks = num_blocks
        self.refs = np.zeros(num_blocks, dtype=np.int32)
        self.stored = np.zeros(num_blocks, dtype=np.bool_)
        self.protected = np.zeros(num_blocks, dtype=np.bool_)
        self.num_active_blocks = 0
        self.num_cached_blocks = 0
        self.num_protected_blocks = 0
        self.num_protected_idle_blocks = 0  # protected and CACHED

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken at once."""
        return self.pool.num_free_blocks

    @property
    def num_evictable_blocks(self) -> int:
        """Cached blocks that can be evicted, soft-pinned ones included."""
        return self.num_cached_blocks - self.num_protected_idle_blocks

    def take(self, num_blocks: int, after: int | None = None, growth_blocks: int | None = None) -> Int32Array:
        """FREE → ACTIVE: `num_blocks` blocks with one holder, int32 [num_blocks]. The caller has checked that they
        exist."""
        blocks = self.pool.take(num_blocks, after, growth_blocks)
        self.refs[blocks] = 1
        self.num_active_blocks += num_blocks
        return blocks

    def take_one_each(self, lasts: Sequence[int], growths: Sequence[int | None]) -> Int32Array:
        """FREE → ACTIVE: one block for each sequence that ends with block `lasts[i]` (-1: it has none) and is expected
        to take `growths[i]` more, int32 [len(lasts)]. The caller has checked that they exist."""
        blocks = self.pool.take_one_each(lasts, growths)
        self.refs[blocks] = 1
        self.num_active_blocks += len(blocks)
        return blocks

    def hold(self, blocks: Int32Array) -> None:
        """One more holder for stored or held blocks; CACHED ones become ACTIVE."""
        counts = self.refs[blocks]
        num_woken = len(blocks) - int(np.count_nonzero(counts))
        if num_woken:
            self.num_active_blocks += num_woken
            self.num_cached_blocks -= num_woken
            if self.num_protected_idle_blocks:
                self.num_protected_idle_blocks -= int(np.count_nonzero(self.protected[blocks[counts == 0]]))
        counts += 1
        self.refs[blocks] = counts

    def hold_run(self, blocks: Int32Array, num_holders: int) -> None:
        """`hold` for all blocks of a stored run, of any shape, each of which has `num_holders` holders: no need to look
        at them."""
        self.refs[blocks] = num_holders + 1
        if num_holders == 0:
            self.num_active_blocks += blocks.size
            self.num_cached_blocks -= blocks.size
            if self.num_protected_idle_blocks and self.protected[blocks[0]].all():
                self.num_protected_idle_blocks -= blocks.size

    def drop_run(self, blocks: Int32Array, num_holders: int) -> None:
        """`drop` for all blocks of a stored run, of any shape, each of which has `num_holders` holders."""
        self.refs[blocks] = num_holders - 1
        if num_holders == 1:
            self.num_active_blocks -= blocks.size
            self.num_cached_blocks += blocks.size
            if self.num_protected_blocks and self.protected[blocks[0]].all():
                self.num_protected_idle_blocks += blocks.size

    def drop(self, blocks: Int32Array) -> None:
        """One holder less; blocks without any become CACHED if they are stored, FREE if not."""
        counts = self.refs[blocks]
        counts -= 1
        self.refs[blocks] = counts
        num_idle = len(blocks) - int(np.count_nonzero(counts))
        if num_idle == 0:
            return
        idle = blocks if num_idle == len(blocks) else blocks[counts == 0]
        kept = self.stored[idle]
        num_kept = int(np.count_nonzero(kept))
        self.num_active_blocks -= num_idle
        self.num_cached_blocks += num_kept
        if self.num_protected_blocks:
            self.num_protected_idle_blocks += int(np.count_nonzero(self.protected[idle]))
        if num_kept < num_idle:
            self.pool.give_back(idle[~kept])

    def store(self, blocks: Int32Array) -> None:
        """Note that held blocks are now in the prefix tree."""
        self.stored[blocks] = True

    def protect(self, blocks: Int32Array, protected: bool) -> None:
        """Note that a hard pin covers stored blocks from now on, or that none does any more."""
        changed = blocks[self.protected[blocks] != protected]
        self.num_protected_blocks += len(changed) if protected else -len(changed)
        num_idle = int(np.count_nonzero(self.refs[changed] == 0))
        self.num_protected_idle_blocks += num_idle if protected else -num_idle
        self.protected[changed] = protected

    def forget(self, blocks: Int32Array) -> int:
        """Note that unprotected blocks left the prefix tree; those without a holder become FREE. Returns how many
        did."""
        self.stored[blocks] = False
        refs = self.refs[blocks]
        idle = blocks[refs == 0] if np.count_nonzero(refs) else blocks
        self.num_cached_blocks -= len(idle)
        self.pool.give_back(idle)
        return len(idle)

    def forget_run(self, blocks: Int32Array, num_holders: int) -> int:
        """`forget` for all blocks of a stored run, [n], each of which has `num_holders` holders."""
        self.stored[blocks] = False
        if num_holders:
            return 0
        self.num_cached_blocks -= len(blocks)
        self.pool.give_back(blocks)
        return len(blocks)

    def move(self, from_blocks: Int32Array, to_blocks: Int32Array, num_pages: int) -> None:
        """Take over the state of `from_blocks` [n] at free `to_blocks` [n], in a pool of `num_pages` pages from now on;
        no other taken block may lie beyond it. O(blocks)."""
        num_blocks = num_pages * self.pool.blocks_per_page
        for name in ("refs", "stored", "protected"):
            before = getattr(self, name)
            after = np.zeros(num_blocks, dtype=before.dtype)
            after[: len(before)] = before[:num_blocks]
            after[from_blocks[from_blocks < num_blocks]] = 0
            after[to_blocks] = before[from_blocks]
            setattr(self, name, after)
        self.num_blocks = num_blocks
        self.pool.rebuild((self.refs > 0) | self.stored)

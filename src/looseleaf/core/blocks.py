"""Who holds each block and which blocks are stored in the prefix tree: the states FREE, ACTIVE and CACHED."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from looseleaf.core.pages import PagePool
from looseleaf.ids import Int32Array

DType = TypeVar("DType", bound=np.generic)


class BlockStates(NamedTuple):
    """Of all blocks, [num_blocks]. refs: how many leases hold each, int32; stored: which are in the prefix tree, bool.
    Only to be read."""

    refs: Int32Array
    stored: NDArray[np.bool_]


class BlockLedger:
    """Who holds what, over a `PagePool`.

        FREE    no holder, not stored: the pool may give it out
        ACTIVE  held by at least one lease
        CACHED  no holder, stored in the prefix tree

    All blocks of a stored run have the same holders, and its node knows how many: runs are counted as a whole
    (`hold_run`, `drop_run`, `forget_run`). `refs` has the holders of taken blocks that are in no run, and 1 for all
    others, so that most are taken, stored and evicted without a look at it. Where groups slide, leases hold some rows
    of a run and not others: there every block is counted in the arrays `refs` and `stored` (`hold`, `store`,
    `forget`). Whoever looks at all blocks asks for `states`.

    A CACHED block may be *protected* by a hard pin: it is not evictable then. Every method takes int32 block ids [n]
    that are distinct within the call and works on the array as a whole. Counters are kept by the transitions and
    checked by `check_integrity`.
    """

    def __init__(self, pool: PagePool, *, counts_runs: bool) -> None:
        self.pool = pool
        self.counts_runs = counts_runs
        num_blocks = pool.num_pages * pool.blocks_per_page
        self.num_blocks = num_blocks
        self.refs = np.full(num_blocks, 1 if counts_runs else 0, dtype=np.int32)
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
        if not self.counts_runs:
            self.refs[blocks] = 1
        self.num_active_blocks += num_blocks
        return blocks

    def take_one_each(self, lasts: Sequence[int], growths: Sequence[int | None]) -> Int32Array:
        """FREE → ACTIVE: one block for each sequence that ends with block `lasts[i]` (-1: it has none) and is expected
        to take `growths[i]` more, int32 [len(lasts)]. The caller has checked that they exist."""
        blocks = self.pool.take_one_each(lasts, growths)
        if not self.counts_runs:
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

    def hold_run(self, num_blocks: int, num_holders: int, is_protected: bool) -> None:
        """One more holder for a stored run of so many blocks, which has `num_holders`."""
        if num_holders == 0:
            self.num_active_blocks += num_blocks
            self.num_cached_blocks -= num_blocks
            if is_protected:
                self.num_protected_idle_blocks -= num_blocks

    def drop_run(self, num_blocks: int, num_holders: int, is_protected: bool) -> None:
        """One holder less for a stored run of so many blocks, which has `num_holders`."""
        if num_holders == 1:
            self.num_active_blocks -= num_blocks
            self.num_cached_blocks += num_blocks
            if is_protected:
                self.num_protected_idle_blocks += num_blocks

    def drop(self, blocks: Int32Array) -> None:
        """One holder less; blocks without any become CACHED if they are stored, FREE if not."""
        counts = self.refs[blocks]
        counts -= 1
        self.refs[blocks] = counts
        num_idle = len(blocks) - int(np.count_nonzero(counts))
        if num_idle == 0:
            return
        idle = blocks if num_idle == len(blocks) else blocks[counts == 0]
        self.num_active_blocks -= num_idle
        if self.counts_runs:  # those of runs are not dropped here
            self.refs[idle] = 1  # for whoever takes them next
            self.pool.give_back(idle)
            return
        kept = self.stored[idle]
        num_kept = int(np.count_nonzero(kept))
        self.num_cached_blocks += num_kept
        if self.num_protected_blocks:
            self.num_protected_idle_blocks += int(np.count_nonzero(self.protected[idle]))
        if num_kept < num_idle:
            self.pool.give_back(idle[~kept])

    def store(self, blocks: Int32Array) -> None:
        """Note that held blocks are now in the prefix tree."""
        self.stored[blocks] = True

    def protect_run(self, blocks: Int32Array, protected: bool, num_holders: int) -> None:
        """`protect` for blocks of a run [n], all or none of which are, and each of which has `num_holders` holders."""
        num_blocks = len(blocks) if protected else -len(blocks)
        self.num_protected_blocks += num_blocks
        if num_holders == 0:
            self.num_protected_idle_blocks += num_blocks
        self.protected[blocks] = protected

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
        """`forget` for blocks of a run [n], each of which has `num_holders` holders, and is counted by itself from now
        on."""
        if num_holders:
            self.refs[blocks] = num_holders
            return 0
        self.num_cached_blocks -= len(blocks)
        self.pool.give_back(blocks)
        return len(blocks)

    def states(self, runs: Iterable[tuple[Int32Array, int]]) -> BlockStates:
        """Who holds each block, and what is stored. `runs`: the blocks of every stored run, and how many holders they
        have. O(blocks + runs)."""
        if not self.counts_runs:
            return BlockStates(self.refs, self.stored)
        states = BlockStates(np.where(self.pool.taken(), self.refs, 0), np.zeros_like(self.stored))
        for blocks, num_holders in runs:
            states.refs[blocks] = num_holders
            states.stored[blocks] = True
        return states

    def move(self, from_blocks: Int32Array, to_blocks: Int32Array, num_pages: int) -> None:
        """Take over the state of `from_blocks` [n] at free `to_blocks` [n], in a pool of `num_pages` pages from now on;
        no other taken block may lie beyond it. O(blocks)."""
        num_blocks = num_pages * self.pool.blocks_per_page

        def moved(before: NDArray[DType], of_free: int) -> NDArray[DType]:
            after = np.full(num_blocks, of_free, dtype=before.dtype)
            after[: len(before)] = before[:num_blocks]
            after[from_blocks[from_blocks < num_blocks]] = of_free
            after[to_blocks] = before[from_blocks]
            return after

        self.pool.rebuild(moved(self.pool.taken(), False))
        self.refs = moved(self.refs, 1 if self.counts_runs else 0)
        self.stored = moved(self.stored, False)
        self.protected = moved(self.protected, False)
        self.num_blocks = num_blocks

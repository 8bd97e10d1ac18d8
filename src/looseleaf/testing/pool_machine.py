"""State machine over the page pool: blocks are given out once, and a page's books always balance."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from looseleaf.core.pages import PagePool
from looseleaf.errors import IntegrityError


class PoolMachine(RuleBasedStateMachine):
    """The oracle is the set of blocks that are out."""

    def __init__(self) -> None:
        super().__init__()
        self.out: set[int] = set()

    @initialize(num_pages=st.integers(1, 6), blocks_per_page=st.sampled_from([1, 2, 3, 8, 16, 64]))
    def make(self, num_pages: int, blocks_per_page: int) -> None:
        """An empty pool."""
        self.pool = PagePool(num_pages, blocks_per_page)
        self.all = set(range(num_pages * blocks_per_page))

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        """What is given out was free."""
        count = data.draw(st.integers(0, min(self.pool.num_free_blocks, 70)))
        after = data.draw(st.sampled_from(sorted(self.out))) if bool(self.out) and data.draw(st.booleans()) else None
        blocks = self.pool.take(count, after).tolist()
        assert len(set(blocks)) == count
        assert self.out.isdisjoint(blocks)
        assert self.all.issuperset(blocks)
        self.out.update(blocks)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """Any part of what is out can come back, in any order."""
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.out)), unique=True, max_size=70))
        self.pool.give_back(np.array(blocks, dtype=np.int32))
        self.out.difference_update(blocks)

    @rule(data=st.data())
    def give_back_twice(self, data: st.DataObject) -> None:
        """What is free can't come back, alone or among others, and nothing changes then."""
        free = sorted(self.all - self.out)
        if not free:
            return
        wrong = data.draw(st.sampled_from(free))
        right = data.draw(st.lists(st.sampled_from(sorted(self.out)), unique=True, max_size=3)) if self.out else []
        try:
            self.pool.give_back(np.array([*right, wrong], dtype=np.int32))
        except IntegrityError:
            return
        raise AssertionError(f"free block {wrong} was taken back")

    @invariant()
    def balanced(self) -> None:
        """I3: masks, counts and lists agree with the oracle."""
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        size = pool.blocks_per_page
        masks = [0] * pool.num_pages
        for block in self.out:
            masks[block // size] |= 1 << (block % size)
        assert pool.masks == masks
        assert pool.num_free_blocks == len(self.all) - len(self.out)
        assert sorted(pool.free_pages) == [page for page, mask in enumerate(masks) if mask == 0]
        for free, pages in enumerate(pool.partial):
            assert all(size - masks[page].bit_count() == free for page in pages)
        assert pool.num_partial_pages == sum(0 < mask < pool.full_mask for mask in masks)

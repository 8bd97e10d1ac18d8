"""Laws of the page pool."""

from __future__ import annotations

import numpy as np
import pytest

from looseleaf import IntegrityError
from looseleaf.core.pages import PagePool


def test_double_free_is_refused() -> None:
    """[P2] A block given back twice is refused; then all ids are distinct and the fifth allocation is not there."""
    pool = PagePool(num_pages=4, blocks_per_page=1)
    block = pool.take(1)
    pool.give_back(block)
    with pytest.raises(IntegrityError, match="I3"):
        pool.give_back(block)
    assert pool.num_free_blocks == 4
    assert sorted(int(pool.take(1)[0]) for _ in range(4)) == [0, 1, 2, 3]
    assert pool.num_free_blocks == 0


@pytest.mark.parametrize("blocks", [[3, 3], [0, 5, 0], [7, 0, 7]])
def test_block_named_twice_in_one_call(blocks: list[int]) -> None:
    """[P4] A block repeated in one list is refused as a whole and the free lists stay right."""
    pool = PagePool(num_pages=2, blocks_per_page=8)
    pool.take(16)
    with pytest.raises(IntegrityError, match="I3"):
        pool.give_back(np.array(blocks, dtype=np.int32))
    assert pool.num_free_blocks == 0
    pool.give_back(np.arange(16, dtype=np.int32))
    assert sorted(pool.take(16).tolist()) == list(range(16))


def test_long_runs_take_whole_pages() -> None:
    """A long run is contiguous: whole pages first, then a tail in one page."""
    pool = PagePool(num_pages=8, blocks_per_page=16)
    pool.take(3)
    blocks = pool.take(40)
    assert (np.diff(blocks[:32]) == 1).all()
    assert blocks[0] % 16 == 0
    assert len({block // 16 for block in blocks[32:].tolist()}) == 1


def test_tails_share_a_page() -> None:
    """The tails of several sequences are packed into one page, so 256-token pages waste no more than their blocks
    do."""
    pool = PagePool(num_pages=8, blocks_per_page=16)
    for _ in range(4):
        pool.take(3)
    assert pool.num_free_pages == 7


def test_growth_stays_next_to_its_block() -> None:
    """A sequence that grows gets the block right behind its last one, if that is free."""
    pool = PagePool(num_pages=4, blocks_per_page=16)
    first = pool.take(3)
    assert pool.take(1, after=int(first[-1])).tolist() == [3]
    assert pool.take(2, after=3).tolist() == [4, 5]


def test_free_blocks_of_partial_pages_are_free() -> None:
    """Every free block of any page can be given out before anything is out of memory."""
    pool = PagePool(num_pages=4, blocks_per_page=16)
    taken = [pool.take(16) for _ in range(4)]
    for blocks in taken:
        pool.give_back(blocks[::2].copy())
    assert pool.num_free_pages == 0
    assert len(set(pool.take(32).tolist())) == 32
    assert pool.num_free_blocks == 0

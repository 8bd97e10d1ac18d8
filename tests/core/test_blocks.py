"""Laws of who holds what: runs are counted as a whole, everything else block by block, and damage is found."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from looseleaf import CacheConfig, CacheManager, IntegrityError, LayerGroup
from looseleaf.core.tree import Node
from tests.core.conftest import MakeCache, run, start, tokens

GROUPS = [
    (LayerGroup("full"),),
    (LayerGroup("full", num_lanes=2),),
    (LayerGroup("full"), LayerGroup("window", window_tokens=8)),
]


@pytest.mark.parametrize("groups", GROUPS, ids=lambda groups: "+".join(group.kind for group in groups))
def test_states_tell_the_holders_of_every_block(make: MakeCache, groups: tuple[LayerGroup, ...]) -> None:
    """Of each block, `states` has the number of leases in whose tables it is, and whether it is stored."""
    cache = make(48, groups=groups)
    run(cache, tokens(1, 12))
    first, second = start(cache, tokens(1, 11)), start(cache, [*tokens(1, 8), *tokens(2, 8)])
    skipping = start(cache, tokens(3, 8), reuse=False)
    leases = [first, second, skipping, skipping.fork(), second.fork()]
    states = cache._store.block_states()
    held = np.zeros(48, dtype=np.int32)
    for lease in leases:
        for table in lease.tables:
            np.add.at(held, table, 1)
    assert states.refs.tolist() == held.tolist()
    num_stored = int(np.count_nonzero(states.stored))
    assert int(np.count_nonzero(states.stored & (held == 0))) == cache.stats().cached_blocks
    assert num_stored == sum(int((node.blocks >= 0).sum()) for node in cache._store.tree.nodes.values())
    for lease in leases:
        lease.release()
    assert not cache._store.block_states().refs.any()


@pytest.mark.parametrize("groups", GROUPS, ids=lambda groups: "+".join(group.kind for group in groups))
def test_a_cleared_run_is_free_with_its_last_holder(make: MakeCache, groups: tuple[LayerGroup, ...]) -> None:
    """A run that is cleared while several leases hold it is counted block by block from then on: each holder, and each
    fork of one, must end before its blocks are free, and nobody's before."""
    cache = make(48, groups=groups)
    run(cache, tokens(1, 8))
    leases = [start(cache, tokens(1, 10)), start(cache, tokens(1, 10))]
    cache.clear()
    leases.append(leases[0].fork())
    again = start(cache, tokens(1, 10))  # stored anew, in blocks of its own
    for lease in leases:
        cache.check_integrity()
        assert not set(again.tables[0].ravel().tolist()) & set(lease.tables[0].ravel().tolist())
        lease.release()
    assert cache.stats().active_blocks == sum(table.size for table in again.tables)
    again.release()
    cache.clear()
    assert cache.stats().free_blocks == 48


def _hold(cache: CacheManager, node: Node) -> None:
    node.num_holders += 1


def _free(cache: CacheManager, node: Node) -> None:
    cache._store.pool.give_back(node.blocks.ravel())


def _count(cache: CacheManager, node: Node) -> None:
    cache._store.ledger.refs[node.blocks[0, 0]] = 2


def _leak(cache: CacheManager, node: Node) -> None:
    cache._store.ledger.take(1)


def _steal(cache: CacheManager, node: Node) -> None:
    node.blocks[0] = node.blocks[1]


@pytest.mark.parametrize("damage", [_hold, _free, _count, _leak, _steal])
def test_damage_is_found(damage: Callable[[CacheManager, Node], None]) -> None:
    """A run with a wrong number of holders, whose blocks are free, are counted elsewhere too, or are there twice, and a
    block that nobody has, do not pass the integrity check."""
    cache = CacheManager(CacheConfig(num_pages=8, page_tokens=16, block_tokens=4))
    run(cache, tokens(1, 12))
    (node,) = cache._store.tree.nodes.values()
    cache.check_integrity()
    damage(cache, node)
    with pytest.raises(IntegrityError):
        cache.check_integrity()

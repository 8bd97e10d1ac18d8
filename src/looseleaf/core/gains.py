"""What releasing a lease would give: the scheduler's measure for whom to preempt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from looseleaf.core.blocks import BlockLedger
from looseleaf.core.tree import ABSENT, Node
from looseleaf.ids import Int32Array


@dataclass(frozen=True)
class ReleaseGain:
    """What releasing a lease now would give. `num_blocks`: blocks that become free or evictable, in all lanes.
    `num_lost_tokens`: committed tokens from the first that no other lease and no hard pin keeps."""

    num_blocks: int
    num_lost_tokens: int


def release_gain(
    ledger: BlockLedger, node: Node, table: Int32Array, num_committed_tokens: int, block_tokens: int
) -> ReleaseGain:
    """What the lease of block table `table` [num_blocks, num_lanes] would give, of which what is stored lies on the
    path down to `node`. Read-only; O(blocks)."""
    num_holders = ledger.refs[table]
    for step in node.nearest_alive().path() if ledger.counts_runs else ():
        num_holders[step.start : step.end] = step.num_holders
    is_alone = (table != ABSENT) & (num_holders == 1) & ~ledger.protected[table]
    lost = np.flatnonzero(is_alone.any(axis=1))
    num_kept = (int(lost[0]) if len(lost) else len(table)) * block_tokens
    return ReleaseGain(int(np.count_nonzero(is_alone)), max(0, num_committed_tokens - num_kept))

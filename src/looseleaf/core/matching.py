"""How much of what is stored of a prompt can be used: every layer group must be able to go on from its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from looseleaf.core.config import GroupPlan
from looseleaf.core.tree import ABSENT, Match


class Usable(NamedTuple):
    """The longest beginning of a `Match` from which every group can go on. `cut_by`: the group that allowed no more, if
    one did. `num_known_blocks`: what the tree knows beyond that."""

    match: Match
    cut_by: GroupPlan | None
    num_known_blocks: int


def usable_part(match: Match, sliding: Sequence[GroupPlan]) -> Usable:
    """What of a match can be used where the groups `sliding` let go of old blocks. Read-only. O(1) without such groups,
    else O(blocks), a few array operations."""
    num_known = match.num_blocks
    if not sliding or num_known == 0:
        return Usable(match, None, num_known)
    rows = np.concatenate([node.blocks for node in match.node.path()])[:num_known]
    is_usable = np.ones(num_known + 1, dtype=np.bool_)
    cut_by = None
    for group in sliding:
        absent = rows[:, group.first_lane] == ABSENT
        behind_hole = np.zeros(num_known + 1, dtype=np.int64)  # [n]: begin of the unbroken run that ends at n
        np.maximum.accumulate(np.where(absent, np.arange(1, num_known + 1), 0), out=behind_hole[1:])
        is_usable &= behind_hole <= group.first_needed_blocks(num_known)
        if cut_by is None and not is_usable[num_known]:
            cut_by = group
    return Usable(_up_to(match, int(np.flatnonzero(is_usable)[-1])), cut_by, num_known)


def _up_to(match: Match, num_blocks: int) -> Match:
    """The first `num_blocks` blocks of a match."""
    node = match.node
    while node.start >= num_blocks and node.parent is not None:
        node = node.parent
    return Match(node, num_blocks - node.start if node.parent else 0, num_blocks)

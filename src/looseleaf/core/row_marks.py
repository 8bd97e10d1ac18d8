"""What is noted of each row (logical block) of a node in the groups that slide: when it was of use, who guards it."""

from __future__ import annotations

import numpy as np

from looseleaf.ids import Int32Array, Int64Array

NOT_QUEUED = 2**62
"""Larger than any tick."""


class RowMarks:
    """Columns are the sliding groups in their order, rows the blocks of a node.

    ticks        [rows, groups] int64   logical time at which a look-up or a lease ended so that it needed the row;
                                        negative: it only ever slid out of a window
    hard_guards  [rows, groups] int32   hard pins that need the row for a hit at their end, whether it is there or not
    soft_guards  [rows, groups] int32   soft pins alike
    queued       [groups]               the lowest tick under which the node waits in `SlidOutQueue`
    """

    __slots__ = ("hard_guards", "queued", "soft_guards", "ticks")

    def __init__(self, num_rows: int, num_groups: int, tick: int) -> None:
        self.ticks: Int64Array = np.full((num_rows, num_groups), tick, dtype=np.int64)
        self.hard_guards: Int32Array = np.zeros((num_rows, num_groups), dtype=np.int32)
        self.soft_guards: Int32Array = np.zeros((num_rows, num_groups), dtype=np.int32)
        self.queued = [NOT_QUEUED] * num_groups

    def extend(self, num_rows: int, tick: int) -> None:
        """Add rows at the end."""
        new = RowMarks(num_rows, self.ticks.shape[1], tick)
        self.ticks = np.concatenate((self.ticks, new.ticks))
        self.hard_guards = np.concatenate((self.hard_guards, new.hard_guards))
        self.soft_guards = np.concatenate((self.soft_guards, new.soft_guards))

    def cut(self, num_rows: int) -> RowMarks:
        """Take the first `num_rows` rows away; they are returned, not queued yet."""
        upper = RowMarks(0, self.ticks.shape[1], 0)
        for name in ("ticks", "hard_guards", "soft_guards"):
            rows = getattr(self, name)
            setattr(upper, name, rows[:num_rows].copy())
            setattr(self, name, rows[num_rows:].copy())
        return upper

    def shorten(self, num_rows: int) -> None:
        """Keep the first `num_rows` rows."""
        for name in ("ticks", "hard_guards", "soft_guards"):
            setattr(self, name, getattr(self, name)[:num_rows].copy())

"""What `AdaptivePolicy` keeps of stored runs, of what it calls runs, and of requests that are not over."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from looseleaf.core.eviction.holding import RunClass
from looseleaf.core.eviction.policy import StoredRun, Use

MAX_TURNS = 4

_NONE_OFFERED: Final[Mapping[int, int]] = MappingProxyType({})
_NO_GHOSTS: Final[frozenset[int]] = frozenset()
_NO_KEYS: Final = array("q")


class Run:
    """Blocks that one request used last, with as many uses: they live and age together.

    tick: when its request ended, which orders equals. num_blocks: when it ended. num_left: of them not used since.
    is_counted: still teaches the table. ghost_keys: what was evicted of it. offered: evictable ids, by depth.
    """

    __slots__ = (
        "born", "class_id", "ghost_keys", "is_counted", "num_blocks", "num_left", "offered", "seq", "step", "tick",
    )  # fmt: skip

    def __init__(self, seq: int, tick: int, class_id: int, born: float) -> None:
        self.seq = seq
        self.tick = tick
        self.class_id = class_id
        self.born = born
        self.step = self.num_blocks = self.num_left = 0
        self.is_counted = True
        self.ghost_keys: set[int] | frozenset[int] = _NO_GHOSTS  # a set of its own from the first one on
        self.offered: Mapping[int, int] = _NONE_OFFERED  # most have none or one

    def offer(self, node_id: int, depth_blocks: int) -> None:
        """One of its parts may be evicted. Only leaves are, of which a run has one but for rare cases."""
        self.offered = {**self.offered, node_id: depth_blocks}

    def withdraw(self, node_id: int) -> None:
        """The part may not be evicted any more, if it was offered."""
        if node_id in self.offered:
            left = {node: depth for node, depth in self.offered.items() if node != node_id}
            self.offered = left or _NONE_OFFERED

    def add_ghost(self, key: int) -> None:
        """A part of it was evicted and is remembered by `key`."""
        if isinstance(self.ghost_keys, frozenset):
            self.ghost_keys = set()
        self.ghost_keys.add(key)

    def drop_ghost(self, key: int) -> None:
        """It is remembered no more."""
        if isinstance(self.ghost_keys, set):
            self.ghost_keys.discard(key)


class Part:
    """A stored run of blocks (a node) or what is remembered of an evicted one. `keys`: chain keys of its first blocks,
    as far as they are known; `ghost_key`: that of its evicted end."""

    __slots__ = (
        "ghost_key", "is_padded", "keys", "last_request", "last_tick", "last_used", "num_blocks", "num_uses", "run",
        "turns",
    )  # fmt: skip

    def __init__(self, num_blocks: int, num_uses: int, turns: int, is_padded: bool) -> None:
        self.num_blocks = num_blocks
        self.num_uses = num_uses
        self.turns = turns
        self.is_padded = is_padded
        self.run: Run | None = None
        self.last_request = self.last_tick = 0
        self.last_used = 0.0
        self.ghost_key = 0
        self.keys: array[int] = _NO_KEYS

    def use(self, use: Use) -> None:
        """A request uses it."""
        self.last_request, self.last_tick, self.last_used = use.request, use.tick, use.seconds

    def copy(self, num_blocks: int) -> Part:
        """Another part with the same history."""
        part = Part(num_blocks, self.num_uses, self.turns, self.is_padded)
        part.run = self.run
        part.last_request, part.last_tick, part.last_used = self.last_request, self.last_tick, self.last_used
        return part


class OpenRequest:
    """A request between its look-up and its end."""

    __slots__ = ("began", "ghost_uses", "keys", "num_new", "num_stored", "seen_at", "turns")

    def __init__(self, began: float) -> None:
        self.began = began
        self.seen_at: float | None = None  # when the conversation that it continues was last used
        self.turns = self.num_new = self.num_stored = 0
        self.ghost_uses: dict[int, int] = {}
        self.keys: Sequence[int] = _NO_KEYS  # of what it did not find, of which `num_stored` are behind it

    def take_keys(self, run: StoredRun) -> array[int]:
        """Those of a run that it stores now; none where they are not known. O(blocks of the run) in the order of a
        prompt."""
        at = self.num_stored
        if at >= len(self.keys) or self.keys[at] != run.key:  # others have stored what lies between
            at = self.keys.index(run.key, at) if run.key in self.keys[at:] else len(self.keys)
        self.num_stored = min(len(self.keys), at + run.num_blocks)
        return array("q", self.keys[at : self.num_stored])

    def class_of(self, use_bucket: int, num_output_tokens: int) -> RunClass:
        """The class of its runs of so many uses."""
        gap = -1
        if self.seen_at is not None:  # later than it began: another stored the same meanwhile
            gap = int(max(0.0, self.began - self.seen_at)).bit_length()
        turns = min(self.turns.bit_length(), MAX_TURNS)
        return RunClass(use_bucket, num_output_tokens.bit_length(), gap, turns, self.num_new.bit_length())

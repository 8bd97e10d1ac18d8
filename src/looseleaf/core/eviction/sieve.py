"""SIEVE: first in, first out, but what was used since the hand passed may stay where it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from looseleaf.core.eviction.base import PlainPolicy
from looseleaf.core.eviction.heap import Key, OfferedHeap
from looseleaf.core.eviction.policy import StoredRun, Use


class SIEVEPolicy(PlainPolicy):
    """One queue and a hand (Zhang et al., "SIEVE is simpler than LRU", NSDI 2024).

    The hand goes from old to new runs, past each that was used since it came by, which it marks unused, and evicts the
    first other one; from the newest it goes back to the oldest. Runs keep their place for life.

    The hand only ever meets runs that are offered: they wait in two heaps, ahead of it and behind it, which change
    roles when it starts anew. It passes a run at most once per use: O(log offered) amortised.
    """

    name: ClassVar[str] = "sieve"

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._places: dict[int, int] = {}
        self._used: set[int] = set()
        self._ahead = OfferedHeap()
        self._behind = OfferedHeap()
        self._hand: Key = (0, 0)
        self._last_place = 0

    def insert(self, node_id: int, run: StoredRun, use: Use) -> None:
        """The newest; being stored is no use."""
        self._last_place += 1
        self._places[node_id] = self._last_place

    def hit(self, node_ids: Sequence[int], use: Use) -> None:
        """Marks them."""
        self._used.update(node_ids)

    def release(self, node_ids: Sequence[int], use: Use, num_output_tokens: int) -> None:
        """Changes nothing."""

    def split(self, node_id: int, upper_id: int, num_upper_blocks: int) -> None:
        """Both parts have the place and the mark of the whole."""
        self._places[upper_id] = self._places[node_id]
        if node_id in self._used:
            self._used.add(upper_id)

    def offer(self, node_id: int, depth_blocks: int) -> None:
        """Ahead of the hand or behind it, by its place. O(log offered)."""
        place = (self._places[node_id], -depth_blocks)
        (self._ahead if place > self._hand else self._behind).offer(node_id, place)

    def withdraw(self, node_id: int) -> None:
        """O(1)."""
        self._ahead.withdraw(node_id)
        self._behind.withdraw(node_id)

    def victim(self) -> int | None:
        """Moves the hand to the next offered run that was not used."""
        while True:
            node_id = self._ahead.first()
            if node_id is None:
                if self._behind.first() is None:
                    return None
                self._ahead, self._behind, self._hand = self._behind, self._ahead, (0, 0)
            elif node_id not in self._used:
                return node_id
            else:
                self._used.remove(node_id)
                self._hand = self._ahead.key(node_id)
                self._ahead.withdraw(node_id)
                self._behind.offer(node_id, self._hand)

    def forget(self, node_id: int, key: int | None) -> None:
        """O(1)."""
        self.withdraw(node_id)
        self._used.discard(node_id)
        del self._places[node_id]

    def offered(self) -> Iterable[int]:
        """All offered ids."""
        return (*self._ahead.offered(), *self._behind.offered())

    def describe(self, node_id: int, seconds: float) -> Mapping[str, float | str]:
        """Whether the hand will spare it."""
        return {"is_marked": int(node_id in self._used)}

"""Holds of pins in an order of their own, so that who gives way or gets quota next is never searched for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from looseleaf.core.eviction.heap import Key, OfferedHeap
from looseleaf.core.pin_record import PinHold
from looseleaf.ids import Namespace


class PinQueue:
    """Some of the holds, least `key` first: one heap for each namespace with a quota of its own, and one, None, for all
    others. `key` of a hold never changes and ends in its number. All calls cost O(log holds), but `first`, which costs
    O(namespaces with a quota)."""

    def __init__(self, key: Callable[[PinHold], Key], quotas: Mapping[Namespace, int]) -> None:
        self.holds: dict[int, PinHold] = {}
        self._key = key
        self._heaps: dict[Namespace | None, OfferedHeap] = {}
        self.set_quotas(quotas)

    def set_quotas(self, quotas: Mapping[Namespace, int]) -> None:
        """Other namespaces have quotas now."""
        holds, self.holds = self.holds, {}
        self._heaps = {namespace: OfferedHeap() for namespace in (None, *quotas)}
        for hold in holds.values():
            self.add(hold)

    def add(self, hold: PinHold) -> None:
        """Add a hold, unless it is there."""
        if hold.number not in self.holds:
            self.holds[hold.number] = hold
            self._heap_of(hold).offer(hold.number, self._key(hold))

    def discard(self, hold: PinHold) -> None:
        """Remove a hold, if it is there."""
        if self.holds.pop(hold.number, None) is not None:
            self._heap_of(hold).withdraw(hold.number)

    def heads(self, namespace: Namespace | None = None) -> Iterable[PinHold]:
        """The first hold of each heap that has one, least key first; of one namespace with a quota only, if given."""
        heaps = self._heaps.values() if namespace is None else (self._heaps[namespace],)
        numbers = [number for heap in heaps if (number := heap.first()) is not None]
        return sorted((self.holds[number] for number in numbers), key=self._key)

    def _heap_of(self, hold: PinHold) -> OfferedHeap:
        return self._heaps.get(hold.node.namespace) or self._heaps[None]

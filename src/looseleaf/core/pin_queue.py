"""Pins in an order of their own, so that who gives way or gets quota next is never searched for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from looseleaf.core.eviction.heap import Key, OfferedHeap
from looseleaf.core.pin_record import PinRecord
from looseleaf.ids import Namespace


class PinQueue:
    """Some of the pins, least `key` first: one heap for each namespace with a quota of its own, and one, None, for all
    others. `key` of a pin never changes and ends in its number. All calls cost O(log pins), but `first`, which costs
    O(namespaces with a quota)."""

    def __init__(self, key: Callable[[PinRecord], Key], quotas: Mapping[Namespace, int]) -> None:
        self.records: dict[int, PinRecord] = {}
        self._key = key
        self._heaps: dict[Namespace | None, OfferedHeap] = {}
        self.set_quotas(quotas)

    def set_quotas(self, quotas: Mapping[Namespace, int]) -> None:
        """Other namespaces have quotas now."""
        records, self.records = self.records, {}
        self._heaps = {namespace: OfferedHeap() for namespace in (None, *quotas)}
        for record in records.values():
            self.add(record)

    def add(self, record: PinRecord) -> None:
        """Add a pin, unless it is there."""
        if record.number not in self.records:
            self.records[record.number] = record
            self._heap_of(record).offer(record.number, self._key(record))

    def discard(self, record: PinRecord) -> None:
        """Remove a pin, if it is there."""
        if self.records.pop(record.number, None) is not None:
            self._heap_of(record).withdraw(record.number)

    def heads(self, namespace: Namespace | None = None) -> Iterable[PinRecord]:
        """The first pin of each heap that has one, least key first; of one namespace with a quota only, if given."""
        heaps = self._heaps.values() if namespace is None else (self._heaps[namespace],)
        numbers = [number for heap in heaps if (number := heap.first()) is not None]
        return sorted((self.records[number] for number in numbers), key=self._key)

    def _heap_of(self, record: PinRecord) -> OfferedHeap:
        return self._heaps.get(record.node.namespace) or self._heaps[None]

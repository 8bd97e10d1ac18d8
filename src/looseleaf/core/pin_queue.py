"""Holds of pins in an order of their own, so that who gives way or gets quota next is never searched for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from looseleaf.core.eviction.heap import Key, OfferedHeap
from looseleaf.core.pin_record import PinHold
from looseleaf.ids import Namespace


class PinQueue:
    """Some of the holds, least `key` first: one heap for all holds to which the quotas of the same namespaces matter.

    `key` of a hold never changes and ends in its number; `namespaces_of`, in which it looks for quotas, is asked when a
    hold is added. All calls cost O(log holds), but `heads`, which costs O(heaps): one, and one for each namespace with
    a quota if no hold is told to lie in several.
    """

    def __init__(
        self,
        key: Callable[[PinHold], Key],
        namespaces_of: Callable[[PinHold], Iterable[Namespace]],
        quotas: Mapping[Namespace, int],
    ) -> None:
        self.holds: dict[int, PinHold] = {}
        self._key = key
        self._namespaces_of = namespaces_of
        self._places: dict[int, tuple[Namespace, ...]] = {}
        self._heaps: dict[tuple[Namespace, ...], OfferedHeap] = {}
        self.set_quotas(quotas)

    def set_quotas(self, quotas: Mapping[Namespace, int]) -> None:
        """Other namespaces have quotas now."""
        holds, self.holds = self.holds, {}
        self._quotas, self._heaps, self._places = quotas, {}, {}
        for hold in holds.values():
            self.add(hold)

    def add(self, hold: PinHold) -> None:
        """Add a hold, or move it where its namespaces have changed."""
        place = tuple(namespace for namespace in self._namespaces_of(hold) if namespace in self._quotas)
        if hold.number not in self.holds or self._places[hold.number] != place:
            self.discard(hold)
            self.holds[hold.number], self._places[hold.number] = hold, place
            self._heaps.setdefault(place, OfferedHeap()).offer(hold.number, self._key(hold))

    def discard(self, hold: PinHold) -> None:
        """Remove a hold, if it is there."""
        if self.holds.pop(hold.number, None) is not None:
            place = self._places.pop(hold.number)
            self._heaps[place].withdraw(hold.number)
            if not self._heaps[place].offered():
                del self._heaps[place]

    def heads(self, namespace: Namespace | None = None) -> Iterable[PinHold]:
        """The first hold of each heap, least key first; only of those under the quota of `namespace`, if given."""
        heaps = [heap for place, heap in self._heaps.items() if namespace is None or namespace in place]
        numbers = [number for heap in heaps if (number := heap.first()) is not None]
        return sorted((self.holds[number] for number in numbers), key=self._key)

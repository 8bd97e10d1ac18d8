"""How many blocks pins may hold: in all, and in single namespaces."""

from __future__ import annotations

from collections.abc import Iterator

from looseleaf.core.config import CachePlan
from looseleaf.core.pin_marks import PinMarks
from looseleaf.core.pin_record import HARD, PinHold
from looseleaf.core.tree import Node
from looseleaf.ids import Int64Array, Namespace


class PinQuotas:
    """The quotas of a pool, and what pins have taken of them. A block counts to the namespace in which it is stored: a
    pin of a prompt with layers takes quota of several. None stands for the quota of all."""

    def __init__(self, plan: CachePlan, marks: PinMarks) -> None:
        self._marks = marks
        self.set(plan)

    def set(self, plan: CachePlan) -> None:
        """Those of `plan` from now on."""
        self.num_blocks = plan.quota_blocks
        self.by_namespace: dict[Namespace, int] = dict(plan.namespace_quotas)

    def fits(self, plan: CachePlan) -> bool:
        """True if what hard pins hold is within the quotas of `plan`."""
        quotas = plan.namespace_quotas.items()
        is_within = all(self.taken(namespace, hard_only=True) <= quota for namespace, quota in quotas)
        return is_within and self.taken(None, hard_only=True) <= plan.quota_blocks

    def of(self, namespace: Namespace | None) -> int:
        """Blocks that pins may hold there."""
        return self.num_blocks if namespace is None else self.by_namespace[namespace]

    def taken(self, namespace: Namespace | None, *, hard_only: bool = False) -> int:
        """Blocks that pins hold there, each counted once."""
        if namespace is None:
            return self._marks.num_hard_blocks if hard_only else self._marks.num_pinned_blocks
        return self._marks.taken_blocks(namespace, hard_only=hard_only)

    def excess(self, namespace: Namespace | None) -> int:
        """Blocks that pins hold beyond the quota; negative: what is left; none of a namespace without one."""
        if namespace is not None and namespace not in self.by_namespace:
            return 0
        return self.taken(namespace) - self.of(namespace)

    def under(self, hold: PinHold) -> Iterator[Namespace]:
        """The namespaces with a quota in which a hold lies."""
        return (namespace for namespace in hold.tenancy.namespaces if namespace in self.by_namespace)

    def rooms(self, hold: PinHold) -> dict[Namespace | None, int]:
        """Blocks that this pin may take of each quota that it is under."""
        is_hard = hold.level == HARD
        return {
            namespace: max(0, self.of(namespace) - self.taken(namespace, hard_only=is_hard))
            for namespace in (None, *self.under(hold))
        }

    def room(self, hold: PinHold) -> int:
        """Blocks of quota that there are for the block that this pin waits for."""
        rooms = self.rooms(hold)
        return min(rooms[None], rooms.get(hold.awaited.namespace, rooms[None]))

    def used(self, hold: PinHold, path: list[Node], first: int, last: int) -> dict[Namespace | None, Int64Array]:
        """`PinMarks.used` of each quota that a hold is under."""
        of_all = self._marks.used(hold, path, first, last)
        used: dict[Namespace | None, Int64Array] = {None: of_all}
        for namespace in self.under(hold):
            is_alone = not hold.tenancy.borders
            used[namespace] = of_all if is_alone else self._marks.used(hold, path, first, last, namespace)
        return used

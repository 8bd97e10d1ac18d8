"""Queues of stored runs, for policies that keep several and move runs between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from looseleaf.core.eviction.base import PlainPolicy
from looseleaf.core.eviction.heap import OfferedHeap
from looseleaf.core.eviction.policy import StoredRun, Use


@dataclass(slots=True)
class QueuedRun:
    """A stored run's place. `queue`: its number; `place`: smaller ones leave it earlier, of equal ones the deepest.
    `uses`: what its policy counts. `depth_blocks`: where it ends if it is offered, else None."""

    start_block: int
    num_blocks: int
    queue: int
    place: int
    uses: int = 0
    depth_blocks: int | None = None


class QueuePolicy(PlainPolicy):
    """Stored runs in numbered queues, with their sizes in blocks; a policy says what goes where.

    Only leaves can go, but runs that may not go now keep their place. So each queue is two heaps with lazy removal:
    `front` looks at all its runs, `front_offered` at those offered, and nobody ever walks over runs that he can't take.
    Every call costs O(log runs) amortised per run that it names or moves; a policy moves a run at most once per use
    of it. Why not linked lists, as in the papers: there the next offered run would be found by walking.
    """

    queue_names: ClassVar[tuple[str, ...]]

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.runs: dict[int, QueuedRun] = {}
        self.queue_blocks = [0] * len(self.queue_names)
        self._members = [OfferedHeap() for _ in self.queue_names]
        self._offered = [OfferedHeap() for _ in self.queue_names]
        self._last_place = 0

    # --- for policies ---------------------------------------------------------------------------------------------

    def back(self) -> int:
        """A place behind all others."""
        self._last_place += 1
        return self._last_place

    def add(self, node_id: int, run: StoredRun, queue: int) -> None:
        """Put a new run at the back of a queue."""
        self.runs[node_id] = QueuedRun(run.start_block, run.num_blocks, queue, self.back())
        self.queue_blocks[queue] += run.num_blocks
        self._members[queue].offer(node_id, (self._last_place, -run.start_block))

    def move(self, node_id: int, queue: int, place: int) -> None:
        """Put a run elsewhere, in another queue or in its own."""
        run = self.runs[node_id]
        if queue != run.queue:
            self._members[run.queue].withdraw(node_id)
            self._offered[run.queue].withdraw(node_id)
            self.queue_blocks[run.queue] -= run.num_blocks
            self.queue_blocks[queue] += run.num_blocks
        run.queue, run.place = queue, place
        self._members[queue].offer(node_id, (place, -run.start_block))
        if run.depth_blocks is not None:
            self._offered[queue].offer(node_id, (place, -run.depth_blocks))

    def front(self, queue: int) -> int | None:
        """The run that has been in a queue for longest, offered or not, the deepest on ties."""
        return self._members[queue].first()

    def front_offered(self, queue: int) -> int | None:
        """The offered run that has been in a queue for longest, the deepest on ties."""
        return self._offered[queue].first()

    # --- the contract ---------------------------------------------------------------------------------------------

    def extend(self, node_id: int, num_blocks: int) -> None:
        """O(1)."""
        run = self.runs[node_id]
        run.num_blocks += num_blocks
        self.queue_blocks[run.queue] += num_blocks

    def shorten(self, node_id: int, num_blocks: int, key: int) -> None:
        """O(1)."""
        self.extend(node_id, -num_blocks)

    def release(self, node_ids: Sequence[int], use: Use, num_output_tokens: int) -> None:
        """Changes nothing."""

    def split(self, node_id: int, upper_id: int, num_upper_blocks: int) -> None:
        """Both parts have the place that the whole had."""
        run, members = self.runs[node_id], self._members[self.runs[node_id].queue]
        self.runs[upper_id] = QueuedRun(run.start_block, num_upper_blocks, run.queue, run.place, run.uses)
        members.offer(upper_id, (run.place, -run.start_block))
        run.start_block += num_upper_blocks
        run.num_blocks -= num_upper_blocks
        members.offer(node_id, (run.place, -run.start_block))

    def offer(self, node_id: int, depth_blocks: int) -> None:
        """O(log offered)."""
        run = self.runs[node_id]
        run.depth_blocks = depth_blocks
        self._offered[run.queue].offer(node_id, (run.place, -depth_blocks))

    def withdraw(self, node_id: int) -> None:
        """O(1)."""
        run = self.runs[node_id]
        run.depth_blocks = None
        self._offered[run.queue].withdraw(node_id)

    def forget(self, node_id: int, key: int | None) -> None:
        """O(1)."""
        run = self.runs.pop(node_id)
        self.queue_blocks[run.queue] -= run.num_blocks
        self._members[run.queue].withdraw(node_id)
        self._offered[run.queue].withdraw(node_id)

    def offered(self) -> Iterable[int]:
        """All offered ids."""
        return (node_id for queue in self._offered for node_id in queue.offered())

    def describe(self, node_id: int, seconds: float) -> Mapping[str, float | str]:
        """Its queue and what is counted of its uses."""
        run = self.runs[node_id]
        return {"queue": self.queue_names[run.queue], "num_counted_uses": run.uses}

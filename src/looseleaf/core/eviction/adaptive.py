"""Our own policy: it learns how long what looks alike stays away, and keeps what yields most per second of memory."""

from __future__ import annotations

import heapq
import math
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, TypeAlias

from looseleaf.core.eviction.holding import NUM_STEPS, STEP_ENDS_SECONDS, HoldingTable, RunClass, step_of
from looseleaf.core.eviction.holding_parts import OpenRequest, Part, Run
from looseleaf.core.eviction.policy import StoredRun, Use

RECOMPUTE_REQUESTS = 100
"""Yields are worked out anew after so many requests."""

MEMORY = 8
"""Runs are counted until so many times the pool's blocks were used after them, held or not."""

_Entry: TypeAlias = tuple[int, int, int, Run]
"""A leaf in a cell: tick, depth (negated), id, run."""


class AdaptivePolicy:
    """Evicts the leaf whose run yields least, the oldest of equals, its tail first. docs/EVICTION.md draws it.

    When a request ends, the blocks it used become runs, split by their number of uses; a run's class says what is known
    of it (`RunClass`). Runs age in steps; `HoldingTable` counts per class how many got to a step and how many were used
    within it, evicted ones too, by chain key. Offered leaves wait in cells, one per class and step, and cells in the
    order of their yield.

    Costs O(log runs) per node and request, and a table of some hundred classes every `RECOMPUTE_REQUESTS` requests.
    Memory: a few hundred bytes per run and 8 per block, of stored blocks and of evicted ones, which together are at
    most `MEMORY` times the pool's.
    """

    name: ClassVar[str] = "adaptive"
    uses_keys: ClassVar[bool] = True

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._table = HoldingTable()
        self._parts: dict[int, Part] = {}
        self._ghosts: dict[int, Part] = {}
        self._open: dict[int, OpenRequest] = {}
        self._runs: deque[Run] = deque()  # counted ones, oldest first
        self._num_counted_blocks = 0
        self._aging: list[deque[Run]] = [deque() for _ in STEP_ENDS_SECONDS]  # by step, oldest first
        self._num_aging = 0
        self._next_step_at = math.inf  # seconds: no run goes to another step before
        self._num_runs = self._num_requests = 0
        self._max_listed = self._max_queued = 256
        self._cells: dict[tuple[int, int], list[_Entry]] = {}
        self._order: list[tuple[float, int, int]] = []
        self._yields: dict[int, list[float]] = {}
        self._recent: set[int] = set()  # classes of runs made since the last table, likely to be met again

    # --- what requests do -----------------------------------------------------------------------------------------

    def resize(self, num_blocks: int) -> None:
        """Remembers as much more or less from now on."""
        self._num_blocks = num_blocks

    def hit(self, node_ids: Sequence[int], use: Use) -> None:
        """The runs are used; the deepest tells of which conversation the request is."""
        self._advance(use.seconds)
        request = self._opened(use)
        for node_id in node_ids:
            part = self._parts[node_id]
            request.seen_at, request.turns = part.last_used, part.turns + 1
            self._leave(part)
            part.num_uses += 1
            part.use(use)
            part.turns = request.turns

    def missed(self, keys: Sequence[int], use: Use) -> Sequence[int]:
        """What was evicted comes back: counted as used. Its new blocks are stored apart, since their history is
        another."""
        self._advance(use.seconds)
        request = self._opened(use)
        cuts: list[int] = []
        num_seen = 0
        is_all_new = not self._ghosts or self._ghosts.keys().isdisjoint(keys)
        for number, key in () if is_all_new else enumerate(keys):
            ghost = self._ghosts.get(key)
            if ghost is None:
                continue
            num_again = _num_equal(ghost, keys, number)
            num_seen = min(len(keys), number + num_again)
            cuts += (number, num_seen)
            request.seen_at, request.turns = ghost.last_used, ghost.turns + 1
            request.ghost_uses[key] = ghost.num_uses
            self._drop_ghost(key)
            if num_again < ghost.num_blocks:
                self._leave(self._cut_ghost(ghost, num_again))
            else:
                self._leave(ghost)
        request.num_new = len(keys) - num_seen
        request.keys, request.num_stored = keys, 0
        return sorted({cut for cut in cuts if 0 < cut < len(keys)}) if cuts else cuts

    def insert(self, node_id: int, run: StoredRun, use: Use) -> None:
        """A first use, or one more for what was evicted before."""
        request = self._opened(use)
        num_uses = request.ghost_uses.pop(run.key, 0) + 1
        part = self._parts[node_id] = Part(run.num_blocks, num_uses, request.turns, run.is_padded)
        part.use(use)
        part.keys = request.take_keys(run)

    def extend(self, node_id: int, num_blocks: int) -> None:
        """The request that stored it is still open: no run yet."""
        self._parts[node_id].num_blocks += num_blocks

    def release(self, node_ids: Sequence[int], use: Use, num_output_tokens: int) -> None:
        """What nobody has used since becomes runs, by number of uses."""
        self._advance(use.seconds)
        request = self._open.pop(use.request, None) or OpenRequest(use.seconds)
        runs: dict[int, Run] = {}
        for node_id in node_ids:
            part = self._parts[node_id]
            if part.last_request != use.request or part.run is not None:
                continue
            part.last_used = use.seconds
            uses = _use_bucket(part)
            run = runs.get(uses)
            if run is None:
                run = runs[uses] = self._new_run(request.class_of(uses, num_output_tokens), use.tick, use.seconds)
            self._join(part, run)
        for run in runs.values():
            self._count(run)
        self._num_requests += 1
        if self._num_requests % RECOMPUTE_REQUESTS == 0:
            self._table.fade(RECOMPUTE_REQUESTS)
            self._recompute()

    def split(self, node_id: int, upper_id: int, num_upper_blocks: int) -> None:
        """Both parts stay in the run; what was evicted lies behind the lower."""
        part = self._parts[node_id]
        upper = self._parts[upper_id] = part.copy(num_upper_blocks)
        upper.keys, part.keys = part.keys[:num_upper_blocks], part.keys[num_upper_blocks:]
        part.num_blocks -= num_upper_blocks

    # --- what evictions do ----------------------------------------------------------------------------------------

    def shorten(self, node_id: int, num_blocks: int, key: int) -> None:
        """The tail is remembered by its key."""
        part = self._parts[node_id]
        part.num_blocks -= num_blocks
        keys, part.keys = part.keys[part.num_blocks :], part.keys[: part.num_blocks]
        self._remember(part, num_blocks, key, keys)

    def forget(self, node_id: int, key: int | None) -> None:
        """Remembered by its key if it was evicted; what is cleared teaches nothing more."""
        self.withdraw(node_id)
        part = self._parts.pop(node_id)
        if key is not None:
            self._remember(part, part.num_blocks, key, part.keys)
            return
        if part.ghost_key in self._ghosts:
            self._take_out(self._drop_ghost(part.ghost_key))
        self._take_out(part)

    def offer(self, node_id: int, depth_blocks: int) -> None:
        """O(log offered)."""
        part = self._parts[node_id]
        run = part.run
        if run is None:  # its request left without a word
            run_class = OpenRequest(part.last_used).class_of(_use_bucket(part), 0)
            run = self._new_run(run_class, part.last_tick, part.last_used)
            self._join(part, run)
            self._count(run)
        run.offer(node_id, depth_blocks)
        self._enqueue(run, node_id, depth_blocks)

    def withdraw(self, node_id: int) -> None:
        """O(1)."""
        run = self._parts[node_id].run
        if run is not None:
            run.withdraw(node_id)

    def victim(self) -> int | None:
        """O(log offered), amortised: outdated entries go when they surface."""
        while self._order:
            _, class_id, step = self._order[0]
            cell = self._cells[class_id, step]
            _drop_outdated(cell, step)
            if cell:
                return cell[0][2]
            heapq.heappop(self._order)
        return None

    def offered(self) -> Iterable[int]:
        """All offered ids. O(parts); for the integrity check."""
        return [
            node_id for node_id, part in self._parts.items() if part.run is not None and node_id in part.run.offered
        ]

    def describe(self, node_id: int, seconds: float) -> Mapping[str, float | str]:
        """Its class, age and yield; what is in use has none yet."""
        part = self._parts[node_id]
        if part.run is None:
            return {"num_uses": part.num_uses}
        step = step_of(seconds - part.run.born)
        return {
            "num_uses": part.num_uses,
            "class": self._table.classes[part.run.class_id].describe(),
            "age_seconds": seconds - part.run.born,
            "hazard": float(self._table.hazards([part.run.class_id])[0, step]),
            "yield_per_second": float(self._table.yields([part.run.class_id])[0, step]),
        }

    # --- runs -----------------------------------------------------------------------------------------------------

    def _opened(self, use: Use) -> OpenRequest:
        request = self._open.get(use.request)
        if request is None:
            request = self._open[use.request] = OpenRequest(use.seconds)
        return request

    def _new_run(self, run_class: RunClass, tick: int, born: float) -> Run:
        self._num_runs += 1
        class_id = self._table.class_id(run_class)
        self._recent.add(class_id)
        return Run(self._num_runs, tick, class_id, born)

    def _join(self, part: Part, run: Run) -> None:
        part.run = run
        run.num_blocks += part.num_blocks
        run.num_left += part.num_blocks

    def _count(self, run: Run) -> None:
        """Let a run teach the table from now on, and the oldest no more where there are too many."""
        self._table.reach(run.class_id, 0, 1.0)
        self._wait(run)
        self._runs.append(run)
        self._num_counted_blocks += run.num_left
        if len(self._runs) + self._num_aging > self._max_listed:
            self._drop_used_runs()
        while self._num_counted_blocks > MEMORY * self._num_blocks and len(self._runs) > 1:
            oldest = self._runs.popleft()
            oldest.is_counted = False
            self._num_counted_blocks -= oldest.num_left
            for key in oldest.ghost_keys:
                oldest.num_left -= self._ghosts.pop(key).num_blocks
            oldest.ghost_keys = frozenset()

    def _drop_used_runs(self) -> None:
        """Take runs of which nothing is left out of the lists. O(runs), when these have doubled."""
        self._runs = deque(run for run in self._runs if run.num_left > 0)
        self._aging = [deque(run for run in runs if run.num_left > 0) for runs in self._aging]
        self._num_aging = sum(map(len, self._aging))
        self._max_listed = 2 * (len(self._runs) + self._num_aging) + 256

    def _leave(self, part: Part) -> None:
        """The part is used: its run learns that, and it leaves the run."""
        run, part.run = part.run, None
        if run is None:
            return
        run.num_left -= part.num_blocks
        if run.is_counted:
            self._num_counted_blocks -= part.num_blocks
            self._table.use(run.class_id, run.step, part.num_blocks / run.num_blocks)

    def _take_out(self, part: Part) -> None:
        """The part leaves its run without a use."""
        run, part.run = part.run, None
        if run is not None:
            run.num_left -= part.num_blocks
            if run.is_counted:
                self._num_counted_blocks -= part.num_blocks

    def _remember(self, part: Part, num_blocks: int, key: int, keys: array[int]) -> None:
        """The end of a part, `num_blocks` blocks from `key` on, is evicted; what was evicted behind it joins it.
        `keys`: those of its blocks that are known."""
        run = part.run
        if run is None:
            return
        if not run.is_counted:
            run.num_left -= num_blocks
            return
        ghost = part.copy(num_blocks)
        ghost.keys = keys
        if part.ghost_key in run.ghost_keys:
            behind = self._drop_ghost(part.ghost_key)
            ghost.num_blocks += behind.num_blocks
            ghost.keys = keys + behind.keys if len(keys) == num_blocks else keys
        if key in self._ghosts:  # the same content was stored and evicted twice
            self._take_out(self._drop_ghost(key))
        part.ghost_key = key
        self._ghosts[key] = ghost
        run.add_ghost(key)

    def _cut_ghost(self, ghost: Part, num_blocks: int) -> Part:
        """The first blocks of a ghost; the others stay remembered by a key of their own."""
        first, key = ghost.copy(num_blocks), ghost.keys[num_blocks]
        ghost.num_blocks -= num_blocks
        ghost.keys = ghost.keys[num_blocks:]
        if key in self._ghosts or ghost.run is None:
            self._take_out(ghost)
        else:
            self._ghosts[key] = ghost
            ghost.run.add_ghost(key)
        return first

    def _drop_ghost(self, key: int) -> Part:
        ghost = self._ghosts.pop(key)
        assert ghost.run is not None  # only runs have ghosts
        ghost.run.drop_ghost(key)
        return ghost

    # --- ages and cells -------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Runs that have waited longer go to later steps. O(1) each time one does, and O(log offered) where it is
        offered.

        Those in one step follow each other by age, and those in later steps are older: with the last step first, each
        goes to the back of another's queue.
        """
        if now < self._next_step_at:
            return
        self._next_step_at = math.inf
        for step in range(NUM_STEPS - 2, -1, -1):
            runs = self._aging[step]
            if not runs:
                continue
            born = now - STEP_ENDS_SECONDS[step]
            while runs and runs[0].born <= born:
                self._age(runs.popleft(), now)
            if runs:
                self._next_step_at = min(self._next_step_at, runs[0].born + STEP_ENDS_SECONDS[step])

    def _age(self, run: Run, now: float) -> None:
        """Bring a run to the step that it is in now."""
        self._num_aging -= 1
        if run.num_left <= 0:
            return
        while run.step < NUM_STEPS - 1 and run.born + STEP_ENDS_SECONDS[run.step] <= now:
            run.step += 1
            if run.is_counted:
                self._table.reach(run.class_id, run.step, run.num_left / run.num_blocks)
        if run.step < NUM_STEPS - 1:
            self._wait(run)
        for node_id, depth in run.offered.items():
            self._enqueue(run, node_id, depth)

    def _wait(self, run: Run) -> None:
        """Wait for the end of the run's step."""
        self._aging[run.step].append(run)
        self._num_aging += 1
        due = run.born + STEP_ENDS_SECONDS[run.step]
        if due < self._next_step_at:
            self._next_step_at = due

    def _enqueue(self, run: Run, node_id: int, depth_blocks: int) -> None:
        name = (run.class_id, run.step)
        cell = self._cells.get(name)
        if cell is None:
            cell = self._cells[name] = []
        if not cell:
            heapq.heappush(self._order, (self._yield_of(run.class_id, run.step), *name))
        heapq.heappush(cell, (run.tick, -depth_blocks, node_id, run))

    def _yield_of(self, class_id: int, step: int) -> float:
        rates = self._yields.get(class_id)
        if rates is None:
            rates = self._yields[class_id] = self._table.yields_of(class_id)
        return rates[step]

    def _recompute(self) -> None:
        """New yields for all classes in use, and cells in their order."""
        for (_, step), cell in self._cells.items():
            _drop_outdated(cell, step)
        self._cells = {name: cell for name, cell in self._cells.items() if cell}
        if sum(map(len, self._cells.values())) > self._max_queued:
            self._cells = {name: _still_offered(cell, name[1]) for name, cell in self._cells.items()}
            self._max_queued = 2 * sum(map(len, self._cells.values())) + 256
        class_ids = sorted({class_id for class_id, _ in self._cells} | self._recent)
        self._recent.clear()
        rates = self._table.yields(class_ids).tolist() if class_ids else []
        self._yields = dict(zip(class_ids, rates, strict=True))
        self._order = [(self._yields[class_id][step], class_id, step) for class_id, step in self._cells]
        heapq.heapify(self._order)


def _num_equal(ghost: Part, keys: Sequence[int], first: int) -> int:
    """How many blocks of a ghost are `keys` from number `first` on. What is not known of it counts as equal."""
    for number, key in enumerate(ghost.keys):
        if first + number >= len(keys) or keys[first + number] != key:
            return number
    return ghost.num_blocks


def _use_bucket(part: Part) -> int:
    """0 for a padded block used once, else 1, 2–3, 4–15, 16 and more uses as 1 to 4."""
    if part.is_padded and part.num_uses == 1:
        return 0
    return 1 if part.num_uses == 1 else 2 if part.num_uses < 4 else 3 if part.num_uses < 16 else 4


def _is_offered(entry: _Entry, step: int) -> bool:
    """Whether an entry of a cell of that step is not outdated."""
    _, depth, node_id, run = entry
    return run.step == step and run.offered.get(node_id) == -depth


def _drop_outdated(cell: list[_Entry], step: int) -> None:
    """Drop outdated entries until the first is none. O(log entries) for each."""
    while cell and not _is_offered(cell[0], step):
        heapq.heappop(cell)


def _still_offered(cell: list[_Entry], step: int) -> list[_Entry]:
    """What is not outdated in a cell, once, in the order of a heap."""
    return sorted({entry for entry in cell if _is_offered(entry, step)})

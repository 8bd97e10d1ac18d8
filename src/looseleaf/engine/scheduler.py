"""What to compute in the next step, and who may hold blocks.

Order of a plan: running prefills get room for their next chunk, running decodes for their newest token, then requests
are admitted, first come first served. A request is admitted when there is room for all that it knows and one token
more. Models whose layers all keep everything reserve that room at once; with windows or chunks, where old blocks come
back on the way, room is reserved chunk by chunk. Where there is none, the cheapest request to compute again gives its
blocks back (preemption by recompute) and waits again, in order of arrival:

    running, by arrival            waiting, by arrival
    [ 1  2  5  7 ......... k ]     [ 4 (preempted)  6 (preempted)  k+1 (follows k)  k+2  k+3 ...]
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter

import numpy as np

from looseleaf.core.lease import Lease
from looseleaf.core.manager import CacheManager
from looseleaf.engine.config import EngineConfig
from looseleaf.engine.observer import EngineObserver
from looseleaf.engine.plan import NO_DECODES, Chunk, DecodeRows, Ending, StepPlan
from looseleaf.engine.request import FinishReason
from looseleaf.engine.sequence import Sequence
from looseleaf.engine.sharing import InFlightSharing
from looseleaf.errors import LooseleafError, OutOfBlocks

_by_arrival = attrgetter("arrival")
MAX_SET_ASIDE = 64
"""Most requests of one step that are looked at only to find that they must wait for another one's prefill."""


class Scheduler:
    """Queue, running set and their leases. Used from the engine's thread only.

    `limit_tokens`: most tokens of one sequence, set by the engine. `waiting` and `running` are in order of arrival; new
    requests are put at the end of `waiting`; those that follow a running prefill are set aside in `InFlightSharing`, so
    a step's cost does not depend on how many wait. `copies`: what forks want copied in the next step, source by target.
    """

    def __init__(
        self, cache: CacheManager, config: EngineConfig, observer: EngineObserver, clock: Callable[[], float]
    ) -> None:
        self._cache = cache
        self._config = config
        self._observer = observer
        self._clock = clock
        self._max_running = min(config.max_running_requests, config.max_step_tokens)
        self._sharing = InFlightSharing(cache, config.share_in_flight and config.reuse)
        self._by_chunk = cache.plan.slides and not config.reserve_output
        self._mean_output_tokens = 128.0
        self._num_usable_blocks = cache.plan.num_blocks
        self.limit_tokens = 0
        self._last_decodes = NO_DECODES
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.copies: dict[int, int] = {}

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that ended, wherever it is, and release what it holds. The first of its samples that
        still wait for its prefill takes its place."""
        if sequence.lease is not None:
            sequence.give_back()
            self.running.remove(sequence)
        elif sequence.lead is not None:
            sequence.lead.samples.remove(sequence)
        else:
            index = bisect_left(self.waiting, sequence.arrival, key=_by_arrival)
            if self.waiting[index : index + 1] == [sequence]:
                del self.waiting[index]
        if sequence.num_output_tokens:
            self._mean_output_tokens += (sequence.num_output_tokens - self._mean_output_tokens) / 64
        if sequence.samples:
            lead, *rest = sequence.samples
            sequence.samples, lead.samples, lead.lead = [], rest, None
            for sample in rest:
                sample.lead = lead
            self._queue(lead)

    def plan(self) -> StepPlan:
        """Decide the next step: appends the tokens of decodes to their leases, makes and releases leases.

        Terminates whatever the pins hold: a lone request that can't grow ends with LENGTH (ERROR in its prefill), and
        if nothing runs, heads of the queue that can't be admitted end with ERROR until one can. The oldest running
        request is never preempted, and nobody is admitted in a step that preempted: so each request's turn comes.
        """
        plan = StepPlan()
        if self._by_chunk:
            self._num_usable_blocks = self._cache.plan.num_blocks - self._cache.stats().hard_pinned_blocks
        self._plan_chunks(plan)
        self._plan_decodes(plan)
        if not plan.has_preempted:
            self._admit(plan)
        if plan.decodes.sequences or plan.chunks:
            plan.copies = tuple(self.take_copies())
        return plan

    def fork_samples(self, chunk: Chunk) -> None:
        """The prompt of `chunk.sequence` is committed: its samples go on from it, each with a lease of its own. One
        that finds no room for that waits like a preempted request."""
        lead, block_tokens = chunk.sequence, self._cache.plan.block_tokens
        lead.samples = []
        for sample in chunk.drawn[1:]:
            sample.lead = None
            if sample.is_aborted:
                continue
            sample.is_counted = True
            sample.admitted_seconds = self._clock()
            sample.num_cached_tokens = (lead.num_prompt_tokens - 1) // block_tokens * block_tokens
            try:
                lease = lead.held.fork(sample.request_id) if len(self.running) < self._max_running else None
            except LooseleafError:
                lease = None
            if lease is None:
                self._queue(sample)
                continue
            sample.lease, sample.is_decoding = lease, True
            insort(self.running, sample, key=_by_arrival)
            self.copies.update((to_block, from_block) for from_block, to_block in lease.copies)
            lease.copies.clear()  # they are ours to do now: a later resize must not look for their blocks
            self._observer.on_fork(num_tokens=lease.num_committed_tokens)

    def take_copies(self) -> list[tuple[int, int]]:
        """The copies that forks asked for, for the caller to do before anything is written.

        They stay right whatever happened to their sequences since: blocks are written by steps only, and each step does
        them first, so a block that was given to somebody else is overwritten before anybody reads it; of two copies to
        one block the later counts.
        """
        copies, self.copies = self.copies, {}
        return [(from_block, to_block) for to_block, from_block in copies.items()]

    def _queue(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_by_arrival)

    # -- who runs --

    def _plan_chunks(self, plan: StepPlan) -> None:
        """What running prefills compute next, within the budget that decodes leave."""
        budget = self._config.max_step_tokens - sum(sequence.is_decoding for sequence in self.running)
        for sequence in [sequence for sequence in self.running if not sequence.is_decoding]:
            if budget > 0 and sequence.lease is not None:  # not preempted for an earlier one
                wanted = self._next_chunk(sequence, sequence.held.num_committed_tokens, budget)
                chunk = self._make_room(plan, wanted)
                if chunk is not None:
                    plan.chunks.append(chunk)
                    budget -= chunk.end - chunk.start

    def _next_chunk(self, sequence: Sequence, start: int, budget: int) -> Chunk:
        """What is not computed yet from `start` on, up to `budget` tokens."""
        end = min(sequence.num_tokens, start + min(budget, self._max_chunk_tokens(sequence.num_tokens + 1)))
        is_sampled = end == sequence.num_tokens and sequence.request.params.max_tokens > 0
        return Chunk(sequence, start, end, (sequence, *sequence.samples) if is_sampled else ())

    def _make_room(self, plan: StepPlan, chunk: Chunk) -> Chunk | None:
        """Reserve what a chunk needs, or what fits of it if its sequence is alone; None if that had to give way or to
        end."""
        sequence = chunk.sequence
        while not sequence.held.try_reserve(chunk.end) and len(self.running) > 1:
            if self._preempt(plan, "prefill") is sequence:
                return None
        try:
            return self._reserved(chunk, sequence.held)
        except OutOfBlocks as error:
            plan.endings.append(Ending(sequence, FinishReason.ERROR, error))
            return None

    def _reserved(self, chunk: Chunk, lease: Lease) -> Chunk:
        """Reserve room for a chunk, cut where pins leave too little for all of it; OutOfBlocks if no block fits."""
        num_tokens = chunk.end - chunk.start
        while not lease.try_reserve(chunk.end) and num_tokens > self._cache.plan.block_tokens:
            num_tokens //= 2
            chunk = self._next_chunk(chunk.sequence, chunk.start, num_tokens)
        lease.reserve(chunk.end)  # nothing to do, or the refusal with its numbers
        return chunk

    def _plan_decodes(self, plan: StepPlan) -> None:
        """Give every decoding sequence room for its newest token, preempting until that works."""
        while decodes := [sequence for sequence in self.running if sequence.is_decoding]:
            rows = self._last_decodes
            if decodes != rows.sequences:  # one that left and came back was missing in a step between
                rows = DecodeRows.of(decodes)
            tokens = np.array([sequence.last_token for sequence in decodes], np.int64)
            try:
                slots = self._cache.append_many(rows.leases, tokens)
            except OutOfBlocks:
                if len(self.running) == 1:  # alone: recomputing would end at the same place
                    plan.endings.append(Ending(decodes[0], FinishReason.LENGTH))
                    break
                self._preempt(plan, "decode")
            else:
                has_one_lane = self._cache.plan.num_lanes == 1
                plan.decodes, plan.decode_tokens = rows, tokens
                plan.decode_slots = slots[None] if has_one_lane else self._cache.slots_many(rows.leases)
                break
        self._last_decodes = plan.decodes

    def _preempt(self, plan: StepPlan, cause: str) -> Sequence:
        """Take the blocks of the request that gives most of them per token to be computed again, the latest arrival
        among equals; never of the oldest, and of one that has done nothing since it came back only if all others
        haven't either."""
        candidates = [sequence for sequence in self.running[1:] if sequence.has_progressed] or self.running[1:]
        gains = self._cache.release_gains([sequence.held for sequence in candidates])
        worths = [gain.num_blocks / max(gain.num_lost_tokens, 1e-9) for gain in gains]
        index = max(range(len(worths)), key=lambda index: (worths[index], index))
        victim, gain = candidates[index], gains[index]
        victim.note_preemption()
        victim.give_back()
        self.running.remove(victim)
        self._queue(victim)
        plan.chunks = [chunk for chunk in plan.chunks if chunk.sequence is not victim]
        plan.has_preempted = True
        self._observer.on_preempt(cause=cause, num_lost_tokens=gain.num_lost_tokens, num_freed_blocks=gain.num_blocks)
        return victim

    # -- who comes in --

    def _admit(self, plan: StepPlan) -> None:
        budget, num_set_aside = self._config.max_step_tokens - plan.num_tokens, 0
        for follower in self._sharing.take_ready():
            self._queue(follower)
        while self.waiting and budget > 0 and len(self.running) < self._max_running and num_set_aside < MAX_SET_ASIDE:
            sequence = self.waiting[0]
            if self._sharing.must_wait(sequence, self.running):
                self._sharing.set_aside(self.waiting.pop(0))
                num_set_aside += 1
                continue
            try:
                chunk = self._try_admit(sequence, budget)
                if chunk is None:
                    return
            except LooseleafError as error:
                plan.endings.append(Ending(sequence, FinishReason.ERROR, error))
            else:
                insort(self.running, sequence, key=_by_arrival)
                plan.chunks.append(chunk)
                budget -= chunk.end - chunk.start
            del self.waiting[0]

    def _try_admit(self, sequence: Sequence, budget: int) -> Chunk | None:
        """Match, hold and reserve what the sequence needs to begin, or nothing; what it computes first.

        Raises:
            OutOfBlocks: it does not fit though nothing runs, so waiting would not help.
            DuplicateRequest: somebody else holds a lease of this id.
        """
        must = not self.running
        request, num_tokens = sequence.request, self._num_admitted_tokens(sequence)
        reuse = self._config.reuse and request.reuse
        if not must and not self._may_fit(sequence, num_tokens, reuse):
            return None
        num_output_tokens = max(2 * self._mean_output_tokens, sequence.num_output_tokens + 1)
        lease = self._cache.lease(
            sequence.tokens,
            request_id=sequence.request_id,
            namespace=request.namespace,
            session=request.session,
            layers=request.layers,
            count_lookup=not sequence.is_counted,
            reuse=reuse,
            expected_tokens=sequence.num_prompt_tokens + int(min(request.params.max_tokens, num_output_tokens)),
        )
        if reuse and not sequence.is_counted:
            self._observer.on_lookup(
                namespace=request.namespace,
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_cached_tokens=lease.num_cached_tokens,
            )
        is_first, sequence.is_counted = not sequence.is_counted, True
        chunk = self._next_chunk(sequence, lease.num_cached_tokens, budget)
        try:
            if must and self._by_chunk:
                chunk = self._reserved(chunk, lease)
            else:
                lease.reserve(chunk.end if self._by_chunk else num_tokens)
        except LooseleafError as error:
            lease.release()
            if must or not isinstance(error, OutOfBlocks):
                raise
            return None
        sequence.lease = lease
        if sequence.admitted_seconds is None:
            sequence.admitted_seconds = self._clock()
            sequence.num_cached_tokens = lease.num_cached_tokens
        if sequence.wait is not None:
            num_shared = min(lease.num_cached_tokens, sequence.wait.num_tokens) - sequence.wait.num_found_tokens
            sequence.wait = None
            if num_shared > 0:
                if is_first:
                    lease.note_in_flight(num_shared)
                self._observer.on_share(num_tokens=num_shared)
        return chunk

    def _may_fit(self, sequence: Sequence, num_tokens: int, reuse: bool) -> bool:
        """False if a lease would be in vain: read-only, so that those who wait touch neither statistics nor the
        eviction order. (True is no promise: what matches may itself be what is evictable.)"""
        room = self._cache.room()
        num_available_blocks = room.num_free_blocks + room.num_evictable_blocks - self._num_promised_blocks()
        num_wanted_blocks = self._num_blocks_for(num_tokens)
        if num_wanted_blocks <= num_available_blocks or not reuse:
            return num_wanted_blocks <= num_available_blocks
        request = sequence.request
        match = self._cache.match(sequence.tokens, namespace=request.namespace, layers=request.layers)
        return num_wanted_blocks - match.num_blocks <= num_available_blocks

    def _num_promised_blocks(self) -> int:
        """Blocks that those who run will want: what prefills that reserve by chunk still need, and one block in each
        lane for each request and sample, so that what is admitted now does not give way in the next steps. Measured
        with 64 requests over a pool for 22: 44% of the tokens were computed again without this, 24% with it, in as many
        steps."""
        if self._config.reserve_output:
            return 0
        plan = self._cache.plan
        num_promised = plan.num_lanes * sum(1 + len(sequence.samples) for sequence in self.running)
        if self._by_chunk:
            for sequence in self.running:
                if not sequence.is_decoding:
                    num_held = sum(table.size for table in sequence.held.tables)
                    num_promised += max(0, self._num_blocks_for(sequence.num_tokens + 1) - num_held)
        return num_promised

    def _num_admitted_tokens(self, sequence: Sequence) -> int:
        """Tokens that must have room when a sequence is admitted."""
        max_tokens = sequence.request.params.max_tokens
        if self._config.reserve_output:
            return min(sequence.num_prompt_tokens + max_tokens, self.limit_tokens)
        return sequence.num_tokens + (1 if max_tokens else 0)

    def _num_blocks_for(self, num_tokens: int) -> int:
        """Most blocks that a sequence holds at once on its way to `num_tokens` tokens."""
        return self._cache.plan.blocks_for(num_tokens, self._max_chunk_tokens(num_tokens))

    def _max_chunk_tokens(self, num_tokens: int) -> int:
        """Longest chunk on the way to `num_tokens` tokens. Where room is reserved chunk by chunk, one takes at most a
        quarter of what hard pins leave of the pool, and less where the sequence would not fit otherwise."""
        if not self._by_chunk:
            return num_tokens
        plan = self._cache.plan
        quarter_tokens = self._num_usable_blocks // (4 * plan.num_lanes) * plan.block_tokens
        chunk_tokens = min(self._config.max_step_tokens, max(plan.block_tokens, quarter_tokens))
        while chunk_tokens > plan.block_tokens and plan.blocks_for(num_tokens, chunk_tokens) > self._num_usable_blocks:
            chunk_tokens //= 2
        return chunk_tokens

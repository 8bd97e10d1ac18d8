"""The offline optimum: what a cache would hit that knew the future. No policy can hit more blocks under the same rules.

Belady's rule (Belady, "A study of replacement algorithms for virtual-storage computers", IBM Systems Journal 1966): the
block whose next use is furthest goes first, the deepest on ties. A block's parent is used whenever the block is, so
what is kept of a path is always a prefix of it, and which blocks these are follows from their number alone. So blocks
need no names here: it is enough to count, for each request to come, how many resident blocks it is the next to use.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from looseleaf.ids import Int32Array
from looseleaf.lab.replay import ReplayResult, num_cache_blocks, replayed_block_tokens
from looseleaf.lab.traces import Trace

OPTIMUM = "optimum"
"""Its name among policies."""


@dataclass(frozen=True)
class _Segment:
    """Blocks of a path, `first` (inclusive) to `stop` (exclusive), that the same request is the next to use."""

    next_request: int
    first: int
    stop: int


class Optimum:
    """The optimum of one trace in blocks of one size; works out once what does not depend on the capacity.

    Args:
        trace: must tell which blocks its prompts have.
        block_tokens: as for `replay_instant`.

    Raises:
        ConfigError: as `replay_instant`.
    """

    def __init__(self, trace: Trace, block_tokens: int | None = None) -> None:
        self._trace = trace
        self.block_tokens = replayed_block_tokens(trace, block_tokens)
        trace_size = trace.block_tokens or self.block_tokens
        self._num_blocks = [num_cache_blocks(request, trace_size, self.block_tokens) for request in trace.requests]
        self._segments = self._next_uses(trace_size // self.block_tokens)

    def replay(self, capacity_blocks: int) -> ReplayResult:
        """What a cache of so many blocks hits at best, by the rules of `replay_instant`: all blocks of a request are
        stored (the first `capacity_blocks` of a longer one), and not evicted while it is served. O(requests log
        requests)."""
        size, never = self.block_tokens, len(self._trace.requests)
        resident: dict[int, int] = {}  # by the request that uses them next; `never` for none
        latest: list[int] = []  # heap of -keys of `resident`; may name some twice, or some that are gone
        num_resident = hit_tokens = peak_blocks = num_evicted = num_places = num_used = 0
        for number, request in enumerate(self._trace.requests):
            num_hits = resident.pop(number, 0)
            num_resident -= num_hits
            hit_tokens += min(num_hits * size, request.num_input_tokens)
            num_own = min(self._num_blocks[number], capacity_blocks)
            while num_resident + num_own > capacity_blocks:
                furthest = -latest[0]
                num_here = resident.get(furthest, 0)
                num_gone = min(num_here, num_resident + num_own - capacity_blocks)
                num_resident -= num_gone
                num_evicted += num_gone
                if num_gone < num_here:
                    resident[furthest] = num_here - num_gone
                else:
                    resident.pop(furthest, None)
                    heapq.heappop(latest)
            for segment in self._segments[number]:
                count = min(segment.stop, num_own) - segment.first
                if count > 0:
                    if segment.next_request not in resident:
                        heapq.heappush(latest, -segment.next_request)
                    resident[segment.next_request] = resident.get(segment.next_request, 0) + count
            num_resident += num_own
            peak_blocks = max(peak_blocks, num_resident)
            num_places += num_own * size
            num_used += min(num_own * size, request.num_input_tokens)
        input_tokens = sum(request.num_input_tokens for request in self._trace.requests)
        peak_own = min(max(self._num_blocks, default=0), capacity_blocks) * size
        return ReplayResult(
            trace=self._trace.name,
            policy=OPTIMUM,
            mode="instant",
            capacity_blocks=capacity_blocks,
            page_tokens=size,
            block_tokens=size,
            requests=never,
            input_tokens=input_tokens,
            hit_tokens=hit_tokens,
            token_hit_rate=hit_tokens / input_tokens if input_tokens else 0.0,
            waste=1 - num_used / num_places if num_places else 0.0,
            peak_blocks=peak_blocks,
            evicted_blocks=num_evicted,
            peak_held_tokens=peak_own,
            peak_used_tokens=peak_own,
        )

    def _next_uses(self, ratio: int) -> list[tuple[_Segment, ...]]:
        """By request: its path in segments of equal next use. From the last request to the first."""
        never = len(self._trace.requests)
        highest = max((max(request.blocks) for request in self._trace.requests if request.blocks), default=-1)
        next_use: Int32Array = np.full((highest + 1) * ratio, never, dtype=np.int32)
        within = np.arange(ratio, dtype=np.int32)
        by_request: list[tuple[_Segment, ...]] = [()] * never
        for number in range(never - 1, -1, -1):
            blocks = np.array(self._trace.requests[number].blocks, dtype=np.int32)
            ids = (blocks[:, None] * ratio + within).ravel()[: self._num_blocks[number]]
            if len(ids) == 0:
                continue
            uses = next_use[ids]
            ends = [*(np.flatnonzero(uses[1:] != uses[:-1]) + 1).tolist(), len(ids)]
            firsts = [0, *ends[:-1]]
            nexts = uses[firsts].tolist()
            by_request[number] = tuple(map(_Segment, nexts, firsts, ends))
            next_use[ids] = number
        return by_request


def gap_closed(token_hit_rate: float, lru: float, optimum: float, least_gap: float = 0.001) -> float | None:
    """Share of the way from LRU to the optimum, by hit rates (0 to 1): 1 is the optimum, 0 LRU, below 0 worse than LRU.
    None where the two are less than `least_gap` apart, 0.1 points, and the share says nothing."""
    return (token_hit_rate - lru) / (optimum - lru) if optimum - lru >= least_gap else None

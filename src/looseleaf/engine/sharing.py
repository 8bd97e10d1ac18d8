"""In-flight sharing: what a running prefill is about to compute is not computed a second time beside it.

    leader    [ committed ....|.. its prefill goes on .........)
    follower  [ found .)[ awaited ........)                     waits until the leader has committed what both share

A follower holds nothing while it waits, so there are no cycles; its leader commits the awaited blocks in a bounded
number of steps or leaves (aborted, preempted, failed). Then the follower looks again, in its turn. Until then it is set
aside with its leader, so that thousands of them cost a step nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from heapq import heappop, heappush

from looseleaf.core.manager import CacheManager
from looseleaf.core.namespaces import Tenancy
from looseleaf.engine.exact_prompt import num_common_tokens
from looseleaf.engine.request import GenerationRequest
from looseleaf.engine.sequence import Sequence, Wait


class InFlightSharing:
    """Says who waits for whom, and keeps those who do. `is_on` False: nobody waits."""

    def __init__(self, cache: CacheManager, is_on: bool) -> None:
        self._cache = cache
        self._is_on = is_on
        self._followers: dict[Sequence, list[tuple[int, int, Sequence]]] = {}
        """By leader: a heap of (awaited tokens, arrival, follower). Those who ended meanwhile stay in it."""

    def set_aside(self, follower: Sequence) -> None:
        """Keep one that must wait until its leader has what it waits for, or leaves."""
        if follower.wait is None:
            raise RuntimeError(f"request {follower.request_id!r} waits for nobody")
        heap = self._followers.setdefault(follower.wait.leader, [])
        heappush(heap, (follower.wait.num_tokens, follower.arrival, follower))

    def take_ready(self) -> list[Sequence]:
        """Those set aside who need not wait any longer. O(leaders + those given back)."""
        ready: list[Sequence] = []
        for leader, heap in list(self._followers.items()):
            lease = None if leader.is_decoding else leader.lease
            while heap and (lease is None or lease.num_committed_tokens >= heap[0][0]):
                follower = heappop(heap)[2]
                if not follower.is_aborted:
                    ready.append(follower)
            if not heap:
                del self._followers[leader]
        return ready

    def must_wait(self, sequence: Sequence, running: AbstractSequence[Sequence]) -> bool:
        """True if a prefill among `running` will commit more whole blocks of this prompt than the cache holds now. What
        it waits for is kept in `sequence.wait`, so that asking again costs little."""
        if not self._is_on or not sequence.request.reuse:
            return False
        if sequence.wait is not None and _is_pending(sequence.wait):
            return True
        wait = self._find(sequence, running)
        if wait is not None:
            sequence.wait = wait
        return wait is not None

    def _find(self, sequence: Sequence, running: AbstractSequence[Sequence]) -> Wait | None:
        tokens, request, block_tokens = sequence.tokens, sequence.request, self._cache.plan.block_tokens
        leader, num_tokens = None, 0
        for other in running:
            if other.is_decoding or not other.request.reuse:
                continue
            num_alike = self._num_tokens_alike(request, other.request)
            if num_alike == 0:
                continue
            num_shared = num_common_tokens(other.tokens, tokens[:-1][:num_alike]) // block_tokens * block_tokens
            if num_shared > max(num_tokens, other.held.num_committed_tokens):
                leader, num_tokens = other, num_shared
        if leader is None:
            return None
        num_found = self._cache.match(tokens, namespace=request.namespace, layers=request.layers).num_tokens
        if num_tokens <= num_found:
            return None
        leader.held.expect_end(num_tokens)
        return Wait(leader, num_tokens, num_found if sequence.wait is None else sequence.wait.num_found_tokens)

    def _num_tokens_alike(self, ours: GenerationRequest, theirs: GenerationRequest) -> int | None:
        """How many first tokens of two requests lie in the same namespaces; None: all."""
        if not (ours.layers or theirs.layers):
            return None if ours.namespace == theirs.namespace else 0
        block_tokens = self._cache.plan.block_tokens
        mine, its = (
            Tenancy.of(one.namespace, one.layers, len(one.prompt_tokens), block_tokens) for one in (ours, theirs)
        )
        if mine == its:
            return None
        starts = sorted({0, *(border.first_block for border in (*mine.borders, *its.borders))})
        return next(block for block in starts if mine.at(block) != its.at(block)) * block_tokens


def _is_pending(wait: Wait) -> bool:
    """True while the leader runs its prefill and has not committed what is awaited."""
    lease = wait.leader.lease
    return lease is not None and not wait.leader.is_decoding and lease.num_committed_tokens < wait.num_tokens

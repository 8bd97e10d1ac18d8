"""A small cache of numbered words that does to eviction policies whatever a real one may do, and checks every answer.

It is a prefix tree of runs whose blocks are single words; requests look up, hold, store and let go, memory runs out.
Two policies of one kind get the same calls: they must agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from looseleaf.core.eviction import EvictionPolicy, PolicyFactory, StoredRun, Use


@dataclass(eq=False)
class DrivenRun:
    """A stored run: a node of the tree. `words`, `keys`: its blocks and their chain keys."""

    id: int
    parent: DrivenRun | None = field(repr=False)
    words: list[int]
    keys: list[int]
    start: int = 0
    children: dict[int, DrivenRun] = field(default_factory=dict, repr=False)
    num_holders: int = 0
    num_pins: int = 0
    is_alive: bool = True
    is_offered: bool = False

    @property
    def end(self) -> int:
        """Blocks up to its end."""
        return self.start + len(self.words)

    def path(self) -> list[DrivenRun]:
        """The runs from the root down to this one, the root itself and what is gone left out."""
        path = []
        run: DrivenRun | None = self
        while run is not None and run.parent is not None:
            path.append(run)
            run = run.parent
        return [run for run in reversed(path) if run.is_alive]


@dataclass(eq=False)
class DrivenRequest:
    """A request that holds the path down to `last`. `num_stored`: words stored or found; own: it made `last`; `cuts`:
    words at which another run begins."""

    number: int
    words: Sequence[int]
    last: DrivenRun
    num_stored: int
    own: bool = False
    cuts: Sequence[int] = ()


class PolicyDriver:
    """Drives a pair of equal policies for a pool of `num_blocks` blocks; an AssertionError tells the law that they
    break. All calls keep the caller's part of the contract."""

    def __init__(self, factory: PolicyFactory, num_blocks: int, *, is_checked: bool = True) -> None:
        self.num_blocks = num_blocks
        self.policies: list[EvictionPolicy] = [factory(num_blocks) for _ in range(1 + is_checked)]
        self.root = DrivenRun(0, None, [], [])
        self.requests: list[DrivenRequest] = []
        self.offered: dict[int, DrivenRun] = {}
        self.seconds = 0.0
        self.num_used = 0
        self._num_runs = self._num_requests = self._tick = 0
        self._is_checked = is_checked

    # --- what requests do -----------------------------------------------------------------------------------------

    def open(self, words: Sequence[int]) -> DrivenRequest:
        """Look up, and hold what is found."""
        self._num_requests += 1
        request = DrivenRequest(self._num_requests, words, self.root, 0)
        self.requests.append(request)
        self._follow(request, words)
        if self.policies[0].uses_keys:
            keys = self._keys(request.last, words[request.num_stored :])
            request.cuts = [request.num_stored + number for number in self._missed(keys, self._use(request))]
        return request

    def store(self, request: DrivenRequest, num_blocks: int) -> None:
        """Compute up to `num_blocks` more words and store them; fewer if memory does not suffice."""
        for cut in [cut for cut in request.cuts if request.num_stored < cut < request.num_stored + num_blocks]:
            num_blocks -= cut - request.num_stored
            self._store(request, cut - request.num_stored)
            request.own = False
        self._store(request, num_blocks)

    def _store(self, request: DrivenRequest, num_blocks: int) -> None:
        words = list(request.words[request.num_stored : request.num_stored + num_blocks])
        self.evict(len(words) - (self.num_blocks - self.num_used))
        words = words[: self.num_blocks - self.num_used]
        if not request.last.is_alive:  # it was cleared; what comes behind it is stored no more
            request.num_stored += len(words)
            return
        words = self._follow(request, words)
        if not words:
            return
        last, keys = request.last, self._keys(request.last, words)
        if request.own and not last.children and last.num_holders == 1:
            last.words += words
            last.keys += keys
            self._call("extend", last.id, len(words))
        else:
            self._num_runs += 1
            run = DrivenRun(self._num_runs, last, words, keys, last.end, num_holders=1)
            last.children[words[0]] = run
            stored = StoredRun(len(words), run.start, keys[0] if self.policies[0].uses_keys else 0)
            self._call("insert", run.id, stored, self._use(request))
            self._review(last)
            request.last, request.own = run, True
        self.num_used += len(words)
        request.num_stored += len(words)

    def close(self, request: DrivenRequest, num_output_tokens: int = 0) -> None:
        """The request ends."""
        self.requests.remove(request)
        path = request.last.path()
        for run in path:
            run.num_holders -= 1
        self._call("release", [run.id for run in path], self._use(request), num_output_tokens)
        if path:
            self._review(path[-1])

    def serve(self, words: Sequence[int]) -> int:
        """A whole request at once. How many words were found."""
        request = self.open(words)
        num_found = request.num_stored
        self.store(request, len(words))
        self.close(request)
        return num_found

    def _follow(self, request: DrivenRequest, words: Sequence[int]) -> list[int]:
        """Hold what is stored of the words behind a request's path; what is not stored."""
        found: list[DrivenRun] = []
        run, at = request.last, 0
        while at < len(words) and words[at] in run.children:
            run = run.children[words[at]]
            num_equal = 0
            while num_equal < min(len(run.words), len(words) - at) and run.words[num_equal] == words[at + num_equal]:
                num_equal += 1
            if num_equal < len(run.words):
                run = self._split(run, num_equal)
            found.append(run)
            at += num_equal
        if found:
            for run in found:
                run.num_holders += 1
            self._review(found[-1])
            self._call("hit", [run.id for run in found], self._use(request))
            request.last, request.num_stored, request.own = found[-1], request.num_stored + at, False
        return list(words[at:])

    # --- what else happens ----------------------------------------------------------------------------------------

    def evict(self, num_blocks: int) -> int:
        """Evict up to `num_blocks` blocks; how many it were."""
        num_left = num_blocks
        while num_left > 0 and (run := self.victim()) is not None:
            num_left -= self.cut(run, min(num_left, len(run.words)))
        return num_blocks - num_left

    def cut(self, run: DrivenRun, num_blocks: int) -> int:
        """Evict the last `num_blocks` blocks of a leaf that nobody holds, as many as it has at most."""
        num_left = len(run.words) - num_blocks
        key = run.keys[max(0, num_left)] if self.policies[0].uses_keys else 0
        if num_left <= 0:
            self._drop(run, key)
            return len(run.words)
        del run.words[num_left:], run.keys[num_left:]
        self.num_used -= num_blocks
        self._call("shorten", run.id, num_blocks, key)
        return num_blocks

    def clear(self) -> None:
        """Forget all that no pin covers; what requests hold is lost to others."""
        for run in reversed([run for run in self.runs() if not run.num_pins]):  # children before parents
            if not run.children:
                self._drop(run, None)

    def pin(self, run: DrivenRun, change: int) -> None:
        """One pin more (1) or less (-1) on all of a run's path."""
        for step in run.path():
            step.num_pins += change
            self._review(step)

    def resize(self, num_blocks: int) -> None:
        """The pool grows, or shrinks as far as memory can be evicted."""
        self.num_blocks = max(num_blocks, self.num_used - self.evict(self.num_used - num_blocks))
        self._call("resize", self.num_blocks)

    def victim(self) -> DrivenRun | None:
        """The policies' choice, checked."""
        victims = [policy.victim() for policy in self.policies]
        for victim in victims:
            assert victim == victims[0], f"the same calls gave two victims, {victims}: it must be deterministic"
        if victims[0] is None:
            assert not self.offered, f"no victim, though {sorted(self.offered)} are offered"
            return None
        assert victims[0] in self.offered, f"victim {victims[0]} is not offered; these are: {sorted(self.offered)}"
        return self.offered[victims[0]]

    def runs(self) -> list[DrivenRun]:
        """All stored runs, parents before children."""
        return list(self._below(self.root))

    # --- laws -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every law that can be seen between two calls."""
        for policy in self.policies:
            offered = list(policy.offered())
            assert sorted(offered) == sorted(self.offered), f"offered() is {offered}, not {sorted(self.offered)}"
        victim = self.victim()
        assert self.victim() is victim, "two calls of victim() in a row gave two victims"
        if victim is not None:
            self._call("withdraw", victim.id)
            self._call("offer", victim.id, victim.end)
            again = self.victim()
            assert again is victim, f"run {victim.id} was withdrawn and offered again, and lost its place to {again}"
        for run in self.runs():
            for name, value in self.policies[0].describe(run.id, self.seconds).items():
                is_fine = isinstance(name, str) and (isinstance(value, str) or math.isfinite(value))
                assert is_fine, f"describe() says {name!r}: {value!r}; it must be a finite number or a string"

    # --- inside ---------------------------------------------------------------------------------------------------

    def _below(self, run: DrivenRun) -> Iterator[DrivenRun]:
        for child in run.children.values():
            yield child
            yield from self._below(child)

    def _call(self, name: str, *args: Any) -> None:
        for policy in self.policies:
            given = [list(arg) if isinstance(arg, list) else arg for arg in args]
            result = getattr(policy, name)(*given)
            assert result is None, f"{name}() returned {result!r}"
            assert given == list(args), f"{name}() changed the lists that it was given"

    def _missed(self, keys: list[int], use: Use) -> list[int]:
        """Where the policies want another run to begin, checked."""
        cuts = [list(policy.missed(list(keys), use)) for policy in self.policies]
        for found in cuts:
            assert found == cuts[0], f"the same calls cut at {cuts}: it must be deterministic"
        is_fine = all(0 < number < len(keys) for number in cuts[0]) and cuts[0] == sorted(set(cuts[0]))
        assert is_fine, f"missed() returned {cuts[0]}, not ascending numbers of {len(keys)} keys"
        return cuts[0]

    def _use(self, request: DrivenRequest) -> Use:
        self._tick += 1
        return Use(self._tick, self.seconds, request.number)

    def _keys(self, run: DrivenRun, words: Sequence[int]) -> list[int]:
        """Chain keys of words behind a run."""
        key = run.keys[-1] if run.keys else 1
        keys = []
        for word in words:
            key = (key * 0x5851F42D4C957F2D + word + 1) % 2**63
            keys.append(key - 2**62)
        return keys

    def _split(self, run: DrivenRun, num_blocks: int) -> DrivenRun:
        """Cut a run; its new upper part."""
        assert run.parent is not None  # the root has no blocks
        self._num_runs += 1
        upper = DrivenRun(self._num_runs, run.parent, run.words[:num_blocks], run.keys[:num_blocks], run.start)
        upper.num_holders, upper.num_pins = run.num_holders, run.num_pins
        run.parent.children[run.words[0]] = upper
        del run.words[:num_blocks], run.keys[:num_blocks]
        run.parent, run.start = upper, upper.end
        upper.children[run.words[0]] = run
        self._call("split", run.id, upper.id, num_blocks)
        return upper

    def _review(self, run: DrivenRun) -> None:
        """Offer a run or withdraw it, as its state demands."""
        wanted = run.is_alive and run is not self.root and not (run.children or run.num_holders or run.num_pins)
        if wanted and not run.is_offered:
            self.offered[run.id] = run
            self._call("offer", run.id, run.end)
        elif run.is_offered and not wanted:
            del self.offered[run.id]
            self._call("withdraw", run.id)
        run.is_offered = wanted

    def _drop(self, run: DrivenRun, key: int | None) -> None:
        assert run.parent is not None  # the root has no blocks
        run.is_alive = False
        self._review(run)
        self._call("forget", run.id, key)
        self.num_used -= len(run.words)
        del run.parent.children[run.words[0]]
        self._review(run.parent)

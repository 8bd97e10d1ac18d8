"""Where misses came from: tokens and requests by reason over time, in bounded memory, each look-up counted once."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from looseleaf.core.explain import Finding
from looseleaf.ids import Namespace

MINUTE, HOUR = 60.0, 3_600.0
NUM_MINUTES, NUM_HOURS = 60, 24
"""Minutes, then hours, that are told apart, of those in which something was looked up; all before is one sum."""

MAX_NAMESPACES = 64
"""Namespaces that are told apart in each of these; what others look up counts in the sum of all."""

_WORDS = {
    "never_seen": "were never seen before",
    "evicted": "had been evicted",
    "diverged": "lay behind a point where the prompt differs from what is stored",
    "other_namespace": "lay behind what is stored in another namespace",
    "below_one_block": "were shared with something stored, but less than a block, or in a shorter prompt",
    "window_cut": "lay behind a window that was gone",
    "cleared": "had been cleared",
    "not_admitted": "had not been worth keeping",
    "always_computed": "are always computed, the last of a prompt and those in its block",
}
_Counts: TypeAlias = "Counter[tuple[str, str]]"


@dataclass(frozen=True)
class MissSummary:
    """What became of all tokens that were looked up since `seconds` seconds ago.

    query_tokens = hit_tokens + the sum of `missed_tokens`, whose keys are the reasons of explanations and
    "always_computed": of a prompt longer than a block its last token and those in the same block. What lies behind an
    evicted, cleared or cut part is never seen. hit_rate: 0 to 1. `hit_tokens_by_rung`: by the rung of reuse that gave
    them. `requests`: by their reason, those that skipped the cache too, though they look nothing up. `by_namespace`:
    the same by namespace, as far as these are told apart; `buckets`: over time, oldest first, each up to the begin of
    the next one: all that is long ago, hours, minutes.
    """

    seconds: float
    num_lookups: int
    query_tokens: int
    hit_tokens: int
    hit_rate: float
    hit_tokens_by_rung: Mapping[str, int]
    missed_tokens: Mapping[str, int]
    requests: Mapping[str, int]
    by_namespace: Mapping[Namespace, MissSummary] = field(default_factory=dict)
    buckets: tuple[MissSummary, ...] = ()

    @property
    def as_sentence(self) -> str:
        """The answer in words, the largest share first."""
        if not self.query_tokens:
            return "Nothing was looked up."
        missed = sorted(self.missed_tokens.items(), key=lambda item: -item[1])
        shares = [f"{num_tokens / self.query_tokens:.1%} {_WORDS[reason]}" for reason, num_tokens in missed]
        found = f"Of {self.query_tokens:,} tokens in {self.num_lookups:,} look-ups {self.hit_rate:.1%} were found"
        return f"{'; '.join([found, *shares])}."


@dataclass(slots=True)
class _Bucket:
    """Counts of a stretch of time by namespace (None: those that are not told apart), by kind and reason."""

    begin_seconds: float
    counts: dict[Namespace | None, _Counts] = field(default_factory=dict)

    def of(self, namespace: Namespace | None) -> _Counts:
        """The counts in which a namespace is told."""
        if namespace not in self.counts and len(self.counts) >= MAX_NAMESPACES:
            namespace = None
        return self.counts.setdefault(namespace, Counter())

    def total(self, namespace: Namespace | None) -> _Counts:
        """The counts of one namespace, or of all (None)."""
        total: _Counts = Counter()
        for key, counts in self.counts.items():
            if namespace is None or key == namespace:
                total.update(counts)
        return total


class MissLog:
    """Counts what look-ups found. Each costs O(1), a summary O(buckets x namespaces). It never takes more than 85
    buckets of 65 namespaces, about 1 KB each."""

    def __init__(self, block_tokens: int, now_seconds: float) -> None:
        self._block_tokens = block_tokens
        self._before = _Bucket(now_seconds)
        self._hours: deque[_Bucket] = deque()
        self._minutes: deque[_Bucket] = deque()

    def record(self, namespace: Namespace, finding: Finding) -> None:
        """A look-up, or a request that skipped the cache."""
        counts = self._now(finding.at_seconds).of(namespace)
        counts["requests", finding.reason] += 1
        if finding.reason != "skipped":
            counts["query", ""] += finding.num_prompt_tokens
            counts["hit", ""] += finding.num_cached_tokens
            for reason, num_tokens in self._missed(finding).items():
                counts["missed", reason] += num_tokens

    def note_in_flight(self, namespace: Namespace, finding: Finding, num_tokens: int) -> None:
        """Of what a look-up found that was recorded, so many tokens were in flight."""
        finding.num_in_flight_tokens = num_tokens
        for bucket, _ in self._newest_first():
            if bucket.begin_seconds <= finding.at_seconds:
                bucket.of(namespace)["in_flight", ""] += num_tokens
                return

    def _missed(self, finding: Finding) -> dict[str, int]:
        """The tokens of a prompt that were not found, by reason."""
        num_missed = finding.num_prompt_tokens - finding.num_cached_tokens
        if finding.num_prompt_tokens <= self._block_tokens:
            return {"below_one_block": num_missed}
        num_always = (finding.num_prompt_tokens - 1) % self._block_tokens + 1
        missed, rest = Counter({"always_computed": num_always}), num_missed - num_always
        if finding.num_lost_tokens:
            missed[finding.reason] += finding.num_lost_tokens
            missed["never_seen"] += rest - finding.num_lost_tokens
        elif rest:
            num_shared = finding.num_shared_tokens - finding.num_cached_tokens
            missed["below_one_block"] += num_shared
            missed["never_seen" if finding.reason == "below_one_block" else finding.reason] += rest - num_shared
        return missed

    def _now(self, seconds: float) -> _Bucket:
        if not self._minutes or seconds >= self._minutes[-1].begin_seconds + MINUTE:
            self._minutes.append(_Bucket(seconds // MINUTE * MINUTE))
            if len(self._minutes) > NUM_MINUTES:
                self._move_up(self._minutes.popleft())
        return self._minutes[-1]

    def _move_up(self, minute: _Bucket) -> None:
        if not self._hours or minute.begin_seconds >= self._hours[-1].begin_seconds + HOUR:
            self._hours.append(_Bucket(minute.begin_seconds // HOUR * HOUR))
            if len(self._hours) > NUM_HOURS:
                _merge(self._hours.popleft(), self._before)
        _merge(minute, self._hours[-1])

    def _newest_first(self) -> Iterator[tuple[_Bucket, float]]:
        """All buckets, each with when it ends at the latest."""
        for bucket in reversed(self._minutes):
            yield bucket, bucket.begin_seconds + MINUTE
        for bucket in reversed(self._hours):
            yield bucket, bucket.begin_seconds + HOUR
        yield self._before, float("-inf")

    def summary(self, since_seconds: float | None, namespace: Namespace | None, now_seconds: float) -> MissSummary:
        """See `CacheManager.miss_summary`."""
        oldest = self._before.begin_seconds if since_seconds is None else now_seconds - since_seconds
        chosen = [bucket for bucket, end in self._newest_first() if since_seconds is None or end > oldest][::-1]
        by_namespace: dict[Namespace | None, _Counts] = {}
        for bucket in chosen:
            for name, counts in bucket.counts.items():
                if namespace in (None, name):
                    by_namespace.setdefault(name, Counter()).update(counts)
        seconds = now_seconds - max(oldest, self._before.begin_seconds)
        return replace(
            _summary(sum(by_namespace.values(), Counter()), seconds),
            by_namespace={name: _summary(by_namespace[name], seconds) for name in by_namespace if name is not None},
            buckets=tuple(
                _summary(bucket.total(namespace), now_seconds - bucket.begin_seconds)
                for bucket in chosen
                if bucket.total(namespace)
            ),
        )


def _summary(counts: _Counts, seconds: float) -> MissSummary:
    query, hit, in_flight = (counts[kind, ""] for kind in ("query", "hit", "in_flight"))
    missed, requests = (
        {reason: count for (what, reason), count in sorted(counts.items()) if what == kind and count}
        for kind in ("missed", "requests")
    )
    num_lookups = sum(requests.values()) - requests.get("skipped", 0)
    rungs = {"exact": hit - in_flight, **({"in_flight": in_flight} if in_flight else {})}
    return MissSummary(seconds, num_lookups, query, hit, hit / query if query else 0.0, rungs, missed, requests)


def _merge(bucket: _Bucket, into: _Bucket) -> None:
    for namespace, counts in bucket.counts.items():
        into.of(namespace).update(counts)

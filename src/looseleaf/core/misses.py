"""Where misses came from: tokens and requests by reason over time, in bounded memory, each look-up counted once."""

from __future__ import annotations

import operator
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from looseleaf.core.explain import Finding, Reason
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
_REQUESTS, _QUERY, _HIT, _IN_FLIGHT, _OWN, _BELOW, _NEVER, _ALWAYS = range(8)
_Counts: TypeAlias = "dict[Reason, list[int]]"
"""By reason: requests, and tokens: asked for, found, found in flight, missed for that reason, and for three others."""


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
    """Counts of a stretch of time by namespace; None: those that are not told apart."""

    begin_seconds: float
    counts: dict[Namespace | None, _Counts] = field(default_factory=dict)

    def row(self, namespace: Namespace | None, reason: Reason) -> list[int]:
        """The counts in which a request is told."""
        by_reason = self.counts.get(namespace)
        if by_reason is None:
            by_reason = self.counts.setdefault(namespace if len(self.counts) < MAX_NAMESPACES else None, {})
        row = by_reason.get(reason)
        return by_reason.setdefault(reason, [0] * 8) if row is None else row

    def merge(self, other: _Bucket) -> None:
        """Take in what another one has counted."""
        for namespace, counts in other.counts.items():
            for reason, row in counts.items():
                _add(self.row(namespace, reason), row)


class MissLog:
    """Counts what look-ups found. Each costs O(1), a summary O(buckets x namespaces). It never takes more than 85
    buckets of 65 namespaces, 1.5 KB each."""

    def __init__(self, block_tokens: int, now_seconds: float) -> None:
        self._block_tokens = block_tokens
        self._before = _Bucket(now_seconds)
        self._hours: deque[_Bucket] = deque()
        self._minutes: deque[_Bucket] = deque()

    def record(self, namespace: Namespace, finding: Finding) -> None:
        """A look-up, or a request that skipped the cache."""
        row = self._now(finding.at_seconds).row(namespace, finding.reason)
        row[_REQUESTS] += 1
        if finding.reason == "skipped":
            return
        num_prompt, num_cached = finding.num_prompt_tokens, finding.num_cached_tokens
        row[_QUERY] += num_prompt
        row[_HIT] += num_cached
        if num_prompt <= self._block_tokens:
            row[_BELOW] += num_prompt
            return
        num_always = (num_prompt - 1) % self._block_tokens + 1
        rest = num_prompt - num_cached - num_always  # whole blocks that might have hit
        row[_ALWAYS] += num_always
        if finding.num_lost_tokens:
            row[_OWN] += finding.num_lost_tokens
            row[_NEVER] += rest - finding.num_lost_tokens
        elif rest:
            num_below = finding.num_shared_tokens - num_cached
            row[_BELOW] += num_below
            row[_NEVER if finding.reason == "below_one_block" else _OWN] += rest - num_below

    def note_in_flight(self, namespace: Namespace, finding: Finding, num_tokens: int) -> None:
        """Of what a look-up found that was recorded, so many tokens were in flight."""
        finding.num_in_flight_tokens = num_tokens
        for bucket, _ in self._newest_first():
            if bucket.begin_seconds <= finding.at_seconds:
                bucket.row(namespace, finding.reason)[_IN_FLIGHT] += num_tokens
                return

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
                self._before.merge(self._hours.popleft())
        self._hours[-1].merge(minute)

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
        seconds = now_seconds - max(oldest, self._before.begin_seconds)
        total = _Bucket(oldest)
        buckets: list[MissSummary] = []
        for bucket in chosen:
            names = [name for name in bucket.counts if namespace in (None, name)]
            if names:
                buckets.append(_summary([bucket.counts[name] for name in names], now_seconds - bucket.begin_seconds))
            for name in names:
                for reason, row in bucket.counts[name].items():
                    _add(total.counts.setdefault(name, {}).setdefault(reason, [0] * 8), row)
        return replace(
            _summary(total.counts.values(), seconds),
            by_namespace={name: _summary([rows], seconds) for name, rows in total.counts.items() if name is not None},
            buckets=tuple(buckets),
        )


def _summary(parts: Iterable[_Counts], seconds: float) -> MissSummary:
    total, missed, requests = [0] * 8, Counter[str](), Counter[str]()
    for counts in parts:
        for reason, row in counts.items():
            _add(total, row)
            requests[reason] += row[_REQUESTS]
            missed[reason] += row[_OWN]
    missed.update(below_one_block=total[_BELOW], never_seen=total[_NEVER], always_computed=total[_ALWAYS])
    query, hit = total[_QUERY], total[_HIT]
    rungs = {"exact": hit - total[_IN_FLIGHT], **({"in_flight": total[_IN_FLIGHT]} if total[_IN_FLIGHT] else {})}
    return MissSummary(
        seconds=seconds,
        num_lookups=total[_REQUESTS] - requests["skipped"],
        query_tokens=query,
        hit_tokens=hit,
        hit_rate=hit / query if query else 0.0,
        hit_tokens_by_rung=rungs,
        missed_tokens={reason: count for reason, count in sorted(missed.items()) if count},
        requests={reason: count for reason, count in sorted(requests.items()) if count},
    )


def _add(row: list[int], other: list[int]) -> None:
    row[:] = map(operator.add, row, other)

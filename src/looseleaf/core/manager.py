"""`CacheManager`: the library's one door to pages, leases, reuse, pins, eviction and explanations."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy.typing as npt

from looseleaf.core.config import CacheConfig, CachePlan
from looseleaf.core.events import EventListener
from looseleaf.core.eviction import POLICIES
from looseleaf.core.explain import Explanation
from looseleaf.core.history import History
from looseleaf.core.integrity import check_integrity
from looseleaf.core.lease import Lease
from looseleaf.core.leasing import LeaseDesk
from looseleaf.core.pins import HARD, SOFT, Pin, PinRecord
from looseleaf.core.stats import CacheStats, ClearResult
from looseleaf.core.store import BlockStore
from looseleaf.core.tokens import TOKEN_BYTES, Tokens, pack_tokens
from looseleaf.errors import RequestError, UnknownPin, UnknownRequest
from looseleaf.ids import Int64Array, Namespace, RequestId


@dataclass(frozen=True)
class PrefixMatch:
    """How much of a prompt would hit now. `num_tokens`: whole blocks, at most num_prompt_tokens - 1. `by_rung`: the
    same tokens by the rung of reuse that gives them."""

    num_tokens: int
    num_prompt_tokens: int
    by_rung: Mapping[str, int]


class CacheManager:
    """Paged, pinned, reusable KV memory of one model, as bookkeeping: it gives out block ids and never touches tensors.

    Calls are atomic under one lock, so several threads may call; a lease belongs to one thread at a time.

    Args:
        config: sizes, policy, quota.
        clock: gives seconds; used for expiry and for ages in explanations, never by policies.
        on_event: is called, under the lock, with every `CacheEvent`; it must be quick, not raise and not call back.
    """

    def __init__(
        self, config: CacheConfig, clock: Callable[[], float] = time.monotonic, on_event: EventListener | None = None
    ) -> None:
        self.config = config
        self.plan = CachePlan.of(config)
        self._clock = clock
        self._lock = threading.RLock()
        self._store = BlockStore(self.plan, POLICIES[config.policy](), clock, on_event)
        self._history = History(config.num_known_requests, max_tokens=4 * self.plan.num_tokens)
        self._desk = LeaseDesk(self._store, self._history, clock, self._lock)
        self._num_made_pins = 0

    # --- sequences ------------------------------------------------------------------------------------------------

    def match(self, prompt: Tokens, namespace: Namespace = "") -> PrefixMatch:
        """How much of `prompt` is cached; read-only, not counted.

        Raises:
            InvalidTokens: empty, negative, too large or not integers.
        """
        data = pack_tokens(prompt)
        num_prompt = len(data) // TOKEN_BYTES
        with self._lock:
            root = self._store.tree.roots.get(namespace)
            num_tokens = 0
            if root is not None:
                max_blocks = (num_prompt - 1) // self.plan.block_tokens
                num_tokens = self._store.tree.find(root, data, max_blocks).num_blocks * self.plan.block_tokens
        return PrefixMatch(num_tokens, num_prompt, {"exact": num_tokens})

    def lease(
        self,
        prompt: Tokens,
        request_id: RequestId | None = None,
        namespace: Namespace = "",
        *,
        count_lookup: bool = True,
        reuse: bool = True,
    ) -> Lease:
        """Match `prompt` and hold what is found. Allocates nothing and evicts nothing.

        Args:
            prompt: token ids, any sequence of ints or an int32 array.
            request_id: the caller's name, unique among live leases; one is made if None.
            namespace: nothing is shared across namespaces.
            count_lookup: False keeps the look-up out of the statistics (a preempted request that comes back).
            reuse: False neither matches nor stores anything; the explanation says "skipped".

        Raises:
            InvalidTokens: empty, negative, too large or not integers.
            DuplicateRequest: a live lease has this id.
        """
        return self._desk.open(prompt, request_id, namespace, count_lookup, reuse)

    def append_many(self, leases: Sequence[Lease], token_ids: npt.ArrayLike) -> Int64Array:
        """Append one token to each lease and reserve its slot: int64 [num_leases], `block_id * block_tokens + offset`.

        All or nothing. A decode step's bookkeeping in a few array operations.

        Raises:
            OutOfBlocks: not every lease can have its slot; nothing has changed.
            LeaseClosed, InvalidTokens, RequestError: a released lease, a bad token, a lease named twice; nothing has
            changed.
        """
        return self._desk.append_many(leases, token_ids)

    def commit_many(self, leases: Sequence[Lease]) -> None:
        """Declare all known tokens of each lease written. All or nothing.

        Raises:
            CommitBeyondReserved: a lease knows more tokens than it has room for.
            LeaseClosed, RequestError: a released lease, a lease named twice.
        """
        self._desk.commit_many(leases)

    # --- pins -----------------------------------------------------------------------------------------------------

    def pin(
        self,
        tokens: Tokens | None = None,
        *,
        request_id: RequestId | None = None,
        namespace: Namespace = "",
        cache_type: str = "kv",
        owner: str = "",
        level: str = HARD,
        priority: int = 0,
        ttl_seconds: float | None = None,
        refresh: bool = False,
        partial: bool = False,
    ) -> Pin:
        """Promise that a prefix is not evicted: `tokens` of a namespace, or what a live or finished request has
        committed.

        It covers whole blocks. Tokens that are not stored yet are accepted, take no quota until they come, and are
        then held as far as the quota goes.

        Args:
            cache_type: "kv" (all layer groups) or the name of one group.
            level: "hard" is never evicted before it expires; "soft" after everything unpinned.
            priority: of soft pins; higher stays longer.
            ttl_seconds: time to live; None for ever. `refresh` starts it anew whenever a request reuses the pinned
            prefix. partial: grant a hard pin what fits under the quota instead of refusing it.

        Raises:
            PinQuotaExceeded: a hard pin's stored part does not fit; nothing has changed.
            UnknownRequest: no live or remembered request has this id.
            InvalidTokens, RequestError: bad tokens or a bad argument.
        """
        self._check_pin_arguments(tokens, request_id, cache_type, level, priority, ttl_seconds)
        data = None if tokens is None else pack_tokens(tokens)
        with self._lock:
            self._store.expire_pins()
            if data is None:
                assert request_id is not None  # checked above
                namespace, data, num_tokens = self._committed_by(request_id)
            else:
                num_tokens = len(data) // TOKEN_BYTES
            num_blocks = num_tokens // self.plan.block_tokens
            now = self._clock()
            record = PinRecord(
                id=f"pin-{self._num_made_pins + 1}",
                data=data[: num_blocks * self._store.tree.block_bytes],
                num_blocks=num_blocks,
                num_tokens=num_tokens,
                node=self._store.tree.root(namespace),
                owner=owner,
                level=level,
                priority=priority,
                cache_type=cache_type,
                request_id=request_id,
                created_at=now,
                ttl_seconds=ttl_seconds,
                refresh=refresh,
                expires_at=None if ttl_seconds is None else now + ttl_seconds,
            )
            self._store.pins.add(record, partial=partial)
            self._num_made_pins += 1
            return self._store.pins.snapshot(record)

    def unpin(self, pin_id: str | None = None, *, request_id: RequestId | None = None, cache_type: str = "kv") -> Pin:
        """Undo a pin by its id, or the latest pin made with this `request_id` and `cache_type`. Its last snapshot.

        Raises:
            UnknownPin: there is no such live pin; nothing has changed.
            RequestError: neither or both of `pin_id` and `request_id` are given.
        """
        if (pin_id is None) == (request_id is None):
            raise RequestError("unpin takes a pin id or a request_id, one of them")
        with self._lock:
            self._store.expire_pins()
            record = self._find_pin(pin_id, request_id, cache_type)
            snapshot = self._store.pins.snapshot(record)
            self._store.pins.remove(record)
            return snapshot

    def pins(self) -> list[Pin]:
        """Snapshots of all live pins, oldest first."""
        with self._lock:
            self._store.expire_pins()
            return [self._store.pins.snapshot(record) for record in self._store.pins.records.values()]

    def _check_pin_arguments(
        self,
        tokens: Tokens | None,
        request_id: RequestId | None,
        cache_type: str,
        level: str,
        priority: int,
        ttl_seconds: float | None,
    ) -> None:
        if (tokens is None) == (request_id is None):
            raise RequestError("pin takes tokens or a request_id, one of them")
        if level not in (HARD, SOFT):
            raise RequestError(f'level is {level!r}; it must be "hard" or "soft"')
        groups = [group.name for group in self.config.groups]
        if cache_type != "kv" and cache_type not in groups:
            raise RequestError(f'cache_type is {cache_type!r}; it must be "kv" or a layer group: {", ".join(groups)}')
        if not isinstance(priority, int):
            raise RequestError(f"priority is {priority!r}; it must be an integer")
        is_positive = isinstance(ttl_seconds, (int, float)) and math.isfinite(ttl_seconds) and ttl_seconds > 0
        if ttl_seconds is not None and not is_positive:
            raise RequestError(f"ttl_seconds is {ttl_seconds!r}; it must be positive", "leave it out for no expiry")

    def _committed_by(self, request_id: RequestId) -> tuple[Namespace, bytes, int]:
        lease = self._desk.live.get(request_id)
        if lease is not None:
            data = self._desk.committed_blocks(lease)
            return lease.namespace, data, lease.num_committed_tokens
        finished = self._history.get(request_id)
        if finished is None:
            raise UnknownRequest(request_id, f"the last {self.config.num_known_requests:,} finished requests are known")
        if finished.data is None:
            raise UnknownRequest(request_id, "it finished too long ago: its tokens are not kept any more")
        return finished.namespace, finished.data, finished.num_committed_tokens

    def _find_pin(self, pin_id: str | None, request_id: RequestId | None, cache_type: str) -> PinRecord:
        records = self._store.pins.records
        if pin_id is not None:
            if pin_id not in records:
                raise UnknownPin(repr(pin_id))
            return records[pin_id]
        for record in reversed(records.values()):
            if record.request_id == request_id and record.cache_type == cache_type:
                return record
        raise UnknownPin(f"of request {request_id!r} and cache_type {cache_type!r}")

    # --- upkeep and answers ---------------------------------------------------------------------------------------

    def maintain(self) -> None:
        """Between steps: expire pins, and evict ahead of need while fewer than `reserve_pages` pages are free.

        Cheap when there is nothing to do. Evicts at most until twice the reserve is free in blocks, wherever they lie.
        """
        with self._lock:
            self._store.expire_pins()
            reserve = self.plan.reserve_blocks
            pool = self._store.pool
            while pool.num_free_pages < self.config.reserve_pages and pool.num_free_blocks < 2 * reserve:
                if not self._store.evict(self.plan.blocks_per_page, spare_soft=True):
                    return

    def stats(self) -> CacheStats:
        """The figures of this moment."""
        with self._lock:
            self._store.expire_pins()
            store, pins, counters, rows = self._store, self._store.pins, self._store.counters, self._desk.rows
            pool, ledger = store.pool, store.ledger
            num_places = ledger.num_active_blocks * self.plan.block_tokens
            return CacheStats(
                num_pages=self.plan.num_pages,
                free_pages=pool.num_free_pages,
                partial_pages=pool.num_partial_pages,
                full_pages=self.plan.num_pages - pool.num_free_pages - pool.num_partial_pages,
                page_tokens=self.config.page_tokens,
                block_tokens=self.plan.block_tokens,
                num_blocks=self.plan.num_blocks,
                free_blocks=ledger.num_free_blocks,
                active_blocks=ledger.num_active_blocks,
                cached_blocks=ledger.num_cached_blocks,
                evictable_blocks=store.num_evictable_blocks,
                pinned_blocks=pins.num_pinned_blocks,
                hard_pinned_blocks=pins.num_hard_blocks,
                quota_blocks=self.plan.quota_blocks,
                waste=rows.num_unfilled_places / num_places if num_places else 0.0,
                uncommitted_tokens=rows.num_uncommitted_tokens,
                num_lookups=counters.num_lookups,
                query_tokens=counters.query_tokens,
                hit_tokens=counters.hit_tokens,
                hit_rate=counters.hit_tokens / counters.query_tokens if counters.query_tokens else 0.0,
                below_block_tokens=counters.below_block_tokens,
                stored_tokens=counters.stored_tokens,
                evicted_tokens=counters.evicted_tokens,
                cleared_tokens=counters.cleared_tokens,
                num_leases=len(self._desk.live),
                num_pins=len(pins.records),
                num_expired_pins=pins.num_expired_pins,
                num_refused_pins=pins.num_refused_pins,
                num_namespaces=len(store.tree.roots),
                num_nodes=len(store.tree.nodes),
            )

    def explain(self, request_id: RequestId) -> Explanation:
        """Why a live or finished request hit or missed, as of its look-up.

        Raises:
            UnknownRequest: no live or remembered request has this id.
        """
        with self._lock:
            lease = self._desk.live.get(request_id)
            if lease is not None:
                return lease.explanation
            finished = self._history.get(request_id)
            if finished is None:
                raise UnknownRequest(
                    request_id, f"the last {self.config.num_known_requests:,} finished requests are known"
                )
            return finished.explanation

    def clear(self, namespace: Namespace | None = None, *, include_pins: bool = False) -> ClearResult:
        """Forget what is cached and neither held nor pinned, in one namespace or in all (None).

        What running requests hold is detached: never matched again, freed when they end; so nothing old survives a
        change of weights. Pins are spared unless `include_pins`, which undoes them first.
        """
        with self._lock:
            self._store.expire_pins()
            pins = self._store.pins
            if include_pins:
                for record in list(pins.records.values()):
                    if namespace is None or record.node.namespace == namespace:
                        pins.remove(record)
            result = self._store.clear(namespace)
            self._desk.detach(namespace)
            return result

    def check_integrity(self) -> None:
        """Check every invariant of `core/README.md`. Costs O(blocks + nodes).

        Raises:
            IntegrityError: the first one that does not hold ("I3: …"); a bug in looseleaf.
        """
        with self._lock:
            check_integrity(self._store, self._desk)

"""`CacheManager`: the library's one door to pages, leases, reuse, pins, eviction and explanations."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy.typing as npt

from looseleaf.core.auto_pin_config import AutoPinConfig
from looseleaf.core.auto_pins import NOTHING, AutoPinner, AutoPinReport
from looseleaf.core.config import CacheConfig, CachePlan, check_share
from looseleaf.core.events import EventListener
from looseleaf.core.eviction import POLICIES
from looseleaf.core.explain import Explanation
from looseleaf.core.gains import ReleaseGain
from looseleaf.core.history import History
from looseleaf.core.inspection import StoredPart, stored_parts
from looseleaf.core.integrity import check_integrity
from looseleaf.core.lease import Lease
from looseleaf.core.leasing import LeaseDesk, SettledLock
from looseleaf.core.many_leases import ManyLeases
from looseleaf.core.misses import MissSummary
from looseleaf.core.moving import CompactionResult, ResizeResult, compact, resize
from looseleaf.core.namespaces import NamespaceLayer, Tenancy
from looseleaf.core.pin_desk import PinDesk, PinWish
from looseleaf.core.pin_record import HARD, PastPin, Pin
from looseleaf.core.reports import Fragmentation, PrefixMatch, Room, collect_stats, collect_usage, measure_fragmentation
from looseleaf.core.sessions import Session, SessionEnd
from looseleaf.core.stats import CacheStats, ClearResult
from looseleaf.core.store import BlockStore
from looseleaf.core.tokens import TOKEN_BYTES, Tokens, pack_tokens
from looseleaf.core.usage import NamespaceUsage
from looseleaf.errors import LifecycleError, RequestError
from looseleaf.ids import Int64Array, Namespace, RequestId


class CacheManager:
    """Paged, pinned, reusable KV memory of one model, as bookkeeping: it gives out block ids and never touches tensors.

    Calls are atomic under one lock, so several threads may call; a lease belongs to one thread at a time.

    Args:
        config: sizes, policy, quota.
        clock: gives seconds; used for expiry and for ages in explanations. Policies do not read it, they are told.
        on_event: is called, under the lock, with every `CacheEvent`; it must be quick, not raise and not call back.
    """

    def __init__(
        self, config: CacheConfig, clock: Callable[[], float] = time.monotonic, on_event: EventListener | None = None
    ) -> None:
        self.config = self._first_config = config
        self._mover: object | None = None
        self.plan = CachePlan.of(config)
        self._clock = clock
        self._lock = threading.RLock()
        self._store = BlockStore(self.plan, POLICIES[config.policy], clock, on_event)
        max_tokens = 4 * self.plan.num_blocks * self.plan.block_tokens
        self._history = History(config.num_known_requests, max_tokens)
        self._desk = LeaseDesk(self._store, self._history, clock, self._lock)
        self._many = ManyLeases(self._desk, self._store, self._lock)
        self._settled = SettledLock(self._lock, self._desk)
        self._pins = PinDesk(self._store, self._desk, self._history, clock)
        if config.auto_pin is not None:
            self.set_auto_pin(config.auto_pin)

    # --- sequences ------------------------------------------------------------------------------------------------

    def match(self, prompt: Tokens, namespace: Namespace = "", *, layers: Sequence[NamespaceLayer] = ()) -> PrefixMatch:
        """How much of `prompt` is cached; read-only, not counted.

        Raises:
            InvalidTokens: empty, negative, too large or not integers.
            RequestError: layers that do not fit together, or the prompt.
        """
        data = pack_tokens(prompt)
        num_prompt = len(data) // TOKEN_BYTES
        tenancy = Tenancy.of(namespace, layers, num_prompt, self.plan.block_tokens)
        with self._settled:
            root = self._store.tree.roots.get(tenancy.root)
            num_rows = 0
            if root is not None:
                num_usable = (num_prompt - 1) // self.plan.block_tokens
                found = self._store.find(root, data, num_usable, tenancy.borders)
                num_rows = found.match.num_blocks
            num_tokens = num_rows * self.plan.block_tokens
            return PrefixMatch(num_tokens, num_prompt, {"exact": num_tokens}, self.plan.num_held_blocks(num_rows))

    def lease(
        self,
        prompt: Tokens,
        request_id: RequestId | None = None,
        namespace: Namespace = "",
        *,
        layers: Sequence[NamespaceLayer] = (),
        count_lookup: bool = True,
        reuse: bool = True,
        expected_tokens: int | None = None,
        session: str | None = None,
    ) -> Lease:
        """Match `prompt` and hold what is found. Allocates nothing and evicts nothing.

        Args:
            prompt: token ids, any sequence of ints or an int32 array.
            request_id: the caller's name, unique among live leases; one is made if None.
            namespace: nothing is shared across namespaces.
            layers: beginnings of the prompt that lie in other namespaces, shortest first: they are found there, and
            stored there, by whoever declares them. A request that comes back is given the same.
            count_lookup: False keeps the look-up out of the statistics (a preempted request that comes back).
            reuse: False neither matches nor stores anything; the explanation says "skipped".
            expected_tokens: length that the sequence is expected to reach; it is given blocks with room to grow there.
            session: the conversation, or task, in this namespace of which this is a turn. What only this session used
                is evicted first once a later turn has replaced it, or `end_session` is called (docs/SESSIONS.md).

        Raises:
            InvalidTokens: empty, negative, too large or not integers.
            DuplicateRequest: a live lease has this id.
            RequestError: layers that do not fit together, or the prompt.
        """
        return self._desk.open(prompt, request_id, namespace, layers, count_lookup, reuse, expected_tokens, session)

    def append_many(self, leases: Sequence[Lease], token_ids: npt.ArrayLike) -> Int64Array:
        """Append one token to each lease and reserve its slot: int64 [num_leases], `block_id * block_tokens + offset`.

        All or nothing. A decode step's bookkeeping in a few array operations.

        Raises:
            OutOfBlocks: not every lease can have its slot; nothing has changed.
            LeaseClosed, InvalidTokens, RequestError: a released lease, a bad token, a lease named twice; nothing has
            changed.
        """
        return self._many.append_many(leases, token_ids)

    def slots_many(self, leases: Sequence[Lease]) -> Int64Array:
        """The slot of each lease's newest known token, which has room, in every lane: int64 [num_lanes, num_leases].

        Raises:
            LeaseClosed, RequestError: a released lease, a lease named twice.
        """
        return self._many.slots_many(leases)

    def release_gains(self, leases: Sequence[Lease]) -> list[ReleaseGain]:
        """What releasing each lease alone would make available, and what would be lost by it. Read-only.

        Raises:
            LeaseClosed, RequestError: a released lease, a lease named twice.
        """
        return self._many.release_gains(leases)

    def commit_many(self, leases: Sequence[Lease]) -> None:
        """Declare all known tokens of each lease written. All or nothing.

        Raises:
            CommitBeyondReserved: a lease knows more tokens than it has room for.
            LeaseClosed, RequestError: a released lease, a lease named twice.
        """
        self._many.commit_many(leases)

    # --- sessions -------------------------------------------------------------------------------------------------

    def end_session(self, session: str, namespace: Namespace = "") -> SessionEnd:
        """A conversation is over: what only it used is evicted before anything else from now on. What is pinned or held
        is not; what running requests hold follows when they end. O(its stored runs).

        Raises:
            UnknownSession: none of the sessions of this namespace that are remembered, at most 10,000 in all.
        """
        with self._settled:
            self._store.expire_pins()
            return self._store.sessions.end_session(session, namespace)

    def sessions(self) -> list[Session]:
        """The sessions that are remembered, longest unused first. O(stored runs that are one session's alone)."""
        with self._settled:
            return self._store.sessions.sessions(self._clock())

    # --- pins -----------------------------------------------------------------------------------------------------

    def pin(
        self,
        tokens: Tokens | None = None,
        *,
        request_id: RequestId | None = None,
        namespace: Namespace = "",
        layers: Sequence[NamespaceLayer] = (),
        cache_type: str = "kv",
        owner: str = "",
        labels: Mapping[str, str] | None = None,
        level: str = HARD,
        priority: int = 0,
        ttl_seconds: float | None = None,
        max_ttl_seconds: float | None = None,
        refresh: bool = False,
        partial: bool = False,
        part: str = "all",
        last_token: int | None = None,
    ) -> Pin:
        """Promise that a prefix is not evicted: `tokens` of a namespace (and of `layers`, as in `lease`), or what a
        live or finished request has committed.

        It covers whole blocks. Tokens that are not stored yet are accepted, take no quota until they come, and are
        then held as far as the quota goes.

        Args:
            cache_type: "kv" (all layer groups) or the name of one group.
            level: "hard" is never evicted before it expires; "soft" after everything unpinned.
            priority: of soft pins; higher stays longer.
            ttl_seconds: time to live; None for ever. `refresh` starts it anew whenever a request reuses the pinned
            prefix, but never beyond `max_ttl_seconds` after the pin was made. partial: grant a hard pin what fits under
            the quota instead of refusing it.
            part: of a request: "all" that it has committed, or its "prompt" without the answer.
            last_token: pin the first so many tokens only. (A range that begins later needs all before it to be of use.)
            owner, labels: whatever helps to find it again; shown, and `unpin_all` goes by owner.

        Raises:
            PinQuotaExceeded: a hard pin's stored part does not fit; nothing has changed.
            UnknownRequest: no live or remembered request has this id.
            InvalidTokens, RequestError: bad tokens or a bad argument.
        """
        wish = PinWish(
            cache_type, owner, labels, level, priority, ttl_seconds, max_ttl_seconds, refresh, partial, part, last_token
        )
        with self._settled:
            return self._pins.pin(tokens, request_id, namespace, layers, wish)

    def unpin(self, pin_id: str | None = None, *, request_id: RequestId | None = None, cache_type: str = "kv") -> Pin:
        """Undo a pin by its id, or the latest pin made with this `request_id` and `cache_type`. Its last snapshot.

        Raises:
            UnknownPin: there is no such live pin; nothing has changed.
            RequestError: neither or both of `pin_id` and `request_id` are given.
        """
        with self._settled:
            return self._pins.unpin(pin_id, request_id, cache_type)

    def unpin_all(self, *, owner: str, namespace: Namespace | None = None) -> list[Pin]:
        """Undo all pins of an owner, in one namespace or in all (None). Their last snapshots, oldest first."""
        with self._settled:
            return self._pins.unpin_all(owner, namespace)

    def set_pin_quota(self, share: float, namespace: Namespace | None = None) -> None:
        """Another share of all blocks that pins may hold: in all (None), or those of one namespace. Soft pins give way.

        Raises:
            ConfigError: not a share from 0 to 1.
            PinQuotaExceeded: hard pins hold more than that; nothing has changed.
        """
        check_share("share", share)
        with self._settled:
            self._store.expire_pins()
            if namespace is None:
                config = replace(self.config, pin_quota=share)
            else:
                quotas = {**self.config.namespace_pin_quotas, namespace: share}
                config = replace(self.config, namespace_pin_quotas=quotas)
            self._pins.set_quotas(CachePlan.of(config), namespace)
            self.config, self.plan = config, self._store.plan

    def set_auto_pin(self, config: AutoPinConfig | None) -> None:
        """What the cache may pin by itself from now on; None: nothing. Pins that it has made end if it is off or a dry
        run now. What was learned is kept as long as it is on.

        Raises:
            ConfigError: no `AutoPinConfig`.
        """
        with self._settled:
            self.config, pinner = replace(self.config, auto_pin=config), self._store.auto_pins
            if config is None:
                if pinner is not None:
                    pinner.put_on_paper()
                self._store.auto_pins = None
            elif pinner is None:
                self._store.auto_pins = AutoPinner(
                    config,
                    self.plan.block_tokens,
                    self.plan.num_lanes,
                    self._store.pressure,
                    self._store.pins,
                    self._pins.pin_automatically,
                )
            else:
                if config.dry_run:
                    pinner.put_on_paper()
                pinner.config = config

    def auto_pin_report(self) -> AutoPinReport:
        """What automatic pinning does, would do (dry run), and has done. O(prefixes that it knows), at most 16,384."""
        with self._settled:
            pinner = self._store.auto_pins
            return NOTHING if pinner is None else pinner.report(self._clock())

    def pins(self) -> list[Pin]:
        """Snapshots of all live pins, oldest first."""
        with self._settled:
            return self._pins.pins()

    def find_pin(self, pin_id: str) -> Pin | None:
        """A snapshot of one live pin, None if there is none of that id. O(1)."""
        with self._settled:
            return self._pins.find(pin_id)

    def pinned_blocks_of(self, namespace: Namespace) -> int:
        """Blocks that the pins of one namespace hold, each counted once."""
        with self._settled:
            self._store.expire_pins()
            return self._store.pins.marks.taken_blocks(namespace)

    def past_pins(self) -> list[PastPin]:
        """The last pins that ended or were refused, oldest first: at most 256."""
        with self._settled:
            return self._pins.past_pins()

    # --- upkeep and answers ---------------------------------------------------------------------------------------

    def maintain(self) -> None:
        """Between steps: expire pins, evict what is over a quota and nobody holds any more, and evict ahead of need
        while fewer than `reserve_pages` pages are free.

        Cheap when there is nothing to do. Evicts at most until twice the reserve is free in blocks, wherever they lie.
        """
        with self._lock:
            self._store.expire_pins()
            self._store.quotas.keep()
            reserve = self.plan.reserve_blocks
            pool = self._store.pool
            while pool.num_free_pages < self.config.reserve_pages and pool.num_free_blocks < 2 * reserve:
                if not self._store.evict(self.plan.blocks_per_page, spare_soft=True):
                    return

    def stats(self) -> CacheStats:
        """The figures of this moment."""
        with self._settled:
            self._store.expire_pins()
            return collect_stats(self._store, self._desk, self.config.page_tokens)

    def namespace_usage(self) -> list[NamespaceUsage]:
        """Who stores, holds, pins, hits and loses how much, by tenant (`account_of`), largest user first.

        Tenants and namespaces without a block are remembered as long as they are not more than 1,024; a last entry with
        the namespace None sums up all others. O(namespaces + nodes that leases hold).
        """
        with self._settled:
            self._store.expire_pins()
            return collect_usage(self._store, self._desk)

    def set_namespace_quota(self, share: float, namespace: Namespace) -> None:
        """Another share of all blocks that a namespace, or a tenant, may store. In force at once: what it has beyond
        that and neither leases nor pins hold is evicted, the rest when they let go. O(nodes) for its first quota.

        Raises:
            ConfigError: not a share from 0 to 1, or a namespace that counts to a tenant; nothing has changed.
        """
        with self._settled:
            quotas = {**self.config.namespace_quotas, namespace: share}
            config = replace(self.config, namespace_quotas=quotas)
            self._store.set_plan(CachePlan.of(config))
            for lease in self._desk.live.values():
                self._desk.count_private(lease)
            self.config, self.plan = config, self._store.plan

    def fragmentation(self) -> Fragmentation:
        """How the memory is cut up at this moment. O(blocks): for dashboards, not for every step."""
        with self._settled:
            return measure_fragmentation(self._store, self._desk)

    def room(self) -> Room:
        """What a reservation can have now. O(1)."""
        with self._lock:
            self._store.expire_pins()
            return Room(self._store.ledger.num_free_blocks, self._store.ledger.num_evictable_blocks)

    def claim_moves(self, mover: object) -> None:
        """From now on only `mover` may resize or compact: whoever owns the tensors, since it must do the copies."""
        self._mover = mover

    def _check_mover(self, by: object | None) -> None:
        if self._mover is not None and by is not self._mover:
            raise LifecycleError("an engine runs on this cache and must do the copies", "use the engine's resize")

    def resize(self, num_pages: int, *, by: object | None = None) -> ResizeResult:
        """Give the pool another number of pages: grow, or shrink by evicting and by moving what is held.

        Tables of live leases may change: read them again. The tensors must do `copies` of the answer before anything
        else. `reserve_pages` keeps its share of the pool. `by`: who asks, see `claim_moves`. O(blocks + nodes).

        Raises:
            ConfigError: not a number of pages >= 1.
            LifecycleError: an engine runs on this cache, and it is not the one that asks.
            ResizeRefused: running requests or hard pins need more; nothing has changed.
        """
        self._check_mover(by)
        with self._settled:
            replace(self.config, num_pages=num_pages, reserve_pages=0)  # refuses what is no number of pages
            config = replace(self.config, num_pages=num_pages, reserve_pages=self._reserve_pages(num_pages))
            self._store.expire_pins()
            result = resize(self._store, self._desk, CachePlan.of(config))
            self.config, self.plan = config, self._store.plan
            return result

    def _reserve_pages(self, num_pages: int) -> int:
        first = self._first_config
        if first.reserve_pages == 0:
            return 0
        return min(num_pages - 1, max(1, round(first.reserve_pages * num_pages / first.num_pages)))

    def compact(self, num_pages: int, *, by: object | None = None) -> CompactionResult:
        """Make up to `num_pages` more whole pages free by moving cached blocks together, never those that are held.

        The tensors must do `copies` of the answer before anything else. O(blocks + nodes). Nobody calls this by itself:
        it pays only where whole pages are worth more than the copies (`bench/paging.py --parts compaction`).

        Raises:
            RequestError: not a number of pages >= 0.
            LifecycleError: an engine runs on this cache, and it is not the one that asks (`by`).
        """
        if isinstance(num_pages, bool) or not isinstance(num_pages, int) or num_pages < 0:
            raise RequestError(f"compact({num_pages!r}): a number of pages is an integer >= 0")
        self._check_mover(by)
        with self._settled:
            return compact(self._store, self._desk, num_pages)

    def explain(self, request_id: RequestId) -> Explanation:
        """Why a live or finished request hit or missed, as of its look-up.

        Raises:
            UnknownRequest: no live or remembered request has this id.
        """
        with self._settled:
            lease = self._desk.live.get(request_id)
            if lease is not None:
                return lease.explanation
            return self._history.require(request_id).finding.explain(self.plan.block_tokens)

    def inspect(
        self,
        prompt: Tokens | None = None,
        namespace: Namespace = "",
        *,
        request_id: RequestId | None = None,
        layers: Sequence[NamespaceLayer] = (),
    ) -> list[StoredPart]:
        """What is stored of a prompt, or of what a live or finished request has committed, run by run, and what the
        eviction policy thinks of each. Read-only.

        Raises:
            InvalidTokens, UnknownRequest: as `lease`, as `pin`.
            RequestError: neither or both of prompt and request_id; layers that do not fit together, or the prompt.
        """
        if (prompt is None) == (request_id is None):
            raise RequestError("inspect needs a prompt or a request_id, one of both")
        with self._settled:
            if request_id is not None:
                tenancy, data, _ = self._pins.committed_by(request_id, "all")
            elif prompt is not None:
                data = pack_tokens(prompt)
                tenancy = Tenancy.of(namespace, layers, len(data) // TOKEN_BYTES, self.plan.block_tokens)
            return stored_parts(self._store, data, tenancy, self._clock())

    def miss_summary(self, since_seconds: float | None = None, namespace: Namespace | None = None) -> MissSummary:
        """Where misses came from: tokens and requests by reason, over all look-ups or those of the last so many seconds
        (whole minutes, hours when it is long), of all namespaces or one. Without arguments its sums are `stats()`'s."""
        with self._settled:
            return self._store.misses.summary(since_seconds, namespace, self._clock())

    def clear(self, namespace: Namespace | None = None, *, include_pins: bool = False) -> ClearResult:
        """Forget what is cached and neither held nor pinned, in one namespace or in all (None).

        What other namespaces store behind a layer of it goes with it. What running requests hold is detached: never
        matched again, freed when they end; so nothing old survives a change of weights. Pins are spared unless
        `include_pins`, which undoes them first.
        """
        with self._settled:
            self._store.expire_pins()
            pins = self._store.pins
            if include_pins:
                for record in list(pins.records.values()):
                    if namespace is None or namespace in (record.namespace, *record.hold.tenancy.namespaces):
                        pins.remove(record, "unpinned")
            result = self._store.clear(namespace)
            self._desk.detach(namespace)
            return result

    def check_integrity(self) -> None:
        """Check every invariant of `core/README.md`. Costs O(blocks + nodes).

        Raises:
            IntegrityError: the first one that does not hold ("I3: …"); a bug in looseleaf.
        """
        with self._settled:
            check_integrity(self._store, self._desk)

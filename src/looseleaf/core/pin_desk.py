"""What callers ask of pins: arguments checked, requests looked up, records made and found."""

from __future__ import annotations

import math
from collections.abc import Callable

from looseleaf.core.history import History
from looseleaf.core.leasing import LeaseDesk
from looseleaf.core.pins import HARD, SOFT, Pin, PinRecord
from looseleaf.core.store import BlockStore
from looseleaf.core.tokens import TOKEN_BYTES, Tokens, pack_tokens
from looseleaf.errors import RequestError, UnknownPin, UnknownRequest
from looseleaf.ids import Namespace, RequestId


class PinDesk:
    """Pins of one manager. Used under the manager's lock."""

    def __init__(self, store: BlockStore, desk: LeaseDesk, history: History, clock: Callable[[], float]) -> None:
        self._store = store
        self._desk = desk
        self._history = history
        self._clock = clock
        self._num_made = 0

    def pin(
        self,
        tokens: Tokens | None,
        request_id: RequestId | None,
        namespace: Namespace,
        cache_type: str,
        owner: str,
        level: str,
        priority: int,
        ttl_seconds: float | None,
        refresh: bool,
        partial: bool,
    ) -> Pin:
        """See `CacheManager.pin`."""
        self._check_arguments(tokens, request_id, cache_type, level, priority, ttl_seconds)
        data = None if tokens is None else pack_tokens(tokens)
        self._store.expire_pins()
        if data is None:
            assert request_id is not None  # checked above
            namespace, data, num_tokens = self._committed_by(request_id)
        else:
            num_tokens = len(data) // TOKEN_BYTES
        num_blocks = num_tokens // self._store.plan.block_tokens
        now = self._clock()
        record = PinRecord(
            id=f"pin-{self._num_made + 1}",
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
        self._num_made += 1
        return self._store.pins.snapshot(record)

    def unpin(self, pin_id: str | None, request_id: RequestId | None, cache_type: str) -> Pin:
        """See `CacheManager.unpin`."""
        if (pin_id is None) == (request_id is None):
            raise RequestError("unpin takes a pin id or a request_id, one of them")
        self._store.expire_pins()
        record = self._find(pin_id, request_id, cache_type)
        snapshot = self._store.pins.snapshot(record)
        self._store.pins.remove(record)
        return snapshot

    def pins(self) -> list[Pin]:
        """Snapshots of all live pins, oldest first."""
        self._store.expire_pins()
        return [self._store.pins.snapshot(record) for record in self._store.pins.records.values()]

    def _check_arguments(
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
        groups = self._desk.group_names
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
        finished = self._history.require(request_id)
        if finished.data is None:
            raise UnknownRequest(request_id, "it finished too long ago: its tokens are not kept any more")
        return finished.namespace, finished.data, finished.num_committed_tokens

    def _find(self, pin_id: str | None, request_id: RequestId | None, cache_type: str) -> PinRecord:
        records = self._store.pins.records
        if pin_id is not None:
            if pin_id not in records:
                raise UnknownPin(repr(pin_id))
            return records[pin_id]
        for record in reversed(records.values()):
            if record.request_id == request_id and record.cache_type == cache_type:
                return record
        raise UnknownPin(f"of request {request_id!r} and cache_type {cache_type!r}")

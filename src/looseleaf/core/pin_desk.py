"""What callers ask of pins: arguments checked, requests looked up, records made and found."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from looseleaf.core.config import CachePlan
from looseleaf.core.history import History
from looseleaf.core.leasing import LeaseDesk
from looseleaf.core.namespaces import NamespaceLayer, Tenancy
from looseleaf.core.pin_record import AUTOMATIC, HARD, SOFT, PastPin, Pin, PinHold, PinRecord
from looseleaf.core.store import BlockStore
from looseleaf.core.tokens import TOKEN_BYTES, Tokens, pack_tokens
from looseleaf.errors import PinQuotaExceeded, RequestError, UnknownPin, UnknownRequest
from looseleaf.ids import Namespace, RequestId


@dataclass(frozen=True)
class PinWish:
    """What is asked of a pin, apart from whose tokens; see `CacheManager.pin`."""

    cache_type: str = "kv"
    owner: str = ""
    labels: Mapping[str, str] | None = None
    level: str = HARD
    priority: int = 0
    ttl_seconds: float | None = None
    max_ttl_seconds: float | None = None
    refresh: bool = False
    partial: bool = False
    part: str = "all"
    last_token: int | None = None

    def check(self, group_names: Sequence[str]) -> None:
        """RequestError for a value that can't be."""
        if self.level not in (HARD, SOFT):
            raise RequestError(f'level is {self.level!r}; it must be "hard" or "soft"')
        if self.cache_type != "kv" and self.cache_type not in group_names:
            known = ", ".join(group_names)
            raise RequestError(f'cache_type is {self.cache_type!r}; it must be "kv" or a layer group: {known}')
        if not _is_whole(self.priority) or abs(self.priority) >= -AUTOMATIC:
            raise RequestError(f"priority is {self.priority!r}; it must be an integer, less than 2**31 in size")
        if self.part not in ("all", "prompt"):
            raise RequestError(f'part is {self.part!r}; it must be "all" or "prompt"')
        if self.last_token is not None and not (_is_whole(self.last_token) and self.last_token >= 1):
            raise RequestError(f"last_token is {self.last_token!r}; it must be a number of tokens >= 1")
        if not isinstance(self.owner, str):
            raise RequestError(f"owner is {self.owner!r}; it must be a string")
        labels = {} if self.labels is None else self.labels
        if not isinstance(labels, Mapping) or not all(
            isinstance(text, str) for pair in labels.items() for text in pair
        ):
            raise RequestError("labels must be a mapping from strings to strings")
        for name in ("ttl_seconds", "max_ttl_seconds"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < value <= sys.float_info.max):
                raise RequestError(f"{name} is {value!r}; it must be positive", "leave it out for no expiry")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_names(**names: object) -> None:
    for name, value in names.items():
        if value is not None and not isinstance(value, str):
            raise RequestError(f"{name} is {value!r}; it must be a string")


class PinDesk:
    """Pins of one manager. Used under the manager's lock."""

    def __init__(self, store: BlockStore, desk: LeaseDesk, history: History, clock: Callable[[], float]) -> None:
        self._store = store
        self._desk = desk
        self._history = history
        self._clock = clock
        self._num_asked = 0

    def pin(
        self,
        tokens: Tokens | None,
        request_id: RequestId | None,
        namespace: Namespace,
        layers: Sequence[NamespaceLayer],
        wish: PinWish,
    ) -> Pin:
        """See `CacheManager.pin`."""
        if (tokens is None) == (request_id is None):
            raise RequestError("pin takes tokens or a request_id, one of them")
        if request_id is not None and layers:
            raise RequestError("pin takes layers with tokens only", "a request is pinned where it is stored")
        _check_names(namespace=namespace, request_id=request_id)
        wish.check(self._desk.group_names)
        data = None if tokens is None else pack_tokens(tokens)
        self._store.expire_pins()
        if data is None:
            assert request_id is not None  # checked above
            tenancy, data, num_tokens = self.committed_by(request_id, wish.part)
        else:
            num_tokens = len(data) // TOKEN_BYTES
            tenancy = Tenancy.of(namespace, layers, num_tokens, self._store.plan.block_tokens)
        if wish.last_token is not None:
            if wish.last_token > num_tokens:
                raise RequestError(f"last_token is {wish.last_token}, but there are only {num_tokens} tokens to pin")
            num_tokens = wish.last_token
        return self._store.pins.snapshot(self._add(data, num_tokens, tenancy, request_id, wish))

    def _add(
        self, data: bytes, num_tokens: int, tenancy: Tenancy, request_id: RequestId | None, wish: PinWish
    ) -> PinRecord:
        num_blocks = num_tokens // self._store.plan.block_tokens
        self._num_asked += 1
        now = self._clock()
        ttl_seconds = wish.max_ttl_seconds if wish.ttl_seconds is None else wish.ttl_seconds
        hold = PinHold(
            number=self._num_asked,
            tenancy=tenancy.up_to(num_blocks),
            data=data[: num_blocks * self._store.tree.block_bytes],
            num_blocks=num_blocks,
            node=self._store.tree.root(tenancy.root),
            level=wish.level,
            priority=wish.priority,
            cache_type=wish.cache_type,
        )
        record = PinRecord(
            number=self._num_asked,
            namespace=tenancy.namespace,
            hold=hold,
            num_tokens=num_tokens,
            owner=wish.owner,
            request_id=request_id,
            created_at=now,
            ttl_seconds=ttl_seconds,
            refresh=wish.refresh,
            labels=dict(wish.labels or {}),
            last_expiry=None if wish.max_ttl_seconds is None else now + wish.max_ttl_seconds,
            expires_at=None if ttl_seconds is None else now + ttl_seconds,
        )
        self._store.pins.add(record, partial=wish.partial)
        return record

    def pin_automatically(self, tenancy: Tenancy, data: bytes) -> str:
        """A soft pin that gives way to every explicit one; its id."""
        wish = PinWish(owner="auto", level=SOFT, priority=AUTOMATIC)
        return self._add(data, len(data) // TOKEN_BYTES, tenancy, None, wish).id

    def unpin(self, pin_id: str | None, request_id: RequestId | None, cache_type: str) -> Pin:
        """See `CacheManager.unpin`."""
        if (pin_id is None) == (request_id is None):
            raise RequestError("unpin takes a pin id or a request_id, one of them")
        _check_names(pin_id=pin_id, request_id=request_id)
        self._store.expire_pins()
        record = self._find(pin_id, request_id, cache_type)
        return self._undo(record)

    def unpin_all(self, owner: str, namespace: Namespace | None) -> list[Pin]:
        """See `CacheManager.unpin_all`."""
        self._store.expire_pins()
        chosen = [
            record
            for record in self._store.pins.records.values()
            if record.owner == owner and namespace in (None, record.namespace)
        ]
        return [self._undo(record) for record in chosen]

    def _undo(self, record: PinRecord) -> Pin:
        return self._store.pins.remove(record, "unpinned")

    def set_quotas(self, plan: CachePlan, namespace: Namespace | None) -> None:
        """Take the quotas of `plan`, of which that of `namespace`, or of all, is another one than now.

        Raises:
            PinQuotaExceeded: hard pins hold more; nothing has changed.
        """
        quotas = self._store.pins.quotas
        if not quotas.fits(plan):
            quota = plan.quota_blocks if namespace is None else plan.namespace_quotas[namespace]
            taken = quotas.taken(namespace, hard_only=True)
            raise PinQuotaExceeded(taken, quota, quota, taken, namespace, is_new_quota=True)
        self._store.plan = plan
        self._store.pins.set_quotas(plan)

    def pins(self) -> list[Pin]:
        """Snapshots of all live pins, oldest first."""
        self._store.expire_pins()
        return [self._store.pins.snapshot(record) for record in self._store.pins.records.values()]

    def find(self, pin_id: str) -> Pin | None:
        """See `CacheManager.find_pin`."""
        self._store.expire_pins()
        record = self._store.pins.records.get(pin_id)
        return None if record is None else self._store.pins.snapshot(record)

    def past_pins(self) -> list[PastPin]:
        """See `CacheManager.past_pins`."""
        self._store.expire_pins()
        return list(self._store.pins.past)

    def committed_by(self, request_id: RequestId, part: str) -> tuple[Tenancy, bytes, int]:
        """What a request has committed, or of its prompt: where it is stored, its packed whole blocks, its length."""
        lease = self._desk.live.get(request_id)
        if lease is not None:
            tenancy, data = lease.tenancy, self._desk.committed_blocks(lease)
            num_tokens, num_prompt_tokens = lease.num_committed_tokens, lease.num_prompt_tokens
        else:
            finished = self._history.require(request_id)
            if finished.data is None:
                raise UnknownRequest(request_id, "it finished too long ago: its tokens are not kept any more")
            tenancy, data = finished.tenancy, finished.data
            num_tokens, num_prompt_tokens = finished.num_committed_tokens, finished.num_prompt_tokens
        return tenancy, data, min(num_tokens, num_prompt_tokens) if part == "prompt" else num_tokens

    def _find(self, pin_id: str | None, request_id: RequestId | None, cache_type: str) -> PinRecord:
        records = self._store.pins.records
        if pin_id is not None:
            if pin_id not in records:
                raise UnknownPin(repr(pin_id))
            return records[pin_id]
        for record in reversed(records.values()):
            if record.request_id == request_id and record.hold.cache_type == cache_type:
                return record
        raise UnknownPin(f"of request {request_id!r} and cache_type {cache_type!r}")

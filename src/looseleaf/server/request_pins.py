"""Pins that come with ordinary requests (`prompt_cache_retention`, `cache_control`): asked again and again, kept
once."""

from __future__ import annotations

import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from looseleaf.core.manager import CacheManager
from looseleaf.errors import PinQuotaExceeded, UnknownPin
from looseleaf.server.layers import Layers, cut_layers

MAX_REQUEST_PINS = 10_000
"""Pins asked for by requests that are kept at a time; beyond, the one asked for longest ago goes."""


@dataclass(frozen=True)
class PinRequest:
    """A wish: keep these tokens until `ttl_seconds` after they were used last. `layers`: those of their prompt."""

    tokens: Sequence[int]
    ttl_seconds: float
    labels: Mapping[str, str] = field(default_factory=dict)
    layers: Layers = ()


@dataclass(frozen=True)
class GrantedPin:
    """A wish that was granted. `wish_key`: the same for the same tokens, namespace and owner. `is_new`: by a pin of its
    own, not by one that an earlier request had asked for."""

    pin_id: str
    wish_key: bytes
    ttl_seconds: float
    is_new: bool


Outcome = GrantedPin | PinQuotaExceeded


@dataclass
class _Kept:
    """The pin of a wish, and how many requests that asked for it still run."""

    pin_id: str
    ttl_seconds: float
    num_running: int = 0


class RequestPins:
    """Makes the pins that requests ask for: one for the same tokens, namespace and owner, whoever asked first says how
    it is labelled; every request that begins with its tokens keeps it for another time to live. Used from the event
    loop only.

    A pin is granted before its request is submitted, so that what the quota says does not depend on how far the engine
    has come; then it is kept (`keep`) or, if the engine refuses the request, taken back (`revoke`). A pin that holds
    nothing when its requests have ended (`settle`) goes: they were aborted, or the quota was used up.
    """

    def __init__(self, cache: CacheManager, clock: Callable[[], float], max_pins: int = MAX_REQUEST_PINS) -> None:
        self._cache = cache
        self._clock = clock  # the one that `cache` reads
        self._max_pins = max_pins
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()

    def grant(self, wish: PinRequest, *, namespace: str, owner: str) -> Outcome:
        """Pin, or say why not. A pin of the same wish that ends too soon stays until `keep`, so that nothing is
        unprotected meanwhile.

        Raises:
            InvalidTokens: the wish is for something that is no prompt.
        """
        digest = hashlib.blake2b(np.asarray(wish.tokens, dtype=np.int64).tobytes(), digest_size=16)
        layers = cut_layers(wish.layers, len(wish.tokens))
        digest.update(repr((len(wish.tokens), namespace, owner, layers)).encode())
        key, ttl_seconds = digest.digest(), wish.ttl_seconds
        kept = self._kept.get(key)
        pin = self._cache.find_pin(kept.pin_id) if kept else None
        if kept and pin and pin.expires_at is not None:
            left_seconds = pin.expires_at - self._clock()  # until the request is looked up, which refreshes the pin
            if kept.ttl_seconds >= ttl_seconds and left_seconds >= ttl_seconds / 2:
                return GrantedPin(pin.id, key, kept.ttl_seconds, is_new=False)
            ttl_seconds = max(ttl_seconds, kept.ttl_seconds)
        try:
            pin = self._cache.pin(
                wish.tokens,
                namespace=namespace,
                layers=layers,
                owner=owner,
                labels=wish.labels,
                ttl_seconds=ttl_seconds,
                refresh=True,
            )
        except PinQuotaExceeded as error:
            return error
        return GrantedPin(pin.id, key, ttl_seconds, is_new=True)

    def keep(self, outcomes: Sequence[Outcome]) -> None:
        """The requests run: older pins of the same wishes go."""
        for granted in _granted(outcomes):
            kept = self._kept.setdefault(granted.wish_key, _Kept(granted.pin_id, granted.ttl_seconds))
            kept.num_running += 1
            if kept.pin_id != granted.pin_id:
                self._unpin(kept.pin_id)
                kept.pin_id, kept.ttl_seconds = granted.pin_id, granted.ttl_seconds
            self._kept.move_to_end(granted.wish_key)
        while len(self._kept) > self._max_pins:
            self._unpin(self._kept.popitem(last=False)[1].pin_id)

    def revoke(self, outcomes: Sequence[Outcome]) -> None:
        """The requests were refused: their pins go, older ones stay."""
        for granted in _granted(outcomes):
            if granted.is_new:
                self._unpin(granted.pin_id)

    def settle(self, outcomes: Sequence[Outcome]) -> None:
        """The requests have ended: pins that hold nothing go, unless others that asked for them still run."""
        for granted in _granted(outcomes):
            kept = self._kept.get(granted.wish_key)
            if kept is None:
                continue
            kept.num_running -= 1
            if kept.num_running > 0:
                continue
            pin = self._cache.find_pin(kept.pin_id)
            if pin is None or pin.num_pinned_tokens == 0:
                self._unpin(kept.pin_id)
                del self._kept[granted.wish_key]

    def _unpin(self, pin_id: str) -> None:
        with contextlib.suppress(UnknownPin):
            self._cache.unpin(pin_id)

    def describe(self, outcomes: Sequence[Outcome]) -> str:
        """Outcomes that are kept as text for a header, each `status=held; id=…; num_tokens=…; num_pinned_tokens=…`.

        Status: `held`, `partial` (not all of it is held), `pending` (nothing is computed yet; it takes effect as it
        comes), `too_short` (less than a block), `refused` (over the quota), `expired`.
        """
        return ", ".join(self._describe(outcome) for outcome in outcomes)

    def _describe(self, outcome: Outcome) -> str:
        if isinstance(outcome, PinQuotaExceeded):
            needed = f"needed_blocks={outcome.needed_blocks}; available_blocks={outcome.available_blocks}"
            return f"status=refused; {needed}; quota_blocks={outcome.quota_blocks}"
        kept = self._kept.get(outcome.wish_key)
        pin = self._cache.find_pin(kept.pin_id) if kept else None
        if pin is None:
            return f"status=expired; id={outcome.pin_id}"
        block_tokens = self._cache.config.block_tokens
        wanted = pin.num_tokens // block_tokens * block_tokens
        status = "held" if wanted else "too_short"
        if pin.num_pinned_tokens < wanted:
            status = "partial" if pin.num_pinned_tokens else "refused" if pin.is_limited else "pending"
        return f"status={status}; id={pin.id}; num_tokens={pin.num_tokens}; num_pinned_tokens={pin.num_pinned_tokens}"


def _granted(outcomes: Sequence[Outcome]) -> list[GrantedPin]:
    return [outcome for outcome in outcomes if isinstance(outcome, GrantedPin)]

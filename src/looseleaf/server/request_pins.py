"""Pins that come with ordinary requests (`prompt_cache_retention`, `cache_control`): asked again and again, kept
once."""

from __future__ import annotations

import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from looseleaf.core.manager import CacheManager
from looseleaf.errors import PinQuotaExceeded, UnknownPin

_MAX_REMEMBERED_PINS = 10_000


@dataclass(frozen=True)
class PinRequest:
    """A wish: keep these tokens for `ttl_seconds`."""

    tokens: list[int]
    ttl_seconds: float


@dataclass(frozen=True)
class GrantedPin:
    """A wish that was granted. `wish_key` is the same for the same wish in the same namespace."""

    pin_id: str
    wish_key: bytes


Outcome = GrantedPin | PinQuotaExceeded


class RequestPins:
    """Makes the pins that requests ask for. A wish for the same tokens and time to live replaces the pin made before.
    Used from the event loop only.

    A pin is granted before its request is submitted, so that what the quota says does not depend on how far the engine
    has come; then it is kept (`keep`) or, if the engine refuses the request, taken back (`revoke`).
    """

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._pin_of_wish: OrderedDict[bytes, str] = OrderedDict()

    def grant(self, wish: PinRequest, *, namespace: str, owner: str) -> Outcome:
        """Pin, or say why not. An older pin of the same wish stays until `keep`, so that nothing is unprotected
        meanwhile.

        Raises:
            InvalidTokens: the wish is for something that is no prompt.
        """
        try:
            pin = self._cache.pin(tokens=wish.tokens, namespace=namespace, owner=owner, ttl_seconds=wish.ttl_seconds)
        except PinQuotaExceeded as error:
            return error
        digest = hashlib.blake2b(np.asarray(wish.tokens, dtype=np.int64).tobytes(), digest_size=16)
        digest.update(f"{len(wish.tokens)} {wish.ttl_seconds} {namespace}".encode("utf-8", "surrogatepass"))
        return GrantedPin(pin.id, digest.digest())

    def keep(self, outcomes: Sequence[Outcome]) -> None:
        """The requests run: older pins of the same wishes go."""
        for outcome in outcomes:
            if isinstance(outcome, GrantedPin):
                self._unpin(self._pin_of_wish.pop(outcome.wish_key, None))
                self._pin_of_wish[outcome.wish_key] = outcome.pin_id
        while len(self._pin_of_wish) > _MAX_REMEMBERED_PINS:
            self._pin_of_wish.popitem(last=False)

    def revoke(self, outcomes: Sequence[Outcome]) -> None:
        """The requests were refused: their pins go, older ones stay."""
        for outcome in outcomes:
            if isinstance(outcome, GrantedPin):
                self._unpin(outcome.pin_id)

    def _unpin(self, pin_id: str | None) -> None:
        if pin_id is not None:
            with contextlib.suppress(UnknownPin):
                self._cache.unpin(pin_id)

    def describe(self, outcomes: Sequence[Outcome]) -> str:
        """Outcomes as text for a header, each `status=held; id=…; num_tokens=…; num_pinned_tokens=…`.

        Status: `held`, `partial` (not all of it is held), `pending` (nothing is computed yet; it takes effect as it
        comes), `too_short` (less than a block), `refused` (with the quota's numbers), `expired`.
        """
        return ", ".join(self._describe(outcome) for outcome in outcomes)

    def _describe(self, outcome: Outcome) -> str:
        if isinstance(outcome, PinQuotaExceeded):
            needed = f"needed_blocks={outcome.needed_blocks}; available_blocks={outcome.available_blocks}"
            return f"status=refused; {needed}; quota_blocks={outcome.quota_blocks}"
        pin = next((pin for pin in self._cache.pins() if pin.id == outcome.pin_id), None)
        if pin is None:
            return f"status=expired; id={outcome.pin_id}"
        block_tokens = self._cache.config.block_tokens
        wanted = pin.num_tokens // block_tokens * block_tokens
        status = "held" if wanted else "too_short"
        if pin.num_pinned_tokens < wanted:
            status = "partial" if pin.num_pinned_tokens or pin.is_limited else "pending"
        return f"status={status}; id={pin.id}; num_tokens={pin.num_tokens}; num_pinned_tokens={pin.num_pinned_tokens}"

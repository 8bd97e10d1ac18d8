"""The rules of the manager's state machine that pin and unpin, and the oracle of what pins may hold."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from looseleaf.core.auto_pin_config import AutoPinConfig, AutoPinRule
from looseleaf.core.config import LayerGroup
from looseleaf.core.lease import Lease
from looseleaf.core.manager import CacheManager
from looseleaf.core.namespaces import NamespaceLayer, Tenancy
from looseleaf.core.pin_record import PastPin, Pin
from looseleaf.core.tokens import pack_tokens
from looseleaf.errors import PinQuotaExceeded, RequestError, UnknownPin, UnknownRequest
from looseleaf.testing.clock import ManualClock
from looseleaf.testing.mirror import EventMirror, Place, owners_of

AUTO_PIN = AutoPinConfig(AutoPinRule(min_tokens=1, min_requests_per_second=None))
AUTO_PINS = st.sampled_from([None, AUTO_PIN, replace(AUTO_PIN, dry_run=True)])
NAMESPACES = st.sampled_from(["", "", "", "a"])
SHARES = st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0])

WISHES = st.fixed_dictionaries(
    {
        "namespace": NAMESPACES,
        "owner": st.sampled_from(["", "ops"]),
        "labels": st.sampled_from([None, {"team": "a"}]),
        "level": st.sampled_from(["hard", "soft"]),
        "priority": st.sampled_from([0, 0, 0, 1, 2]),
        "ttl_seconds": st.sampled_from([None, None, 5.0]),
        "max_ttl_seconds": st.sampled_from([None, None, 3.0, 12.0]),
        "refresh": st.booleans(),
        "partial": st.booleans(),
    }
)


Layers: TypeAlias = tuple[NamespaceLayer, ...]


def draw_layers(data: st.DataObject, num_tokens: int, namespace: str) -> Layers:
    """Mostly none; else one or two that fit a prompt of so many tokens."""
    names = [name for name in data.draw(st.sampled_from([[], [], [], [""], ["s"], ["s", ""]])) if name != namespace]
    if data.draw(st.integers(0, 7)) == 7:
        names.append(namespace)  # it merges with the rest
    lengths = st.lists(st.integers(1, num_tokens), min_size=len(names), max_size=len(names), unique=True)
    ends = sorted(data.draw(lengths)) if len(names) <= num_tokens else []
    return tuple(NamespaceLayer(name, end) for name, end in zip(names, ends, strict=False))


@dataclass
class KnownPin:
    """A pin as the machine made it: its tokens, cut to whole blocks, its latest snapshot, and layers."""

    tokens: list[int]
    latest: Pin
    layers: Layers = ()
    could_hit: bool = False


@dataclass
class PinTally:
    """How pins ended or failed, by the machine's own count."""

    ends: list[tuple[str, str]] = field(default_factory=list)
    num_refused: int = 0


class PinRules(RuleBasedStateMachine):
    """Pins of every kind, and what must be true of them whatever happens. The machine that has these rules sets
    `cache`, `mirror`, `size` (tokens of a block) and `groups`, and calls `check_pins` after each rule."""

    cache: CacheManager
    mirror: EventMirror
    size: int
    groups: tuple[LayerGroup, ...]

    def __init__(self) -> None:
        super().__init__()
        self.pins: dict[str, KnownPin] = {}
        self.tally = PinTally()
        self.leases: list[Lease] = []
        self.clock = ManualClock()

    def _prompt(self, data: st.DataObject) -> list[int]:
        raise AssertionError(f"the machine chooses its prompts from {data}")

    @rule(data=st.data(), wish=WISHES, is_cut=st.booleans(), times=st.sampled_from([1, 1, 2, 3]))
    def pin(self, data: st.DataObject, wish: dict[str, Any], is_cut: bool, times: int) -> None:
        """A pin holds whole blocks within the quota, or is refused and nothing changes; also the same again."""
        prompt = self._prompt(data)
        wish["last_token"] = data.draw(st.integers(1, len(prompt) + 1)) if is_cut else None
        wish["layers"] = draw_layers(data, len(prompt), wish["namespace"])
        wish["cache_type"] = data.draw(st.sampled_from(["kv", "kv", "kv", *(group.name for group in self.groups)]))
        for _ in range(times):
            self._pin(prompt, wish)

    def _pin(self, prompt: list[int], wish: dict[str, Any]) -> None:
        stats, held = self.cache.stats(), self._held()
        try:
            pin = self.cache.pin(prompt, **wish)
        except PinQuotaExceeded as error:
            assert (wish["level"], wish["partial"]) == ("hard", False)
            assert error.needed_blocks > error.available_blocks
            assert self.cache.stats().pinned_blocks == stats.pinned_blocks
            assert self._held() == held
            self.tally.num_refused += 1
            self.tally.ends.append((self.cache.past_pins()[-1].pin.id, "refused"))
            return
        except RequestError:
            assert wish["last_token"] == len(prompt) + 1
            return
        assert pin.num_tokens == (wish["last_token"] or len(prompt))
        assert pin.labels == (wish["labels"] or {})
        lives = [wish[name] for name in ("ttl_seconds", "max_ttl_seconds") if wish[name] is not None]
        assert pin.expires_at == (self.clock() + min(lives) if lives else None)
        self._note(pin, prompt, wish["layers"])

    @rule(data=st.data(), namespace=NAMESPACES)
    def pin_automatically(self, data: st.DataObject, namespace: str) -> None:
        """The cache pins by itself, as its rules would: softly, behind all others."""
        prompt = self._prompt(data)
        layers = draw_layers(data, len(prompt), namespace)
        tenancy = Tenancy.of(namespace, layers, len(prompt), self.size)
        pin_id = self.cache._pins.pin_automatically(tenancy, pack_tokens(prompt))
        self._note(next(pin for pin in self.cache.pins() if pin.id == pin_id), prompt, layers)

    @rule(auto_pin=AUTO_PINS)
    def set_auto_pin(self, auto_pin: AutoPinConfig | None) -> None:
        """What the cache may pin by itself can change at any time; without it nothing of that is left."""
        self.cache.set_auto_pin(auto_pin)
        assert self.cache.auto_pin_report().is_on == (auto_pin is not None)
        if auto_pin is None or auto_pin.dry_run:
            assert all(pin.id in self.pins for pin in self.cache.pins() if pin.is_automatic)

    @rule(number=st.integers(1, 40), part=st.sampled_from(["all", "prompt"]))
    def pin_request(self, number: int, part: str) -> None:
        """A live or finished request can be pinned by its id, with its answer or without."""
        name = f"r{number}"
        try:
            pin = self.cache.pin(request_id=name, partial=True, part=part)
        except UnknownRequest:
            assert all(lease.request_id != name for lease in self.leases)
            return
        for lease in self.leases:
            if lease.request_id == name:
                assert pin.num_tokens <= lease.num_committed_tokens
                assert part == "prompt" or pin.num_tokens == lease.num_committed_tokens
                self._note(pin, lease.token_ids.tolist(), lease.layers)
                return
        self._note(pin, None)

    def _note(self, pin: Pin, prompt: list[int] | None, layers: Layers = ()) -> None:
        end = pin.num_tokens // self.size * self.size
        self.pins[pin.id] = KnownPin([] if prompt is None else prompt[:end], pin, layers)

    @precondition(lambda self: self.pins)
    @rule(data=st.data(), by_request=st.booleans())
    def unpin(self, data: st.DataObject, by_request: bool) -> None:
        """A pin is undone once, by its id or as the latest of its request."""
        pin = self.pins[data.draw(st.sampled_from(sorted(self.pins)))].latest
        if by_request and pin.request_id is not None:
            ids = [other.id for other in self.cache.pins() if other.request_id == pin.request_id]
            assert self.cache.unpin(request_id=pin.request_id).id == ids[-1]
            self._ended(ids[-1], "unpinned")
            return
        assert self.cache.unpin(pin.id).id == pin.id
        self._ended(pin.id, "unpinned")
        stats = self.cache.stats()
        try:
            self.cache.unpin(pin.id)
        except UnknownPin:
            assert self.cache.stats() == stats
            return
        raise AssertionError("unpinned twice")

    @precondition(lambda self: len(self.pins) > 3)
    @rule(owner=st.sampled_from(["", "ops", "auto"]), namespace=st.sampled_from([None, "", "a"]))
    def unpin_all(self, owner: str, namespace: str | None) -> None:
        """All pins of an owner go at once, and no other."""
        chosen = [pin.id for pin in self.cache.pins() if pin.owner == owner and namespace in (None, pin.namespace)]
        assert [pin.id for pin in self.cache.unpin_all(owner=owner, namespace=namespace)] == chosen
        for pin_id in self.pins.keys() & chosen:
            self._ended(pin_id, "unpinned")

    @rule(share=SHARES, namespace=st.sampled_from([None, None, "", "a"]))
    def set_pin_quota(self, share: float, namespace: str | None) -> None:
        """Another quota is in force at once, or refused since hard pins hold more: then nothing has changed."""
        stats, held = self.cache.stats(), self._held()
        try:
            self.cache.set_pin_quota(share, namespace)
        except PinQuotaExceeded as error:
            assert error.needed_blocks > error.quota_blocks == math.floor(share * stats.num_blocks)
            assert error.namespace == namespace
            assert (self.cache.stats(), self._held()) == (stats, held)

    @rule(seconds=st.sampled_from([1.0, 3.5, 6.0]))
    def pass_time(self, seconds: float) -> None:
        """Pins expire without anybody calling for it."""
        self.clock.advance(seconds)
        for pin_id, known in list(self.pins.items()):
            if known.latest.expires_at is not None and known.latest.expires_at <= self.clock():
                self._ended(pin_id, "expired")

    def _held(self) -> dict[str, int]:
        return {pin.id: pin.num_pinned_tokens for pin in self.cache.pins()}

    def _ended(self, pin_id: str, end: str) -> None:
        del self.pins[pin_id]
        self.tally.ends.append((pin_id, end))

    # --- the oracle -----------------------------------------------------------------------------------------------

    def check_pins(self) -> None:
        """Pins live as long as they should, hold what is stored as far as the quota goes, and never lose it."""
        live = {pin.id: pin for pin in self.cache.pins()}
        by_itself = [live.pop(pin_id) for pin_id in [*live] if live[pin_id].is_automatic and pin_id not in self.pins]
        assert set(live) == set(self.pins)
        for pin_id, pin in live.items():
            self._check_pin(self.pins[pin_id], pin)
        if not any(pin.num_pinned_tokens for pin in by_itself):  # the machine does not know what those should hold
            self._check_quotas(live)
        automatic = [*by_itself, *(pin for pin in live.values() if pin.is_automatic)]
        assert all((pin.owner, pin.level, pin.expires_at) == ("auto", "soft", None) for pin in automatic)
        self._check_past(self.cache.past_pins())
        assert self.cache.stats().num_pins == len(live) + len(by_itself)

    def _check_pin(self, known: KnownPin, now: Pin) -> None:
        before, known.latest = known.latest, now
        assert now.expires_at is None or now.expires_at > self.clock()
        if not now.refresh:
            assert now.expires_at == before.expires_at
        if now.level == "hard":
            assert now.num_pinned_tokens >= before.num_pinned_tokens, "a hard pin lost tokens"
        assert now.num_pinned_tokens % self.size == 0
        assert (now.num_hits, now.served_tokens) >= (before.num_hits, before.served_tokens)
        assert now.cost_tokens >= before.cost_tokens
        if len(known.tokens) < now.num_tokens // self.size * self.size:
            return  # of a finished request: the machine has not kept its tokens
        ahead = [*known.tokens[: now.num_pinned_tokens], 9]
        could_hit, had_moved = known.could_hit, now.num_pinned_tokens != before.num_pinned_tokens
        known.could_hit = self.mirror.match(ahead, now.namespace, known.layers) == now.num_pinned_tokens
        if now.level == "hard" and now.cache_type == "kv" and could_hit and not had_moved:
            assert known.could_hit, "what a hard pin holds can't be matched any more"
        num_stored = self.mirror.num_known([*known.tokens, 9], now.namespace, known.layers)
        assert now.num_pinned_tokens <= num_stored
        assert now.is_limited == (now.num_pinned_tokens < num_stored)

    def _check_quotas(self, live: dict[str, Pin]) -> None:
        """Every block that pins hold is counted once, in all and by namespace, and stays within each quota."""
        known = [(self.pins[pin_id].tokens, pin) for pin_id, pin in live.items()]
        if any(len(tokens) < pin.num_pinned_tokens for tokens, pin in known):
            return
        hard: set[tuple[str, Place]] = set()
        every: set[tuple[str, Place]] = set()
        explicit: set[tuple[str, Place]] = set()
        for tokens, pin in known:
            rows = [
                (group.name, self._place(pin, tokens, end + self.size))
                for group in self.groups
                if group.kind == "full" or pin.cache_type in ("kv", group.name)
                for end in range(0, pin.num_pinned_tokens, self.size)
                if end + self.size > group.first_needed_token(pin.num_pinned_tokens)
            ]
            every.update(rows)
            hard.update(rows if pin.level == "hard" else ())
            explicit.update(() if pin.is_automatic else rows)
        lanes = {group.name: group.num_lanes for group in self.groups}
        stats, config = self.cache.stats(), self.cache.config
        counts = [sum(lanes[name] for name, _ in rows) for rows in (hard, every)]
        assert counts == [stats.hard_pinned_blocks, stats.pinned_blocks]
        assert counts[1] <= stats.quota_blocks == math.floor(config.pin_quota * stats.num_blocks)
        room_of_all, room = stats.quota_blocks - counts[1], {}
        for namespace, share in config.namespace_pin_quotas.items():
            num_held = sum(lanes[name] for name, (owners, _) in every if owners[-1] == namespace)
            room[namespace] = math.floor(share * stats.num_blocks) - num_held
            assert room[namespace] >= 0
        for tokens, pin in known:
            behind = ("full", self._place(pin, tokens, pin.num_pinned_tokens + self.size))
            if self.groups == (LayerGroup("full"),) and pin.is_limited and behind not in every:
                owner = behind[1][0][-1]
                assert min(room_of_all, room.get(owner, room_of_all)) == 0, "quota is left that a pin wants"
                is_behind = pin.is_automatic or room.get(owner) == 0
                assert is_behind or every == explicit, "an automatic pin holds what an explicit one wants"

    def _place(self, pin: Pin, tokens: list[int], end: int) -> Place:
        owners = owners_of(end // self.size, self.size, pin.namespace, self.pins[pin.id].layers)
        return owners, tuple(tokens[:end])

    def _check_past(self, past: list[PastPin]) -> None:
        ends = {(ended.pin.id, ended.end) for ended in past}
        assert ends >= set(self.tally.ends[-200:])
        stats = self.cache.stats()
        assert stats.num_refused_pins == self.tally.num_refused
        assert stats.num_expired_pins == sum(end == "expired" for _, end in self.tally.ends)

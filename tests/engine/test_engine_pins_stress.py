"""Eight threads that pin and unpin a thousand times a second beside an engine under three times the load that fits."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections import Counter

import pytest
from tests.engine.test_engine_soak import MODELS, Soak

from looseleaf.errors import PinQuotaExceeded, UnknownPin, UnknownRequest

NUM_THREADS = 8
PAIRS_PER_SECOND = 1000.0
"""Pins, and as many unpins, that all threads try to do together."""
MAX_OWN_PINS = 40
QUOTAS = (0.0, 0.1, 0.2, 0.3)


class Pinner(threading.Thread):
    """Pins and unpins whatever the soak serves, at a steady rate, until told to stop. `counts`: what it did."""

    def __init__(self, soak, number, stopping):
        super().__init__(name=f"pinner-{number}")
        self.rng = random.Random(number)
        self.soak, self.cache, self.stopping = soak, soak.kit.cache, stopping
        self.own = []
        self.counts = Counter()
        self.error = None

    def run(self):
        started, num_turns = time.monotonic(), 0
        try:
            while not self.stopping.is_set():
                self.pin()
                self.unpin()
                num_turns += 1
                due = started + num_turns * NUM_THREADS / PAIRS_PER_SECOND
                self.stopping.wait(max(0.0, due - time.monotonic()))
        except BaseException as error:  # the test shows it
            self.error = error

    def pin(self):
        rng = self.rng
        wish = {
            "owner": self.name,
            "labels": {"thread": self.name},
            "level": rng.choice(("hard", "soft")),
            "priority": rng.randint(0, 3),
            "partial": rng.random() < 0.5,
            "ttl_seconds": rng.choice((None, 0.001, 0.005, 0.05)),
            "max_ttl_seconds": rng.choice((None, 0.002, 0.1)),
            "refresh": rng.random() < 0.5,
            "cache_type": rng.choice(("kv", "kv", "kv", self.soak.kit.cache.config.groups[-1].name)),
        }
        live = list(self.soak.live)
        try:
            if live and rng.random() < 0.5:
                name = rng.choice(live) if rng.random() < 0.9 else f"r{rng.randint(0, self.soak.num_added)}"
                pin = self.cache.pin(request_id=name, part=rng.choice(("all", "prompt")), **wish)
            else:
                prompt = rng.choice(self.soak.prompts)
                namespace = rng.choice(("", "x"))
                pin = self.cache.pin(prompt, last_token=rng.randint(1, 300), namespace=namespace, **wish)
        except (UnknownRequest, PinQuotaExceeded) as error:
            self.counts[type(error).__name__] += 1
        else:
            self.counts["pinned"] += 1
            self.own.append(pin)

    def unpin(self):
        rng = self.rng
        if rng.random() < 0.002:
            with contextlib.suppress(PinQuotaExceeded):
                self.cache.set_pin_quota(rng.choice(QUOTAS[1:]), rng.choice((None, "", "x")))
            self.counts["quota"] += 1
        if rng.random() < 0.002:
            self.counts["unpinned"] += len(self.cache.unpin_all(owner=self.name))
            self.own.clear()
        if rng.random() < 0.01:
            assert all(pin.num_pinned_tokens <= pin.num_tokens for pin in self.cache.pins())
            self.counts["listed"] += 1
        while self.own and (len(self.own) > MAX_OWN_PINS or rng.random() < 0.5):
            pin = self.own.pop(rng.randrange(len(self.own)))
            try:
                if pin.request_id is not None and rng.random() < 0.3:
                    self.cache.unpin(request_id=pin.request_id, cache_type=pin.cache_type)
                else:
                    self.cache.unpin(pin.id)
            except UnknownPin:
                self.counts["gone before"] += 1
            else:
                self.counts["unpinned"] += 1


def load(soak, num_steps):
    """So many steps under three times the load that fits, then an idle point."""
    soak.is_short_phase = not soak.is_short_phase
    for _ in range(num_steps):
        while soak.demand_blocks() < 3 * soak.kit.cache.plan.num_blocks and soak.rng.random() < 0.8:
            soak.add()
        soak.disturb()
        soak.step()
        if soak.num_steps % 50 == 0:
            soak.kit.cache.check_integrity()
    soak.drain()


def stress(model, seconds, seed):
    """A soak with pinners beside it; what they did, and the seconds that it took."""
    soak = Soak(model, seed)
    soak.kit.cache.set_pin_quota(QUOTAS[-1])
    stopping = threading.Event()
    pinners = [Pinner(soak, number, stopping) for number in range(NUM_THREADS)]
    started = time.monotonic()
    for pinner in pinners:
        pinner.start()
    try:
        while time.monotonic() < started + seconds:
            load(soak, soak.rng.randint(10, 150))
    finally:
        stopping.set()
        for pinner in pinners:
            pinner.join()
    seconds = time.monotonic() - started
    errors = [pinner.error for pinner in pinners if pinner.error is not None]
    assert errors == []
    counts = sum((pinner.counts for pinner in pinners), Counter())
    check_all_gone(soak, pinners)
    num_calls = sum(
        counts[what] for what in ("pinned", "unpinned", "gone before", "UnknownRequest", "PinQuotaExceeded")
    )
    print(
        f"\n{model}: {counts['pinned'] / seconds:.0f} pins/s, {num_calls / seconds:.0f} calls/s, "
        f"{soak.num_steps / seconds:.0f} steps/s, longest wait {soak.longest_wait_steps} steps, "
        f"{soak.kit.cache.stats().num_expired_pins} expired, {dict(counts)}, {dict(soak.counts)}"
    )
    assert soak.longest_wait_steps < 3 * soak.pool_tokens
    return counts, num_calls / seconds


def check_all_gone(soak, pinners):
    """Once nobody pins any more nothing is pinned or held, and the pool is whole."""
    cache = soak.kit.cache
    for pinner in pinners:
        cache.unpin_all(owner=pinner.name)
    cache.check_integrity()
    stats = cache.stats()
    assert (stats.num_pins, stats.pinned_blocks, stats.num_leases, stats.active_blocks) == (0, 0, 0, 0)
    assert stats.evictable_blocks == stats.cached_blocks
    book = cache._store.pins
    assert (book.anchorages, book.holds, book.soft.holds, book.limited.holds) == ({}, {}, {}, {})
    cache.clear()
    stats = cache.stats()
    assert (stats.free_blocks, stats.num_nodes, stats.num_namespaces) == (stats.num_blocks, 0, 0)


@pytest.mark.parametrize("model", ["full", "full+window"])
def test_short_stress(model):
    """Pins from eight threads, on prompts, on requests that run, end or are aborted, expiring in the middle of steps,
    while the pool is resized and cleared: cold tokens, whole invariants at idle points, and nothing pinned at the
    end."""
    counts, _ = stress(model, 2.0, seed=3)
    assert counts["pinned"]
    assert counts["unpinned"]


@pytest.mark.heavy
@pytest.mark.parametrize("model", MODELS)
def test_stress(model):
    """The same for LOOSELEAF_SOAK_SECONDS (120), divided among the models, at 1,000 pins and unpins a second."""
    seconds = float(os.environ.get("LOOSELEAF_SOAK_SECONDS", "120")) / len(MODELS)
    counts, rate = stress(model, seconds, seed=4)
    assert rate > PAIRS_PER_SECOND
    for what in ("pinned", "unpinned", "gone before", "UnknownRequest", "PinQuotaExceeded", "quota", "listed"):
        assert counts[what], f"no {what} came about"

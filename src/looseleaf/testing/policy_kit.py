"""`check_policy`: does an eviction policy keep its contract? For policies of your own, and for those built in."""

from __future__ import annotations

import gc
import importlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any
from unittest import mock

from looseleaf.core.eviction import BUILT_IN, EvictionPolicy, PolicyFactory, StoredRun, Use
from looseleaf.errors import ConfigError
from looseleaf.testing.policy_driver import PolicyDriver

_METHODS = tuple(name for name in vars(EvictionPolicy) if not name.startswith("_"))


def check_policy(factory: PolicyFactory, num_examples: int = 50) -> None:
    """Check a policy against the contract in `looseleaf.core.eviction.policy`.

    Its victims are offered ones, and there is one if any is offered; `offered()` tells what is offered; what was
    withdrawn keeps its place; every legal call works at every legal moment, with ids it knows nothing of never named;
    the same calls give the same victims and no clock is read; of equal runs the deepest goes first; memory is bounded
    however many runs come and go; an eviction does not take longer the more is stored. All of that by random calls
    (`PolicyMachine`), by fixed ones, and by random use of a whole `CacheManager` (`ManagerMachine`).

    Args:
        factory: the policy's class, or a function that makes one for a pool of so many blocks.
        num_examples: random sequences of 50 calls; a fifth as many in a cache.

    Raises:
        AssertionError: a law is broken; the message says which.
        IntegrityError: the same, seen from inside a cache.
        ConfigError: hypothesis is not installed.
        Exception: whatever the policy itself raises.
    """
    check_surface(factory)
    check_ties(factory)
    check_bounded(factory)
    check_reads_no_clock(factory)
    check_scaling(factory)
    try:
        machines: Any = importlib.import_module("looseleaf.testing.policy_machine")
    except ImportError as error:
        raise ConfigError(f"check_policy needs hypothesis: {error}", "pip install 'looseleaf[testing]'") from error
    machines.run_on_its_own(factory, num_examples)
    name = factory(1).name
    known = {**BUILT_IN, name: factory}
    with mock.patch("looseleaf.core.config.POLICIES", known), mock.patch("looseleaf.core.manager.POLICIES", known):
        machines.run_in_cache(name, max(1, num_examples // 5))


def check_surface(factory: PolicyFactory) -> None:
    """It has all attributes of the contract."""
    policy = factory(8)
    for name in _METHODS:
        assert callable(getattr(policy, name, None)), f"{policy!r} has no method {name}()"
    assert isinstance(getattr(policy, "name", None), str), f"{policy!r} has no name"
    assert isinstance(getattr(policy, "uses_keys", None), bool), f"{policy!r} does not say whether it uses_keys"
    assert policy.victim() is None, f"{policy!r} has a victim though nothing is stored"


def check_ties(factory: PolicyFactory) -> None:
    """Of runs with one history the deepest goes first, whatever the order in which they were offered."""
    for order in ((1, 2, 3), (3, 2, 1), (2, 3, 1)):
        policy = factory(64)
        policy.insert(3, StoredRun(9, 0, 5), Use(1, 0.0, 1))
        policy.split(3, 1, 3)
        policy.split(3, 2, 3)
        for node_id in order:
            policy.offer(node_id, 3 * node_id)
        for expected in (3, 2, 1):
            victim = policy.victim()
            assert victim == expected, f"of equal runs the deepest must go first, {expected}; it was {victim}"
            policy.withdraw(expected)
            policy.forget(expected, 0)


def check_bounded(factory: PolicyFactory) -> None:
    """What it keeps does not grow with all that ever was stored."""
    driver = PolicyDriver(factory, 64, is_checked=False)
    sizes = []
    for number in range(4096):
        _churn(driver, number)
        if number in (511, 4095):
            sizes.append(_num_bytes(driver.policies[0]))
    limit = 1.5 * sizes[0] + 16384
    assert sizes[1] <= limit, (
        f"memory grows without bound: {sizes[0]} bytes after 512 requests, {sizes[1]} after 4096, with 64 blocks all "
        "the time; forget() must leave nothing behind, or what it leaves must be limited"
    )


def check_reads_no_clock(factory: PolicyFactory) -> None:
    """It never asks what time it is."""
    driver = PolicyDriver(factory, 64, is_checked=False)
    read: list[str] = []

    def watch(_frame: FrameType, event: str, what: Any) -> None:
        if event == "c_call":
            name = getattr(what, "__qualname__", "")
            if getattr(what, "__module__", None) == "time" or name in ("datetime.now", "datetime.utcnow", "date.today"):
                read.append(name)

    before = sys.getprofile()
    with _no_garbage_collection():
        sys.setprofile(watch)
        try:
            for number in range(256):
                _churn(driver, number)
        finally:
            sys.setprofile(before)
    assert not read, f"it reads a clock ({read[0]}); a policy knows the time that it is told, in Use.seconds"


def check_scaling(factory: PolicyFactory) -> None:
    """An eviction costs about the same in a pool 32 times as large: in lines of Python, and in time (so that a scan in
    C is seen too; the margin is wide, and it has three tries)."""
    few = _count_lines(_Evictions(factory, 250), math.inf)
    many = _count_lines(_Evictions(factory, 8000), 4 * few + 20)
    assert many <= 4 * few + 20, (
        f"an eviction runs {few:.0f} lines of Python with 250 runs, {many:.0f} with 8000: it must not scan"
    )
    for _ in range(3):
        seconds = [_Evictions(factory, num_runs).seconds() for num_runs in (250, 8000)]
        if seconds[1] <= 12 * seconds[0]:
            return
    raise AssertionError(
        f"an eviction takes {seconds[0] * 1e6:.1f} us with 250 runs, {seconds[1] * 1e6:.1f} us with 8000: it must not "
        "scan"
    )


class _Evictions:
    """`num_runs` offered runs of which some are evicted, each replaced by a new one."""

    def __init__(self, factory: PolicyFactory, num_runs: int) -> None:
        self.policy = factory(num_runs)
        self._num_made = 0
        self._tick = 0
        self.num_evictions = min(num_runs // 2, 500)
        for _ in range(num_runs):
            self._store()

    def _store(self) -> None:
        self._num_made += 1
        node_id, policy = self._num_made, self.policy
        key = node_id * 0x9E3779B97F4A7C15 % 2**62 if policy.uses_keys else 0
        if policy.uses_keys:
            policy.missed([key], self._use())
        policy.insert(node_id, StoredRun(1, 0, key), self._use())
        if node_id % 3 == 0:
            policy.hit([node_id], self._use())
        policy.release([node_id], self._use(), 1)
        policy.offer(node_id, 1)

    def _use(self) -> Use:
        self._tick += 1
        return Use(self._tick, self._tick / 100, self._num_made)

    def replace_one(self) -> None:
        """Evict a run and store another."""
        victim = self.policy.victim()
        assert victim is not None, "no victim, though runs are offered"
        self.policy.withdraw(victim)
        self.policy.forget(victim, 0)
        self._store()

    def seconds(self) -> float:
        """Processor time of one eviction and its replacement."""
        gc.collect()
        with _no_garbage_collection():
            start = time.process_time()
            for _ in range(self.num_evictions):
                self.replace_one()
            return max(time.process_time() - start, 1e-9) / self.num_evictions


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """It takes time, and others may have it call what reads clocks."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _count_lines(evictions: _Evictions, limit: float) -> float:
    """Lines of Python of one eviction and its replacement; as soon as it must be more than `limit`, how many so far."""
    num_lines = 0

    def trace(_frame: FrameType, event: str, _what: Any) -> Callable[..., Any]:
        nonlocal num_lines
        num_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for number in range(evictions.num_evictions):
            evictions.replace_one()
            if num_lines > limit * evictions.num_evictions:
                return num_lines / (number + 1)
    finally:
        sys.settrace(before)
    return num_lines / evictions.num_evictions


def _churn(driver: PolicyDriver, number: int) -> None:
    """One request of many: mostly new content, some that returns, pins and a clear now and then."""
    beginning = [number % 7] * (number % 5)
    driver.serve([*beginning, *range(1000 + 10 * number, 1000 + 10 * number + 1 + number % 9)])
    driver.serve([*beginning, 8, 8])
    driver.seconds += 0.1
    if number % 100 == 99:
        driver.clear()


def _num_bytes(policy: EvictionPolicy) -> int:
    """Bytes of all objects that a policy keeps alive, classes, functions and modules left out."""
    seen: set[int] = set()
    found: list[Any] = [policy]
    total = 0
    while found:
        item = found.pop()
        if id(item) in seen or isinstance(item, (type, ModuleType, FunctionType, CodeType)):
            continue
        seen.add(id(item))
        total += sys.getsizeof(item)
        found += gc.get_referents(item)
    return total

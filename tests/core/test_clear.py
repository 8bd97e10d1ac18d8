"""Laws of clear: it says what it did, spares what it must, and nothing old survives it."""

from __future__ import annotations

from looseleaf import ClearResult
from tests.core.conftest import MakeCache, run, start, tokens


def test_clear_says_what_it_did(make: MakeCache) -> None:
    """[S118] One namespace, then all: the returned counts, later look-ups and free blocks agree."""
    cache = make(32)
    run(cache, tokens(1, 16), namespace="a")
    run(cache, tokens(2, 24), namespace="b")
    run(cache, tokens(3, 8), namespace="b")
    assert cache.clear("a") == ClearResult(16, 0)
    assert cache.match([*tokens(1, 16), 0], namespace="a").num_tokens == 0
    assert cache.match([*tokens(2, 24), 0], namespace="b").num_tokens == 24
    assert cache.clear() == ClearResult(32, 0)
    assert cache.clear() == ClearResult(0, 0)
    stats = cache.stats()
    assert (stats.free_blocks, stats.cleared_tokens, stats.num_namespaces) == (32, 48, 0)


def test_running_requests_are_detached(make: MakeCache) -> None:
    """[S117, T137] What runs during a clear goes on, is never matched again, and stores nothing old afterwards."""
    cache = make(32)
    run(cache, tokens(1, 16))
    with start(cache, tokens(1, 16) + tokens(2, 8)) as lease:
        assert cache.clear() == ClearResult(0, 24)
        assert cache.match([*tokens(1, 16), 0]).num_tokens == 0
        cache.append_many([lease], [5])
        cache.commit_many([lease])
        child = lease.fork("child")
        cache.check_integrity()
        lease.append(tokens(3, 8))
        lease.reserve(lease.num_tokens)
        lease.commit(lease.num_tokens)
        assert cache.stats().cached_blocks == 0
        child.release()
        run(cache, tokens(1, 16))  # new content may come meanwhile
    assert cache.stats().cached_blocks == 4
    assert cache.match([*tokens(1, 16), *tokens(2, 8)]).num_tokens == 16


def test_pins_are_spared_unless_asked(make: MakeCache) -> None:
    """Pinned content stays and is counted as kept; include_pins drops content and pins."""
    cache = make(32, pin_quota=1.0)
    run(cache, tokens(1, 16) + tokens(2, 8))
    cache.pin(tokens=tokens(1, 16))
    with cache.lease([*tokens(1, 16), 1]) as lease:
        assert cache.clear() == ClearResult(8, 16)
        assert cache.match([*tokens(1, 16), 0]).num_tokens == 16
        lease.reserve(17)
    assert len(cache.pins()) == 1
    assert cache.clear(include_pins=True) == ClearResult(16, 0)
    assert cache.pins() == []
    assert cache.stats().free_blocks == 32


def test_a_waiting_pin_outlives_a_clear(make: MakeCache) -> None:
    """A pin for tokens to come still works after a clear."""
    cache = make(32, pin_quota=1.0)
    cache.pin(tokens=tokens(1, 16))
    cache.clear()
    run(cache, tokens(1, 16))
    assert cache.pins()[0].num_pinned_tokens == 16


def test_namespaces_leave_nothing_behind(make: MakeCache) -> None:
    """[T133, T142] Namespaces never share, and one that stores nothing any more costs nothing."""
    cache = make(8)
    for number in range(200):
        name = f"tenant-{number % 50}"
        assert run(cache, tokens(1, 9), namespace=name) == 0
        run(cache, [1], namespace=f"short-{number}")
    assert cache.stats().num_namespaces <= 4
    assert run(cache, tokens(1, 9), namespace="tenant-49") == 8

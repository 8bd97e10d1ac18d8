"""Laws of leases: what they hold, how they grow, and that they end."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from looseleaf import (
    CommitBeyondReserved,
    DuplicateRequest,
    InvalidTokens,
    LeaseClosed,
    OutOfBlocks,
    RequestError,
    TruncateBelowCommitted,
)
from tests.core.conftest import MakeCache, run, start, tokens


def test_nothing_stays_behind(make: MakeCache) -> None:
    """[P1, P8] After any number of requests nothing is held; with reuse off nothing is even cached."""
    cache = make(32, block_tokens=16)
    for number in range(200):
        run(cache, tokens(number, 20), output=5, reuse=False)
        assert cache.stats().free_blocks == 32
    for number in range(30):
        run(cache, tokens(number, 32))
        stats = cache.stats()
        assert stats.active_blocks == 0
        assert stats.num_leases == 0
    run(cache, tokens(99, 32))


def test_cancel_before_commit_stores_nothing(make: MakeCache) -> None:
    """[P7] What was reserved but never committed is free after release and is never matched."""
    cache = make(8)
    with cache.lease(tokens(1, 12)) as lease:
        lease.reserve(13)
    assert cache.stats().free_blocks == 8
    assert cache.match(tokens(1, 12)).num_tokens == 0


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9])
def test_one_token_is_always_computed(make: MakeCache, length: int) -> None:
    """[R25, R37] A hit is whole blocks and at most num_tokens - 1, at every boundary."""
    cache = make(16)
    prompt = tokens(1, length)
    run(cache, prompt)
    assert cache.match(prompt).num_tokens == (length - 1) // 4 * 4
    assert cache.stats().cached_blocks == length // 4
    with cache.lease(prompt) as lease:
        assert lease.num_cached_tokens == (length - 1) // 4 * 4
        assert lease.num_cached_tokens <= length - 1


def test_full_hit_keeps_the_chain(make: MakeCache) -> None:
    """[R26] A block-aligned full hit is constant, and what continues it is stored behind it."""
    cache = make(16, block_tokens=16)
    prompt = tokens(1, 48)
    assert [run(cache, prompt) for _ in range(3)] == [0, 32, 32]
    longer = prompt + tokens(2, 16)
    assert run(cache, longer) == 48
    assert cache.match([*longer, 5]).num_tokens == 64


def test_generated_tokens_are_reusable(make: MakeCache) -> None:
    """What was generated hits like what was prompted."""
    cache = make(16)
    prompt = tokens(1, 6)
    run(cache, prompt, output=7)
    assert cache.match([*prompt, *range(1000, 1007)]).num_tokens == 12


def test_running_requests_can_be_matched(make: MakeCache) -> None:
    """A running request's committed blocks are shared, those not committed are not."""
    cache = make(16)
    prompt = tokens(1, 16)
    with cache.lease(prompt) as lease:
        lease.reserve(16)
        assert cache.match([*prompt, 1]).num_tokens == 0
        lease.commit(9)
        with cache.lease([*prompt, 1]) as other:
            assert other.num_cached_tokens == 8
            assert other.block_table.tolist() == lease.block_table[:2].tolist()
            lease.commit(16)  # what follows is this lease's alone
            cache.check_integrity()
            assert len(other.block_table) == 2


def test_equal_blocks_are_stored_once(make: MakeCache) -> None:
    """Two requests that compute the same prefix at once end up with the same blocks; the copies are free again."""
    cache = make(16)
    prompt = tokens(1, 9)
    first, second = cache.lease(prompt, "a"), cache.lease(prompt, "b")
    first.reserve(9)
    second.reserve(9)
    assert cache.stats().free_blocks == 10
    first.commit(9)
    second.commit(9)
    assert first.block_table[:2].tolist() == second.block_table[:2].tolist()
    assert first.block_table[2] != second.block_table[2]
    assert cache.stats().free_blocks == 12
    first.release()
    second.release()


def test_out_of_blocks_changes_nothing(make: MakeCache) -> None:
    """A reservation that can't be had evicts nothing and leaves the lease as it was, with the figures in the error."""
    cache = make(8)
    run(cache, tokens(1, 12))
    with start(cache, tokens(2, 8)) as lease:
        before = cache.stats()
        with pytest.raises(OutOfBlocks) as caught:
            lease.reserve(100)
        assert cache.stats() == before
        error = caught.value
        assert (error.needed, error.free, error.evictable, error.pinned) == (23, 3, 3, 0)
        assert "cannot reserve 23 blocks: 3 free, 3 evictable, 0 pinned" in str(error)
        assert "\nhint: " in str(error)
        assert not lease.try_reserve(100)
        assert lease.try_reserve(28)
        assert cache.stats().evicted_tokens == 8


def test_failed_admission_owns_nothing(make: MakeCache) -> None:
    """[P21] A request that matched but could not be scheduled gives everything back."""
    cache = make(6)
    run(cache, tokens(1, 4))
    running = start(cache, tokens(2, 19))
    before = cache.stats()
    waiting = cache.lease(tokens(1, 4) + tokens(3, 4), "waiting")
    assert waiting.num_cached_tokens == 4
    assert not waiting.try_reserve(9)
    waiting.release()
    after = cache.stats()
    assert (after.active_blocks, after.cached_blocks) == (before.active_blocks, before.cached_blocks)
    running.release()
    with cache.lease(tokens(1, 4) + tokens(3, 4), "waiting") as admitted:
        admitted.reserve(9)


def test_waiting_look_up_holds_what_it_found(make: MakeCache) -> None:
    """[R34, R35] A look-up is read-only, a lease holds: what it reports can't be evicted before it is used."""
    cache = make(8)
    prompt = tokens(1, 13)
    run(cache, prompt)
    assert cache.match(prompt).num_tokens == 12
    with start(cache, tokens(2, 24)):
        assert cache.match(prompt).num_tokens == 8  # one block had to go
        with cache.lease(prompt) as lease:
            assert lease.num_cached_tokens == 8
            with pytest.raises(OutOfBlocks):
                lease.reserve(30)
            assert cache.match(prompt).num_tokens == 8


def test_fork_shares_full_blocks_and_copies_the_tail(make: MakeCache) -> None:
    """[P10] Three forks at 10 tokens of 8-token blocks share one block and list one copy each; a reused id starts
    clean."""
    cache = make(16, block_tokens=8)
    with start(cache, tokens(1, 10), "parent") as parent:
        children = [parent.fork(f"child-{number}") for number in range(3)]
        tail = int(parent.block_table[1])
        for child in children:
            assert child.block_table[0] == parent.block_table[0]
            assert child.copies == [(tail, int(child.block_table[1]))]
            assert child.token_ids.tolist() == parent.token_ids.tolist()
        assert len({int(child.block_table[1]) for child in children} | {tail}) == 4
        assert cache.stats().active_blocks == 5
        for child in children:
            child.release()
        with cache.lease(tokens(5, 3), "child-0") as fresh:
            assert fresh.copies == []
        lookups = cache.stats().num_lookups
        assert lookups == 2  # forks do not count


def test_fork_without_room_changes_nothing(make: MakeCache) -> None:
    """A fork that gets no block for its tail is refused."""
    cache = make(2)
    with start(cache, tokens(1, 5)) as parent:
        before = cache.stats()
        with pytest.raises(OutOfBlocks):
            parent.fork("child")
        assert cache.stats() == before


def test_decode_step_is_all_or_nothing(make: MakeCache) -> None:
    """append_many gives every lease its slot or changes nothing."""
    cache = make(4)
    first, second = start(cache, tokens(1, 7), "a"), start(cache, tokens(2, 7), "b")
    slots = cache.append_many([first, second], [5, 6])
    assert slots.dtype == np.int64
    assert slots.tolist() == [int(first.block_table[1]) * 4 + 3, int(second.block_table[1]) * 4 + 3]
    cache.commit_many([first, second])
    before = cache.stats()
    with pytest.raises(OutOfBlocks):
        cache.append_many([first, second], [5, 6])
    assert cache.stats() == before
    assert (first.num_tokens, second.num_tokens) == (8, 8)
    second.release()
    assert len(cache.append_many([first], [5])) == 1
    first.release()


def test_decode_step_refuses_bad_calls(make: MakeCache) -> None:
    """A lease named twice, a released one, a bad token, a missing token: refused, nothing changes."""
    cache = make(8)
    lease, gone = start(cache, tokens(1, 5), "a"), start(cache, tokens(2, 5), "b")
    gone.release()
    for leases, values, error in [
        ([lease, lease], [1, 2], RequestError),
        ([lease, gone], [1, 2], LeaseClosed),
        ([lease], [-1], InvalidTokens),
        ([lease], [2**31], InvalidTokens),
        ([lease], [1, 2], RequestError),
    ]:
        with pytest.raises(error):
            cache.append_many(leases, values)
        assert lease.num_tokens == 5
    assert cache.append_many([], []).shape == (0,)
    lease.release()


def test_commit_has_limits(make: MakeCache) -> None:
    """Commit goes up to what is known and reserved; less than before changes nothing."""
    cache = make(8)
    with cache.lease(tokens(1, 6)) as lease:
        with pytest.raises(CommitBeyondReserved):
            lease.commit(1)
        lease.reserve(8)
        with pytest.raises(CommitBeyondReserved):
            lease.commit(7)
        lease.commit(6)
        lease.commit(2)
        assert lease.num_committed_tokens == 6


def test_draft_tokens_are_never_stored(make: MakeCache) -> None:
    """[R38] Rejected draft tokens leave no trace: only what is committed is in the tree."""
    cache = make(8)
    with start(cache, [1, 2, 3, 4]) as lease:
        lease.append([5, 6, 7, 8])
        lease.reserve(8)
        lease.truncate(6)
        assert lease.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
        lease.append([9, 8])
        lease.reserve(8)
        lease.commit(8)
        with pytest.raises(TruncateBelowCommitted, match="cannot truncate to 7 tokens: 8 are committed"):
            lease.truncate(7)
    assert cache.match([1, 2, 3, 4, 5, 6, 7, 8, 0]).num_tokens == 4
    assert cache.match([1, 2, 3, 4, 5, 6, 9, 8, 0]).num_tokens == 8
    stats = cache.stats()
    assert stats.free_blocks + stats.cached_blocks == stats.num_blocks


def test_a_lease_ends_once(make: MakeCache) -> None:
    """Every call after release is LeaseClosed; the end of a `with` does not release twice."""
    cache = make(8)
    with start(cache, tokens(1, 5)) as lease:
        lease.release()
    for call in (
        lease.release,
        lease.fork,
        lambda: lease.reserve(6),
        lambda: lease.block_table,
        lambda: lease.commit(1),
    ):
        with pytest.raises(LeaseClosed):
            call()


def test_block_table_is_read_only(make: MakeCache) -> None:
    """[R41] What a lease hands out can't be written, and growing it does not change what others see."""
    cache = make(8)
    with start(cache, tokens(1, 5)) as lease:
        table = lease.block_table
        assert table.dtype == np.int32
        with pytest.raises(ValueError, match="read-only"):
            table[0] = 7
        with pytest.raises(ValueError, match="WRITEABLE"):
            table.flags.writeable = True
        lease.reserve(20)
        assert len(table) == 2


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        [1, -1],
        [1, 2**31],
        [1.5],
        ["a"],
        np.array([[1]]),
        np.array([1.0]),
        np.array([2**31], dtype=np.int64),
        [None],
        5,
        np.array(5),
        b"",
        iter([1]),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "__next__") else str(value),
)
def test_bad_tokens(make: MakeCache, prompt: object) -> None:
    """Tokens that are empty, negative, too large or not integers are refused by every call."""
    cache = make(8)
    for call in (cache.lease, cache.match, cache.pin):
        with pytest.raises(InvalidTokens):
            call(prompt)  # type: ignore[operator]
    assert cache.stats().num_leases == 0


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda t: np.array(t, dtype=np.uint16), range])
def test_any_sequence_of_ints(make: MakeCache, kind: object) -> None:
    """Lists, tuples, ranges and integer arrays are the same prompt."""
    cache = make(8)
    run(cache, list(range(9)))
    values = range(9) if kind is range else kind(list(range(9)))  # type: ignore[operator]
    assert cache.match(values).num_tokens == 8


def test_live_ids_are_unique(make: MakeCache) -> None:
    """An id is refused while it is live and free to use afterwards."""
    cache = make(8)
    with cache.lease([1], "same"):
        with pytest.raises(DuplicateRequest):
            cache.lease([1], "same")
        with pytest.raises(DuplicateRequest):
            cache.lease([1], "other").fork("same")
    with cache.lease([1], "same"):
        pass


def test_made_ids_never_meet_the_caller_s(make: MakeCache) -> None:
    """An id that is made up is neither live nor remembered."""
    cache = make(8)
    with cache.lease([1, 2, 3], "lease-1") as named, cache.lease([1, 2, 3]) as other:
        named.reserve(4)
        assert other.request_id != "lease-1"
    cache.lease([1], "lease-3").release()
    with cache.lease([1]) as other:
        assert other.request_id not in ("lease-1", "lease-3")


def test_another_manager_s_lease_is_refused(make: MakeCache) -> None:
    """A decode step takes its own manager's leases only."""
    ours, theirs = make(8), make(8)
    with ours.lease([1]) as lease, theirs.lease([2]) as foreign:
        for call in (lambda: ours.append_many([foreign], [5]), lambda: ours.commit_many([foreign])):
            with pytest.raises(RequestError, match="another manager"):
                call()
        assert (lease.num_tokens, foreign.num_tokens) == (1, 1)


@pytest.mark.parametrize("count", [2.5, "3", None, -1])
def test_numbers_of_tokens_are_integers(make: MakeCache, count: object) -> None:
    """What is no number of tokens is refused before anything happens."""
    cache = make(8)
    with cache.lease([1]) as lease:
        for call in (lease.reserve, lease.try_reserve, lease.commit, lease.truncate):
            with pytest.raises(RequestError, match="number of tokens"):
                call(count)  # type: ignore[arg-type]


def test_figures_can_be_read_while_others_lease(make: MakeCache) -> None:
    """A lease's own figures stay right while other threads make leases and the table of rows grows."""
    cache = make(8)
    with cache.lease([1] * 5, "watched") as lease:
        stop = threading.Event()
        wrong: list[int] = []

        def watch() -> None:
            while not stop.is_set():
                if lease.num_tokens != 5 or len(lease.token_ids) != 5:
                    wrong.append(1)

        thread = threading.Thread(target=watch)
        thread.start()
        others = [cache.lease([2]) for _ in range(2000)]
        stop.set()
        thread.join()
        for other in others:
            other.release()
        assert not wrong


def test_long_growth_and_long_drafts(make: MakeCache) -> None:
    """A sequence that grows far beyond one run, with drafts dropped on the way, reads back and is matched whole."""
    cache = make(256)
    known = [7]
    with cache.lease(known, "long") as lease:
        for step in range(200):
            draft = [step, step + 1, step + 2, step + 3, step + 4]
            lease.append(draft)
            lease.reserve(lease.num_tokens)
            lease.truncate(len(known) + 1 + step % 5)
            known += draft[: 1 + step % 5]
            lease.commit(lease.num_tokens)
            assert lease.token_ids.tolist() == known
    assert cache.match([*known, 0]).num_tokens == len(known) // 4 * 4


def test_many_leases(make: MakeCache) -> None:
    """Rows are reused and grow: 300 leases at once decode in one call and all read back their own tokens."""
    cache = make(1024)
    leases = [start(cache, tokens(number, 3), f"r{number}") for number in range(300)]
    for step in range(9):
        cache.append_many(leases, [number * 10 + step for number in range(300)])
        cache.commit_many(leases)
    for number, lease in enumerate(leases):
        assert lease.token_ids.tolist() == tokens(number, 3) + [number * 10 + step for step in range(9)]
        lease.release()
    assert cache.stats().cached_blocks == 300 * 3


def test_waste_is_what_no_token_fills(make: MakeCache) -> None:
    """Waste: places in held blocks without a reserved token, as a share of all places in them; shared ones count
    once."""
    cache = make(16)
    assert cache.stats().waste == 0.0
    with cache.lease(tokens(1, 6)) as lease:
        lease.reserve(6)
        stats = cache.stats()
        assert stats.waste == pytest.approx(2 / 8)
        assert stats.uncommitted_tokens == 6
        lease.commit(6)
        with cache.lease(tokens(1, 6)) as other:
            assert cache.stats().waste == pytest.approx(2 / 8)
            other.reserve(5)
            assert cache.stats().waste == pytest.approx((2 + 3) / 12)

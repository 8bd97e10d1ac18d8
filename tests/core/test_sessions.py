"""Laws of sessions: what only one conversation used goes first once it is over or replaced, and nothing else does."""

from __future__ import annotations

import random

import pytest

from looseleaf import CacheConfig, CacheManager, InvalidTokens, LayerGroup, Lease, UnknownSession
from looseleaf.core import sessions as module
from looseleaf.core.namespaces import NamespaceLayer
from looseleaf.testing.clock import ManualClock
from looseleaf.testing.mirror import EventMirror
from looseleaf.testing.session_machine import SessionRules
from tests.core.conftest import MakeCache, run, start, tokens


def turn(
    cache: CacheManager, prompt: list[int], answer: list[int], session: str | None = "s", **how: object
) -> list[int]:
    """A whole turn; the conversation so far, as a client that keeps token ids would send it."""
    with answered(cache, prompt, answer, session=session, **how):
        return [*prompt, *answer]


def answered(cache: CacheManager, prompt: list[int], answer: list[int], **how: object) -> Lease:
    """A turn that has its answer but still holds its blocks."""
    lease = start(cache, prompt, **how)
    for token in answer:
        cache.append_many([lease], [token])
        cache.commit_many([lease])
    return lease


def evict(cache: CacheManager, num_blocks: int) -> None:
    """Have so many blocks evicted from a cache, by a request that stores nothing."""
    free = cache.stats().free_blocks
    with cache.lease([1], reuse=False) as lease:
        lease.reserve((free + num_blocks) // cache.plan.num_lanes * cache.plan.block_tokens)


def found(cache: CacheManager, prompt: list[int], namespace: str = "") -> int:
    return cache.match([*prompt, 9], namespace).num_tokens


# --- the end of a session ------------------------------------------------------------------------------------------


def test_an_ended_session_goes_first(make: MakeCache) -> None:
    """What only an ended session used is evicted before older content of others, from its end on."""
    cache = make(32)
    run(cache, tokens(1, 16), "old")
    mine = turn(cache, tokens(2, 10), tokens(3, 6))
    result = cache.end_session("s")
    assert (result.session, result.num_released_tokens, result.num_kept_tokens) == ("s", 16, 0)
    assert found(cache, mine) == 16
    evict(cache, 3)
    assert (found(cache, mine), found(cache, tokens(1, 16))) == (4, 16)
    evict(cache, 2)
    assert (found(cache, mine), found(cache, tokens(1, 16))) == (0, 12)


def test_the_deepest_goes_first(make: MakeCache) -> None:
    """Of what is left behind the ends of the longest paths go first, whichever is older."""
    cache = make(32)
    turn(cache, tokens(1, 8), [])
    turn(cache, tokens(2, 16), [])
    turn(cache, tokens(3, 12), [])
    cache.end_session("s")
    evict(cache, 1)
    assert [found(cache, tokens(number, 16)) for number in (1, 2, 3)] == [8, 12, 12]


def test_windows_of_others_stay(make: MakeCache) -> None:
    """What is left behind goes before rows of windows that others may need again."""
    cache = make(64, groups=(LayerGroup("full"), LayerGroup("window", window_tokens=8)))
    run(cache, tokens(1, 32))
    turn(cache, tokens(2, 32), [])
    cache.end_session("s")
    num_cold = 2 * 5  # rows behind the windows (and one block more) of both
    evict(cache, num_cold + 10)
    assert (found(cache, tokens(1, 32)), found(cache, tokens(2, 32))) == (32, 0)


def test_what_others_used_stays(make: MakeCache) -> None:
    """A part that another session, or a request without one, has used is not released: whoever came first."""
    cache = make(64)
    system = tokens(1, 16)
    turn(cache, [*system, *tokens(2, 8)], [], "s")
    turn(cache, [*system, *tokens(3, 8)], [], "t")
    turn(cache, [*system, *tokens(4, 8)], [], "u")
    run(cache, [*system, *tokens(4, 8), 5])
    assert cache.end_session("s").num_released_tokens == 8
    assert cache.end_session("u").num_released_tokens == 0
    evict(cache, 2)
    assert [found(cache, [*system, *tokens(number, 8)]) for number in (2, 3, 4)] == [16, 24, 24]


def test_holders_and_pins_keep(make: MakeCache) -> None:
    """Nothing that is held or pinned is evicted; a held part is released with its last holder."""
    cache = make(16, pin_quota=1.0)
    pinned = turn(cache, tokens(1, 8), [])
    pin = cache.pin(pinned)
    lease = start(cache, tokens(2, 8), session="s")
    result = cache.end_session("s")
    assert (result.num_released_tokens, result.num_kept_tokens) == (0, 16)
    run(cache, tokens(3, 8))
    evict(cache, 2)
    assert (found(cache, pinned), found(cache, tokens(2, 8)), found(cache, tokens(3, 8))) == (8, 8, 0)
    run(cache, tokens(3, 8))
    lease.release()
    evict(cache, 2)
    assert (found(cache, tokens(2, 8)), found(cache, tokens(3, 8))) == (0, 8)
    cache.unpin(pin.id)
    evict(cache, 2)
    assert (found(cache, pinned), found(cache, tokens(3, 8))) == (0, 8)


def test_a_look_up_takes_it_back(make: MakeCache) -> None:
    """What an ended session has left behind and somebody finds again is the policy's like anything else."""
    cache = make(16)
    mine = turn(cache, tokens(1, 8), [])
    cache.end_session("s")
    run(cache, tokens(2, 8))
    run(cache, [*mine, 5])
    evict(cache, 2)
    assert (found(cache, mine), found(cache, tokens(2, 8))) == (8, 0)


def test_what_a_running_turn_stores_after_the_end_goes_too(make: MakeCache) -> None:
    """A turn may outlive its session: what it stores is released when it ends, also when it had given way."""
    cache = make(32)
    run(cache, tokens(4, 8))
    lease = start(cache, tokens(1, 8), "r", session="s")
    cache.end_session("s")
    lease.append(tokens(2, 8))
    lease.reserve(16)
    lease.commit(16)
    lease.release()
    back = start(cache, [*tokens(1, 8), *tokens(2, 8), *tokens(3, 8)], "r", session="s", count_lookup=False)
    back.release()
    assert cache.sessions() == []
    evict(cache, 6)
    assert (found(cache, tokens(1, 8)), found(cache, tokens(4, 8))) == (0, 8)


def test_sessions_of_two_namespaces(make: MakeCache) -> None:
    """A session belongs to its namespace: equal names are two sessions."""
    cache = make(32)
    turn(cache, tokens(1, 8), [], "s", namespace="a")
    turn(cache, tokens(1, 8), [], "s", namespace="b")
    assert [(session.session, session.namespace) for session in cache.sessions()] == [("s", "a"), ("s", "b")]
    cache.end_session("s", namespace="b")
    evict(cache, 2)
    assert (found(cache, tokens(1, 8), "a"), found(cache, tokens(1, 8), "b")) == (8, 0)


def test_a_shared_layer_is_nobodys(make: MakeCache) -> None:
    """What lies in another namespace, for all who may share it, is no session's, whoever used it alone so far."""
    cache = make(32)
    prompt = [*tokens(1, 8), *tokens(2, 8)]
    with start(cache, prompt, namespace="a", layers=[NamespaceLayer("", 8)], session="s"):
        pass
    assert cache.end_session("s", namespace="a").num_released_tokens == 8
    run(cache, tokens(3, 8))
    evict(cache, 2)
    assert (found(cache, tokens(1, 8)), found(cache, tokens(3, 8))) == (8, 8)


def test_unknown_sessions(make: MakeCache) -> None:
    """A session that was never named, or has ended, is an error with a stable code that changes nothing."""
    cache = make(16)
    turn(cache, tokens(1, 8), [])
    for session, namespace in (("other", ""), ("s", "a")):
        with pytest.raises(UnknownSession, match="no session") as caught:
            cache.end_session(session, namespace)
        assert (caught.value.code, caught.value.session, caught.value.namespace) == (
            "unknown_session",
            session,
            namespace,
        )
    cache.end_session("s")
    with pytest.raises(UnknownSession):
        cache.end_session("s")
    with pytest.raises(InvalidTokens):
        cache.lease([], session="t")
    assert cache.sessions() == []


def test_a_name_used_again_is_a_new_session(make: MakeCache) -> None:
    """After its end the same name begins anew: what it finds of its former self is not lost."""
    cache = make(16)
    mine = turn(cache, tokens(1, 8), [])
    cache.end_session("s")
    turn(cache, [*mine, *tokens(2, 4)], [])
    assert [(session.num_turns, session.num_tokens) for session in cache.sessions()] == [(1, 4)]
    run(cache, tokens(3, 8))
    evict(cache, 1)
    assert found(cache, [*mine, *tokens(2, 4)]) == 8  # as lru says


def test_the_table_is_bounded(make: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the sessions used last are remembered; what a forgotten one stored is the policy's."""
    monkeypatch.setattr(module, "MAX_SESSIONS", 2)
    cache = make(32)
    for number, session in enumerate(("a", "b", "a", "c")):
        turn(cache, tokens(number, 8), [], session)
    assert [(session.session, session.num_turns) for session in cache.sessions()] == [("a", 2), ("c", 1)]
    with pytest.raises(UnknownSession):
        cache.end_session("b")
    evict(cache, 2)
    assert found(cache, tokens(0, 8)) == 0


def test_figures(make: MakeCache, clock: ManualClock) -> None:
    """Turns, tokens that are its own, idle time, the mean pause between turns; parallel turns are no pause."""
    cache = make(64)
    so_far = turn(cache, tokens(1, 8), tokens(2, 8))
    clock.advance(10)
    with start(cache, [*so_far, *tokens(3, 8)], session="s"):
        clock.advance(5)
        with start(cache, [*so_far, *tokens(4, 8)], session="s") as lease:
            lease.fork().release()
    clock.advance(20)
    turn(cache, tokens(5, 8), [])
    clock.advance(7)
    (session,) = cache.sessions()
    assert (session.num_turns, session.num_tokens, session.num_superseded_tokens) == (4, 40, 0)
    assert (session.last_used_seconds_ago, session.mean_gap_seconds) == (7, 15)


def test_a_request_that_comes_back_is_no_turn(make: MakeCache) -> None:
    """A preempted request goes on as the same turn."""
    cache = make(64)
    start(cache, tokens(1, 8), "r", session="s").release()
    start(cache, tokens(1, 12), "r", session="s", count_lookup=False).release()
    assert [session.num_turns for session in cache.sessions()] == [1]


# --- a turn replaces another ---------------------------------------------------------------------------------------

# With thinking and answer 71 tokens, 17 blocks of 4 of them stored.
SYSTEM, QUESTION, THINKING, ANSWER, NEXT = tokens(1, 16), tokens(2, 9), tokens(3, 23), tokens(4, 21), tokens(5, 10)
PROMPT = [*SYSTEM, *QUESTION, 90, 91]  # 27 tokens; a template opens the answer with 90, 91


def superseded(cache: CacheManager) -> int:
    return sum(session.num_superseded_tokens for session in cache.sessions())


@pytest.mark.parametrize("opening", [[], [92, 93]], ids=["in the answer", "in the template's opening"])
def test_dropped_thinking_is_superseded(make: MakeCache, opening: list[int]) -> None:
    """[R43] A turn that leaves out the thinking of the one before replaces it from there on: that goes first, while
    what both share stays and is found."""
    cache = make(64)
    full = turn(cache, [*PROMPT, *opening], [*THINKING, *ANSWER])
    num_replaced = len(full) // 4 - 6
    run(cache, tokens(6, 16))
    second = [*PROMPT, *ANSWER, *NEXT]
    lease = start(cache, second, session="s")
    assert lease.num_cached_tokens == 24
    assert superseded(cache) == num_replaced * 4
    evict(cache, num_replaced - 2)
    assert found(cache, full) == 32
    lease.release()
    evict(cache, 2)
    assert (found(cache, full), found(cache, second)) == (24, 56)
    assert found(cache, tokens(6, 16)) == 16


def test_an_answer_that_was_interrupted_is_superseded(make: MakeCache) -> None:
    """What a request generated before it gave way is an answer still, though it comes back with it as its prompt."""
    cache = make(64)
    answered(cache, PROMPT, THINKING, request_id="r", session="s").release()
    cache.clear()
    turn(cache, [*PROMPT, *THINKING], ANSWER, request_id="r", count_lookup=False)
    turn(cache, [*PROMPT, *ANSWER, *NEXT], [])
    assert superseded(cache) == 68 - 24


def test_thinking_of_a_whole_tool_loop_is_superseded(make: MakeCache) -> None:
    """Templates keep the thinking of tool calls until the user speaks again, then drop all of it: the rest of the
    path, prompts of tool results included, is replaced."""
    cache = make(128)
    so_far = turn(cache, PROMPT, [*THINKING, *ANSWER])
    so_far = turn(cache, [*so_far, *tokens(10, 12)], tokens(11, 20))
    so_far = turn(cache, [*so_far, *tokens(12, 12)], tokens(13, 20))
    assert superseded(cache) == 0
    turn(cache, [*PROMPT, *ANSWER, *tokens(10, 12), *tokens(12, 12), *tokens(13, 20), *NEXT], [])
    assert superseded(cache) == len(so_far) // 4 * 4 - 24


def test_a_clean_continuation_supersedes_nothing(make: MakeCache) -> None:
    """Turns that go on with what was generated, token by token, keep it all."""
    cache = make(128)
    so_far = PROMPT
    for number in range(10, 14):
        so_far = turn(cache, [*so_far, *tokens(number, 5)], tokens(10 * number, 6))
    assert superseded(cache) == 0
    assert found(cache, so_far) == len(so_far) // 4 * 4


@pytest.mark.parametrize("length", [1, 2, 4, 5, 9, 30])
def test_branches_live_on(make: MakeCache, length: int) -> None:
    """Agents that fork in one session, by what they are asked, each keep their branch, however short the task."""
    cache = make(256)
    so_far = turn(cache, PROMPT, ANSWER)
    ends = [turn(cache, [*so_far, *tokens(number, length), 90, 91], tokens(10 * number, 14)) for number in (6, 7, 8)]
    ends = [turn(cache, [*end, *tokens(number, 5)], tokens(10 * number, 14)) for number, end in enumerate(ends, 16)]
    assert superseded(cache) == 0
    assert all(found(cache, end) == len(end) // 4 * 4 for end in ends)


@pytest.mark.parametrize("lengths", [(1, 20), (20, 1), (2, 20, 40), (20, 20)], ids=str)
def test_answers_to_one_prompt_live_on(make: MakeCache, lengths: tuple[int, ...]) -> None:
    """Several answers to one prompt (a search, an answer regenerated) are branches: to go on from one of them replaces
    none, even if it is too short to be stored."""
    cache = make(256)
    ends = [turn(cache, PROMPT[:25], tokens(number, length)) for number, length in enumerate(lengths, 6)]
    for number, end in enumerate(ends, 16):
        turn(cache, [*end, *tokens(number, 9)], [])
    assert superseded(cache) == 0


def test_a_running_branch_lives_on(make: MakeCache) -> None:
    """What a running request of the session holds is not replaced, and what branches off it neither."""
    cache = make(128)
    so_far = turn(cache, PROMPT, [*THINKING, *ANSWER])
    running = start(cache, [*so_far, *tokens(6, 8)], session="s")
    turn(cache, [*PROMPT, *ANSWER, *NEXT], [])
    assert superseded(cache) == 0
    running.release()
    assert found(cache, [*so_far, *tokens(6, 8)]) == 76


@pytest.mark.parametrize("length", [2, 20])
def test_where_it_is_open_which_is_rewritten_none_is(make: MakeCache, length: int) -> None:
    """If a prompt departs alike from two answers, one of them too short to be stored or gone on with, none goes."""
    cache = make(256)
    other = turn(cache, PROMPT[:25], tokens(6, length))
    running = start(cache, [*other, *tokens(7, 9)], session="s")
    turn(cache, PROMPT[:25], tokens(8, 30))
    turn(cache, [*PROMPT[:25], *NEXT, *ANSWER], [])
    assert superseded(cache) == 0
    running.release()


def test_a_branch_within_a_last_block_lives_on(make: MakeCache) -> None:
    """A path from which another branch goes on stays, though its own last words come up again."""
    cache = make(256)
    answer = tokens(6, 23)  # 50 tokens, 48 of them stored
    turn(cache, PROMPT, answer)
    turn(cache, [*PROMPT, *answer[:22], *tokens(7, 9)], [])
    turn(cache, [*PROMPT, 5, *answer, *NEXT], [])
    assert superseded(cache) == 0


def test_as_far_as_a_running_request_holds_it(make: MakeCache) -> None:
    """Only what lies behind the part that a running request has taken up is replaced."""
    cache = make(128)
    full = turn(cache, PROMPT, [*THINKING, *ANSWER])
    with cache.lease(full[:33], session="s"):
        turn(cache, [*PROMPT, *ANSWER, *NEXT], [])
    assert superseded(cache) == 68 - 32


def test_a_window_that_is_gone_hides_no_departure(make: MakeCache) -> None:
    """Where a look-up is cut since a window has gone, a turn replaces no more than what lies behind its departure."""
    cache = make(96, groups=(LayerGroup("full"), LayerGroup("window", window_tokens=8)))
    turn(cache, PROMPT, [*THINKING, *ANSWER])
    evict(cache, 14)  # rows that only slid out, all but the first
    lease = start(cache, [*PROMPT, *ANSWER, *NEXT], session="s")
    assert lease.num_cached_tokens == 4
    assert superseded(cache) == 68 - 24
    lease.release()


def test_one_of_two_rewritten_branches(make: MakeCache) -> None:
    """Where two branches part behind the point of departure, the one goes whose last words come up again; what both
    share stays for the other."""
    cache = make(256)
    so_far = turn(cache, PROMPT, [*THINKING, *ANSWER])
    ends = [turn(cache, [*so_far, *tokens(number, 12)], tokens(10 * number, 14)) for number in (6, 7)]
    turn(cache, [*PROMPT, *ANSWER, *tokens(6, 12), *tokens(60, 14), *NEXT], [])
    assert superseded(cache) == len(ends[0]) // 4 * 4 - 68
    assert found(cache, ends[1]) == len(ends[1]) // 4 * 4


def test_samples_of_one_turn_are_superseded_together(make: MakeCache) -> None:
    """Samples (forks) of one prompt are one turn: rewritten history replaces all of them."""
    cache = make(128)
    lease = start(cache, PROMPT, session="s")
    samples = [lease, lease.fork(), lease.fork()]
    for step in range(30):
        cache.append_many(samples, [1000 * number + step for number in range(3)])
        cache.commit_many(samples)
    for sample in samples:
        sample.release()
    turn(cache, [*PROMPT, *NEXT, *ANSWER], [])
    assert superseded(cache) == 3 * 32
    assert [session.num_turns for session in cache.sessions()] == [2]


def test_a_superseded_part_found_again_stays(make: MakeCache) -> None:
    """A client that comes back to the version that was replaced takes it back."""
    cache = make(64)
    full = turn(cache, PROMPT, [*THINKING, *ANSWER])
    turn(cache, [*PROMPT, *ANSWER, *NEXT], [])
    run(cache, tokens(6, 16))
    turn(cache, full[:69], [])
    evict(cache, 8 + 4)
    assert (found(cache, full), found(cache, tokens(6, 16))) == (68, 0)


def test_what_others_share_is_not_superseded(make: MakeCache) -> None:
    """A part that another session has used too stays, whatever this one does."""
    cache = make(64)
    full = turn(cache, PROMPT, [*THINKING, *ANSWER])
    run(cache, [*full, 7, 7, 7])
    turn(cache, [*PROMPT, *ANSWER, *NEXT], [])
    assert superseded(cache) == 0


def test_an_edited_question_is_the_policys(make: MakeCache) -> None:
    """An edited question can't be told from a branch: nothing is replaced."""
    cache = make(64)
    turn(cache, PROMPT, ANSWER)
    turn(cache, [*SYSTEM, *tokens(7, 12), 90, 91], [])
    turn(cache, [*SYSTEM, *tokens(8, 12), 90, 91, *ANSWER, *NEXT], [])
    assert superseded(cache) == 0


def test_what_was_evicted_of_it_does_not_matter(make: MakeCache) -> None:
    """A turn whose end was evicted is replaced as far as it is still there."""
    cache = make(64)
    full = turn(cache, PROMPT, [*THINKING, *ANSWER])
    turn(cache, [*full, *tokens(6, 20)], [])
    evict(cache, 12)
    assert found(cache, full) == 40
    turn(cache, [*PROMPT, *ANSWER, *NEXT], [])
    assert superseded(cache) == 16


def test_explained_as_the_sessions_doing(make: MakeCache, clock: ManualClock) -> None:
    """A miss on what was evicted so is told apart from the policy's choice."""
    cache = make(32)
    mine = turn(cache, tokens(1, 17), [])
    cache.end_session("s")
    evict(cache, 4)
    clock.advance(3)
    lease = start(cache, mine, session="s")
    explanation = lease.explanation
    lease.release()
    assert (explanation.reason, explanation.policy, explanation.evicted_seconds_ago) == ("evicted", "session", 3)
    assert "its session had ended or replaced it" in explanation.message
    assert explanation.num_evicted_tokens == 16
    assert explanation.session == "s"


# --- any traffic ---------------------------------------------------------------------------------------------------


class Traffic(SessionRules):
    """Conversations that go on, are rewritten, branch, quote others and end, in a small cache, against the oracle."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        full, window = LayerGroup("full"), LayerGroup("window", window_tokens=12)
        self.groups = self.rng.choice([(full,), (full,), (full, window), (window,)])
        self.size = self.rng.choice([2, 4])
        self.mirror = EventMirror(self.size, self.groups)
        pages = self.rng.choice([24, 48, 96]) * len(self.groups)
        config = CacheConfig(
            pages, self.size, self.size, pin_quota=0.5, groups=self.groups, policy=self.rng.choice(["lru", "fifo"])
        )
        self.cache = CacheManager(config, clock=self.clock, on_event=self.mirror.on_event)
        self.talks: list[list[int]] = [[1] * 8]
        self.num_requests = self.num_words = self.num_expended = 0

    def words(self, count: int) -> list[int]:
        self.num_words += count
        return list(range(self.num_words, self.num_words + count))

    def prompt(self) -> list[int]:
        """What a client may send next: a conversation that goes on, is rewritten in the middle, or asked anew."""
        rng, talk = self.rng, self.rng.choice(self.talks[-6:])
        cut = rng.randrange(len(talk) + 1)
        kept = talk[min(len(talk), cut + rng.randrange(12)) :]
        return rng.choice([talk, talk, talk[:cut], talk[:cut] + kept]) + self.words(rng.choice([1, 3, 9]))

    def serve(self) -> None:
        self.num_requests += 1
        prompt, name = self.prompt()[:60], f"r{self.num_requests}"
        namespace, session = self.rng.choice(["", "", "a"]), self.rng.choice([None, "s", "s", "t"])
        layers = [NamespaceLayer("s", self.rng.randrange(1, len(prompt) + 1))] if self.rng.random() < 0.3 else []
        lease = self.cache.lease(prompt, name, namespace, layers=layers, session=session)
        self.name_session(name, namespace, session)
        self.note_use(lease)
        expendable, stored = self.expendable(), set(self.mirror.blocks)
        if lease.try_reserve(len(prompt) + 16):
            self.num_expended += bool(expendable & (stored - set(self.mirror.blocks)))
            self.check_order(expendable, stored)
            lease.commit(len(prompt))
            lease.append(self.words(self.rng.choice([2, 7, 16])))
            lease.commit(lease.num_tokens)
            self.talks.append(lease.token_ids.tolist())
        self.leases.append(lease)

    def step(self) -> None:
        kind = self.rng.choice(["serve"] * 8 + ["release"] * 5 + ["fork", "end", "pin", "unpin", "pass", "clear"])
        if kind == "serve":
            self.serve()
        elif kind == "release" or len(self.leases) > 3:
            for lease in self.leases[: self.rng.choice([1, 4])]:
                self.note_use(lease)
                self.leases.remove(lease)
                lease.release()
        elif kind == "fork" and self.leases:
            parent = self.rng.choice(self.leases)
            if parent.num_committed_tokens % self.size == 0:
                self.leases.append(parent.fork(f"f{self.num_requests}-{self.num_words}"))
                self.num_words += 1
                self.user_of[self.leases[-1].request_id] = self.user_of[parent.request_id]
        elif kind == "end":
            self.end_session(self.rng.choice(["s", "t"]), self.rng.choice(["", "a"]))
        elif kind == "pin":
            level = self.rng.choice(["hard", "soft"])
            self.cache.pin(self.prompt(), level=level, partial=True, ttl_seconds=self.rng.choice([None, 9]))
        elif kind == "unpin" and self.cache.pins():
            self.cache.unpin(self.rng.choice(self.cache.pins()).id)
        elif kind == "pass":
            self.clock.advance(5)
            self.cache.pins()
        elif kind == "clear" and self.rng.random() < 0.2:
            self.cache.clear(self.rng.choice([None, "a"]))
        self.check_sessions()
        self.cache.check_integrity()


def test_any_traffic() -> None:
    """Whatever sessions do, what goes early was used by one of them alone, is held and pinned by nobody, and all of it
    goes before anything else: by an oracle that knows tokens and requests only."""
    num_expended = num_superseded = 0
    for seed in range(12):
        traffic = Traffic(seed)
        for _ in range(150):
            traffic.step()
            num_superseded += any(session.num_superseded_tokens for session in traffic.cache.sessions())
        num_expended += traffic.num_expended
    assert num_expended > 10
    assert num_superseded > 10

"""Laws of quotas and fair shares: who takes too much gives up its own, others keep theirs, and everybody is told."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looseleaf import (
    CacheConfig,
    CacheManager,
    ConfigError,
    LayerGroup,
    NamespaceLayer,
    NamespaceUsage,
    OutOfBlocks,
    namespace_of,
)
from looseleaf.core import fair_shares, usage
from looseleaf.core.eviction import BUILT_IN
from tests.core.conftest import MakeCache, run, start, tokens

ALL_POLICIES = sorted(BUILT_IN)


def of(cache: CacheManager, namespace: str | None) -> NamespaceUsage:
    """The figures of one account."""
    return next(figures for figures in cache.namespace_usage() if figures.namespace == namespace)


def stored(cache: CacheManager, *namespaces: str) -> list[int]:
    """Blocks that they store."""
    known = {figures.namespace: figures.stored_blocks for figures in cache.namespace_usage()}
    return [known.get(namespace, 0) for namespace in namespaces]


def one_offs(cache: CacheManager, namespace: str, count: int, first: int = 100, num_tokens: int = 4) -> None:
    """Requests of a namespace that share nothing."""
    for number in range(count):
        run(cache, tokens(first + number, num_tokens), namespace=namespace)


# --- quotas -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "num_puts", "reserve_pages"), [(0.1, 15, 0), (0.1, 15, 10), (0.9, 95, 0)])
def test_a_tenant_at_its_quota_loses_its_own_oldest(
    make: MakeCache, share: float, num_puts: int, reserve_pages: int
) -> None:
    """[T143] Quota 10 of a pool of 100, A stores 15: its own oldest 5 are evicted, B is untouched, A is told. A quota
    of nearly all behaves the same."""
    cache = make(100, namespace_quotas={"A": share}, reserve_pages=reserve_pages)
    quota = round(100 * share)
    one_offs(cache, "B", 5, first=1)
    for number in range(num_puts):
        run(cache, tokens(100 + number, 4), namespace="A")
        cache.maintain()
    kept = [cache.match([*tokens(100 + number, 4), 0], "A").num_tokens // 4 for number in range(num_puts)]
    assert kept == [0] * (num_puts - quota) + [1] * quota
    assert all(cache.match([*tokens(1 + number, 4), 0], "B").num_tokens == 4 for number in range(5))
    told = of(cache, "A")
    assert (told.stored_blocks, told.quota_blocks) == (quota, quota)
    assert told.over_quota_tokens == told.evicted_tokens == (num_puts - quota) * 4
    assert cache.stats().over_quota_tokens == cache.stats().evicted_tokens == told.over_quota_tokens
    with cache.lease([*tokens(100, 4), 0], "r", "A"):
        told_why = cache.explain("r")
        assert (told_why.reason, told_why.policy) == ("evicted", "quota")
        assert "stored more than its quota" in told_why.message


def test_a_quota_that_meets_the_watermark(make: MakeCache) -> None:
    """[T143] A quota of just what the watermark leaves (90 of 100): nothing is refused, nothing lost in silence. A does
    not come to its quota, since B has 5; with fair shares it is A that gives room, and it is told how much."""
    cache = make(100, namespace_quotas={"A": 0.9}, reserve_pages=10, fair_shares=True)
    one_offs(cache, "B", 5, first=1)
    for number in range(95):
        run(cache, tokens(100 + number, 4), namespace="A")
        cache.maintain()
    assert stored(cache, "A", "B") == [85, 5]
    assert (of(cache, "A").evicted_tokens, of(cache, "A").over_quota_tokens) == (40, 0)
    kept = [cache.match([*tokens(100 + number, 4), 0], "A").num_tokens // 4 for number in range(95)]
    assert kept == [0] * 10 + [1] * 85


def test_a_running_request_may_be_over_its_quota(make: MakeCache) -> None:
    """What runs is served whatever the quota; at its end what is beyond the quota goes, tail first."""
    cache = make(32, namespace_quotas={"A": 4 / 32})
    run(cache, tokens(1, 8), namespace="A")
    lease = start(cache, tokens(2, 40), namespace="A")
    assert stored(cache, "A") == [10], "its own two older blocks went at once"
    assert of(cache, "A").held_blocks == 10
    lease.release()
    assert stored(cache, "A") == [4]
    assert cache.match([*tokens(2, 40), 0], "A").num_tokens == 16


def test_room_is_made_from_whoever_is_over_its_quota(make: MakeCache) -> None:
    """In a full pool a tenant at its quota takes the place of its own, though another's is older."""
    cache = make(16, namespace_quotas={"A": 8 / 16})
    one_offs(cache, "B", 8, first=1)
    one_offs(cache, "A", 8)
    assert cache.room().num_free_blocks == 0
    with cache.lease(tokens(50, 12), None, "A") as lease:
        lease.reserve(12)
        assert stored(cache, "A", "B") == [5, 8]
        lease.commit(12)
        cache.append_many([lease], [1])
        assert stored(cache, "A", "B") == [7, 8]
    with cache.lease(tokens(51, 60), None, "A") as lease:
        lease.reserve(60)
        assert stored(cache, "A", "B")[0] == 0, "its own first"
    cache.check_integrity()


def test_pins_stay_above_a_quota(make: MakeCache) -> None:
    """A pin is a promise: what it covers stays, whatever the quota of stored blocks; when it ends the rest goes."""
    cache = make(32, pin_quota=1.0)
    run(cache, tokens(1, 24), namespace="A")
    pin = cache.pin(tokens(1, 24), namespace="A")
    cache.set_namespace_quota(2 / 32, "A")
    assert of(cache, "A").stored_blocks == of(cache, "A").pinned_blocks == 6
    cache.unpin(pin.id)
    cache.maintain()
    assert stored(cache, "A") == [2]


def test_quotas_change_at_run_time(make: MakeCache) -> None:
    """A first quota moves what is stored under a policy of its own, in the order of last use; a larger one lets more
    in; other namespaces go on as before."""
    cache = make(32)
    one_offs(cache, "A", 6)
    one_offs(cache, "B", 6, first=1)
    run(cache, [*tokens(100, 4), 0], namespace="A")  # the oldest is used again
    with cache.lease(tokens(60, 8), None, "A") as lease:
        lease.reserve(8)
        cache.set_namespace_quota(3 / 32, "A")
        cache.check_integrity()
    kept = [number for number in range(6) if cache.match([*tokens(100 + number, 4), 0], "A").num_tokens]
    assert kept == [0, 4, 5]
    cache.set_namespace_quota(5 / 32, "A")
    one_offs(cache, "A", 6)
    assert stored(cache, "A", "B") == [5, 6]
    one_offs(cache, "B", 40, first=200)
    assert stored(cache, "A", "B") == [0, 32], "the oldest goes first where nobody is over a quota"
    assert cache.config.namespace_quotas == {"A": 5 / 32}
    cache.resize(16)
    one_offs(cache, "A", 6)
    assert stored(cache, "A") == [2], "5 of 32 are 2 of 16"


def test_a_quota_covers_all_that_is_the_tenant_s(make: MakeCache) -> None:
    """Salts and adapters divide a tenant's namespace; they do not multiply its quota."""
    cache = make(32, namespace_quotas={namespace_of(tenant="A"): 4 / 32})
    for number in range(12):
        salted = namespace_of(tenant="A", salt=f"{number}", adapter="x")
        run(cache, tokens(number + 1, 8), namespace=salted)
    assert stored(cache, namespace_of(tenant="A")) == [4]
    assert [figures.namespace for figures in cache.namespace_usage()] == [namespace_of(tenant="A")]


def test_sessions_that_ended_go_first_within_a_quota(make: MakeCache) -> None:
    """Of what is the tenant's own, what a session left behind goes before all else."""
    cache = make(32, namespace_quotas={"A": 4 / 32})
    run(cache, tokens(1, 8), namespace="A")
    run(cache, tokens(2, 8), namespace="A", session="s")
    cache.end_session("s", "A")
    run(cache, tokens(3, 4), namespace="A")
    assert cache.match([*tokens(1, 8), 0], "A").num_tokens == 8
    assert cache.match([*tokens(2, 8), 0], "A").num_tokens == 4


@pytest.mark.parametrize(
    ("quotas", "message"),
    [
        ({"A": 1.5}, "must be a share from 0 to 1"),
        ({"A": -0.1}, "must be a share from 0 to 1"),
        ({"A": "10%"}, "must be a share from 0 to 1"),
        ({3: 0.1}, "must be a string"),
        ({namespace_of(tenant="A", salt="s"): 0.1}, "counts to the tenant"),
    ],
)
def test_quotas_that_cannot_be_are_refused(make: MakeCache, quotas: dict, message: str) -> None:  # type: ignore[type-arg]
    """In the configuration and at run time, with nothing changed."""
    with pytest.raises(ConfigError, match=message):
        make(8, namespace_quotas=quotas)
    cache = make(8)
    run(cache, tokens(1, 8))
    before = cache.stats()
    ((namespace, share),) = quotas.items()
    with pytest.raises(ConfigError, match=message):
        cache.set_namespace_quota(share, namespace)
    assert (cache.stats(), cache.config.namespace_quotas) == (before, {})
    assert cache._store.victims.shares is None
    with pytest.raises(ConfigError, match="fair_shares"):
        make(8, fair_shares=1)


# --- fair shares ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_a_flood_takes_its_own_blocks_first(make: MakeCache, policy: str) -> None:
    """Whatever the policy: tenants within their share keep all of it while another floods the cache."""
    cache = make(40, policy=policy, fair_shares=True)
    for name in ("a", "b", "c"):
        one_offs(cache, name, 10, first=1)
    one_offs(cache, "flood", 200)
    assert stored(cache, "a", "b", "c", "flood") == [10, 10, 10, 10]
    for name in ("a", "b", "c"):
        assert [cache.match([*tokens(1 + number, 4), 0], name).num_tokens for number in range(10)] == [4] * 10
    assert of(cache, "flood").evicted_tokens == cache.stats().evicted_tokens == 190 * 4


def test_idle_share_may_be_used(make: MakeCache) -> None:
    """What a tenant leaves of its share others use, and give back when it comes: the one furthest over gives."""
    cache = make(30, fair_shares=True)
    one_offs(cache, "a", 5, first=1)
    one_offs(cache, "b", 40)
    assert stored(cache, "a", "b") == [5, 25]
    one_offs(cache, "a", 40, first=200)
    assert stored(cache, "a", "b") == [15, 15]
    one_offs(cache, "c", 12)
    assert sorted(stored(cache, "a", "b", "c")) == [9, 9, 12] or sorted(stored(cache, "a", "b", "c")) == [10, 10, 10]
    one_offs(cache, "c", 40)
    assert stored(cache, "a", "b", "c") == [10, 10, 10]


def test_one_large_request_takes_no_more_than_the_excess(make: MakeCache) -> None:
    """Room for a long prompt comes from all who are above their share, each down to it, and not below from one."""
    cache = make(40, fair_shares=True)
    one_offs(cache, "a", 12, first=1)
    one_offs(cache, "b", 14, first=1)
    one_offs(cache, "c", 14, first=1)
    with cache.lease(tokens(9, 40), None, "d") as lease:  # 10 blocks: a share of four
        lease.reserve(40)
        assert stored(cache, "a", "b", "c") == [10, 10, 10]


def test_what_cannot_be_evicted_is_not_asked_for(make: MakeCache) -> None:
    """Held and pinned blocks count to their namespace; if it can't give them up the next one gives."""
    cache = make(32, fair_shares=True, pin_quota=0.5)
    run(cache, tokens(1, 32), namespace="a")
    cache.pin(tokens(1, 32), namespace="a")
    running = start(cache, tokens(2, 32), namespace="a")
    one_offs(cache, "b", 40)
    assert stored(cache, "a", "b") == [16, 16]
    assert (of(cache, "a").held_blocks, of(cache, "a").pinned_blocks) == (8, 8)
    one_offs(cache, "c", 40, first=900)
    assert stored(cache, "a", "b", "c") == [16, 8, 8]
    running.release()
    one_offs(cache, "c", 40, first=900)
    assert stored(cache, "a", "b", "c") == [12, 8, 12]


def test_blocks_that_are_being_written_count(make: MakeCache) -> None:
    """What a tenant's running requests hold and have not committed is its own use: its cached blocks go first."""
    cache = make(32, fair_shares=True)
    one_offs(cache, "a", 12, first=1)
    one_offs(cache, "b", 12, first=1)
    with cache.lease(tokens(50, 80), None, "a") as lease:
        lease.reserve(80)
        assert stored(cache, "a", "b") == [0, 12]
        assert of(cache, "a").held_blocks == 20


def test_a_shared_layer_outlives_its_tenants(make: MakeCache) -> None:
    """The shared part stays while anything hangs below it; what hangs below counts to the tenants."""
    cache = make(24, fair_shares=True)
    layer = NamespaceLayer("", 16)
    for number in range(60):
        prompt = tokens(1, 16) + tokens(number + 2, 8)
        run(cache, prompt, namespace=f"t{number % 4}", layers=[layer])
    assert cache.match([*tokens(1, 16), 0]).num_tokens == 16
    assert stored(cache, "")[0] == 4
    assert min(stored(cache, "t0", "t1", "t2", "t3")) >= 24 // 5


@given(st.integers(0, 2**32), st.sampled_from(ALL_POLICIES))
@settings(max_examples=25, deadline=None)
def test_nobody_goes_below_its_share_while_others_are_above(seed: int, policy: str) -> None:
    """Max-min fairness, at every reservation: who lost blocks and is below an equal share now lost them since nobody
    above it had anything left to give."""
    rng = random.Random(seed)
    config = CacheConfig(num_pages=24, page_tokens=4, block_tokens=4, policy=policy, fair_shares=True)
    cache = CacheManager(config)
    leases = []
    for number in range(120):
        name = f"t{min(rng.randrange(6), rng.randrange(6))}"
        prompt = tokens(rng.randrange(8), rng.randrange(1, 40)) + tokens(rng.randrange(40), rng.randrange(1, 12))
        lease = cache.lease(prompt, f"r{number}", name)
        before = {figures.namespace: figures for figures in cache.namespace_usage()}
        if lease.try_reserve(len(prompt)):
            after = {figures.namespace: figures for figures in cache.namespace_usage()}
            check_fairness(cache, before, after)
            lease.commit(len(prompt))
        leases.append(lease)
        while len(leases) > 3 or (leases and rng.random() < 0.5):
            leases.pop(rng.randrange(len(leases))).release()
        cache.check_integrity()


def check_fairness(
    cache: CacheManager, before: dict[str | None, NamespaceUsage], after: dict[str | None, NamespaceUsage]
) -> None:
    """`held_blocks` holds those that are stored and held twice with `stored_blocks`: what is private is the rest."""
    accounts = cache._store.usage.accounts
    used = {name: accounts[name].used_blocks for name in after if name is not None}
    share = cache.plan.num_blocks // max(1, sum(blocks > 0 for blocks in used.values()))
    losers = [name for name, figures in after.items() if figures.stored_blocks < before[name].stored_blocks]
    if all(used[name] >= share for name in losers if name is not None):
        return
    offered = {cache._store.tree.nodes[node_id].namespace for node_id in cache._store.victims.offered("unpinned")}
    above = {name for name in offered if used[name] > share}
    assert not above, f"{losers} lost blocks below a share of {share}, but {above} of {used} had some to give"


@given(st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_one_tenant_alone_is_served_as_without_shares(seed: int) -> None:
    """With one namespace, or without a word about shares, the order is the policy's own."""
    rng = random.Random(seed)
    prompts = [tokens(rng.randrange(12), rng.randrange(1, 40)) for _ in range(120)]
    for policy in ("lru", "lfu", "fifo"):
        config = CacheConfig(num_pages=24, page_tokens=4, block_tokens=4, policy=policy)
        plain, fair, quota = (
            CacheManager(config),
            CacheManager(CacheConfig(24, 4, 4, policy, fair_shares=True)),
            CacheManager(CacheConfig(24, 4, 4, policy, namespace_quotas={"x": 0.5, "": 1.0})),
        )
        for prompt in prompts:
            assert run(plain, prompt) == run(fair, prompt) == run(quota, prompt)


def test_quotas_of_others_keep_the_order_of_lru(make: MakeCache) -> None:
    """With quotas that nobody reaches, LRU over several policies is LRU over all."""
    rng = random.Random(1)
    plain, divided = make(24), make(24, namespace_quotas={"t1": 1.0, "t2": 1.0, "nobody": 0.5})
    for _ in range(500):
        name, prompt = f"t{rng.randrange(4)}", tokens(rng.randrange(6), rng.randrange(1, 40))
        assert run(plain, prompt, namespace=name) == run(divided, prompt, namespace=name)
    assert plain.stats().hit_tokens > 0


# --- whatever else ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_all_policies_work_by_namespace(make: MakeCache, policy: str) -> None:
    """Splits, layers, forks, clears, resizes and new quotas under every policy; the integrity check sees all."""
    rng = random.Random(7)
    cache = make(48, policy=policy, fair_shares=policy > "m", namespace_quotas={"t1": 0.2})
    for number in range(300):
        name = f"t{rng.randrange(5)}"
        prompt = tokens(rng.randrange(3), rng.randrange(8, 40)) + tokens(rng.randrange(30), 6)
        layers = [NamespaceLayer("", 8)] if rng.random() < 0.4 else []
        run(cache, prompt, namespace=name, layers=layers, session=rng.choice([None, "s"]))
        if number % 60 == 59:
            cache.set_namespace_quota(rng.random(), f"t{rng.randrange(5)}")
            cache.resize(rng.choice([40, 48, 56]))
        if number % 100 == 99:
            cache.clear(name)
        cache.check_integrity()
    assert cache.stats().hit_tokens > 0


def test_groups_that_slide_are_fair_too(make: MakeCache) -> None:
    """Rows that a tenant may still need are not taken while a flood has its own to give."""
    groups = (LayerGroup("full"), LayerGroup("window", window_tokens=8))
    cache = make(80, groups=groups, fair_shares=True)
    for number in range(4):
        run(cache, tokens(number + 1, 16), namespace="a")
    one_offs(cache, "flood", 60, num_tokens=16)
    for number in range(4):
        assert run(cache, [*tokens(number + 1, 16), 0], namespace="a") == 16
    assert of(cache, "a").evicted_tokens == 0


def test_hit_rates_by_namespace_are_truthful(make: MakeCache) -> None:
    """Each look-up counts once, for the request's own namespace, whoever had stored the layer; not those that skip the
    cache, come back or are forked."""
    cache = make(32)
    layer = NamespaceLayer("", 16)
    run(cache, tokens(1, 24), namespace="a", layers=[layer])
    run(cache, tokens(1, 25), namespace="b", layers=[layer])
    run(cache, tokens(1, 25), namespace="b", layers=[layer], count_lookup=False)
    run(cache, tokens(1, 25), namespace="b", reuse=False)
    with start(cache, tokens(1, 25), namespace="b", layers=[layer]) as lease, lease.fork():
        pass
    assert (of(cache, "a").query_tokens, of(cache, "a").hit_rate) == (24, 0.0)
    figures = of(cache, "b")
    assert (figures.num_lookups, figures.query_tokens, figures.hit_tokens) == (2, 50, 16 + 24)
    assert figures.hit_rate == 40 / 50
    assert (of(cache, "").num_lookups, of(cache, "").stored_blocks) == (0, 4)


def test_figures_are_bounded(make: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Namespaces without a block are forgotten when there are many; their sums are not, and neither is a quota."""
    monkeypatch.setattr(usage, "MAX_IDLE_ACCOUNTS", 10)
    monkeypatch.setattr(usage, "MAX_NAMES", 16)
    monkeypatch.setattr(fair_shares, "MAX_IDLE_POLICIES", 4)
    cache = make(8, fair_shares=True, namespace_quotas={"tenant-3": 0.25})
    for number in range(200):
        run(cache, tokens(1, 9), namespace=f"tenant-{number}")
    told = cache.namespace_usage()
    assert len(told) <= 8 + 10 + 1
    assert (told[-1].namespace, told[-1].stored_blocks) == (None, 0)
    assert sum(figures.query_tokens for figures in told) == cache.stats().query_tokens == 200 * 9
    assert sum(figures.evicted_tokens for figures in told) == cache.stats().evicted_tokens
    shares = cache._store.victims.shares
    assert shares is not None
    assert len(shares._shares) <= 8 + 4 + 1
    run(cache, tokens(1, 17), namespace="tenant-3")
    assert (of(cache, "tenant-3").stored_blocks, of(cache, "tenant-3").quota_blocks) == (2, 2)


def test_a_reservation_that_fails_takes_from_nobody(make: MakeCache) -> None:
    """With quotas and shares too, a reservation that can't succeed evicts nothing and says what there is."""
    cache = make(16, fair_shares=True, namespace_quotas={"a": 0.1})
    one_offs(cache, "b", 8, first=1)
    with start(cache, tokens(1, 24), namespace="a") as lease, cache.lease(tokens(2, 60), "big", "a") as big:
        stats, told = cache.stats(), cache.namespace_usage()
        with pytest.raises(OutOfBlocks, match="cannot reserve 15 blocks"):
            big.reserve(60)
        assert (cache.stats(), cache.namespace_usage()) == (stats, told)
        assert lease.num_committed_tokens == 24


def test_policies_of_accounts_hear_of_every_end(make: MakeCache) -> None:
    """A request that stored nothing, was too short for a block, or whose blocks were cleared meanwhile leaves nothing
    open in the policy of its account."""
    cache = make(32, policy="adaptive", fair_shares=True)
    for number in range(20):
        with cache.lease(tokens(number, 3 + number % 3), namespace="a"):
            pass
        run(cache, tokens(number, 9), namespace="a", layers=(NamespaceLayer("b", 4),))
    with start(cache, tokens(19, 9), namespace="a", layers=(NamespaceLayer("b", 4),)):
        cache.clear()
    shares = cache._store.victims.shares
    assert shares is not None
    policies = [share.policy for share in shares._shares.values()]
    assert len(policies) > 1
    assert not any(policy._open for policy in policies)
    assert not shares._waiting

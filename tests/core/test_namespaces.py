"""Laws of namespaces: their names are unambiguous, nothing crosses them but declared layers, and those exactly."""

from __future__ import annotations

import itertools

import pytest

from looseleaf import CacheConfig, CacheManager, NamespaceLayer, RequestError, namespace_of
from looseleaf.core.namespaces import Border, Tenancy, account_of, fingerprint
from looseleaf.testing import StampMemory
from looseleaf.testing.mirror import EventMirror
from tests.core.conftest import MakeCache, run, start, tokens

ODD = [None, "", "X", "org_1", "org_12", "2345", "345", 'X"', '"', "/", '/salt="X"', "tenant", "ü", "\\", "\ud800"]
SHARED = NamespaceLayer("", 16)
POLICY = tokens(1, 16)
"""A prompt of four blocks that every tenant begins with."""


# --- names ------------------------------------------------------------------------------------------------------------


def test_no_two_combinations_have_the_same_name() -> None:
    """[T134] Tenant, adapter, revision and salt are typed and quoted; absent differs from empty; nothing at all is "".

    The public fault: name "X" and salt "X" made the same key, and ("org_1", "2345") that of ("org_12", "345").
    """
    few = [None, "", "X", '/salt="X"']
    names = [
        namespace_of(tenant=tenant, adapter=adapter, model_revision=revision, salt=salt)
        for tenant, salt in itertools.product(ODD, ODD)
        for adapter, revision in itertools.product(few, few)
    ]
    assert len(set(names)) == len(names)
    assert namespace_of() == ""
    adapter, salt = namespace_of(adapter="X"), namespace_of(salt="X")
    assert len({adapter, salt, namespace_of(adapter="X", salt=""), namespace_of(adapter="", salt="X")}) == 4


@pytest.mark.parametrize("value", [7, b"X", ["X"], True])
def test_parts_are_strings(value: object) -> None:
    """Adapter 7 and adapter "7" are not guessed to be the same: a part that is no string is refused."""
    with pytest.raises(RequestError, match="must be a string"):
        namespace_of(adapter=value)  # type: ignore[arg-type]


def test_memory_counts_to_the_tenant() -> None:
    """Whatever divides a tenant's namespace, its memory is the tenant's; names of no tenant stand for themselves."""
    for tenant, salt in itertools.product(ODD, ODD):
        name = namespace_of(tenant=tenant, salt=salt, adapter="a")
        assert account_of(name) == (name if tenant is None else namespace_of(tenant=tenant))
    for own in ("", "a", "tenant", "tenant=", 'tenant="', 'tenant="a', 'tenant="a"x', "tenant=3", 'xtenant="a"'):
        assert account_of(own) == own


def test_a_fingerprint_names_content() -> None:
    """[T136] The same weights have the same name wherever they are loaded; other weights, or cut elsewhere, another."""
    assert fingerprint([b"ab", b"c"]) == fingerprint([b"ab", b"c"])
    assert len({fingerprint(chunks) for chunks in ([b"ab", b"c"], [b"a", b"bc"], [b"abc"], [b"abc", b""], [])}) == 5


# --- apart ------------------------------------------------------------------------------------------------------------


def test_adapters_do_not_share(make: MakeCache) -> None:
    """[T133] The same 16 tokens under the base model and two adapters: three prefixes, no cross hits."""
    cache = make(32)
    names = [namespace_of(), namespace_of(adapter="L1"), namespace_of(adapter="L2")]
    assert [run(cache, [*POLICY, 0], namespace=name) for name in names] == [0, 0, 0]
    assert [run(cache, [*POLICY, 0], namespace=name) for name in names] == [16, 16, 16]
    assert cache.stats().cached_blocks == 12
    with cache.lease([*POLICY, 0], "r", namespace_of(adapter="L3")):
        assert cache.explain("r").reason == "other_namespace"


def test_an_adapter_reloaded_in_place_shares_nothing_with_its_past(make: MakeCache) -> None:
    """[T136] Warm "a" of version 1, load version 2 under the same name: 0 cached; version 1 again: a hit."""
    cache = make(32)
    old, new = (namespace_of(adapter=fingerprint([b"a", weights])) for weights in (b"version 1", b"version 2"))
    assert run(cache, [*POLICY, 0], namespace=old) == 0
    assert run(cache, [*POLICY, 0], namespace=new) == 0
    assert run(cache, [*POLICY, 0], namespace=old) == 16


def test_rapid_switching_never_mixes_adapters() -> None:
    """[T142] L1 and L2 in turn on the same 60 tokens, 200 times, in a pool for one and a half of them: every stamp that
    is read belongs to the adapter that reads it."""
    cache = CacheManager(CacheConfig(num_pages=12, page_tokens=8, block_tokens=4))
    memory = StampMemory(24, 4)
    for number in range(200):
        with cache.lease(tokens(1, 60), None, namespace_of(adapter=f"L{number % 2}")) as lease:
            memory.verify(lease)
            lease.reserve(60)
            memory.write(lease, lease.num_cached_tokens, 60)
            lease.commit(60)
            memory.verify(lease)
    assert 0 < cache.stats().hit_tokens < cache.stats().query_tokens
    cache.check_integrity()


def test_salts_are_honoured(make: MakeCache) -> None:
    """[T140] Tenant A stores, tenant B asks for the same: nothing; A again hits (or the test would prove nothing)."""
    cache = make(32)
    one, other = namespace_of(salt="A"), namespace_of(salt="B")
    run(cache, [*POLICY, 0], namespace=one)
    assert cache.match([*POLICY, 0], other).num_tokens == 0
    assert run(cache, [*POLICY, 0], namespace=other) == 0
    assert run(cache, [*POLICY, 0], namespace=one) == 16


def test_new_weights_find_nothing_old(make: MakeCache) -> None:
    """[T137] A change of weights clears: what is cached is gone, layers and what hangs below them too, and a request
    that runs meanwhile stores nothing any more."""
    cache = make(32)
    run(cache, POLICY + tokens(2, 8), namespace="a", layers=[SHARED])
    with start(cache, POLICY + tokens(3, 8), namespace="b", layers=[SHARED]) as running:
        cache.clear()
        running.append(tokens(4, 8))
        running.reserve(32)
        running.commit(32)
    assert cache.stats().cached_blocks == 0
    assert run(cache, POLICY + tokens(2, 8), namespace="a", layers=[SHARED]) == 0


# --- layers -----------------------------------------------------------------------------------------------------------


def test_a_layer_is_shared_and_the_rest_is_not(make: MakeCache) -> None:
    """Every tenant finds the shared beginning, whoever computed it, and of what follows its own alone."""
    cache = make(64)
    prompt = POLICY + tokens(2, 12)
    assert run(cache, prompt, namespace="a", layers=[SHARED]) == 0
    assert run(cache, prompt, namespace="b", layers=[SHARED]) == 16
    assert run(cache, [*prompt, 0], namespace="b", layers=[SHARED]) == 28
    assert run(cache, [*prompt, 0], namespace="c", layers=[SHARED]) == 16
    assert run(cache, [*prompt, 0]) == 16, "the layer is the plain namespace's beginning"
    assert run(cache, [*prompt, 0], namespace="a") == 0, "without the layer all lies in a's own tree"
    assert cache.match(POLICY, "d", layers=[SHARED]).num_tokens == 12
    assert cache.stats().num_namespaces == 4


def test_a_layer_is_cut_to_whole_blocks(make: MakeCache) -> None:
    """Of a layer of 15 tokens three blocks of four are shared; one of less than a block is none."""
    cache = make(64)
    run(cache, [*POLICY, 0], namespace="a", layers=[NamespaceLayer("", 15)])
    assert run(cache, [*POLICY, 0], namespace="b", layers=[NamespaceLayer("", 15)]) == 12
    assert run(cache, [*POLICY, 0], namespace="b", layers=[SHARED]) == 12, "the fourth block lies in b's own part"
    assert run(cache, [*POLICY, 0], namespace="c", layers=[NamespaceLayer("", 3)]) == 0
    assert run(cache, [*POLICY, 0], namespace="c") == 16


def test_layers_of_layers(make: MakeCache) -> None:
    """A part for all, a part for an organisation, a part for its user: each is found by those who declare it."""
    cache = make(64)
    prompt = tokens(1, 24)
    layers = [NamespaceLayer("", 8), NamespaceLayer("org", 16)]
    assert run(cache, [*prompt, 0], namespace="ann", layers=layers) == 0
    assert run(cache, [*prompt, 0], namespace="bob", layers=layers) == 16
    assert run(cache, [*prompt, 0], namespace="ann", layers=layers) == 24
    assert run(cache, [*prompt, 0], namespace="org", layers=[NamespaceLayer("", 8)]) == 16
    assert run(cache, [*prompt, 0], namespace="org", layers=layers) == 24, "its own layer merges with the rest"
    assert run(cache, [*prompt, 0], namespace="eve", layers=[NamespaceLayer("", 8)]) == 8


def test_output_belongs_to_the_tenant(make: MakeCache) -> None:
    """A prompt that is shared to its end: what is generated behind it is the tenant's alone."""
    cache = make(64)
    with start(cache, POLICY, namespace="a", layers=[SHARED]) as lease:
        lease.append(tokens(5, 8))
        lease.reserve(24)
        lease.commit(24)
        with lease.fork("child") as child:
            assert (child.namespace, child.layers) == ("a", (SHARED,))
    assert cache.match([*POLICY, *tokens(5, 8), 0], "a", layers=[SHARED]).num_tokens == 24
    assert cache.match([*POLICY, *tokens(5, 8), 0], "b", layers=[SHARED]).num_tokens == 16
    assert cache.match([*POLICY, *tokens(5, 8), 0]).num_tokens == 16


def test_a_request_that_comes_back_finds_its_own(make: MakeCache) -> None:
    """[P23] A preempted request is looked up again with the layers of its lease, prompt and output: all is there."""
    cache = make(64)
    lease = start(cache, POLICY + tokens(2, 5), "r", namespace="a", layers=[SHARED])
    lease.append(tokens(3, 10))
    lease.reserve(31)
    lease.commit(31)
    known, namespace, layers = lease.token_ids, lease.namespace, lease.layers
    lease.release()
    with cache.lease([*known.tolist(), 0], "r", namespace, layers=layers, count_lookup=False) as back:
        assert back.num_cached_tokens == 28
        assert cache.explain("r").reason == "never_seen", "the reason of its first look-up"


def test_explanations_tell_nothing_of_others(make: MakeCache) -> None:
    """Behind a layer a miss is explained by the tenant's own past; of others it says at most that they have it."""
    cache = make(64)
    own, other = POLICY + tokens(2, 8), POLICY + tokens(3, 8)
    run(cache, own, namespace="a", layers=[SHARED])
    run(cache, other, namespace="b", layers=[SHARED])

    def reason(prompt: list[int], namespace: str) -> tuple[str, int | None, int]:
        with cache.lease([*prompt, 0], "r", namespace, layers=[SHARED]):
            told = cache.explain("r")
            return told.reason, told.first_missed_token, told.num_shared_tokens

    assert reason(other, "a") == ("other_namespace", 16, 16)
    assert reason([*other[:18], 7, 7], "a") == ("diverged", 16, 16), "b's two tokens in common are not told"
    assert reason([*own[:18], 7, 7], "a") == ("diverged", 18, 18)
    assert reason([*other[:18], 7, 7], "c") == ("never_seen", 16, 16)
    cache.clear("a")
    assert reason(own, "a") == ("cleared", 16, 16)
    assert reason(own, "c") == ("never_seen", 16, 16)


def test_clearing_a_tenant_spares_the_layer(make: MakeCache) -> None:
    """[S118] What a tenant has behind layers goes with the rest of its namespace, and nothing else does."""
    cache = make(64)
    run(cache, POLICY + tokens(2, 8), namespace="a", layers=[SHARED])
    run(cache, tokens(4, 8), namespace="a")
    run(cache, POLICY + tokens(3, 8), namespace="b", layers=[SHARED])
    result = cache.clear("a")
    assert (result.num_cleared_tokens, result.num_kept_tokens) == (16, 0)
    assert run(cache, POLICY + tokens(2, 8), namespace="a", layers=[SHARED]) == 16
    assert run(cache, POLICY + tokens(3, 9), namespace="b", layers=[SHARED]) == 24


def test_clearing_a_layer_clears_what_hangs_below(make: MakeCache) -> None:
    """[S117, S118] What was computed behind a layer can't outlive it; a running request below is detached."""
    cache = make(64)
    run(cache, POLICY + tokens(2, 8), namespace="a", layers=[SHARED])
    run(cache, tokens(4, 8), namespace="a")
    with start(cache, POLICY + tokens(3, 8), namespace="b", layers=[SHARED]) as running:
        result = cache.clear("")
        assert (result.num_cleared_tokens, result.num_kept_tokens) == (8, 24)
        assert not running.stores
    assert cache.match([*tokens(4, 8), 0], "a").num_tokens == 8
    assert cache.stats().cached_blocks == 2
    assert run(cache, POLICY + tokens(2, 8), namespace="a", layers=[SHARED]) == 0


def test_pins_below_layers(make: MakeCache) -> None:
    """A pin of a layered prompt takes quota of each namespace for its part, survives clears, and is its tenant's."""
    cache = make(64, pin_quota=1.0, namespace_pin_quotas={"a": 2 / 64, "": 5 / 64})
    prompt = POLICY + tokens(2, 12)
    run(cache, prompt, "r", namespace="a", layers=[SHARED])
    pin = cache.pin(prompt, namespace="a", layers=[SHARED], level="soft")
    assert (pin.namespace, pin.num_pinned_tokens, pin.is_limited) == ("a", 24, True)
    assert (cache.pinned_blocks_of(""), cache.pinned_blocks_of("a")) == (4, 2)
    run(cache, tokens(9, 8))
    cache.pin(tokens(9, 8), level="soft", priority=1)
    assert (cache.pinned_blocks_of(""), cache.pinned_blocks_of("a")) == (5, 2), (
        "one of two: the quota of the layer is full"
    )
    assert cache.clear("").num_kept_tokens == 24 + 4
    assert cache.clear("a").num_kept_tokens == 8
    assert cache.match([*prompt, 0], "a", layers=[SHARED]).num_tokens == 24
    cache.set_pin_quota(1.0, "a")
    run(cache, prompt, namespace="a", layers=[SHARED])
    assert cache.pins()[0].num_pinned_tokens == 28
    assert cache.pin(request_id="r").num_pinned_tokens == 28
    assert [pin.namespace for pin in cache.unpin_all(owner="", namespace="a")] == ["a", "a"]


def test_a_pin_waits_in_its_own_namespace(make: MakeCache) -> None:
    """A pin that waits for a tenant's part takes no notice of another's equal tokens, stored or evicted."""
    cache = make(64, pin_quota=1.0)
    prompt = POLICY + tokens(2, 8)
    cache.pin(prompt, namespace="a", layers=[SHARED])
    run(cache, prompt, namespace="b", layers=[SHARED])
    assert cache.pins()[0].num_pinned_tokens == 16
    cache.clear("b")
    run(cache, prompt, namespace="a", layers=[SHARED])
    assert cache.pins()[0].num_pinned_tokens == 24
    cache.clear(include_pins=False)
    assert cache.match([*prompt, 0], "a", layers=[SHARED]).num_tokens == 24


def test_the_event_stream_tells_of_layers() -> None:
    """[I10] Events name each block's own namespace and its parent, in whatever namespace that is."""
    mirror = EventMirror(4)
    cache = CacheManager(CacheConfig(num_pages=12, page_tokens=4, block_tokens=4), on_event=mirror.on_event)
    for number in range(6):
        run(cache, POLICY + tokens(number % 3 + 2, 8), namespace=f"t{number % 2}", layers=[SHARED])
        prompt = [*POLICY, *tokens(number % 3 + 2, 8), 0]
        for name in ("t0", "t1", ""):
            layers = [SHARED] if name else []
            assert cache.match(prompt, name, layers=layers).num_tokens == mirror.match(prompt, name, layers)
    assert cache.stats().evicted_tokens == mirror.num_removed_tokens["evicted"] > 0
    cache.check_integrity()


def test_many_tenants_below_one_layer_cost_nothing_when_gone(make: MakeCache) -> None:
    """What a tenant had below a layer leaves nothing behind when it is evicted."""
    cache = make(8)
    for number in range(200):
        run(cache, POLICY + tokens(2, 4), namespace=f"tenant-{number}", layers=[SHARED])
    assert cache.stats().num_namespaces <= 5
    assert len(cache._store.tree.first_blocks) <= 5


# --- what is refused --------------------------------------------------------------------------------------------------

BAD_LAYERS = {
    "shorter": ([NamespaceLayer("", 8), NamespaceLayer("org", 4)], "ends after 4 tokens"),
    "as long": ([NamespaceLayer("", 8), NamespaceLayer("org", 8)], "ends after 8 tokens"),
    "twice": ([NamespaceLayer("x", 4), NamespaceLayer("y", 8), NamespaceLayer("x", 12)], "a second time"),
    "own": ([NamespaceLayer("a", 4), NamespaceLayer("y", 8)], "a second time"),
    "longer than the prompt": ([NamespaceLayer("", 17)], "covers 17 tokens of a prompt of 16"),
    "no layer": ([("", 8)], "must be a NamespaceLayer"),
}


@pytest.mark.parametrize(("layers", "message"), BAD_LAYERS.values(), ids=BAD_LAYERS)
def test_layers_that_do_not_fit_are_refused(make: MakeCache, layers: list[NamespaceLayer], message: str) -> None:
    """Every door refuses them with the numbers, and nothing has changed."""
    cache = make(32)
    run(cache, POLICY, namespace="a")
    stats = cache.stats()
    for door in (
        lambda: cache.lease(POLICY, "r", "a", layers=layers),
        lambda: cache.match(POLICY, "a", layers=layers),
        lambda: cache.pin(POLICY, namespace="a", layers=layers),
    ):
        with pytest.raises(RequestError, match=message):
            door()
    assert cache.stats() == stats


def test_bad_values_are_refused(make: MakeCache) -> None:
    """Namespaces are strings, lengths numbers of tokens; a pin of a request has the layers of the request."""
    cache = make(32)
    for namespace, num_tokens in ((None, 4), (b"", 4), ("", 0), ("", -1), ("", 1.5), ("", True), ("", "4")):
        with pytest.raises(RequestError, match="a layer's"):
            NamespaceLayer(namespace, num_tokens)  # type: ignore[arg-type]
    for namespace in (None, 3, b"a"):
        with pytest.raises(RequestError, match="must be a string"):
            cache.lease(POLICY, "r", namespace)  # type: ignore[arg-type]
    run(cache, POLICY, "r", namespace="a", layers=[SHARED])
    with pytest.raises(RequestError, match="layers with tokens only"):
        cache.pin(request_id="r", layers=[SHARED])


def test_a_tenancy_says_where_blocks_lie() -> None:
    """Layers are cut to blocks, merged with their neighbours of the same name, and dropped where nothing is left."""
    of = Tenancy.of
    layers = [NamespaceLayer("x", 9), NamespaceLayer("y", 11), NamespaceLayer("z", 20)]
    tenancy = of("z", layers, 40, 4)
    assert (tenancy.root, tenancy.borders) == ("x", (Border(2, "z"),))
    assert [tenancy.at(block) for block in range(4)] == ["x", "x", "z", "z"]
    assert tenancy.namespaces == ("x", "z")
    assert tenancy.up_to(2).namespaces == ("x",)
    assert of("a", [NamespaceLayer("a", 20)], 40, 4) == of("a", [], 40, 4)
    assert of("a", [NamespaceLayer("x", 8)], 40, 4) == of("a", [NamespaceLayer("x", 11)], 40, 4)

"""A request's look-up: what is found is held, counted and explained, and everybody who learns from it is told."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from looseleaf.core.auto_pins import LookUp
from looseleaf.core.explain import Finding, Lost, WindowCut, explain_lookup
from looseleaf.core.namespaces import Tenancy
from looseleaf.core.store import BlockStore
from looseleaf.core.tokens import TOKEN_BYTES
from looseleaf.core.tree import Node
from looseleaf.ids import Int32Array, Int64Array, Namespace


@dataclass(slots=True)  # not frozen: that costs three times as much, at each look-up
class Query:
    """What a request asks for: packed tokens `data`, stored as `tenancy` says. `request`: its number for policy and
    sessions. Without `reuse` nothing is looked for. `earlier`: what the first look-up of a request found that comes
    back; `is_counted`: False for such a one, which is no further use and counts nowhere."""

    data: bytes
    tenancy: Tenancy
    request: int
    reuse: bool
    is_counted: bool
    session: str | None
    earlier: Finding | None


class Found(NamedTuple):
    """What a look-up holds: the last `node` and the block `table` of its path, only to be read. `finding` says why (of
    a request that comes back: why at first). Of the whole blocks behind it, `keys`: their chain keys, int64 [n], None
    where nobody asked for them; `cuts`: the logical blocks at which another run begins when they are stored."""

    node: Node
    table: Int32Array
    finding: Finding
    keys: Int64Array | None = None
    cuts: Sequence[int] = ()


def look_up(store: BlockStore, query: Query, clock: Callable[[], float]) -> Found:
    """Find the longest usable prefix and hold it."""
    root, data = store.tree.root(query.tenancy.root), query.data
    num_tokens, now = len(data) // TOKEN_BYTES, clock()
    if not query.reuse:
        finding = Finding("skipped", num_tokens, at_seconds=now, session=query.session)
        if query.is_counted:
            store.misses.record(query.tenancy.namespace, finding)
        return Found(root, store.tree.no_blocks, finding)
    if query.session is not None:
        num_prompt_tokens = num_tokens if query.earlier is None else query.earlier.num_prompt_tokens
        is_first = query.is_counted
        store.sessions.begin(query.session, query.tenancy.namespace, query.request, num_prompt_tokens, is_first, now)
    num_usable = (num_tokens - 1) // store.plan.block_tokens
    found = store.find(root, data, num_usable, query.tenancy.borders)
    used_at = [] if store.auto_pins is None else [step.last_used_at for step in found.match.node.path()]
    node, table = store.hold(found.match, query.request)
    cut = None if found.cut_by is None else WindowCut(found.cut_by.group.name, found.num_known_blocks)
    keys = _keys_of_missing(store, query, node)
    lost = None if keys is None or node.end == num_usable else _lost(store, int(keys[0]))
    finding = explain_lookup(store.tree, node, data, query.tenancy, cut, lost, now)
    finding.session = query.session
    if store.pins.records:
        _tell_pins(store, query, root, node, finding)
    cuts: Sequence[int] = ()
    if keys is not None:
        usable = keys[: num_usable - node.end]
        cuts = _tell_others(store, query, node, usable, used_at, found.num_known_blocks, finding)
        cuts = [node.end + number for number in cuts] if cuts else cuts
    if query.session is not None and query.is_counted:
        store.sessions.supersede(query.request, node, data)
    if query.is_counted:
        _count(store, query.tenancy.namespace, finding)
        store.misses.record(query.tenancy.namespace, finding)
    return Found(node, table, query.earlier or finding, keys, cuts)


def _lost(store: BlockStore, key: int) -> Lost | None:
    """What is remembered of a block by its chain key, if it was stored once."""
    block = store.forgotten.look_up(key)
    if block is None:
        return None
    return Lost(block, store.pressure.num_evicted_blocks - block.num_evicted_blocks, store.victims.policy.name)


def _count(store: BlockStore, namespace: Namespace, finding: Finding) -> None:
    """Each look-up counts once, with the whole prompt, in all and for the request's namespace."""
    store.usage.on_lookup(namespace, finding.num_prompt_tokens, finding.num_cached_tokens)
    counters = store.counters
    counters.num_lookups += 1
    counters.query_tokens += finding.num_prompt_tokens
    counters.hit_tokens += finding.num_cached_tokens
    if finding.first_missed_token is not None:
        counters.below_block_tokens += finding.num_shared_tokens - finding.num_cached_tokens


def _tell_pins(store: BlockStore, query: Query, root: Node, node: Node, finding: Finding) -> None:
    """Pins are used, and those that use keeps alive are refreshed."""
    path, now = node.path(), finding.at_seconds
    if query.is_counted:
        store.pins.on_hit(path, query.data, query.tenancy, now)
    if store.pins.has_expiries:
        store.pins.refresh(root, query.data, query.tenancy, now)
    num_pinned = sum(step.num_blocks for step in path if step.is_pinned)
    finding.num_pinned_tokens = num_pinned * store.plan.block_tokens


def _keys_of_missing(store: BlockStore, query: Query, node: Node) -> Int64Array | None:
    """Chain keys of the prompt's whole blocks behind `node`, if anybody has a use for them before they are stored."""
    if not store.victims.policy.uses_keys and store.forgotten.is_empty and store.auto_pins is None:
        return None
    return store.forgotten.keys_behind(node, query.data, query.tenancy.borders)


def _tell_others(
    store: BlockStore,
    query: Query,
    node: Node,
    keys: Int64Array,
    used_at: list[float],
    num_known_blocks: int,
    finding: Finding,
) -> Sequence[int]:
    """What is missing, by the chain keys of the blocks that could have hit, is told to the policy, to pins that cost
    it, and to automatic pinning. At which of them the policy wants another run to begin."""
    cuts: Sequence[int] = ()
    if store.victims.policy.uses_keys:
        told = array("q", keys.tobytes())
        cuts = store.victims.on_missed(told, store.next_use(query.request), query.tenancy, node.end)
    block_tokens = store.plan.block_tokens
    if finding.reason == "cleared":
        finding.num_lost_tokens = store.forgotten.num_cleared(keys) * block_tokens
    auto_pins = store.auto_pins if query.is_counted else None
    if finding.reason == "evicted" or auto_pins is not None:
        run = store.forgotten.evicted_run(keys)
        if finding.reason == "evicted":
            finding.num_lost_tokens = len(run.keys) * block_tokens
            store.pins.on_recomputed(finding.num_lost_tokens)
        if auto_pins is not None:
            path, now = node.path(), finding.at_seconds
            ends = store.forgotten.end_keys(node)
            auto_pins.on_lookup(
                LookUp(query.tenancy, query.data, path, ends, used_at, keys, run, num_known_blocks, now)
            )
    return cuts

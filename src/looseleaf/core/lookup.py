"""A request's look-up: what is found is held, counted and explained, and everybody who learns from it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from looseleaf.core.auto_pins import LookUp
from looseleaf.core.explain import Explanation, WindowCut, explain_lookup, skipped
from looseleaf.core.namespaces import Tenancy
from looseleaf.core.store import BlockStore
from looseleaf.core.tokens import TOKEN_BYTES
from looseleaf.core.tree import Node
from looseleaf.ids import Int32Array


def look_up(
    store: BlockStore,
    data: bytes,
    tenancy: Tenancy,
    request: int,
    reuse: bool,
    is_first: bool,
    clock: Callable[[], float],
) -> tuple[Node, Int32Array, Explanation]:
    """Find the longest usable prefix of packed tokens `data`, stored as `tenancy` says, and hold it: the last node
    held, the block table of its path, and why there is no more. `request`: its number for the policy. Without `reuse`
    nothing is looked for. `is_first`: False for a request that comes back, which is no further use."""
    root = store.tree.root(tenancy.root)
    num_tokens = len(data) // TOKEN_BYTES
    if not reuse:
        return root, store.tree.no_blocks.copy(), skipped(num_tokens)
    block_tokens, block_bytes = store.plan.block_tokens, store.tree.block_bytes
    num_usable = (num_tokens - 1) // block_tokens
    found = store.find(root, data, num_usable, tenancy.borders)
    used_at = [step.last_used_at for step in found.match.node.path()]
    node, table = store.hold(found.match, request)
    cut = None if found.cut_by is None else WindowCut(found.cut_by.group.name, found.num_known_blocks)
    now = clock()
    explanation = explain_lookup(store.tree, store.forgotten, node, data, tenancy, cut, now)
    if store.pins.records:
        path = node.path()
        if is_first:
            store.pins.on_hit(path, data, tenancy, now)
        if store.pins.has_expiries:
            store.pins.refresh(root, data, tenancy, now)
        num_pinned = sum(step.num_blocks for step in path if step.is_pinned)
        if num_pinned:
            explanation = replace(explanation, num_pinned_tokens=num_pinned * block_tokens)
    uses_keys = store.victims.policy.uses_keys
    if uses_keys or explanation.reason == "evicted" or store.auto_pins is not None:
        keys = store.forgotten.keys_behind(
            node, data[node.end * block_bytes : num_usable * block_bytes], tenancy.borders
        )
        run = store.forgotten.evicted_run(keys)
        if uses_keys:
            store.victims.on_missed(keys.tolist(), store.next_use(request))
        if explanation.reason == "evicted":
            num_evicted_tokens = len(run.keys) * block_tokens
            explanation = replace(explanation, num_evicted_tokens=num_evicted_tokens)
            store.pins.on_recomputed(num_evicted_tokens)
        if store.auto_pins is not None and is_first:
            ends = store.forgotten.end_keys(node)
            store.auto_pins.on_lookup(
                LookUp(tenancy, data, node.path(), ends, used_at, keys, run, found.num_known_blocks, now)
            )
    return node, table, explanation

"""The invariants I1 to I9 as code. They are numbered in this folder's README; I10 needs a listener and is in
`testing`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from looseleaf.core.blocks import BlockStates
from looseleaf.core.leasing import LeaseDesk
from looseleaf.core.namespaces import account_of
from looseleaf.core.pin_record import HARD, SOFT, PinHold
from looseleaf.core.store import BlockStore
from looseleaf.core.tree import ABSENT, Node, heads_of
from looseleaf.errors import IntegrityError
from looseleaf.ids import Int32Array


def check_integrity(store: BlockStore, desk: LeaseDesk) -> None:
    """Raise `IntegrityError` for the first invariant that does not hold."""
    states = store.block_states()
    _check_states(store, states)
    _check_references(store, desk, states)
    _check_pages(store, states)
    _check_tree(store, states)
    _check_leases(store, desk)
    _check_pins(store, states)
    _check_sessions(store, desk)
    _check_victims(store)
    _check_usage(store, desk)


def _require(holds: bool, invariant: str, facts: str) -> None:
    if not holds:
        raise IntegrityError(invariant, facts)


def _stored_nodes(store: BlockStore) -> Iterator[Node]:
    for root in store.tree.roots.values():
        for node in root.subtree():
            if not node.is_root:
                yield node


def _check_states(store: BlockStore, states: BlockStates) -> None:
    """I1: free + active + cached = all; each block is in exactly one state."""
    ledger = store.ledger
    held = states.refs > 0
    free = ~held & ~states.stored
    counts = (int(free.sum()), int(held.sum()), int((~held & states.stored).sum()))
    counted = (ledger.num_free_blocks, ledger.num_active_blocks, ledger.num_cached_blocks)
    _require(counts == counted, "I1", f"(free, active, cached) blocks are {counts}, counted {counted}")
    _require(sum(counted) == ledger.num_blocks, "I1", f"{counted} do not add up to {ledger.num_blocks} blocks")


def _check_references(store: BlockStore, desk: LeaseDesk, states: BlockStates) -> None:
    """I2: a block's reference count is the number of leases that hold it."""
    refs = np.zeros(store.ledger.num_blocks, dtype=np.int32)
    for lease in desk.live.values():
        table = lease.table[: lease.num_blocks]
        np.add.at(refs, table[table != ABSENT], 1)
    differ = np.flatnonzero(refs != states.refs)
    if len(differ):
        block = int(differ[0])
        raise IntegrityError("I2", f"block {block} has {refs[block]} holders, counted {states.refs[block]}")
    ledger = store.ledger
    if ledger.counts_runs:
        strays = np.flatnonzero((ledger.refs != 1) & (states.stored | (refs == 0)))
        _require(len(strays) == 0, "I2", f"blocks {strays[:8]}… are free or in a run, and counted one by one")


def _check_pages(store: BlockStore, states: BlockStates) -> None:
    """I3: page masks, per-page counts and the free lists agree."""
    pool = store.pool
    taken = ((states.refs > 0) | states.stored).reshape(pool.num_pages, pool.blocks_per_page)
    num_free = 0
    for page in range(pool.num_pages):
        mask = sum(1 << int(index) for index in np.flatnonzero(taken[page]))
        _require(mask == pool.masks[page], "I3", f"page {page} has mask {pool.masks[page]:b}, its blocks say {mask:b}")
        free = pool.blocks_per_page - mask.bit_count()
        num_free += free
        if 0 < free < pool.blocks_per_page:
            _require(page in pool.partial[free], "I3", f"page {page} with {free} free blocks is not in its list")
    _require(num_free == pool.num_free_blocks, "I3", f"{num_free} blocks are free, counted {pool.num_free_blocks}")
    empty = [page for page in range(pool.num_pages) if pool.masks[page] == 0]
    _require(sorted(pool.free_pages) == empty, "I3", f"free pages are {empty[:8]}…, listed {pool.free_pages[:8]}…")
    partial = sum(0 < mask < pool.full_mask for mask in pool.masks)
    _require(
        partial == pool.num_partial_pages, "I3", f"{partial} pages are partly used, {pool.num_partial_pages} listed"
    )


def _check_tree(store: BlockStore, states: BlockStates) -> None:
    """I4: a stored node's parent is stored and at least as held. I5/I6: its blocks are in one node, whole, and
    stored."""
    ledger, tree = store.ledger, store.tree
    owner = np.zeros(ledger.num_blocks, dtype=np.int32)
    seen = set()
    for node in _stored_nodes(store):
        seen.add(node.id)
        parent = node.parent
        assert parent is not None  # not a root
        name = f"node {node.id} of namespace {node.namespace!r}"
        _require(node.alive and tree.nodes.get(node.id) is node, "I4", f"{name} is in the tree but not alive")
        _require(node.num_blocks > 0, "I6", f"{name} owns no blocks")
        _require(len(node.tokens) == node.num_blocks * tree.block_bytes, "I6", f"{name}: tokens and blocks differ")
        _require(node.end == parent.end + node.num_blocks, "I6", f"{name} ends at {node.end}, parent {parent.end}")
        key = node.tokens[: tree.block_bytes]
        siblings = tree.continuations(parent, node.namespace)
        _require(siblings.get(key) is node, "I4", f"{name} is not its parent's child")
        is_listed = node.id in tree.layered.get(node.namespace, {})
        _require(is_listed == node.begins_layer, "I4", f"{name} begins a layer: {node.begins_layer}")
        present = node.blocks[node.blocks != ABSENT]
        np.add.at(owner, present, 1)
        _require(bool(states.stored[present].all()), "I6", f"{name} owns a block that is not stored")
        full = node.blocks[:, _full_lanes(store)]
        _require(bool((full != ABSENT).all()), "I6", f"{name} lacks a block that is never let go of")
        holders = states.refs[full]
        _require(bool((holders == node.num_holders).all()), "I4", f"{name}: not all its holders hold its blocks")
        _require(bool((states.refs[present] <= node.num_holders).all()), "I4", f"{name}: a block has more holders")
        _require(parent.is_root or parent.num_holders >= node.num_holders, "I4", f"{name} is held more than its parent")
        _check_marks(store, node)
    _require(seen == set(tree.nodes), "I4", "the list of nodes and the tree differ")
    for node in (*tree.roots.values(), *tree.nodes.values()):
        _require(node.heads in (None, heads_of(node)), "I4", f"node {node.id}: heads are not those of its children")
    num_layered = sum(len(begun) for begun in tree.layered.values())
    num_first = num_layered + sum(len(root.children) for root in tree.roots.values())
    _require(sum(tree.first_blocks.values()) == num_first, "I4", f"{num_first} first blocks, others are counted")
    _require(bool((owner == states.stored).all()), "I6", "a block is in two nodes, or stored without a node")


def _full_lanes(store: BlockStore) -> list[int]:
    return [
        lane for group in store.plan.groups if not group.slides for lane in range(group.first_lane, group.last_lane)
    ]


def _check_marks(store: BlockStore, node: Node) -> None:
    """I9: a sliding group's evictable rows are queued no later than they are due; a row is held in all its lanes."""
    for column, group in enumerate(store.sliding):
        lanes = node.blocks[:, group.lanes]
        _require(
            bool(((lanes == ABSENT) == (lanes[:, :1] == ABSENT)).all()), "I6", f"node {node.id}: half a row is gone"
        )
        keys = store.slid_out.keys(node, column)
        assert node.marks is not None  # there are sliding groups
        is_queued = len(keys) == 0 or node.marks.queued[column] <= keys.min()
        _require(is_queued, "I9", f"node {node.id} has evictable rows in {group.group.name!r} but is not queued")
        _require(len(node.marks.ticks) == node.num_blocks, "I6", f"node {node.id}: rows and marks differ")


def _check_leases(store: BlockStore, desk: LeaseDesk) -> None:
    """I5: what is committed is shared by content only. I7: a table covers exactly the reserved tokens."""
    rows, size = desk.rows, store.plan.block_tokens
    for lease in desk.live.values():
        row, name = lease.row, f"request {lease.request_id!r}"
        known, reserved, committed = rows.num_tokens[row], rows.num_reserved[row], rows.num_committed[row]
        _require(
            committed <= min(known, reserved), "I7", f"{name}: {committed} committed of {known}, {reserved} reserved"
        )
        _require(
            lease.num_blocks == -(-reserved // size), "I7", f"{name}: {lease.num_blocks} blocks, {reserved} tokens"
        )
        _require(rows.num_places[row] == lease.num_blocks * size, "I7", f"{name}: places are miscounted")
        index = known // size
        blocks = lease.table[index] if index < lease.num_blocks else np.full(store.plan.num_lanes, ABSENT)
        is_next = bool((rows.next_block[row] == blocks).all())
        _require(is_next, "I7", f"{name}: next blocks are {rows.next_block[row]}, not {blocks}")
        for group, first in zip(store.plan.groups, lease.first_rows, strict=True):
            present = lease.table[: lease.num_blocks, group.lanes] != ABSENT
            _require(bool(present[first:].all() and not present[:first].any()), "I7", f"{name}: it has holes")
            _require(first <= group.first_needed_block(committed // size), "I7", f"{name}: it lacks what it needs")
        if not lease.stores:
            continue
        path = lease.node.path()
        blocks = np.concatenate([store.tree.no_blocks, *(node.blocks for node in path)])
        same = len(blocks) == committed // size
        if same:
            own = lease.table[: len(blocks)]
            same = bool(((own == blocks) | (own == ABSENT)).all())
        _require(same, "I5", f"{name}: its committed blocks are not those of its path")
        tokens = b"".join(node.tokens for node in path)
        _require(lease.head.startswith(tokens), "I6", f"{name}: the tokens of its path are not its own")
        is_own = all(node.namespace == lease.tenancy.at(block) for node in path for block in (node.start, node.end - 1))
        _require(is_own, "I6", f"{name}: its path leads through namespaces that are not its own")


def _check_pins(store: BlockStore, states: BlockStates) -> None:
    """I8: pinned blocks ≤ quota; marks and counters follow from the pins."""
    pins = store.pins
    hard: dict[int, int] = {}
    soft: dict[int, list[int]] = {}
    for hold in pins.holds.values():
        _check_place(store, hold)
        path = hold.node.path()
        tokens = b"".join(node.tokens for node in path)
        _require(hold.data.startswith(tokens), "I8", f"{hold.id} holds tokens that it did not ask for")
        for node in path:
            _require(node.alive, "I8", f"{hold.id} holds a node that is gone")
            is_own = {hold.tenancy.at(node.start), hold.tenancy.at(node.end - 1)} == {node.namespace}
            _require(is_own, "I8", f"{hold.id} holds a node of another namespace")
            if hold.level == HARD:
                hard[node.id] = hard.get(node.id, 0) + 1
            else:
                soft.setdefault(node.id, []).append(hold.priority)
    num_full_lanes = len(_full_lanes(store))
    taken: Counter[tuple[str, str]] = Counter()  # blocks by namespace and level
    protected = np.zeros(store.ledger.num_blocks, dtype=np.bool_)
    guards = _expected_guards(store)
    for node in _stored_nodes(store):
        _require(node.num_hard_pins == hard.get(node.id, 0), "I8", f"node {node.id}: hard pins are miscounted")
        _require(
            sorted(node.soft_priorities) == sorted(soft.get(node.id, [])),
            "I8",
            f"node {node.id}: soft pins are miscounted",
        )
        if node.num_hard_pins:
            taken[node.namespace, HARD] += node.num_blocks * num_full_lanes
            protected[node.blocks[:, _full_lanes(store)]] = True
        elif node.soft_priorities:
            taken[node.namespace, SOFT] += node.num_blocks * num_full_lanes
        if node.marks is None:
            continue
        expected = guards.get(node.id, np.zeros((2, *node.marks.ticks.shape), dtype=np.int32))
        counted_guards = np.stack((node.marks.hard_guards, node.marks.soft_guards))
        _require(bool((expected == counted_guards).all()), "I8", f"node {node.id}: guards are miscounted")
        for column, group in enumerate(store.sliding):
            is_hard, is_soft = expected[:, :, column] > 0
            taken[node.namespace, HARD] += int(is_hard.sum()) * group.num_lanes
            taken[node.namespace, SOFT] += int((is_soft & ~is_hard).sum()) * group.num_lanes
            blocks = node.blocks[is_hard, group.lanes]
            protected[blocks[blocks != ABSENT]] = True
    _require(bool((protected == store.ledger.protected).all()), "I8", "protected blocks are not those of hard pins")
    num_protected, counted = int(protected.sum()), store.ledger.num_protected_blocks
    _require(num_protected == counted, "I8", f"{num_protected} blocks are protected, counted {counted}")
    num_idle = int((protected & (states.refs == 0)).sum())
    counted_idle = store.ledger.num_protected_idle_blocks
    _require(num_idle == counted_idle, "I8", f"{num_idle} protected blocks are idle, counted {counted_idle}")
    _check_quotas(store, taken)


def _check_place(store: BlockStore, hold: PinHold) -> None:
    """I8: pins and what they hold are where those who look for them find them."""
    pins, node, name = store.pins, hold.node, hold.id
    anchorage = pins.anchorages[node.id]
    place = anchorage.by_awaited[hold.awaited]
    is_found = anchorage.holds.get(hold.number) is hold and place.get(hold.number) is hold
    _require(is_found and pins.holds.get(hold.terms) is hold, "I8", f"{name} is not at its anchor")
    is_shared = all(record.hold is hold and pins.records.get(key) is record for key, record in hold.records.items())
    _require(bool(hold.records) and is_shared, "I8", f"{name} is held for pins that are not there")
    size = store.tree.block_bytes
    block = hold.data[node.end * size :][:size]
    _require(hold.awaited.block == block, "I8", f"{name} waits for another block")
    is_limited = block in store.tree.continuations(node, hold.tenancy.at(node.end))
    _require((hold.number in pins.limited.holds) == is_limited, "I8", f"{name} is limited: {is_limited}")
    gives_way = hold.level == SOFT and node.end > 0
    _require((hold.number in pins.soft.holds) == gives_way, "I8", f"{name} can give way: {gives_way}")


def _check_quotas(store: BlockStore, taken: Counter[tuple[str, str]]) -> None:
    """I8: what pins take, by namespace and level, is counted right, and within every quota."""
    pins, marks = store.pins, store.pins.marks
    for namespace in {
        *store.tree.roots,
        *store.tree.layered,
        *pins.quotas.by_namespace,
        *(namespace for namespace, _ in taken),
    }:
        found = (taken[namespace, HARD], taken[namespace, HARD] + taken[namespace, SOFT])
        counted = (marks.taken_blocks(namespace, hard_only=True), marks.taken_blocks(namespace))
        _require(found == counted, "I8", f"(hard, all) blocks of {namespace!r} are {found}, counted {counted}")
        quota = pins.quotas.by_namespace.get(namespace, found[1])
        _require(found[1] <= quota, "I8", f"{found[1]} pinned in namespace {namespace!r}, quota {quota}")
    num_hard, num_soft = (sum(n for (_, level), n in taken.items() if level == wanted) for wanted in (HARD, SOFT))
    found, counted = (num_hard, num_soft), (marks.num_hard_blocks, marks.num_soft_blocks)
    _require(found == counted, "I8", f"(hard, soft) blocks are {found}, counted {counted}")
    quota = pins.quotas.num_blocks
    _require(num_hard + num_soft <= quota, "I8", f"{num_hard + num_soft} pinned, quota {quota}")
    num_anchored = sum(len(anchorage.holds) for anchorage in pins.anchorages.values())
    _require(num_anchored == len(pins.holds), "I8", f"{num_anchored} holds have an anchor, {len(pins.holds)} are live")
    num_pins = sum(len(hold.records) for hold in pins.holds.values())
    _require(num_pins == len(pins.records), "I8", f"{num_pins} pins have a hold, {len(pins.records)} are live")


def _expected_guards(store: BlockStore) -> dict[int, Int32Array]:
    """By node id, int32 [2 (hard, soft), rows, sliding groups]: what the pins of this moment guard."""
    guards: dict[int, Int32Array] = {}
    for hold in store.pins.holds.values():
        for column, group in enumerate(store.sliding):
            if hold.cache_type not in ("kv", group.group.name):
                continue
            first = group.first_needed_block(hold.node.end)
            for node in hold.node.path():
                shape = (2, node.num_blocks, len(store.sliding))
                counts = guards.setdefault(node.id, np.zeros(shape, dtype=np.int32))
                counts[0 if hold.level == HARD else 1, max(0, first - node.start) :, column] += 1
    return guards


def _check_sessions(store: BlockStore, desk: LeaseDesk) -> None:
    """I9: sessions and the runs that only one of them used know of each other; a request of another one holds none."""
    nodes = {node.id: node for node in _stored_nodes(store) if node.session is not None}
    for node in nodes.values():
        session, parent = node.session, node.parent
        assert session is not None  # chosen so
        assert parent is not None  # a root is no session's
        _require(node.id in session.nodes, "I9", f"node {node.id} is unknown to session {session.key}")
        is_below = parent.session is None or session.is_same(parent.session)
        _require(is_below, "I9", f"node {node.id} is of session {session.key}, its parent another's")
    for record in {id(node.session): node.session for node in nodes.values()}.values():
        assert record is not None  # chosen so
        own = {node_id for node_id, node in nodes.items() if node.session is record}
        _require(set(record.nodes) == own, "I9", f"session {record.key} has nodes {own}, knows {set(record.nodes)}")
        tips = {tip.node.id for tip in record.tips}
        _require(record.superseded | tips <= own, "I9", f"session {record.key} has left behind what is not its own")
    for record in store.sessions.records.values():
        known = set(record.nodes)
        _require(
            known <= set(nodes), "I9", f"session {record.key} knows nodes {known - set(nodes)} that are not its own"
        )
    for lease in desk.live.values():
        record_of = store.sessions.record_of(lease.number)
        for node in lease.node.nearest_alive().path() if lease.stores else []:
            is_own = node.session is None or node.session.is_same(record_of)
            _require(is_own, "I9", f"request {lease.request_id!r} uses node {node.id} of another session alone")


def _check_victims(store: BlockStore) -> None:
    """I9: the victims are the cached, unheld leaves without a hard pin; softly pinned ones, and what sessions have left
    behind, are in queues of their own."""
    expected: dict[str, set[int]] = {"unpinned": set(), "soft": set(), "expendable": set()}
    for node in _stored_nodes(store):
        if node.is_leaf and not node.num_holders and not node.num_hard_pins:
            is_left = node.session is not None and (node.session.is_ended or node.id in node.session.superseded)
            expected["soft" if node.soft_priorities else "expendable" if is_left else "unpinned"].add(node.id)
    for queue, nodes in expected.items():
        offered = set(store.victims.offered(queue))
        _require(offered == nodes, "I9", f"{queue} victims are {sorted(nodes)[:8]}…, offered {sorted(offered)[:8]}…")


def _check_usage(store: BlockStore, desk: LeaseDesk) -> None:
    """I1: what accounts use adds up to what is stored and held. I9: each run is with its own account's policy."""
    usage, shares = store.usage, store.victims.shares
    stored: Counter[str] = Counter()
    private: Counter[str] = Counter()
    for node in _stored_nodes(store):
        stored[account_of(node.namespace)] += int(np.count_nonzero(node.blocks != ABSENT))
    for lease in desk.live.values() if usage.tracks_private else ():
        private[account_of(lease.namespace)] += lease.num_private_blocks
    for name in usage.accounts.keys() | stored.keys() | private.keys():
        account = usage.accounts.get(name)
        counted = (0, 0) if account is None else (account.stored_blocks, account.private_blocks)
        found = (stored[name], private[name])
        _require(found == counted, "I1", f"(stored, private) blocks of {name!r} are {found}, counted {counted}")
        is_over = account is not None and account.excess_blocks > 0
        _require(not is_over or account in usage.over_quota, "I1", f"{name!r} is over its quota, and nobody knows")
    num_users = sum(account.used_blocks > 0 for account in usage.accounts.values())
    _require(num_users == usage.num_users, "I1", f"{num_users} accounts have blocks, counted {usage.num_users}")
    if shares is not None:
        wrong = [node.id for node in _stored_nodes(store) if node.queue == "unpinned" and not shares.is_with_own(node)]
        _require(not wrong, "I9", f"nodes {wrong[:8]}… are not with their account's policy")

"""State machine over the whole manager, against stamped memory and a mirror of the event stream."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from looseleaf.core.auto_pin_config import AutoPinConfig
from looseleaf.core.config import CacheConfig, LayerGroup
from looseleaf.core.eviction import BUILT_IN
from looseleaf.core.manager import CacheManager
from looseleaf.core.stats import CacheStats
from looseleaf.errors import CommitBeyondReserved, DuplicateRequest, LeaseClosed, OutOfBlocks, ResizeRefused
from looseleaf.testing.mirror import EventMirror, owners_of
from looseleaf.testing.pin_machine import AUTO_PINS, NAMESPACES, SHARES, draw_layers
from looseleaf.testing.session_machine import SESSIONS, SessionRules
from looseleaf.testing.stamps import StampMemory

# Few different beginnings and long runs of one token, so that prompts share, diverge inside edges and fill pools.
PROMPTS = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=12),
    st.builds(
        lambda head, count, tail: [0, 1] * head + [1] * count + tail,
        st.integers(0, 8),
        st.integers(1, 24),
        st.lists(st.integers(0, 2), max_size=4),
    ),
)
FULL, FULL_2 = LayerGroup("full"), LayerGroup("full", num_lanes=2)
GROUPS = (
    (FULL,),
    (FULL_2,),
    (FULL, LayerGroup("window", window_tokens=5, num_lanes=2)),
    (FULL, LayerGroup("window", window_tokens=8), LayerGroup("window", window_tokens=3, name="narrow")),
    (LayerGroup("window", window_tokens=6),),
    (LayerGroup("chunked", chunk_tokens=8, num_lanes=2), FULL),
)
COUNTERS = ("num_lookups", "query_tokens", "hit_tokens", "evicted_tokens", "cleared_tokens", "stored_tokens")


class ManagerMachine(SessionRules):
    """Random sequences of every public call. After each: all invariants, every committed slot, every hard pin."""

    policy: ClassVar[str | None] = None
    """The only policy to try; None: each that is built in."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []
        self.num_requests = 0

    @initialize(
        num_pages=st.integers(1, 4),
        blocks_per_page=st.sampled_from([1, 4, 8]),
        block_tokens=st.sampled_from([1, 2, 4]),
        policy=st.sampled_from(sorted(BUILT_IN)),
        pin_quota=SHARES,
        namespace_pin_quotas=st.dictionaries(NAMESPACES, SHARES, max_size=2),
        reserve_pages=st.sampled_from([0, 1]),
        groups=st.sampled_from([(FULL,), *GROUPS]),
        auto_pin=AUTO_PINS,
        namespace_quotas=st.one_of(st.just({}), st.dictionaries(st.sampled_from(["", "a", "s"]), SHARES, max_size=2)),
        fair_shares=st.sampled_from([False, False, True]),
    )
    def make(
        self,
        num_pages: int,
        blocks_per_page: int,
        block_tokens: int,
        policy: str,
        pin_quota: float,
        namespace_pin_quotas: dict[str, float],
        reserve_pages: int,
        groups: tuple[LayerGroup, ...],
        auto_pin: AutoPinConfig | None,
        namespace_quotas: dict[str, float],
        fair_shares: bool,
    ) -> None:
        """An empty cache of any shape."""
        self.groups = groups
        self.num_lanes = sum(group.num_lanes for group in groups)
        config = CacheConfig(
            num_pages=num_pages * self.num_lanes,
            page_tokens=blocks_per_page * block_tokens,
            block_tokens=block_tokens,
            policy=self.policy or policy,
            pin_quota=pin_quota,
            namespace_pin_quotas=namespace_pin_quotas,
            reserve_pages=reserve_pages,
            groups=groups,
            num_known_requests=5,
            auto_pin=auto_pin,
            namespace_quotas=namespace_quotas,
            fair_shares=fair_shares,
        )
        self.mirror = EventMirror(block_tokens, groups)
        self.cache = CacheManager(config, clock=self.clock, on_event=self.mirror.on_event)
        self.memory = StampMemory(self.cache.plan.num_blocks, block_tokens)
        self.size = block_tokens
        self.before: CacheStats = self.cache.stats()

    def _prompt(self, data: st.DataObject) -> list[int]:
        """A new prompt, or one seen before, cut or with something behind it."""
        if len(self.seen) > 0 and data.draw(st.integers(0, 3)) > 0:
            known = data.draw(st.sampled_from(self.seen))
            cut = data.draw(st.sampled_from([len(known), len(known), len(known) // 2 + 1]))
            return known[:cut] + data.draw(st.lists(st.integers(0, 2), max_size=6))
        prompt = data.draw(PROMPTS)
        self.seen = [*self.seen[-5:], prompt]
        return prompt

    # --- sequences ------------------------------------------------------------------------------------------------

    @rule(data=st.data(), namespace=NAMESPACES, reuse=st.sampled_from([True, True, True, False]), session=SESSIONS)
    def lease(self, data: st.DataObject, namespace: str, reuse: bool, session: str | None) -> None:
        """A lease finds exactly what the mirror says, and allocates nothing."""
        prompt = self._prompt(data)
        layers = draw_layers(data, len(prompt), namespace)
        would_hit, num_known = (find(prompt, namespace, layers) for find in (self.mirror.match, self.mirror.num_known))
        expected = would_hit if reuse else 0
        assert self.cache.match(prompt, namespace, layers=layers).num_tokens == would_hit
        free = self.cache.stats().free_blocks
        self.num_requests += 1
        request_id = f"r{self.num_requests}"
        lease = self.cache.lease(prompt, request_id, namespace, layers=layers, reuse=reuse, session=session)
        self.name_session(request_id, namespace, session if reuse else None)
        assert lease.num_cached_tokens == expected
        assert self.cache.stats().free_blocks == free
        explanation = self.cache.explain(lease.request_id)
        assert explanation == lease.explanation
        assert (explanation.session, sum(explanation.by_rung.values())) == (session, expected)
        assert explanation.num_cached_tokens == expected
        assert (explanation.reason == "skipped") == (not reuse)
        if explanation.reason == "full_hit":
            assert expected == (len(prompt) - 1) // self.size * self.size
        assert (explanation.reason == "window_cut") == (reuse and expected < num_known)
        self.leases.append(lease)

    @rule(data=st.data(), namespace=NAMESPACES, keep=st.booleans(), session=SESSIONS)
    def serve(self, data: st.DataObject, namespace: str, keep: bool, session: str | None) -> None:
        """A whole prefill: match, reserve, write, commit; the lease ends at once or goes on living."""
        prompt = self._prompt(data)
        layers = draw_layers(data, len(prompt), namespace)
        self.num_requests += 1
        lease = self.cache.lease(prompt, f"r{self.num_requests}", namespace, layers=layers, session=session)
        self.name_session(lease.request_id, namespace, session)
        self.note_use(lease)
        if not lease.try_reserve(len(prompt) + 1):
            lease.release()
            return
        self.memory.write(lease, lease.num_cached_tokens, len(prompt))
        lease.commit(len(prompt))
        self.note_use(lease)
        if lease.stores:
            whole = len(prompt) // self.size * self.size
            assert self.mirror.num_known([*prompt, 9], namespace, layers) == whole
            assert self.cache.match([*prompt, 9], namespace, layers=layers).num_tokens == whole
        if keep:
            self.leases.append(lease)
        else:
            lease.release()

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), extra=st.integers(0, 12))
    def reserve(self, data: st.DataObject, extra: int) -> None:
        """A reservation succeeds exactly if enough is free or evictable; a refused one changes nothing."""
        lease = data.draw(st.sampled_from(self.leases))
        target = lease.num_reserved_tokens + extra
        stats = self.cache.stats()
        needed = max(0, -(-target // self.size) - lease.num_blocks) * self.num_lanes
        table = lease.block_table.tolist()
        expendable, stored = self.expendable(), set(self.mirror.blocks)
        try:
            lease.reserve(target)
        except OutOfBlocks as error:
            assert needed > stats.free_blocks + stats.evictable_blocks
            assert (error.needed, error.free) == (needed, stats.free_blocks)
            assert self.cache.stats() == stats
            assert not lease.try_reserve(target)
        else:
            assert needed <= stats.free_blocks + stats.evictable_blocks
            self.check_order(expendable, stored)
            assert lease.num_reserved_tokens == target
            after = self.cache.stats()
            evicted = after.evicted_tokens - stats.evicted_tokens
            if self.num_lanes == 1 and not after.slid_out_blocks:
                assert evicted == max(0, needed - stats.free_blocks) * self.size
            assert after.free_blocks < max(stats.free_blocks - needed, 0) + self.num_lanes
        assert lease.block_table.tolist()[: len(table)] == table

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        """Appended tokens are known at once."""
        lease = data.draw(st.sampled_from(self.leases))
        known = lease.token_ids.tolist()
        lease.append(tokens)
        assert lease.token_ids.tolist() == known + tokens

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """A commit goes up to what is known and reserved, not beyond; then the content can be matched."""
        lease = data.draw(st.sampled_from(self.leases))
        limit = min(lease.num_tokens, lease.num_reserved_tokens)
        target = data.draw(st.sampled_from([limit, limit, limit // 2, limit + 1]))
        done = lease.num_committed_tokens
        if target > limit:
            try:
                lease.commit(target)
            except CommitBeyondReserved:
                assert lease.num_committed_tokens == done
                return
            raise AssertionError("committed beyond what is reserved")
        self.memory.write(lease, done, target)
        lease.commit(target)
        assert lease.num_committed_tokens == max(done, target)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def decode_step(self, data: st.DataObject) -> None:
        """One token each, in one call: all get their slot or nothing changes."""
        ready = [lease for lease in self.leases if lease.num_committed_tokens == lease.num_tokens]
        leases = data.draw(st.lists(st.sampled_from(ready), unique=True, min_size=1, max_size=4)) if ready else []
        tokens = [data.draw(st.integers(0, 2)) for _ in leases]
        stats = self.cache.stats()
        lengths = [lease.num_tokens for lease in leases]
        try:
            slots = self.cache.append_many(leases, tokens)
        except OutOfBlocks:
            assert self.cache.stats() == stats
            assert [lease.num_tokens for lease in leases] == lengths
            return
        for lease, token, slot, length in zip(leases, tokens, slots.tolist(), lengths, strict=True):
            assert lease.token_ids[-1] == token
            first_lane = lease.tables[0][length // self.size - lease.firsts[0], 0]
            assert slot == int(first_lane) * self.size + length % self.size
            self.memory.write(lease, length, length + 1)
        for lease, length, lanes in zip(leases, lengths, self.cache.slots_many(leases).T.tolist(), strict=True):
            number, offset = divmod(length, self.size)
            rows = [table[number - first] for table, first in zip(lease.tables, lease.firsts, strict=True)]
            assert lanes == [int(block) * self.size + offset for row in rows for block in row]
        self.cache.commit_many(leases)
        assert [lease.num_committed_tokens for lease in leases] == [length + 1 for length in lengths]

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """A fork reads what its parent has committed, once the copy is done."""
        parent = data.draw(st.sampled_from(self.leases))
        self.num_requests += 1
        try:
            child = parent.fork(f"r{self.num_requests}")
        except OutOfBlocks:
            assert parent.num_committed_tokens % self.size
            return
        self.memory.copy_blocks(child.copies)
        self.user_of[child.request_id] = self.user_of[parent.request_id]
        assert child.token_ids.tolist() == parent.token_ids.tolist()
        assert child.num_committed_tokens == parent.num_committed_tokens
        self.leases.append(child)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        """Uncommitted tokens and room can be dropped, committed ones can't."""
        lease = data.draw(st.sampled_from(self.leases))
        target = data.draw(st.integers(lease.num_committed_tokens, lease.num_tokens))
        known = lease.token_ids.tolist()
        lease.truncate(target)
        assert lease.token_ids.tolist() == known[:target]
        assert lease.num_reserved_tokens <= max(target, lease.num_committed_tokens)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """A lease ends once."""
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.remove(lease)
        lease.release()
        try:
            lease.release()
        except LeaseClosed:
            return
        raise AssertionError("released twice")

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), prompt=PROMPTS)
    def duplicate(self, data: st.DataObject, prompt: list[int]) -> None:
        """A live id is refused before anything changes."""
        stats = self.cache.stats()
        try:
            self.cache.lease(prompt, data.draw(st.sampled_from(self.leases)).request_id)
        except DuplicateRequest:
            assert self.cache.stats() == stats
            return
        raise AssertionError("a live id was taken twice")

    # --- upkeep ---------------------------------------------------------------------------------------------------

    @rule()
    def maintain(self) -> None:
        """Upkeep never touches what is held or pinned (the invariants say so), and leaves nobody over a quota who could
        be within it."""
        expendable, stored = self.expendable(), set(self.mirror.blocks)
        self.cache.maintain()
        self.check_order(expendable, stored)
        for usage in self.cache.namespace_usage():
            if usage.quota_blocks is not None and usage.stored_blocks > usage.quota_blocks:
                is_bound = any(other.held_blocks + other.pinned_blocks for other in self.cache.namespace_usage())
                assert is_bound or any(len(set(owners)) > 1 for owners, _ in self.mirror.blocks)

    @rule(share=SHARES, namespace=st.sampled_from(["", "a", "s"]))
    def set_namespace_quota(self, share: float, namespace: str) -> None:
        """Another quota of stored blocks is in force at once; held and pinned content stays (the invariants say so)."""
        self.cache.set_namespace_quota(share, namespace)
        assert self.cache.config.namespace_quotas[namespace] == share

    @precondition(lambda self: self.num_requests % 8 == 7)
    @rule(namespace=st.sampled_from([None, "", "a", "s"]), include_pins=st.booleans())
    def clear(self, namespace: str | None, include_pins: bool) -> None:
        """What a clear says is what it did: nothing but pinned content can be matched afterwards."""
        stats = self.cache.stats()
        result = self.cache.clear(namespace, include_pins=include_pins)
        after = self.cache.stats()
        if self.num_lanes == 1 and self.groups[0].kind == "full":
            assert result.num_cleared_tokens == (after.free_blocks - stats.free_blocks) * self.size
        assert result.num_cleared_tokens == after.cleared_tokens - stats.cleared_tokens
        left = [owners for owners, _ in self.mirror.blocks if namespace is None or namespace in owners]
        if include_pins:
            assert not left
            live = {pin.id for pin in self.cache.pins()}
            for pin_id, known in list(self.pins.items()):
                is_unknown = len(known.tokens) < known.latest.num_tokens // self.size * self.size
                whole = max(1, len(known.tokens) // self.size)
                owners = owners_of(whole, self.size, known.latest.namespace, known.layers)
                if namespace in (None, known.latest.namespace, *owners) or (is_unknown and pin_id not in live):
                    self._ended(pin_id, "unpinned")
        assert len(left) <= after.pinned_blocks or after.pinned_blocks

    @precondition(lambda self: self.num_requests % 4 == 3)
    @rule(num_pages=st.integers(1, 6))
    def resize(self, num_pages: int) -> None:
        """A pool changes its size without anything lost that is held or pinned, or stays as it was."""
        stats = self.cache.stats()
        try:
            result = self.cache.resize(max(num_pages * self.num_lanes, self.cache.config.reserve_pages))
        except ResizeRefused as error:
            assert error.num_blocks < stats.num_blocks
            assert self.cache.stats() == stats
            return
        self.memory.resize(max(result.num_blocks, stats.num_blocks))
        self.memory.copy_blocks(result.copies)
        self.memory.resize(result.num_blocks)
        assert self.cache.stats().num_blocks == result.num_blocks == self.cache.plan.num_blocks
        needed = stats.num_blocks - stats.free_blocks - result.num_blocks
        assert max(0, needed) <= result.num_evicted_blocks < max(0, needed) + max(1, self.num_lanes)

    @rule(num_pages=st.integers(1, 3))
    def compact(self, num_pages: int) -> None:
        """Moving blocks together frees the pages that it says, and changes nothing else."""
        stats = self.cache.stats()
        tables = [[table.tolist() for table in lease.tables] for lease in self.leases]
        result = self.cache.compact(num_pages)
        self.memory.copy_blocks(result.copies)
        after = self.cache.stats()
        assert result.num_freed_pages <= num_pages
        assert after.free_pages == stats.free_pages + result.num_freed_pages
        assert replace(after, free_pages=0, partial_pages=0, full_pages=0) == replace(
            stats, free_pages=0, partial_pages=0, full_pages=0
        )
        assert [[table.tolist() for table in lease.tables] for lease in self.leases] == tables

    def _check_usage(self, stats: CacheStats) -> None:
        """Figures by namespace add up to those of all, and stored blocks are those that the mirror has."""
        usages = self.cache.namespace_usage()
        for name in ("num_lookups", "query_tokens", "hit_tokens", "evicted_tokens", "over_quota_tokens"):
            assert sum(getattr(usage, name) for usage in usages) == getattr(stats, name), name
        stored: Counter[str] = Counter()
        for (owners, _), groups in self.mirror.blocks.items():
            stored[owners[-1]] += sum(map(len, groups.values()))
        assert {usage.namespace: usage.stored_blocks for usage in usages if usage.stored_blocks} == +stored
        assert sum(usage.pinned_blocks for usage in usages) == stats.pinned_blocks

    # --- after every rule -----------------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        """I1 to I10, every committed slot of every lease, every hard pin, and counters that only grow."""
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        for lease in self.leases:
            self.memory.verify(lease)
        stats = self.cache.stats()
        for name in COUNTERS:
            assert getattr(stats, name) >= getattr(self.before, name), name
        assert 0.0 <= stats.waste < 1.0
        assert stats.stored_tokens == self.mirror.num_stored_tokens
        assert stats.evicted_tokens == self.mirror.num_removed_tokens["evicted"]
        assert stats.slid_out_blocks == self.mirror.num_removed_alone
        self._check_usage(stats)
        self.check_pins()
        self.check_sessions()
        told = self.cache.miss_summary()
        assert (told.query_tokens, told.hit_tokens) == (stats.query_tokens, stats.hit_tokens)
        assert told.query_tokens == told.hit_tokens + sum(told.missed_tokens.values())
        self.before = stats

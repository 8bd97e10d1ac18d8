"""Opening, growing, committing, forking and ending leases. The store moves blocks; the desk moves sequences."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from looseleaf.core.config import GroupPlan
from looseleaf.core.explain import Finding
from looseleaf.core.history import FinishedRequest, History
from looseleaf.core.lease import Lease
from looseleaf.core.lease_table import LeaseTable, read_only
from looseleaf.core.lookup import Query, look_up
from looseleaf.core.namespaces import NamespaceLayer, Tenancy
from looseleaf.core.store import BlockStore, Holder
from looseleaf.core.tokens import TOKEN_BYTES, Tokens, check_count, pack_tokens, unpack_tokens
from looseleaf.core.tree import ABSENT, Node
from looseleaf.core.usage import MAX_NAMES
from looseleaf.errors import CommitBeyondReserved, DuplicateRequest, LeaseClosed, RequestError, TruncateBelowCommitted
from looseleaf.ids import Int32Array, Namespace, RequestId


class LeaseDesk:
    """All live leases of one manager. Every public method is atomic under the manager's lock."""

    def __init__(self, store: BlockStore, history: History, clock: Callable[[], float], lock: threading.RLock) -> None:
        self.live: dict[RequestId, Lease] = {}
        self.rows = LeaseTable(store.plan.block_tokens, store.plan.num_lanes)
        self.group_names = tuple(group.group.name for group in store.plan.groups)
        self._store = store
        self._history = history
        self._clock = clock
        self._lock = lock
        self._block_tokens = store.plan.block_tokens
        self._block_bytes = store.tree.block_bytes
        self._num_lanes = store.plan.num_lanes
        self._num_opened = self._num_requests = self.num_closed = 0
        self._unsettled: dict[Lease, None] = {}
        self._tenancies: dict[Namespace, Tenancy] = {}

    # --- opening and ending ---------------------------------------------------------------------------------------

    def open(
        self,
        prompt: Tokens,
        request_id: RequestId | None,
        namespace: Namespace,
        layers: Sequence[NamespaceLayer],
        count_lookup: bool,
        reuse: bool,
        expected_tokens: int | None,
        session: str | None,
    ) -> Lease:
        """Match `prompt` and hold what is found; see `CacheManager.lease`."""
        data = pack_tokens(prompt)
        tenancy = self._tenancy(namespace, layers, len(data) // TOKEN_BYTES)
        store = self._store
        with self._lock:
            if self._unsettled:
                self.settle()
            store.expire_pins()
            request_id = self._claim(request_id)
            self._num_requests += 1
            number = self._num_requests
            earlier = None if count_lookup else self._history.get(request_id)
            first = None if earlier is None else earlier.finding
            query = Query(data, tenancy, number, reuse, count_lookup, session, first)
            found = look_up(store, query, self._clock)
            table = found.table
            firsts = store.first_needed(len(table))
            lease = self._make(request_id, number, tenancy, found.node, data, table, reuse, found.finding, firsts)
            lease.missed_keys, lease.cuts = found.keys, list(found.cuts)
            lease.expected_tokens = expected_tokens
            return lease

    def fork(self, parent: Lease, request_id: RequestId | None) -> Lease:
        """See `Lease.fork`."""
        with self._lock:
            self._check_open(parent, "fork")
            self.settle()
            request_id = self._claim(request_id)
            num_committed = int(self.rows.num_committed[parent.row])
            num_full, num_tail = divmod(num_committed, self._block_tokens)
            if num_tail and not self.make_room([parent], [1]):
                raise self._store.out_of_blocks(self._num_lanes)
            shared = parent.table[:num_full].copy()
            num_tokens = int(self.rows.num_tokens[parent.row])
            finding = parent.finding
            if finding.reason != "skipped":
                num_shared = num_full * self._block_tokens
                finding = Finding("full_hit", num_tokens, num_shared, num_shared, None, self._clock())
                finding.why, finding.session = parent.request_id, parent.session
            data = self._known_tokens(parent)
            self._store.share(parent.node, shared)
            firsts = list(parent.first_rows)
            self._num_requests += 1
            number = self._num_requests
            stores = parent.stores
            child = self._make(request_id, number, parent.tenancy, parent.node, data, shared, stores, finding, firsts)
            self._store.sessions.fork(parent.number, number)
            child.expected_tokens = parent.expected_tokens
            if num_tail:
                self.take(child, 1)
                tail, own = parent.table[num_full].tolist(), child.table[num_full].tolist()
                child.copies = list(zip(tail, own, strict=True))
            self.sync(child, num_reserved=num_committed)
            self.rows.num_committed[child.row] = num_committed
            return child

    def _tenancy(self, namespace: Namespace, layers: Sequence[NamespaceLayer], num_tokens: int) -> Tenancy:
        """`Tenancy.of`; all requests of a namespace without layers share one."""
        if layers or not isinstance(namespace, str):
            return Tenancy.of(namespace, layers, num_tokens, self._block_tokens)
        tenancy = self._tenancies.get(namespace)
        if tenancy is None:
            if len(self._tenancies) >= MAX_NAMES:
                self._tenancies.clear()
            tenancy = self._tenancies[namespace] = Tenancy(namespace, namespace)
        return tenancy

    def _claim(self, request_id: RequestId | None) -> RequestId:
        while request_id is None:
            self._num_opened += 1
            name = f"lease-{self._num_opened}"
            if name not in self.live and self._history.get(name) is None:
                request_id = name
        if request_id in self.live:
            raise DuplicateRequest(request_id)
        return request_id

    def _make(
        self,
        request_id: RequestId,
        number: int,
        tenancy: Tenancy,
        node: Node,
        data: bytes,
        table: Int32Array,
        stores: bool,
        finding: Finding,
        firsts: list[int],
    ) -> Lease:
        """A lease that knows packed tokens `data` and holds the blocks of `table`, which is only read."""
        num_tokens = len(data) // TOKEN_BYTES
        row, num_cached = self.rows.open(num_tokens, len(table)), len(table) * self._block_tokens
        num_tail = num_tokens % self._block_tokens
        head, tick = data, self._store.tick
        if num_tail:
            head = data[: -num_tail * TOKEN_BYTES]
            self.rows.tail[row, :num_tail] = np.frombuffer(data, dtype=np.int32, offset=len(head))
        lease = Lease(self, row, request_id, number, tenancy, node, head, table, stores, finding, firsts, tick)
        lease.num_prompt_tokens, lease.num_cached_tokens = num_tokens, num_cached
        if self._store.usage.tracks_private:
            self.count_private(lease)
        self.live[request_id] = lease
        return lease

    def release(self, lease: Lease) -> None:
        """See `Lease.release`."""
        with self._lock:
            self._check_open(lease, "release")
            self.settle_one(lease)
            num_committed = self.rows.num_committed.item(lease.row)
            finished = FinishedRequest(
                lease.tenancy, num_committed, lease.num_prompt_tokens, self.committed_blocks(lease), lease.finding
            )
            self._history.add(lease.request_id, finished)
            num_output = lease.num_output_tokens
            if num_output is None:
                num_output = self.rows.num_tokens.item(lease.row) - lease.num_prompt_tokens
            table = lease.table[: lease.num_blocks]
            self._store.let_go(lease.node, table, lease.first_rows, lease.number, num_output)
            if lease.finding.session is not None:
                end = lease.node.nearest_alive()
                self._store.sessions.end(lease.number, end, self._known_tokens(lease), self._clock())
            lease.is_open = False
            self.num_closed += 1
            if lease.num_counted_blocks:
                self._store.usage.add_blocks(lease.namespace, private=-lease.num_counted_blocks)
            self.rows.close(lease.row)
            del self.live[lease.request_id]

    def detach(self, namespace: Namespace | None) -> None:
        """After a clear: live leases keep their blocks, but what they commit from now on is not stored any more."""
        for lease in self.live.values():
            if namespace is None or namespace in lease.tenancy.namespaces:
                lease.stores = False
                self.count_private(lease)

    def count_private(self, lease: Lease) -> None:
        """Bring the lease's blocks that are not stored to account, if that is of interest to anybody."""
        if self._store.usage.tracks_private:
            change = lease.num_private_blocks - lease.num_counted_blocks
            lease.num_counted_blocks += change
            self._store.usage.add_blocks(lease.namespace, private=change)

    def rename(self, new_id: Int32Array) -> None:
        """Blocks have other ids now: `new_id` [old id], and ABSENT for ABSENT."""
        for lease in self.live.values():
            lease.set_table(new_id[lease.table[: lease.num_blocks]])
            known = [pair for pair in lease.copies if max(pair) < len(new_id) - 1]  # others were done long ago
            lease.copies = [(int(new_id[source]), int(new_id[target])) for source, target in known]
            self.sync(lease)

    # --- one lease ------------------------------------------------------------------------------------------------

    def reserve(self, lease: Lease, num_tokens: int) -> None:
        """See `Lease.reserve`."""
        num_tokens = check_count(num_tokens, "reserve")
        with self._lock:
            if not self._reserve(lease, num_tokens):
                raise self._store.out_of_blocks((self.blocks_for(num_tokens) - lease.num_blocks) * self._num_lanes)

    def try_reserve(self, lease: Lease, num_tokens: int) -> bool:
        """See `Lease.try_reserve`."""
        num_tokens = check_count(num_tokens, "try_reserve")
        with self._lock:
            return self._reserve(lease, num_tokens)

    def _reserve(self, lease: Lease, num_tokens: int) -> bool:
        self._check_open(lease, "reserve")
        if num_tokens <= self.rows.num_reserved.item(lease.row):
            return True
        missing = self.blocks_for(num_tokens) - lease.num_blocks
        if missing > 0:
            is_short = missing * self._num_lanes > self._store.pool.num_free_blocks
            if is_short and not self.make_room([lease], [missing]):
                return False
            self.take(lease, missing)
        self.sync(lease, num_reserved=num_tokens)
        return True

    def append(self, lease: Lease, tokens: Tokens) -> None:
        """See `Lease.append`."""
        data = pack_tokens(tokens)
        with self._lock:
            self._check_open(lease, "append")
            data = self._tail(lease) + data
            num_head = len(data) // self._block_bytes * self._block_bytes
            lease.know(data[:num_head])
            self._set_tail(lease, data[num_head:])

    def commit(self, lease: Lease, num_tokens: int, is_padded: bool) -> None:
        """See `Lease.commit`."""
        num_tokens = check_count(num_tokens, "commit")
        with self._lock:
            self._check_open(lease, "commit")
            rows, row = self.rows, lease.row
            if num_tokens > rows.num_tokens.item(row) or num_tokens > rows.num_reserved.item(row):
                raise self.beyond(row, num_tokens)
            before = rows.num_committed.item(row)
            if num_tokens > before:
                self.settle_one(lease)
                self.commit_to(lease, before, num_tokens, is_padded)
                rows.num_committed[row] = num_tokens

    def truncate(self, lease: Lease, num_tokens: int) -> None:
        """See `Lease.truncate`."""
        num_tokens = check_count(num_tokens, "truncate")
        with self._lock:
            self._check_open(lease, "truncate")
            rows, row = self.rows, lease.row
            if num_tokens < rows.num_committed[row]:
                raise TruncateBelowCommitted(num_tokens, int(rows.num_committed[row]))
            if num_tokens < rows.num_tokens[row]:
                lease.missed_keys = None  # other tokens may follow
                num_head = num_tokens // self._block_tokens * self._block_bytes
                data = bytes(lease.head[num_head:]) + self._tail(lease)
                lease.head = lease.head[:num_head]
                self._set_tail(lease, data[: num_tokens % self._block_tokens * TOKEN_BYTES])
            if num_tokens < rows.num_reserved[row]:
                keep = self.blocks_for(num_tokens)
                self._store.ledger.drop(lease.table[keep : lease.num_blocks].ravel())
                lease.set_table(lease.table[:keep].copy())
                self.sync(lease, num_reserved=num_tokens)

    # --- what is stored later -------------------------------------------------------------------------------------

    def store_later(self, lease: Lease) -> None:
        """Leave what the lease has committed since its run was stored for `settle`."""
        self._unsettled[lease] = None

    def settle(self) -> None:
        """Store what `commit_many` has left for later: what lengthens runs of which nobody but their lease knows.
        Whoever reads the tree, or what is counted of it, calls this first. O(leases that decoded since)."""
        for lease in list(self._unsettled):
            self.settle_one(lease)

    def settle_one(self, lease: Lease) -> None:
        """Store what was left for later of one lease."""
        if lease in self._unsettled:
            del self._unsettled[lease]
            num_committed = int(self.rows.num_committed[lease.row])
            self._store_rows(lease, lease.node.end, num_committed // self._block_tokens, False)
            lease.views = None

    def make_room(self, leases: Sequence[Lease], num_rows: Sequence[int]) -> bool:
        """Have free what each of these leases is about to take, so many blocks in each lane; False if that can't be."""
        wanted: dict[Namespace, int] = {}
        for lease, count in zip(leases, num_rows, strict=True):
            wanted[lease.namespace] = wanted.get(lease.namespace, 0) + count * self._num_lanes
        return self._store.make_room(sum(wanted.values()), wanted)

    # --- reading --------------------------------------------------------------------------------------------------

    def figure(self, lease: Lease, column: str) -> int:
        """A figure of the lease's row by its column in `LeaseTable`; LeaseClosed after release."""
        with self._lock:  # the columns are exchanged when the table grows
            self._check_open(lease, column)
            return int(getattr(self.rows, column)[lease.row])

    def tables(self, lease: Lease) -> tuple[Int32Array, ...]:
        """See `Lease.tables`."""
        self._check_open(lease, "block_table")
        if lease.views is None:
            lease.views = tuple(
                read_only(lease.table[first : lease.num_blocks, group.lanes])
                for group, first in zip(self._store.plan.groups, lease.first_rows, strict=True)
            )
        return lease.views

    def token_ids(self, lease: Lease) -> Int32Array:
        """See `Lease.token_ids`."""
        with self._lock:
            self._check_open(lease, "token_ids")
            tokens: Int32Array = unpack_tokens(self._known_tokens(lease)).copy()
            return tokens

    def committed_blocks(self, lease: Lease) -> bytes:
        """Packed tokens of the committed whole blocks."""
        num_blocks = self.rows.num_committed.item(lease.row) // self._block_tokens
        return bytes(lease.head[: num_blocks * self._block_bytes])

    def note_in_flight(self, lease: Lease, num_tokens: int) -> None:
        """See `Lease.note_in_flight`."""
        with self._lock:
            self._check_open(lease, "note_in_flight")
            if not 0 <= num_tokens <= lease.finding.num_cached_tokens:
                raise RequestError(f"{num_tokens} of {lease.num_cached_tokens} cached tokens can't have been in flight")
            self._store.misses.note_in_flight(lease.namespace, lease.finding, num_tokens)

    # --- inside ---------------------------------------------------------------------------------------------------

    def commit_to(self, lease: Lease, before_tokens: int, after_tokens: int, is_padded: bool = False) -> None:
        """Store the blocks that became full between two committed lengths."""
        first, last = before_tokens // self._block_tokens, after_tokens // self._block_tokens
        if last == first:
            return
        if lease.stores:
            while lease.cuts and lease.cuts[0] <= last:
                cut = lease.cuts.pop(0)
                self._store_rows(lease, first, cut, False)
                lease.node.sealed = True
                first = cut
            self._store_rows(lease, first, last, is_padded)
            if lease.expected_ends:
                for end in [end for end in lease.expected_ends if end <= last]:
                    lease.expected_ends.remove(end)
                    self._store.mark_end(lease.node, end)
        if self._store.sliding:
            for number, group in enumerate(self._store.plan.groups):
                if group.slides:
                    self._slide(lease, number, group, last)
        lease.views = None
        if self._store.usage.tracks_private:
            self.count_private(lease)

    def _store_rows(self, lease: Lease, first: int, last: int, is_padded: bool) -> None:
        """Store the logical blocks `first` to `last` (exclusive) of a lease."""
        if first == last:
            return
        data = bytes(lease.head[first * self._block_bytes : last * self._block_bytes])
        rows = lease.table[first:last]  # a view: where an equal run is stored already, its ids are written here
        keys, behind = lease.missed_keys, lease.num_cached_tokens // self._block_tokens
        keys = None if keys is None or last - behind > len(keys) else keys[first - behind : last - behind]
        holder = Holder(lease.own_node, lease.opened_tick, lease.number, is_padded, lease.tenancy.borders, keys)
        lease.node, lease.own_node = self._store.add(lease.node, data, rows, holder)

    def expect_end(self, lease: Lease, num_tokens: int) -> None:
        """See `Lease.expect_end`."""
        num_tokens = check_count(num_tokens, "expect_end")
        with self._lock:
            self._check_open(lease, "expect_end")
            num_blocks = num_tokens // self._block_tokens
            if self._store.sliding and num_blocks * self._block_tokens > self.rows.num_committed[lease.row]:
                lease.expected_ends.add(num_blocks)

    def _slide(self, lease: Lease, number: int, group: GroupPlan, num_committed_blocks: int) -> None:
        """Let a group go of what is not needed any more behind `num_committed_blocks` blocks."""
        first = lease.first_rows[number]
        needed = group.first_needed_block(num_committed_blocks)
        if needed > first:
            out = lease.table[first:needed, group.lanes]
            self._store.slide(lease.node, out.ravel(), first, needed)
            out[:] = ABSENT
            lease.first_rows[number] = needed

    def take(self, lease: Lease, num_rows: int) -> None:
        """Give a lease `num_rows` more blocks in each lane, near those that it has and with room to grow."""
        take, table, num_blocks = self._store.ledger.take, lease.table, lease.num_blocks
        growth = None
        if lease.expected_tokens is not None:
            growth = max(0, self.blocks_for(lease.expected_tokens) - num_blocks - num_rows)
        last = table[num_blocks - 1].tolist() if num_blocks else [ABSENT] * self._num_lanes
        places = lease.add_rows(num_rows)
        for lane, after in enumerate(last):
            places[:, lane] = take(num_rows, None if after == ABSENT else after, growth)

    def _set_tail(self, lease: Lease, data: bytes) -> None:
        """What is known behind `lease.head`, less than a block; brings the row in line with both."""
        rest = unpack_tokens(data)
        self.rows.tail[lease.row, : len(rest)] = rest
        self.rows.num_tokens[lease.row] = len(lease.head) // TOKEN_BYTES + len(rest)
        self.sync(lease)

    def _tail(self, lease: Lease) -> bytes:
        num_tail = int(self.rows.num_tokens[lease.row]) & (self._block_tokens - 1)
        return self.rows.tail[lease.row, :num_tail].tobytes()

    def _known_tokens(self, lease: Lease) -> bytes:
        return bytes(lease.head) + self._tail(lease)

    def sync(self, lease: Lease, num_reserved: int | None = None) -> None:
        """Bring the row's derived figures in line with the lease's table and tokens."""
        rows, row = self.rows, lease.row
        if num_reserved is not None:
            rows.num_reserved[row] = num_reserved
            rows.num_places[row] = lease.num_blocks * self._block_tokens
        if self._store.usage.tracks_private:
            self.count_private(lease)
        index = rows.num_tokens.item(row) // self._block_tokens
        rows.next_block[row] = lease.table[index] if index < lease.num_blocks else ABSENT

    def beyond(self, row: int, asked_tokens: int) -> CommitBeyondReserved:
        """The error for a commit of more than a lease has."""
        rows = self.rows
        return CommitBeyondReserved(
            asked_tokens, int(rows.num_tokens[row]), int(rows.num_reserved[row]), int(rows.num_committed[row])
        )

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks, in one lane, that so many tokens take."""
        return -(-num_tokens // self._block_tokens)

    @staticmethod
    def _check_open(lease: Lease, call: str) -> None:
        if not lease.is_open:
            raise LeaseClosed(lease.request_id, call)


class SettledLock:
    """The manager's lock for whoever reads the tree: taken, everything that was left for later is stored."""

    def __init__(self, lock: threading.RLock, desk: LeaseDesk) -> None:
        self._lock = lock
        self._desk = desk

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            self._desk.settle()
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._lock.release()

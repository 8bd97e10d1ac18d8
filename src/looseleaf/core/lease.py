"""A lease: the scope in which one sequence holds its blocks. Made only by the manager; ends once."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING

import numpy as np

from looseleaf.core.tokens import Tokens
from looseleaf.core.tree import ABSENT
from looseleaf.ids import Int32Array, Int64Array, Namespace, RequestId

if TYPE_CHECKING:
    from looseleaf.core.explain import Explanation, Finding
    from looseleaf.core.leasing import LeaseDesk
    from looseleaf.core.namespaces import NamespaceLayer, Tenancy
    from looseleaf.core.tree import Node


class Lease:
    """Blocks of one sequence, in order, and how much of them is known, reserved and written.

        0 ........ num_cached ........ num_committed ........ num_tokens ........ num_reserved
        | found in the cache | written since      | known, not written  | room for more |

    A lease belongs to one thread at a time. A lost lease leaks its blocks visibly (`stats().num_leases`); it never
    frees another's.
    """

    __slots__ = (
        "copies", "cuts", "desk", "expected_ends", "expected_tokens", "finding", "first_rows", "head", "is_open",
        "missed_keys", "node", "num_blocks", "num_cached_tokens", "num_counted_blocks", "num_output_tokens",
        "num_prompt_tokens", "number",
        "opened_tick", "own_node", "request_id", "row", "stores", "table", "tenancy", "views",
    )  # fmt: skip

    def __init__(
        self,
        desk: LeaseDesk,
        row: int,
        request_id: RequestId,
        number: int,
        tenancy: Tenancy,
        node: Node,
        head: bytes,
        table: Int32Array,
        stores: bool,
        finding: Finding,
        first_rows: list[int],
        opened_tick: int,
    ) -> None:
        self.desk = desk
        self.own_node = False
        self.row = row
        self.request_id = request_id
        self.number = number  # the request's, for the policy
        self.num_output_tokens: int | None = (
            None  # what the policy learns at the end; None: the tokens behind the prompt
        )
        self.tenancy = tenancy  # in which namespaces its blocks are stored
        self.node = node
        self.head: bytes | bytearray = head  # known tokens, whole blocks, packed; see `know`
        self.table = table
        self.num_blocks = len(table)
        self.views: tuple[Int32Array, ...] | None = None  # what each group holds, read-only, once it was asked for
        self.first_rows = first_rows  # the logical block with which each group begins
        self.opened_tick = opened_tick
        self.expected_tokens: int | None = None
        self.missed_keys: Int64Array | None = None  # chain keys of the prompt's blocks that were not found
        self.cuts: list[int] = []  # logical blocks at which another run begins when they are stored
        self.expected_ends: set[int] = set()  # logical blocks behind which others will go on
        self.num_cached_tokens = self.num_prompt_tokens = 0
        self.stores = stores
        self.finding = finding  # of its first look-up
        self.copies: list[tuple[int, int]] = []
        self.is_open = True
        self.num_counted_blocks = 0  # of it that are in its namespace's account as private

    @property
    def namespace(self) -> Namespace:
        """The request's own namespace."""
        return self.tenancy.namespace

    @property
    def num_private_blocks(self) -> int:
        """Blocks of it that are not stored, in all lanes. O(1) unless it was detached or stores nothing."""
        if self.stores:
            return (self.num_blocks - self.node.end) * int(self.table.shape[1])
        return int(np.count_nonzero(self.table[: self.num_blocks] != ABSENT))

    @property
    def layers(self) -> tuple[NamespaceLayer, ...]:
        """The beginnings of the prompt that lie in other namespaces, as they were declared: a request that comes back
        must be given the same."""
        return self.tenancy.layers

    # --- what it holds --------------------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and appended."""
        return self.desk.figure(self, "num_tokens")

    @property
    def num_reserved_tokens(self) -> int:
        """Tokens that have room."""
        return self.desk.figure(self, "num_reserved")

    @property
    def num_committed_tokens(self) -> int:
        """Tokens whose K and V are written, those found in the cache included."""
        return self.desk.figure(self, "num_committed")

    @property
    def explanation(self) -> Explanation:
        """Why it hit or missed, as of its first look-up; also after its release."""
        return self.finding.explain(self.desk.rows.block_tokens)

    @property
    def session(self) -> str | None:
        """The session that it named."""
        return self.finding.session

    @property
    def block_table(self) -> Int32Array:
        """Block ids of the first layer group in logical order, int32 [num_blocks] ([num_blocks, num_lanes] if it has
        several lanes), read-only. Entries may change at this lease's commit and when the cache is resized, never
        elsewhere: read it again after these.

        Raises:
            LeaseClosed: the lease is released.
        """
        return _in_one_column(self.desk.tables(self)[0])

    @property
    def tables(self) -> tuple[Int32Array, ...]:
        """What each layer group holds, int32 [num_blocks, num_lanes] each, read-only, from its entry in `firsts` on.

        Raises:
            LeaseClosed: the lease is released.
        """
        return self.desk.tables(self)

    @property
    def firsts(self) -> tuple[int, ...]:
        """The logical block with which each of `tables` begins."""
        return tuple(self.first_rows)

    @property
    def block_tables(self) -> Mapping[str, Int32Array]:
        """The block table of each layer group by its name, in the form of `block_table`.

        Raises:
            LeaseClosed: the lease is released.
        """
        tables = map(_in_one_column, self.desk.tables(self))
        return MappingProxyType(dict(zip(self.desk.group_names, tables, strict=True)))

    @property
    def first_blocks(self) -> Mapping[str, int]:
        """The logical block with which each group's table begins; what slid out of a window lies before it."""
        return MappingProxyType(dict(zip(self.desk.group_names, self.first_rows, strict=True)))

    @property
    def token_ids(self) -> Int32Array:
        """All known tokens, int32 [num_tokens], a copy.

        Raises:
            LeaseClosed: the lease is released.
        """
        return self.desk.token_ids(self)

    # --- changing it ----------------------------------------------------------------------------------------------

    def reserve(self, num_tokens: int) -> None:
        """Have room for `num_tokens` tokens in all; nothing happens if there is. May evict cached blocks of others.

        Raises:
            OutOfBlocks: it can't be had; the lease is unchanged and nothing was evicted.
            LeaseClosed: the lease is released.
        """
        self.desk.reserve(self, num_tokens)

    def try_reserve(self, num_tokens: int) -> bool:
        """As `reserve`, but False instead of `OutOfBlocks`."""
        return self.desk.try_reserve(self, num_tokens)

    def append(self, tokens: Tokens) -> None:
        """Add tokens to what is known; they need room and a commit of their own.

        Raises:
            InvalidTokens: not non-negative integers below 2**31; nothing is added then.
            LeaseClosed: the lease is released.
        """
        self.desk.append(self, tokens)

    def commit(self, num_tokens: int, *, is_padded: bool = False) -> None:
        """Declare the first `num_tokens` tokens written; full blocks become shareable. Less than before: nothing
        happens. `is_padded`: the last of these blocks is filled up with padding, so that only the very same prompt
        can reuse it; the eviction policy learns how often that happens.

        Raises:
            CommitBeyondReserved: above what is known or reserved; nothing changes.
            LeaseClosed: the lease is released.
        """
        self.desk.commit(self, num_tokens, is_padded)

    def expect_end(self, num_tokens: int) -> None:
        """Another request waits to go on from this sequence's first `num_tokens` tokens: once these are committed, what
        a hit there needs is kept before other rows that slid out of windows.

        Raises:
            LeaseClosed: the lease is released.
        """
        self.desk.expect_end(self, num_tokens)

    def note_in_flight(self, num_tokens: int) -> None:
        """So many tokens of what the look-up found were computed by another request while this one waited for them:
        explanations and figures tell them apart as a rung of their own. For a look-up that counts, once, before others
        are made.

        Raises:
            RequestError: more than what was found.
            LeaseClosed: the lease is released.
        """
        self.desk.note_in_flight(self, num_tokens)

    def truncate(self, num_tokens: int) -> None:
        """Drop known but uncommitted tokens beyond `num_tokens`, and the room beyond it (rejected drafts).

        Raises:
            TruncateBelowCommitted: below what is committed; nothing changes.
            LeaseClosed: the lease is released.
        """
        self.desk.truncate(self, num_tokens)

    def fork(self, request_id: RequestId | None = None) -> Lease:
        """A second lease that knows the same tokens and shares the committed full blocks.

        A committed partial tail gets a block of its own in each lane, and `child.copies` lists the copies that the
        tensors must do before the child's next step: [(from_block, to_block)]. Uncommitted room stays here. Not
        counted as a look-up.

        Raises:
            OutOfBlocks: no block for the tail; nothing changes.
            DuplicateRequest: a live lease has this id.
            LeaseClosed: the lease is released.
        """
        return self.desk.fork(self, request_id)

    def release(self) -> None:
        """End of use: stored blocks become evictable once nobody holds them, the others are free at once.

        Raises:
            LeaseClosed: it was released before.
        """
        self.desk.release(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.is_open:
            self.release()

    def __repr__(self) -> str:
        if not self.is_open:
            return f"<Lease {self.request_id!r}, released>"
        return (
            f"<Lease {self.request_id!r}: {self.num_tokens} tokens, {self.num_cached_tokens} cached, "
            f"{self.num_committed_tokens} committed, {self.num_blocks} blocks>"
        )

    # --- for the desk ---------------------------------------------------------------------------------------------

    def set_table(self, blocks: Int32Array) -> None:
        """Replace the whole table, int32 [num_blocks, num_lanes]."""
        self.table = blocks
        self.num_blocks = len(blocks)
        self.views = None

    @property
    def grows_alone(self) -> bool:
        """True if its stored run, which it made, can only become longer by its next blocks, and nobody else knows it
        yet. One that may not be lengthened in place any more gets another run behind it when these are stored."""
        node = self.node
        return (
            self.own_node
            and self.stores
            and not node.sealed
            and not node.children
            and node.layers is None
            and not self.cuts
            and not self.expected_ends
        )

    def add_block(self, block: int) -> None:
        """Append one row to a table of one lane; amortised O(1)."""
        if self.num_blocks == len(self.table):
            self.add_rows(1)[0] = block
            return
        self.table[self.num_blocks, 0] = block
        self.num_blocks += 1
        self.views = None

    def add_rows(self, num_rows: int) -> Int32Array:
        """Append rows to the table, whose blocks the caller writes: int32 [num_rows, num_lanes]. Amortised O(rows)."""
        before, after = self.num_blocks, self.num_blocks + num_rows
        if after > len(self.table):
            table = np.empty((max(after, 2 * before), self.table.shape[1]), dtype=np.int32)
            table[:before] = self.table[:before]
            self.table = table
        self.num_blocks = after
        self.views = None
        return self.table[before:after]

    def know(self, data: bytes) -> None:
        """Add packed tokens, whole blocks, to what is known: a prompt alone is kept as it came. Amortised O(tokens)."""
        if isinstance(self.head, bytes):
            self.head = bytearray(self.head)
        self.head += data


def _in_one_column(table: Int32Array) -> Int32Array:
    """A table of one lane as int32 [num_blocks]; any other as it is."""
    return table[:, 0] if table.shape[1] == 1 else table

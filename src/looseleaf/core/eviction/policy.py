"""The contract of an eviction policy: a small plug-in over opaque ids in logical time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol, TypeAlias


class Use(NamedTuple):  # several are made for each request: a frozen dataclass takes three times as long
    """Who touches stored runs, and when.

    tick: logical time; it grows with every call and orders everything. seconds: what the cache's clock said, for
    policies that learn how long things stay away; never goes back. request: number of the request, the same from its
    first call to its `release`; larger for one that began later.
    """

    tick: int
    seconds: float
    request: int


class StoredRun(NamedTuple):
    """A run of blocks that is stored now. `start_block`: logical blocks before it (the cost of computing a block grows
    with it). key: chain key of its first block, 0 unless the policy `uses_keys`. is_padded: one last block that is not
    full of tokens, of use to the very same prompt only."""

    num_blocks: int
    start_block: int
    key: int = 0
    is_padded: bool = False


class EvictionPolicy(Protocol):
    """Chooses which stored run of blocks goes next.

    An id stands for one node of the prefix tree: a run of blocks that all have the same history. Only evictable leaves
    are *offered*; the policy answers with one of these, and the cache takes as many blocks as it needs from the end of
    that run. A policy modifies nothing but itself, reads no clock, and finds its victim through a structure that it
    maintains, never by a scan. `looseleaf.testing.check_policy` tests a policy against all of this.

    The caller guarantees: `insert` comes first and `forget` last for each id, ids are never used again; `offer` and
    `withdraw` alternate, and what is offered is withdrawn before a `hit`; a run is only lengthened, cut or shortened
    between; `use.tick` and `use.seconds` never go back.
    """

    name: ClassVar[str]
    uses_keys: ClassVar[bool]
    """True for a policy that remembers content after its eviction: it is told chain keys, which take time to
    compute."""

    def resize(self, num_blocks: int) -> None:
        """The pool has `num_blocks` blocks from now on."""
        ...

    def insert(self, node_id: int, run: StoredRun, use: Use) -> None:
        """A run was stored: its first use."""
        ...

    def extend(self, node_id: int, num_blocks: int) -> None:
        """The request that stored the run has added `num_blocks` blocks at its end."""
        ...

    def hit(self, node_ids: Sequence[int], use: Use) -> None:
        """A request reuses these runs, root first: one more use of each."""
        ...

    def missed(self, keys: Sequence[int], use: Use) -> Sequence[int]:
        """Chain keys of the blocks of a request behind those that were found, root first; comes after its `hit` and
        before its `insert`s, and only if the policy `uses_keys`. Returns where histories part: numbers of keys in
        ascending order, 0 < number < len(keys), at which the cache begins another run when it stores these blocks."""
        ...

    def release(self, node_ids: Sequence[int], use: Use, num_output_tokens: int) -> None:
        """A request that used these runs, root first, has ended after so many output tokens; not a further use."""
        ...

    def split(self, node_id: int, upper_id: int, num_upper_blocks: int) -> None:
        """The run was cut in two; `upper_id` is its new first part of so many blocks and inherits the history."""
        ...

    def shorten(self, node_id: int, num_blocks: int, key: int) -> None:
        """The last `num_blocks` blocks were evicted; `key` is the chain key of the first of these (0 unless the policy
        `uses_keys`)."""
        ...

    def offer(self, node_id: int, depth_blocks: int) -> None:
        """The run may be evicted from now on; its last block lies at `depth_blocks` (ties: deepest first)."""
        ...

    def withdraw(self, node_id: int) -> None:
        """The run may not be evicted any more."""
        ...

    def victim(self) -> int | None:
        """The offered run to evict next, None if none is offered. It stays offered."""
        ...

    def forget(self, node_id: int, key: int | None) -> None:
        """The run is gone. `key`: it was evicted, with the chain key of its first block (0 unless the policy
        `uses_keys`); None: it was cleared, and its content must not be remembered."""
        ...

    def offered(self) -> Iterable[int]:
        """All offered ids, for the integrity check."""
        ...

    def describe(self, node_id: int, seconds: float) -> Mapping[str, float | str]:
        """What the policy thinks of a run at that time, in numbers for people (`explain`); names end in their unit."""
        ...


PolicyFactory: TypeAlias = Callable[[int], EvictionPolicy]
"""Makes a policy for a pool of so many blocks."""

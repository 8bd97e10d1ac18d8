"""One eviction policy for each account, and who gives up memory next: fair shares, and quotas of stored blocks.

                   usage        who gives next
    flood    ##############     the account that uses most: with equal shares it is the one furthest over its own
    one      ######             (max-min fairness; what an account leaves of its share others may use)
    two      #####
    three    ##

Without fair shares only accounts with a quota have a policy of their own, all others one in common; the victim is then,
of what the policies choose, what was used longest ago.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from looseleaf.core.eviction import EvictionPolicy, PolicyFactory, StoredRun, Use
from looseleaf.core.eviction.heap import Key, OfferedHeap
from looseleaf.core.namespaces import Tenancy
from looseleaf.core.tree import Node, PrefixTree
from looseleaf.core.usage import Account, UsageBook
from looseleaf.ids import Namespace

MAX_IDLE_POLICIES = 64
"""Policies of accounts that store nothing which are kept for what they remember."""

_COMMON = 0


@dataclass(eq=False, slots=True)
class _Share:
    """An account (None: all without one of their own), its policy, made for `num_blocks`, how many runs that knows, how
    many it may choose from, and those that go before all others."""

    number: int
    account: Account | None
    policy: EvictionPolicy
    num_blocks: int
    num_runs: int = 0
    num_offered: int = 0
    expendable: OfferedHeap = field(default_factory=OfferedHeap)


class PolicyShares:
    """Stands where one policy stands otherwise, with the same methods, but `missed`, which must be told whose blocks
    are missing. Every run is known to the policy of its namespace's account, and to no other."""

    def __init__(
        self,
        factory: PolicyFactory,
        common: EvictionPolicy,
        tree: PrefixTree,
        usage: UsageBook,
        num_blocks: int,
        is_fair: bool,
    ) -> None:
        self.name, self.uses_keys = common.name, common.uses_keys
        self.num_blocks = num_blocks
        self.is_fair = is_fair
        self._factory = factory
        self._tree = tree
        self._usage = usage
        self._common = _Share(_COMMON, None, common, num_blocks)
        self._shares: dict[int, _Share] = {_COMMON: self._common}  # by number of the account
        self._idle: OrderedDict[int, _Share] = OrderedDict()
        self._heap = OfferedHeap()  # shares that have something to give
        self._waiting: dict[int, dict[int, _Share]] = {}  # by request: those whose policies are to be told of its end
        usage.tracks_private = True

    # --- whose ----------------------------------------------------------------------------------------------------

    def _share(self, namespace: Namespace) -> _Share:
        account = self._usage.of(namespace)
        if not self.is_fair and account.quota_blocks is None:
            return self._common
        share = self._shares.get(account.number)
        if share is None:
            size = self._fair_blocks(account)
            share = self._shares[account.number] = _Share(account.number, account, self._factory(size), size)
            self._idle[share.number] = share
            if len(self._idle) > MAX_IDLE_POLICIES:
                del self._shares[self._idle.popitem(last=False)[0]]
        return share

    def _of(self, node_id: int) -> _Share:
        return self._share(self._tree.nodes[node_id].namespace)

    def _parts(self, node_ids: Sequence[int]) -> Iterable[tuple[_Share, list[int]]]:
        """Runs of a path by share, in their order."""
        parts: dict[int, tuple[_Share, list[int]]] = {}
        for node_id in node_ids:
            share = self._of(node_id)
            parts.setdefault(share.number, (share, []))[1].append(node_id)
        return parts.values()

    def _fair_blocks(self, account: Account) -> int:
        """What an account may count on: its equal share, or what others leave it, within its quota."""
        blocks = max(self.num_blocks // max(1, self._usage.num_users), account.used_blocks) if self.is_fair else 0
        quota = account.quota_blocks
        return max(1, blocks if quota is None else min(blocks or quota, quota))

    def count_common(self, nodes: Iterable[Node]) -> None:
        """The common policy has known these runs, all that are stored, already."""
        self._common.num_offered = sum(node.queue == "unpinned" for node in nodes)
        if self._common.num_offered:
            self._heap.offer(_COMMON, self._key(self._common))

    def adopt(self, nodes: Iterable[Node], key_of: Callable[[Node], int]) -> None:
        """Stored runs, used longest ago first, whose accounts had the common policy until now, get one of their own: it
        knows nothing of them but their last use. `key_of`: chain key of a run's first block, if policies use keys."""
        common = self._common
        for node in nodes:
            if node.queue == "unpinned":
                common.policy.withdraw(node.id)
                common.num_offered -= 1
                if not common.num_offered:
                    self._heap.withdraw(_COMMON)
            common.policy.forget(node.id, None)
            run = StoredRun(node.num_blocks, node.start, key_of(node) if self.uses_keys else 0)
            self.insert(node.id, run, Use(node.last_tick, node.last_used_at, request=0))
            if node.queue == "unpinned":
                self.offer(node.id, node.end)
            elif node.queue == "expendable":
                self.offer_expendable(node, (-node.end,))

    # --- as a policy ----------------------------------------------------------------------------------------------

    def resize(self, num_blocks: int) -> None:
        """The pool has `num_blocks` blocks from now on; policies of accounts follow as these store."""
        self.num_blocks = num_blocks
        self._common.policy.resize(num_blocks)

    def insert(self, node_id: int, run: StoredRun, use: Use) -> None:
        """As in `EvictionPolicy`; a policy that was made for a share of half or twice the size is resized."""
        share = self._of(node_id)
        if share.account is not None:
            self._idle.pop(share.number, None)
            size = self._fair_blocks(share.account)
            if not share.num_blocks < 2 * size < 4 * share.num_blocks:
                share.num_blocks = size
                share.policy.resize(size)
        share.num_runs += 1
        share.policy.insert(node_id, run, use)

    def extend(self, node_id: int, num_blocks: int) -> None:
        """As in `EvictionPolicy`."""
        self._of(node_id).policy.extend(node_id, num_blocks)

    def hit(self, node_ids: Sequence[int], use: Use) -> None:
        """As in `EvictionPolicy`; each policy is told its part of the path."""
        for share, part in self._parts(node_ids):
            self._waiting.setdefault(use.request, {})[share.number] = share
            share.policy.hit(part, use)

    def missed(self, keys: Sequence[int], use: Use, tenancy: Tenancy, first_block: int) -> Sequence[int]:
        """As in `EvictionPolicy`, for the blocks from `first_block` on of a prompt that is stored as `tenancy` says."""
        stop = first_block + len(keys)
        ends = [border.first_block for border in tenancy.borders if first_block < border.first_block < stop]
        cuts: list[int] = []
        for first, last in zip((first_block, *ends), (*ends, stop), strict=True):
            begin = first - first_block
            share = self._share(tenancy.at(first))
            self._waiting.setdefault(use.request, {})[share.number] = share
            part = share.policy.missed(keys[begin : last - first_block], use)
            cuts += [begin + cut for cut in part]
        return cuts

    def release(self, node_ids: Sequence[int], use: Use, num_output_tokens: int) -> None:
        """As in `EvictionPolicy`; each policy is told its part of the path, be it empty, if it was told of the
        request."""
        waiting = self._waiting.pop(use.request, {})
        for share, part in self._parts(node_ids):
            waiting.pop(share.number, None)
            share.policy.release(part, use, num_output_tokens)
        for share in waiting.values():
            share.policy.release([], use, num_output_tokens)

    def split(self, node_id: int, upper_id: int, num_upper_blocks: int) -> None:
        """As in `EvictionPolicy`."""
        share = self._of(node_id)
        share.num_runs += 1
        share.policy.split(node_id, upper_id, num_upper_blocks)

    def shorten(self, node_id: int, num_blocks: int, key: int) -> None:
        """As in `EvictionPolicy`."""
        self._of(node_id).policy.shorten(node_id, num_blocks, key)

    def offer(self, node_id: int, depth_blocks: int) -> None:
        """As in `EvictionPolicy`. O(log accounts) besides."""
        share = self._of(node_id)
        share.policy.offer(node_id, depth_blocks)
        share.num_offered += 1
        key = self._key_of(share, self._tree.nodes[node_id])
        if share.num_offered == 1 or key < self._heap.key(share.number):
            self._heap.offer(share.number, key)

    def withdraw(self, node_id: int) -> None:
        """As in `EvictionPolicy`."""
        share = self._of(node_id)
        share.policy.withdraw(node_id)
        share.num_offered -= 1
        if not share.num_offered:
            self._heap.withdraw(share.number)

    def victim(self) -> int | None:
        """As in `EvictionPolicy`, for the account that is to give up memory next. O(log accounts), amortised."""
        if self._usage.grown:
            for account in self._usage.grown:
                share = self._shares.get(account.number)
                if share is not None and share.num_offered:
                    self._heap.offer(share.number, self._key(share))
            self._usage.grown.clear()
        while (number := self._heap.first()) is not None:
            share = self._shares[number]
            key = self._key(share)
            if key <= self._heap.key(number):
                return share.policy.victim()
            self._heap.offer(number, key)  # it has become smaller, or its oldest run was used
        return None

    def victim_of(self, account: Account) -> int | None:
        """The run of an account that is to be evicted next, None if none is offered or expendable."""
        share = self._shares.get(account.number)
        if share is None:
            return None
        node_id = share.expendable.first()
        return share.policy.victim() if node_id is None else node_id

    def offer_expendable(self, node: Node, key: Key) -> None:
        """A run goes before all others, least `key` first, until it is withdrawn."""
        self._of(node.id).expendable.offer(node.id, key)

    def withdraw_expendable(self, node: Node) -> None:
        """It does not any more."""
        self._of(node.id).expendable.withdraw(node.id)

    def forget(self, node_id: int, key: int | None) -> None:
        """As in `EvictionPolicy`. The policies of accounts that store nothing are kept a while."""
        share = self._of(node_id)
        share.policy.forget(node_id, key)
        share.num_runs -= 1
        if not share.num_runs and share.account is not None:
            self._idle[share.number] = share
            if len(self._idle) > MAX_IDLE_POLICIES:
                del self._shares[self._idle.popitem(last=False)[0]]

    def offered(self) -> Iterable[int]:
        """As in `EvictionPolicy`, of all policies."""
        return [node_id for share in self._shares.values() for node_id in share.policy.offered()]

    def is_with_own(self, node: Node) -> bool:
        """True if a run that is offered is so by its account's policy, for the integrity check."""
        share = self._share(node.namespace)
        return node.id in share.policy.offered() and share.number in self._heap.offered()

    def describe(self, node_id: int, seconds: float) -> Mapping[str, float | str]:
        """As in `EvictionPolicy`."""
        return self._of(node_id).policy.describe(node_id, seconds)

    # --- who gives ------------------------------------------------------------------------------------------------

    def most_from(self, node: Node) -> int:
        """Blocks that may be taken from a victim before others are asked again: what its account has beyond its share,
        so that nobody is brought below it while others are above."""
        if not self.is_fair:
            return self.num_blocks
        fair = self.num_blocks // max(1, self._usage.num_users)
        excess = self._usage.of(node.namespace).used_blocks - fair
        return excess if excess > 0 else self.num_blocks

    def goes_after(self, node: Node, other: Node) -> bool:
        """True if fairness spares what `node` stores as long as `other` is there to be taken."""
        of = self._usage.of
        return self.is_fair and of(node.namespace).used_blocks < of(other.namespace).used_blocks

    def _key(self, share: _Share) -> Key:
        if self.is_fair:
            return self._key_of(share, None)
        victim = share.policy.victim()
        assert victim is not None  # it has something to give
        return self._key_of(share, self._tree.nodes[victim])

    def _key_of(self, share: _Share, node: Node | None) -> Key:
        """The place of a share in the heap, least first: that of its largest user, or of its oldest run."""
        if self.is_fair:
            assert share.account is not None  # with fair shares every account has one
            return (-share.account.used_blocks,)
        assert node is not None  # callers name one
        return (node.last_tick, -node.end)

"""Quotas of stored blocks: an account that stores more than its own loses its own, and nobody else does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from looseleaf.core.config import CachePlan
from looseleaf.core.eviction import PolicyFactory
from looseleaf.core.fair_shares import PolicyShares
from looseleaf.core.namespaces import account_of
from looseleaf.core.stats import Counters
from looseleaf.core.tree import Node, PrefixTree
from looseleaf.core.usage import Account, UsageBook
from looseleaf.core.victims import VictimQueue
from looseleaf.ids import Namespace


class QuotaKeeper:
    """Keeps every account within its quota as far as it stores something that is neither held nor pinned.

    `evict(leaf, num_blocks)` evicts up to so many blocks from the end of a victim, and answers how many it freed.
    """

    def __init__(
        self,
        factory: PolicyFactory,
        victims: VictimQueue,
        tree: PrefixTree,
        usage: UsageBook,
        counters: Counters,
        evict: Callable[[Node, int], int],
    ) -> None:
        self._factory = factory
        self._victims = victims
        self._tree = tree
        self._usage = usage
        self._counters = counters
        self._evict = evict

    def set(self, plan: CachePlan, key_of: Callable[[Node], int]) -> None:
        """The quotas of `plan`, in force at once; accounts that need one get a policy of their own, which learns the
        order of what is stored already: O(nodes) then. `key_of`: chain key of a run's first block."""
        fresh = plan.stored_quotas.keys() - self._usage.quotas.keys()
        self._usage.set_quotas(plan.stored_quotas)
        policy = self._victims.policy
        if not isinstance(policy, PolicyShares):
            if not fresh and not plan.fair_shares:
                return
            policy = PolicyShares(
                self._factory, policy, self._tree, self._usage, plan.num_blocks, is_fair=plan.fair_shares
            )
            policy.count_common(self._tree.nodes.values())
            self._victims.policy = policy
        if fresh and not policy.is_fair:
            nodes = [node for node in self._tree.nodes.values() if account_of(node.namespace) in fresh]
            policy.adopt(sorted(nodes, key=lambda node: node.last_tick), key_of)
        self.keep()

    def keep(self) -> None:
        """Have accounts give up what they store beyond their quotas. O(1) when there is nothing to do."""
        for account in list(self._usage.over_quota):
            self._give_up(account, account.excess_blocks)
            if not account.excess_blocks:
                self._usage.over_quota.discard(account)

    @contextmanager
    def expecting(self, wanted: Mapping[Namespace, int]) -> Iterator[None]:
        """Meanwhile, blocks that namespaces are about to take count as theirs."""
        for namespace, count in wanted.items():
            self._usage.add_blocks(namespace, private=count)
        try:
            yield
        finally:
            for namespace, count in wanted.items():
                self._usage.add_blocks(namespace, private=-count)

    def evict_own(self, wanted: Mapping[Namespace, int], num_blocks: int) -> int:
        """Evict up to `num_blocks` blocks of those of these namespaces that are beyond their quotas with what they are
        about to take. How many it freed."""
        freed = 0
        for namespace in wanted:
            account = self._usage.of(namespace)
            if account.quota_blocks is not None:
                freed += self._give_up(account, min(num_blocks - freed, account.used_blocks - account.quota_blocks))
        return freed

    def _give_up(self, account: Account, num_blocks: int) -> int:
        freed = 0
        while freed < num_blocks:
            leaf = self._victims.next_of(account)
            if leaf is None:
                break
            before = account.evicted_tokens
            freed += self._evict(leaf, num_blocks - freed)
            account.over_quota_tokens += account.evicted_tokens - before
            self._counters.over_quota_tokens += account.evicted_tokens - before
        return freed

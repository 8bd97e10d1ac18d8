"""Who uses the memory: figures by account. A namespace with a tenant counts to the tenant's account, any other is an
account of its own (`namespaces.account_of`)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from looseleaf.core.namespaces import account_of
from looseleaf.ids import Namespace

MAX_IDLE_ACCOUNTS = 1024
"""Accounts without a block that are remembered; of older ones only sums."""

MAX_NAMES = 8192
"""Namespaces whose account is remembered, so that their names need not be parsed again."""


@dataclass(eq=False, slots=True)
class Account:
    """Blocks (in all lanes) and tokens of one account.

    stored_blocks   in the prefix tree, held, pinned or merely cached
    private_blocks  held by leases and not in the tree; only counted if `UsageBook.tracks_private`
    quota_blocks    most blocks that may be stored; None: as many as there are
    """

    name: Namespace
    number: int
    quota_blocks: int | None = None
    stored_blocks: int = 0
    private_blocks: int = 0
    num_lookups: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    evicted_tokens: int = 0
    over_quota_tokens: int = 0

    @property
    def used_blocks(self) -> int:
        """All blocks of the account."""
        return self.stored_blocks + self.private_blocks

    @property
    def excess_blocks(self) -> int:
        """Stored blocks beyond the quota."""
        return 0 if self.quota_blocks is None else max(0, self.stored_blocks - self.quota_blocks)


@dataclass(frozen=True)
class NamespaceUsage:
    """The figures of one account: a tenant's, or those of a namespace that has no tenant. Blocks in all lanes.

    `stored_blocks`: reusable now; `held_blocks`: held by running requests, stored or not; `pinned_blocks`: held by
    pins. `quota_blocks`: most that may be stored, None without a quota. The rest since the start: every look-up counted
    once, `evicted_tokens`, and `over_quota_tokens`, those of them that went since the account was over its quota.
    `namespace` None: the sum of all that are not remembered any more.
    """

    namespace: Namespace | None
    stored_blocks: int
    held_blocks: int
    pinned_blocks: int
    quota_blocks: int | None
    num_lookups: int
    query_tokens: int
    hit_tokens: int
    hit_rate: float
    evicted_tokens: int
    over_quota_tokens: int


class UsageBook:
    """All accounts of one cache. O(1) for each change. Those that have no block are forgotten, the oldest first, when
    there are more than `MAX_IDLE_ACCOUNTS`; their figures stay in `others`."""

    def __init__(self) -> None:
        self.accounts: dict[Namespace, Account] = {}
        self.others = Account("", -1)
        self.tracks_private = False
        self.num_users = 0  # accounts that have blocks
        self.grown: set[Account] = set()  # since somebody emptied it; only if private blocks are tracked
        self.over_quota: set[Account] = set()  # perhaps: whoever evicts takes them out
        self._quotas: dict[Namespace, int] = {}
        self._by_namespace: dict[Namespace, Account] = {}
        self._idle: OrderedDict[Namespace, Account] = OrderedDict()
        self._num_made = 0

    def of(self, namespace: Namespace) -> Account:
        """The account of a namespace, made if there is none."""
        account = self._by_namespace.get(namespace)
        if account is None:
            if len(self._by_namespace) >= MAX_NAMES:
                self._by_namespace.clear()
            name = account_of(namespace)
            account = self._by_namespace[namespace] = self.accounts.get(name) or self._make(name)
        return account

    def _make(self, name: Namespace) -> Account:
        self._num_made += 1
        account = self.accounts[name] = self._idle[name] = Account(name, self._num_made, self._quotas.get(name))
        if len(self._idle) > MAX_IDLE_ACCOUNTS:
            _, oldest = self._idle.popitem(last=False)
            del self.accounts[oldest.name]
            self._by_namespace.clear()
            for field in ("num_lookups", "query_tokens", "hit_tokens", "evicted_tokens", "over_quota_tokens"):
                setattr(self.others, field, getattr(self.others, field) + getattr(oldest, field))
        return account

    def set_quotas(self, quotas: Mapping[Namespace, int]) -> None:
        """Other quotas, by account."""
        self._quotas = dict(quotas)
        for account in self.accounts.values():
            account.quota_blocks = self._quotas.get(account.name)
            if account.excess_blocks:
                self.over_quota.add(account)

    @property
    def quotas(self) -> Mapping[Namespace, int]:
        """Accounts with a quota, in blocks."""
        return self._quotas

    def add_blocks(self, namespace: Namespace, stored: int = 0, private: int = 0) -> None:
        """So many blocks more (negative: fewer) are stored, or private."""
        account = self.of(namespace)
        before = account.stored_blocks + account.private_blocks
        account.stored_blocks += stored
        account.private_blocks += private
        was_idle = before == 0
        if was_idle != (before + stored + private == 0):
            self.num_users += 1 if was_idle else -1
            if was_idle:
                self._idle.pop(account.name, None)
            else:
                self._idle[account.name] = account
        if self.tracks_private and stored + private > 0:
            self.grown.add(account)
            if account.excess_blocks:
                self.over_quota.add(account)

    def on_lookup(self, namespace: Namespace, query_tokens: int, hit_tokens: int) -> None:
        """A look-up that counts."""
        account = self.of(namespace)
        account.num_lookups += 1
        account.query_tokens += query_tokens
        account.hit_tokens += hit_tokens
        if not account.used_blocks:
            self._idle.move_to_end(account.name)

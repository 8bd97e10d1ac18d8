"""What is asked of a cache (`CacheConfig`) and what comes out of it (`CachePlan`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from looseleaf.core.auto_pin_config import AutoPinConfig
from looseleaf.core.eviction import POLICIES
from looseleaf.core.namespaces import account_of
from looseleaf.core.settings import strict_settings, unknown_setting
from looseleaf.errors import ConfigError
from looseleaf.ids import Int64Array

MAX_SEQUENCE_TOKENS = 2**30
"""More than any sequence has: the limit where only windows are kept, whatever the length."""

MAX_BLOCKS_PER_PAGE = 64
"""A page's occupancy is one bit mask of 64 bits."""

GROUP_KINDS = ("full", "window", "chunked")
"""What the layers of a group keep; see `LayerGroup`."""


def _check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {value!r}; it must be an integer >= {least}")


def check_share(name: str, value: object) -> None:
    """ConfigError if `value` is no share from 0 to 1."""
    if not (isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 <= value <= 1.0):
        raise ConfigError(f"{name} is {value!r}; it must be a share from 0 to 1")


def check_account(namespace: object) -> None:
    """ConfigError if a namespace can't have a quota of its own."""
    if not isinstance(namespace, str):
        raise ConfigError(f"a quota is set for namespace {namespace!r}; it must be a string")
    if account_of(namespace) != namespace:
        hint = f"set the tenant's quota, that of namespace {account_of(namespace)!r}"
        raise ConfigError(f"namespace {namespace!r} is a part of a tenant's: its memory counts to the tenant", hint)


@strict_settings
@dataclass(frozen=True)
class LayerGroup:
    """Layers that keep the same history.

    kind: "full" keeps all tokens; "window" the last `window_tokens` tokens; "chunked" those since the last multiple of
    `chunk_tokens` (attention that looks back within its chunk only).
    num_lanes: the group's layers are stored in so many lanes of equal bytes per token; each lane has block ids of its
    own, so that lanes of all groups can take their blocks from one pool.
    name: key of the group in `Lease.block_tables`; its kind if left out.
    """

    kind: str = "full"
    window_tokens: int | None = None
    chunk_tokens: int | None = None
    num_lanes: int = 1
    name: str = ""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: unknown kind, or a window or chunk without a positive size.
        """
        if self.kind not in GROUP_KINDS:
            raise unknown_setting(str(self.kind), GROUP_KINDS, "LayerGroup")
        for kind, setting in (("window", "window_tokens"), ("chunked", "chunk_tokens")):
            value = getattr(self, setting)
            if self.kind == kind:
                if value is None:
                    raise ConfigError(f"a {kind} group needs {setting} >= 1, not None")
                _check_count(setting, value, 1)
            elif value is not None:
                raise ConfigError(f"a {self.kind} group has no {setting}", f'use LayerGroup("{kind}", {setting}=...)')
        _check_count("num_lanes", self.num_lanes, 1)
        if not self.name:
            object.__setattr__(self, "name", self.kind)

    def first_needed_token(self, num_tokens: int) -> int:
        """The oldest token that must still be there to compute the token at position `num_tokens`, and all after it."""
        if self.window_tokens is not None:
            return max(0, num_tokens - self.window_tokens)
        if self.chunk_tokens is not None:
            return num_tokens // self.chunk_tokens * self.chunk_tokens
        return 0


@strict_settings
@dataclass(frozen=True)
class CacheConfig:
    """What is asked of a cache. All settings have a meaning in tokens, blocks or pages; none in bytes.

    num_pages: pages of the pool. page_tokens, block_tokens: their sizes; a block is a power of two from 1 to 512
    tokens, a page a multiple of it with at most 64 blocks. policy: name of the eviction policy. pin_quota: share of
    all blocks that pins may hold, 0 to 1. reserve_pages: whole pages that `maintain` keeps free ahead of need.
    groups: the layer groups; all their lanes take blocks from this one pool. num_known_requests: finished requests that
    `explain` and `pin(request_id=...)` remember. layout: fingerprint of what a block holds; an engine refuses a
    model of another one. namespace_pin_quotas: shares of all blocks that the pins of single namespaces may
    hold, within pin_quota. auto_pin: what the cache may pin by itself; None: nothing. namespace_quotas: shares of all
    blocks that single namespaces (or tenants, see `account_of`) may store; what is over a quota goes first, and takes
    nobody else's place. fair_shares: memory is taken from the namespace that uses most.
    """

    num_pages: int
    page_tokens: int = 256
    block_tokens: int = 16
    policy: str = "adaptive"
    pin_quota: float = 0.30
    reserve_pages: int = 0
    groups: tuple[LayerGroup, ...] = (LayerGroup("full"),)
    num_known_requests: int = 10_000
    layout: str = ""
    namespace_pin_quotas: Mapping[str, float] = field(default_factory=dict)
    auto_pin: AutoPinConfig | None = None
    namespace_quotas: Mapping[str, float] = field(default_factory=dict)
    fair_shares: bool = False

    def __post_init__(self) -> None:
        """Check every value and their combinations.

        Raises:
            ConfigError: with the value, what it must be, and a hint where one helps.
        """
        for name, least in (("num_pages", 1), ("page_tokens", 1), ("block_tokens", 1), ("reserve_pages", 0)):
            _check_count(name, getattr(self, name), least)
        _check_count("num_known_requests", self.num_known_requests, 0)
        if self.block_tokens > 512 or self.block_tokens & (self.block_tokens - 1):
            raise ConfigError(
                f"block_tokens is {self.block_tokens}; it must be a power of two from 1 to 512", "16 is a good choice"
            )
        if self.page_tokens % self.block_tokens:
            raise ConfigError(f"page_tokens is {self.page_tokens}, not a multiple of block_tokens {self.block_tokens}")
        if self.page_tokens // self.block_tokens > MAX_BLOCKS_PER_PAGE:
            raise ConfigError(
                f"a page of {self.page_tokens} tokens has {self.page_tokens // self.block_tokens} blocks of "
                f"{self.block_tokens}; at most {MAX_BLOCKS_PER_PAGE} fit",
                "use smaller pages or larger blocks",
            )
        if self.policy not in POLICIES:
            raise unknown_setting(str(self.policy), POLICIES, "policy")
        check_share("pin_quota", self.pin_quota)
        for namespace, share in self.namespace_pin_quotas.items():
            check_share(f"namespace_pin_quotas[{namespace!r}]", share)
        for namespace, share in self.namespace_quotas.items():
            check_share(f"namespace_quotas[{namespace!r}]", share)
            check_account(namespace)
        if not isinstance(self.fair_shares, bool):
            raise ConfigError(f"fair_shares is {self.fair_shares!r}; it must be True or False")
        if self.reserve_pages > self.num_pages:
            raise ConfigError(f"reserve_pages is {self.reserve_pages}, above num_pages {self.num_pages}")
        if not isinstance(self.auto_pin, (AutoPinConfig, type(None))):
            raise ConfigError(f"auto_pin is {self.auto_pin!r}; it must be an AutoPinConfig or None")
        self._check_groups()

    def _check_groups(self) -> None:
        if not isinstance(self.groups, tuple) or not all(isinstance(group, LayerGroup) for group in self.groups):
            raise ConfigError(f"groups is {self.groups!r}; it must be a tuple of LayerGroup")
        if not self.groups:
            raise ConfigError("groups is empty", 'leave it out for one full group, LayerGroup("full")')
        names = [group.name for group in self.groups]
        for name in names:
            if names.count(name) > 1 or name == "kv":
                what = '"kv" means all groups' if name == "kv" else f"{names.count(name)} groups have this name"
                raise ConfigError(
                    f"a layer group is named {name!r}: {what}", 'tell them apart with LayerGroup(name="...")'
                )
        if sum(group.kind == "full" for group in self.groups) > 1:
            raise ConfigError("there are several full groups", "layers that keep all tokens make one group")


@dataclass(frozen=True)
class GroupPlan:
    """A layer group and its place among the lanes: columns `first_lane` to `last_lane` (exclusive) of a block table."""

    group: LayerGroup
    first_lane: int
    last_lane: int
    block_tokens: int

    @property
    def lanes(self) -> slice:
        """Its columns."""
        return slice(self.first_lane, self.last_lane)

    @property
    def num_lanes(self) -> int:
        """How many columns these are."""
        return self.last_lane - self.first_lane

    @property
    def slides(self) -> bool:
        """True if it lets go of old blocks (a window, or chunks)."""
        return self.group.kind != "full"

    def first_needed_block(self, num_blocks: int) -> int:
        """The oldest logical block that must be there to go on behind `num_blocks` blocks."""
        return self.group.first_needed_token(num_blocks * self.block_tokens) // self.block_tokens

    def first_needed_blocks(self, num_blocks: int) -> Int64Array:
        """`first_needed_block` of 0, 1, …, `num_blocks`: int64 [num_blocks + 1]."""
        ends = np.arange(num_blocks + 1, dtype=np.int64) * self.block_tokens
        if self.group.window_tokens is not None:
            ends = np.maximum(ends - self.group.window_tokens, 0)
        elif self.group.chunk_tokens is not None:
            ends -= ends % self.group.chunk_tokens
        else:
            ends[:] = 0
        return ends // self.block_tokens


@dataclass(frozen=True)
class CachePlan:
    """What comes out of a `CacheConfig`: sizes in blocks, worked out once.

    `num_blocks`: blocks of the pool; each holds `block_tokens` tokens of one lane. `num_lanes`: lanes of all groups.
    `num_tokens`: most tokens that one sequence can have when it has the pool for itself.
    """

    num_pages: int
    blocks_per_page: int
    block_tokens: int
    num_blocks: int
    num_tokens: int
    quota_blocks: int
    namespace_quotas: Mapping[str, int]
    reserve_blocks: int
    groups: tuple[GroupPlan, ...]
    stored_quotas: Mapping[str, int]
    fair_shares: bool

    @classmethod
    def of(cls, config: CacheConfig, num_pages: int | None = None) -> CachePlan:
        """The plan that follows from `config`, with another number of pages if that is given; `quota_blocks` is
        floor(pin_quota * num_blocks)."""
        num_pages = config.num_pages if num_pages is None else num_pages
        per_page = config.page_tokens // config.block_tokens
        num_blocks = num_pages * per_page
        groups: list[GroupPlan] = []
        for group in config.groups:
            first = groups[-1].last_lane if groups else 0
            groups.append(GroupPlan(group, first, first + group.num_lanes, config.block_tokens))
        plan = cls(
            num_pages=num_pages,
            blocks_per_page=per_page,
            block_tokens=config.block_tokens,
            num_blocks=num_blocks,
            num_tokens=num_blocks * config.block_tokens,
            quota_blocks=math.floor(config.pin_quota * num_blocks),
            namespace_quotas={
                name: math.floor(share * num_blocks) for name, share in config.namespace_pin_quotas.items()
            },
            reserve_blocks=config.reserve_pages * per_page,
            groups=tuple(groups),
            stored_quotas={name: math.floor(share * num_blocks) for name, share in config.namespace_quotas.items()},
            fair_shares=config.fair_shares,
        )
        return plan if plan.num_lanes == 1 and not plan.slides else replace(plan, num_tokens=plan._most_tokens())

    @property
    def num_lanes(self) -> int:
        """Lanes of all groups: columns of a block table."""
        return self.groups[-1].last_lane

    @property
    def slides(self) -> bool:
        """True if some group lets go of old blocks."""
        return any(group.slides for group in self.groups)

    def num_held_blocks(self, num_blocks: int) -> int:
        """Blocks, in all lanes, that a lease holds which goes on behind `num_blocks` logical blocks."""
        return sum(group.num_lanes * (num_blocks - group.first_needed_block(num_blocks)) for group in self.groups)

    def blocks_for(self, num_tokens: int, step_tokens: int) -> int:
        """Most blocks, in all lanes, that a sequence holds at once while it grows to `num_tokens` tokens, computing at
        most `step_tokens` in one step."""
        num_blocks = -(-num_tokens // self.block_tokens)
        needed = 0
        for plan in self.groups:
            span = plan.group.window_tokens or plan.group.chunk_tokens
            held = num_blocks
            if span is not None:  # what the first token of a step sees and the step itself, each begun midway
                held = min(num_blocks, -(-span // self.block_tokens) + -(-step_tokens // self.block_tokens) + 1)
            needed += plan.num_lanes * held
        return needed

    def _most_tokens(self) -> int:
        low, high = 0, MAX_SEQUENCE_TOKENS // self.block_tokens
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.blocks_for(middle * self.block_tokens, self.block_tokens) <= self.num_blocks
            low, high = (middle, high) if fits else (low, middle - 1)
        return low * self.block_tokens

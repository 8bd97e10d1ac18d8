"""A pin as its callers see it, and as the cache keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from looseleaf.core.namespaces import Tenancy
from looseleaf.core.tree import Node
from looseleaf.ids import Namespace, RequestId

HARD = "hard"
SOFT = "soft"
AUTOMATIC = -(2**31)
"""Priority of automatic pins: below that of any explicit one."""


@dataclass(frozen=True)
class Pin:
    """A snapshot of one pin.

    `num_tokens`: what was asked, from the first token on. `num_pinned_tokens`: what is held now, whole blocks;
    `num_blocks`: what that takes in all lanes, shared or not. `created_at`, `expires_at`, `last_used_at`: seconds of
    the cache's clock, None without a time to live, before the first use. `is_limited`: stored tokens of it are not held
    because the quota is used up. `is_automatic`: the cache made it by itself.

    `num_hits`: look-ups that reused all that it holds; `served_tokens`: tokens that they so found. `cost_tokens`: an
    estimate of what it cost others: for every token computed again after its eviction, the share of this pin in the
    memory that eviction chooses from.
    """

    id: str
    owner: str
    level: str
    priority: int
    namespace: Namespace
    cache_type: str
    request_id: RequestId | None
    num_tokens: int
    num_pinned_tokens: int
    num_blocks: int
    labels: Mapping[str, str]
    created_at: float
    expires_at: float | None
    last_used_at: float | None
    refresh: bool
    is_limited: bool
    is_automatic: bool
    num_hits: int
    served_tokens: int
    cost_tokens: float


@dataclass(frozen=True)
class PastPin:
    """The last snapshot of a pin that ended, "unpinned", "expired" or "lapsed", or was "refused" for want of quota, and
    when, in seconds of the cache's clock."""

    pin: Pin
    end: str
    ended_at: float


@dataclass(frozen=True, slots=True)
class Awaited:
    """The first block that a hold lacks, packed (empty if it lacks none), and its namespace."""

    namespace: Namespace = ""
    block: bytes = b""


NONE_AWAITED = Awaited()


@dataclass(eq=False)
class PinHold:
    """What all pins that are alike hold together: those that ask for the same, on the same terms. `data` is what they
    ask for, packed and cut to whole blocks, stored as `tenancy` says; they hold the path down to `node` and wait for
    `awaited`. `number`: that of the first of them. Figures are sums since then."""

    number: int
    tenancy: Tenancy
    data: bytes
    num_blocks: int
    node: Node
    level: str
    priority: int
    cache_type: str
    awaited: Awaited = NONE_AWAITED
    records: dict[str, PinRecord] = field(default_factory=dict)
    num_hits: int = 0
    served_tokens: int = 0
    cost_tokens: float = 0.0
    hit_at: float | None = None
    asked_at: float | None = None
    price_mark: float = 0.0
    hit_mark: int = 0
    served_mark: int = 0

    @property
    def id(self) -> str:
        """The name of its first pin."""
        return f"pin-{self.number}"

    @property
    def terms(self) -> tuple[Tenancy, str, int, str, bytes]:
        """What pins that are alike have in common."""
        return self.tenancy, self.level, self.priority, self.cache_type, self.data

    @property
    def is_automatic(self) -> bool:
        """Made by the cache itself: any explicit pin may take its place."""
        return self.priority == AUTOMATIC


@dataclass(eq=False)
class PinRecord:
    """A live pin. `number`: pins are numbered as they are made. `namespace`: whose it is. `…_before`: figures of its
    hold when it came."""

    number: int
    namespace: Namespace
    hold: PinHold
    num_tokens: int
    owner: str
    request_id: RequestId | None
    created_at: float
    ttl_seconds: float | None
    refresh: bool
    labels: Mapping[str, str]
    last_expiry: float | None = None
    expires_at: float | None = None
    hits_before: int = 0
    served_before: int = 0
    cost_before: float = 0.0

    @property
    def id(self) -> str:
        """Its name to callers."""
        return f"pin-{self.number}"

    @property
    def node(self) -> Node:
        """Where its hold ends."""
        return self.hold.node


@dataclass
class Anchorage:
    """The holds that end at one node, all (by number) and by the block that they wait for there, so that storing a run
    looks only at those that wait for it. Uses of the node since the first of them came: hits of all down to it, the
    blocks that they found, and when it was last hit or asked for."""

    holds: dict[int, PinHold] = field(default_factory=dict)
    by_awaited: dict[Awaited, dict[int, PinHold]] = field(default_factory=dict)
    num_hits: int = 0
    num_served_blocks: int = 0
    hit_at: float | None = None
    asked_at: float | None = None

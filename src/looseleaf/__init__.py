"""looseleaf: a KV-cache engine for large language models, made of paging, pinning and reuse.

`from looseleaf import CacheManager` is the library's door; it needs numpy only. See `docs/ARCHITECTURE.md`.
"""

from __future__ import annotations

from looseleaf.core.config import CacheConfig, CachePlan, LayerGroup
from looseleaf.core.events import BlocksRemoved, BlocksStored
from looseleaf.core.explain import Explanation
from looseleaf.core.lease import Lease
from looseleaf.core.manager import CacheManager, PrefixMatch
from looseleaf.core.pins import Pin
from looseleaf.core.stats import CacheStats, ClearResult
from looseleaf.errors import (
    CapacityError,
    CommitBeyondReserved,
    ConfigError,
    DuplicateRequest,
    IntegrityError,
    InvalidTokens,
    LayoutMismatch,
    LeaseClosed,
    LifecycleError,
    LooseleafError,
    ModelError,
    OutOfBlocks,
    PageCorrupt,
    PinQuotaExceeded,
    PromptTooLong,
    RequestError,
    TierError,
    TierUnavailable,
    TruncateBelowCommitted,
    UnknownPin,
    UnknownRequest,
    UnsupportedModel,
)

__version__ = "0.1.0"

__all__ = [
    "BlocksRemoved",
    "BlocksStored",
    "CacheConfig",
    "CacheManager",
    "CachePlan",
    "CacheStats",
    "CapacityError",
    "ClearResult",
    "CommitBeyondReserved",
    "ConfigError",
    "DuplicateRequest",
    "Explanation",
    "IntegrityError",
    "InvalidTokens",
    "LayerGroup",
    "LayoutMismatch",
    "Lease",
    "LeaseClosed",
    "LifecycleError",
    "LooseleafError",
    "ModelError",
    "OutOfBlocks",
    "PageCorrupt",
    "Pin",
    "PinQuotaExceeded",
    "PrefixMatch",
    "PromptTooLong",
    "RequestError",
    "TierError",
    "TierUnavailable",
    "TruncateBelowCommitted",
    "UnknownPin",
    "UnknownRequest",
    "UnsupportedModel",
]

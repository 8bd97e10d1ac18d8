"""looseleaf: a KV-cache engine for large language models, made of paging, pinning and reuse.

`from looseleaf import CacheManager` is the library's door; it needs numpy only. See `docs/ARCHITECTURE.md`.
"""

from __future__ import annotations

from looseleaf.core.config import CacheConfig, CachePlan, LayerGroup
from looseleaf.core.events import BlocksMoved, BlocksRemoved, BlocksStored
from looseleaf.core.explain import Explanation
from looseleaf.core.inspection import StoredPart
from looseleaf.core.lease import Lease
from looseleaf.core.manager import CacheManager
from looseleaf.core.misses import MissSummary
from looseleaf.core.moving import CompactionResult, ResizeResult
from looseleaf.core.namespaces import NamespaceLayer, namespace_of
from looseleaf.core.pin_record import Pin
from looseleaf.core.reports import Fragmentation, GroupUse, PrefixMatch
from looseleaf.core.sessions import Session, SessionEnd
from looseleaf.core.stats import CacheStats, ClearResult
from looseleaf.core.usage import NamespaceUsage
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
    ResizeRefused,
    TierError,
    TierUnavailable,
    TruncateBelowCommitted,
    UnknownPin,
    UnknownRequest,
    UnknownSession,
    UnsupportedModel,
)

__version__ = "0.1.0"

__all__ = [
    "BlocksMoved",
    "BlocksRemoved",
    "BlocksStored",
    "CacheConfig",
    "CacheManager",
    "CachePlan",
    "CacheStats",
    "CapacityError",
    "ClearResult",
    "CommitBeyondReserved",
    "CompactionResult",
    "ConfigError",
    "DuplicateRequest",
    "Explanation",
    "Fragmentation",
    "GroupUse",
    "IntegrityError",
    "InvalidTokens",
    "LayerGroup",
    "LayoutMismatch",
    "Lease",
    "LeaseClosed",
    "LifecycleError",
    "LooseleafError",
    "MissSummary",
    "ModelError",
    "NamespaceLayer",
    "NamespaceUsage",
    "OutOfBlocks",
    "PageCorrupt",
    "Pin",
    "PinQuotaExceeded",
    "PrefixMatch",
    "PromptTooLong",
    "RequestError",
    "ResizeRefused",
    "ResizeResult",
    "Session",
    "SessionEnd",
    "StoredPart",
    "TierError",
    "TierUnavailable",
    "TruncateBelowCommitted",
    "UnknownPin",
    "UnknownRequest",
    "UnknownSession",
    "UnsupportedModel",
    "namespace_of",
]

"""Eviction policies by name. One policy, one file; contract: `policy.py`, plug-ins: `plugins.py`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from looseleaf.core.eviction.adaptive import AdaptivePolicy
from looseleaf.core.eviction.cost import CostPolicy
from looseleaf.core.eviction.fifo import FIFOPolicy
from looseleaf.core.eviction.lfu import LFUPolicy
from looseleaf.core.eviction.lfuda import LFUDAPolicy
from looseleaf.core.eviction.lru import LRUPolicy
from looseleaf.core.eviction.plugins import PolicyRegistry
from looseleaf.core.eviction.policy import EvictionPolicy, PolicyFactory, StoredRun, Use
from looseleaf.core.eviction.s3fifo import S3FIFOPolicy
from looseleaf.core.eviction.sieve import SIEVEPolicy
from looseleaf.core.eviction.slru import SLRUPolicy
from looseleaf.core.eviction.wtinylfu import WTinyLFUPolicy

BUILT_IN: Mapping[str, PolicyFactory] = MappingProxyType(
    {
        AdaptivePolicy.name: AdaptivePolicy,
        LRUPolicy.name: LRUPolicy,
        FIFOPolicy.name: FIFOPolicy,
        LFUPolicy.name: LFUPolicy,
        LFUDAPolicy.name: LFUDAPolicy,
        SLRUPolicy.name: SLRUPolicy,
        SIEVEPolicy.name: SIEVEPolicy,
        S3FIFOPolicy.name: S3FIFOPolicy,
        WTinyLFUPolicy.name: WTinyLFUPolicy,
        CostPolicy.name: CostPolicy,
    }
)
"""Policies that come with looseleaf."""

POLICIES: Mapping[str, PolicyFactory] = PolicyRegistry(BUILT_IN)
"""All policies, plug-ins too."""

__all__ = ["BUILT_IN", "POLICIES", "EvictionPolicy", "PolicyFactory", "StoredRun", "Use"]

"""Eviction policies by name. One policy, one file; the contract is in `policy.py`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from looseleaf.core.eviction.fifo import FIFOPolicy
from looseleaf.core.eviction.lfu import LFUPolicy
from looseleaf.core.eviction.lru import LRUPolicy
from looseleaf.core.eviction.policy import EvictionPolicy, PolicyFactory, StoredRun, Use

POLICIES: Mapping[str, PolicyFactory] = MappingProxyType(
    {policy.name: policy for policy in (LRUPolicy, FIFOPolicy, LFUPolicy)}
)

__all__ = ["POLICIES", "EvictionPolicy", "PolicyFactory", "StoredRun", "Use"]

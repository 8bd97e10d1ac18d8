"""KV memory: the tensors that hold keys and values in blocks (torch)."""

from looseleaf.tensors.kv_memory import KeysValues, KVMemory
from looseleaf.tensors.lanes import LanePlan, LayerPlace, LayerShape, plan_lanes
from looseleaf.tensors.layout import KVLayout, num_blocks_for_bytes, token_bytes

__all__ = [
    "KVLayout",
    "KVMemory",
    "KeysValues",
    "LanePlan",
    "LayerPlace",
    "LayerShape",
    "num_blocks_for_bytes",
    "plan_lanes",
    "token_bytes",
]

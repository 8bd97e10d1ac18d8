"""KV memory: the tensors that hold keys and values in blocks (torch)."""

from looseleaf.tensors.kv_memory import KVMemory, LayerShape, num_blocks_for_bytes

__all__ = ["KVMemory", "LayerShape", "num_blocks_for_bytes"]

"""SGLang's side of `bookkeeping.py`, in an environment of its own: a JSON line for each line read, as vLLM's side.

Its radix cache and its pools of tokens run without a GPU, if SGLang is installed without what it needs besides
(`pip install --no-deps sglang`, beside torch and transformers); modules that are missing get stand-ins, none of which
is called here. One token is one page, as it is by default. A request is matched, locked, given slots, inserted and
unlocked as `RadixCache.cache_finished_req` does it; a decode step takes a slot for every sequence and notes it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import sys
import time
import types
from array import array
from collections.abc import Sequence
from unittest.mock import MagicMock

from bookkeeping_load import BLOCK_TOKENS, NUM_BLOCKS, NUM_STEPS, admission_prompts, decode_prompts

STAND_INS = ("IPython", "gguf", "orjson", "torchvision")
MAX_TOKENS = 4096


class StandIn(types.ModuleType):
    """A module that has every name."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what nobody else found, of `STAND_INS`."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in STAND_INS:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> StandIn:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


import transformers.models.auto.processing_auto  # noqa: E402, F401 - before the stand-ins: it looks for torchvision

sys.meta_path.append(StandIns())

import torch  # noqa: E402
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode  # noqa: E402


class Manager:
    """A radix cache over slots for as many tokens as 65,536 blocks of 16 have, and the table of running requests."""

    def __init__(self) -> None:
        self.slots = TokenToKVPoolAllocator(NUM_BLOCKS * BLOCK_TOKENS, torch.bfloat16, "cpu", None, False)
        self.table = ReqToTokenPool(512, MAX_TOKENS, "cpu", False)
        self.cache = RadixCache(CacheInitParams(False, self.table, self.slots, 1))

    def take(self, count: int) -> torch.Tensor:
        """Slots for `count` tokens, evicted if there are not enough."""
        if self.slots.available_size() < count:
            self.cache.evict(EvictParams(num_tokens=count))
        return self.slots.alloc(count)

    def admit(self, row: int, prompt: list[int]) -> tuple[RadixKey, TreeNode]:
        """Match, lock and allocate; the slots are in `row` of the table."""
        key = RadixKey(array("q", prompt))
        found = self.cache.match_prefix(MatchPrefixParams(key=key))
        node, matched = found.last_device_node, found.device_prefix_len
        self.cache.inc_lock_ref(node)
        if matched:
            self.table.write((row, slice(0, matched)), self.cache.path_device_indices(node).to(torch.int32))
        self.table.write((row, slice(matched, len(prompt))), self.take(len(prompt) - matched).to(torch.int32))
        return key, node

    def finish(self, row: int, key: RadixKey, node: TreeNode, matched: int) -> None:
        """Insert and unlock."""
        kept = self.table.req_to_token[row, : len(key)]
        result = self.cache.insert(InsertParams(key=key, value=kept.to(dtype=torch.int64, copy=True), inserted_len=0))
        self.slots.free_segment(kept[matched : result.prefix_len], start_pos=matched)
        self.cache.dec_lock_ref(node)


def depth_of(manager: Manager, node: TreeNode) -> int:
    """Tokens from the root to `node`."""
    count = 0
    while node is not manager.cache.root_node:
        count, node = count + len(node.key), node.parent
    return count


def main() -> None:
    """Answer each round's number with its figures."""
    kept = Manager()
    rows = list(range(1, 257))
    print(json.dumps({"version": importlib.metadata.version("sglang")}), flush=True)
    for line in sys.stdin:
        number, state = int(line.split()[0]), line.split()[1]
        manager = kept if state == "full" else Manager()
        prompts = admission_prompts(number)
        start = time.process_time()
        for prompt in prompts:
            key, node = manager.admit(1, prompt)
            manager.finish(1, key, node, depth_of(manager, node))
        admission = (time.process_time() - start) / len(prompts)
        decoded = decode_prompts(number)
        live = [manager.admit(row, prompt) for row, prompt in zip(rows, decoded, strict=True)]
        places = torch.tensor(rows)
        lengths = torch.tensor([len(prompt) for prompt in decoded])
        start = time.process_time()
        for step in range(NUM_STEPS):
            manager.table.write((places, lengths + step), manager.take(len(live)).to(torch.int32))
        took = (time.process_time() - start) / NUM_STEPS
        for row, (key, node) in zip(rows, live, strict=True):
            manager.finish(row, key, node, depth_of(manager, node))
            manager.slots.free(manager.table.req_to_token[row, len(key) : len(key) + NUM_STEPS].to(torch.int64))
        print(json.dumps({"admission_us": admission * 1e6, "decode_step_us": took * 1e6}), flush=True)


if __name__ == "__main__":
    main()

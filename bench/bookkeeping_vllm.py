"""vLLM's side of `bookkeeping.py`, in an environment of its own: a JSON line for each line read, a round and "full"
(go on with the same cache) or "fresh" (begin with an empty one).

Calls the public methods of `KVCacheManager`; requests are made, hashed (SHA-256), matched, allocated and freed as its
scheduler does it.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from typing import Any

from bookkeeping_load import BLOCK_TOKENS, NUM_BLOCKS, NUM_STEPS, OUTPUT_TOKEN, admission_prompts, decode_prompts

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import torch
import vllm
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request


def make_manager() -> KVCacheManager:
    """A cache of 65,536 blocks with prefix caching."""
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    config = KVCacheConfig(
        num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    options: dict[str, Any] = {"max_model_len": 131_072, "enable_caching": True, "hash_block_size": BLOCK_TOKENS}
    if "scheduler_block_size" in inspect.signature(KVCacheManager.__init__).parameters:
        options["scheduler_block_size"] = BLOCK_TOKENS
    return KVCacheManager(config, **options)


def main() -> None:
    """Answer each round's number with its figures."""
    init_none_hash(sha256)
    hasher, kept = get_request_block_hasher(BLOCK_TOKENS, sha256), make_manager()

    def make(name: str, tokens: list[int]) -> Request:
        return Request(name, tokens, SamplingParams(max_tokens=2000), None, block_hasher=hasher)

    def admit(manager: KVCacheManager, request: Request) -> None:
        manager.new_step_starts()
        found, num_found = manager.get_computed_blocks(request)[:2]
        manager.allocate_slots(request, request.num_tokens - num_found, num_found, found)
        request.num_computed_tokens = request.num_tokens

    print(json.dumps({"version": vllm.__version__}), flush=True)
    for line in sys.stdin:
        number, state = int(line.split()[0]), line.split()[1]
        manager = kept if state == "full" else make_manager()
        prompts = admission_prompts(number)
        start = time.process_time()
        for i, prompt in enumerate(prompts):
            request = make(f"a{number}-{i}", prompt)
            admit(manager, request)
            manager.free(request)
        admission = (time.process_time() - start) / len(prompts)
        live = [make(f"d{number}-{i}", prompt) for i, prompt in enumerate(decode_prompts(number))]
        for request in live:
            admit(manager, request)
        start = time.process_time()
        for _ in range(NUM_STEPS):
            manager.new_step_starts()
            for request in live:
                request.append_output_token_ids(OUTPUT_TOKEN)
                manager.allocate_slots(request, 1)
                request.num_computed_tokens = request.num_tokens
        step = (time.process_time() - start) / NUM_STEPS
        for request in live:
            manager.free(request)
        print(json.dumps({"admission_us": admission * 1e6, "decode_step_us": step * 1e6}), flush=True)


if __name__ == "__main__":
    main()

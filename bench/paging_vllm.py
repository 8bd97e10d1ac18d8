"""vLLM's side of `paging.py`: how its blocks lie after the same requests. Run it with a Python that has vLLM.

    python bench/paging_vllm.py --num-blocks 8192 --late-at 3000 < requests.json

Reads [[seconds, input tokens, output tokens], ...] and serves them through vLLM's own `KVCacheManager` (16-token
blocks, prefix caching on, nothing shared), each prompt at 8,000 tokens/s and each output at 40 tokens/s, blocks given
out when a token needs one. Prints the block ids of each finished request as JSON lines: [has evicted, finished late,
block ids].
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import sys
from itertools import count

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

BLOCK_TOKENS = 16
PREFILL_RATE, DECODE_RATE = 8000.0, 40.0


def new_manager(num_blocks: int) -> KVCacheManager:
    """vLLM's manager of one full-attention group; one block more, since block 0 stands for none."""
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    config = KVCacheConfig(num_blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(config, 131_072, BLOCK_TOKENS, BLOCK_TOKENS, enable_caching=True)


def main() -> None:
    """Serve all requests in their own time."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-blocks", type=int, required=True)
    parser.add_argument("--late-at", type=float, required=True)
    arguments = parser.parse_args()
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    manager, ticket, num_taken = new_manager(arguments.num_blocks), count(), 0
    events = [(row[0], next(ticket), None, row) for row in json.load(sys.stdin)]
    heapq.heapify(events)
    while events:
        now, _, request, row = heapq.heappop(events)
        _, num_input, num_output = row
        manager.new_step_starts()
        if request is None:
            number = next(ticket)
            params = SamplingParams(max_tokens=num_output + 1)
            request = Request(str(number), [number] * max(1, num_input), params, None, block_hasher=hasher)
            num_before, seconds = 0, num_input / PREFILL_RATE
        else:
            blocks = manager.get_block_ids(request.request_id)[0]
            num_new = min(num_output - request.num_output_tokens, BLOCK_TOKENS - request.num_tokens % BLOCK_TOKENS)
            if num_new == 0:
                print(json.dumps([num_taken > arguments.num_blocks, now >= arguments.late_at, blocks]))
                manager.free(request)
                continue
            request.append_output_token_ids([7] * num_new)  # all that the block of the next token holds
            num_before, seconds = len(blocks), num_new / DECODE_RATE
        if manager.allocate_slots(request, request.num_tokens - request.num_computed_tokens) is None:
            raise RuntimeError("vLLM's pool is too small for this load")
        num_taken += len(manager.get_block_ids(request.request_id)[0]) - num_before
        request.num_computed_tokens = request.num_tokens
        heapq.heappush(events, (now + seconds, next(ticket), request, row))


if __name__ == "__main__":
    main()

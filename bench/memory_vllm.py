"""vLLM's side of `memory_per_sequence.py`: run it with a Python that has vLLM. Prints one JSON line per length.

    python bench/memory_vllm.py MODEL_DIR --lengths 1024 4096 --step-tokens 2048 --block-tokens 16

The engine runs in this process; what the request holds is read from its KV cache manager after each allocation (null
blocks, which stand for what slid out of a window, are not counted). Prompts longer than --computed-tokens are given to
that manager as the scheduler would, without running the model. `--block-tokens 0` leaves vLLM its own choice.
"""

from __future__ import annotations

import argparse
import json
import os
import random

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="2", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR"
)
import vllm  # after the environment, which it reads
from vllm.v1.request import Request


def main() -> None:
    """Serve each length alone and print what it held."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--lengths", type=int, nargs="+", required=True)
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--step-tokens", type=int, default=2048)
    parser.add_argument("--block-tokens", type=int, default=0)
    parser.add_argument("--computed-tokens", type=int, default=4096)
    arguments = parser.parse_args()
    chosen = {"block_size": arguments.block_tokens} if arguments.block_tokens else {}
    llm = vllm.LLM(
        arguments.model,
        dtype="bfloat16",
        max_model_len=max(arguments.lengths) + 64,
        max_num_batched_tokens=arguments.step_tokens,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        enforce_eager=True,
        max_num_seqs=4,
        **chosen,
    )
    core = llm.llm_engine.engine_core.engine_core
    manager = core.scheduler.kv_cache_manager
    config = manager.kv_cache_config
    groups = [
        {"kind": type(group.kv_cache_spec).__name__, "layers": len(group.layer_names)}
        for group in config.kv_cache_groups
    ]
    allocate, held = manager.allocate_slots, []

    def watched(request, *args, **kwargs):  # type: ignore[no-untyped-def]
        result = allocate(request, *args, **kwargs)
        tables = manager.coordinator.get_blocks(request.request_id)
        held.append(sum(not block.is_null for blocks in tables for block in blocks))
        return result

    manager.allocate_slots = watched
    rng = random.Random(1)
    for length in arguments.lengths:
        held.clear()
        prompt = [rng.randrange(1000, 200_000) for _ in range(length)]
        params = vllm.SamplingParams(temperature=0, max_tokens=arguments.output_tokens, ignore_eos=True)
        is_computed = length <= arguments.computed_tokens
        if is_computed:
            llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        else:
            request = Request(f"r{length}", prompt, params, None, block_hasher=core.request_block_hasher)
            schedule(manager, request, arguments.step_tokens, arguments.output_tokens)
        row = {
            "version": vllm.__version__,
            "length": length,
            "kind": "computed" if is_computed else "scheduled",
            "groups": groups,
            "block_tokens": config.kv_cache_groups[0].kv_cache_spec.block_size,
            # The tensors of all groups lie over one allocation, of this size.
            "block_bytes": max(tensor.size for tensor in config.kv_cache_tensors) // config.num_blocks,
            "held_blocks": held,
        }
        print(json.dumps(row), flush=True)


def schedule(manager, request, step_tokens, output_tokens):  # type: ignore[no-untyped-def]
    """Give a request its blocks step by step, as vLLM's scheduler does, and take them back."""
    manager.new_step_starts()
    while request.num_computed_tokens < request.num_prompt_tokens + output_tokens - 1:
        left = request.num_prompt_tokens - request.num_computed_tokens
        if left <= 0:
            request.append_output_token_ids(5)
        num_tokens = min(left, step_tokens) if left > 0 else 1
        if manager.allocate_slots(request, num_tokens) is None:
            raise RuntimeError("vLLM's pool is too small")
        request.num_computed_tokens += num_tokens
        manager.new_step_starts()
    manager.free(request)


if __name__ == "__main__":
    main()

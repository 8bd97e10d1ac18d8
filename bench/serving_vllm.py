"""vLLM's side of `serving.py`, run by the interpreter in which vLLM is installed: serving_vllm.py SETTINGS (JSON)."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from serving_driver import Progress, answer


class VllmSide:
    """vLLM's offline engine, prefix caching on, driven step by step."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(
            settings["model"],
            dtype=settings["dtype"],
            max_model_len=settings["max_model_tokens"],
            enable_prefix_caching=True,
            max_num_seqs=settings["batch"],
            max_num_batched_tokens=settings["step_tokens"],
            seed=0,
        )
        self._num_given: dict[str, int] = {}

    def submit(self, request_id: str, tokens: list[int], max_tokens: int) -> None:
        """See `Side`."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self._llm.llm_engine.add_request(request_id, TokensPrompt(prompt_token_ids=list(tokens)), params)
        self._num_given[request_id] = 0

    def step(self) -> list[Progress]:
        """See `Side`."""
        given = []
        for output in self._llm.llm_engine.step():
            tokens = list(output.outputs[0].token_ids)  # all so far
            new = tokens[self._num_given[output.request_id] :]
            self._num_given[output.request_id] = len(tokens)
            given.append(Progress(output.request_id, new, output.finished, output.num_cached_tokens))
        return given


def main() -> None:
    """Start with the settings of the command line and answer."""
    settings = json.loads(sys.argv[1])
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE=str(settings["kv_gib"]),
        VLLM_CPU_OMP_THREADS_BIND=f"0-{settings['threads'] - 1}" if settings["threads"] > 1 else "0",
        HF_HUB_OFFLINE="1",
        VLLM_LOGGING_LEVEL="ERROR",
    )
    answer(VllmSide(settings))


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()

"""The paged engine on real models gives the tokens of plain `generate`, whatever happened to the blocks before.

Each law runs on a small scale in the normal suite, and with 40 prompts of 1 to 2,000 tokens in the heavy one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hf_engine import ModelKit
from hf_models import random_tokens, tiny_model
from transformers import PreTrainedModel

from looseleaf import CacheConfig, CachePlan
from looseleaf.engine.config import EngineConfig
from looseleaf.hf.runner import HFRunner

FAMILIES = ("llama", "qwen3", "gemma3_text", "gpt2")
BLOCK = 16


@dataclass(frozen=True)
class Scale:
    """How much a run does: prompts, the longest of them, tokens generated, tokens in a step."""

    num_prompts: int
    longest_tokens: int
    num_generated: int
    step_tokens: int
    by_generate: bool

    def prompts(self, seed: int) -> list[np.ndarray]:
        """Prompts from 1 token to the longest, some sharing a beginning, in random order."""
        rng = np.random.default_rng(seed)
        edges = [1, BLOCK - 1, BLOCK, BLOCK + 1, self.longest_tokens]
        spread = np.exp(rng.uniform(0, np.log(self.longest_tokens), size=self.num_prompts - len(edges)))
        lengths = [*edges, *(max(1, int(length)) for length in spread)]
        common = random_tokens(rng, self.longest_tokens)
        prompts = []
        for index, length in enumerate(lengths):
            shared = int(rng.integers(0, length)) if index % 3 == 2 else 0
            prompts.append(np.concatenate([common[:shared], random_tokens(rng, length - shared)]))
        rng.shuffle(prompts)
        return prompts

    def config(self, num_running: int = 16) -> EngineConfig:
        return EngineConfig(max_running_requests=num_running, max_step_tokens=self.step_tokens)

    @property
    def roomy_blocks(self) -> int:
        """Blocks of one lane that hold everything at once."""
        return self.num_prompts * (self.longest_tokens + self.num_generated) // BLOCK + 2 * self.num_prompts


SCALES = [
    pytest.param(Scale(9, 150, 5, 48, by_generate=False), id="small"),
    pytest.param(Scale(40, 2000, 8, 512, by_generate=True), id="full", marks=pytest.mark.heavy),
]


@dataclass
class Bench:
    """A family's plain model and its runner, for one scale."""

    scale: Scale
    plain: PreTrainedModel
    runner: HFRunner

    def kit(self, num_blocks: int, num_running: int = 16) -> ModelKit:
        assert num_blocks <= self.runner.num_blocks
        return ModelKit(self.runner, num_blocks, self.scale.config(num_running))

    @property
    def num_lanes(self) -> int:
        return self.runner.memory.layout.lanes.num_lanes

    @property
    def roomy_blocks(self) -> int:
        """Blocks that hold everything at once."""
        return self.num_lanes * self.scale.roomy_blocks

    def blocks_for(self, num_tokens: int, step_tokens: int | None = None) -> int:
        """Even number of blocks, in all lanes, that one sequence takes while it grows to `num_tokens`."""
        config = CacheConfig(num_pages=10**6, block_tokens=BLOCK, groups=self.runner.info.groups)
        return -(-CachePlan.of(config).blocks_for(num_tokens, step_tokens or self.scale.step_tokens) // 2) * 2


@pytest.fixture(scope="module", params=FAMILIES)
def served_family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=SCALES)
def bench(request: pytest.FixtureRequest, served_family: str) -> Iterator[Bench]:
    scale: Scale = request.param
    with HFRunner.load(
        tiny_model(served_family), num_blocks=3 * scale.roomy_blocks, block_tokens=BLOCK, num_threads=1
    ) as runner:
        yield Bench(scale, tiny_model(served_family), runner)


def feed(kit: ModelKit, prompts: list[np.ndarray], num_generated: int, name: str, rng: np.random.Generator) -> None:
    """Add the prompts over time, so that prefills, chunks and decodes of many share their steps."""
    for index, prompt in enumerate(prompts):
        kit.add(f"{name}{index}", prompt, num_generated)
        for _ in range(int(rng.integers(0, 3))):
            kit.step()
    kit.run()


def test_cold_and_warm(bench: Bench) -> None:
    """[R28] Mixed batches, cold, then the same prompts again: the same tokens, and the second time most come from
    blocks.
    """
    scale, rng = bench.scale, np.random.default_rng(1)
    kit, prompts = bench.kit(bench.roomy_blocks), scale.prompts(1)
    feed(kit, prompts, scale.num_generated, "cold", rng)
    feed(kit, prompts, scale.num_generated, "warm", rng)
    for index, prompt in enumerate(prompts):
        kit.check(bench.plain, f"cold{index}", scale.num_generated)
        kit.check(bench.plain, f"warm{index}", scale.num_generated, scale.by_generate)
        assert kit.num_cached(f"warm{index}") == (len(prompt) - 1) // BLOCK * BLOCK


def test_hits_at_every_boundary(bench: Bench) -> None:
    """[R26] Prompts that share k tokens with a known one, k = B-1, B, B+1 of every block, and prefixes of it as they
    are.
    """
    scale, rng = bench.scale, np.random.default_rng(2)
    kit = bench.kit(bench.roomy_blocks)
    known = random_tokens(rng, min(scale.longest_tokens, 6 * BLOCK))
    feed(kit, [known], scale.num_generated, "known", rng)
    boundaries = [k for b in range(BLOCK, len(known), BLOCK) for k in (b - 1, b, b + 1)]
    prefixes = [known[:k] for k in boundaries]
    forks = [
        np.concatenate([known[:k], (known[k : k + 1] - 3 + 7) % 200 + 3, random_tokens(rng, 3)]) for k in boundaries
    ]
    feed(kit, prefixes, scale.num_generated, "prefix", rng)
    for index, k in enumerate(boundaries):
        kit.check(bench.plain, f"prefix{index}", scale.num_generated, scale.by_generate)
        assert kit.num_cached(f"prefix{index}") >= (k - 1) // BLOCK * BLOCK
    for index, k in enumerate(boundaries):  # one after the other: their own tails must not add to the hit
        if index % 3 != 2 or scale.num_prompts > 20:
            feed(kit, [forks[index]], scale.num_generated, f"fork{index}-", rng)
            kit.check(bench.plain, f"fork{index}-0", scale.num_generated, scale.by_generate)
            assert kit.num_cached(f"fork{index}-0") >= k // BLOCK * BLOCK


def test_after_eviction(bench: Bench) -> None:
    """[R31] In a pool that holds one long prompt, everything is evicted again and again: the same tokens."""
    scale, rng = bench.scale, np.random.default_rng(3)
    num_blocks = bench.blocks_for(scale.longest_tokens + scale.num_generated) + 4
    kit, prompts = bench.kit(num_blocks), scale.prompts(3)
    feed(kit, prompts, scale.num_generated, "first", rng)
    feed(kit, prompts[::-1], scale.num_generated, "again", rng)
    assert kit.cache.stats().evicted_tokens > scale.longest_tokens
    for index in range(len(prompts)):
        kit.check(bench.plain, f"first{index}", scale.num_generated, scale.by_generate)
        kit.check(bench.plain, f"again{index}", scale.num_generated, scale.by_generate)


def test_after_preemption(bench: Bench) -> None:
    """[P23] Requests that lose their blocks in the middle of the output and compute again: the same tokens."""
    scale, rng = bench.scale, np.random.default_rng(4)
    slides = any(group.kind != "full" for group in bench.runner.info.groups)
    num_generated = (12 if slides else 4) * BLOCK  # where windows let go, only the full lane grows
    shortest = 56 if scale.num_prompts < 20 else 256
    num_blocks = 3 * bench.blocks_for(shortest + BLOCK, BLOCK if slides else None)  # three, but not to their ends
    kit = bench.kit(num_blocks + 3 * bench.blocks_for(1))
    lengths = rng.integers(shortest, shortest + BLOCK, size=scale.num_prompts // 2)
    prompts = [random_tokens(rng, int(length)) for length in lengths]
    assert len(prompts) >= 4
    feed(kit, prompts, num_generated, "r", rng)
    assert kit.observer.named("on_preempt")
    for index in range(len(prompts)):
        kit.check(bench.plain, f"r{index}", num_generated, scale.by_generate)


def test_among_aborted_requests(bench: Bench) -> None:
    """[P7] Two thirds of the requests leave at random stages; the others get the same tokens, and so does who asks
    later.
    """
    scale, rng = bench.scale, np.random.default_rng(5)
    num_blocks = max(bench.blocks_for(scale.longest_tokens + scale.num_generated), bench.roomy_blocks // 8 * 2)
    kit, prompts = bench.kit(num_blocks, num_running=6), scale.prompts(5)
    leaving = set(rng.permutation(len(prompts))[: len(prompts) * 2 // 3].tolist())
    for index, prompt in enumerate(prompts):
        kit.add(f"r{index}", prompt, scale.num_generated)
    waiting = rng.permutation(sorted(leaving)).tolist()
    while kit.engine.has_work:
        for _ in range(int(rng.integers(0, 3))):
            if waiting:
                kit.engine.abort(f"r{waiting.pop()}")
        kit.step()
    kit.run()
    survivors = kit.finished()
    assert len(survivors) >= len(prompts) - len(leaving)
    for request_id in survivors:
        kit.check(bench.plain, request_id, scale.num_generated, scale.by_generate)
    feed(kit, prompts, scale.num_generated, "later", rng)
    for index in range(len(prompts)):
        kit.check(bench.plain, f"later{index}", scale.num_generated, scale.by_generate)

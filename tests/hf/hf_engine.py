"""Engine and runner wired on a tiny model, with a witness that keeps the logits of every sampled token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from hf_models import full_logits, plain_generate
from transformers import PreTrainedModel

from looseleaf import CacheConfig, CacheManager
from looseleaf.engine.config import EngineConfig
from looseleaf.engine.engine import Engine
from looseleaf.engine.request import FinishReason, GenerationRequest, OutputDelta
from looseleaf.engine.runner import ModelInfo, StepBatch, StepOutput
from looseleaf.engine.sampling import SamplingParams
from looseleaf.hf.runner import HFRunner
from looseleaf.hf.sampling import sample
from looseleaf.testing.engine_kit import RecordingObserver

LOGITS_TOLERANCE = 1e-4


class LetterTokenizer:
    """One character per token, so that no token is ever held back."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) - 0x4E00 for letter in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(0x4E00 + token) for token in token_ids)

    def render_chat(self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True) -> list[int]:
        return self.encode("".join(str(message["content"]) for message in messages))


@dataclass
class Witness:
    """A `ModelRunner` that keeps each sampled row: (request, number of tokens before it) to logits [vocab]."""

    runner: HFRunner
    logits: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)

    @property
    def info(self) -> ModelInfo:
        return self.runner.info

    def execute(self, batch: StepBatch) -> StepOutput:
        rows = self.runner.logits(batch)
        for index, row in zip(batch.sampled, rows, strict=True):
            last = int(batch.positions[batch.query_starts[index + 1] - 1])
            self.logits[batch.request_ids[index], last + 1] = row
        chosen = sample(rows, batch.sampling)
        return StepOutput(chosen.token_ids, chosen.logprobs)

    def resize(self, num_blocks: int, copies: Sequence[tuple[int, int]]) -> None:
        self.runner.resize(num_blocks, copies)


class ModelKit:
    """Cache, engine and a real runner over `num_blocks` blocks of `runner.memory.block_tokens` tokens."""

    def __init__(self, runner: HFRunner, num_blocks: int, config: EngineConfig, blocks_per_page: int = 2) -> None:
        block = runner.memory.block_tokens
        self.cache = CacheManager(
            CacheConfig(
                num_pages=num_blocks // blocks_per_page,
                page_tokens=block * blocks_per_page,
                block_tokens=block,
                groups=runner.info.groups,
            )
        )
        self.witness = Witness(runner)
        self.observer = RecordingObserver()
        self.engine = Engine(self.cache, self.witness, LetterTokenizer(), config, observer=self.observer)
        self.prompts: dict[str, np.ndarray] = {}
        self.deltas: dict[str, list[OutputDelta]] = {}

    def add(self, request_id: str, prompt: np.ndarray, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.engine.add(GenerationRequest(request_id, prompt.astype(np.int32), params))
        self.prompts[request_id] = prompt
        self.deltas[request_id] = []

    def add_samples(
        self, names: Sequence[str], prompt: np.ndarray, max_tokens: int, seeds: Sequence[int | None]
    ) -> None:
        """One sample per name: greedy where the seed is None, else drawn."""
        requests = []
        for name, seed in zip(names, seeds, strict=True):
            params = SamplingParams(
                max_tokens=max_tokens, temperature=0.0 if seed is None else 1.0, seed=seed, ignore_eos=True
            )
            requests.append(GenerationRequest(name, prompt.astype(np.int32), params))
            self.prompts[name], self.deltas[name] = prompt, []
        self.engine.add_samples(requests)

    def step(self) -> None:
        for delta in self.engine.step():
            self.deltas[delta.request_id].append(delta)

    def run(self) -> None:
        while self.engine.has_work:
            self.step()
        self.cache.check_integrity()
        assert self.cache.stats().active_blocks == 0

    def tokens(self, request_id: str) -> list[int]:
        return [token for delta in self.deltas[request_id] for token in delta.token_ids]

    def num_cached(self, request_id: str) -> int:
        return self.deltas[request_id][-1].usage.num_cached_tokens

    def finished(self) -> list[str]:
        """Requests that ran to their end."""
        return [i for i, deltas in self.deltas.items() if deltas and deltas[-1].finish_reason is FinishReason.LENGTH]

    def check(self, plain: PreTrainedModel, request_id: str, num_tokens: int, by_generate: bool = True) -> None:
        """Greedy tokens equal those of the plain model, and each sampled row's logits its forward pass within 1e-4.

        The plain tokens come from `generate`; without `by_generate`, faster, from one forward pass over the whole.
        """
        prompt, tokens = self.prompts[request_id], self.tokens(request_id)
        assert len(tokens) == num_tokens
        whole = full_logits(plain, np.concatenate([prompt, tokens]))
        assert tokens == whole[len(prompt) - 1 : -1].argmax(dim=-1).tolist(), request_id
        if by_generate:
            assert tokens == plain_generate(plain, prompt, num_tokens), request_id
        self.check_logits(plain, request_id)

    def _logits(self, plain: PreTrainedModel, request_id: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows that were sampled from, and what the plain model says to the tokens before each."""
        whole = full_logits(plain, np.concatenate([self.prompts[request_id], self.tokens(request_id)]))
        seen = {num_before: row for (name, num_before), row in self.witness.logits.items() if name == request_id}
        return torch.stack(list(seen.values())), whole[torch.tensor(list(seen)) - 1]

    def check_logits(self, plain: PreTrainedModel, request_id: str) -> None:
        """Each sampled row of a request equals the plain model's within 1e-4."""
        rows, expected = self._logits(plain, request_id)
        difference = float((rows - expected).abs().max())
        assert difference <= LOGITS_TOLERANCE, f"{request_id}: {difference}"

    def spread_error(self, plain: PreTrainedModel, request_id: str) -> float:
        """Root mean square error of the sampled rows' logits as a share of their spread."""
        rows, expected = self._logits(plain, request_id)
        return float((rows - expected).square().mean().sqrt() / expected.std())

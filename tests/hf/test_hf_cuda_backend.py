"""What FlashInfer is told of a step, by brute force; and, with a GPU, that it answers as the reference does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hf_driver import HandDriver
from hf_models import random_tokens, tiny_model

from looseleaf import LayerGroup
from looseleaf.hf.attention_backend import GatherBackend
from looseleaf.hf.cuda_backend import FlashInferBackend, paged_rows
from looseleaf.hf.runner import HFRunner
from looseleaf.hf.step_plan import StepPlan, oldest_visible
from looseleaf.tensors import LayerShape, plan_lanes


@pytest.mark.parametrize("window", [None, 5, 24])
def test_sequences_are_cut_to_what_they_see(window: int | None) -> None:
    """Every sequence's blocks go from its oldest visible token to its last one, in the lane's own ids."""
    with HFRunner.load(tiny_model("llama"), num_blocks=60, block_tokens=8, num_threads=1, self_test=False) as runner:
        driver = HandDriver(runner, np.random.default_rng(0))
        work = [
            (driver.sequence(np.arange(3, 3 + n)), n - context) for n, context in ((40, 39), (33, 8), (8, 0), (17, 16))
        ]
        for (sequence, _), context in zip(work, (39, 8, 0, 16), strict=True):
            sequence.num_computed = context
        batch = driver.batch(work)
    group = LayerGroup() if window is None else LayerGroup("window", window_tokens=window)
    lanes = plan_lanes([group], [LayerShape(1, 8, 8)])
    plan = StepPlan(batch, lanes, 8, torch.device("cpu"), torch.float32, keep_exact=True)
    starts, blocks, last = paged_rows(plan, group, batch.groups[0], 0)
    for index, (sequence, count) in enumerate(work):
        first, total = int(oldest_visible(group, sequence.num_computed)) // 8, sequence.num_computed + count
        assert blocks[starts[index] : starts[index + 1]].tolist() == sequence.table[first : -(-total // 8), 0].tolist()
        assert last[index] == total - 8 * ((total - 1) // 8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family_name", ["llama", "mistral", "gemma2"])
def test_flashinfer_answers_as_the_reference(family_name: str) -> None:
    """Chunks and decodes of shared and private blocks in one step: logits within half precision of the reference."""
    flashinfer = pytest.importorskip("flashinfer")
    rows = []
    for backend in (GatherBackend(), FlashInferBackend(flashinfer, torch.device("cuda"))):
        model = tiny_model(family_name, head_dim=64).to("cuda", torch.float16)
        with HFRunner.load(model, num_blocks=200, block_tokens=16, backend=backend) as runner:
            rng = np.random.default_rng(0)
            driver = HandDriver(runner, rng)
            first = driver.sequence(random_tokens(rng, 100))
            driver.step([(first, 99)])
            other = driver.sequence(np.concatenate([first.tokens[:64], random_tokens(rng, 30)]), first.table[:4])
            rows.append(driver.step([(first, 1), (other, 30)]).float().cpu())
    assert (rows[0] - rows[1]).abs().max() <= 0.02 * rows[0].std()

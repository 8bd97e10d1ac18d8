"""Layers that keep different histories: each family against the plain model, at prompts of half a window to five."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hf_driver import HandDriver, HandSequence
from hf_models import CHUNK, WINDOW, full_logits, random_tokens, tiny_model
from transformers import PreTrainedModel

from looseleaf.errors import IntegrityError
from looseleaf.hf.runner import HFRunner
from looseleaf.hf.step_plan import oldest_visible

TOLERANCE = 1e-4
BLOCK = 8
SPANS = {
    "llama": WINDOW,
    "qwen3": WINDOW,
    "mistral": WINDOW,
    "gemma3_text": WINDOW,
    "gemma4_text": WINDOW,
    "gpt_oss": WINDOW,
    "llama4_text": CHUNK,
    "deepseek_v2": WINDOW,
    "deepseek_v3": WINDOW,
}
LANES = {
    "llama": {"full": 1},
    "mistral": {"window": 1},
    "gemma3_text": {"full": 1, "window": 2},
    "gpt_oss": {"full": 1, "window": 2},
    "llama4_text": {"full": 1, "chunked": 3},
    "deepseek_v3": {"full": 1},
}


@dataclass(frozen=True)
class Served:
    """A family's plain model, a runner on equal weights, the window or chunk of its layers."""

    plain: PreTrainedModel
    runner: HFRunner
    span: int

    def prompts(self, seed: int) -> list[np.ndarray]:
        """Half a window, one and its neighbours, two, five."""
        rng = np.random.default_rng(seed)
        lengths = [self.span // 2, self.span - 1, self.span, self.span + 1, 2 * self.span, 5 * self.span]
        return [random_tokens(rng, length) for length in lengths]


@pytest.fixture(scope="module", params=SPANS)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    family = str(request.param)
    own = {"attn_implementation": "eager"} if family == "gpt_oss" else {}
    with HFRunner.load(tiny_model(family), num_blocks=360, block_tokens=BLOCK, num_threads=1) as runner:
        yield Served(tiny_model(family, **own), runner, SPANS[family])


class SlidingDriver(HandDriver):
    """Gives blocks back as they slide out, spoils them with NaN, and hands them to whoever comes next."""

    def slide(self, sequences: list[HandSequence]) -> None:
        """All blocks that no group of `sequences` may look back on any more become free."""
        kept: set[int] = set()
        for s in sequences:
            lane = 0
            for group in self.runner.info.groups:
                first = int(oldest_visible(group, s.num_computed)) // BLOCK
                kept.update(s.table[first:, lane : lane + group.num_lanes].flatten().tolist())
                s.table[:first, lane : lane + group.num_lanes] = -1
                lane += group.num_lanes
        self.free = [int(b) for b in self.rng.permutation(self.runner.num_blocks) if int(b) not in kept]
        memory = self.runner.memory
        slots = torch.tensor(self.free)[:, None] * BLOCK + torch.arange(BLOCK)
        for layer, shape in enumerate(memory.layout.shapes):
            spoilt = [
                torch.full((slots.numel(), shape.num_kv_heads, d), torch.nan) for d in (shape.key_dim, shape.value_dim)
            ]
            memory.write(layer, slots.flatten(), *spoilt)


@pytest.mark.parametrize("piece", [3, BLOCK, 29, 1000])
def test_prompts_of_half_a_window_to_five(served: Served, piece: int) -> None:
    """[H95, H96, H101] Prefilled in pieces of any size, then decoded, all in one batch, with blocks that are given to
    others and spoiled as soon as they slide out: logits within 1e-4 of the plain model.
    """
    rng = np.random.default_rng(piece)
    driver = SlidingDriver(served.runner, rng)
    prompts = served.prompts(piece)
    expected = [full_logits(served.plain, tokens) for tokens in prompts]
    pending = [HandSequence(tokens, np.empty((0, driver.num_lanes), dtype=np.int32)) for tokens in prompts]
    while working := [s for s in pending if s.num_computed < len(s.tokens)]:
        work = [(s, min(piece, max(1, len(s.tokens) - 4 - s.num_computed))) for s in working]
        for s, count in work:  # a place for what is computed next, as the engine reserves it
            missing = -(-(s.num_computed + count) // BLOCK) - len(s.table)
            s.table = np.concatenate([s.table, driver.blocks(missing)])
        rows = driver.step(work)
        for (s, _), row in zip(work, rows, strict=True):
            index = next(i for i, other in enumerate(pending) if other is s)
            difference = float((row - expected[index][s.num_computed - 1]).abs().max())
            assert difference <= TOLERANCE, (len(s.tokens), s.num_computed, difference)
        driver.slide(pending)


def test_a_hit_reads_another_requests_window(served: Served) -> None:
    """[H98, H99] A request that goes on behind another one's blocks needs of each group only what its own first token
    sees; it is computed as if alone, inside, at and after the window.
    """
    rng = np.random.default_rng(4)
    driver = HandDriver(served.runner, rng)
    first = driver.sequence(random_tokens(rng, 5 * served.span))
    driver.step([(first, len(first.tokens))])
    for num_shared in sorted({served.span // 2 // BLOCK, served.span // BLOCK, served.span // BLOCK + 1, 9}):
        tokens = np.concatenate([first.tokens[: num_shared * BLOCK], random_tokens(rng, 11)])
        other = driver.sequence(tokens, shared=first.table[:num_shared])
        row = driver.step([(other, 10)])[0]
        expected = full_logits(served.plain, tokens)
        assert float((row - expected[-2]).abs().max()) <= TOLERANCE
        assert float((driver.step([(other, 1)])[0] - expected[-1]).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("family", LANES)
def test_lanes_of_families(family: str) -> None:
    """Layers are grouped by the history they keep; one history makes one lane with all layers, and no padding."""
    with HFRunner.load(tiny_model(family), num_blocks=2, num_threads=1, self_test=False) as runner:
        layout = runner.memory.layout
        assert {group.kind: group.num_lanes for group in runner.info.groups} == LANES[family]
        assert layout.lanes.padding == 0
        assert layout.lane_bytes_per_token * layout.lanes.num_lanes == layout.bytes_per_token
        assert runner.info.bytes_per_token == layout.bytes_per_token
        spans = {group.window_tokens or group.chunk_tokens for group in runner.info.groups if group.kind != "full"}
        assert spans <= {SPANS[family]}


def test_layers_of_unequal_shape_share_one_memory() -> None:
    """Full layers with wider heads than window layers (Gemma 4): equal bytes per lane, and what is unused is told."""
    with HFRunner.load(tiny_model("gemma4_text"), num_blocks=2, num_threads=1, self_test=False) as runner:
        layout = runner.memory.layout
        whole = layout.lane_bytes_per_token * layout.lanes.num_lanes
        assert layout.lanes.padding == 1 - layout.bytes_per_token / whole
        assert 0 < layout.lanes.padding < 0.4


@pytest.mark.parametrize("group_index", [0, 1])
def test_each_lane_is_checked(group_index: int) -> None:
    """[H105] A table that leads one lane to another lane's or an unwritten block is refused, in every group."""
    with HFRunner.load(tiny_model("gemma3_text"), num_blocks=90, block_tokens=BLOCK, num_threads=1) as runner:
        driver = HandDriver(runner, np.random.default_rng(0))
        s = driver.sequence(np.arange(3, 3 + 5 * BLOCK))
        driver.step([(s, 5 * BLOCK - 1)])
        s.table = s.table.copy()
        kept = s.table[3, group_index + 1], s.table[1, group_index + 1]
        s.table[3, group_index + 1] = driver.blocks(1)[0, 0]
        with pytest.raises(IntegrityError, match=rf"KV3.*lane {group_index}"):
            driver.step([(s, 1)])
        s.table[3, group_index + 1], s.table[1, group_index + 1] = kept[0], driver.blocks(1)[0, 0]
        driver.step([(s, 1)])  # block 1 slid out of the window of 24 tokens: what it is does not matter


def test_a_table_that_begins_too_late_is_refused() -> None:
    """[H98, H101] A window group's table must reach back to the oldest token that the step may look at."""
    with HFRunner.load(tiny_model("mistral"), num_blocks=30, block_tokens=BLOCK, num_threads=1) as runner:
        driver = HandDriver(runner, np.random.default_rng(0))
        s = driver.sequence(np.arange(3, 3 + 6 * BLOCK))
        driver.step([(s, 6 * BLOCK - 3)])
        batch = driver.batch([(s, 1)])
        (step,) = batch.groups
        assert step.first_blocks.tolist() == [2]  # the token at position 45 sees from 22 on
        late = type(step)(step.slots, (step.block_tables[0][1:],), step.first_blocks + 1)
        with pytest.raises(IntegrityError, match=r"KV2.*from block 3"):
            runner.logits(type(batch)(**{**batch.__dict__, "groups": (late,)}))


def test_queries_are_scaled_by_position_not_by_row() -> None:
    """Llama 4 scales queries of its full layers by how far along they are, beyond `floor_scale` tokens; in a packed
    pass rows are no positions.
    """
    plain = tiny_model("llama4_text", floor_scale=4, attn_scale=3.0)
    rng = np.random.default_rng(2)
    with HFRunner.load(
        tiny_model("llama4_text", floor_scale=4, attn_scale=3.0), num_blocks=60, block_tokens=BLOCK, num_threads=1
    ) as runner:
        driver = HandDriver(runner, rng)
        sequences = [driver.sequence(random_tokens(rng, n)) for n in (30, 50)]
        driver.step([(s, 19) for s in sequences])
        for s, row in zip(sequences, driver.step([(s, 7) for s in sequences]), strict=True):
            assert float((row - full_logits(plain, s.tokens)[25]).abs().max()) <= TOLERANCE

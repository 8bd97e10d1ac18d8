"""Packed, chunked passes over blocks say what the plain model says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hf_driver import HandDriver, HandSequence
from hf_models import full_logits, plain_generate, random_tokens, tiny_model
from transformers import PreTrainedModel

from looseleaf.errors import IntegrityError
from looseleaf.hf.runner import HFRunner

TOLERANCE = 1e-4
BLOCK = 8


def close(row: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((row - expected).abs().max() <= TOLERANCE)


@pytest.mark.parametrize("seed", range(4))
def test_logits_of_any_chunking(runner: HFRunner, plain: PreTrainedModel, seed: int) -> None:
    """[R29, H95, H96] Mixed prefill chunks and single tokens, cut anywhere, in permuted blocks: logits within 1e-4 of
    one pass.

    Lengths go beyond the window of the windowed models, and to the edges of blocks.
    """
    rng = np.random.default_rng(seed)
    driver = HandDriver(runner, rng)
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, int(rng.integers(30, 60)), int(rng.integers(60, 120))]
    sequences = [driver.sequence(random_tokens(rng, n)) for n in lengths]
    expected = [full_logits(plain, s.tokens) for s in sequences]
    while any(s.num_computed < len(s.tokens) for s in sequences):
        open_ones = [s for s in sequences if s.num_computed < len(s.tokens)]
        rng.shuffle(open_ones)
        work = [
            (s, int(rng.choice([1, 1, 2, 7, 33, 200]).clip(1, len(s.tokens) - s.num_computed)))
            for s in open_ones[: rng.integers(1, len(open_ones) + 1)]
        ]
        logits = driver.step(work)
        for (s, _), row in zip(work, logits, strict=True):
            index = next(i for i, other in enumerate(sequences) if other is s)
            assert close(row, expected[index][s.num_computed - 1])


def test_greedy_tokens_equal_generate(runner: HFRunner, plain: PreTrainedModel) -> None:
    """Sequences of unequal length decoded together give the tokens of `generate`, each alone."""
    rng = np.random.default_rng(11)
    driver = HandDriver(runner, rng)
    prompts = [random_tokens(rng, n) for n in (1, 5, 16, 40, 90)]
    sequences = [driver.sequence(p) for p in prompts]
    logits = driver.step([(s, len(s.tokens)) for s in sequences])
    for _ in range(12):
        for s, row in zip(sequences, logits, strict=True):
            driver.append(s, int(row.argmax()))
        logits = driver.step([(s, 1) for s in sequences])
    for s, prompt in zip(sequences, prompts, strict=True):
        assert s.tokens[len(prompt) :].tolist() == plain_generate(plain, prompt, 12)


def test_shared_prefix_blocks(runner: HFRunner, plain: PreTrainedModel) -> None:
    """A sequence that begins behind another one's blocks, in the very step that writes them, is computed as
    if alone.
    """
    rng = np.random.default_rng(5)
    driver = HandDriver(runner, rng)
    prefix = random_tokens(rng, 6 * BLOCK)
    first = driver.sequence(np.concatenate([prefix, random_tokens(rng, 9)]))
    others = [
        driver.sequence(np.concatenate([prefix, random_tokens(rng, n)]), shared=first.table[:6]) for n in (1, 2, 30)
    ]
    sequences = [*others, first]
    logits = driver.step([(s, len(s.tokens) - s.num_computed) for s in sequences])
    for s, row in zip(sequences, logits, strict=True):
        assert close(row, full_logits(plain, s.tokens)[-1])


def test_fork_by_copies(runner: HFRunner, plain: PreTrainedModel) -> None:
    """[P10] Children share the full blocks and copy the tail; each then goes its own way, and the parent is
    untouched.
    """
    rng = np.random.default_rng(6)
    driver = HandDriver(runner, rng)
    parent = driver.sequence(random_tokens(rng, 4 * BLOCK + 3))
    driver.step([(parent, len(parent.tokens))])
    children, copies = [], []
    for _ in range(2):
        tail = driver.blocks(1)
        copies.extend(zip(parent.table[-1].tolist(), tail[0].tolist(), strict=True))
        table = np.concatenate([parent.table[:-1], tail])
        children.append(HandSequence(parent.tokens.copy(), table, parent.num_computed))
    for offset, s in enumerate((*children, parent)):
        driver.append(s, 20 + offset)
    logits = driver.step([(s, 1) for s in (*children, parent)], copies=copies)
    for s, row in zip((*children, parent), logits, strict=True):
        assert close(row, full_logits(plain, s.tokens)[-1])


def test_neighbouring_blocks_are_read_in_place(runner: HFRunner, plain: PreTrainedModel) -> None:
    """A chunk whose context lies in blocks that follow each other takes the path without copies, and says
    the same.
    """
    rng = np.random.default_rng(7)
    driver = HandDriver(runner, rng)
    tokens = random_tokens(rng, 70)
    lanes = np.arange(driver.num_lanes, dtype=np.int32)
    s = HandSequence(tokens, 20 + 10 * lanes + np.arange(9, dtype=np.int32)[:, None])
    expected = full_logits(plain, tokens)
    for count in (11, 30, 1, 28):
        row = driver.step([(s, count)])[0]
        assert close(row, expected[s.num_computed - 1])


def test_a_wrong_block_changes_the_answer(runner: HFRunner, plain: PreTrainedModel) -> None:
    """Two blocks swapped in the table must be seen in the logits: this suite can fail."""
    rng = np.random.default_rng(8)
    driver = HandDriver(runner, rng)
    s = driver.sequence(random_tokens(rng, 5 * BLOCK + 2))
    driver.step([(s, len(s.tokens) - 1)])
    expected = full_logits(plain, s.tokens)[-1]
    other = driver.sequence(random_tokens(rng, 5 * BLOCK + 2))
    driver.step([(other, len(other.tokens) - 1)])
    wrong = HandSequence(s.tokens, s.table.copy(), s.num_computed)
    wrong.table[4] = other.table[4]
    assert not close(driver.step([(wrong, 1)])[0], expected)
    assert close(driver.step([(s, 1)])[0], expected)


def test_unwritten_tokens_cannot_be_read(runner: HFRunner) -> None:
    """[S115] A table that leads to tokens never written, or out of the memory, is refused before anything
    is computed.
    """
    driver = HandDriver(runner, np.random.default_rng(9))
    s = driver.sequence(np.arange(3, 3 + 3 * BLOCK))
    driver.step([(s, BLOCK + 2)])
    s.num_computed = 2 * BLOCK
    with pytest.raises(IntegrityError, match="KV3"):
        driver.step([(s, 1)])
    s.num_computed = BLOCK + 2
    s.table[1] = runner.num_blocks
    with pytest.raises(IntegrityError, match="KV1"):
        driver.step([(s, 1)])


def test_a_short_table_is_refused(runner: HFRunner) -> None:
    """A table with fewer blocks than the sequence needs is our bug and is named as such."""
    driver = HandDriver(runner, np.random.default_rng(9))
    s = driver.sequence(np.arange(3, 3 + 2 * BLOCK))
    batch = driver.batch([(s, 2 * BLOCK)])
    short = tuple(replace(group, block_tables=(group.block_tables[0][:1],)) for group in batch.groups)
    cut = replace(batch, groups=short)
    with pytest.raises(IntegrityError, match="KV2"):
        runner.logits(cut)


@pytest.mark.parametrize("family_name", ["gemma2", "gpt_oss", "mixtral"])
def test_soft_caps_and_sinks(family_name: str) -> None:
    """Scores that are capped (Gemma 2) and heads with sinks (gpt-oss) are computed as the model's eager
    attention does.
    """
    plain = tiny_model(family_name, attn_implementation="eager")
    rng = np.random.default_rng(3)
    with HFRunner.load(tiny_model(family_name), num_blocks=40, block_tokens=BLOCK, num_threads=1) as runner:
        driver = HandDriver(runner, rng)
        sequences = [driver.sequence(random_tokens(rng, n)) for n in (50, 9)]
        expected = [full_logits(plain, s.tokens) for s in sequences]
        for _ in range(3):
            work = [(s, min(len(s.tokens) // 3, len(s.tokens) - s.num_computed)) for s in sequences]
            for (s, _), row, want in zip(work, driver.step(work), expected, strict=True):
                assert close(row, want[s.num_computed - 1])
        decode = [(s, 1) for s in sequences if s.num_computed < len(s.tokens)]
        assert len(decode) == 1
        assert close(driver.step(decode)[0], expected[0][48])


def test_nothing_sampled() -> None:
    """A step that only fills blocks gives no logits and still writes."""
    with HFRunner.load(tiny_model("llama"), num_blocks=10, block_tokens=BLOCK, num_threads=1) as runner:
        driver = HandDriver(runner, np.random.default_rng(0))
        s = driver.sequence(np.arange(3, 23))
        batch = driver.batch([(s, 19)])
        out = runner.execute(replace(batch, sampled=np.zeros(0, dtype=np.int32)))
        assert len(out.token_ids) == 0
        s.num_computed = 19
        assert close(driver.step([(s, 1)])[0], full_logits(tiny_model("llama"), s.tokens)[-1])

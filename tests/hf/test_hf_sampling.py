"""The sampler against a slow one in numpy, row by row."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from looseleaf.engine.sampling import SamplingParams, SamplingRow
from looseleaf.hf import sampling
from looseleaf.hf.sampling import greedy, sample

NOTHING = np.zeros(0, dtype=np.int32)


def row(
    uniform: float = 0.5, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), **params: object
) -> SamplingRow:
    return SamplingRow(
        SamplingParams(**params),  # type: ignore[arg-type]
        uniform,
        np.asarray(prompt, dtype=np.int32),
        np.asarray(output, dtype=np.int32),
    )


def slow_sample(logits: np.ndarray, wanted: SamplingRow) -> int:
    """One row, by the definition: penalties, temperature, sort, top-k, top-p, inverse of the cumulated
    probabilities.
    """
    params = wanted.params
    scores = logits.astype(np.float32).copy()
    for token in {*wanted.prompt_tokens.tolist(), *wanted.output_tokens.tolist()}:
        factor = np.float32(params.repetition_penalty)
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(wanted.output_tokens.tolist()):
        count = wanted.output_tokens.tolist().count(token)
        scores[token] -= np.float32(params.presence_penalty + params.frequency_penalty * count)
    if params.is_greedy:
        return int(scores.argmax())
    scaled = (scores - scores.max()) / np.float32(params.temperature)
    order = np.argsort(-scaled, kind="stable")
    weights = np.exp(scaled[order].astype(np.float64))
    if params.top_k:
        weights = weights[: params.top_k]
    kept, total, running = [], weights.sum(), 0.0
    for weight in weights:
        if kept and running >= params.top_p * total:
            break
        kept.append(weight)
        running += weight
    target, running = wanted.uniform * sum(kept), 0.0
    for place, weight in enumerate(kept):
        running += weight
        if running > target:
            return int(order[place])
    return int(order[len(kept) - 1])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_equals_the_slow_sampler(data: st.DataObject) -> None:
    """Any mix of rows gives, row by row, what the definition gives."""
    vocab = data.draw(st.sampled_from([3, 17, 600, 1500, 3000]))
    num_rows = data.draw(st.integers(1, 6))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    logits = (rng.normal(size=(num_rows, vocab)) * 3).astype(np.float32)
    rows = [
        row(
            uniform=data.draw(st.floats(0, 1, exclude_max=True)),
            prompt=tuple(rng.integers(0, vocab, size=4).tolist()),
            output=tuple(rng.integers(0, vocab, size=data.draw(st.integers(0, 5))).tolist()),
            temperature=data.draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
            top_k=data.draw(st.sampled_from([0, 1, 2, 50])),
            top_p=data.draw(st.sampled_from([1.0, 0.9, 0.4, 0.01])),
            presence_penalty=data.draw(st.sampled_from([0.0, 1.5])),
            frequency_penalty=data.draw(st.sampled_from([0.0, -0.5])),
            repetition_penalty=data.draw(st.sampled_from([1.0, 1.3])),
        )
        for _ in range(num_rows)
    ]
    before = logits.copy()
    got = sample(torch.from_numpy(logits), rows)
    assert got.token_ids.tolist() == [slow_sample(before[i], rows[i]) for i in range(num_rows)]
    assert np.array_equal(logits, before)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """A row alone and in a batch of others draws the same token from the same number: seeds survive
    batching.
    """
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.normal(size=(12, 700)).astype(np.float32))
    rows = [
        row(uniform=float(u), temperature=0.8, top_k=int(k), top_p=0.95)
        for u, k in zip(rng.random(12), rng.choice([0, 5, 40], size=12), strict=True)
    ]
    together = sample(logits, rows).token_ids.tolist()
    assert together == [int(sample(logits[i : i + 1], rows[i : i + 1]).token_ids[0]) for i in range(12)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 511, 512, 513, 5000])
def test_greedy_takes_the_first_of_the_largest(dtype: torch.dtype, vocab: int) -> None:
    """Greedy equals argmax in float32, ties included (bfloat16 has many), at any vocabulary size."""
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.normal(size=(20, vocab)).astype(np.float32)).to(dtype)
    logits[3:, vocab // 2] = logits[3:].amax(dim=-1)
    logits[5:, -1] = logits[5:].amax(dim=-1)
    logits[7] = 0.0
    assert greedy(logits).tolist() == logits.float().numpy().argmax(axis=-1).tolist()


def test_draws_follow_the_probabilities() -> None:
    """10,000 draws of one distribution hit each token as often as it is likely (within 4 standard
    deviations).
    """
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    logits = torch.from_numpy(np.log(probabilities).astype(np.float32)).repeat(10_000, 1)
    rows = [row(uniform=float(u)) for u in np.random.default_rng(0).random(10_000)]
    counts = np.bincount(sample(logits, rows).token_ids, minlength=4)
    spread = np.sqrt(10_000 * probabilities * (1 - probabilities))
    assert (np.abs(counts - 10_000 * probabilities) < 4 * spread).all()


def test_logprobs_are_the_models_own() -> None:
    """[S114] Log-probabilities are of the model's distribution, whatever temperature and penalties; top
    ones largest first.
    """
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(3, 50)).astype(np.float32)
    expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    rows = [
        row(temperature=0.0, num_logprobs=3),
        row(temperature=3.0, output=(1, 2), presence_penalty=2.0, num_logprobs=0),
        row(temperature=1.0),
    ]
    got = sample(torch.from_numpy(logits), rows)
    first, second, third = got.logprobs
    assert third is None
    assert first is not None
    assert second is not None
    assert second.top_token_ids == ()
    for i, entry in enumerate((first, second)):
        assert entry.token_id == got.token_ids[i]
        assert entry.logprob == pytest.approx(expected[i, entry.token_id], abs=1e-5)
    assert first.top_token_ids == tuple(np.argsort(-expected[0])[:3].tolist())
    assert first.top_logprobs == pytest.approx(np.sort(expected[0])[::-1][:3].tolist(), abs=1e-5)


def test_greedy_rows_never_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of greedy rows never reaches the sorting path; with one sampled row only that row does."""
    seen: list[int] = []
    slow = sampling._sample_rows

    def spy(logits: torch.Tensor, rows: object) -> torch.Tensor:
        seen.append(len(logits))
        return slow(logits, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(sampling, "_sample_rows", spy)
    logits = torch.randn(8, 100)
    sample(logits, [row(temperature=0.0)] * 8)
    assert seen == []
    sample(logits, [row(temperature=0.0)] * 7 + [row(temperature=1.0)])
    assert seen == [1]


def test_greedy_in_bfloat16_beats_argmax() -> None:
    """Over a vocabulary of 262,144 in bfloat16 the two-stage search is faster than argmax."""
    logits = torch.randn(8, 262_144).to(torch.bfloat16)

    def best(function: object) -> float:
        times = []
        for _ in range(5):
            started = time.perf_counter()
            function()  # type: ignore[operator]
            times.append(time.perf_counter() - started)
        return min(times)

    assert best(lambda: greedy(logits)) < best(lambda: logits.argmax(dim=-1))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.2, 3.0]), st.booleans())
def test_candidates_change_nothing(seed: int, spread: float, tied: bool) -> None:
    """Drawing among the most likely first gives the token of the full sort: flat rows, ties, draws far out."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy((rng.normal(size=(6, 2000)) * spread).astype(np.float32))
    if tied:
        logits = logits.round()
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    rows = [
        row(uniform=float(u), top_k=int(k), top_p=float(p))
        for u, k, p in zip(rng.random(6), rng.choice([0, 0, 7, 700], 6), rng.choice([1.0, 0.9, 0.999], 6), strict=True)
    ]
    assert sampling._draw(scaled, rows).tolist() == sampling._draw_sorted(scaled, rows).tolist()


def test_most_draws_sort_nothing_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a distribution like a language model's, no row of a large vocabulary is sorted in full."""
    sorted_rows: list[int] = []
    slow = sampling._draw_sorted

    def spy(scaled: torch.Tensor, rows: object) -> torch.Tensor:
        sorted_rows.append(len(scaled))
        return slow(scaled, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(sampling, "_draw_sorted", spy)
    rng = np.random.default_rng(0)
    logits = torch.from_numpy((-np.log1p(np.arange(20_000)) * 3)[None].repeat(50, 0).astype(np.float32))
    got = sample(
        logits, [row(uniform=float(u), top_p=p) for u, p in zip(rng.random(50), [1.0, 0.95] * 25, strict=True)]
    )
    assert sorted_rows == []
    assert len(set(got.token_ids.tolist())) > 1


def test_no_rows() -> None:
    """A step that samples nothing gives nothing."""
    got = sample(torch.zeros(0, 50), [])
    assert got.token_ids.tolist() == []
    assert got.logprobs == ()

"""From logits to the next tokens, for all sampled rows of a step at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from looseleaf.engine.sampling import SamplingRow, TokenLogprobs
from looseleaf.ids import Int32Array, Int64Array

MAX_SPAN_TOKENS = 512
"""Vocabulary entries searched together: a maximum per span is fast in any dtype, while argmax over all is
slow in bfloat16.
"""


@dataclass(frozen=True)
class Sampled:
    """Chosen tokens int64 [N], and log-probabilities for the rows that asked (None for the others)."""

    token_ids: Int64Array
    logprobs: tuple[TokenLogprobs | None, ...]


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Sampled:
    """Choose one token per row of `logits` [N, vocab] (any floating dtype) as `rows` [N] ask.

    Greedy rows take the first of the largest logits. Others: penalties, temperature, top-k, top-p, then the
    inverse of the cumulated probabilities at `uniform` over the tokens kept, most likely first.
    Log-probabilities are of the model's own distribution, before any of that. Costs one maximum per greedy
    row; sorting is paid by sampled rows only.
    """
    plain = [i for i, row in enumerate(rows) if row.params.is_greedy and not row.params.needs_history]
    others = [
        i for i in range(len(rows)) if not (rows[i].params.is_greedy and not rows[i].params.needs_history)
    ]
    chosen = np.zeros(len(rows), dtype=np.int64)
    if plain:
        picked = logits if not others else logits[torch.tensor(plain, device=logits.device)]
        chosen[plain] = greedy(picked).cpu().numpy()
    if others:
        picked = logits[torch.tensor(others, device=logits.device)].float()
        chosen[others] = _sample_rows(picked, [rows[i] for i in others]).cpu().numpy()
    asking = [i for i, row in enumerate(rows) if row.params.num_logprobs is not None]
    logprobs: list[TokenLogprobs | None] = [None] * len(rows)
    for i in asking:
        logprobs[i] = _logprobs(logits[i], int(chosen[i]), rows[i].params.num_logprobs or 0)
    return Sampled(chosen, tuple(logprobs))


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Index of the first largest entry of each row, int64 [N], for `logits` [N, vocab].

    Finds the best span by its maximum, then searches in that span.
    """
    num_rows, vocab = logits.shape
    whole = vocab // MAX_SPAN_TOKENS * MAX_SPAN_TOKENS
    if whole == 0 or num_rows == 0:
        return logits.argmax(dim=-1)
    spans = logits[:, :whole].view(num_rows, -1, MAX_SPAN_TOKENS)
    best_of_span = spans.amax(dim=-1)
    best_span = best_of_span.argmax(dim=-1)
    inside = spans[torch.arange(num_rows, device=logits.device), best_span].argmax(dim=-1)
    index = best_span * MAX_SPAN_TOKENS + inside
    if whole < vocab:
        tail = logits[:, whole:]
        tail_best, tail_index = tail.max(dim=-1)
        index = torch.where(tail_best > best_of_span.amax(dim=-1), tail_index + whole, index)
    return index


def _sample_rows(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Tokens int64 [N] for float32 `logits` [N, vocab] that may be overwritten."""
    device = logits.device
    for i, row in enumerate(rows):
        if row.params.needs_history:
            _penalise(logits[i], row)
    temperatures = torch.tensor([row.params.temperature or 1.0 for row in rows], device=device)
    is_greedy = torch.tensor([row.params.is_greedy for row in rows], device=device)
    choice = greedy(logits)
    if all(row.params.is_greedy for row in rows):
        return choice
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures.clamp(min=1e-6)[:, None]
    limits = [row.params.top_k for row in rows if not row.params.is_greedy]
    largest_k = 0 if 0 in limits else min(max(limits), logits.shape[-1])
    if largest_k:
        ordered, order = torch.topk(scaled, largest_k, dim=-1)
        # topk gives equal entries in any order: make it the order of token ids, as the full sort does.
        ordered, order = _stable(ordered, order)
    else:
        ordered, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    position = inverse_cdf(ordered, rows)
    drawn = order.gather(-1, position[:, None])[:, 0]
    return torch.where(is_greedy, choice, drawn)


def _stable(ordered: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    by_token = order.argsort(dim=-1)
    ordered, order = ordered.gather(-1, by_token), order.gather(-1, by_token)
    by_score = ordered.argsort(dim=-1, descending=True, stable=True)
    return ordered.gather(-1, by_score), order.gather(-1, by_score)


def inverse_cdf(ordered: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Places int64 [N] drawn in `ordered` [N, M] (scaled logits, largest first), within what top-k and
    top-p keep.

    top-p keeps the smallest set of most likely tokens whose probability, among those top-k kept, reaches p.
    Sums are in float64, so that they are the same whatever the batch.
    """
    device = ordered.device
    num_places = ordered.shape[-1]
    places = torch.arange(num_places, device=device)[None, :]
    top_k = torch.tensor([row.params.top_k or num_places for row in rows], device=device)[:, None]
    top_p = torch.tensor([row.params.top_p for row in rows], dtype=torch.float64, device=device)[:, None]
    uniform = torch.tensor([row.uniform for row in rows], dtype=torch.float64, device=device)[:, None]
    weights = ordered.double().exp_().masked_fill_(places >= top_k, 0.0)
    cumulated = weights.cumsum(dim=-1)
    total = cumulated[:, -1:]
    before = cumulated - weights
    keep = (before < top_p * total) & (places < top_k)
    keep[:, 0] = True
    kept_total = (weights * keep).sum(dim=-1, keepdim=True)
    reached = (cumulated > uniform * kept_total) & keep & (weights > 0)
    # The first place where the sum exceeds the draw; rounding may leave none: then the last place kept.
    return torch.where(reached.any(dim=-1), reached.int().argmax(dim=-1), keep.sum(dim=-1) - 1)


def _penalise(logits: torch.Tensor, row: SamplingRow) -> None:
    """Apply the penalties of `row` to its `logits` [vocab], in place.

    Repetition (Keskar et al. 2019, CTRL): logits of tokens seen in prompt or output are divided by it if
    positive, multiplied if negative. Presence and frequency (OpenAI): a constant, and a multiple of the
    count, off tokens in the output.
    """
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = _tensor(np.unique(np.concatenate([row.prompt_tokens, row.output_tokens])), logits.device)
        scores = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
    if (params.presence_penalty or params.frequency_penalty) and len(row.output_tokens):
        tokens, counts = np.unique(row.output_tokens, return_counts=True)
        off = params.presence_penalty + params.frequency_penalty * counts
        logits[_tensor(tokens, logits.device)] -= torch.from_numpy(off).to(logits)


def _tensor(tokens: Int32Array, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(tokens.astype(np.int64)).to(device)


def _logprobs(logits: torch.Tensor, token_id: int, num_logprobs: int) -> TokenLogprobs:
    """Log-probability of `token_id` and of the `num_logprobs` most likely tokens, for `logits` [vocab]."""
    scores = logits.float()
    total = torch.logsumexp(scores, dim=-1)
    top = torch.topk(scores, min(num_logprobs, scores.shape[-1])) if num_logprobs else None
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(scores[token_id] - total),
        top_token_ids=() if top is None else tuple(int(i) for i in top.indices),
        top_logprobs=() if top is None else tuple(float(x) for x in (top.values - total)),
    )

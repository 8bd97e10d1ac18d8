"""From logits to the next tokens, for all sampled rows of a step at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from looseleaf.engine.runner import StepOutput
from looseleaf.engine.sampling import SamplingRow, TokenLogprobs
from looseleaf.ids import Int32Array

MAX_SPAN_TOKENS = 512
"""Vocabulary entries searched together: a maximum per span is fast in any dtype, argmax over all slow in bfloat16."""

NUM_CANDIDATES = 512
"""Most likely tokens that are put in order before a draw; nearly every draw falls among them."""

PART_NUMBERS = 1 << 19
"""Logits that are sampled together on the CPU: 2 MiB of float32."""


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> StepOutput:
    """Choose one token per row of `logits` [N, vocab] (any floating dtype) as `rows` [N] ask.

    Greedy rows take the first of the largest logits. Others: penalties, temperature, top-k, top-p, then the inverse of
    the cumulated probabilities at `uniform` over the tokens kept, most likely first. Log-probabilities are of the
    model's own distribution, before any of that. Costs one maximum per greedy row; only sampled rows are sorted.
    """
    is_plain = [row.params.is_greedy and not row.params.needs_history for row in rows]
    plain = [i for i, found in enumerate(is_plain) if found]
    others = [i for i, found in enumerate(is_plain) if not found]
    chosen = np.zeros(len(rows), dtype=np.int64)
    if plain:
        picked = logits[torch.tensor(plain, device=logits.device)] if others else logits
        chosen[plain] = greedy(picked).cpu().numpy()
    for few in _in_parts(others, logits):
        picked = logits[torch.tensor(few, device=logits.device)].float()
        chosen[few] = _sample_rows(picked, [rows[i] for i in few]).cpu().numpy()
    counts = [row.params.num_logprobs for row in rows]
    logprobs = (None if n is None else _logprobs(logits[i], int(chosen[i]), n) for i, n in enumerate(counts))
    return StepOutput(chosen, tuple(logprobs))


def _in_parts(places: list[int], logits: torch.Tensor) -> list[list[int]]:
    """On the CPU rows are sampled a few at a time, so that their passes stay in its caches; elsewhere all at once."""
    size = max(1, PART_NUMBERS // logits.shape[-1] if logits.device.type == "cpu" else len(places))
    return [places[first : first + size] for first in range(0, len(places), size)]


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Index int64 [N] of the first largest entry of each row of `logits` [N, vocab]: the best span, then its best."""
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
        tail_best, tail_index = logits[:, whole:].max(dim=-1)
        index = torch.where(tail_best > best_of_span.amax(dim=-1), tail_index + whole, index)
    return index


def _sample_rows(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Tokens int64 [N] for float32 `logits` [N, vocab] that may be overwritten."""
    for i, row in enumerate(rows):
        if row.params.needs_history:
            _penalise(logits[i], row)
    choice = greedy(logits)
    drawing = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    if drawing:
        where = torch.tensor(drawing, device=logits.device)
        temperatures = torch.tensor([rows[i].params.temperature for i in drawing], device=logits.device)
        scores = logits[where] if len(drawing) < len(rows) else logits
        scaled = scores.sub_(scores.amax(dim=-1, keepdim=True)).div_(temperatures[:, None])
        choice[where] = _draw(scaled, [rows[i] for i in drawing])
    return choice


def _draw(scaled: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Tokens int64 [N] drawn from `scaled` [N, vocab], the logits over their temperature, largest 0.

    Most draws fall among the first few hundred tokens: only those are put in order. A row whose draw may lie beyond
    them, or at a tie with the last of them, is sorted in full; either way the token is the same.
    """
    if scaled.shape[-1] <= 2 * NUM_CANDIDATES:
        return _draw_sorted(scaled, rows)
    total = scaled.exp().sum(dim=-1, dtype=torch.float64)[:, None]
    # topk gives equal entries in any order: make it the order of token ids, as the full sort does.
    tokens = scaled.topk(NUM_CANDIDATES, dim=-1, sorted=False).indices.sort(dim=-1).values
    ordered, order = scaled.gather(-1, tokens).sort(dim=-1, descending=True, stable=True)
    draw = inverse_cdf(ordered, rows, total)
    drawn = tokens.gather(-1, order).gather(-1, draw.places[:, None])[:, 0]
    beyond_tie = ordered.gather(-1, draw.places[:, None])[:, 0] > ordered[:, -1]
    unsure = torch.nonzero(~(draw.is_certain & beyond_tie))[:, 0]
    if len(unsure):
        drawn[unsure] = _draw_sorted(scaled[unsure], [rows[i] for i in unsure.tolist()])
    return drawn


def _draw_sorted(scaled: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """The same by sorting every row in full."""
    ordered, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    total = scaled.exp().sum(dim=-1, dtype=torch.float64)[:, None]
    return order.gather(-1, inverse_cdf(ordered, rows, total).places[:, None])[:, 0]


@dataclass(frozen=True)
class Draw:
    """`places` int64 [N] drawn; `is_certain` bool [N]: False if more candidates might give another place."""

    places: torch.Tensor
    is_certain: torch.Tensor


def inverse_cdf(ordered: torch.Tensor, rows: Sequence[SamplingRow], total: torch.Tensor) -> Draw:
    """Places drawn in `ordered` [N, M], the M largest scaled logits of a row, largest first.

    `total` float64 [N, 1]: sum of exp over the whole row. top-p keeps the smallest set of most likely tokens whose
    probability, among those that top-k keeps, reaches p. Sums are in float64, so that batching does not change them.
    """
    device, num_places = ordered.device, ordered.shape[-1]
    places = torch.arange(num_places, device=device)[None, :]
    limits = torch.tensor([row.params.top_k for row in rows], device=device)[:, None]
    top_p = torch.tensor([row.params.top_p for row in rows], dtype=torch.float64, device=device)[:, None]
    uniform = torch.tensor([row.uniform for row in rows], dtype=torch.float64, device=device)[:, None]
    allowed = (limits == 0) | (places < limits)
    weights = ordered.exp().double() * allowed
    cumulated = weights.cumsum(dim=-1)
    total = torch.where((limits > 0) & (limits <= num_places), cumulated[:, -1:], total)
    keep = allowed & (cumulated - weights < top_p * total)
    keep[:, 0] = True
    is_whole = ~keep[:, -1:]  # the kept tokens end among the candidates
    kept_total = torch.where(is_whole | (top_p < 1.0), (weights * keep).sum(dim=-1, keepdim=True), total)
    reached = (cumulated > uniform * kept_total) & keep & (weights > 0)
    is_reached = reached.any(dim=-1)
    # The first place where the sum exceeds the draw; rounding may leave none: then the last place kept.
    drawn = torch.where(is_reached, reached.int().argmax(dim=-1), keep.sum(dim=-1) - 1)
    is_known = ((limits == 0) | (limits <= num_places)) & (is_whole | (top_p == 1.0))
    return Draw(drawn, is_known[:, 0] & (is_reached | is_whole[:, 0]))


def _penalise(logits: torch.Tensor, row: SamplingRow) -> None:
    """Apply the penalties of `row` to its `logits` [vocab], in place.

    Repetition (Keskar et al. 2019, CTRL): logits of tokens seen in prompt or output are divided by it if positive,
    multiplied if negative. Presence and frequency (OpenAI): a constant, and a multiple of the count, off tokens in the
    output.
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
        top_token_ids=() if top is None else tuple(top.indices.tolist()),
        top_logprobs=() if top is None else tuple((top.values - total).tolist()),
    )

"""`/v1/requests/{id}/cache`: why a request hit or missed; `/v1/cache/misses`: where misses came from in all;
`/v1/cache/namespaces`: who uses how much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool

from looseleaf.core.explain import Explanation
from looseleaf.core.misses import MissSummary
from looseleaf.errors import UnknownRequest
from looseleaf.server.auth import Caller
from looseleaf.server.context import AnyCaller, Context, ServerContext

# That somebody else has sent the same text is none of a client's business: it would make prompts guessable.
_NOTHING_OF_YOURS = "nothing in this namespace begins like this prompt."

router = APIRouter(tags=["explanations"])


@router.get("/v1/requests/{request_id:path}/cache")
async def explain_request(request_id: str, context: Context, caller: AnyCaller, stored: bool = False) -> dict[str, Any]:
    """The explanation, in numbers and one sentence; 404 for a request that is unknown or another client's.

    `diverged_text`: what is stored where the prompt leaves it, and what was asked instead. `drift`: where and why a
    conversation did not go on with the tokens of its last turn. What is stored, and what an earlier turn said, is shown
    to the admin and within the namespace of the caller's key: without keys, others may have the same namespace. With
    `?stored=true`, `stored`: what is stored now of what the request computed, run by run, and what the eviction policy
    thinks of it.
    """
    known = known_request_id(context, caller, request_id)
    explanation = context.cache.explain(request_id=known)
    if explanation.reason == "other_namespace" and not caller.may_know_of_others:
        explanation = replace(explanation, reason="never_seen", message=_NOTHING_OF_YOURS)
    note = context.directory.note_of(known)
    is_own, first_missed = caller.key_namespace is not None, explanation.first_missed_token or 0
    if not (caller.may_know_of_others or (is_own and first_missed >= note.num_foreign_tokens)):
        explanation = replace(explanation, stored_tokens=())
    answer = {"object": "cache.explanation", "request_id": known, **asdict(explanation)}
    answer["diverged_text"] = _diverged_text(context, explanation)
    answer["drift"] = note.drift and note.drift.as_answer(shows_earlier=is_own or caller.may_know_of_others)
    if stored:
        found = await run_in_threadpool(partial(context.cache.inspect, request_id=known))
        parts = [asdict(part) for part in found if caller.may_see(part.namespace)]
        answer["stored"] = [
            {name: value for name, value in part.items() if name != "namespace" or caller.may_know(value)}
            for part in parts
        ]
    return answer


def _diverged_text(context: ServerContext, explanation: Explanation) -> dict[str, str | None] | None:
    """What is stored where a prompt leaves it (null: not the caller's to see), and what was asked instead; None where
    it does not leave what is stored."""
    if not explanation.asked_tokens:
        return None
    decode = partial(context.tokenizer.decode, skip_special_tokens=False)
    stored = explanation.stored_tokens
    return {"stored": decode(stored) if stored else None, "asked": decode(explanation.asked_tokens)}


@router.get("/v1/cache/misses")
async def get_misses(
    context: Context,
    caller: AnyCaller,
    since_seconds: Annotated[float | None, Query(gt=0, allow_inf_nan=False)] = None,
    cache_salt: str | None = None,
    buckets: bool = False,
) -> dict[str, Any]:
    """Where misses came from: tokens and requests by reason since the start or in the last so many seconds, in numbers
    and one sentence; with `?buckets=true` also over time. Of all namespaces or, for a key or with a salt, of one."""
    everything = cache_salt is None and caller.key_namespace is None
    summary = context.cache.miss_summary(since_seconds, None if everything else caller.namespace(cache_salt))
    if not caller.may_know_of_others:
        summary = _without_others(summary)
    if not buckets:
        summary = replace(summary, buckets=())
    answer = {"object": "cache.misses", "sentence": summary.as_sentence, **asdict(summary)}
    return answer if buckets else {name: value for name, value in answer.items() if name != "buckets"}


def _without_others(summary: MissSummary) -> MissSummary:
    """Without what tells of other namespaces: their names, and that they have what was asked for."""
    return replace(
        summary,
        missed_tokens=_unknown_as_new(summary.missed_tokens),
        requests=_unknown_as_new(summary.requests),
        by_namespace={},
        buckets=tuple(_without_others(bucket) for bucket in summary.buckets),
    )


def _unknown_as_new(counts: Mapping[str, int]) -> dict[str, int]:
    folded = Counter[str]()
    for reason, count in counts.items():
        folded["never_seen" if reason == "other_namespace" else reason] += count
    return dict(folded)


@router.get("/v1/cache/namespaces")
async def list_namespaces(context: Context, caller: AnyCaller) -> dict[str, Any]:
    """What each namespace, or tenant, stores, holds and finds, the largest user first: those that the caller may know
    of. An entry without a name sums up those that are not remembered any more."""
    data = [
        {"object": "namespace", **asdict(usage)}
        for usage in context.cache.namespace_usage()
        if (caller.may_know_of_others if usage.namespace is None else caller.may_know(usage.namespace))
    ]
    return {"object": "list", "data": data}


def known_request_id(context: ServerContext, caller: Caller, request_id: str) -> str:
    """The engine's id for the id of an answer: the same, or for an answer of several choices that of the first.

    Raises:
        UnknownRequest: no such request is known, or it is another client's.
    """
    for candidate in (request_id, f"{request_id}-0"):
        if not context.directory.may_see(candidate, caller):
            continue
        try:
            context.cache.explain(request_id=candidate)
        except UnknownRequest:
            continue
        return candidate
    raise UnknownRequest(request_id)

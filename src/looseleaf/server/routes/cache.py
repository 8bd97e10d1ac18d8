"""`/v1/cache`: statistics, look-up, warming and clearing; `/v1/requests/{id}/cache`: why a request hit or missed."""

from __future__ import annotations

import uuid
from dataclasses import asdict, replace
from typing import Any

from fastapi import APIRouter, Request

from looseleaf.engine.request import GenerationRequest, Usage
from looseleaf.engine.sampling import SamplingParams
from looseleaf.errors import UnknownRequest
from looseleaf.server.auth import Caller
from looseleaf.server.context import AdminCaller, AnyCaller, Context, ServerContext
from looseleaf.server.conversations import render, stable_prefix
from looseleaf.server.generation import Generation
from looseleaf.server.prompts import prompt_tokens
from looseleaf.server.schemas import ClearBody, PromptBody

# That somebody else has sent the same text is none of a client's business: it would make prompts guessable.
_NOTHING_OF_YOURS = "nothing in this namespace begins like this prompt."

router = APIRouter(tags=["cache"])


@router.get("/v1/cache/stats")
async def get_stats(context: Context, _: AnyCaller) -> dict[str, Any]:
    """The fields of `CacheManager.stats()`."""
    return {"object": "cache.stats", **asdict(context.cache.stats())}


@router.post("/v1/cache/match")
async def match_prompt(body: PromptBody, context: Context, caller: AnyCaller) -> dict[str, Any]:
    """Would this prompt hit, and how much? Changes nothing. A conversation is taken as if its answer were asked for;
    `by_rung` splits `num_cached_tokens` by how they would be had."""
    tokens = await prompt_tokens(context.tokenizer, body, render)
    match = context.cache.match(tokens, namespace=caller.namespace(body.cache_salt))
    return {
        "object": "cache.match",
        "num_prompt_tokens": match.num_prompt_tokens,
        "num_cached_tokens": match.num_tokens,
        "by_rung": dict(match.by_rung),
    }


@router.post("/v1/cache/warm")
async def warm_prompt(request: Request, body: PromptBody, context: Context, caller: AdminCaller) -> dict[str, Any]:
    """Compute a prompt and keep it in the cache, generating nothing. Of a conversation it is the part with which every
    request begins that goes on from it."""
    tokens = await prompt_tokens(context.tokenizer, body, stable_prefix)
    request_id = f"warm-{uuid.uuid4().hex}"
    usage = await warm(request, context, caller, request_id, tokens, caller.namespace(body.cache_salt))
    return {
        "object": "cache.warm",
        "request_id": request_id,
        "num_prompt_tokens": usage.num_prompt_tokens,
        "num_cached_tokens": usage.num_cached_tokens,
        "num_computed_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
    }


@router.post("/v1/cache/clear")
async def clear_cache(context: Context, caller: AdminCaller, body: ClearBody | None = None) -> dict[str, Any]:
    """Forget what is cached, and say what was really done. Without a salt: every namespace, or the key's own.

    `complete` is false while running requests or pins still keep something (`num_kept_tokens`); what requests hold is
    freed at their end without ever being matched again.
    """
    body = body or ClearBody()
    everything = body.cache_salt is None and caller.key_namespace is None
    namespace = None if everything else caller.namespace(body.cache_salt)
    result = context.cache.clear(namespace=namespace, include_pins=body.include_pins)
    return {
        "object": "cache.clear",
        "num_cleared_tokens": result.num_cleared_tokens,
        "num_kept_tokens": result.num_kept_tokens,
        "complete": result.num_kept_tokens == 0,
    }


@router.get("/v1/requests/{request_id:path}/cache")
async def explain_request(request_id: str, context: Context, caller: AnyCaller) -> dict[str, Any]:
    """The explanation, in numbers and one sentence; 404 for a request that is unknown or another client's."""
    known = known_request_id(context, caller, request_id)
    explanation = context.cache.explain(request_id=known)
    if explanation.reason == "other_namespace" and not caller.may_know_of_others:
        explanation = replace(explanation, reason="never_seen", message=_NOTHING_OF_YOURS)
    return {"object": "cache.explanation", "request_id": known, **asdict(explanation)}


async def warm(
    request: Request, context: ServerContext, caller: Caller, request_id: str, tokens: list[int], namespace: str
) -> Usage:
    """Prefill `tokens` in `namespace` and wait for it. A client that leaves ends it.

    Raises:
        PromptTooLong, InvalidTokens: as the engine's `submit`.
    """
    prefill = GenerationRequest(request_id, tokens, SamplingParams(max_tokens=0), namespace)
    generation = Generation(context.engine, [prefill])
    context.directory.record(request_id, caller)
    (deltas,) = await generation.collect(request.receive)
    return deltas[-1].usage


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

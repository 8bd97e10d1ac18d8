"""`/v1/cache`: statistics, look-up, warming and clearing."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request

from looseleaf.server.callers import AdminCaller, AnyCaller
from looseleaf.server.context import Context
from looseleaf.server.prompts import prompt_to_keep, prompt_to_match
from looseleaf.server.schemas.cache import ClearAnswer, ClearBody, MatchAnswer, PromptBody, WarmAnswer
from looseleaf.server.warming import warm

router = APIRouter(tags=["cache"])


@router.get("/v1/cache/stats")
async def get_stats(context: Context, _: AnyCaller) -> dict[str, Any]:
    """The fields of `CacheManager.stats()`."""
    return {"object": "cache.stats", **asdict(context.cache.stats())}


@router.post("/v1/cache/match")
async def match_prompt(body: PromptBody, context: Context, caller: AnyCaller) -> MatchAnswer:
    """Would this prompt hit, and how much? Changes nothing."""
    tokens = await prompt_to_match(context.tokenizer, body)
    match = context.cache.match(tokens, namespace=caller.namespace(body.cache_salt))
    by_rung = dict(match.by_rung)
    return MatchAnswer(num_prompt_tokens=match.num_prompt_tokens, num_cached_tokens=match.num_tokens, by_rung=by_rung)


@router.post("/v1/cache/warm")
async def warm_prompt(request: Request, body: PromptBody, context: Context, caller: AdminCaller) -> WarmAnswer:
    """Compute a prompt and keep it in the cache, generating nothing."""
    tokens = await prompt_to_keep(context.tokenizer, body)
    warmed = await warm(request, context, caller, tokens, caller.namespace(body.cache_salt))
    usage = warmed.usage
    return WarmAnswer(
        request_id=warmed.request_id,
        num_prompt_tokens=usage.num_prompt_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_computed_tokens=usage.num_prompt_tokens - usage.num_cached_tokens,
    )


@router.post("/v1/cache/clear")
async def clear_cache(context: Context, caller: AdminCaller, body: ClearBody | None = None) -> ClearAnswer:
    """Forget what is cached, and say what was really done. Without a salt: every namespace, or the key's
    own."""
    body = body or ClearBody()
    everything = body.cache_salt is None and caller.key_namespace is None
    namespace = None if everything else caller.namespace(body.cache_salt)
    result = context.cache.clear(namespace=namespace, include_pins=body.include_pins)
    return ClearAnswer(
        num_cleared_tokens=result.num_cleared_tokens,
        num_kept_tokens=result.num_kept_tokens,
        complete=result.num_kept_tokens == 0,
    )

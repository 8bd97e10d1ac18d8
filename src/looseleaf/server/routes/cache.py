"""`/v1/cache`: statistics, look-up, warming, clearing, size."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import asdict
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool

from looseleaf.engine.request import GenerationRequest, Usage
from looseleaf.engine.sampling import SamplingParams
from looseleaf.errors import CapacityError
from looseleaf.server.auth import Caller
from looseleaf.server.context import AdminCaller, AnyCaller, Context, ServerContext
from looseleaf.server.conversations import render, stable_prefix
from looseleaf.server.errors import ApiError
from looseleaf.server.generation import Generation
from looseleaf.server.layers import num_foreign_tokens
from looseleaf.server.prompts import PlacedPrompt, placed_prompt
from looseleaf.server.schemas import ClearBody, PromptBody, ResizeBody

router = APIRouter(tags=["cache"])


@router.get("/v1/cache/stats")
async def get_stats(context: Context, _: AnyCaller, fragmentation: bool = False) -> dict[str, Any]:
    """The fields of `CacheManager.stats()`; with `?fragmentation=true` those of `fragmentation()` under that key."""
    answer = {"object": "cache.stats", **asdict(context.cache.stats())}
    if fragmentation:  # takes milliseconds, by the size of the pool
        answer["fragmentation"] = asdict(await run_in_threadpool(context.cache.fragmentation))
    return answer


@router.post("/v1/cache/match")
async def match_prompt(body: PromptBody, context: Context, caller: AnyCaller) -> dict[str, Any]:
    """Would this prompt hit, and how much? Changes nothing. A conversation is taken as if its answer were asked for;
    `by_rung` splits `num_cached_tokens` by how they would be had; `num_blocks` of all layer groups would be held."""
    prompt = await placed_prompt(context, caller, body, render)
    place = prompt.placement
    find = partial(context.cache.match, namespace=place.namespace, layers=place.layers)
    match = await run_in_threadpool(find, prompt.tokens)
    return {
        "object": "cache.match",
        "num_prompt_tokens": match.num_prompt_tokens,
        "num_cached_tokens": match.num_tokens,
        "num_blocks": match.num_blocks,
        "by_rung": dict(match.by_rung),
    }


@router.post("/v1/cache/warm")
async def warm_prompt(request: Request, body: PromptBody, context: Context, caller: AdminCaller) -> dict[str, Any]:
    """Compute a prompt and keep it in the cache, generating nothing. Of a conversation it is the part with which every
    request begins that goes on from it."""
    prompt = await placed_prompt(context, caller, body, stable_prefix)
    request_id = f"warm-{uuid.uuid4().hex}"
    usage = await warm(request, context, caller, request_id, prompt)
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
    context.past_turns.forget(namespace)
    clear = partial(context.cache.clear, namespace=namespace, include_pins=body.include_pins)
    result = await run_in_threadpool(clear)  # of a large cache takes its time
    return {
        "object": "cache.clear",
        "num_cleared_tokens": result.num_cleared_tokens,
        "num_kept_tokens": result.num_kept_tokens,
        "complete": result.num_kept_tokens == 0,
    }


@router.post("/v1/cache/resize")
async def resize_cache(body: ResizeBody, context: Context, caller: AdminCaller) -> dict[str, Any]:
    """Give the memory another size, between two steps; requests go on. 409 with the numbers, and nothing changed, where
    running requests or hard pins need more, or the device has no memory for so much."""
    if not caller.may_know_of_others:
        raise ApiError("the memory is everybody's: this needs the admin key", status=403, code="admin_key_required")
    sizes = body.model_dump(exclude_none=True)
    if len(sizes) != 1:
        given = " and ".join(sizes) or "none of them"
        message = f"give exactly one of num_pages, num_blocks, kv_bytes; got {given}"
        raise ApiError(message, code="invalid_value", param="num_pages")
    ((name, size),) = sizes.items()
    blocks_per_page = context.cache.plan.blocks_per_page
    in_page = {"num_pages": 1, "num_blocks": blocks_per_page, "kv_bytes": blocks_per_page * context.bytes_per_block}
    num_pages = size // in_page[name]
    if not 1 <= num_pages * blocks_per_page < 2**31:
        message = f"{name} {size} is less than a page of {in_page[name]}, or more than 2**31 blocks"
        raise ApiError(message, code="invalid_value", param=name)
    try:
        result = await asyncio.wrap_future(context.engine.resize(num_pages))
    except CapacityError:
        context.metrics.on_resize(outcome="refused")
        raise
    context.metrics.on_resize(outcome="done", num_moved_blocks=len(result.copies))
    return {
        "object": "cache.resize",
        "num_pages": result.num_pages,
        "num_blocks": result.num_blocks,
        "num_tokens": context.cache.plan.num_tokens,
        "kv_bytes": result.num_blocks * context.bytes_per_block,
        "max_model_tokens": context.engine.engine.max_model_tokens,
        "num_evicted_blocks": result.num_evicted_blocks,
        "num_moved_blocks": len(result.copies),
    }


async def warm(
    request: Request, context: ServerContext, caller: Caller, request_id: str, prompt: PlacedPrompt
) -> Usage:
    """Prefill a prompt and wait for it. A client that leaves ends it.

    Raises:
        PromptTooLong, InvalidTokens: as the engine's `submit`.
    """
    place, nothing = prompt.placement, SamplingParams(max_tokens=0)
    prefill = GenerationRequest(request_id, prompt.tokens, nothing, place.namespace, layers=place.layers)
    generation = Generation(context.engine, [[prefill]])
    context.directory.record(request_id, caller, num_foreign_tokens=num_foreign_tokens(place.layers, caller))
    (deltas,) = await generation.collect(request.receive)
    return deltas[-1].usage

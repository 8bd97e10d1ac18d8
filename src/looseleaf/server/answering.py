"""The common course of both generation doors: sampling, pins that come along, then one answer or a stream."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

from fastapi import Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from looseleaf.engine.request import GenerationRequest, Usage
from looseleaf.engine.sampling import SamplingParams
from looseleaf.errors import LooseleafError
from looseleaf.server.auth import Caller
from looseleaf.server.context import ServerContext
from looseleaf.server.disconnect import EventStreamResponse
from looseleaf.server.errors import ApiError, answer_for
from looseleaf.server.formats import AnswerFormat
from looseleaf.server.generation import Generation
from looseleaf.server.layers import Placement, num_foreign_tokens
from looseleaf.server.past_turns import ContinuedPrompt
from looseleaf.server.request_pins import Outcome, PinRequest
from looseleaf.server.schemas import GenerationBody

Result = TypeVar("Result")

PIN_HEADER = "x-looseleaf-pin"
_MANY_TOKENS = 2048
"""From so many tokens of prompts or answers on, requests and answers are made beside the event loop."""
_SAMPLING_FIELDS = {
    "temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "ignore_eos",
}  # fmt: skip


def check_supported(context: ServerContext, body: GenerationBody, num_prompts: int) -> None:
    """Refuse what would be answered wrongly.

    Raises:
        ApiError: 404 for another model, 400 for a field that is not supported or a number of choices that cannot be.
    """
    context.check_model(body.model)
    field = body.unsupported_field()
    if field is not None:
        raise ApiError(f"{field} is not supported", code="unsupported_parameter", param=field)
    field = "n" if body.num_samples == body.num_choices else "best_of"
    num_samples = num_prompts * body.num_samples
    if num_samples > context.settings.max_choices:
        most = context.settings.max_choices
        message = f"{num_samples} choices are asked for; at most {most} are generated at once"
        raise ApiError(message, code="invalid_value", param=field)
    if body.num_samples < body.num_choices or (body.stream and field == "best_of"):
        message = f"the best {body.num_choices} of {body.num_samples} choices cannot be chosen"
        hint = "give best_of at least n, and no best_of with stream: a choice is the best only once all have ended"
        raise ApiError(f"{message}\nhint: {hint}", code="invalid_value", param=field)


async def answer(
    request: Request,
    context: ServerContext,
    caller: Caller,
    body: GenerationBody,
    answer_format: AnswerFormat,
    *,
    prompts: Sequence[list[int]],
    max_tokens: int,
    placement: Placement,
    continued: ContinuedPrompt | None = None,
    marked: Sequence[PinRequest] = (),
    stops: tuple[str, ...] = (),
) -> Response:
    """Generate from `prompts` and answer, at once or as a stream. A client that leaves ends it. `placement`: where its
    tokens belong. `continued`: the conversation whose prompt this is; its answers are remembered. `marked`: pins that
    `body` asks for besides those of its retention. `stops`: where an answer ends besides what `body` asks for.

    Raises:
        LooseleafError: the engine refuses or fails a request.
    """
    is_long = sum(map(len, prompts)) >= _MANY_TOKENS
    samples = await _aside(is_long, _samples, body, answer_format.answer_id, prompts, max_tokens, placement, stops)
    pins = context.request_pins
    outcomes: list[Outcome] = []
    try:
        wishes = _wishes(context, body, prompts, marked, placement)
        outcomes.extend(pins.grant(wish, namespace=placement.namespace, owner=caller.name) for wish in wishes)
        generation = Generation(context.engine, samples)
    except BaseException:
        pins.revoke(outcomes)
        raise
    pins.keep(outcomes)
    drift = None if continued is None else continued.drift
    if drift is not None:
        context.metrics.on_drift(cause=drift.cause, num_lost_tokens=drift.num_lost_tokens)
    for item in chain.from_iterable(samples):
        context.directory.record(item.request_id, caller, drift, num_foreign_tokens(placement.layers, caller))

    def headers() -> dict[str, str]:
        pinned = {PIN_HEADER: pins.describe(outcomes)} if outcomes else {}
        return {"x-request-id": answer_format.answer_id, **pinned}

    def close() -> None:
        generation.close()
        pins.settle(outcomes)
        if continued is not None and body.reuse is not False:
            for given in generation.given:
                if given.token_ids:
                    context.past_turns.remember(given.request_id, continued, "".join(given.texts), given.token_ids)

    if body.stream:
        events = _events(generation, answer_format, body.wants_usage_event, body.num_logprobs is not None)
        return EventStreamResponse(events, close, headers())
    try:
        results = await generation.collect(request.receive)
        is_long = body.num_logprobs is not None or sum(map(len, results)) >= _MANY_TOKENS
        return await _aside(is_long, lambda: JSONResponse(answer_format.answer(results), headers=headers()))
    finally:
        close()


async def _aside(is_long: bool, call: Callable[..., Result], *arguments: object) -> Result:
    """The result of `call`, which a worker thread makes if it may take long: others are answered meanwhile."""
    return await run_in_threadpool(call, *arguments) if is_long else call(*arguments)


def session_of(body: GenerationBody, header: str | None) -> str | None:
    """The session that a request belongs to: by its body, or by its header.

    Raises:
        ApiError: 400, they name two.
    """
    if body.session_id is not None and header not in (None, body.session_id):
        message = f"session_id is {body.session_id!r} in the body and {header!r} in the header"
        raise ApiError(message, code="invalid_value", param="session_id")
    return body.session_id if header is None else header


def _samples(
    body: GenerationBody,
    answer_id: str,
    prompts: Sequence[list[int]],
    max_tokens: int,
    placement: Placement,
    stops: tuple[str, ...],
) -> list[list[GenerationRequest]]:
    """For each prompt one engine request per choice; choice c of prompt p is number p * num_samples + c. A lone one
    carries the answer's id itself, several carry `id-0`, `id-1`, …; a seed is moved on by the number of the choice."""
    asked = body.model_dump(include=_SAMPLING_FIELDS, exclude_none=True)
    if asked.get("top_k") == -1:
        asked["top_k"] = 0
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    num_samples, num_logprobs = body.num_samples, body.num_logprobs
    if num_logprobs is None and num_samples > body.num_choices:
        num_logprobs = 0  # the best are chosen by them
    params = SamplingParams(max_tokens=max_tokens, stop=stop + stops, num_logprobs=num_logprobs, **asked)
    total = len(prompts) * num_samples
    samples: list[list[GenerationRequest]] = [[] for _ in prompts]
    for index in range(total):
        prompt, choice = divmod(index, num_samples)
        request_id = answer_id if total == 1 else f"{answer_id}-{index}"
        seeded = params if params.seed is None else replace(params, seed=params.seed + choice)
        where = (placement.namespace, body.reuse is not False, placement.session, placement.layers)
        samples[prompt].append(GenerationRequest(request_id, prompts[prompt], seeded, *where))
    return samples


def _wishes(
    context: ServerContext,
    body: GenerationBody,
    prompts: Sequence[list[int]],
    marked: Sequence[PinRequest],
    placement: Placement,
) -> list[PinRequest]:
    """The pins that a request asks for, one for the same tokens, none of them longer than the server allows."""
    if not context.settings.request_pins:
        return []
    wishes = list(marked)
    if body.prompt_cache_retention is not None:
        wishes += [PinRequest(prompt, body.prompt_cache_retention) for prompt in prompts]
    seconds: dict[tuple[int, ...], float] = {}
    for wish in wishes:
        tokens = tuple(wish.tokens)
        seconds[tokens] = max(seconds.get(tokens, 0.0), min(wish.ttl_seconds, context.settings.max_request_pin_seconds))
    labels = {} if body.prompt_cache_key is None else {"prompt_cache_key": body.prompt_cache_key}
    layers = placement.layers
    return [PinRequest(tokens, ttl_seconds, labels, layers) for tokens, ttl_seconds in seconds.items()]


async def _events(
    generation: Generation, answer_format: AnswerFormat, wants_usage: bool, asks_tokenizer: bool
) -> AsyncGenerator[str, None]:
    for opening in answer_format.opening():
        yield _event(opening)
    usages: dict[int, Usage] = {}
    try:
        async with aclosing(generation.deltas()) as deltas:
            async for choice in deltas:
                usages[choice.index] = choice.delta.usage
                chunk = await _aside(asks_tokenizer, answer_format.chunk, choice)
                if chunk is not None:
                    yield _event(chunk)
        if wants_usage:
            yield _event(answer_format.usage_chunk([usages[index] for index in sorted(usages)]))
    except LooseleafError as error:  # the response aborts the other choices when it ends
        yield _event({"error": answer_for(error).error})
    yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"

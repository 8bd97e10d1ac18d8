"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from looseleaf.server.answering import GenerationPlan, answer, answer_id_of, check_supported, sampling_params
from looseleaf.server.callers import AnyCaller
from looseleaf.server.context import Context, ServerContext
from looseleaf.server.conversations import Turn, prefix_up_to
from looseleaf.server.durations import parse_duration
from looseleaf.server.errors import ApiError
from looseleaf.server.formats.answer import AnswerFormat, Envelope
from looseleaf.server.formats.chat import ChatFormat
from looseleaf.server.prompts import Prompt, chat_prompt, marked_places, turns_of
from looseleaf.server.request_pins import PinRequest
from looseleaf.server.schemas.chat import ChatBody

MAX_MARKS = 4

router = APIRouter(tags=["generation"])


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request, body: ChatBody, context: Context, caller: AnyCaller) -> Response:
    """Answer a conversation."""
    check_supported(context, body, num_prompts=1)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError("top_logprobs needs logprobs: true", code="invalid_value", param="top_logprobs")
    turns = turns_of(body.messages)
    tokens = await chat_prompt(context.tokenizer, turns)
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    max_tokens = _max_tokens(context, body, len(tokens))
    plan = GenerationPlan(
        answer_id=answer_id_of(request, body, "chatcmpl"),
        prompts=[Prompt(tokens, None)],
        params=sampling_params(body, max_tokens=max_tokens, num_logprobs=num_logprobs),
        namespace=caller.namespace(body.cache_salt),
        num_choices=body.num_choices,
        reuse=body.reuse is not False,
        streams=bool(body.stream),
        includes_usage=body.wants_usage_event,
        pins=await _pins(context, body, turns, tokens),
    )

    def make_format(envelope: Envelope) -> AnswerFormat:
        with_logprobs = bool(body.logprobs)
        return ChatFormat(envelope, context.tokenizer, with_logprobs=with_logprobs, num_choices=body.num_choices)

    return await answer(request, context, caller, plan, make_format)


def _max_tokens(context: ServerContext, body: ChatBody, num_prompt_tokens: int) -> int:
    """What the body says, else what the model's length leaves, up to the server's limit for chat answers."""
    given = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if given is not None:
        return given
    left = context.engine.engine.max_model_tokens - num_prompt_tokens
    return max(1, min(left, context.settings.chat_output_tokens))


async def _pins(context: ServerContext, body: ChatBody, turns: Sequence[Turn], tokens: list[int]) -> list[PinRequest]:
    places = marked_places(body.messages)
    if len(places) > MAX_MARKS:
        message = f"{len(places)} cache_control marks are given; at most {MAX_MARKS} are allowed"
        raise ApiError(message, code="invalid_value", param="messages")
    longest = context.settings.max_request_pin_seconds
    wishes = []
    for place in places:
        ttl_seconds = parse_duration(place.control.ttl, param="cache_control.ttl")
        if context.settings.request_pins:
            prefix = await run_in_threadpool(prefix_up_to, context.tokenizer, turns, place.mark, tokens)
            if prefix:
                wishes.append(PinRequest(prefix, min(ttl_seconds, longest)))
    if body.prompt_cache_retention is not None:
        ttl_seconds = parse_duration(body.prompt_cache_retention, param="prompt_cache_retention")
        if context.settings.request_pins:
            wishes.append(PinRequest(tokens, min(ttl_seconds, longest)))
    return wishes

"""`POST /v1/completions` and `POST /v1/chat/completions`."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from looseleaf.server.answering import answer, check_supported
from looseleaf.server.context import AnyCaller, Context, ServerContext
from looseleaf.server.conversations import Turn, prefix_up_to, render
from looseleaf.server.errors import ApiError
from looseleaf.server.formats import ChatFormat, CompletionFormat
from looseleaf.server.prompts import marked_places, turns_of
from looseleaf.server.request_pins import PinRequest
from looseleaf.server.schemas import ChatBody, CompletionBody, RequestIdHeader

DEFAULT_MAX_TOKENS = 16
MAX_MARKS = 4

router = APIRouter(tags=["generation"])


@router.post("/v1/completions")
async def create_completion(
    request: Request, body: CompletionBody, context: Context, caller: AnyCaller, request_id: RequestIdHeader = None
) -> Response:
    """Continue one or several prompts."""
    check_supported(context, body, num_prompts=len(body.prompt))
    if body.echo and body.logprobs is not None:
        message = "echo with logprobs is not supported: a prompt found in the cache is not computed again"
        raise ApiError(message, code="unsupported_parameter", param="echo")
    tokenizer = context.tokenizer
    prompts = [
        await run_in_threadpool(tokenizer.encode, item) if isinstance(item, str) else item for item in body.prompt
    ]
    starts = [""] * (len(prompts) * body.num_choices)
    if body.echo:
        texts = [item if isinstance(item, str) else tokenizer.decode(item) for item in body.prompt]
        starts = [text for text in texts for _ in range(body.num_choices)]
    answer_id = body.request_id or request_id or f"cmpl-{uuid.uuid4().hex}"
    answer_format = CompletionFormat(context, body, answer_id, starts)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return await answer(request, context, caller, body, answer_format, prompts=prompts, max_tokens=max_tokens)


@router.post("/v1/chat/completions")
async def create_chat_completion(
    request: Request, body: ChatBody, context: Context, caller: AnyCaller, request_id: RequestIdHeader = None
) -> Response:
    """Answer a conversation."""
    check_supported(context, body, num_prompts=1)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError("top_logprobs needs logprobs: true", code="invalid_value", param="top_logprobs")
    turns = turns_of(body.messages)
    prompt = await run_in_threadpool(render, context.tokenizer, turns)
    answer_id = body.request_id or request_id or f"chatcmpl-{uuid.uuid4().hex}"
    return await answer(
        request,
        context,
        caller,
        body,
        ChatFormat(context, body, answer_id, [""] * body.num_choices),
        prompts=[prompt],
        max_tokens=_max_chat_tokens(context, body, len(prompt)),
        marked=await _marked_prefixes(context, body, turns, prompt),
        stops=() if body.ignore_eos else context.tokenizer.chat_stops,
    )


def _max_chat_tokens(context: ServerContext, body: ChatBody, num_prompt_tokens: int) -> int:
    """What the body says, else what the model's length leaves, up to the server's limit for chat answers."""
    given = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if given is not None:
        return given
    left = context.engine.engine.max_model_tokens - num_prompt_tokens
    return max(1, min(left, context.settings.chat_output_tokens))


async def _marked_prefixes(
    context: ServerContext, body: ChatBody, turns: Sequence[Turn], prompt: list[int]
) -> list[PinRequest]:
    """What the marks in the messages ask to keep."""
    places = marked_places(body.messages)
    if len(places) > MAX_MARKS:
        message = f"{len(places)} cache_control marks are given; at most {MAX_MARKS} are allowed"
        raise ApiError(message, code="invalid_value", param="messages")
    if not context.settings.request_pins:
        return []
    wishes = []
    for mark, control in places.items():
        prefix = await run_in_threadpool(prefix_up_to, context.tokenizer, turns, mark, prompt)
        if prefix:
            wishes.append(PinRequest(prefix, control.ttl))
    return wishes

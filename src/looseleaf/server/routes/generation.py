"""`POST /v1/completions` and `POST /v1/chat/completions`."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from looseleaf.server.answering import answer, check_supported, session_of
from looseleaf.server.context import AnyCaller, Context, ServerContext
from looseleaf.server.errors import ApiError
from looseleaf.server.formats import ChatFormat, CompletionFormat
from looseleaf.server.layers import Placement, layers_of
from looseleaf.server.prompts import ChatPrompt, chat_prompt, marked_places
from looseleaf.server.request_pins import PinRequest
from looseleaf.server.schemas import ChatBody, CompletionBody, RequestIdHeader, SessionIdHeader

DEFAULT_MAX_TOKENS = 16
MAX_MARKS = 4

router = APIRouter(tags=["generation"])


@router.post("/v1/completions")
async def create_completion(
    request: Request,
    body: CompletionBody,
    context: Context,
    caller: AnyCaller,
    request_id: RequestIdHeader = None,
    session_id: SessionIdHeader = None,
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
        texts = [
            item if isinstance(item, str) else await run_in_threadpool(tokenizer.decode, item) for item in body.prompt
        ]
        starts = [text for text in texts for _ in range(body.num_choices)]
    answer_id = body.request_id or request_id or f"cmpl-{uuid.uuid4().hex}"
    return await answer(
        request,
        context,
        caller,
        body,
        CompletionFormat(context, body, answer_id, starts, prompts),
        prompts=prompts,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        placement=Placement(
            caller.namespace(body.cache_salt),
            layers_of(body.cache_layers, caller, context.settings),
            session_of(body, session_id),
        ),
    )


@router.post("/v1/chat/completions")
async def create_chat_completion(
    request: Request,
    body: ChatBody,
    context: Context,
    caller: AnyCaller,
    request_id: RequestIdHeader = None,
    session_id: SessionIdHeader = None,
) -> Response:
    """Answer a conversation."""
    check_supported(context, body, num_prompts=1)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError("top_logprobs needs logprobs: true", code="invalid_value", param="top_logprobs")
    if bool(body.messages) == bool(body.prompt_token_ids):
        message = "give at least one message, or prompt_token_ids and no message"
        raise ApiError(message, code="invalid_value", param="messages")
    session, namespace, asked = session_of(body, session_id), caller.namespace(body.cache_salt), None
    if body.messages:
        asked = await run_in_threadpool(chat_prompt, context, body, namespace, session)
    count = None if asked is None else asked.num_tokens_of
    layers = await run_in_threadpool(layers_of, body.cache_layers, caller, context.settings, count)
    prompt = asked.tokens if asked else body.prompt_token_ids or []
    answer_id = body.request_id or request_id or f"chatcmpl-{uuid.uuid4().hex}"
    return await answer(
        request,
        context,
        caller,
        body,
        ChatFormat(context, body, answer_id, [""] * body.num_choices, [prompt]),
        prompts=[prompt],
        placement=Placement(namespace, layers, session),
        continued=None if asked is None else asked.continued,
        max_tokens=_max_chat_tokens(context, body, len(prompt)),
        marked=await _marked_prefixes(context, body, asked) if asked else (),
        stops=() if body.ignore_eos else context.tokenizer.chat_stops,
    )


def _max_chat_tokens(context: ServerContext, body: ChatBody, num_prompt_tokens: int) -> int:
    """What the body says, else what the model's length leaves, up to the server's limit for chat answers."""
    given = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if given is not None:
        return given
    left = context.engine.engine.max_model_tokens - num_prompt_tokens
    return max(1, min(left, context.settings.chat_output_tokens))


async def _marked_prefixes(context: ServerContext, body: ChatBody, asked: ChatPrompt) -> list[PinRequest]:
    """What the marks in the messages ask to keep."""
    places = marked_places(body.messages)
    if len(places) > MAX_MARKS:
        message = f"{len(places)} cache_control marks are given; at most {MAX_MARKS} are allowed"
        raise ApiError(message, code="invalid_value", param="messages")
    if not context.settings.request_pins:
        return []
    wishes = []
    for mark, control in places.items():
        prefix = await run_in_threadpool(asked.tokens_up_to, mark)
        if prefix:
            wishes.append(PinRequest(prefix, control.ttl))
    return wishes

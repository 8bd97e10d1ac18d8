"""`POST /v1/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from looseleaf.server.answering import GenerationPlan, answer, answer_id_of, check_supported, sampling_params
from looseleaf.server.callers import AnyCaller
from looseleaf.server.context import Context, ServerContext
from looseleaf.server.durations import parse_duration
from looseleaf.server.errors import ApiError
from looseleaf.server.formats.answer import AnswerFormat, Envelope
from looseleaf.server.formats.completions import CompletionFormat
from looseleaf.server.prompts import Prompt, completion_prompts
from looseleaf.server.request_pins import PinRequest
from looseleaf.server.schemas.completions import CompletionBody

DEFAULT_MAX_TOKENS = 16

router = APIRouter(tags=["generation"])


@router.post("/v1/completions")
async def create_completion(request: Request, body: CompletionBody, context: Context, caller: AnyCaller) -> Response:
    """Continue one or several prompts."""
    if body.best_of not in (None, body.num_choices):
        message = f"best_of is {body.best_of}; it is supported only where it equals n ({body.num_choices})"
        raise ApiError(message, code="unsupported_parameter", param="best_of")
    if body.echo and body.logprobs is not None:
        message = "echo with logprobs is not supported: a prompt found in the cache is not computed again"
        raise ApiError(message, code="unsupported_parameter", param="echo")
    check_supported(context, body, num_prompts=1)
    prompts = await completion_prompts(context.tokenizer, body.prompt)
    check_supported(context, body, num_prompts=len(prompts))
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    plan = GenerationPlan(
        answer_id=answer_id_of(request, body, "cmpl"),
        prompts=prompts,
        params=sampling_params(body, max_tokens=max_tokens, num_logprobs=body.logprobs),
        namespace=caller.namespace(body.cache_salt),
        num_choices=body.num_choices,
        reuse=body.reuse is not False,
        streams=bool(body.stream),
        includes_usage=body.wants_usage_event,
        pins=_pins(context, body, prompts),
    )

    def make_format(envelope: Envelope) -> AnswerFormat:
        echoes = [prompt.as_text(context.tokenizer) if body.echo else "" for prompt in prompts]
        repeated = [echo for echo in echoes for _ in range(body.num_choices)]
        with_logprobs = body.logprobs is not None
        return CompletionFormat(envelope, context.tokenizer, with_logprobs=with_logprobs, echoes=repeated)

    return await answer(request, context, caller, plan, make_format)


def _pins(context: ServerContext, body: CompletionBody, prompts: list[Prompt]) -> list[PinRequest]:
    if body.prompt_cache_retention is None:
        return []
    ttl_seconds = parse_duration(body.prompt_cache_retention, param="prompt_cache_retention")
    if not context.settings.request_pins:
        return []
    ttl_seconds = min(ttl_seconds, context.settings.max_request_pin_seconds)
    return [PinRequest(prompt.tokens, ttl_seconds) for prompt in prompts]

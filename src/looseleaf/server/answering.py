"""The common course of both generation doors: ids, sampling, pins that come along, then one answer or a
stream."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from looseleaf.engine.request import FinishReason, GenerationRequest, Usage
from looseleaf.engine.sampling import SamplingParams
from looseleaf.errors import LooseleafError
from looseleaf.server.auth import Caller
from looseleaf.server.context import ServerContext
from looseleaf.server.disconnect import ClientLeft, EventStreamResponse, unless_client_leaves
from looseleaf.server.errors import CLIENT_LEFT_STATUS, ApiError, answer_for
from looseleaf.server.formats.answer import AnswerFormat, Envelope, usage_object
from looseleaf.server.generation import Generation, raise_if_failed
from looseleaf.server.prompts import Prompt
from looseleaf.server.request_pins import GrantedPin, PinRequest, RefusedPin
from looseleaf.server.schemas.generation import GenerationBody

PIN_HEADER = "x-looseleaf-pin"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,200}")
_SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "ignore_eos",
)  # fmt: skip
_DONE = "data: [DONE]\n\n"


@dataclass(frozen=True)
class GenerationPlan:
    """What one HTTP request asks of the engine: `num_choices` choices of each prompt, and pins."""

    answer_id: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    namespace: str
    num_choices: int
    reuse: bool
    streams: bool
    includes_usage: bool
    pins: Sequence[PinRequest]

    def requests(self) -> list[GenerationRequest]:
        """One engine request per choice; choice c of prompt p is number p * num_choices + c. A lone one
        carries the answer's id itself, several carry `id-0`, `id-1`, …; a seed is moved on by the number of
        the choice.

        Raises:
            InvalidTokens: a prompt is empty or holds something that is no token.
        """
        total = len(self.prompts) * self.num_choices
        requests = []
        for index in range(total):
            choice = index % self.num_choices
            seed = None if self.params.seed is None else self.params.seed + choice
            request_id = self.answer_id if total == 1 else f"{self.answer_id}-{index}"
            tokens = self.prompts[index // self.num_choices].tokens
            params = replace(self.params, seed=seed)
            requests.append(GenerationRequest(request_id, tokens, params, self.namespace, self.reuse))
        return requests


def answer_id_of(request: Request, body: GenerationBody, prefix: str) -> str:
    """The id of an answer: the body's `request_id`, else the header `X-Request-Id`, else a new one.

    Raises:
        ApiError: 400, the given id is not 1 to 200 visible ASCII characters.
    """
    given = body.request_id if body.request_id is not None else request.headers.get("x-request-id")
    if given is None:
        return f"{prefix}-{uuid.uuid4().hex}"
    if _REQUEST_ID.fullmatch(given) is None:
        message = "the request id must be 1 to 200 visible ASCII characters, without spaces"
        raise ApiError(message, code="invalid_value", param="request_id")
    return given


def sampling_params(body: GenerationBody, *, max_tokens: int, num_logprobs: int | None) -> SamplingParams:
    """The sampling that a body asks for; what is absent or null takes the default.

    Raises:
        RequestError: a value is outside its range.
    """
    asked = {name: getattr(body, name) for name in _SAMPLING_FIELDS if getattr(body, name) is not None}
    if asked.get("top_k") == -1:
        asked["top_k"] = 0
    return SamplingParams(max_tokens=max_tokens, stop=body.stop_strings, num_logprobs=num_logprobs, **asked)


def check_supported(context: ServerContext, body: GenerationBody, num_prompts: int) -> None:
    """Refuse what would be answered wrongly.

    Raises:
        ApiError: 404 for another model, 400 for a field that is not supported or too many choices.
    """
    context.check_model(body.model)
    field = body.unsupported_field()
    if field is not None:
        raise ApiError(f"{field} is not supported", code="unsupported_parameter", param=field)
    num_choices = num_prompts * body.num_choices
    if num_choices > context.settings.max_choices:
        most = context.settings.max_choices
        message = f"{num_choices} choices are asked for; at most {most} are answered at once"
        raise ApiError(message, code="invalid_value", param="n")


async def answer(
    request: Request,
    context: ServerContext,
    caller: Caller,
    plan: GenerationPlan,
    make_format: Callable[[Envelope], AnswerFormat],
) -> Response:
    """Run `plan` and answer, at once or as a stream. A client that leaves ends it.

    Raises:
        LooseleafError: the engine refuses or fails a request.
    """
    requests = plan.requests()
    pins = context.request_pins
    outcomes = [pins.grant(wish, namespace=plan.namespace, owner=caller.name) for wish in plan.pins]
    headers = {"x-request-id": plan.answer_id, **_pin_header(context, outcomes)}
    try:
        generation = Generation(context.engine, requests)
    except BaseException:
        pins.revoke(outcomes)
        raise
    try:
        pins.keep(outcomes)
        for item in requests:
            context.directory.record(item.request_id, caller)
        includes_usage = plan.streams and plan.includes_usage
        answer_format = make_format(Envelope(plan.answer_id, int(time.time()), context.model_name, includes_usage))
        if plan.streams:
            return EventStreamResponse(_events(generation, answer_format, plan), generation.close, headers)
    except BaseException:
        generation.close()
        raise
    try:
        results = await unless_client_leaves(request.receive, generation.collect())
    except ClientLeft:
        return Response(status_code=CLIENT_LEFT_STATUS)
    finally:
        generation.close()
    usage = usage_object({result.index: result.usage for result in results}, plan.num_choices)
    headers.update(_pin_header(context, outcomes))
    return JSONResponse(answer_format.answer(results, usage), headers=headers)


def _pin_header(context: ServerContext, outcomes: Sequence[GrantedPin | RefusedPin]) -> dict[str, str]:
    if not outcomes:
        return {}
    return {PIN_HEADER: ", ".join(context.request_pins.describe(outcome) for outcome in outcomes)}


async def _events(
    generation: Generation, answer_format: AnswerFormat, plan: GenerationPlan
) -> AsyncGenerator[str, None]:
    for opening in answer_format.opening():
        yield _event(opening)
    usages: dict[int, Usage] = {}
    try:
        async with aclosing(generation.deltas()) as deltas:
            async for choice in deltas:
                if choice.delta.finish_reason is FinishReason.ERROR:
                    raise_if_failed(choice.delta)
                usages[choice.index] = choice.delta.usage
                chunk = answer_format.chunk(choice)
                if chunk is not None:
                    yield _event(chunk)
    except LooseleafError as error:  # the response aborts the other choices when it ends
        yield _event(answer_for(error).body())
        yield _DONE
        return
    if plan.includes_usage:
        yield _event(answer_format.usage_chunk(usage_object(usages, plan.num_choices)))
    yield _DONE


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"

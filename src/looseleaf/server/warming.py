"""Compute a prompt so that it is in the cache: a request that generates nothing."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from fastapi import Request

from looseleaf.engine.request import GenerationRequest, Usage
from looseleaf.engine.sampling import SamplingParams
from looseleaf.server.auth import Caller
from looseleaf.server.context import ServerContext
from looseleaf.server.disconnect import unless_client_leaves
from looseleaf.server.generation import Generation


@dataclass(frozen=True)
class Warmed:
    """A prefill that is done."""

    request_id: str
    usage: Usage


async def warm(request: Request, context: ServerContext, caller: Caller, tokens: list[int], namespace: str) -> Warmed:
    """Prefill `tokens` in `namespace` and wait for it. A client that leaves ends it.

    Raises:
        PromptTooLong, InvalidTokens: as the engine's `submit`.
        ClientLeft: the connection closed first.
    """
    request_id = f"warm-{uuid.uuid4().hex}"
    generation = Generation(
        context.engine, [GenerationRequest(request_id, tokens, SamplingParams(max_tokens=0), namespace)]
    )
    context.directory.record(request_id, caller)
    try:
        (result,) = await unless_client_leaves(request.receive, generation.collect())
    finally:
        generation.close()
    return Warmed(request_id, result.usage)

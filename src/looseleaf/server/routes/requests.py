"""`GET /v1/requests/{id}/cache`: why a request hit or missed."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from fastapi import APIRouter

from looseleaf.errors import UnknownRequest
from looseleaf.server.auth import Caller
from looseleaf.server.callers import AnyCaller
from looseleaf.server.context import Context, ServerContext

# That somebody else has sent the same text is none of a client's business: it would make prompts guessable.
_NOTHING_OF_YOURS = "nothing in this namespace begins like this prompt."

router = APIRouter(tags=["cache"])


@router.get("/v1/requests/{request_id:path}/cache")
async def explain_request(request_id: str, context: Context, caller: AnyCaller) -> dict[str, Any]:
    """The explanation, in numbers and one sentence; 404 for a request that is unknown or another client's."""
    known = known_request_id(context, caller, request_id)
    explanation = context.cache.explain(request_id=known)
    if explanation.reason == "other_namespace" and not caller.may_know_of_others:
        explanation = replace(explanation, reason="never_seen", message=_NOTHING_OF_YOURS)
    return {"object": "cache.explanation", "request_id": known, **asdict(explanation)}


def known_request_id(context: ServerContext, caller: Caller, request_id: str) -> str:
    """The engine's id for the id of an answer: the same, or for an answer of several choices that of the
    first.

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

"""`/v1/sessions`: conversations that requests named, and the end of one. A client sees and ends those of its own
namespaces."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter

from looseleaf.server.context import AnyCaller, Context
from looseleaf.server.errors import ApiError

router = APIRouter(tags=["sessions"])


@router.get("/v1/sessions")
async def list_sessions(context: Context, caller: AnyCaller) -> dict[str, Any]:
    """The sessions that are remembered, longest unused first: the fields of `Session`; `namespace` where the caller may
    know it."""
    data = []
    for session in context.cache.sessions():
        if caller.may_see(session.namespace):
            fields = asdict(session)
            data.append({"id": fields.pop("session"), "object": "session", **fields})
            if not caller.may_know(session.namespace):
                del data[-1]["namespace"]
    return {"object": "list", "data": data}


@router.delete("/v1/sessions/{session_id:path}")
async def end_session(
    session_id: str, context: Context, caller: AnyCaller, cache_salt: str | None = None, namespace: str | None = None
) -> dict[str, Any]:
    """A conversation is over: what only it used goes before anything else is evicted. `cache_salt` as in its requests;
    who may know namespaces can name one. 404 if there is no such session of the caller's."""
    if namespace is not None and (cache_salt is not None or not caller.may_know(namespace)):
        message = "give cache_salt; a namespace is named, without one, by who may know of it"
        raise ApiError(message, code="invalid_value", param="namespace")
    where = caller.namespace(cache_salt) if namespace is None else namespace
    ended = context.cache.end_session(session_id, where)
    context.past_turns.forget(where, session_id)
    return {
        "id": session_id,
        "object": "session",
        "deleted": True,
        "num_released_tokens": ended.num_released_tokens,
        "num_kept_tokens": ended.num_kept_tokens,
    }

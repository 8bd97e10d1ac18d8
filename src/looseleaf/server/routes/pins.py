"""`/v1/pins`: make, list and undo pins."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request

from looseleaf.core.pin_record import Pin
from looseleaf.errors import RequestError, UnknownPin
from looseleaf.server.auth import Caller
from looseleaf.server.context import AdminCaller, AnyCaller, Context, ServerContext
from looseleaf.server.conversations import stable_prefix
from looseleaf.server.prompts import prompt_tokens
from looseleaf.server.routes.cache import known_request_id, warm
from looseleaf.server.schemas import PinBody

router = APIRouter(tags=["pins"])


@router.post("/v1/pins")
async def create_pin(request: Request, body: PinBody, context: Context, caller: AdminCaller) -> dict[str, Any]:
    """Promise that a prefix is not evicted. 409 with the numbers if the quota does not allow it."""
    options = body.model_dump(include={"level", "priority", "ttl_seconds", "refresh", "partial"})
    options["owner"] = body.owner or caller.name
    if body.request_id is not None:
        if body.sources:
            raise RequestError("give request_id or a prompt, not both")
        request_id = known_request_id(context, caller, body.request_id)
        return _answer(context, context.cache.pin(request_id=request_id, **options))
    tokens = await prompt_tokens(context.tokenizer, body, stable_prefix)
    namespace = caller.namespace(body.cache_salt)
    if body.wait:
        await warm(request, context, caller, f"warm-{uuid.uuid4().hex}", tokens, namespace)
    return _answer(context, context.cache.pin(tokens=tokens, namespace=namespace, **options))


@router.get("/v1/pins")
async def list_pins(context: Context, caller: AnyCaller) -> dict[str, Any]:
    """Live pins; a key with a namespace sees those in it."""
    return {"object": "list", "data": [_answer(context, pin) for pin in _visible_pins(context, caller)]}


@router.delete("/v1/pins/{pin_id}")
async def delete_pin(pin_id: str, context: Context, caller: AdminCaller) -> dict[str, Any]:
    """Undo one pin; 404 if it is unknown, undone or expired."""
    if pin_id not in [pin.id for pin in _visible_pins(context, caller)]:
        raise UnknownPin(repr(pin_id))
    return _undo(context, pin_id)


@router.delete("/v1/pins")
async def delete_pin_of_request(request_id: str, context: Context, caller: AdminCaller) -> dict[str, Any]:
    """Undo the latest pin that was made by this request id; 404 if there is none."""
    ids = (request_id, f"{request_id}-0")
    made = [pin for pin in _visible_pins(context, caller) if pin.request_id in ids]
    if not made:
        raise UnknownPin(f"of request {request_id!r}")
    return _undo(context, made[-1].id)


def _visible_pins(context: ServerContext, caller: Caller) -> list[Pin]:
    return [pin for pin in context.cache.pins() if caller.may_see(pin.namespace)]


def _undo(context: ServerContext, pin_id: str) -> dict[str, Any]:
    context.cache.unpin(pin_id)
    return {"id": pin_id, "object": "pin", "deleted": True}


def _answer(context: ServerContext, pin: Pin) -> dict[str, Any]:
    """A live pin. Times are Unix seconds; `expires_at` is null without a time to live."""
    return {
        "id": pin.id,
        "object": "pin",
        "owner": pin.owner,
        "level": pin.level,
        "num_tokens": pin.num_tokens,
        "num_pinned_tokens": pin.num_pinned_tokens,
        "created_at": context.unix_seconds(pin.created_at),
        "expires_at": None if pin.expires_at is None else context.unix_seconds(pin.expires_at),
    }

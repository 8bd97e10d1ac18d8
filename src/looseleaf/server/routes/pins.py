"""`/v1/pins`: make, list and undo pins."""

from __future__ import annotations

from fastapi import APIRouter, Request

from looseleaf.core.pins import Pin
from looseleaf.errors import RequestError, UnknownPin
from looseleaf.server.auth import Caller
from looseleaf.server.callers import AdminCaller, AnyCaller
from looseleaf.server.context import Context, ServerContext
from looseleaf.server.prompts import prompt_to_keep
from looseleaf.server.routes.requests import known_request_id
from looseleaf.server.schemas.cache import DeletedPin, PinAnswer, PinBody, PinList
from looseleaf.server.warming import warm

router = APIRouter(tags=["pins"])


@router.post("/v1/pins")
async def create_pin(request: Request, body: PinBody, context: Context, caller: AdminCaller) -> PinAnswer:
    """Promise that a prefix is not evicted. 409 with the numbers if the quota does not allow it."""
    owner = body.owner or caller.name
    if body.request_id is not None:
        if body.tokens is not None or body.text is not None or body.messages is not None:
            raise RequestError("give request_id or a prompt, not both")
        pin = context.cache.pin(
            request_id=known_request_id(context, caller, body.request_id),
            owner=owner,
            level=body.level,
            priority=body.priority,
            ttl_seconds=body.ttl_seconds,
            refresh=body.refresh,
            partial=body.partial,
        )
        return _answer(context, pin)
    tokens = await prompt_to_keep(context.tokenizer, body)
    namespace = caller.namespace(body.cache_salt)
    if body.wait:
        await warm(request, context, caller, tokens, namespace)
    pin = context.cache.pin(
        tokens=tokens,
        namespace=namespace,
        owner=owner,
        level=body.level,
        priority=body.priority,
        ttl_seconds=body.ttl_seconds,
        refresh=body.refresh,
        partial=body.partial,
    )
    return _answer(context, pin)


@router.get("/v1/pins")
async def list_pins(context: Context, caller: AnyCaller) -> PinList:
    """Live pins; a key with a namespace sees those in it."""
    return PinList(data=[_answer(context, pin) for pin in _visible_pins(context, caller)])


@router.delete("/v1/pins/{pin_id}")
async def delete_pin(pin_id: str, context: Context, caller: AdminCaller) -> DeletedPin:
    """Undo one pin; 404 if it is unknown, undone or expired."""
    if caller.key_namespace is not None and pin_id not in [pin.id for pin in _visible_pins(context, caller)]:
        raise UnknownPin(repr(pin_id))
    context.cache.unpin(pin_id)
    return DeletedPin(id=pin_id)


@router.delete("/v1/pins")
async def delete_pin_of_request(request_id: str, context: Context, caller: AdminCaller) -> DeletedPin:
    """Undo the latest pin that was made by this request id; 404 if there is none."""
    ids = (request_id, f"{request_id}-0")
    made = [pin for pin in _visible_pins(context, caller) if pin.request_id in ids]
    if not made:
        raise UnknownPin(f"of request {request_id!r}")
    context.cache.unpin(made[-1].id)
    return DeletedPin(id=made[-1].id)


def _visible_pins(context: ServerContext, caller: Caller) -> list[Pin]:
    return [pin for pin in context.cache.pins() if caller.may_see(pin.namespace)]


def _answer(context: ServerContext, pin: Pin) -> PinAnswer:
    return PinAnswer(
        id=pin.id,
        owner=pin.owner,
        level=pin.level,
        num_tokens=pin.num_tokens,
        num_pinned_tokens=pin.num_pinned_tokens,
        created_at=context.unix_seconds(pin.created_at),
        expires_at=None if pin.expires_at is None else context.unix_seconds(pin.expires_at),
    )

"""`/v1/pins`: make, list and undo pins, and what they may hold in all."""

from __future__ import annotations

import contextlib
import uuid
from dataclasses import asdict, replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from looseleaf.core.auto_pin_config import AutoPinConfig, AutoPinRule
from looseleaf.core.pin_record import Pin
from looseleaf.errors import RequestError, UnknownPin
from looseleaf.server.auth import Caller
from looseleaf.server.context import AdminCaller, AnyCaller, Context, ServerContext
from looseleaf.server.conversations import stable_prefix
from looseleaf.server.errors import ApiError
from looseleaf.server.layers import cut_layers
from looseleaf.server.prompts import PlacedPrompt, placed_prompt
from looseleaf.server.routes.cache import warm
from looseleaf.server.routes.explain import known_request_id
from looseleaf.server.schemas import AutoPinBody, AutoRuleBody, PinBody, QuotaBody

_TIMES = ("created_at", "expires_at", "last_used_at", "ended_at")

router = APIRouter(tags=["pins"])


@router.post("/v1/pins")
async def create_pin(
    request: Request, body: PinBody, context: Context, caller: AdminCaller, wait: bool = False
) -> dict[str, Any]:
    """Promise that a prefix is not evicted, now or as soon as it comes. `wait`, in the body or as `?wait=true`,
    computes it first. 409 with the numbers if the quota does not allow it."""
    options = body.model_dump(
        include={"level", "priority", "ttl_seconds", "max_ttl_seconds", "refresh", "partial", "labels"}
    )
    options["owner"] = body.owner or caller.name
    wait = wait or body.wait
    if body.request_id is not None:
        if body.sources or body.cache_salt is not None or body.cache_layers or wait:
            hint = "give request_id alone; to wait, give the prompt itself"
            raise RequestError("request_id stands for a prompt, its salt, and tokens that are computed already", hint)
        request_id = known_request_id(context, caller, body.request_id)
        pin = context.cache.pin(request_id=request_id, part=body.part, last_token=body.last_token, **options)
        return _answer(context, caller, pin)
    prompt = await placed_prompt(context, caller, body, stable_prefix)
    num_tokens = len(prompt.tokens)
    if body.last_token is not None and body.last_token > num_tokens:
        raise RequestError(f"last_token is {body.last_token}, but there are only {num_tokens} tokens to pin")
    place, num_tokens = prompt.placement, body.last_token or num_tokens
    place = replace(place, layers=cut_layers(place.layers, num_tokens))
    prompt = PlacedPrompt(prompt.tokens[:num_tokens], place)
    if wait:
        await warm(request, context, caller, f"warm-{uuid.uuid4().hex}", prompt)
    pin = context.cache.pin(prompt.tokens, namespace=place.namespace, layers=place.layers, **options)
    return _answer(context, caller, pin)


@router.get("/v1/pins")
async def list_pins(
    context: Context,
    caller: AnyCaller,
    owner: str | None = None,
    label: Annotated[list[str] | None, Query()] = None,
    past: bool = False,
) -> dict[str, Any]:
    """Live pins, oldest first; with `past` the last that ended or were refused. A key with a namespace sees those in
    it. `label` is `name:value`; of several all must fit."""
    if past:
        ended = [(one.pin, {"end": one.end, "ended_at": one.ended_at}) for one in context.cache.past_pins()]
    else:
        ended = [(pin, {}) for pin in context.cache.pins()]
    data = [
        _answer(context, caller, pin, **end)
        for pin, end in ended
        if caller.may_see(pin.namespace)
        and owner in (None, pin.owner)
        and {f"{name}:{value}" for name, value in pin.labels.items()}.issuperset(label or ())
    ]
    return {"object": "list", "data": data}


@router.get("/v1/pins/quota")
async def get_quota(context: Context, caller: AnyCaller) -> dict[str, Any]:
    """The share of all blocks that pins may hold, and what they hold of it. `namespaces`: those with a quota of their
    own that the caller may know of."""
    config, plan, stats = context.cache.config, context.cache.plan, context.cache.stats()
    return {
        "object": "pin_quota",
        "share": config.pin_quota,
        "num_blocks": stats.quota_blocks,
        "used": stats.pinned_blocks,
        "namespaces": {
            name: {
                "share": share,
                "num_blocks": plan.namespace_quotas[name],
                "used": context.cache.pinned_blocks_of(name),
            }
            for name, share in config.namespace_pin_quotas.items()
            if caller.may_know(name)
        },
    }


@router.put("/v1/pins/quota")
async def set_quota(body: QuotaBody, context: Context, caller: AdminCaller) -> dict[str, Any]:
    """Another share, in all or of one namespace; soft pins give way. 409 with the numbers if hard pins hold more."""
    if body.namespace is not None and body.cache_salt is not None:
        raise ApiError("give namespace or cache_salt, not both", code="invalid_value", param="namespace")
    namespace = body.namespace
    if namespace is None and not (body.cache_salt is None and caller.may_know_of_others):
        namespace = caller.namespace(body.cache_salt)
    if namespace is not None and not caller.may_see(namespace):
        message = f"{namespace!r} is not this key's namespace: this needs the admin key"
        raise ApiError(message, status=403, code="admin_key_required")
    context.cache.set_pin_quota(body.share, namespace)
    return await get_quota(context, caller)


@router.get("/v1/pins/auto")
async def get_auto_pins(context: Context, caller: AnyCaller) -> dict[str, Any]:
    """What is pinned automatically, what that gained and lost, and by which rules. Candidates and namespaces are those
    that the caller may know of."""
    settings = context.cache.config.auto_pin
    answer: dict[str, Any] = {"object": "auto_pin", "mode": "off", **asdict(context.cache.auto_pin_report())}
    answer["candidates"] = [one for one in answer["candidates"] if caller.may_know(one["namespace"])]
    if settings is not None:
        answer["mode"] = "dry-run" if settings.dry_run else "on"
        answer |= {**asdict(settings.rule), "rate_window_seconds": settings.rate_window_seconds}
        own = {name: rule and asdict(rule) for name, rule in settings.namespaces.items() if caller.may_know(name)}
        answer["namespaces"] = own
    return answer


@router.put("/v1/pins/auto")
async def set_auto_pins(body: AutoPinBody, context: Context, caller: AdminCaller) -> dict[str, Any]:
    """Pin automatically, only report what would be pinned, or stop; and by other rules."""
    if not caller.may_know_of_others:
        raise ApiError("the rules are everybody's: this needs the admin key", status=403, code="admin_key_required")
    settings = context.cache.config.auto_pin
    if settings is None and body.mode is None:
        raise ApiError("automatic pinning is off\nhint: give a mode", code="invalid_value", param="mode")
    settings = settings or AutoPinConfig()
    given = body.model_dump(exclude_unset=True)
    mode = given.pop("mode", None) or ("dry-run" if settings.dry_run else "on")
    if "namespaces" in given:
        given["namespaces"] = {name: rule and AutoPinRule(**rule) for name, rule in given["namespaces"].items()}
    rule = {name: given.pop(name) for name in AutoRuleBody.model_fields if name in given}
    settings = replace(settings, rule=replace(settings.rule, **rule), dry_run=mode == "dry-run", **given)
    context.cache.set_auto_pin(None if mode == "off" else settings)
    return await get_auto_pins(context, caller)


@router.get("/v1/pins/{pin_id}")
async def get_pin(pin_id: str, context: Context, caller: AnyCaller) -> dict[str, Any]:
    """One live pin; 404 if it is unknown, undone or expired."""
    return _answer(context, caller, _visible_pin(context, caller, pin_id))


@router.delete("/v1/pins/{pin_id}")
async def delete_pin(pin_id: str, context: Context, caller: AdminCaller) -> dict[str, Any]:
    """Undo one pin; 404 if it is unknown, undone or expired."""
    return _undo(context, _visible_pin(context, caller, pin_id).id)


@router.delete("/v1/pins")
async def delete_pins(
    context: Context, caller: AdminCaller, request_id: str | None = None, owner: str | None = None
) -> dict[str, Any]:
    """Undo the latest pin that was made by this request id (404 if there is none), or all pins of an owner that the
    caller sees: a list of those that are gone."""
    if (request_id is None) == (owner is None):
        raise ApiError("give exactly one of request_id and owner", code="invalid_value", param="request_id")
    visible = [pin for pin in context.cache.pins() if caller.may_see(pin.namespace)]
    if request_id is not None:
        made = [pin for pin in visible if pin.request_id in (request_id, f"{request_id}-0")]
        if not made:
            raise UnknownPin(f"of request {request_id!r}")
        return _undo(context, made[-1].id)
    undone = []
    for pin in visible:
        if pin.owner == owner:
            with contextlib.suppress(UnknownPin):  # somebody else was faster
                undone.append(_undo(context, pin.id))
    return {"object": "list", "data": undone}


def _visible_pin(context: ServerContext, caller: Caller, pin_id: str) -> Pin:
    pin = context.cache.find_pin(pin_id)
    if pin is None or not caller.may_see(pin.namespace):
        raise UnknownPin(repr(pin_id))
    return pin


def _undo(context: ServerContext, pin_id: str) -> dict[str, Any]:
    context.cache.unpin(pin_id)
    return {"id": pin_id, "object": "pin", "deleted": True}


def _answer(context: ServerContext, caller: Caller, pin: Pin, **end: Any) -> dict[str, Any]:
    """A pin, with its `end` if it has one: the fields of `Pin`; without `namespace` if that is a secret. Times are Unix
    seconds, or null: no time to live, not used yet."""
    answer = {"id": pin.id, "object": "pin", **vars(pin), **end, "labels": dict(pin.labels)}
    for name in _TIMES:
        if answer.get(name) is not None:
            answer[name] = context.unix_seconds(answer[name])
    if not caller.may_know(pin.namespace):
        del answer["namespace"]
    return answer

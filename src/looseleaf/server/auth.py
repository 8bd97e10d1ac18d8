"""Who calls: API keys with a namespace each, an admin key, or nobody in particular."""

from __future__ import annotations

import hmac
from collections import OrderedDict
from dataclasses import dataclass

from looseleaf.server.errors import ApiError
from looseleaf.server.namespaces import belongs_to_key, combine_namespace
from looseleaf.server.settings import ServerSettings

_MAX_REMEMBERED_REQUESTS = 20_000


@dataclass(frozen=True)
class Caller:
    """Who sent a request. `key_namespace` is None for the admin and where no keys are in use."""

    name: str
    key_namespace: str | None
    is_admin: bool

    @property
    def may_know_of_others(self) -> bool:
        """True if the caller may learn what other namespaces hold."""
        return self.is_admin and self.key_namespace is None

    def namespace(self, cache_salt: str | None) -> str:
        """The cache namespace of a request with this salt: the key's own comes first, the salt divides it
        further."""
        return combine_namespace(key=self.key_namespace, salt=cache_salt)

    def may_see(self, namespace: str) -> bool:
        """True if what lives in `namespace` is the caller's business."""
        return self.key_namespace is None or belongs_to_key(namespace, self.key_namespace)


class RequestDirectory:
    """Which caller made which request, so that no client reads or pins another's. Remembers the last 20,000.

    Used from the event loop only.
    """

    def __init__(self) -> None:
        self._key_of_request: OrderedDict[str, str | None] = OrderedDict()

    def record(self, request_id: str, caller: Caller) -> None:
        """Note that `caller` made `request_id`."""
        self._key_of_request[request_id] = caller.key_namespace
        self._key_of_request.move_to_end(request_id)
        if len(self._key_of_request) > _MAX_REMEMBERED_REQUESTS:
            self._key_of_request.popitem(last=False)

    def may_see(self, request_id: str, caller: Caller) -> bool:
        """True for callers without a namespace of their own (no keys in use, or the admin), and for the
        request's maker."""
        if caller.key_namespace is None:
            return True
        return self._key_of_request.get(request_id) == caller.key_namespace


def identify(authorization: str | None, settings: ServerSettings) -> Caller:
    """The caller behind an `Authorization` header.

    Raises:
        ApiError: 401, if keys are in use and this is none of them.
    """
    scheme, _, token = (authorization or "").partition(" ")
    secret = token.strip().encode() if scheme.lower() == "bearer" else b""
    if settings.admin_key is not None and hmac.compare_digest(secret, settings.admin_key.encode()):
        return Caller(name="admin", key_namespace=None, is_admin=True)
    for key in settings.api_keys:
        if hmac.compare_digest(secret, key.secret.encode()):
            return Caller(name=key.name, key_namespace=key.namespace, is_admin=settings.admin_key is None)
    if settings.api_keys:
        what = "an API key is needed" if not secret else "this API key is not known"
        raise ApiError(
            f"{what}\nhint: send `Authorization: Bearer KEY`",
            status=401,
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return Caller(name="anonymous", key_namespace=None, is_admin=settings.admin_key is None)


def refuse_unless_admin(caller: Caller) -> None:
    """Guard of routes that change what the cache keeps.

    Raises:
        ApiError: 403, if an admin key is set and the caller does not have it.
    """
    if not caller.is_admin:
        raise ApiError(
            "this route needs the admin key\nhint: send `Authorization: Bearer ADMIN_KEY`",
            status=403,
            code="admin_key_required",
        )

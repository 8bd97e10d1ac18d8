"""Who calls: API keys with a namespace each, an admin key, or nobody in particular; and who shares what."""

from __future__ import annotations

import hmac
import re
from collections import OrderedDict
from dataclasses import dataclass

from looseleaf.core.namespaces import account_of, namespace_of
from looseleaf.server.errors import ApiError
from looseleaf.server.past_turns import Drift
from looseleaf.server.settings import ServerSettings
from looseleaf.telemetry.namespace_labels import hidden_name

_MAX_REMEMBERED_REQUESTS = 20_000
_PART = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


def shown_name(namespace: str) -> str:
    """What anybody may be told of a namespace: its parts as they are, but of a salt, which opens it, a digest only."""
    parts = _PART.findall(namespace)
    shown = (f"{label}#{hidden_name(value)}" if label == "salt" else f"{label}={value}" for label, value in parts)
    return "/".join(shown) or hidden_name(namespace)


@dataclass(frozen=True)
class Caller:
    """Who sent a request. `key_namespace` is None for the admin and where no keys are in use. `model_revision`: of what
    is served, if namespaces tell it."""

    name: str
    key_namespace: str | None
    is_admin: bool
    model_revision: str | None = None

    @property
    def may_know_of_others(self) -> bool:
        """True if the caller may learn what other namespaces hold."""
        return self.is_admin and self.key_namespace is None

    def namespace(self, cache_salt: str | None) -> str:
        """The cache namespace of a request: the key's own comes first, the salt divides it further."""
        return namespace_of(tenant=self.key_namespace, model_revision=self.model_revision, salt=cache_salt)

    def shared_namespace(self, salt: str | None) -> str:
        """The namespace of a salt that all keys share: the one that it has without a key."""
        return namespace_of(model_revision=self.model_revision, salt=salt)

    def may_see(self, namespace: str) -> bool:
        """True if what lives in `namespace` is the caller's business."""
        return self.key_namespace is None or account_of(namespace) == namespace_of(tenant=self.key_namespace)

    def may_know(self, namespace: str) -> bool:
        """True if the caller may be told the name of `namespace`, which holds the salt that opens it."""
        return self.may_see(namespace) and (self.is_admin or self.key_namespace is not None)


@dataclass(frozen=True)
class RequestNote:
    """What is noted of a request: the namespace of its maker's key, how it drifted from an earlier one, and how many of
    its first tokens lie in layers that are not its maker's alone."""

    key_namespace: str | None
    drift: Drift | None = None
    num_foreign_tokens: int = 0


class RequestDirectory:
    """Which key made which request, so that no client reads or pins another's. Remembers the last 20,000. Used from the
    event loop only."""

    def __init__(self) -> None:
        self._notes: OrderedDict[str, RequestNote] = OrderedDict()

    def record(self, request_id: str, caller: Caller, drift: Drift | None = None, num_foreign_tokens: int = 0) -> None:
        """Note that `caller` made `request_id`; the rest as in `RequestNote`."""
        self._notes[request_id] = RequestNote(caller.key_namespace, drift, num_foreign_tokens)
        self._notes.move_to_end(request_id)
        if len(self._notes) > _MAX_REMEMBERED_REQUESTS:
            self._notes.popitem(last=False)

    def may_see(self, request_id: str, caller: Caller) -> bool:
        """True for callers without a namespace of their own, and for the request's maker."""
        if caller.key_namespace is None:
            return True
        note = self._notes.get(request_id)
        return note is not None and note.key_namespace == caller.key_namespace

    def note_of(self, request_id: str) -> RequestNote:
        """What is noted of a request; an empty note if nothing is."""
        return self._notes.get(request_id, RequestNote(None))


def identify(authorization: str | None, settings: ServerSettings) -> Caller:
    """The caller behind an `Authorization` header.

    Raises:
        ApiError: 401, if keys are in use and this is none of them.
    """
    scheme, _, token = (authorization or "").partition(" ")
    secret = token.strip().encode() if scheme.lower() == "bearer" else b""
    revision = settings.model_revision
    if settings.admin_key is not None and hmac.compare_digest(secret, settings.admin_key.encode()):
        return Caller("admin", None, True, revision)
    for key in settings.api_keys:
        if hmac.compare_digest(secret, key.secret.encode()):
            return Caller(key.name, key.namespace, settings.admin_key is None, revision)
    if settings.api_keys:
        what = "this API key is not known" if secret else "an API key is needed"
        message = f"{what}\nhint: send `Authorization: Bearer KEY`"
        raise ApiError(message, status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
    return Caller("anonymous", None, settings.admin_key is None, revision)

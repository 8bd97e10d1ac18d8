"""Layered salts: a beginning of the prompt that others share, then a part of one's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from looseleaf.core.namespaces import NamespaceLayer
from looseleaf.ids import Namespace
from looseleaf.server.auth import Caller
from looseleaf.server.errors import ApiError
from looseleaf.server.schemas import CacheLayer
from looseleaf.server.settings import ServerSettings

Layers = tuple[NamespaceLayer, ...]


@dataclass(frozen=True)
class Placement:
    """Where the tokens of a request belong: a namespace, behind layers in others; and to which session."""

    namespace: Namespace
    layers: Layers = ()
    session: str | None = None


def layers_of(
    asked: Sequence[CacheLayer] | None,
    caller: Caller,
    settings: ServerSettings,
    num_tokens_of_messages: Callable[[int], int] | None = None,
) -> Layers:
    """Layers as a body asks for them, shortest first. `num_tokens_of_messages`: how many tokens the first so many
    messages have in common with every request that begins with them; None where the prompt is no conversation. Layers
    of messages that have none, or no more than the one before, are left out.

    Raises:
        ApiError: 400, messages of a prompt that has none, or more messages than there are.
    """
    layers: list[NamespaceLayer] = []
    for number, layer in enumerate(asked or ()):
        num_tokens = layer.num_tokens
        if layer.num_messages is not None:
            if num_tokens_of_messages is None:
                message = f"cache_layers.{number}: this prompt has no messages: give num_tokens"
                raise ApiError(message, code="invalid_value", param="cache_layers")
            num_tokens = num_tokens_of_messages(layer.num_messages)
            if num_tokens <= (layers[-1].num_tokens if layers else 0):
                continue
        layers.append(NamespaceLayer(_namespace_of(layer.salt, caller, settings), num_tokens or 0))
    return tuple(layers)


def cut_layers(layers: Layers, num_tokens: int) -> Layers:
    """Those of a prompt's layers that its first `num_tokens` tokens have."""
    cut: list[NamespaceLayer] = []
    for layer in layers:
        if cut and cut[-1].num_tokens == num_tokens:
            break
        cut.append(NamespaceLayer(layer.namespace, min(layer.num_tokens, num_tokens)))
    return tuple(cut)


def num_foreign_tokens(layers: Layers, caller: Caller) -> int:
    """Tokens up to the end of the last layer whose namespace is not the caller's alone."""
    return max((layer.num_tokens for layer in layers if not caller.may_see(layer.namespace)), default=0)


def _namespace_of(salt: str | None, caller: Caller, settings: ServerSettings) -> str:
    """A layer's namespace: within the caller's own, but for the salts that all keys may use."""
    return caller.shared_namespace(salt) if salt in settings.shared_salts else caller.namespace(salt)

"""Namespaces: who shares with whom. Their names, and prompts whose beginnings lie in other namespaces than the rest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from looseleaf.errors import RequestError
from looseleaf.ids import Namespace

_DECODER = json.JSONDecoder()


def namespace_of(
    *, tenant: str | None = None, adapter: str | None = None, model_revision: str | None = None, salt: str | None = None
) -> Namespace:
    """The namespace of what only requests that agree in all four may share; without any the default one, "".

    Each part carries its type and is quoted as JSON, so that no two combinations coincide: tenant "x" and salt "x"
    differ, as do ("a", "bc") and ("ab", "c"). A part that is absent (None) differs from an empty one. `adapter` and
    `model_revision` must name content (`fingerprint`), not a name under which other weights may be loaded tomorrow.

    Raises:
        RequestError: a part is no string.
    """
    parts = {"tenant": tenant, "adapter": adapter, "model_revision": model_revision, "salt": salt}
    for label, value in parts.items():
        if value is not None and not isinstance(value, str):
            raise RequestError(f"{label} is {value!r}; it must be a string, or None for no such part")
    return "/".join(f"{label}={json.dumps(value)}" for label, value in parts.items() if value is not None)


def account_of(namespace: Namespace) -> Namespace:
    """The namespace to which memory of `namespace` counts: that of its tenant, whatever else divides it; itself if it
    has none."""
    label = "tenant="
    if not namespace.startswith(label + '"'):
        return namespace
    try:
        _, end = _DECODER.raw_decode(namespace, len(label))
    except json.JSONDecodeError:
        return namespace
    return namespace[:end] if namespace[end : end + 1] in ("", "/") else namespace


def fingerprint(chunks: Iterable[bytes]) -> str:
    """The name of weights by what they are: 32 hex digits of BLAKE2b over `chunks` and where each ends."""
    digest = hashlib.blake2b(digest_size=16)
    for chunk in chunks:
        digest.update(len(chunk).to_bytes(8, "little"))
        digest.update(chunk)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class NamespaceLayer:
    """The beginning of a prompt, up to its first `num_tokens` tokens (cut to whole blocks), lies in `namespace`, as far
    as no earlier layer has it. Who may declare what is the caller's to decide."""

    namespace: Namespace
    num_tokens: int

    def __post_init__(self) -> None:
        """RequestError for a value that can't be."""
        if not isinstance(self.namespace, str):
            raise RequestError(f"a layer's namespace is {self.namespace!r}; it must be a string")
        if not isinstance(self.num_tokens, int) or isinstance(self.num_tokens, bool) or self.num_tokens < 1:
            raise RequestError(f"a layer's num_tokens is {self.num_tokens!r}; it must be a number of tokens >= 1")


@dataclass(frozen=True, slots=True)
class Border:
    """From logical block `first_block` on, at least 1, a prompt's blocks belong to `namespace`."""

    first_block: int
    namespace: Namespace


@dataclass(frozen=True, slots=True)
class Tenancy:
    """In which namespaces the blocks of a prompt are stored.

        root               borders[0].namespace    namespace
        0 ............... borders[0].first_block ............ borders[-1].first_block .......

    `namespace`: the request's own, in which all lies that no layer has; `layers`: as they were declared. Two tenancies
    are equal if the same blocks lie in the same namespaces.
    """

    namespace: Namespace = field(compare=False)
    root: Namespace
    borders: tuple[Border, ...] = ()
    layers: tuple[NamespaceLayer, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, namespace: Namespace, layers: Sequence[NamespaceLayer], num_tokens: int, block_tokens: int) -> Tenancy:
        """The tenancy of a prompt of `num_tokens` tokens.

        Raises:
            RequestError: a namespace that is no string; layers that are no `NamespaceLayer`s, not each longer than the
            one before, longer than the prompt, or name a namespace twice.
        """
        if not isinstance(namespace, str):
            raise RequestError(f"namespace is {namespace!r}; it must be a string", "namespace_of() makes one")
        if not layers:
            return cls(namespace, namespace)
        _check_layers(namespace, layers, num_tokens)
        starts: list[Border] = []
        at = 0
        for layer in (*layers, None):
            owner = namespace if layer is None else layer.namespace
            end = num_tokens if layer is None else layer.num_tokens // block_tokens
            if (layer is None or end > at) and not (starts and starts[-1].namespace == owner):
                starts.append(Border(at, owner))
            at = max(at, end)
        return cls(namespace, starts[0].namespace, tuple(starts[1:]), tuple(layers))

    @property
    def namespaces(self) -> tuple[Namespace, ...]:
        """All of them, from the prompt's begin on, each once."""
        return (self.root, *(border.namespace for border in self.borders))

    def at(self, block: int) -> Namespace:
        """The namespace of a logical block."""
        owner = self.root
        for border in self.borders:
            if border.first_block <= block:
                owner = border.namespace
        return owner

    def up_to(self, num_blocks: int) -> Tenancy:
        """That of the first `num_blocks` blocks alone."""
        borders = tuple(border for border in self.borders if border.first_block < num_blocks)
        return self if len(borders) == len(self.borders) else Tenancy(self.namespace, self.root, borders, self.layers)


def _check_layers(namespace: Namespace, layers: Sequence[NamespaceLayer], num_tokens: int) -> None:
    seen: set[Namespace] = set()
    before = 0
    for number, layer in enumerate(layers):
        name = f"layers[{number}]"
        if not isinstance(layer, NamespaceLayer):
            raise RequestError(f"{name} is {layer!r}; it must be a NamespaceLayer")
        if layer.num_tokens <= before:
            raise RequestError(
                f"{name} ends after {layer.num_tokens} tokens, the one before it after {before}",
                "num_tokens counts from the prompt's begin: each layer ends behind the one before",
            )
        if layer.num_tokens > num_tokens:
            raise RequestError(
                f"{name} covers {layer.num_tokens} tokens of a prompt of {num_tokens}", "cut it to the prompt's length"
            )
        is_last = number == len(layers) - 1
        if layer.namespace in seen or (layer.namespace == namespace and not is_last):
            raise RequestError(
                f"{name} names namespace {layer.namespace!r} a second time",
                "one namespace has one part of a prompt: leave out what lies between, or give it another name",
            )
        seen.add(layer.namespace)
        before = layer.num_tokens

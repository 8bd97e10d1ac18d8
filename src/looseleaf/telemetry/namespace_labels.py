"""Which namespaces have series of their own: few, and without the secrets that their names may hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

MAX_NAMESPACES = 20
"""With series of their own; all others are "other". Counters never go back, so a name once given stays."""

MIN_SHARE = 0.01
"""Of all tokens looked up so far, for a series of its own."""

OTHER = "other"
_MAX_WAITING = 1000


def hidden_name(namespace: str) -> str:
    """`default` for the default namespace, else a digest: the same namespace always has the same."""
    return blake2b(namespace.encode(), digest_size=4).hexdigest() if namespace else "default"


class NamespaceLabels:
    """Gives each namespace its label. Used from one thread."""

    def __init__(self, name_of: Callable[[str], str]) -> None:
        self._name_of = name_of
        self._labels: dict[str, str] = {}
        self._waiting: OrderedDict[str, int] = OrderedDict()
        self._num_tokens = 0

    def label(self, namespace: str, num_tokens: int) -> str:
        """The label under which to count `num_tokens` more tokens of a namespace."""
        self._num_tokens += num_tokens
        known = self._labels.get(namespace)
        if known is not None:
            return known
        if len(self._labels) >= MAX_NAMESPACES:
            return OTHER
        waited = self._waiting.pop(namespace, 0) + num_tokens
        if waited >= MIN_SHARE * self._num_tokens:
            return self._labels.setdefault(namespace, self._name_of(namespace))
        self._waiting[namespace] = waited
        if len(self._waiting) > _MAX_WAITING:
            self._waiting.popitem(last=False)
        return OTHER

"""One namespace from what a request says about itself: typed parts, joined so that no two combinations
coincide."""

from __future__ import annotations

import json


def combine_namespace(*, key: str | None = None, salt: str | None = None) -> str:
    """The namespace of a client's key and of the salt in the body.

    Each part carries its type and is quoted as JSON, so key "x" and salt "x" differ, as do ("a", "bc") and
    ("ab", "c"). A part that is absent (None) differs from an empty one. Without parts it is the default
    namespace "".
    """
    parts = [f"{label}={json.dumps(value)}" for label, value in (("key", key), ("salt", salt)) if value is not None]
    return "/".join(parts)


def belongs_to_key(namespace: str, key: str) -> bool:
    """True if `namespace` is that of `key` or a division of it by a salt."""
    own = combine_namespace(key=key)
    return namespace == own or namespace.startswith(own + "/")

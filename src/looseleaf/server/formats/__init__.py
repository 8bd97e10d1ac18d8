"""How answers look on the wire: one class per door, plain dicts out."""

from __future__ import annotations

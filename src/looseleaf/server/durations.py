"""How long a request wants its prompt kept: "24h", "5m", "90s", "in_memory", or seconds."""

from __future__ import annotations

import math
import re

from looseleaf.server.errors import ApiError

IN_MEMORY_SECONDS = 300.0
_SECONDS_OF_UNIT = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def parse_duration(value: str | float, *, param: str) -> float:
    """Seconds, above 0. "in_memory" is five minutes.

    Raises:
        ApiError: 400, it is no duration; the message names `param`.
    """
    seconds = 0.0
    if isinstance(value, str):
        if value in ("in_memory", "in-memory"):
            return IN_MEMORY_SECONDS
        found = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([smhd]?)\s*", value)
        if found is not None:
            seconds = float(found[1]) * _SECONDS_OF_UNIT[found[2]]
    else:
        seconds = float(value)
    if not (math.isfinite(seconds) and seconds > 0):
        message = f'{param} is {value!r}; it must be a duration such as "24h", "5m", 90 (seconds) or "in_memory"'
        raise ApiError(message, code="invalid_value", param=param)
    return seconds

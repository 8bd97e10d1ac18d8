"""Capacities as people write them: `5%` of a trace's unique blocks, `388blocks`, `2GiB`."""

from __future__ import annotations

import math
import re

from looseleaf.errors import ConfigError

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `512MiB`, `2GB` or `1000`.

    Raises:
        ConfigError: not a positive size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = found.group(2).upper() if found else ""
    if found is None or (unit or "B") not in _UNITS:
        raise ConfigError(f"{text!r} is not a size in bytes", "write 512MiB, 2GiB, 800MB or a number of bytes")
    size = int(float(found.group(1)) * _UNITS[unit or "B"])
    if size < 1:
        raise ConfigError(f"{text!r} is less than one byte")
    return size


def capacity_blocks(text: str, num_unique_blocks: int, block_bytes: int | None) -> int:
    """Blocks of a capacity. A share of the unique blocks rounds up, bytes round down.

    Args:
        text: `5%`, `388blocks`, or a size in bytes.
        num_unique_blocks: what 100% means.
        block_bytes: bytes of one block, None if they are not known.

    Raises:
        ConfigError: not a capacity, less than one block, or bytes without `block_bytes`.
    """
    share = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    blocks = re.fullmatch(r"\s*(\d+)\s*blocks?\s*", text)
    if share:
        num_blocks = math.ceil(num_unique_blocks * float(share.group(1)) / 100)
    elif blocks:
        num_blocks = int(blocks.group(1))
    elif block_bytes is None:
        raise ConfigError(
            f"{text!r} can't be turned into blocks without the bytes of a token",
            "give --bytes-per-token, or write the capacity as 5% or 388blocks",
        )
    else:
        num_blocks = parse_bytes(text) // block_bytes
    if num_blocks < 1:
        raise ConfigError(f"a capacity of {text!r} is less than one block")
    return num_blocks

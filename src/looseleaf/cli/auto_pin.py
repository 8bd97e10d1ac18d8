"""Options of automatic pinning, the same for `serve` and `replay`."""

from __future__ import annotations

import contextlib
import math
from typing import Annotated

import typer

from looseleaf.core.auto_pin_config import AutoPinConfig, AutoPinRule
from looseleaf.errors import ConfigError

RULE = AutoPinRule()
AutoPinOption = Annotated[
    str,
    typer.Option("--auto-pin", help="Pin by itself what is worth its memory: on, off, or dry-run (only report it)."),
]
MinTokensOption = Annotated[
    str,
    typer.Option("--auto-pin-min-tokens", help="Prefixes of more tokens may be pinned by themselves; off for no such."),
]
MinRateOption = Annotated[
    str, typer.Option("--auto-pin-min-rate", help="So may those asked for by more requests a second; off for no such.")
]


def auto_pin_config(mode: str, min_tokens: str, min_rate: str) -> AutoPinConfig | None:
    """Automatic pinning as these options say; None if it is off.

    Raises:
        ConfigError: an option that cannot be.
    """
    tokens, rate = number_or_off("--auto-pin-min-tokens", min_tokens), number_or_off("--auto-pin-min-rate", min_rate)
    rule = AutoPinRule(None if tokens is None else int(tokens), rate)
    if mode not in ("on", "off", "dry-run"):
        raise ConfigError(f"--auto-pin is {mode!r}; it must be on, off or dry-run")
    return None if mode == "off" else AutoPinConfig(rule, dry_run=mode == "dry-run")


def number_or_off(option: str, text: str) -> float | None:
    """The number that an option gives, None for "off".

    Raises:
        ConfigError: it is neither; the message names `option`.
    """
    if text == "off":
        return None
    with contextlib.suppress(ValueError):
        if math.isfinite(number := float(text)):
            return number
    raise ConfigError(f"{option} is {text!r}; it must be a number, or off")

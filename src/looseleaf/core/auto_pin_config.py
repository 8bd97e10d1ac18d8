"""Settings of automatic pinning."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from looseleaf.core.settings import strict_settings
from looseleaf.errors import ConfigError
from looseleaf.ids import Namespace


@strict_settings
@dataclass(frozen=True)
class AutoPinRule:
    """Which prefixes may be pinned: those longer than `min_tokens` tokens, or asked for more often than
    `min_requests_per_second`. None switches one of the rules off."""

    min_tokens: int | None = 1024
    min_requests_per_second: float | None = 100.0

    def __post_init__(self) -> None:
        """ConfigError for a value that can't be."""
        for name in ("min_tokens", "min_requests_per_second"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and value >= 0):
                raise ConfigError(f"{name} is {value!r}; it must be a number >= 0, or None for no such rule")


@strict_settings
@dataclass(frozen=True)
class AutoPinConfig:
    """Automatic pinning. `rule` holds everywhere but in `namespaces` with a rule of their own (None: nothing is pinned
    there). `rate_window_seconds`: time over which request rates are taken. `dry_run`: only report what would have been
    pinned."""

    rule: AutoPinRule = AutoPinRule()
    namespaces: Mapping[Namespace, AutoPinRule | None] = field(default_factory=dict)
    rate_window_seconds: float = 1.0
    dry_run: bool = False

    def __post_init__(self) -> None:
        """ConfigError for a value that can't be."""
        rules = [self.rule, *(rule for rule in self.namespaces.values() if rule is not None)]
        if not all(isinstance(rule, AutoPinRule) for rule in rules):
            raise ConfigError(f"rule and namespaces are {rules!r}; each must be an AutoPinRule")
        if not (isinstance(self.rate_window_seconds, (int, float)) and 0 < self.rate_window_seconds < math.inf):
            raise ConfigError(f"rate_window_seconds is {self.rate_window_seconds!r}; it must be a positive number")

    def rule_of(self, namespace: Namespace) -> AutoPinRule | None:
        """The rule that holds in a namespace."""
        return self.namespaces.get(namespace, self.rule)

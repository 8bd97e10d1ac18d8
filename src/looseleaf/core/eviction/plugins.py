"""Policies by name: those built in, and those that installed packages offer under an entry point."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence

from looseleaf.core.eviction.policy import PolicyFactory
from looseleaf.errors import ConfigError

ENTRY_POINT_GROUP = "looseleaf.eviction_policies"
"""A package offers a policy by an entry point of this group: its name is the policy's, its object the factory."""


class PolicyRegistry(Mapping[str, PolicyFactory]):
    """Built-in policies first, then plug-ins by name. A plug-in is imported when it is asked for, and never takes the
    name of a policy that is built in."""

    def __init__(self, built_in: Mapping[str, PolicyFactory]) -> None:
        self.built_in = built_in

    def __getitem__(self, name: str) -> PolicyFactory:
        """The factory of a policy.

        Raises:
            KeyError: no policy has this name.
            ConfigError: a plug-in can't be used: it is offered twice, can't be imported, or is no factory.
        """
        return self.built_in[name] if name in self.built_in else _load(name, _plugins()[name])

    def __iter__(self) -> Iterator[str]:
        """Names; imports no plug-in."""
        yield from self.built_in
        yield from (name for name in _plugins() if name not in self.built_in)

    def __len__(self) -> int:
        """How many names."""
        return sum(1 for _ in self)


@functools.cache
def _plugins() -> Mapping[str, Sequence[importlib.metadata.EntryPoint]]:
    """Entry points of the group by name, read once per process."""
    found: dict[str, list[importlib.metadata.EntryPoint]] = {}
    for point in sorted(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
        same_name = found.setdefault(point.name, [])
        if point not in same_name:  # one package may be found on two paths
            same_name.append(point)
    return found


def _load(name: str, points: Sequence[importlib.metadata.EntryPoint]) -> PolicyFactory:
    if len(points) > 1:
        offered = " and ".join(sorted(point.value for point in points))
        raise ConfigError(f"the eviction policy {name!r} is offered by {offered}", "uninstall one of these plug-ins")
    value = points[0].value
    try:
        factory = points[0].load()
    except Exception as error:  # whatever a foreign module does when it is imported
        facts = f"the eviction policy {name!r} is a plug-in, {value}, that cannot be loaded: "
        raise ConfigError(facts + f"{type(error).__name__}: {error}", "repair or uninstall it") from error
    if not callable(factory):
        facts = f"the eviction policy {name!r} is a plug-in, {value}, that is {type(factory).__name__}, not a factory"
        raise ConfigError(facts, "an entry point must name a policy's class, or a function that makes one")
    policy: PolicyFactory = factory
    return policy

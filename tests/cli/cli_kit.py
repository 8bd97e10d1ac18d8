"""The command line in process, and a whole server over a fake model behind a real socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from typer.testing import Result

from looseleaf.cli.build import LoadedModel, MemorySettings, Stack, build_stack
from looseleaf.cli.serving import BackgroundServer
from looseleaf.engine.config import EngineConfig
from looseleaf.server import ServerSettings

MEMORY = MemorySettings(num_pages=8, page_tokens=64, block_tokens=16, pin_quota=0.5)
LETTERS = tuple(range(ord("a"), ord("z") + 1))

RunCli = Callable[..., Result]


@dataclass(frozen=True)
class Running:
    """A server that runs: where, and what is inside."""

    url: str
    stack: Stack


@contextmanager
def running(model: LoadedModel, settings: ServerSettings | None = None) -> Iterator[Running]:
    """Serve `model` behind a real socket."""
    stack = build_stack(model, MEMORY, EngineConfig(), settings)
    with BackgroundServer(stack.app) as server:
        yield Running(server.url, stack)

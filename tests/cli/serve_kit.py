"""The `serve` command in a process of its own, over a fake model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"

# The real command over a fake model: what needs torch is replaced, so that it starts at once.
PROGRAM = """
import signal
import sys
import time
import types
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs in the background
for name in ("demo_model", "runner", "tokenizer"):
    stub = sys.modules["looseleaf.hf." + name] = types.ModuleType("looseleaf.hf." + name)
    for attribute in ("DEMO_MODEL_NAME", "Progress", "demo_model_dir", "quiet_transformers", "HFRunner", "HFTokenizer"):
        setattr(stub, attribute, None)
import looseleaf.cli.build as build
from looseleaf.cli.main import app
from looseleaf.core.config import LayerGroup
from looseleaf.testing.fake_runner import FakeRunner
from looseleaf.testing.fake_tokenizer import FakeTokenizer

def load_model(model, memory, progress):
    progress("loading", 0.5)
    print("loading", file=sys.stderr, flush=True)
    time.sleep({loading})
    num_blocks = memory.kv_bytes // 8 // memory.block_tokens
    letters = tuple(range(ord("a"), ord("z") + 1))
    runner = FakeRunner(num_blocks, memory.block_tokens, delay_seconds={delay}, alphabet=letters, groups={groups})
    closed = lambda: print("closed", flush=True)
    return build.LoadedModel("fake", runner, FakeTokenizer(), num_blocks, 8 * memory.block_tokens, closed)

build.load_model = load_model
assert "torch" not in sys.modules
app()
"""


@contextmanager
def serving(
    *options: str, delay: float = 0.0, loading: float = 0.0, groups: str = "(LayerGroup(),)"
) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own; killed at the end if it still runs."""
    command = [
        sys.executable,
        "-c",
        PROGRAM.format(delay=delay, loading=loading, groups=groups),
        "serve",
        "--port",
        "0",
        "--kv-memory",
        "64KiB",
        *options,
    ]
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    watchdog = threading.Timer(60.0, process.kill)
    watchdog.start()
    try:
        yield process
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def read_json(process: subprocess.Popen[str]) -> dict[str, object]:
    """The JSON document that the command prints when it is ready."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if line == "}\n":
            return dict(json.loads("".join(lines)))
    raise AssertionError(f"it ended: {process.stderr.read() if process.stderr else ''}")

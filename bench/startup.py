"""From the start of the process to the first answer: `looseleaf serve` on the demo model, and where the time goes.

    python bench/startup.py [--repeats 3] [--model FOLDER] [--output FILE]

*Cold* is a first start with empty caches of compiled code (Python's, torch's and numba's are led to an empty folder);
*warm* is every later one. What the operating system has read before stays in its page cache either way: dropping it
takes an administrator. Parts: `imports` (until the command has imported what it needs), `model` (tokenizer, weights),
`memory and survey`, `self-test`, `serving` (cache, engine, app, until the socket answers), `first answer` (the first
request, one token). `rest` is what lies between them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, cast

from looseleaf.cli.machine import provenance

PARTS = ("imports", "model", "memory and survey", "self-test", "serving", "first answer", "rest")

CHILD = """
import json, sys, time
began = float(sys.argv.pop(1))
marks = {"process": time.time()}
from looseleaf.cli.main import app
import looseleaf.cli.build as build
import looseleaf.cli.serving
import looseleaf.hf.runner as runner
marks["imports"] = time.time()

def timed(owner, name, mark):
    inner = getattr(owner, name)
    def call(*args, **kwargs):
        start = time.time()
        try:
            return inner(*args, **kwargs)
        finally:
            spent[mark] = spent.get(mark, 0.0) + time.time() - start
    setattr(owner, name, call)

spent = {}
timed(build.HFTokenizer, "load", "model")
timed(runner, "load_model", "model")
timed(runner, "check_against_own_forward", "self-test")
timed(build, "load_model", "load in all")
import looseleaf.cli.serve as serve
shown = serve.print_json
def print_json(facts):
    marks["ready"] = time.time()
    shown({**facts, "marks": marks, "spent": spent})
serve.print_json = print_json
app()
"""


def start(model: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Seconds of each part of one start."""
    began = time.time()
    command = [sys.executable, "-c", CHILD, str(began), "serve", *model, "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        facts = _facts(process)
        body = json.dumps({"prompt": "The harbour at dawn", "max_tokens": 1, "temperature": 0}).encode()
        asked = time.time()
        request = urllib.request.Request(f"{facts['url']}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            answer.read()
        ended = time.time()
    finally:
        process.terminate()
        process.wait(60)
    marks, spent = facts["marks"], facts["spent"]
    parts = {
        "imports": marks["imports"] - began,
        "model": spent["model"],
        "memory and survey": spent["load in all"] - spent["model"] - spent.get("self-test", 0.0),
        "self-test": spent.get("self-test", 0.0),
        "serving": marks["ready"] - marks["imports"] - spent["load in all"],
        "first answer": ended - asked,
    }
    return {**parts, "rest": ended - began - sum(parts.values()), "in all": ended - began}


def _facts(process: subprocess.Popen[str]) -> dict[str, Any]:
    text = ""
    for line in cast(Any, process.stdout):
        text += line
        if line == "}\n":
            facts: dict[str, Any] = json.loads(text)
            return facts
    raise RuntimeError(f"the server ended with {process.wait()}")


def main() -> int:
    """Start it several times, first cold; print or save the medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="folder or hub id; the demo model without it")
    parser.add_argument("--repeats", type=int, default=3, help="cold starts, and as many warm ones")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    model = [arguments.model] if arguments.model else []
    runs: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(arguments.repeats):
        folder = tempfile.mkdtemp(prefix="startup-")
        names = {"PYTHONPYCACHEPREFIX": "python", "TORCHINDUCTOR_CACHE_DIR": "torch", "NUMBA_CACHE_DIR": "numba"}
        environment = os.environ | {name: os.path.join(folder, part) for name, part in names.items()}
        try:
            for kind in ("cold", "warm"):
                runs[kind].append(start(model, environment))
                print(
                    kind, {name: round(value, 2) for name, value in runs[kind][-1].items()}, file=sys.stderr, flush=True
                )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    medians = {
        kind: {name: round(statistics.median(run[name] for run in found), 3) for name in (*PARTS, "in all")}
        for kind, found in runs.items()
    }
    text = json.dumps({"provenance": provenance(), "seconds": medians, "runs": runs}, indent=2)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

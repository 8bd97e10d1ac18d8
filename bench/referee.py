"""Hit tokens of `looseleaf replay --instant` beside a referee's exact results, on real traces.

    python bench/referee.py TRACES_DIR GOLDEN_JSON [REFEREE_PY TRACE...]

GOLDEN_JSON: {trace: {"policies": {capacity in blocks: {policy: [hit tokens, hit blocks]}}}}; each trace is read from
TRACES_DIR/NAME.ptrace. Further traces are replayed by REFEREE_PY itself, a module with `load(path)` and
`simulate(trace, capacity, policy)`, at 1, 5 and 10% of their blocks. Prints a row per trace, capacity and policy, the
offline optimum among them, and fails if one differs.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from looseleaf.lab.optimum import OPTIMUM, Optimum
from looseleaf.lab.replay import replay_instant
from looseleaf.lab.traces import Trace, load_trace

POLICIES = {"lru": "lru", "fifo": "fifo+leaf", "lfu": "lfu", "lfuda": "lfuda", OPTIMUM: "opt"}
"""The referee's policies by our names."""


def is_equal(trace: Trace, optimum: Optimum, capacity: int, policy: str, wanted: int) -> bool:
    """Replay and print one row."""
    start = time.perf_counter()
    result = optimum.replay(capacity) if policy == OPTIMUM else replay_instant(trace, capacity, policy)
    seconds = time.perf_counter() - start
    verdict = "equal" if result.hit_tokens == wanted else f"DIFFERS by {result.hit_tokens - wanted}"
    row = f"{trace.name[:28]:28} {capacity:>6} blocks {policy:7} {result.hit_tokens:>12,} hit tokens  {verdict}"
    print(f"{row}  ({seconds:.1f} s)", flush=True)
    return result.hit_tokens == wanted


def against_golden(traces: Path, golden: Path) -> int:
    """Compare with results that were kept; the number of differences."""
    num_different = 0
    for name, expected in json.loads(golden.read_text()).items():
        trace = load_trace(traces / f"{name}.ptrace")
        optimum = Optimum(trace)
        for capacity, by_policy in expected["policies"].items():
            for ours, theirs in POLICIES.items():
                if theirs in by_policy:
                    num_different += not is_equal(trace, optimum, int(capacity), ours, by_policy[theirs][0])
    return num_different


def against_referee(referee: Path, paths: Sequence[str]) -> int:
    """Compare with what the referee finds now; the number of differences."""
    spec = importlib.util.spec_from_file_location("referee", referee)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["referee"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    num_different = 0
    for path in paths:
        trace, theirs = load_trace(Path(path)), module.load(path)
        optimum = Optimum(trace)
        for percent in (1, 5, 10):
            capacity = -(-trace.num_unique_blocks * percent // 100)
            for ours, name in POLICIES.items():
                wanted = module.simulate(theirs, capacity, name).hit_tokens
                num_different += not is_equal(trace, optimum, capacity, ours, wanted)
    return num_different


def main(traces: Path, golden: Path, further: Sequence[str]) -> int:
    """Compare everything; the number of differences."""
    num_different = against_golden(traces, golden)
    if further:
        num_different += against_referee(Path(further[0]), further[1:])
    print(f"{num_different} differences")
    return num_different


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(min(1, main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])))

"""Hit tokens of `looseleaf replay --instant` beside a referee's exact results, on real traces.

    python bench/referee.py TRACES_DIR GOLDEN_JSON

GOLDEN_JSON: {trace: {"policies": {capacity in blocks: {policy: [hit tokens, hit blocks]}}}}; each trace is read from
TRACES_DIR/NAME.ptrace. Prints a row per trace, capacity and policy, and fails if one differs.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from looseleaf.lab.replay import replay_instant
from looseleaf.lab.traces import load_trace

POLICIES = {"lru": "lru", "fifo": "fifo+leaf", "lfu": "lfu"}
"""Our policies by the referee's names."""


def main(traces: Path, golden: Path) -> int:
    """Compare everything; the number of differences."""
    num_different = 0
    for name, expected in json.loads(golden.read_text()).items():
        trace = load_trace(traces / f"{name}.ptrace")
        for capacity, by_policy in expected["policies"].items():
            for ours, theirs in POLICIES.items():
                if theirs not in by_policy:
                    continue
                start = time.perf_counter()
                found = replay_instant(trace, int(capacity), ours).hit_tokens
                seconds = time.perf_counter() - start
                wanted = by_policy[theirs][0]
                verdict = "equal" if found == wanted else f"DIFFERS by {found - wanted}"
                print(
                    f"{name:28} {capacity:>6} blocks {ours:5} {found:>12,} hit tokens  {verdict}  ({seconds:.1f} s)",
                    flush=True,
                )
                num_different += found != wanted
    print(f"{num_different} differences")
    return num_different


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(min(1, main(Path(sys.argv[1]), Path(sys.argv[2]))))

"""Products of a model's linear layers: torch's own, oneDNN's packed weights, and looseleaf's kernel, in turns.

    python bench/linears.py [--threads 1] [--layers 640x1024,...] [--rows 1,4,16,...] [--repeats 7] [--output FILE]

Layers are inputs x outputs, by default those of the demo model (Gemma 3 270M); weights are bfloat16 numbers in float32,
as the model's are, and then with more digits. Every product of a round reads another copy of the weight, 64 MiB or more
in all, so that it comes from main memory as in a model, not from a cache. Milliseconds, medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import linear

from looseleaf.cli.machine import provenance
from looseleaf.hf.packed_linear import compiled_multiplier

LAYERS = "640x1024,640x256,1024x640,640x2048,2048x640,640x262144"
ROWS = "1,2,4,8,16,32,64,256,1024"
COLD_BYTES = 64 * 2**20

Side = Callable[[torch.Tensor, int], torch.Tensor]


def sides(weight: torch.Tensor, copies: int) -> dict[str, Side]:
    """Each side: the product of rows with copy number i of `weight`."""
    multiplier = compiled_multiplier()
    if multiplier is None:
        raise SystemExit("the kernel is not for this machine: see the log")
    num_outputs = len(weight)
    finer = weight * 1.0001
    plain = [weight.clone() for _ in range(copies)]
    onednn = [torch.ops.mkldnn._reorder_linear_weight(weight) for _ in range(copies)]
    short, wide = ([multiplier.pack(each) for _ in range(copies)] for each in (weight, finer))
    assert (short[0].dtype, wide[0].dtype) == (torch.bfloat16, torch.float32)
    bias = torch.zeros(len(short[0]) * multiplier.panel)
    return {
        "torch": lambda rows, i: linear(rows, plain[i]),
        "oneDNN, packed": lambda rows, i: torch.ops.mkldnn._linear_pointwise(rows, onednn[i], None, "none", [], ""),
        "looseleaf, float32": lambda rows, i: multiplier.product(rows, wide[i], bias, num_outputs),
        "looseleaf, bfloat16": lambda rows, i: multiplier.product(rows, short[i], bias, num_outputs),
    }


@torch.inference_mode()
def measure(num_inputs: int, num_outputs: int, counts: list[int], repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds by number of rows and side."""
    weight = torch.randn(num_outputs, num_inputs).bfloat16().float()
    copies = min(16, -(-COLD_BYTES // (weight.numel() * 2)))
    by_name = sides(weight, copies)
    found: dict[str, dict[str, float]] = {}
    for count in counts:
        rows = torch.randn(count, num_inputs)
        took: dict[str, list[float]] = {name: [] for name in by_name}
        for number in range(repeats + 1):
            for name, product in by_name.items():
                start = time.perf_counter()
                for copy in range(copies):
                    product(rows, copy)
                if number:
                    took[name].append(1000 * (time.perf_counter() - start) / copies)
        found[str(count)] = {name: round(statistics.median(each), 4) for name, each in took.items()}
        print(f"{num_inputs} x {num_outputs}, {count} rows:", found[str(count)], flush=True)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", default=LAYERS)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    counts = [int(count) for count in arguments.rows.split(",")]
    found = {}
    for layer in arguments.layers.split(","):
        num_inputs, num_outputs = map(int, layer.split("x"))
        allowed = [count for count in counts if num_outputs < 100_000 or count <= 64]
        found[layer] = measure(num_inputs, num_outputs, allowed, arguments.repeats)
    if arguments.output:
        text = {"provenance": provenance(), "threads": arguments.threads, "milliseconds": found}
        arguments.output.write_text(json.dumps(text, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""On a machine with a GPU: do FlashInfer's kernels answer as the reference does, and how fast is a step? Some minutes.

    pip install -e '.[hf,demo]' flashinfer-python && python bench/gpu_check.py

Runs the tests marked `gpu`, then `attention_step.py` in bfloat16 behind a shared context of 4,096 tokens.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device")
    tests = [sys.executable, "-m", "pytest", "-n0", "-q", "-m", "gpu", "tests/hf"]
    subprocess.run(tests, cwd=ROOT, check=True)
    step = [sys.executable, "bench/attention_step.py", "--device", "cuda", "--dtype", "bfloat16", "--shared"]
    output = ["--context-tokens", "4096", "--output", "bench/results/attention_step_gpu.json"]
    subprocess.run([*step, *output], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()

"""The load of `bookkeeping.py`, the same for every side: prompts of one round by its number. Imports nothing else."""

from __future__ import annotations

import random

NUM_BLOCKS = 65_536
BLOCK_TOKENS = 16
NUM_PROMPTS = 600
NUM_SEQUENCES = 256
NUM_STEPS = 100
OUTPUT_TOKEN = 5


def admission_prompts(number: int) -> list[list[int]]:
    """600 prompts of 2,048 tokens, half of each shared: 20 prefixes of 1,024 tokens."""
    rng = random.Random(number)
    prefixes = [[rng.randrange(32_000) for _ in range(1024)] for _ in range(20)]
    return [rng.choice(prefixes) + [rng.randrange(32_000) for _ in range(1024)] for _ in range(NUM_PROMPTS)]


def decode_prompts(number: int) -> list[list[int]]:
    """256 prompts of 512 tokens."""
    rng = random.Random(-1 - number)
    return [[rng.randrange(32_000) for _ in range(512)] for _ in range(NUM_SEQUENCES)]

"""What live pins cost the bookkeeping of an engine step: CPU microseconds with 0, 100 and 10,000 pins.

    python bench/pin_bookkeeping.py [--rounds 40] [--steps 5] [--json]

One cache for each number of pins, with the same content: 65,536 blocks of 16 tokens, full, so that every step evicts.
A step is what an engine asks of the manager: `maintain`, 4 admissions of 768-token prompts (256 of them shared, the
rest new), one decode step of 256 sequences, `room`, and 4 releases. A sixth of the pins each: hard; soft; refreshed on
use with a time to live; on one shared prefix that the load asks for; waiting for tokens that never come; limited by a
quota. Rounds of the caches are interleaved, each first in its turn, since other work runs on the machine; `ratio` is
the median over the rounds of a step's cost by that of the cache without pins in the same round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field

import numpy as np

from looseleaf import CacheConfig, CacheManager, Lease
from looseleaf.cli.machine import provenance

NUM_BLOCKS = 65_536
BLOCK_TOKENS = 16
NUM_PINS = (0, 100, 10_000)
NUM_DECODES = 256
NUM_PINNED_PROMPTS = 10_000
PINNED_TOKENS = 32
PARTS = ("maintain", "admit", "decode", "release")


def prompt_of(number: int, num_tokens: int) -> np.ndarray:
    """Tokens that no other number shares."""
    return np.random.default_rng(number).integers(0, 2**31 - 1, num_tokens, dtype=np.int32)


def serve(cache: CacheManager, prompt: np.ndarray, namespace: str = "") -> Lease:
    """A whole prefill; its lease."""
    lease = cache.lease(prompt, namespace=namespace)
    lease.reserve(len(prompt))
    lease.commit(len(prompt))
    return lease


@dataclass
class Subject:
    """A cache under load with so many pins. `seconds`: CPU seconds of each round's steps, by part."""

    num_pins: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})

    def __post_init__(self) -> None:
        quotas = {"limited": 0.001}
        config = CacheConfig(NUM_BLOCKS // 16, block_tokens=BLOCK_TOKENS, pin_quota=0.3, namespace_pin_quotas=quotas)
        self.cache = CacheManager(config)
        self.shared = [prompt_of(10**6 + number, 256) for number in range(20)]
        self.num_served = 0
        self.leases = [serve(self.cache, prompt_of(2 * 10**6 + number, 512)) for number in range(NUM_DECODES)]
        while self.cache.stats().free_blocks > NUM_PINNED_PROMPTS * PINNED_TOKENS // BLOCK_TOKENS + 512:
            prompt = prompt_of(3 * 10**6 + self.num_served, 496)
            serve(self.cache, prompt).release()
            self.num_served += 1
        for prompt in self.shared:  # used last, so that no subject evicts what others can't
            serve(self.cache, prompt).release()
        for number in range(NUM_PINNED_PROMPTS):
            namespace = "limited" if number % 6 == 5 else ""
            serve(self.cache, prompt_of(number, PINNED_TOKENS), namespace).release()
        for number in range(self.num_pins):
            self.pin(number)

    def pin(self, number: int) -> None:
        """The pin of this number, of the kind that is its turn."""
        prompt, kind = prompt_of(number, PINNED_TOKENS), number % 6
        if kind == 0:
            self.cache.pin(prompt, owner="ops")
        elif kind == 1:
            self.cache.pin(prompt, level="soft", priority=2 + number % 7)
        elif kind == 2:
            self.cache.pin(prompt, ttl_seconds=3600.0 + number, refresh=True, max_ttl_seconds=90_000.0)
        elif kind == 3:
            self.cache.pin(self.shared[0], level="soft" if number % 4 else "hard", ttl_seconds=7200.0, refresh=True)
        elif kind == 4:
            self.cache.pin(prompt_of(4 * 10**6 + number, 500), level="soft" if number % 4 else "hard")
        else:
            self.cache.pin(prompt, namespace="limited", level="soft")

    def round(self, num_steps: int) -> None:
        """So many steps, timed."""
        cache, tokens = self.cache, np.full(NUM_DECODES, 5, dtype=np.int32)
        seconds = dict.fromkeys(PARTS, 0.0)
        for _ in range(num_steps):
            prompts = []
            for _ in range(4):
                self.num_served += 1
                shared = self.shared[self.num_served % len(self.shared)]
                prompts.append(np.concatenate([shared, prompt_of(5 * 10**6 + self.num_served, 512)]))
            marks = [time.process_time()]
            cache.maintain()
            marks.append(time.process_time())
            admitted = [serve(cache, prompt) for prompt in prompts]
            cache.room()
            marks.append(time.process_time())
            cache.append_many(self.leases, tokens)
            cache.commit_many(self.leases)
            marks.append(time.process_time())
            for lease in admitted:
                lease.release()
            marks.append(time.process_time())
            for part, begin, end in zip(PARTS, marks, marks[1:], strict=False):
                seconds[part] += end - begin
        for part in PARTS:
            self.seconds[part].append(seconds[part] / num_steps)
        if self.leases[0].num_tokens > 1500:  # the decoding requests end, and others come
            for lease in self.leases:
                lease.release()
            self.num_served += NUM_DECODES
            self.leases = [serve(cache, prompt_of(6 * 10**6 + self.num_served + n, 512)) for n in range(NUM_DECODES)]

    def steps(self) -> list[float]:
        """CPU seconds of a step in each round."""
        return [sum(parts) for parts in zip(*self.seconds.values(), strict=True)]

    def figures(self, without: Subject) -> dict[str, float]:
        """Medians in microseconds, of the parts and of whole steps, and the ratio to the cache without pins."""
        medians = {part: statistics.median(self.seconds[part]) for part in PARTS}
        medians["step"] = statistics.median(self.steps())
        ratios = [mine / other for mine, other in zip(self.steps(), without.steps(), strict=True)]
        figures = {part: round(1e6 * value, 1) for part, value in medians.items()}
        return {**figures, "ratio": round(statistics.median(ratios), 3)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    subjects = [Subject(num_pins) for num_pins in NUM_PINS]
    for number in range(arguments.rounds + 1):
        first = number % len(subjects)
        for subject in subjects[first:] + subjects[:first]:
            subject.round(arguments.steps)
    result: dict[str, object] = {"provenance": provenance(), "cpu_us": {}}
    for times in [times for subject in subjects for times in subject.seconds.values()]:
        del times[0]  # the first warms up
    for subject in subjects:
        stats = subject.cache.stats()
        figures = {
            **subject.figures(subjects[0]),
            "live_pins": stats.num_pins,
            "evicted_tokens": stats.evicted_tokens,
            "pinned_blocks": stats.pinned_blocks,
        }
        result["cpu_us"][str(subject.num_pins)] = figures  # type: ignore[index]
        subject.cache.check_integrity()
        if not arguments.json:
            row = "  ".join(f"{name} {value:>9}" for name, value in figures.items())
            print(f"{subject.num_pins:>6} pins: {row}", flush=True)
    if arguments.json:
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

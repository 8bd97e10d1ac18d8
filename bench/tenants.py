"""One of 50 tenants floods the cache: what the other 49 keep, with and without fair shares.

    python bench/tenants.py TRACE [--policies lru,lfu,s3fifo,adaptive] [--capacities 5,10,25] [--floods 10,100]
                                  [--jobs 2] [--output FILE]

TRACE: Mooncake JSONL or prefix-trace/1 of one service. Its conversations (all that begin with the same two blocks) are
dealt out to 50 tenants at random, each with a namespace of its own; so a tenant has its conversations of many turns and
the prompt that all of the service begin with. The last tenant floods: besides its own traffic it sends 10 or 100
times as many one-off requests, of lengths drawn from the trace, at random times. Requests are served at once and alone,
in order of time, in the trace's own blocks. The pool P is a share of the different (tenant, block) pairs of the trace
without the flood.

For each policy, pool and flood, the hit rates (in % of input tokens) of the 49 others:

    alone      each of them alone in a cache of P/50
    without    the 49 together in 49/50 of P, nobody floods
    flood      all 50 in P, one floods

"without" and "flood" with one policy for all (`plain`) and with fair shares (`fair`). The columns `lost` tell most
points that any of the 49 loses in the flood: against what it has alone, against what it has without the flood under the
same rule, and (`plain`, of fair shares) against what it has without the flood and without fair shares. Fails if with
fair shares the flood costs any of the 49 more than 1 point. (That a tenant has less than alone need not be the flood's
work: policies that learn, learn other things where memory is not just as large.)
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from looseleaf import CacheConfig, CacheManager
from looseleaf.cli.machine import provenance
from looseleaf.lab.replay import TraceClock
from looseleaf.lab.traces import Trace, TraceRequest, load_trace

NUM_TENANTS = 50
FLOODING = f"tenant-{NUM_TENANTS - 1}"
MAX_LOST_POINTS = 1.0


@dataclass(frozen=True)
class Rule:
    """How cells are served that differ in their flood only."""

    policy: str
    capacity_percent: float
    floods: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """What the 49 have, over all of their tokens, in %, and most points that one of them loses in the flood
    (`…_lost_to_…`), without (`plain`) and with fair shares; what the flooding tenant has."""

    policy: str
    capacity_percent: float
    pool_blocks: int
    flood: int
    alone: float
    plain_without: float
    plain_flood: float
    fair_without: float
    fair_flood: float
    plain_lost_to_alone: float
    plain_lost_to_without: float
    fair_lost_to_alone: float
    fair_lost_to_without: float
    fair_lost_to_plain_without: float
    flooding_plain: float
    flooding_fair: float


def deal_out(trace: Trace) -> list[TraceRequest]:
    """The trace's requests, each in the namespace of its conversation's tenant."""
    dealt = []
    for request in trace.requests:
        conversation = repr(request.blocks[:2]).encode()
        tenant = zlib.crc32(conversation) % NUM_TENANTS
        dealt.append(replace(request, namespace=f"tenant-{tenant}"))
    return dealt


def flood_of(requests: Sequence[TraceRequest], factor: int) -> list[TraceRequest]:
    """One-off requests of the flooding tenant, `factor` times as many as it has of its own."""
    rng = random.Random(factor)
    count = factor * sum(request.namespace == FLOODING for request in requests)
    last, number = requests[-1].at_seconds, 1 + max(max(request.blocks) for request in requests)
    flood = []
    for at_seconds in sorted(rng.uniform(0.0, last) for _ in range(count)):
        like = rng.choice(requests)
        blocks = tuple(range(number, number + len(like.blocks)))
        number += len(blocks)
        flood.append(replace(like, at_seconds=at_seconds, blocks=blocks, namespace=FLOODING))
    return flood


def serve(
    requests: Iterable[TraceRequest], size: int, num_blocks: int, policy: str, *, is_fair: bool
) -> dict[str, float]:
    """Hit rates by tenant in %, and "others": of all but the flooding one together."""
    clock = TraceClock()
    config = CacheConfig(num_blocks, size, size, policy, num_known_requests=0, fair_shares=is_fair)
    cache = CacheManager(config, clock=clock)
    asked: Counter[str] = Counter()
    found: Counter[str] = Counter()
    for request in requests:
        clock.seconds = request.at_seconds
        num_input = request.num_input_tokens
        num_places = len(request.blocks) * size
        prompt = np.zeros(num_places + 1, dtype=np.int32)
        prompt[:-1] = np.repeat(np.array(request.blocks, dtype=np.int32), size)
        with cache.lease(prompt, "served", request.namespace) as lease:
            stored = min(num_places, num_blocks * size)
            lease.reserve(stored)
            if stored > num_input:
                lease.commit(stored - size)
            lease.commit(stored, is_padded=stored > num_input)
            lease.num_output_tokens = request.num_output_tokens
            num_hit = min(lease.num_cached_tokens, num_input)
        groups = (request.namespace,) if request.namespace == FLOODING else (request.namespace, "others")
        for name in groups:
            asked[name] += num_input
            found[name] += num_hit
    return {name: 100 * found[name] / count for name, count in asked.items()}


def measure(trace: Trace, rule: Rule) -> list[Row]:
    """A row of the table for each flood."""
    size, policy = trace.block_tokens or 0, rule.policy
    dealt = deal_out(trace)
    num_pairs = len({(request.namespace, block) for request in dealt for block in request.blocks})
    pool = round(num_pairs * rule.capacity_percent / 100)
    others = [request for request in dealt if request.namespace != FLOODING]
    alone: dict[str, float] = {}
    tokens: Counter[str] = Counter()
    for tenant in {request.namespace for request in others}:
        own = [request for request in others if request.namespace == tenant]
        alone[tenant] = serve(own, size, pool // NUM_TENANTS, policy, is_fair=False)[tenant]
        tokens[tenant] = sum(request.num_input_tokens for request in own)

    def lost(before: dict[str, float], after: dict[str, float]) -> float:
        return round(max(before[tenant] - after[tenant] for tenant in alone), 2)

    rest = pool - pool // NUM_TENANTS
    plain, fair = (serve(others, size, rest, policy, is_fair=is_fair) for is_fair in (False, True))
    rows = []
    for flood in rule.floods:
        everything = list(heapq.merge(dealt, flood_of(dealt, flood), key=lambda request: request.at_seconds))
        plain_flood, fair_flood = (serve(everything, size, pool, policy, is_fair=is_fair) for is_fair in (False, True))
        rows.append(
            Row(
                policy=policy,
                capacity_percent=rule.capacity_percent,
                pool_blocks=pool,
                flood=flood,
                alone=round(sum(rate * tokens[tenant] for tenant, rate in alone.items()) / tokens.total(), 2),
                plain_without=round(plain["others"], 2),
                plain_flood=round(plain_flood["others"], 2),
                fair_without=round(fair["others"], 2),
                fair_flood=round(fair_flood["others"], 2),
                plain_lost_to_alone=lost(alone, plain_flood),
                plain_lost_to_without=lost(plain, plain_flood),
                fair_lost_to_alone=lost(alone, fair_flood),
                fair_lost_to_without=lost(fair, fair_flood),
                fair_lost_to_plain_without=lost(plain, fair_flood),
                flooding_plain=round(plain_flood[FLOODING], 2),
                flooding_fair=round(fair_flood[FLOODING], 2),
            )
        )
    return rows


HEAD = (
    f"{'':20}   {'':6} | {'one policy for all':^27} | {'fair shares':^34}\n"
    f"{'policy':10} {'P %':>3} {'flood':>5} | {'alone':>6} | {'w/o':>6} {'flood':>6} {'lost':>6} {'lost':>6} | "
    f"{'w/o':>6} {'flood':>6} {'lost':>6} {'lost':>6} {'lost':>6}\n"
    f"{'':20} | {'':6} | {'':13} {'alone':>6} {'w/o':>6} | {'':13} {'alone':>6} {'w/o':>6} {'plain':>6}"
)


def show(row: Row) -> str:
    """One line of the table."""
    return (
        f"{row.policy:10} {row.capacity_percent:>3g} {row.flood:>5} | {row.alone:6.2f} | {row.plain_without:6.2f} "
        f"{row.plain_flood:6.2f} {row.plain_lost_to_alone:6.2f} {row.plain_lost_to_without:6.2f} | "
        f"{row.fair_without:6.2f} {row.fair_flood:6.2f} {row.fair_lost_to_alone:6.2f} {row.fair_lost_to_without:6.2f} "
        f"{row.fair_lost_to_plain_without:6.2f}"
    )


def main(arguments: Sequence[str]) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--policies", default="lru,lfu,s3fifo,adaptive")
    parser.add_argument("--capacities", default="5,10,25")
    parser.add_argument("--floods", default="10,100")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    trace = load_trace(options.trace)
    floods = tuple(map(int, options.floods.split(",")))
    rules = [
        Rule(policy, float(capacity), floods)
        for policy in options.policies.split(",")
        for capacity in options.capacities.split(",")
    ]
    print(HEAD)
    rows = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for measured in pool.map(measure, [trace] * len(rules), rules):
            rows += measured
            print("\n".join(map(show, measured)), flush=True)
    most = max(row.fair_lost_to_without for row in rows)
    print(f"with fair shares the flood costs nobody more than {most:.2f} points")
    if options.output is not None:
        report = {
            **provenance(),
            "tenants": NUM_TENANTS,
            "trace_requests": len(trace.requests),
            "rows": [asdict(row) for row in rows],
        }
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if most > MAX_LOST_POINTS else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What pins are worth in a flood of one-off requests, and what they cost: off, explicit (hard, soft), automatic.

    python bench/pinning.py {documents,short,replay} [--output FILE] [--scenes NAME ...] [--texts PATH] [--rounds N]

documents: the real server with the demo model. Long documents, at most 30% of the pool, are asked about again and again
    while one-off requests pass through the cache; least-recently-used order alone loses them between two questions.
short: the same server; 1% of the prompts get half of the requests, in a pool that turns over between two uses of a
    popular prompt, and in one that does not.
replay: both on imagined machines of the size of an 8B model, through the same engine and cache with a clock that a cost
    model moves. The loads are traces (prefix-trace/1); `--traces FOLDER` keeps them.

Every run has a fresh cache and the same list of requests. The first rounds are a warm-up, in which automatic pinning
learns; they are not measured. `fit`: how many requests of the flood could run at once beside the hard pins.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from looseleaf.cli.build import MemorySettings, ModelSettings, load_model
from looseleaf.cli.machine import provenance
from looseleaf.core.auto_pin_config import AutoPinConfig, AutoPinRule
from pinning_figures import Answer, against
from pinning_load import DOCUMENT, POPULAR, DocumentsSpec, PopularSpec, TextPrompts
from pinning_replay import Machine, ReplayScene
from pinning_server import Mode, ServerScene

OFF, HARD, SOFT = Mode("off"), Mode("explicit, hard", level="hard"), Mode("explicit, soft", level="soft")
AUTO = Mode("automatic", auto=AutoPinConfig())
RATE = AutoPinRule(min_tokens=None, min_requests_per_second=0.1)
AUTO_RATE = Mode("automatic, from 0.1/s", auto=AutoPinConfig(RATE, rate_window_seconds=30.0))
"""The default rule takes prompts above 1,024 tokens, or asked for 100 times a second: no short one at these rates."""


@dataclass(frozen=True)
class Scene:
    """A load on a pool, and the modes to compare; the first is compared against. `pages` and
    `step_tokens`: the real server's pool and most tokens of a step, or `machine`: an imagined one."""

    name: str
    spec: DocumentsSpec | PopularSpec
    modes: tuple[Mode, ...]
    pages: int = 0
    step_tokens: int = 512
    machine: Machine | None = None

    @property
    def kind(self) -> str:
        """Which requests are looked at."""
        return DOCUMENT if isinstance(self.spec, DocumentsSpec) else POPULAR


_DOCUMENTS = DocumentsSpec(
    num_documents=2,
    document_tokens=(1400, 1600),
    question_tokens=24,
    answer_tokens=8,
    flood_per_question=8,
    flood_tokens=160,
    flood_output_tokens=8,
    warm_rounds=5,
    rounds=5,
    num_clients=8,
)
_SHORT = PopularSpec(
    num_prompts=400,
    popular_tokens=120,
    other_tokens=300,
    output_tokens=8,
    warm_requests=30,
    requests=100,
    num_clients=6,
)
_LARGE = DocumentsSpec(
    num_documents=6,
    document_tokens=(6000, 10_000),
    question_tokens=64,
    answer_tokens=64,
    flood_per_question=40,
    flood_tokens=500,
    flood_output_tokens=100,
    warm_rounds=4,
    rounds=6,
    num_clients=64,
)
_LARGE_SHORT = PopularSpec(
    num_prompts=1000,
    popular_tokens=250,
    other_tokens=2000,
    output_tokens=64,
    warm_requests=400,
    requests=1200,
    num_clients=8,
)


def _machine(pool_tokens: int) -> Machine:
    """An 8B model: 8,000 prompt tokens/s, steps of 20 ms and more."""
    return Machine("8B", prefill_rate=8000.0, step_seconds=0.020, pool_tokens=pool_tokens, step_tokens=2048)


_FAST = Machine("1B", prefill_rate=200_000.0, step_seconds=0.005, pool_tokens=12_288, step_tokens=8192)
_EXPLICIT = (OFF, HARD, SOFT, AUTO)
PARTS: Mapping[str, tuple[Scene, ...]] = {
    "documents": (
        Scene("28% of the pool", _DOCUMENTS, (OFF, HARD, AUTO), pages=112),
        Scene("28% of the pool, short steps", _DOCUMENTS, (OFF, HARD, AUTO), pages=112, step_tokens=128),
        Scene(
            "16% of the pool",
            replace(_DOCUMENTS, num_clients=16, flood_per_question=14, rounds=3),
            (AUTO, OFF, HARD),
            pages=192,
        ),
    ),
    "short": (
        Scene("pool turns over between two uses", _SHORT, (OFF, HARD, AUTO_RATE), pages=36),
        Scene("pool keeps what is popular", _SHORT, (AUTO_RATE, OFF, HARD), pages=144),
    ),
    "replay": (
        Scene("documents, 29% of the pool", _LARGE, _EXPLICIT, machine=_machine(163_840)),
        Scene(
            "documents, 15% of the pool",
            replace(_LARGE, flood_per_question=80, rounds=4, num_clients=96),
            _EXPLICIT,
            machine=_machine(327_680),
        ),
        Scene(
            "documents, 24% of the pool, memory is the limit",
            replace(_LARGE, num_documents=3, num_clients=192),
            _EXPLICIT,
            machine=_machine(98_304),
        ),
        Scene(
            "short, pool turns over between two uses",
            _LARGE_SHORT,
            (OFF, HARD, AUTO, AUTO_RATE),
            machine=_machine(20_480),
        ),
        Scene(
            "short, pool keeps what is popular", _LARGE_SHORT, (OFF, HARD, AUTO, AUTO_RATE), machine=_machine(163_840)
        ),
        Scene(
            "short, more than 100 uses a second",
            PopularSpec(200, 90, 200, 8, warm_requests=1000, requests=3000, num_clients=32),
            (OFF, HARD, AUTO),
            machine=_FAST,
        ),
    ),
}


def run_part(scenes: Sequence[Scene], texts: Path | None, traces: Path) -> list[dict[str, Any]]:
    """All scenes of a part, each mode after the other."""
    pages = max(scene.pages for scene in scenes)
    model = load_model(ModelSettings(), MemorySettings(num_pages=pages)) if pages else None
    rows = []
    try:
        for number, scene in enumerate(scenes):
            load = scene.spec.load()
            if scene.machine is None:
                assert model is not None  # some scene has pages
                prompts = TextPrompts(model.tokenizer, texts).prompts(load)
                run = ServerScene(model, scene.pages, scene.step_tokens, load, prompts).run
            else:
                run = ReplayScene.of(scene.machine, load, traces / f"pinning-{number}.ptrace").run
            rows.append(run_scene(scene, len(load.items), run))
    finally:
        if model is not None:
            model.close()
    return rows


def run_scene(scene: Scene, num_items: int, run: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """All modes of a scene in their order, with progress on stderr, and the table on stdout."""
    runs: dict[str, Any] = {}
    for mode in scene.modes:
        started, done = time.monotonic(), 0

        def on_done(_answer: Answer, name: str = f"{scene.name}: {mode.name}") -> None:
            nonlocal done
            done += 1
            if sys.stderr.isatty() or done % max(1, num_items // 4) == 0:
                print(f"\r{name}: {done} of {num_items}", end="", file=sys.stderr, flush=True)

        runs[mode.name] = run(mode, on_done)
        seconds = time.monotonic() - started
        print(f"\r{scene.name}: {mode.name}: {num_items} requests in {seconds:.0f} s", file=sys.stderr, flush=True)
    changes = {name: against(runs[OFF.name], figures, scene.kind) for name, figures in runs.items() if name != OFF.name}
    print_table(scene, runs)
    return {
        "scene": scene.name,
        "load": asdict(scene.spec),
        "pool_pages": scene.pages or None,
        "machine": None if scene.machine is None else asdict(scene.machine),
        "modes": {mode.name: asdict(mode) for mode in scene.modes},
        "runs": runs,
        "against_off": changes,
    }


def print_table(scene: Scene, runs: Mapping[str, dict[str, Any]]) -> None:
    """One line for each mode."""
    print(f"\n{scene.name} ({scene.kind}s)")
    print(
        f"{'pins':<22} {'TTFT p50':>9} {'p95':>8} {'flood p50':>9} {'running':>8} {'max':>4} {'fit':>4} {'req/s':>7} "
        f"{'hits':>6} {'of these':>8} {'pinned':>7} {'auto':>5}"
    )
    for name, run in runs.items():
        these, flood = run[scene.kind], run["flood"]
        share = run["pinned_blocks_mean"] / run["pool_blocks"]
        print(
            f"{name:<22} {these['ttft_p50_seconds']:>8.3f}s {these['ttft_p95_seconds']:>7.3f}s "
            f"{flood['ttft_p50_seconds']:>8.3f}s {run['running_mean']:>8.1f} {run['running_max']:>4} {run['fit']:>4} "
            f"{run['requests_per_second']:>7.2f} {run['hit_rate']:>6.1%} {these['hit_rate']:>8.1%} {share:>7.1%} "
            f"{run['pins']['made_automatically']:>5}"
        )
    sys.stdout.flush()


def main() -> None:
    """Run one part and save its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=sorted(PARTS))
    parser.add_argument("--scenes", nargs="+", metavar="NAME", help="only scenes whose name has one of these in it")
    parser.add_argument(
        "--texts", type=Path, help="a file or folder of texts for the prompts; those of the demo if not"
    )
    parser.add_argument("--traces", type=Path, help="keep the traces of a replay in this folder")
    parser.add_argument("--rounds", type=int, help="measured rounds of questions, instead of the scene's own")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    scenes = [
        scene
        for scene in PARTS[arguments.part]
        if not arguments.scenes or any(name in scene.name for name in arguments.scenes)
    ]
    if arguments.rounds:
        scenes = [
            replace(scene, spec=replace(scene.spec, rounds=arguments.rounds))
            if isinstance(scene.spec, DocumentsSpec)
            else scene
            for scene in scenes
        ]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows = run_part(scenes, arguments.texts, arguments.traces or Path(folder))
    result = {
        "provenance": provenance(),
        "part": arguments.part,
        "seconds": round(time.monotonic() - started, 1),
        "scenes": rows,
    }
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

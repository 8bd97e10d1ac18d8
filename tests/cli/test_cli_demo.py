"""The demo's parts, with a fake model: the workload, the clients, the measure, both runs, the report."""

from __future__ import annotations

import asyncio
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from cli_kit import MEMORY, RunCli, Running
from rich.console import Console

import looseleaf
from looseleaf.cli.build import LoadedModel, MemorySettings
from looseleaf.cli.client import ServerError
from looseleaf.cli.demo.command import show
from looseleaf.cli.demo.figures import percentile
from looseleaf.cli.demo.load import send_all
from looseleaf.cli.demo.recorder import MemoryRecorder
from looseleaf.cli.demo.report import change
from looseleaf.cli.demo.scene import DEMO_MEMORY, run_looseleaf, run_plain, scene_of
from looseleaf.cli.demo.workload import MAX_ANSWER_TOKENS, DemoRequest, Workload, shipped_workload
from looseleaf.cli.machine import commit, provenance
from looseleaf.core.config import CacheConfig
from looseleaf.core.manager import CacheManager
from looseleaf.telemetry import Metrics
from looseleaf.testing.engine_kit import RecordingObserver

POLICY = "You answer the members. Ladders go out for four days, saws for seven. " * 3


def small_workload(num_clients: int = 2) -> Workload:
    """Four questions behind a policy of 213 tokens, two about a document, letters of more than the memory."""
    document = "The light at the point was built long ago and mended twice since then. " * 2
    short = [DemoRequest(f"q{i}", "short", f"{POLICY}{i}?", max_tokens=20, stops=("\n",)) for i in range(4)]
    long = [DemoRequest(f"d{i}", "long", f"{document}{i}?", max_tokens=20, stops=("\n",)) for i in range(2)]
    one_off = [DemoRequest(f"l{i}", "one-off", f"{i} letter " * 18, max_tokens=20, stops=("\n",)) for i in range(5)]
    return Workload(POLICY, (short[0], long[0], short[1], *one_off, short[2], long[1], short[3]), num_clients)


def test_the_shipped_workload_is_what_the_demo_promises() -> None:
    """10 short questions behind one policy, 4 about one document, 8 letters that share no first block; letters lie
    between questions."""
    workload = shipped_workload()
    by_kind = {
        kind: [request for request in workload.requests if request.kind == kind]
        for kind in ("short", "long", "one-off")
    }
    assert {kind: len(requests) for kind, requests in by_kind.items()} == {"short": 10, "long": 4, "one-off": 8}
    assert all(request.prompt.startswith(workload.policy) for request in by_kind["short"])
    assert len({request.prompt for request in workload.requests}) == len(workload.requests)
    assert len({request.prompt[:24] for request in by_kind["one-off"]}) == 8
    assert len({request.name for request in workload.requests}) == 22
    kinds = "".join(request.kind[0] for request in workload.requests)
    assert re.match(r"[sl]+o.*o[sl]+$", kinds)


def test_the_shipped_workload_is_the_same_every_time() -> None:
    """Both runs, and runs on other machines, send the same texts in the same order."""
    assert shipped_workload() == shipped_workload()


def test_requests_are_sent_in_order_a_few_at_a_time(server: Running) -> None:
    """Outcomes come in the workload's order with the server's own token counts, whatever finishes first."""
    workload = small_workload(num_clients=3)
    done: list[str] = []
    outcomes = asyncio.run(send_all(server.url, "fake", workload, lambda outcome: done.append(outcome.request.name)))
    assert [outcome.request for outcome in outcomes] == list(workload.requests)
    assert sorted(done) == sorted(request.name for request in workload.requests)
    for outcome in outcomes:
        assert outcome.num_prompt_tokens == len(outcome.request.prompt.encode()) + 1
        assert 0 <= outcome.num_cached_tokens < outcome.num_prompt_tokens
        assert outcome.num_output_tokens == len(outcome.text) == 20
        assert 0 < outcome.first_token_seconds <= outcome.seconds


def test_a_refused_request_ends_the_run_with_its_name(server: Running) -> None:
    """One prompt that cannot be served ends everything, with its name and the server's numbers; nothing is left."""
    workload = Workload("", (*small_workload().requests, DemoRequest("too long", "long", "x" * 5000)), 2)
    with pytest.raises(ServerError, match=r"too long.*5001"):
        asyncio.run(send_all(server.url, "fake", workload))
    assert server.stack.engine.engine.num_waiting == 0


class FakeStats:
    """A cache of which only the figures exist."""

    def __init__(self, **figures: float) -> None:
        self.figures = figures

    def stats(self) -> Any:
        return type("Stats", (), {"block_tokens": 16, **self.figures})


def test_waste_is_weighted_with_time() -> None:
    """Waste = empty places over held places: unfilled and reserved-but-unwritten ones alike, by the steps' seconds."""
    fake = FakeStats(active_blocks=10, waste=0.1, uncommitted_tokens=12, num_lanes=2)
    observer = RecordingObserver()
    recorder = MemoryRecorder(fake, observer)  # type: ignore[arg-type]  # only stats() is asked
    step = {
        "num_scheduled_tokens": 5,
        "num_running": 2,
        "num_waiting": 0,
        "schedule_seconds": 0.0,
        "commit_seconds": 0.0,
    }
    recorder.on_step(seconds=3.0, **step)
    assert recorder.waste == pytest.approx((16 + 24) / 160)
    fake.figures = {"active_blocks": 40, "waste": 0.0, "uncommitted_tokens": 0, "num_lanes": 2}
    recorder.on_step(seconds=1.0, **step)
    assert recorder.waste == pytest.approx(3 * 40 / (3 * 160 + 640))
    assert recorder.mean_running_requests == 2.0
    recorder.on_fork(num_tokens=7)
    assert observer.named("on_step") == [{**step, "seconds": 3.0}, {**step, "seconds": 1.0}]
    assert observer.named("on_fork") == [{"num_tokens": 7}]
    recorder.start()
    assert (recorder.waste, recorder.num_prefill_tokens) == (0.0, 0)


def test_nothing_held_is_no_waste() -> None:
    """A run in which nothing was held has waste 0, not a division by zero."""
    cache = CacheManager(CacheConfig(num_pages=1))
    assert MemoryRecorder(cache, Metrics(cache)).waste == 0.0


def test_plain_computes_everything(fake_model: LoadedModel) -> None:
    """Without reuse each prompt token is computed once and none is found."""
    run = run_plain(fake_model, MEMORY, small_workload())
    assert run.figures.cached_tokens == 0
    assert run.figures.hit_rate == 0.0
    assert run.figures.prefill_tokens == run.figures.prompt_tokens
    assert run.figures.preemptions == 0


def test_looseleaf_computes_the_rest_only(fake_model: LoadedModel) -> None:
    """With reuse and the policy pinned, later questions find it, also after a burst larger than the memory; what is
    found and what is computed add up."""
    done: list[str] = []
    workload = small_workload(num_clients=1)
    run = run_looseleaf(fake_model, MEMORY, workload, lambda outcome: done.append(outcome.request.name))
    cached = {outcome.request.name: outcome.num_cached_tokens for outcome in run.outcomes}
    in_policy = (len(POLICY) + 1) // MEMORY.block_tokens * MEMORY.block_tokens
    assert cached["q0"] == 0
    assert [cached[name] for name in ("q1", "q2", "q3")] == [in_policy] * 3
    assert run.figures.prefill_tokens + run.figures.cached_tokens == run.figures.prompt_tokens
    assert done == [request.name for request in workload.requests]


def test_both_runs_give_the_same_answers_and_plain_wastes_more(fake_model: LoadedModel) -> None:
    """A model without rounding answers the same either way; room set aside for answers shows as waste."""
    plain = run_plain(fake_model, MEMORY, small_workload())
    loose = run_looseleaf(fake_model, MEMORY, small_workload())
    assert [one.text for one in plain.outcomes] == [one.text for one in loose.outcomes]
    assert 0 < loose.figures.waste < plain.figures.waste < 1


def test_the_scene_says_how_large_the_burst_is(fake_model: LoadedModel) -> None:
    """The burst is larger than the memory, in the facts that are saved."""
    scene = scene_of(fake_model, MEMORY, small_workload())
    assert scene.memory_tokens == 512
    assert scene.burst_tokens > scene.memory_tokens
    assert scene.memory_bytes == 512 * 8


def test_the_demo_has_room_for_its_pin() -> None:
    """A quota of 30% of the demo's memory holds a policy of 1,000 tokens in every lane, and every request beside it."""
    assert DEMO_MEMORY.num_pages is not None
    memory_tokens = DEMO_MEMORY.num_pages * DEMO_MEMORY.page_tokens // 6
    assert memory_tokens * DEMO_MEMORY.pin_quota > 1000
    assert memory_tokens - 1000 > 1500 + MAX_ANSWER_TOKENS


@pytest.mark.parametrize("as_json", [False, True])
def test_the_result_is_shown_and_saved(
    fake_model: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    """The table names each figure, the file holds both runs with machine, versions and command; `--json` prints the
    file's content and nothing else."""
    output = tmp_path / "out.json"
    quiet = Console(stderr=True)
    show(fake_model, MEMORY, small_workload(), output, as_json=as_json, progress_on=quiet)
    saved = json.loads(output.read_text(encoding="utf-8"))
    assert saved["format"] == "looseleaf-demo/1"
    assert saved["plain"]["requests"] == saved["looseleaf"]["requests"] == 11
    assert saved["answers"]["num_different"] == 0
    assert saved["versions"]["numpy"]
    assert saved["machine"]["num_processors"] >= 1
    said = capsys.readouterr()
    if as_json:
        assert json.loads(said.out) == saved
        assert said.err == ""
        return
    for expected in ("memory held but empty", "p50", "p95", "requests per second", "prompt tokens computed"):
        assert expected in said.out
    assert "All 11 answers are the same" in said.out
    assert "looseleaf serve" in said.out
    assert "/metrics" in said.out


@pytest.mark.parametrize(
    ("before", "after", "better", "text"),
    [
        (10.0, 5.0, "less", "2.0x less"),
        (5.0, 10.0, "more", "2.0x more"),
        (5.0, 10.0, "less", "2.0x more (worse)"),
        (0.0, 0.4, "more", "from 0"),
        (0.4, 0.0, "less", "to 0"),
        (3.0, 3.0, "less", "none"),
        (math.nan, 3.0, "less", "-"),
    ],
)
def test_changes_are_said_in_words(before: float, after: float, better: Any, text: str) -> None:
    """A change is a ratio with a direction, marked where it is for the worse."""
    assert change(before, after, better) == text


def test_percentiles() -> None:
    """Linear between neighbours; NaN where there is nothing."""
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
    assert percentile([1.0, 2.0], 95) == pytest.approx(1.95)
    assert math.isnan(percentile([], 50))


def test_provenance_names_machine_versions_and_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit is that of the checkout that tracks the package; a folder outside of one has none. No path of the
    machine gets into it."""
    monkeypatch.setattr("sys.argv", [str(tmp_path / "run.py"), str(tmp_path / "a.jsonl"), "b/c", "--jobs", "2"])
    facts = provenance()
    assert facts["command"] == "run.py a.jsonl b/c --jobs 2"
    assert set(facts) == {"machine", "versions", "commit", "command"}
    assert json.loads(json.dumps(facts)) == facts
    assert commit(tmp_path) is None
    found = commit(Path(looseleaf.__file__).parent)
    assert found is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", found)


def test_memory_is_asked_for_in_bytes_or_pages() -> None:
    """A cache of n pages has n pages, whatever a token takes."""
    assert MemorySettings(num_pages=3).cache_config(3).num_pages == 3


def test_demo_without_the_data_package_says_what_to_install(
    cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`looseleaf demo` where the model's package is missing: exit code 1, the licence shown, the pip command."""
    monkeypatch.setenv("LOOSELEAF_CACHE", str(tmp_path))
    monkeypatch.setattr("looseleaf.hf.demo_model._MODULE", "no_such_data_package")
    result = cli("demo", "--output", str(tmp_path / "out.json"))
    assert result.exit_code == 1, result.output
    assert "pip install 'looseleaf[demo]'" in result.stderr
    assert "Gemma Terms of Use" in result.stdout

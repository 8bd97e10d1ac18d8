"""The `replay` command; the laws of replaying itself are tested with the lab."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_kit import RunCli

from looseleaf.lab.sweep import Outcome
from looseleaf.lab.workers import run_sweep

FIELDS = {
    "requests", "input_tokens", "hit_tokens", "token_hit_rate", "waste", "peak_blocks", "evicted_blocks", "policy",
}  # fmt: skip


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    """Four requests of blocks of 512 tokens; the second repeats the first, the fourth repeats it after others."""
    rows = [
        {"timestamp": 0, "input_length": 1024, "output_length": 8, "hash_ids": [1, 2]},
        {"timestamp": 1000, "input_length": 1024, "output_length": 8, "hash_ids": [1, 2]},
        {"timestamp": 2000, "input_length": 1536, "output_length": 8, "hash_ids": [5, 6, 7]},
        {"timestamp": 3000, "input_length": 1024, "output_length": 8, "hash_ids": [1, 2]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    """Two requests of which only the lengths are known."""
    path = tmp_path / "lengths.csv"
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    row = "2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:17:04.0319600,396,109\n"
    path.write_text(head + row, encoding="utf-8")
    return path


def test_instant_replay_prints_the_promised_fields(cli: RunCli, mooncake: Path) -> None:
    """With room for all five blocks, the repeats hit in full; with room for three, the last one misses."""
    all_fit = json.loads(cli("replay", str(mooncake), "--instant", "--capacity", "100%", "--json").stdout)
    assert set(all_fit) >= FIELDS
    assert (all_fit["requests"], all_fit["input_tokens"], all_fit["hit_tokens"]) == (4, 4608, 2048)
    three = json.loads(cli("replay", str(mooncake), "--instant", "--capacity", "3blocks", "--json").stdout)
    assert three["hit_tokens"] == 1024
    assert three["evicted_blocks"] > 0


@pytest.mark.parametrize("mode", [["--instant"], ["--page-tokens", "512", "--block-tokens", "512"]])
def test_automatic_pinning_is_off_unless_asked_for(cli: RunCli, mooncake: Path, mode: list[str]) -> None:
    """Without `--auto-pin` the cache pins nothing and the report is empty; with it the report says what it did, in a
    dry run without any change of the hits."""
    options = ("replay", str(mooncake), *mode, "--capacity", "3blocks", "--json")
    plain, on, dry = (
        json.loads(cli(*options, *more).stdout)
        for more in ([], ["--auto-pin", "on"], ["--auto-pin", "dry-run", "--auto-pin-min-tokens", "512"])
    )
    assert plain["auto_pin"] is None
    assert (on["auto_pin"]["is_on"], on["auto_pin"]["dry_run"]) == (True, False)
    assert dry["auto_pin"]["dry_run"]
    assert dry["hit_tokens"] == plain["hit_tokens"]


def test_request_rates_are_those_of_the_trace(cli: RunCli, tmp_path: Path) -> None:
    """However quickly a trace is replayed, a prefix that it asks for every twenty seconds is not frequent."""
    rows = []
    for number in range(120):  # comes back after it was evicted, time and again
        blocks = [1, 2] if number % 6 == 0 else [100 + 2 * number, 101 + 2 * number]
        rows.append({"timestamp": number * 3333, "input_length": 1024, "output_length": 1, "hash_ids": blocks})
    path = tmp_path / "regular.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = ("replay", str(path), "--instant", "--capacity", "8blocks", "--json", "--auto-pin", "on")
    for rules, is_pinned in (
        (["--auto-pin-min-tokens", "off", "--auto-pin-min-rate", "10"], False),
        (["--auto-pin-min-tokens", "off", "--auto-pin-min-rate", "off"], False),
        (["--auto-pin-min-tokens", "512", "--auto-pin-min-rate", "off"], True),
    ):
        result = json.loads(cli(*options, *rules).stdout)
        assert (result["auto_pin"]["num_made"] > 0) == is_pinned, rules


def test_timed_replay_takes_sizes_and_rates(cli: RunCli, mooncake: Path) -> None:
    """Without `--instant` the trace's shares are counted in blocks of `--block-tokens`, in whole pages."""
    options = ("--capacity", "100%", "--page-tokens", "256", "--block-tokens", "16", "--decode-rate", "100")
    result = json.loads(cli("replay", str(mooncake), *options, "--json").stdout)
    assert result["capacity_blocks"] == 5 * 512 // 16
    assert result["block_tokens"] == 16
    assert result["hit_tokens"] > 0


def test_a_table_for_people(cli: RunCli, mooncake: Path) -> None:
    """Without `--json` the same figures come as a table."""
    result = cli("replay", str(mooncake), "--instant", "--capacity", "100%")
    assert result.exit_code == 0
    assert "token hit rate" in result.stdout
    assert "44.44%" in result.stdout


def test_lengths_only_need_an_absolute_capacity(cli: RunCli, lengths: Path) -> None:
    """A trace without blocks has no unique blocks to take 5% of; blocks and bytes work."""
    share = cli("replay", str(lengths))
    assert share.exit_code == 2
    assert "lengths only" in share.stderr
    blocks = json.loads(cli("replay", str(lengths), "--capacity", "320blocks", "--json").stdout)
    in_bytes = json.loads(cli("replay", str(lengths), "--capacity", "5KiB", "--bytes-per-token", "1", "--json").stdout)
    assert blocks == in_bytes
    assert blocks["capacity_blocks"] == 320


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--capacity", "lots"], "lots"),
        (["--capacity", "2GiB"], "--bytes-per-token"),
        (["--capacity", "15blocks"], "less than one page"),
        (["--policy", "lruu"], "lru"),
        (["--instant", "--block-tokens", "48"], "whole part"),
        (["--prefill-rate", "0"], "prefill_rate"),
        (["--max-running", "0"], "max_running"),
        (["--policy", "lru,lruu"], "lru"),
        (["--policy", "lru,"], "with commas between"),
        (["--policy", ""], "with commas between"),
        (["--capacity", "5%,lots"], "lots"),
        (["--capacity", "5%,,10%"], "with commas between"),
        (["--capacity", "5%,0%"], "less than one block"),
        (["--page-tokens", "256,big"], "number of tokens"),
        (["--block-tokens", "0"], "number of tokens"),
        (["--block-tokens", "-16"], "number of tokens"),
        (["--pin-quota", "2"], "pin_quota"),
        (["--jobs", "0"], "--jobs is 0"),
        (["--optimum"], "--instant"),
        (["--policy", "optimum", "--capacity", "100%"], "--instant"),
        (["--plot", "picture.gif"], ".png, .svg, .html"),
        (["--plot", "missing/picture.png"], "missing/picture.png"),
        (["--plot", "/proc/picture.png"], "/proc/picture.png"),
        (["--plot", "."], ".png, .svg, .html"),
    ],
)
def test_bad_options_are_refused(cli: RunCli, mooncake: Path, options: list[str], said: str) -> None:
    """What cannot be replayed is exit code 2 before anything is, with the way out in the message."""
    result = cli("replay", str(mooncake), *options)
    assert result.exit_code == 2, result.output
    assert said in result.stderr


def test_a_sweep_is_all_combinations(cli: RunCli, mooncake: Path) -> None:
    """Lists of traces, policies, capacities and sizes are replayed in all combinations, with the facts beside them, and
    each result is what the single replay says."""
    second = mooncake.with_name("second.jsonl")
    second.write_text("".join(mooncake.read_text().splitlines(keepends=True)[:2]), encoding="utf-8")
    sizes = ["--block-tokens", "512,256", "--page-tokens", "512,1024"]
    options = ["--instant", "--policy", "lru,lfu", "--capacity", "3blocks,100%", *sizes, "--jobs", "1", "--json"]
    sweep = json.loads(cli("replay", str(mooncake), str(second), *options).stdout)
    assert len(sweep["results"]) == 2 * 2 * 2 * 4
    assert (sweep["failures"], sweep["num_not_replayed"]) == ([], 0)
    assert {"machine", "commit", "command", "versions"} <= set(sweep["facts"])
    for row in sweep["results"][::5]:
        asked = {
            "--policy": "policy",
            "--capacity": "capacity",
            "--page-tokens": "page_tokens",
            "--block-tokens": "block_tokens",
        }
        alone = [text for option, name in asked.items() for text in (option, str(row[name]))]
        path = mooncake if row["trace"] == "trace" else second
        assert json.loads(cli("replay", str(path), "--instant", *alone, "--json").stdout).items() <= row.items()


def test_a_sweep_compares_with_the_optimum(cli: RunCli, mooncake: Path) -> None:
    """With `--optimum` each result says what LRU and the offline optimum hit, though nobody asked for these two, and
    which share of the gap between them is closed."""
    options = ["--instant", "--policy", "fifo,optimum", "--capacity", "3blocks,100%", "--optimum", "--jobs", "1"]
    rows = json.loads(cli("replay", str(mooncake), *options, "--json").stdout)["results"]
    assert [(row["policy"], row["capacity"]) for row in rows] == [
        ("fifo", "3blocks"), ("fifo", "100%"), ("optimum", "3blocks"), ("optimum", "100%"),
    ]  # fmt: skip
    assert [row["hit_tokens"] for row in rows] == [1024, 2048, 1024, 2048]
    assert {row["gap_closed"] for row in rows} == {None}
    shown = cli("replay", str(mooncake), *options).stdout
    assert "gap closed" in shown


def test_a_single_replay_is_compared_too(cli: RunCli, tmp_path: Path) -> None:
    """Three prompts in a round through a cache for two: LRU never hits, the optimum hits twice; nothing is closed."""
    rows = [{"timestamp": at, "input_length": 512, "output_length": 1, "hash_ids": [at % 3]} for at in range(6)]
    path = tmp_path / "round.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = ["--instant", "--policy", "fifo", "--capacity", "2blocks", "--optimum", "--jobs", "1"]
    single = json.loads(cli("replay", str(path), *options, "--json").stdout)
    assert (single["policy"], single["token_hit_rate"], single["lru_token_hit_rate"]) == ("fifo", 0, 0)
    assert single["optimum_token_hit_rate"] == pytest.approx(1 / 3)
    assert single["gap_closed"] == 0.0
    assert "33.33%" in cli("replay", str(path), *options).stdout


def test_one_failing_cell_does_not_lose_the_others(cli: RunCli, mooncake: Path) -> None:
    """What can't be replayed is named with its reason, the rest is printed, and the exit code says that not all went
    well."""
    options = ["--instant", "--block-tokens", "512,48", "--jobs", "1"]
    result = cli("replay", str(mooncake), *options, "--json")
    assert result.exit_code == 1
    sweep = json.loads(result.stdout)
    assert [row["block_tokens"] for row in sweep["results"]] == [512]
    assert [(row["block_tokens"], row["trace"]) for row in sweep["failures"]] == [(48, "trace.jsonl")]
    shown = cli("replay", str(mooncake), *options)
    assert shown.exit_code == 1
    assert "11.11%" in shown.stdout
    assert "trace.jsonl, adaptive, 5%, 48-token blocks: trace has blocks of 512 tokens" in shown.stderr


def test_traces_of_equal_names_are_told_apart(cli: RunCli, mooncake: Path) -> None:
    """Two files of one name are two rows under their paths; a file given twice is replayed once."""
    second = mooncake.parent / "other" / mooncake.name
    second.parent.mkdir()
    second.write_text(mooncake.read_text(), encoding="utf-8")
    paths = [str(mooncake), str(second), str(mooncake)]
    sweep = json.loads(cli("replay", *paths, "--instant", "--jobs", "1", "--json").stdout)
    assert [row["trace"] for row in sweep["results"]] == paths[:2]


@pytest.mark.parametrize("suffix", ["png", "svg", "html"])
def test_plots(cli: RunCli, mooncake: Path, tmp_path: Path, suffix: str) -> None:
    """The picture is what its name says, shows every policy and the optimum, and needs no other file."""
    path = tmp_path / f"picture.{suffix}"
    options = ["--instant", "--policy", "lru,lfu", "--capacity", "3blocks,4blocks,100%", "--jobs", "1"]
    result = cli("replay", str(mooncake), *options, "--plot", str(path))
    assert result.exit_code == 0, result.output
    data = path.read_bytes()
    if suffix == "png":
        assert data.startswith(b"\x89PNG")
        return
    for word in (b"<svg", b"offline optimum", b"lfu", b"lru", b"3blocks", b"trace"):
        assert word in data
    assert (b"<table" in data) == (suffix == "html")
    assert b"<script" not in data
    assert not re.search(rb"""(?:src|href)=["']https?:""", re.sub(rb"xmlns[:\w]*=\S+", b"", data))


def test_a_plot_of_timed_replays_has_no_bound(cli: RunCli, mooncake: Path, tmp_path: Path) -> None:
    """The optimum is that of requests served at once and alone: beside timed replays it is not drawn."""
    path = tmp_path / "picture.svg"
    options = ["--capacity", "80blocks,160blocks", "--jobs", "1"]
    assert cli("replay", str(mooncake), *options, "--plot", str(path)).exit_code == 0
    assert "offline optimum" not in path.read_text()
    assert "80blocks" in path.read_text()


def test_names_of_traces_are_text(cli: RunCli, mooncake: Path, tmp_path: Path) -> None:
    """A name may hold what is markup or a formula elsewhere; it is drawn and printed as it is."""
    path, odd = tmp_path / "picture.html", mooncake.rename(tmp_path / "[b]<i>$x_$&.jsonl")
    result = cli("replay", str(odd), "--instant", "--policy", "lru,fifo", "--jobs", "1", "--plot", str(path))
    assert result.exit_code == 0, result.output
    assert "[b]<i>$x_$&" in result.stdout
    assert "<td>[b]&lt;i&gt;$x_$&amp;</td>" in path.read_text()
    assert "<i>" not in path.read_text()


def test_ctrl_c_keeps_what_is_done(cli: RunCli, mooncake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped by Ctrl-C, a sweep prints what it has, says how far it came, and ends with 130."""

    def interrupted(*arguments: Any) -> Iterator[tuple[int, Outcome]]:
        yield next(run_sweep(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr("looseleaf.cli.replay.run_sweep", interrupted)
    result = cli("replay", str(mooncake), "--instant", "--policy", "lru,fifo", "--jobs", "1", "--json")
    assert result.exit_code == 130
    assert "stopped after 1 of 2 replays" in result.stderr
    sweep = json.loads(result.stdout)
    assert (len(sweep["results"]), sweep["num_not_replayed"]) == (1, 1)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_behind(tmp_path: Path, sent: signal.Signals) -> None:
    """Ctrl-C reaches the whole group and ends a parallel sweep with 130; killed outright, its workers end too."""
    rows = [
        {"timestamp": at, "input_length": 1024, "output_length": 1, "hash_ids": [at, at + 1]} for at in range(60_000)
    ]
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "looseleaf.cli",
        "replay",
        str(path),
        "--instant",
        "--policy",
        "lru,fifo",
        "--jobs",
        "2",
    ]
    # a shell makes what it runs in the background deaf to it
    listening = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    command[1:3] = ["-c", listening + "from looseleaf.cli.main import app; app(prog_name='looseleaf')"]
    with subprocess.Popen(
        [*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        children: list[str] = []
        while len(children) < 3:  # two workers, and what looks after them
            assert process.poll() is None
            time.sleep(0.05)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        time.sleep(1.0)
        os.killpg(process.pid, sent) if sent == signal.SIGINT else process.kill()
        output, errors = process.communicate(timeout=60)
    assert process.returncode == (130 if sent == signal.SIGINT else -signal.SIGKILL), errors
    if sent == signal.SIGINT:
        assert json.loads(output)["num_not_replayed"] == 2
        assert b"Traceback" not in errors
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, children
        time.sleep(0.05)


@pytest.mark.parametrize("content", [None, "", "hello\n", b"\xff\xfe\x00"])
def test_files_that_are_no_trace(cli: RunCli, tmp_path: Path, content: str | bytes | None) -> None:
    """A missing, empty, foreign or binary file is exit code 2, named, without traceback."""
    path = tmp_path / "odd.trace"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.write_text(content, encoding="utf-8")
    result = cli("replay", str(path))
    assert result.exit_code == 2, result.output
    assert "odd.trace" in result.stderr

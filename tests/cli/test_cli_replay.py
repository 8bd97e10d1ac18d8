"""The `replay` command; the laws of replaying itself are tested with the lab."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_kit import RunCli

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
    ],
)
def test_bad_options_are_refused(cli: RunCli, mooncake: Path, options: list[str], said: str) -> None:
    """What cannot be replayed is exit code 2, with the way out in the message."""
    result = cli("replay", str(mooncake), *options)
    assert result.exit_code == 2, result.output
    assert said in result.stderr


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

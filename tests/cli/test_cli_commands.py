"""Help, errors and exit codes of the command line."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from cli_kit import RunCli

from looseleaf.cli.extras import import_extra
from looseleaf.cli.failures import BAD_INPUT, FAILED, friendly_errors
from looseleaf.cli.output import format_bytes
from looseleaf.cli.reference import render_reference
from looseleaf.errors import (
    ConfigError,
    IntegrityError,
    InvalidTokens,
    LooseleafError,
    ModelError,
    OutOfBlocks,
    PinQuotaExceeded,
)
from looseleaf.lab.capacity import parse_bytes

ROOT = Path(__file__).parents[2]
COMMANDS = [["serve"], ["demo"], ["replay"], ["explain"], ["pins", "list"], ["pins", "add"], ["pins", "rm"],
            ["pins", "quota"], ["pins", "auto"]]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_and_json(cli: RunCli, command: list[str]) -> None:
    """`--help` of each command exits with 0 and names `--json`."""
    result = cli(*command, "--help")
    assert result.exit_code == 0, result.output
    assert "--json" in result.stdout


def test_help_lists_every_command(cli: RunCli) -> None:
    """The overview names each command."""
    result = cli("--help")
    assert result.exit_code == 0
    for command in COMMANDS:
        assert command[0] in result.stdout


def test_version_is_the_installed_one(cli: RunCli) -> None:
    """`--version` prints one line and exits with 0."""
    result = cli("--version")
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 1


def test_help_needs_no_torch() -> None:
    """The overview comes without importing torch, transformers or the HTTP server."""
    code = (
        "import sys; from looseleaf.cli.main import app\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "src", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_reference_is_up_to_date() -> None:
    """`docs/CLI.md` says what the commands say."""
    written = (ROOT / "docs" / "CLI.md").read_text(encoding="utf-8")
    assert written == render_reference(), "run: python -m looseleaf.cli.reference > docs/CLI.md"


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("512MiB", 512 * 2**20),
        ("2GiB", 2 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("100kb", 100_000),
        ("3GB", 3 * 10**9),
        ("64KiB", 65536),
        ("4096", 4096),
    ],
)
def test_sizes_are_read_in_binary_and_decimal_units(text: str, num_bytes: int) -> None:
    """KiB, MiB, GiB count in 1,024; KB, MB, GB in 1,000; a bare number in bytes; case does not matter."""
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "lots", "12 parsecs", "-5MiB", "0", "MiB", "1,5GiB", "nan"])
def test_a_size_that_is_none_is_refused_before_anything_is_loaded(cli: RunCli, text: str) -> None:
    """A size that cannot be read is exit code 2, with the text itself in the message."""
    result = cli("serve", f"--kv-memory={text}")
    assert result.exit_code == BAD_INPUT
    assert result.stderr.startswith("error: ")
    assert repr(text) in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--page-tokens", "100"], "page_tokens"),
        (["--block-tokens", "12"], "block_tokens"),
        (["--pin-quota", "1.5"], "pin_quota"),
        (["--policy", "lru2000"], "lru"),
        (["--max-running-requests", "0"], "max_running_requests"),
        (["--max-step-tokens", "-1"], "max_step_tokens"),
        (["--max-model-tokens", "0"], "max_model_tokens"),
        (["--page-tokens", "0"], "page_tokens"),
        (["--block-tokens", "0"], "block_tokens"),
        (["--admin-key", ""], "key"),
        (["--auto-pin", "maybe"], "dry-run"),
        (["--auto-pin-min-tokens", "many"], "--auto-pin-min-tokens"),
        (["--auto-pin-min-tokens", "inf"], "--auto-pin-min-tokens"),
        (["--auto-pin-min-rate", "-1"], "min_requests_per_second"),
    ],
)
def test_bad_settings_are_refused_before_the_model_is_loaded(
    cli: RunCli, monkeypatch: pytest.MonkeyPatch, options: list[str], named: str
) -> None:
    """A setting that cannot be is exit code 2 and named, and no model is touched."""

    def must_not_load(*_: object, **__: object) -> None:
        pytest.fail("the model was loaded")

    monkeypatch.setattr("looseleaf.cli.build.HFRunner.load", must_not_load)
    monkeypatch.setattr("looseleaf.cli.build.HFTokenizer.load", must_not_load)
    monkeypatch.setattr("looseleaf.cli.build.demo_model_dir", must_not_load)
    result = cli("serve", "--port", "0", *options)
    assert result.exit_code == BAD_INPUT, result.output
    assert named in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unknown_option_is_bad_input(cli: RunCli) -> None:
    """An option that does not exist is exit code 2."""
    assert cli("serve", "--kv-memroy", "1GiB").exit_code == BAD_INPUT


def test_a_port_in_use_is_said_before_the_model_is_loaded(cli: RunCli) -> None:
    """A taken port is exit code 2 with a hint at `--port`."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = cli("serve", "--port", str(taken.getsockname()[1]))
    assert result.exit_code == BAD_INPUT
    assert "cannot listen on 127.0.0.1" in result.stderr
    assert "--port" in result.stderr


@pytest.mark.parametrize("port", ["70000", "-1"])
def test_a_port_that_is_none_is_bad_input(cli: RunCli, port: str) -> None:
    """A number that is no port is exit code 2."""
    result = cli("serve", f"--port={port}")
    assert result.exit_code == BAD_INPUT
    assert port in result.stderr


def test_a_model_that_is_nowhere_fails_without_traceback(cli: RunCli, tmp_path: Path) -> None:
    """A folder without a model is exit code 1, with the folder in the message."""
    result = cli("serve", str(tmp_path), "--port", "0", "--kv-memory", "1MiB")
    assert result.exit_code == FAILED
    assert str(tmp_path) in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), BAD_INPUT),
        (InvalidTokens("x"), BAD_INPUT),
        (OutOfBlocks(1, 0, 0, 0), BAD_INPUT),
        (PinQuotaExceeded(2, 1, 1, 0), BAD_INPUT),
        (ModelError("x"), FAILED),
        (LooseleafError("x"), FAILED),
    ],
)
def test_errors_have_a_message_and_an_exit_code(
    capsys: pytest.CaptureFixture[str], error: LooseleafError, code: int
) -> None:
    """Bad input is 2, the world's fault 1; facts first, the hint on a line of its own, all on stderr."""
    with pytest.raises(typer.Exit) as raised, friendly_errors():
        raise error
    assert raised.value.exit_code == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"error: {error.facts}\n" + (f"hint: {error.hint}\n" if error.hint else "")


def test_our_own_bugs_keep_their_traceback() -> None:
    """A broken invariant and foreign exceptions go through as they are."""
    with pytest.raises(IntegrityError), friendly_errors():
        raise IntegrityError("I3", "x")
    with pytest.raises(ZeroDivisionError), friendly_errors():
        raise ZeroDivisionError


def test_a_missing_extra_names_the_command_that_installs_it() -> None:
    """A module whose package is missing becomes a hint; a module of ours that is missing stays a bug."""
    with pytest.raises(ConfigError, match=r"no_such_package.*\n.*looseleaf\[demo\]"):
        import_extra("no_such_package.part", "demo")
    with pytest.raises(ModuleNotFoundError):
        import_extra("looseleaf.cli.no_such_file", "demo")


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(12, "12 B"), (18432, "18.0 KiB"), (128 * 2**20, "128.0 MiB"), (3 * 2**29, "1.5 GiB")]
)
def test_bytes_are_shown_in_binary_units(num_bytes: int, text: str) -> None:
    """A size is shown in the largest unit of which there is one."""
    assert format_bytes(num_bytes) == text


def test_demo_refuses_an_output_that_cannot_be_written(cli: RunCli, tmp_path: Path) -> None:
    """A path that cannot be written is exit code 2, before a model is converted."""
    result = cli("demo", "--output", str(tmp_path / "nowhere" / "out.json"))
    assert result.exit_code == BAD_INPUT
    assert "--output" in result.stderr

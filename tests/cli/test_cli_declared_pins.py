"""Pins that a file declares, and `serve --pins`: what is refused at once, what is pinned after the start."""

from __future__ import annotations

import asyncio
import json
import signal
from itertools import islice
from pathlib import Path

import httpx
import pytest
from cli_kit import RunCli, running
from serve_kit import read_json, serving

from looseleaf.cli.build import LoadedModel
from looseleaf.cli.declared_pins import load_pins, warm_pins
from looseleaf.core.pin_record import Pin
from looseleaf.errors import ConfigError
from looseleaf.server import ServerSettings

RULES = "All members may borrow five items at a time, ladders for four days only. "
MESSAGES = [{"role": "system", "content": RULES}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with what pins may name: a text, a chat and token ids."""
    (tmp_path / "rules.txt").write_text(RULES, encoding="utf-8")
    (tmp_path / "chat.json").write_text(json.dumps(MESSAGES), encoding="utf-8")
    (tmp_path / "tokens.json").write_text("[" + ", ".join(map(str, range(97, 122))) + "]\n", encoding="utf-8")
    return tmp_path


def write(folder: Path, content: str) -> Path:
    path = folder / "pins.toml"
    path.write_text(content, encoding="utf-8")
    return path


def warmed(model: LoadedModel, path: Path, settings: ServerSettings | None = None) -> tuple[list[Pin], list[str]]:
    """The pins of a new server after it has warmed those of a file, and what it said."""
    said: list[str] = []
    with running(model, settings) as server:
        context = server.stack.app.state.context
        asyncio.run(warm_pins(context, load_pins(path), said.append))
        return server.stack.cache.pins(), said


def test_every_kind_of_prompt_is_pinned_and_held(fake_model: LoadedModel, folder: Path) -> None:
    """Text, file, messages, a file of messages and token ids are computed and held, with what the file says of each;
    paths are relative to it."""
    path = write(
        folder,
        f"""
[[pin]]
text = "{RULES}"
[[pin]]
file = "rules.txt"
owner = "ops"
labels = {{ team = "docs" }}
level = "soft"
priority = 3
[[pin]]
messages = [{{ role = "system", content = "{RULES}" }}]
salt = "tenant"
ttl_seconds = 60
max_ttl_seconds = 3600
refresh = true
[[pin]]
messages_file = "chat.json"
[[pin]]
tokens_file = "tokens.json"
last_token = 17
""",
    )
    pins, said = warmed(fake_model, path)
    assert [pin.num_pinned_tokens for pin in pins] == [pin.num_tokens // 16 * 16 for pin in pins]
    assert all(pin.num_pinned_tokens for pin in pins)
    text, file, messages, chat, tokens = pins
    assert text.num_tokens == file.num_tokens == len(RULES) + 1
    assert (file.owner, dict(file.labels), file.level, file.priority) == ("ops", {"team": "docs"}, "soft", 3)
    assert text.owner == "pins.toml"
    assert messages.num_tokens == chat.num_tokens
    assert (messages.namespace, messages.refresh) == ('salt="tenant"', True)
    assert messages.expires_at == pytest.approx(messages.created_at + 60)
    assert (tokens.num_tokens, tokens.num_pinned_tokens) == (17, 16)
    assert len(said) == 5
    assert said[1].startswith(f"pin 2 of 5: pins.toml, pin 2 (rules.txt): 64 of {len(RULES) + 1} tokens held")


def test_what_cannot_be_pinned_is_said_and_the_rest_go_on(fake_model: LoadedModel, folder: Path) -> None:
    """A prompt longer than the memory and one over the quota are named with the numbers; those around them are held."""
    (folder / "long.txt").write_text("a" * 5000, encoding="utf-8")
    path = write(
        folder,
        f"""
[[pin]]
file = "long.txt"
[[pin]]
text = "{RULES}"
[[pin]]
text = "{"b" * 240}"
[[pin]]
tokens_file = "tokens.json"
""",
    )
    pins, said = warmed(fake_model, path, ServerSettings(admin_key="secret"))
    assert [pin.num_pinned_tokens for pin in pins] == [64, 16]
    assert "long.txt" in said[0]
    assert "not pinned" in said[0]
    assert "5001" in said[0].replace(",", "")
    assert "64 of" in said[1]
    assert "not pinned" in said[2]
    assert "quota" in said[2]
    assert "16 of 25" in said[3]


@pytest.mark.parametrize(
    ("content", "facts", "hint"),
    [
        ("[[pin]\n", "pins.toml", None),
        ("[[pins]]\ntext = 'a'\n", "no setting 'pins'", "pin"),
        ("pin = 3\n", "no list of tables", "[[pin]]"),
        ("[pin]\ntext = 'a'\n", "no list of tables", "[[pin]]"),
        ("[[pin]]\ntext = 'a'\n[[pin]]\ntext = 'a'\nownr = 'x'\n", "pin 2 has no setting 'ownr'", "'owner'"),
        ("[[pin]]\ntext = 'a'\nwait = true\n", "no setting 'wait'", None),
        ("[[pin]]\nowner = 'x'\n", "pin 1 has nothing to pin", "text, file"),
        ("[[pin]]\ntext = 'a'\nfile = 'rules.txt'\n", "text and file", "one of"),
        ("[[pin]]\nfile = 'none.txt'\n", "none.txt: No such file", None),
        ("[[pin]]\nmessages_file = 'rules.txt'\n", "rules.txt: Expecting value", "JSON list"),
        ("[[pin]]\nmessages_file = 'object.json'\n", "pin 1: messages: ", None),
        ("[[pin]]\ntokens_file = 'rules.txt'\n", "rules.txt: Expecting value", "JSON list"),
        ("[[pin]]\nmessages = [{ role = 'user', text = 3, content = 4 }]\n", "pin 1: messages.0.content", None),
        ("[[pin]]\ntext = 'a'\nlevel = 'harder'\n", "pin 1: level: ", None),
        ("[[pin]]\ntext = 'a'\nttl_seconds = 0\n", "pin 1: ttl_seconds: ", None),
        ("[[pin]]\ntext = 'a'\nlabels = { team = 7 }\n", "pin 1: labels.team: ", None),
        ("[[pin]]\ntext = 3\n", "pin 1: text: ", None),
    ],
)
def test_a_malformed_file_is_refused(folder: Path, content: str, facts: str, hint: str | None) -> None:
    """What cannot be is said with the pin's number and the key; a misspelt key gets the nearest name."""
    (folder / "object.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        load_pins(write(folder, content))
    assert facts in raised.value.facts
    assert hint is None or hint in (raised.value.hint or "")


def test_a_malformed_file_is_refused_before_the_model_is_loaded(
    cli: RunCli, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """`serve` says what is wrong with the file with exit code 2, and touches no model."""
    monkeypatch.setattr("looseleaf.cli.build.load_model", lambda *_: pytest.fail("the model was loaded"))
    for path in (write(folder, "[[pin]]\ntxt = 'a'\n"), folder / "none.toml"):
        result = cli("serve", "--port", "0", "--pins", str(path))
        assert result.exit_code == 2, result.output
        assert path.name in result.stderr
        path.unlink(missing_ok=True)


def test_an_empty_file_declares_nothing(folder: Path) -> None:
    """No pins is no error."""
    assert load_pins(write(folder, "")) == []


def test_serving_declared_pins_and_again_after_a_restart(folder: Path) -> None:
    """The server is up while it warms (each forward pass takes 0.2 s), says how far it is, and holds the pins in the
    end; a new process with the same file holds them again."""
    path = write(folder, f"[[pin]]\ntext = '{RULES}'\nowner = 'ops'\n[[pin]]\nfile = 'rules.txt'\nsalt = 'x'\n")
    for _ in range(2):
        with serving("--json", "--pins", str(path), "--max-step-tokens", "16", delay=0.2) as process:
            url = read_json(process)["url"]
            assert httpx.get(f"{url}/health").status_code == 200
            assert httpx.get(f"{url}/v1/pins").json()["data"] == []  # it still computes
            assert process.stderr is not None
            said = list(islice((line for line in process.stderr if line.startswith("pin ")), 2))
            assert said[0].startswith("pin 1 of 2: pins.toml, pin 1 (text): 64 of 74 tokens held, after ")
            assert said[1].startswith("pin 2 of 2: pins.toml, pin 2 (rules.txt): 64 of 74 tokens held, after ")
            pins = httpx.get(f"{url}/v1/pins").json()["data"]
            assert [(pin["owner"], pin["num_pinned_tokens"]) for pin in pins] == [("ops", 64), ("pins.toml", 64)]


def test_stopping_while_pins_are_computed_is_clean(folder: Path) -> None:
    """Ctrl-C in the middle of warming ends the server with 0 and without a traceback, and says nothing of pins."""
    path = write(folder, f"[[pin]]\ntext = '{RULES}'\n[[pin]]\ntext = 'b{RULES}'\n")
    with serving("--json", "--pins", str(path), "--max-step-tokens", "16", delay=0.5) as process:
        read_json(process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0
        assert "Traceback" not in err
        assert "pin " not in err

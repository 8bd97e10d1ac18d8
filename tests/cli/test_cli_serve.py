"""`serve` as a process: start-up, what it prints, signals."""

from __future__ import annotations

import re
import signal

import httpx
import pytest
from openai import OpenAI
from serve_kit import read_json, serving


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_cleanly(sent: signal.Signals) -> None:
    """Ctrl-C ends the server with 0, SIGTERM as that signal; the model is closed, and no traceback is printed."""
    with serving("--json") as process:
        facts = read_json(process)
        assert httpx.get(f"{facts['url']}/health").status_code == 200
        process.send_signal(sent)
        out, err = process.communicate(timeout=30)
        assert process.returncode == (0 if sent is signal.SIGINT else -signal.SIGTERM)
        assert "Traceback" not in err
        if sent is signal.SIGINT:
            assert "closed" in out


def test_startup_facts_add_up() -> None:
    """`--json` says how the memory is cut: 64 KiB of 8 bytes a token are 8,192 tokens in 32 pages."""
    with serving("--json", "--policy", "lfu", "--max-model-tokens", "1000", "--pin-quota", "0.25") as process:
        facts = read_json(process)
        assert facts["model"] == "fake"
        assert facts["num_pages"] == 32
        assert facts["num_tokens"] == 8192
        assert facts["kv_bytes"] == 65536
        assert facts["policy"] == "lfu"
        assert facts["max_model_tokens"] == 1000
        assert facts["pin_quota_tokens"] == 2048
        assert facts["reserve_pages"] == 1
        assert (facts["sequence_tokens"], facts["sequence_blocks"]) == (1000, 63)
        assert facts["sequence_bytes"] == facts["sequence_all_bytes"] == 63 * 16 * 8


def test_startup_facts_of_windows() -> None:
    """Of a full lane and two that keep 64 tokens, a sequence of 1,000 tokens holds 63 blocks and twice 6 (the window,
    and what is being written), of the 189 that it would take if every layer kept every token."""
    groups = '(LayerGroup("full"), LayerGroup("window", window_tokens=64, num_lanes=2))'
    with serving("--json", "--max-model-tokens", "1000", "--reserve-pages", "3", groups=groups) as process:
        facts = read_json(process)
        assert (facts["num_lanes"], facts["num_blocks"], facts["reserve_pages"]) == (3, 512, 3)
        assert facts["sequence_blocks"] == 63 + 2 * 6
        assert facts["sequence_all_bytes"] == 3 * 63 * 16 * 8
        assert httpx.get(f"{facts['url']}/v1/cache/stats").json()["num_lanes"] == 3


def test_the_printed_calls_work() -> None:
    """A person sees model, memory, a curl call and the client's address; the address serves the official client."""
    with serving() as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "dashboard" in line:
                break
        text = "".join(lines)
        found = re.search(r'base_url="(\S+)/v1"', text)
        assert found is not None
        assert f"curl {found.group(1)}/v1/completions" in text
        assert "64.0 KiB: 512 blocks, 32 pages of 256 tokens" in text
        assert "a sequence of 4,096 tokens takes 256 blocks (32.0 KiB), so 2 fit" in text
        with OpenAI(base_url=f"{found.group(1)}/v1", api_key="none") as client:
            answer = client.completions.create(model="fake", prompt="The harbour", max_tokens=4)
        assert len(answer.choices[0].text) == 4


def test_ctrl_c_does_not_wait_for_long_requests() -> None:
    """A request that would run for minutes is cut off after the grace time, and the exit is clean."""
    with serving("--json", delay=0.2) as process:
        facts = read_json(process)
        body = {"model": "fake", "prompt": "a", "max_tokens": 2000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{facts['url']}/v1/completions", json=body, timeout=30.0) as response:
            assert next(response.iter_lines()).startswith("data: ")
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=30)
        assert process.returncode == 0
        assert "Traceback" not in err, err


def test_ctrl_c_while_loading_is_no_traceback() -> None:
    """Ctrl-C before the server is ready ends the command at once, without a traceback."""
    with serving("--json", loading=60.0) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
        assert process.returncode in (1, 130)
        assert "Traceback" not in err


def test_the_admin_key_is_asked_for() -> None:
    """With `--admin-key`, pins are refused without it and granted with it; completions stay open."""
    with serving("--json", "--admin-key", "secret") as process:
        url = read_json(process)["url"]
        assert httpx.post(f"{url}/v1/pins", json={"text": "hello"}).status_code in (401, 403)
        granted = httpx.post(f"{url}/v1/pins", json={"text": "hello"}, headers={"Authorization": "Bearer secret"})
        assert granted.status_code == 200
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200

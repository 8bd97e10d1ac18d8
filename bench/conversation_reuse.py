"""A conversation with tools through the chat API, text in and text out: what each turn reuses, and why it loses what it
loses.

    python bench/conversation_reuse.py CONVERSATIONS [--conversation ID] [--output FILE] [--styles NAME ...]

CONVERSATIONS: JSON lines, each `{"id": ..., "messages": [...]}` in the shape of the chat API. Every user message and
every result of a tool asks the real server with the demo model for the next answer; what is sent back as that answer is
what the styles differ in:

unchanged         the text that came, a recorded tool call behind it where there was one
unchanged, text   the same, but the server remembers no tokens: the text is tokenised anew, as other servers do
trimmed           without white space at both ends, as many clients do
recorded          the recorded answer instead: an edited message
thinking          unchanged, under a template that opens a thought for the answer and drops it from old turns
clock             unchanged, with the time of day in the system prompt, which changes with every turn

`could`: whole blocks of the turn before, prompt and answer, as far as they were computed (the last token that a limit
allows is given out, not computed).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from looseleaf.cli.machine import provenance

Message = dict[str, Any]

THINKING_TEMPLATE = (
    "{{ bos_token }}{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for message in messages %}"
    "<start_of_turn>{{ message['role'] }}{{ '\\n' }}{{ message['content'].split('</think>')[-1] }}"
    "{% for call in message['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}<end_of_turn>{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>assistant{{ '\\n' }}<think>{{ '\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Style:
    """How answers are sent back. `text`: what becomes of an answer's text; None: the recorded message. `has_clock`: a
    system prompt that tells the time. `remembers`: the server keeps generated tokens. `template`: the chat template."""

    text: Callable[[str], str] | None = str
    has_clock: bool = False
    remembers: bool = True
    template: str | None = None


STYLES: Mapping[str, Style] = {
    "unchanged": Style(),
    "unchanged, text": Style(remembers=False),
    "trimmed": Style(str.strip),
    "recorded": Style(None),
    "thinking": Style(template=THINKING_TEMPLATE),
    "clock": Style(has_clock=True),
}


@dataclass(frozen=True)
class Turn:
    """One request. `could_tokens`: what the turn before left in whole blocks. `reason`: of the first miss; `cause` and
    `message`: how the conversation drifted, if it did."""

    turn: int
    role: str
    prompt_tokens: int
    cached_tokens: int
    could_tokens: int
    reused_share: float
    lost_tokens: int
    reason: str
    cause: str | None
    message: str


def play(
    http: httpx.Client, messages: Sequence[Message], style: Style, max_tokens: int, block_tokens: int
) -> Iterator[Turn]:
    """Ask for an answer at each place where the recording has one, and at its end; the figures of each request."""
    sent: list[Message] = []
    tools, known = tools_of(messages), 0
    for place, message in enumerate([*messages, {"role": "assistant"}]):
        if message["role"] != "assistant":
            sent.append(message)
            continue
        number = sum(1 for one in messages[:place] if one["role"] == "assistant") + 1
        asked = with_clock(sent, number) if style.has_clock else sent
        answer, explanation = ask(http, asked, tools, max_tokens, seed=number)
        usage, choice = answer["usage"], answer["choices"][0]
        prompt, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        could = known // block_tokens * block_tokens
        drift = explanation["drift"] or {}
        yield Turn(
            number,
            sent[-1]["role"],
            prompt,
            cached,
            could,
            cached / prompt,
            max(0, could - cached),
            explanation["reason"],
            drift.get("cause"),
            drift.get("message", explanation["message"]),
        )
        known = prompt + len(choice["token_ids"]) - (choice["finish_reason"] == "length")
        if style.text is None:
            sent.append(message)
        else:
            calls = {"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {}
            sent.append({"role": "assistant", "content": style.text(choice["message"]["content"]), **calls})


def ask(
    http: httpx.Client, messages: Sequence[Message], tools: Sequence[Message], max_tokens: int, seed: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One answer, drawn at temperature 1 (the most likely tokens alone are seldom other ones than the tokenizer's), and
    the explanation of its request."""
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 1.0, "seed": seed, "return_token_ids": True}
    if tools:
        body["tools"] = tools
    answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
    return answer, http.get(f"/v1/requests/{answer['id']}/cache").raise_for_status().json()


def with_clock(messages: Sequence[Message], minute: int) -> list[Message]:
    """The messages with the time of day in the first one."""
    first = messages[0]
    return [{**first, "content": f"It is 15:{minute:02} now.\n{first['content']}"}, *messages[1:]]


def tools_of(messages: Sequence[Message]) -> list[Message]:
    """A description of each tool that is called, from its calls."""
    arguments: dict[str, dict[str, Any]] = {}
    for message in messages:
        for call in message.get("tool_calls") or []:
            function = call["function"]
            arguments.setdefault(function["name"], {}).update(json.loads(function["arguments"]))
    tools = []
    for name, given in arguments.items():
        properties = {key: {"type": kind_of(value)} for key, value in given.items()}
        function = {"name": name, "parameters": {"type": "object", "properties": properties}}
        tools.append({"type": "function", "function": function})
    return tools


def kind_of(value: object) -> str:
    """Its type in JSON schema."""
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "string")


def totals(turns: Sequence[Turn]) -> dict[str, Any]:
    """Sums over all turns, and what was lost by cause."""
    prompt, cached = sum(turn.prompt_tokens for turn in turns), sum(turn.cached_tokens for turn in turns)
    could, lost = sum(turn.could_tokens for turn in turns), sum(turn.lost_tokens for turn in turns)
    causes: dict[str, int] = {}
    for turn in turns:
        if turn.lost_tokens:
            cause = turn.cause or turn.reason
            causes[cause] = causes.get(cause, 0) + turn.lost_tokens
    return {
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "reused_share": cached / prompt,
        "could_tokens": could,
        "lost_tokens": lost,
        "lost_by_cause": causes,
    }


def run(conversation: Mapping[str, Any], names: Sequence[str], max_tokens: int) -> dict[str, Any]:
    """Every style on the real server with the demo model, each with a fresh cache."""
    from transformers import AutoTokenizer

    from looseleaf.cli.build import MemorySettings, ModelSettings, build_stack, load_model
    from looseleaf.cli.serving import BackgroundServer
    from looseleaf.engine.config import EngineConfig
    from looseleaf.hf.demo_model import demo_model_dir
    from looseleaf.hf.tokenizer import HFTokenizer
    from looseleaf.server import ServerSettings

    memory = MemorySettings(kv_bytes=512 * 2**20)
    model = load_model(ModelSettings(), memory)
    results: dict[str, Any] = {}
    try:
        for name in names:
            style, served = STYLES[name], model
            if style.template is not None:
                tokenizer = AutoTokenizer.from_pretrained(demo_model_dir())
                tokenizer.chat_template = style.template
                served = replace(model, tokenizer=HFTokenizer(tokenizer))
            settings = ServerSettings() if style.remembers else ServerSettings(remembered_tokens=0)
            stack = build_stack(served, memory, EngineConfig(), settings)
            with BackgroundServer(stack.app) as server, httpx.Client(base_url=server.url, timeout=600.0) as http:
                turns = []
                for turn in play(http, conversation["messages"], style, max_tokens, memory.block_tokens):
                    turns.append(turn)
                    print_turn(name, turn)
            results[name] = {**totals(turns), "turns": [asdict(turn) for turn in turns]}
    finally:
        model.close()
    return results


def print_turn(style: str, turn: Turn) -> None:
    """A line, and the explanation of a loss below it."""
    print(
        f"{style:16} turn {turn.turn:2} after {turn.role:6} {turn.prompt_tokens:6} tokens, "
        f"{turn.cached_tokens:6} reused ({turn.reused_share:6.1%}), {turn.lost_tokens:5} lost",
        flush=True,
    )
    if turn.lost_tokens:
        print(f"    {turn.cause or turn.reason}: {turn.message}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("conversations", type=Path)
    parser.add_argument("--conversation", help="its id; default: the first")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--styles", nargs="+", choices=list(STYLES), default=list(STYLES))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    lines = arguments.conversations.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    chosen = next((row for row in rows if arguments.conversation in (None, row["id"])), None)
    if chosen is None:
        sys.exit(f"there is none {arguments.conversation!r}; there are {', '.join(row['id'] for row in rows)}")
    results = run(chosen, arguments.styles, arguments.max_tokens)
    for name, result in results.items():
        share, lost = result["reused_share"], result["lost_tokens"]
        print(f"{name:16} {share:6.1%} reused, {lost:6} lost: {result['lost_by_cause']}")
    if arguments.output:
        facts = {"conversation": chosen["id"], "max_tokens": arguments.max_tokens, "block_tokens": 16}
        document = {**provenance(), **facts, "styles": results}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""What the demo asks: a policy with short questions, a document with long ones, and a burst of one-off letters."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["short", "long", "one-off"]

NUM_LETTERS = 8
PARAGRAPHS_PER_LETTER = 14
MAX_ANSWER_TOKENS = 256
"""The bound that clients set; answers end long before it, at the end of a sentence."""


@dataclass(frozen=True)
class DemoRequest:
    """One prompt. `short`: a question behind the shared policy; `long`: one behind the document; `one-off`: a letter.

    Answers end at one of `stops`; `max_tokens` is only a bound, as clients set it.
    """

    name: str
    kind: Kind
    prompt: str
    max_tokens: int = MAX_ANSWER_TOKENS
    stops: tuple[str, ...] = (".", "\n")


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival, `num_clients` at a time; `policy` is the text that is worth a pin."""

    policy: str
    requests: tuple[DemoRequest, ...]
    num_clients: int = 4


def shipped_workload() -> Workload:
    """The workload of the texts in this package: 10 questions, 4 about the document, 8 letters."""
    policy = _read("policy.txt")
    document = _read("document.txt")
    shorts = [
        DemoRequest(f"question {number}", "short", f"{policy}\nQuestion: {question}\nAnswer:")
        for number, question in enumerate(_read("questions.txt").splitlines(), 1)
    ]
    longs = [
        DemoRequest(f"document {number}", "long", f"{document}\nQuestion: {question}\nAnswer:")
        for number, question in enumerate(_read("document_questions.txt").splitlines(), 1)
    ]
    return Workload(policy, tuple(_mixed(shorts, longs, _letters())))


def _mixed(shorts: list[DemoRequest], longs: list[DemoRequest], letters: list[DemoRequest]) -> list[DemoRequest]:
    """Some questions, then the burst of letters with a few questions in it, then the other questions.

    q d q q d q | l l l q  l l d q  l l l | q d q q q
    """
    short, long, letter = iter(shorts), iter(longs), iter(letters)
    mixed: list[DemoRequest] = []
    for kind in "qdqqdq" + "lllq" + "lldq" + "lll" + "qdqqq":
        mixed += islice({"q": short, "d": long, "l": letter}[kind], 1)
    return mixed


def _letters() -> list[DemoRequest]:
    """Letters that begin differently, each made of other paragraphs in another order; none shares a first block."""
    paragraphs = [text.strip() for text in _read("letters.txt").split("\n\n")]
    names = _read("names.txt").splitlines()
    letters = []
    for number, name in enumerate(names[:NUM_LETTERS]):
        stride = (1, 3, 5, 9, 11, 13)[number % 6]
        chosen = [paragraphs[(5 * number + stride * i) % len(paragraphs)] for i in range(PARAGRAPHS_PER_LETTER)]
        head, end = f"Letter {number + 1}, from {name}.", "Question: Is this letter a complaint, yes or no?\nAnswer:"
        text = "\n".join([head, *chosen, end])
        letters.append(DemoRequest(f"letter {number + 1}", "one-off", text))
    return letters


def _read(name: str) -> str:
    return (files("looseleaf.cli.demo") / "texts" / name).read_text(encoding="utf-8").strip()

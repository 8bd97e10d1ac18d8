"""What the pinning bench asks for: documents with questions, or popular prompts, in a flood of one-off requests.

A load is an ordered list that a fixed number of clients works through, each sending its next request when its last one
is answered. So what lies between two questions about a document is a number of other requests, not a time: the cache
meets the same load on a slow machine and on a fast one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np

from looseleaf.engine.tokenizer import Tokenizer
from looseleaf.ids import Int32Array

DOCUMENT, POPULAR, FLOOD = "document", "popular", "flood"
SHIPPED_TEXTS = ("policy.txt", "document.txt", "letters.txt")


@dataclass(frozen=True)
class Item:
    """One request. `subject` names what it shares with others of its kind (None: nothing), its first `shared_tokens`
    tokens; `own_tokens` follow that nobody else has. `is_measured`: not part of the warm-up."""

    kind: str
    subject: int | None
    shared_tokens: int
    own_tokens: int
    output_tokens: int
    is_measured: bool

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self.shared_tokens + self.own_tokens


@dataclass(frozen=True)
class Load:
    """Items in order, worked through by `num_clients` clients; `subjects`: tokens of what is worth a pin, by name."""

    items: tuple[Item, ...]
    num_clients: int
    subjects: Mapping[int, int]


@dataclass(frozen=True)
class DocumentsSpec:
    """`num_documents` of `document_tokens` (shortest, longest), asked about once a round in random order; between two
    questions come `flood_per_question` one-off requests. This number and all lengths of the flood vary by a half."""

    num_documents: int
    document_tokens: tuple[int, int]
    question_tokens: int
    answer_tokens: int
    flood_per_question: int
    flood_tokens: int
    flood_output_tokens: int
    warm_rounds: int
    rounds: int
    num_clients: int

    def load(self, seed: int = 1) -> Load:
        """The same list for the same seed."""
        rng = random.Random(seed)
        low, high = self.document_tokens
        step = (high - low) // max(1, self.num_documents - 1)
        subjects = {number: (low + step * number) // 16 * 16 for number in range(self.num_documents)}
        items = []
        for number in range(self.warm_rounds + self.rounds):
            is_measured = number >= self.warm_rounds
            for subject in rng.sample(sorted(subjects), len(subjects)):
                items.append(
                    Item(
                        DOCUMENT,
                        subject,
                        subjects[subject],
                        around(rng, self.question_tokens),
                        self.answer_tokens,
                        is_measured,
                    )
                )
                items.extend(
                    Item(FLOOD, None, 0, around(rng, self.flood_tokens), self.flood_output_tokens, is_measured)
                    for _ in range(around(rng, self.flood_per_question))
                )
        return Load(tuple(items), self.num_clients, subjects)


@dataclass(frozen=True)
class PopularSpec:
    """`num_prompts` different prompts of which 1% get half of the requests, each equally often; the other half is drawn
    from the rest. All are answered with `output_tokens`; the popular ones have `popular_tokens` tokens."""

    num_prompts: int
    popular_tokens: int
    other_tokens: int
    output_tokens: int
    warm_requests: int
    requests: int
    num_clients: int

    def load(self, seed: int = 2) -> Load:
        """The same list for the same seed."""
        rng = random.Random(seed)
        num_popular = max(1, self.num_prompts // 100)
        lengths = {
            number: self.popular_tokens if number < num_popular else around(rng, self.other_tokens)
            for number in range(self.num_prompts)
        }
        items = []
        for number in range(self.warm_requests + self.requests):
            is_popular = rng.random() < 0.5
            subject = rng.randrange(num_popular) if is_popular else rng.randrange(num_popular, self.num_prompts)
            items.append(
                Item(
                    POPULAR if is_popular else FLOOD,
                    subject,
                    lengths[subject],
                    0,
                    self.output_tokens,
                    number >= self.warm_requests,
                )
            )
        return Load(tuple(items), self.num_clients, {number: lengths[number] for number in range(num_popular)})


def around(rng: random.Random, num_tokens: int) -> int:
    """A length within a half of `num_tokens`."""
    return rng.randint(num_tokens // 2, num_tokens * 3 // 2)


class TextPrompts:
    """Prompts of real sentences in random order, as token ids of exact length, each under a title of its own."""

    def __init__(self, tokenizer: Tokenizer, texts: Path | None = None) -> None:
        """`texts`: a file, or a folder of .txt and .jsonl, to take sentences from; None for those of the demo."""
        self._tokenizer = tokenizer
        self._sentences = [line for text in _texts(texts) for line in text.replace("\n", ". ").split(". ") if line]

    def subject(self, kind: str, subject: int, num_tokens: int) -> Int32Array:
        """The first `num_tokens` tokens of what all items of one subject share: int32 [num_tokens]."""
        return self._write(f"{kind} {subject}", num_tokens)

    def prompts(self, load: Load) -> list[Int32Array]:
        """The prompt of each item."""
        known: dict[tuple[str, int], Int32Array] = {}
        found = []
        for number, item in enumerate(load.items):
            parts = []
            if item.subject is not None:
                key = (item.kind, item.subject)
                if key not in known:
                    known[key] = self.subject(*key, item.shared_tokens)
                parts.append(known[key])
            if item.own_tokens:
                parts.append(self._write(f"Item {number}", item.own_tokens, is_start=not parts))
            found.append(np.concatenate(parts))
        return found

    def _write(self, title: str, num_tokens: int, is_start: bool = True) -> Int32Array:
        rng = random.Random(title)
        words: list[str] = [f"{title}:"]
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            words += rng.sample(self._sentences, min(20, len(self._sentences)))
            tokens = self._tokenizer.encode(". ".join(words), add_special_tokens=is_start)
        return np.array(tokens[:num_tokens], np.int32)


def _texts(path: Path | None) -> Iterator[str]:
    if path is None:
        for name in SHIPPED_TEXTS:
            yield (files("looseleaf.cli.demo") / "texts" / name).read_text(encoding="utf-8")
        return
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.suffix == ".jsonl":
            yield from (text for line in file.read_text().splitlines() for text in _strings(json.loads(line)))
        elif file.suffix == ".txt":
            yield file.read_text(encoding="utf-8")


def _strings(value: object) -> Iterator[str]:
    """All texts of some length in a JSON value."""
    if isinstance(value, str):
        if len(value) > 40:
            yield value
    elif isinstance(value, (list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)

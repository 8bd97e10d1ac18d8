"""Conversations as they were computed, so that the next turn goes on from the very tokens of the last one, and so that
what changed in between can be told.

An answer leaves as text and comes back as text. Where a request goes on from one that is remembered, the tokens of that
one, generated ones included, are taken for the text that is still the same. Where it is not (the template drops
thoughts from old turns, a client trimmed or edited a message), what lies before still matches, and a `Drift` says where
and why.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any, Literal, TypeAlias

import numpy as np

from looseleaf.engine.exact_prompt import ExactPrompt, texts_agree
from looseleaf.engine.tokenizer import Tokenizer
from looseleaf.ids import Int32Array, Namespace, RequestId
from looseleaf.server.conversations import Turn

Cause: TypeAlias = Literal[
    "retokenized", "template_rewrote", "message_edited", "message_removed", "message_inserted", "tools_changed"
]
MAX_REQUESTS = 10_000
_MIN_TELLING_CHARACTERS = 24
"""An answer that short is given in many conversations: it does not tell which one this is."""
_NUM_SHOWN_TOKENS = 12
_ABSENT: tuple[object, ...] = (None, "", [], {}, ())

_REASONS: Mapping[Cause, str] = {
    "retokenized": "the same text has other tokens there",
    "template_rewrote": "the chat template renders a message that came back unchanged in another way",
    "message_edited": "that message is not what it was",
    "message_removed": "a message that stood there is missing",
    "message_inserted": "a message was put in between",
    "tools_changed": "the tools are not the same",
}


@dataclass(frozen=True)
class Drift:
    """Where a conversation left the tokens of an earlier request and its answer, `earlier_request_id`.

    `token`: position of the first token that differs. `message_index`: the message of the new request in which that
    lies or that is missing or changed, from 0. `num_lost_tokens`: tokens of the earlier sequence in whole blocks behind
    it. `text_before`, `earlier_text`, `text_now`: a few tokens before that place, and behind it then and now.
    """

    cause: Cause
    earlier_request_id: RequestId
    token: int
    message_index: int
    num_lost_tokens: int
    text_before: str
    earlier_text: str
    text_now: str

    def as_answer(self, *, shows_earlier: bool) -> dict[str, Any]:
        """All of it with a sentence, for JSON; what was said earlier only if it is the reader's to see."""
        earlier = repr(self.earlier_text) if shows_earlier else "something else"
        message = (
            f"differs from token {self.token} on, in message {self.message_index}, from request "
            f"{self.earlier_request_id!r} and its answer, of which {self.num_lost_tokens} cached tokens are lost: "
            f"{_REASONS[self.cause]}. After {self.text_before!r} came {earlier}, now {self.text_now!r}."
        )
        hidden = {} if shows_earlier else {"earlier_text": None}
        return {**asdict(self), **hidden, "message": message}


@dataclass(frozen=True)
class Conversation:
    """Messages of a request, the tools it offers, and where it belongs."""

    turns: Sequence[Turn]
    tools: Sequence[Mapping[str, Any]] = ()
    namespace: Namespace = ""
    session: str | None = None


@dataclass(frozen=True, eq=False)
class ContinuedPrompt:
    """The prompt of a conversation. `messages`: digests of its messages. `drift`: how it left the earlier request that
    it goes on from; None if it did not."""

    conversation: Conversation
    messages: tuple[bytes, ...]
    prompt: ExactPrompt
    drift: Drift | None = None


@dataclass(frozen=True, eq=False)
class _Past:
    """A request with its answer. `messages`: digests of its messages, the answer last; `keys`: where it is found."""

    request_id: RequestId
    namespace: Namespace
    session: str | None
    messages: tuple[bytes, ...]
    tools: bytes
    prompt: ExactPrompt
    generated: Int32Array
    keys: tuple[bytes, ...]

    @property
    def tokens(self) -> Int32Array:
        """The prompt and its answer."""
        return np.concatenate((self.prompt.tokens, self.generated))

    @property
    def num_tokens(self) -> int:
        """Tokens that remembering it takes."""
        return (2 if self.prompt.seams else 1) * len(self.prompt.tokens) + len(self.generated)


class PastTurns:
    """The last conversations, at most `max_tokens` tokens and 10,000 requests of them, least recently used ones first
    out. Safe from several threads. `max_tokens` 0: nothing is remembered, prompts are always what the template says."""

    def __init__(self, tokenizer: Tokenizer, block_tokens: int, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._block_tokens = block_tokens
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._lock = threading.Lock()
        self._pasts: OrderedDict[_Past, None] = OrderedDict()
        self._index: dict[bytes, _Past] = {}

    def go_on(self, conversation: Conversation, rendered: Sequence[int]) -> ContinuedPrompt:
        """The prompt for `rendered`, the tokens that the template gives for a conversation or its beginning.

        Raises:
            InvalidTokens: it is empty.
        """
        fresh = ExactPrompt.of(rendered)
        messages = tuple(_digest(turn) for turn in conversation.turns)
        with self._lock:
            past = self._find(conversation, messages)
            if past is None:
                return ContinuedPrompt(conversation, messages, fresh)
            self._pasts.move_to_end(past)
        prompt = past.prompt.go_on(self._tokenizer, past.generated, fresh.rendered)
        return ContinuedPrompt(conversation, messages, prompt, self._drift(conversation, messages, past, prompt))

    def remember(self, request_id: RequestId, asked: ContinuedPrompt, text: str, token_ids: Sequence[int]) -> None:
        """Keep a request with the answer that it got: its text, and the tokens of that text."""
        conversation, generated = asked.conversation, np.asarray(token_ids, np.int32)
        messages = (*asked.messages, _digest(Turn("assistant", (text,))))
        keys = [*_chain(conversation.namespace, messages)]
        if len(text) >= _MIN_TELLING_CHARACTERS:
            keys.append(_key("answer", conversation.namespace, text.strip().encode("utf-8", "replace")))
        if conversation.session is not None:
            keys.append(_key("session", conversation.namespace, conversation.session.encode()))
        past = _Past(
            request_id,
            conversation.namespace,
            conversation.session,
            messages,
            _digest_of(conversation.tools),
            asked.prompt,
            generated,
            tuple(keys),
        )
        if past.num_tokens > self._max_tokens:
            return
        with self._lock:
            self._pasts[past] = None
            self._index.update(dict.fromkeys(keys, past))
            self._num_tokens += past.num_tokens
            while self._num_tokens > self._max_tokens or len(self._pasts) > MAX_REQUESTS:
                self._drop(next(iter(self._pasts)))

    def forget(self, namespace: Namespace | None, session: str | None = None) -> None:
        """Forget the conversations of one namespace or all (None), or one session of it."""
        with self._lock:
            for past in list(self._pasts):
                if namespace in (None, past.namespace) and session in (None, past.session):
                    self._drop(past)

    def _drop(self, past: _Past) -> None:
        del self._pasts[past]
        self._num_tokens -= past.num_tokens
        for key in past.keys:
            if self._index.get(key) is past:
                del self._index[key]

    def _find(self, conversation: Conversation, messages: Sequence[bytes]) -> _Past | None:
        """The request that this one goes on from: with most messages in common, if that is more than an opening that
        others have too; else one whose answer is among the messages; else the last one of the session."""
        namespace, turns = conversation.namespace, conversation.turns
        for index, key in reversed(list(enumerate(_chain(namespace, messages)))):
            past = self._index.get(key)
            if past is not None:
                answered = any(turn.role == "assistant" for turn in turns[: index + 1])
                if answered or index + 1 >= len(past.messages) - 1:
                    return past
                break
        for turn in reversed(turns):
            if turn.role == "assistant" and len(turn.text) >= _MIN_TELLING_CHARACTERS:
                past = self._index.get(_key("answer", namespace, turn.text.strip().encode("utf-8", "replace")))
                if past is not None:
                    return past
        if conversation.session is None:
            return None
        return self._index.get(_key("session", namespace, conversation.session.encode()))

    def _drift(
        self, conversation: Conversation, messages: Sequence[bytes], past: _Past, prompt: ExactPrompt
    ) -> Drift | None:
        cause: Cause
        earlier, at = past.tokens, prompt.num_kept_tokens
        num_common = sum(1 for _ in _common(past.messages, messages))
        if at >= len(earlier):
            return None
        if _digest_of(conversation.tools) != past.tools:
            cause, place = "tools_changed", 0
        elif num_common == len(messages):  # it asks again, or goes back to an earlier turn
            return None
        elif num_common == len(past.messages):
            agree = texts_agree(self._tokenizer, earlier, prompt.tokens, at)
            cause = "retokenized" if agree else "template_rewrote"
            place = self._message_at(conversation.turns, prompt.tokens, at)
        else:
            cause, place = _changed(past.messages, messages, num_common), num_common
        block_tokens = self._block_tokens
        num_lost = max(0, (len(earlier) - 1) // block_tokens - at // block_tokens) * block_tokens
        texts = (prompt.tokens[max(0, at - _NUM_SHOWN_TOKENS) : at], earlier[at:], prompt.tokens[at:])
        before, then, now = (self._text(tokens[:_NUM_SHOWN_TOKENS]) for tokens in texts)
        return Drift(cause, past.request_id, at, place, num_lost, before, then, now)

    def _message_at(self, turns: Sequence[Turn], tokens: Int32Array, at: int) -> int:
        """In which message the token at `at` lies: the first whose text ends behind it. A message that the template
        rewrote is not found, and lies between its neighbours."""
        whole, place = self._text(tokens), len(self._text(tokens[:at]))
        index = end = 0
        for number, turn in enumerate(turns):
            text = turn.text.strip()
            start = whole.find(text, end)
            if not text or start < 0:
                continue
            if place < start:
                break
            index, end = number, start + len(text)
            if place <= end:
                break
            index += 1
        return min(index, len(turns) - 1)

    def _text(self, tokens: Int32Array) -> str:
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False)


def _changed(earlier: Sequence[bytes], messages: Sequence[bytes], place: int) -> Cause:
    """What was done to the messages at `place`, the first that differ."""
    if messages[place] in earlier[place + 1 :]:
        return "message_removed"
    return "message_inserted" if earlier[place] in messages[place + 1 :] else "message_edited"


def _common(ours: Sequence[bytes], theirs: Sequence[bytes]) -> Iterator[bytes]:
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            return
        yield mine


def _digest(turn: Turn) -> bytes:
    """A message without fields that say nothing, such as `refusal: null`."""
    return _digest_of({name: value for name, value in turn.as_message().items() if value not in _ABSENT})


def _digest_of(value: object) -> bytes:
    return blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=16).digest()


def _key(kind: str, namespace: Namespace, name: bytes) -> bytes:
    return blake2b(json.dumps([kind, namespace]).encode() + name, digest_size=16).digest()


def _chain(namespace: Namespace, messages: Sequence[bytes]) -> Iterator[bytes]:
    """A key for each beginning of a conversation: of its first message, its first two, …"""
    key = b""
    for message in messages:
        key = _key("messages", namespace, key + message)
        yield key

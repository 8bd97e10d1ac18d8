"""A transformers tokenizer as the engine's `Tokenizer`, safe for several threads."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from looseleaf.errors import ModelError, RequestError

PLAIN_CHAT_TEMPLATE = (
    "{{ bos_token or '' }}"
    "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}"
    "{{ message['role'] | capitalize }}:"
    "{% if not message['content'][:1].isspace() %} {% endif %}{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ {'tool_call': call['function']} | tojson }}{% endfor %}{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""For tokenizers without a template of their own: one line a turn, `User: …`, then `Assistant:`. An answer
that begins with a space goes back as it was generated. Tools are a line of JSON in front, tool calls JSON behind the
content."""

PLAIN_CHAT_STOPS = ("\nUser:", "\nSystem:", "\nTool:")

END_OF_TURN_TOKENS = frozenset(
    ["<end_of_turn>", "<turn|>", "<|im_end|>", "<|eot_id|>", "<|end_of_turn|>", "<|endoftext|>", "</s>"]
)
"""Tokens with which chat models end their turn; those that exist as special tokens end a sequence. Tokens that end a
turn in one format and only a part of it in another are left to the model's generation configuration."""


class HFTokenizer:
    """Text to token ids and back. One lock: fast tokenizers change their own settings during a call."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()

    @classmethod
    def load(cls, model_id: str | Path, *, revision: str | None = None) -> HFTokenizer:
        """Load the tokenizer in a folder or hub id. ModelError if there is none."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(model_id), revision=revision)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"no tokenizer can be read from {str(model_id)!r}: {error}") from error
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ModelError(f"{type(tokenizer).__name__} from {str(model_id)!r} is not a transformers tokenizer")
        return cls(tokenizer)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence: the tokenizer's own, and special tokens that end a turn in known chat formats."""
        added = self._tokenizer.get_added_vocab()
        found = {self._tokenizer.eos_token_id, *(added.get(text) for text in END_OF_TURN_TOKENS)}
        return frozenset(int(token) for token in found if token is not None)

    @property
    def chat_stops(self) -> tuple[str, ...]:
        """The beginnings of other turns in the plain template; none where the model has a template of its own."""
        return () if self._tokenizer.chat_template else PLAIN_CHAT_STOPS

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with `add_special_tokens` what the model expects at the start is added."""
        with self._lock:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`, exactly as written: no spaces are cleaned up."""
        with self._lock:
            text = self._tokenizer.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        return str(text)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a conversation in the model's chat template, or in the plain default one.

        Contents given as lists of `{"type": "text", "text": …}` parts are joined.

        Raises:
            RequestError: a message has no role or a content that is no text, or the template refuses them.
        """
        if not messages:
            raise RequestError("a conversation needs at least one message")
        plain = [_plain_message(index, message) for index, message in enumerate(messages)]
        with self._lock:
            try:
                text = self._tokenizer.apply_chat_template(
                    plain,
                    tools=[dict(tool) for tool in tools] or None,
                    chat_template=None if self._tokenizer.chat_template else PLAIN_CHAT_TEMPLATE,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                )
            except (TemplateError, TypeError, KeyError, ValueError) as error:
                raise RequestError(f"the chat template refuses these messages: {error}") from error
            # The template has written the special tokens itself.
            ids: list[int] = self._tokenizer.encode(str(text), add_special_tokens=False)
        return ids


def _plain_message(index: int, message: Mapping[str, object]) -> dict[str, Any]:
    """The message with its content as one string; other fields (name, tool calls) as they are."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise RequestError(f"message {index} has no role")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "".join(_text_of(index, part) for part in content)
    if content is not None and not isinstance(content, str):
        raise RequestError(f"the content of message {index} is {type(content).__name__}; it must be text")
    return {**message, "content": content or ""}


def _text_of(index: int, part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") in ("text", "input_text") and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RequestError(f"message {index} has a part of type {kind!r}; only text is served")

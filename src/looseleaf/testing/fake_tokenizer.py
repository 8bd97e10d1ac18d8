"""A tokenizer without files: one token per byte, and a few special ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from looseleaf.errors import RequestError

_NUM_BYTES = 256


class FakeTokenizer:
    """Tokens 0–255 are bytes, so that characters beyond ASCII span two to four tokens; `bos_token_id` 256 and
    `eos_token_id` 257 are special; ids above are unknown to it and have no text. Vocabulary: 260.

    `decode(encode(text)) == text` for every text. Stateless, hence safe from several threads.
    """

    bos_token_id = _NUM_BYTES
    eos_token_id = _NUM_BYTES + 1
    vocab_size = _NUM_BYTES + 4

    @property
    def chat_stops(self) -> tuple[str, ...]:
        """None: tests say where a text ends."""
        return ()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The UTF-8 bytes of `text`, after BOS if `add_special_tokens`."""
        tokens = list(text.encode("utf-8"))
        return [self.bos_token_id, *tokens] if add_special_tokens else tokens

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the bytes; parts of characters come out as U+FFFD. Special tokens: skipped, or as `<|bos|>`."""
        if skip_special_tokens and max(token_ids, default=0) < _NUM_BYTES:
            return bytes(token_ids).decode("utf-8", errors="replace")
        names = {self.bos_token_id: b"<|bos|>", self.eos_token_id: b"<|eos|>"}
        kept = [token for token in token_ids if not skip_special_tokens or token < _NUM_BYTES]
        parts = [bytes((token,)) if token < _NUM_BYTES else names.get(token, b"<|%d|>" % token) for token in kept]
        return b"".join(parts).decode("utf-8", errors="replace")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """`role: content` lines after BOS, tool calls behind the content, and `assistant: ` to go on from; first a line
        `tools: …` if there are any.

        Raises:
            RequestError: no message, or one without a text `role` and `content`.
        """
        if not messages:
            raise RequestError("a conversation needs at least one message")
        lines = [f"tools: {json.dumps(list(tools))}\n"] if tools else []
        for message in messages:
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str) or not isinstance(content, str):
                raise RequestError(f"each message needs a text role and content, got {dict(message)!r}")
            calls = message.get("tool_calls")
            lines.append(f"{role}: {content}{json.dumps(calls) if calls else ''}\n")
        if add_generation_prompt:
            lines.append("assistant: ")
        return self.encode("".join(lines))

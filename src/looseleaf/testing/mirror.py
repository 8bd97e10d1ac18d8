"""The oracle of reuse: a plain dictionary of tokens, rebuilt from the event stream alone (I10)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from looseleaf.core.events import BlocksStored, CacheEvent

Prefix: TypeAlias = tuple[int, ...]


class EventMirror:
    """What is stored, by namespace and whole prefix. Pass `mirror.on_event` to `CacheManager(on_event=...)`.

    Shares no code with the prefix tree: every stored block is one entry {(namespace, all tokens up to its end): block}.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.blocks: dict[tuple[str, Prefix], int] = {}
        self._prefix_of: dict[int, tuple[str, Prefix]] = {}
        self.num_removed_tokens: dict[str, int] = {"evicted": 0, "cleared": 0}
        self.num_stored_tokens = 0

    def on_event(self, event: CacheEvent) -> None:
        """Take one event in.

        Raises:
            AssertionError: the event contradicts those before it.
        """
        if isinstance(event, BlocksStored):
            self._on_stored(event)
            return
        for block in event.blocks.tolist():
            key = self._prefix_of.pop(block, None)
            assert key is not None, f"block {block} is removed but was not stored"
            del self.blocks[key]
            self.num_removed_tokens[event.cause] += self._block_tokens

    def _on_stored(self, event: BlocksStored) -> None:
        prefix: Prefix = ()
        if event.parent_block is not None:
            assert event.parent_block in self._prefix_of, f"parent block {event.parent_block} is not stored"
            namespace, prefix = self._prefix_of[event.parent_block]
            assert namespace == event.namespace, f"parent is in {namespace!r}, child in {event.namespace!r}"
        tokens = event.token_ids.tolist()
        for number, block in enumerate(event.blocks.tolist()):
            prefix += tuple(tokens[number * self._block_tokens : (number + 1) * self._block_tokens])
            key = (event.namespace, prefix)
            assert key not in self.blocks, f"{key} is stored twice"
            assert block not in self._prefix_of, f"block {block} stores two things"
            self.blocks[key] = block
            self._prefix_of[block] = key
            self.num_stored_tokens += self._block_tokens

    def match(self, prompt: Sequence[int], namespace: str = "") -> int:
        """Tokens of the longest stored prefix: whole blocks, at most len(prompt) - 1."""
        end = 0
        while end + self._block_tokens <= len(prompt) - 1:
            if (namespace, tuple(prompt[: end + self._block_tokens])) not in self.blocks:
                break
            end += self._block_tokens
        return end

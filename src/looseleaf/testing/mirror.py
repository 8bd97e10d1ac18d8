"""The oracle of reuse: a plain dictionary of tokens, rebuilt from the event stream alone (I10)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from looseleaf.core.config import LayerGroup
from looseleaf.core.events import BlocksMoved, BlocksRemoved, BlocksStored, CacheEvent
from looseleaf.core.namespaces import NamespaceLayer

Prefix: TypeAlias = tuple[int, ...]
Place: TypeAlias = tuple[tuple[str, ...], Prefix]
"""The namespace of each block up to a block, and all tokens up to its end."""


def owners_of(
    num_blocks: int, block_tokens: int, namespace: str, layers: Sequence[NamespaceLayer] = ()
) -> tuple[str, ...]:
    """The namespaces in which the first blocks of a prompt are to be stored, one for each block."""
    owners = []
    for number in range(num_blocks):
        end = (number + 1) * block_tokens
        owners.append(next((layer.namespace for layer in layers if end <= layer.num_tokens), namespace))
    return tuple(owners)


class EventMirror:
    """What is stored, by namespace and whole prefix. Pass `mirror.on_event` to `CacheManager(on_event=...)`.

    Shares no code with the prefix tree: every stored block is one entry {(namespaces, all tokens up to its end):
    {group: block ids}}.
    """

    def __init__(self, block_tokens: int, groups: Sequence[LayerGroup] = (LayerGroup("full"),)) -> None:
        self._block_tokens = block_tokens
        self._groups = groups
        self.blocks: dict[Place, dict[str, list[int]]] = {}
        self._place_of: dict[int, Place] = {}
        self.num_removed_tokens: dict[str, int] = {"evicted": 0, "cleared": 0}
        self.num_removed_alone = 0
        self.num_stored_tokens = 0

    def on_event(self, event: CacheEvent) -> None:
        """Take one event in.

        Raises:
            AssertionError: the event contradicts those before it.
        """
        if isinstance(event, BlocksStored):
            self._on_stored(event)
        elif isinstance(event, BlocksRemoved):
            self._on_removed(event)
        elif isinstance(event, BlocksMoved):
            self._on_moved(event)
        ids = [block for entry in self.blocks.values() for blocks in entry.values() for block in blocks]
        assert len(ids) == len(set(ids)), "a block stores two things"

    def _on_removed(self, event: BlocksRemoved) -> None:
        for key in event.keys.tolist():
            place = self._place_of.get(key)
            assert place is not None, f"{key} is removed but was not stored"
            if event.group:
                self.num_removed_alone += len(self.blocks[place].pop(event.group))
                continue
            del self.blocks[place], self._place_of[key]
            self.num_removed_tokens[event.cause] += self._block_tokens

    def _on_moved(self, event: BlocksMoved) -> None:
        new_id = dict(zip(event.from_blocks.tolist(), event.to_blocks.tolist(), strict=True))
        for entry in self.blocks.values():
            for name, blocks in entry.items():
                entry[name] = [new_id.get(block, block) for block in blocks]

    def _on_stored(self, event: BlocksStored) -> None:
        owners: tuple[str, ...] = ()
        prefix: Prefix = ()
        if event.parent_key is not None:
            assert event.parent_key in self._place_of, f"parent {event.parent_key} is not stored"
            owners, prefix = self._place_of[event.parent_key]
        tokens = event.token_ids.tolist()
        for number, (key, ids) in enumerate(zip(event.keys.tolist(), event.blocks.tolist(), strict=True)):
            prefix += tuple(tokens[number * self._block_tokens : (number + 1) * self._block_tokens])
            owners += (event.namespace,)
            place = (owners, prefix)
            if event.group:
                assert self._place_of[key] == place, f"{key} stands for something else"
                assert event.group not in self.blocks[place], f"{event.group} holds {place} already"
                self.blocks[place][event.group] = ids
                continue
            assert place not in self.blocks, f"{place} is stored twice"
            self._place_of[key] = place
            self.blocks[place] = self._by_group(ids)
            self.num_stored_tokens += self._block_tokens

    def _by_group(self, ids: list[int]) -> dict[str, list[int]]:
        found = {}
        for group in self._groups:
            found[group.name], ids = ids[: group.num_lanes], ids[group.num_lanes :]
        return found

    def num_known(self, prompt: Sequence[int], namespace: str = "", layers: Sequence[NamespaceLayer] = ()) -> int:
        """Tokens of the longest prefix that is known, whole blocks, at most len(prompt) - 1, whatever groups hold."""
        end, size = 0, self._block_tokens
        owners = owners_of(len(prompt) // size, size, namespace, layers)
        while end + size <= len(prompt) - 1:
            if (owners[: end // size + 1], tuple(prompt[: end + size])) not in self.blocks:
                break
            end += size
        return end

    def match(self, prompt: Sequence[int], namespace: str = "", layers: Sequence[NamespaceLayer] = ()) -> int:
        """Tokens of the longest prefix behind which every group can go on."""
        end = self.num_known(prompt, namespace, layers)
        owners = owners_of(end // self._block_tokens, self._block_tokens, namespace, layers)
        while end and not all(self._can_go_on(prompt, owners, end, group) for group in self._groups):
            end -= self._block_tokens
        return end

    def _can_go_on(self, prompt: Sequence[int], owners: tuple[str, ...], end: int, group: LayerGroup) -> bool:
        """True if the group still holds every token before `end` that the token at `end` may see (and for a window one
        more, as the definition goes)."""
        size = self._block_tokens
        for position in range(end):
            if group.window_tokens is not None and position < end - group.window_tokens:
                continue
            if group.chunk_tokens is not None and position // group.chunk_tokens != end // group.chunk_tokens:
                continue
            block_end = position // size * size + size
            if group.name not in self.blocks[(owners[: block_end // size], tuple(prompt[:block_end]))]:
                return False
        return True

"""State machine over the prefix tree: it finds exactly what a dictionary of prefixes would."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from looseleaf.core.tokens import pack_tokens, unpack_tokens
from looseleaf.core.tree import Match, PrefixTree

PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=24)
NAMESPACES = st.sampled_from(["", "a"])


class TreeMachine(RuleBasedStateMachine):
    """The oracle is {(namespace, whole prefix): block}."""

    def __init__(self) -> None:
        super().__init__()
        self.oracle: dict[tuple[str, tuple[int, ...]], int] = {}
        self.num_made = 0

    @initialize(block_tokens=st.sampled_from([1, 2, 4]))
    def make(self, block_tokens: int) -> None:
        """An empty tree."""
        self.size = block_tokens
        self.tree = PrefixTree(block_tokens, 1)

    def _find(self, namespace: str, prompt: list[int]) -> Match:
        return self.tree.find(self.tree.root(namespace), pack_tokens(prompt), len(prompt) // self.size)

    def _expected(self, namespace: str, prompt: list[int]) -> int:
        count = 0
        while (namespace, tuple(prompt[: (count + 1) * self.size])) in self.oracle:
            count += 1
            if (count + 1) * self.size > len(prompt):
                break
        return count

    @rule(namespace=NAMESPACES, prompt=PROMPTS)
    def insert(self, namespace: str, prompt: list[int]) -> None:
        """Store what is missing of a prompt behind what is there, splitting where it leaves an edge."""
        match = self._find(namespace, prompt)
        node = match.node
        if match.num_edge_blocks < node.num_blocks:
            node = self.tree.split(node, match.num_edge_blocks)
        first, last = match.num_blocks, len(prompt) // self.size
        if first == last:
            return
        blocks = np.arange(self.num_made, self.num_made + last - first, dtype=np.int32)[:, None]
        self.num_made += last - first
        tokens = pack_tokens(prompt[first * self.size : last * self.size])
        if node.children or node.is_root or namespace == "a":
            self.tree.insert(node, tokens, blocks)
        else:
            self.tree.extend(node, tokens, blocks)
        for number, block in enumerate(blocks[:, 0].tolist()):
            self.oracle[namespace, tuple(prompt[: (first + number + 1) * self.size])] = block

    @rule(namespace=NAMESPACES, prompt=PROMPTS)
    def find(self, namespace: str, prompt: list[int]) -> None:
        """The longest stored prefix, and exactly its blocks."""
        match = self._find(namespace, prompt)
        assert match.num_blocks == self._expected(namespace, prompt)
        path = match.node.path()
        blocks = [block for node in path for block in node.blocks[:, 0].tolist()][: match.num_blocks]
        prefixes = [tuple(prompt[: (number + 1) * self.size]) for number in range(match.num_blocks)]
        assert blocks == [self.oracle[namespace, prefix] for prefix in prefixes]

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """Drop the tail of a leaf, or the whole leaf."""
        leaves = [node for node in self.tree.nodes.values() if not node.children]
        if not leaves:
            return
        node = data.draw(st.sampled_from(leaves))
        count = data.draw(st.integers(1, node.num_blocks))
        gone = set(node.blocks[node.num_blocks - count :, 0].tolist())
        if count < node.num_blocks:
            self.tree.shorten(node, count)
        else:
            self.tree.remove(node)
        self.oracle = {key: block for key, block in self.oracle.items() if block not in gone}

    @invariant()
    def consistent(self) -> None:
        """Every node holds what the oracle says, at the depth that it says."""
        if not hasattr(self, "tree"):
            return
        found = {}
        for node in self.tree.nodes.values():
            prefix = b"".join(step.tokens for step in node.path())
            tokens = tuple(unpack_tokens(prefix).tolist())
            assert len(tokens) == node.end * self.size
            for number, block in enumerate(node.blocks[:, 0].tolist()):
                end = (node.end - node.num_blocks + number + 1) * self.size
                found[node.namespace, tokens[:end]] = block
        assert found == self.oracle

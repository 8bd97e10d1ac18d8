"""The prefix tree: a radix tree over packed token ids whose edges are runs of whole blocks.

        root ── "policy prompt" ─┬─ "question 1"
          (12 blocks)            └─ "question 2" ── "follow-up"

A node owns the run of blocks on the edge from its parent. All blocks of one node have the same history: the same leases
hold them, the same pins cover them, the same requests used them. Where histories part, the node is split; that is
what makes it right to count, pin and evict by node. This file knows structure only: no reference counts, no policy.

Where a prompt goes on in another namespace (a layer ends), the run ends, and what follows hangs below it apart from its
own continuations and from those of every other namespace:

        root "" ── "policy prompt" ─┬─ "question" (also in "")
                                    ├─ in "a" ──── "a's question"
                                    └─ in "b" ──── "b's question"
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np

from looseleaf.core.namespaces import Border
from looseleaf.core.row_marks import RowMarks
from looseleaf.core.tokens import TOKEN_BYTES
from looseleaf.ids import Int32Array, Int64Array, Namespace

if TYPE_CHECKING:
    from looseleaf.core.sessions import SessionRecord

ABSENT = -1
"""Stands in a block table where a group holds no block."""

Continuations: TypeAlias = "dict[bytes, Node] | MappingProxyType[bytes, Node]"
"""Stored runs by their first block, oldest first."""

MAX_COMPARED_SIBLINGS = 32
"""Stored continuations, newest first, among which the nearest one is looked for."""

_NO_CHILDREN: Final[Continuations] = MappingProxyType({})
"""Of all leaves: most nodes are, and a dictionary each would be the most that they cost."""


class Node:
    """A run of stored blocks below its parent; a root has none.

    id              opaque id for policies, never used twice
    tokens          packed tokens of the run, whole blocks
    blocks          int32 [num_blocks, num_lanes], the blocks that hold them; ABSENT in lanes of a sliding group whose
                    block is gone
    marks           what is noted of its rows for sliding groups; None if there are none
    children        nodes that go on behind the run in its own namespace, by their first block
    layers          those that go on in other namespaces, by namespace; None if there are none
    end             logical blocks from the root to the end of the run
    num_holders     leases whose path leads through the run
    num_uses        requests that stored or found it
    last_tick       logical time of its last use
    last_used_at    the same in seconds of the cache's clock
    alive           in the tree; a cleared node that is still held is not
    sealed          another lease or a pin has met it: it must not be extended in place any more
    num_hard_pins   hard pins that cover the run
    soft_priorities priorities of the soft pins that cover the run
    queue           the victim queue in which it is offered: "", "expendable", "unpinned" or "soft"
    session         the only session that used it; None: several did, or requests without one
    chain_keys      int64 [num_blocks] or None: `forgotten.chain_keys` of its blocks, once they were asked for
    heads           first tokens of its newest children, packed, newest last: of `MAX_COMPARED_SIBLINGS`, or of all if
                    these are fewer; None if that was not asked for
    """

    __slots__ = (
        "alive", "blocks", "chain_keys", "children", "end", "heads", "id", "last_tick", "last_used_at", "layers",
        "marks", "namespace", "num_hard_pins", "num_holders", "num_uses", "parent", "queue", "sealed", "session",
        "soft_priorities", "tokens",
    )  # fmt: skip

    def __init__(
        self, node_id: int, parent: Node | None, namespace: Namespace, tokens: bytes, blocks: Int32Array
    ) -> None:
        self.id = node_id
        self.parent = parent
        self.namespace = namespace
        self.tokens = tokens
        self.blocks = blocks
        self.marks: RowMarks | None = None
        self.end: int = len(blocks) if parent is None else parent.end + len(blocks)
        self.children: Continuations = _NO_CHILDREN  # changed by the tree only
        self.layers: dict[Namespace, dict[bytes, Node]] | None = None
        self.num_holders = 0
        self.num_uses = 1
        self.last_tick = 0
        self.last_used_at = 0.0
        self.alive = True
        self.sealed = False
        self.num_hard_pins = 0
        self.soft_priorities: tuple[int, ...] = ()
        self.queue = ""
        self.session: SessionRecord | None = None
        self.chain_keys: Int64Array | None = None
        self.heads: bytes | None = None

    @property
    def is_root(self) -> bool:
        """True for the root of a namespace, which owns no blocks."""
        return self.parent is None

    @property
    def is_leaf(self) -> bool:
        """True if nothing is stored behind it, in any namespace."""
        return not self.children and self.layers is None

    @property
    def begins_layer(self) -> bool:
        """True if it goes on, in its namespace, behind what lies in another."""
        return self.parent is not None and self.parent.namespace != self.namespace

    @property
    def num_blocks(self) -> int:
        """Blocks of the run."""
        return len(self.blocks)

    @property
    def start(self) -> int:
        """Logical blocks from the root to the begin of the run."""
        return self.end - len(self.blocks)

    @property
    def is_pinned(self) -> bool:
        """True if any pin covers the run."""
        return bool(self.num_hard_pins or self.soft_priorities)

    def nearest_alive(self) -> Node:
        """This node, or the nearest above that was not cleared while it was held."""
        node = self
        while not node.alive:
            assert node.parent is not None  # a root is always alive
            node = node.parent
        return node

    def path(self, first_block: int = 0) -> list[Node]:
        """The nodes from below the root to this one, root side first; the root itself is not among them. Those that end
        at or before the logical block `first_block` are left out."""
        nodes = []
        node: Node | None = self
        while node is not None and node.parent is not None and node.end > first_block:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def subtree(self) -> Iterator[Node]:
        """This node and all below, parents first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
            for children in (node.layers or {}).values():
                stack.extend(children.values())


class Match(NamedTuple):
    """Where a look-up ended: the first `num_blocks` blocks of the asked tokens are stored.

    They end after the first `num_edge_blocks` blocks of `node`'s run (all of them, unless the look-up left an edge
    midway).
    """

    node: Node
    num_edge_blocks: int
    num_blocks: int


class PrefixTree:
    """Namespaces, their roots and the nodes below. Roots come into being with the first stored run."""

    def __init__(self, block_tokens: int, num_lanes: int) -> None:
        self.block_bytes = block_tokens * TOKEN_BYTES
        self.no_blocks: Int32Array = np.empty(
            (0, num_lanes), dtype=np.int32
        )  # a table of no rows, for all who have none
        self.roots: dict[Namespace, Node] = {}
        self.nodes: dict[int, Node] = {}
        self.layered: dict[Namespace, dict[int, Node]] = {}  # nodes that begin a layer, by namespace and id
        # How often a block begins what namespaces keep apart, at the roots or behind one node (`_first_key`), to tell
        # "never seen" from "seen in another namespace".
        self.first_blocks: dict[bytes, int] = {}
        self._next_id = 0

    def root(self, namespace: Namespace) -> Node:
        """The root of a namespace, made if there is none."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(self._new_id(), None, namespace, b"", self.no_blocks)
        return root

    @property
    def num_namespaces(self) -> int:
        """Namespaces that store something, or for whose tokens a pin waits."""
        return len(self.roots.keys() | self.layered.keys())

    def continuations(self, node: Node, namespace: Namespace) -> Continuations:
        """What goes on behind a node in a namespace, by first block, oldest first; only to be read."""
        if namespace == node.namespace:
            return node.children
        return _NO_CHILDREN if node.layers is None else node.layers.get(namespace, _NO_CHILDREN)

    def newest_alike(self, node: Node, namespace: Namespace, token: bytes) -> list[bytes]:
        """Of the newest continuations of a node in a namespace, `MAX_COMPARED_SIBLINGS` at most, the first blocks of
        those that begin with a packed token, newest first."""
        continuations = self.continuations(node, namespace)
        if continuations is node.children:
            if node.heads is None:
                node.heads = heads_of(node)
            if token not in node.heads:  # keys lie all over the memory, their heads in one place
                return []
        return [key for key in islice(reversed(continuations), MAX_COMPARED_SIBLINGS) if key.startswith(token)]

    def is_elsewhere(self, node: Node, block: bytes, namespace: Namespace) -> bool:
        """True if `block` is stored right behind `node`, or at the begin, in another namespace than this one, in which
        it is not."""
        if namespace != node.namespace and block in node.children:
            return True
        return self._first_key(node, block) in self.first_blocks

    def find(self, node: Node, data: bytes, max_blocks: int, borders: Sequence[Border] = ()) -> Match:
        """The longest stored continuation of `node`, a root or any other, that begins like packed tokens, at most
        `max_blocks` whole blocks. `borders`: those of the tokens' `Tenancy`. Read-only.

        Costs one dictionary look-up and one memory comparison per node on the way.
        """
        size, start = self.block_bytes, node.end
        stop = max_blocks * size
        at = 0
        while at < stop:
            children, limit = node.children, stop
            for border in borders:
                if border.first_block == node.end:
                    children = self.continuations(node, border.namespace)
                elif border.first_block > node.end:
                    limit = min(stop, (border.first_block - start) * size)
                    break
            child = children.get(data[at : at + size])
            if child is None:
                break
            edge = child.tokens
            if len(edge) <= limit - at and data.startswith(edge, at):
                node, at = child, at + len(edge)
                continue
            num_edge = self.common_blocks(child.tokens, data, at, limit)
            return Match(child, num_edge, at // size + num_edge)
        return Match(node, len(node.blocks), at // size)

    def common_blocks(self, edge: bytes, data: bytes, at: int, stop: int) -> int:
        """Whole blocks that `edge` and `data[at:stop]` have in common at their beginnings."""
        length = min(len(edge), stop - at)
        count = length // TOKEN_BYTES
        ours = np.frombuffer(edge, dtype=np.int32, count=count)
        theirs = np.frombuffer(data, dtype=np.int32, count=count, offset=at)
        differ = ours != theirs
        first = int(differ.argmax()) if count else 0
        if count == 0 or not differ[first]:
            return length // self.block_bytes
        return first * TOKEN_BYTES // self.block_bytes

    def insert(self, parent: Node, tokens: bytes, blocks: Int32Array, namespace: Namespace | None = None) -> Node:
        """A new leaf below `parent`, in its namespace (None) or another one, in which there is no continuation that
        begins with the same block."""
        namespace = parent.namespace if namespace is None else namespace
        node = Node(self._new_id(), parent, namespace, tokens, blocks)
        key = tokens[: self.block_bytes]
        begins_layer = namespace != parent.namespace
        if begins_layer:
            if parent.layers is None:
                parent.layers = {}
            parent.layers.setdefault(namespace, {})[key] = node
            self.layered.setdefault(namespace, {})[node.id] = node
        else:
            _children(parent)[key] = node
            if parent.heads is not None:
                parent.heads = (parent.heads + key[:TOKEN_BYTES])[-MAX_COMPARED_SIBLINGS * TOKEN_BYTES :]
        self.nodes[node.id] = node
        if parent.parent is None or begins_layer:
            first = self._first_key(parent, key)
            self.first_blocks[first] = self.first_blocks.get(first, 0) + 1
        return node

    def extend(self, node: Node, tokens: bytes, blocks: Int32Array) -> None:
        """Lengthen the run of a leaf."""
        node.tokens += tokens
        node.blocks = np.concatenate((node.blocks, blocks))
        node.end += len(blocks)
        node.chain_keys = None

    def split(self, node: Node, num_blocks: int) -> Node:
        """Cut a run after its first `num_blocks` blocks, 0 < num_blocks < node.num_blocks.

            parent ── [0 … k … n) node          parent ── [0 … k) upper ── [k … n) node

        The node keeps its identity as the lower part, so leases and pins that end at it still do. Returns the upper
        part.
        """
        parent = node.parent
        assert parent is not None  # a root has no run to cut
        cut = num_blocks * self.block_bytes
        upper = Node(self._new_id(), parent, node.namespace, node.tokens[:cut], node.blocks[:num_blocks].copy())
        if node.begins_layer:
            assert parent.layers is not None  # it has this one
            parent.layers[node.namespace][node.tokens[: self.block_bytes]] = upper
            del self.layered[node.namespace][node.id]
            self.layered[node.namespace][upper.id] = upper
        else:
            _children(parent)[node.tokens[: self.block_bytes]] = upper
        node.tokens = node.tokens[cut:]
        node.blocks = node.blocks[num_blocks:].copy()
        node.parent = upper
        _children(upper)[node.tokens[: self.block_bytes]] = node
        upper.marks = None if node.marks is None else node.marks.cut(num_blocks)
        upper.num_holders, upper.num_uses = node.num_holders, node.num_uses
        upper.last_tick, upper.last_used_at = node.last_tick, node.last_used_at
        upper.sealed = True
        upper.num_hard_pins = node.num_hard_pins
        upper.soft_priorities = node.soft_priorities
        upper.session = node.session
        if node.chain_keys is not None:
            upper.chain_keys = node.chain_keys[:num_blocks].copy()
            node.chain_keys = node.chain_keys[num_blocks:].copy()
        self.nodes[upper.id] = upper
        return upper

    def shorten(self, node: Node, num_blocks: int) -> None:
        """Drop the last `num_blocks` blocks of a leaf's run, fewer than it has."""
        keep = node.num_blocks - num_blocks
        node.tokens = node.tokens[: keep * self.block_bytes]
        node.blocks = node.blocks[:keep].copy()
        if node.marks is not None:
            node.marks.shorten(keep)
        node.end -= num_blocks
        node.chain_keys = None if node.chain_keys is None else node.chain_keys[:keep].copy()

    def remove(self, node: Node) -> None:
        """Take a node without children out of the tree. It keeps its parent, so that a lease can find its way up."""
        parent = node.parent
        assert parent is not None  # roots are dropped by `drop_root`
        key = node.tokens[: self.block_bytes]
        if node.begins_layer:
            self._remove_from_layer(parent, node, key)
        else:
            del _children(parent)[key]
            if parent.heads is not None and key[:TOKEN_BYTES] in parent.heads:
                parent.heads = None
        del self.nodes[node.id]
        node.alive = False
        if parent.parent is None or node.begins_layer:
            first = self._first_key(parent, key)
            self.first_blocks[first] -= 1
            if not self.first_blocks[first]:
                del self.first_blocks[first]

    def _remove_from_layer(self, parent: Node, node: Node, key: bytes) -> None:
        assert parent.layers is not None  # it has this node
        siblings, begun = parent.layers[node.namespace], self.layered[node.namespace]
        del siblings[key], begun[node.id]
        if not siblings:
            del parent.layers[node.namespace]
            parent.layers = parent.layers or None
        if not begun:
            del self.layered[node.namespace]

    @staticmethod
    def _first_key(parent: Node, block: bytes) -> bytes:
        """The same at all roots; a node's own otherwise (it keeps its id and what goes on behind it when it is cut)."""
        return block if parent.parent is None else parent.id.to_bytes(8, "little") + block

    def drop_root_if_empty(self, root: Node) -> None:
        """Forget a namespace that stores nothing. Leases that still name the old root store into a new one."""
        if root.is_leaf and self.roots.get(root.namespace) is root:
            del self.roots[root.namespace]

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id


def heads_of(node: Node) -> bytes:
    """See `Node.heads`."""
    newest = list(islice(reversed(node.children), MAX_COMPARED_SIBLINGS))
    return b"".join([key[:TOKEN_BYTES] for key in reversed(newest)])


def _children(node: Node) -> dict[bytes, Node]:
    """The children of a node, to be changed."""
    if not isinstance(node.children, dict):
        node.children = {}
    return node.children

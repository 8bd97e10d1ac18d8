"""Which stored node goes next: what sessions have left behind, deepest first; unpinned leaves in the policy's order;
softly pinned ones by priority."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from looseleaf.core.eviction import EvictionPolicy, StoredRun, Use
from looseleaf.core.eviction.heap import OfferedHeap
from looseleaf.core.fair_shares import PolicyShares
from looseleaf.core.namespaces import Tenancy
from looseleaf.core.slid_out import SlidOutQueue
from looseleaf.core.tree import Node, PrefixTree
from looseleaf.core.usage import Account


class VictimQueue:
    """Keeps the set of victims equal to the cached, unheld, not hard-pinned leaves (I9).

    `review` is called for a node whenever its children, its holders or its pins may have changed; everything else
    follows.
    """

    def __init__(self, policy: EvictionPolicy | PolicyShares, tree: PrefixTree, slid_out: SlidOutQueue) -> None:
        self.policy = policy
        self._tree = tree
        self._slid_out = slid_out
        self._soft = OfferedHeap()
        self._expendable = OfferedHeap()
        self._num_soft_offers = 0

    # --- what happens to stored runs, for the policy ---------------------------------------------------------------

    def on_stored(self, node: Node, use: Use, key: int, is_padded: bool) -> None:
        """A run was stored as a new node; `key`: chain key of its first block if the policy uses keys."""
        self.policy.insert(node.id, StoredRun(node.num_blocks, node.start, key, is_padded), use)

    def on_extended(self, node: Node, num_blocks: int) -> None:
        """A run was lengthened by its holder."""
        self.policy.extend(node.id, num_blocks)

    def on_hit(self, path: Sequence[Node], use: Use) -> None:
        """A request reuses these runs, root side first."""
        self.policy.hit([node.id for node in path], use)

    @property
    def shares(self) -> PolicyShares | None:
        """The policies of accounts, if there is not one for all."""
        return self.policy if isinstance(self.policy, PolicyShares) else None

    def on_missed(self, keys: Sequence[int], use: Use, tenancy: Tenancy, first_block: int) -> Sequence[int]:
        """Chain keys of what a request did not find, from logical block `first_block` of its prompt on. At which of
        them another run begins when it is stored."""
        if isinstance(self.policy, PolicyShares):
            return self.policy.missed(keys, use, tenancy, first_block)
        return self.policy.missed(keys, use)

    def on_released(self, path: Sequence[Node], use: Use, num_output_tokens: int) -> None:
        """A request over these runs, root side first, has ended."""
        self.policy.release([node.id for node in path], use, num_output_tokens)

    def on_shortened(self, node: Node, num_blocks: int, key: int) -> None:
        """A run lost its last blocks."""
        self.policy.shorten(node.id, num_blocks, key)

    def on_gone(self, node: Node, key: int | None) -> None:
        """A run is gone; see `EvictionPolicy.forget`."""
        self.withdraw(node)
        self.policy.forget(node.id, key)
        if node.session is not None:
            node.session.on_gone(node)

    # --- who goes next ---------------------------------------------------------------------------------------------

    def review(self, node: Node) -> None:
        """Offer the node, withdraw it, or move it between the queues, as its state demands. O(log victims)."""
        wanted = self._queue_for(node)
        if wanted == node.queue and wanted != "soft":
            return
        self.withdraw(node)
        if wanted == "unpinned":
            self.policy.offer(node.id, node.end)
        elif wanted == "soft":
            self._num_soft_offers += 1
            self._soft.offer(node.id, (max(node.soft_priorities), self._num_soft_offers))
        elif wanted == "expendable":
            self._expendable.offer(node.id, (-node.end, node.id))
            if self.shares is not None:
                self.shares.offer_expendable(node, (-node.end, node.id))
        node.queue = wanted

    def withdraw(self, node: Node) -> None:
        """Take the node out of the queue that it is in, if any."""
        if node.queue == "unpinned":
            self.policy.withdraw(node.id)
        elif node.queue == "soft":
            self._soft.withdraw(node.id)
        elif node.queue == "expendable":
            self._expendable.withdraw(node.id)
            if self.shares is not None:
                self.shares.withdraw_expendable(node)
        node.queue = ""

    def split(self, node: Node, num_blocks: int) -> Node:
        """Cut a run after `num_blocks` blocks where histories part; both parts keep the history so far. The upper
        part."""
        upper = self._tree.split(node, num_blocks)
        self.policy.split(node.id, upper.id, upper.num_blocks)
        self._slid_out.review([upper])
        if node.session is not None:
            node.session.on_split(node, upper)
        return upper

    def next(self, spare_soft: bool) -> Node | None:
        """The node to evict from now, None if nothing can be evicted; `spare_soft` leaves softly pinned ones alone."""
        node_id = self._expendable.first()
        if node_id is None:
            node_id = self.policy.victim()
        if node_id is None and not spare_soft:
            node_id = self._soft.first()
        return None if node_id is None else self._tree.nodes[node_id]

    def next_of(self, account: Account) -> Node | None:
        """The node of an account with a policy of its own to evict from now, none that a pin covers."""
        node_id = None if self.shares is None else self.shares.victim_of(account)
        return None if node_id is None else self._tree.nodes[node_id]

    def offered(self, queue: str) -> Iterable[int]:
        """Node ids in the queue "expendable", "unpinned" or "soft", for the integrity check."""
        if queue == "unpinned":
            return self.policy.offered()
        return (self._soft if queue == "soft" else self._expendable).offered()

    def _queue_for(self, node: Node) -> str:
        if node.num_holders or node.children or node.layers is not None or node.num_hard_pins:
            return ""
        if node.parent is None or not node.alive:
            return ""
        if node.soft_priorities:
            return "soft"
        return "expendable" if node.session is not None and node.session.is_expendable(node.id) else "unpinned"

"""What is stored of a prompt, run by run: whose it is, who keeps it, and what the eviction policy thinks of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from looseleaf.core.namespaces import Tenancy
from looseleaf.core.store import BlockStore
from looseleaf.core.tokens import TOKEN_BYTES
from looseleaf.ids import Namespace


@dataclass(frozen=True)
class StoredPart:
    """A stored run of blocks that all have the same history: the tokens of a prompt from `first_token` on.

    `num_uses`: requests that stored or found it. `num_holders`: leases that hold it now. `num_pins`: pins that cover it
    (alike ones count once). `queue`: where it waits for its eviction: "expendable" goes first, then "unpinned" in the
    policy's order, then "soft"; "" if it can't go now (held, pinned hard, or something is stored behind it). `session`:
    the only one that used it. `policy`: its figures of it, whose names end in their unit.
    """

    first_token: int
    num_tokens: int
    namespace: Namespace
    num_uses: int
    last_used_seconds_ago: float
    num_holders: int
    num_pins: int
    queue: str
    session: str | None
    policy: Mapping[str, float | str]


def stored_parts(store: BlockStore, data: bytes, tenancy: Tenancy, now_seconds: float) -> list[StoredPart]:
    """The runs in which packed tokens, stored as `tenancy` says, are stored, from their begin as far as they go; the
    last one may go on with other tokens. Read-only; O(runs)."""
    root = store.tree.roots.get(tenancy.root)
    if root is None:
        return []
    match = store.tree.find(root, data, len(data) // store.tree.block_bytes, tenancy.borders)
    block_tokens = store.tree.block_bytes // TOKEN_BYTES
    return [
        StoredPart(
            first_token=node.start * block_tokens,
            num_tokens=(min(node.end, match.num_blocks) - node.start) * block_tokens,
            namespace=node.namespace,
            num_uses=node.num_uses,
            last_used_seconds_ago=now_seconds - node.last_used_at,
            num_holders=node.num_holders,
            num_pins=node.num_hard_pins + len(node.soft_priorities),
            queue=node.queue,
            session=None if node.session is None else node.session.key[1],
            policy=store.victims.policy.describe(node.id, now_seconds),
        )
        for node in match.node.path()
    ]

"""The rules of the manager's state machine that end sessions, and the oracle of whose stored content is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from hypothesis import strategies as st
from hypothesis.stateful import rule

from looseleaf.core.lease import Lease
from looseleaf.errors import UnknownSession
from looseleaf.testing.mirror import Place, owners_of
from looseleaf.testing.pin_machine import NAMESPACES, PinRules

SESSIONS = st.sampled_from([None, "s", "s", "t"])
User: TypeAlias = "tuple[str, str, int] | None"
"""Namespace, session, and how often that name had ended before; None for requests without a session."""


@dataclass
class _Used:
    """Who used what the mirror holds as `entry`: a block that is stored anew is another entry."""

    entry: object
    users: set[User] = field(default_factory=set)


class SessionRules(PinRules):
    """Sessions by name; what may go early must be one ended or rewritten conversation's alone, whatever happens. The
    machine tells with `name_session` and `note_use` who makes and uses a lease, and calls `check_sessions` after each
    rule."""

    def __init__(self) -> None:
        super().__init__()
        self.num_ends: dict[tuple[str, str], int] = {}
        self.num_turns: dict[tuple[str, str], int] = {}
        self.user_of: dict[str, User] = {}
        self.used: dict[Place, _Used] = {}

    def name_session(self, request_id: str, namespace: str, session: str | None, *, is_turn: bool = True) -> None:
        """A request that uses the cache names its session."""
        user: User = None
        if session is not None:
            key = (namespace, session)
            user = (*key, self.num_ends.get(key, 0))
            self.num_turns[key] = self.num_turns.get(key, 0) + is_turn
        self.user_of[request_id] = user

    def note_use(self, lease: Lease) -> None:
        """What a lease has found and committed was used by its session; in other namespaces by no session alone."""
        for place in self._places_of(lease):
            entry = self.mirror.blocks[place]
            used = self.used.get(place)
            if used is None or used.entry is not entry:
                used = self.used[place] = _Used(entry)
            used.users.add(self.user_of[lease.request_id] if place[0][-1] == lease.namespace else None)

    def _places_of(self, lease: Lease) -> Iterator[Place]:
        if not lease.stores:
            return
        tokens = lease.token_ids.tolist()[: lease.num_committed_tokens]
        owners = owners_of(len(tokens) // self.size, self.size, lease.namespace, lease.layers)
        for number in range(1, len(owners) + 1):
            yield owners[:number], tuple(tokens[: number * self.size])

    def _alone(self, user: User) -> set[Place]:
        """What is stored and was used by nobody else."""
        blocks = self.mirror.blocks
        return {place for place, used in self.used.items() if blocks.get(place) is used.entry and used.users == {user}}

    def _held_places(self) -> set[Place]:
        return {place for lease in self.leases for place in self._places_of(lease)}

    def expendable(self, *, is_pinned: bool = False) -> set[Place]:
        """What the cache would evict before anything else (if `is_pinned`: any that pins cover), by its own marks."""
        places: set[Place] = set()
        for node in self.cache._store.tree.nodes.values():
            is_left = node.session is not None and node.session.is_expendable(node.id)
            if node.is_pinned if is_pinned else is_left and not node.is_pinned and not node.num_holders:
                path = node.path()
                owners = tuple(step.namespace for step in path for _ in range(step.num_blocks))
                tokens = [token for step in path for token in memoryview(step.tokens).cast("i").tolist()]
                ends = range(node.start + 1, node.end + 1)
                places.update((owners[:end], tuple(tokens[: end * self.size])) for end in ends)
        return places

    @rule(session=st.sampled_from(["s", "t"]), namespace=NAMESPACES)
    def end_session(self, session: str, namespace: str) -> None:
        """A session ends once; nothing is lost by that alone, and it tells how much may go."""
        key = (namespace, session)
        user: User = (*key, self.num_ends.get(key, 0))
        stored, alone = set(self.mirror.blocks), self._alone(user)
        kept = alone & (self._held_places() | self.expendable(is_pinned=True))
        try:
            result = self.cache.end_session(session, namespace)
        except UnknownSession:
            assert key not in self.num_turns
            return
        assert self.num_turns.pop(key) > 0
        assert set(self.mirror.blocks) == stored
        assert result.num_kept_tokens == self.size * len(kept)
        assert result.num_released_tokens == self.size * len(alone - kept)
        assert alone - kept <= self.expendable()
        self.num_ends[key] = self.num_ends.get(key, 0) + 1

    def check_order(self, expendable: set[Place], before: set[Place]) -> None:
        """Of what was stored before, nothing was evicted while anything expendable was left (but what was over a
        quota)."""
        if self.cache.config.namespace_quotas:
            return
        gone = before - set(self.mirror.blocks)
        if any(group.kind == "full" for group in self.groups) and not gone <= expendable:
            assert expendable <= gone, "others were evicted before what sessions had left behind"

    def check_sessions(self) -> None:
        """What goes early is one session's alone; all of an ended one that nobody holds or pins does."""
        for lease in self.leases:
            self.note_use(lease)
        expendable, held = self.expendable(), self._held_places()
        for place in expendable:
            (user, *others) = self.used[place].users
            assert user is not None, f"{place} may go early though a request without a session has used it"
            assert not others, f"{place} may go early though {user} and {others} have used it"
        pinned = self.expendable(is_pinned=True)
        for place, used in self.used.items():
            (user, *others) = used.users
            is_over = user is not None and user[2] < self.num_ends.get(user[:2], 0)
            if is_over and not others and self.mirror.blocks.get(place) is used.entry and place not in held | pinned:
                assert place in expendable, f"{place} of ended session {user} does not go early"
        told = {(session.namespace, session.session): session for session in self.cache.sessions()}
        assert {key: session.num_turns for key, session in told.items()} == self.num_turns
        for key, session in told.items():
            assert session.num_tokens == self.size * len(self._alone((*key, self.num_ends.get(key, 0))))

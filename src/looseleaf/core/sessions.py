"""Sessions: requests that say which conversation they belong to. What only one of them used can go early.

    turn 1   [ prompt ........ | thinking | answer )
    turn 2   [ prompt ........ | answer | question ........ | answer )
                               ^ departs inside what turn 1 generated: the rest of turn 1 is superseded

A stored run knows the only session that used it. It becomes *expendable*, evicted before anything that the policy would
choose, when that session ends, or when a later turn *supersedes* it. Held and pinned runs stay; a run that is found
again is no longer superseded.

Sessions may branch (agents that fork, samples, regenerated answers), and no branch that may still go on must be lost.
So a turn supersedes the end of an earlier, finished one, the *tip* of a branch, only if

1. it goes on from nothing else in the session that shares as much with it as this tip does;
2. it departs from it inside tokens that the model had generated (templates and clients that drop thinking parts rewrite
   those, while branches part in what they are asked), and no other tip departs there too, but samples of one turn;
3. or, where 2 is open (it departs in the last `TEMPLATE_TOKENS` tokens of a prompt, where templates open thinking
   parts, or several tips depart alike), the last tokens generated at this tip come up again in the new prompt.

Then what lies behind the point of departure goes, up to where another branch goes on or a running request holds it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from looseleaf.core.explain import common_tokens
from looseleaf.core.tokens import TOKEN_BYTES
from looseleaf.core.tree import Node, PrefixTree
from looseleaf.core.victims import VictimQueue
from looseleaf.errors import UnknownSession
from looseleaf.ids import Namespace

MAX_SESSIONS = 10_000
"""Sessions that are remembered, those used last."""

MAX_TIPS = 16
"""Branches of a session whose ends are remembered, the newest."""

TEMPLATE_TOKENS = 8
"""A template may end a prompt with so many tokens that it leaves out when the answer is in the history."""

PROOF_TOKENS = 8
"""Generated tokens that prove, when they come up again, that a prompt goes on from them."""


@dataclass(frozen=True)
class Session:
    """A remembered session. `num_turns`: requests that named it. `num_tokens`: stored now that only it used.
    `mean_gap_seconds`: from the end of its turns to the next one's begin, None before its second turn.
    `num_superseded_tokens`: that its turns have replaced so far."""

    session: str
    namespace: Namespace
    num_turns: int
    num_tokens: int
    last_used_seconds_ago: float
    mean_gap_seconds: float | None
    num_superseded_tokens: int


@dataclass(frozen=True)
class SessionEnd:
    """What ending a session did. `num_released_tokens`: that only it used and that are evicted first from now on.
    `num_kept_tokens`: those that a pin keeps, or a running request, at whose end they are released too."""

    session: str
    num_released_tokens: int
    num_kept_tokens: int


@dataclass(slots=True)
class _Tip:
    """The end of a finished turn. `turn`: its number; samples of one prompt share it. What is stored of its
    `num_tokens` tokens ends with `node`; those from `first_hidden` on never were, being less than a block: `hidden` is
    their hash."""

    node: Node
    turn: int
    num_tokens: int
    first_hidden: int
    hidden: int

    def is_in(self, data: bytes) -> bool:
        """True if packed tokens `data`, which begin with what is stored of the turn, begin with all of it."""
        return hash(data[self.first_hidden * TOKEN_BYTES : self.num_tokens * TOKEN_BYTES]) == self.hidden


class SessionRecord:
    """What is known of a session.

    nodes       by node id, the runs that only it used: length of the prompt of the request that stored the run, in
                tokens; what lies behind that was generated
    tips        ends of finished turns from which no other finished one goes on, oldest first
    superseded  node ids of runs that later turns have replaced
    """

    __slots__ = (
        "gap_seconds", "is_ended", "key", "last_used_at", "nodes", "num_gaps", "num_running", "num_superseded_tokens",
        "num_turns", "superseded", "tips",
    )  # fmt: skip

    def __init__(self, key: tuple[Namespace, str], now_seconds: float) -> None:
        self.key = key
        self.last_used_at = now_seconds
        self.is_ended = False
        self.num_turns = self.num_gaps = self.num_running = self.num_superseded_tokens = 0
        self.gap_seconds = 0.0
        self.nodes: dict[int, int] = {}
        self.tips: list[_Tip] = []
        self.superseded: set[int] = set()

    def is_expendable(self, node_id: int) -> bool:
        """True if a run that only this session used can go before all others."""
        return self.is_ended or node_id in self.superseded

    def is_same(self, other: SessionRecord | None) -> bool:
        """True if both are the same session; a request that had given way when it ended has a record of its own."""
        return self is other or (other is not None and self.is_ended and other.is_ended and self.key == other.key)

    def on_split(self, node: Node, upper: Node) -> None:
        """A run of this session was cut in two."""
        self.nodes[upper.id] = self.nodes[node.id]
        if node.id in self.superseded:
            self.superseded.add(upper.id)

    def on_gone(self, node: Node) -> None:
        """A run of this session is about to leave the tree; what ended there ends above now."""
        parent = node.parent
        if parent is not None and parent.session is self:
            for tip in self.tips:
                if tip.node is node:
                    tip.node = parent
        self.on_shared(node)

    def on_shared(self, node: Node) -> None:
        """A run is not this session's alone any more."""
        node.session = None
        del self.nodes[node.id]
        self.superseded.discard(node.id)
        if self.tips:
            self.tips = [tip for tip in self.tips if tip.node is not node]


@dataclass(slots=True)
class _Turn:
    """A running request of a session. `number`: of the turn; samples of one prompt share it."""

    record: SessionRecord
    number: int
    num_prompt_tokens: int


@dataclass(slots=True)
class _Departure:
    """Where a prompt leaves the path down to a tip: at token `at_token`, within `node`'s run."""

    tip: _Tip
    node: Node
    at_token: int


class SessionBook:
    """The sessions of one cache, and which of their requests run. Used under the manager's lock."""

    def __init__(self, tree: PrefixTree, victims: VictimQueue) -> None:
        self.records: OrderedDict[tuple[Namespace, str], SessionRecord] = OrderedDict()
        self._turns: dict[int, _Turn] = {}  # by number of the request
        self._tree = tree
        self._victims = victims

    # --- turns ----------------------------------------------------------------------------------------------------

    def begin(
        self, session: str, namespace: Namespace, request: int, num_prompt_tokens: int, is_first: bool, now: float
    ) -> None:
        """Request number `request` begins. `is_first`: False for one that comes back, which is no further turn."""
        key = (namespace, session)
        record = self.records.get(key)
        if record is None:
            record = SessionRecord(key, now)
            if is_first:
                self.records[key] = record
                if len(self.records) > MAX_SESSIONS:
                    self.records.popitem(last=False)
            else:
                record.is_ended = True  # while the request had given way
        if is_first:
            self.records.move_to_end(key)
            if record.num_turns and not record.num_running:
                record.gap_seconds += now - record.last_used_at
                record.num_gaps += 1
            record.num_turns += 1
        record.num_running += 1
        record.last_used_at = now
        self._turns[request] = _Turn(record, record.num_turns, num_prompt_tokens)

    def fork(self, parent: int, child: int) -> None:
        """Request number `child` was forked from `parent`."""
        turn = self._turns.get(parent)
        if turn is not None:
            turn.record.num_running += 1
            self._turns[child] = turn

    def end(self, request: int, node: Node, data: bytes, now_seconds: float) -> None:
        """A request that knew packed tokens `data` has let go of the path down to `node`."""
        turn = self._turns.pop(request, None)
        if turn is None:
            return
        record = turn.record
        record.num_running -= 1
        record.last_used_at = max(record.last_used_at, now_seconds)
        path = {step.id for step in node.path()}
        record.tips = [tip for tip in record.tips if tip.node.id not in path or not tip.is_in(data)]
        if node.session is record:
            first = node.end * self._tree.block_bytes
            tip = _Tip(node, turn.number, len(data) // TOKEN_BYTES, first // TOKEN_BYTES, hash(data[first:]))
            record.tips = [*record.tips[-MAX_TIPS + 1 :], tip]

    def record_of(self, request: int) -> SessionRecord | None:
        """The session of a running request."""
        turn = self._turns.get(request)
        return None if turn is None else turn.record

    # --- what is stored -------------------------------------------------------------------------------------------

    def on_stored(self, node: Node, request: int) -> None:
        """A request stores a new run. What lies in another namespace is common to many, whoever came first."""
        turn = self._turns.get(request)
        if turn is not None and turn.record.key[0] == node.namespace:
            node.session = turn.record
            turn.record.nodes[node.id] = turn.num_prompt_tokens

    def on_used(self, node: Node, request: int) -> None:
        """A request uses a run that was one session's alone."""
        assert node.session is not None  # the caller has seen it
        turn = self._turns.get(request)
        if turn is None or not turn.record.is_same(node.session):
            node.session.on_shared(node)
        else:
            node.session.superseded.discard(node.id)

    def supersede(self, request: int, node: Node, data: bytes) -> None:
        """A turn has looked up packed tokens `data` and holds the path down to `node`: let what it replaces go."""
        turn = self._turns.get(request)
        if turn is None or not turn.record.tips:
            return
        record = turn.record
        held = {step.id for step in node.path()}
        departures: list[_Departure] = []
        others_at = node.end * self._tree.block_bytes // TOKEN_BYTES - 1  # shared with what it may go on from besides
        for tip in record.tips:
            departure = self._departure(tip, held, data)
            if departure is None:
                if tip.is_in(data):
                    return
                others_at = max(others_at, tip.num_tokens - 1)
            elif not tip.node.is_leaf:
                others_at = max(others_at, departure.at_token)
            else:
                departures.append(departure)
        at_token = max((departure.at_token for departure in departures), default=-1)
        nearest = [departure for departure in departures if departure.at_token == at_token]
        is_alone = at_token > others_at and len({departure.tip.turn for departure in nearest}) == 1
        for departure in nearest:
            num_prompt_tokens = record.nodes.get(departure.node.id)
            if num_prompt_tokens is None or at_token < num_prompt_tokens - TEMPLATE_TOKENS:
                continue
            if (is_alone and at_token >= num_prompt_tokens) or self._is_proven(record, departure, data):
                self._let_go(record, departure)

    def _departure(self, tip: _Tip, held: set[int], data: bytes) -> _Departure | None:
        """Where a prompt, of which these nodes are held, leaves what is stored of a turn; None if it does not."""
        size = self._tree.block_bytes
        stop = (len(data) - TOKEN_BYTES) // size * size
        for step in tip.node.path():
            at = step.start * size
            if step.id in held:
                continue
            if at >= stop:
                break
            common = self._tree.common_blocks(step.tokens, data, at, stop) * size
            if common < len(step.tokens):
                at += common
                if at >= stop:
                    break
                num_equal = common_tokens(step.tokens[common : common + size], data[at : at + size])
                return _Departure(tip, step, at // TOKEN_BYTES + num_equal)
        return None

    def _is_proven(self, record: SessionRecord, departure: _Departure, data: bytes) -> bool:
        """True if the last tokens generated at a tip come up in `data` behind the point of departure."""
        node, at = departure.tip.node, departure.at_token * TOKEN_BYTES
        proof = node.tokens[-PROOF_TOKENS * TOKEN_BYTES :]
        first = node.end * self._tree.block_bytes // TOKEN_BYTES - PROOF_TOKENS
        if len(proof) < PROOF_TOKENS * TOKEN_BYTES or first < max(record.nodes[node.id], departure.at_token):
            return False
        found = data.find(proof, at)
        while found > 0 and found % TOKEN_BYTES:
            found = data.find(proof, found + 1)
        return found >= 0

    def _let_go(self, record: SessionRecord, departure: _Departure) -> None:
        """Make a turn's path expendable from the point of departure on, as far as it is nobody else's."""
        first = departure.at_token * TOKEN_BYTES // self._tree.block_bytes
        node = departure.tip.node
        record.tips.remove(departure.tip)
        while node.session is record and not node.num_holders and node.end > first:
            if node.start < first:  # a window was gone there, so the look-up did not cut it
                self._victims.split(node, first - node.start)
            record.superseded.add(node.id)
            record.num_superseded_tokens += len(node.tokens) // TOKEN_BYTES
            self._victims.review(node)
            if node.parent is None or len(node.parent.children) > 1:
                break
            node = node.parent

    # --- ends and answers -----------------------------------------------------------------------------------------

    def end_session(self, session: str, namespace: Namespace) -> SessionEnd:
        """See `CacheManager.end_session`. O(its runs)."""
        record = self.records.pop((namespace, session), None)
        if record is None:
            raise UnknownSession(session, namespace, MAX_SESSIONS)
        record.is_ended = True
        released = kept = 0
        for node_id in record.nodes:
            node = self._tree.nodes[node_id]
            self._victims.review(node)
            if node.is_pinned or node.num_holders:
                kept += len(node.tokens)
            else:
                released += len(node.tokens)
        return SessionEnd(session, released // TOKEN_BYTES, kept // TOKEN_BYTES)

    def sessions(self, now_seconds: float) -> list[Session]:
        """See `CacheManager.sessions`. O(runs of all sessions)."""
        nodes = self._tree.nodes
        return [
            Session(
                session=session,
                namespace=namespace,
                num_turns=record.num_turns,
                num_tokens=sum(len(nodes[node_id].tokens) for node_id in record.nodes) // TOKEN_BYTES,
                last_used_seconds_ago=now_seconds - record.last_used_at,
                mean_gap_seconds=record.gap_seconds / record.num_gaps if record.num_gaps else None,
                num_superseded_tokens=record.num_superseded_tokens,
            )
            for (namespace, session), record in self.records.items()
        ]

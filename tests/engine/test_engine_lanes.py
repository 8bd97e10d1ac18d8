"""The fake model with layer groups: it looks at what each query sees, in every lane, and at nothing else."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from looseleaf.core.config import LayerGroup
from looseleaf.engine.runner import GroupBatch, StepBatch
from looseleaf.engine.sampling import SamplingParams, SamplingRow
from looseleaf.errors import CapacityError
from looseleaf.testing.fake_runner import FakeRunner, StampMismatch

BLOCK_TOKENS = 4
FULL, WINDOW, CHUNKED = LayerGroup("full"), LayerGroup("window", window_tokens=8), LayerGroup("chunked", chunk_tokens=8)
WIDE = LayerGroup("window", window_tokens=8, num_lanes=2)
MODELS = {"full+window": (FULL, WIDE), "window": (WIDE,), "chunked": (CHUNKED,), "window+chunked": (WINDOW, CHUNKED)}
ROW = SamplingRow(SamplingParams(temperature=0.0), 0.0, np.zeros(0, np.int32), np.zeros(0, np.int32))


class Driver:
    """Sequences over a fake runner; blocks are given out in order and never come back, tables keep what is needed."""

    def __init__(self, groups):
        self.groups = groups
        self.tokens = {}
        self.blocks = {}
        self.num_taken = 0
        self.runner = FakeRunner(512, BLOCK_TOKENS, groups=groups, known_tokens=lambda name: self.tokens[name])

    def add(self, name, tokens):
        self.tokens[name] = np.array(tokens, np.int32)
        self.blocks[name] = [{} for _ in self.groups]

    def first_block(self, group, position):
        """The block of the oldest token that the query at `position` sees, by the plain definition."""
        seen = [p for p in range(position + 1) if sees(group, position, p)]
        return seen[0] // BLOCK_TOKENS

    def batch(self, name, start, end):
        """Positions from `start` to `end` of one sequence."""
        positions = np.arange(start, end)
        parts = []
        for group, blocks in zip(self.groups, self.blocks[name], strict=True):
            first, last = self.first_block(group, start), (end - 1) // BLOCK_TOKENS
            for block in range(first, last + 1):
                if block not in blocks:
                    blocks[block] = [self.num_taken + lane for lane in range(group.num_lanes)]
                    self.num_taken += group.num_lanes
            table = np.array([blocks[block] for block in range(first, last + 1)], np.int32)
            parts.append(GroupBatch(slots_of(table, first, positions), (table,), np.array([first], np.int32)))
        return StepBatch(
            request_ids=(name,),
            token_ids=self.tokens[name][start:end].astype(np.int64),
            positions=positions,
            query_starts=np.array([0, end - start], np.int32),
            num_context_tokens=np.array([start], np.int32),
            groups=tuple(parts),
            sampled=np.array([0], np.int32),
            sampling=(ROW,),
        )

    def run(self, name, *cuts):
        """Compute up to the last of `cuts`, in steps that end at each; the token after it."""
        start = 0
        for end in cuts:
            output = self.runner.execute(self.batch(name, start, end))
            start = end
        return output.token_ids.tolist()[0]


def sees(group, query, key):
    """Whether the query at a position sees the key at another one."""
    if group.window_tokens is not None:
        return query - group.window_tokens < key <= query
    if group.chunk_tokens is not None:
        return key <= query and key // group.chunk_tokens == query // group.chunk_tokens
    return key <= query


def slots_of(table, first, positions):
    return table[positions // BLOCK_TOKENS - first].T.astype(np.int64) * BLOCK_TOKENS + positions % BLOCK_TOKENS


def with_group(batch, index, **changes):
    groups = list(batch.groups)
    groups[index] = dataclasses.replace(groups[index], **changes)
    return dataclasses.replace(batch, groups=tuple(groups))


def retabled(batch, index, table, first=None):
    """`batch` with another table in one group, and the slots that follow from it, as a builder would make them."""
    first = int(batch.groups[index].first_blocks[0]) if first is None else first
    slots = slots_of(table, first, batch.positions)
    return with_group(batch, index, slots=slots, block_tables=(table,), first_blocks=np.array([first], np.int32))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("cuts", [(30,), (6, *range(7, 31)), (8, 9, 20, 30), (7, 8, 16, 17, 30), (15, 16, 24, 30)])
def test_any_chunks_give_the_plain_recurrence(model, cuts):
    """[H95] [H96] Through any chunks, also where the length first equals the window and with queries longer than it,
    each query finds exactly what it sees, and nothing else has to be there."""
    driver = Driver(MODELS[model])
    tokens = [(7 * i * i + 3 * i) % 250 for i in range(30)]
    driver.add("a", tokens)
    assert driver.run("a", *cuts) == driver.runner.expected_tokens(tokens, 1, ROW.params)[0]


def corrupt(driver, batch, index, how):
    """A batch for the positions 21 and 22 with one thing wrong in one group."""
    table = batch.groups[index].block_tables[0].copy()
    first = int(batch.groups[index].first_blocks[0])
    other = driver.batch("b", 21, 23).groups[index].block_tables[0]
    if how == "foreign":
        return retabled(batch, index, np.concatenate((other[:1], table[1:])))
    if how == "order":
        return retabled(batch, index, table[::-1].copy())
    if how == "stale":  # the window's block before, which this sequence gave back
        old = driver.blocks["a"][index][first - 1]
        return retabled(batch, index, np.concatenate(([old], table[1:])).astype(np.int32))
    if how == "late":  # the table begins a block later than what is seen
        return retabled(batch, index, table[1:], first + 1)
    if how == "shifted":  # first_blocks is one too high, slots are right
        return with_group(batch, index, first_blocks=np.array([first + 1], np.int32))
    if how == "shifted-with-slots":
        longer = np.concatenate((table, other[-1:]))
        return retabled(batch, index, longer, first - 1)
    if how == "lanes":
        return retabled(batch, index, table[:, ::-1].copy())
    assert how == "shared"
    return retabled(batch, index, np.repeat(table[:, :1], table.shape[1], axis=1))


def broken_batches():
    ways = ("foreign", "order", "stale", "late", "shifted", "shifted-with-slots")
    for model, groups in MODELS.items():
        for index, group in enumerate(groups):
            for how in ways if group.kind != "full" else ("foreign", "order"):
                yield model, index, how
            if group.num_lanes > 1:
                yield from ((model, index, how) for how in ("lanes", "shared"))


@pytest.mark.parametrize(("model", "index", "how"), list(broken_batches()))
def test_whatever_is_wrong_in_a_lane_is_found(model, index, how):
    """[H105] [H99] A foreign, stale, moved, exchanged or shared block, or a table that begins elsewhere, in any lane of
    any group: the read says so."""
    driver = Driver(MODELS[model])
    for name, factor in (("a", 3), ("b", 5)):
        driver.add(name, [factor * i % 250 for i in range(30)])
        driver.run(name, 10, 20, 21)
    batch = driver.batch("a", 21, 23)
    driver.runner.execute(corrupt_nothing(batch))
    with pytest.raises(StampMismatch):
        driver.runner.execute(corrupt(driver, batch, index, how))


def corrupt_nothing(batch):
    """The batch itself, rebuilt: the way of building is right."""
    for index, part in enumerate(batch.groups):
        batch = retabled(batch, index, part.block_tables[0])
    return batch


def test_two_lanes_never_share_a_block():
    """A block that is in a full lane's table and in a window lane's at once is refused, whatever it holds."""
    driver = Driver(MODELS["full+window"])
    driver.add("a", list(range(10)))
    batch = driver.batch("a", 0, 10)
    table = batch.groups[1].block_tables[0].copy()
    table[0, 0] = batch.groups[0].block_tables[0][2, 0]
    with pytest.raises(StampMismatch):
        driver.runner.execute(retabled(batch, 1, table))


def test_what_no_query_sees_may_be_anybodys():
    """[H101] Blocks that slid out of the window are written by others without anybody noticing."""
    driver = Driver(MODELS["window"])
    driver.add("a", list(range(30)))
    driver.run("a", 20)
    driver.add("b", list(range(100, 130)))
    driver.blocks["b"] = [dict(driver.blocks["a"][0])]
    for block in (3, 4):
        del driver.blocks["b"][0][block]
    driver.run("b", 12)
    driver.runner.execute(driver.batch("a", 20, 30))


def test_a_window_model_must_be_told_the_tokens():
    """Without a full group nothing in memory says what the whole prefix was: the runner wants to be told."""
    with pytest.raises(ValueError, match="known_tokens"):
        FakeRunner(8, 4, groups=(WINDOW,))


@pytest.mark.parametrize("num_blocks", [40, 300, 600])
def test_resize_moves_what_is_told(num_blocks):
    """Blocks keep their content over a resize; those that are copied are found at their new place, all read before any
    is written."""
    driver = Driver(MODELS["full+window"])
    driver.add("a", list(range(30)))
    driver.run("a", 20)
    groups = driver.blocks["a"]
    used = sorted({block for blocks in groups for lanes in blocks.values() for block in lanes})
    places = dict(zip(used, [*used[1:], used[0]], strict=True))  # each moves to the next one's place
    driver.runner.resize(num_blocks, list(places.items()))
    driver.blocks["a"] = [
        {block: [places[lane] for lane in lanes] for block, lanes in blocks.items()} for blocks in groups
    ]
    driver.runner.execute(driver.batch("a", 20, 30))
    assert driver.runner.num_blocks == num_blocks


def test_resize_beyond_memory_is_refused():
    """A size above what there is memory for is refused, and nothing has changed."""
    runner = FakeRunner(8, 4, max_blocks=10)
    with pytest.raises(CapacityError, match="10"):
        runner.resize(11, [])
    assert runner.num_blocks == 8

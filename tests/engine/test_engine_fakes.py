"""The fakes themselves: a wrong block is found, a right one gives the plain recurrence; the tokenizer loses nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from looseleaf.engine.runner import GroupBatch, StepBatch
from looseleaf.engine.sampling import SamplingParams, SamplingRow
from looseleaf.errors import RequestError
from looseleaf.testing.fake_runner import FakeRunner, StampMismatch
from looseleaf.testing.fake_tokenizer import FakeTokenizer

GREEDY = SamplingParams(temperature=0.0)
NONE = np.zeros(0, np.int32)


def batch_of(name, tokens, num_context, table, block_tokens=4, copies=()):
    """One sequence: `tokens` after `num_context` tokens that are in `table` already."""
    positions = np.arange(num_context, num_context + len(tokens))
    table = np.array(table, np.int32)
    slots = table[positions // block_tokens].astype(np.int64) * block_tokens + positions % block_tokens
    return StepBatch(
        request_ids=(name,),
        token_ids=np.array(tokens, np.int64),
        positions=positions,
        query_starts=np.array([0, len(tokens)], np.int32),
        num_context_tokens=np.array([num_context], np.int32),
        groups=(GroupBatch(slots[None], (table[:, None],), np.zeros(1, np.int32)),),
        sampled=np.array([0], np.int32),
        sampling=(SamplingRow(GREEDY, 0.0, NONE, NONE),),
        copies=copies,
    )


def with_group(batch, index=0, **changes):
    """`batch` with other values in one of its groups."""
    groups = list(batch.groups)
    groups[index] = dataclasses.replace(groups[index], **changes)
    return dataclasses.replace(batch, groups=tuple(groups))


def written_runner():
    """Blocks 0, 1 hold tokens 1..8 of "a"; blocks 2, 3 hold tokens 11..18 of "b"."""
    runner = FakeRunner(8, 4, namespace_of=lambda name: "other" if name == "stranger" else "")
    runner.execute(batch_of("a", range(1, 9), 0, [0, 1]))
    runner.execute(batch_of("b", range(11, 19), 0, [2, 3]))
    return runner


@given(st.lists(st.integers(0, 259), min_size=1, max_size=40), st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_chunks_give_the_plain_recurrence(prompt, cuts):
    """Computed through blocks in any chunks, the next token is that of the plain recurrence."""
    runner = FakeRunner(16, 4)
    at = i = 0
    while at < len(prompt):
        chunk = prompt[at : at + cuts[i % len(cuts)]]
        output = runner.execute(batch_of("a", chunk, at, [5, 3, 9, 1, 0, 2, 4, 6, 7, 8, 10]))
        at, i = at + len(chunk), i + 1
    assert output.token_ids.tolist() == runner.expected_tokens(prompt, 1, GREEDY)


@pytest.mark.parametrize(
    ("name", "table", "what"),
    [
        ("a", [0, 3, 4], "another sequence's block"),
        ("a", [1, 0, 4], "blocks in the wrong order"),
        ("a", [0, 5, 4], "a block never written"),
        ("a", [0, 0, 4], "a block twice"),
        ("a", [0, 1], "no block for the query"),
        ("a", [0, 1, 8], "a block outside the pool"),
        ("stranger", [0, 1, 4], "a block of another namespace"),
    ],
)
def test_wrong_blocks_are_found(name, table, what):
    """Whatever is wrong with a block table, the read says so, and the text of it is kept."""
    runner = written_runner()
    runner.execute(batch_of("a", [9], 8, [0, 1, 4]))
    batch = batch_of(name, [10], 9, [0, 1, 4])
    with pytest.raises(StampMismatch):
        runner.execute(with_group(batch, block_tables=(np.array(table, np.int32)[:, None],)))
    assert len(runner.mismatches) == 1, what


def test_overwritten_block_is_found():
    """A block that was given to somebody else while it was held no longer fits its sequence."""
    runner = written_runner()
    runner.execute(batch_of("b", range(21, 25), 0, [1]))
    with pytest.raises(StampMismatch, match="position 4"):
        runner.execute(batch_of("a", [9], 8, [0, 1, 4]))


def test_slots_must_be_those_of_the_table():
    """Slots and tables that disagree are an error, as are two writes to one slot."""
    runner = written_runner()
    batch = batch_of("a", [9, 10], 8, [0, 1, 4])
    with pytest.raises(StampMismatch, match="slots"):
        runner.execute(with_group(batch, slots=batch.groups[0].slots + 1))
    with pytest.raises(StampMismatch, match="twice"):
        runner.execute(with_group(batch, slots=batch.groups[0].slots * 0 + 16))


def test_copied_blocks_go_on():
    """[P10] A fork's copied tail reads like the parent's; without the copy it is found."""
    for copies in (((1, 6),), ()):
        runner = written_runner()
        batch = batch_of("fork", [30], 6, [0, 6], copies=copies)
        if copies:
            output = runner.execute(batch)
            assert output.token_ids.tolist() == runner.expected_tokens([1, 2, 3, 4, 5, 6, 30], 1, GREEDY)
        else:
            with pytest.raises(StampMismatch):
                runner.execute(batch)


def test_failing_step_leaves_garbage():
    """A step told to fail raises and spoils its slots, so that committing them would be noticed."""
    runner = written_runner()
    runner.fail_next(ValueError("boom"))
    with pytest.raises(ValueError, match="boom"):
        runner.execute(batch_of("a", [9], 8, [0, 1, 4]))
    with pytest.raises(StampMismatch):
        runner.execute(batch_of("a", [10], 9, [0, 1, 4]))


def test_sampled_tokens_depend_on_the_draw_and_the_history():
    """Other seeds, other tokens; penalties change them too; the end token ends."""
    runner = FakeRunner(8, 4, eos_every=5)
    plain = runner.expected_tokens([1, 2], 30, SamplingParams(seed=1, ignore_eos=True))
    assert plain != runner.expected_tokens([1, 2], 30, SamplingParams(seed=2, ignore_eos=True))
    assert plain != runner.expected_tokens([1, 2], 30, SamplingParams(seed=1, ignore_eos=True, presence_penalty=1.0))
    assert plain == runner.expected_tokens([1, 2], 30, SamplingParams(seed=1, ignore_eos=True))
    ended = runner.expected_tokens([1, 2], 30, SamplingParams(seed=1))
    assert ended == plain[: len(ended)]
    assert ended[-1] == 257
    with pytest.raises(ValueError, match="seed"):
        runner.expected_tokens([1, 2], 3, SamplingParams())


@given(st.text())
def test_tokenizer_loses_nothing(text):
    """decode(encode(text)) is text, with and without BOS; special tokens show only when asked for."""
    tokenizer = FakeTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == "<|bos|>" + text
    assert max(tokenizer.encode(text)) < tokenizer.vocab_size


def test_chat_is_plain():
    """A conversation is its lines; a wrong one is refused."""
    tokenizer = FakeTokenizer()
    tokens = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(tokens) == "user: hi\nassistant: "
    for bad in ([], [{"role": "user"}], [{"role": 1, "content": "x"}]):
        with pytest.raises(RequestError):
            tokenizer.render_chat(bad)

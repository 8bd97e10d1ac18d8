"""Scheduling is array work: what a decode step costs besides the model."""

from __future__ import annotations

import numpy as np

from looseleaf.engine.config import EngineConfig
from looseleaf.engine.runner import StepOutput
from looseleaf.testing.engine_kit import EngineKit
from looseleaf.testing.engine_kit import sample_prompt as prompt_of

NUM_ROWS = 256


def decoding_kit():
    """256 requests, all decoding, over a model that costs nothing."""
    config = EngineConfig(max_running_requests=NUM_ROWS, max_step_tokens=100_000, share_in_flight=False)
    kit = EngineKit(num_blocks=16_384, block_tokens=16, blocks_per_page=16, config=config)
    kit.runner.execute = lambda batch: StepOutput(
        np.full(len(batch.sampled), 65, np.int64), (None,) * len(batch.sampled)
    )
    for i in range(NUM_ROWS):
        kit.add(f"r{i}", prompt_of(150 + i % 100, seed=i), 500)
    kit.engine.step()
    assert kit.engine.num_running == NUM_ROWS
    return kit


def test_a_decode_step_is_two_calls_of_the_cache():
    """However many rows decode, tokens are appended in one call and committed in one; no look-up, no reservation."""
    kit = decoding_kit()
    calls = []
    for name in ("lease", "match", "stats", "append_many", "commit_many", "maintain"):
        method = getattr(kit.cache, name)
        setattr(
            kit.cache, name, lambda *args, _name=name, _method=method, **kw: calls.append(_name) or _method(*args, **kw)
        )
    kit.engine.step()
    assert calls == ["maintain", "append_many", "commit_many"]


def test_every_decoding_row_is_in_every_step():
    """256 decoding requests are 256 tokens of each step, none left out; `bench/engine_step.py` times it."""
    kit = decoding_kit()
    for _ in range(50):
        kit.engine.step()
    steps = kit.observer.named("on_step")[1:]
    assert all(step["num_scheduled_tokens"] == NUM_ROWS for step in steps)


def test_ten_thousand_that_wait_do_not_slow_a_step():
    """With 10,000 requests in the queue a decode step looks at none of them, and adding and aborting one does not look
    at the others either."""

    class Watched(list):
        num_looks = 0

        def __iter__(self):
            type(self).num_looks += len(self)
            return super().__iter__()

        def __contains__(self, item):
            type(self).num_looks += len(self)
            return super().__contains__(item)

        def index(self, *args):
            type(self).num_looks += len(self)
            return super().index(*args)

        remove = index

        def __getitem__(self, index):
            type(self).num_looks += 1
            return super().__getitem__(index)

    kit = decoding_kit()
    for i in range(10_000):
        kit.add(f"w{i}", prompt_of(20, seed=i % 7), 4)
    kit.engine.step()
    assert kit.engine.num_waiting == 10_000
    scheduler = kit.engine._scheduler
    scheduler.waiting = Watched(scheduler.waiting)
    for i in range(50):
        kit.engine.abort(f"w{7 * i}")
        kit.engine.step()
    assert len(scheduler.waiting) == 9_950
    assert Watched.num_looks <= 50 * 64


def test_rows_are_made_again_only_when_they_change():
    """The decoding rows of a step are those of the step before, as one object, until a request comes or ends."""
    kit = decoding_kit()
    kit.engine.step()
    rows = kit.engine._scheduler._last_decodes
    kit.engine.step()
    assert kit.engine._scheduler._last_decodes is rows
    kit.engine.abort("r17")
    kit.add("new", prompt_of(150, seed=300), 500)
    kit.engine.step()
    kit.engine.step()
    changed = kit.engine._scheduler._last_decodes
    assert [sequence.request_id for sequence in changed.sequences] == [
        *(f"r{i}" for i in range(NUM_ROWS) if i != 17),
        "new",
    ]
    assert changed.leases == [sequence.held for sequence in changed.sequences]

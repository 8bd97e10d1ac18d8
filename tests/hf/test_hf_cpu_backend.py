"""The compiled backend says what the reference says, reads shared blocks once, and notices wrong blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hf_driver import HandDriver, HandSequence
from hf_models import full_logits, random_tokens, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from looseleaf import LayerGroup
from looseleaf.engine.runner import GroupBatch, StepBatch
from looseleaf.errors import UnsupportedModel
from looseleaf.hf import cpu_backend
from looseleaf.hf.attention_backend import AttentionCall, GatherBackend
from looseleaf.hf.cpu_backend import CpuBackend, Threads, backend_for
from looseleaf.hf.runner import HFRunner
from looseleaf.hf.shared_runs import DecodeTables, WorkItems, common_blocks, work_items
from looseleaf.hf.step_plan import StepPlan, oldest_visible, slots_of
from looseleaf.tensors import KVLayout, KVMemory, LayerShape, plan_lanes

BLOCK = 4
CPU = torch.device("cpu")
HISTORIES = [
    LayerGroup(),
    LayerGroup("window", window_tokens=7),
    LayerGroup("window", window_tokens=64),
    LayerGroup("chunked", chunk_tokens=24),
]


@pytest.fixture(scope="module")
def fast() -> CpuBackend:
    backend = backend_for(CPU, torch.float32)
    assert isinstance(backend, CpuBackend)
    return backend


class Family:
    """Sequences in a tree of common beginnings, with random K and V in every slot that one of them may see."""

    def __init__(self, seed: int, history: LayerGroup, shape: LayerShape, dtype: torch.dtype) -> None:
        self.rng = np.random.default_rng(seed)
        self.shape = shape
        lanes = plan_lanes([history] * 2 + [LayerGroup("window", window_tokens=3)] * 3, [shape] * 5)
        self.memory = KVMemory(KVLayout((shape,) * 5, lanes, dtype, BLOCK), num_blocks=900, device=CPU)
        self.group = lanes.groups[lanes.places[0].group]
        self.index = lanes.places[0].group
        self.free = self.rng.permutation(900).tolist()
        self.generator = torch.Generator().manual_seed(seed)
        for layer in range(5):
            for tensor in self.memory.in_place(layer) or ():
                tensor.copy_(torch.randn(tensor.shape, generator=self.generator))

    def blocks(self, count: int) -> np.ndarray:
        taken = [self.free.pop() for _ in range(count * self.group.num_lanes)]
        return np.asarray(taken, dtype=np.int32).reshape(count, self.group.num_lanes)

    def plan(self, num_context: list[int], num_query: list[int]) -> StepPlan:
        """A step: every sequence shares a random beginning with one of those before it."""
        tables: list[np.ndarray] = []
        for context, query in zip(num_context, num_query, strict=True):
            need = -(-(context + query) // BLOCK)
            kept = 0
            if tables:
                parent = tables[int(self.rng.integers(len(tables)))]
                kept = int(self.rng.integers(0, min(context // BLOCK, len(parent)) + 1))
            shared = parent[:kept] if kept else self.blocks(0)
            tables.append(np.concatenate([shared, self.blocks(need - kept)]))
        contexts = np.asarray(num_context)
        firsts = oldest_visible(self.group, contexts) // BLOCK
        spans = [np.arange(c, c + q) for c, q in zip(num_context, num_query, strict=True)]
        slots = [slots_of(table, 0, at, BLOCK) for table, at in zip(tables, spans, strict=True)]
        step = GroupBatch(
            np.concatenate(slots, axis=1),
            tuple(table[first:] for first, table in zip(firsts, tables, strict=True)),
            firsts.astype(np.int32),
        )
        nothing = GroupBatch(np.zeros((1, sum(num_query)), np.int64), (), np.zeros(0, np.int32))
        groups = [nothing] * len(self.memory.layout.lanes.groups)
        groups[self.index] = step
        batch = StepBatch(
            request_ids=tuple(map(str, range(len(tables)))),
            token_ids=np.zeros(sum(num_query), np.int64),
            positions=np.concatenate(spans),
            query_starts=np.cumsum([0, *num_query]).astype(np.int32),
            num_context_tokens=contexts.astype(np.int32),
            groups=tuple(groups),
            sampled=np.zeros(0, np.int32),
            sampling=(),
        )
        return StepPlan(batch, self.memory.layout.lanes, BLOCK, CPU, torch.float32, keep_exact=False, group_tokens=300)

    def call(self, layer: int, num_rows: int, num_heads: int, **wishes: object) -> AttentionCall:
        """Random queries, scaled up so that few keys take most of the weight."""
        shape = self.shape
        query = 3 * torch.randn(num_rows, num_heads, shape.key_dim, generator=self.generator)
        keys, values = (torch.zeros(num_rows, shape.num_kv_heads, dim) for dim in (shape.key_dim, shape.value_dim))
        given = {"scaling": None, "softcap": None, "sinks": None, **wishes}
        return AttentionCall(layer, query, keys, values, **given)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(HISTORIES),
    st.lists(st.tuples(st.integers(0, 150), st.sampled_from([1, 1, 1, 2, 30, 170])), min_size=1, max_size=9),
    st.sampled_from([(1, 4, 16, 16), (2, 2, 8, 8), (3, 1, 8, 12), (2, 3, 20, 32), (1, 1, 5, 3)]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(["plain", "softcap", "sinks", "scaling"]),
)
def test_the_kernel_equals_the_reference(
    fast: CpuBackend,
    seed: int,
    history: LayerGroup,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    wish: str,
) -> None:
    """[H96] Any mix of decodes and chunks, any tree of shared blocks, any history, grouped heads, V of another size
    than K, soft caps, sinks: within 1e-5 of the reference, in every lane."""
    num_kv_heads, sharing, key_dim, value_dim = heads
    family = Family(seed, history, LayerShape(num_kv_heads, key_dim, value_dim), dtype)
    num_heads = num_kv_heads * sharing
    wishes = {
        "plain": {},
        "softcap": {"softcap": 2.0},
        "scaling": {"scaling": 0.3},
        "sinks": {"sinks": torch.linspace(-2, 2, num_heads)},
    }[wish]
    contexts, queries = [c for c, _ in lengths], [q for _, q in lengths]
    plan = family.plan(contexts, queries)
    for layer in (0, 1):
        call = family.call(layer, sum(queries), num_heads, **wishes)
        found = fast.attend(call, plan, family.memory)
        wanted = GatherBackend().attend(call, plan, family.memory)
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_what_is_hidden_is_not_read(fast: CpuBackend) -> None:
    """[S115] NaN in every slot that no row may see, also in the rest of its last block, leaves the result as it is."""
    for history in HISTORIES:
        family = Family(1, history, LayerShape(2, 8, 8), torch.float32)
        plan = family.plan([70, 33, 90], [1, 1, 1])
        call = family.call(0, 3, 4)
        before = fast.attend(call, plan, family.memory).clone()
        seen = torch.cat([group.slots for group in plan.for_layer(0).decode]).unique()
        hidden = torch.ones(900 * BLOCK, dtype=torch.bool)
        hidden[seen] = False
        for tensor in family.memory.in_place(0) or ():
            tensor[hidden] = float("nan")
        assert torch.equal(fast.attend(call, plan, family.memory), before)
        for tensor in family.memory.in_place(0) or ():
            tensor[seen[0]] = float("nan")
        assert fast.attend(call, plan, family.memory).isnan().any()


def test_a_wrong_block_gives_a_wrong_token(fast: CpuBackend) -> None:
    """A block swapped for another's, shared or private, changes what comes out."""
    family = Family(2, LayerGroup(), LayerShape(1, 16, 16), torch.float32)
    plan = family.plan([80, 80, 80], [1, 1, 1])
    call = family.call(0, 3, 2)
    before = fast.attend(call, plan, family.memory)
    step = plan.batch.groups[family.index]
    for block in (0, 10, 20):
        table = step.block_tables[1].copy()
        table[block] = family.blocks(1)[0]
        tables = (step.block_tables[0], table, step.block_tables[2])
        groups = list(plan.batch.groups)
        groups[family.index] = replace(step, block_tables=tables)
        wrong = replace(plan, batch=replace(plan.batch, groups=tuple(groups)), _plans={})
        after = fast.attend(call, wrong, family.memory)
        assert not torch.allclose(after[1], before[1], atol=1e-3)
        assert torch.allclose(after[[0, 2]], before[[0, 2]], atol=1e-6)


def test_the_number_of_threads_changes_nothing(fast: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece of work is done once whoever does it; without the threads of torch the caller does it alone."""
    family = Family(3, LayerGroup(), LayerShape(2, 16, 16), torch.float32)
    plan = family.plan([150] * 12, [1] * 12)
    call = family.call(0, 12, 4)
    monkeypatch.setattr(Threads, "num_threads", property(lambda _: 3))
    many = fast.attend(call, plan, family.memory)
    monkeypatch.setattr(Threads, "num_threads", property(lambda _: 1))
    alone = fast.attend(call, plan, family.memory)
    assert torch.equal(many, alone)


def tables_of(rows: list[list[int]], stops: list[int]) -> DecodeTables:
    table = np.zeros((1, len(rows), max(map(len, rows))), dtype=np.int32)
    for index, row in enumerate(rows):
        table[0, index, : len(row)] = row
    every = np.arange(len(rows), dtype=np.int64)
    return DecodeTables(every, table, np.zeros(len(rows), dtype=np.int64), np.asarray(stops, dtype=np.int64))


def test_common_runs_are_found_and_read_once() -> None:
    """A trie of two levels: blocks 5, 6 are seen by four rows, 7 and 8 by two of them; each is in one item for all."""
    rows = tables_of([[5, 6, 7, 8, 1], [5, 6, 2], [5, 6, 7, 8, 3], [5, 6, 4, 9]], [18, 10, 17, 16])
    leaders = common_blocks(rows, BLOCK)
    assert leaders.tolist() == [[0, 0, 0, 0, 0], [0, 0, 1, 1, 1], [0, 0, 0, 0, 2], [0, 0, 3, 3, 3]]
    work = work_items(rows, BLOCK, item_tokens=64, max_members=8, min_saved=1)
    shared = {(i[1], i[2]): work.members[i[3] : i[3] + i[4]].tolist() for i in work.items.tolist() if i[4] > 1}
    assert shared == {(0, 8): [0, 1, 2, 3], (8, 16): [0, 2]}
    assert seen_tokens(work, 4) == [list(range(stop)) for stop in (18, 10, 17, 16)]


def test_a_block_shared_only_in_part_is_no_common_block() -> None:
    """A block is common only for rows that see all of it, and only at the same place."""
    rows = tables_of([[5, 6], [5, 6], [6, 5]], [8, 6, 8])
    assert common_blocks(rows, BLOCK).tolist() == [[0, 0], [0, 1], [2, 2]]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.sampled_from([4, 20, 64, 1000]), st.sampled_from([1, 2, 5]))
def test_items_show_each_row_exactly_its_tokens(seed: int, num_rows: int, item_tokens: int, max_members: int) -> None:
    """However work is cut and shared, each row sees every token between first and stop once, in its own blocks."""
    rng = np.random.default_rng(seed)
    table = np.cumsum(rng.integers(0, 2, size=(num_rows, 30)), axis=1).astype(np.int32) * 30 + np.arange(30)
    stops = rng.integers(1, 30 * BLOCK + 1, size=num_rows)
    firsts = (stops * rng.random(num_rows)).astype(np.int64)
    rows = DecodeTables(np.arange(num_rows), table[None].astype(np.int32), firsts, stops)
    work = work_items(rows, BLOCK, item_tokens=item_tokens, max_members=max_members, min_saved=BLOCK)
    assert seen_tokens(work, num_rows) == [list(range(a, b)) for a, b in zip(firsts, stops, strict=True)]
    for row, first, stop, at, count, _ in work.items.tolist():
        columns = slice(first // BLOCK, -(-stop // BLOCK))
        assert all((table[m, columns] == table[row, columns]).all() for m in work.members[at : at + count])


def seen_tokens(work: WorkItems, num_rows: int) -> list[list[int]]:
    """Tokens that each row's parts show, in order."""
    found: dict[int, list[int]] = {part: [] for part in range(len(work.members))}
    for _, first, stop, member, count, part in work.items.tolist():
        assert member == part
        for extra in range(count):
            found[part + extra] = list(range(first, stop))
    parts = [work.order[work.starts[row] : work.starts[row + 1]] for row in range(num_rows)]
    assert all((work.members[mine] == row).all() for row, mine in enumerate(parts))
    return [sorted(token for part in mine.tolist() for token in found[part]) for mine in parts]


def test_without_numba_the_reference_serves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A machine without the compiler gets the reference, and a line in the log that says what to install."""

    def missing(name: str) -> object:
        raise ImportError(f"no {name}")

    monkeypatch.setattr(cpu_backend, "import_module", missing)
    assert isinstance(backend_for(CPU, torch.float32), GatherBackend)
    assert "hint: pip install" in caplog.text


class Wrong(CpuBackend):
    """A backend that is off by a little."""

    def attend(self, call: AttentionCall, plan: StepPlan, memory: KVMemory) -> torch.Tensor:
        return super().attend(call, plan, memory) * 1.05


def test_a_backend_that_fails_the_self_test_is_not_used(
    fast: CpuBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The self-test runs through the backend: one chosen by default gives way to the reference, with the reason in the
    log; one asked for is refused, and the model left as it was."""
    compiled = [cpu_backend.import_module(f"looseleaf.hf.{name}") for name in ("paged_kernel", "chunk_kernel")]
    model = tiny_model("llama")
    with pytest.raises(UnsupportedModel, match="differ"):
        HFRunner.load(model, num_blocks=20, block_tokens=8, num_threads=1, backend=Wrong(*compiled))
    assert not any(weight.isnan().any() for weight in model.parameters())
    monkeypatch.setattr(cpu_backend, "CpuBackend", Wrong)
    with HFRunner.load(model, num_blocks=20, block_tokens=8, num_threads=1) as runner:
        assert isinstance(runner._attention.backend, GatherBackend)
    assert "with Wrong" in caplog.text


def test_memory_that_the_kernel_cannot_read_gets_the_reference() -> None:
    """8 bits and float16 are served by the reference, without a word."""
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.float16):
        assert isinstance(backend_for(CPU, dtype), GatherBackend)


@pytest.mark.parametrize("family_name", ["llama", "gemma3_text", "gemma2", "gpt_oss", "deepseek_v3"])
def test_decodes_of_a_model_with_a_common_beginning(family_name: str) -> None:
    """Sequences behind the same long prefix, decoded together, say what the plain model says of each alone."""
    attention = {"attn_implementation": "eager"} if family_name in ("gemma2", "gpt_oss") else {}
    plain, rng = tiny_model(family_name, **attention), np.random.default_rng(4)
    with HFRunner.load(tiny_model(family_name), num_blocks=400, block_tokens=8, num_threads=1) as runner:
        driver = HandDriver(runner, rng)
        prefix = random_tokens(rng, 12 * 8)
        first = driver.sequence(np.concatenate([prefix, random_tokens(rng, 5)]))
        driver.step([(first, len(first.tokens) - 1)])
        others = [
            driver.sequence(np.concatenate([prefix, random_tokens(rng, n)]), shared=first.table[:12])
            for n in (2, 9, 30)
        ]
        driver.step([(s, len(s.tokens) - s.num_computed - 1) for s in others])
        sequences: list[HandSequence] = [first, *others]
        logits = driver.step([(s, 1) for s in sequences])
        for s, row in zip(sequences, logits, strict=True):
            assert (row - full_logits(plain, s.tokens)[-1]).abs().max() <= 1e-4

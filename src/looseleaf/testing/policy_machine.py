"""State machines over an eviction policy: on its own, and as the policy of a cache."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from looseleaf.core.eviction import PolicyFactory
from looseleaf.testing.manager_machine import ManagerMachine
from looseleaf.testing.policy_driver import DrivenRun, PolicyDriver

WORDS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


class PolicyMachine(RuleBasedStateMachine):
    """Whatever a cache may do to a policy, in any order. After each step: the laws that `PolicyDriver.check` knows."""

    factory: ClassVar[PolicyFactory]

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[DrivenRun] = []
        self.seen: list[list[int]] = [[0]]
        self.num_steps = 0

    @initialize(num_blocks=st.integers(1, 40))
    def make(self, num_blocks: int) -> None:
        """An empty pool."""
        self.driver = PolicyDriver(type(self).factory, num_blocks)

    def _words(self, data: st.DataObject) -> list[int]:
        """New words, or known ones, cut or with something behind them."""
        if data.draw(st.booleans()):
            known = data.draw(st.sampled_from(self.seen))
            return known[: data.draw(st.integers(1, len(known)))] + data.draw(WORDS)
        words = data.draw(WORDS)
        self.seen = [*self.seen[-4:], words]
        return words

    @rule(data=st.data(), gap_seconds=st.sampled_from([0.0, 0.5, 100.0]))
    def serve(self, data: st.DataObject, gap_seconds: float) -> None:
        """A request begins, stores all of its words, and ends."""
        self.driver.serve(self._words(data))
        self.driver.seconds += gap_seconds

    @precondition(lambda self: len(self.driver.requests) < 4)
    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        """A request begins."""
        self.driver.open(self._words(data))

    @precondition(lambda self: self.driver.requests)
    @rule(data=st.data(), num_blocks=st.integers(1, 8))
    def store(self, data: st.DataObject, num_blocks: int) -> None:
        """A request goes on."""
        self.driver.store(data.draw(st.sampled_from(self.driver.requests)), num_blocks)

    @precondition(lambda self: self.driver.requests)
    @rule(data=st.data(), num_output_tokens=st.sampled_from([0, 1, 1000]))
    def close(self, data: st.DataObject, num_output_tokens: int) -> None:
        """A request ends."""
        self.driver.close(data.draw(st.sampled_from(self.driver.requests)), num_output_tokens)

    @rule(num_blocks=st.integers(1, 6))
    def evict(self, num_blocks: int) -> None:
        """Memory is needed."""
        self.driver.evict(num_blocks)

    @rule(data=st.data(), num_blocks=st.integers(1, 6))
    def cut(self, data: st.DataObject, num_blocks: int) -> None:
        """A leaf is evicted that the policy did not choose, or was not even offered."""
        leaves = [run for run in self.driver.runs() if not (run.children or run.num_holders)]
        if leaves:
            self.driver.cut(data.draw(st.sampled_from(leaves)), num_blocks)

    @precondition(lambda self: self.driver.root.children)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        """Runs are withdrawn though nobody uses them."""
        run = data.draw(st.sampled_from(self.driver.runs()))
        self.pinned.append(run)
        self.driver.pin(run, 1)

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        """They are offered again."""
        self.driver.pin(self.pinned.pop(), -1)

    @precondition(lambda self: self.num_steps % 8 == 7)
    @rule()
    def clear(self) -> None:
        """All content is forgotten, also what requests hold."""
        self.driver.clear()

    @rule(num_blocks=st.integers(1, 40))
    def resize(self, num_blocks: int) -> None:
        """Another size of the pool."""
        self.driver.resize(num_blocks)

    @invariant()
    def holds(self) -> None:
        """All laws."""
        self.num_steps += 1
        if hasattr(self, "driver"):
            self.driver.check()


def run_on_its_own(factory: PolicyFactory, num_examples: int) -> None:
    """Run `PolicyMachine` on a policy, `num_examples` times 50 steps."""
    _run(type("PolicyOnItsOwn", (PolicyMachine,), {"factory": staticmethod(factory)}), num_examples)


def run_in_cache(name: str, num_examples: int) -> None:
    """Run `ManagerMachine` on caches with one policy, `num_examples` times 50 steps."""
    _run(type("PolicyInCache", (ManagerMachine,), {"policy": name}), num_examples)


def _run(machine: type[RuleBasedStateMachine], num_examples: int) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=checks,
            database=None,  # its keys would not tell one policy from another
            report_multiple_bugs=False,
        ),
    )

"""State machines over pool, tree and manager; the long run is marked heavy."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from looseleaf.testing.manager_machine import ManagerMachine
from looseleaf.testing.pool_machine import PoolMachine
from looseleaf.testing.tree_machine import TreeMachine

MACHINES = [PoolMachine, TreeMachine, ManagerMachine]


def run(machine: type[RuleBasedStateMachine], num_examples: int, num_steps: int) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_examples, stateful_step_count=num_steps, deadline=None, suppress_health_check=checks
        ),
    )


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
def test_machine(machine: type[RuleBasedStateMachine]) -> None:
    """[E55] No sequence of calls breaks an invariant or lets a counter drift (some thousands of rules)."""
    run(machine, num_examples=100, num_steps=60)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("machine", "num_examples"),
    [(PoolMachine, 800), (TreeMachine, 800), (ManagerMachine, 2600)],
    ids=lambda value: str(value),
)
def test_machine_long(machine: type[RuleBasedStateMachine], num_examples: int) -> None:
    """[E55] No sequence of calls breaks an invariant or lets a counter drift (over 200,000 rules in all)."""
    run(machine, num_examples, num_steps=50)

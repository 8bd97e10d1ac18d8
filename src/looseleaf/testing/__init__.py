"""The test kit that ships with looseleaf: fake runner, oracles, state machines. Needs no torch.

The state machines (`pool_machine`, `tree_machine`, `manager_machine`, `policy_machine`, `engine_machine`) need
hypothesis; import them by module. So does `check_policy`, when it is called.
"""

from __future__ import annotations

from looseleaf.testing.clock import ManualClock
from looseleaf.testing.engine_kit import EngineKit
from looseleaf.testing.fake_runner import FakeRunner
from looseleaf.testing.fake_tokenizer import FakeTokenizer
from looseleaf.testing.mirror import EventMirror
from looseleaf.testing.policy_kit import check_policy
from looseleaf.testing.stamps import StampMemory, WrongStamp

__all__ = [
    "EngineKit",
    "EventMirror",
    "FakeRunner",
    "FakeTokenizer",
    "ManualClock",
    "StampMemory",
    "WrongStamp",
    "check_policy",
]

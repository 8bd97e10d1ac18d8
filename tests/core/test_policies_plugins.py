"""Laws of policies that other packages offer: they are found, they can't do harm by being there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = """
from looseleaf.core.eviction.lru import LRUPolicy
class MRUPolicy(LRUPolicy):
    name = "mru"
    def key(self, node_id, depth_blocks):
        return (-self._last_used[node_id], -depth_blocks)
lru = MRUPolicy
number = 7
"""
POINTS = """[looseleaf.eviction_policies]
mru = good_plugin:MRUPolicy
lru = good_plugin:lru
broken = broken_plugin:Policy
missing = good_plugin:Missing
number = good_plugin:number
twice = good_plugin:MRUPolicy
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with two installed packages: one with a policy that works and others that don't, one that clashes."""
    (tmp_path / "good_plugin.py").write_text(PLUGIN)
    (tmp_path / "broken_plugin.py").write_text("import a_module_that_does_not_exist")
    for name, points in (("good", POINTS), ("other", "[looseleaf.eviction_policies]\ntwice = other_plugin:Policy\n")):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(points)
    return tmp_path


def ask(installed: Path, code: str) -> str:
    """What `code` prints where these packages are installed."""
    setup = f"import sys; sys.path.append({str(installed)!r})\n"
    setup += "from looseleaf import CacheConfig, CacheManager, ConfigError\n"
    done = subprocess.run([sys.executable, "-c", setup + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_plugin_serves(installed: Path) -> None:
    """A policy of another package is listed behind those built in, and used by its name; nothing is imported before."""
    code = """
from looseleaf.core.eviction import BUILT_IN, POLICIES
print(list(POLICIES)[len(BUILT_IN):], len(POLICIES) - len(BUILT_IN), "good_plugin" in sys.modules)
cache = CacheManager(CacheConfig(4, 4, 4, "mru"))
for first in range(5):
    with cache.lease([first] * 4 + [0]) as lease:
        lease.reserve(4)
        lease.commit(4)
print([cache.match([first] * 4 + [0]).num_tokens for first in range(5)])
"""
    assert ask(installed, code).splitlines() == [
        "['broken', 'missing', 'mru', 'number', 'twice'] 5 False",
        "[4, 4, 4, 0, 4]",
    ]


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("broken", "'broken' is a plug-in, broken_plugin:Policy, that cannot be loaded: ModuleNotFoundError"),
        ("missing", "'missing' is a plug-in, good_plugin:Missing, that cannot be loaded: AttributeError"),
        ("number", "'number' is a plug-in, good_plugin:number, that is int, not a factory"),
        ("twice", "'twice' is offered by good_plugin:MRUPolicy and other_plugin:Policy"),
        ("lur", "policy has no setting 'lur'"),
    ],
)
def test_a_plugin_that_does_not_work_is_named(installed: Path, name: str, facts: str) -> None:
    """Who asks for it gets a ConfigError that says which and why; others never notice."""
    code = f"""
CacheManager(CacheConfig(4, 4, 4))
try:
    CacheConfig(4, 4, 4, {name!r})
except ConfigError as error:
    print(error)
"""
    assert facts in ask(installed, code)


def test_a_plugin_takes_no_name_that_is_built_in(installed: Path) -> None:
    """`lru` stays ours."""
    assert ask(installed, "from looseleaf.core.eviction import POLICIES; print(POLICIES['lru'].__module__)").endswith(
        "eviction.lru"
    )


def test_the_policy_in_the_docs_keeps_the_contract() -> None:
    """The example of docs/EVICTION.md is a policy that passes the kit, which is what its last lines ask."""
    page = (Path(__file__).parents[2] / "docs/EVICTION.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    assert "check_policy(LRU2Policy)" in code
    exec(compile(code.replace("check_policy(LRU2Policy)", "check_policy(LRU2Policy, 5)"), "EVICTION.md", "exec"), {})

"""Docs that cannot rot: README code runs, what can be set or go wrong is documented, links lead somewhere."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from looseleaf import CacheConfig, LayerGroup, errors
from looseleaf.core.eviction import POLICIES
from looseleaf.core.explain import Reason
from looseleaf.engine.config import EngineConfig
from looseleaf.server.settings import ServerSettings

ROOT = Path(__file__).parents[2]
SETTINGS = (CacheConfig, LayerGroup, EngineConfig, ServerSettings)
REFERENCE = (ROOT / "docs/REFERENCE.md").read_text()
PAGES = sorted(path for path in ROOT.rglob("*.md") if not {".venv", "venv", "node_modules"} & set(path.parts))


def test_readme_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The README's Python works as it stands and prints what its comments say."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("992\n")


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda item: item.__name__)
def test_settings_are_documented(settings: type) -> None:
    """Every setting has its line, and there are no more than 40 in all."""
    for field in fields(settings):
        assert f"`{field.name}`" in REFERENCE, field.name


def test_there_are_few_settings() -> None:
    """At most 40 settings in all."""
    assert sum(len(fields(settings)) for settings in SETTINGS) <= 40


def test_policies_reasons_and_errors_are_documented() -> None:
    """Every policy, every reason, every error with its code."""
    for name in [*POLICIES, *get_args(Reason)]:
        assert f"| `{name}` |" in REFERENCE, name
    for name, item in inspect.getmembers(errors, inspect.isclass):
        if issubclass(item, Exception):
            assert f"| `{name}` | `{item.code}` |" in REFERENCE, name


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """A relative link names a file that is there."""
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_folder_says_what_it_is_for() -> None:
    """Each layer's folder has a README that says where a new class goes."""
    folders = [path.parent for path in (ROOT / "src/looseleaf").glob("*/__init__.py")]
    assert len(folders) >= 9
    for folder in folders:
        assert (folder / "README.md").exists(), folder.name

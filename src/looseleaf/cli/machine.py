"""Facts that belong beside every published figure: machine, versions, commit, command."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import looseleaf

_PACKAGES = ("looseleaf", "torch", "transformers", "numpy")


def provenance() -> dict[str, Any]:
    """Machine, versions, commit (None outside of a checkout) and command of this process, ready for JSON. Of files that
    the command names by an absolute path only the names are told."""
    words = [Path(sys.argv[0]).name, *(Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:])]
    return {
        "machine": {
            "platform": platform.platform(),
            "processor": _processor(),
            "num_processors": num_processors(),
            "memory_bytes": _memory_bytes(),
        },
        "versions": {"python": platform.python_version(), **{name: version_of(name) for name in _PACKAGES}},
        "commit": commit(Path(looseleaf.__file__).parent),
        "command": " ".join(words),
    }


def commit(folder: Path) -> str | None:
    """The commit of the checkout that tracks `folder`, with `-dirty` if files changed; None if there is none."""
    tracked = _git(folder, "ls-files", "--error-unmatch", "__init__.py")
    head = _git(folder, "rev-parse", "HEAD")
    if tracked is None or head is None:
        return None
    return head + ("-dirty" if _git(folder, "status", "--porcelain", "--untracked-files=no", ".") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1) if found else platform.processor() or platform.machine()


def num_processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def version_of(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

"""git, asked about the checkout that holds a file. ``git_says(root, "rev-parse", "HEAD")``. Called by the parent.

What the environment tells git (``GIT_DIR``, ``GIT_WORK_TREE``, ``GIT_INDEX_FILE``, as hooks have them set) is about
another checkout, and is kept from it.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

import relaymeter

__all__ = ["checkout_root", "git_says", "tree_of"]


def checkout_root(package: Path | None = None) -> Path | None:
    """The folder of the checkout whose ``src`` holds ``package``, an ``__init__.py`` (this one); None: in none."""
    root = (Path(relaymeter.__file__) if package is None else package).resolve().parents[2]
    return root if (root / ".git").exists() else None


def git_says(root: Path, *arguments: str) -> str:
    """What git prints about the checkout in ``root``. Raises OSError, SubprocessError, ValueError."""
    # why: the folder of a CI job often belongs to another user, which git refuses unless told
    command = ["git", "-c", f"safe.directory={root}", "-C", str(root), *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=True)
    return found.stdout.strip()


def tree_of(package: Path) -> str | None:
    """Hash of all files of the checkout that holds ``package``; None outside a checkout, or where files are changed."""
    root = checkout_root(package)
    if root is not None:
        with suppress(OSError, subprocess.SubprocessError, ValueError):
            if not git_says(root, "status", "--porcelain", "--untracked-files=no"):
                return git_says(root, "rev-parse", "HEAD^{tree}") or None
    return None

"""Files that a command of ``track`` adds to, looked at before the first launch. Called by the parent; no torch import.

``check_history(path)`` and ``check_summary(path)`` raise InputError where the file could not be added to at the end.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from relaymeter.errors import InputError

__all__ = ["check_history", "check_summary"]


def check_history(path: Path) -> None:
    """Refuse a history to which no launch could be added: a folder, a pipe, a place without rights, something else than
    a folder on the way. Folders that are missing are made later; leaves nothing behind. Raises InputError."""
    try:
        _refuse_unwritable(Path(os.path.realpath(path)))
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot write history {str(path)[:200]}: {getattr(error, 'strerror', None) or error}: name another with "
            "--history"
        ) from error


def check_summary(text: str) -> None:
    """Refuse a step summary of GitHub that could not be added to; its folder has to be there. Raises InputError."""
    path = Path(os.path.realpath(text))
    try:
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {path.parent}")
        _refuse_unwritable(path)
    except (OSError, ValueError) as error:
        raise InputError(
            f"--github cannot add to {text[:200]}, which GITHUB_STEP_SUMMARY names: "
            f"{getattr(error, 'strerror', None) or error}: set it to a file, or leave --github out"
        ) from error


def _refuse_unwritable(path: Path) -> None:
    """Raise OSError or ValueError where nothing could be added to the file ``path``, which may be missing."""
    if os.path.lexists(path):
        if path.is_dir():
            raise ValueError("it is a folder: name a file in it")
        # why: without O_NONBLOCK a pipe would be waited for
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise ValueError("it is no regular file")
        finally:
            os.close(handle)
        return
    folder = path.parent
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder")
    os.rmdir(tempfile.mkdtemp(dir=folder, prefix=".relaymeter-"))  # rights alone do not say it, as in /proc

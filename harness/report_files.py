"""The folder that ``report`` writes: made whole under another name, then renamed into place, never over anything else.

``write_folder(Path("out"), write, force=False)`` calls ``write`` with the folder to fill. Called by one process.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from relaymeter.errors import InputError

__all__ = ["FILES", "check_folder", "default_folder", "write_folder"]

#: Names of everything that a report may hold: a folder with anything else is never replaced.
FILES = re.compile(r"report\.md|rows\.(csv|parquet)|((state-)?phases|ratios|moves(-[0-9]+)?)\.png")


def default_folder(paths: Sequence[Path]) -> Path:
    """``report`` in the folder that was given, or in the one that all the given lie in."""
    folders = [path if path.is_dir() else path.parent for path in paths]
    if len(folders) == 1:
        return folders[0] / "report"
    parents = [os.path.abspath(folder.parent) for folder in folders]
    if len(set(parents)) == 1:
        return folders[0].parent / "report"
    raise InputError(f"{paths[0]} and {paths[-1]} lie in different folders: say with --out DIR where the report goes")


def check_folder(folder: Path, reads: Sequence[Path], *, force: bool) -> None:
    """Refuse, before any work, what ``write_folder`` would: a folder that is there (no ``force``) or that holds more
    than a report. ``reads``: files that are read, which no report may replace. Raises InputError."""
    try:
        if any(Path(os.path.realpath(folder)) in Path(os.path.realpath(path)).parents for path in reads):
            raise InputError(f"--out {folder} holds rows that are read: choose another folder")
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise InputError(f"--out {folder} is no folder: choose another name")
        if not folder.is_dir():
            parent = folder.absolute().parent
            if not parent.is_dir():
                raise InputError(f"folder {folder.parent} does not exist: make it first (mkdir -p {folder.parent})")
            return
        if not force:
            raise InputError(f"{folder} exists: choose another folder with --out, or add --force to replace it")
        strange = sorted(path.name for path in folder.iterdir() if not FILES.fullmatch(path.name) or path.is_dir())
    except (OSError, ValueError) as error:
        raise _unwritable(folder, error) from error
    if strange:
        raise InputError(
            f"{folder} holds {strange[0]!r}, which no report writes, and --force replaces reports only: choose another "
            "folder with --out"
        )


def write_folder(folder: Path, write: Callable[[Path], None], *, force: bool) -> None:
    """Let ``write`` fill a new folder and rename it to ``folder``; a report that stood there goes. Raises InputError,
    and then leaves what stood there."""
    name = secrets.token_hex(8)
    building, old = (folder.absolute().parent / f".relaymeter-{name}{end}" for end in ("", "-old"))
    try:
        building.mkdir()
        write(building)
        check_folder(folder, (), force=force)  # it may have been made meanwhile
        if folder.exists():
            folder.rename(old)
        try:
            building.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
        shutil.rmtree(old, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(building, ignore_errors=True)
        if isinstance(error, OSError):
            raise _unwritable(folder, error) from error
        if isinstance(error, InputError):
            raise InputError(str(error).replace(str(building), str(folder))) from error
        raise


def _unwritable(folder: Path, error: OSError | ValueError) -> InputError:
    text = getattr(error, "strerror", None) or str(error)
    return InputError(f"cannot write {str(folder)[:200]}: {text}: choose another folder with --out")

"""The history: append-only JSON Lines, a launch a line, that several write and no killed one spoils. No torch import.

``append(path, launches)`` adds lines; ``read(path)`` gives every launch in the order of the file. A writer holds a lock
on the file and ends with fsync. What a killed one left without its newline is kept where it is whole, else moved to a
file beside the history; it never runs into the next line. Needs a file system with flock (local ones, NFS from 4 on).
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from relaymeter.errors import InputError, NothingMeasured, Undecided
from relaymeter.harness.track.records import HISTORY_SCHEMA_VERSION, LaunchRecord
from relaymeter.records import dump_json, parse_json
from relaymeter.units import counted

__all__ = ["append", "read"]

#: The largest history that is read, in bytes: some 100,000 launches.
_LARGEST = 1 << 30
#: How long a writer waits for another, in seconds. One holds the lock for as long as an fsync takes.
_PATIENCE_S = 60.0
_BAD = (ValueError, TypeError, AttributeError, RecursionError, OverflowError)
#: UTF-8, with the mark that some editors write at the start of a file.
_TEXT = "utf-8-sig"


def append(path: Path, launches: Sequence[LaunchRecord]) -> list[str]:
    """Add a line for each launch, all or none, making the file and its folders where they are missing.

    Returns notes: what an earlier writer had left torn, and where it is now. Raises InputError where the file cannot be
    written or a launch would not be read back (a sample that is no number above 0), and Undecided, nothing written,
    where the last line is of another schema version. The parent calls it, no rank.
    """
    entries = [launch.to_dict() for launch in launches]
    text = "".join(dump_json(entry, indent=None) for entry in entries)
    for line in text.splitlines():
        LaunchRecord.from_dict(parse_json(line))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not path.exists()
        with _locked(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, fcntl.LOCK_EX) as handle:
            notes = _mend(path, handle)
            size = os.fstat(handle).st_size
            try:
                _write(handle, text.encode())
                os.fsync(handle)
            except BaseException:
                os.ftruncate(handle, size)
                raise
        if fresh:
            _sync_folder(path.parent)
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot write history {str(path)[:200]}: {getattr(error, 'strerror', None) or error}: name another with "
            "--history"
        ) from error
    return notes


def read(path: Path) -> tuple[list[LaunchRecord], list[str]]:
    """Every launch in the order of the file, and notes: a torn last line is left out and said.

    Raises NothingMeasured where there is no file, InputError naming file and line where any other line is bad, and
    Undecided where a line is of another schema version.
    """
    try:
        if not path.exists():
            raise NothingMeasured(
                f"history {str(path)[:200]} does not exist: relaymeter track run --history {str(path)[:200]} makes it"
            )
        with _locked(path, os.O_RDONLY, fcntl.LOCK_SH) as handle, os.fdopen(os.dup(handle), "rb") as stream:
            content = stream.read()
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read history {path}: {getattr(error, 'strerror', None) or error}") from error
    *lines, last = content.split(b"\n")
    notes = []
    if last and _whole(last):
        lines.append(last)
    elif last:
        notes.append(
            f"history {path}: line {len(lines) + 1} is torn after {counted(len(last), 'byte')} (its writer was "
            "killed) and left out; the next relaymeter track run sets it aside"
        )
    return [_launch(path, number, line) for number, line in enumerate(lines, start=1)], notes


def _launch(path: Path, number: int, line: bytes) -> LaunchRecord:
    where = f"history {path}, line {number}"
    if not line.strip():
        raise InputError(f"{where}: it is empty: remove it")
    try:
        entry = parse_json(line.decode(_TEXT))
        _check_version(entry, where)
        return LaunchRecord.from_dict(entry)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not valid JSON at column {error.colno}: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text") from error
    except (InputError, *_BAD) as error:
        raise InputError(f"{where}: {error}") from error


def _check_version(entry: Any, where: str) -> None:
    version = entry.get("schema_version") if isinstance(entry, dict) else None
    if isinstance(version, int) and version != HISTORY_SCHEMA_VERSION:
        raise Undecided(
            f"{where}: schema_version {version}, this version reads {HISTORY_SCHEMA_VERSION}: leave that history to "
            "the version that wrote it and start another with --history"
        )


def _whole(line: bytes) -> bool:
    """Whether a line is a whole JSON object; a part of one never is."""
    try:
        return isinstance(parse_json(line.decode(_TEXT)), dict)
    except _BAD:
        return False


@contextmanager
def _locked(path: Path, flags: int, lock: int) -> Iterator[int]:
    """The open file, locked. Raises InputError: no regular file, too large, held by another for too long."""
    # why: without O_NONBLOCK a pipe would be waited for
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise InputError(f"history {path} is no regular file: name another with --history")
        if found.st_size > _LARGEST:
            raise InputError(f"history {path} has {found.st_size} bytes: at most {_LARGEST} are read; start another")
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.flock(handle, lock | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > until:
                    raise InputError(
                        f"history {path} has been held by another process for {_PATIENCE_S:.0f} s: end it (fuser "
                        f"{path} names it) and try again"
                    ) from error
                time.sleep(0.02)
        yield handle
    finally:
        os.close(handle)


def _mend(path: Path, handle: int) -> list[str]:
    """Make the file end with a newline, setting a torn line aside; refuse one of another schema version."""
    last, end, size = _last_line(handle)
    whole = _whole(last)
    if whole:
        _check_version(parse_json(last.decode(_TEXT)), f"history {path}, last line")
    if end == size:
        return []
    if whole:
        _write(handle, b"\n")
        return [f"history {path}: its last line had no newline but is whole: kept"]
    aside = _set_aside(path, last)
    os.ftruncate(handle, end)
    return [
        f"history {path}: its last line was torn after {counted(len(last), 'byte')} (its writer was killed): set aside "
        f"as {aside.name}"
    ]


def _last_line(handle: int) -> tuple[bytes, int, int]:
    """The last line without its newline; where the last newline ends; the size of the file."""
    size = os.fstat(handle).st_size
    tail = b""
    start = size
    # why: the newline before the last line is looked for, not the one that ends it
    while start and tail.rfind(b"\n", 0, -1) < 0:
        step = min(start, 1 << 16)
        start -= step
        tail = os.pread(handle, step, start) + tail
    if tail.endswith(b"\n"):
        return tail[tail.rfind(b"\n", 0, -1) + 1 : -1], size, size
    cut = tail.rfind(b"\n") + 1
    return tail[cut:], size - len(tail) + cut, size


def _set_aside(path: Path, line: bytes) -> Path:
    """A new file beside the history that holds the torn line, on disk before the history loses it."""
    number = 1
    while True:
        aside = path.with_name(f"{path.name}.torn-{number}")
        try:
            handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            break
        except FileExistsError:
            number += 1
    try:
        _write(handle, line)
        os.fsync(handle)
    finally:
        os.close(handle)
    _sync_folder(path.parent)
    return aside


def _write(handle: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(handle, rest) :]


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

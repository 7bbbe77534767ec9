"""The journal of ``compare``: rows of finished changes in a file, that an interrupted command goes on from.

``finished_rows(journal, making, launches)`` reads it, ``keep_rows(journal, made, making)`` adds one change. Several
commands may share a journal at once: each reads it again under a lock, and replaces the file as a whole.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from relaymeter.compare_records import CompareRecord
from relaymeter.errors import InputError
from relaymeter.harness.compare_change import Making
from relaymeter.records import dump_lines, write_text
from relaymeter.row_files import read_rows

__all__ = ["finished_rows", "keep_rows"]

#: How long a writer waits for another, in seconds. One holds the lock for as long as an fsync takes.
_PATIENCE_S = 20.0
#: What a file system without locks of folders says. NFS is one: there the file is still written whole.
_NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def finished_rows(
    journal: Path | None, making: Making, launches: int
) -> tuple[list[CompareRecord], list[CompareRecord]]:
    """Rows of the changes that an earlier run of the same comparison has made in the first ``launches``, and the
    journal's other rows: of changes and launches that are not asked for. Those of a change in which a path failed are
    in neither: it is made again. Raises InputError where they are of another comparison."""
    asked = {change.name for change in making.scenario.changes}
    rows: list[CompareRecord] = []
    others: list[CompareRecord] = []
    for row in [] if journal is None else _rows(journal, making):
        (others if row.change not in asked or row.launch > launches else rows).append(row)
    again = {(row.change, row.launch) for row in rows if row.verdict == "failed"}
    return [row for row in rows if (row.change, row.launch) not in again], others


def keep_rows(journal: Path, made: Sequence[CompareRecord], making: Making) -> None:
    """Add the rows of one change in one launch to what the journal holds by now, in place of those of the same change
    in which a path failed. Where another command has finished that change meanwhile, its rows stay.

    Raises InputError, OSError; the journal is then as it was.
    """
    path = Path(os.path.realpath(journal))
    change = {(row.change, row.launch) for row in made}
    with _locked(path.parent):
        found = _rows(path, making)
        same = [row for row in found if (row.change, row.launch) in change]
        if same and not any(row.verdict == "failed" for row in same):
            return
        others = [row for row in found if (row.change, row.launch) not in change]
        write_text(path, dump_lines([*others, *made]), force=True)


def _rows(journal: Path, making: Making) -> list[CompareRecord]:
    """All rows of the journal. Raises InputError where they are of another comparison."""
    if not journal.exists():
        return []
    changes = {change.name: change for change in making.scenario.changes}
    rows: list[CompareRecord] = []
    for row in read_rows(journal):
        if not isinstance(row, CompareRecord):
            raise InputError(f"--journal {journal} holds rows of other commands: give another file")
        for key, now in (("scenario", making.scenario.name), ("machine_id", making.stamp.machine_id),
                         ("commit", making.stamp.commit)):  # fmt: skip
            if getattr(row, key) != now:
                raise InputError(
                    f"--journal {journal} holds rows of {key} {getattr(row, key)}, this is {now}: give another file"
                )
        if row.change in changes and row.setting != making.setting(changes[row.change]):
            raise InputError(
                f"--journal {journal} holds rows of another comparison of {row.change}: training, engines, --paths, "
                "--storage, ranks or --nic were others; give another file, or the same options"
            )
        rows.append(row)
    return rows


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of the journals in ``folder``: on the folder itself, as the file is another after each writing."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > until:
                    raise InputError(
                        f"{folder} has been locked by another process for {_PATIENCE_S:.0f} s: end it"
                    ) from error
                time.sleep(0.02)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                break
        yield
    finally:
        os.close(handle)

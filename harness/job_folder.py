"""The folder of one launch of ranks: their job, logs, result and temporary files. What killed commands left goes.

    with JobFolder() as work:          # $TMPDIR/relaymeter-XXXXXXXX
        ...                            # work.folder, work.scratch
        work.done = True               # nothing of it is wanted any more

The logs of ranks that failed stay for a day, in which their commands name them; then the next launch removes them.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from relaymeter.harness.processes import has_ended, own_mark
from relaymeter.harness.signals import held_signals

__all__ = ["JobFolder", "remove_abandoned_jobs"]

_PREFIX = "relaymeter-"
_NAME = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")
#: Says which process made the folder, see ``own_mark``.
_OWNER = "owner"
_SCRATCH = "tmp"
#: How long logs stay, in seconds.
_LOGS_STAY_S = 86400.0


class JobFolder:
    """A fresh folder for temporary files; ``scratch`` in it is for what ranks would put there, and always goes."""

    def __init__(self) -> None:
        self.folder = Path()
        self.done = False
        """Whether the whole folder goes at the end, with the logs."""

    @property
    def scratch(self) -> Path:
        """The folder that ranks have as TMPDIR."""
        return self.folder / _SCRATCH

    def __enter__(self) -> JobFolder:
        remove_abandoned_jobs(Path(tempfile.gettempdir()))
        try:
            with held_signals():
                self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
                (self.folder / _OWNER).write_text(own_mark())
                self.scratch.mkdir()
        except BaseException:
            self._remove(whole=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        interrupted = kind is not None and not issubclass(kind, Exception)
        self._remove(whole=self.done or interrupted)

    def _remove(self, *, whole: bool) -> None:
        if self.folder != Path():
            with held_signals():
                shutil.rmtree(self.folder if whole else self.scratch, ignore_errors=True)


def remove_abandoned_jobs(temporary: Path) -> None:
    """Remove what processes of this user that are gone have left in ``temporary``: the files of their ranks at once,
    their logs after a day. A folder of another name, user or PID namespace, or without an owner, stays."""
    with suppress(OSError):
        for path in sorted(temporary.glob(f"{_PREFIX}*")):
            with suppress(OSError):
                if _NAME.fullmatch(path.name) and not path.is_symlink() and path.stat().st_uid == os.getuid():
                    _remove_abandoned(path)


def _remove_abandoned(folder: Path) -> None:
    """Raises OSError where it is no folder of a launch."""
    with open(os.open(folder / _OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as owner:
        mark = owner.read(200)
    if not has_ended(mark):
        return
    old = time.time() - folder.stat().st_mtime > _LOGS_STAY_S
    shutil.rmtree(folder if old else folder / _SCRATCH, ignore_errors=True)

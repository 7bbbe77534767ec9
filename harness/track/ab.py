"""An interleaved A/B: launches of two builds by turns, each in processes of its own. The parent calls it; no torch.

``sides = other_side("../base"), this_side()``, then ``LaunchPairs(sides, suite_file, keep=...).take(8)``.
Each launch is ``relaymeter track run --suite FILE --launches 1 --json FILE`` of its side, with that side's code on the
import path, in an empty folder; what it prints is only shown where it fails. Sides take turns as A B B A, so that what
drifts on the machine falls on both.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from relaymeter.errors import (
    EXIT_OK,
    EXIT_RANK_LOST,
    EXIT_TIME_LIMIT,
    EXIT_WRONG_BITS,
    InputError,
    RelaymeterError,
    Undecided,
)
from relaymeter.harness.processes import end_offspring, has_ended
from relaymeter.harness.signals import INTERRUPTED, ending_signals, held_signals
from relaymeter.harness.track.ab_sides import Side, this_side
from relaymeter.harness.track.records import HISTORY_SCHEMA_VERSION, LaunchRecord
from relaymeter.harness.track.row_texts import visible
from relaymeter.records import parse_json

__all__ = ["LaunchFailed", "LaunchPairs", "OutOfTime", "launch_side", "turns"]

#: A launch that is told to end gets so long to end its ranks, in seconds.
_ENDING_S = 15.0
_TAIL_LINES = 12


class LaunchFailed(RelaymeterError):
    """A launch of one side gave no record. ``exit_code`` is that launch's."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class OutOfTime(RelaymeterError):
    """The time limit has passed before as many launches were taken as were wanted."""

    exit_code = EXIT_TIME_LIMIT


def turns(pair: int) -> tuple[int, int]:
    """Which side goes first in this pair (from 0): 0 before, 1 after. A B, B A, A B, ..."""
    return (0, 1) if pair % 2 == 0 else (1, 0)


class LaunchPairs:
    """The launches of both sides so far, ``launches[0]`` before and ``launches[1]`` after, in the order taken."""

    def __init__(
        self,
        sides: tuple[Side, Side],
        suite_file: Path,
        *,
        keep: Callable[[LaunchRecord], None],
        cases: Sequence[str] = (),
        time_limit_s: float | None = None,
        fault: str | None = None,
        launch: Callable[[Side, Sequence[str]], LaunchRecord] | None = None,
    ) -> None:
        """``keep`` gets every launch as soon as it has ended; ``cases`` of the suite alone are measured, by default
        all; ``time_limit_s``: of all launches together; ``fault`` (tests) goes to the launches after."""
        self.launches: tuple[list[LaunchRecord], list[LaunchRecord]] = ([], [])
        self._sides, self._keep = sides, keep
        self._options = ["--suite", str(suite_file.resolve())]
        self._options += [word for name in cases for word in ("--case", name)]
        self.limit_s = time_limit_s
        self._fault = [] if fault is None else ["--fault", fault]
        self._launch = launch or launch_side
        self._sessions = (secrets.token_hex(4), secrets.token_hex(4))
        self._began, self._taken = time.monotonic(), 0

    def take(self, launches: int) -> None:
        """Launch by turns until each side has ``launches``. Raises LaunchFailed, OutOfTime, InputError, Undecided."""
        while len(self.launches[1]) < launches or len(self.launches[0]) < launches:
            for which in turns(len(self.launches[0])):
                options = [*self._options, *self._limit(launches), *(self._fault if which else [])]
                found = self._launch(self._sides[which], options)
                mine = self.launches[which]
                record = replace(found, session_id=self._sessions[which], launch=len(mine) + 1)
                self._keep(record)
                mine.append(record)
                self._taken += 1
                self._tell(which, launches)

    def _limit(self, launches: int) -> list[str]:
        """What is left of the time, for the next launch."""
        if self.limit_s is None:
            return []
        left = self.limit_s - (time.monotonic() - self._began)
        if left < 1:
            done = f"{len(self.launches[0])} before and {len(self.launches[1])} after"
            raise OutOfTime(f"time limit: {done} of {launches} launches a side were measured")
        return ["--time-limit", f"{left:.0f}"]

    def _tell(self, which: int, launches: int) -> None:
        spent = time.monotonic() - self._began
        left = spent / self._taken * (2 * launches - self._taken)
        name = "before" if which == 0 else "after"
        print(
            f"launch {self._taken} of {2 * launches} ({name}: {visible(self._sides[which].label)}) {spent:.0f} s, "
            f"about {left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )


def launch_side(side: Side, options: Sequence[str]) -> LaunchRecord:
    """One launch of ``side`` in fresh processes. Raises LaunchFailed with what it printed, InputError, Undecided.

    Whatever ends this, the launch is told to end its ranks, and dies with this process. One that a signal killed is a
    lost rank, and nothing of it stays.
    """
    with tempfile.TemporaryDirectory(prefix="relaymeter-ab-") as folder, ending_signals():
        command = [side.python, "-m", "relaymeter", "track", "run", *options, "--launches", "1"]
        made = Path(folder) / "record.json"
        command += ["--history", str(Path(folder) / "history.jsonl"), "--json", str(made)]
        path = ["-u", "PYTHONPATH"] if side.import_path is None else [f"PYTHONPATH={side.import_path}"]
        shim = [sys.executable, "-m", "relaymeter.harness.enter", "--parent", str(os.getpid()), "--", "env", *path]
        with open(Path(folder) / "log", "w+b") as log:
            process: subprocess.Popen[bytes] | None = None
            try:
                with held_signals():
                    process = subprocess.Popen(
                        [*shim, *command], cwd=folder, env=this_side().environment(), stdin=subprocess.DEVNULL,
                        stdout=log, stderr=log, start_new_session=True,
                    )  # fmt: skip
                code = _exit_code(process)
            except BaseException:
                if process is not None:
                    with held_signals():  # why: a second one would leave the launch running
                        _end(process)
                raise
            log.seek(0)
            lines = log.read().decode("utf-8", "replace").strip().splitlines()
        said = made.read_text(encoding="utf-8", errors="replace") if made.is_file() else ""
        if code not in (EXIT_OK, EXIT_WRONG_BITS) or not said.strip():
            tail = "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:]) or "  it printed nothing"
            raise LaunchFailed(
                f"a launch of {side.label} {_how_it_ended(code)} and gave no record:\n{tail}", _verdict_of(code)
            )
        return _record(said, side)


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """Wait for a launch. Its exit code, below 0 where a signal ended it: then all that it started is ended too."""
    with suppress(ChildProcessError):  # where children are not waited for (SIGCHLD is ignored)
        # why: not reaped yet, so that its number is nobody else's
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        if found is not None and found.si_code != os.CLD_EXITED:
            end_offspring(process.pid)
            _remove_job_of(process.pid)
    return process.wait()


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, upon which a launch ends its ranks; SIGKILL to it and all that it started where that takes too long."""
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_ENDING_S)
        return
    end_offspring(process.pid)
    process.kill()
    process.wait()
    _remove_job_of(process.pid)


def _remove_job_of(pid: int) -> None:
    """Remove the folder of ranks, see ``job_folder``, that the process ``pid`` of this user has left: it was killed."""
    for folder in Path(tempfile.gettempdir()).glob("relaymeter-????????"):
        with suppress(OSError, ValueError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with open(os.open(folder / "owner", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as owner:
                mark = owner.read(200)
            if mark.split("-")[1:2] == [str(pid)] and has_ended(mark):
                shutil.rmtree(folder, ignore_errors=True)


def _signal_of(code: int) -> int:
    """The signal that ended a process of this exit code, 0 for none: by itself, or as a shell between reports it."""
    if code < 0:
        return -code
    return code - 128 if code > 128 and code not in INTERRUPTED else 0


def _how_it_ended(code: int) -> str:
    number = _signal_of(code)
    if not number:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"was killed by {name}" + (" (is there too little memory?)" if number == signal.SIGKILL else "")


def _verdict_of(code: int) -> int:
    """What a command whose launch ended so returns: 7 where a signal killed it."""
    return EXIT_RANK_LOST if _signal_of(code) else code or LaunchFailed.exit_code


def _record(text: str, side: Side) -> LaunchRecord:
    try:
        entry = parse_json(text)
    except ValueError as error:
        raise InputError(f"{side.label} wrote no record of a launch: {error}") from error
    version = entry.get("schema_version") if isinstance(entry, dict) else None
    if version != HISTORY_SCHEMA_VERSION:
        raise Undecided(
            f"{side.label} writes launches of schema_version {version}, this version reads {HISTORY_SCHEMA_VERSION}: "
            "the two cannot be compared"
        )
    try:
        return LaunchRecord.from_dict(entry)
    except InputError as error:
        raise InputError(f"{side.label} wrote a record that this version does not read: {error}") from error

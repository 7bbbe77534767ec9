"""An interleaved A/B: launches of two builds by turns, each in processes of its own. The parent calls it; no torch.

``sides = other_side("../base"), this_side()``, then ``LaunchPairs(sides, suite_file, keep=...).take(8)``.
Each launch is ``relaymeter track run --suite FILE --launches 1 --json -`` of its side, with that side's code on the
import path, in an empty folder. Sides take turns as A B B A, so that what drifts on the machine falls on both.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import relaymeter
from relaymeter.errors import EXIT_OK, EXIT_TIME_LIMIT, EXIT_WRONG_BITS, InputError, RelaymeterError, Undecided
from relaymeter.harness.processes import end_offspring
from relaymeter.harness.signals import ending_signals
from relaymeter.harness.track.records import HISTORY_SCHEMA_VERSION, LaunchRecord
from relaymeter.records import parse_json

__all__ = [
    "LaunchFailed",
    "LaunchPairs",
    "OutOfTime",
    "Side",
    "launch_side",
    "other_side",
    "this_side",
    "turns",
    "versions_differ",
]

_PROBE_LIMIT_S = 60.0
#: A launch that is told to end gets so long to end its ranks, in seconds.
_ENDING_S = 15.0
_TAIL_LINES = 12
#: What times depend on besides the code: a machine's id holds it too, see ``launches.track_machine_id``.
_PACKAGES = ("torch", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_PROBE = f"""import importlib.metadata, importlib.util, json
try:
    import relaymeter
    found = relaymeter.__file__, relaymeter.__version__
except ImportError:
    found = None, None
try:
    track = importlib.util.find_spec("relaymeter.harness.options_track") is not None
except ImportError:
    track = False
versions = {{}}
for name in {_PACKAGES}:
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps([*found, track, versions]))
"""


class LaunchFailed(RelaymeterError):
    """A launch of one side gave no record. ``exit_code`` is that launch's."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class OutOfTime(RelaymeterError):
    """The time limit has passed before as many launches were taken as were wanted."""

    exit_code = EXIT_TIME_LIMIT


@dataclass(frozen=True)
class Side:
    """A build that can be launched: the interpreter, and the folder that its code is imported from (None: as
    installed)."""

    label: str
    python: str
    path: str | None
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of torch and NCCL, by the name of their packages."""

    def environment(self) -> dict[str, str]:
        """What its processes get: this one's environment with the side's code first on the import path."""
        found = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return found if self.path is None else {**found, "PYTHONPATH": self.path}


def this_side() -> Side:
    """The build that runs this command."""
    found = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return Side("this", sys.executable, str(Path(relaymeter.__file__).parent.parent), found)


def other_side(text: str) -> Side:
    """The build that ``--ab`` names: a checkout's folder, run by this interpreter, or another python executable.

    Raises InputError where it is neither, or its version has no ``track run``.
    """
    path = Path(text)
    if path.is_dir():
        source = path.resolve() / "src"
        if not (source / "relaymeter" / "__init__.py").is_file():
            raise InputError(
                f"--ab {text} holds no src/relaymeter/__init__.py: name a checkout of relaymeter, such as one that git "
                "worktree add makes, or a python executable"
            )
        side = Side(text, sys.executable, str(source))
    elif path.is_file() and os.access(path, os.X_OK):
        side = Side(text, str(path.absolute()), None)  # a link into a virtual environment stays a link
    else:
        raise InputError(f"--ab {text} is neither the folder of a checkout nor a python executable")
    origin, own, track, versions = _probe(side, text)
    if origin is None:
        raise InputError(f"--ab {text}: relaymeter is not installed there")
    if side.path is not None and not Path(origin).resolve().is_relative_to(Path(side.path).resolve()):
        raise InputError(f"--ab {text}: its code is not what is imported there, but {origin}")
    if not track:
        raise InputError(f"--ab {text} is relaymeter {own} from before track run existed: choose a base that has it")
    return replace(side, versions=versions)


def _probe(side: Side, text: str) -> tuple[str | None, str | None, bool, dict[str, str]]:
    """Where the side's code is, its version, whether it has ``track``, and versions of what it runs on."""
    try:
        with tempfile.TemporaryDirectory(prefix="relaymeter-ab-") as folder:
            found = subprocess.run(
                [side.python, "-c", _PROBE], env=side.environment(), cwd=folder, capture_output=True, text=True,
                timeout=_PROBE_LIMIT_S, check=False,
            )  # fmt: skip
        origin, own, track, versions = json.loads(found.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(f"--ab {text} cannot be run: {error}") from error
    except (ValueError, IndexError) as error:
        said = (found.stderr.strip().splitlines() or ["nothing on standard error"])[-1]
        raise InputError(f"--ab {text} is no python that imports relaymeter: {said}") from error
    return origin, own, bool(track), versions or {}


def versions_differ(before: Side, after: Side) -> list[str]:
    """What the sides run on besides their own code, where it differs: ``torch 2.9.0 before, 2.10.0 after``."""
    return [
        f"{name} {before.versions.get(name, 'none')} before, {after.versions.get(name, 'none')} after"
        for name in _PACKAGES
        if before.versions.get(name) != after.versions.get(name)
    ]


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
        self._limit_s = time_limit_s
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
        if self._limit_s is None:
            return []
        left = self._limit_s - (time.monotonic() - self._began)
        if left < 1:
            done = f"{len(self.launches[0])} before and {len(self.launches[1])} after"
            raise OutOfTime(f"time limit: {done} of {launches} launches a side were measured")
        return ["--time-limit", f"{left:.0f}"]

    def _tell(self, which: int, launches: int) -> None:
        spent = time.monotonic() - self._began
        left = spent / self._taken * (2 * launches - self._taken)
        name = "before" if which == 0 else "after"
        print(
            f"launch {self._taken} of {2 * launches} ({name}: {self._sides[which].label}) {spent:.0f} s, "
            f"about {left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )


def launch_side(side: Side, options: Sequence[str]) -> LaunchRecord:
    """One launch of ``side`` in fresh processes. Raises LaunchFailed with what it printed, InputError, Undecided.

    Whatever ends this, the launch is told to end its ranks, and dies with this process.
    """
    with tempfile.TemporaryDirectory(prefix="relaymeter-ab-") as folder, ending_signals():
        command = [side.python, "-m", "relaymeter", "track", "run", *options, "--launches", "1"]
        command += ["--history", str(Path(folder) / "history.jsonl"), "--json", "-"]
        path = ["-u", "PYTHONPATH"] if side.path is None else [f"PYTHONPATH={side.path}"]
        shim = [sys.executable, "-m", "relaymeter.harness.enter", "--parent", str(os.getpid()), "--", "env", *path]
        with open(Path(folder) / "log", "w+b") as log:
            process = subprocess.Popen(
                [*shim, *command], cwd=folder, env=this_side().environment(), stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=log, start_new_session=True,
            )  # fmt: skip
            try:
                said, _ = process.communicate()
            except BaseException:
                _end(process)
                raise
            log.seek(0)
            lines = log.read().decode("utf-8", "replace").strip().splitlines()
        if process.returncode not in (EXIT_OK, EXIT_WRONG_BITS) or not said.strip():
            tail = "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])
            code = process.returncode
            raise LaunchFailed(
                f"a launch of {side.label} ended with exit code {code} and gave no record:\n{tail}",
                code if code > 0 else LaunchFailed.exit_code,
            )
        return _record(said.decode(), side)


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, upon which a launch ends its ranks; SIGKILL to it and all that it started where that takes too long."""
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_ENDING_S)
        return
    end_offspring(process.pid)
    process.kill()
    process.wait()


def _record(text: str, side: Side) -> LaunchRecord:
    try:
        entry = parse_json(text)
    except ValueError as error:
        raise InputError(f"{side.label} printed no record of a launch: {error}") from error
    version = entry.get("schema_version") if isinstance(entry, dict) else None
    if version != HISTORY_SCHEMA_VERSION:
        raise Undecided(
            f"{side.label} writes launches of schema_version {version}, this version reads {HISTORY_SCHEMA_VERSION}: "
            "the two cannot be compared"
        )
    return LaunchRecord.from_dict(entry)

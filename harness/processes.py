"""What /proc says of processes: their state, all that one of them has started, and whether one is gone.

``end_offspring(pid)`` kills every process that the leader of a session has started, in whatever process group.
``own_mark()`` names this process for good, in a file or in the name of a folder; ``has_ended(mark)`` asks later.
"""

from __future__ import annotations

import errno
import os
import signal
from contextlib import suppress
from dataclasses import dataclass

__all__ = ["end_offspring", "has_ended", "own_mark", "pid_namespace", "start_of", "state_of"]


def end_offspring(root: int) -> bool:
    """SIGKILL to every process that descends from ``root``; whether there were any. The parent of the ranks calls it.

    ``root`` leads a session of its own and is not reaped yet, so that its number is nobody else's.
    """
    ended: set[tuple[int, int]] = set()
    while found := _offspring(root) - ended:  # again: one may have started another meanwhile
        for pid, started in found:
            if (process := _process(pid)) is not None and process.started == started:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        ended |= found
    return bool(ended)


@dataclass(frozen=True)
class _Process:
    """A line of /proc: state letter (T is stopped, Z has ended), parent, session, and the clock tick of its start."""

    state: str
    parent: int
    session: int
    started: int


def _process(pid: int) -> _Process | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            words = stat.read().rpartition(")")[2].split()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESRCH, errno.EACCES, errno.EPERM):  # gone, or hidden (hidepid)
            raise
        return None
    return _Process(words[0], int(words[1]), int(words[3]), int(words[19]))


def state_of(pid: int) -> str:
    """State letter of a process. Empty where there is none."""
    process = _process(pid)
    return "" if process is None else process.state


def start_of(pid: int) -> str | None:
    """Start of a process in clock ticks since boot; None where there is none. With the pid it names a process."""
    process = _process(pid)
    return None if process is None or process.state in "ZX" else str(process.started)


def pid_namespace() -> str:
    """What tells this process's PID namespace, in which its number means it, from others of this machine."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return "0"


def own_mark() -> str:
    """This process for good, as three numbers: ``"NAMESPACE-PID-START"``."""
    return f"{pid_namespace()}-{os.getpid()}-{start_of(os.getpid())}"


def has_ended(mark: str) -> bool:
    """Whether the process of ``own_mark()`` is gone. Of another PID namespace, or no such mark: nobody knows, so no."""
    words = mark.split("-")
    if len(words) != 3 or not all(word.isdigit() for word in words) or words[0] != pid_namespace():
        return False
    return start_of(int(words[1])) != words[2]


def _offspring(root: int) -> set[tuple[int, int]]:
    """Process id and start of all that live and descend from ``root``, the leader of a session: the members of its
    session, whose parents may have ended, and the children of all these, in whatever session."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    processes = {pid: process for pid in pids if (process := _process(pid)) is not None}
    family = more = {root}
    while more:
        more = {pid for pid, each in processes.items() if each.session in family or each.parent in family} - family
        family = family | more
    return {(pid, processes[pid].started) for pid in family - {root} if processes[pid].state not in "ZX"}

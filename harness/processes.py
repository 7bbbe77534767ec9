"""What /proc says of processes: their state, and all that one of them has started.

``end_offspring(pid)`` kills every process that the leader of a session has started, in whatever process group.
"""

from __future__ import annotations

import errno
import os
import signal
from contextlib import suppress
from dataclasses import dataclass

__all__ = ["end_offspring", "state_of"]


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

"""Puts a rank in its place: joins a network namespace, takes a host name, dies with its launcher, runs the command.

``python -m relaymeter.harness.enter --netns NAME --hostname NODE --parent PID -- COMMAND ...`` is run by the launcher,
once per rank. It becomes the command (exec), so process id, signals and exit code are the command's own.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Sequence

from relaymeter.errors import EXIT_CRASH

__all__ = ["enter", "main"]

_CLONE_NEWUTS = 0x04000000
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1


def enter(netns: str | None, hostname: str | None, parent: int | None) -> None:
    """Move the calling process. ``netns``: name or path of a network namespace. Raises OSError.

    ``hostname`` is set in a UTS namespace of its own. With ``parent``, the kernel kills this process when its launcher
    ends; where it has ended already, the process exits at once.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: int) -> None:
        if getattr(libc, name)(*arguments) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"{name}: {os.strerror(code)}")

    if parent is not None:
        call("prctl", _PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            raise ProcessLookupError(f"the launcher (process {parent}) has ended")
    if netns is not None:
        handle = os.open(netns if "/" in netns else f"/var/run/netns/{netns}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            call("setns", handle, _CLONE_NEWNET)
        finally:
            os.close(handle)
    if hostname is not None:
        call("unshare", _CLONE_NEWUTS)
        socket.sethostname(hostname)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of the module; returns only where the rank could not be put in its place."""
    parser = argparse.ArgumentParser(prog="python -m relaymeter.harness.enter", description="Puts a rank in its place.")
    parser.add_argument("--netns", help="network namespace to join: a name or a path")
    parser.add_argument("--hostname", help="host name to take, in a UTS namespace of its own")
    parser.add_argument("--parent", type=int, help="process id of the launcher, with which this process dies")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- then the command to run")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command given after --")
    try:
        enter(options.netns, options.hostname, options.parent)
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]} in {options.netns or 'this namespace'}: {error}", file=sys.stderr)
    return EXIT_CRASH


if __name__ == "__main__":
    sys.exit(main())

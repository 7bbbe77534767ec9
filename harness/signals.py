"""SIGTERM and SIGHUP as exceptions, so that they end a command as Ctrl-C does: through whatever has to be tidied up.

``with ending_signals(): ...`` raises EndingSignal where one comes; ``with held_signals(): ...`` is a block that none of
the three cuts in the middle; ``exit_code(stop)`` is what a command that was ended so returns. Imports little.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["INTERRUPTED", "EndingSignal", "ending_signals", "exit_code", "held_signals"]

#: Exit codes of what was interrupted: 128 and the number of SIGHUP, SIGINT (Ctrl-C) and SIGTERM.
INTERRUPTED = (129, 130, 143)
#: Within so many seconds a second signal is the first once more: ``timeout`` sends one to a process, one to its group.
_TWICE_S = 1.0


class EndingSignal(SystemExit):
    """SIGTERM or SIGHUP came; ``code`` is 128 + the signal, what a shell would report."""


def exit_code(stop: KeyboardInterrupt | EndingSignal) -> int:
    """The exit code of a command that ``stop`` ended: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP."""
    return int(str(stop.code)) if isinstance(stop, EndingSignal) else 128 + signal.SIGINT


@contextmanager
def ending_signals() -> Iterator[None]:
    """While open, SIGTERM and SIGHUP raise EndingSignal in the main thread, so that contexts are closed.

    Handlers that somebody else installed stay. Outside the main thread nothing changes.
    """
    came: list[float] = []

    def end(number: int, _: FrameType | None) -> None:
        again = bool(came) and time.monotonic() - came[-1] < _TWICE_S
        came.append(time.monotonic())
        if not again:
            raise EndingSignal(128 + number)

    changed: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (int(signal.SIGTERM), int(signal.SIGHUP)):
            if signal.getsignal(number) is signal.SIG_DFL:
                changed[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, before in changed.items():
            signal.signal(number, before)


@contextmanager
def held_signals() -> Iterator[None]:
    """Hold Ctrl-C, SIGTERM and SIGHUP back until the block has ended, so that it is never cut in the middle."""
    came: list[int] = []
    held: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (int(signal.SIGINT), int(signal.SIGTERM), int(signal.SIGHUP)):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                held[number] = signal.signal(number, lambda got, _: came.append(got))
    try:
        yield
    finally:
        for number, before in held.items():
            signal.signal(number, before)
        for number in came:
            signal.raise_signal(number)

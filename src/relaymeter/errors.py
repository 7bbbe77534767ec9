"""Typed errors and the exit code each of them stands for.

Every error a user can cause says the value, what was expected and the next command. ``exit_code`` is what the command
line returns for it; wrong bits outrank every other verdict.
"""

from __future__ import annotations

__all__ = [
    "EXIT_CRASH",
    "EXIT_GATE_MISSED",
    "EXIT_NOTHING_MEASURED",
    "EXIT_OK",
    "EXIT_RANK_LOST",
    "EXIT_TIME_LIMIT",
    "EXIT_UNDECIDED",
    "EXIT_USAGE",
    "EXIT_WRONG_BITS",
    "DigestMismatch",
    "InputError",
    "LayoutError",
    "MoveTimeout",
    "NothingMeasured",
    "PlanDisagreement",
    "RankLost",
    "RelaymeterError",
    "Undecided",
]

EXIT_OK = 0
EXIT_CRASH = 1
EXIT_USAGE = 2
EXIT_GATE_MISSED = 3
EXIT_UNDECIDED = 4
EXIT_NOTHING_MEASURED = 5
EXIT_WRONG_BITS = 6
EXIT_RANK_LOST = 7
EXIT_TIME_LIMIT = 124


class RelaymeterError(Exception):
    """Base of every error this package raises on purpose. ``exit_code`` is the command line's answer to it."""

    exit_code = EXIT_CRASH


class InputError(RelaymeterError):
    """A bad command line, file or value: says the value, the place, what is valid and the next command."""

    exit_code = EXIT_USAGE


class LayoutError(InputError):
    """A layout that contradicts itself or does not cover a tensor: names tensor, rank and count."""


class PlanDisagreement(RelaymeterError):
    """Ranks expect different messages: names the pair and both counts. Raised on every rank before a byte moves."""

    exit_code = EXIT_USAGE


class DigestMismatch(RelaymeterError):
    """Bits at the destination differ from the source: names tensor and element range."""

    exit_code = EXIT_WRONG_BITS


class RankLost(RelaymeterError):
    """A rank stopped answering during a move. ``ranks`` are the lost ones; the destination is not usable."""

    exit_code = EXIT_RANK_LOST

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class MoveTimeout(RelaymeterError):
    """The time limit of a move passed while every rank still answered. The destination is not usable."""

    exit_code = EXIT_TIME_LIMIT


class Undecided(RelaymeterError):
    """Two things cannot be compared, or the measurement does not decide."""

    exit_code = EXIT_UNDECIDED


class NothingMeasured(RelaymeterError):
    """No link, no size or no row was measured."""

    exit_code = EXIT_NOTHING_MEASURED

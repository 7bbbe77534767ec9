"""Verdicts: pure functions from records and exit codes to what a command answers. Wrong bits outrank everything.

``judge(rows)`` gives the exit code of a finished run and the lines to print, the worst first. Called by the parent or
offline, never inside the ranks; the verdict on ranks that did not finish is ``launch.verdict``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from relaymeter.errors import (
    EXIT_CRASH,
    EXIT_GATE_MISSED,
    EXIT_NOTHING_MEASURED,
    EXIT_OK,
    EXIT_RANK_LOST,
    EXIT_WRONG_BITS,
)
from relaymeter.records import MoveRecord
from relaymeter.units import format_bytes

__all__ = ["BOUND_TOLERANCE", "WIRE_SLACK_BYTES", "WIRE_TOLERANCE", "Verdict", "judge", "notes", "row_verdict"]

#: Kernel-counted bytes may differ from the planned ones by this share (headers, acknowledgements) ...
WIRE_TOLERANCE = 0.08
#: ... and by this many bytes of barriers and heartbeats, which small moves would notice.
WIRE_SLACK_BYTES = 262144

#: A time below this share of the lower bound says that the calibrated rates are too low.
BOUND_TOLERANCE = 0.97

#: From the worst down: the first that occurs is the exit code of the whole.
_ORDER = (EXIT_WRONG_BITS, EXIT_RANK_LOST, EXIT_GATE_MISSED, EXIT_NOTHING_MEASURED)

_CODES = {
    "ok": EXIT_OK,
    "wrong bits": EXIT_WRONG_BITS,
    "wire bytes differ": EXIT_GATE_MISSED,
    "not measured": EXIT_NOTHING_MEASURED,
}


@dataclass(frozen=True)
class Verdict:
    """Exit code, and lines for people, the worst first."""

    exit_code: int
    lines: tuple[str, ...]


def row_verdict(
    *,
    digest_passed: int,
    digest_total: int,
    measured_s: float | None,
    planned_bytes: int,
    wire_bytes: int | None,
) -> str:
    """One word or two for a row: ``ok``, ``wrong bits``, ``wire bytes differ`` or ``not measured``."""
    if digest_passed != digest_total:
        return "wrong bits"
    if measured_s is None or digest_total == 0:
        return "not measured"
    if wire_bytes is not None and abs(wire_bytes - planned_bytes) > WIRE_TOLERANCE * planned_bytes + WIRE_SLACK_BYTES:
        return "wire bytes differ"
    return "ok"


def judge(rows: Sequence[MoveRecord], ended: int = EXIT_OK) -> Verdict:
    """The verdict of a run's rows and of how its ranks ended (an exit code). No rows is nothing measured."""
    if not rows:
        return Verdict(EXIT_NOTHING_MEASURED, ("nothing was measured",))
    codes = [_CODES.get(row.verdict, EXIT_CRASH) for row in rows]
    lines = [(_rank(code), _line(row)) for code, row in zip(codes, rows, strict=True) if code != EXIT_OK]
    worst = min([*codes, ended], key=_rank)
    return Verdict(worst, tuple(text for _, text in sorted(lines, key=lambda line: line[0])))


def notes(rows: Sequence[MoveRecord]) -> tuple[str, ...]:
    """What a reader should know of rows that are no fault: times under a bound that is only as good as its rates, and
    memory beyond a limit that the process as a whole, not only the move, took."""
    fast = tuple(
        f"{row.move} by {row.route} took less than its lower bound ({row.measured_s / row.bound_s:.3f} of it): the "
        "profile's rates are too low for this machine now; calibrate again"
        for row in rows
        if row.measured_s is not None and row.bound_s and row.measured_s < BOUND_TOLERANCE * row.bound_s
    )
    large = tuple(
        f"{row.move} by {row.route}: a process took {format_bytes(row.peak_bytes)} beyond its larger layout, "
        f"{format_bytes(row.max_extra_bytes)} were allowed and {format_bytes(row.peak_predicted_bytes)} predicted"
        for row in rows
        if row.max_extra_bytes is not None and row.peak_bytes is not None and row.peak_bytes > row.max_extra_bytes
    )
    return fast + large


def _rank(code: int) -> int:
    return len(_ORDER) + (code == EXIT_OK) if code not in _ORDER else _ORDER.index(code)


def _line(row: MoveRecord) -> str:
    where = f"{row.move} by {row.route}"
    if row.verdict == "wrong bits":
        return (
            f"WRONG BITS in {where}: {row.digest_total - row.digest_passed} of {row.digest_total} digests differ; "
            f"first: {row.mismatch}"
        )
    if row.verdict == "wire bytes differ":
        wire = row.wire_cross_node_bytes or 0
        return (
            f"wire bytes differ in {where}: the kernel counted {format_bytes(wire)} between nodes, "
            f"{format_bytes(row.bytes_cross_node)} were planned"
        )
    return f"{where}: {row.verdict}"

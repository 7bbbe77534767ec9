"""Verdicts: pure functions from records and exit codes to what a command answers. Wrong bits outrank everything.

``judge(rows)`` gives the exit code of a finished run and the lines to print, the worst first. Called by the parent or
offline, never inside the ranks; the verdict on ranks that did not finish is ``launch.verdict``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from relaymeter.compare_records import CompareRecord
from relaymeter.errors import (
    EXIT_CRASH,
    EXIT_GATE_MISSED,
    EXIT_NOTHING_MEASURED,
    EXIT_OK,
    EXIT_RANK_LOST,
    EXIT_USAGE,
    EXIT_WRONG_BITS,
)
from relaymeter.records import MoveRecord
from relaymeter.state_records import OffloadRecord, StateRecord
from relaymeter.units import counted, format_bytes

__all__ = [
    "BOUND_TOLERANCE",
    "SIMULATED",
    "WIRE_SLACK_BYTES",
    "WIRE_TOLERANCE",
    "Verdict",
    "judge",
    "judge_comparison",
    "judge_states",
    "notes",
    "row_verdict",
    "state_verdict",
]

#: Kernel-counted bytes may differ from the planned ones by this share (headers, acknowledgements) ...
WIRE_TOLERANCE = 0.08
#: ... and by this many bytes of barriers and heartbeats, which small moves would notice.
WIRE_SLACK_BYTES = 262144

#: A time below this share of the lower bound says that the calibrated rates are too low.
BOUND_TOLERANCE = 0.97

#: From the worst down: the first that occurs is the exit code of the whole.
_ORDER = (EXIT_WRONG_BITS, EXIT_RANK_LOST, EXIT_GATE_MISSED, EXIT_NOTHING_MEASURED)

#: The verdict of a row whose move was only timed, on a simulated cluster: there are no bits to be right or wrong.
SIMULATED = "simulated"

_CODES = {
    "ok": EXIT_OK,
    SIMULATED: EXIT_OK,
    "wrong bits": EXIT_WRONG_BITS,
    "wire bytes differ": EXIT_GATE_MISSED,
    "not measured": EXIT_NOTHING_MEASURED,
}


#: The same for training states, where a change that is refused leaves the others to be judged.
_STATE_ORDER = (EXIT_WRONG_BITS, EXIT_RANK_LOST, EXIT_CRASH, EXIT_USAGE, EXIT_GATE_MISSED, EXIT_NOTHING_MEASURED)
_STATE_CODES = {
    "wrong bits": EXIT_WRONG_BITS,
    "refused": EXIT_USAGE,
    "checkpoint differs": EXIT_GATE_MISSED,
    "not checked": EXIT_NOTHING_MEASURED,
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


def state_verdict(
    *,
    digests: tuple[int, int],
    oracle: tuple[int, int],
    fields: Sequence[str],
    continuation_ok: bool,
    checkpoint: str,
) -> str:
    """The verdict of a move of a training state: ``ok``, ``wrong bits``, ``checkpoint differs`` or ``not checked``.

    ``digests`` and ``oracle``: passed and total. A field that differs and training that does not go on as it should are
    wrong bits too. Where only the same change through a checkpoint gave something else, that is the checkpoint's doing.
    Nothing digested is not checked.
    """
    if digests[0] != digests[1] or oracle[0] != oracle[1] or fields or not continuation_ok:
        return "wrong bits"
    if not digests[1]:
        return "not checked"
    return "checkpoint differs" if checkpoint.startswith("differs") else "ok"


def judge_states(
    rows: Sequence[StateRecord | OffloadRecord],
    ended: int = EXIT_OK,
    *,
    seconds: float | None = None,
    bound_s: float | None = None,
) -> Verdict:
    """The verdict of rows of training states, of how their ranks ended, and of the ``seconds`` that all took where
    there is a bound. No rows is nothing measured."""
    if not rows:
        return Verdict(ended if ended != EXIT_OK else EXIT_NOTHING_MEASURED, ("nothing was measured",))
    codes = [EXIT_OK if row.ok else _state_code(row) for row in rows]
    found = [(_state_rank(code), _state_line(row)) for code, row in zip(codes, rows, strict=True) if code != EXIT_OK]
    lines = [text for _, text in sorted(found, key=lambda line: line[0])]
    if seconds is not None and bound_s is not None and seconds > bound_s:
        codes.append(EXIT_GATE_MISSED)
        lines.append(f"bound missed: the suite took {seconds:.0f} s, its bound is {bound_s:.0f} s")
    return Verdict(min([*codes, ended], key=_state_rank), tuple(lines))


def judge_comparison(rows: Sequence[CompareRecord], ended: int = EXIT_OK) -> Verdict:
    """The verdict of rows of ``compare`` and of how its ranks ended. A path that cannot make a change is no fault."""
    if not any(row.verdict != "cannot" for row in rows):
        return Verdict(ended if ended != EXIT_OK else EXIT_NOTHING_MEASURED, ("nothing was measured",))
    wrong = [row for row in rows if row.verdict == "wrong bits"]
    failed = [row for row in rows if row.verdict == "failed"]
    lines = [
        f"WRONG BITS: {_path_text(row)}: {row.digest_passed} of {row.digest_total} digests are right: {row.mismatch}"
        for row in wrong
    ]
    lines += [f"failed: {_path_text(row)}: {row.failed}" for row in failed]
    codes = [ended, *([EXIT_WRONG_BITS] if wrong else []), *([EXIT_CRASH] if failed and ended == EXIT_OK else [])]
    return Verdict(min(codes, key=_state_rank), tuple(lines))


def _path_text(row: CompareRecord) -> str:
    place = "" if row.storage is None else f" ({row.storage}{'' if row.cache is None else f', {row.cache}'})"
    return f"{row.change} by {row.path}{place}"


def _state_code(row: StateRecord | OffloadRecord) -> int:
    """The exit code of a row that is not ok. What DeepSpeed's own offload cannot do is a gate missed, no crash."""
    gate = isinstance(row, OffloadRecord) and row.verdict == "failed" and row.way == "deepspeed"
    return EXIT_GATE_MISSED if gate else _STATE_CODES.get(row.verdict, EXIT_CRASH)


def _state_rank(code: int) -> int:
    return len(_STATE_ORDER) + (code == EXIT_OK) if code not in _STATE_ORDER else _STATE_ORDER.index(code)


def _state_line(row: StateRecord | OffloadRecord) -> str:
    """What is wrong with a row, in one line."""
    if isinstance(row, OffloadRecord):
        told = next((text for text in (row.mismatch, row.trains, row.note) if text and text != "bit-equal"), "")
        what = f"offload and reload of {row.state} (zero{row.stage}, {row.way})"
        return f"{'WRONG BITS after' if row.verdict == 'wrong bits' else row.verdict} {what}: {told}".removesuffix(": ")
    where = f"{row.change} ({row.source} -> {row.destination}, {row.planner})"
    if row.refused is not None:
        return f"{row.verdict}: {where}: {row.refused}"
    if row.verdict == "checkpoint differs":
        return f"{where}: the move is right, the checkpoint {row.checkpoint}"
    if row.verdict != "wrong bits":
        return f"{where}: {row.verdict}"
    found = []
    if row.digest_passed != row.digest_total:
        found.append(f"{row.digest_total - row.digest_passed} of {row.digest_total} digests differ: {row.mismatch}")
    if row.oracle_passed != row.oracle_total:
        wrong = row.oracle_total - row.oracle_passed
        found.append(f"the oracle finds {wrong} of {row.oracle_total} different: {row.oracle_mismatch}")
    if row.fields:
        found.append(f"{counted(len(row.fields), 'field')} differ: {row.fields[0]}")
    if not row.continuation_ok:
        found.append(f"training on: {row.continuation}")
    return f"WRONG BITS in {where}: {'; '.join(found)}"


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

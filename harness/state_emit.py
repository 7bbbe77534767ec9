"""Tables of ``run`` on scenarios of training states: changes by row of the matrix, rounds by planner, offloads.

``change_tables(rows)``, ``rounds_table(rows)`` and ``offload_table(rows)`` read rows of ``state_records``;
``total_line`` says the whole in one. Called by the parent, or by rank 0 in a world that was joined.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from rich.table import Table

from relaymeter.harness.emit import NONE, simple_table, size_text, time_text
from relaymeter.harness.state_config import OFFLOAD_STATES, ROWS
from relaymeter.state_records import OffloadRecord, StateRecord
from relaymeter.units import counted

__all__ = [
    "change_tables",
    "checkpoint_lines",
    "leg_text",
    "offload_lines",
    "offload_table",
    "offload_text",
    "rounds_lines",
    "rounds_table",
    "state_headline",
    "total_line",
]

#: What a table shows where the device has no allocator to ask.
_NOT_APPLICABLE = "not applicable"
_STATES: tuple[str, ...] = OFFLOAD_STATES
_WORST = ("wrong bits", "failed", "refused", "checkpoint differs", "not checked")


def state_headline(rows: Sequence[StateRecord]) -> str:
    """What all rows have in common."""
    worlds = " and ".join(str(size) for size in dict.fromkeys(row.ranks for row in rows))
    planners = " and ".join(dict.fromkeys(row.planner for row in rows))
    return (
        f"{rows[0].scenario}: {worlds} ranks on {counted(rows[0].nodes, 'node')} "
        f"({'shaped' if rows[0].shaped else 'unshaped'}), planned by {planners}; times of the slowest rank"
    )


def leg_text(row: StateRecord) -> str:
    """One line of progress about a move."""
    if row.refused is not None:
        return f"  {row.verdict}: {row.refused}"
    checks = f"{row.digest_passed}/{row.digest_total} digests"
    if row.oracle_total:
        checks += f", {row.oracle_passed}/{row.oracle_total} by the oracle"
    text = f"  {row.source} -> {row.destination}: {time_text(row.total_s)}, {size_text(row.bytes_total)}, {checks}"
    if row.continuation:
        text += f", {row.continuation}"
    return text if row.ok else f"{text}: {row.verdict.upper()}"


def change_tables(rows: Sequence[StateRecord]) -> list[Table]:
    """A table per row of the matrix, a line per change (and planner): its moves together."""
    several = len({row.planner for row in rows}) > 1
    checkpoints = any(row.checkpoint != "not asked" for row in rows)
    tables = []
    for name in _in_order(rows):
        changes = _changes(row for row in rows if row.row == name)
        good = all(row.ok for legs in changes for row in legs)  # else a cell may hold a whole sentence
        short = "whole" if good else "left"
        table = simple_table(
            f"{name}: {counted(len({legs[0].change for legs in changes}), 'change')}",
            [("change", "whole"), ("engines", "whole"), *([("planner", "whole")] if several else []),
             ("plan\nms", "right"), ("move\nms", "right"), ("refresh\nms", "right"), ("all\nms", "right"),
             ("bytes", "right"), ("digests\nequal", "right"), ("oracle\nequal", "right"),
             ("trained on", short), *([("check-\npoint", short)] if checkpoints else []), ("verdict", "left")],
        )  # fmt: skip
        for legs in changes:
            table.add_row(
                legs[0].change, _engines(legs), *([legs[0].planner] if several else []),
                _summed(legs, lambda row: row.plan_s), _summed(legs, lambda row: row.move_s),
                _summed(legs, lambda row: row.refresh_s), _summed(legs, lambda row: row.total_s),
                size_text(sum(row.bytes_total for row in legs) or None),
                _share(legs, lambda row: (row.digest_passed, row.digest_total)),
                _share(legs, lambda row: (row.oracle_passed, row.oracle_total)),
                _trained(legs),
                *([_checkpoint(legs)] if checkpoints else []), _verdict(legs),
            )  # fmt: skip
        tables.append(table)
    return tables


def checkpoint_lines(rows: Sequence[StateRecord]) -> list[str]:
    """Why a change could not be made through a checkpoint, where it was asked for."""
    found = [row for row in rows if ":" in row.checkpoint and row.ok]
    return [f"{row.change} through a checkpoint: {row.checkpoint}" for row in found]


def total_line(rows: Sequence[StateRecord], seconds: float) -> str:
    """How many changes were as they should be, with every check counted."""
    changes = _changes(rows)
    good = sum(all(row.ok for row in legs) for legs in changes)
    parts = [
        f"{sum(row.digest_passed for row in rows)} of {sum(row.digest_total for row in rows)} digests equal",
        f"{sum(row.oracle_passed for row in rows)} of {sum(row.oracle_total for row in rows)} by the oracle",
    ]
    trained = [row for row in rows if row.continuation]
    if trained:
        equal = sum(row.continuation.startswith("bit-equal") for row in trained)
        within = sum(row.continuation_ok for row in trained) - equal
        limited = f", {within} within the limit" if within else ""
        parts.append(f"{equal} of {counted(len(trained), 'continuation')} bit-equal{limited}")
    asked = [row for row in rows if row.checkpoint != "not asked"]
    if asked:
        equal = sum(row.checkpoint.startswith("bit-equal") for row in asked)
        parts.append(f"{equal} of {counted(len(asked), 'checkpoint')} bit-equal")
    return f"total: {good} of {counted(len(changes), 'change')} ok; {', '.join(parts)}; {seconds:.0f} s in all"


def rounds_table(rows: Sequence[StateRecord]) -> Table:
    """A line per planner: planning both directions once, the medians of each direction, and memory."""
    ways = list(dict.fromkeys(row.change for row in rows))
    few = min(rows, key=lambda row: _size(row.destination))
    name = few.change.rpartition(" -> ")[2]
    table = simple_table(
        f"{rows[0].scenario}: {_engines(rows[:1])}, {size_text(rows[0].bytes_total)} of masters and moments",
        [("planner", "whole"), ("plan once", "right"), *((way, "right") for way in ways),
         (f"{name} rank\nbefore", "right"), ("\nafter", "right"), ("peak on a\n" + f"{name} rank", "right"),
         ("peak\npredicted", "right"), ("digests\nequal", "right"), ("bitwise\nequal", "right")],
        caption="plan: both directions; moves: all but the plan, medians of the rounds; memory: training state of both "
        "engines, and at the peak everything beside it",
    )  # fmt: skip
    for planner in dict.fromkeys(row.planner for row in rows):
        found = [row for row in rows if row.planner == planner]
        plans = {row.change: row.plan_s for row in found if row.plan_s is not None}
        table.add_row(
            planner, time_text(sum(plans.values())) if plans else NONE,
            *(_median([row.total_s for row in found if row.change == way]) for way in ways),
            size_text(found[0].held_bytes), size_text(found[0].held_after_bytes),
            size_text(_peak(found, lambda row: row.peak_bytes)),
            size_text(_peak(found, lambda row: row.peak_predicted_bytes)),
            _share(found, lambda row: (row.digest_passed, row.digest_total)),
            f"{sum(row.ok for row in found)}/{len(found)}",
        )  # fmt: skip
    return table


def rounds_lines(rows: Sequence[StateRecord]) -> list[str]:
    """How long the engines took to build, and how many of the moves were equal bit by bit."""
    builds = {row.change.rpartition(" -> ")[2]: row.build_s for row in rows}
    good = sum(row.ok for row in rows)
    return [
        "engines built in: " + ", ".join(f"{name} {time_text(seconds)}" for name, seconds in builds.items()),
        f"{good} of {counted(len(rows), 'move')} bitwise equal",
    ]


def offload_table(rows: Sequence[OffloadRecord]) -> Table:
    """A line per stage, kind of state and kind of copy; what does not apply to the device is left to the notes."""
    rows = [row for row in rows if row.verdict != "not applicable"]
    rows.sort(key=lambda row: (row.stage, row.way, _STATES.index(row.state) if row.state in _STATES else -1))
    if not rows:
        return simple_table("offload: nothing applies to this device", [])
    memory = any(row.allocated_before_bytes is not None for row in rows)
    columns = ("allocated\nbefore", "\nafter", "\nreloaded") if memory else ("allocated",)
    table = simple_table(
        f"{rows[0].scenario}: {counted(rows[0].ranks, 'rank')}, largest and slowest rank",
        [("stage", "whole"), ("state", "whole"), ("way", "whole"), ("pinned", "whole"), ("blocking", "whole"),
         ("bytes", "right"), ("offload", "right"), ("reload", "right"), ("offload\nGB/s", "right"),
         ("reload\nGB/s", "right"), *((name, "right") for name in columns), ("equal", "left")],
    )  # fmt: skip
    for row in rows:
        held = (row.allocated_before_bytes, row.allocated_after_bytes, row.allocated_reloaded_bytes)
        table.add_row(
            f"zero{row.stage}", _state(row), row.way, _yes(row.pinned), _yes(row.blocking), size_text(row.bytes),
            time_text(row.offload_s), time_text(row.reload_s), _rate(row.bytes, row.offload_s),
            _rate(row.bytes, row.reload_s), *(map(size_text, held) if memory else (_NOT_APPLICABLE,)),
            _yes(row.equal) if row.equal is not None else row.verdict,
        )  # fmt: skip
    return table


def offload_lines(rows: Sequence[OffloadRecord]) -> list[str]:
    """How many were as before and trained on as an engine that was never offloaded, and every note once."""
    done = [row for row in rows if row.equal is not None]
    equal = sum(bool(row.equal) for row in done)
    trained = sum(row.trains == "bit-equal" for row in done)
    notes: dict[str, list[OffloadRecord]] = {}
    for row in rows:
        if row.note is not None:
            notes.setdefault(row.note, []).append(row)
    return [
        f"{equal} of {counted(len(done), 'offload')} equal after the reload, {trained} bit-equal after the next step",
        *(f"{_where(found)}: {note}" for note, found in notes.items()),
    ]


def offload_text(row: OffloadRecord) -> str:
    """One line of progress about an offload."""
    what = f"  zero{row.stage} {_state(row)} by {row.way}"
    if row.equal is None:
        return f"{what}: {row.note or row.verdict}"
    kind = "" if row.pinned is None else f" ({_copy(row)})"
    times = f"{time_text(row.offload_s)} out, {time_text(row.reload_s)} back"
    return f"{what}{kind}: {size_text(row.bytes)}, {times}" + ("" if row.ok else f": {row.verdict.upper()}")


def _state(row: OffloadRecord) -> str:
    """The kind of state, and the moment where it is not the usual one."""
    return (
        row.state
        if row.moment == "after a step"
        else f"{row.state} {row.moment.replace('a backward pass', 'backward')}"
    )


def _copy(row: OffloadRecord) -> str:
    return f"{'pinned' if row.pinned else 'not pinned'}, {'blocking' if row.blocking else 'not blocking'}"


def _where(rows: Sequence[OffloadRecord]) -> str:
    """The stages and kinds of state that a note is about."""
    stages = "/".join(str(stage) for stage in dict.fromkeys(row.stage for row in rows))
    states = ", ".join(dict.fromkeys(_state(row) for row in rows))
    return f"zero{stages} {states}"


def _in_order(rows: Sequence[StateRecord]) -> list[str | None]:
    known: list[str | None] = [*ROWS]
    return sorted(dict.fromkeys(row.row for row in rows), key=lambda name: known.index(name) if name in known else -1)


def _changes(rows: Iterable[StateRecord]) -> list[list[StateRecord]]:
    """The rows of each change by each planner."""
    found: dict[tuple[str, str], list[StateRecord]] = {}
    for row in rows:
        found.setdefault((row.change, row.planner), []).append(row)
    return list(found.values())


def _engines(legs: Sequence[StateRecord]) -> str:
    moved = [row for row in legs if row.refused is None] or legs
    path = [moved[0].source, *(row.destination for row in moved)]
    return f"{path[0]} <-> {path[1]}" if len(path) == 3 and path[0] == path[2] else " -> ".join(path)


def _summed(legs: Sequence[StateRecord], of: Callable[[StateRecord], float | None]) -> str:
    """Milliseconds of all moves of a change."""
    found = [seconds for row in legs if (seconds := of(row)) is not None]
    return f"{sum(found) * 1e3:.{2 if sum(found) < 1e-3 else 1 if sum(found) < 0.1 else 0}f}" if found else NONE


def _trained(legs: Sequence[StateRecord]) -> str:
    """How training went on, in short; with everything where it should not have gone so."""
    found = [
        row.continuation.partition(", ")[0].partition(" of ")[0] if row.continuation_ok else row.continuation
        for row in legs
        if row.continuation
    ]
    return "; ".join(dict.fromkeys(found)) or NONE


def _median(values: Sequence[float | None]) -> str:
    found = [value for value in values if value is not None]
    return time_text(statistics.median(found)) if found else NONE


def _peak(rows: Sequence[StateRecord], of: Callable[[StateRecord], int | None]) -> int | None:
    """The largest of what a rank held before a move and took while moving."""
    found = [row.held_bytes + more for row in rows if row.held_bytes is not None and (more := of(row)) is not None]
    return max(found, default=None)


def _share(legs: Sequence[StateRecord], of: Callable[[StateRecord], tuple[int, int]]) -> str:
    passed, total = (sum(column) for column in zip(*map(of, legs), strict=True))
    return f"{passed}/{total}" if total else NONE


def _checkpoint(legs: Sequence[StateRecord]) -> str:
    found = [row.checkpoint.partition(":")[0] for row in legs if row.checkpoint != "not asked"]
    return "; ".join(dict.fromkeys(found)) or NONE


def _verdict(legs: Sequence[StateRecord]) -> str:
    found = {row.verdict for row in legs}
    return next((verdict for verdict in _WORST if verdict in found), "ok")


def _size(label: str) -> int:
    """Ranks of an engine by its label."""
    return int(label.split()[1].removeprefix("x"))


def _yes(value: bool | None) -> str:
    return NONE if value is None else "yes" if value else "no"


def _rate(count: int | None, seconds: float | None) -> str:
    return NONE if not count or not seconds else f"{count / seconds / 1e9:.3g}"

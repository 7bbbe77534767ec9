"""Tables of ``report`` over moves of weights: every configuration of a scenario, then each move with its routes.

``move_section(scenario, rows)`` makes them of ``records.MoveRecord``. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from relaymeter.harness.emit import NONE, size_text, time_text
from relaymeter.harness.emit_run import fastest_lines, planner_lines
from relaymeter.harness.report_figures import (
    WRONG_BITS,
    Figure,
    by_launch,
    fault_lines,
    figure,
    figure_text,
    interval_notes,
    is_wrong,
    launch_of,
    ratio_text,
    usable,
)
from relaymeter.harness.report_sources import Origin, origin_of
from relaymeter.harness.report_tables import Cell, ReportTable, Section, cells, grouped, titled
from relaymeter.records import MoveRecord
from relaymeter.units import counted, format_bytes

__all__ = ["Taken", "medians", "move_section", "worlds_of"]

#: Moves beyond which the table of all configurations stands for those of each move, which a reader then unfolds.
_MANY = 3
#: Medians of two planners that agree within this share count as equal.
_ALIKE = 0.01


@dataclass(frozen=True)
class Taken:
    """The launches of one configuration: a move by a route, planned and executed one way."""

    rows: tuple[MoveRecord, ...]

    @property
    def first(self) -> MoveRecord:
        """A row, for what all have in common."""
        return self.rows[0]

    def median(self, of: Callable[[MoveRecord], float | None]) -> Figure | None:
        """The median over launches of what each row has."""
        return figure(by_launch((row, of(row)) for row in self.rows if usable(row)))

    @property
    def measured(self) -> Figure | None:
        """The measured time: of a single launch as its row has it, over its repeats."""
        good = [row for row in self.rows if usable(row) and row.measured_s is not None]
        found = self.median(lambda row: row.measured_s)
        if found is None or len(good) > 1:
            return found
        (row,) = good
        low, high = (found.middle if edge is None else edge for edge in (row.measured_low_s, row.measured_high_s))
        return replace(found, low=low, high=high, samples=max(1, len(row.samples_s)))


def worlds_of(rows: Sequence[MoveRecord]) -> dict[tuple[Origin, str], list[MoveRecord]]:
    """The rows of each table of configurations: measured in one place, on one world, moving the same bytes."""
    sizes = grouped(rows, lambda row: (origin_of(row), row.ranks, row.nodes))
    found: dict[tuple[Origin, str], list[MoveRecord]] = {}
    for (origin, ranks, nodes), mine in sizes.items():
        alike = grouped(mine, lambda row: (row.bucket_bytes, row.max_extra_bytes))
        moved = {name: len({row.bytes_total for row in own}) for name, own in grouped(mine, _move).items()}
        world = f"{counted(ranks, 'rank')} on {counted(nodes, 'node')}"
        if max(moved.values()) == 1 and not _clash(mine):
            found[origin, world] = mine
            continue
        for (bucket, extra), own in alike.items():
            kept = "" if extra is None else f", source given up for {format_bytes(extra)}"
            name = f"{world}, buckets of {format_bytes(bucket)}{kept}"
            if all(len({row.bytes_total for row in same}) == 1 for same in grouped(own, _move).values()):
                found[origin, name] = own
                continue
            for total, same in grouped(own, lambda row: row.bytes_total).items():
                found[origin, f"{name}, {format_bytes(total)}"] = same
    return found


def _move(row: MoveRecord) -> str:
    return row.move


def _clash(rows: Sequence[MoveRecord]) -> bool:
    """Whether rows of one configuration differ in what they were asked for, so that they are no launches of it."""
    found = grouped(rows, _configuration)
    return any(len({(row.bucket_bytes, row.max_extra_bytes) for row in own}) > 1 for own in found.values())


def _configuration(row: MoveRecord) -> tuple[str, str, str, str]:
    return (row.move, row.planner, row.executor, row.route)


def medians(rows: Sequence[MoveRecord]) -> list[MoveRecord]:
    """A row for each configuration, of several launches with the median of them and its interval."""
    found = []
    for own in grouped([row for row in rows if usable(row)], _configuration).values():
        taken = Taken(tuple(own)).measured
        if taken is None or len(own) == 1:
            found.append(own[0])
        else:
            low, high = taken.low, taken.high
            found.append(replace(own[0], measured_s=taken.middle, measured_low_s=low, measured_high_s=high))
    return found


def move_section(scenario: str, rows: Sequence[MoveRecord], missing: Sequence[str] = ()) -> Section:
    """All tables of the moves of one scenario."""
    worlds = worlds_of(rows)
    several = len({origin for origin, _ in worlds}) > 1
    tables: list[ReportTable] = []
    lines: list[str] = []
    for (origin, world), mine in worlds.items():
        moves = grouped(mine, _move)
        where = "" if not several else f"commit {origin.commit} on {origin.machine_id}: "
        if len(moves) > 1:
            tables.append(_configurations(titled(f"every move of {scenario}", origin, several), origin, world, mine))
        lines += [where + line for line in _lines(mine)]
        for name, own in moves.items():
            table = _routes(titled(f"{scenario}, {name}", origin, several), origin, world, own)
            tables.append(replace(table, folded=len(moves) > _MANY))
    return Section(f"{scenario}: moves of weights", tuple(lines), tuple(tables), tuple(missing))


def _lines(rows: Sequence[MoveRecord]) -> list[str]:
    """What the moves of one world show together."""
    one = medians(rows)
    configurations = {(row.move, row.route) for row in rows}
    lines = []
    if any(row.simulated for row in rows):
        lines.append("simulated: nothing moved, no bit was checked")
    else:
        passed, total = sum(row.digest_passed for row in rows), sum(row.digest_total for row in rows)
        lines.append(f"{passed} of {total} digests equal over {counted(len(configurations), 'configuration')}")
    lines += planner_lines(one)
    pairs = grouped([row for row in one if row.measured_s], lambda row: (row.move, row.route, row.executor))
    both = [[row.measured_s or 0.0 for row in own] for own in pairs.values() if len(own) == 2]
    if both:
        alike = sum(max(pair) <= (1 + _ALIKE) * min(pair) for pair in both)
        lines.append(f"the medians of both planners agree within {_ALIKE:.0%} in {alike} of {len(both)} configurations")
    return lines + fastest_lines(one)


def _caption(origin: Origin, world: str, rows: Sequence[MoveRecord]) -> str:
    launches = [len({launch_of(row) for row in own}) for own in grouped(rows, _configuration).values()]
    repeats = max(len(row.samples_s) for row in rows)
    return (
        f"{origin.text}; {world}; measured: pack, communicate and unpack of the slowest rank, "
        f"{interval_notes(launches, repeats)}"
    )


def _configurations(title: str, origin: Origin, world: str, rows: Sequence[MoveRecord]) -> ReportTable:
    """A line a move and route, a column of times a planner and executor: one table for all configurations."""
    ways = list(dict.fromkeys((row.planner, row.executor) for row in rows))
    sources = list(dict.fromkeys(name for row in rows for name in row.source_bytes))
    lines = []
    for (move, route), own in grouped(rows, lambda row: (row.move, row.route)).items():
        times = []
        for way in ways:
            mine = [row for row in own if (row.planner, row.executor) == way]
            times.append(_time_cell(Taken(tuple(mine)), interval=False) if mine else Cell("not run"))
        lines.append(cells(
            move, route, *times, _per_planner(own, lambda row: row.bytes_in_node),
            _per_planner(own, lambda row: row.bytes_cross_node),
            _wire(own), *(size_text(own[0].source_bytes.get(name)) for name in sources), _digests(own),
        ))  # fmt: skip
    columns = [("move", "left"), ("route", "left"), *((", ".join(way), "right") for way in ways),
               ("in node", "right"), ("across nodes", "right"), ("kernel counted", "right"),
               *((f"from {name}", "right") for name in sources), ("digests equal", "right")]  # fmt: skip
    return ReportTable(
        title,
        tuple(columns),
        tuple(lines),
        (_caption(origin, world, rows), "medians only: intervals stand in the table of each move"),
    ).without_empty()


def _per_planner(rows: Sequence[MoveRecord], of: Callable[[MoveRecord], int]) -> str:
    """Planned bytes; each planner's where they differ."""
    found = grouped(rows, lambda row: size_text(of(row)))
    if len(found) == 1:
        return str(next(iter(found)))
    planners = {text: " and ".join(dict.fromkeys(row.planner for row in own)) for text, own in found.items()}
    return ", ".join(f"{text} ({names})" for text, names in planners.items())


def _wire(rows: Sequence[MoveRecord]) -> str:
    found = [row.wire_cross_node_bytes for row in rows if row.wire_cross_node_bytes is not None]
    low, high = size_text(min(found, default=None)), size_text(max(found, default=None))
    return low if low == high else f"{low} to {high}"


def _digests(rows: Sequence[MoveRecord]) -> str:
    passed, total = sum(row.digest_passed for row in rows), sum(row.digest_total for row in rows)
    wrong = f" {WRONG_BITS}" if any(is_wrong(row) for row in rows) else ""
    return f"{passed}/{total}{wrong}" if total else "simulated" if rows[0].simulated else NONE


def _time_cell(taken: Taken, *, interval: bool) -> Cell:
    """The measured time, or why there is none; notes say what was wrong with some launches."""
    notes = fault_lines(taken.rows)
    found = taken.measured
    if found is None:
        wrong = any(is_wrong(row) for row in taken.rows)
        return Cell(WRONG_BITS if wrong else taken.first.verdict, notes)
    return Cell(figure_text(found) if interval else time_text(found.middle), notes)


def _routes(title: str, origin: Origin, world: str, rows: Sequence[MoveRecord]) -> ReportTable:
    """A move: a line a route, planner and executor, with the price and the bound beside what was measured."""
    found = [Taken(tuple(own)) for own in grouped(rows, _configuration).values()]
    lines = []
    for taken in found:
        row, measured = taken.first, taken.measured
        direct = next((one for one in found if _like_direct(one.first, row)), None)
        base = direct.measured if direct is not None else None
        bound = taken.median(lambda row: row.bound_s)
        predicted = taken.median(lambda row: row.predicted_s)
        lines.append(cells(
            row.planner, row.executor, _route(row), _time_cell(taken, interval=True),
            ratio_text(_middle(measured), _middle(base)),
            _over(measured, bound, ".3f"),
            _predicted(taken, predicted), _error(measured, predicted), time_text(_middle(bound)),
            size_text(row.bytes_in_node), size_text(row.bytes_cross_node), _wire(taken.rows), _digests(taken.rows),
            size_text(max((one.peak_bytes for one in taken.rows if one.peak_bytes is not None), default=None)),
        ))  # fmt: skip
    first = rows[0]
    binds = f"; bound by {first.bound_by}" if first.bound_by else ""
    what = f"{format_bytes(first.bytes_total)} into place, buckets of {format_bytes(first.bucket_bytes)}{binds}"
    columns = (
        ("planner", "left"), ("executor", "left"), ("route", "left"), ("measured", "right"), ("of direct", "right"),
        ("/ bound", "right"), ("predicted", "right"), ("error", "right"), ("bound", "right"), ("in node", "right"),
        ("across nodes", "right"), ("kernel counted", "right"), ("digests equal", "right"), ("peak", "right"),
    )  # fmt: skip
    return ReportTable(title, columns, tuple(lines), (_caption(origin, world, rows), what)).without_empty()


def _middle(found: Figure | None) -> float | None:
    return None if found is None else found.middle


def _like_direct(row: MoveRecord, other: MoveRecord) -> bool:
    return row.route == "direct" and (row.planner, row.executor) == (other.planner, other.executor)


def _route(row: MoveRecord) -> str:
    """The route; of the chosen mix also what carries most."""
    if row.route != "chosen" or not any(row.route_bytes.values()):
        return row.route
    total = sum(row.route_bytes.values())
    parts = [name for name, count in row.route_bytes.items() if count >= total / 100]
    return f"chosen ({', '.join(parts)})"


def _predicted(taken: Taken, found: Figure | None) -> str:
    """The price with its own interval; of several launches the median of the prices."""
    row = taken.first
    if found is None or found.launches > 1 or row.predicted_low_s is None or row.predicted_high_s is None:
        return NONE if found is None else time_text(found.middle)
    return figure_text(Figure(found.middle, row.predicted_low_s, row.predicted_high_s, samples=2, launches=1))


def _error(measured: Figure | None, predicted: Figure | None) -> str:
    return _over(predicted, measured, "+.1%", less=1)


def _over(found: Figure | None, base: Figure | None, form: str, less: float = 0.0) -> str:
    return NONE if found is None or base is None or not base.middle else f"{found.middle / base.middle - less:{form}}"

"""Tables of ``report`` over rows of ``compare``: pause and total of every path beside the path in memory, and phases.

``compare_section(scenario, rows)`` makes them of ``compare_records.CompareRecord``. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from relaymeter.compare_records import PATHS, PHASES, CompareRecord
from relaymeter.harness.compare_prices import error_text
from relaymeter.harness.emit import NONE, time_text
from relaymeter.harness.report_figures import (
    WRONG_BITS,
    Figure,
    by_launch,
    fault_of,
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
from relaymeter.units import counted, format_bytes

__all__ = ["BASELINE", "PathRows", "compare_section", "paths_of", "tables_of", "without_relaunch"]

#: What every other path is held against.
BASELINE = "in-memory"
_COLUMNS = (
    ("path", "left"), ("checkpoint on", "left"), ("launches", "right"), ("pause", "right"), ("priced", "right"),
    ("pause without relaunch", "right"), ("total", "right"), ("total without relaunch", "right"),
    ("state only", "right"), ("digests equal", "right"),
)  # fmt: skip
_LEGEND = (
    "pause: training stands still, without plan and build where they happen while it runs. total: all phases but the "
    "digest. without relaunch: less the start of new processes and their imports. state only: without relaunch, "
    f"imports and build. Behind a time its ratio to {BASELINE}."
)

_PRICED = " priced: the pause by a profile's costs of paths, and how far off that was."


@dataclass(frozen=True)
class PathRows:
    """The launches of one path over one storage."""

    label: str
    on: str
    rows: tuple[CompareRecord, ...]

    @property
    def used(self) -> tuple[CompareRecord, ...]:
        """The rows whose times count."""
        return tuple(row for row in self.rows if usable(row))

    def figure(self, of: Callable[[CompareRecord], float | None]) -> Figure | None:
        """The median of the launches."""
        return figure(by_launch((row, of(row)) for row in self.used))


def without_relaunch(row: CompareRecord, seconds: float | None) -> float | None:
    """``seconds`` without the start of new processes and their imports."""
    return None if seconds is None else seconds - (row.relaunch_s or 0.0) - (row.import_s or 0.0)


def _pause(row: CompareRecord) -> float | None:
    return row.pause_s


def _priced(path: PathRows) -> str:
    """What a profile said of the pause, and its error."""
    priced = [row for row in path.used if row.predicted_pause_s is not None]
    found = figure(by_launch((row, row.predicted_pause_s) for row in priced))
    measured = figure(by_launch((row, row.pause_s) for row in priced))
    if found is None or measured is None:
        return NONE
    return f"{time_text(found.middle)}, {error_text(found.middle, measured.middle)}"


def _total(row: CompareRecord) -> float | None:
    return row.total_s


def _state_only(row: CompareRecord) -> float | None:
    return row.transfer_s


def _pause_alone(row: CompareRecord) -> float | None:
    return without_relaunch(row, row.pause_s)


def _total_alone(row: CompareRecord) -> float | None:
    return without_relaunch(row, row.total_s)


_TIMES = (_pause, _pause_alone, _total, _total_alone, _state_only)


def tables_of(rows: Sequence[CompareRecord]) -> dict[tuple[Origin, str], list[CompareRecord]]:
    """The rows of each table: of one change of one state between the same engines, measured in one place."""

    def table(row: CompareRecord) -> tuple[object, ...]:
        ends = (row.source, row.destination, row.ranks, row.nodes)
        return (origin_of(row), row.change, *ends, row.model, row.dtype, row.optimizer, row.state_bytes)

    found = grouped(rows, table)
    named: dict[tuple[Origin, str], list[CompareRecord]] = {}
    for mine in found.values():
        origin, name = origin_of(mine[0]), f"{mine[0].change}: {mine[0].source} -> {mine[0].destination}"
        if (origin, name) in named:
            name += f", {format_bytes(mine[0].state_bytes)} of {mine[0].model} on {counted(mine[0].ranks, 'rank')}"
        while (origin, name) in named:
            name += ", another state"
        named[origin, name] = mine
    return named


def paths_of(rows: Sequence[CompareRecord]) -> list[PathRows]:
    """The paths of one table in the order of ``PATHS``, storages as they occur."""
    found = grouped(rows, lambda row: (row.path, _on(row)))
    order = sorted(found, key=lambda key: PATHS.index(key[0]) if key[0] in PATHS else len(PATHS))
    return [PathRows(label, on, tuple(found[label, on])) for label, on in order]


def _on(row: CompareRecord) -> str:
    if row.storage is None:
        return NONE
    kind = f" ({row.filesystem})" if row.filesystem and row.filesystem != row.storage else ""
    return f"{row.storage}{kind}" + (f", {row.cache} cache" if row.cache else "")


def compare_section(scenario: str, rows: Sequence[CompareRecord], missing: Sequence[str] = ()) -> Section:
    """All tables of the rows of one scenario."""
    found = tables_of(rows)
    several = len({origin for origin, _ in found}) > 1
    tables: list[ReportTable] = []
    lines: list[str] = []
    for origin, mine in grouped(found.items(), lambda entry: entry[0][0]).items():
        if len(mine) > 1:
            tables.append(_overview(scenario, origin, [(name, paths_of(own)) for (_, name), own in mine], several))
        for (_, name), own in mine:
            title = titled(name, origin, several)
            tables += [_times(title, origin, own), replace(_phases(title, origin, own), folded=len(mine) > 1)]
            lines += _summary(title, paths_of(own))
    if tables:
        legend = _LEGEND + (_PRICED if any(row.predicted_pause_s is not None for row in rows) else "")
        tables[0] = replace(tables[0], captions=(*tables[0].captions, legend))
    return Section(f"{scenario}: paths of a change", tuple(lines), tuple(tables), tuple(missing))


def _summary(title: str, paths: Sequence[PathRows]) -> list[str]:
    """In one line what the path in memory takes, and each other one beside it, over its fastest storage."""
    base = next((path for path in paths if path.label == BASELINE), None)
    pause = base.figure(_pause) if base is not None else None
    if pause is None:
        return [f"{title}: no ratio: no good row of {BASELINE}"]
    parts = [f"training stands still for {time_text(pause.middle)} in memory"]
    for label, own in grouped(paths, lambda path: path.label).items():
        timed = [(found.middle, path) for path in own if (found := path.figure(_pause)) is not None]
        if label == BASELINE or not timed:
            continue
        seconds, path = min(timed, key=lambda pair: pair[0])
        alone = path.figure(_pause_alone)
        where = f" on {path.used[0].storage}" if len(own) > 1 else ""
        ratio = ratio_text(seconds, pause.middle)
        if alone is not None and alone.middle != seconds:
            ratio += f", {ratio_text(alone.middle, pause.middle)} without relaunch"
        parts.append(f"{time_text(seconds)} by {label}{where} ({ratio})")
    return [f"{title}: {', '.join(parts)}"]


def _overview(scenario: str, origin: Origin, found: Sequence[tuple[str, list[PathRows]]], several: bool) -> ReportTable:
    """Pauses of all changes in one table: a line a change, a column a path."""
    keys = list(dict.fromkeys((path.label, path.on) for _, paths in found for path in paths))
    keys.sort(key=lambda key: PATHS.index(key[0]) if key[0] in PATHS else len(PATHS))
    lines = []
    for name, paths in found:
        have = {(path.label, path.on): path for path in paths}
        base = next((path.figure(_pause) for path in paths if path.label == BASELINE), None)
        lines.append(cells(name, *(_overview_cell(have.get(key), base) for key in keys)))
    columns = tuple((label + (f", {on}" if on != NONE else ""), "right") for label, on in keys)
    launches = interval_notes(_launches(path) for _, paths in found for path in paths)
    return ReportTable(
        titled(f"pause of every change of {scenario}", origin, several),
        (("change", "left"), *columns),
        tuple(lines),
        (f"{origin.text}; {launches}; relaunch included",),
    )


def _overview_cell(path: PathRows | None, base: Figure | None) -> Cell:
    if path is None:
        return Cell("not run")
    found = path.figure(_pause)
    if found is None:
        return _standing(path)
    return Cell(figure_text(found, None if path.label == BASELINE else base), _faults(path))


def _launches(path: PathRows) -> int:
    return len({launch_of(row) for row in path.used})


def _caption(origin: Origin, rows: Sequence[CompareRecord], paths: Sequence[PathRows]) -> str:
    row = rows[0]
    notes = interval_notes(_launches(path) for path in paths)
    return (
        f"{origin.text}; {counted(row.ranks, 'rank')} on {counted(row.nodes, 'node')}; {format_bytes(row.state_bytes)} "
        f"of state, model {row.model} in {row.dtype}, {row.optimizer}; times of the slowest rank"
        + (f", {notes}" if notes else "")
    )


def _times(title: str, origin: Origin, rows: Sequence[CompareRecord]) -> ReportTable:
    """Pause and total, relaunch included and not, with ratios."""
    paths = paths_of(rows)
    base = next((path for path in paths if path.label == BASELINE and path.used), None)
    lines = []
    for path in paths:
        against = None if base is None or path is base else base
        times = [figure_text(path.figure(of), None if against is None else against.figure(of)) for of in _TIMES]
        first = Cell(times[0]) if path.used else _standing(path)
        lines.append(cells(
            Cell(path.label, tuple(dict.fromkeys(row.note for row in path.rows if row.note))), path.on,
            Cell(_count(path), _faults(path) if path.used else ()), first, _priced(path), *times[1:], _digests(path),
        ))  # fmt: skip
    table = ReportTable(title, _COLUMNS, tuple(lines), (_caption(origin, rows, paths),))
    return table.without_empty()


def _phases(title: str, origin: Origin, rows: Sequence[CompareRecord]) -> ReportTable:
    """Phases as columns; those that no path has are left out."""
    paths = [path for path in paths_of(rows) if path.used]
    lines = [cells(path.label, path.on, *(figure_text(path.figure(_phase(name))) for name in PHASES)) for path in paths]
    columns = (("path", "left"), ("checkpoint on", "left"), *((name, "right") for name in PHASES))
    about = "phases in the order in which they happen; the digest is the proof and in no total"
    return ReportTable(
        f"{title}: phases", columns, tuple(lines), (_caption(origin, rows, paths), about)
    ).without_empty()


def _phase(name: str) -> Callable[[CompareRecord], float | None]:
    return lambda row: row.phases.get(name)


def _count(path: PathRows) -> str:
    """Launches that count, and of how many where others did not come to an end."""
    good, every = _launches(path), len({launch_of(row) for row in path.rows})
    return str(every) if good == every or not good else f"{good} of {every}"


def _faults(path: PathRows) -> tuple[str, ...]:
    """Why launches of a path do not count."""
    told = (fault_of(row) or row.cannot or row.verdict for row in path.rows if not usable(row))
    return tuple(f"{text} ({count} launches)" if count > 1 else text for text, count in Counter(told).items())


def _standing(path: PathRows) -> Cell:
    """The cell of a path without times."""
    wrong, failed = any(is_wrong(row) for row in path.rows), any(row.verdict == "failed" for row in path.rows)
    return Cell(WRONG_BITS if wrong else "failed" if failed else path.rows[0].verdict, _faults(path))


def _digests(path: PathRows) -> str:
    passed, total = sum(row.digest_passed for row in path.rows), sum(row.digest_total for row in path.rows)
    wrong = f" {WRONG_BITS}" if any(is_wrong(row) for row in path.rows) else ""
    return f"{passed}/{total}{wrong}" if total else NONE

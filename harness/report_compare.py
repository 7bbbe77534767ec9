"""Tables of ``report`` over rows of ``compare``: pause and total of every path beside the path in memory, and phases.

``compare_section(scenario, rows)`` makes them of ``compare_records.CompareRecord``. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from relaymeter.compare_records import PATHS, PHASES, CompareRecord, pausing
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
    over,
    usable,
)
from relaymeter.harness.report_legend import compare_legend
from relaymeter.harness.report_sources import Origin, origin_of
from relaymeter.harness.report_tables import Cell, ReportTable, Section, cells, grouped, titled
from relaymeter.units import counted, format_bytes

__all__ = ["BASELINE", "PathRows", "compare_section", "paths_of", "tables_of", "without_relaunch"]

#: What every other path is held against.
BASELINE = "in-memory"
_COLUMNS = (
    ("path", "left"), ("pause", "right"), ("priced", "right"), ("pause without relaunch and imports", "right"),
    ("state only", "right"), ("total", "right"), ("total without relaunch and imports", "right"),
    ("digests equal", "right"),
)  # fmt: skip
#: Columns of the widest table: a pull request shows no more without scrolling.
_WIDEST = 7
_CAPTION = "pause: how long training stands still; this and all other words are in the legend"
#: What is left out of the pause where processes stay.
_OVERLAPPED = (
    "where processes stay, pause leaves out plan and build, assuming that both can overlap training: that overlap was "
    "not measured, and both engines are alive then, so the state is held twice"
)


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

    @property
    def part(self) -> bool:
        """Whether the path moves less than the change asks for, and stands in no ratio to others."""
        return any(row.moves_part for row in self.rows)

    @property
    def name(self) -> str:
        """Path and storage, such as ``dcp, disk (ext4), cold cache``."""
        return _name(self.label, self.on)

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


def _restarts(path: PathRows) -> bool:
    """Whether processes are started anew."""
    return any(row.relaunch_s is not None for row in path.used)


def tables_of(rows: Sequence[CompareRecord]) -> dict[tuple[Origin, str], list[CompareRecord]]:
    """The rows of each table: of one change of one state between the same engines, measured in one place."""

    def table(row: CompareRecord) -> tuple[object, ...]:
        ends = (row.source, row.destination, row.ranks, row.nodes)
        state = (row.model, row.dtype, row.optimizer, row.state_bytes)
        return (origin_of(row), row.change, *ends, *state, row.cluster or "", row.setting or "")

    found = grouped(rows, table)
    named: dict[tuple[Origin, str], list[CompareRecord]] = {}
    for mine in found.values():
        origin, name = origin_of(mine[0]), f"{mine[0].change}: {mine[0].source} -> {mine[0].destination}"
        if (origin, name) in named:
            name += f", {format_bytes(mine[0].state_bytes)} of {mine[0].model} on {counted(mine[0].ranks, 'rank')}"
        if (origin, name) in named and mine[0].cluster:
            name += f", {mine[0].cluster}"
        while (origin, name) in named:
            name += ", another state or setting"
        named[origin, name] = mine
    return named


def paths_of(rows: Sequence[CompareRecord]) -> list[PathRows]:
    """The paths of one table in the order of ``PATHS``, storages as they occur."""
    found = grouped(rows, lambda row: (row.path, _on(row)))
    order = sorted(found, key=lambda key: PATHS.index(key[0]) if key[0] in PATHS else len(PATHS))
    return [PathRows(label, on, tuple(found[label, on])) for label, on in order]


def _name(label: str, on: str) -> str:
    return label + (f", {on}" if on != NONE else "")


def _on(row: CompareRecord) -> str:
    if row.storage is None:
        return NONE
    kind = f" ({row.filesystem})" if row.filesystem and row.filesystem != row.storage else ""
    return f"{row.storage}{kind}" + (f", {row.cache} cache" if row.cache else "")


def compare_section(
    scenario: str, rows: Sequence[CompareRecord], missing: Sequence[str] = (), model: str = ""
) -> Section:
    """All tables of the rows of one scenario, and what their words mean. ``model``: what is known of its size."""
    found = tables_of(rows)
    several = len({origin for origin, _ in found}) > 1
    tables: list[ReportTable] = []
    lines: list[str] = []
    for origin, mine in grouped(found.items(), lambda entry: entry[0][0]).items():
        if len(mine) > 1:
            tables += _overviews(scenario, origin, [(name, paths_of(own)) for (_, name), own in mine], several)
        for (_, name), own in mine:
            title = titled(name, origin, several)
            caption = _caption(origin, own, model)
            tables.append(_times(title, caption, own))
            tables += [replace(table, folded=len(mine) > 1) for table in _phases(title, origin, own)]
            lines += _summary(title, paths_of(own))
    if tables:
        tables.append(compare_legend(rows))
    return Section(f"{scenario}: paths of a change", tuple(lines), tuple(tables), tuple(missing))


def _summary(title: str, paths: Sequence[PathRows]) -> list[str]:
    """In one line what the path in memory takes, and each other one beside it, over the storage of its least pause."""
    base = next((path for path in paths if path.label == BASELINE), None)
    pause = base.figure(_pause) if base is not None else None
    if base is None or pause is None:
        return [f"{title}: no ratio: no good row of {BASELINE}"]
    parts = [f"training stands still for {time_text(pause.middle)} in memory"]
    launches = {_launches(base)}
    for label, own in grouped(paths, lambda path: path.label).items():
        timed = [(found, path) for path in own if (found := path.figure(_pause)) is not None]
        if label == BASELINE or not timed:
            continue
        launches |= {_launches(path) for _, path in timed}
        parts.append(_beside(label, sorted(timed, key=lambda pair: pair[0].middle), base))
    counts = " to ".join(str(count) for count in sorted({min(launches), max(launches)}))
    return [f"{title}, {counts} {'launch' if counts == '1' else 'launches'}: {'; '.join(parts)}"]


def _beside(label: str, timed: Sequence[tuple[Figure, PathRows]], base: PathRows) -> str:
    """``"12.3 s by dcp on tmpfs (73x; 7.6x without relaunch and imports; 4.9x state only)"``, all over one storage."""
    found, path = timed[0]
    if path.part:
        return f"{time_text(found.middle)} by {label} (weights alone: no ratio)"
    pause = base.figure(_pause)
    told = [over(found, pause)]
    if _restarts(path):
        told.append(f"{over(path.figure(_pause_alone), base.figure(_pause_alone))} without relaunch and imports")
    told.append(f"{over(path.figure(_state_only), base.figure(_state_only))} state only")
    ends = list(dict.fromkeys(over(one, pause) for one, _ in (timed[0], timed[-1])))
    if len(timed) > 1:
        told.append(f"{' to '.join(ends)} over all {len(timed)} storages and caches")
    where = f" on {path.on}" if path.on != NONE else ""
    return f"{time_text(found.middle)} by {label}{where} ({'; '.join(told)})"


def _overviews(
    scenario: str, origin: Origin, found: Sequence[tuple[str, list[PathRows]]], several: bool
) -> list[ReportTable]:
    """Pauses of all changes together: a line a path, a column a change, as many as stand side by side in a table."""
    keys = list(dict.fromkeys((path.label, path.on) for _, paths in found for path in paths))
    keys.sort(key=lambda key: PATHS.index(key[0]) if key[0] in PATHS else len(PATHS))
    launches = interval_notes(_launches(path) for _, paths in found for path in paths)
    tables = []
    for at in range(0, len(found), _WIDEST - 1):
        shown = found[at : at + _WIDEST - 1]
        lines = []
        for key in keys:
            told = []
            for _, paths in shown:
                base = next((path.figure(_pause) for path in paths if path.label == BASELINE), None)
                told.append(_overview_cell(next((path for path in paths if (path.label, path.on) == key), None), base))
            lines.append(cells(_name(*key), *told))
        part = f", {at + 1} to {at + len(shown)}" if len(found) > len(shown) else ""
        tables.append(ReportTable(
            titled(f"pause of every change of {scenario}{part}", origin, several),
            (("path", "left"), *((name, "right") for name, _ in shown)),
            tuple(lines),
            (f"{origin.text}; {launches}; relaunch and imports included", _OVERLAPPED),
        ))  # fmt: skip
    return tables


def _overview_cell(path: PathRows | None, base: Figure | None) -> Cell:
    if path is None:
        return Cell("not run")
    found = path.figure(_pause)
    if found is None:
        return _standing(path)
    return Cell(figure_text(found, None if path.label == BASELINE or path.part else base), _faults(path))


def _launches(path: PathRows) -> int:
    return len({launch_of(row) for row in path.used})


def _caption(origin: Origin, rows: Sequence[CompareRecord], model: str) -> str:
    row = rows[0]
    notes = interval_notes(_launches(path) for path in paths_of(rows))
    kept = "moments" if "adam" in row.optimizer.lower() else "what the optimizer keeps"
    what = "of weights" if row.is_weights_only else f"of state: fp32 masters and {kept}"
    return (
        f"{origin.text}; {counted(row.ranks, 'rank')} on {counted(row.nodes, 'node')}"
        + (f" (cluster: {row.cluster})" if row.cluster else "")
        + (f"; {format_bytes(row.state_bytes)} {what}, each element once" if row.state_bytes else "")
        + f"; model {row.model}"
        + (f" ({model})" if model else "")
        + f" in {row.dtype}, {row.optimizer}; times of the slowest rank"
        + (f", {notes}" if notes else "")
    )


def _times(title: str, caption: str, rows: Sequence[CompareRecord]) -> ReportTable:
    """Pause and total, relaunch included and not, with ratios; what a path has twice stands once."""
    paths = paths_of(rows)
    base = next((path for path in paths if path.label == BASELINE and path.used), None)

    def time(path: PathRows, of: Callable[[CompareRecord], float | None], restarts: bool = False) -> str:
        if restarts and not _restarts(path):
            return NONE
        alone = base is None or path is base or path.part
        return figure_text(path.figure(of), None if base is None or alone else base.figure(of))

    lines = []
    for path in paths:
        notes = (*(row.note for row in path.rows if row.note), *(_faults(path) if path.used else ()))
        lines.append(cells(
            Cell(path.name + _count(path), tuple(dict.fromkeys(notes))),
            Cell(time(path, _pause)) if path.used else _standing(path), _priced(path),
            time(path, _pause_alone, restarts=True), time(path, _state_only), time(path, _total),
            time(path, _total_alone, restarts=True), _digests(path),
        ))  # fmt: skip
    captions = [caption, _CAPTION]
    if any(path.used and not _restarts(path) for path in paths):
        captions.append(_OVERLAPPED)
    table = ReportTable(title, _COLUMNS, tuple(lines), tuple(captions)).without_empty()
    shares = {_digests(path) for path in paths if path.used or path.rows[0].digest_total}
    if len(table.columns) > _WIDEST and len(shares) == 1 and not any(is_wrong(row) for row in rows):
        kept = tuple(row[:-1] for row in table.rows)
        captions.insert(1, f"digests equal by every path that made the change: {shares.pop()}")
        table = replace(table, columns=table.columns[:-1], rows=kept, captions=tuple(captions))
    return table


def _phases(title: str, origin: Origin, rows: Sequence[CompareRecord]) -> list[ReportTable]:
    """Phases as lines, paths as columns: those whose processes stay in a table of their own, and as many of the others
    in one as stand side by side. A phase that no path of a table has is left out."""
    paths = [path for path in paths_of(rows) if path.used]
    kinds = grouped(paths, _restarts)
    notes = interval_notes(_launches(path) for path in paths)
    caption = f"{origin.text}; times of the slowest rank, {notes}"
    parts = [
        (restarts, own[at : at + _WIDEST - 1])
        for restarts, own in kinds.items()
        for at in range(0, len(own), _WIDEST - 1)
    ]
    tables = []
    for restarts, own in parts:
        have = [name for name in PHASES if any(name in row.phases for path in own for row in path.used)]
        paused = pausing(have)
        lines = []
        for name in have:
            mark = "" if name in paused else " (the proof)" if name == "digest" else " (not in pause)"
            lines.append(cells(name + mark, *(figure_text(path.figure(_phase(name))) for path in own)))
        kind = "" if len(kinds) < 2 else ", processes started anew" if restarts else ", processes stay"
        columns = (("phase", "left"), *((path.name, "right") for path in own))
        about = "phases in the order in which they happen; the digest is the proof and in no sum"
        tables.append(ReportTable(f"{title}: phases{kind}", columns, tuple(lines), (caption, about)))
    return tables


def _phase(name: str) -> Callable[[CompareRecord], float | None]:
    return lambda row: row.phases.get(name)


def _count(path: PathRows) -> str:
    """Launches that count, and of how many, where others did not come to an end."""
    good, every = _launches(path), len({launch_of(row) for row in path.rows})
    return "" if good == every or not good else f" ({good} of {every} launches)"


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

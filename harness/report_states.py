"""Tables of ``report`` over training states and offloads: changes by row of the matrix, rounds by planner, offloads.

``state_section(scenario, rows)`` and ``offload_section(scenario, rows)`` make them of ``state_records``. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from relaymeter.harness.emit import NONE, size_text, time_text
from relaymeter.harness.report_figures import (
    WRONG_BITS,
    Figure,
    by_launch,
    fault_lines,
    fault_of,
    figure,
    figure_text,
    interval_notes,
    is_wrong,
    launch_of,
    usable,
)
from relaymeter.harness.report_sources import Origin, origin_of
from relaymeter.harness.report_tables import Cell, ReportTable, Section, cells, grouped, titled
from relaymeter.harness.state_config import OFFLOAD_STATES, ROWS
from relaymeter.state_records import OffloadRecord, StateRecord
from relaymeter.units import counted

__all__ = ["STATE_PHASES", "Change", "changes_of", "offload_section", "state_section"]

#: Phases of a move in the order in which they happen; each is a field ``<phase>_s``.
STATE_PHASES = ("plan", "prepare", "move", "fields", "refresh")
_STATES: tuple[str, ...] = OFFLOAD_STATES


@dataclass(frozen=True)
class Change:
    """The moves of one change (or of one direction of rounds) by one planner, in all launches."""

    rows: tuple[StateRecord, ...]

    @property
    def first(self) -> StateRecord:
        """A row, for what all have in common."""
        return self.rows[0]

    def figure(self, of: Callable[[StateRecord], float | None]) -> Figure | None:
        """Rounds: the median of the moves. Changes: of the launches, the moves of each added up."""
        used = self._used
        if self.first.row is None:
            return figure(by_launch((row, of(row)) for row in used))
        summed = {launch: [sum(values)] for launch, values in by_launch((row, of(row)) for row in used).items()}
        return figure(summed)

    def phase(self, name: str) -> Figure | None:
        """Seconds of a phase, or of the ``total``."""
        return self.figure(lambda row: getattr(row, f"{name}_s"))

    @property
    def _used(self) -> list[StateRecord]:
        """Rows whose times count: of changes those of launches in which every move came to its end."""
        if self.first.row is None:
            return [row for row in self.rows if usable(row)]
        bad = {launch_of(row) for row in self.rows if not usable(row)}
        return [row for row in self.rows if launch_of(row) not in bad]

    @property
    def faults(self) -> tuple[str, ...]:
        """What was wrong with some of the moves."""
        return fault_lines(self.rows)

    @property
    def verdict(self) -> Cell:
        """How it stands, with reasons."""
        if any(is_wrong(row) for row in self.rows):
            return Cell(WRONG_BITS, self.faults)
        return Cell(next((row.verdict for row in self.rows if not row.ok), "ok"), self.faults)

    def share(self, of: Callable[[StateRecord], tuple[int, int]]) -> str:
        """``"84/84"``."""
        passed, total = (sum(column) for column in zip(*map(of, self.rows), strict=True))
        return f"{passed}/{total}" if total else NONE


def changes_of(rows: Sequence[StateRecord]) -> list[Change]:
    """The rows of each change by each planner."""
    return [Change(tuple(own)) for own in grouped(rows, lambda row: (row.change, row.planner)).values()]


def state_section(scenario: str, rows: Sequence[StateRecord], missing: Sequence[str] = ()) -> Section:
    """All tables of the training states of one scenario."""
    worlds = grouped(rows, lambda row: (origin_of(row), row.nodes, row.row is None))
    several = len({origin for origin, _, _ in worlds}) > 1
    tables: list[ReportTable] = []
    for (origin, _, rounds), mine in worlds.items():
        kinds = _alike(mine)
        for own in kinds:
            size = f", {size_text(sum(row.bytes_total for row in own))} in all" if len(kinds) > 1 else ""
            if rounds:
                tables += _rounds(titled(scenario, origin, several) + size, origin, own)
                continue
            for name in sorted(grouped(own, lambda row: row.row), key=_place):
                title = titled(f"{scenario}, {name}", origin, several) + size
                tables.append(_changes(title, origin, [row for row in own if row.row == name]))
    return Section(f"{scenario}: training states", tuple(_state_lines(rows)), tuple(tables), tuple(missing))


def _place(name: str | None) -> int:
    """Where a row of the matrix stands in it."""
    known: list[str | None] = [*ROWS]
    return known.index(name) if name in known else -1


def _alike(rows: Sequence[StateRecord]) -> list[list[StateRecord]]:
    """The rows by what was moved: launches that moved other bytes, or between other engines, under the same name are no
    launches of one thing."""
    kinds: list[tuple[dict[Hashable, Hashable], list[StateRecord]]] = []
    for own in grouped(rows, launch_of).values():
        facts: dict[Hashable, Hashable] = {
            (row.change, row.planner, row.leg): (row.source, row.destination, row.bytes_total, row.ranks, row.model,
                                                 row.dtype, row.optimizer)
            for row in own
            if row.refused is None
        }  # fmt: skip
        for known, kept in kinds:
            if all(known.get(key, fact) == fact for key, fact in facts.items()):
                known.update(facts)
                kept.extend(own)
                break
        else:
            kinds.append((facts, list(own)))
    return [kept for _, kept in kinds]


def _state_lines(rows: Sequence[StateRecord]) -> list[str]:
    """Every check counted."""
    good = sum(row.ok for row in rows)
    digests = f"{sum(row.digest_passed for row in rows)} of {sum(row.digest_total for row in rows)} digests equal"
    lines = [f"{good} of {counted(len(rows), 'move')} bitwise equal; {digests}"]
    oracle = sum(row.oracle_total for row in rows)
    if oracle:
        lines.append(
            f"{sum(row.oracle_passed for row in rows)} of {oracle} tensors equal by an oracle that shares no code with "
            "the planner"
        )
    trained = [row for row in rows if row.continuation]
    if trained:
        equal = sum(row.continuation.startswith("bit-equal") for row in trained)
        within = sum(row.continuation_ok for row in trained) - equal
        more = f", {within} within the limit of the dtype" if within else ""
        lines.append(f"{equal} of {counted(len(trained), 'continuation')} of training bit-equal{more}")
    asked = [row for row in rows if row.checkpoint != "not asked"]
    if asked:
        equal = sum(row.checkpoint.startswith("bit-equal") for row in asked)
        lines.append(f"{equal} of {len(asked)} compared with a universal checkpoint bit-equal")
    return lines


def _caption(origin: Origin, rows: Sequence[StateRecord], note: str) -> str:
    ranks = " and ".join(str(count) for count in dict.fromkeys(row.ranks for row in rows))
    models = "; ".join(dict.fromkeys(f"model {row.model} in {row.dtype}, {row.optimizer}" for row in rows))
    told = f"; {models}" if models.count(";") < 2 else ""
    return f"{origin.text}; {ranks} ranks on {counted(rows[0].nodes, 'node')}{told}; times of the slowest rank, {note}"


def _rounds(title: str, origin: Origin, rows: Sequence[StateRecord]) -> list[ReportTable]:
    """A line a planner: each direction, memory, checks; then the phases of each direction."""
    changes = changes_of(rows)
    ways = list(dict.fromkeys(row.change for row in rows))
    few = min(rows, key=lambda row: _size(row.destination))
    name = few.change.rpartition(" -> ")[2]
    launches = [len({launch_of(row) for row in change.rows}) for change in changes]
    each = max(len(own) for own in grouped(rows, lambda row: (row.change, row.planner, launch_of(row))).values())
    lines = []
    for planner, own in grouped(changes, lambda change: change.first.planner).items():
        mine = [row for change in own for row in change.rows]
        plans = [found.middle for change in own if (found := change.phase("plan")) is not None]
        by_way = {change.first.change: change for change in own}
        lines.append(cells(
            planner, time_text(sum(plans) if plans else None),
            *(figure_text(by_way[way].phase("total")) if way in by_way else "not run" for way in ways),
            size_text(mine[0].held_bytes), size_text(mine[0].held_after_bytes),
            size_text(_peak(mine, lambda row: row.peak_bytes)),
            size_text(_peak(mine, lambda row: row.peak_predicted_bytes)),
            Change(tuple(mine)).share(lambda row: (row.digest_passed, row.digest_total)),
            f"{sum(row.ok for row in mine)}/{len(mine)}", Change(tuple(mine)).verdict,
        ))  # fmt: skip
    caption = _caption(origin, rows, interval_notes(launches, each, "round"))
    columns = (
        ("planner", "left"), ("plan once", "right"), *((way, "right") for way in ways),
        (f"{name} rank before", "right"), ("after", "right"), (f"peak on a {name} rank", "right"),
        ("predicted", "right"), ("digests equal", "right"), ("bitwise equal", "right"), ("verdict", "left"),
    )  # fmt: skip
    builds = {row.change.rpartition(" -> ")[2]: row.build_s for row in rows if row.build_s is not None}
    built = ", ".join(f"{end} {time_text(seconds)}" for end, seconds in builds.items())
    about = (
        f"{rows[0].source} and {rows[0].destination}, {size_text(rows[0].bytes_total)} of masters and moments; plan: "
        "both directions; moves: all but the plan; memory: training state of both engines, at the peak everything "
        "beside it" + (f"; engines built in {built}" if built else "")
    )
    phases = _phases(f"{title}: phases", changes, (caption,), named="direction")
    return [ReportTable(title, columns, tuple(lines), (caption, about)).without_empty(), phases]


def _phases(title: str, changes: Sequence[Change], captions: tuple[str, ...], *, named: str) -> ReportTable:
    lines = [
        cells(
            change.first.change,
            change.first.planner,
            *(figure_text(change.phase(name)) for name in (*STATE_PHASES, "total")),
        )
        for change in changes
    ]
    columns = ((named, "left"), ("planner", "left"), *((name, "right") for name in (*STATE_PHASES, "total")))
    about = "total: all but the plan, which is made once"
    return ReportTable(title, columns, tuple(lines), (*captions, about)).without_empty()


def _changes(title: str, origin: Origin, rows: Sequence[StateRecord]) -> ReportTable:
    """A line a change (and planner): phases, checks, and how it went on."""
    several = len({row.planner for row in rows}) > 1
    lines = []
    for change in changes_of(rows):
        bytes_moved = sum(row.bytes_total for row in _one_launch(change))
        lines.append(cells(
            change.first.change, _engines(_one_launch(change)), change.first.planner if several else NONE,
            *(figure_text(change.phase(name)) for name in (*STATE_PHASES, "total")), size_text(bytes_moved or None),
            change.share(lambda row: (row.digest_passed, row.digest_total)),
            change.share(lambda row: (row.oracle_passed, row.oracle_total)),
            _trained(change), _checkpoint(change), change.verdict,
        ))  # fmt: skip
    columns = (
        ("change", "left"), ("engines", "left"), ("planner", "left"),
        *((name, "right") for name in (*STATE_PHASES, "total")), ("bytes", "right"), ("digests equal", "right"),
        ("oracle equal", "right"), ("trained on", "left"), ("checkpoint", "left"), ("verdict", "left"),
    )  # fmt: skip
    launches = [len({launch_of(row) for row in change.rows}) for change in changes_of(rows)]
    note = f"all moves of a change together, {interval_notes(launches)}; total: all but the plan"
    return ReportTable(title, columns, tuple(lines), (_caption(origin, rows, note),)).without_empty()


def _one_launch(change: Change) -> list[StateRecord]:
    """The moves of the first launch."""
    launch = launch_of(change.first)
    return [row for row in change.rows if launch_of(row) == launch]


def _engines(legs: Sequence[StateRecord]) -> str:
    moved = [row for row in legs if row.refused is None] or list(legs)
    path = [moved[0].source, *(row.destination for row in moved)]
    return f"{path[0]} <-> {path[1]}" if len(path) == 3 and path[0] == path[2] else " -> ".join(path)


def _trained(change: Change) -> Cell:
    """How training went on, in short; the whole in a note where it was not bit-equal."""
    told = [row for row in change.rows if row.continuation]
    texts = dict.fromkeys(row.continuation.partition(", ")[0].partition(" of ")[0] for row in told)
    notes = tuple(dict.fromkeys(row.continuation for row in told if not row.continuation.startswith("bit-equal")))
    return Cell("; ".join(texts) or NONE, notes)


def _checkpoint(change: Change) -> Cell:
    """Beside a universal checkpoint; the reason in a note."""
    asked = list(dict.fromkeys(row.checkpoint for row in change.rows if row.checkpoint != "not asked"))
    texts = dict.fromkeys(text.partition(":")[0] for text in asked)
    return Cell("; ".join(texts) or NONE, tuple(text for text in asked if ":" in text))


def _peak(rows: Sequence[StateRecord], of: Callable[[StateRecord], int | None]) -> int | None:
    """The largest of what a rank held before a move and took while moving."""
    found = [row.held_bytes + more for row in rows if row.held_bytes is not None and (more := of(row)) is not None]
    return max(found, default=None)


def _size(label: str) -> int:
    """Ranks of an engine by its label, such as ``zero3 x4``."""
    digits = "".join(character for character in label.partition(" x")[2] if character.isdigit())
    return int(digits) if digits else 0


def offload_section(scenario: str, rows: Sequence[OffloadRecord], missing: Sequence[str] = ()) -> Section:
    """The table of offloads, one for each place and number of ranks; what does not apply is left out."""
    tables = []
    told = [row for row in rows if row.verdict != "not applicable"]
    worlds = grouped(told, lambda row: (origin_of(row), row.ranks))
    several = len({origin for origin, _ in worlds}) > 1
    for (origin, ranks), mine in worlds.items():
        tables.append(_offloads(titled(scenario, origin, several), origin, ranks, mine))
    done = [row for row in rows if row.equal is not None]
    lines = [
        f"{sum(bool(row.equal) for row in done)} of {counted(len(done), 'offload')} equal after the reload, "
        f"{sum(row.trains == 'bit-equal' for row in done)} bit-equal after the next step"
    ]
    left = grouped([row for row in rows if row.verdict == "not applicable"], lambda row: row.note or "does not apply")
    for note, own in left.items():
        stages = "/".join(str(stage) for stage in dict.fromkeys(row.stage for row in own))
        lines.append(f"not applicable, zero{stages} {', '.join(dict.fromkeys(row.state for row in own))}: {note}")
    return Section(f"{scenario}: offload and reload", tuple(lines), tuple(tables), tuple(missing))


def _offloads(title: str, origin: Origin, ranks: int, rows: Sequence[OffloadRecord]) -> ReportTable:
    def key(row: OffloadRecord) -> tuple[object, ...]:
        return (row.stage, row.way, row.state, row.moment, row.pinned, row.blocking, row.bytes)

    found = list(grouped(rows, key).values())
    found.sort(key=lambda own: (own[0].stage, own[0].way, _order(own[0].state)))
    lines = []
    for own in found:
        row, used = own[0], [one for one in own if usable(one) and one.equal is not None]
        out = figure(by_launch((one, one.offload_s) for one in used))
        back = figure(by_launch((one, one.reload_s) for one in used))
        notes = [fault_of(one) or one.note for one in own]
        wrong = any(is_wrong(one) for one in own)
        lines.append(cells(
            f"zero{row.stage}", row.state if row.moment == "after a step" else f"{row.state} {row.moment}", row.way,
            _yes(row.pinned), _yes(row.blocking), size_text(row.bytes), figure_text(out), figure_text(back),
            _rate(row.bytes, out), _rate(row.bytes, back), size_text(row.allocated_before_bytes),
            size_text(row.allocated_after_bytes), size_text(row.allocated_reloaded_bytes),
            size_text(row.host_growth_bytes),
            Cell(WRONG_BITS if wrong else "yes" if used and len(used) == len(own) else row.verdict,
                 tuple(dict.fromkeys(note for note in notes if note is not None))),
            next((one.trains for one in own if one.trains not in (None, "bit-equal")), row.trains) or NONE,
        ))  # fmt: skip
    columns = (
        ("stage", "left"), ("state", "left"), ("way", "left"), ("pinned", "left"), ("blocking", "left"),
        ("bytes", "right"), ("offload", "right"), ("reload", "right"), ("offload GB/s", "right"),
        ("reload GB/s", "right"), ("allocated before", "right"), ("after", "right"), ("reloaded", "right"),
        ("host growth", "right"), ("equal", "left"), ("next step", "left"),
    )  # fmt: skip
    note = interval_notes(len({launch_of(row) for row in own}) for own in found)
    caption = f"{origin.text}; {counted(ranks, 'rank')}; median of the cycles, largest and slowest rank, {note}"
    return ReportTable(title, columns, tuple(lines), (caption,)).without_empty()


def _order(state: str) -> int:
    return _STATES.index(state) if state in _STATES else len(_STATES)


def _yes(value: bool | None) -> str:
    return NONE if value is None else "yes" if value else "no"


def _rate(count: int | None, taken: Figure | None) -> str:
    return NONE if not count or taken is None or not taken.middle else f"{count / taken.middle / 1e9:.3g}"

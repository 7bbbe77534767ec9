"""Tables of ``run``: predicted against measured for every row of a move, and a suite's rows in one table.

All of them read rows of ``records.MoveRecord``. Called by the parent, or by rank 0 in a world that was joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from relaymeter.harness.emit import NONE, simple_table, size_text, time_text, time_with_interval
from relaymeter.records import MoveRecord
from relaymeter.units import counted, format_bytes

__all__ = ["fastest_lines", "planner_lines", "run_headline", "run_tables", "suite_table"]


def run_headline(rows: Sequence[MoveRecord], *, suite: bool = False) -> str:
    """What all rows of a run have in common. ``suite``: they stand in one table, which has no room for intervals."""
    first = rows[0]
    shown = (
        "median, slowest rank; intervals are in the rows"
        if suite or _kinds(rows)
        else "slowest rank, median [interval]"
    )
    kept = "" if first.max_extra_bytes is None else f", source given up for {size_text(first.max_extra_bytes)} of extra"
    how = f"simulated: {first.simulated}" if first.simulated else "shaped" if first.shaped else "unshaped"
    return (
        f"{first.scenario}: {counted(first.ranks, 'rank')} on {counted(first.nodes, 'node')} ({how}), "
        f"{' and '.join(dict.fromkeys(row.executor for row in rows))}, "
        f"{counted(len(first.samples_s), 'repeat')}{kept}; measured: pack + communicate + unpack, {shown}"
    )


def run_tables(rows: Sequence[MoveRecord]) -> list[Table]:
    """One table per move: predicted against measured, bound, bytes, digests and memory of every row.

    Where rows differ in planner or executor those are columns, and intervals are left out to make room for them.
    """
    kinds = _kinds(rows)
    tables = []
    for name in dict.fromkeys(row.move for row in rows):
        found = [row for row in rows if row.move == name]
        held = "buffers" if found[0].max_extra_bytes is None else "extra"
        table = simple_table(
            _move_title(found),
            [*((kind, "whole") for kind in kinds), ("route", "left"), ("measured", "right"), ("/ bound", "right"),
             ("predicted", "right"), ("error", "right"), ("across\nnodes", "right"), ("kernel\ncounted", "right"),
             ("digests\nequal", "right"), (f"peak\n{held}", "right"), ("verdict", "left")],
        )  # fmt: skip
        for row in found:
            ours = (None, None) if len(kinds) > 1 else (row.measured_low_s, row.measured_high_s)
            edges = (None, None) if kinds else (row.predicted_low_s, row.predicted_high_s)
            table.add_row(
                *(getattr(row, kind) for kind in kinds),
                row.route + (f" ({_mix(row.route_bytes)})" if row.route == "chosen" else ""),
                time_with_interval(row.measured_s, *ours), _ratio(row),
                time_with_interval(row.predicted_s, *edges), NONE if row.error is None else f"{row.error:+.1%}",
                size_text(row.bytes_cross_node), size_text(row.wire_cross_node_bytes),
                _digests(row), size_text(row.peak_bytes), row.verdict,
            )  # fmt: skip
        tables.append(table)
    return tables


def suite_table(rows: Sequence[MoveRecord]) -> Table:
    """All rows of a suite in one table; columns in which no row has anything are left out."""
    kinds = _kinds(rows)
    sources = list(dict.fromkeys(name for row in rows for name in row.source_bytes))
    priced = any(row.predicted_s is not None for row in rows)
    table = simple_table(
        f"{rows[0].scenario}: {counted(len(rows), 'row')}" + _simulated(rows[0]),
        [("move", "left"), *((kind, "whole") for kind in kinds), ("route", "whole"), ("measured", "right"),
         *([("/ bound", "right"), ("predicted", "right")] if priced else []),
         ("across\nnodes", "right"), ("kernel\ncounted", "right"), *((f"from\n{name}", "right") for name in sources),
         ("digests\nequal", "right"), ("verdict", "left")],
    )  # fmt: skip
    for number, row in enumerate(rows):
        table.add_row(
            row.move, *(getattr(row, kind) for kind in kinds), row.route, time_text(row.measured_s),
            *([_ratio(row), time_text(row.predicted_s)] if priced else []),
            size_text(row.bytes_cross_node), size_text(row.wire_cross_node_bytes),
            *(size_text(row.source_bytes.get(name)) for name in sources),
            _digests(row), row.verdict,
            end_section=number + 1 == len(rows) or rows[number + 1].move != row.move,
        )  # fmt: skip
    return table


def fastest_lines(rows: Sequence[MoveRecord]) -> list[str]:
    """The fastest row of each move of a suite that has bytes between nodes, beside direct with the same planner and
    executor; without such bytes all routes of a move are the same exchanges."""
    lines = []
    for name in dict.fromkeys(row.move for row in rows if row.bytes_cross_node):
        found = [(row.measured_s, row) for row in rows if row.move == name and row.measured_s is not None]
        if not found:
            continue
        best_s, best = min(found, key=lambda pair: pair[0])
        alike = ("direct", best.planner, best.executor)
        direct = [taken for taken, row in found if (row.route, row.planner, row.executor) == alike]
        beside = "" if best.route == "direct" or not direct else f", {best_s / direct[0]:.2f} of direct"
        where = f"{best.route}, {best.planner}, {best.executor}"
        lines.append(f"fastest of {name}: {time_text(best_s)} ({where}){beside}")
    return lines


def planner_lines(rows: Sequence[MoveRecord]) -> list[str]:
    """Whether the planners send equal bytes between nodes, where rows of several stand side by side, and of how many
    tensors each left the planning to another."""
    lines = []
    alike: dict[tuple[str, str, str], dict[str, int]] = {}
    for row in rows:
        if row.route != "chosen":  # the choice may differ by planner
            alike.setdefault((row.move, row.executor, row.route), {})[row.planner] = row.bytes_cross_node
    pairs = {key: found for key, found in alike.items() if len(found) > 1}
    odd = {key: found for key, found in pairs.items() if len(set(found.values())) > 1}
    if pairs:
        equal = f"{len(pairs) - len(odd)} of {len(pairs)}"
        lines.append(f"both planners send the same bytes between nodes in {equal} configurations")
    for (move, _, route), found in odd.items():
        sent = ", ".join(f"{planner} {size_text(count)}" for planner, count in found.items())
        lines.append(f"{move} by {route}: {sent} between nodes")
    fell = {(row.move, row.planner): row.fallback_tensors for row in rows if row.fallback_tensors}
    lines += [
        f"{move}: {planner} fell back for {counted(count, 'tensor')} (relaymeter plan says which and why)"
        for (move, planner), count in fell.items()
    ]
    return lines


def _kinds(rows: Sequence[MoveRecord]) -> list[str]:
    """Of planner and executor, those in which the rows differ."""
    return [kind for kind in ("planner", "executor") if len({getattr(row, kind) for row in rows}) > 1]


def _move_title(rows: Sequence[MoveRecord]) -> str:
    first = rows[0]
    parts = [f"{first.move}: {format_bytes(first.bytes_total)} into place"]
    if len(first.source_bytes) > 1 or "trainer" not in first.source_bytes:
        parts.append(" and ".join(f"{format_bytes(count)} from {name}" for name, count in first.source_bytes.items()))
    if first.bound_s is not None:
        parts.append(f"bound {time_text(first.bound_s)} ({first.bound_by})")
    return ", ".join([*parts, f"buckets of {format_bytes(first.bucket_bytes)}"]) + _simulated(first)


def _simulated(row: MoveRecord) -> str:
    """The end of a title."""
    return "" if row.simulated is None else f" (simulated: {row.simulated})"


def _digests(row: MoveRecord) -> str:
    return f"{row.digest_passed}/{row.digest_total}" if row.simulated is None else NONE


def _ratio(row: MoveRecord) -> str:
    return NONE if row.measured_s is None or not row.bound_s else f"{row.measured_s / row.bound_s:.3f}"


def _mix(route_bytes: Mapping[str, int]) -> str:
    """The routes that carry at least a hundredth of the bytes, with their shares where there are several."""
    total = sum(route_bytes.values())
    parts = [(name, count / total) for name, count in route_bytes.items() if count >= total / 100 and count]
    if len(parts) < 2:
        return parts[0][0] if parts else "nothing"
    return ", ".join(f"{name} {share:.0%}" for name, share in parts)

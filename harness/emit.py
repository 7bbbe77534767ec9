"""Output: tables for people and JSON for programs, from the same data.

``with Output(json_target="-", force=False) as out: out.table(...); out.json(document)`` sends the table to standard
error when standard output carries the JSON. Called by the parent, or by rank 0 in a world that was joined.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from relaymeter.calibration.profiles import Profile
from relaymeter.records import MoveRecord, check_target, dump_json, write_text
from relaymeter.units import format_bytes, format_rate, format_seconds

__all__ = ["Output", "candidate_table", "choice_lines", "price_table", "profile_tables", "run_headline", "run_tables"]

#: Columns of a table that goes to a file or a pipe.
_WIDE = 120
_NONE = "-"
_SCALES = ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "us"))


class _Console(Console):
    """A reader that goes away (``| head``) silences the tables; the verdict and the files stay."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


class Output:
    """Where a command's tables and JSON go. Raises InputError at once where the JSON file could not be written."""

    def __init__(self, json_target: str | None, *, force: bool) -> None:
        self._target = json_target
        self._force = force
        if json_target not in (None, "-"):
            check_target(Path(str(json_target)), force=force)
        stream = sys.stderr if json_target == "-" else sys.stdout
        seen = stream is not None and stream.isatty()
        self.console = _Console(
            file=stream, quiet=stream is None, width=None if seen else _WIDE, highlight=False, soft_wrap=False
        )

    def say(self, text: str = "") -> None:
        """A line for people."""
        self.console.print(text, markup=False, soft_wrap=True)

    def table(self, table: Table) -> None:
        """A table for people."""
        self.console.print(table)

    def json(self, text: str | Mapping[str, Any]) -> None:
        """The JSON of the command (a document, or ready-made lines), if it was asked for."""
        content = text if isinstance(text, str) else dump_json(text)
        if self._target == "-":
            with suppress(BrokenPipeError, AttributeError):
                sys.stdout.write(content)
                sys.stdout.flush()
        elif self._target is not None:
            write_text(Path(self._target), content, force=self._force)


def _table(title: str, columns: Sequence[tuple[str, str]], *, caption: str | None = None) -> Table:
    table = Table(
        title=title, caption=caption, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left",
        pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for name, justify in columns:
        table.add_column(name, justify=justify, overflow="fold", no_wrap=justify == "right")  # type: ignore[arg-type]
    return table


def _time(seconds: float | None) -> str:
    return _NONE if seconds is None else format_seconds(seconds)


def _time_with_interval(seconds: float | None, low: float | None, high: float | None) -> str:
    """``"17.2 [11.3, 20.7] ms"``: all three in the unit that suits the middle one."""
    if seconds is None or low is None or high is None:
        return _time(seconds)
    scale, unit = next(((s, u) for limit, s, u in _SCALES if seconds >= limit), _SCALES[-1][1:])
    value, *edges = (_digits(number * scale) for number in (seconds, low, high))
    return f"{value} {unit}" if low == high else f"{value} [{', '.join(edges)}] {unit}"


def _digits(number: float) -> str:
    return f"{number:.3g}" if abs(number) < 1000 else f"{number:.0f}"


def _size(count: float | None) -> str:
    return _NONE if count is None else format_bytes(count)


def price_table(move: Mapping[str, Any]) -> Table:
    """Route and prices of every block class of one move: what ``choose`` and ``plan`` print."""
    table = _table(
        f"{move['move']}: routes by block class",
        [("weights", "left"), ("tensors", "right"), ("block\nelements", "right"), ("ranks\na node", "right"),
         ("bytes", "right"), ("route", "left"), ("direct", "right"), ("relay", "right"), ("spread", "right")],
        caption="prices: all blocks of the class moved alone; bytes: each block counted once",
    )  # fmt: skip
    for row in move["classes"]:
        prices = [_time(row[f"price_{route}_s"]) for route in ("direct", "relay", "spread")]
        table.add_row(
            row["label"], f"{row['tensors']:,}", f"{row['elements']:,}", str(row["fanout"]), _size(row["bytes"]),
            row["route"] or _NONE, *prices,
        )  # fmt: skip
    return table


def candidate_table(move: Mapping[str, Any]) -> Table:
    """The whole move by every route: predicted time, bytes, messages and memory."""
    bound = move["bound_s"]
    title = f"{move['move']}: the whole move" + (f" (bound {_time(bound)}, {move['bound_by']})" if bound else "")
    table = _table(
        title,
        [("route", "left"), ("predicted", "right"), ("/ bound", "right"), ("across\nnodes", "right"),
         ("in node", "right"), ("messages", "right"), ("rounds", "right"), ("peak\nbuffers", "right")],
    )  # fmt: skip
    if any(row["extrapolated"] for row in move["candidates"]):
        table.caption = "~ extrapolated: beyond the measured sizes, or another topology than the measured one"
    for row in move["candidates"]:
        predicted = row["predicted_s"]
        table.add_row(
            row["route"] + (" *" if row["chosen"] else ""),
            ("~ " if row["extrapolated"] else "")
            + _time_with_interval(predicted, row["predicted_low_s"], row["predicted_high_s"]),
            _NONE if predicted is None or not bound else f"{predicted / bound:.2f}",
            _size(row["bytes_cross_node"]), _size(row["bytes_in_node"]), f"{row['messages']:,}", str(row["rounds"]),
            _size(row["peak_predicted_bytes"]),
        )  # fmt: skip
    return table


def choice_lines(move: Mapping[str, Any]) -> list[str]:
    """The choice in words, ``min_relay`` and ``min_split`` by ranks per node, and the regret of today's constants."""
    if move["choice"] is None:
        return []
    lines = [f"{move['move']}: chosen {move['choice']}; {_trust(move)}"]
    for name in ("min_relay", "min_split"):
        for fanout, found in move["thresholds"][name].items():
            value, low, high = found["elements"], found["low"], found["high"]
            text = f"{name}({fanout} ranks per node) = {_elements(value)}"
            lines.append(text + ("" if low == high else f" [{_edge(low)}, {_edge(high)}]"))
    regret, fixed = move["regret_fixed_s"], move["fixed_constants_s"]
    share = f" ({regret / (fixed - regret):+.1%})" if fixed > regret else ""
    lines.append(
        f"today's constants (65,536 elements) would take {_time(fixed)}: {_signed(regret)} over the choice{share}"
    )
    return lines


def _trust(move: Mapping[str, Any]) -> str:
    """How far the prices may be off, and how that is known."""
    matrices, error = move["price_error_matrices"], move["price_error"]
    if not matrices:
        text = f"{error:.1%} error assumed: the calibration measured no matrix that it did not fit"
    else:
        text = f"prices erred by {error:.1%} (median, 3% at least) on {matrices} matrices measured but not fitted"
    return text + ("; beyond what was measured, so the error here is not known" if move["extrapolated"] else "")


def _signed(seconds: float) -> str:
    return ("-" if seconds < 0 else "+") + format_seconds(abs(seconds))


def _elements(count: int | None) -> str:
    return "never" if count is None else f"{count:,} elements"


def _edge(elements: int | None) -> str:
    return "never" if elements is None else f"{elements:,}"


def profile_tables(profile: Profile) -> list[Table]:
    """What a calibration found: the fitted figures of each executor with their intervals, and its own gates."""
    shape = "+".join(str(len(profile.topology.ranks_of(node))) for node in range(profile.topology.nodes))
    figures = _table(
        f"calibration of {shape} ranks by node, {len(set(profile.topology.nic))} NICs"
        + (" (quick)" if profile.quick else ""),
        [("figure", "left"), *((executor, "right") for executor in profile.executors)],
        caption="value [5 %, 95 %] of the bootstrap",
    )
    names = dict.fromkeys(name for found in profile.executors.values() for name in found.intervals)
    for name in names:
        cells = [found.intervals.get(name) for found in profile.executors.values()]
        figures.add_row(name, *(_NONE if cell is None else _with_interval(name, cell) for cell in cells))
    passed = sum(gate.passed for gate in profile.gates)
    gates = _table(
        f"gates: {passed} of {len(profile.gates)} passed" + ("" if passed == len(profile.gates) else "; missed:"),
        [("gate", "left"), ("value", "right"), ("limit", "right")],
        caption="a missed gate says which prices are rough: close other programs, give more --budget, calibrate again",
    )
    for gate in profile.gates:
        if not gate.passed:
            gates.add_row(gate.name, _NONE if gate.value is None else f"{gate.value:.3g}", f"{gate.limit:.3g}")
    return [figures, gates]


def _with_interval(name: str, triple: tuple[float, float, float]) -> str:
    value, low, high = (_figure(name, number) for number in triple)
    return value if low == high else f"{value} [{low}, {high}]"


def _figure(name: str, value: float) -> str:
    if name.endswith("_bytes_per_s"):
        return format_rate(value)
    if name.endswith("_s"):
        return format_seconds(value)
    return format_bytes(value) if name.endswith("_bytes") else f"{value:.3g}"


def run_headline(rows: Sequence[MoveRecord]) -> str:
    """What all rows of a run have in common."""
    first = rows[0]
    return (
        f"{first.scenario}: {first.ranks} ranks on {first.nodes} nodes ({'shaped' if first.shaped else 'unshaped'}), "
        f"{first.executor}, {len(first.samples_s)} repeats; measured: pack + communicate + unpack, slowest rank, "
        "median [interval]"
    )


def run_tables(rows: Sequence[MoveRecord]) -> list[Table]:
    """One table per move: predicted against measured, bound, bytes, digests and memory of every route."""
    tables = []
    for name in dict.fromkeys(row.move for row in rows):
        found = [row for row in rows if row.move == name]
        first = found[0]
        table = _table(
            f"{name}: {format_bytes(first.bytes_total)} into place, bound {_time(first.bound_s)} ({first.bound_by}), "
            f"buckets of {format_bytes(first.bucket_bytes)}",
            [("route", "left"), ("measured", "right"), ("/ bound", "right"), ("predicted", "right"), ("error", "right"),
             ("across\nnodes", "right"), ("kernel\ncounted", "right"), ("digests\nequal", "right"),
             ("peak\nbuffers", "right"), ("verdict", "left")],
        )  # fmt: skip
        for row in found:
            ratio = _NONE if row.measured_s is None or not row.bound_s else f"{row.measured_s / row.bound_s:.3f}"
            table.add_row(
                row.route + (f" ({_mix(row.route_bytes)})" if row.route == "chosen" else ""),
                _time_with_interval(row.measured_s, row.measured_low_s, row.measured_high_s), ratio,
                _time_with_interval(row.predicted_s, row.predicted_low_s, row.predicted_high_s),
                _NONE if row.error is None else f"{row.error:+.1%}",
                _size(row.bytes_cross_node), _size(row.wire_cross_node_bytes),
                f"{row.digest_passed}/{row.digest_total}", _size(row.peak_bytes), row.verdict,
            )  # fmt: skip
        tables.append(table)
    return tables


def _mix(route_bytes: Mapping[str, int]) -> str:
    """The routes that carry at least a hundredth of the bytes, with their shares where there are several."""
    total = sum(route_bytes.values())
    parts = [(name, count / total) for name, count in route_bytes.items() if count >= total / 100 and count]
    if len(parts) < 2:
        return parts[0][0] if parts else "nothing"
    return ", ".join(f"{name} {share:.0%}" for name, share in parts)

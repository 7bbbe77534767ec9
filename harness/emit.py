"""Output: tables for people and JSON for programs, from the same data.

``out = Output(json_target="-", force=False)``, then ``out.table(...)`` and ``out.json(document)``, sends the table to
standard error when standard output carries the JSON. Called by the parent, or by rank 0 in a world that was joined. The
tables of ``choose`` and ``plan`` are in ``emit_plan``, those of ``run`` in ``emit_run``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from relaymeter.calibration.profiles import Profile
from relaymeter.errors import EXIT_OK, EXIT_USAGE, InputError
from relaymeter.records import check_target, dump_json, write_text
from relaymeter.relayout.topology import Topology
from relaymeter.units import counted, format_bytes, format_rate, format_seconds

__all__ = [
    "NONE",
    "Output",
    "print_table",
    "profile_tables",
    "simple_table",
    "size_text",
    "time_text",
    "time_with_interval",
    "unpriced",
]

#: Columns of a table that goes to a file or a pipe.
_WIDE = 120
#: More columns than any table needs.
_WIDEST = 100_000
#: The least that a column of texts keeps where the table is too wide.
_NARROWEST = 7
#: What a table shows where there is no value.
NONE = "-"
_SCALES = ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "us"))


class _Console(Console):
    """A reader that goes away (``| head``) silences the tables; the verdict and the files stay."""

    def on_broken_pipe(self) -> None:
        self.mute()

    def mute(self) -> None:
        """Print nothing more, and leave nothing to be flushed when the process ends."""
        self.quiet = True
        with suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


class Output:
    """Where a command's tables and JSON go. Raises InputError at once where the JSON file could not be written."""

    def __init__(self, json_target: str | None, *, force: bool) -> None:
        self._target = json_target
        self._force = force
        self.exit_code = EXIT_OK
        """``EXIT_USAGE`` once a table could not be written."""
        if json_target not in (None, "-"):
            check_target(Path(str(json_target)), force=force)
        stream = sys.stderr if json_target == "-" else sys.stdout
        seen = stream is not None and stream.isatty()
        self.console = _Console(
            file=stream, quiet=stream is None, width=None if seen else _WIDE, highlight=False, soft_wrap=False
        )

    def say(self, text: str | Text = "") -> None:
        """A line for people; a Text may be coloured in part."""
        with self._heard():
            self.console.print(text, markup=False, soft_wrap=True)

    def table(self, table: Table) -> None:
        """A table for people."""
        with self._heard():
            print_table(self.console, table)

    @contextmanager
    def _heard(self) -> Iterator[None]:
        """Where nothing can be written (a full disk), say so once on standard error and go on without tables."""
        try:
            yield
        except OSError as error:
            self.exit_code = EXIT_USAGE
            self.console.mute()
            with suppress(OSError, ValueError):
                print(f"relaymeter: cannot write the tables: {error.strerror or error}", file=sys.stderr, flush=True)

    def json(self, text: str | Mapping[str, Any]) -> None:
        """The JSON of the command (a document, or ready-made lines), if it was asked for."""
        content = text if isinstance(text, str) else dump_json(text)
        if self._target == "-":
            try:
                with suppress(BrokenPipeError, AttributeError):
                    sys.stdout.write(content)
                    sys.stdout.flush()
            except OSError as error:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise InputError(f"cannot write standard output: {error.strerror or error}") from error
        elif self._target is not None:
            write_text(Path(self._target), content, force=self._force)


def print_table(console: Console, table: Table) -> None:
    """Print ``table`` with every number and unit whole: where the terminal is narrower than it needs, at the width that
    a file gets, or more, so that the terminal wraps or scrolls the lines."""
    for column in table.columns:
        if column.no_wrap:
            texts = [str(text) for text in (column.header, *column.cells)]
            column.min_width = max(cell_len(line) for text in texts for line in text.split("\n"))
    usual = console.width
    needed = Measurement.get(console, console.options.update(width=_WIDEST, max_width=_WIDEST), table)
    if needed.maximum > usual:
        console.width = max(usual, needed.minimum, min(needed.maximum, _WIDE))
    console.print(table)
    if console.width != usual:
        console.width = usual


def simple_table(title: str, columns: Sequence[tuple[str, str]], *, caption: str | None = None) -> Table:
    """A table of ``columns`` as all commands print them: name and ``"right"`` for numbers, ``"left"`` for texts, which
    wrap where the table is too wide, or ``"whole"`` for texts that never do."""
    table = Table(
        title=title, caption=caption, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left",
        pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for name, justify in columns:
        table.add_column(
            name,
            justify="right" if justify == "right" else "left",
            overflow="fold",
            no_wrap=justify != "left",
            min_width=_NARROWEST if justify == "left" else None,
        )
    return table


def time_text(seconds: float | None) -> str:
    """``"17.2 ms"``, or ``NONE``."""
    return NONE if seconds is None else format_seconds(seconds)


def time_with_interval(seconds: float | None, low: float | None, high: float | None) -> str:
    """``"17.2 [11.3, 20.7] ms"``: all three in the unit that suits the middle one."""
    if seconds is None or low is None or high is None:
        return time_text(seconds)
    scale, unit = next(((s, u) for limit, s, u in _SCALES if seconds >= limit), _SCALES[-1][1:])
    value, *edges = (_digits(number * scale) for number in (seconds, low, high))
    return f"{value} {unit}" if low == high else f"{value} [{', '.join(edges)}] {unit}"


def _digits(number: float) -> str:
    return f"{number:.3g}" if abs(number) < 1000 else f"{number:.0f}"


def size_text(count: float | None) -> str:
    """``"59 MB"``, or ``NONE``."""
    return NONE if count is None else format_bytes(count)


def unpriced(executor: str, profile: Profile) -> str:
    """Why moves by ``executor`` have no prices."""
    return (
        f"the profile measured {' and '.join(profile.executors)} only, so {executor} has no prices: calibrate with "
        f"--executor auto, which measures both"
    )


def profile_tables(profile: Profile) -> list[Table]:
    """What a calibration found: the fitted figures of each executor with their intervals, and the gates that it
    missed, if any."""
    figures = simple_table(
        ("" if profile.simulated is None else f"simulated ({profile.simulated}): ")
        + f"calibration of {_shape(profile.topology)}, {counted(len(set(profile.topology.nic)), 'NIC')}"
        + (" (quick)" if profile.quick else ""),
        [("figure", "left"), *((executor, "right") for executor in profile.executors)],
        caption="value [5 %, 95 %] of the bootstrap",
    )
    names = dict.fromkeys(name for found in profile.executors.values() for name in found.intervals)
    for name in names:
        cells = [found.intervals.get(name) for found in profile.executors.values()]
        figures.add_row(name, *(NONE if cell is None else _with_interval(name, cell) for cell in cells))
    passed = sum(gate.passed for gate in profile.gates)
    gates = simple_table(
        f"gates: {passed} of {len(profile.gates)} passed; missed:",
        [("gate", "left"), ("value", "right"), ("limit", "right")],
        caption="a missed gate says which prices are rough: close other programs, give more --budget, calibrate again",
    )
    for gate in profile.gates:
        if not gate.passed:
            gates.add_row(gate.name, NONE if gate.value is None else f"{gate.value:.3g}", f"{gate.limit:.3g}")
    return [figures, gates] if passed < len(profile.gates) else [figures]


def _shape(topology: Topology) -> str:
    """``"16 nodes x 8 ranks"``, or where nodes differ ``"4+2 ranks by node"``."""
    ranks = [len(topology.ranks_of(node)) for node in range(topology.nodes)]
    if len(set(ranks)) == 1:
        return f"{counted(len(ranks), 'node')} x {counted(ranks[0], 'rank')}"
    return f"{'+'.join(map(str, ranks))} ranks by node"


def _with_interval(name: str, triple: tuple[float, float, float]) -> str:
    value, low, high = (_figure(name, number) for number in triple)
    return value if low == high else f"{value} [{low}, {high}]"


def _figure(name: str, value: float) -> str:
    if name.endswith("_bytes_per_s"):
        return format_rate(value)
    if name.endswith("_s"):
        return format_seconds(value)
    return format_bytes(value) if name.endswith("_bytes") else f"{value:.3g}"

"""The report of a validation: figures with their bars, and what lies behind them, as tables for people and as Markdown.

``report = make_report(records, profile)``; ``report.lines`` and ``report.tables`` are printed, ``report.to_markdown()``
is kept, ``report.exit_code`` is the command's answer. Called by the parent or offline; no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from relaymeter.calibration.profiles import Profile
from relaymeter.errors import InputError
from relaymeter.harness.emit import NONE, simple_table, time_text, time_with_interval
from relaymeter.harness.validate_bars import MET, NO_MEANING, NONE_HERE, NOT_MEASURED, UNDECIDED, Bar, Figure
from relaymeter.harness.validate_candidates import contests, mixes, sides
from relaymeter.harness.validate_check import wrong_bits
from relaymeter.harness.validate_figures import executors_of, exit_code, figures
from relaymeter.records import load_json, plain
from relaymeter.units import counted, format_bytes
from relaymeter.validation_records import ValidationRecord

__all__ = ["Report", "make_report", "report_facts"]

#: Cases that the table of the largest errors lists.
_WORST = 12
#: The longest note that the table of figures shows, in characters.
_SHORT = 60


@dataclass(frozen=True, eq=False)
class Report:
    """What a validation says: lines for people, the gravest first, tables, and the exit code."""

    lines: tuple[str, ...]
    tables: tuple[Table, ...]
    exit_code: int
    figures: tuple[Figure, ...]
    simulated: str | None
    notes: tuple[str, ...] = ()
    nic_rates: Mapping[int, float] | None = None
    """What ``make_report`` was given beside the rows and the profile."""

    def to_markdown(self, plots: Sequence[str] = (), *, title: str = "Predicted against measured") -> str:
        """The report as a Markdown file. ``plots``: file names, relative to it."""
        parts = [f"# {title}" + (f" (simulated: {self.simulated})" if self.simulated else "")]
        parts.append("\n".join(f"- {_escaped(line)}" for line in self.lines))
        parts += [_markdown(table) for table in self.tables]
        parts += [f"![{name}]({name})" for name in plots]
        return "\n\n".join(parts) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: the figures, the verdict, and what ``report_facts`` reads back."""
        return {
            "simulated": self.simulated,
            "exit_code": self.exit_code,
            "lines": list(self.lines),
            "notes": list(self.notes),
            "nic_rates_bytes_per_s": None if self.nic_rates is None else plain(self.nic_rates),
            "figures": [figure.to_dict() for figure in self.figures],
        }


def report_facts(path: Path) -> dict[str, Any]:
    """``notes`` and ``nic_rates`` of a ``report.json`` that ``validate --results`` kept, so that ``make_report(rows,
    profile, **report_facts(path))`` is the report that the command gave. Raises InputError."""
    entry = load_json(path, "report")
    try:
        rates = entry["nic_rates_bytes_per_s"]
        return {
            "notes": tuple(str(note) for note in entry["notes"]),
            "nic_rates": None if rates is None else {int(nic): float(rate) for nic, rate in rates.items()},
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"report {path}: it has no notes and nic_rates_bytes_per_s as validate writes them") from error


def make_report(
    records: Sequence[ValidationRecord],
    profile: Profile,
    *,
    nic_rates: Mapping[int, float] | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """The report on ``records``, predicted from ``profile``. Pure.

    ``nic_rates``: true payload rate of each NIC in bytes per second, where the profile does not say it. ``notes``: what
    was looked for and could not be measured; see ``figures``. Raises InputError on rows of which no figure can be made.
    """
    found = figures(records, profile, nic_rates=nic_rates, notes=notes)
    simulated = next((row.simulated for row in records if row.simulated is not None), profile.simulated)
    code = exit_code(found, records)
    executors = executors_of(records, profile)
    tables = [_figures_table(found, executor, place == 0, simulated) for place, executor in enumerate(executors)]
    tables += [_errors_table(found, simulated), _five_line_table(found)]
    bad = {id(row) for row in wrong_bits(records)}
    sound = [row for row in records if id(row) not in bad]
    mine = [row for row in sound if row.executor == executors[0]]
    tables += [_moves_table(mine), _sides_table(sound), _mixes_table(sound), _worst_table(mine)]
    return Report(
        lines=(*_lines(found, records, executors[0], simulated), *_unsaid(notes, found)),
        tables=tuple(table for table in tables if table.row_count),
        exit_code=code,
        figures=found,
        simulated=simulated,
        notes=tuple(notes),
        nic_rates=nic_rates,
    )


def _lines(
    found: Sequence[Figure], records: Sequence[ValidationRecord], default: str, simulated: str | None
) -> list[str]:
    lines = [f"simulated: every time below is of the simulated cluster {simulated}"] if simulated else []
    for row in wrong_bits(records):
        bad = row.digest_total - row.digest_passed
        where = f"{row.kind} {row.name}" + (f" by {row.route}" if row.route else "")
        lines.append(
            f"WRONG BITS in {where} ({row.executor}): {bad} of {row.digest_total} digests differ; first: {row.mismatch}"
        )
    if not records:
        return [*lines, "nothing was measured"]
    if wrong := len(wrong_bits(records)):
        lines.append(
            f"{counted(wrong, 'case')} with wrong bits {'counts' if wrong == 1 else 'count'} in no other figure"
        )
    judged = [one for one in found if one.judged and one.bars]
    asked = [one for one in judged if one.status not in (NO_MEANING, NONE_HERE)]
    met = [one for one in asked if one.status == MET]
    others = counted(len(records), "case")
    lines.append(f"{len(met)} of {len(asked)} figures meet their bars ({default}, the default executor; {others})")
    for one in asked:
        if one.status == NOT_MEASURED:
            lines.append(f"not measured: {one.title.strip()}")
        elif one.status == UNDECIDED:
            lines.append(f"undecided: {one.title.strip()}: {one.note}")
        elif one.status != MET:
            short = "; ".join(f"{_bar_value(bar)}, {_limit(bar)} asked" for bar in one.bars if not bar.met)
            lines.append(f"missed: {one.title.strip()}: {short}" + (f" ({one.note})" if one.note else ""))
    lines += [f"{one.title.strip()}: {one.note or one.status}" for one in judged if one.status == NONE_HERE]
    return lines


def _unsaid(notes: Sequence[str], found: Sequence[Figure]) -> list[str]:
    """The notes that no figure's own line repeats."""
    said = " ".join(one.note for one in found if one.judged and one.status == NONE_HERE)
    return [note for note in dict.fromkeys(notes) if note not in said]


def _percent(value: float | None) -> str:
    return NONE if value is None else "inf" if value == float("inf") else f"{100 * value:.3g} %"


def _bar_value(bar: Bar) -> str:
    if bar.value is None:
        return f"{bar.statistic} not measured"
    return f"{bar.statistic} {bar.value:.0f}" if bar.number else f"{bar.statistic} {_percent(bar.value)}"


def _limit(bar: Bar) -> str:
    side = "at least" if bar.least else "at most"
    return f"{side} {bar.limit:.0f}" if bar.number else f"{side} {_percent(bar.limit)}"


def _figures_table(found: Sequence[Figure], executor: str, default: bool, simulated: str | None) -> Table:
    table = simple_table(
        f"figures, {executor}" + (" (the default executor)" if default else ", reported beside it")
        + (f", simulated: {simulated}" if simulated else ""),
        [
            ("figure", "left"), ("cases", "right"), ("hard", "right"), ("median", "right"), ("90 %", "right"),
            ("max", "right"), ("asked", "left"), ("verdict", "whole"),
        ],
        caption="errors: predicted over measured, less one, absolute; asked: the bar, and what was reached",
    )  # fmt: skip
    for one in found:
        if one.executor != executor:
            continue
        table.add_row(
            one.title,
            str(one.count),
            NONE if one.hard is None else str(one.hard),
            *(_percent(one.statistics.get(name)) for name in ("median", "p90", "max")),
            _asked(one) or NONE,
            one.status if one.judged else "beside" if one.bars else "",
        )
    return table


def _asked(one: Figure) -> str:
    """The bars of a figure and, but for columns of their own, what was reached: its note where that is short."""
    if one.status == NO_MEANING:
        return one.note
    if one.note and len(one.note) <= _SHORT and len(one.bars) == 1 and one.status != NOT_MEASURED:
        return f"{one.bars[0].statistic} {_limit(one.bars[0])}: {one.note}"
    texts = []
    for bar in one.bars:
        text = f"{bar.statistic} {_limit(bar).removeprefix('at most ')}"
        own = bar.statistic in ("median", "p90", "max")
        texts.append(text if own else f"{text}: {_bar_value(bar).removeprefix(bar.statistic).strip()}")
    return ", ".join(texts)


def _errors_table(found: Sequence[Figure], simulated: str | None) -> Table:
    table = simple_table(
        "how the errors lie" + (f", simulated: {simulated}" if simulated else ""),
        [
            ("figure", "left"), ("executor", "whole"), ("cases", "right"), ("bias", "right"), ("tau", "right"),
            ("in interval", "right"), ("scatter", "right"),
        ],
        caption=(
            "bias: median signed error; tau: Kendall's, of predicted and measured order; in interval: measured inside "
            "the predicted interval; scatter: half-width of the measured interval, median"
        ),
    )  # fmt: skip
    for one in found:
        tau, bias = one.statistics.get("tau"), one.statistics.get("bias")
        if one.count and not (tau is None and bias is None):
            table.add_row(
                one.title,
                one.executor,
                str(one.count),
                NONE if bias is None else f"{100 * bias:+.2g} %",
                NONE if tau is None else f"{tau:.3f}",
                _percent(one.statistics.get("inside")),
                _percent(one.statistics.get("scatter")),
            )
    return table


def _five_line_table(found: Sequence[Figure]) -> Table:
    table = simple_table(
        "hard cases: these prices beside the five-line model",
        [
            ("cases", "left"), ("executor", "whole"), ("count", "right"), ("median", "right"),
            ("five lines", "right"), ("90 %", "right"), ("five lines ", "right"), ("ratio", "right"),
        ],
        caption="five-line model: the largest load of a NIC or port over its rate, plus one constant",
    )  # fmt: skip
    for one in found:
        if one.key.startswith("five-line") and one.count:
            names = ("median", "five_line_median", "p90", "five_line_p90")
            ratio = one.statistics.get("ratio")
            table.add_row(
                one.key.removeprefix("five-line "),
                one.executor,
                str(one.count),
                *(_percent(one.statistics.get(name)) for name in names),
                NONE if ratio is None else f"{ratio:.2f}",
            )
    return table


def _moves_table(records: Sequence[ValidationRecord]) -> Table:
    table = simple_table(
        "moves: the chosen routes against the best measured",
        [
            ("move", "left"), ("bytes", "right"), ("hard", "left"), ("chosen", "left"), ("predicted", "right"),
            ("measured", "right"), ("best", "left"), ("measured ", "right"), ("regret", "right"), ("bound", "right"),
        ],
        caption="routes measured by moves of the default executor; bound: the least time of any route",
    )  # fmt: skip
    for case in contests(records):
        chosen, best = case.chosen, case.best
        table.add_row(
            case.name,
            format_bytes(best.bytes_total),
            ", ".join(best.hard) or NONE,
            NONE if chosen is None else str(chosen.route),
            time_text(None if chosen is None else chosen.predicted_s),
            time_text(None if chosen is None else chosen.measured_s),
            str(best.route),
            time_text(best.measured_s),
            _percent(case.regret),
            time_text(best.bound_s),
        )
    return table


def _sides_table(records: Sequence[ValidationRecord]) -> Table:
    table = simple_table(
        "thresholds: batches of equal blocks below, at and above",
        [
            ("threshold", "left"), ("executor", "whole"), ("fanout", "right"), ("bucket", "right"),
            ("elements", "right"), ("blocks of", "right"), ("side", "left"), ("direct", "right"),
            ("by the route", "right"), ("gain", "right"), ("verdict", "left"),
        ],
        caption="min_relay is about relay, min_split about spread; elements: threshold [5 %, 95 %]; gain: of direct",
    )  # fmt: skip
    for one in sides(records):
        table.add_row(
            one.threshold,
            one.executor,
            str(one.fanout),
            NONE if one.bucket_bytes is None else format_bytes(one.bucket_bytes),
            "never" if one.limit is None else f"{one.limit} [{one.low}, {'never' if one.high is None else one.high}]",
            str(one.elements),
            one.side,
            time_text(one.direct.measured_s),
            time_text(one.other.measured_s),
            f"{100 * one.gain:+.2g} %",
            one.verdict,
        )
    return table


def _mixes_table(records: Sequence[ValidationRecord]) -> Table:
    table = simple_table(
        "mixes of routes against the best uniform choice",
        [
            ("move", "left"), ("executor", "whole"), ("mixed", "right"), ("best uniform", "left"),
            ("measured", "right"), ("gain", "right"), ("wins", "left"),
        ],
        caption="wins: by more than the intervals, against every uniform choice",
    )  # fmt: skip
    for one in mixes(records):
        best = one.best
        table.add_row(
            one.name,
            one.executor,
            time_with_interval(one.mixed.measured_s, one.mixed.measured_low_s, one.mixed.measured_high_s),
            str(best.route),
            time_with_interval(best.measured_s, best.measured_low_s, best.measured_high_s),
            f"{100 * one.gain:+.2g} %",
            "yes" if one.wins else "no",
        )
    return table


def _worst_table(records: Sequence[ValidationRecord]) -> Table:
    table = simple_table(
        "the largest errors, default executor",
        [
            ("case", "left"), ("route", "left"), ("hard", "left"), ("predicted", "right"), ("measured", "right"),
            ("error", "right"), ("five lines", "right"),
        ],
        caption="intervals: of the prediction, and of the measured median",
    )  # fmt: skip
    for row in sorted(records, key=lambda row: -abs(row.error))[:_WORST]:
        theirs = row.baseline_error
        table.add_row(
            f"{row.kind} {row.name}",
            row.route or NONE,
            ", ".join(row.hard) or NONE,
            time_with_interval(row.predicted_s, row.predicted_low_s, row.predicted_high_s),
            time_with_interval(row.measured_s, row.measured_low_s, row.measured_high_s),
            f"{100 * row.error:+.3g} %",
            NONE if theirs is None else f"{100 * theirs:+.3g} %",
        )
    return table


def _markdown(table: Table) -> str:
    """A table as Markdown, with its title above and its caption below."""
    columns = [[_escaped(str(text)) for text in column.cells] for column in table.columns]
    lines = [f"## {table.title}", ""]
    lines.append("| " + " | ".join(_escaped(str(column.header).strip()) for column in table.columns) + " |")
    lines.append("|" + "|".join("---:" if column.justify == "right" else "---" for column in table.columns) + "|")
    lines += ["| " + " | ".join(cells) + " |" for cells in zip(*columns, strict=True)]
    return "\n".join([*lines, *(["", str(table.caption)] if table.caption else [])])


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")

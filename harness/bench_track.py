"""Benchmark of tracking's verdicts: false alarms and detections on synthetic launches, beside two common gates.

``track(say)`` gives the figures. Nothing is timed: launches are drawn, with a fixed seed, as a launch-level drift
(log-normal, half its variance common to all rows of a launch, as a busy machine's is) and noise of each sample, and go
through ``check_ab``, ``next_launches`` and ``check_history`` as real ones do. Beside them: Welch's t-test over
the pooled samples of all launches, p < .01; and Mann-Whitney's test over the launches' medians, p < .01 and a ratio
above 1.05, row by row. An alarm is a slow-down that is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.table import Table

from relaymeter.harness.bench_report import Figure, Found, Say, plain_table
from relaymeter.harness.track.judge import check_ab, check_history, next_launches
from relaymeter.harness.track.records import CaseRecord, LaunchRecord
from relaymeter.harness.track.verdicts import Check
from relaymeter.units import counted

__all__ = ["draw_launches", "track"]

_PART = "track"
_METRICS = ("move_s", "pack_s", "communicate_s", "unpack_s")
_CASES = 5
_SAMPLES = 15
_SAMPLE_NOISE = 0.03
_SHARED = 0.5
_RUNS = 200
_COMMITS = 12
_DAYS, _SLOW_DAYS, _SLOWER = 30, 0.25, 1.2
_DRIFTS = (0.03, 0.05)
_LAUNCHES = (5, 8, 12)
_CHANGES = (1.0, 1.1, 1.2)
_ALARMS_PER_ROW = 0.01
_ALARMS_PER_RUN = 0.02
_CAUGHT = 0.88
#: Launches a side that should do, by drift.
_ENOUGH = {0.03: 5, 0.05: 12}

Times = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class _Rate:
    """How often something was said of rows, and of whole runs."""

    runs: int = 0
    rows: int = 0
    alarms: int = 0
    runs_with_alarm: int = 0
    changed: int = 0
    caught: int = 0
    undecided: int = 0
    launches: list[int] = field(default_factory=list)

    def add(
        self, slower: Sequence[bool], changed: Sequence[bool], *, undecided: bool = False, launches: int = 0
    ) -> None:
        false = sum(said and not real for said, real in zip(slower, changed, strict=True))
        self.runs += 1
        self.rows += len(changed) - sum(changed)
        self.alarms += false
        self.runs_with_alarm += false > 0
        self.changed += sum(changed)
        self.caught += sum(said and real for said, real in zip(slower, changed, strict=True))
        self.undecided += undecided
        self.launches.append(launches)


def draw_launches(rng: np.random.Generator, launches: int, rows: int, drift: float, *, slower: float = 1.0) -> Times:
    """Samples of ``rows`` times in ``launches`` launches, seconds, of shape (launches, rows, samples). ``drift``:
    standard deviation of a launch's logarithm. The first row is ``slower`` times slower. Pure but for ``rng``."""
    common = rng.normal(size=(launches, 1, 1)) * np.sqrt(_SHARED)
    own = rng.normal(size=(launches, rows, 1)) * np.sqrt(1 - _SHARED)
    noise = rng.normal(size=(launches, rows, _SAMPLES)) * _SAMPLE_NOISE
    scale = np.ones((1, rows, 1)) * 0.01
    scale[0, 0, 0] *= slower
    found: Times = scale * np.exp(drift * (common + own) + noise)
    return found


def _records(times: Times, commit: str) -> list[LaunchRecord]:
    """Launches whose rows are the metrics of case after case."""
    found = []
    for number, rows in enumerate(times, start=1):
        cases = [
            CaseRecord(
                name=f"case {at // len(_METRICS)}",
                exact={"messages": 12, "digest": "00"},
                samples={
                    metric: tuple(map(float, values))
                    for metric, values in zip(_METRICS, rows[at : at + len(_METRICS)], strict=False)
                },
                digest_passed=1,
                digest_total=1,
            )
            for at in range(0, len(rows), len(_METRICS))
        ]
        found.append(
            LaunchRecord(
                utc="2026-01-01T00:00:00Z", session_id="drawn", launch=number, machine_id="drawn", config_hash="drawn",
                suite="drawn", version="0", commit=commit * 40, commit_utc=None, dirty=False, cases=tuple(cases),
            )
        )  # fmt: skip
    return found


def _said(check: Check) -> tuple[list[bool], bool]:
    """Of every timed row whether it is a regression; and whether the run is undecided."""
    rows = [row for row in check.rows if row.metric in _METRICS]
    return [row.verdict == "regression" for row in rows], check.exit_code(warn_only=True) != 0


def _welch(before: Times, after: Times) -> list[bool]:
    from scipy import stats

    rows = before.shape[1]
    old, new = (times.transpose(1, 0, 2).reshape(rows, -1) for times in (before, after))
    p_values = stats.ttest_ind(new, old, axis=1, equal_var=False).pvalue
    return list((p_values < 0.01) & (new.mean(axis=1) > old.mean(axis=1)))


def _mann_whitney(before: Times, after: Times) -> list[bool]:
    from scipy import stats

    old, new = np.median(before, axis=2), np.median(after, axis=2)
    p_values = stats.mannwhitneyu(new, old, axis=0, method="exact").pvalue
    return list((p_values < 0.01) & (np.median(new, axis=0) / np.median(old, axis=0) > 1.05))


_Row = tuple[str, float, float, int, str, _Rate]


def _fixed(say: Say, runs: int, rows: int) -> list[_Row]:
    """Checks of a number of launches that was fixed before, by every gate."""
    found = []
    gates: dict[str, Callable[[Times, Times], list[bool]]] = {"pooled Welch": _welch, "Mann-Whitney": _mann_whitney}
    for drift in _DRIFTS:
        for change in _CHANGES:
            for launches in _LAUNCHES:
                say(f"{counted(rows, 'row')}, {drift:.0%} drift, {change:.2f}x, {launches} launches: {runs} runs")
                rng = np.random.default_rng([rows, launches, round(100 * drift), round(100 * change)])
                rates = {name: _Rate() for name in ("check", *gates)}
                changed = [change > 1 and row == 0 for row in range(rows)]
                for _ in range(runs):
                    before = draw_launches(rng, launches, rows, drift)
                    after = draw_launches(rng, launches, rows, drift, slower=change)
                    slower, undecided = _said(
                        check_ab(_records(before, "a"), _records(after, "b"), labels=("base", "new"))
                    )
                    rates["check"].add(slower, changed, undecided=undecided, launches=launches)
                    for name, gate in gates.items():
                        rates[name].add(gate(before, after), changed, launches=launches)
                found += [(f"{launches}", drift, change, rows, name, rate) for name, rate in rates.items()]
    return found


def _growing(say: Say, runs: int, rows: int) -> list[_Row]:
    """A/B that take more launches as ``next_launches`` asks."""
    found = []
    for drift in _DRIFTS:
        for change in _CHANGES:
            say(f"{counted(rows, 'row')}, {drift:.0%} drift, {change:.2f}x, launches as needed: {runs} runs")
            rng = np.random.default_rng([rows, 99, round(100 * drift), round(100 * change)])
            rate = _Rate()
            for _ in range(runs):
                before = _records(draw_launches(rng, 12, rows, drift), "a")
                after = _records(draw_launches(rng, 12, rows, drift, slower=change), "b")
                taken = 0
                while more := next_launches(before[:taken], after[:taken], 5):
                    taken += more
                slower, undecided = _said(check_ab(before[:taken], after[:taken], labels=("base", "new")))
                changed = [change > 1 and row == 0 for row in range(rows)]
                rate.add(slower, changed, undecided=undecided, launches=taken)
            found.append(("as needed", drift, change, rows, "check", rate))
    return found


def _historic(say: Say, runs: int, rows: int) -> list[_Row]:
    """Checks of the newest of some commits, 5 launches each, against their history."""
    found = []
    for drift in _DRIFTS:
        for change in _CHANGES:
            say(f"{counted(rows, 'row')}, {drift:.0%} drift, {change:.2f}x, {_COMMITS} commits: {runs} runs")
            rng = np.random.default_rng([rows, 77, round(100 * drift), round(100 * change)])
            rate = _Rate()
            for _ in range(runs):
                launches: list[LaunchRecord] = []
                for commit in range(_COMMITS):
                    slower_now = change if commit == _COMMITS - 1 else 1.0
                    launches += _records(draw_launches(rng, 5, rows, drift, slower=slower_now), f"{commit:x}")
                slower, undecided = _said(check_history(launches, against="history"))
                changed = [change > 1 and row == 0 for row in range(rows)]
                rate.add(slower, changed, undecided=undecided, launches=5)
            found.append((f"history of {_COMMITS}", drift, change, rows, "check", rate))
    return found


def _slow_days(say: Say, runs: int, rows: int) -> list[_Row]:
    """Checks of the newest of some commits that are all alike, launched on days of which some are slower."""
    say(f"{counted(rows, 'row')}, {_DRIFTS[0]:.0%} drift, {_DAYS} commits, slow days: {runs} runs")
    rng = np.random.default_rng([rows, 55])
    rate = _Rate()
    for _ in range(runs):
        launches: list[LaunchRecord] = []
        for day in range(_DAYS):
            slower = _SLOWER if rng.random() < _SLOW_DAYS else 1.0
            launches += _records(slower * draw_launches(rng, 5, rows, _DRIFTS[0]), f"{day:02x}")
        said, undecided = _said(check_history(launches, against="history"))
        rate.add(said, [False] * rows, undecided=undecided, launches=5)
    label = f"history of {_DAYS}, {_SLOW_DAYS:.0%} of days {_SLOWER - 1:.0%} slower"
    return [(label, _DRIFTS[0], 1.0, rows, "check", rate)]


def track(say: Say, tiny: bool = False) -> Found:
    """Draw unchanged and changed launches and count what the gates say of them. ``tiny``: few runs."""
    runs = 4 if tiny else _RUNS
    wide = _CASES * len(_METRICS)
    found = [*_fixed(say, runs, 1), *_fixed(say, runs, wide), *_growing(say, runs, wide), *_historic(say, runs, wide)]
    days = [*_slow_days(say, runs, 1), *_slow_days(say, runs, wide)]
    return _figures([*found, *days]), [_table(found)]


def _figures(found: Sequence[_Row]) -> list[Figure]:
    by_key = {(launches, drift, change, rows, gate): rate for launches, drift, change, rows, gate, rate in found}
    figures = []
    for (launches, drift, change, rows, gate), rate in by_key.items():
        if gate != "check":
            continue
        naive, plain = (
            by_key.get((launches, drift, change, rows, other)) for other in ("pooled Welch", "Mann-Whitney")
        )
        enough = launches in (str(_ENOUGH[drift]), "as needed", f"history of {_COMMITS}")
        if change == 1:
            value, what = rate.runs_with_alarm / rate.runs, "false alarms"
            bar: float | None = _ALARMS_PER_ROW if rows == 1 and "days" not in launches else _ALARMS_PER_RUN
            counts = [other.runs_with_alarm / other.runs if other else None for other in (naive, plain)]
        else:
            value, what = rate.caught / rate.changed, f"{change - 1:+.0%} caught"
            bar = (_CAUGHT if change < 1.15 else 1.0) if enough and (drift < 0.04 or rows == 1) else None
            counts = [other.caught / other.changed if other else None for other in (naive, plain)]
        beside = ", ".join(
            f"{name} {share:.1%}"
            for name, share in zip(("pooled", "Mann-Whitney"), counts, strict=True)
            if share is not None
        )
        suffix = " launches" if launches.isdigit() else ""
        figures.append(
            Figure(
                part=_PART,
                name=f"{what}, {drift:.0%} drift, {launches}{suffix}, {counted(rows, 'row')}",
                value=value,
                unit="ratio",
                bar=bar,
                at_least=change > 1,
                ours=f"{value:.1%}",
                peer=beside,
                samples={
                    "runs": rate.runs,
                    "rows": rate.rows,
                    "alarms": rate.alarms,
                    "runs_with_alarm": rate.runs_with_alarm,
                    "changed": rate.changed,
                    "caught": rate.caught,
                    "undecided": rate.undecided,
                    "mean_launches": float(np.mean(rate.launches)),
                },
            )
        )
    return figures


def _table(found: Sequence[_Row]) -> Table:
    """Every gate in one table: alarms of unchanged rows and runs, what is caught, how many runs stay undecided."""
    table = plain_table(
        "alarms in unchanged launches, and changes caught",
        [("drift", "right"), ("launches", "left"), ("rows", "right"), ("gate", "left"), ("alarms/row", "right"),
         ("alarms/run", "right"), ("undecided", "right"), ("+10 %", "right"), ("+20 %", "right"), ("mean", "right")],
        caption="mean: launches a side in unchanged runs; undecided: unchanged runs that end inconclusive",
    )  # fmt: skip
    rates = {(drift, launches, rows, gate, change): rate for launches, drift, change, rows, gate, rate in found}
    for drift, launches, rows, gate in dict.fromkeys(key[:4] for key in rates):
        same, ten, twenty = (rates[drift, launches, rows, gate, change] for change in _CHANGES)
        table.add_row(
            f"{drift:.0%}", launches, str(rows), gate, f"{same.alarms / same.rows:.2%}",
            f"{same.runs_with_alarm / same.runs:.1%}", f"{same.undecided / same.runs:.1%}" if gate == "check" else "-",
            f"{ten.caught / ten.changed:.1%}", f"{twenty.caught / twenty.changed:.1%}",
            f"{np.mean(same.launches):.1f}",
        )  # fmt: skip
    return table

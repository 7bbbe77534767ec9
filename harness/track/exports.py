"""Measurements as other programs read them: ``action_benchmark(check)``, ``hud(check, launches)``,
``otava_csv(launches)``. Pure.

Cases with wrong bits are in none of them: a move that lost bits may well be a fast one. Numbers are finite and the JSON
is strict.

Apache Otava reads the CSV with a configuration such as ``otava_config(launches, "track.csv")`` writes it::

    tests:
      "ci":
        type: csv
        file: "track.csv"
        time_column: time
        attributes: [commit, version, session, launch]
        metrics:
          "weights/move_s":
            column: "weights/move_s"
            direction: -1
            scale: 1

and is run as ``OTAVA_CONFIG=otava.yaml otava analyze ci --since 2000-01-01``. It exits 0 whatever it finds.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from relaymeter import __version__
from relaymeter.harness.track.records import CaseRecord, LaunchRecord, Metric, metric_of
from relaymeter.harness.track.row_texts import number, ratio_text, stamps, visible
from relaymeter.harness.track.verdicts import Check, Row
from relaymeter.records import dump_json

__all__ = ["action_benchmark", "hud", "otava_config", "otava_csv", "untimed"]

_ATTRIBUTES = ("commit", "version", "session", "launch")
#: What a spreadsheet takes for the beginning of a formula.
_FORMULA = ("=", "+", "-", "@")


def action_benchmark(check: Check) -> str:
    """The JSON of github-action-benchmark's tool ``customSmallerIsBetter``: an array of ``name``, ``unit``, ``value``,
    ``range``, ``extra``, a row each.

    One file, one direction: the action takes every entry of a file for better where it is smaller. So a rate is
    written as the seconds that a byte takes (``.../moved_bytes_per_s as s_per_byte``, unit ``s/B``): a bandwidth that
    rises from 100 to 120 falls here, and raises no alarm. Counts and bytes are in it as they are: the action alarms
    where they grow, as the check does, which fails also where ``bytes_total`` shrinks. A digest is no number and is
    left out, and so is a value of 0 that would have to be turned round.
    """
    wrong = _wrong_cases(check)
    found = []
    for row in check.rows:
        value = number(row.after)
        if value is None or row.case in wrong:
            continue
        metric = metric_of(row.metric)
        name, unit = f"{check.suite}/{row.case}/{row.metric}", metric.unit or "count"
        if metric.better == "higher":
            if value <= 0:
                continue
            name, unit, value = f"{name} as s_per_byte", "s/B", 1.0 / value
        entry = {"name": _action_name(name), "unit": unit, "value": value}
        spread = _half_width(row, metric)
        if spread is not None:
            entry["range"] = f"\u00b1 {spread:.6f}" if spread >= 1e-3 else f"\u00b1 {spread:.3e}"
        found.append({**entry, "extra": "\n".join([f"{row.verdict}: {visible(row.text)}", *stamps(check)])})
    return dump_json(found)


def _wrong_cases(check: Check) -> set[str]:
    return {row.case for row in check.rows if row.verdict == "wrong bits"}


def _action_name(name: str) -> str:
    """The action puts names between backticks into a table."""
    return visible(name).replace("`", "\\x60").replace("|", "\\x7c")


def _half_width(row: Row, metric: Metric) -> float | None:
    """Half the 95 % interval of what is written, from that of the ratio, which compares seconds, also of rates."""
    before, low, high = number(row.before), number(row.ratio_low), number(row.ratio_high)
    if not before or low is None or high is None:
        return None
    return (high - low) / 2 * (1.0 / before if metric.better == "higher" else before)


def hud(check: Check, launches_after: Sequence[LaunchRecord]) -> str:
    """The JSON of PyTorch's benchmark database, version 3 (``upload-benchmark-results``): a list of records, one for
    each number of each case, with a value for each of ``launches_after``.

    ``benchmark.name`` is ``relaymeter``, ``model.name`` the case, ``model.origins`` the suite. Seconds are written as
    microseconds, ``move_s`` as ``move_us``: the dashboard cuts averages to two decimals. Its values are 32-bit floats;
    of a whole number above 2^24 ``metric.extra_info.exact`` has every digit. ``target_value`` is the base's. All values
    of ``extra_info`` are text, as the database wants them; repository, commit and workflow are added by the uploader.
    A digest is no number and is left out.
    """
    rows = {(row.case, row.metric): row for row in check.rows}
    wrong = _wrong_cases(check)
    names: dict[tuple[str, str], list[float | int]] = {}
    for launch in launches_after:
        for case in launch.cases:
            if not case.ok or case.name in wrong:
                continue
            for metric, value in _values(case).items():
                names.setdefault((case.name, metric), []).append(value)
    records = [_hud_record(check, key, values, rows.get(key)) for key, values in names.items()]
    return dump_json(records)


def _hud_record(check: Check, key: tuple[str, str], values: list[float | int], row: Row | None) -> dict[str, Any]:
    case, name = key
    seconds = metric_of(name).unit == "s"
    scale = 1e6 if seconds else 1
    extra = {"unit": "us" if seconds else metric_of(name).unit, "better": metric_of(name).better}
    if all(isinstance(value, int) for value in values):
        extra["exact"] = ",".join(str(value) for value in dict.fromkeys(values))
    metric: dict[str, Any] = {
        "name": f"{name[:-2]}_us" if seconds else name,
        "benchmark_values": [value * scale for value in values],
    }
    if row is not None:
        extra |= {"verdict": row.verdict, "ratio": ratio_text(row), "text": visible(row.text)}
        before = number(row.before)
        if before is not None:
            metric["target_value"] = before * scale
    side = check.after
    about = {
        "suite": visible(check.suite),
        "kind": check.kind,
        "machine_id": visible(side.machine_id),
        "config_hash": visible(side.config_hash),
        "version": visible(side.version),
        "commit": visible(side.commit or ""),
        "mismatch": ", ".join(map(visible, check.mismatch)),
        "relaymeter": __version__,
    }
    return {
        "benchmark": {"name": "relaymeter", "mode": "relayout", "dtype": "", "extra_info": about},
        "model": {"name": visible(case), "type": "move", "origins": [visible(check.suite)]},
        "metric": {**metric, "extra_info": extra},
    }


def untimed(launches: Sequence[LaunchRecord]) -> list[LaunchRecord]:
    """The launches without their times."""
    return [replace(launch, cases=tuple(replace(case, samples={}) for case in launch.cases)) for launch in launches]


def _values(case: CaseRecord) -> dict[str, float | int]:
    """Every number of a case: medians of the timed metrics, and the exact ones but for texts."""
    medians = {name: case.median(name) for name in case.samples}
    found = {name: number(value) for name, value in {**medians, **case.exact}.items()}
    return {name: value for name, value in found.items() if value is not None}


def otava_csv(
    launches: Sequence[LaunchRecord], judged: LaunchRecord | None = None, mismatch: Sequence[str] = ()
) -> str:
    """The CSV of Apache Otava's importer: a line for each launch, in the order of time, columns ``time``, ``commit``,
    ``version``, ``session``, ``launch``, then ``CASE/METRIC`` with the median of its repeats or its exact number.

    For a history: two builds launched by turns are no series. Otava knows one series a file and takes no gap. So the
    lines are those of the suite, machine and configuration of ``judged`` (by default the newest launch), and of them
    the ones that measured all that the newest did, with every bit in place. ``mismatch``: in what the sides of the
    check differ; where they do, each line has it in a column of that name. A name or text that a spreadsheet would take
    for a formula begins with an escape: ``\\x3dSUM``.
    """
    found = _series(launches, judged)
    stamp = [_cell(" ".join(mismatch))] if mismatch else []
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    columns = list(_columns(found[-1])) if found else []
    writer.writerow(["time", *_ATTRIBUTES, *(["mismatch"] if stamp else []), *map(_cell, columns)])
    for launch in found:
        values = _columns(launch)
        commit = (launch.commit or "") + ("-dirty" if launch.dirty else "")
        about = [launch.utc, commit, launch.version, launch.session_id]
        writer.writerow([*map(_cell, about), launch.launch, *stamp, *(repr(values[name]) for name in columns)])
    return stream.getvalue()


def _cell(text: str) -> str:
    """A text as a cell, which no spreadsheet calculates."""
    found = visible(text)
    return f"\\x{ord(found[0]):02x}{found[1:]}" if found.startswith(_FORMULA) else found


def otava_config(launches: Sequence[LaunchRecord], csv_name: str) -> str:
    """An ``otava.yaml`` for what ``otava_csv`` wrote to the file ``csv_name``: the test's name is the suite's."""
    found = _series(launches)
    suite = visible(found[-1].suite) if found else "track"
    lines = ["tests:", f"  {json.dumps(suite)}:", "    type: csv", f"    file: {json.dumps(csv_name)}",
             "    time_column: time", f"    attributes: [{', '.join(_ATTRIBUTES)}]", "    metrics:"]  # fmt: skip
    for column in _columns(found[-1]) if found else {}:
        better = metric_of(column.rpartition("/")[2]).better
        name = json.dumps(_cell(column))
        lines += [f"      {name}:", f"        column: {name}", f"        direction: {1 if better == 'higher' else -1}"]
        lines.append("        scale: 1")
    return "\n".join(lines) + "\n"


def _series(launches: Sequence[LaunchRecord], judged: LaunchRecord | None = None) -> list[LaunchRecord]:
    """Of one suite, machine and configuration, whole, by time."""
    whole = [launch for launch in launches if launch.cases and all(case.ok for case in launch.cases)]
    whole.sort(key=lambda launch: launch.utc)
    whole = [launch for launch in whole if _setting(launch) == _setting(judged or whole[-1])]
    columns = set(_columns(whole[-1])) if whole else set()
    return [launch for launch in whole if columns <= set(_columns(launch))]


def _setting(launch: LaunchRecord) -> tuple[str, str, str]:
    return launch.suite, launch.machine_id, launch.config_hash


def _columns(launch: LaunchRecord) -> dict[str, float | int]:
    return {f"{case.name}/{name}": value for case in launch.cases for name, value in _values(case).items()}

"""What a launch of a suite measured: one line of the history. No torch import.

``LaunchRecord(...).to_dict()`` is one line; ``LaunchRecord.from_dict(entry)`` reads it back. A launch, not an
iteration, is the unit of evidence: what differs between two launches of one build is what a verdict has to see through.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any, Literal

from relaymeter.errors import InputError
from relaymeter.records import plain

__all__ = ["HISTORY_SCHEMA_VERSION", "CaseRecord", "LaunchRecord", "Metric", "metric_of"]

#: Version of a line of the history. Readers refuse any other.
HISTORY_SCHEMA_VERSION = 1
_KIND = "track-launch"
#: Whole numbers from here on are no count of anything, and no float holds the largest of them.
_TOO_LARGE = 1 << 63
#: Samples lie between these, so that every quotient of two is a number.
_LEAST, _MOST = 1e-100, 1e100

Better = Literal["lower", "higher", "equal"]


@dataclass(frozen=True)
class Metric:
    """What a number of a case means: its unit, and which way is better; ``equal``: it repeats exactly."""

    name: str
    unit: str
    better: Better
    fewer_is_better: bool = True
    """Of a count that repeats exactly; False: it is part of what was asked for, and fewer is a fault too."""


_METRICS = {
    metric.name: metric
    for metric in (
        Metric("move_s", "s", "lower"),
        Metric("pack_s", "s", "lower"),
        Metric("communicate_s", "s", "lower"),
        Metric("unpack_s", "s", "lower"),
        Metric("plan_s", "s", "lower"),
        Metric("digest_s", "s", "lower"),
        Metric("moved_bytes_per_s", "B/s", "higher"),
        Metric("bytes_total", "B", "equal", fewer_is_better=False),
        Metric("bytes_cross_node", "B", "equal"),
        Metric("bytes_in_node", "B", "equal"),
        Metric("messages", "", "equal"),
        Metric("segments", "", "equal"),
        Metric("rounds", "", "equal"),
        Metric("digest", "", "equal"),
    )
}


def _check_members(entry: Mapping[str, Any], names: set[str], what: str) -> None:
    if not isinstance(entry, Mapping):
        raise InputError(f"{what}: an object was expected")
    if set(entry) != names:
        raise InputError(f"{what}: {', '.join(sorted(map(str, set(entry) ^ names)))} missing or unknown")


def _short(value: Any) -> str:
    """The beginning of a value, for an error; ``repr`` of a whole number of thousands of digits raises."""
    if isinstance(value, int) and abs(value) >= _TOO_LARGE:
        return f"a whole number of {value.bit_length()} bits"
    text = ", ".join(map(_short, value[:5])) if isinstance(value, list) else repr(value)
    return text if len(text) <= 100 else f"{text[:99]}\u2026"


def _is_utc(text: str) -> bool:
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).utcoffset() == timedelta(0)
    except ValueError:
        return False


def metric_of(name: str) -> Metric:
    """The metric of this name. Raises InputError listing the known ones."""
    if name not in _METRICS:
        raise InputError(f"metric {name!r} is not one of {', '.join(_METRICS)}")
    return _METRICS[name]


@dataclass(frozen=True, kw_only=True)
class CaseRecord:
    """One case of the suite in one launch."""

    name: str
    exact: Mapping[str, int | str]
    """Metrics that repeat exactly, by name: bytes, messages, segments, rounds, ``digest`` (hex) of what arrived."""
    samples: Mapping[str, tuple[float, ...]]
    """Every measured repeat of each timed metric, in the order in which they were taken, warm-ups left out."""
    digest_passed: int
    digest_total: int

    def __post_init__(self) -> None:
        for name in (*self.exact, *self.samples):
            if (metric_of(name).better == "equal") != (name in self.exact):
                raise InputError(f"case {self.name}: {name} is {'exact' if name not in self.exact else 'timed'}")
        if not 0 <= self.digest_passed <= self.digest_total:
            raise InputError(f"case {self.name}: {self.digest_passed} of {self.digest_total} digests")

    @property
    def ok(self) -> bool:
        """Whether every bit arrived."""
        return self.digest_passed == self.digest_total > 0

    def median(self, metric: str) -> float | None:
        """Median of the repeats, in the metric's unit; None where there is none."""
        values = self.samples.get(metric)
        return statistics.median(values) if values else None

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> CaseRecord:
        """The case that ``plain`` wrote. Raises InputError naming what is missing, unknown or of another type."""
        _check_members(entry, {field.name for field in fields(cls)}, "case")
        name, exact, samples = entry["name"], entry["exact"], entry["samples"]
        if not isinstance(name, str) or not isinstance(exact, dict) or not isinstance(samples, dict):
            raise InputError("case: name is text, exact and samples are objects")
        for metric, value in exact.items():
            if metric == "digest" and not isinstance(value, str):
                raise InputError(f"case {name}: {metric} is {_short(value)}: text was expected")
            if metric != "digest" and (type(value) is not int or not 0 <= value < _TOO_LARGE):
                raise InputError(f"case {name}: {metric} is {_short(value)}: a whole number below 2^63 was expected")
        for metric, values in samples.items():
            good = isinstance(values, list) and all(
                isinstance(value, (int, float)) and not isinstance(value, bool) and _LEAST <= value <= _MOST
                for value in values
            )
            if not good:
                limits = f"{_LEAST:g} to {_MOST:g}"
                raise InputError(f"case {name}: {metric} is {_short(values)}: numbers from {limits} were expected")
        for field in ("digest_passed", "digest_total"):
            if isinstance(entry[field], bool) or not isinstance(entry[field], int) or abs(entry[field]) >= _TOO_LARGE:
                raise InputError(f"case {name}: {field} is {_short(entry[field])}: a whole number was expected")
        return cls(
            name=name,
            exact=dict(exact),
            samples={metric: tuple(float(value) for value in values) for metric, values in samples.items()},
            digest_passed=entry["digest_passed"],
            digest_total=entry["digest_total"],
        )


@dataclass(frozen=True, kw_only=True)
class LaunchRecord:
    """One launch: fresh processes that measured every case of a suite once round."""

    schema_version: int = HISTORY_SCHEMA_VERSION
    kind: str = _KIND
    utc: str
    """When the launch began, ISO 8601 in UTC, ending in ``Z``."""
    session_id: str
    """Shared by the launches of one ``track run``."""
    launch: int
    """Number of the launch in its session, from 1."""
    machine_id: str
    """Hash of versions, processor, memory and kernel: times of different ones are not compared."""
    config_hash: str
    """Hash of the suite's content and of how the ranks were started."""
    suite: str
    version: str
    """Of this package."""
    commit: str | None
    """Full revision of what was measured; None outside a checkout."""
    commit_utc: str | None
    """When that was committed, as ``utc``."""
    dirty: bool
    """Whether files differed from the commit."""
    cases: tuple[CaseRecord, ...]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict with every field, in order."""
        found = {field.name: plain(getattr(self, field.name)) for field in fields(self) if field.name != "cases"}
        cases = [
            {
                "name": case.name,
                "exact": plain(case.exact),
                "samples": {metric: list(values) for metric, values in case.samples.items()},
                "digest_passed": case.digest_passed,
                "digest_total": case.digest_total,
            }
            for case in self.cases
        ]
        return {**found, "cases": cases}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> LaunchRecord:
        """The launch that ``to_dict`` wrote. Raises InputError for another schema version or kind and for missing,
        unknown or wrongly typed fields."""
        version = entry.get("schema_version") if isinstance(entry, Mapping) else None
        if version != HISTORY_SCHEMA_VERSION:
            raise InputError(f"schema_version {version!r}: this version reads {HISTORY_SCHEMA_VERSION}")
        _check_members(entry, {field.name for field in fields(cls)}, "launch")
        if entry["kind"] != _KIND:
            raise InputError(f"record of kind {entry['kind']!r}: the history holds {_KIND}")
        for name in ("utc", "session_id", "machine_id", "config_hash", "suite", "version", "commit", "commit_utc"):
            value = entry[name]
            if not isinstance(value, str) and not (value is None and name.startswith("commit")):
                raise InputError(f"{name} is {value!r}: text was expected")
            if name.endswith("utc") and value is not None and not _is_utc(value):
                raise InputError(f"{name} is {_short(value)}: a time in UTC such as 2026-01-31T12:00:00Z was expected")
        launch, dirty = entry["launch"], entry["dirty"]
        if isinstance(launch, bool) or not isinstance(launch, int) or not 1 <= launch < _TOO_LARGE:
            raise InputError(f"launch is {_short(launch)}: a whole number from 1 was expected")
        if not isinstance(dirty, bool):
            raise InputError(f"dirty is {dirty!r}: true or false was expected")
        if not isinstance(entry["cases"], list):
            raise InputError("cases is no list")
        cases = tuple(CaseRecord.from_dict(case) for case in entry["cases"])
        names = [case.name for case in cases]
        if len(set(names)) != len(names):
            raise InputError(f"a case occurs twice among {', '.join(names)}")
        return cls(**{**entry, "cases": cases})

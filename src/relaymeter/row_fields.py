"""Reading a row strictly: every field there, each of the type and the values that the record class says.

``record_of(MoveRecord, entry)`` makes a record of a JSON object. A class says by ``VALUES`` what its fields may hold
beside their types, and by a method ``check()`` how they must fit each other, in the words of ``expect``. Pure.
"""

from __future__ import annotations

import json
import math
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from relaymeter.errors import InputError

__all__ = ["Values", "check_count", "check_interval", "check_values", "check_verdict", "expect", "record_of", "shown"]

_Record = TypeVar("_Record")
#: Whole numbers have 64 bits, as in the files for pandas.
_LARGEST = 2**63 - 1
_CALLED = {bool: "true or false", int: "a whole number of 64 bits", float: "a number", str: "a text"}
_SHOWN = 60
#: ISO 8601 in UTC, to the second or finer.
_UTC = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|\+00:00)", re.ASCII)
#: Ranks, nodes and launches: there is at least one.
_FROM_ONE = ("ranks", "nodes", "launch")
#: Seconds of anything.
_LONGEST_S = 1e10
#: Sentences, which may say nothing; other texts are names.
_SENTENCES = ("mismatch", "oracle_mismatch", "note", "refused", "cannot", "failed", "trains")


@dataclass(frozen=True)
class Values:
    """What the fields of a record may hold, beside their types. Of every record: no number is below 0, and ``ranks``,
    ``nodes`` and ``launch`` not below 1; no time is above 1e10 s; no name is empty; ``utc`` is a time."""

    least: Mapping[str, float] = field(default_factory=dict)
    """Smallest number of a field, where it is another one."""
    one_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The texts that a field may be."""
    may_be_empty: tuple[str, ...] = ()
    """Texts that are no names."""


def record_of(cls: type[_Record], entry: Mapping[str, Any]) -> _Record:
    """``entry`` as a ``cls``, a dataclass whose type hints say what each field holds: ``bool``, ``int``, ``float``,
    ``str``, ``tuple[X, ...]`` (a list in JSON), ``Mapping[str, X]``, ``Any``, or one of them or None.

    A whole number is a number too. Raises InputError: unknown or missing fields, or a value of another type, out of
    what ``cls.VALUES`` allows or against ``check()`` of the record, with the field, the value and what was expected.
    """
    record: Any = cls
    hints = _hints(record)
    if set(entry) != set(hints):
        differ = ", ".join(sorted(set(entry) ^ set(hints)))
        raise InputError(f"record does not have the expected fields: {differ} differ")
    found: Any = cls(**{name: _checked(entry[name], hint, name) for name, hint in hints.items()})
    check_values(found, getattr(record, "VALUES", Values()))
    if hasattr(found, "check"):
        found.check()
    made: _Record = found
    return made


def check_values(record: Any, values: Values) -> None:
    """Refuse a record, a dataclass, with a field that holds what ``values`` do not allow. Raises InputError."""
    cls: Any = type(record)
    for name in _hints(cls):
        value = getattr(record, name)
        if name in values.one_of and value is not None:
            expect(value in values.one_of[name], name, value, f"one of {', '.join(values.one_of[name])}")
        elif name == "utc":
            expect(_is_time(value), name, value, "a time in UTC such as 2026-01-02T03:04:05Z")
        elif isinstance(value, str):
            named = name not in _SENTENCES and name not in values.may_be_empty
            expect(not named or value.strip() != "", name, value, "a name, not nothing")
        else:
            least = values.least.get(name, 1 if name in _FROM_ONE else 0)
            for place, number in _numbers(value, name):
                expect(number >= least, place, number, f"at least {least}")
                expect(not name.endswith("_s") or number <= _LONGEST_S, place, number, "at most 1e10, some 300 years")


def check_verdict(record: Any, good: tuple[str, ...] = ("ok",)) -> None:
    """Refuse a record whose ``ok`` is not what its ``verdict`` says. Raises InputError."""
    right = record.verdict in good
    expect(record.ok == right, "ok", record.ok, f"{shown(right)} where verdict is {shown(record.verdict)}")


def check_count(record: Any, what: str) -> bool:
    """Whether all of ``<what>_total`` passed. Raises InputError where more did than there are."""
    passed, total = getattr(record, f"{what}_passed"), getattr(record, f"{what}_total")
    expect(passed <= total, f"{what}_passed", passed, f"at most {what}_total, which is {total}")
    return bool(passed == total)


def check_interval(record: Any) -> None:
    """Refuse a record whose ``measured_s`` does not lie in its interval. Raises InputError."""
    low, middle, high = record.measured_low_s, record.measured_s, record.measured_high_s
    if middle is not None:
        expect(low is None or low <= middle, "measured_low_s", low, f"at most measured_s, which is {middle}")
        expect(high is None or high >= middle, "measured_high_s", high, f"at least measured_s, which is {middle}")


def expect(holds: bool, name: str, value: Any, expected: str) -> None:
    """Raise InputError unless it ``holds``: the field ``name``, its value, and what was expected of it."""
    if not holds:
        raise InputError(f"{name} = {shown(value)}: expected {expected}")


def shown(value: Any) -> str:
    """A JSON value for an error, cut where it is long."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _is_time(text: str) -> bool:
    try:
        return _UTC.fullmatch(text) is not None and datetime.fromisoformat(text[:19]) is not None
    except ValueError:
        return False


def _numbers(value: Any, place: str) -> Iterator[tuple[str, float]]:
    """The numbers in a value, each with its place, such as ``samples_s[0][1]``."""
    if isinstance(value, tuple):
        for at, one in enumerate(value):
            yield from _numbers(one, f"{place}[{at}]")
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _numbers(one, f"{place}.{key}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield place, value


@cache
def _hints(cls: type[Any]) -> Mapping[str, Any]:
    known = get_type_hints(cls)
    return {field.name: known[field.name] for field in fields(cls)}


def _checked(value: Any, hint: Any, place: str, *, or_null: bool = False) -> Any:
    """``value`` as ``hint`` has it: lists as tuples, whole numbers as floats. Raises InputError naming ``place``."""
    if hint is Any:
        return value
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, types.UnionType):
        (only,) = (one for one in inner if one is not types.NoneType)
        return None if value is None else _checked(value, only, place, or_null=True)
    if kind is tuple and isinstance(value, list | tuple):
        return tuple(_checked(one, inner[0], f"{place}[{at}]") for at, one in enumerate(value))
    if kind is Mapping and isinstance(value, Mapping):
        return {key: _checked(one, inner[1], f"{place}.{key}") for key, one in value.items()}
    if kind in (bool, str) and isinstance(value, kind):
        return value
    if type(value) is int and kind in (int, float) and abs(value) <= _LARGEST:
        return kind(value)
    if type(value) is float and kind is float and math.isfinite(value):
        return value
    expected = _CALLED.get(kind, "a list" if kind is tuple else "an object")
    raise InputError(f"{place} = {shown(value)}: expected {expected}{' or null' if or_null else ''}")

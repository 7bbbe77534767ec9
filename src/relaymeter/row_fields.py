"""Reading a row strictly: every field there, each of the type that the record class says.

``record_of(MoveRecord, entry)`` makes a record of a JSON object. Pure.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from relaymeter.errors import InputError

__all__ = ["record_of", "shown"]

_Record = TypeVar("_Record")
#: Whole numbers have 64 bits, as in the files for pandas.
_LARGEST = 2**63 - 1
_CALLED = {bool: "true or false", int: "a whole number of 64 bits", float: "a number", str: "a text"}
_SHOWN = 60


def record_of(cls: type[_Record], entry: Mapping[str, Any]) -> _Record:
    """``entry`` as a ``cls``, a dataclass whose type hints say what each field holds: ``bool``, ``int``, ``float``,
    ``str``, ``tuple[X, ...]`` (a list in JSON), ``Mapping[str, X]``, ``Any``, or one of them or None.

    A whole number is a number too. Raises InputError: unknown or missing fields, or a value of another type, with the
    field, the value and what was expected.
    """
    record: Any = cls
    hints = _hints(record)
    if set(entry) != set(hints):
        differ = ", ".join(sorted(set(entry) ^ set(hints)))
        raise InputError(f"record does not have the expected fields: {differ} differ")
    return cls(**{name: _checked(entry[name], hint, name) for name, hint in hints.items()})


def shown(value: Any) -> str:
    """A JSON value for an error, cut where it is long."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


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

"""Files with rows of any kind: moves of weights, training states, offloads, comparisons of paths.

``read_rows(path)`` gives each line of a JSON Lines file as the record that it says it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from relaymeter.compare_records import CompareRecord
from relaymeter.errors import InputError
from relaymeter.records import MoveRecord, Row, read_lines
from relaymeter.state_records import BaseRecord, OffloadRecord, StateRecord

__all__ = ["read_rows"]

_KINDS: Mapping[str, type[BaseRecord]] = {
    "training-state": StateRecord,
    "offload": OffloadRecord,
    "compare": CompareRecord,
}


def read_rows(path: Path, more: Mapping[str, Callable[[Mapping[str, Any]], Row]] = MappingProxyType({})) -> list[Row]:
    """The rows of a JSON Lines file, each of the kind that it says; where it says none, ``MoveRecord``. ``more``: what
    makes rows of kinds that this module does not know. Raises InputError naming the line, and in it the field."""
    makers = {**{kind: record.from_dict for kind, record in _KINDS.items()}, **more}

    def make(entry: Mapping[str, Any]) -> Row:
        kind = entry.get("kind")
        if kind is None:
            return MoveRecord.from_dict(entry)
        if not isinstance(kind, str) or kind not in makers:
            raise InputError(f"record of kind {kind!r}: this version reads {', '.join(sorted(_KINDS))}")
        return makers[kind](entry)

    return read_lines(path, make)

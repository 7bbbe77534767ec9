"""Files with rows of any kind: moves of weights, training states, offloads, comparisons of paths.

``read_rows(path)`` gives each line of a JSON Lines file as the record that it says it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from relaymeter.compare_records import CompareRecord
from relaymeter.errors import InputError
from relaymeter.records import MoveRecord, Row, parse_json, read_input
from relaymeter.state_records import BaseRecord, OffloadRecord, StateRecord

__all__ = ["read_rows"]

_KINDS: Mapping[str, type[BaseRecord]] = {
    "training-state": StateRecord,
    "offload": OffloadRecord,
    "compare": CompareRecord,
}


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSON Lines file, each of the kind that it says; where it says none, ``MoveRecord``. Raises
    InputError naming the line."""
    rows: list[Row] = []
    for number, line in enumerate(read_input(path, "records").splitlines(), start=1):
        try:
            entry = parse_json(line)
            kind = entry.get("kind")
            if kind is not None and kind not in _KINDS:
                raise InputError(f"record of kind {kind!r}: this version reads {', '.join(sorted(_KINDS))}")
            rows.append(MoveRecord.from_dict(entry) if kind is None else _KINDS[kind].from_dict(entry))
        except (ValueError, TypeError, InputError, AttributeError, RecursionError) as error:
            raise InputError(f"records {path}, line {number}: {error}") from error
    return rows

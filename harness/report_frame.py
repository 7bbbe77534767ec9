"""The rows of ``report`` as one table for pandas: ``rows.csv`` and ``rows.parquet``, a line a row of whatever kind.

``columns, lines = frame(sources)``; numbers are numbers, what was not measured is empty (NaN in pandas). Needs no
pandas; Parquet needs pyarrow, which is optional.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from relaymeter.compare_records import CompareRecord
from relaymeter.harness.report_compare import without_relaunch
from relaymeter.harness.report_sources import AnyRow, Source
from relaymeter.harness.soak_rows import SoakRecord

__all__ = ["NO_PARQUET", "frame", "has_parquet", "write_csv", "write_parquet"]

NO_PARQUET = "rows.parquet was not written: pyarrow is missing: pip install 'relaymeter[report]'"
#: Fields that no column is made of: they stay in the rows.
_LEFT_OUT = ("samples_s", "origins")
_TYPES = {"int": int, "float": float, "bool": bool}


def frame(sources: Sequence[Source]) -> tuple[dict[str, type], list[dict[str, Any]]]:
    """Names and types of the columns (``int``, ``float``, ``bool`` or ``str``), and a line for each row.

    A mapping is a column a key (``route_bytes_direct``), a list of texts one text. ``kind`` is ``move`` for moves of
    weights, ``result`` the folder or file of the row. Columns are those of the kinds that there are.
    """
    columns: dict[str, type] = {"result": str, "kind": str}
    lines = []
    for source in sources:
        for row in source.launched:
            line: dict[str, Any] = {"result": source.name, "kind": "move"}
            for field in fields(row):
                if field.name not in _LEFT_OUT:
                    line |= _cells(field.name, getattr(row, field.name), str(field.type), columns)
            line |= _derived(row, columns)
            lines.append(line)
    return columns, lines


def _cells(name: str, value: Any, annotation: str, columns: dict[str, type]) -> dict[str, Any]:
    if isinstance(value, Mapping):
        found = {f"{name}_{key}": int(count) for key, count in value.items()}
        columns.update(dict.fromkeys(found, int))
        return found
    columns.setdefault(name, _TYPES.get(annotation.partition(" | ")[0], str))
    if isinstance(value, tuple):
        return {name: "; ".join(map(str, value)) or None}
    return {name: float(value) if columns[name] is float and value is not None else value}


def _derived(row: AnyRow | SoakRecord, columns: dict[str, type]) -> dict[str, float | None]:
    """What the tables of paths show and the rows do not say themselves."""
    if not isinstance(row, CompareRecord):
        return {}
    found = {
        "pause_without_relaunch_s": without_relaunch(row, row.pause_s),
        "total_without_relaunch_s": without_relaunch(row, row.total_s),
    }
    columns.update(dict.fromkeys(found, float))
    return found


def write_csv(path: Path, columns: Mapping[str, type], lines: Sequence[Mapping[str, Any]]) -> None:
    """Write a new CSV file; None is empty."""
    with path.open("x", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def has_parquet() -> bool:
    """Whether pyarrow is there."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        return False
    return True


def write_parquet(path: Path, columns: Mapping[str, type], lines: Sequence[Mapping[str, Any]]) -> None:
    """Write a Parquet file; None is null, which pandas reads as NaN."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    types = {int: pa.int64(), float: pa.float64(), bool: pa.bool_(), str: pa.string()}
    schema = pa.schema([(name, types[kind]) for name, kind in columns.items()])
    arrays = [pa.array([line.get(name) for line in lines], type=types[kind]) for name, kind in columns.items()]
    table = pa.table(arrays, schema=schema)
    parquet.write_table(table, path)

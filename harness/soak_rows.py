"""Rows of ``soak``: one summary, one row a rank, one a run of wrong bytes. No torch import.

``soak_rows(record, ranks, runs)`` gives the JSON-ready rows; ``SoakRecord.from_dict(rows[0])`` reads the summary back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from relaymeter.calibration.wrong_bytes import ORIGINS, WrongRun, grid_of
from relaymeter.errors import InputError
from relaymeter.records import plain
from relaymeter.row_fields import record_of
from relaymeter.units import counted

__all__ = ["SOAK_SCHEMA_VERSION", "SoakRecord", "binary_text", "by_origin", "places_of", "runs_of", "soak_rows"]

#: Version of the rows below.
SOAK_SCHEMA_VERSION = 1
#: What the rows of ranks and runs repeat of the summary.
_REPEATED = ("schema_version", "utc", "machine_id", "launch_id", "commit")


@dataclass(frozen=True, kw_only=True)
class SoakRecord:
    """The summary of one soak, over all ranks. What is not known before the end is None in one that broke off."""

    schema_version: int = SOAK_SCHEMA_VERSION
    kind: str = "soak"
    utc: str
    """When the launch began, ISO 8601 in UTC."""
    machine_id: str
    """Hash of versions, processor, memory and kernel."""
    launch_id: str
    """Shared by the rows of one command."""
    commit: str | None
    """Source revision, with ``-dirty`` where files differ from it; None outside a checkout."""
    shaped: bool
    """Whether the NICs' rates were held by the kernel (cluster in a box)."""
    ranks: int
    nodes: int
    backend: str
    executors: tuple[str, ...]
    seconds_asked: float | None
    bytes_asked: int | None
    message_bytes: int
    """The largest message."""
    peers: int
    """Messages that a rank sends in a call, at most."""
    calls: int
    messages: int
    bytes_total: int
    """Sent by all ranks, each byte checked by its receiver."""
    elapsed_s: float
    make_s: float | None
    """Making the messages of all calls: maximum over the ranks."""
    exchange_s: float | None
    check_s: float | None
    wrong_messages: int
    wrong_bytes: int
    runs: int
    """Runs of wrong bytes that are listed, of at most 64 a rank and call, and 10,000 in all."""
    origins: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By origin of the listed runs: ``runs``, ``bytes`` and ``grid_bytes``."""
    finished: bool
    verdict: str
    """``ok``, ``wrong bits`` or ``not finished``."""
    ok: bool

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict with every field, in order."""
        return {field.name: plain(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> SoakRecord:
        """The row that ``to_dict`` wrote. Raises InputError for another version, unknown or missing fields, and values
        of another type."""
        version = entry.get("schema_version")
        if version != SOAK_SCHEMA_VERSION or entry.get("kind") != "soak":
            raise InputError(
                f"record of kind {entry.get('kind')!r}, schema_version {version!r}: a soak of version "
                f"{SOAK_SCHEMA_VERSION} is read here"
            )
        return record_of(cls, entry)


def by_origin(runs: Sequence[WrongRun]) -> dict[str, dict[str, Any]]:
    """By origin, in the order of ``ORIGINS``: how many runs and wrong bytes, and the grid they all sit on."""
    found = {}
    for origin in ORIGINS:
        of = [run for run in runs if run.origin == origin]
        if of:
            found[origin] = {"runs": len(of), "bytes": sum(run.wrong_bytes for run in of), "grid_bytes": grid_of(of)}
    return found


def soak_rows(
    record: SoakRecord,
    ranks: Sequence[Mapping[str, Any]],
    runs: Sequence[Mapping[str, Any]],
    places: Sequence[tuple[int, str]] = (),
) -> list[dict[str, Any]]:
    """The rows of a file: the summary first, then the ranks, then the runs. ``places``: node and host of every rank,
    which its rows then name."""
    summary = record.to_dict()
    same = {name: summary[name] for name in _REPEATED}

    def place(rank: int, whose: str = "") -> dict[str, Any]:
        return {f"{whose}node": places[rank][0], f"{whose}host": places[rank][1]} if places else {}

    return [
        summary,
        *({**same, "kind": "soak-rank", **entry, **place(entry["rank"])} for entry in ranks),
        *(
            {
                **same, "kind": "soak-run", **entry,
                **place(entry["sender"], "sender_"), **place(entry["receiver"], "receiver_"),
            }
            for entry in runs
        ),
    ]  # fmt: skip


def places_of(rows: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """By rank of the runs among rows where it is, for people: ``"node 1 (host-b)"``."""
    found = {}
    for row in rows:
        for whose in ("sender", "receiver"):
            if row["kind"] == "soak-run" and f"{whose}_node" in row:
                found[row[whose]] = f"node {row[f'{whose}_node']} ({row[f'{whose}_host']})"
    return found


def binary_text(count: int) -> str:
    """A size for people, in powers of 1,024 as the grids of wrong bytes are: ``"128 KiB"``."""
    for shift, name in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >> shift:
            return f"{count / (1 << shift):.4g} {name}"
    return counted(count, "byte")


def runs_of(rows: Sequence[Mapping[str, Any]]) -> list[WrongRun]:
    """The runs of wrong bytes among rows."""
    names = {field.name for field in fields(WrongRun)}
    return [
        WrongRun(**{name: value for name, value in row.items() if name in names})
        for row in rows
        if row["kind"] == "soak-run"
    ]

"""Rows of ``validate``: one case that was never fitted, its predicted time and what was measured.

``ValidationRecord(...).to_dict()`` is one row; ``read_validation(path)`` reads a file of them back. Numbers carry their
unit in their name; what was not measured, or does not apply, is null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from relaymeter.errors import InputError
from relaymeter.records import plain, read_lines
from relaymeter.row_fields import Values, check_count, check_interval, expect, record_of, shown

__all__ = ["HARD", "KINDS", "THRESHOLDS", "VALIDATION_SCHEMA_VERSION", "ValidationRecord", "read_validation"]

#: Version of the rows below. A reader refuses another one.
VALIDATION_SCHEMA_VERSION = 1

#: Kinds of cases: one lone flow of a size that calibration skipped; an uneven matrix; a whole move; a batch of equal
#: blocks at a threshold; a move of two classes of blocks for which a mix of routes is predicted to pay.
KINDS = ("size", "matrix", "move", "batch", "mix")
#: What makes a case hard to predict: both directions at once, bound inside a node, many small segments, several
#: senders to one rank, NICs that nothing shapes.
HARD = ("two-way", "in-node", "small segments", "incast", "unshaped")
#: The thresholds that batches stand below, at and above.
THRESHOLDS = ("min_relay", "min_split")


@dataclass(frozen=True, kw_only=True)
class ValidationRecord:
    """One case by one route and executor. Cases that differ in ``route`` alone share ``kind``, ``name`` and
    ``executor``."""

    VALUES: ClassVar[Values] = Values(
        least={"calls": 1}, one_of={"kind": KINDS, "link": ("in_node", "cross_node"), "threshold": THRESHOLDS}
    )

    schema_version: int = VALIDATION_SCHEMA_VERSION
    kind: str
    """One of ``KINDS``."""
    name: str
    """The case; shared by the routes that are held against each other."""
    link: str | None
    """``in_node`` or ``cross_node`` for a size, else None."""
    route: str | None
    """A name of ``relayout.routes.ROUTES``, ``mixed``, or None for sizes and matrices."""
    chosen: bool
    """Whether the policy picks exactly these routes."""
    executor: str
    default_executor: bool
    """Whether it is the one that moves take by default: the profile's first."""
    hard: tuple[str, ...]
    """What makes the case hard, of ``HARD``; empty: nothing does."""
    bytes_total: int
    """Sizes and matrices: bytes of all flows. Moves, batches and mixes: destination bytes, each replica counted."""
    largest_bytes: int
    """Sizes and matrices: bytes of the largest flow. Others: the most that one rank sends to another in a round."""
    calls: int = 1
    """Sizes and matrices: 1 for an isolated call, more for a series of which the time of one call is given."""
    predicted_s: float
    predicted_low_s: float
    predicted_high_s: float
    baseline_s: float | None
    """Predicted by the five-line model: largest NIC load over its rate, plus one constant."""
    samples_s: tuple[float, ...]
    """Per call or move, the maximum over the ranks."""
    measured_s: float
    """Median of the samples."""
    measured_low_s: float
    measured_high_s: float
    """Interval of the median, ``records.median_interval``."""
    bound_s: float | None
    """Lower bound of any route; None for sizes and matrices."""
    block_elements: int | None
    """Batches: elements of a block; mixes: of the large ones; else None."""
    itemsize: int | None
    """Bytes of an element, where ``block_elements`` is given."""
    fanout: int | None
    """Destination ranks per node that want each block, where ``block_elements`` is given."""
    threshold: str | None
    """Batches: which of ``THRESHOLDS`` the blocks were sized by; None else."""
    threshold_elements: int | None
    """The threshold under this executor and bucket, in elements; None: never, or no batch."""
    threshold_low: int | None
    threshold_high: int | None
    """Its bootstrap interval; None: never, or no batch."""
    bucket_bytes: int | None
    """Bytes of a bucket; None for sizes and matrices."""
    digest_passed: int
    """Tensor copies (of sizes and matrices: calls) whose bits were right, over all samples; 0 where nothing moved."""
    digest_total: int
    mismatch: str | None = None
    """The first wrong bits."""
    note: str | None = None
    """Mixes: what was searched, and what was found."""
    simulated: str | None
    """Name of the simulated cluster; None: real ranks."""
    shaped: bool
    """Whether the NICs' rates were held by the kernel (cluster in a box)."""
    machine_id: str
    """Hash of the environment that matters: the profile's fingerprint."""
    commit: str | None
    """Source revision, with ``-dirty`` where files differ from it; None outside a checkout."""
    utc: str
    """When the launch began, ISO 8601 in UTC."""
    launch_id: str
    """Shared by the rows of one command."""

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1

    @property
    def baseline_error(self) -> float | None:
        """The same for the five-line model."""
        return None if self.baseline_s is None else self.baseline_s / self.measured_s - 1

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict with every field, in order."""
        return {field.name: plain(getattr(self, field.name)) for field in fields(self)}

    def check(self) -> None:
        """Raises InputError where what the row says of itself cannot all be true."""
        for at, text in enumerate(self.hard):
            expect(text in HARD, f"hard[{at}]", text, f"one of {', '.join(HARD)}")
        check_count(self, "digest")
        check_interval(self)
        expect(self.measured_s > 0, "measured_s", self.measured_s, "above 0")

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> ValidationRecord:
        """The row that ``to_dict`` wrote. Raises InputError for another version or kind, unknown or missing fields,
        values of another type, and what ``VALUES`` and ``check`` refuse."""
        version = entry.get("schema_version")
        if type(version) is not int or version != VALIDATION_SCHEMA_VERSION:
            raise InputError(
                f"record of schema_version {shown(version)}: this version reads {VALIDATION_SCHEMA_VERSION}"
            )
        return record_of(cls, entry)


def read_validation(path: Path) -> list[ValidationRecord]:
    """The rows of a JSON Lines file that ``validate`` wrote. Raises InputError naming the line."""
    return read_lines(path, ValidationRecord.from_dict)

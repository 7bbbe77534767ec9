"""Rows of a validation of which figures can be made: what is refused before anything is computed. Pure functions.

``check(records, profile)`` raises InputError naming the row; ``wrong_bits(records)`` are the rows that count in no
figure but that of the bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from relaymeter.calibration.profiles import Profile
from relaymeter.errors import InputError
from relaymeter.validation_records import KINDS, THRESHOLDS, ValidationRecord

__all__ = ["check", "wrong_bits"]

_YES_OR_NO = ("chosen", "default_executor", "shaped")


def check(records: Sequence[ValidationRecord], profile: Profile) -> None:
    """Refuse rows of which no figure can be made. Raises InputError naming the row and what is wrong with it.

    Times are positive numbers of seconds in the order low <= value <= high; digests are whole numbers, of which at most
    all passed; the rows are of the machine that ``profile`` was measured on, of one simulated cluster or of none, and
    have one default executor; no two of them are of the same case, routes and executor.
    """
    seen: set[tuple[object, ...]] = set()
    for row in records:
        found = _fault(row)
        if found is None and row.machine_id != profile.machine_id:
            found = f"is of machine {row.machine_id}, the profile of {profile.machine_id}: give the profile beside it"
        if found is None and (key := _key(row)) in seen:
            found = "is there twice: give the rows of each launch once"
        if found is not None:
            raise InputError(f"record {_named(row)}: {found}")
        seen.add(key)
    for what, values in (
        ("simulated clusters", {row.simulated for row in records}),
        ("default executors", {row.executor for row in records if row.default_executor}),
    ):
        if len(values) > 1:
            names = ", ".join(sorted("none" if name is None else name for name in values))
            raise InputError(f"the records are of several {what} ({names}): report each validation alone")


def wrong_bits(records: Iterable[ValidationRecord]) -> list[ValidationRecord]:
    """Rows with bits that arrived wrong."""
    return [row for row in records if row.digest_passed != row.digest_total or row.mismatch is not None]


def _named(row: ValidationRecord) -> str:
    route = f" by {row.route}" if row.route is not None else ""
    return f"{row.kind} {row.name}{route} ({row.executor})"


def _key(row: ValidationRecord) -> tuple[object, ...]:
    """Equal for two rows that measured the same."""
    return (
        row.launch_id, row.kind, row.name, row.route, row.executor, row.calls, row.threshold, row.fanout, row.itemsize,
        row.block_elements, row.bucket_bytes,
    )  # fmt: skip


def _fault(row: ValidationRecord) -> str | None:
    """What is wrong with a row for itself; None: nothing."""
    if row.kind not in KINDS or row.threshold not in (None, *THRESHOLDS):
        return f"kind {row.kind!r} or threshold {row.threshold!r} is not known here"
    for what in ("predicted", "measured"):
        value, low, high = (getattr(row, f"{what}_{end}") for end in ("s", "low_s", "high_s"))
        if not all(_positive(one) for one in (value, low, high)):
            return f"{what} seconds {value} [{low}, {high}] are not all positive numbers: measure it again"
        if not low <= value <= high:
            return f"{what} seconds {value} lie outside their own interval [{low}, {high}]: measure it again"
    if row.baseline_s is not None and not _positive(row.baseline_s):
        return f"baseline_s {row.baseline_s} is neither null nor a positive number of seconds"
    passed, total = row.digest_passed, row.digest_total
    if not (_whole(passed) and _whole(total) and 0 <= passed <= total):
        return f"digest_passed {passed} of digest_total {total} are not whole numbers with 0 <= passed <= total"
    if row.simulated is not None and not (isinstance(row.simulated, str) and row.simulated):
        return f"simulated {row.simulated!r} is neither null nor the name of a cluster"
    if row.simulated is not None and total:
        return f"{total} digests on the simulated cluster {row.simulated}, where nothing moves"
    for name in _YES_OR_NO:
        if not isinstance(getattr(row, name), bool):
            return f"{name} {getattr(row, name)!r} is neither true nor false"
    return None


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

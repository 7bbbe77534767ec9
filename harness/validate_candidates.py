"""Candidates held against each other: regret, order, both sides of a threshold, mixes. Pure functions on records.

``contests(records)`` gathers the routes of each case; ``sides(records)`` says who won below and above each threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from relaymeter.units import format_bytes
from relaymeter.validation_records import ValidationRecord

__all__ = [
    "ABOVE",
    "AT",
    "BELOW",
    "MIXED",
    "Contest",
    "Mix",
    "Side",
    "contests",
    "kendall_tau",
    "mixes",
    "ordered_pairs",
    "settled",
    "sides",
]

#: The route of a row whose blocks take different routes.
MIXED = "mixed"
#: The route that each threshold is about; the other side is direct.
_ROUTE = {"min_relay": "relay", "min_split": "spread"}
_DIRECT = "direct"

BELOW, AT, ABOVE = "below", "at", "above"
#: Blocks within this factor of the threshold stand at it: neither side is predicted to win there.
_AT = 2**0.5


def apart(one: ValidationRecord, two: ValidationRecord) -> bool:
    """Whether the measured intervals of two rows do not overlap."""
    return one.measured_high_s < two.measured_low_s or two.measured_high_s < one.measured_low_s


@dataclass(frozen=True)
class Contest:
    """One case and its rows, one a route, by one executor."""

    name: str
    executor: str
    rows: tuple[ValidationRecord, ...]

    @property
    def candidates(self) -> tuple[ValidationRecord, ...]:
        """The rows, but for one of those that ran exactly the routes that the policy picked: the fastest of these."""
        chosen = self.chosen
        return tuple(row for row in self.rows if row is chosen or not row.chosen)

    @property
    def best(self) -> ValidationRecord:
        """The fastest row as measured."""
        return min(self.rows, key=lambda row: row.measured_s)

    @property
    def chosen(self) -> ValidationRecord | None:
        """The row of the routes that the policy picked; the faster one where two rows ran exactly the same routes."""
        return min((row for row in self.rows if row.chosen), key=lambda row: row.measured_s, default=None)

    @property
    def regret(self) -> float | None:
        """What the chosen routes cost beyond the best measured ones, as a share of these; None without a chosen row or
        a second candidate."""
        chosen = self.chosen
        if chosen is None or len(self.candidates) < 2:
            return None
        return chosen.measured_s / self.best.measured_s - 1


def contests(records: Sequence[ValidationRecord], kind: str = "move") -> tuple[Contest, ...]:
    """The cases of ``kind`` with their candidates, in order of appearance."""
    found: dict[tuple[str, str, str, int | None], list[ValidationRecord]] = {}
    for row in records:
        if row.kind == kind and row.route is not None:
            found.setdefault((row.launch_id, row.name, row.executor, row.bucket_bytes), []).append(row)
    return tuple(Contest(key[1], key[2], tuple(rows)) for key, rows in found.items())


def ordered_pairs(cases: Sequence[Contest]) -> tuple[int, int]:
    """Pairs of candidates whose measured intervals do not overlap: how many are predicted in the measured order, and
    how many there are."""
    right = total = 0
    for case in cases:
        for one, two in combinations(case.candidates, 2):
            if not apart(one, two):
                continue
            total += 1
            right += (one.predicted_s - two.predicted_s) * (one.measured_s - two.measured_s) > 0
    return right, total


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Kendall's tau-b of two orders; None for fewer than two values, or where one side has no order at all."""
    one, two = (np.sign(np.subtract.outer(values, values)) for values in (predicted, measured))
    ties = float(np.abs(one).sum() * np.abs(two).sum())
    return None if ties == 0 else float((one * two).sum() / ties**0.5)


@dataclass(frozen=True)
class Side:
    """A batch of equal blocks below, at or above a threshold: the threshold's route against direct."""

    threshold: str
    executor: str
    fanout: int
    itemsize: int
    bucket_bytes: int | None
    elements: int
    """Of a block of this batch."""
    limit: int | None
    """The threshold in elements; None: never."""
    low: int | None
    high: int | None
    direct: ValidationRecord
    other: ValidationRecord
    """The row of the threshold's route."""

    @property
    def setting(self) -> tuple[str, str, int, int, int | None, int | None]:
        """What the batches of one threshold share."""
        return self.threshold, self.executor, self.fanout, self.itemsize, self.bucket_bytes, self.limit

    @property
    def where(self) -> str:
        """The setting for people."""
        bucket = "" if self.bucket_bytes is None else f", buckets of {format_bytes(self.bucket_bytes)}"
        return f"{self.threshold} x{self.fanout}{bucket}, T = {'never' if self.limit is None else self.limit}"

    @property
    def side(self) -> str:
        """``below``, ``at`` or ``above``. Everything is below a threshold that is "never"."""
        if self.limit is None or self.elements * _AT <= self.limit:
            return BELOW
        return ABOVE if self.elements >= self.limit * _AT else AT

    @property
    def gain(self) -> float:
        """What the route saves of direct's measured time; negative where it loses."""
        return 1 - self.other.measured_s / self.direct.measured_s

    @property
    def verdict(self) -> str:
        """``right`` where the predicted side is faster and the measured intervals do not overlap, ``wrong`` where the
        other one is, ``undecided`` where they overlap, ``not judged`` at it, where neither is predicted to win."""
        if self.side == AT:
            return "not judged"
        if not apart(self.direct, self.other):
            return "undecided"
        return "right" if (self.gain > 0) == (self.side == ABOVE) else "wrong"


def sides(records: Sequence[ValidationRecord]) -> tuple[Side, ...]:
    """The batches that ran both by direct and by their threshold's route, ordered by setting and block size."""
    found = []
    groups: dict[tuple[object, ...], dict[str, ValidationRecord]] = {}
    for row in records:
        if row.kind == "batch" and row.threshold is not None and row.route is not None and row.block_elements:
            key = (
                row.launch_id, row.name, row.executor, row.threshold, row.fanout, row.itemsize, row.bucket_bytes,
                row.block_elements,
            )  # fmt: skip
            groups.setdefault(key, {})[row.route] = row
    for routes in groups.values():
        direct = routes.get(_DIRECT)
        if direct is None or direct.threshold is None or _ROUTE[direct.threshold] not in routes:
            continue
        found.append(
            Side(
                threshold=direct.threshold,
                executor=direct.executor,
                fanout=direct.fanout or 0,
                itemsize=direct.itemsize or 0,
                bucket_bytes=direct.bucket_bytes,
                elements=direct.block_elements or 0,
                limit=direct.threshold_elements,
                low=direct.threshold_low,
                high=direct.threshold_high,
                direct=direct,
                other=routes[_ROUTE[direct.threshold]],
            )
        )
    order = {row.executor: number for number, row in reversed(list(enumerate(records)))}
    return tuple(
        sorted(
            found,
            key=lambda one: (
                order[one.executor], one.threshold, one.fanout, one.itemsize, one.bucket_bytes or 0, one.elements,
            ),
        )
    )  # fmt: skip


def settled(found: Sequence[Side]) -> tuple[list[Side], int]:
    """Settings whose threshold lies inside the measured block sizes with both sides decided for the predicted one, each
    by its first side; and how many settings there are."""
    settings: dict[tuple[object, ...], list[Side]] = {}
    for one in found:
        settings.setdefault(one.setting, []).append(one)
    both = {(BELOW, "right"), (ABOVE, "right")}
    wrong = {(BELOW, "wrong"), (ABOVE, "wrong")}
    seen = {key: {(one.side, one.verdict) for one in mine} for key, mine in settings.items()}
    decided = [mine[0] for key, mine in settings.items() if both <= seen[key] and not wrong & seen[key]]
    return decided, len(settings)


@dataclass(frozen=True)
class Mix:
    """A move of two classes of blocks by a mix of routes, against every uniform choice."""

    name: str
    executor: str
    mixed: ValidationRecord
    uniform: tuple[ValidationRecord, ...]
    """The same move by one route for all its blocks, a row a route."""

    @property
    def best(self) -> ValidationRecord:
        """The fastest uniform row as measured."""
        return min(self.uniform, key=lambda row: row.measured_s)

    @property
    def gain(self) -> float:
        """What the mix saves of the fastest uniform choice; negative where it loses."""
        return 1 - self.mixed.measured_s / self.best.measured_s

    @property
    def wins(self) -> bool:
        """Whether the mix beats every uniform choice by more than the intervals."""
        return len(self.uniform) > 1 and all(self.mixed.measured_high_s < row.measured_low_s for row in self.uniform)


def mixes(records: Sequence[ValidationRecord]) -> tuple[Mix, ...]:
    """The cases of kind ``mix`` that ran by a mix and by uniform routes."""
    found = []
    for case in contests(records, "mix"):
        uniform = tuple(row for row in case.rows if row.route != MIXED)
        mixed = [row for row in case.rows if row.route == MIXED]
        if uniform and mixed:
            found.append(Mix(case.name, case.executor, min(mixed, key=lambda row: row.measured_s), uniform))
    return tuple(found)

"""What ``validate`` measures: flows and moves with what the prices say of them, as frozen data that goes to every rank.

``agenda.to_json()`` on the rank that has drawn the cases up, ``Agenda.from_json(text)`` on the others. Pure, no torch
import.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaymeter.calibration.patterns import Flow
from relaymeter.calibration.profiles import Profile
from relaymeter.policies.baseline import five_line_seconds
from relaymeter.policies.price import Price, Pricer
from relaymeter.records import dump_json
from relaymeter.relayout.segments import RoundLoads
from relaymeter.relayout.topology import Topology

__all__ = [
    "APART",
    "MIXED",
    "Agenda",
    "Expected",
    "Expecter",
    "FlowCase",
    "MoveCase",
    "MoveSpec",
    "Observed",
    "Threshold",
]

#: The route of a move whose blocks do not all take one route.
MIXED = "mixed"
#: Kinds of moves whose storages lie so that every segment is a copy of its own.
APART = ("batch", "mix")


@dataclass(frozen=True)
class Expected:
    """What the prices say of a case before it is measured; ``baseline_s`` is the five-line model's word."""

    seconds: float
    low_s: float
    high_s: float
    baseline_s: float
    largest_bytes: int


@dataclass(frozen=True, kw_only=True)
class FlowCase:
    """Flows (src, dst, bytes) of one exchange; fields as in ``ValidationRecord``."""

    kind: str
    name: str
    link: str | None
    executor: str
    hard: tuple[str, ...]
    flows: tuple[Flow, ...]
    calls: int
    expected: Expected


@dataclass(frozen=True)
class MoveSpec:
    """What every rank makes the two layouts of a move from: a name of ``validate_moves.SHAPES`` and its numbers."""

    shape: str
    sizes: tuple[int, ...]
    bucket_bytes: int


@dataclass(frozen=True)
class Threshold:
    """Which threshold a batch stands at, in elements, with its interval (None: never), and the batch's blocks."""

    kind: str
    fanout: int
    elements: int | None
    low: int | None
    high: int | None


@dataclass(frozen=True, kw_only=True)
class MoveCase:
    """One move by one route array and executor; fields as in ``ValidationRecord``."""

    kind: str
    name: str
    spec: MoveSpec
    executor: str
    route: str
    codes: tuple[int, ...]
    chosen: bool
    hard: tuple[str, ...]
    bytes_total: int
    bound_s: float
    expected: Expected
    block_elements: int | None = None
    itemsize: int | None = None
    fanout: int | None = None
    threshold: Threshold | None = None
    note: str | None = None

    @property
    def route_array(self) -> NDArray[np.int8]:
        """``codes`` as ``build_schedule`` takes them."""
        return np.asarray(self.codes, dtype=np.int8)


@dataclass(frozen=True)
class Observed:
    """What measuring a case showed: seconds per call or move (maximum over ranks), and the bits that were checked."""

    times_s: tuple[float, ...]
    passed: int
    total: int
    mismatch: str | None = None


@dataclass(frozen=True)
class Agenda:
    """All cases of one validation, in the order of the report. ``notes`` say what was left out and why."""

    flows: tuple[FlowCase, ...] = ()
    moves: tuple[MoveCase, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> str:
        """Strict JSON that ``from_json`` reads back."""
        return dump_json(asdict(self), indent=None)

    @classmethod
    def from_json(cls, text: str) -> Agenda:
        entry = json.loads(text)
        return cls(
            tuple(_flow(found) for found in entry["flows"]),
            tuple(_move(found) for found in entry["moves"]),
            tuple(entry["notes"]),
        )


def _flow(entry: Mapping[str, Any]) -> FlowCase:
    return FlowCase(
        **{
            **entry,
            "hard": tuple(entry["hard"]),
            "flows": tuple((int(r), int(q), int(b)) for r, q, b in entry["flows"]),
            "expected": Expected(**entry["expected"]),
        }
    )


def _move(entry: Mapping[str, Any]) -> MoveCase:
    spec, threshold = entry["spec"], entry["threshold"]
    return MoveCase(
        **{
            **entry,
            "hard": tuple(entry["hard"]),
            "codes": tuple(entry["codes"]),
            "spec": MoveSpec(spec["shape"], tuple(spec["sizes"]), spec["bucket_bytes"]),
            "threshold": None if threshold is None else Threshold(**threshold),
            "expected": Expected(**entry["expected"]),
        }
    )


class Expecter:
    """What a profile says of loads under one executor: the price and the five-line model's word, on one topology."""

    def __init__(self, profile: Profile, topology: Topology, executor: str) -> None:
        self.executor, self.topology = executor, topology
        self.pricer = Pricer(profile, topology, executor)
        self._rates, self._port = profile.nic_rates(topology, executor), profile.port_rate(executor)
        # The best that a single constant can be: what the smallest message takes, begun after a pause.
        links = [link for link in (self.pricer.costs.in_node, self.pricer.costs.cross_node) if link is not None]
        self._constant = self.pricer.costs.start_s + max(link.curve.seconds[0] for link in links)

    def price(self, loads: RoundLoads, *, in_series: bool = False) -> Price:
        """The price of ``loads``, begun after a pause or ``in_series``. Raises InputError where a link class was not
        measured."""
        return self.pricer.price(loads, in_series=in_series)

    def expect(self, loads: RoundLoads, price: Price | None = None, *, in_series: bool = False) -> Expected:
        """What both models say of ``loads``; ``price`` spares pricing them again."""
        price = self.price(loads, in_series=in_series) if price is None else price
        away = loads.src != loads.dst
        return Expected(
            seconds=price.total_s,
            low_s=price.low_s,
            high_s=price.high_s,
            baseline_s=five_line_seconds(loads, self.topology, self._rates, self._port, self._constant),
            largest_bytes=int(loads.bytes[away].max(initial=0)),
        )

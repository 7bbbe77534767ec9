"""Made-up rows of a validation, small enough that every figure of them can be computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from relaymeter.calibration.cells import Cell
from relaymeter.calibration.costs import Curve, ExecutorCosts, LinkCosts, PackCosts
from relaymeter.calibration.profiles import ExecutorProfile, Profile
from relaymeter.harness import validate_figures, validate_report
from relaymeter.harness.validate_bars import Figure
from relaymeter.harness.validate_report import Report
from relaymeter.relayout.topology import Topology
from relaymeter.validation_records import ValidationRecord

#: 50 MB/s of wire rate: 1448 of 1514 bytes are payload.
PAYLOAD = 50e6 * 1448 / 1514


def link(rate: float, latency_s: float = 1e-4) -> LinkCosts:
    sizes = tuple(1024 * 2**k for k in range(14))
    curve = Curve(sizes, tuple(latency_s + size / rate for size in sizes), 1 / rate)
    return LinkCosts(
        curve=curve, two_way=0.0, turn=0.0, fan_out=1.0, fan_in=1.0, port=1.0, ports_out={}, ports_in={}, node=1.0,
        crowd={}, message_s=0.0,
    )  # fmt: skip


def profile(
    cells: tuple[Cell, ...] = (), *, cross: LinkCosts | None = None, cluster: Any = None, **facts: Any
) -> Profile:
    costs = ExecutorCosts(
        floor_s=1e-4, start_s=0.0, overlap=0.5, busy_s=0.0,
        in_node=link(1e9), cross_node=cross or link(PAYLOAD),
        pack=PackCosts(1e-5, 1e-6, 1e-10), unpack=PackCosts(1e-5, 1e-6, 1e-10),
    )  # fmt: skip
    found = {name: ExecutorProfile(costs, (), {}) for name in ("send-recv", "all-to-all")}
    return Profile(
        created_utc="2026-01-01T00:00:00Z", fingerprint={"cluster": cluster, **facts}, topology=Topology.grid(2, 2),
        executors=found, gates=(), warnings=(), quick=False, spent_s=1.0, connect_s={}, cells=cells,
    )  # fmt: skip


SHAPED = {"shape": True, "nic_rate_bytes_per_s": 50e6}


_NUMBERS = count(1)


def row(kind: str, predicted_s: float, measured_s: float, **changed: Any) -> ValidationRecord:
    """A row whose measured interval is 1 % wide on each side; a case of its own where ``name`` is not given."""
    fields: dict[str, Any] = {
        "kind": kind, "name": f"case {next(_NUMBERS)}", "link": None, "route": None, "chosen": False,
        "executor": "send-recv", "default_executor": True, "hard": (), "bytes_total": 1 << 22, "largest_bytes": 1 << 22,
        "predicted_s": predicted_s, "predicted_low_s": predicted_s / 1.1, "predicted_high_s": predicted_s * 1.1,
        "baseline_s": None, "samples_s": (measured_s,), "measured_s": measured_s, "measured_low_s": measured_s * 0.99,
        "measured_high_s": measured_s * 1.01, "bound_s": None, "block_elements": None, "itemsize": None, "fanout": None,
        "threshold": None, "threshold_elements": None, "threshold_low": None, "threshold_high": None,
        "bucket_bytes": None, "digest_passed": 2, "digest_total": 2, "simulated": None, "shaped": True,
        "machine_id": "m", "commit": None, "utc": "2026-01-01T00:00:00Z", "launch_id": "l",
    }  # fmt: skip
    return ValidationRecord(**{**fields, **changed})


def batch(threshold: str, elements: int, direct_s: float, other_s: float, **changed: Any) -> list[ValidationRecord]:
    limits = {"threshold_elements": 100, "threshold_low": 90, "threshold_high": 110, "bucket_bytes": 1 << 20}
    shared = {
        "name": f"{threshold} {elements}", "threshold": threshold, "block_elements": elements, "itemsize": 2,
        "fanout": 2, "bytes_total": 2048 * 2 * 2 * elements, **limits, **changed,
    }  # fmt: skip
    other = {"min_relay": "relay", "min_split": "spread"}[threshold]
    return [row("batch", took, took, route=route, **shared) for route, took in (("direct", direct_s), (other, other_s))]


def of(found: tuple[Figure, ...], key: str, executor: str = "send-recv") -> Figure:
    return next(one for one in found if one.key == key and one.executor == executor)


def value(figure: Figure, statistic: str) -> float:
    found = figure.statistics[statistic]
    assert found is not None
    return found


def move(name: str, times: dict[str, tuple[float, float]], chosen: str, **changed: Any) -> list[ValidationRecord]:
    """Routes -> (predicted, measured)."""
    return [
        row("move", *pair, name=name, route=route, chosen=route == chosen, **changed) for route, pair in times.items()
    ]


def mix(measured: dict[str, float], note: str | None = None) -> list[ValidationRecord]:
    return [row("mix", 0.1, took, name="tiny and large", route=route, note=note) for route, took in measured.items()]


def whole(**changed: Any) -> list[ValidationRecord]:
    """Records that meet every bar."""
    hard: dict[str, Any] = {"hard": ("two-way",), "baseline_s": 0.3, **changed}
    rows = [
        row("size", 0.1, 0.1, link=kind, calls=calls, **changed)
        for kind in ("in_node", "cross_node")
        for calls in (1, 5)
    ]
    rows += [row("matrix", 0.1, 0.1, name=str(k), **hard) for k in range(3)]
    times = {"direct": (0.2, 0.2), "relay": (0.1, 0.1), "spread": (0.15, 0.15)}
    rows += [one for k in range(8) for one in move(f"m{k}", times, "relay", **hard)]
    for name in ("min_relay", "min_split"):
        rows += [*batch(name, 25, 0.1, 0.2, **changed), *batch(name, 400, 0.2, 0.1, **changed)]
    return rows + [
        row("mix", took, took, name="x", route=route, **changed)
        for route, took in (("direct", 0.2), ("relay", 0.3), ("mixed", 0.1))
    ]


def measured_on(rows: Sequence[ValidationRecord], found: Profile) -> list[ValidationRecord]:
    """The rows as of the machine of ``found``."""
    return [replace(row, machine_id=found.machine_id) for row in rows]


def figures(rows: Sequence[ValidationRecord], found: Profile, **more: Any) -> tuple[Figure, ...]:
    return validate_figures.figures(measured_on(rows, found), found, **more)


def make_report(rows: Sequence[ValidationRecord], found: Profile, **more: Any) -> Report:
    return validate_report.make_report(measured_on(rows, found), found, **more)

"""Rows of a validation: cases with what was predicted and what was measured, as records. Pure.

``flow_rows(cases, observed, about)`` and ``move_rows(...)``; ``about`` is what all rows of a launch have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from relaymeter.harness.jobs import RunStamp
from relaymeter.harness.validate_cases import Expected, FlowCase, MoveCase, Observed
from relaymeter.records import median_interval
from relaymeter.validation_records import ValidationRecord

__all__ = ["About", "flow_rows", "move_rows"]


@dataclass(frozen=True)
class About:
    """The launch: its stamp, the default executor, and the simulated cluster's name (None: real ranks)."""

    stamp: RunStamp
    default_executor: str
    simulated: str | None = None


def flow_rows(cases: Sequence[FlowCase], observed: Sequence[Observed], about: About) -> list[ValidationRecord]:
    """One row for each size and matrix."""
    return [
        ValidationRecord(
            **_common(case, found, about),
            link=case.link,
            route=None,
            chosen=False,
            bytes_total=sum(flow[2] for flow in case.flows),
            calls=case.calls,
            bound_s=None,
            block_elements=None,
            itemsize=None,
            fanout=None,
            threshold=None,
            threshold_elements=None,
            threshold_low=None,
            threshold_high=None,
            bucket_bytes=None,
        )
        for case, found in zip(cases, observed, strict=True)
    ]


def move_rows(cases: Sequence[MoveCase], observed: Sequence[Observed], about: About) -> list[ValidationRecord]:
    """One row for each route of a move, a batch or a mix."""
    rows = []
    for case, found in zip(cases, observed, strict=True):
        limit = None if case.threshold is None else asdict(case.threshold)
        rows.append(
            ValidationRecord(
                **_common(case, found, about),
                link=None,
                route=case.route,
                chosen=case.chosen,
                bytes_total=case.bytes_total,
                bound_s=case.bound_s,
                block_elements=case.block_elements,
                itemsize=case.itemsize,
                fanout=case.fanout,
                threshold=None if limit is None else limit["kind"],
                threshold_elements=None if limit is None else limit["elements"],
                threshold_low=None if limit is None else limit["low"],
                threshold_high=None if limit is None else limit["high"],
                bucket_bytes=case.spec.bucket_bytes,
                note=case.note,
            )
        )
    return rows


def _common(case: FlowCase | MoveCase, found: Observed, about: About) -> dict[str, Any]:
    stamp, expected = about.stamp, case.expected
    measured, low, high = median_interval(found.times_s)
    return {
        "kind": case.kind,
        "name": case.name,
        "executor": case.executor,
        "default_executor": case.executor == about.default_executor,
        "hard": case.hard,
        **_predicted(expected),
        "samples_s": found.times_s,
        "measured_s": measured,
        "measured_low_s": low,
        "measured_high_s": high,
        "digest_passed": found.passed if about.simulated is None else 0,
        "digest_total": found.total if about.simulated is None else 0,
        "mismatch": found.mismatch,
        "simulated": about.simulated,
        "shaped": stamp.shaped,
        "machine_id": stamp.machine_id,
        "commit": stamp.commit,
        "utc": stamp.utc,
        "launch_id": stamp.launch_id,
    }


def _predicted(expected: Expected) -> dict[str, Any]:
    return {
        "largest_bytes": expected.largest_bytes,
        "predicted_s": expected.seconds,
        "predicted_low_s": expected.low_s,
        "predicted_high_s": expected.high_s,
        "baseline_s": expected.baseline_s,
    }

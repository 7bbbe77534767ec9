"""Launches made for tests of tracking, by hand: no rank ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from relaymeter.harness.track.records import CaseRecord, LaunchRecord

__all__ = ["case", "commit_launches", "launch", "side"]

#: Launch-level factors that spread by about 3 %, by hand, so that nothing is drawn.
STEADY = (1.0, 0.98, 1.02, 1.01, 0.99, 1.015, 0.985, 1.005, 0.995, 1.01, 0.99, 1.0)


def case(
    name: str = "tp2", *, samples: Mapping[str, Sequence[float]] | None = None,
    exact: Mapping[str, int | str] | None = None, passed: int = 8, total: int = 8,
) -> CaseRecord:  # fmt: skip
    return CaseRecord(
        name=name,
        exact={"messages": 12, "digest": "ab12"} if exact is None else exact,
        samples={name: tuple(values) for name, values in ({"move_s": [0.01]} if samples is None else samples).items()},
        digest_passed=passed,
        digest_total=total,
    )


def launch(*cases: CaseRecord, commit: str | None = "a", number: int = 1, dirty: bool = False) -> LaunchRecord:
    return LaunchRecord(
        utc="2026-01-01T00:00:00Z",
        session_id="s",
        launch=number,
        machine_id="machine-1",
        config_hash="config-1",
        suite="ci",
        version="0.9",
        commit=commit and commit * 40,
        commit_utc=None,
        dirty=dirty,
        cases=cases or (case(),),
    )


def side(base: float, count: int = 5, metric: str = "move_s", *, commit: str = "a") -> list[LaunchRecord]:
    """``count`` launches of one case with one time around ``base``."""
    return [
        launch(case(samples={metric: [base * factor]}), commit=commit, number=number)
        for number, factor in enumerate((STEADY * 9)[:count], start=1)
    ]


def commit_launches(bases: Sequence[float], count: int = 5) -> list[LaunchRecord]:
    """A history: per base ``count`` launches of a commit, the commits named by letters in order."""
    return [replace(one, commit=f"{at:02x}" * 20) for at, base in enumerate(bases) for one in side(base, count)]

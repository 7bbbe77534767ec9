"""Results of offloads: one of what every rank saw of a case. Pure; ``offload.run_offload`` measures.

merge(Case(stage=3, way="deepspeed", state="hp_params", pinned=True, blocking=True), [seen_of_rank_0, ...]).verdict
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "AFTER_BACKWARD",
    "AFTER_PINNED",
    "AFTER_STEP",
    "ALL",
    "BIT_EQUAL",
    "DEEPSPEED",
    "RELEASE",
    "Case",
    "OffloadResult",
    "Seen",
    "merge",
    "result_of",
]

DEEPSPEED, RELEASE = "deepspeed", "release"
ALL = "all"
AFTER_STEP, AFTER_BACKWARD = "after a step", "after a backward pass"
#: Not pinned, on an engine that offloaded the same state pinned and trained on since: ZeRO-3 keeps those host copies.
AFTER_PINNED = "after a pinned offload and a step"
BIT_EQUAL = "bit-equal"
#: Memory counts as kept, or as grown, beyond this part of a state's bytes: allocators round up.
_TOLERANCE = 0.05


@dataclass(frozen=True, kw_only=True)
class OffloadResult:
    """One kind of state of one engine, offloaded and reloaded; the same on every rank."""

    stage: int
    way: str
    """``deepspeed`` (offload_states, reload_states) or ``release`` (dropped; a copy put aside is written back)."""
    state: str
    """DeepSpeed's name of the kind of state, or ``all``."""
    moment: str
    """``after a step``; ``after a backward pass``: the only time at which ZeRO-1 and 2 hold gradients; ``after a pinned
    offload and a step``."""
    pinned: bool | None = None
    blocking: bool | None = None
    """None where these do not apply."""
    outcome: str = "moved"
    """``moved``, ``not offered``, ``not applicable`` or ``failed``; ``note`` says why."""
    bytes: int | None = None
    """Bytes of that kind that the engine held before, largest rank."""
    offload_s: float | None = None
    """Seconds to offload, until the device is idle: median of the cycles, slowest rank."""
    reload_s: float | None = None
    allocated_before_bytes: int | None = None
    """What the device's allocator had handed out, largest rank; None on a CPU, whose allocator does not say."""
    allocated_after_bytes: int | None = None
    """The same after the first offload."""
    allocated_reloaded_bytes: int | None = None
    """The same after the last reload."""
    host_growth_bytes: int | None = None
    """Resident memory after the last cycle beyond that after the first, largest rank; None for a single cycle."""
    equal: bool | None = None
    """Whether every bit is as before; None where nothing was offloaded."""
    mismatch: str | None = None
    """The first bits that are not."""
    trains: str | None = None
    """How the next step went: ``bit-equal`` with the twin, ``differs: ...`` or ``cannot: ...``."""
    note: str | None = None

    @property
    def offload_rate(self) -> float | None:
        """Bytes per second of one rank while offloading."""
        return self.bytes / self.offload_s if self.bytes and self.offload_s else None

    @property
    def reload_rate(self) -> float | None:
        """Bytes per second of one rank while reloading."""
        return self.bytes / self.reload_s if self.bytes and self.reload_s else None

    @property
    def freed_bytes(self) -> int | None:
        """What the allocator got back; None where it does not say."""
        if self.allocated_before_bytes is None or self.allocated_after_bytes is None:
            return None
        return self.allocated_before_bytes - self.allocated_after_bytes

    @property
    def verdict(self) -> str:
        """``ok``, ``wrong bits``, or the outcome where nothing was moved."""
        if self.outcome != "moved":
            return self.outcome
        return "ok" if self.equal and self.trains == BIT_EQUAL else "wrong bits"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one result measures; the fields are those of ``OffloadResult``."""

    stage: int
    way: str
    state: str
    moment: str = AFTER_STEP
    pinned: bool | None = None
    blocking: bool | None = None


@dataclass(kw_only=True)
class Seen:
    """What one rank saw of a case: bytes, seconds of every cycle, readings of memory, differences. JSON-able."""

    bytes: int = 0
    offload_s: list[float] = field(default_factory=list)
    reload_s: list[float] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    mismatch: str | None = None
    trains: str | None = None
    failure: str | None = None


def result_of(case: Case, **fields: Any) -> OffloadResult:
    """The result of a case with these other fields."""
    return OffloadResult(**vars(case), **fields)


def merge(case: Case, ranks: Sequence[Seen]) -> OffloadResult:
    """One result of what the ranks saw of a case: the slowest, the largest, the first error. Pure.

    ``allocated`` of each rank has the readings before, after the first offload and after the last reload, or none.
    """
    failures = [one.failure for one in ranks if one.failure is not None]
    nbytes = max(one.bytes for one in ranks)
    if failures:
        note = f"{'DeepSpeed' if case.way == DEEPSPEED else 'release'} fails: {failures[0]}"
        return result_of(case, outcome="failed", bytes=nbytes, note=note)
    readings = [max(column) for column in zip(*(one.allocated for one in ranks), strict=True)]
    before, after, reloaded = readings or (None, None, None)
    mismatches = [one.mismatch for one in ranks if one.mismatch is not None]
    trains = [one.trains for one in ranks if one.trains != BIT_EQUAL]
    notes = [] if trains == [] else [f"the next step {trains[0]}"]
    if before is not None and after is not None and before - after < (1 - _TOLERANCE) * nbytes:
        notes.append(f"the allocator got back {before - after} of {nbytes} bytes")
    if before is not None and reloaded is not None and reloaded - before > _TOLERANCE * nbytes:
        notes.append(f"the allocator holds {reloaded - before} bytes more than before")
    growth = [one.resident[-1] - one.resident[0] for one in ranks if len(one.resident) > 1]
    return result_of(
        case,
        bytes=nbytes,
        offload_s=max(statistics.median(one.offload_s) for one in ranks),
        reload_s=max(statistics.median(one.reload_s) for one in ranks),
        allocated_before_bytes=before,
        allocated_after_bytes=after,
        allocated_reloaded_bytes=reloaded,
        host_growth_bytes=max(growth, default=None),
        equal=not mismatches,
        mismatch=next(iter(mismatches), None),
        trains=trains[0] if trains else BIT_EQUAL,
        note="; ".join(notes) or None,
    )

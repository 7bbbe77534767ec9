"""What one measurement is: how a cell is sampled, what comes back, and the seam every probe goes through.

``measure(matrix, executor) -> Samples`` is a ``Measure``: real ranks stand behind it (``measure.RankExchange``) or an
invented cluster (tests, simulation). No torch import.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from relaymeter.errors import NothingMeasured
from relaymeter.records import median_interval

__all__ = [
    "QUIET_SAMPLES",
    "Cell",
    "Instruments",
    "Measure",
    "MeasurePacking",
    "PackCell",
    "Samples",
    "Sampling",
    "Wrong",
    "check_times",
]

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

#: Samples that agree within ``Sampling.quiet`` end a cell after this many; others go on to ``STEADY_SAMPLES``.
QUIET_SAMPLES = 3
STEADY_SAMPLES = 11
#: A cell out of time whose samples scatter by more than this share of the median still goes on to so many samples.
ROUGH = 0.1
ROUGH_SAMPLES = 5
#: Medians of two epochs that differ by more than this share: something else on the machine came or went.
UNSTABLE = 0.1


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """When a cell has enough samples. Decided on values that are equal on all ranks, so all of them stop together."""

    warmups: int = 2
    """Untimed calls before the first sample."""
    maximum: int = 40
    """Never more samples than this."""
    quiet: float = 0.02
    """A range of this share of the median ends the cell at once."""
    half_width: float = 0.05
    """Relative half-width of the median's interval that ends the cell from ``STEADY_SAMPLES`` on."""
    seconds: float = 0.6
    """Wall time after which the cell ends, unless it is rough."""
    volume_bytes: float = float("inf")
    """Bytes moved by all ranks together after which the cell ends."""

    def enough(self, times_s: Sequence[float], spent_s: float, moved_bytes: float) -> bool:
        """Whether sampling stops after ``times_s``. Pure; ``spent_s`` is the cell's wall time so far."""
        count = len(times_s)
        if count < QUIET_SAMPLES:
            return count >= self.maximum
        if count >= self.maximum or moved_bytes >= self.volume_bytes:
            return True
        median, low, high = median_interval(times_s)
        if not (all(map(math.isfinite, times_s)) and median > 0):
            return True  # the clock stands still: more of the same says no more, see check_times
        scatter = (max(times_s) - min(times_s)) / median
        if scatter <= self.quiet:
            return True
        if spent_s >= self.seconds:
            return scatter <= ROUGH or count >= ROUGH_SAMPLES or spent_s >= 3 * self.seconds
        return count >= STEADY_SAMPLES and (high - low) / 2 <= self.half_width * median


def check_times(times_s: Sequence[float], what: str) -> None:
    """Raise NothingMeasured, naming ``what`` was timed, unless there are times and all are finite and above 0 s."""
    if not times_s or not all(math.isfinite(taken) and taken > 0 for taken in times_s):
        raise NothingMeasured(
            f"{what}: calls took {list(times_s[:3])} s by the clock, of which no price can be made: look at the "
            "machine's clock"
        )


@dataclass(frozen=True)
class Wrong:
    """Bytes that arrived different from what was sent, from one rank to another, over all calls of a cell."""

    src: int
    dst: int
    bytes: int


@dataclass(frozen=True)
class Samples:
    """What ``Measure`` returns, equal on all ranks: seconds per call (maximum over ranks), wall time, wrong bytes."""

    times_s: tuple[float, ...]
    spent_s: float
    wrong: tuple[Wrong, ...] = ()


class Measure(Protocol):
    """The seam. Collective: every rank calls it with equal arguments and gets equal results."""

    def __call__(
        self, matrix: IntArray, executor: str, *, messages: int = 1, calls: int = 1, sampling: Sampling | None = None
    ) -> Samples:
        """Move ``matrix[r, q]`` bytes from rank r to rank q (world x world) and time it.

        ``messages``: each pair's bytes are cut into so many messages (send-recv only). ``calls``: 1 for an isolated
        call after a barrier; more for a back-to-back series after one barrier, of which the time per call is returned.
        """


class MeasurePacking(Protocol):
    """The local seam: gather or scatter of strided segments, no communication. Collective like ``Measure``."""

    def __call__(
        self,
        direction: str,
        run_bytes: int,
        runs: int,
        *,
        copies: int = 1,
        ranks: Sequence[int] = (),
        sampling: Sampling | None = None,
    ) -> Samples:
        """Time ``direction`` ("pack" or "unpack") of ``runs`` contiguous runs of ``run_bytes`` each, evenly over
        ``copies`` strided copies, on all of ``ranks`` at once (none given: the ranks of node 0)."""


@dataclass(frozen=True)
class Instruments:
    """Everything probing needs from the cluster: the two seams and the largest message memory allows, in bytes."""

    exchange: Measure
    packing: MeasurePacking | None
    largest_bytes: int = 1 << 28


@dataclass(frozen=True)
class Cell:
    """One measured cell: a pattern of flows and its samples.

    flows: (src, dst, bytes). messages: per flow. calls: 1 isolated, more back-to-back (samples are per call). epochs:
    how many of the samples, in order, were taken in each epoch; empty: all in one.
    """

    pattern: str
    executor: str
    flows: tuple[tuple[int, int, int], ...]
    samples_s: tuple[float, ...]
    messages: int = 1
    calls: int = 1
    epochs: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of the largest flow."""
        return max((flow[2] for flow in self.flows), default=0)

    @property
    def median_s(self) -> float:
        """The (lower) median of the epochs' medians: what disturbed one epoch of two is left out."""
        return median_low([float(np.median(samples)) for samples in self.epoch_samples])

    def resampled(self, rng: np.random.Generator) -> Cell:
        """The same cell with epochs, and then the samples within them, drawn with replacement: one bootstrap
        replicate."""
        samples, epochs = _drawn(self.epoch_samples, rng)
        return replace(self, samples_s=samples, epochs=epochs)

    @property
    def epoch_samples(self) -> list[FloatArray]:
        """The samples of each epoch."""
        return _by_epoch(self.samples_s, self.epochs)

    @property
    def unstable(self) -> bool:
        """Whether medians of two epochs differ by more than ``UNSTABLE``."""
        return _differ(self.epoch_samples)

    def again(self, more: Sequence[float]) -> Cell:
        """The cell with the samples of one more epoch."""
        before = self.epochs or (len(self.samples_s),)
        return replace(self, samples_s=(*self.samples_s, *more), epochs=(*before, len(more)))

    def to_dict(self) -> dict[str, Any]:
        return {
            "pattern": self.pattern,
            "executor": self.executor,
            "flows": [list(flow) for flow in self.flows],
            "messages": self.messages,
            "calls": self.calls,
            "median_s": self.median_s,
            "samples_s": list(self.samples_s),
            "epochs": list(self.epochs),
        }

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Cell:
        flows = tuple((int(r), int(q), int(b)) for r, q, b in entry["flows"])
        samples = tuple(float(t) for t in entry["samples_s"])
        epochs = tuple(int(count) for count in entry["epochs"])
        return cls(entry["pattern"], entry["executor"], flows, samples, entry["messages"], entry["calls"], epochs)


@dataclass(frozen=True)
class PackCell:
    """One measured cell of packing: ``runs`` runs of ``run_bytes`` gathered ("pack") or scattered ("unpack") by
    ``copies`` strided copies on so many ``ranks`` at once."""

    direction: str
    run_bytes: int
    runs: int
    copies: int
    ranks: int
    samples_s: tuple[float, ...]
    epochs: tuple[int, ...] = ()

    @property
    def median_s(self) -> float:
        """As of a ``Cell``."""
        return median_low([float(np.median(samples)) for samples in _by_epoch(self.samples_s, self.epochs)])

    def resampled(self, rng: np.random.Generator) -> PackCell:
        """One bootstrap replicate, drawn like ``Cell.resampled``."""
        samples, epochs = _drawn(_by_epoch(self.samples_s, self.epochs), rng)
        return replace(self, samples_s=samples, epochs=epochs)

    @property
    def unstable(self) -> bool:
        """Whether medians of two epochs differ by more than ``UNSTABLE``."""
        return _differ(_by_epoch(self.samples_s, self.epochs))

    def again(self, more: Sequence[float]) -> PackCell:
        """The cell with the samples of one more epoch."""
        before = self.epochs or (len(self.samples_s),)
        return replace(self, samples_s=(*self.samples_s, *more), epochs=(*before, len(more)))

    def to_dict(self) -> dict[str, Any]:
        return {
            "direction": self.direction,
            "run_bytes": self.run_bytes,
            "runs": self.runs,
            "copies": self.copies,
            "ranks": self.ranks,
            "median_s": self.median_s,
            "samples_s": list(self.samples_s),
            "epochs": list(self.epochs),
        }

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> PackCell:
        samples = tuple(float(t) for t in entry["samples_s"])
        run_bytes, runs, copies, ranks = (int(entry[name]) for name in ("run_bytes", "runs", "copies", "ranks"))
        epochs = tuple(int(count) for count in entry["epochs"])
        return cls(entry["direction"], run_bytes, runs, copies, ranks, samples, epochs)


def _by_epoch(samples_s: Sequence[float], epochs: Sequence[int]) -> list[FloatArray]:
    return np.split(np.asarray(samples_s, dtype=np.float64), np.cumsum(epochs)[:-1] if epochs else [])


def _drawn(epochs: Sequence[FloatArray], rng: np.random.Generator) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Samples of as many epochs drawn with replacement, drawn anew within each, and their numbers."""
    drawn = [rng.choice(epochs[k], size=len(epochs[k])) for k in rng.integers(len(epochs), size=len(epochs)).tolist()]
    return tuple(np.concatenate(drawn).tolist()), tuple(len(samples) for samples in drawn)


def _differ(epochs: Sequence[FloatArray]) -> bool:
    medians = [float(np.median(samples)) for samples in epochs]
    return max(medians) > (1 + UNSTABLE) * min(medians)

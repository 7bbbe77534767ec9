"""Recording cells within a budget: settings, findings, and the object that measures one cell at a time.

``Recorder(instruments, topology, settings).cell("pair", flows, expected_s)`` measures, checks and keeps a cell, or
skips it where the budget is spent. Every rank makes the same calls, because all decisions rest on samples that are
equal on all of them. No torch import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from relaymeter.calibration.cells import Cell, Instruments, PackCell, Samples, Sampling, check_times
from relaymeter.calibration.links import Sharing
from relaymeter.calibration.patterns import Flow, matrix_of
from relaymeter.errors import DigestMismatch
from relaymeter.records import median_interval
from relaymeter.relayout.topology import Topology

__all__ = ["LEAST_END_BYTES", "LEAST_MATRICES", "Findings", "Recorder", "Settings"]

#: The largest message per pair (larger ones are where misplaced blocks were seen in the field).
MESSAGE_CAP_BYTES = 256 << 20
#: About as many cells as one executor takes; only the pace within the budget depends on it.
_CELLS = 70
#: Exchanges of more bytes in all are timed one by one.
_SERIES_BYTES = 4 << 20
#: So many uneven matrices are measured whatever the budget: without them the error of the prices is unknown.
LEAST_MATRICES = 3
#: No curve ends below this size without need.
LEAST_END_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How far calibration goes. ``Settings.short()`` is the short form."""

    budget_s: float = 60.0
    """Wall time after which only what a price cannot do without is still measured."""
    call_s: float = 0.09
    """A large flow is sized to take about this long."""
    largest_s: float = 0.25
    """A curve ends before a call takes longer than this, whether its rate is flat or not."""
    cell_s: float = 0.2
    """Wall time of a noisy cell in one epoch."""
    pairs: int = 16
    """Directed pairs of each kind that are held against each other."""
    matrices: int = 6
    """Random uneven matrices per executor, measured for the error of the prices and never fitted."""
    coarse: bool = False
    """Fewer sizes below 1 MiB (of the second executor below 4 MiB), and fewer kinds of packing."""
    replicates: int = 32
    """Bootstrap replicates of all costs."""
    first_epoch: float = 0.62
    """Share of the budget for the first epoch of exchanges; packing follows, and what scatters takes the rest."""
    epochs: int = 4
    """Most epochs that a cell is measured in, in another order each, as long as its samples do not agree."""

    @classmethod
    def short(cls, budget_s: float = 12.0) -> Settings:
        """``--quick``: fewer sizes, samples and matrices."""
        return cls(
            budget_s=budget_s, call_s=0.045, largest_s=0.025, cell_s=0.1, pairs=4, matrices=4, coarse=True,
            replicates=16, epochs=2, first_epoch=0.85,
        )  # fmt: skip


@dataclass
class Findings:
    """What probing found: cells, the topology with its NICs, and what did not go as expected."""

    topology: Topology
    cells: list[Cell] = field(default_factory=list)
    pack_cells: list[PackCell] = field(default_factory=list)
    sharing: list[Sharing] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    spent_s: float = 0.0

    def of(self, pattern: str, executor: str) -> list[Cell]:
        """Cells of one pattern and executor, in order of measurement."""
        return [cell for cell in self.cells if cell.pattern == pattern and cell.executor == executor]


class Recorder:
    """Measures cells and keeps them, at a pace that fits the budget of the executor at hand."""

    def __init__(self, instruments: Instruments, topology: Topology, settings: Settings) -> None:
        self.found = Findings(topology)
        self.settings = settings
        self.instruments = instruments
        self.executor = ""
        self._samplings: list[Sampling] = []
        self._until_s = settings.budget_s
        self._cells_left = _CELLS

    @property
    def topology(self) -> Topology:
        return self.found.topology

    @property
    def hurried(self) -> bool:
        """Whether the share of the budget is spent: only what a price cannot do without is still measured."""
        return self.found.spent_s >= self._until_s

    @property
    def largest_bytes(self) -> int:
        """Largest message that is measured."""
        return min(self.instruments.largest_bytes, MESSAGE_CAP_BYTES)

    def begin(self, executor: str, until_s: float) -> None:
        """Go on with ``executor``, whose share of the budget ends at ``until_s`` of spent time."""
        if executor != self.executor:
            self.executor, self._until_s, self._cells_left = executor, until_s, _CELLS

    def of(self, pattern: str) -> list[Cell]:
        """Cells of a pattern under the executor at hand."""
        return self.found.of(pattern, self.executor)

    def cell(
        self,
        pattern: str,
        flows: Sequence[Flow],
        expected_s: float,
        *,
        messages: int = 1,
        calls: int | None = None,
        essential: bool = False,
    ) -> Cell | None:
        """Measure and keep one cell; None where the budget is spent. ``expected_s`` chooses the series' length."""
        left_s = self._until_s - self.found.spent_s
        if not essential and left_s <= 0:
            self.found.skipped.append(f"{self.executor} {pattern}")
            return None
        share = float(np.clip(left_s / self._cells_left, 0.02, self.settings.cell_s))
        self._cells_left = max(8, self._cells_left - 1)
        if calls is None:
            total = sum(flow[2] for flow in flows)
            calls = min(self._calls(expected_s, total), max(1, int(share / (3 * expected_s))))
        share *= 0.5 if expected_s * calls < 5e-3 else 1.0
        sampling = Sampling(warmups=1 if calls > 1 or expected_s > 0.03 else 3, seconds=share)
        matrix = matrix_of(flows, self.topology.world_size)
        samples = self.instruments.exchange(matrix, self.executor, messages=messages, calls=calls, sampling=sampling)
        self.note(samples, f"{pattern} of {max((f[2] for f in flows), default=0)} bytes")
        cell = Cell(pattern, self.executor, tuple(flows), samples.times_s, messages, calls)
        self.found.cells.append(cell)
        self._samplings.append(sampling)
        return cell

    def again(self, until_s: float, progress: Callable[[float, int], None]) -> None:
        """Further epochs: measure once more, in an order drawn alike on all ranks, every cell whose samples do not
        agree, until ``until_s`` of spent time or until all are known well enough (``Sampling``'s own limits, and epochs
        whose medians agree). What lasts longer than one cell, such as another program, is then seen for what it is.

        ``progress(share, epoch)`` hears of each epoch (from 2) as it begins and of each tenth of the time: a share that
        only grows."""
        rng, begun = np.random.default_rng(20260102), self.found.spent_s
        told = (0, 0)
        for epoch in range(2, self.settings.epochs + 1):
            order = [number for number in rng.permutation(len(self.found.cells)).tolist() if self._open(number)]
            for number in order:
                if self.found.spent_s >= until_s:
                    return
                cell, sampling = self.found.cells[number], self._samplings[number]
                matrix = matrix_of(cell.flows, self.topology.world_size)
                samples = self.instruments.exchange(
                    matrix, cell.executor, messages=cell.messages, calls=cell.calls, sampling=sampling
                )
                self.note(samples, f"{cell.pattern} of {cell.size} bytes")
                self.found.cells[number] = cell.again(samples.times_s)
                share = min(1.0, (self.found.spent_s - begun) / max(until_s - begun, 1e-9))
                if told < (epoch, int(10 * share)):
                    told = epoch, int(10 * share)
                    progress(share, epoch)

    def _open(self, number: int) -> bool:
        """Whether a cell is worth another epoch: its samples scatter, and too much for their number."""
        cell, sampling = self.found.cells[number], self._samplings[number]
        median, low, high = median_interval(cell.samples_s)
        if max(cell.samples_s) - min(cell.samples_s) <= sampling.quiet * median:
            return False
        return len(cell.epochs) < 2 or cell.unstable or (high - low) / 2 > sampling.half_width * median

    def note(self, samples: Samples, what: str) -> None:
        """Count the time of a cell. Raises NothingMeasured where its times are none, DigestMismatch where bytes arrived
        wrong."""
        self.found.spent_s += samples.spent_s
        check_times(samples.times_s, f"calibration, {self.executor} {what}")
        if samples.wrong:
            bad = samples.wrong[0]
            total = sum(wrong.bytes for wrong in samples.wrong)
            raise DigestMismatch(
                f"calibration, {self.executor} {what}: {total} bytes arrived wrong, {bad.bytes} of them from rank "
                f"{bad.src} to rank {bad.dst}; a link that alters data has no rate: check the transport first"
            )

    def _calls(self, expected_s: float, total_bytes: int) -> int:
        """Calls of a series: some, of small exchanges; one, of those whose checking would take longer than they do."""
        most = 8 if total_bytes <= _SERIES_BYTES else 1
        return int(np.clip(round(0.6 * self.settings.call_s / max(expected_s, 1e-9)), 1, most))

    def flow_bytes(self, kind: str, seconds: float) -> tuple[int, float]:
        """The largest size of the curve of ``kind`` that takes at most ``seconds``, else the smallest; its time."""
        curve = {cell.size: cell.median_s for cell in self.of(f"{kind} curve")}
        best = max((size for size, took in curve.items() if took <= seconds), default=min(curve))
        return best, curve[best]

"""The probes: which patterns are measured, in which order, and how far each goes.

``Prober(instruments, topology, settings, progress).run(executors) -> Findings`` runs on every rank with equal
arguments; all decisions rest on samples that are equal on all ranks, so all ranks make the same calls. No torch import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from relaymeter.calibration import patterns
from relaymeter.calibration.cells import Cell, Instruments, PackCell, Samples, Sampling
from relaymeter.calibration.costs import CROSS_NODE, IN_NODE
from relaymeter.calibration.links import Sharing, classify_ratio, join, link_classes, link_warnings, with_nics
from relaymeter.calibration.patterns import Flow, matrix_of
from relaymeter.errors import DigestMismatch, NothingMeasured
from relaymeter.relayout.topology import Topology

__all__ = ["Findings", "Prober", "Settings"]

Progress = Callable[[float, str], None]
#: The largest message per pair (larger ones are where misplaced blocks were seen in the field).
MESSAGE_CAP_BYTES = 256 << 20
#: Share of the budget for exchanges (the rest is for packing), and of that for the first of several executors.
_PROBE_SHARE = 0.93
_FIRST_SHARE = 0.62
#: About as many cells as one executor takes; only the pace within the budget depends on it.
_CELLS = 60
#: No curve ends below this size without need.
_LEAST_END = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How far calibration goes. ``Settings.quick()`` is the short form."""

    budget_s: float = 60.0
    """Wall time after which only what a price cannot do without is still measured."""
    call_s: float = 0.09
    """A large flow is sized to take about this long."""
    largest_s: float = 0.25
    """A curve ends before a call takes longer than this, whether its rate is flat or not."""
    cell_s: float = 0.5
    """Wall time of a noisy cell."""
    pairs: int = 16
    """Directed pairs of each kind that are held against each other."""
    matrices: int = 6
    """Random uneven matrices per executor, measured for the error of the prices and never fitted."""
    coarse: bool = False
    """Fewer sizes below 1 MiB."""
    replicates: int = 32
    """Bootstrap replicates of all costs."""

    @classmethod
    def short(cls, budget_s: float = 20.0) -> Settings:
        """``--quick``: fewer sizes, samples and matrices."""
        return cls(budget_s=budget_s, call_s=0.045, largest_s=0.12, cell_s=0.15, pairs=4, matrices=3, coarse=True)


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


class Prober:
    """Runs the probes. One object per calibration, the same on every rank."""

    def __init__(
        self, instruments: Instruments, topology: Topology, settings: Settings, progress: Progress | None = None
    ) -> None:
        if topology.world_size < 2:
            raise NothingMeasured("a world of one rank has no link to measure: start at least two ranks")
        self.found = Findings(topology)
        self._in, self._set = instruments, settings
        self._progress = progress or (lambda fraction, text: None)
        self._executor, self._until_s, self._cells_left = "", settings.budget_s, _CELLS
        node = next((n for n in range(topology.nodes) if len(topology.ranks_of(n)) > 1), None)
        ranks = () if node is None else topology.ranks_of(node)
        self._near = None if node is None else (node, ranks[0], ranks[1])
        self._far = (topology.ranks_of(0)[0], topology.ranks_of(1)[0]) if topology.nodes > 1 else None

    @property
    def topology(self) -> Topology:
        return self.found.topology

    def run(self, executors: Sequence[str]) -> Findings:
        """Measure with every executor; the first one is probed most. Raises DigestMismatch on a wrong byte."""
        steps: list[tuple[str, Callable[[], None]]] = []
        begun = 0.0
        for number, executor in enumerate(executors):
            begun += (_FIRST_SHARE if number == 0 else (1 - _FIRST_SHARE) / (len(executors) - 1)) * _PROBE_SHARE
            until = self._set.budget_s * (_PROBE_SHARE if len(executors) == 1 else begun)
            for name, step in self._steps(number == 0):
                steps.append((f"{executor}: {name}", self._under(executor, until, step)))
        steps.append(("packing", self._packing))
        for number, (name, step) in enumerate(steps):
            self._progress(number / len(steps), name)
            step()
        self._progress(1.0, "probed")
        if self.found.skipped:
            skipped = ", ".join(dict.fromkeys(self.found.skipped))
            self.found.warnings.append(
                f"the budget of {self._set.budget_s:g} s was spent before: {skipped}; their defaults are used"
            )
        return self.found

    def _under(self, executor: str, until_s: float, step: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            if executor != self._executor:
                self._executor, self._until_s, self._cells_left = executor, until_s, _CELLS
            step()

        return call

    def _steps(self, first: bool) -> list[tuple[str, Callable[[], None]]]:
        steps: list[tuple[str, Callable[[], None]]] = [("empty call", self._empty), ("time against size", self._curves)]
        if first:
            steps.append(("shared NICs", self._sharing))
        steps += [
            ("both directions", self._two_way),
            ("nodes at once", self._nodes),
            ("inside nodes", self._inside),
            ("overlap of stages", self._overlap),
            ("uneven matrices", self._matrices),
        ]
        if first:
            # What links and NICs there are does not depend on the executor.
            steps += [("single NICs", self._nics), ("pairs", self._pairs)]
        return [*steps, ("fan-in and fan-out", self._fans), ("many messages", self._messages)]

    # One cell

    def _cell(
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
            self.found.skipped.append(f"{self._executor} {pattern}")
            return None
        share = float(np.clip(left_s / self._cells_left, 0.02, self._set.cell_s))
        self._cells_left = max(8, self._cells_left - 1)
        if calls is None:
            calls = min(self._calls(expected_s), max(1, int(share / (3 * expected_s))))
        share *= 0.5 if expected_s * calls < 5e-3 else 1.0
        sampling = Sampling(warmups=1 if calls > 1 or expected_s > 0.03 else 3, seconds=share)
        matrix = matrix_of(flows, self.topology.world_size)
        samples = self._in.exchange(matrix, self._executor, messages=messages, calls=calls, sampling=sampling)
        self._note(samples, f"{pattern} of {max((f[2] for f in flows), default=0)} bytes")
        cell = Cell(pattern, self._executor, tuple(flows), samples.times_s, messages, calls)
        self.found.cells.append(cell)
        return cell

    def _note(self, samples: Samples, what: str) -> None:
        self.found.spent_s += samples.spent_s
        if samples.wrong:
            bad = samples.wrong[0]
            total = sum(wrong.bytes for wrong in samples.wrong)
            raise DigestMismatch(
                f"calibration, {self._executor} {what}: {total} bytes arrived wrong, {bad.bytes} of them from rank "
                f"{bad.src} to rank {bad.dst}; a link that alters data has no rate: check the transport first"
            )

    def _calls(self, expected_s: float) -> int:
        return int(np.clip(round(0.6 * self._set.call_s / max(expected_s, 1e-9)), 1, 8))

    def _flow_bytes(self, kind: str, seconds: float) -> tuple[int, float]:
        """The largest size of the curve of ``kind`` that takes at most ``seconds``, else the smallest; its time."""
        curve = {cell.size: cell.median_s for cell in self.found.of(f"{kind} curve", self._executor)}
        best = max((size for size, took in curve.items() if took <= seconds), default=min(curve))
        return best, curve[best]

    @property
    def _largest(self) -> int:
        return min(self._in.largest_bytes, MESSAGE_CAP_BYTES)

    # The probes

    def _empty(self) -> None:
        self._cell("empty", [], 1e-3, calls=1, essential=True)
        self._cell("empty", [], 1e-3, calls=8, essential=True)

    def _curves(self) -> None:
        if self._near is not None:
            self._curve(IN_NODE, self._near[1], self._near[2])
        if self._far is not None:
            self._curve(CROSS_NODE, *self._far)

    def _curve(self, kind: str, src: int, dst: int) -> None:
        """Sizes by four up to 16 KiB, then by two, until the rate is flat or a call takes ``largest_s``.

        Flat: two sizes in a row, of 4 MiB or more, are no faster than the best before them by 3 %. A curve goes on to
        4 MiB unless a call would take four times as long as it may.
        """
        size, expected, best, flat = 1024, 1e-3, 0.0, 0
        while size <= self._largest:
            cell = self._cell(f"{kind} curve", [(src, dst, size)], expected, essential=True)
            if cell is None:
                return
            rate = size / cell.median_s
            flat = flat + 1 if rate < 1.03 * best and size >= _LEAST_END else 0
            best = max(best, rate)
            hurried = self.found.spent_s >= self._until_s
            coarse = (hurried or self._set.coarse) and size < (1 << 20)
            factor = 4 if size < (16 << 10) or coarse else 2
            expected = cell.median_s * (factor if size >= 65536 else 1)
            ends = flat >= 2 or hurried or expected > self._set.largest_s
            if (ends and size >= _LEAST_END) or expected > 4 * self._set.largest_s:
                return
            size *= factor

    def _pairs(self) -> None:
        near, far = (patterns.in_node_pairs, IN_NODE, self._near), (patterns.cross_pairs, CROSS_NODE, self._far)
        rates: dict[tuple[int, int], float] = {}
        for choose, kind, known in (near, far):
            if known is None:
                continue
            size, expected = self._flow_bytes(kind, self._set.call_s / 3)
            for src, dst in choose(self.topology, self._set.pairs):
                took = self._alone(kind, src, dst, size, expected)
                if took is not None:
                    rates[src, dst] = size / took
        if rates:
            self.found.warnings += [f"{self._executor}: {w}" for w in link_warnings(link_classes(rates, self.topology))]

    def _sharing(self) -> None:
        """Which ranks of a node share a NIC: two flows out of it (and into it) at once against each alone."""
        topology = self.topology
        if self._far is None:
            return
        size, expected = self._flow_bytes(CROSS_NODE, self._set.call_s / 3)
        groups: dict[int, list[list[int]]] = {}
        for node in range(topology.nodes if topology.nodes <= 4 else 2):
            if len(topology.ranks_of(node)) > 1:
                groups[node] = join(topology.ranks_of(node), lambda one, two: self._share(one, two, size, expected))
        if not groups or self.found.skipped:
            return
        measured = with_nics(topology, groups)
        if measured != topology:
            self.found.warnings.append(
                f"NICs: the launcher says {_count(topology)}, the measured flows say {_count(measured)}; "
                "the measurement is used"
            )
        self.found.topology = measured

    def _share(self, one: int, two: int, size: int, expected: float) -> bool:
        """Whether two ranks of a node share a NIC; where the data do not decide, what the topology says."""
        topology = self.topology
        hint = topology.nic[one] == topology.nic[two]
        home = topology.node[one]
        away = [(home + step) % topology.nodes for step in range(1, min(topology.nodes, 3))]
        first, last = topology.ranks_of(away[0]), topology.ranks_of(away[-1])
        place = topology.ranks_of(home).index(one)
        tries = [(first[place % len(first)], last[(place + 1 + k) % len(last)]) for k in range(min(2, len(last)))]
        best: Sharing | None = None
        for x, y in tries:
            if x == y:
                continue
            ahead = [self._alone(CROSS_NODE, r, q, size, expected) for r, q in ((one, x), (two, y))]
            back = [self._alone(CROSS_NODE, r, q, size, expected) for r, q in ((x, one), (y, two))]
            out = self._together([(one, x, size), (two, y, size)], expected)
            into = self._together([(x, one, size), (y, two, size)], expected)
            control = self._together([(one, x, size), (y, two, size)], expected)
            if out is None or into is None or control is None or None in ahead or None in back:
                return hint
            (ahead_one, ahead_two), (back_one, back_two) = ([t or 0.0 for t in pair] for pair in (ahead, back))
            ratio = min(max(ahead_one, ahead_two) / out, max(back_one, back_two) / into)
            crossed = max(ahead_one, back_two) / control
            verdict = classify_ratio(one, two, ratio, crossed)
            if best is None or verdict.ratio > best.ratio:
                best = verdict
            if verdict.shared is False:
                break
        if best is None:
            return hint
        self.found.sharing.append(best)
        if best.shared is None:
            self.found.warnings.append(
                f"NICs: flows of ranks {one} and {two} together reach {best.ratio:.2f} of their speed alone (flows "
                f"that share no NIC {best.control:.2f}), which does not decide; the launcher's word is used"
            )
            return hint
        return best.shared

    def _alone(self, kind: str, src: int, dst: int, size: int, expected: float) -> float | None:
        """Seconds of one flow, measured once."""
        for cell in self.found.of(f"{kind} pair", self._executor):
            if cell.flows == ((src, dst, size),):
                return cell.median_s
        measured = self._cell(f"{kind} pair", [(src, dst, size)], expected)
        return None if measured is None else measured.median_s

    def _together(self, flows: list[Flow], expected: float) -> float | None:
        cell = self._cell("two flows", flows, expected)
        return None if cell is None else cell.median_s

    def _two_way(self) -> None:
        for kind, known in ((IN_NODE, self._near and self._near[1:]), (CROSS_NODE, self._far)):
            if known is not None:
                one, two = known
                size, expected = self._flow_bytes(kind, self._set.call_s)
                self._cell(f"{kind} two-way", [(one, two, size), (two, one, size)], expected)

    def _nics(self) -> None:
        """Every NIC (some of many), filled by all its ranks, to the like-numbered one of the next node."""
        topology = self.topology
        if self._far is None:
            return
        size, expected = self._flow_bytes(CROSS_NODE, self._set.call_s)
        for nic in sorted(set(topology.nic))[: self._set.pairs]:
            peers = patterns.nic_peers(topology, nic)
            if peers is not None:
                sources, targets, _ = peers
                share = max(16, size // len(sources) // 16 * 16)
                flows = [(rank, targets[k % len(targets)], share) for k, rank in enumerate(sources)]
                self._cell("nic", flows, expected)

    def _nodes(self) -> None:
        """All NICs of a node in one direction, in both, and of all nodes."""
        topology = self.topology
        if self._far is None:
            return
        size, expected = self._flow_bytes(CROSS_NODE, self._set.call_s)
        self._cell("rails", patterns.rails(topology, 0, 1, size), expected)
        self._cell("dense", patterns.dense(topology, 0, 1, size), expected)
        self._cell("dense both ways", patterns.dense(topology, 0, 1, size, both=True), expected)
        flows = patterns.turn(topology, 0, 1, size)
        if flows:
            self._cell("turn", flows, expected)
        if topology.nodes > 2:
            ring = [patterns.dense(topology, node, (node + 1) % topology.nodes, size) for node in range(topology.nodes)]
            self._cell("dense ring", [flow for part in ring for flow in part], expected)

    def _fans(self) -> None:
        topology = self.topology
        for kind, known in ((CROSS_NODE, self._far), (IN_NODE, self._near)):
            if known is None:
                continue
            rank, others = (
                (known[1], topology.ranks_of(0)) if kind == CROSS_NODE else (known[1], topology.ranks_of(known[0]))
            )
            others = tuple(other for other in others if other != rank)
            size, expected = self._flow_bytes(kind, self._set.call_s)
            for many in dict.fromkeys((2, len(others))):
                if 2 <= many <= len(others):
                    share = max(16, size // many // 16 * 16)
                    self._cell(f"{kind} fan-in", patterns.fan_in(others[:many], rank, share), expected)
                    self._cell(f"{kind} fan-out", patterns.fan_out(rank, others[:many], share), expected)

    def _inside(self) -> None:
        """The exchange of bands of a spread: every pair of one node, then of all nodes at once."""
        if self._near is None:
            return
        topology, node = self.topology, self._near[0]
        size, expected = self._flow_bytes(IN_NODE, self._set.call_s / 2)
        share = max(16, size // (len(topology.ranks_of(node)) - 1) // 16 * 16)
        self._cell("in_node all pairs", patterns.all_pairs(topology, [node], share), expected)
        if topology.nodes > 1:
            everywhere = patterns.all_pairs(topology, range(topology.nodes), share)
            self._cell("in_node all pairs everywhere", everywhere, expected)

    def _overlap(self) -> None:
        """Stage one between nodes and stage two inside the receiving node: each alone, then together."""
        if self._near is None or self._far is None or len(self.topology.ranks_of(1)) < 2:
            return
        far, expected = self._flow_bytes(CROSS_NODE, self._set.call_s / 2)
        near, _ = self._flow_bytes(IN_NODE, self._set.call_s / 2)
        across = patterns.rails(self.topology, 0, 1, far)
        inside = patterns.all_pairs(
            self.topology, [1], max(16, near // (len(self.topology.ranks_of(1)) - 1) // 16 * 16)
        )
        self._cell("overlap cross", across, expected, calls=1)
        self._cell("overlap in node", inside, expected, calls=1)
        self._cell("overlap both", [*across, *inside], expected, calls=1)

    def _messages(self) -> None:
        """The same bytes as one message and as sixteen."""
        if self._executor != "send-recv":
            return
        for kind, known in ((IN_NODE, self._near and self._near[1:]), (CROSS_NODE, self._far)):
            if known is not None:
                flows = [(known[0], known[1], 1 << 20)]
                curve = {cell.size: cell.median_s for cell in self.found.of(f"{kind} curve", self._executor)}
                expected = curve.get(1 << 20, 1e-2)
                self._cell(f"{kind} messages", flows, expected)
                self._cell(f"{kind} messages", flows, expected, messages=16)

    def _matrices(self) -> None:
        rng = np.random.default_rng(20260101)
        sizes = {}
        for kind, known in ((IN_NODE, self._near), (CROSS_NODE, self._far)):
            sizes[kind] = 0 if known is None else self._flow_bytes(kind, self._set.call_s)[0]
        for _ in range(self._set.matrices):
            flows = patterns.random_matrix(self.topology, rng, sizes[CROSS_NODE], sizes[IN_NODE])
            if flows:
                self._cell("uneven", flows, 2 * self._set.call_s, calls=1)

    def _packing(self) -> None:
        measure = self._in.packing
        if measure is None:
            return
        table: Mapping[int, tuple[int, ...]] = {64: (16, 1024), 1024: (16, 1024), 16384: (1, 64, 256), 1 << 20: (1, 4)}
        for direction in ("pack", "unpack"):
            for run, counts in table.items():
                for segments in counts:
                    sampling = Sampling(warmups=2, seconds=self._set.cell_s / 2)
                    samples = measure(direction, run, segments, sampling=sampling)
                    self.found.spent_s += samples.spent_s
                    self.found.pack_cells.append(PackCell(direction, run, segments, samples.times_s))


def _count(topology: Topology) -> str:
    per_node = [len(topology.nics_of(node)) for node in range(topology.nodes)]
    return " + ".join(str(count) for count in per_node) + " NICs on the nodes"

"""The probes: which patterns are measured, in which order, and how far each goes.

``Prober(instruments, topology, settings, progress).run(executors) -> Findings`` runs on every rank with equal
arguments; all decisions rest on samples that are equal on all ranks, so all ranks make the same calls. No torch import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from relaymeter.calibration import patterns
from relaymeter.calibration.cells import Instruments, PackCell, Sampling
from relaymeter.calibration.costs import CROSS_NODE, IN_NODE
from relaymeter.calibration.links import (
    CLASS_RATIO,
    Sharing,
    alike,
    classify_ratio,
    join,
    link_classes,
    link_warnings,
    with_nics,
)
from relaymeter.calibration.patterns import Flow
from relaymeter.calibration.recorder import LEAST_END_BYTES, LEAST_MATRICES, Findings, Recorder, Settings
from relaymeter.errors import NothingMeasured
from relaymeter.relayout.topology import Topology

__all__ = ["Prober"]

Progress = Callable[[float, str], None]
#: Share of the first epoch of exchanges for the first of several executors.
_FIRST_SHARE = 0.62
#: Smallest message of a curve; the others are multiples by powers of two. No power of two itself: messages that just
#: pass what a network card segments at once (64 KiB) take up to twice as long as others, and are rare in moves.
_FIRST_BYTES = 11 * 128
#: A single NIC is timed with flows of about this long even in the short form: its rate is what bounds are made of.
_NIC_CALL_S = 0.1
#: What a further peer costs is measured with so many of them.
_LEAST_PEERS, _MOST_PEERS = 3, 128
#: A message of no more bytes takes its latency and little else.
_SMALL_BYTES = 32 << 10
#: What is packed: bytes of a run, runs, and strided copies that they are spread over.
_PACKED = (
    (16, 65536, 1), (16, 1024, 16), (64, 1024, 1024), (256, 4096, 1), (1024, 16, 16), (1024, 1024, 1024),
    (1024, 1024, 1), (16384, 1, 1), (16384, 64, 64), (16384, 256, 16), (1 << 20, 4, 4),
)  # fmt: skip
_CROWD_BYTES, _CROWD_COPIES = 4 << 20, (64, 1024)
#: A curve ends, too, where a call takes so many times what the smallest message takes: its latency is nothing then.
_LATENCIES = 50


class Prober(Recorder):
    """Runs the probes. One object per calibration, the same on every rank."""

    def __init__(
        self, instruments: Instruments, topology: Topology, settings: Settings, progress: Progress | None = None
    ) -> None:
        if topology.world_size < 2:
            raise NothingMeasured("a world of one rank has no link to measure: start at least two ranks")
        super().__init__(instruments, topology, settings)
        self._first = True
        self._progress = progress or (lambda fraction, text: None)
        node = next((n for n in range(topology.nodes) if len(topology.ranks_of(n)) > 1), None)
        ranks = () if node is None else topology.ranks_of(node)
        self._near = None if node is None else (node, ranks[0], ranks[1])
        self._far = (topology.ranks_of(0)[0], topology.ranks_of(1)[0]) if topology.nodes > 1 else None

    def run(self, executors: Sequence[str]) -> Findings:
        """Measure with every executor; the first one is probed most. Raises DigestMismatch on a wrong byte."""
        steps: list[tuple[str, Callable[[], None]]] = []
        begun = 0.0
        for number, executor in enumerate(executors):
            begun += _FIRST_SHARE if number == 0 else (1 - _FIRST_SHARE) / (len(executors) - 1)
            share = self.settings.first_epoch
            until = self.settings.budget_s * (share if len(executors) == 1 else begun * share)
            for name, step in self._steps(number == 0):
                steps.append((f"{executor}: {name}", self._under(executor, number == 0, until, step)))
        steps.append(("packing", self._packing))
        first = self.settings.first_epoch
        for number, (name, step) in enumerate(steps):
            self._progress(first * number / len(steps), name)
            step()
        self.again(
            self.settings.budget_s,
            lambda share, epoch: self._progress(first + (1 - first) * share, f"epoch {epoch}, in another order"),
        )
        self._progress(1.0, "probed")
        if self.found.skipped:
            self.found.warnings.append(self._went_without(executors))
        return self.found

    def _went_without(self, executors: Sequence[str]) -> str:
        """What the budget left out, what that does to prices, and the remedy."""
        skipped = dict.fromkeys(self.found.skipped)
        left_out = ", ".join(skipped)
        says = []
        if any(not name.endswith("uneven") for name in skipped):
            says.append(
                "prices take these as another executor showed them, else flows as not disturbing each other and links "
                "as full duplex"
            )
        for executor in executors:
            if f"{executor} uneven" in skipped:
                matrices = len(self.found.of("uneven", executor))
                says.append(f"the error of {executor}'s prices stands on {matrices} matrices")
        one = f"measure one executor (--executor {executors[0]}) or " if len(executors) > 1 else ""
        more = f"{one}give more time (--budget {2 * self.settings.budget_s:g})"
        return f"the budget of {self.settings.budget_s:g} s was spent before: {left_out}: {'; '.join(says)}; {more}"

    def _under(self, executor: str, first: bool, until_s: float, step: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            self._first = first
            self.begin(executor, until_s)
            step()

        return call

    def _steps(self, first: bool) -> list[tuple[str, Callable[[], None]]]:
        steps: list[tuple[str, Callable[[], None]]] = [
            ("empty call", self._empty),
            ("time against size", self._curves),
            ("lone calls", self._lone),
        ]
        if first:
            steps.append(("shared NICs", self._sharing))
        steps += [
            ("both directions", self._two_way),
            ("overlap of stages", self._overlap),
            ("nodes at once", self._nodes),
            ("inside nodes", self._inside),
            ("uneven matrices", self._matrices),
        ]
        if first:
            # What links and NICs there are does not depend on the executor.
            steps += [("single NICs", self._nics), ("fan-in and fan-out", self._fans)]
        if first and not self.settings.coarse:
            steps += [("pairs", self._pairs)]
        if not first and not self.settings.coarse:
            steps += [("fan-in and fan-out", self._fans)]
        return steps if self.settings.coarse else [*steps, ("many messages", self._messages)]

    def _empty(self) -> None:
        self.cell("empty", [], 1e-3, calls=1, essential=True)
        self.cell("empty", [], 1e-3, calls=8, essential=True)

    def _curves(self) -> None:
        if self._near is not None:
            self._curve(IN_NODE, self._near[1], self._near[2])
        if self._far is not None:
            self._curve(CROSS_NODE, *self._far)

    def _curve(self, kind: str, src: int, dst: int) -> None:
        """Sizes by four up to 16 KiB, then by two, until the rate is flat or a call takes ``largest_s``.

        Flat: two sizes in a row, of 4 MiB or more, are no faster than the best before them by 3 %; or the latency is
        nothing beside the time. A curve goes on to 4 MiB unless a call would take four times as long as it may.
        """
        size, expected, best, flat, smallest = _FIRST_BYTES, 1e-3, 0.0, 0, 0.0
        while size <= self.largest_bytes:
            cell = self.cell(f"{kind} curve", [(src, dst, size)], expected, essential=True)
            if cell is None:
                return
            rate = size / cell.median_s
            flat = flat + 1 if rate < 1.03 * best and size >= LEAST_END_BYTES else 0
            best = max(best, rate)
            coarse = (self.hurried or self.settings.coarse) and size < (1 << 20 if self._first else LEAST_END_BYTES)
            factor = 4 if size < (16 << 10) or coarse else 2
            expected = cell.median_s * (factor if size >= 65536 else 1)
            smallest = smallest or cell.median_s
            long = expected > self.settings.largest_s or cell.median_s > _LATENCIES * smallest
            ends = flat >= 2 or self.hurried or long
            if (ends and size >= LEAST_END_BYTES) or expected > 4 * self.settings.largest_s:
                return
            size *= factor if size * factor <= self.largest_bytes else 2

    def _lone(self) -> None:
        """A message that is all latency in a call of its own, where the curve has it in a series; and one such message
        from every rank to the next."""
        if self.settings.coarse and not self._first:
            return
        kinds = ((IN_NODE, self._near), (CROSS_NODE, self._far))
        for kind, known in kinds:
            small = [cell for cell in self.of(f"{kind} curve") if cell.size <= _SMALL_BYTES]
            if known is not None and small:
                self.cell(f"{kind} lone call", small[-1].flows, small[-1].median_s, calls=1)
        smallest = [self.of(f"{kind} curve")[0].median_s for kind, known in kinds if known is not None]
        if self.topology.world_size > 2:
            self.cell("ring", patterns.ring(self.topology, _FIRST_BYTES), 2 * max(smallest))

    def _pairs(self) -> None:
        near, far = (patterns.in_node_pairs, IN_NODE, self._near), (patterns.cross_pairs, CROSS_NODE, self._far)
        rates: dict[tuple[int, int], float] = {}
        for choose, kind, known in (near, far):
            if known is None:
                continue
            size, expected = self.flow_bytes(kind, self.settings.call_s / 3)
            for src, dst in choose(self.topology, self.settings.pairs):
                took = self._alone(kind, src, dst, size, expected)
                if took is not None:
                    rates[src, dst] = size / took
        if rates:
            self.found.warnings += [f"{self.executor}: {w}" for w in link_warnings(link_classes(rates, self.topology))]

    def _sharing(self) -> None:
        """Which ranks of a node share a NIC: two flows out of it (and into it) at once against each alone."""
        topology = self.topology
        if self._far is None:
            return
        size, expected = self.flow_bytes(CROSS_NODE, self.settings.call_s / 3)
        groups: dict[int, list[list[int]]] = {}
        for node in range(topology.nodes if topology.nodes <= 4 else 1):
            if len(topology.ranks_of(node)) > 1:
                groups[node] = join(topology.ranks_of(node), lambda one, two: self._share(one, two, size, expected))
        if not groups or self.found.skipped:
            return
        if not alike(topology, groups):
            self.found.warnings.append(
                "NICs: nodes that should be alike were measured to group their ranks differently, which is noise more "
                "often than wiring; the launcher's word is used"
            )
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
            lone = partial(self._alone, CROSS_NODE, size=size, expected=expected, essential=True)
            ahead = [lone(r, q) for r, q in ((one, x), (two, y))]
            back = [lone(r, q) for r, q in ((x, one), (y, two))]
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
        if best.shared and not hint and not self._network_is_slower():
            best = replace(best, shared=None)
        self.found.sharing.append(best)
        if best.shared is None:
            self.found.warnings.append(
                f"NICs: flows of ranks {one} and {two} together reach {best.ratio:.2f} of their speed alone (flows "
                f"that share no NIC {best.control:.2f}), which does not decide; the launcher's word is used"
            )
            return hint
        return best.shared

    def _network_is_slower(self) -> bool:
        """Whether a lone flow between nodes is slower than one inside a node. Where it is not, two flows that slow each
        other down may share cores or memory just as well as a NIC."""
        if self._near is None:
            return True
        best = [max(cell.size / cell.median_s for cell in self.of(f"{kind} curve")) for kind in (IN_NODE, CROSS_NODE)]
        return best[0] > CLASS_RATIO * best[1]

    def _alone(
        self, kind: str, src: int, dst: int, size: int, expected: float, *, essential: bool = False
    ) -> float | None:
        """Seconds of one flow, measured once."""
        for cell in self.of(f"{kind} pair"):
            if cell.flows == ((src, dst, size),):
                return cell.median_s
        measured = self.cell(f"{kind} pair", [(src, dst, size)], expected, essential=essential)
        return None if measured is None else measured.median_s

    def _together(self, flows: list[Flow], expected: float) -> float | None:
        cell = self.cell("two flows", flows, expected, essential=True)
        return None if cell is None else cell.median_s

    def _two_way(self) -> None:
        for kind, known in ((IN_NODE, self._near and self._near[1:]), (CROSS_NODE, self._far)):
            if known is not None:
                one, two = known
                size, expected = self.flow_bytes(kind, self.settings.call_s)
                self.cell(f"{kind} two-way", [(one, two, size), (two, one, size)], expected)

    def _nics(self) -> None:
        """Every NIC (some of many), filled by all its ranks, to the like-numbered one of the next node."""
        topology = self.topology
        if self._far is None:
            return
        size, expected = self.flow_bytes(CROSS_NODE, max(self.settings.call_s, _NIC_CALL_S))
        for nic in sorted(set(topology.nic))[: self.settings.pairs]:
            peers = patterns.nic_peers(topology, nic)
            if peers is not None:
                sources, targets, _ = peers
                share = max(16, size // len(sources) // 16 * 16)
                flows = [(rank, targets[k % len(targets)], share) for k, rank in enumerate(sources)]
                self.cell("nic", flows, expected)

    def _nodes(self) -> None:
        """All NICs of a node in one direction, in both, and of all nodes."""
        topology = self.topology
        if self._far is None:
            return
        size, expected = self.flow_bytes(CROSS_NODE, self.settings.call_s)
        self.cell("rails", patterns.rails(topology, 0, 1, size), expected)
        self.cell("dense", patterns.dense(topology, 0, 1, size), expected)
        halves = patterns.halves(topology, 0, 1, size)
        if halves and not self.settings.coarse:
            self.cell("halves", halves, expected)
        self.cell("dense both ways", patterns.dense(topology, 0, 1, size, both=True), expected)
        flows = patterns.turn(topology, 0, 1, size)
        if flows:
            self.cell("turn", flows, expected)
        if topology.nodes > 2:
            ring = [patterns.dense(topology, node, (node + 1) % topology.nodes, size) for node in range(topology.nodes)]
            self.cell("dense ring", [flow for part in ring for flow in part], expected)

    def _fans(self) -> None:
        topology = self.topology
        for kind, known in ((CROSS_NODE, self._far), (IN_NODE, self._near)):
            if known is None:
                continue
            rank, others = (
                (known[1], topology.ranks_of(0)) if kind == CROSS_NODE else (known[1], topology.ranks_of(known[0]))
            )
            others = tuple(other for other in others if other != rank)
            size, expected = self.flow_bytes(kind, self.settings.call_s)
            for many in dict.fromkeys((2, len(others))):
                if 2 <= many <= len(others):
                    share = max(16, size // many // 16 * 16)
                    self.cell(f"{kind} fan-in", patterns.fan_in(others[:many], rank, share), expected)
                    self.cell(f"{kind} fan-out", patterns.fan_out(rank, others[:many], share), expected)

    def _inside(self) -> None:
        """The exchange of bands of a spread: every pair of one node, then of all nodes at once."""
        if self._near is None:
            return
        topology, node = self.topology, self._near[0]
        size, expected = self.flow_bytes(IN_NODE, self.settings.call_s / 2)
        share = max(16, size // (len(topology.ranks_of(node)) - 1) // 16 * 16)
        self.cell("in_node all pairs", patterns.all_pairs(topology, [node], share), expected)
        if topology.nodes > 1:
            everywhere = patterns.all_pairs(topology, range(topology.nodes), share)
            self.cell("in_node all pairs everywhere", everywhere, expected)
            apart = patterns.one_pair_a_node(topology, size)
            if len(apart) > 1:
                self.cell("in_node apart", apart, expected)

    def _overlap(self) -> None:
        """Stage one between nodes and stage two inside the receiving node, half as long: each alone, then together."""
        if self._near is None or self._far is None or len(self.topology.ranks_of(1)) < 2:
            return
        far, expected = self.flow_bytes(CROSS_NODE, self.settings.call_s)
        near, _ = self.flow_bytes(IN_NODE, expected / 2)
        across = patterns.rails(self.topology, 0, 1, far)
        inside = patterns.all_pairs(
            self.topology, [1], max(16, near // (len(self.topology.ranks_of(1)) - 1) // 16 * 16)
        )
        self.cell("overlap cross", across, expected, calls=1)
        self.cell("overlap in node", inside, expected, calls=1)
        self.cell("overlap both", [*across, *inside], expected, calls=1)

    def _messages(self) -> None:
        """Small messages to many peers at once; the same bytes as one message and as sixteen."""
        for kind, known in ((IN_NODE, self._near and self._near[1:]), (CROSS_NODE, self._far)):
            if known is not None:
                home = self.topology.node[known[0]]
                peers = [r for r, node in enumerate(self.topology.node) if (node == home) == (kind == IN_NODE)]
                flows = patterns.fan_out(known[0], peers[:_MOST_PEERS], _FIRST_BYTES)
                if len(flows) >= _LEAST_PEERS:
                    self.cell(f"{kind} peers", flows, self.of(f"{kind} curve")[0].median_s)
        if self.executor != "send-recv":
            return
        for kind, known in ((IN_NODE, self._near and self._near[1:]), (CROSS_NODE, self._far)):
            if known is not None:
                size, expected = self.flow_bytes(kind, self.settings.call_s / 3)
                flows = [(known[0], known[1], size)]
                self.cell(f"{kind} messages", flows, expected)
                self.cell(f"{kind} messages", flows, expected, messages=16)

    def _matrices(self) -> None:
        rng = np.random.default_rng(20260101)
        sizes = {}
        for kind, known in ((IN_NODE, self._near), (CROSS_NODE, self._far)):
            sizes[kind] = 0 if known is None else self.flow_bytes(kind, self.settings.call_s)[0]
        for number in range(self.settings.matrices):
            flows = patterns.random_matrix(self.topology, rng, sizes[CROSS_NODE], sizes[IN_NODE])
            if flows:
                self.cell("uneven", flows, 2 * self.settings.call_s, calls=1, essential=number < LEAST_MATRICES)

    def _packing(self) -> None:
        measure = self.instruments.packing
        if measure is None:
            return
        home = self.topology.ranks_of(self._near[0] if self._near is not None else 0)
        crowds = {len(ranks): ranks for ranks in (home[:1], home, tuple(range(self.topology.world_size)))}
        for direction in ("pack", "unpack"):
            for run, runs, copies in _PACKED[:: 2 if self.settings.coarse else 1]:
                # Where much is packed memory and cores are shared; the rest is measured on one node.
                for ranks in (
                    crowds.values() if run * runs >= _CROWD_BYTES or (run, copies) == _CROWD_COPIES else (home,)
                ):
                    sampling = Sampling(warmups=2, seconds=self.settings.cell_s / 3)
                    samples = measure(direction, run, runs, copies=copies, ranks=ranks, sampling=sampling)
                    self.note(samples, f"{direction} of {runs} runs of {run} bytes")
                    self.found.pack_cells.append(PackCell(direction, run, runs, copies, len(ranks), samples.times_s))


def _count(topology: Topology) -> str:
    per_node = [len(topology.nics_of(node)) for node in range(topology.nodes)]
    return " + ".join(str(count) for count in per_node) + " NICs on the nodes"

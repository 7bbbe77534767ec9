"""From cells to costs: isotonic time curves, crowding factors, packing lines, held-out errors, bootstrap replicates.

``fit_costs(cells, pack_cells, topology, executor)`` is one fit; ``replicates(...)`` repeats it on resampled cells.
Pure; rank 0 calls it and broadcasts the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from relaymeter.calibration.cells import Cell, PackCell
from relaymeter.calibration.costs import CROSS_NODE, IN_NODE, Curve, ExecutorCosts, LinkCosts, PackCosts
from relaymeter.calibration.curve_fit import best_width, fit_curve, relative_line
from relaymeter.errors import NothingMeasured
from relaymeter.relayout.topology import Topology

__all__ = ["curve_points", "fit_costs", "replicates"]

FloatArray = NDArray[np.float64]
#: Octaves of sizes that a curve is averaged over, by executor and link class.
Widths = Mapping[tuple[str, str], float]

#: Where nothing was measured (budget spent, no such links): no extra cost, and packing at a modest machine's pace.
_DEFAULT_PACK = PackCosts(call_s=2e-5, segment_s=5e-6, byte_s=4e-10)
#: Packing of so many copies is bound by what each of them costs, not by their bytes.
_MANY_COPIES = 256
#: Flows of one rank to a node that are together so many times as fast as alone leave by more than one NIC.
_MANY_NICS = 1.5
#: A factor below 1 by less than this is noise of the measurement, not a faster port.
_NOISE = 0.05


def curve_points(cells: Sequence[Cell], kind: str, executor: str) -> tuple[list[int], list[float]]:
    """Sizes and median seconds of the curve cells of one link class and executor."""
    found = sorted((c.size, c.median_s) for c in cells if c.pattern == f"{kind} curve" and c.executor == executor)
    return [size for size, _ in found], [took for _, took in found]


def fit_costs(
    cells: Sequence[Cell],
    pack_cells: Sequence[PackCell],
    topology: Topology,
    executor: str,
    widths: Widths | None = None,
    like: ExecutorCosts | None = None,
) -> ExecutorCosts:
    """All costs of ``executor``; ``widths``: of its curves, by default the best; ``like``: another executor's costs,
    which stand in for how nodes, the cluster and stages share where that was not measured. Raises NothingMeasured where
    no curve has two sizes."""
    widths = _widths(cells) if widths is None else widths
    start = _start(cells, executor)
    cells = [_in_series(cell, start) if cell.executor == executor else cell for cell in cells]
    mine = [cell for cell in cells if cell.executor == executor]
    empty = {cell.calls: cell.median_s for cell in mine if cell.pattern == "empty"}
    links = {kind: _fit_link(cells, kind, topology, executor, widths) for kind in (IN_NODE, CROSS_NODE)}
    for kind, link in links.items():
        other = None if like is None else like.link(kind)
        if link is not None and other is not None and not _shared_was_measured(mine, kind):
            links[kind] = replace(link, node=other.node, crowd=other.crowd)
    if not any(links.values()):
        raise NothingMeasured(f"no link was measured with {executor}")
    return ExecutorCosts(
        floor_s=empty[max(empty)] if empty else 0.0,
        start_s=start,
        overlap=_overlap(mine, like),
        in_node=links[IN_NODE],
        cross_node=links[CROSS_NODE],
        pack=_fit_pack(pack_cells, "pack"),
        unpack=_fit_pack(pack_cells, "unpack"),
    )


def replicates(
    cells: Sequence[Cell],
    pack_cells: Sequence[PackCell],
    topology: Topology,
    executor: str,
    count: int,
    seed: int,
    like: ExecutorCosts | None = None,
) -> tuple[ExecutorCosts, ...]:
    """``count`` bootstrap fits: the samples of every cell drawn anew with replacement."""
    rng, widths = np.random.default_rng(seed), _widths(cells)
    found = []
    for _ in range(count):
        drawn = [cell.resampled(rng) for cell in cells]
        packed = [cell.resampled(rng) for cell in pack_cells]
        found.append(fit_costs(drawn, packed, topology, executor, widths, like))
    return tuple(found)


def _widths(cells: Sequence[Cell]) -> Widths:
    """``best_width`` of every curve, by executor and link class."""
    found: dict[tuple[str, str], float] = {}
    for executor in {cell.executor for cell in cells}:
        for kind in (IN_NODE, CROSS_NODE):
            sizes, seconds = curve_points(cells, kind, executor)
            if len(sizes) > 1:
                found[executor, kind] = best_width(sizes, seconds)
    return found


def _fit_link(
    measured: Sequence[Cell], kind: str, topology: Topology, executor: str, widths: Widths
) -> LinkCosts | None:
    """Curve, capacities, and then the penalties: what a pattern takes beyond all capacities is the pattern's own cost.

    A capacity is the best throughput that any pattern reached at that level (port, node, cluster), so it never charges
    twice; latencies cancel because every time is turned into the bytes of a lone flow.
    """
    sizes, seconds = curve_points(measured, kind, executor)
    if not sizes:
        return None
    curve = fit_curve(sizes, seconds, widths.get((executor, kind)))
    cells = [cell for cell in measured if cell.executor == executor]
    mine = [cell for cell in cells if cell.pattern in _CAPACITY_PATTERNS[kind] and cell.flows]
    loads = _Loads(curve, kind, topology)
    rail = kind == CROSS_NODE and loads.leaves_by_receiver(mine)
    loads = _Loads(curve, kind, topology, rail)
    shown = (f"{kind} fan-in",) if rail else (f"{kind} fan-in", f"{kind} fan-out")
    fans = [loads.effective(c) / loads.total(c) for c in mine if c.pattern in shown]
    many = min([1.0, *(found for found in fans if found < 1 - _NOISE)])
    ports_out, ports_in = _nics(measured, topology, many, widths, rail) if kind == CROSS_NODE else ({}, {})
    every = [*ports_out.values(), *ports_in.values()]
    link = LinkCosts(
        curve=loads.curve,
        two_way=0.0,
        turn=0.0,
        fan_out=many,
        fan_in=many,
        port=float(np.median(every)) if every else many,
        ports_out=ports_out,
        ports_in=ports_in,
        node=1.0,
        crowd={},
        message_s=_message_s(cells, kind),
        receiver_rail=rail,
    )
    link = replace(link, node=loads.node(mine, link))
    link = replace(link, crowd=loads.crowd(mine, link))

    def penalty(pattern: str) -> list[tuple[float, Cell]]:
        """Effective bytes of the pattern's cells that take longer than every capacity explains."""
        found = [(loads.effective(cell), cell) for cell in mine if cell.pattern == pattern]
        return [(bytes_, cell) for bytes_, cell in found if bytes_ > (1 + _NOISE) * loads.explained(cell, link)]

    two_way = [min(found / cell.size - 1, 1.5) for found, cell in penalty(f"{kind} two-way")]
    # A pair that is full duplex proves that its ports are.
    turn = [min(found / cell.size - 1, *two_way, 1.5) for found, cell in penalty("turn") if two_way]
    exchange = [found / loads.explained(cell, link) - 1 for found, cell in penalty("dense both ways")]
    # So do ranks that send to, and receive from, all of another node at once.
    proof = [loads.effective(cell) / loads.largest(cell) for cell in mine if cell.pattern == "dense"]
    fan_in = [min(found / loads.total(cell), *proof, 2.0) for found, cell in penalty(f"{kind} fan-in")]
    fan_out = [min(found / loads.total(cell), *proof, 2.0) for found, cell in penalty(f"{kind} fan-out")]
    return replace(
        link,
        two_way=max(two_way, default=0.0),
        turn=max(turn, default=0.0),
        exchange=min(max(exchange, default=0.0), 1.5) if kind == CROSS_NODE else 0.0,
        fan_in=max([link.fan_in, *fan_in]),
        fan_out=max([link.fan_out, *fan_out]),
    )


def _nics(
    cells: Sequence[Cell], topology: Topology, many: float, widths: Widths, rail: bool
) -> tuple[dict[int, float], dict[int, float]]:
    """Factors of the NICs, sending and receiving, from the executor that probed them: a NIC is one whoever uses it.

    NICs within noise of the usual one are taken to be like it.
    """
    executor = next((cell.executor for cell in cells if cell.pattern == "nic"), None)
    if executor is None:
        return {}, {}
    width = widths.get((executor, CROSS_NODE))
    loads = _Loads(fit_curve(*curve_points(cells, CROSS_NODE, executor), width), CROSS_NODE, topology, rail)
    wanted = _CAPACITY_PATTERNS[CROSS_NODE]
    found = loads.ports([c for c in cells if c.executor == executor and c.pattern in wanted and c.flows], many)
    usual = _settled(float(np.median([factor for side in found for factor in side.values()])))
    sent, received = (
        {nic: usual if abs(factor / usual - 1) <= _NOISE else factor for nic, factor in side.items()} for side in found
    )
    return sent, received


#: Cells that tell what ports, nodes and the cluster carry.
_CAPACITY_PATTERNS = {
    IN_NODE: (
        "in_node two-way", "in_node fan-in", "in_node fan-out", "in_node all pairs", "in_node all pairs everywhere",
        "in_node apart",
    ),
    CROSS_NODE: (
        "cross_node pair", "cross_node two-way", "cross_node fan-in", "cross_node fan-out", "nic", "rails", "halves",
        "dense", "dense both ways", "dense ring", "turn",
    ),
}  # fmt: skip


class _Loads:
    """Bytes of a cell at every level, against the bytes that a lone flow moves in the cell's time."""

    def __init__(self, curve: Curve, kind: str, topology: Topology, rail: bool = False) -> None:
        """``rail``: flows leave by the NIC on the receiver's rail."""
        self.curve = curve
        self._topology, self._rail = topology, rail
        self._node = topology.node
        self._port = topology.nic if kind == CROSS_NODE else tuple(range(topology.world_size))
        self._nodes = dict(zip(self._port, self._node, strict=True))
        self._width = Counter(self._nodes.values())

    def _ports(self, cell: Cell, side: int) -> list[int]:
        """The port of each flow, on its sending (0) or receiving (1) side."""
        if not (self._rail and side == 0):
            return [self._port[flow[side]] for flow in cell.flows]
        ends = np.asarray([flow[:2] for flow in cell.flows], dtype=np.int64).reshape(-1, 2)
        found: list[int] = self._topology.nic_on_rail_of(ends[:, 0], ends[:, 1]).tolist()
        return found

    def leaves_by_receiver(self, cells: Sequence[Cell]) -> bool:
        """Whether flows of one rank to several rails of a node leave by several NICs: together they are faster than a
        lone flow, and not because a lone flow does not fill a NIC, which several flows through each NIC would show."""
        gain = {pattern: 1.0 for pattern in ("cross_node fan-out", "dense", "rails")}
        for cell in cells:
            if cell.pattern in gain:
                sent = float(max(self._by_port(cell, 0).values()))
                gain[cell.pattern] = max(gain[cell.pattern], sent / self.effective(cell))
        return gain["cross_node fan-out"] > _MANY_NICS * max(1.0, gain["dense"] / gain["rails"])

    def effective(self, cell: Cell) -> float:
        """Bytes that a lone flow moves in the cell's median time."""
        return self.curve.inverse(cell.median_s)

    def total(self, cell: Cell) -> float:
        return float(sum(flow[2] for flow in cell.flows))

    def largest(self, cell: Cell) -> float:
        """Most bytes of any rank in one direction."""
        ranks = range(len(self._node))
        return max(max(self._by(cell, ranks, side).values()) for side in (0, 1))

    def _by(self, cell: Cell, place: Sequence[int], side: int) -> dict[int, float]:
        found: dict[int, float] = {}
        for flow in cell.flows:
            found[place[flow[side]]] = found.get(place[flow[side]], 0.0) + flow[2]
        return found

    def _by_port(self, cell: Cell, side: int) -> dict[int, float]:
        found: dict[int, float] = {}
        for port, flow in zip(self._ports(cell, side), cell.flows, strict=True):
            found[port] = found.get(port, 0.0) + flow[2]
        return found

    def ports(self, cells: Sequence[Cell], many: float) -> tuple[dict[int, float], dict[int, float]]:
        """Factor of each port, sending and receiving: of its own cells ("nic"), unless others show it to be faster.

        ``many`` is what several flows of a port reach over one of them.
        """
        own: tuple[dict[int, list[float]], dict[int, list[float]]] = ({}, {})
        other: tuple[dict[int, list[float]], dict[int, list[float]]] = ({}, {})
        for cell in cells:
            for side in (0, 1):
                flows = Counter(self._ports(cell, side))
                for port, load in self._by_port(cell, side).items():
                    factor = self.effective(cell) / load * (many if flows[port] == 1 else 1.0)
                    table = own if cell.pattern == "nic" else other
                    table[side].setdefault(port, []).append(factor)
        sent, received = (
            {port: _port_factor(own[side].get(port, []), other[side].get(port, [])) for port in sorted(ports)}
            for side, ports in ((side, {*own[side], *other[side]}) for side in (0, 1))
        )
        return sent, received

    def node(self, cells: Sequence[Cell], link: LinkCosts) -> float:
        """Smallest factor of the mean bytes per port of a node, one direction, over cells that use all its ports; what
        as many ports take on several nodes is no node's doing."""
        known = self._crowd([cell for cell in cells if not self._full(cell)], link)
        apart = replace(link, crowd=known and {**known, len(self._nodes) + 1: known[max(known)]})
        found = []
        for cell in cells:
            used = [set(self._ports(cell, side)) for side in (0, 1)]
            crowded = self._crowding(cell, apart)
            for side in (0, 1):
                busy = Counter(self._home(port) for port in used[side])
                for node, load in self._by(cell, self._node, side).items():
                    if busy[node] == self._width[node]:
                        found.append(self.effective(cell) / crowded / load * self._width[node])
        return _settled(min(found, default=1.0))

    def _home(self, port: int) -> int:
        return self._nodes[port]

    def _full(self, cell: Cell) -> bool:
        """Whether the cell uses all ports of a node that has several, in one direction."""
        for side in (0, 1):
            busy = Counter(self._home(port) for port in set(self._ports(cell, side)))
            if any(count == self._width[node] > 1 for node, count in busy.items()):
                return True
        return False

    def _crowding(self, cell: Cell, link: LinkCosts) -> float:
        """How many times as long as its busiest port alone the cell takes by ``link.crowd``, at least once."""
        if not link.crowd:
            return 1.0
        loads = self._ports_of(cell, link)
        alone = max(float(side.max()) for side in loads)
        return max(1.0, *(float(link.crowded(side[None, :])[0]) / alone for side in loads))

    def crowd(self, cells: Sequence[Cell], link: LinkCosts) -> dict[int, float]:
        """``LinkCosts.crowd`` from the cells that load all their ports alike: what is no node's doing. Empty where none
        is slowed down."""
        found = self._crowd(cells, link)
        return found if found and found[max(found)] > 1 + _NOISE else {}

    def _crowd(self, cells: Sequence[Cell], link: LinkCosts) -> dict[int, float]:
        """By number of busy ports. That more ports at once are faster than fewer is noise."""
        found: dict[int, float] = {}
        for cell in cells:
            loads = max(self._ports_of(cell, link), key=lambda side: float(side.max()))
            if loads.min() > 0.99 * loads.max():
                factor = self.effective(cell) / float(loads.max())
                if self.effective(cell) <= (1 + _NOISE) * self._through_nodes(cell, link):
                    factor = 1.0
                found[len(loads)] = min(found.get(len(loads), np.inf), factor)
        least = np.inf
        for busy in sorted(found, reverse=True):
            least = found[busy] = min(least, found[busy])
        return {busy: max(factor, 1.0) for busy, factor in sorted(found.items())}

    def _through_nodes(self, cell: Cell, link: LinkCosts) -> float:
        """Effective bytes of the busiest node, one direction; 0 where nodes do not hold ports back."""
        if link.node == 1:
            return 0.0
        sides = (self._by(cell, self._node, side).items() for side in (0, 1))
        return max(load * link.node / self._width[node] for side in sides for node, load in side)

    def _ports_of(self, cell: Cell, link: LinkCosts) -> list[FloatArray]:
        """Effective bytes of the ports that send, then of those that receive."""
        found = []
        for side, factor in ((0, link.port_out), (1, link.port_in)):
            flows: dict[int, list[float]] = {}
            for port, flow in zip(self._ports(cell, side), cell.flows, strict=True):
                flows.setdefault(port, []).append(float(flow[2]))
            found.append(np.asarray([_through(sizes, factor(port)) for port, sizes in flows.items()]))
        return found

    def explained(self, cell: Cell, link: LinkCosts) -> float:
        """Effective bytes that pair, ports, node and cluster predict for the cell without any penalty."""
        found = [float(cell.size), *(float(link.crowded(side[None, :])[0]) for side in self._ports_of(cell, link))]
        for side, factor in ((0, link.port_out), (1, link.port_in)):
            found += [load * factor(port) for port, load in self._by_port(cell, side).items()]
            found += [load * link.node / self._width[node] for node, load in self._by(cell, self._node, side).items()]
        return max(found)


def _through(sizes: Sequence[float], factor: float) -> float:
    """Effective bytes of a port that carries flows of ``sizes``: their sum times its factor, or, where a flow does not
    fill it (below 1), the integral of max(1, factor * flows that are left) over bytes."""
    if factor >= 1:
        return factor * sum(sizes)
    steps = np.diff(np.sort(np.asarray([0.0, *sizes])))
    return float(steps @ np.maximum(1.0, factor * np.arange(len(sizes), 0, -1)))


def _port_factor(own: Sequence[float], other: Sequence[float]) -> float:
    least = min([*own, *other])
    if own and least > (1 - _NOISE) * float(np.median(own)):
        return float(np.median(own))
    return float(np.mean([value for value in (*own, *other) if value <= 1.03 * least]))


def _settled(factor: float) -> float:
    """A factor within noise of 1 is 1."""
    return 1.0 if abs(factor - 1) <= _NOISE else factor


def _start(cells: Sequence[Cell], executor: str) -> float:
    """``ExecutorCosts.start_s``: the median over link classes of lone against serial calls of one size; 0 where no such
    pair was measured."""
    found = []
    for kind in (IN_NODE, CROSS_NODE):
        serial = {c.flows: c for c in cells if c.pattern == f"{kind} curve" and c.executor == executor and c.calls > 1}
        lone = [c for c in cells if c.pattern == f"{kind} lone call" and c.executor == executor]
        found += [cell.median_s - serial[cell.flows].median_s for cell in lone if cell.flows in serial]
    return max(0.0, float(np.median(found))) if found else 0.0


def _in_series(cell: Cell, start_s: float) -> Cell:
    """The cell as if its calls were part of a series: without ``start_s`` where they were isolated."""
    if cell.calls > 1 or not cell.flows or start_s == 0:
        return cell
    return replace(cell, samples_s=tuple(max(taken - start_s, taken / 2) for taken in cell.samples_s))


def _message_s(cells: Sequence[Cell], kind: str) -> float:
    found = {c.messages: c.median_s for c in cells if c.pattern == f"{kind} messages"}
    if len(found) < 2:
        return 0.0
    most = max(found)
    return max(0.0, (found[most] - found[min(found)]) / (most - min(found)))


def _shared_was_measured(cells: Sequence[Cell], kind: str) -> bool:
    """Whether all ports of a node, or of all nodes, were busy at once."""
    wanted = "in_node all pairs" if kind == IN_NODE else "dense"
    return any(cell.pattern.startswith(wanted) for cell in cells)


def _overlap(cells: Sequence[Cell], like: ExecutorCosts | None) -> float:
    found = {c.pattern: c.median_s for c in cells if c.pattern.startswith("overlap ")}
    if len(found) < 3:
        return 0.0 if like is None else like.overlap
    near, far, both = found["overlap in node"], found["overlap cross"], found["overlap both"]
    return float(np.clip((near + far - both) / min(near, far), 0.0, 1.0))


def _fit_pack(cells: Sequence[PackCell], direction: str) -> PackCosts:
    mine = [cell for cell in cells if cell.direction == direction]
    few = min((cell.ranks for cell in mine), default=1)
    alike: dict[tuple[int, int, int], dict[int, float]] = {}
    for cell in mine:
        alike.setdefault((cell.run_bytes, cell.runs, cell.copies), {})[cell.ranks] = cell.median_s
    # What crowding costs, by the number of ranks that pack at once, for cells of few copies and of many.
    ratios: dict[bool, dict[int, list[float]]] = {False: {}, True: {}}
    for (_, _, copies), times in alike.items():
        for ranks, seconds in times.items():
            if few in times and ranks > few:
                ratios[copies >= _MANY_COPIES].setdefault(ranks, []).append(seconds / times[few])
    slower = {
        many: {ranks: max(1.0, float(np.median(of))) for ranks, of in found.items()} for many, found in ratios.items()
    }
    if len(alike) < 4:
        return _DEFAULT_PACK
    rows = [[1.0, float(c.copies), float(c.runs * c.run_bytes), float(c.runs)] for c in mine]
    # All cells as if one rank packed alone.
    alone = [c.median_s / slower[c.copies >= _MANY_COPIES].get(c.ranks, 1.0) for c in mine]
    call, segment, byte, run = relative_line(np.asarray(rows), np.asarray(alone)).tolist()
    return PackCosts(call, segment, byte, run, *_lanes(slower[False]), *_lanes(slower[True]))


def _lanes(slower: Mapping[int, float]) -> tuple[float | None, float | None]:
    """Ranks that pack side by side as if alone: of a node's, and of all; None where none of them waits."""
    found = [ranks / factor if factor > 1 + _NOISE else None for ranks, factor in sorted(slower.items())]
    return (found[0] if len(found) > 1 else None), (found[-1] if found else None)

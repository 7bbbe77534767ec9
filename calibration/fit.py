"""From cells to costs: isotonic time curves, crowding factors, packing lines, held-out errors, bootstrap replicates.

``fit_costs(cells, pack_cells, topology, executor)`` is one fit; ``replicates(...)`` repeats it on resampled cells.
Pure; rank 0 calls it and broadcasts the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from relaymeter.calibration.cells import Cell, PackCell
from relaymeter.calibration.costs import CROSS_NODE, IN_NODE, Curve, ExecutorCosts, LinkCosts, PackCosts
from relaymeter.calibration.curve_fit import best_width, fit_curve, relative_line
from relaymeter.calibration.fit_loads import NOISE, Loads, drained, settled
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
    starts = {name: _start(cells, name) for name in {cell.executor for cell in cells}}
    cells = [_in_series(cell, starts[cell.executor]) for cell in cells]
    mine = [cell for cell in cells if cell.executor == executor]
    empty = {cell.calls: cell.median_s for cell in mine if cell.pattern == "empty"}
    links = {kind: _fit_link(cells, kind, topology, executor, widths) for kind in (IN_NODE, CROSS_NODE)}
    for kind, link in links.items():
        other = None if like is None else like.link(kind)
        if link is not None and other is not None and not _shared_was_measured(mine, kind):
            # A node carries so many bytes per second whoever uses it; the factor is against a lone flow's rate.
            node = other.node * link.curve.plateau_rate / other.curve.plateau_rate
            links[kind] = replace(link, node=node, crowd=other.crowd)
    if not any(links.values()):
        raise NothingMeasured(f"no link was measured with {executor}")
    return ExecutorCosts(
        floor_s=empty[max(empty)] if empty else 0.0,
        start_s=starts.get(executor, 0.0),
        overlap=_overlap(mine, like),
        busy_s=_busy_s(mine, list(links.values())),
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
    All in bytes as they drain (``Curve.drain``).

    A capacity is the best throughput that any pattern reached at that level (port, node, cluster), so it never charges
    twice; latencies cancel because every time is turned into the bytes of a lone flow.
    """
    sizes, seconds = curve_points(measured, kind, executor)
    if not sizes:
        return None
    curve = fit_curve(sizes, seconds, widths.get((executor, kind)))
    cells = [cell for cell in measured if cell.executor == executor]
    mine = [drained(cell, curve) for cell in cells if cell.pattern in _CAPACITY_PATTERNS[kind] and cell.flows]
    loads = Loads(curve, kind, topology)
    rail = kind == CROSS_NODE and loads.leaves_by_receiver(mine)
    loads = Loads(curve, kind, topology, rail)
    shown = (f"{kind} fan-in",) if rail else (f"{kind} fan-in", f"{kind} fan-out")
    fans = [loads.effective(c) / loads.total(c) for c in mine if c.pattern in shown]
    many = min([1.0, *(found for found in fans if found < 1 - NOISE)])
    ports_out, ports_in = (
        _nics(measured, topology, many, widths, rail, curve.plateau_rate) if kind == CROSS_NODE else ({}, {})
    )
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
        message_s=_message_s(cells, kind, curve),
        receiver_rail=rail,
    )
    link = replace(link, node=loads.node(mine, link))
    link = replace(link, crowd=loads.crowd(mine, link))

    def penalty(pattern: str) -> list[tuple[float, Cell]]:
        """Effective bytes of the pattern's cells that take longer than every capacity explains."""
        found = [(loads.effective(cell), cell) for cell in mine if cell.pattern == pattern]
        return [(bytes_, cell) for bytes_, cell in found if bytes_ > (1 + NOISE) * loads.explained(cell, link)]

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
    cells: Sequence[Cell], topology: Topology, many: float, widths: Widths, rail: bool, rate: float
) -> tuple[dict[int, float], dict[int, float]]:
    """Factors of the NICs, sending and receiving, on a curve of plateau ``rate``, from the executor that probed them: a
    NIC carries so many bytes per second whoever uses it.

    NICs within noise of the usual one are taken to be like it.
    """
    executor = next((cell.executor for cell in cells if cell.pattern == "nic"), None)
    if executor is None:
        return {}, {}
    width = widths.get((executor, CROSS_NODE))
    loads = Loads(fit_curve(*curve_points(cells, CROSS_NODE, executor), width), CROSS_NODE, topology, rail)
    wanted = _CAPACITY_PATTERNS[CROSS_NODE]
    mine = [c for c in cells if c.executor == executor and c.pattern in wanted and c.flows]
    found = loads.ports([drained(cell, loads.curve) for cell in mine], many)
    usual = float(np.median([factor for side in found for factor in side.values()]))
    # A lone flow of this executor proves that the usual NIC carries as much.
    scale = min(rate / loads.curve.plateau_rate, max(1.0, 1 / usual))
    sent, received = (
        {nic: settled(scale * (usual if abs(factor / usual - 1) <= NOISE else factor)) for nic, factor in side.items()}
        for side in found
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


def _message_s(cells: Sequence[Cell], kind: str, curve: Curve) -> float:
    """Seconds of a further message: to one peer, or of small ones to many peers beyond what their bytes take."""
    cut = {c.messages: c.median_s for c in cells if c.pattern == f"{kind} messages"}
    found = [0.0]
    if len(cut) > 1:
        found.append((cut[max(cut)] - cut[min(cut)]) / (max(cut) - min(cut)))
    for cell in cells:
        if cell.pattern == f"{kind} peers":
            together = sum(flow[2] for flow in drained(cell, curve).flows)
            alone = float(curve.time(curve.fill(np.asarray([together], dtype=np.float64)))[0])
            found.append((cell.median_s - alone) / (len(cell.flows) - 1))
    return max(found)


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


def _busy_s(cells: Sequence[Cell], links: Sequence[LinkCosts | None]) -> float:
    """``ExecutorCosts.busy_s``: the ring of small messages against the slower of its lone flows."""
    rings = [cell for cell in cells if cell.pattern == "ring"]
    if not rings:
        return 0.0
    size = np.asarray([float(rings[0].size)])
    alone = max(float(link.curve.time(size)[0]) for link in links if link is not None)
    return max(0.0, rings[0].median_s - alone)


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
    found = [ranks / factor if factor > 1 + NOISE else None for ranks, factor in sorted(slower.items())]
    return (found[0] if len(found) > 1 else None), (found[-1] if found else None)

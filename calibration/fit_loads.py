"""What cells say of ports, nodes and the cluster, in bytes that a lone flow moves in a cell's time.

``Loads(curve, kind, topology).node(cells, link)`` and its siblings; ``fit.py`` makes costs of them. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from relaymeter.calibration.cells import Cell
from relaymeter.calibration.costs import CROSS_NODE, Curve, LinkCosts
from relaymeter.relayout.topology import Topology

__all__ = ["NOISE", "Loads", "drained", "settled"]

FloatArray = NDArray[np.float64]

#: Flows of one rank to a node that are together so many times as fast as alone leave by more than one NIC.
_MANY_NICS = 1.5
#: A factor below 1 by less than this is noise of the measurement, not a faster port.
NOISE = 0.05


def drained(cell: Cell, curve: Curve) -> Cell:
    """The cell with what its flows add up by on ``curve`` in place of their bytes."""
    sizes = curve.drain(np.asarray([flow[2] for flow in cell.flows], dtype=np.float64)).tolist()
    return replace(cell, flows=tuple((r, q, round(size)) for (r, q, _), size in zip(cell.flows, sizes, strict=True)))


class Loads:
    """Bytes of ``drained`` cells at every level, against those that a lone flow drains in the cell's time."""

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
        """Bytes that a lone flow drains in the cell's median time."""
        return float(self.curve.drain(np.asarray(self.curve.inverse(cell.median_s))))

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
        return settled(min(found, default=1.0))

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
        return found if found and found[max(found)] > 1 + NOISE else {}

    def _crowd(self, cells: Sequence[Cell], link: LinkCosts) -> dict[int, float]:
        """By number of busy ports. That more ports at once are faster than fewer is noise."""
        found: dict[int, float] = {}
        for cell in cells:
            loads = max(self._ports_of(cell, link), key=lambda side: float(side.max()))
            if loads.min() > 0.99 * loads.max():
                factor = self.effective(cell) / float(loads.max())
                if self.effective(cell) <= (1 + NOISE) * self._through_nodes(cell, link):
                    factor = 1.0
                found[len(loads)] = min(found.get(len(loads), np.inf), factor)
        least = np.inf
        for busy in sorted(found, reverse=True):
            least = found[busy] = min(least, found[busy])
        return {busy: max(factor, 1.0) if busy > 1 else 1.0 for busy, factor in sorted(found.items())}

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
    if own and least > (1 - NOISE) * float(np.median(own)):
        return float(np.median(own))
    return float(np.mean([value for value in (*own, *other) if value <= 1.03 * least]))


def settled(factor: float) -> float:
    """A factor within noise of 1 is 1."""
    return 1.0 if abs(factor - 1) <= NOISE else factor

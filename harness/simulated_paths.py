"""The resources of a simulated cluster, and which of them each flow passes through.

``Paths(model).flows(src, dst, nbytes, executor)`` gives flows for ``simulated_flows.FlowNetwork`` and their latencies.
Inside a node: the sender's port, the receiver's port. Between nodes: the sender's PCIe, its NIC, the switch, the
receiver's NIC, its PCIe; with PXN first over the node's ports to the rank whose NIC is on the receiver's rail, and
through that one's PCIe and NIC. Pure, no torch import.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from relaymeter.harness.simulated_config import ClusterModel, LinkModel
from relaymeter.harness.simulated_flows import Flows

__all__ = ["Paths"]

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

#: Index of the resource that stands for none: its capacity is infinite.
_NOTHING = 0


class Paths:
    """Resources of ``model``: ``capacity`` (m) and ``incast`` (m) as ``FlowNetwork`` takes them.

    ``slowness`` (world): how many times slower than the others a rank is, 1 but for stragglers.
    """

    def __init__(self, model: ClusterModel) -> None:
        self._model = model
        world, nics = model.nodes * model.ranks_per_node, model.nodes * model.nics_per_node
        ranks = np.arange(world)
        self._node = ranks // model.ranks_per_node
        self._nic = ranks // (model.ranks_per_node // model.nics_per_node)
        self.slowness = _slowness(model.stragglers.ranks, world)
        slow_nics = _slowness(model.stragglers.nics, nics)
        rates = model.rates
        self._capacity: list[FloatArray] = [np.full(1, np.inf)]
        self._incast: list[FloatArray] = [np.zeros(1)]
        self._count = 1
        ones = np.ones(1)
        self._port_out = self._add(rates.port, self.slowness)
        self._port_in = self._add(rates.port, self.slowness)
        self._pcie_out = self._add(rates.pcie, self.slowness)
        self._pcie_in = self._add(rates.pcie, self.slowness)
        self._nic_out = self._add(rates.nic, slow_nics)
        self._nic_in = self._add(rates.nic, slow_nics, model.incast)
        self._node_out = self._add(rates.node, np.ones(model.nodes))
        self._node_in = self._add(rates.node, np.ones(model.nodes))
        self._rank = self._add(rates.rank, self.slowness)
        self._switch = self._add(rates.switch, ones)
        self._machine = self._add(rates.machine, ones)
        self.capacity: FloatArray = np.concatenate(self._capacity)
        self.incast: FloatArray = np.concatenate(self._incast)

    def _add(self, rate: float | None, slowness: FloatArray, incast: float = 0.0) -> IntArray:
        """Indices of new resources of this rate, one for each entry of ``slowness``; no resource without a rate."""
        if rate is None:
            return np.full(len(slowness), _NOTHING, dtype=np.int64)
        self._capacity.append(rate / slowness)
        self._incast.append(np.full(len(slowness), incast))
        self._count += len(slowness)
        return np.arange(self._count - len(slowness), self._count, dtype=np.int64)

    def flows(self, src: IntArray, dst: IntArray, nbytes: IntArray, executor: str) -> tuple[Flows, FloatArray]:
        """Flows (n) of ``nbytes`` from ``src`` to ``dst``, two different ranks, and each one's latency in seconds."""
        model = next(found for name, found in self._model.executors.items() if name == executor)
        far = self._node[src] != self._node[dst]
        detour = far & (self._rail(src) != self._rail(dst)) if self._model.pxn else np.zeros(len(src), dtype=bool)
        # The rank of the sender's node that has the receiver's place: its NIC is on the receiver's rail.
        width = self._model.ranks_per_node
        gate = np.where(detour, self._node[src] * width + dst % width, src)
        near, over_ports = ~far, ~far | detour
        columns = [
            np.where(over_ports, self._port_out[src], _NOTHING),
            np.where(over_ports, self._port_in[np.where(near, dst, gate)], _NOTHING),
            np.where(far, self._pcie_out[gate], _NOTHING),
            np.where(far, self._pcie_in[dst], _NOTHING),
            np.where(far, self._nic_out[self._nic[gate]], _NOTHING),
            np.where(far, self._nic_in[self._nic[dst]], _NOTHING),
            np.where(far, self._node_out[self._node[src]], _NOTHING),
            np.where(far, self._node_in[self._node[dst]], _NOTHING),
            np.where(far, self._switch[0], _NOTHING),
            self._rank[src],
            self._rank[dst],
            np.full(len(src), self._machine[0]),
        ]
        slow = np.maximum(self.slowness[src], self.slowness[dst])
        cap, size, latency, duplex = (np.zeros(len(src)) for _ in range(4))
        for rows, link in ((near, model.in_node), (far, model.cross_node)):
            cap[rows] = np.inf if link.flow is None else link.flow / slow[rows]
            size[rows] = nbytes[rows] / _efficiency(link, nbytes[rows])
            latency[rows] = link.latency_s * slow[rows]
            duplex[rows] = link.half_duplex
        latency[detour] += self._model.pxn_latency_s
        alone = np.minimum(cap, np.min([self.capacity[column] for column in columns], axis=0))
        pairs, extra = self._pairs(src, dst, alone, duplex)
        columns.append(pairs)
        use = np.column_stack([column for column in columns if bool((column != _NOTHING).any())] or [pairs])
        return Flows(use, cap, size, extra), latency

    def _rail(self, rank: IntArray) -> IntArray:
        rail: IntArray = self._nic[rank] % self._model.nics_per_node
        return rail

    def _pairs(
        self, src: IntArray, dst: IntArray, alone: FloatArray, duplex: FloatArray
    ) -> tuple[IntArray, FloatArray]:
        """The resource that both directions of a pair share where it is not full duplex (n), and what those carry.

        Both directions at once each reach 1 / (1 + half_duplex) of what one reaches alone.
        """
        column = np.full(len(src), _NOTHING, dtype=np.int64)
        rows = np.flatnonzero(duplex > 0)
        if not len(rows):
            return column, np.zeros(0)
        world = len(self._node)
        key = np.minimum(src, dst)[rows] * world + np.maximum(src, dst)[rows]
        keys, place = np.unique(key, return_inverse=True)
        extra = np.full(len(keys), np.inf)
        np.minimum.at(extra, place, alone[rows] * 2 / (1 + duplex[rows]))
        column[rows] = self._count + place
        return column, extra


def _slowness(named: dict[str, float], count: int) -> FloatArray:
    found = np.ones(count)
    for name, factor in named.items():
        found[int(name)] = factor
    return found


def _efficiency(link: LinkModel, nbytes: IntArray) -> FloatArray:
    """Share of the rate that messages (n) of so many bytes reach: log-log between the ramp's points, flat outside."""
    if not link.ramp:
        return np.ones(len(nbytes))
    size, share = np.log(np.asarray(link.ramp, dtype=np.float64)).T
    found: FloatArray = np.exp(np.interp(np.log(np.maximum(nbytes, 1)), size, share))
    return found

"""Traffic of one link class: the seconds that its loads take in every round on every rank. Pure NumPy, no torch import.

``Traffic(link, kind, topology, measured, loads, rows).seconds`` is an array (rounds, world). Every resource (the
pair with its duplex, the rank's port, the NIC, the node, the cluster) turns its bytes into the bytes of a lone flow
that takes as long, small messages counted as they drain (``Curve.drain``); the largest of them goes through the one
time curve of the class.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from relaymeter.calibration.costs import CROSS_NODE, LinkCosts
from relaymeter.relayout.segments import RoundLoads
from relaymeter.relayout.topology import Topology

__all__ = ["Traffic", "grouped"]

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

#: Factors closer to 1 than this are taken as 1.
_SMALL = 0.05
#: The curve is flat at its end, so a load up to this many times its largest size counts as measured.
_REACH = 1.25


class Traffic:
    """Seconds per round and rank that the rows of one link class take, as if there were no other class."""

    def __init__(
        self, link: LinkCosts, kind: str, topology: Topology, measured: bool, loads: RoundLoads, rows: NDArray[np.bool_]
    ) -> None:
        self._link, self._topology = link, topology
        self._world, self._rounds = topology.world_size, loads.rounds
        self._round, self._src, self._dst = loads.round[rows], loads.src[rows], loads.dst[rows]
        self._bytes = link.curve.drain(loads.bytes[rows].astype(np.float64))
        messages = loads.messages[rows].astype(np.float64)
        # What comes back over the same pair in the same round.
        self._back = self._returned() if link.two_way > 0 or link.exchange > 0 else np.zeros_like(self._bytes)
        out_key, in_key = self._round * self._world + self._src, self._round * self._world + self._dst
        out, into = self._sum(out_key, self._bytes), self._sum(in_key, self._bytes)
        effective = self._pairs(out_key, in_key)
        # Between nodes a port that one flow does not fill is the NIC, below; inside a node it is the rank itself.
        least = 1.0 if kind == CROSS_NODE else 0.0
        fan_out, fan_in = max(link.fan_out, least), max(link.fan_in, least)
        if not (kind == CROSS_NODE and link.port < 1 - _SMALL and fan_out == fan_in == 1):
            # What leaves by several NICs is bound by each of them, below, not by one.
            sending = np.zeros_like(out) if link.receiver_rail else self._fan(out, out_key, fan_out)
            both = self._both(sending, self._fan(into, in_key, fan_in))
            effective = np.maximum(effective, both)
        busy = (out + into) > 0
        effective = np.maximum(effective, self._shared(out, into, kind, measured))
        effective = link.curve.fill(effective)
        self.extrapolated = bool(effective.max(initial=0.0) > _REACH * link.curve.largest)
        beyond = np.maximum(np.maximum(self._sum(out_key, messages), self._sum(in_key, messages)) - 1, 0.0)
        self.seconds: FloatArray = np.where(busy, link.curve.time(effective) + beyond * link.message_s, 0.0)

    def _sum(self, key: IntArray, values: FloatArray) -> FloatArray:
        found = np.bincount(key, weights=values, minlength=self._rounds * self._world)
        return found.astype(np.float64).reshape(self._rounds, self._world)

    def _largest(self, key: IntArray, values: FloatArray) -> FloatArray:
        found = np.zeros(self._rounds * self._world)
        np.maximum.at(found, key, values)
        return found.reshape(self._rounds, self._world)

    def _pairs(self, out_key: IntArray, in_key: IntArray) -> FloatArray:
        """Largest effective bytes of a rank's pairs: the larger direction plus ``two_way`` of the smaller."""
        larger, smaller = np.maximum(self._bytes, self._back), np.minimum(self._bytes, self._back)
        size = larger + self._link.two_way * smaller if self._link.two_way > 0 else self._bytes
        return np.maximum(self._largest(out_key, size), self._largest(in_key, size))

    def _returned(self) -> FloatArray:
        """Bytes (rows) that the receiver of each row sends to its sender in the same round."""
        found = np.zeros_like(self._bytes)
        world = self._world
        pair, back = self._src * world + self._dst, self._dst * world + self._src
        ever = np.zeros(world * world, dtype=bool)
        ever[pair] = True
        rows = np.flatnonzero(ever[back])
        if not len(rows):
            return found
        key = self._round[rows] * (world * world) + pair[rows]
        order = np.argsort(key, kind="stable")
        ordered = key[order]
        wanted = self._round[rows] * (world * world) + back[rows]
        place = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
        found[rows] = np.where(ordered[place] == wanted, self._bytes[rows[order[place]]], 0.0)
        return found

    def _fan(self, total: FloatArray, key: IntArray, factor: float) -> FloatArray:
        """Bytes of a rank in one direction, weighted: the full factor from two equal peers on, none for a lone one."""
        if factor == 1:
            return total
        if factor < 1:
            return self._fair(key, np.full(self._world, factor), self._world)
        lone = self._largest(key, self._bytes)
        return total + (factor - 1) * np.minimum(total, 2 * (total - lone))

    def _fair(self, key: IntArray, factors: FloatArray, ports: int) -> FloatArray:
        """Effective bytes of the ports (rounds, ports) that one flow does not fill, ``key`` being round * ports + port.

        The flows of a port share it evenly; as the short ones end, fewer are left than it takes to fill it. With n(b)
        flows of more than b bytes that is the integral of max(1, factor * n(b)) over b up to the largest.
        """
        order = np.lexsort((self._bytes, key))
        size, place = self._bytes[order], key[order]
        first = np.concatenate([[True], place[1:] != place[:-1]])
        step = np.where(first, size, size - np.concatenate([[0.0], size[:-1]]))
        count = np.bincount(place, minlength=self._rounds * ports)
        rank_in = np.arange(len(place)) - (np.cumsum(count) - count)[place]
        alive = count[place] - rank_in
        weight = np.maximum(1.0, factors[place % ports] * alive)
        found = np.bincount(place, weights=step * weight, minlength=self._rounds * ports)
        return found.astype(np.float64).reshape(self._rounds, ports)

    def _through(self, key: IntArray, factors: FloatArray) -> FloatArray:
        """Effective bytes of NICs (rounds, NICs) in one direction, ``key`` (rows) being round * NICs + NIC."""
        shape, cells = (self._rounds, len(factors)), self._rounds * len(factors)
        if factors.min() < 1 - _SMALL:
            carried = self._fair(key, factors, len(factors))
        else:
            carried = np.bincount(key, weights=self._bytes, minlength=cells).reshape(shape) * factors
        if self._link.exchange == 0:
            return carried
        # What comes back from several peers adds: all of it from two equal ones on, nothing from a lone one.
        back = np.minimum(self._bytes, self._back)
        total, lone = np.bincount(key, weights=back, minlength=cells), np.zeros(cells)
        np.maximum.at(lone, key, back)
        added: FloatArray = np.minimum(total, 2 * (total - lone)).reshape(shape) * factors
        return carried + self._link.exchange * added

    def _both(self, out: FloatArray, into: FloatArray) -> FloatArray:
        return np.maximum(out, into) + self._link.turn * np.minimum(out, into)

    def _shared(self, out: FloatArray, into: FloatArray, kind: str, measured: bool) -> FloatArray:
        """Effective bytes of what ranks share: NIC, node, cluster; each rank gets those of its own (rounds, world)."""
        link, topology = self._link, self._topology
        node = topology.node_array
        found = np.zeros_like(out)
        port: IntArray = np.arange(self._world)
        ports, sent, received = self._world, out, into
        if kind == CROSS_NODE:
            names, place = np.unique(topology.nic_array, return_inverse=True)
            port, ports = place.reshape(-1).astype(np.int64), len(names)
            usual = np.full(ports, link.port)
            factor_out = np.asarray([link.port_out(n) for n in names.tolist()]) if measured else usual
            factor_in = np.asarray([link.port_in(n) for n in names.tolist()]) if measured else usual
            leaving = port[self._src]
            if link.receiver_rail:
                leaving = np.searchsorted(names, topology.nic_on_rail_of(self._src, self._dst))
            key = self._round * ports + leaving
            sent = self._through(key, factor_out)
            received = self._through(self._round * ports + port[self._dst], factor_in)
            through = self._both(sent, received)
            found = through[:, port]
            if link.receiver_rail:
                out_key = self._round * self._world + self._src
                found = np.maximum(found, self._largest(out_key, through.reshape(-1)[key]))
        home = np.zeros(ports, dtype=np.int64)
        home[port] = node
        width = np.bincount(home, minlength=topology.nodes)
        by_node = np.maximum(grouped(out, node, topology.nodes), grouped(into, node, topology.nodes))
        found = np.maximum(found, (by_node * link.node / width)[:, node])
        if not link.crowd:
            return found
        everywhere = np.maximum(link.crowded(sent), link.crowded(received))
        return np.maximum(found, everywhere[:, None])


def grouped(values: FloatArray, group: IntArray, groups: int) -> FloatArray:
    """Sum the columns (rounds, world) by the group of their rank (rounds, groups)."""
    member = np.zeros((len(group), groups))
    member[np.arange(len(group)), group] = 1.0
    found: FloatArray = values @ member
    return found

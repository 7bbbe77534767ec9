"""The lower bound of a move: what no route can beat, from the distinct bytes and the calibrated rates.

``lower_bound(plan, topology, nic_rate, port_rate)`` says the seconds and which node or port binds. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relaymeter.errors import InputError
from relaymeter.relayout.geometry import union_volumes
from relaymeter.relayout.planner import MovePlan
from relaymeter.relayout.topology import Topology

__all__ = ["Bound", "lower_bound"]

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Bound:
    """``seconds`` that any route needs, and what binds, for example ``"node 1 receive"``."""

    seconds: float
    bound_by: str


def lower_bound(plan: MovePlan, topology: Topology, nic_rate: Mapping[int, float], port_rate: float | None) -> Bound:
    """The largest, over nodes and directions, of distinct bytes over the sum of the node's NIC rates.

    ``nic_rate`` maps each NIC to payload bytes per second; ``port_rate`` is one rank's in-node rate in bytes per second
    (None: in-node bytes bind nothing). A node must receive each element that it needs and does not hold once, however
    many of its ranks need it, and send each that the plan takes from it at least once; for in-node blocks a rank must
    receive them through its own port.
    """
    missing = sorted(set(topology.nic) - set(nic_rate))
    if missing and topology.nodes > 1:
        raise InputError(f"no payload rate for NIC {missing[0]}: calibrate this topology first")
    node = topology.node_array
    receive, send = np.zeros(topology.nodes), np.zeros(topology.nodes)
    port_in = np.zeros(topology.world_size)
    for found in plan.classes:
        times = float(found.itemsize * len(found.tensors))
        src, dst = node[found.src_rank], node[found.dst_rank]
        far = src != dst
        if far.any():
            receive += times * union_volumes(dst[far], found.lo[far], found.shape[far], topology.nodes)
            send += times * union_volumes(src[far], found.lo[far], found.shape[far], topology.nodes)
        size = np.prod(found.shape, axis=1, dtype=np.int64) * times
        near = ~far & (found.src_rank != found.dst_rank)
        np.add.at(port_in, found.dst_rank[near], size[near])
    best = Bound(0.0, "nothing crosses a link")
    for direction, load in (("receive", receive), ("send", send)):
        for home in np.flatnonzero(load).tolist():
            rate = sum(nic_rate[nic] for nic in topology.nics_of(home))
            if load[home] / rate > best.seconds:
                best = Bound(float(load[home] / rate), f"node {home} {direction}")
    if port_rate:
        rank = int(port_in.argmax())
        if port_in[rank] / port_rate > best.seconds:
            best = Bound(float(port_in[rank] / port_rate), f"rank {rank} in-node receive")
    return best

"""The five-line model that prices have to beat: the largest load over its rate, plus one constant. Pure NumPy.

``five_line_seconds(schedule.loads(executor), topology, nic_rate, port_rate, constant_s)``, rates of the same executor:
``profile.nic_rates(topology, executor)`` and ``profile.port_rate(executor)``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from relaymeter.errors import InputError
from relaymeter.relayout.segments import RoundLoads
from relaymeter.relayout.topology import Topology

__all__ = ["five_line_seconds"]

FloatArray = NDArray[np.float64]


def five_line_seconds(
    loads: RoundLoads, topology: Topology, nic_rate: Mapping[int, float], port_rate: float | None, constant_s: float
) -> float:
    """Seconds of a whole move: the most that any NIC sends or receives over its rate, or any rank inside its node over
    ``port_rate`` where that takes longer, plus ``constant_s``. Rates in bytes per second; rounds, latency, packing,
    duplex and sharing are left out on purpose. Raises InputError where bytes cross nodes and a NIC has no rate.
    """
    node, nic = topology.node_array, topology.nic_array
    far = node[loads.src] != node[loads.dst]
    near = ~far & (loads.src != loads.dst)
    longest = 0.0
    for end in (loads.src, loads.dst):
        sent = np.bincount(nic[end[far]], weights=loads.bytes[far])
        for port in np.flatnonzero(sent).tolist():
            if port not in nic_rate:
                raise InputError(f"no payload rate for NIC {port}: calibrate this topology first")
            longest = max(longest, float(sent[port]) / nic_rate[port])
        if port_rate and near.any():
            longest = max(longest, float(np.bincount(end[near], weights=loads.bytes[near]).max()) / port_rate)
    return longest + constant_s

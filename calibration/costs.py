"""What the fits say a cluster costs: time curves, crowding factors and packing, as frozen data that prices are made of.

``curve.seconds(bytes)`` is the time of one lone flow. Everything that slows a flow down is a *factor in bytes*: a port
that carries ``b`` bytes with factor ``f`` takes as long as a lone flow of ``f * b`` bytes, so latencies cancel and one
curve per link class prices every resource. No torch import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["CROSS_NODE", "IN_NODE", "Curve", "ExecutorCosts", "LinkCosts", "PackCosts"]

FloatArray = NDArray[np.float64]

#: The two classes of links that a price tells apart.
IN_NODE = "in_node"
CROSS_NODE = "cross_node"


@dataclass(frozen=True)
class Curve:
    """Seconds of one call with one lone flow against its bytes.

    ``bytes`` and ``seconds`` are the measured sizes and their isotonic medians, strictly rising. Between them seconds
    are interpolated log-log; below the first size they stay constant; above the last one they grow by
    ``tail_s_per_byte`` (extrapolated). ``drained``: what messages of these sizes add up by on a port that they share;
    empty: by their bytes.
    """

    bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    tail_s_per_byte: float
    drained: tuple[float, ...] = ()

    @cached_property
    def _log_bytes(self) -> FloatArray:
        return np.log(np.asarray(self.bytes, dtype=np.float64))

    @cached_property
    def _log_seconds(self) -> FloatArray:
        return np.log(np.asarray(self.seconds, dtype=np.float64))

    def time(self, nbytes: FloatArray) -> FloatArray:
        """Seconds for an array of bytes (not negative), elementwise; 0 bytes cost as much as the first size."""
        wanted = np.maximum(nbytes, 1.0)
        inside = np.exp(np.interp(np.log(wanted), self._log_bytes, self._log_seconds))
        found: FloatArray = inside + np.maximum(wanted - self.bytes[-1], 0.0) * self.tail_s_per_byte
        return found

    def inverse(self, seconds: float) -> float:
        """Bytes that a lone flow moves in ``seconds``: at least 0, exact inverse of ``time`` from the first size on."""
        if seconds <= 0:
            return 0.0
        if seconds >= self.seconds[-1]:
            return self.bytes[-1] + (seconds - self.seconds[-1]) / self.tail_s_per_byte
        if seconds <= self.seconds[0]:
            return self.bytes[0] * seconds / self.seconds[0]
        return float(np.exp(np.interp(np.log(seconds), self._log_seconds, self._log_bytes)))

    @cached_property
    def _log_drained(self) -> FloatArray:
        return np.log(np.asarray(self.drained or self.bytes, dtype=np.float64))

    def drain(self, nbytes: FloatArray) -> FloatArray:
        """What messages of ``nbytes`` (any shape) add up by where they share a port: the bytes that the port moves at
        the plateau's rate while one of them drains. At least ``nbytes``; more of them for the ramp of small messages,
        never more per byte for larger ones. Elementwise, rising."""
        return _log_log(nbytes, self._log_bytes, self._log_drained)

    def fill(self, drained: FloatArray) -> FloatArray:
        """Bytes of the lone flow that drains as long: exact inverse of ``drain``."""
        return _log_log(drained, self._log_drained, self._log_bytes)

    @property
    def plateau_rate(self) -> float:
        """Payload rate of large messages, in bytes per second: the best of the sizes from half the largest on.

        Smaller ones may look faster than the link, where a rate limiter lets a burst through, or slower: latency.
        """
        pairs = zip(self.bytes, self.seconds, strict=True)
        return max(b / s for b, s in pairs if 2 * b >= self.bytes[-1])

    @property
    def largest(self) -> int:
        """Largest measured size; prices above it are extrapolated."""
        return self.bytes[-1]


def _log_log(wanted: FloatArray, known: FloatArray, values: FloatArray) -> FloatArray:
    """Interpolation between logarithms, in proportion beyond both ends."""
    log = np.log(np.maximum(wanted, 1e-300))
    inside = np.interp(log, known, values)
    beyond = np.minimum(log - known[0], 0.0) + np.maximum(log - known[-1], 0.0)
    found: FloatArray = np.where(wanted > 0, np.exp(inside + beyond), 0.0)
    return found


@dataclass(frozen=True)
class LinkCosts:
    """Costs of one link class under one executor. Factors multiply bytes; see the module's docstring.

    A *port* is what a rank's bytes of the class go through: its NIC between nodes, itself inside a node.
    """

    curve: Curve
    two_way: float
    """Share of the smaller direction that adds to the larger one within a pair: 0 full duplex, 1 half duplex."""
    turn: float
    """The same at a port that sends to one peer and receives from another."""
    fan_out: float
    """Factor of a rank's bytes sent to several peers at once; below 1 where one flow does not fill the port."""
    fan_in: float
    """Factor of a rank's bytes received from several peers at once (incast)."""
    port: float
    """Factor of a port's bytes in one direction when all its ranks use it; the usual port of the class."""
    ports_out: Mapping[int, float]
    """``port`` of single NICs where it was measured, sending; keyed by NIC number."""
    ports_in: Mapping[int, float]
    """``port`` of single NICs where it was measured, receiving."""
    node: float
    """Factor of the mean bytes per port of a node, one direction: 1 where a node's ports do not disturb each other."""
    crowd: Mapping[int, float]
    """How many times as long as alone a port takes when so many of the cluster's ports are busy at once: a shared
    switch, or shared cores. Rising with their number; empty where ports do not disturb each other."""
    message_s: float
    """Seconds for each message of a rank in a round beyond its first."""
    receiver_rail: bool = False
    """Whether a flow leaves its node by the NIC on the receiver's rail (NCCL's PXN), not by the sender's own."""
    exchange: float = 0.0
    """Share of what a port's peers send back over the same pairs that adds to what it sends them, several at once."""

    def port_out(self, nic: int) -> float:
        return self.ports_out.get(nic, self.port)

    def port_in(self, nic: int) -> float:
        return self.ports_in.get(nic, self.port)

    def plateau_of(self, nic: int) -> float:
        """Payload bytes per second of one NIC, the faster direction."""
        return self.curve.plateau_rate / min(self.port_out(nic), self.port_in(nic))

    @property
    def port_rate(self) -> float:
        """Payload bytes per second of a usual port, one direction."""
        return self.curve.plateau_rate / self.port

    def crowded(self, loads: FloatArray) -> FloatArray:
        """Effective bytes (rounds) of ports that carry ``loads`` (rounds, ports), all begun at once.

        The ports progress alike; as long as n of them have bytes left, each takes ``crowd[n]`` times as long as alone.
        Between the measured numbers the factor is interpolated, beyond the last one it grows with their number.
        """
        if not self.crowd:
            found: FloatArray = loads.max(axis=1, initial=0.0)
            return found
        falling = -np.sort(-loads, axis=1)
        steps = falling - np.column_stack([falling[:, 1:], np.zeros(len(falling))])
        known = sorted({1: 1.0, **self.crowd}.items())
        busy, factor = (np.asarray(column, dtype=np.float64) for column in zip(*known, strict=True))
        number = np.arange(1, loads.shape[1] + 1, dtype=np.float64)
        weights = np.interp(number, busy, factor) * np.maximum(number / busy[-1], 1.0)
        total: FloatArray = steps @ weights
        return total

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> LinkCosts:
        columns = {key: tuple(entry["curve"][key]) for key in ("bytes", "seconds", "drained")}
        curve = Curve(**columns, tail_s_per_byte=entry["curve"]["tail_s_per_byte"])
        keyed = ("ports_out", "ports_in", "crowd")
        ports = {key: {int(nic): float(f) for nic, f in entry[key].items()} for key in keyed}
        return cls(**{**entry, **ports, "curve": curve})


@dataclass(frozen=True)
class PackCosts:
    """Packing on one rank: ``call_s`` once a round where anything is packed, plus per copy, per contiguous run and per
    byte."""

    call_s: float
    segment_s: float
    """Seconds of each strided copy."""
    byte_s: float
    run_s: float = 0.0
    """Seconds of each contiguous run within a copy."""
    node_lanes: float | None = None
    """How many ranks of a node move packed bytes as fast as one does alone; None: all of them."""
    world_lanes: float | None = None
    """The same over all ranks: less than the world where nodes share a machine."""
    node_copy_lanes: float | None = None
    """How many ranks of a node begin copies and runs as fast as one does alone (cores, not memory); None: all."""
    world_copy_lanes: float | None = None
    """The same over all ranks."""


@dataclass(frozen=True)
class ExecutorCosts:
    """Costs of one executor: the empty call, the link classes (None where the cluster has none), overlap, packing."""

    floor_s: float
    """Seconds of an empty call in a series: what a round costs before it moves anything."""
    start_s: float
    """What an isolated call of a small message takes beyond one in a series: ranks leave a barrier one after the other,
    and nothing is warm. A move begins once."""
    overlap: float
    """Share of the shorter of in-node and cross-node traffic that is hidden behind the longer one: 0 none, 1 all."""
    busy_s: float
    """What a call of small messages takes beyond a lone one where all ranks exchange: they wait for shared cores."""
    in_node: LinkCosts | None
    cross_node: LinkCosts | None
    pack: PackCosts
    unpack: PackCosts

    def link(self, name: str) -> LinkCosts | None:
        """Costs of ``IN_NODE`` or ``CROSS_NODE``."""
        return self.in_node if name == IN_NODE else self.cross_node

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> ExecutorCosts:
        links = {
            name: None if entry[name] is None else LinkCosts.from_dict(entry[name]) for name in (IN_NODE, CROSS_NODE)
        }
        packs = {name: PackCosts(**entry[name]) for name in ("pack", "unpack")}
        return cls(**{**entry, **links, **packs})

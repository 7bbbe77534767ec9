"""An invented cluster behind the measuring seam: max-min fair flows over ports, NICs and a machine, with known truth.

Written apart from the price on purpose: rates are shared by progressive filling, not by effective bytes on a curve.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from relaymeter.calibration.cells import Instruments, Samples, Sampling, Wrong
from relaymeter.relayout.topology import Topology


@dataclass
class Cluster:
    """Rates in bytes per second. ``machine_rate`` caps the sum of all flows (shared cores); None: no such limit."""

    topology: Topology
    nic_rate: float = 48e6
    port_rate: float = 1e9
    flow_rate: float | None = None
    flow_rates: dict[str, float] = field(default_factory=dict)
    """``flow_rate`` of single executors."""
    node_rate: float | None = None
    """Caps what leaves a node, and what enters it."""
    exchange: float = 0.0
    """Share of what a flow's receiver sends back that the flow has to wait for, where its sender has several peers."""
    busy_s: float = 0.0
    """What every call takes more, at least, where all ranks send and receive: shared cores."""
    isolated_s: float = 0.0
    """What a call of its own takes beyond one of a series."""
    machine_rate: float | None = None
    cross_latency_s: float = 6e-4
    near_latency_s: float = 1e-4
    floor_s: float = 5e-5
    half_duplex: dict[str, bool] = field(default_factory=dict)
    message_s: float = 2e-5
    segment_s: float = 4e-6
    run_s: float = 5e-9
    copy_rate: float = 3e9
    lanes: float = float("inf")
    noise: float = 0.002
    wrong: tuple[Wrong, ...] = ()
    slow_nics: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    calls: int = 0

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def instruments(self) -> Instruments:
        return Instruments(self.measure, self.packing)

    def measure(self, matrix, executor, *, messages=1, calls=1, sampling=None) -> Samples:
        seconds = self.seconds(np.asarray(matrix, dtype=float), executor, messages)
        seconds += self.isolated_s if calls == 1 and matrix.any() else 0.0
        return self._sampled(seconds, float(matrix.sum()), sampling, calls)

    def packing(self, direction, run_bytes, runs, *, copies=1, ranks=(), sampling=None) -> Samples:
        seconds = 1e-5 + copies * self.segment_s + runs * self.run_s + runs * run_bytes / self.copy_rate
        seconds *= max(1.0, max(len(ranks), 1) / self.lanes)
        return self._sampled(seconds, run_bytes * runs, sampling, 1)

    def _sampled(self, seconds: float, moved: float, sampling: Sampling | None, calls: int) -> Samples:
        sampling = sampling or Sampling()
        self.calls += 1
        times: list[float] = []
        spent = sampling.warmups * seconds * calls
        while not sampling.enough(times, spent, moved * len(times)):
            times.append(seconds * float(np.exp(self.noise * self._rng.standard_normal())))
            spent += times[-1] * calls
        return Samples(tuple(times), spent, self.wrong if moved else ())

    def seconds(self, matrix: np.ndarray, executor: str, messages: int = 1) -> float:
        """Time until the last flow is through."""
        src, dst = np.nonzero(matrix)
        if not len(src):
            return self.floor_s
        node, nic = self.topology.node_array, self.topology.nic_array
        far = node[src] != node[dst]
        several = (matrix > 0).sum(axis=1)[src] > 1
        left = matrix[src, dst] + np.where(several, self.exchange * np.minimum(matrix[src, dst], matrix[dst, src]), 0.0)
        groups: dict[tuple, list[int]] = {}
        caps: dict[tuple, float] = {}
        for flow, (r, q) in enumerate(zip(src.tolist(), dst.tolist(), strict=True)):
            if far[flow]:
                keys = [("out", nic[r]), ("in", nic[q])]
                rates = [self.slow_nics.get(int(n), self.nic_rate) for n in (nic[r], nic[q])]
                alone = self.flow_rates.get(executor, self.flow_rate)
                if alone is not None:
                    keys.append(("flow", flow))
                    rates.append(alone)
                if self.node_rate is not None:
                    keys += [("node out", node[r]), ("node in", node[q])]
                    rates += [self.node_rate, self.node_rate]
            else:
                keys, rates = [("port out", r), ("port in", q)], [self.port_rate, self.port_rate]
            if self.half_duplex.get(executor):
                keys.append(("pair", min(r, q), max(r, q)))
                rates.append(min(rates))
            if self.machine_rate is not None:
                keys.append(("machine",))
                rates.append(self.machine_rate)
            for key, rate in zip(keys, rates, strict=True):
                groups.setdefault(key, []).append(flow)
                caps[key] = rate
        now = 0.0
        while (left > 1e-6).any():
            rate = _fill(left > 1e-6, groups, caps)
            step = float((left[left > 1e-6] / rate[left > 1e-6]).min())
            left = np.maximum(left - rate * step, 0.0)
            now += step
        latency = self.cross_latency_s if far.any() else self.near_latency_s
        most = max(np.bincount(src).max(), np.bincount(dst).max())
        extra = (messages * most - 1) * self.message_s if executor == "send-recv" else 0.0
        ranks = len(set(src.tolist()) | set(dst.tolist()))
        waits = self.busy_s * max(ranks - 2, 0) / max(self.topology.world_size - 2, 1)
        return self.floor_s + latency + extra + max(now, waits)


def _fill(alive: np.ndarray, groups: dict, caps: dict) -> np.ndarray:
    """Max-min fair rates of the flows that are alive."""
    rate = np.zeros(len(alive))
    open_flows = alive.copy()
    room = dict(caps)
    while open_flows.any():
        share = {key: room[key] / n for key, flows in groups.items() if (n := int(open_flows[flows].sum()))}
        key = min(share, key=lambda k: share[k])
        chosen = [flow for flow in groups[key] if open_flows[flow]]
        for flow in chosen:
            rate[flow] = share[key]
            open_flows[flow] = False
            for other, flows in groups.items():
                if flow in flows:
                    room[other] = max(room[other] - share[key], 1e-9)
    return rate

"""A simulated cluster behind the measuring seam: flows over ports, PCIe, NICs and switch, shared max-min fairly.

``cluster = load_preset("h100-16x8")``; ``cluster.instruments()`` is what calibration takes, ``cluster.move_times(loads,
executor, repeats)`` runs whole schedules. Its truth is known, so what calibration finds and what prices predict can be
held against it. It knows nothing of curves and prices, and shares no code with them. No torch import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaymeter.calibration.cells import Instruments, Samples, Sampling
from relaymeter.errors import InputError
from relaymeter.harness.simulated_config import ClusterModel, ExecutorModel, load_spec
from relaymeter.harness.simulated_flows import FlowNetwork
from relaymeter.harness.simulated_moves import SimulatedMove
from relaymeter.harness.simulated_paths import Paths
from relaymeter.relayout.segments import RoundLoads
from relaymeter.relayout.topology import Topology

__all__ = ["SimulatedCluster", "load_preset"]

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


def load_preset(name: str) -> SimulatedCluster:
    """The simulated cluster of a shipped preset, or of a TOML file. Raises InputError."""
    return SimulatedCluster(load_spec(name))


class SimulatedCluster:
    """A cluster that exists only as a model. Times are the same for the same model, seed and order of calls.

    ``topology`` has its NICs as they are; ``declared`` is what a launcher would say that knows only nodes: a NIC for
    every rank. Calibration is told ``declared`` and has to find ``topology``.
    """

    def __init__(self, model: ClusterModel) -> None:
        self.model = model
        self._rng = np.random.default_rng(model.seed)
        ranks = np.arange(model.nodes * model.ranks_per_node)
        nic = ranks // (model.ranks_per_node // model.nics_per_node)
        node = tuple((ranks // model.ranks_per_node).tolist())
        self.topology = Topology(node=node, nic=tuple(nic.tolist()))
        self.declared = Topology(node=node, nic=tuple(ranks.tolist()))

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def executors(self) -> tuple[str, ...]:
        """The executors it has, the default one of its backend first."""
        own = "all-to-all" if self.model.backend == "nccl" else "send-recv"
        return tuple(sorted(self.model.executors, key=lambda name: name != own))

    @cached_property
    def truth(self) -> Mapping[str, Any]:
        """What calibration should find, by name: payload bytes per second and seconds of an undisturbed cluster.

        ``nic_bytes_per_s`` (of a NIC that is no straggler; ``nic_rates`` has each), ``port_bytes_per_s``: one
        direction, as far as one rank or one NIC may use them;
        ``in_node_flow_bytes_per_s`` and ``cross_node_flow_bytes_per_s``: a lone large message, by executor; ``floor_s``
        by executor; ``nics_per_node``; ``segment_s`` and ``pack_bytes_per_s``.
        """
        rates = self.model.rates
        flows: dict[str, dict[str, float]] = {"in_node": {}, "cross_node": {}}
        for executor, found in self.model.executors.items():
            for kind, link, shared in (
                ("in_node", found.in_node, [rates.port]),
                ("cross_node", found.cross_node, [rates.nic, rates.pcie, rates.node, rates.switch]),
            ):
                limits = [link.flow, rates.rank, rates.machine, *shared]
                flows[kind][executor] = min(rate for rate in limits if rate is not None)
        return {
            "nic_bytes_per_s": rates.nic,
            "port_bytes_per_s": rates.port,
            "in_node_flow_bytes_per_s": flows["in_node"],
            "cross_node_flow_bytes_per_s": flows["cross_node"],
            "floor_s": {name: found.floor_s for name, found in self.model.executors.items()},
            "nics_per_node": self.model.nics_per_node,
            "segment_s": self.model.packing.segment_s,
            "pack_bytes_per_s": self.model.packing.rate,
        }

    @cached_property
    def nic_rates(self) -> Mapping[int, float]:
        """The true payload rate of each NIC of ``topology``, one direction, in bytes per second: stragglers have their
        own."""
        slow = {int(name): factor for name, factor in self.model.stragglers.nics.items()}
        return {nic: self.model.rates.nic / slow.get(nic, 1.0) for nic in sorted(set(self.topology.nic))}

    def instruments(self) -> Instruments:
        """The seam that calibration goes through."""
        return Instruments(self.measure, self.packing, self.model.largest_bytes)

    def measure(
        self, matrix: IntArray, executor: str, *, messages: int = 1, calls: int = 1, sampling: Sampling | None = None
    ) -> Samples:
        """See ``calibration.cells.Measure``. Raises InputError on a bad matrix or an executor that it has not."""
        size = self.topology.world_size
        if matrix.shape != (size, size) or bool((matrix < 0).any()):
            raise InputError(f"a matrix of {size} x {size} byte counts is needed, got {matrix.shape}")
        src, dst = np.nonzero(matrix)
        apart = src != dst
        src, dst = src[apart], dst[apart]
        nbytes = matrix[src, dst]
        cut = messages if executor == "send-recv" else 1
        took = self.exchange_s(src, dst, nbytes, np.full(len(src), cut, dtype=np.int64), executor, isolated=calls == 1)
        return self._sampled(took, calls, float(nbytes.sum()) * calls, sampling or Sampling())

    def packing(
        self,
        direction: str,
        run_bytes: int,
        runs: int,
        *,
        copies: int = 1,
        ranks: Sequence[int] = (),
        sampling: Sampling | None = None,
    ) -> Samples:
        """See ``calibration.cells.MeasurePacking``. Raises InputError on another direction."""
        if direction not in ("pack", "unpack"):
            raise InputError(f"direction {direction!r} is not one of pack, unpack")
        active = np.asarray(ranks or self.topology.ranks_of(0), dtype=np.int64)
        model, rate = self.model.packing, self.model.packing.rate_of(direction)
        alone = model.call_s + copies * model.segment_s + runs * run_bytes / rate
        slow = float(self._paths.slowness[active].max())
        moved = float(run_bytes * runs * len(active))
        return self._sampled(alone * slow * model.crowding(len(active)), 1, moved, sampling or Sampling())

    def exchange_s(
        self, src: IntArray, dst: IntArray, nbytes: IntArray, messages: IntArray, executor: str, *, isolated: bool
    ) -> float:
        """Seconds of one exchange of flows (n), undisturbed: until the last rank is through, all having begun at once.

        Where no flow moves anything, the empty call. Only ranks and resources that carry something are looked at.
        """
        found = self._executor(executor)
        begin = found.floor_s + (found.isolated_s if isolated else 0.0)
        slowness = self._paths.slowness
        if not len(src):
            return begin * float(slowness.max() if found.together else np.median(slowness))
        ranks, place = np.unique(np.concatenate([src, dst]), return_inverse=True)
        sent = np.bincount(place[: len(src)], weights=messages, minlength=len(ranks))
        received = np.bincount(place[len(src) :], weights=messages, minlength=len(ranks))
        posted = (begin + (np.maximum(sent, received) - 1) * found.message_s) * slowness[ranks]
        meet = np.maximum(posted[place[: len(src)]], posted[place[len(src) :]])
        flows, latency = self._paths.flows(src, dst, nbytes, executor)
        starts = list(zip((meet + latency).tolist(), range(len(src)), strict=True))
        ends = self._network.run(flows, starts)
        return float(max(ends.max(), posted.max()))

    def move_times(self, loads: RoundLoads, executor: str, repeats: int) -> tuple[float, ...]:
        """Seconds of a whole schedule (the slowest rank, packing included), one value per repeat.

        The rounds follow each other without a barrier, as ``relayout.execute`` runs them: see ``simulated_moves``.
        ``loads`` is ``schedule.loads(executor)``, for ``topology``. Raises InputError on an executor that it has not.
        """
        took = self.move_s(loads, executor)
        return tuple(took * self._disturbance(1) for _ in range(repeats))

    def move_s(self, loads: RoundLoads, executor: str) -> float:
        """``move_times`` of an undisturbed cluster."""
        found = self._executor(executor)
        return SimulatedMove(loads, executor, found, self.model.packing, self._paths, self._network).seconds()

    def _executor(self, name: str) -> ExecutorModel:
        for known, found in self.model.executors.items():
            if known == name:
                return found
        raise InputError(f"simulated cluster {self.name} has no executor {name!r}, only {', '.join(self.executors)}")

    @cached_property
    def _paths(self) -> Paths:
        return Paths(self.model)

    @cached_property
    def _network(self) -> FlowNetwork:
        return FlowNetwork(self._paths.capacity, self._paths.incast, self.model.resolution)

    def _disturbance(self, calls: int) -> float:
        """Factor of a sample's time: the mean over ``calls`` back to back."""
        spread = np.exp(self.model.noise * self._rng.standard_normal(calls))
        hit = self._rng.random(calls) < self.model.tail_share
        return float((spread * np.where(hit, self.model.tail, 1.0)).mean())

    def _sampled(self, seconds: float, calls: int, moved: float, sampling: Sampling) -> Samples:
        """Samples as they would be taken one by one; the wall time is what it would have been."""
        times: list[float] = []
        spent = sampling.warmups * seconds * calls
        while not sampling.enough(times, spent, moved * len(times)):
            times.append(seconds * self._disturbance(calls))
            spent += times[-1] * calls
        return Samples(tuple(times), spent)

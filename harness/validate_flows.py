"""Sizes and uneven matrices that calibration never fitted, for both kinds of links and both executors. Pure NumPy.

``flow_cases(profile, topology, executor, settings)`` draws them up, the same wherever it is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from relaymeter.calibration.costs import CROSS_NODE, IN_NODE
from relaymeter.calibration.patterns import Flow, random_matrix
from relaymeter.calibration.profiles import Profile
from relaymeter.harness.validate_cases import Expecter, FlowCase
from relaymeter.policies.price import flow_loads
from relaymeter.relayout.topology import Topology
from relaymeter.units import format_bytes

__all__ = ["FAMILIES", "flow_cases"]

#: Kinds of uneven matrices, with what makes them hard and how many of each there are; calibration draws plain ones.
FAMILIES = (("plain", (), 11), ("two-way", ("two-way",), 4), ("in-node", ("in-node",), 4), ("incast", ("incast",), 4))
#: Seeds of matrices: calibration draws its own from another.
_SEED = 90_210
#: Held-out sizes are 31/16 of these powers of two: half way, in the logarithm, between those that calibration fits.
_FIRST, _LAST = 10, 27
_STEP_BELOW = 3
_LARGE = 1 << 20
#: Every NIC is held against its rate with a message of this size, in bytes.
_NIC_BYTES = 6 << 20
#: Exchanges of at most so many bytes are measured in series too.
_SERIES_BYTES = 1 << 20
_SERIES_CALLS = 8
#: NICs that are held against their rate at most.
_NICS = 16
#: Inside-a-node traffic of a matrix that is bound there takes at least so many times what its other traffic takes.
_BOUND = 1.5


def flow_cases(
    profile: Profile, topology: Topology, executor: str, hard: Sequence[str], *, call_s: float, largest_s: float
) -> list[FlowCase]:
    """The sizes and matrices of one executor. ``hard``: what makes every case of this cluster hard.

    ``call_s``: about what the largest flow of a matrix takes alone; ``largest_s``: no size takes longer. Pure.
    """
    maker = _Maker(profile, topology, executor, tuple(hard))
    return [*maker.sizes(largest_s), *maker.nics(largest_s), *maker.matrices(call_s)]


class _Maker:
    def __init__(self, profile: Profile, topology: Topology, executor: str, hard: tuple[str, ...]) -> None:
        self._topology, self._executor, self._hard = topology, executor, hard
        self._expecter = Expecter(profile, topology, executor)
        self._costs = profile.costs(executor)

    def _case(
        self, kind: str, name: str, flows: Sequence[Flow], hard: tuple[str, ...], link: str | None, calls: int = 1
    ) -> FlowCase:
        return FlowCase(
            kind=kind,
            name=name,
            link=link,
            executor=self._executor,
            hard=tuple(dict.fromkeys((*hard, *self._hard))),
            flows=tuple(flows),
            calls=calls,
            expected=self._expecter.expect(flow_loads(list(flows)), in_series=calls > 1),
        )

    def _pair(self, kind: str) -> tuple[int, int] | None:
        """Two ranks of this kind of link: others than those of calibration's curves, where there are others."""
        node = self._topology.node_array
        near = node[:, None] == node[None, :]
        wanted = near & ~np.eye(len(node), dtype=bool) if kind == IN_NODE else ~near
        pairs = np.argwhere(wanted)
        return None if not len(pairs) or self._costs.link(kind) is None else (int(pairs[-1][0]), int(pairs[-1][1]))

    def sizes(self, largest_s: float) -> Iterator[FlowCase]:
        for kind in (IN_NODE, CROSS_NODE):
            pair, link = self._pair(kind), self._costs.link(kind)
            if pair is None or link is None:
                continue
            powers = (k for k in range(_FIRST, _LAST) if 1 << k >= _LARGE or not (k - _FIRST) % _STEP_BELOW)
            for power in powers:
                size = 31 << (power - 4)
                seconds = float(link.curve.time(np.asarray([size], dtype=np.float64))[0])
                if size > 1.25 * link.curve.largest or (seconds > largest_s and size > 2 * _LARGE):
                    break
                flows, text = [(*pair, size)], f"{kind} {format_bytes(size)}"
                yield self._case("size", f"{text} alone", flows, (), kind)
                if size <= _SERIES_BYTES:
                    yield self._case("size", f"{text} in series", flows, (), kind, _SERIES_CALLS)

    def nics(self, largest_s: float) -> Iterator[FlowCase]:
        """Every NIC by a message of its lowest rank to the like-numbered NIC of the next node."""
        link, topology = self._costs.cross_node, self._topology
        if link is None or topology.nodes < 2:
            return
        if float(link.curve.time(np.asarray([float(_NIC_BYTES)]))[0]) > 2 * largest_s:
            return
        for nic in sorted(set(topology.nic))[:_NICS]:
            rank = topology.nic.index(nic)
            home = topology.node[rank]
            there = topology.ranks_of((home + 1) % topology.nodes)
            peer = there[topology.ranks_of(home).index(rank) % len(there)]
            yield self._case(
                "size", f"NIC {nic} {format_bytes(_NIC_BYTES)}", [(rank, peer, _NIC_BYTES)], (), CROSS_NODE
            )

    def matrices(self, call_s: float) -> Iterator[FlowCase]:
        size = {}
        for kind in (IN_NODE, CROSS_NODE):
            link = self._costs.link(kind)
            largest = 0 if link is None else min(link.curve.inverse(call_s), float(link.curve.largest))
            size[kind] = 0.0 if self._pair(kind) is None else largest
        for place, (family, hard, count) in enumerate(FAMILIES):
            rng = np.random.default_rng([_SEED, place])
            for number in range(1, count + 1):
                flows = self._draw(family, rng, size)
                if flows:
                    yield self._case("matrix", f"{family} {number}", flows, hard, None)

    def _draw(self, family: str, rng: np.random.Generator, size: dict[str, float]) -> list[Flow]:
        """One matrix; empty where this cluster has none of its kind."""
        topology, far, near = self._topology, size[CROSS_NODE], size[IN_NODE]
        if family == "in-node":
            return self._bound_inside(rng, far, near)
        if family == "incast":
            return self._incast(rng, far, near)
        flows: list[Flow] = []
        while not flows:
            flows = random_matrix(topology, rng, far, near)
        if family == "two-way":
            back = [(q, r, max(16, int(b * 10 ** rng.uniform(-0.5, 0)) // 16 * 16)) for r, q, b in flows]
            merged = {(r, q): b for r, q, b in [*back, *flows]}
            flows = [(r, q, b) for (r, q), b in sorted(merged.items())]
        return flows

    def _bound_inside(self, rng: np.random.Generator, far: float, near: float) -> list[Flow]:
        """Mostly traffic inside the nodes: what crosses them is thinned until it takes less time by the prices."""
        if near == 0:
            return []
        for _ in range(20):
            flows = random_matrix(self._topology, rng, far, near)
            parts = self._expecter.price(flow_loads(flows)).breakdown if flows else {}
            if parts and parts["in_node_s"] > 0 and parts["in_node_s"] >= _BOUND * parts["cross_node_s"]:
                return flows
            far *= 0.7
        return []

    def _incast(self, rng: np.random.Generator, far: float, near: float) -> list[Flow]:
        """Several ranks, of other nodes where there are any, send to one, and a few flows go elsewhere."""
        topology = self._topology
        target = int(rng.integers(topology.world_size))
        home = topology.node[target]
        kind = topology.nodes > 1
        others = [r for r in range(topology.world_size) if r != target and (topology.node[r] != home) == kind]
        if len(others) < 2:
            return []
        senders = rng.permutation(others)[: max(2, min(len(others), 8))].tolist()
        largest = (far if kind else near) * 1.5 / len(senders)
        flows = [(int(r), target, int(largest * 10 ** rng.uniform(-0.5, 0)) // 16 * 16) for r in senders]
        elsewhere = random_matrix(topology, rng, far / 4, near / 4)
        taken = {(r, q) for r, q, _ in flows}
        flows += [(r, q, b) for r, q, b in elsewhere if (r, q) not in taken and q != target][: topology.world_size]
        return [flow for flow in flows if flow[2] > 0]

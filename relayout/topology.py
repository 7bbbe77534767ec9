"""Ranks, nodes and NICs: where each rank runs and through which network port its bytes leave the node.

``Topology.grid(2, 2)`` is two nodes of two ranks with one NIC per rank; ``Topology.grid(2, 2, "node")`` shares one NIC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from relaymeter.errors import InputError

__all__ = ["MAX_RANKS", "Topology", "parse_grid"]

#: The largest world that a topology given as text may have.
MAX_RANKS = 65536


@dataclass(frozen=True)
class Topology:
    """``node[r]`` is the node of rank ``r`` (0, 1, ...), ``nic[r]`` the NIC of its cross-node bytes."""

    node: tuple[int, ...]
    nic: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.node or len(self.node) != len(self.nic):
            raise InputError(
                f"a topology needs one node and one NIC per rank, got {len(self.node)} and {len(self.nic)}"
            )
        if sorted(set(self.node)) != list(range(self.nodes)):
            raise InputError(f"nodes must be numbered 0..{self.nodes - 1} without a gap, got {sorted(set(self.node))}")
        home: dict[int, int] = {}
        for rank, (node, nic) in enumerate(zip(self.node, self.nic, strict=True)):
            if home.setdefault(nic, node) != node:
                raise InputError(f"rank {rank} on node {node} uses NIC {nic}, which belongs to node {home[nic]}")

    @classmethod
    def grid(cls, nodes: int, ranks_per_node: int, nic_per: Literal["rank", "node"] = "rank") -> Topology:
        """``nodes`` x ``ranks_per_node`` ranks, numbered node by node, with a NIC per rank or one per node."""
        if nodes < 1 or ranks_per_node < 1:
            raise InputError(f"a topology of {nodes} nodes x {ranks_per_node} ranks has no rank: give at least 1x1")
        node = tuple(rank // ranks_per_node for rank in range(nodes * ranks_per_node))
        return cls(node=node, nic=node if nic_per == "node" else tuple(range(len(node))))

    @property
    def world_size(self) -> int:
        return len(self.node)

    @property
    def nodes(self) -> int:
        return max(self.node) + 1

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """Ranks on ``node``, ascending."""
        return tuple(rank for rank, home in enumerate(self.node) if home == node)

    def nics_of(self, node: int) -> tuple[int, ...]:
        """NICs of ``node``, ascending."""
        return tuple(sorted({self.nic[rank] for rank in self.ranks_of(node)}))

    @cached_property
    def node_array(self) -> NDArray[np.int64]:
        """``node`` as an int64 array of length world_size."""
        return np.asarray(self.node, dtype=np.int64)

    @cached_property
    def nic_array(self) -> NDArray[np.int64]:
        """``nic`` as an int64 array of length world_size."""
        return np.asarray(self.nic, dtype=np.int64)

    @cached_property
    def _rails(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Each rank's rail (place of its NIC among its node's); the NIC of each node on each rail (nodes, rails)."""
        ports = [self.nics_of(node) for node in range(self.nodes)]
        rail = [ports[node].index(nic) for node, nic in zip(self.node, self.nic, strict=True)]
        most = max(len(nics) for nics in ports)
        table = [[nics[place % len(nics)] for place in range(most)] for nics in ports]
        return np.asarray(rail, dtype=np.int64), np.asarray(table, dtype=np.int64)

    def nic_on_rail_of(self, src: NDArray[np.int64], dst: NDArray[np.int64]) -> NDArray[np.int64]:
        """NICs (n) of the senders' nodes that are on the rails of the receivers; ranks ``src``, ``dst`` (n)."""
        rail, table = self._rails
        found: NDArray[np.int64] = table[self.node_array[src], rail[dst]]
        return found

    def to_dict(self) -> dict[str, Any]:
        return {"node": list(self.node), "nic": list(self.nic)}

    @classmethod
    def from_dict(cls, entry: dict[str, Sequence[int]]) -> Topology:
        return cls(node=tuple(entry["node"]), nic=tuple(entry["nic"]))


def parse_grid(text: str) -> tuple[int, int]:
    """Nodes and ranks per node of ``"16x8"``. Raises InputError."""
    left, cross, right = text.lower().partition("x")
    if not cross or not (left + right).isascii() or not left.isdigit() or not right.isdigit():
        raise InputError(f"topology {text!r} is not NODESxRANKS_PER_NODE: for example 2x4 or 16x8")
    if len(left) > 9 or len(right) > 9 or not 1 <= int(left) * int(right) <= MAX_RANKS:
        raise InputError(f"topology {text!r}: nodes x ranks per node must be 1 to {MAX_RANKS:,} ranks")
    return int(left), int(right)

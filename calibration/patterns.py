"""Patterns of flows that calibration probes: who sends to whom at once, for a world of any number of nodes and ranks.

Every function is pure and returns flows (src, dst, bytes); ``matrix_of(flows, world_size)`` is what ``measure`` takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from relaymeter.relayout.topology import Topology

__all__ = [
    "Flow",
    "all_pairs",
    "cross_pairs",
    "dense",
    "fan_in",
    "fan_out",
    "halves",
    "in_node_pairs",
    "matrix_of",
    "nic_peers",
    "one_pair_a_node",
    "rails",
    "random_matrix",
    "ring",
    "turn",
]

Flow = tuple[int, int, int]
IntArray = NDArray[np.int64]


def matrix_of(flows: Sequence[Flow], world_size: int) -> IntArray:
    """Bytes from rank r (row) to rank q (column)."""
    matrix = np.zeros((world_size, world_size), dtype=np.int64)
    for src, dst, nbytes in flows:
        matrix[src, dst] += nbytes
    return matrix


def in_node_pairs(topology: Topology, most: int) -> list[tuple[int, int]]:
    """Directed pairs inside nodes: all of them where they are at most ``most``, else evenly taken ones."""
    pairs = [(r, q) for node in range(topology.nodes) for r in topology.ranks_of(node) for q in topology.ranks_of(node)]
    pairs = [(r, q) for r, q in pairs if r != q]
    return pairs if len(pairs) <= most else [pairs[k * len(pairs) // most] for k in range(most)]


def cross_pairs(topology: Topology, most: int) -> list[tuple[int, int]]:
    """Directed pairs between nodes: all of them where they are at most ``most``, else one per node and round of a
    round-robin tournament (node n with node n + 1, n + 2, ...), ranks taken in turn."""
    node, size = topology.node, topology.world_size
    if size * size <= 4 * most:
        pairs = [(r, q) for r in range(size) for q in range(size) if node[r] != node[q]]
        if len(pairs) <= most:
            return pairs
    pairs = []
    for step in range(1, topology.nodes):
        for home in range(topology.nodes):
            here, there = topology.ranks_of(home), topology.ranks_of((home + step) % topology.nodes)
            pairs.append((here[(home + step) % len(here)], there[home % len(there)]))
    spare = len(pairs) > most
    return [pairs[k * len(pairs) // most] for k in range(most)] if spare else pairs


def rails(topology: Topology, here: int, there: int, nbytes: int) -> list[Flow]:
    """All same-index pairs from node ``here`` to node ``there`` at once."""
    return [(r, q, nbytes) for r, q in zip(topology.ranks_of(here), topology.ranks_of(there), strict=False)]


def halves(topology: Topology, here: int, there: int, nbytes: int) -> list[Flow]:
    """The first half of node ``here``'s ranks send to their like of ``there``, whose second half sends back: as many
    ports as ``rails`` uses, half of them on each node. Empty where a node has one rank."""
    pairs = list(zip(topology.ranks_of(here), topology.ranks_of(there), strict=False))
    half = len(pairs) // 2
    return [(r, q, nbytes) for r, q in pairs[:half]] + [(q, r, nbytes) for r, q in pairs[half:]] if half else []


def dense(topology: Topology, here: int, there: int, nbytes: int, *, both: bool = False) -> list[Flow]:
    """Every rank of node ``here`` sends to every rank of node ``there``, ``nbytes`` in all from each; and back as well
    where ``both``. With several flows at each NIC this is what a node can inject."""
    one, two = topology.ranks_of(here), topology.ranks_of(there)
    share = max(16, nbytes // max(len(one), len(two)) // 16 * 16)
    pairs = [(r, q) for r in one for q in two]
    flows = [(r, q, share) for r, q in pairs]
    return flows + [(q, r, share) for r, q in pairs] if both else flows


def ring(topology: Topology, nbytes: int) -> list[Flow]:
    """Every rank sends to the next one, the last to the first."""
    size = topology.world_size
    return [(rank, (rank + 1) % size, nbytes) for rank in range(size)]


def turn(topology: Topology, here: int, there: int, nbytes: int) -> list[Flow]:
    """Every rank of the two nodes sends to one rank of the other node and receives from a different one.

    Empty where the nodes have not at least two ranks each.
    """
    one, two = topology.ranks_of(here), topology.ranks_of(there)
    width = min(len(one), len(two))
    if width < 2:
        return []
    ahead = [(one[k], two[k], nbytes) for k in range(width)]
    return ahead + [(two[k], one[(k + 1) % width], nbytes) for k in range(width)]


def fan_in(sources: Sequence[int], target: int, nbytes: int) -> list[Flow]:
    """Incast: every source sends ``nbytes`` to one rank."""
    return [(rank, target, nbytes) for rank in sources if rank != target]


def fan_out(source: int, targets: Sequence[int], nbytes: int) -> list[Flow]:
    """Outcast: one rank sends ``nbytes`` to each target. Inside a node this is stage two of a relay, from the hub."""
    return [(source, rank, nbytes) for rank in targets if rank != source]


def all_pairs(topology: Topology, nodes: Sequence[int], nbytes: int) -> list[Flow]:
    """Every rank sends ``nbytes`` to every other rank of its node: the exchange of bands of a spread."""
    flows = []
    for node in nodes:
        ranks = topology.ranks_of(node)
        flows += [(r, q, nbytes) for r in ranks for q in ranks if r != q]
    return flows


def one_pair_a_node(topology: Topology, nbytes: int) -> list[Flow]:
    """One flow inside every node of at least two ranks, all at once: what nodes that share a machine take."""
    homes = (topology.ranks_of(node) for node in range(topology.nodes))
    return [(ranks[0], ranks[1], nbytes) for ranks in homes if len(ranks) > 1]


def nic_peers(topology: Topology, nic: int) -> tuple[list[int], list[int], int] | None:
    """Ranks of ``nic``, ranks of the like-numbered NIC of the next node, and that NIC. None on a single node."""
    if topology.nodes < 2:
        return None
    ranks = [rank for rank, port in enumerate(topology.nic) if port == nic]
    home = topology.node[ranks[0]]
    away = (home + 1) % topology.nodes
    ports = topology.nics_of(away)
    other = ports[topology.nics_of(home).index(nic) % len(ports)]
    return ranks, [rank for rank, port in enumerate(topology.nic) if port == other], other


def random_matrix(topology: Topology, rng: np.random.Generator, cross_bytes: float, near_bytes: float) -> list[Flow]:
    """An uneven matrix as moves have them: at most half of the pairs carry bytes, sizes spread over a factor of ten.

    A rank has about two peers on other nodes and one or two on its own, however large the world. ``cross_bytes`` and
    ``near_bytes`` are the largest flow of each class. Never fitted, only used to measure the error.
    """
    size, node = topology.world_size, topology.node_array
    near = node[:, None] == node[None, :]
    draw = 10.0 ** -rng.random((size, size))
    peers = np.where(near, near.sum(axis=1, keepdims=True) - 1, (~near).sum(axis=1, keepdims=True))
    there = rng.random((size, size)) < np.minimum(0.5, np.where(near, 1.5, 2.0) / np.maximum(peers, 1))
    scale = np.where(near, near_bytes, cross_bytes)
    matrix = np.where(there, draw * scale, 0.0).astype(np.int64) // 16 * 16
    np.fill_diagonal(matrix, 0)
    src, dst = np.nonzero(matrix)
    return [(int(r), int(q), int(matrix[r, q])) for r, q in zip(src, dst, strict=True)]

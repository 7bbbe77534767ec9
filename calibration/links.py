"""What the links are, from measurements: classes of links by clustering, NICs from flows that slow each other down.

``link_classes(pairs)`` clusters directed pairs; ``join(ranks, verdict)`` finds the ranks that share a NIC. The topology
is a hint that the data may contradict; every contradiction becomes a warning. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from relaymeter.relayout.topology import Topology

__all__ = [
    "CLASS_RATIO",
    "LinkClass",
    "Sharing",
    "alike",
    "classify_ratio",
    "join",
    "link_classes",
    "link_warnings",
    "with_nics",
]

#: Links whose rates differ by more than this ratio are of different classes.
CLASS_RATIO = 1.3

#: Two flows together at at most this share of their speed alone use one NIC; from ``SEPARATE`` on they use two.
SHARED = 0.6
SEPARATE = 0.8
#: Where something else slows flows down as well: those that share no NIC are so many times as fast as those that do.
_APART = 1.4


@dataclass(frozen=True)
class LinkClass:
    """Directed pairs of about one rate. ``rate`` is the median in bytes per second; in_node, cross_node count pairs."""

    pairs: tuple[tuple[int, int], ...]
    rate: float
    in_node: int
    cross_node: int


def link_classes(rates: Mapping[tuple[int, int], float], topology: Topology) -> tuple[LinkClass, ...]:
    """Clusters of directed pairs by rate (bytes per second), slowest first: sorted rates split where the next is more
    than ``CLASS_RATIO`` faster."""
    ordered = sorted(rates, key=lambda pair: (rates[pair], pair))
    groups: list[list[tuple[int, int]]] = []
    for pair in ordered:
        if groups and rates[pair] <= CLASS_RATIO * rates[groups[-1][-1]]:
            groups[-1].append(pair)
        else:
            groups.append([pair])
    node = topology.node
    found = []
    for group in groups:
        near = sum(node[r] == node[q] for r, q in group)
        rate = float(np.median([rates[pair] for pair in group]))
        found.append(LinkClass(tuple(sorted(group)), rate, near, len(group) - near))
    return tuple(found)


def link_warnings(classes: Sequence[LinkClass]) -> list[str]:
    """Where the data disagree with the topology: a class that mixes both kinds, or a kind that falls into several."""
    said = []
    for found in classes:
        if found.in_node and found.cross_node:
            said.append(
                f"links: {found.cross_node} pairs between nodes and {found.in_node} inside nodes have one rate "
                f"({found.rate / 1e6:.0f} MB/s): the network is no slower than the node, or the nodes share a machine"
            )
    for kind, name in (("in_node", "inside nodes"), ("cross_node", "between nodes")):
        rates = [found.rate for found in classes if getattr(found, kind)]
        if len(rates) > 1:
            listed = ", ".join(f"{rate / 1e6:.0f}" for rate in rates)
            said.append(f"links: pairs {name} fall into {len(rates)} classes ({listed} MB/s)")
    return said


@dataclass(frozen=True)
class Sharing:
    """Verdict on two ranks of a node: ``shared`` True, False, or None where the data do not decide; the ratio seen.

    ratio: time of the slower flow alone over time of both together; 1 separate, 0.5 shared. control: the same for two
    flows that can share no NIC direction; where it is low too, something else (cores, switch) is the limit.
    """

    one: int
    two: int
    ratio: float
    control: float
    shared: bool | None


def classify_ratio(one: int, two: int, ratio: float, control: float) -> Sharing:
    """Decide from the two ratios. ``one`` and ``two`` are the ranks of a node whose flows were timed together."""
    shared: bool | None = None
    if ratio >= SEPARATE:
        shared = False
    elif ratio <= SHARED and (control >= SEPARATE or control >= _APART * ratio):
        shared = True
    return Sharing(one, two, ratio, control, shared)


def join(ranks: Sequence[int], test: Callable[[int, int], bool]) -> list[list[int]]:
    """Groups of ``ranks`` that share a NIC, ``test(one, two)`` telling whether two do.

    Each rank is held against the first of every group found so far, so k ranks on m NICs need at most k * m tests.
    """
    groups: list[list[int]] = []
    for rank in ranks:
        for group in groups:
            if test(group[0], rank):
                group.append(rank)
                break
        else:
            groups.append([rank])
    return groups


def alike(topology: Topology, groups: Mapping[int, Sequence[Sequence[int]]]) -> bool:
    """Whether nodes that the topology says are built alike (as many ranks, on NICs in the same pattern) were also found
    to be: ``groups[node]`` are the ranks of each NIC of the node."""
    seen: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for node, found in groups.items():
        ranks = topology.ranks_of(node)
        ports = topology.nics_of(node)
        declared = tuple(ports.index(topology.nic[rank]) for rank in ranks)
        place = {rank: number for number, group in enumerate(found) for rank in group}
        seen.setdefault(declared, set()).add(tuple(place[rank] for rank in ranks))
    return all(len(kinds) == 1 for kinds in seen.values())


def with_nics(topology: Topology, groups: Mapping[int, Sequence[Sequence[int]]]) -> Topology:
    """The topology with the NICs found: ``groups[node]`` are the ranks of each NIC of the node, in node order.

    Nodes that are not in ``groups`` take the grouping of the first node that has as many ranks, else their own. Where
    the grouping is the topology's own, the topology comes back unchanged, NIC numbers included.
    """
    nic = [0] * topology.world_size
    count = 0
    for node in range(topology.nodes):
        ranks = topology.ranks_of(node)
        found = groups.get(node)
        if found is None:
            like = next((n for n in sorted(groups) if len(topology.ranks_of(n)) == len(ranks)), None)
            if like is None:
                found = [[r for r in ranks if topology.nic[r] == port] for port in topology.nics_of(node)]
            else:
                place = {rank: k for k, rank in enumerate(topology.ranks_of(like))}
                found = [[ranks[place[r]] for r in group] for group in groups[like]]
        for group in found:
            for rank in group:
                nic[rank] = count
            count += 1
    pairs = set(zip(topology.nic, nic, strict=True))
    same = len(pairs) == len(set(topology.nic)) == count
    return topology if same else Topology(node=topology.node, nic=tuple(nic))

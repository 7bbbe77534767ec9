"""How far prices reach: which limits of its measurement the price of a schedule passes, in words. Pure NumPy.

``limits_passed(loads, topology, profile, executor)`` is empty exactly where ``Price.extrapolated`` is False;
``gates_note(profile)`` says which gates of its quality the calibration missed. No torch import.
"""

from __future__ import annotations

from dataclasses import replace

from relaymeter.calibration.costs import CROSS_NODE, IN_NODE, Curve
from relaymeter.calibration.profiles import Profile
from relaymeter.policies.traffic import Traffic
from relaymeter.relayout.segments import RoundLoads
from relaymeter.relayout.topology import Topology
from relaymeter.units import counted, format_bytes

__all__ = ["gates_note", "limits_passed", "shape_text"]

#: A curve by which effective bytes take as many seconds: what a resource is asked for, not how long it takes.
_BYTES = Curve((1, 1 << 60), (1.0, 2.0**60), 1.0)
_WHERE = {IN_NODE: "inside nodes", CROSS_NODE: "between nodes"}


def limits_passed(loads: RoundLoads, topology: Topology, profile: Profile, executor: str) -> tuple[str, ...]:
    """What of a schedule was not measured, such as ``loads of 8.39 MB between nodes, measured to 5.77 MB``.

    A load is that of the busiest link in one round, in bytes of a lone flow that takes as long. Raises InputError where
    the profile lacks the executor.
    """
    found = []
    if topology != profile.topology:
        measured = profile.topology
        found.append(f"another topology than the measured {shape_text(measured)}, {counted(_nics(measured), 'NIC')}")
    node = topology.node_array
    far = node[loads.src] != node[loads.dst]
    moved = (loads.bytes > 0) & (loads.src != loads.dst)
    for kind, rows in ((IN_NODE, moved & ~far), (CROSS_NODE, moved & far)):
        link = profile.costs(executor).link(kind)
        if link is None or not rows.any():
            continue
        setting = (kind, topology, topology == profile.topology, loads, rows)
        if Traffic(link, *setting).extrapolated:
            load = Traffic(replace(link, curve=_BYTES, message_s=0.0), *setting).seconds.max()
            largest = format_bytes(link.curve.largest)
            found.append(f"loads of {format_bytes(round(float(load)))} {_WHERE[kind]}, measured to {largest}")
    return tuple(found)


def gates_note(profile: Profile) -> str | None:
    """What the calibration's missed gates mean for its prices, naming the one that was missed by most; None: none."""
    missed = [gate for gate in profile.gates if not gate.passed]
    if not missed:
        return None
    measured = [gate for gate in missed if gate.value is not None]
    worst = max(measured or missed, key=lambda gate: (gate.value or 0.0) / gate.limit if gate.limit else float("inf"))
    value = "not measured" if worst.value is None else f"{worst.value:.3g}, limit {worst.limit:.3g}"
    return (
        f"this profile missed {len(missed)} of {counted(len(profile.gates), 'gate')} "
        f"(worst: {worst.name}: {value}): prices and thresholds are rough"
    )


def shape_text(topology: Topology) -> str:
    """Nodes and ranks in words: ``2 nodes x 4 ranks``, or the ranks of each node where they differ."""
    ranks = [len(topology.ranks_of(node)) for node in range(topology.nodes)]
    if len(set(ranks)) == 1:
        return f"{counted(topology.nodes, 'node')} x {counted(ranks[0], 'rank')}"
    return f"ranks by node {ranks}"


def _nics(topology: Topology) -> int:
    return len(set(topology.nic))

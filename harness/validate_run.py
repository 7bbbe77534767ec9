"""A validation from agenda to rows: what real ranks and a simulated cluster have in common. No torch import.

``measure_agenda(agenda, topology, exchange, moves, ...)`` gives the rows so far after each half;
``validate_simulated(cluster, profile, stamp, ...)`` does everything in this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from relaymeter.calibration.cells import Instruments, Measure
from relaymeter.calibration.profiles import Profile
from relaymeter.harness.jobs import RunStamp
from relaymeter.harness.moves import PlannedMove
from relaymeter.harness.validate_agenda import FEW_RANKS, Extent, make_agenda
from relaymeter.harness.validate_cases import APART, Agenda, MoveCase, MoveSpec, Observed
from relaymeter.harness.validate_measure import MeasureMoves, Repeats, measure_flows
from relaymeter.harness.validate_moves import plan_spec
from relaymeter.harness.validate_progress import Clock, Progress
from relaymeter.harness.validate_rows import About, flow_rows, move_rows
from relaymeter.relayout.segments import RoundLoads
from relaymeter.relayout.topology import Topology
from relaymeter.validation_records import ValidationRecord

__all__ = ["ClusterModel", "extent_of", "measure_agenda", "repeats_of", "validate_simulated"]

Say = Callable[[str], None]
#: Where nothing is held in memory, moves may bring a rank so much; whole moves of more than ``FEW_RANKS`` ranks less,
#: as their plans take the longer the more rounds they have.
_SIMULATED_ROOM_BYTES = 1 << 30


class ClusterModel(Protocol):
    """A simulated cluster, as far as a validation needs it: see ``simulated.SimulatedCluster``."""

    @property
    def name(self) -> str: ...
    def instruments(self) -> Instruments: ...
    def move_times(self, loads: RoundLoads, executor: str, repeats: int) -> tuple[float, ...]: ...


def validate_simulated(
    cluster: ClusterModel, profile: Profile, stamp: RunStamp, *, quick: bool, say: Say
) -> tuple[list[ValidationRecord], Agenda]:
    """The same on a simulated cluster of the profile's topology, in this process: the rows, and the agenda."""
    topology = profile.topology
    extent = replace(extent_of(quick), room_bytes=_SIMULATED_ROOM_BYTES)
    if topology.world_size <= FEW_RANKS:
        extent = replace(extent, move_room_bytes=_SIMULATED_ROOM_BYTES)
    else:  # small buckets are very many rounds there, each of very many flows
        extent = replace(extent, buckets=extent.buckets[:2])
    agenda = make_agenda(profile, topology, extent, say=say)
    about = About(stamp, profile.executor, cluster.name)
    moves = _simulated_moves(cluster, topology)
    *_, rows = measure_agenda(agenda, topology, cluster.instruments().exchange, moves, about, repeats_of(quick), say)
    return rows, agenda


def _simulated_moves(cluster: ClusterModel, topology: Topology) -> MeasureMoves:
    """Moves whose rounds the cluster's model runs; nothing arrives, so no bit is checked."""

    def measure(cases: Sequence[MoveCase], repeats: Repeats, progress: Progress) -> list[Observed]:
        found = []
        planned: tuple[MoveSpec, PlannedMove] | None = None
        for number, case in enumerate(cases):
            progress(number / len(cases), f"{case.name} by {case.route}, {case.executor}")
            if planned is None or planned[0] != case.spec:
                planned = case.spec, plan_spec(case.spec, topology, case.name)
            loads = planned[1].schedule(case.route_array)[0].loads(case.executor)
            loads = loads.apart() if case.kind in APART else loads
            found.append(Observed(cluster.move_times(loads, case.executor, repeats.least), 0, 0))
        return found

    return measure


def extent_of(quick: bool) -> Extent:
    """What is measured, in full or quickly."""
    return Extent.short() if quick else Extent()


def repeats_of(quick: bool) -> Repeats:
    """How often, in full or quickly."""
    return Repeats.short() if quick else Repeats()


def measure_agenda(
    agenda: Agenda,
    topology: Topology,
    exchange: Measure,
    moves: MeasureMoves,
    about: About,
    repeats: Repeats,
    say: Say,
) -> Iterator[list[ValidationRecord]]:
    """Sizes and matrices first, then whole moves, batches and mixes together. Gives all rows so far, after each.

    Collective where the seams are: every rank exhausts it and gets equal rows.
    """
    begin = time.monotonic()
    clock = Clock(say, "validate", last_s=0.0)
    observed = measure_flows(agenda.flows, exchange, topology, repeats, clock.part("sizes and matrices", 0.0, 0.45))
    rows = flow_rows(agenda.flows, observed, about)
    yield rows
    observed = moves(agenda.moves, repeats, clock.part("whole moves, batches and mixes", 0.45, 1.0))
    rows = [*rows, *move_rows(agenda.moves, observed, about)]
    say(f"validate 100%  {len(rows)} cases in {time.monotonic() - begin:.0f} s")
    yield rows

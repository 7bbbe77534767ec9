"""The validate job inside the ranks: rank 0 draws up the agenda, all of them measure it.

``run_validate_job(job, world, say)`` is called by every rank of the joined world; rank 0 gets the rows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from relaymeter.calibration.measure import RankExchange
from relaymeter.calibration.profiles import Profile
from relaymeter.calibration.profiles import load as load_profile
from relaymeter.errors import InputError, MoveTimeout, RelaymeterError
from relaymeter.harness.jobs import ValidateJob
from relaymeter.harness.validate_agenda import make_agenda
from relaymeter.harness.validate_cases import Agenda
from relaymeter.harness.validate_ranks import RankMoves
from relaymeter.harness.validate_rows import About
from relaymeter.harness.validate_run import extent_of, measure_agenda, repeats_of
from relaymeter.harness.world import World, watching
from relaymeter.records import dump_json
from relaymeter.relayout.guard import guarded
from relaymeter.relayout.topology import Topology

__all__ = ["run_validate_job"]

Say = Callable[[str], None]
_AGENDA = "relaymeter/validate/agenda"
_POLL_S = 0.05
#: A rank that draws up the agenda on a busy machine may be silent longer than one that moves, in seconds.
_LOST_AFTER_S = 20.0
#: Limit of one exchange or move.
_CALL_LIMIT_S = 60.0


def run_validate_job(job: ValidateJob, world: World, say: Say) -> Iterator[dict[str, Any]]:
    """Do the whole job. Every rank exhausts it after joining; gives all ``rows`` so far (rank 0's only), JSON-ready,
    and the agenda's ``notes``.

    Raises InputError on every rank where the world is not the profile's, RankLost and MoveTimeout out of a move that
    failed.
    """
    with (
        watching(world, "validate", lost_after_s=_LOST_AFTER_S) as heartbeat,
        guarded(
            "the validation", rank=world.rank, time_limit_s=job.time_limit_s, heartbeat=heartbeat, consequence=""
        ) as deadline,
    ):
        agenda, topology, default = _shared_agenda(job, world, say, heartbeat.poll, deadline)
        exchange = RankExchange(world, time_limit_s=_CALL_LIMIT_S, poll=heartbeat.poll)
        for executor in dict.fromkeys(case.executor for case in agenda.flows):
            exchange.connect(executor)
        moves = RankMoves(world, topology, time_limit_s=_CALL_LIMIT_S, heartbeat=heartbeat, say=say, fault=job.fault)
        about = About(job.stamp, default)
        for rows in measure_agenda(agenda, topology, exchange.measure, moves, about, repeats_of(job.quick), say):
            yield {"rows": [row.to_dict() for row in rows], "notes": list(agenda.notes)}


def _shared_agenda(
    job: ValidateJob, world: World, say: Say, poll: Callable[[], None], deadline: float
) -> tuple[Agenda, Topology, str]:
    """The agenda, the topology and the default executor as rank 0 has them, on every rank. Collective."""
    if world.rank == 0:
        message: dict[str, object] = {}
        try:
            profile = load_profile(Path(job.profile))
            _refuse_other_world(job, world, profile)
            hard = ("unshaped",) if job.unshaped else ()
            agenda = make_agenda(profile, profile.topology, extent_of(job.quick), hard=hard, say=say)
            message = {
                "agenda": agenda.to_json(), "topology": profile.topology.to_dict(), "executor": profile.executor,
            }  # fmt: skip
        except RelaymeterError as error:
            message = {"refused": str(error)}
        world.store.set(_AGENDA, dump_json(message, indent=None))
    while not world.store.check([_AGENDA]):
        poll()
        if time.monotonic() > deadline:
            raise MoveTimeout("the time limit passed while rank 0 was drawing up the agenda")
        time.sleep(_POLL_S)
    found = json.loads(world.store.get(_AGENDA))
    if "refused" in found:
        raise InputError(found["refused"])
    return Agenda.from_json(found["agenda"]), Topology.from_dict(found["topology"]), found["executor"]


def _refuse_other_world(job: ValidateJob, world: World, profile: Profile) -> None:
    """Raise InputError where the ranks are not on the nodes that the profile was measured on, or it is simulated."""
    measured, here = profile.topology.node, world.topology.node
    if measured != here:
        raise InputError(
            f"profile {job.profile} was measured on nodes {list(measured)} of the ranks, this world has {list(here)}: "
            "calibrate it first"
        )

"""What the commands with ``--simulate`` share: the cluster, its calibration with progress, and what does not apply.

Every one of them says "simulated" first. Called in the parent; no rank is started.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from relaymeter.calibration.profiles import Profile
from relaymeter.errors import InputError
from relaymeter.harness.simulated import SimulatedCluster
from relaymeter.harness.simulated_profile import simulated_profile

__all__ = ["calibrated", "first_line", "lines_of_progress", "refuse_rank_options", "simulated_executors"]

#: Options about real ranks.
_RANK_OPTIONS = (
    "nodes", "ranks_per_node", "nic_per", "time_limit", "move_limit", "allow_mismatch", "max_extra", "fault",
)  # fmt: skip
#: Least time between two lines of progress, in seconds.
_QUIET_S = 5.0


def refuse_rank_options(args: argparse.Namespace) -> None:
    """Raise InputError where an option is given that is about real ranks."""
    given = ["nic"] if "nic" in args else []
    given += [name for name in _RANK_OPTIONS if getattr(args, name, None) not in (None, False)]
    if given:
        raise InputError(
            f"--{given[0].replace('_', '-')} is about real ranks, and --simulate {args.simulate} starts none: leave it "
            "out"
        )


def first_line(cluster: SimulatedCluster) -> str:
    """What a reader has to know before anything else."""
    return f"simulated: {cluster.name}, {cluster.model.about}; no rank was started"


def simulated_executors(cluster: SimulatedCluster, choice: str) -> tuple[str, ...]:
    """The executors that ``auto`` (the backend's own), ``both`` or a name stands for. Raises InputError."""
    if choice == "auto":
        return cluster.executors[:1]
    wanted = cluster.executors if choice == "both" else (choice,)
    if not set(wanted) <= set(cluster.executors):
        raise InputError(
            f"simulated cluster {cluster.name} has no executor {choice!r}, only {', '.join(cluster.executors)}"
        )
    return wanted


def lines_of_progress(what: str) -> Callable[[float, str], None]:
    """``progress(fraction, text)``: lines on standard error, the first after ``_QUIET_S`` and as far apart."""
    last = time.monotonic()

    def progress(fraction: float, text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _QUIET_S:
            last = time.monotonic()
            print(f"{what} {fraction:4.0%}  {text}", file=sys.stderr, flush=True)

    return progress


def calibrated(
    cluster: SimulatedCluster,
    *,
    quick: bool = False,
    budget_s: float | None = None,
    executors: Sequence[str] | None = None,
) -> Profile:
    """The profile of ``cluster``, with progress. Raises what ``simulated_profile`` raises."""
    progress = lines_of_progress(f"calibrate {cluster.name}")
    return simulated_profile(cluster, quick=quick, budget_s=budget_s, executors=executors, progress=progress)

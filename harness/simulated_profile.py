"""Calibrating a simulated cluster, in this process and in its own time: as a profile that says it is simulated.

``simulated_profile(load_preset("h100-16x8"))`` takes seconds; ``check_profile(cluster, profile, path)`` refuses a
profile that is not of the cluster. The probes and fits are those of real ranks.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from relaymeter import __version__
from relaymeter.calibration.profiles import Profile
from relaymeter.errors import InputError
from relaymeter.harness.simulated import SimulatedCluster

__all__ = ["check_profile", "simulated_facts", "simulated_profile"]


def simulated_facts(cluster: SimulatedCluster) -> dict[str, Any]:
    """The fingerprint of a simulated cluster: its name, a hash of its model, and the version of this package."""
    model = hashlib.sha256(cluster.model.model_dump_json().encode()).hexdigest()[:16]
    return {"simulated": cluster.name, "model": model, "relaymeter": __version__, "backend": cluster.model.backend}


def simulated_profile(
    cluster: SimulatedCluster,
    *,
    quick: bool = False,
    budget_s: float | None = None,
    executors: Sequence[str] | None = None,
    progress: Callable[[float, str], None] | None = None,
) -> Profile:
    """Calibrate ``cluster``, which is told a NIC for every rank and has to be found out. Any one process.

    ``budget_s`` is simulated time. ``executors``: in order of importance, by default all, its backend's own first.
    ``progress(fraction, text)`` is called now and then. Raises InputError on an executor that the cluster has not, and
    what ``calibrate_cluster`` raises.
    """
    from relaymeter.calibration.calibrate import calibrate_cluster
    from relaymeter.calibration.recorder import Settings

    settings = Settings.short() if quick else Settings()
    if budget_s is not None:
        settings = replace(settings, budget_s=budget_s)
    profile = calibrate_cluster(
        cluster.instruments(),
        cluster.declared,
        executors=tuple(executors or cluster.executors),
        settings=settings,
        fingerprint=simulated_facts(cluster),
        progress=progress,
    )
    return replace(profile, quick=quick)


def check_profile(cluster: SimulatedCluster, profile: Profile, path: Path, *, asked: str | None = None) -> None:
    """Raise InputError where ``profile``, read from ``path``, was not made on ``cluster`` as it is now. ``asked``: what
    ``--simulate`` names it by, a preset or a file; None: its own name."""
    again = f"relaymeter calibrate --simulate {shlex.quote(asked or cluster.name)} --out PROFILE makes one"
    if profile.simulated != cluster.name:
        whose = "real ranks" if profile.simulated is None else f"the simulated cluster {profile.simulated}"
        raise InputError(f"profile {path} is of {whose}, not of the simulated cluster {cluster.name}: {again}")
    facts = simulated_facts(cluster)
    differ = [key for key, value in facts.items() if profile.fingerprint.get(key) != value]
    if differ:
        raise InputError(
            f"profile {path} is of another {cluster.name} ({', '.join(differ)} differ): its rates or this package have "
            f"changed since; {again}"
        )

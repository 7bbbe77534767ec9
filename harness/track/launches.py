"""A launch of a suite, in fresh ranks: from a suite to a ``LaunchRecord``. Called by the parent; no torch import.

``plan = plan_launches(suite, out)`` checks what can be checked before a rank is started, and
``plan.measure(number, time_limit_s)`` measures once. In a world that torchrun or the like has made every rank calls it;
rank 0 gets the record.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from relaymeter import __version__
from relaymeter.calibration.fingerprint import environment_facts, machine_facts
from relaymeter.errors import EXIT_OK, InputError
from relaymeter.harness import emit
from relaymeter.harness.commands_ranks import work_together
from relaymeter.harness.git import checkout_root, git_says
from relaymeter.harness.jobs import ClusterConfig, TrackFault, TrackJob
from relaymeter.harness.launch import WorldHint, already_in_world, visible_gpus
from relaymeter.harness.track.case_plan import available_bytes, refuse_idle_routes, refuse_too_large
from relaymeter.harness.track.records import CaseRecord, LaunchRecord
from relaymeter.harness.track.suite import TrackSuite, config_hash

__all__ = ["Checkout", "LaunchPlan", "checkout", "now", "plan_launches", "revision", "track_machine_id"]

_MOVE_LIMIT_S = 60.0


@dataclass(frozen=True)
class Checkout:
    """The revision that a package was imported from: all None and False outside a checkout."""

    commit: str | None
    commit_utc: str | None
    dirty: bool


def checkout(package: Path | None = None) -> Checkout:
    """Revision of the checkout that holds ``package`` (this one), by git; untracked files make it not dirty."""
    root, found = checkout_root(package), Checkout(None, None, False)
    if root is None:
        return found
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        commit, when = git_says(root, "log", "-1", "--format=%H %ct").split()
        dirty = git_says(root, "status", "--porcelain", "--untracked-files=no")
        found = Checkout(commit, _iso(datetime.fromtimestamp(int(when), timezone.utc)), bool(dirty))
    return found


def revision(text: str, package: Path | None = None) -> str | None:
    """The full revision that git means by ``text`` (a branch, ``HEAD~1``, a tag) in the checkout that holds ``package``
    (this one); None where it means none, or there is no checkout."""
    root = checkout_root(package)
    if root is not None:
        with suppress(OSError, subprocess.SubprocessError, ValueError):
            return git_says(root, "rev-parse", "--verify", "--quiet", "--end-of-options", text + "^{commit}") or None
    return None


def _iso(when: datetime) -> str:
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


def now() -> str:
    """The time, ISO 8601 in UTC."""
    return _iso(datetime.now(timezone.utc))


def track_machine_id() -> str:
    """``results.machine_id`` but for this package's own version: that is what is compared on one machine."""
    facts = {name: value for name, value in machine_facts().items() if name != "relaymeter"}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def plan_launches(suite: TrackSuite, out: emit.Output, *, fault: TrackFault | None = None) -> LaunchPlan:
    """Everything that the launches of a suite have in common. Raises InputError before a rank is started: a route
    without a block to carry, more than this machine's memory holds, NICs that it cannot hold to a rate."""
    hint = already_in_world()
    if hint is None and len(visible_gpus(os.environ)) < suite.world.ranks:  # a GPU has memory of its own
        refuse_too_large(suite, available_bytes())
    refuse_idle_routes(suite)
    rate = suite.world.nic_rate_bytes_per_s
    if rate is not None and hint is not None:
        raise InputError(
            f"suite {suite.name} has NICs of {rate * 8 / 1e6:g} Mbit/s, but the world of {hint.launcher} exists "
            'already: set nic = "none" in a copy of it'
        )
    if rate is not None:
        from relaymeter.harness.box import capability

        reason = capability()
        if reason is not None:
            raise InputError(
                f"suite {suite.name} has NICs of {rate * 8 / 1e6:g} Mbit/s, which this machine cannot hold ({reason}): "
                'take a suite without a rate, such as --suite ci, or set nic = "none" in a copy of it'
            )
    cluster = ClusterConfig(
        nodes=suite.world.nodes,
        ranks_per_node=suite.world.ranks_per_node,
        nic_per=suite.world.nic_per,
        nic_rate_bytes_per_s=rate,
        shape=rate is not None,
    )
    return LaunchPlan(suite, None if hint else cluster, hint, checkout(), track_machine_id(), fault, out)


@dataclass(frozen=True)
class LaunchPlan:
    """What the launches of one command have in common. ``cluster`` None: a world that was joined."""

    suite: TrackSuite
    cluster: ClusterConfig | None
    hint: WorldHint | None
    checkout: Checkout
    machine_id: str
    fault: TrackFault | None
    out: emit.Output
    session_id: str = field(default_factory=lambda: secrets.token_hex(4))

    def measure(self, number: int, time_limit_s: float) -> tuple[int, LaunchRecord | None]:
        """Launch ``number`` (from 1): its exit code and its record (None: it failed, or this is not rank 0)."""
        utc = now()
        job = TrackJob(
            suite=self.suite,
            time_limit_s=time_limit_s,
            move_limit_s=min(_MOVE_LIMIT_S, time_limit_s),
            nic_per=self.suite.world.nic_per if self.hint else None,
            fault=self.fault,
        )
        code, result = work_together(job, self.cluster, self.hint, self.out)
        if code != EXIT_OK or result is None:
            return code, None
        return code, LaunchRecord(
            utc=utc,
            session_id=self.session_id,
            launch=number,
            machine_id=self.machine_id,
            config_hash=config_hash(self.suite, self._how(result["world"])),
            suite=self.suite.name,
            version=__version__,
            commit=self.checkout.commit,
            commit_utc=self.checkout.commit_utc,
            dirty=self.checkout.dirty,
            cases=tuple(CaseRecord.from_dict(case) for case in result["cases"]),
        )

    def _how(self, world: Mapping[str, Any]) -> dict[str, Any]:
        """How the ranks were started, as far as times depend on it."""
        return {
            "cluster": None if self.cluster is None else self.cluster.model_dump(mode="json"),
            "launcher": None if self.hint is None else self.hint.launcher,
            "world": dict(world),
            "environment": environment_facts(),
            "threads": os.environ.get("OMP_NUM_THREADS"),
        }

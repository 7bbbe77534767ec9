"""From a case of a suite to its schedule: what ``plan_s`` times. No torch import.

``schedule(case, suite, topology)`` on every rank; ``refuse_idle_routes(suite)`` and ``refuse_too_large(suite,
available_bytes())`` before a rank is started.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import numpy as np

from relaymeter.errors import InputError
from relaymeter.harness.config import nearest
from relaymeter.harness.moves import default_bucket_bytes, plan_layouts
from relaymeter.harness.track.suite import CaseConfig, TrackSuite, ends
from relaymeter.relayout.layout import Layout
from relaymeter.relayout.routes import ROUTES, block_groups
from relaymeter.relayout.schedule import Schedule, build_schedule
from relaymeter.relayout.topology import Topology
from relaymeter.units import counted, format_bytes

__all__ = ["available_bytes", "refuse_idle_routes", "refuse_too_large", "schedule"]

#: What a rank takes at the least before it holds a tensor, in bytes: python and torch.
_RANK_BYTES = 100_000_000
#: Limits of the memory of a container, of either version of control groups.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def schedule(case: CaseConfig, suite: TrackSuite, topology: Topology) -> tuple[Layout, Layout, Schedule]:
    """The layouts of a case and the schedule between them. Pure, the same on every rank. Raises InputError,
    LayoutError."""
    source, destination = ends(case, suite, topology)
    plan = plan_layouts([source], destination, topology, case.planner)
    codes = np.full(int(plan.group_start[-1]), ROUTES.index(case.route), dtype=np.int8)
    return source, destination, build_schedule(plan, topology, codes, case.bucket_bytes or default_bucket_bytes(plan))


def refuse_idle_routes(suite: TrackSuite) -> None:
    """Raise InputError for a case whose route would repeat another: it would be tracked twice under two names."""
    topology = suite.topology()
    for case in suite.cases:
        if case.route == "direct":
            continue
        source, destination = ends(case, suite, topology)
        groups = block_groups(plan_layouts([source], destination, topology, "classes"), topology)
        names = [name for code, name in enumerate(ROUTES) if name == "direct" or groups.offers[code].any()]
        if case.route not in names:
            raise InputError(
                f"suite {suite.name}, case {case.name}: route {case.route!r} has no block to carry there: "
                f"{nearest(case.route, names)}"
            )


def available_bytes() -> int | None:
    """Memory that this machine, or the container, has for ranks, in bytes; None where the system does not say."""
    found = []
    with suppress(OSError, ValueError):
        said = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"), re.MULTILINE)
        found += [int(said[1]) * 1024] if said else []
    for limit in _LIMITS:
        with suppress(OSError, ValueError):  # a limit of "max" is none
            found.append(int(Path(limit).read_text(encoding="utf-8")))
    return min(found, default=None)


def refuse_too_large(suite: TrackSuite, available: int | None) -> None:
    """Raise InputError for a suite whose ranks, all on one machine, need more than ``available`` bytes (None: not
    known). Each case holds its source, its destination, and what arrived first, all cases at once."""
    if available is None:
        return
    ranks = suite.world.ranks * _RANK_BYTES
    if ranks > available:
        raise InputError(
            f"suite {suite.name}: {counted(suite.world.ranks, 'rank')} need {format_bytes(ranks)} before they hold a "
            f"tensor, and this machine has {format_bytes(available)} available: give [world] fewer"
        )
    topology = suite.topology()
    needs = {}
    for case in suite.cases:
        source, destination = ends(case, suite, topology)
        needs[case.name] = _held_bytes(source) + 2 * _held_bytes(destination)
    total = sum(needs.values())
    if total > available - ranks:
        largest = max(needs, key=lambda name: needs[name])
        whole = "" if len(needs) == 1 else f" of {format_bytes(total)} of all cases together"
        raise InputError(
            f"suite {suite.name}, case {largest}: its ranks hold {needs[largest]} bytes ({format_bytes(needs[largest])}"
            f"{whole}), and this machine has {available - ranks} ({format_bytes(available - ranks)}) available: make "
            "its tensors smaller, or take fewer cases with --case"
        )


def _held_bytes(layout: Layout) -> int:
    """Bytes of a layout on all ranks together."""
    return sum(sum(place.storage.values()) * layout.specs[name].itemsize for name, place in layout.placements.items())

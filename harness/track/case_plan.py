"""From a case of a suite to its schedule: what ``plan_s`` times. No torch import.

``schedule(case, suite, topology)`` on every rank; ``refuse_idle_routes(suite)`` before a rank is started.
"""

from __future__ import annotations

import numpy as np

from relaymeter.errors import InputError
from relaymeter.harness.config import nearest
from relaymeter.harness.moves import default_bucket_bytes, plan_layouts
from relaymeter.harness.track.suite import CaseConfig, TrackSuite, ends
from relaymeter.relayout.layout import Layout
from relaymeter.relayout.routes import ROUTES, block_groups
from relaymeter.relayout.schedule import Schedule, build_schedule
from relaymeter.relayout.topology import Topology

__all__ = ["refuse_idle_routes", "schedule"]


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

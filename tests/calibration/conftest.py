"""Fixtures: profiles of invented clusters (made once), and a pool of real ranks whose jobs live in this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "dist"))

from pool import RankPool
from synthetic import Cluster

from relaymeter.calibration.calibrate import calibrate_cluster
from relaymeter.calibration.profiles import Profile
from relaymeter.calibration.recorder import Settings
from relaymeter.relayout.topology import Topology

settings.register_profile("no deadline", deadline=None)  # a busy machine is not a failure
settings.load_profile("no deadline")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Four ranks on loopback that can import the jobs of this folder."""
    with RankPool(4, env={"PYTHONPATH": str(Path(__file__).resolve().parent)}) as found:
        yield found


@pytest.fixture(scope="session")
def quick_profile() -> Profile:
    """A short calibration of the invented cluster of 2 x 2 ranks, with two replicates."""
    grid = Topology.grid(2, 2)
    settings = replace(Settings.short(), replicates=2)
    return calibrate_cluster(Cluster(grid).instruments(), grid, settings=settings)

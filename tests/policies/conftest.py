"""Profiles of invented clusters with known truth, each calibrated once a session."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "calibration"))

from synthetic import Cluster

from relaymeter.calibration.calibrate import calibrate_cluster
from relaymeter.calibration.profiles import Profile
from relaymeter.calibration.recorder import Settings
from relaymeter.relayout.topology import Topology

settings.register_profile("no deadline", deadline=None)  # a busy machine is not a failure
settings.load_profile("no deadline")

GRID = Topology.grid(2, 2)


def _cluster(name: str) -> Cluster:
    if name == "box":  # one slow NIC per rank
        return Cluster(GRID)
    if name == "shared box":  # one slow NIC per node
        return Cluster(Topology.grid(2, 2, "node"))
    if name == "half duplex":
        return Cluster(GRID, half_duplex={"send-recv": True, "all-to-all": True})
    if name == "unshaped":  # two cores behind everything
        return Cluster(GRID, nic_rate=1e9, machine_rate=1.6e9, cross_latency_s=1e-4, noise=0.02)
    return Cluster(  # eight GPUs on two nodes, one NIC each
        Topology.grid(2, 4), nic_rate=50e9, port_rate=300e9, flow_rate=30e9, cross_latency_s=2e-5,
        near_latency_s=1e-5, floor_s=1e-5, message_s=1e-6, segment_s=1e-7, copy_rate=2e12,
    )  # fmt: skip


@cache
def _profile(name: str) -> Profile:
    cluster = _cluster(name)
    return calibrate_cluster(cluster.instruments(), cluster.topology, settings=Settings(replicates=12))


@pytest.fixture(scope="session")
def profile_of() -> Callable[[str], Profile]:
    return _profile


@pytest.fixture(scope="session")
def truth_of() -> Callable[[str], Cluster]:
    return _cluster

"""What a profile is valid for: versions, machine, backend, world and how its ranks were started.

``machine_facts()`` needs no world; ``world_facts(...)`` adds what a joined world knows. A profile is refused where an
entry differs. No torch import (its version is read from its metadata).
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from relaymeter import __version__
from relaymeter.relayout.topology import Topology

__all__ = ["machine_facts", "world_facts"]


def machine_facts() -> dict[str, Any]:
    """Entries that any process on the machine can state: versions, processor, cores, memory, kernel."""
    return {
        "relaymeter": __version__,
        "torch": _version("torch"),
        "cpu": _cpu_model(),
        "cores": psutil.cpu_count(logical=True),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "kernel": platform.release(),
    }


def world_facts(
    topology: Topology, backend: str, device: str, machines: str, cluster: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Entries of a joined world. ``topology`` as the ranks declare it; ``machines`` a hash over all ranks' machines;
    ``cluster`` how the ranks were started (nodes, NICs and their rate), None where the world was joined."""
    return {
        **machine_facts(),
        "backend": backend,
        "device": device,
        "world_size": topology.world_size,
        "node": list(topology.node),
        "nic": list(topology.nic),
        "machines": machines,
        "cluster": None if cluster is None else dict(cluster),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    return names[0] if names else platform.machine()

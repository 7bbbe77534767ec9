"""What a profile is valid for: versions, machine, backend, world and how its ranks were started.

``machine_facts()`` needs no world; ``environment_facts()`` is what ranks inherit of the transports' settings;
``world_facts(...)`` adds what a joined world knows. A profile is refused where an entry differs. No torch import (its
version is read from its metadata).
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from relaymeter import __version__
from relaymeter.calibration.devices import file_text
from relaymeter.relayout.topology import Topology

__all__ = [
    "driver_version",
    "environment_facts",
    "is_secret",
    "machine_facts",
    "nccl_package",
    "package_version",
    "plain_setting",
    "world_facts",
]

#: Settings of the transports, by which the same machine has other prices.
_PREFIXES = ("NCCL_", "GLOO_")
#: What differs from launch to launch or from host to host, or changes no time.
_OTHERWISE = ("_SOCKET_IFNAME", "NCCL_HOSTID", "NCCL_COMM_ID", "NCCL_DEBUG", "NCCL_CONF_FILE")
_SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "COOKIE", "AUTH")
_PLAIN = re.compile(r"[A-Za-z0-9_.,:;=+^-]{0,64}")
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_DRIVER = Path("/proc/driver/nvidia/version")


def machine_facts() -> dict[str, Any]:
    """Entries that any process on the machine can state: versions, driver, processor, cores, memory, kernel."""
    return {
        "relaymeter": __version__,
        "torch": package_version("torch"),
        "nccl": nccl_package(),
        "gpu_driver": driver_version(file_text(_DRIVER)),
        "cpu": _cpu_model(),
        "cores": psutil.cpu_count(logical=True),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "kernel": platform.release(),
    }


def environment_facts(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The transports' settings (``NCCL_*``, ``GLOO_*``) of ``environment``, by default this process's, by name. Values
    that may hold a path or a name are hashed; interfaces and what only identifies a launch are left out."""
    found = os.environ if environment is None else environment
    return {
        name: plain_setting(value)
        for name, value in sorted(found.items())
        if name.startswith(_PREFIXES) and not is_secret(name) and not any(other in name for other in _OTHERWISE)
    }


def is_secret(name: str) -> bool:
    """Whether a variable's name says that its value is nobody's business, whatever its prefix."""
    return any(word in name.upper() for word in _SECRET_WORDS)


def plain_setting(value: str) -> str:
    """``value`` as files may show it: as it is where it can hold no path and no name of a person, else its hash."""
    if _PLAIN.fullmatch(value):
        return value
    return f"sha256:{hashlib.sha256(value.encode(errors='surrogateescape')).hexdigest()[:12]}"


def world_facts(
    topology: Topology,
    backend: str,
    device: str,
    machines: str,
    cluster: Mapping[str, Any] | None,
    nccl_loaded: str | None = None,
) -> dict[str, Any]:
    """Entries of a joined world. ``topology`` as the ranks declare it; ``machines`` a hash over all ranks' machines;
    ``cluster`` how the ranks were started (nodes, NICs and their rate), None where the world was joined;
    ``nccl_loaded`` the version of the NCCL that runs, None on another backend."""
    return {
        **machine_facts(),
        "environment": environment_facts(),
        "nccl_loaded": nccl_loaded,
        "backend": backend,
        "device": device,
        "world_size": topology.world_size,
        "node": list(topology.node),
        "nic": list(topology.nic),
        "machines": machines,
        "cluster": None if cluster is None else dict(cluster),
    }


def nccl_package() -> str | None:
    """Version of the NCCL that pip installed beside torch; None without one."""
    return next((found for found in map(package_version, _NCCL_PACKAGES) if found), None)


def package_version(package: str) -> str | None:
    """Version of an installed package by its metadata, without importing it; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def driver_version(text: str) -> str | None:
    """Version of the NVIDIA kernel driver in what ``/proc/driver/nvidia/version`` says; None without one."""
    found = re.search(r"\b\d+\.\d+(\.\d+)*\b", text)
    return found.group() if found else None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    return names[0] if names else platform.machine()

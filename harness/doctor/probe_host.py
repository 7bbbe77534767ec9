"""Memory, limits, cores and NUMA nodes of the machine, and what this process may have of them.

``read_host()`` reads files and limits; nothing is allocated.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from relaymeter.calibration.devices import core_list, file_text
from relaymeter.harness.doctor.facts import HostFacts

__all__ = ["group_limit", "read_host"]


def read_host(root: Path = Path("/")) -> HostFacts:
    """The machine's memory and limits. ``root`` stands for ``/`` where files are read. Local."""
    cores = set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    nodes = {}
    for node in (root / "sys/devices/system/node").glob("node[0-9]*"):
        nodes[int(node.name[4:])] = set(core_list(file_text(node / "cpulist")))
    shm = _space(root / "dev/shm")
    return HostFacts(
        memory_bytes=psutil.virtual_memory().total,
        limit_bytes=group_limit(root),
        cores=len(cores) or 1,
        shm_bytes=None if shm is None else shm[0],
        shm_free_bytes=None if shm is None else shm[1],
        locked_bytes=_soft_limit("RLIMIT_MEMLOCK"),
        open_files=_soft_limit("RLIMIT_NOFILE"),
        numa_nodes=tuple(sorted(node for node, own in nodes.items() if own)),
        numa_here=tuple(sorted(node for node, own in nodes.items() if own & cores)),
        numa_balancing=file_text(root / "proc/sys/kernel/numa_balancing").strip() not in ("", "0"),
    )


def group_limit(root: Path = Path("/")) -> int | None:
    """Memory limit of this process's control group, as a container sees it; None without one."""
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = file_text(root / name).strip()
        if text.isdigit() and int(text) < 2**60:  # version 1 writes a huge number for none
            return int(text)
    return None


def _space(folder: Path) -> tuple[int, int] | None:
    """Size and free bytes of the file system of ``folder``; None where it is not there."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _soft_limit(name: str) -> int | None:
    """A soft limit of this process; None for unlimited, or on a system without limits."""
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY or soft < 0 else int(soft)

"""Findings about memory, limits and NUMA nodes. Pure.

``host_findings(host, gpus, network)``: what a limit means depends on the GPUs and ports that there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from relaymeter.harness.doctor.facts import Gpus, HostFacts, NetworkFacts
from relaymeter.harness.doctor.findings import Finding, State
from relaymeter.harness.doctor.judge_gpus import numbers
from relaymeter.units import counted, format_bytes

__all__ = ["host_findings"]

#: Less than this of /dev/shm and NCCL's and torch's shared buffers do not fit beside each other.
_LEAST_SHM = 2**30
_LEAST_SHM_FREE = 2**28
#: A rank of a large world over gloo has a socket per peer and group.
_LEAST_FILES, _FEW_FILES = 1024, 4096


def host_findings(host: HostFacts, gpus: Gpus, network: NetworkFacts, environment: Mapping[str, str]) -> list[Finding]:
    """Findings of the group memory."""
    return [
        _memory(host, environment),
        *_shm(host),
        _locked(host, network),
        _files(host),
        _numa(host, gpus, network),
    ]


def _memory(host: HostFacts, environment: Mapping[str, str]) -> Finding:
    values = {
        "total_bytes": host.memory_bytes,
        "group_limit_bytes": host.limit_bytes,
        "cores": host.cores,
        "omp_num_threads": environment.get("OMP_NUM_THREADS"),
    }
    sizes = [format_bytes(host.memory_bytes)] if host.memory_bytes else []
    limited = host.limit_bytes is not None and host.limit_bytes < (host.memory_bytes or 2**60)
    if limited:
        sizes.append(f"of which the control group allows {format_bytes(host.limit_bytes or 0)}")
    text = f"{', '.join(sizes) or 'memory not known'}; {counted(host.cores, 'core')} for this process"
    if host.cores == 1:
        means = "all ranks of this host share it: times hold for this machine and tell little about another"
        return Finding("memory.host", State.NOTE, text, means, values=values)
    return Finding("memory.host", State.OK, text, values=values)


def _shm(host: HostFacts) -> Iterator[Finding]:
    key, size, free = "memory.shm", host.shm_bytes, host.shm_free_bytes
    values = {"total_bytes": size, "free_bytes": free}
    mend = ("docker run --shm-size=16g ...", "mount -o remount,size=16g /dev/shm  # as root")
    means = "NCCL's shared buffers between ranks of a host do not fit, and ranks end with a bus error"
    if size is None or free is None:
        yield Finding(key, State.WARNING, "not there", "what ranks of a host share has no place", mend, values)
        return
    text = f"{format_bytes(size)}, {format_bytes(free)} free"
    if size < _LEAST_SHM:
        yield Finding(key, State.WARNING, text, means, mend, values)
    elif free < _LEAST_SHM_FREE:
        left = "ls -l /dev/shm  # what dead processes left there"
        yield Finding(key, State.WARNING, text, means, (left, *mend), values)
    else:
        yield Finding(key, State.OK, text, values=values)


def _locked(host: HostFacts, network: NetworkFacts) -> Finding:
    key, limit = "memory.locked", host.locked_bytes
    values = {"limit_bytes": limit}
    if limit is None:
        return Finding(key, State.OK, "unlimited", values=values)
    text = f"at most {format_bytes(limit)}"
    if not any(port.active for port in network.ports):
        return Finding(key, State.OK, f"{text}, which matters with RDMA only", values=values)
    means = "RDMA registers the memory it sends from: NCCL fails with 'Cannot allocate memory' in ibv_reg_mr"
    mend = ("ulimit -l unlimited", "docker run --ulimit memlock=-1 ...", "LimitMEMLOCK=infinity  # of slurmd's unit")
    return Finding(key, State.WARNING, text, means, mend, values)


def _files(host: HostFacts) -> Finding:
    key, limit = "memory.open_files", host.open_files
    values = {"limit": limit}
    if limit is None or limit >= _FEW_FILES:
        return Finding(key, State.OK, "unlimited" if limit is None else f"at most {limit} a process", values=values)
    means = "over gloo a rank has a socket for each other rank and group: worlds of hundreds of ranks need more"
    state = State.NOTE if limit >= _LEAST_FILES else State.WARNING
    return Finding(key, state, f"at most {limit} a process", means, ("ulimit -n 65536",), values)


def _numa(host: HostFacts, gpus: Gpus, network: NetworkFacts) -> Finding:
    key = "memory.numa"
    of_gpus = {gpu.index: gpu.numa for gpu in gpus.gpus}
    ports = {port.numa for port in network.ports if port.active}
    values = {
        "nodes": list(host.numa_nodes),
        "nodes_of_this_process": list(host.numa_here),
        "gpus": [{"index": index, "numa_node": node} for index, node in of_gpus.items()],
        "nodes_of_rdma_ports": sorted(node for node in ports if node is not None),
        "balancing": host.numa_balancing,
    }
    if len(host.numa_nodes) < 2:
        return Finding(key, State.OK, "one node", values=values)
    text = f"{len(host.numa_nodes)} nodes"
    places = {node: [index for index, own in of_gpus.items() if own == node] for node in host.numa_nodes}
    text += "".join(f"; {numbers(own)} on node {node}" for node, own in places.items() if own)
    if len(host.numa_here) < len(host.numa_nodes):
        text += f"; this process may run on node {', '.join(map(str, host.numa_here))} only"
    away = sorted(index for index, node in of_gpus.items() if node is not None and ports and node not in ports)
    if away and None not in ports:
        means = f"no active RDMA port is on the NUMA node of {numbers(away)}: their bytes cross to another node first"
        return Finding(key, State.NOTE, text, means, values=values)
    if host.numa_balancing and gpus.gpus:
        means = "the kernel moves pages between nodes while ranks run, which makes times scatter"
        return Finding(key, State.NOTE, text, means, ("sysctl kernel.numa_balancing=0  # as root",), values)
    return Finding(key, State.OK, text, values=values)

"""What ranks can see of their place without measuring: host, NUMA, GPU and NVLink, NICs and their rates, PXN.

``rank_hints(device, interface)`` is one rank's view, kept in the profile; ``hint_warnings(hints, profile)`` holds the
views of all ranks against what was measured. Hints only confirm: where they disagree, the measurement is used and the
disagreement is said. torch and NVML are asked on a rank with a GPU only.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from relaymeter.calibration.devices import (
    SYS,
    NvmlUnavailable,
    active_links,
    core_list,
    file_text,
    interface_rate,
    joined_by_nvlink,
    numa_of,
    nvml_session,
    port_rate,
    uuid_of,
)
from relaymeter.calibration.fingerprint import environment_facts
from relaymeter.calibration.links import CLASS_RATIO
from relaymeter.calibration.profiles import Profile
from relaymeter.units import format_rate

__all__ = ["RankHints", "hint_warnings", "rank_hints"]

#: A NIC that carries more than this share of what its port states, or less than that, is not what the port says it is.
_MOST, _LEAST = 1.05, 0.5
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_INTERFACES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}


@dataclass(frozen=True, kw_only=True)
class RankHints:
    """One rank's view of itself. Names of hosts and GPUs are hashed; rates are bytes per second one way."""

    host: str
    """Host name and boot: ranks of one node have one."""
    machine: str
    """Boot alone: nodes of one machine (containers, namespaces) have one."""
    numa: tuple[int, ...]
    """NUMA nodes of the cores that the rank may run on."""
    interface: str
    """Interface that the backend's sockets use; empty where nothing says so."""
    interface_bytes_per_s: float | None
    """What that interface states as its rate; None for a virtual one, or where it states none."""
    ports_bytes_per_s: tuple[float, ...]
    """Rates of the active InfiniBand and RoCE ports of the host."""
    gpu: str | None
    """The rank's GPU; None on a CPU."""
    gpu_name: str | None
    gpu_numa: int | None
    nvlinks: int | None
    """Active NVLinks of the GPU; None where NVML does not say."""
    nvlink_peers: tuple[str, ...]
    """GPUs that it reaches over NVLink."""
    pxn: bool | None
    """Whether NCCL may send through the NIC of another GPU of the node (needs NVLink); None on other backends."""
    environment: Mapping[str, str]
    """The transports' settings, as ``environment_facts`` has them."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> RankHints:
        values: dict[str, Any] = {field.name: entry[field.name] for field in fields(cls)}
        for name, value in values.items():
            values[name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)


def rank_hints(device: str, backend: str, environment: Mapping[str, str] | None = None, root: Path = SYS) -> RankHints:
    """This process's view. ``device``: as torch names it (``"cuda:0"``, ``"cpu"``). Never fails: what cannot be found
    out is None or empty. Local; any rank."""
    env = os.environ if environment is None else environment
    interface = env.get(_INTERFACES.get(backend, ""), "")
    boot = file_text(_BOOT_ID).strip()
    gpu = _gpu(device, root) if device.startswith("cuda") else _Gpu()
    return RankHints(
        host=_hash(f"{socket.gethostname()} {boot}"),
        machine=_hash(boot),
        numa=_numa_nodes(root),
        interface=interface,
        interface_bytes_per_s=interface_rate(interface, root),
        ports_bytes_per_s=_port_rates(root),
        gpu=gpu.id,
        gpu_name=gpu.name,
        gpu_numa=gpu.numa,
        nvlinks=gpu.nvlinks,
        nvlink_peers=gpu.peers,
        pxn=env.get("NCCL_PXN_DISABLE", "0") == "0" if backend == "nccl" else None,
        environment=environment_facts(env),
    )


@dataclass(frozen=True)
class _Gpu:
    id: str | None = None
    name: str | None = None
    numa: int | None = None
    nvlinks: int | None = None
    peers: tuple[str, ...] = ()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _numa_nodes(root: Path) -> tuple[int, ...]:
    """NUMA nodes of the cores that this process may run on."""
    cores = set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()
    found = []
    for node in (root / "devices/system/node").glob("node[0-9]*"):
        if cores & set(core_list(file_text(node / "cpulist"))):
            found.append(int(node.name[4:]))
    return tuple(sorted(found))


def _port_rates(root: Path) -> tuple[float, ...]:
    """Rates of the active InfiniBand and RoCE ports, by name."""
    found = []
    for port in sorted((root / "class/infiniband").glob("*/ports/*")):
        rate = port_rate(file_text(port / "rate"))
        if "ACTIVE" in file_text(port / "state") and rate is not None:
            found.append(rate)
    return tuple(found)


def _gpu(device: str, root: Path) -> _Gpu:
    """The GPU as torch knows it, and what NVML, where it is installed, says of its links."""
    import torch

    properties = torch.cuda.get_device_properties(torch.device(device))
    uuid = f"GPU-{properties.uuid}"
    # torch 2.9 and later know the place on the bus
    domain, bus, slot = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    numa = None
    if isinstance(domain, int) and isinstance(bus, int) and isinstance(slot, int):
        numa = numa_of(root / "bus/pci/devices" / f"{domain:04x}:{bus:02x}:{slot:02x}.0")
    nvlinks, peers = _nvlink(uuid)
    return _Gpu(_hash(uuid), properties.name, numa, nvlinks, peers)


def _nvlink(uuid: str) -> tuple[int | None, tuple[str, ...]]:
    """Active NVLinks of a GPU and the GPUs that they reach; (None, ()) without NVML."""
    with suppress(NvmlUnavailable), nvml_session() as nvml, suppress(nvml.NVMLError):
        own = nvml.nvmlDeviceGetHandleByUUID(uuid)
        return active_links(nvml, own), tuple(sorted(_nvlink_peers(nvml, own, uuid)))
    return None, ()


def _nvlink_peers(nvml: Any, own: Any, uuid: str) -> Iterator[str]:
    for index in range(nvml.nvmlDeviceGetCount()):
        with suppress(nvml.NVMLError):
            other = nvml.nvmlDeviceGetHandleByIndex(index)
            name = uuid_of(nvml, other)
            if name != uuid and joined_by_nvlink(nvml, own, other):
                yield _hash(name)


Pair = tuple[int, int]


def hint_warnings(hints: Sequence[RankHints], profile: Profile) -> list[str]:
    """Where the ranks' views disagree with what was measured, or with each other. Pure; empty where nothing does.

    ``hints``: one per rank, in order; none at all: nothing to confirm.
    """
    if not hints:
        return []
    rates = _pair_rates(profile)
    said = [*_settings(hints), *_hosts(hints, profile, rates), *_nvlinks(hints)]
    gradings: tuple[tuple[str, Callable[[int, int], bool | None]], ...] = (
        ("NVLink joins", lambda r, q: _joined(hints[r], hints[q])),
        ("one NUMA node holds", lambda r, q: _one_numa(hints[r], hints[q])),
    )
    near = {
        pair: rate for pair, rate in rates.items() if profile.topology.node[pair[0]] == profile.topology.node[pair[1]]
    }
    for text, closer in gradings:
        said += _graded(text, closer, near)
    return ["hints: " + text for text in [*said, *_nics(hints, profile)]]


def _pair_rates(profile: Profile) -> dict[Pair, float]:
    """Rates of lone flows between pairs of ranks, by the executor that was measured most, at its largest size."""
    best: dict[Pair, tuple[int, float]] = {}
    for cell in profile.cells:
        if cell.executor == profile.executor and len(cell.flows) == 1 and cell.messages == 1 and cell.size:
            src, dst, size = cell.flows[0]
            best[src, dst] = max(best.get((src, dst), (0, 0.0)), (size, size / cell.median_s))
    return {pair: rate for pair, (_, rate) in best.items()}


def _settings(hints: Sequence[RankHints]) -> Iterator[str]:
    """Settings that are not alike on all ranks: the collectives assume that they are."""
    for name in sorted({name for one in hints for name in one.environment}):
        values = [one.environment.get(name, "unset") for one in hints]
        odd = [rank for rank, value in enumerate(values) if value != values[0]]
        if odd:
            yield f"{name} is {values[0]} on rank 0, {values[odd[0]]} on {_ranks(odd)}: set it alike on all ranks"


def _hosts(hints: Sequence[RankHints], profile: Profile, rates: Mapping[Pair, float]) -> Iterator[str]:
    """Nodes of one machine whose links are as fast as those inside nodes: bytes between them leave no machine."""
    node = profile.topology.node
    inside = [rate for (r, q), rate in rates.items() if node[r] == node[q]]
    between = [rate for (r, q), rate in rates.items() if node[r] != node[q] and hints[r].machine == hints[q].machine]
    if profile.fingerprint.get("cluster") is None and inside and between:
        one, two = float(np.median(inside)), float(np.median(between))
        if two * CLASS_RATIO >= one:
            yield (
                f"nodes of one machine exchange {format_rate(two)}, inside nodes {format_rate(one)}: the prices "
                "between nodes are this machine's own, not those of a network"
            )


def _nvlinks(hints: Sequence[RankHints]) -> Iterator[str]:
    counts = [one.nvlinks for one in hints]
    known = [count for count in counts if count is not None]
    most = max(known, default=0)
    odd = [rank for rank, count in enumerate(counts) if count is not None and count < most]
    if odd:
        yield f"the GPU of {_ranks(odd)} has {counts[odd[0]]} active NVLinks, others {most}: look at nvidia-smi nvlink"


def _joined(one: RankHints, two: RankHints) -> bool | None:
    if one.nvlinks is None or two.gpu is None:
        return None
    return two.gpu in one.nvlink_peers


def _one_numa(one: RankHints, two: RankHints) -> bool | None:
    places = [(h.gpu_numa,) if h.gpu_numa is not None else h.numa for h in (one, two)]
    return places[0] == places[1] if all(len(place) == 1 for place in places) else None


def _graded(text: str, closer: Callable[[int, int], bool | None], rates: Mapping[Pair, float]) -> Iterator[str]:
    """A hint that some pairs of a node are closer than others, which measured the other way round."""
    groups: dict[bool | None, list[Pair]] = {}
    for src, dst in rates:
        groups.setdefault(closer(src, dst), []).append((src, dst))
    if groups.get(True) and groups.get(False):
        near, far = (float(np.median([rates[pair] for pair in groups[kind]])) for kind in (True, False))
        if near * CLASS_RATIO < far:
            first = min(groups[True], key=lambda pair: rates[pair])
            yield (
                f"{text} ranks {first[0]} and {first[1]}, but such pairs reach {format_rate(near)} and the other pairs "
                f"of the node {format_rate(far)}; the measurement is used"
            )


def _nics(hints: Sequence[RankHints], profile: Profile) -> Iterator[str]:
    """Ports against the NICs that were measured: how many there are, and what they carry."""
    topology = profile.topology
    if topology.nodes < 2 or profile.costs(profile.executor).cross_node is None:
        return
    on_ports = profile.fingerprint.get("backend") == "nccl"
    for node in range(topology.nodes if on_ports else 0):
        ranks, nics = topology.ranks_of(node), topology.nics_of(node)
        ports = len(hints[ranks[0]].ports_bytes_per_s)
        if ports and len(nics) > ports:
            yield (
                f"node {node} has {ports} active ports, but its ranks were measured to have {len(nics)} NICs; the "
                "measurement is used"
            )
            break  # nodes are alike as a rule: one line says it
        if ports and len(nics) < min(ports, len(ranks)):
            yield (
                f"node {node} has {ports} active ports for {len(ranks)} ranks, which were measured to share "
                f"{len(nics)}; the measurement is used (NCCL_IB_HCA, or where ranks run, may leave ports idle)"
            )
            break
    shares = {}
    for nic in sorted(set(topology.nic)):
        one = hints[topology.nic.index(nic)]
        stated = max(one.ports_bytes_per_s, default=None) if on_ports else one.interface_bytes_per_s
        if stated is not None:
            shares[nic] = (profile.nic_rate(nic) / stated, stated)
    fast = [nic for nic, (share, _) in shares.items() if share > _MOST]
    slow = [nic for nic, (share, _) in shares.items() if share < _LEAST]
    if fast:
        share, stated = max(shares[nic] for nic in fast)
        whose = _ranks([topology.nic.index(nic) for nic in fast])
        yield (
            f"the NICs of {whose} carry up to {format_rate(share * stated)}, more than the {format_rate(stated)} that "
            "their ports state: bytes may have gone another way"
        )
    if slow:
        share, stated = min(shares[nic] for nic in slow)
        whose = _ranks([topology.nic.index(nic) for nic in slow])
        yield (
            f"the NICs of {whose} carry only {format_rate(share * stated)} of the {format_rate(stated)} that their "
            "ports state: look whether the transport fell back to another (NCCL_DEBUG=INFO names it)"
        )


def _ranks(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"

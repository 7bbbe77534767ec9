"""Raw facts of a machine, as the probes find them and tests invent them. Frozen data; sizes in bytes, rates in bytes
per second one way, GPUs by their physical number (NVML's, in the order of the PCI bus).

A whole part is None where its probe failed; a member is None where the machine does not say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from relaymeter.harness.interfaces import Interface

__all__ = ["Facts", "Gpu", "Gpus", "HostFacts", "Link", "NetworkFacts", "Nic", "Pair", "Port", "Software"]

#: How a pair of GPUs is joined: NVLink, or where on PCIe their paths meet (as ``nvidia-smi topo -m`` names it).
Link = Literal["NVLink", "PIX", "PXB", "PHB", "NODE", "SYS", "?"]
#: A pair of physical numbers, the smaller first.
Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Software:
    """Versions of what is installed, none of it imported; None: not installed."""

    python: str
    relaymeter: str
    torch: str | None = None
    torch_cuda: str | None = None
    """CUDA version that torch was built for; None: built without, or unknown."""
    torch_build: str = ""
    """What else it was built for: ``hip 6.2``; empty for CPU or CUDA."""
    nccl: str | None = None
    """The NCCL package beside torch."""
    triton: str | None = None
    deepspeed: str | None = None
    transformers: str | None = None
    compiler: bool = True
    """Whether g++ is there."""
    ninja: bool = True


@dataclass(frozen=True, kw_only=True)
class Gpu:
    index: int
    name: str = ""
    uuid: str = ""
    memory_bytes: int | None = None
    used_bytes: int | None = None
    mig: bool | None = None
    mig_instances: int = 0
    ecc: bool | None = None
    corrected_errors: int | None = None
    """Since the driver was loaded."""
    uncorrected_errors: int | None = None
    remap_pending: bool = False
    remap_failed: bool = False
    nvlinks: int | None = None
    """Active NVLinks, whomever they reach."""
    numa: int | None = None


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """GPUs of the machine, whatever CUDA_VISIBLE_DEVICES shows of them."""

    source: Literal["NVML", "nvidia-smi", "/proc", "/dev", "none"] = "none"
    nvml_installed: bool = False
    problem: str | None = None
    """What NVML or nvidia-smi answered instead of GPUs."""
    driver: str | None = None
    open_driver: bool = False
    """Whether the driver's kernel modules are the open ones."""
    on_bus: int = 0
    """NVIDIA GPUs on the PCI bus; read where NVML does not answer."""
    cuda: tuple[int, int] | None = None
    """Newest CUDA version that the driver offers."""
    gpus: tuple[Gpu, ...] = ()
    links: Mapping[Pair, Link] = field(default_factory=dict)
    no_peer: frozenset[Pair] = frozenset()
    """Pairs of which neither may read the other's memory."""


@dataclass(frozen=True, kw_only=True)
class Nic:
    """A network interface with a device behind it. ``kind``: ``ethernet`` or ``ipoib``."""

    name: str
    kind: Literal["ethernet", "ipoib"] = "ethernet"
    up: bool = True
    bytes_per_s: float | None = None
    numa: int | None = None


@dataclass(frozen=True, kw_only=True)
class Port:
    """A port of ``/sys/class/infiniband``."""

    device: str
    port: int = 1
    kind: Literal["InfiniBand", "RoCE", "other"] = "InfiniBand"
    active: bool = True
    bytes_per_s: float | None = None
    numa: int | None = None


@dataclass(frozen=True, kw_only=True)
class NetworkFacts:
    interfaces: tuple[Interface, ...] = ()
    nics: tuple[Nic, ...] = ()
    ports: tuple[Port, ...] = ()
    host_addresses: tuple[str, ...] | None = ()
    """IPv4 addresses that the host's own name resolves to; None: no answer in time."""
    route: str | None = None
    """Interface through which MASTER_ADDR, or where that is unset another network, is reached."""
    peer_memory: bool = False
    """Whether a module lets RDMA reach GPU memory (nvidia_peermem, nv_peer_mem)."""
    kernel: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    memory_bytes: int | None = None
    limit_bytes: int | None = None
    """The control group's limit; None: none."""
    cores: int = 1
    """Cores that this process may run on."""
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    locked_bytes: int | None = None
    """Limit of locked memory; None: unlimited, or no limits here."""
    open_files: int | None = None
    """Soft limit; None as above."""
    numa_nodes: tuple[int, ...] = ()
    numa_here: tuple[int, ...] = ()
    """Nodes of the cores that this process may run on."""
    numa_balancing: bool = False


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything that was found out. ``failed``: for each part that was not, what went wrong."""

    environment: Mapping[str, str]
    software: Software | None = None
    gpus: Gpus | None = None
    network: NetworkFacts | None = None
    host: HostFacts | None = None
    box: str | None = None
    """Why no box can be made; None where one can."""
    failed: Mapping[str, str] = field(default_factory=dict)

"""Network of the machine by its files: interfaces, NICs with their rates, RDMA ports, the host's own name, GPUDirect.

``read_network(environment)`` sends nothing but what the resolver asks for the host's own name, and waits for that no
longer than its limit.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Mapping
from pathlib import Path

from relaymeter.calibration.devices import file_text, interface_rate, numa_of, port_rate
from relaymeter.harness.doctor.facts import NetworkFacts, Nic, Port
from relaymeter.harness.interfaces import choose_interface, interfaces

__all__ = ["read_network", "read_nics", "read_ports"]

_RESOLVE_LIMIT_S = 2.0
#: An address of the range kept for documentation: asking for the way there tells the default route.
_ELSEWHERE = "198.51.100.1"
_IPOIB = 32  # ARPHRD_INFINIBAND
#: Where the modules that let RDMA reach GPU memory say that they are loaded; NCCL looks at the same.
_PEER_MEMORY = (
    "sys/module/nvidia_peermem",
    "sys/kernel/mm/memory_peers/nv_mem/version",
    "sys/kernel/mm/memory_peers/nv_mem_nc/version",
)


def read_network(environment: Mapping[str, str], root: Path = Path("/")) -> NetworkFacts:
    """The network as this process sees it. ``root`` stands for ``/`` where files are read. Local."""
    available = interfaces()
    master = environment.get("MASTER_ADDR", "") or _ELSEWHERE
    way = choose_interface(None, available, master)
    names = {entry.name for entry in available}
    nics = read_nics(root)
    if root == Path("/"):  # in a namespace of its own a process may see the files of another
        nics = tuple(nic for nic in nics if nic.name in names)
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return NetworkFacts(
        interfaces=available,
        nics=nics,
        ports=read_ports(root),
        host_addresses=_own_addresses(_RESOLVE_LIMIT_S),
        route=way[0].name if way else None,
        peer_memory=any((root / path).exists() for path in _PEER_MEMORY),
        kernel=(int(release.group(1)), int(release.group(2))) if release else (0, 0),
    )


def read_nics(root: Path = Path("/")) -> tuple[Nic, ...]:
    """Interfaces with a device behind them, by name; virtual ones (bridges, loopback, veth) are none."""
    found = []
    for path in sorted((root / "sys/class/net").glob("*")):
        if not (path / "device").exists():
            continue
        found.append(
            Nic(
                name=path.name,
                kind="ipoib" if file_text(path / "type").strip() == str(_IPOIB) else "ethernet",
                up=file_text(path / "operstate").strip() in ("up", "unknown"),
                bytes_per_s=interface_rate(path.name, root / "sys"),
                numa=numa_of(path / "device"),
            )
        )
    return tuple(found)


def read_ports(root: Path = Path("/")) -> tuple[Port, ...]:
    """Ports of InfiniBand and RoCE devices, active or not, by name."""
    found = []
    for path in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        layer = file_text(path / "link_layer").strip()
        device = path.parent.parent
        found.append(
            Port(
                device=device.name,
                port=int(path.name) if path.name.isdigit() else 0,
                kind="InfiniBand" if layer == "InfiniBand" else "RoCE" if layer == "Ethernet" else "other",
                active="ACTIVE" in file_text(path / "state"),
                bytes_per_s=port_rate(file_text(path / "rate")),
                numa=numa_of(device / "device"),
            )
        )
    return tuple(found)


def _own_addresses(limit_s: float) -> tuple[str, ...] | None:
    """IPv4 addresses of the host's own name; empty where it has none, None where the resolver is too slow."""
    answers: list[tuple[str, ...]] = []

    def ask() -> None:
        try:
            entries = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            entries = []
        answers.append(tuple(sorted({str(entry[4][0]) for entry in entries})))

    resolver = threading.Thread(target=ask, name="relaymeter-resolver", daemon=True)
    resolver.start()
    resolver.join(limit_s)
    return answers[0] if answers else None

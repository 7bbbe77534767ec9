"""Byte counters of the kernel and of NICs: the witness of what really crossed between nodes.

``box_counter("nic0")`` counts what a rank of a box sent to other nodes; ``port_counter()`` sums the InfiniBand ports;
``interface_counter("eth0")`` an Ethernet interface. A counter is read with ``.read()``: cumulative bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from relaymeter.errors import InputError
from relaymeter.harness.box import BOX_ALIAS, CLASS_OTHER_NODES

__all__ = ["WireCounter", "active_ports", "box_counter", "interface_counter", "is_box_interface", "port_counter"]

_WORDS_PER_UNIT = 4  # port_xmit_data counts units of four bytes


@dataclass(frozen=True)
class WireCounter:
    """``read()`` gives the cumulative bytes sent; ``source`` names what counts them."""

    source: str
    read: Callable[[], int]


def is_box_interface(name: str) -> bool:
    """Whether ``name`` in this network namespace is the NIC of a cluster in a box. Needs pyroute2 to say yes."""
    try:
        from pyroute2 import IPRoute
    except ImportError:
        return False
    with IPRoute() as ipr:
        found = ipr.link_lookup(ifname=name)
        if not found:
            return False
        (link,) = ipr.get_links(found[0])
        return str(link.get_attr("IFLA_IFALIAS") or "").startswith(BOX_ALIAS)


def box_counter(name: str) -> WireCounter:
    """Bytes, Ethernet headers included, that left the box NIC ``name`` of this namespace for other nodes.

    Raises InputError where the interface has no such class.
    """

    def read() -> int:
        from pyroute2 import IPRoute

        with IPRoute() as ipr:
            for entry in ipr.get_classes(index) if (index := next(iter(ipr.link_lookup(ifname=name)), 0)) else ():
                if entry["handle"] == CLASS_OTHER_NODES:
                    return int(entry.get_nested("TCA_STATS2", "TCA_STATS_BASIC")["bytes"])
        raise InputError(f"interface {name} has no class that counts traffic to other nodes: it is no NIC of a box")

    read()
    return WireCounter(f"HTB class of {name}", read)


def active_ports(root: Path = Path("/sys/class/infiniband")) -> tuple[Path, ...]:
    """Directories of the InfiniBand and RoCE ports that are up, by name."""
    ports = sorted(root.glob("*/ports/*")) if root.is_dir() else []
    return tuple(port for port in ports if "ACTIVE" in _text(port / "state"))


def port_counter(ports: tuple[Path, ...] | None = None) -> WireCounter:
    """Bytes sent by all active InfiniBand ports of this machine together. Raises InputError where none counts."""
    files = [port / "counters" / "port_xmit_data" for port in (active_ports() if ports is None else ports)]
    files = [file for file in files if os.access(file, os.R_OK)]
    if not files:
        raise InputError("no active InfiniBand port with a port_xmit_data counter under /sys/class/infiniband")
    return WireCounter(
        f"port_xmit_data of {len(files)} InfiniBand ports",
        lambda: sum(int(file.read_text()) for file in files) * _WORDS_PER_UNIT,
    )


def interface_counter(name: str, table: Path = Path("/proc/net/dev")) -> WireCounter:
    """Bytes sent by the interface ``name`` of this namespace, whatever for. Raises InputError where there is none."""

    def read() -> int:
        for line in table.read_text().splitlines()[2:]:
            interface, _, columns = line.partition(":")
            if interface.strip() == name:
                return int(columns.split()[8])
        raise InputError(f"no interface {name} in {table}")

    read()
    return WireCounter(f"bytes sent by {name}", read)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

"""Network interfaces of a rank, and which of them gloo binds to.

``interfaces()`` are those of this network namespace; ``choose_interface(value, available, master)`` is what a value of
``GLOO_SOCKET_IFNAME`` means, or without one what reaches ``master``.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from relaymeter.errors import InputError

__all__ = ["IFNAME", "Interface", "choose_interface", "interfaces"]

IFNAME = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Interface:
    """A network interface of this namespace: its IPv4 addresses, and whether it is up and loopback."""

    name: str
    addresses: tuple[str, ...]
    up: bool
    loopback: bool

    @property
    def usable(self) -> bool:
        """Whether another node could be reached through it."""
        return self.up and not self.loopback and bool(self.addresses)


def interfaces() -> tuple[Interface, ...]:
    """Interfaces of this network namespace, by name."""
    states = psutil.net_if_stats()
    found = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        own = tuple(entry.address for entry in addresses if entry.family == socket.AF_INET)
        state = states.get(name)
        loopback = any(ipaddress.ip_address(address).is_loopback for address in own) or name == "lo"
        found.append(Interface(name, own, state is not None and state.isup, loopback))
    return tuple(found)


def choose_interface(value: str | None, available: Sequence[Interface], master: str) -> tuple[Interface, ...]:
    """The interfaces that ``value`` of GLOO_SOCKET_IFNAME names; unset, the one whose address reaches ``master``.

    Raises InputError on exclusion lists, addresses and names that are not there, with the names that are. Empty where
    nothing is set and no route leads to ``master``.
    """
    by_name = {entry.name: entry for entry in available}
    names = ", ".join(f"{entry.name} ({', '.join(entry.addresses)})" for entry in available if entry.addresses)
    if value is None:
        source = _source_address(master)
        return tuple(entry for entry in available if source in entry.addresses)[:1]
    chosen = []
    for name in value.split(","):
        problem = None
        if name.startswith("^") or value.startswith("^"):
            problem = "excludes interfaces, but gloo takes exact names only"
        elif name not in by_name:
            problem = f"names no interface of {socket.gethostname()}"
            with suppress(ValueError):
                ipaddress.ip_address(name)
                problem = "holds an address where the name of an interface is expected"
        elif not by_name[name].addresses or not by_name[name].up:
            problem = f"names {name}, which is down or has no IPv4 address"
        if problem is not None:
            raise InputError(f"{IFNAME}={value!r} {problem}; set it to one of: {names or 'none has an address'}")
        chosen.append(by_name[name])
    return tuple(chosen)


def _source_address(target: str) -> str | None:
    """Own IPv4 address from which this host would talk to ``target``; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])

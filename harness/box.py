"""A cluster in a box: network namespaces, virtual NICs and traffic shaping make a real network on one machine.

``with Box(BoxSpec(nodes=2, ranks_per_node=2, nic_per="rank", rate_bytes_per_s=50e6)) as box: ...`` sets it up and
always tears it down. ``capability()`` says why a machine cannot do it. Linux and root only; pyroute2 talks to the
kernel, the ip and tc programs are not needed.

Every rank (or node) has a network namespace with one NIC, wired to a bridge in a namespace of its own. Node ``n`` owns
the prefix ``<range>.n.0/24``. HTB on both ends of each wire puts traffic of other nodes into one class, at the NIC's
rate, and traffic of the own node into a fast one; the byte counters of the classes are the witness of what crossed.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import re
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TypeVar

from relaymeter.errors import InputError, RelaymeterError
from relaymeter.harness.processes import pid_namespace, start_of
from relaymeter.harness.signals import EndingSignal, ending_signals, held_signals

__all__ = [
    "BOX_ALIAS",
    "CLASS_OTHER_NODES",
    "CLASS_OWN_NODE",
    "Box",
    "BoxSpec",
    "BoxUnavailable",
    "EndingSignal",
    "Place",
    "capability",
    "ending_signals",
    "in_namespace",
    "namespace_path",
    "payload_rate",
    "remove_leftovers",
]

T = TypeVar("T")

#: Alias (ifalias) of every NIC of a box: how a rank knows that its interface belongs to one.
BOX_ALIAS = "relaymeter-box"

#: HTB class of traffic inside the node, and of traffic from or to other nodes.
CLASS_OWN_NODE = 0x10010
CLASS_OTHER_NODES = 0x10020

_HTB_ROOT = 0x10000
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWNET = 0x40000000
_NAMESPACES = "/var/run/netns"
_NAME = re.compile(r"relaymeter-(\d+)-(\d+)-(\d+)-[0-9a-f]+-\w+")

_BURST_BYTES = 16384  # 64 KiB lets a message of 1 MiB pass 5 % too fast at 400 Mbit/s
_BURST_S = 3.3e-4  # the same burst in time, for rates at which 16 KiB would be shorter than a timer's tick
_NO_LIMIT_BYTES_PER_S = 100_000_000_000  # far above what one machine's memory moves, so the class only counts
_QUANTUM_BYTES = 60_000
_MTU = 1500
_ETHERNET_BYTES = 14
_IP_TCP_BYTES = 52  # IPv4 20, TCP 20, timestamps 12


class BoxUnavailable(InputError):
    """This machine cannot make a box; the message says why and what would mend it."""


@dataclass(frozen=True, kw_only=True)
class BoxSpec:
    """The network to make. Raises InputError where it has no rank, or more than the address range holds."""

    nodes: int
    ranks_per_node: int
    nic_per: Literal["rank", "node"] = "rank"
    """One NIC for each rank, or one that all ranks of a node share."""
    rate_bytes_per_s: float | None = None
    """What a NIC passes from and to other nodes, each way, headers included. None: no limit, but counted."""

    def __post_init__(self) -> None:
        if self.nic_per not in ("rank", "node"):
            raise InputError(f"nic_per {self.nic_per!r} is not one of: rank, node")
        if not (1 <= self.nodes <= 250 and 1 <= self.ranks_per_node <= 250):
            raise InputError(f"a box has 1..250 nodes of 1..250 ranks, got {self.nodes} x {self.ranks_per_node}")
        if self.rate_bytes_per_s is not None and not 1e3 <= self.rate_bytes_per_s <= _NO_LIMIT_BYTES_PER_S:
            raise InputError(f"a NIC rate is 8kbit..800gbit, got {self.rate_bytes_per_s * 8:.0f} bit/s")


@dataclass(frozen=True)
class Place:
    """Where a rank lives in a box: node, network namespace, the node's host name, its NIC and that NIC's address."""

    rank: int
    node: int
    local_rank: int
    namespace: str
    hostname: str
    interface: str
    address: str


def payload_rate(rate_bytes_per_s: float) -> float:
    """TCP payload per second through a NIC of ``rate_bytes_per_s``: full-sized segments of 1448 of 1514 bytes."""
    return rate_bytes_per_s * (_MTU - _IP_TCP_BYTES) / (_MTU + _ETHERNET_BYTES)


def namespace_path(name: str) -> str:
    """File that stands for the network namespace ``name``."""
    return name if "/" in name else f"{_NAMESPACES}/{name}"


def in_namespace(name: str, work: Callable[[], T]) -> T:
    """Run ``work`` in the network namespace ``name``, in a thread that ends with it; returns or raises what it does.

    Sockets made by ``work`` stay in the namespace and may be used from anywhere afterwards.
    """
    path = namespace_path(name)

    def inside() -> T:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _system_call("setns", handle, _CLONE_NEWNET)
        finally:
            os.close(handle)
        return work()

    return _in_thread(inside)


def capability() -> str | None:
    """None where this machine can make a shaped box, else the reason why not. Found by making one and removing it."""
    try:
        with Box(BoxSpec(nodes=2, ranks_per_node=1, rate_bytes_per_s=50e6)):
            return None
    except BoxUnavailable as reason:
        return str(reason)


class Box:
    """The network of ``spec`` while the context is open. ``places[r]`` says where rank ``r`` belongs.

    One process opens it, from any thread; in the main thread SIGTERM and SIGHUP end the process through the tear-down,
    as Ctrl-C does. A box whose owner was killed outright is removed when the next one is set up. Raises BoxUnavailable.
    """

    def __init__(self, spec: BoxSpec) -> None:
        self.spec = spec
        self.name = f"relaymeter-{pid_namespace()}-{os.getpid()}-{start_of(os.getpid())}-{secrets.token_hex(3)}"
        self.places: tuple[Place, ...] = ()
        self._made: list[str] = []
        self._signals = ExitStack()

    @property
    def switch(self) -> str:
        """Namespace of the bridge that joins the NICs."""
        return f"{self.name}-sw"

    def __enter__(self) -> Box:
        self._signals.enter_context(ending_signals())
        try:
            with held_signals():
                remove_leftovers()
                self._set_up()
        except BaseException:
            with self._signals, held_signals():
                self._tear_down()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._signals, held_signals():
            kept = self._tear_down()
        if kept and error is None:
            raise RelaymeterError("could not remove network namespaces: " + "; ".join(kept))

    def _set_up(self) -> None:
        if not sys.platform.startswith("linux"):
            raise BoxUnavailable(f"a cluster in a box needs Linux network namespaces, this is {sys.platform}")
        try:
            import pyroute2  # noqa: F401
        except ImportError as error:
            raise BoxUnavailable(f"a cluster in a box needs pyroute2: pip install pyroute2 ({error})") from error
        with _step("make a UTS namespace"):
            _in_thread(lambda: _system_call("unshare", _CLONE_NEWUTS))
        with _step("list the addresses in use"):
            block = _free_block()
        spec = self.spec
        ranks_of_nic = 1 if spec.nic_per == "rank" else spec.ranks_per_node
        places: list[Place] = []
        self._create(self.switch)
        with _step("make a bridge"):
            in_namespace(self.switch, _make_bridge)
        for nic in range(spec.nodes * spec.ranks_per_node // ranks_of_nic):
            first = nic * ranks_of_nic
            node, slot = divmod(first, spec.ranks_per_node)
            namespace = f"{self.name}-{'r' if spec.nic_per == 'rank' else 'n'}{nic}"
            address = f"{block}.{node}.{slot + 1}"
            self._create(namespace)
            self._wire(nic, namespace, f"{address}/16", (f"{block}.{node}.0", f"{block}.0.0"))
            places += [
                Place(rank, node, rank % spec.ranks_per_node, namespace, f"box-node{node}", f"nic{nic}", address)
                for rank in range(first, first + ranks_of_nic)
            ]
        self.places = tuple(places)

    def _create(self, namespace: str) -> None:
        from pyroute2 import netns

        def inside() -> None:
            _system_call("unshare", _CLONE_NEWNET)
            self._made.append(namespace)
            netns.attach(namespace, threading.get_native_id())
            try:
                with open("/proc/sys/net/ipv6/conf/all/disable_ipv6", "w") as switch:
                    switch.write("1")  # router and neighbour discovery would only add noise to the counters
            except OSError:
                pass

        with _step("make a network namespace"):
            _in_thread(inside)

    def _wire(self, nic: int, namespace: str, address: str, prefixes: tuple[str, str]) -> None:
        rate = self.spec.rate_bytes_per_s
        port, name = f"port{nic}", f"nic{nic}"

        def switch_end() -> None:
            with _netlink() as ipr:
                with _step("make a veth pair"):
                    ipr.link("add", ifname=port, kind="veth", peer={"ifname": name, "net_ns_fd": namespace})
                    index = _index(ipr, port)
                    ipr.link("set", index=index, master=_index(ipr, "br0"), state="up")
                with _step("shape with HTB"):
                    _shape(ipr, index, 12, prefixes, rate)

        def rank_end() -> None:
            with _netlink() as ipr:
                index = _index(ipr, name)
                with _step("bring up a NIC"):
                    host, length = address.split("/")
                    ipr.addr("add", index=index, address=host, prefixlen=int(length))
                    ipr.link("set", index=index, ifalias=f"{BOX_ALIAS} {self.name}", state="up")
                    ipr.link("set", index=_index(ipr, "lo"), state="up")
                with _step("shape with HTB"):
                    _shape(ipr, index, 16, prefixes, rate)

        in_namespace(self.switch, switch_end)
        in_namespace(namespace, rank_end)

    def _tear_down(self) -> list[str]:
        kept = [problem for name in self._made for problem in _remove(name)]
        self._made = []
        return kept


def remove_leftovers() -> tuple[str, ...]:
    """Remove the namespaces of boxes whose owner is dead; returns their names.

    A name holds the owner's PID namespace, process id and start time; only names of this form, made in the caller's own
    PID namespace, whose process is gone are touched.
    """
    if not os.path.isdir(_NAMESPACES):
        return ()
    gone = []
    for name in sorted(os.listdir(_NAMESPACES)):
        match = _NAME.fullmatch(name)
        if match is None or match.group(1) != pid_namespace():
            continue
        if start_of(int(match.group(2))) != match.group(3) and not _remove(name):
            gone.append(name)
    return tuple(gone)


@contextmanager
def _step(what: str) -> Iterator[None]:
    """Turn a refusal of the kernel into BoxUnavailable with its reason."""
    try:
        yield
    except BoxUnavailable:
        raise
    except Exception as error:
        code = error.errno if isinstance(error, OSError) else getattr(error, "code", None)
        if code is None:
            raise
        if code in (errno.EPERM, errno.EACCES) and os.geteuid() != 0:
            raise BoxUnavailable(f"not root: user id {os.geteuid()} may not {what}; run as root") from error
        if code in (errno.EPERM, errno.EACCES, errno.EROFS):
            hint = "a container needs CAP_SYS_ADMIN and CAP_NET_ADMIN"
            raise BoxUnavailable(f"no permission to {what}: {hint} ({error})") from error
        if "HTB" in what and code in (errno.ENOENT, errno.EOPNOTSUPP, errno.EINVAL):
            raise BoxUnavailable(f"this kernel has no HTB shaping (sch_htb, cls_u32): {error}") from error
        raise BoxUnavailable(f"the kernel refused to {what}: {error}") from error


def _system_call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _in_thread(work: Callable[[], T]) -> T:
    """Run ``work`` in a thread of its own: namespaces belong to threads, so the caller stays where it is."""
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, name="relaymeter-namespace")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _netlink() -> Any:
    from pyroute2 import IPRoute

    return IPRoute()


def _index(ipr: Any, name: str) -> int:
    found = ipr.link_lookup(ifname=name)
    if not found:
        raise OSError(errno.ENODEV, f"no interface {name}")
    return int(found[0])


def _make_bridge() -> None:
    with _netlink() as ipr:
        ipr.link("add", ifname="br0", kind="bridge")
        ipr.link("set", index=_index(ipr, "br0"), state="up")


def _shape(ipr: Any, index: int, offset: int, prefixes: tuple[str, str], rate: float | None) -> None:
    """Two HTB classes on an interface, told apart by the IPv4 address at ``offset`` (12 source, 16 destination).

    ``prefixes``: the own node's /24, then the box's /16 (what is not the first is another node's).
    """
    shaped = int(rate) if rate is not None else _NO_LIMIT_BYTES_PER_S
    ipr.tc("add", "htb", index, _HTB_ROOT, default=CLASS_OWN_NODE & 0xFFFF)
    for handle, limit in ((CLASS_OWN_NODE, _NO_LIMIT_BYTES_PER_S), (CLASS_OTHER_NODES, shaped)):
        burst = max(_BURST_BYTES, int(limit * _BURST_S))
        ipr.tc(
            "add-class", "htb", index, handle,
            parent=_HTB_ROOT, rate=limit, ceil=limit, burst=burst, cburst=burst, quantum=_QUANTUM_BYTES,
        )  # fmt: skip
    rules = ((prefixes[0], 0xFFFFFF00, CLASS_OWN_NODE), (prefixes[1], 0xFFFF0000, CLASS_OTHER_NODES))
    for order, (prefix, mask, target) in enumerate(rules, start=1):
        key = f"0x{int(ipaddress.IPv4Address(prefix)):08x}/0x{mask:08x}+{offset}"
        ipr.tc(
            "add-filter", "u32", index, parent=_HTB_ROOT, prio=order, protocol=0x0800, target=target, keys=[key]
        )  # fmt: skip


def _free_block() -> str:
    """First two bytes of an IPv4 /16 that no address or route of this namespace touches; the benchmark range first."""
    used = []
    with _netlink() as ipr:
        for route in ipr.get_routes(family=socket.AF_INET):
            target = route.get_attr("RTA_DST")
            if target is not None:
                used.append(ipaddress.ip_network(f"{target}/{route['dst_len']}", strict=False))
    blocks = ["198.18", "198.19", *(f"10.{second}" for second in range(255, -1, -1))]
    for block in [*blocks, *(f"172.{second}" for second in range(31, 15, -1))]:
        if not any(ipaddress.ip_network(f"{block}.0.0/16").overlaps(taken) for taken in used):
            return block
    raise BoxUnavailable("every private IPv4 range (198.18/15, 10/8, 172.16/12) is routed on this machine")


def _remove(name: str) -> list[str]:
    """Remove a namespace, its links first so that they are gone at once; returns what went wrong."""
    from pyroute2 import netns

    def unplug() -> None:
        with _netlink() as ipr:
            for link in ipr.get_links():
                if link.get_nested("IFLA_LINKINFO", "IFLA_INFO_KIND") in ("veth", "bridge"):
                    ipr.link("del", index=link["index"])

    # The links go with the namespace in any case; a file that was never bound to one cannot be entered.
    try:
        in_namespace(name, unplug)
    except Exception as error:
        if not isinstance(error, OSError) and getattr(error, "code", None) is None:
            raise
    try:
        netns.remove(name)
    except FileNotFoundError:
        pass
    except OSError as error:
        return [f"{name}: {error}"]
    return []

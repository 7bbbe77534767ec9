"""A rank's way into the world: process group, topology from what the ranks see of themselves, and the wire counter.

In a rank: ``world = join(time_limit_s=60)``, then ``world.topology``, ``world.wire_bytes()`` and at the end
``world.close()``. Works under this package's launcher and under torchrun, deepspeed, srun and mpirun.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from relaymeter.errors import InputError, MoveTimeout, RankLost
from relaymeter.harness.counters import (
    WireCounter,
    active_ports,
    box_counter,
    interface_counter,
    is_box_interface,
    port_counter,
)
from relaymeter.harness.interfaces import IFNAME, Interface, choose_interface, interfaces
from relaymeter.harness.launch import PLACE_VARIABLE, already_in_world
from relaymeter.relayout.copy_kernel import compile_on
from relaymeter.relayout.heartbeat import Heartbeat
from relaymeter.relayout.topology import Topology

__all__ = [
    "DEVICE_VARIABLE",
    "Identity",
    "World",
    "join",
    "tell_by_store",
    "topology_of",
    "watching",
]

#: Where ranks keep what they move: ``auto`` (a GPU with NCCL, else the CPU), ``cpu``, or ``cuda``, over gloo too.
DEVICE_VARIABLE = "RELAYMETER_DEVICE"
_LINGER_S = 5.0


@dataclass(frozen=True)
class Identity:
    """What a rank knows of its place. Every rank publishes its own and reads all others."""

    hostname: str
    boot_id: str
    namespace: int
    """Inode of the network namespace."""
    interface: str
    """What gloo binds to; several names are comma-separated, empty where nothing could be chosen."""
    asked: bool
    """Whether the user or a launcher named the interface."""
    loopback: bool
    usable: tuple[str, ...]
    in_box: bool
    ports: int
    """Active InfiniBand and RoCE ports of the machine."""
    gpu: str | None
    """Unique id of the GPU the rank would use."""
    place: tuple[int, int] | None
    """Declared (node, NIC) of a rank on plain loopback."""
    device: str = "auto"
    """What ``RELAYMETER_DEVICE`` asks for."""
    error: str | None = None

    @property
    def host(self) -> tuple[str, str]:
        return self.hostname, self.boot_id


@dataclass
class World:
    """The world as one rank holds it. ``topology`` is the same on every rank.

    ``store`` is the TCP store the ranks met at; a thread that waits in it needs a clone of its own. ``device`` is the
    rank's GPU with NCCL, or where ``RELAYMETER_DEVICE`` is ``cuda``, else the CPU. ``declared``: the launcher declared
    the nodes, all ranks share one host. ``wire_source`` says what counts cross-node bytes, or why nothing does.
    """

    rank: int
    world_size: int
    topology: Topology
    store: TCPStore
    backend: str
    device: torch.device
    local_rank: int
    declared: bool
    interface: str
    wire_source: str
    wire_counter: WireCounter | None = None
    wire_reporter: int = 0
    """Lowest of the ranks that share this rank's counter: it reports for all of them."""
    hosts: tuple[str, ...] = ()
    """Host name of every rank."""
    start_s: float = 0.0
    """Age of this process when it began to join: interpreter and imports."""
    join_s: float = 0.0
    """What joining took."""
    _hosts_store: bool = field(default=False, repr=False)
    _closed: bool = field(default=False, repr=False)

    def wire_bytes(self) -> int | None:
        """Cumulative bytes, headers included, that this rank's NIC has sent to other nodes; None where nothing counts.

        The lowest of the ranks that share a counter reports it, the others report 0, so the sum over ranks is the
        cluster's. Any rank may call it at any time; to count a move, read it before the barrier that starts the move:
        after that barrier a rank that shares the NIC may already be sending.
        """
        if self.wire_counter is None:
            return None
        return self.wire_counter.read() if self.rank == self.wire_reporter else 0

    def close(self, lost: Sequence[int] = ()) -> None:
        """Leave the world. Every rank calls it once, also after a failure, naming the ranks known to be ``lost``.

        The rank that hosts the store leaves last, but waits at most 5 s, so that the others can still read from it.
        """
        if self._closed:
            return
        self._closed = True
        if dist.is_initialized() and not (lost and self.backend == "nccl"):  # NCCL waits for its dead peers
            with suppress(RuntimeError):
                dist.destroy_process_group()
        if 0 not in lost or self._hosts_store:  # a store whose host is frozen never answers
            _leave(self.store, "relaymeter/left", self.world_size - len(set(lost)), self._hosts_store)


def watching(world: World, what: str, lost_after_s: float = 5.0) -> Heartbeat:
    """A heartbeat of all ranks of ``world`` for one stretch of work, whose name ``what`` is used once. Every rank."""
    host = 0 if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" else None
    return Heartbeat(
        world.store, world.rank, world.world_size,
        lost_after_s=lost_after_s, store_host=host, prefix=f"relaymeter/heartbeat/{what}",
    )  # fmt: skip


def tell_by_store(world: World, key: str, value: str, limit_s: float) -> list[str]:
    """The ``value`` of every rank, told over the store, so that it also works where one rank left a stretch of
    collectives that others are still in. Every rank calls it, once for each ``key``. Raises MoveTimeout where some have
    not come within ``limit_s``."""
    keys = [f"relaymeter/told/{key}/{rank}" for rank in range(world.world_size)]
    world.store.set(keys[world.rank], value or " ")  # the store takes no empty value
    try:
        world.store.wait(keys, timedelta(seconds=limit_s))
    except (RuntimeError, ValueError) as error:
        why = f" (here: {value})" if value else ""
        raise MoveTimeout(f"the ranks did not end {key} together within {limit_s:g} s{why}") from error
    return [world.store.get(name).decode().strip() for name in keys]


def topology_of(
    identities: Sequence[Identity], backend: str = "gloo", nic_per: Literal["rank", "node"] | None = None
) -> Topology:
    """Topology of ranks that see themselves as ``identities``, one per rank in order. Pure.

    Ranks of one host name and boot share a node; nodes are numbered by their lowest rank. In a box ranks share a NIC
    when they share network namespace and interface; on loopback the launcher declares it; elsewhere ``nic_per`` does,
    and without it the same is seen as in a box, or with NCCL whether the node has an active InfiniBand port per rank.
    Raises InputError where declared places contradict each other.
    """
    places = [identity.place for identity in identities]
    if any(places) and not all(places):
        missing = [rank for rank, place in enumerate(places) if place is None]
        raise InputError(f"ranks {missing} have no {PLACE_VARIABLE} although others have: set it for all ranks or none")
    nodes = _number([place[0] if place else identity.host for place, identity in zip(places, identities, strict=True)])
    keys: list[object] = []
    for rank, (node, identity) in enumerate(zip(nodes, identities, strict=True)):
        if identity.in_box:
            keys.append((node, identity.namespace, identity.interface))
        elif identity.place is not None:
            keys.append(identity.place[1])
        elif nic_per is not None:
            keys.append(rank if nic_per == "rank" else (node,))
        elif backend == "nccl":
            keys.append(rank if identity.ports >= nodes.count(node) else (node,))
        else:
            keys.append((node, identity.namespace, identity.interface))
    return Topology(node=tuple(nodes), nic=tuple(_number(keys)))


def join(
    time_limit_s: float,
    *,
    meet_limit_s: float | None = None,
    nic_per: Literal["rank", "node"] | None = None,
    backend: Literal["gloo", "nccl"] | None = None,
) -> World:
    """Join the world that the environment describes. Every rank calls it once, before any other collective.

    The default group is NCCL where every rank has a GPU of its own, else gloo; ``backend`` decides otherwise. With
    ``RELAYMETER_DEVICE`` ``cuda`` gloo moves what lies on GPUs, which ranks may share; with ``cpu`` none is used. Its
    collectives have ``time_limit_s``; all ranks must have come within ``meet_limit_s`` (None: the same), which leaves
    time to say who did not. ``nic_per`` declares what the ranks cannot see. Raises
    InputError, on all ranks alike, for a missing variable or an interface that cannot carry the world, and RankLost
    naming the ranks that did not come.
    """
    hint = already_in_world()
    if hint is None:
        raise InputError("no RANK and WORLD_SIZE: start the ranks with relaymeter, torchrun, deepspeed, srun or mpirun")
    master, port = _master()
    rank, size = hint.rank, hint.world_size
    meet_limit_s = time_limit_s if meet_limit_s is None else meet_limit_s
    deadline = time.monotonic() + meet_limit_s
    hosts_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = _meet(master, port, size, hosts_store, meet_limit_s)
    store.set_timeout(timedelta(seconds=time_limit_s))
    identities = _exchange(store, rank, _identity(master, hint.local_rank, rank), size, deadline)
    try:
        problem = _problem(identities)
        if problem is not None:
            raise InputError(problem)
        gpus = [identity.gpu for identity in identities]
        apart = None not in gpus and len(set(gpus)) == size and identities[rank].device != "cpu"
        chosen = backend or ("nccl" if apart else "gloo")
        topology = topology_of(identities, chosen, nic_per)
        interface = _interface_of(identities[rank], topology.nodes > 1)
    except InputError:
        _leave(store, "relaymeter/refused", size, hosts_store)
        raise
    node = topology.node[rank]
    local_rank = hint.local_rank if hint.local_rank is not None else topology.ranks_of(node).index(rank)
    device = torch.device("cpu")
    if chosen == "nccl" or identities[rank].device == "cuda":
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        compile_on(device)
    # Others in this process (DeepSpeed, new groups) read the same variables; DeepSpeed takes the GPU of that number.
    local = local_rank if device.index is None else device.index
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(local))
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    if chosen == "gloo":
        os.environ[IFNAME] = interface
    dist.init_process_group(
        chosen,
        store=PrefixStore("relaymeter/world", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=time_limit_s),
        device_id=device if chosen == "nccl" else None,
    )
    counter, source, reporter = _wire(identities, topology, rank, chosen)
    return World(
        rank=rank,
        world_size=size,
        topology=topology,
        store=store,
        backend=chosen,
        device=device,
        local_rank=local_rank,
        declared=identities[rank].place is not None,
        interface=interface,
        wire_source=source,
        wire_counter=counter,
        wire_reporter=reporter,
        hosts=tuple(identity.hostname for identity in identities),
        _hosts_store=hosts_store,
    )


def _master() -> tuple[str, int]:
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(
            f"MASTER_ADDR={address!r} and MASTER_PORT={port!r} do not say where the ranks meet: export the address of "
            "rank 0's node and a free port on it, for example MASTER_ADDR=$(scontrol show hostnames | head -n 1) "
            "MASTER_PORT=29500"
        )
    return address, int(port)


def _meet(master: str, port: int, size: int, hosts_store: bool, time_limit_s: float) -> TCPStore:
    try:
        return TCPStore(
            master,
            port,
            size,
            is_master=hosts_store,
            timeout=timedelta(seconds=time_limit_s),
            wait_for_workers=False,  # who does not come is found out by name, below
            multi_tenant=True,
        )
    except dist.DistError as error:
        if hosts_store:
            raise InputError(f"rank 0 cannot listen on port {port}: {error}; set MASTER_PORT to a free one") from error
        raise RankLost(f"rank 0 was not met at {master}:{port} within {time_limit_s:g} s", ranks=(0,)) from error


def _exchange(store: TCPStore, rank: int, own: Identity, size: int, deadline: float) -> list[Identity]:
    """Every rank's identity, in order. Raises RankLost with the ranks that published none in time."""
    keys = [f"relaymeter/identity/{other}" for other in range(size)]
    store.set(keys[rank], json.dumps(asdict(own)))
    try:
        store.wait(keys, timedelta(seconds=max(0.1, deadline - time.monotonic())))
        entries = [json.loads(store.get(key)) for key in keys]
    except dist.DistError as error:
        missing: tuple[int, ...] = (0,)
        with suppress(RuntimeError):
            missing = tuple(other for other, key in enumerate(keys) if not store.check([key]))
        names = ", ".join(str(other) for other in missing)
        raise RankLost(f"ranks {names} of {size} did not join the world in time", ranks=missing) from error
    for entry in entries:
        entry["usable"] = tuple(entry["usable"])
        entry["place"] = tuple(entry["place"]) if entry["place"] is not None else None
    return [Identity(**entry) for entry in entries]


def _identity(master: str, local_rank: int | None, rank: int) -> Identity:
    """What this rank sees of itself; what is wrong with it goes to all ranks as ``error``."""
    error: str | None = None
    chosen: tuple[Interface, ...] = ()
    available = interfaces()
    place: tuple[int, int] | None = None
    device = "auto"
    try:
        chosen = choose_interface(os.environ.get(IFNAME), available, master)
        place = _place(os.environ)
        device = _device(os.environ)
    except InputError as problem:
        error = str(problem)
    names = ",".join(entry.name for entry in chosen)
    return Identity(
        hostname=socket.gethostname(),
        boot_id=_boot_id(),
        namespace=os.stat("/proc/self/ns/net").st_ino,
        interface=names,
        asked=IFNAME in os.environ,
        loopback=any(entry.loopback for entry in chosen),
        usable=tuple(entry.name for entry in available if entry.usable),
        in_box=len(chosen) == 1 and is_box_interface(names),
        ports=len(active_ports()),
        gpu=_gpu(local_rank if local_rank is not None else rank),
        place=place,
        device=device,
        error=error,
    )


def _device(environment: Mapping[str, str]) -> str:
    """Where a rank keeps what it moves: ``auto``, ``cpu`` or ``cuda``. Raises InputError."""
    value = environment.get(DEVICE_VARIABLE, "auto")
    if value not in ("auto", "cpu", "cuda"):
        raise InputError(f"{DEVICE_VARIABLE}={value!r} is not one of: auto, cpu, cuda")
    if value == "cuda" and not torch.cuda.is_available():
        raise InputError(f"{DEVICE_VARIABLE}=cuda, but torch {torch.__version__} sees no CUDA device: unset it")
    return value


def _problem(identities: Sequence[Identity]) -> str | None:
    """Why these ranks cannot make a world, naming ranks; None where they can."""
    errors: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        if identity.error is not None:
            errors.setdefault(identity.error, []).append(rank)
    if errors:
        return "; ".join(f"rank {', '.join(map(str, ranks))}: {error}" for error, ranks in errors.items())
    devices = {identity.device for identity in identities}
    if len(devices) > 1:
        return f"{DEVICE_VARIABLE} differs between ranks ({', '.join(sorted(devices))}): set it alike on all"
    several_hosts = len({identity.host for identity in identities}) > 1
    for rank, identity in enumerate(identities):
        if several_hosts and not _interface_of(identity, True):
            return (
                f"rank {rank} on {identity.hostname} would use {identity.interface or 'no interface'}, through which "
                f"no other node is reached; set {IFNAME} there to one of: {', '.join(identity.usable) or 'none is up'}"
            )
    return None


def _interface_of(identity: Identity, several_nodes: bool) -> str:
    """The interface a rank uses: what was chosen; where that is loopback nobody asked for, the only usable one."""
    if not several_nodes or identity.place is not None or (identity.interface and not identity.loopback):
        return identity.interface or "lo"
    return identity.usable[0] if len(identity.usable) == 1 and not identity.asked else ""


def _wire(
    identities: Sequence[Identity], topology: Topology, rank: int, backend: str
) -> tuple[WireCounter | None, str, int]:
    """The counter of this rank's bytes to other nodes, what it is (or why there is none), and who reports it."""
    own, node = identities[rank], topology.node[rank]
    if own.place is not None:
        return None, "the nodes are only declared: all bytes stay on this host's loopback", rank
    if topology.nodes == 1:
        return None, "all ranks are on one node: nothing crosses", rank
    if all(identity.in_box for identity in identities):
        counter = box_counter(own.interface)
        shared = [other for other, identity in enumerate(identities) if identity.namespace == own.namespace]
        return counter, counter.source, shared[0]
    if backend == "nccl":
        if not all(identity.ports for identity in identities):
            return None, "no InfiniBand port counters, and NCCL over sockets is not counted", rank
        counter = port_counter()
        return counter, counter.source, topology.ranks_of(node)[0]
    for peers in (topology.ranks_of(other) for other in range(topology.nodes)):
        if len({(identities[peer].namespace, identities[peer].interface) for peer in peers}) > 1:
            return None, "the ranks of a node use several interfaces, whose counters mix in-node traffic in", rank
    if any("," in identity.interface for identity in identities):
        return None, f"{IFNAME} names several interfaces", rank
    # Ranks of one namespace reach each other through its loopback, so the interface only carries what leaves the node.
    counter = interface_counter(own.interface)
    return counter, counter.source, topology.ranks_of(node)[0]


def _leave(store: TCPStore, key: str, expected: int, hosts_store: bool) -> None:
    """Say that this rank needs the store no longer; its host waits a while until ``expected`` ranks have said so."""
    deadline = time.monotonic() + _LINGER_S
    with suppress(RuntimeError):
        left = store.add(key, 1)
        while hosts_store and left < expected and time.monotonic() < deadline:
            time.sleep(0.02)
            left = store.add(key, 0)


def _number(keys: Sequence[object]) -> list[int]:
    """0, 1, ... in order of first appearance, equal for equal keys."""
    seen: dict[object, int] = {}
    return [seen.setdefault(key, len(seen)) for key in keys]


def _place(env: Mapping[str, str]) -> tuple[int, int] | None:
    text = env.get(PLACE_VARIABLE)
    if text is None:
        return None
    node, colon, nic = text.partition(":")
    if not colon or not node.isdigit() or not nic.isdigit():
        raise InputError(f"{PLACE_VARIABLE}={text!r} is not NODE:NIC, for example 1:2")
    return int(node), int(nic)


def _boot_id() -> str:
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""


def _gpu(local_rank: int) -> str | None:
    """Unique id of the GPU that a rank would use; None without one."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = 0 if count == 1 else local_rank
    if index >= count:
        return None
    return str(torch.cuda.get_device_properties(index).uuid)

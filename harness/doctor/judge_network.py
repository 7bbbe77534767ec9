"""Findings about the network: which interface gloo takes and why, names, NICs, RDMA ports, GPUDirect. Pure.

``network_findings(network, gpus, environment)``. What gloo takes follows the rules by which ranks join a world
(``interfaces.choose_interface``, ``world.join``); what NCCL takes follows its documentation.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from relaymeter.errors import InputError
from relaymeter.harness.doctor.facts import Gpus, NetworkFacts, Nic, Port
from relaymeter.harness.doctor.findings import Finding, State
from relaymeter.harness.interfaces import IFNAME, Interface, choose_interface
from relaymeter.units import format_rate

__all__ = ["nccl_matches", "network_findings"]

_NCCL_IFNAME, _HCA = "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"
#: From this kernel and CUDA on, RDMA reaches GPU memory by dma-buf, given the driver's open kernel modules.
_DMABUF_KERNEL, _DMABUF_CUDA = (5, 12), (11, 7)


def network_findings(network: NetworkFacts, gpus: Gpus, environment: Mapping[str, str]) -> list[Finding]:
    """Findings of the group network."""
    return [
        _gloo(network, environment),
        _host_name(network, environment),
        _nics(network),
        *_rdma(network.ports, gpus, environment),
        *_nccl(network, environment),
        *_gpudirect(network, gpus),
    ]


def nccl_matches(value: str, names: Sequence[str]) -> tuple[str, ...]:
    """Those of ``names`` that a value of NCCL_SOCKET_IFNAME or NCCL_IB_HCA takes: beginnings of names, ``=`` before
    them: whole names, ``^`` before them: all others. A port after a colon is left aside."""
    excluded, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    wanted = [entry.partition(":")[0] for entry in value.lstrip("^=").split(",") if entry]

    def hit(name: str) -> bool:
        return any(name == entry if exact else name.startswith(entry) for entry in wanted)

    return tuple(name for name in names if hit(name) != excluded)


def _rate(name: str, nics: Sequence[Nic]) -> float | None:
    return next((nic.bytes_per_s for nic in nics if nic.name == name), None)


def _shown(entry: Interface, nics: Sequence[Nic]) -> str:
    rate = _rate(entry.name, nics)
    inside = [*entry.addresses, *([format_rate(rate)] if rate else [])]
    return f"{entry.name} ({', '.join(inside)})"


def _gloo(network: NetworkFacts, environment: Mapping[str, str]) -> Finding:
    key, value = "network.gloo", environment.get(IFNAME)
    usable = [entry for entry in network.interfaces if entry.usable]
    values: dict[str, object] = {"set": value is not None, "usable": [entry.name for entry in usable]}
    exports = tuple(f"export {IFNAME}={entry.name}" for entry in usable)
    if value is not None:
        try:
            chosen = choose_interface(value, network.interfaces, "")
        except InputError as error:
            means = "ranks are refused before they meet; gloo by itself would fail or wait"
            return Finding(key, State.FAULT, str(error), means, exports or (f"unset {IFNAME}",), values)
        values["interfaces"] = [entry.name for entry in chosen]
        text = f"{', '.join(_shown(entry, network.nics) for entry in chosen)}: {IFNAME} names it"
        if any(entry.loopback for entry in chosen):
            means = "ranks of one host only: a world over several is refused"
            return Finding(key, State.WARNING if usable else State.NOTE, text, means, exports, values)
        return Finding(key, State.OK, text, values=values)
    joined = bool(environment.get("MASTER_ADDR"))
    why = "MASTER_ADDR is reached through it" if joined else f"the default route, as {IFNAME} is unset"
    taken = next((entry for entry in network.interfaces if entry.name == network.route), None)
    if taken is None or (taken.loopback and not usable):
        values["interfaces"] = [taken.name] if taken else []
        text = "loopback alone: no other interface is up and has an IPv4 address"
        means = "ranks of this host can meet; with other hosts they cannot"
        return Finding(key, State.NOTE, text, means, values=values)
    if taken.loopback and len(usable) == 1:
        values["interfaces"] = [usable[0].name]
        text = (
            f"{_shown(usable[0], network.nics)} with several hosts: MASTER_ADDR leads to loopback, no other is usable"
        )
        return Finding(key, State.NOTE, text, "on one host loopback is used", exports, values)
    values["interfaces"] = [taken.name]
    text = f"{_shown(taken, network.nics)}: {why}"
    if taken.loopback:
        means = "a world over several hosts is refused: say which interface reaches the others"
        return Finding(key, State.WARNING, text, means, exports, values)
    best = _best(network)
    if best is not None and best != taken:
        means = f"{_shown(best, network.nics)} is faster"
        return Finding(key, State.WARNING, text, means, (f"export {IFNAME}={best.name}  # on every node",), values)
    return Finding(key, State.OK, text, values=values)


def _best(network: NetworkFacts) -> Interface | None:
    """The interface to name: the one that the route takes, but one that states a higher rate is better."""
    usable = [entry for entry in network.interfaces if entry.usable]
    taken = next((entry for entry in usable if entry.name == network.route), None) or next(iter(usable), None)
    own = _rate(taken.name, network.nics) if taken else None
    if own is None:
        return taken
    return max([taken, *usable], key=lambda entry: (entry and _rate(entry.name, network.nics)) or 0.0)


def _host_name(network: NetworkFacts, environment: Mapping[str, str]) -> Finding:
    key, addresses = "network.host_name", network.host_addresses
    kind = "none" if not addresses else "other"
    own = {address for entry in network.interfaces for address in entry.addresses}
    if addresses:
        with suppress(ValueError):
            kind = "loopback" if any(ipaddress.ip_address(one).is_loopback for one in addresses) else kind
        kind = "own" if kind == "other" and set(addresses) & own else kind
    values = {"resolves_to": "no answer in time" if addresses is None else kind}
    if kind == "own":
        return Finding(key, State.OK, "resolves to an address of this host", values=values)
    best = _best(network)
    state = State.WARNING if best and IFNAME not in environment else State.NOTE
    mend = (
        *([f"export {IFNAME}={best.name}"] if best else []),
        "torchrun --master-addr ADDRESS --master-port PORT --node-rank N  # instead of --rdzv-endpoint",
    )
    if kind == "loopback":
        means = "gloo announces that address to other hosts where nobody names its interface; relaymeter does not"
        return Finding(key, state, "resolves to loopback", means, mend, values)
    if kind == "other":
        means = "other hosts may be told an address that leads elsewhere"
        return Finding(key, state, "resolves to an address that no interface here has", means, mend, values)
    text = "the resolver gave no answer in time" if addresses is None else "does not resolve"
    means = "torchrun's c10d rendezvous and gloo by itself look it up, and wait or fail"
    return Finding(key, state, text, means, mend, values)


def _nics(network: NetworkFacts) -> Finding:
    addressed = {entry.name for entry in network.interfaces if entry.usable}
    values = {
        "nics": [
            {"name": nic.name, "kind": nic.kind, "up": nic.up, "rate_bytes_per_s": nic.bytes_per_s,
             "numa_node": nic.numa, "addressed": nic.name in addressed}
            for nic in network.nics
        ]
    }  # fmt: skip
    if not network.nics:
        return Finding("network.nics", State.NOTE, "no NIC with a device behind it", values=values)
    text = ", ".join(
        f"{nic.name} ({nic.kind}, {format_rate(nic.bytes_per_s) if nic.bytes_per_s else 'states no rate'}"
        f"{'' if nic.up else ', down'}{'' if nic.name in addressed or not nic.up else ', no address'})"
        for nic in network.nics
    )
    return Finding("network.nics", State.OK, text, values=values)


def _rdma(ports: Sequence[Port], gpus: Gpus, environment: Mapping[str, str]) -> Iterator[Finding]:
    key = "network.rdma"
    active = [port for port in ports if port.active]
    rates = sorted({port.bytes_per_s for port in active if port.bytes_per_s})
    values = {
        "ports": [
            {"device": port.device, "port": port.port, "kind": port.kind, "active": port.active,
             "rate_bytes_per_s": port.bytes_per_s, "numa_node": port.numa}
            for port in ports
        ]
    }  # fmt: skip
    if not ports:
        means = "between nodes NCCL goes through sockets, and their bytes are not counted" if gpus.gpus else ""
        yield Finding(key, State.NOTE if gpus.gpus else State.OK, "no InfiniBand or RoCE device", means, values=values)
        return
    if not active:
        text = f"none of {len(ports)} is active"
        mend = ("ibstat", "docker run --device=/dev/infiniband ...  # where they are active outside")
        yield Finding(key, State.WARNING, text, "NCCL falls back to sockets", mend, values)
        return
    text = _port_text(active, len(ports))
    if environment.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        means = "NCCL_IB_DISABLE is set: between nodes NCCL goes through sockets"
        yield Finding(key, State.WARNING, text, means, ("unset NCCL_IB_DISABLE",), values)
        return
    chosen = environment.get(_HCA)
    names = [port.device for port in active]
    if chosen and not nccl_matches(chosen, names):
        means = f"{_HCA} names none of them: NCCL finds no device"
        mend = (f"export {_HCA}=={','.join(names)}", f"unset {_HCA}")
        yield Finding(key, State.FAULT, text, means, mend, values)
    elif len(rates) > 1 and not chosen:
        fast = [port.device for port in active if port.bytes_per_s == rates[-1]]
        means = "rates differ: the slow ones may be for storage, and NCCL would take them too"
        yield Finding(key, State.NOTE, text, means, (f"export {_HCA}=={','.join(fast)}",), values)
    else:
        yield Finding(key, State.OK, text, values=values)


def _port_text(active: Sequence[Port], total: int) -> str:
    groups: dict[tuple[str, float | None], list[str]] = {}
    for port in active:
        groups.setdefault((port.kind, port.bytes_per_s), []).append(f"{port.device}:{port.port}")
    parts = [
        f"{len(names)} x {kind}, {format_rate(rate) if rate else 'no rate stated'} ({', '.join(names)})"
        for (kind, rate), names in groups.items()
    ]
    return "; ".join(parts) + (f"; {total - len(active)} not active" if total > len(active) else "")


def _nccl(network: NetworkFacts, environment: Mapping[str, str]) -> Iterator[Finding]:
    value = environment.get(_NCCL_IFNAME)
    if value is None:
        return
    names = [entry.name for entry in network.interfaces if entry.usable or entry.loopback]
    taken = nccl_matches(value, names)
    values = {"interfaces": list(taken)}
    if taken:
        yield Finding("network.nccl", State.OK, f"{', '.join(taken)}: {_NCCL_IFNAME} takes it", values=values)
    else:
        means = "NCCL finds no interface to meet through, and fails when the first communicator is made"
        mend = (f"export {_NCCL_IFNAME}={','.join(entry.name for entry in network.interfaces if entry.usable)}",)
        yield Finding(
            "network.nccl", State.FAULT, f"{_NCCL_IFNAME} takes none of: {', '.join(names)}", means, mend, values
        )


def _gpudirect(network: NetworkFacts, gpus: Gpus) -> Iterator[Finding]:
    if not gpus.gpus or not any(port.active for port in network.ports):
        return
    cuda = gpus.cuda or (0, 0)
    dmabuf = gpus.open_driver and network.kernel >= _DMABUF_KERNEL and cuda >= _DMABUF_CUDA
    values = {"peer_memory_module": network.peer_memory, "dma_buf": dmabuf}
    if network.peer_memory or dmabuf:
        way = "nvidia_peermem is loaded" if network.peer_memory else "dma-buf (open kernel modules)"
        yield Finding("network.gpudirect", State.OK, way, values=values)
        return
    means = "what crosses nodes is copied through the memory of the host first: NICs reach less than their rate"
    mend = ("modprobe nvidia_peermem", "or install the driver with its open kernel modules: dma-buf needs no module")
    text = "neither nvidia_peermem nor dma-buf: RDMA does not reach GPU memory"
    yield Finding("network.gpudirect", State.WARNING, text, means, mend, values)

"""Invented machines for the tests of doctor: facts that no machine here has."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from relaymeter.harness.doctor.examine import findings_of
from relaymeter.harness.doctor.facts import Facts, Gpu, Gpus, HostFacts, Link, NetworkFacts, Nic, Pair, Port, Software
from relaymeter.harness.doctor.findings import Finding
from relaymeter.harness.interfaces import Interface

ETH0 = Interface("eth0", ("192.0.2.2",), up=True, loopback=False)
IB0 = Interface("ib0", ("192.0.2.130",), up=True, loopback=False)
LO = Interface("lo", ("127.0.0.1",), up=True, loopback=True)
SOFTWARE = Software(
    python="3.12.1", relaymeter="0.1.0", torch="2.11.0", torch_cuda="12.8", nccl="2.28.9", triton="3.6.0",
    deepspeed="0.19.8", transformers="5.17.0",
)  # fmt: skip
PORTS = tuple(Port(device=f"mlx5_{index}", bytes_per_s=50e9, numa=index // 4) for index in range(8))
NETWORK = NetworkFacts(
    interfaces=(ETH0, LO), nics=(Nic(name="eth0", bytes_per_s=12.5e9),), ports=PORTS,
    host_addresses=("192.0.2.2",), route="eth0", peer_memory=True, kernel=(5, 15),
)  # fmt: skip
HOST = HostFacts(
    memory_bytes=2 * 10**12, cores=96, shm_bytes=10**12, shm_free_bytes=10**12, open_files=1 << 20,
    numa_nodes=(0, 1), numa_here=(0, 1),
)  # fmt: skip


def links(joined: set[Pair] | None, count: int = 8) -> dict[Pair, Link]:
    """Links of ``count`` GPUs of which NVLink joins the pairs given, by default all; the others meet at NODE."""
    pairs = combinations(range(count), 2)
    return {pair: "NVLink" if joined is None or pair in joined else "NODE" for pair in pairs}


def gpu(index: int, **changes: Any) -> Gpu:
    plain = Gpu(
        index=index, name="NVIDIA H200", uuid=f"GPU-{index:08x}-aaaa", memory_bytes=150 * 10**9, used_bytes=5 * 10**8,
        mig=False, ecc=True, corrected_errors=0, uncorrected_errors=0, nvlinks=18, numa=index // 4,
    )  # fmt: skip
    return replace(plain, **changes)


def machine(count: int = 8, joined: set[Pair] | None = None, odd: dict[int, dict[str, Any]] | None = None) -> Gpus:
    """GPUs as NVML would tell them; ``odd``: what is different, by number."""
    found = tuple(gpu(index, **(odd or {}).get(index, {})) for index in range(count))
    return Gpus(
        source="NVML", nvml_installed=True, driver="580.159.04", open_driver=True, cuda=(13, 0), gpus=found,
        links=links(joined, count),
    )  # fmt: skip


GOOD = Facts(environment={}, software=SOFTWARE, gpus=machine(), network=NETWORK, host=HOST)


def found(facts: Facts = GOOD, **changes: Any) -> dict[str, Finding]:
    """Findings by key of ``facts`` with some changed; of several with one key the last."""
    return {finding.key: finding for finding in findings_of(replace(facts, **changes))}


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from synthetic import Cluster

from relaymeter.calibration import hints as hints_module
from relaymeter.calibration.calibrate import build_profile, calibrate_cluster
from relaymeter.calibration.cells import Cell
from relaymeter.calibration.devices import active_links
from relaymeter.calibration.hints import RankHints, hint_warnings, rank_hints
from relaymeter.calibration.probes import Prober
from relaymeter.calibration.profiles import Profile, from_json
from relaymeter.calibration.recorder import Settings
from relaymeter.relayout.topology import Topology

GRID = Topology.grid(2, 4)
SHORT = dataclasses.replace(Settings.short(), replicates=2, pairs=40)
#: A NIC of the invented cluster, in bytes per second.
NIC = 48e6
ONE = RankHints(
    host="h", machine="m", numa=(0, 1), interface="eth0", interface_bytes_per_s=None, ports_bytes_per_s=(), gpu=None,
    gpu_name=None, gpu_numa=None, nvlinks=None, nvlink_peers=(), pxn=None, environment={},
)  # fmt: skip


@pytest.fixture(scope="module")
def profile() -> Profile:
    facts = {"backend": "nccl", "cluster": None}
    return calibrate_cluster(Cluster(GRID).instruments(), GRID, settings=SHORT, fingerprint=facts)


def _ranks(**changes: Any) -> list[RankHints]:
    """Eight ranks on two hosts; a change that is a list has one value for each rank."""
    ranks = []
    for rank in range(8):
        own = {name: value[rank] if isinstance(value, list) else value for name, value in changes.items()}
        ranks.append(dataclasses.replace(ONE, **{"host": f"h{rank // 4}", "machine": f"m{rank // 4}", **own}))
    return ranks


GPUS = [f"g{rank}" for rank in range(8)]
ALL = [tuple(GPUS[rank // 4 * 4 : rank // 4 * 4 + 4]) for rank in range(8)]
SAID: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "nothing known": ({}, ()),
    "as many ports as NICs, at their rate": ({"ports_bytes_per_s": (NIC,) * 4}, ()),
    "fewer ports than NICs": (
        {"ports_bytes_per_s": (NIC,) * 2}, ("node 0 has 2 active ports, but its ranks were measured to have 4 NICs",),
    ),
    "more ports than ranks": ({"ports_bytes_per_s": (NIC,) * 8}, ()),
    "a port that states a third": (
        {"ports_bytes_per_s": (NIC / 3,) * 4}, ("the NICs of ranks 0, 1, 2, 3, 4, 5, 6, 7 carry up to 4",),
    ),
    "a port that states five times as much": (
        {"ports_bytes_per_s": [(5 * NIC,) * 4] * 4 + [(NIC,) * 4] * 4},
        ("the NICs of ranks 0, 1, 2, 3 carry only 47", "fell back to another"),
    ),
    "an interface, where sockets are not what is used": ({"interface_bytes_per_s": 5 * NIC}, ()),
    "a setting of one rank": (
        {"environment": [{}] * 5 + [{"NCCL_PXN_DISABLE": "1"}] + [{}] * 2},
        ("NCCL_PXN_DISABLE is unset on rank 0, 1 on rank 5: set it alike on all ranks",),
    ),
    "a setting of all ranks": ({"environment": {"NCCL_PXN_DISABLE": "1"}}, ()),
    "all GPUs joined": ({"gpu": GPUS, "nvlinks": 18, "nvlink_peers": ALL}, ()),
    "a GPU with links missing": (
        {"gpu": GPUS, "nvlinks": [18] * 6 + [16] * 2, "nvlink_peers": ALL},
        ("the GPU of ranks 6, 7 has 16 active NVLinks, others 18",),
    ),
    "some GPUs joined, all pairs alike": (
        {"gpu": GPUS, "nvlinks": 4, "nvlink_peers": [("g1",), ("g0",), ("g3",), ("g2",)] * 2}, (),
    ),
    "NUMA nodes, all pairs alike": ({"numa": [(0,), (0,), (1,), (1,)] * 2}, ()),
    "nodes of one machine": ({"machine": "m"}, ()),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID)
def test_hints_are_held_against_the_measurement(profile: Profile, case: str) -> None:
    changes, texts = SAID[case]
    found = hint_warnings(_ranks(**changes), profile)
    assert len(found) == bool(texts), found
    assert all(text in found[0] for text in texts) and all(line.startswith("hints: ") for line in found)


def test_no_hints_confirm_nothing(profile: Profile) -> None:
    assert hint_warnings([], profile) == [] and profile.hints == ()


def _rated(profile: Profile, rate: Callable[[int, int], float]) -> Profile:
    """The profile with lone flows of every pair, at ``rate(src, dst)`` bytes per second."""
    cells = [
        Cell("pair", "send-recv", ((src, dst, 1 << 20),), ((1 << 20) / rate(src, dst),) * 3)
        for src in range(8)
        for dst in range(8)
        if src != dst
    ]
    return dataclasses.replace(profile, cells=tuple(cells))


def test_pairs_that_hints_call_close_but_measured_far_are_named(profile: Profile) -> None:
    def rate(src: int, dst: int) -> float:
        return NIC if src // 4 != dst // 4 else 1e9 if src // 2 == dst // 2 else 3e9

    odd = _rated(profile, rate)
    peers = [("g1",), ("g0",), ("g3",), ("g2",)]
    ranks = _ranks(gpu=[f"g{rank % 4}" for rank in range(8)], nvlinks=4, nvlink_peers=peers * 2)
    (text,) = hint_warnings(ranks, odd)
    assert "NVLink joins ranks" in text and "reach 1000 MB/s and the other pairs of the node 3 GB/s" in text
    (text,) = hint_warnings(_ranks(numa=[(0,), (0,), (1,), (1,)] * 2), odd)
    assert "one NUMA node holds ranks" in text
    assert hint_warnings(_ranks(gpu_numa=[0, 1, 0, 1] * 2), odd) == []  # these are the fast pairs
    assert hint_warnings(_ranks(gpu_numa=[0, 0, 1, 1] * 2), odd)
    alike = _rated(profile, lambda src, dst: max(rate(src, dst), 2.6e9 if src // 4 == dst // 4 else 0.0))
    assert hint_warnings(_ranks(numa=[(0,), (0,), (1,), (1,)] * 2), alike) == []  # within what one class spans


def test_nodes_of_one_machine_without_a_network_between_them_are_told(profile: Profile) -> None:
    fast = _rated(profile, lambda src, dst: 1e9)
    (text,) = hint_warnings(_ranks(machine="m"), fast)
    assert "nodes of one machine exchange 1000 MB/s, inside nodes 1000 MB/s" in text
    assert hint_warnings(_ranks(), fast) == []
    box = dataclasses.replace(fast, fingerprint={**fast.fingerprint, "cluster": {"nodes": 2}})
    assert hint_warnings(_ranks(machine="m"), box) == []  # a box is known to be one machine


def test_ranks_that_share_fewer_nics_than_there_are_ports_are_told() -> None:
    shared = Topology.grid(2, 4, "node")
    facts = {"backend": "nccl", "cluster": None}
    profile = calibrate_cluster(Cluster(shared).instruments(), GRID, settings=SHORT, fingerprint=facts)
    assert profile.topology == shared
    (text,) = hint_warnings(_ranks(ports_bytes_per_s=(NIC,) * 4), profile)
    assert "node 0 has 4 active ports for 4 ranks, which were measured to share 1" in text
    gloo = dataclasses.replace(profile, fingerprint={"backend": "gloo"})
    assert hint_warnings(_ranks(ports_bytes_per_s=(NIC,) * 4), gloo) == []
    (text,) = hint_warnings(_ranks(interface_bytes_per_s=1.25e9), gloo)
    assert "the NICs of ranks 0, 4 carry only 4" in text and "of the 1.25 GB/s" in text


def test_hints_are_kept_in_the_profile_and_disagreement_is_a_warning() -> None:
    findings = Prober(Cluster(GRID).instruments(), GRID, SHORT).run(("send-recv",))
    ranks = _ranks(environment=[{"NCCL_ALGO": "Ring"}] + [{}] * 7)
    profile = build_profile(findings, ("send-recv",), SHORT, {}, {}, quick=True, hints=ranks)
    assert sum("NCCL_ALGO is Ring on rank 0, unset on ranks 1" in text for text in profile.warnings) == 1
    again = from_json(profile.to_dict(), "p.json")
    assert [RankHints.from_dict(entry) for entry in again.hints] == ranks


def _write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_rank_reads_numa_ports_and_interfaces_from_the_system(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    _write(tmp_path, "devices/system/node/node0/cpulist", "1000-1003\n")
    _write(tmp_path, "devices/system/node/node1/cpulist", f"990,{core}-{core + 3}\n")
    for port, state, rate in (("a", "4: ACTIVE", "400 Gb/sec (4X NDR)"), ("b", "3: ARMED", "100 Gb/sec"),
                              ("c", "4: ACTIVE", "2.5 Gb/sec (1X SDR)"), ("d", "4: ACTIVE", "unknown")):  # fmt: skip
        _write(tmp_path, f"class/infiniband/mlx5_{port}/ports/1/state", state)
        _write(tmp_path, f"class/infiniband/mlx5_{port}/ports/1/rate", rate)
    _write(tmp_path, "class/net/card0/device/vendor", "0x15b3")
    _write(tmp_path, "class/net/card0/speed", "100000\n")
    _write(tmp_path, "class/net/veth0/speed", "10000\n")
    env = {"GLOO_SOCKET_IFNAME": "card0", "NCCL_SOCKET_IFNAME": "veth0", "NCCL_PXN_DISABLE": "1", "GLOO_X": "1"}
    found = rank_hints("cpu", "gloo", env, tmp_path)
    assert found.numa == (1,)
    assert found.ports_bytes_per_s == (50e9, 2.5e9 / 8)
    assert (found.interface, found.interface_bytes_per_s) == ("card0", 12.5e9)
    assert found.pxn is None and found.gpu is None and found.environment == {"GLOO_X": "1", "NCCL_PXN_DISABLE": "1"}
    other = rank_hints("cpu", "nccl", env, tmp_path)
    assert (other.interface, other.interface_bytes_per_s, other.pxn) == ("veth0", None, False)
    assert rank_hints("cpu", "nccl", {}, tmp_path).pxn is True
    assert RankHints.from_dict({**found.to_dict(), "numa": [1]}) == found


def test_a_rank_says_nothing_that_it_cannot_find_out_and_names_no_host(tmp_path: Path) -> None:
    found = rank_hints("cpu", "gloo", {}, tmp_path)
    assert (found.numa, found.interface, found.ports_bytes_per_s) == ((), "", ())
    assert os.uname().nodename not in str(found.to_dict()) and len(found.host) == len(found.machine) == 12
    assert rank_hints("cpu", "gloo", {}).numa or not Path("/sys/devices/system/node").is_dir()


def test_nvlinks_are_counted_and_their_ends_named() -> None:
    class NVMLError(Exception):
        pass

    def state(handle: str, link: int) -> int:
        if link > 3:
            raise NVMLError
        return int(link != 1)

    nvml = SimpleNamespace(
        NVMLError=NVMLError, NVML_NVLINK_MAX_LINKS=18, NVML_FEATURE_ENABLED=1, NVML_P2P_CAPS_INDEX_NVLINK=2,
        NVML_P2P_STATUS_OK=0, nvmlDeviceGetNvLinkState=state, nvmlDeviceGetCount=lambda: 4,
        nvmlDeviceGetHandleByIndex=lambda index: f"GPU-{index}", nvmlDeviceGetUUID=lambda handle: handle.encode(),
        nvmlDeviceGetP2PStatus=lambda one, two, what: 0 if two in ("GPU-0", "GPU-2") else 5,
    )  # fmt: skip
    assert active_links(nvml, "GPU-0") == 3
    assert list(hints_module._nvlink_peers(nvml, "GPU-0", "GPU-0")) == [hints_module._hash("GPU-2")]

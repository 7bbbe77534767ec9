"""doctor on invented networks and hosts: gloo's interface, names, RDMA ports, GPUDirect, limits, NUMA."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doctor_machines import ETH0, HOST, IB0, LO, NETWORK, PORTS, found, machine, write

from relaymeter.harness.doctor.facts import Gpus, Nic, Port
from relaymeter.harness.doctor.findings import Finding, State
from relaymeter.harness.doctor.judge_network import nccl_matches
from relaymeter.harness.doctor.probe_host import group_limit, read_host
from relaymeter.harness.doctor.probe_network import read_network, read_nics, read_ports
from relaymeter.harness.interfaces import Interface

NAME = "GLOO_SOCKET_IFNAME"
MASTER = {"MASTER_ADDR": "198.51.100.1"}


def gloo(environment: dict[str, str] | None = None, **changes: Any) -> Finding:
    return found(environment=environment or {}, network=replace(NETWORK, **changes))["network.gloo"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("^lo,docker0", "excludes interfaces"),
        ("192.0.2.2", "holds an address where the name of an interface is expected"),
        ("eth7", "names no interface"),
    ],
)
def test_a_bad_interface_is_a_fault_with_the_usable_ones(value: str, text: str) -> None:
    finding = gloo({NAME: value})
    assert finding.state is State.FAULT and text in finding.text and "eth0 (192.0.2.2)" in finding.text
    assert finding.mend == (f"export {NAME}=eth0",)


def test_an_interface_that_is_named_is_taken_and_loopback_is_for_one_host() -> None:
    assert gloo({NAME: "eth0"}).text == f"eth0 (192.0.2.2, 12.5 GB/s): {NAME} names it"
    assert gloo({NAME: "lo"}).state is State.WARNING
    assert gloo({NAME: "lo"}, interfaces=(LO,)).state is State.NOTE


def test_without_a_name_the_way_to_the_master_decides() -> None:
    plain = gloo()
    assert plain.state is State.OK and "the default route" in plain.text and plain.values["interfaces"] == ["eth0"]
    assert "MASTER_ADDR is reached through it" in gloo(MASTER).text
    alone = gloo(interfaces=(LO,), route=None)
    assert alone.state is State.NOTE and alone.values["usable"] == []
    assert gloo(MASTER, interfaces=(LO,), route="lo").state is State.NOTE


def test_a_master_on_loopback_takes_the_only_other_interface_or_is_refused() -> None:
    one = gloo(MASTER, route="lo")
    assert one.state is State.NOTE and one.values["interfaces"] == ["eth0"]
    two = gloo(MASTER, interfaces=(ETH0, IB0, LO), route="lo")
    assert two.state is State.WARNING and "refused" in two.means
    assert two.mend == (f"export {NAME}=eth0", f"export {NAME}=ib0")


def test_a_faster_interface_beside_the_one_that_is_taken_is_named() -> None:
    nics = (Nic(name="eth0", bytes_per_s=1.25e8), Nic(name="ib0", kind="ipoib", bytes_per_s=25e9))
    finding = gloo(interfaces=(ETH0, IB0, LO), nics=nics)
    assert finding.state is State.WARNING and finding.mend == (f"export {NAME}=ib0  # on every node",)
    assert gloo({NAME: "eth0"}, interfaces=(ETH0, IB0, LO), nics=nics).state is State.OK
    silent = (Nic(name="eth0"), nics[1])  # what a virtual machine's NIC carries is not known: no advice
    assert gloo(interfaces=(ETH0, IB0, LO), nics=silent).state is State.OK
    both = replace(NETWORK, interfaces=(ETH0, IB0, LO), nics=nics, host_addresses=("127.0.0.1",))
    assert found(network=both)["network.host_name"].mend[0] == f"export {NAME}=ib0"


@pytest.mark.parametrize(
    ("addresses", "state", "kind"),
    [
        (("192.0.2.2",), State.OK, "own"),
        (("127.0.0.1",), State.WARNING, "loopback"),
        (("127.0.1.1", "192.0.2.2"), State.WARNING, "loopback"),
        (("203.0.113.9",), State.WARNING, "other"),
        ((), State.WARNING, "none"),
        (None, State.WARNING, "no answer in time"),
    ],
)
def test_a_host_name_that_leads_to_loopback_or_nowhere_is_said(
    addresses: tuple[str, ...] | None, state: State, kind: str
) -> None:
    network = replace(NETWORK, host_addresses=addresses)
    finding = found(network=network)["network.host_name"]
    assert (finding.state, finding.values["resolves_to"]) == (state, kind)
    if state is State.WARNING:
        assert finding.mend[0] == f"export {NAME}=eth0"
        assert found(network=network, environment={NAME: "eth0"})["network.host_name"].state is State.NOTE
        assert found(network=replace(network, interfaces=(LO,)))["network.host_name"].state is State.NOTE


def rdma(environment: dict[str, str] | None = None, **changes: Any) -> Finding:
    return found(environment=environment or {}, network=replace(NETWORK, **changes))["network.rdma"]


def test_ports_are_shown_with_kind_and_rate() -> None:
    assert rdma().text.startswith("8 x InfiniBand, 50 GB/s (mlx5_0:1, mlx5_1:1,")
    assert rdma(ports=(replace(PORTS[0], kind="RoCE"), replace(PORTS[1], active=False))).text == (
        "1 x RoCE, 50 GB/s (mlx5_0:1); 1 not active"
    )
    down = rdma(ports=(replace(PORTS[0], active=False),))
    assert down.state is State.WARNING and down.text == "none of 1 is active"
    assert rdma(ports=()).state is State.NOTE
    assert found(gpus=Gpus(), network=replace(NETWORK, ports=()))["network.rdma"].state is State.OK


def test_settings_that_leave_ports_aside_are_said() -> None:
    assert rdma({"NCCL_IB_DISABLE": "1"}).mend == ("unset NCCL_IB_DISABLE",)
    assert rdma({"NCCL_IB_DISABLE": "0"}).state is State.OK
    assert rdma({"NCCL_IB_HCA": "bnxt"}).state is State.FAULT
    assert rdma({"NCCL_IB_HCA": "=mlx5_0:1"}).state is State.OK
    uneven = rdma(ports=(*PORTS[:2], Port(device="mlx5_9", bytes_per_s=12.5e9)))
    assert uneven.state is State.NOTE and uneven.mend == ("export NCCL_IB_HCA==mlx5_0,mlx5_1",)


def test_nccls_lists_of_names_are_read_as_it_reads_them() -> None:
    names = ("eth0", "eth10", "ib0", "lo")
    assert nccl_matches("eth", names) == ("eth0", "eth10")
    assert nccl_matches("=eth1", names) == () and nccl_matches("=eth0,ib0", names) == ("eth0", "ib0")
    assert nccl_matches("^lo,eth1", names) == ("eth0", "ib0") and nccl_matches("^=eth0", names)[0] == "eth10"
    assert found(environment={"NCCL_SOCKET_IFNAME": "eth"})["network.nccl"].state is State.OK
    bad = found(environment={"NCCL_SOCKET_IFNAME": "bond"})["network.nccl"]
    assert bad.state is State.FAULT and bad.mend == ("export NCCL_SOCKET_IFNAME=eth0",)


def test_gpudirect_takes_the_module_or_dma_buf() -> None:
    without = replace(NETWORK, peer_memory=False)
    assert found()["network.gpudirect"].text == "nvidia_peermem is loaded"
    assert found(network=without)["network.gpudirect"].text.startswith("dma-buf")
    for gpus, network in (
        (replace(machine(), open_driver=False), without),
        (machine(), replace(without, kernel=(5, 4))),
        (replace(machine(), cuda=None), without),
    ):
        finding = found(gpus=gpus, network=network)["network.gpudirect"]
        assert finding.state is State.WARNING and finding.mend[0] == "modprobe nvidia_peermem"


LIMITS: dict[str, tuple[dict[str, Any], str, State]] = {
    "docker's shared memory": ({"shm_bytes": 2**26, "shm_free_bytes": 2**26}, "memory.shm", State.WARNING),
    "shared memory that is full": ({"shm_free_bytes": 2**20}, "memory.shm", State.WARNING),
    "no shared memory": ({"shm_bytes": None}, "memory.shm", State.WARNING),
    "locked memory": ({"locked_bytes": 65536}, "memory.locked", State.WARNING),
    "few files": ({"open_files": 1024}, "memory.open_files", State.NOTE),
    "too few files": ({"open_files": 256}, "memory.open_files", State.WARNING),
    "one core": ({"cores": 1}, "memory.host", State.NOTE),
    "a control group": ({"limit_bytes": 2**34}, "memory.host", State.OK),
    "balancing": ({"numa_balancing": True}, "memory.numa", State.NOTE),
}


@pytest.mark.parametrize("case", sorted(LIMITS))
def test_a_limit_is_said_with_what_lifts_it(case: str) -> None:
    changes, key, state = LIMITS[case]
    finding = found(host=replace(HOST, **changes))[key]
    assert finding.state is state
    assert (state is State.WARNING) <= bool(finding.mend)
    assert found()[key].state is State.OK


def test_limits_matter_where_there_is_what_they_limit() -> None:
    host = replace(HOST, locked_bytes=65536)
    assert found(host=host, network=replace(NETWORK, ports=()))["memory.locked"].state is State.OK
    assert found(host=replace(HOST, numa_nodes=(0,)))["memory.numa"].text == "one node"


def test_gpus_far_from_every_port_are_named() -> None:
    finding = found(network=replace(NETWORK, ports=PORTS[:4]))["memory.numa"]
    assert finding.state is State.NOTE and "GPUs 4, 5, 6, 7" in finding.means
    assert found()["memory.numa"].text == "2 nodes; GPUs 0, 1, 2, 3 on node 0; GPUs 4, 5, 6, 7 on node 1"


def test_nics_and_ports_are_read_from_the_systems_files(tmp_path: Path) -> None:
    net, fabric = "sys/class/net", "sys/class/infiniband"
    write(
        tmp_path,
        {
            f"{net}/nic7/device/numa_node": "1\n", f"{net}/nic7/speed": "25000\n", f"{net}/nic7/operstate": "up\n",
            f"{net}/nic8/device/numa_node": "-1\n", f"{net}/nic8/speed": "-1\n", f"{net}/nic8/operstate": "down\n",
            f"{net}/nic8/type": "32\n", f"{net}/veth7/speed": "10000\n",
            f"{fabric}/mlx5_0/device/numa_node": "1\n", f"{fabric}/mlx5_0/ports/1/link_layer": "Ethernet\n",
            f"{fabric}/mlx5_0/ports/1/state": "4: ACTIVE\n", f"{fabric}/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
            f"{fabric}/mlx5_1/ports/2/link_layer": "InfiniBand\n", f"{fabric}/mlx5_1/ports/2/state": "1: DOWN\n",
            "sys/module/nvidia_peermem/version": "580\n",
        },
    )  # fmt: skip
    assert read_nics(tmp_path) == (
        Nic(name="nic7", bytes_per_s=25e9 / 8, numa=1), Nic(name="nic8", kind="ipoib", up=False),
    )  # fmt: skip
    assert read_ports(tmp_path) == (
        Port(device="mlx5_0", kind="RoCE", bytes_per_s=50e9, numa=1), Port(device="mlx5_1", port=2, active=False),
    )  # fmt: skip
    network = read_network({}, tmp_path)
    assert network.peer_memory and network.kernel > (3, 0) and any(one.loopback for one in network.interfaces)
    assert not read_network(MASTER, tmp_path / "none").peer_memory


def test_memory_and_numa_are_read_from_the_systems_files(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "sys/fs/cgroup/memory.max": "max\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "1073741824\n",
            "sys/devices/system/node/node0/cpulist": "0-4095\n",
            "sys/devices/system/node/node1/cpulist": "4096-8191\n",
            "sys/devices/system/node/node2/cpulist": "\n",
            "proc/sys/kernel/numa_balancing": "1\n",
        },
    )
    host = read_host(tmp_path)
    assert host.limit_bytes == group_limit(tmp_path) == 2**30
    assert (host.numa_nodes, host.numa_here, host.numa_balancing, host.shm_bytes) == ((0, 1), (0,), True, None)
    assert group_limit(tmp_path / "none") is None
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert read_host(tmp_path).shm_bytes


def test_an_interface_without_an_address_is_not_offered() -> None:
    silent = Interface("eth3", (), up=True, loopback=False)
    assert gloo({NAME: "eth7"}, interfaces=(ETH0, silent, LO)).mend == (f"export {NAME}=eth0",)

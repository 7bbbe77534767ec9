"""What ranks see of themselves becomes a topology, an interface and a counter: the pure parts, without ranks."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from relaymeter.errors import InputError, RankLost
from relaymeter.harness.counters import active_ports, interface_counter, port_counter
from relaymeter.harness.interfaces import Interface, choose_interface
from relaymeter.harness.world import Identity, join, topology_of

HERE = (
    Interface("eth0", ("192.0.2.2",), up=True, loopback=False),
    Interface("eth1", (), up=False, loopback=False),
    Interface("lo", ("127.0.0.1",), up=True, loopback=True),
)


def identity(host: str, namespace: int = 1, **changes: object) -> Identity:
    plain = Identity(host, "boot", namespace, "eth0", True, False, ("eth0",), False, 0, None, None)
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_nodes_are_numbered_by_their_lowest_rank() -> None:
    topology = topology_of([identity(host) for host in ("b", "a", "b", "a")])
    assert topology.node == (0, 1, 0, 1)
    assert topology.nic == (0, 1, 0, 1)


def test_equal_host_names_of_two_machines_are_two_nodes() -> None:
    assert topology_of([identity("a"), identity("a", boot_id="other")]).nodes == 2


def test_a_namespace_of_its_own_is_a_nic_of_its_own() -> None:
    ranks = [identity("a", 1), identity("a", 2), identity("b", 3), identity("b", 3)]
    assert topology_of(ranks).nic == (0, 1, 2, 2)


def test_declared_nics_and_places_outrank_what_is_seen_outside_a_box() -> None:
    assert topology_of([identity("a")] * 2, nic_per="rank").nic == (0, 1)
    assert topology_of([identity("a", 1), identity("a", 2)], nic_per="node").nic == (0, 0)
    assert topology_of([identity("a", in_box=True)] * 2, nic_per="rank").nic == (0, 0)
    declared = [identity("a", place=place) for place in ((0, 0), (0, 0), (1, 1))]
    assert (topology_of(declared).node, topology_of(declared).nic) == ((0, 0, 1), (0, 0, 1))
    with pytest.raises(InputError, match=r"ranks \[1\] have no RELAYMETER_PLACE"):
        topology_of([identity("a", place=(0, 0)), identity("a")])


def test_with_nccl_a_port_for_each_rank_is_a_nic_for_each_rank() -> None:
    assert topology_of([identity("a", ports=2)] * 2, "nccl").nic == (0, 1)
    assert topology_of([identity("a", ports=1)] * 2, "nccl").nic == (0, 0)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("^lo,docker0", "excludes interfaces"),
        ("192.0.2.2", "holds an address"),
        ("eth7", "names no interface"),
        ("eth1", "is down or has no IPv4 address"),
        ("eth0,eth7", "names no interface"),
        ("", "names no interface"),
    ],
)
def test_a_bad_interface_is_refused_with_the_good_ones(value: str, text: str) -> None:
    with pytest.raises(InputError, match=text) as refused:
        choose_interface(value, HERE, "127.0.0.1")
    assert "eth0 (192.0.2.2), lo (127.0.0.1)" in str(refused.value)


def test_an_interface_is_taken_by_name_or_by_the_way_to_the_master() -> None:
    assert [entry.name for entry in choose_interface("eth0,lo", HERE, "127.0.0.1")] == ["eth0", "lo"]
    assert [entry.name for entry in choose_interface(None, HERE, "127.0.0.1")] == ["lo"]


@pytest.mark.parametrize(
    ("value", "text"),
    [("gpu", "RELAYMETER_DEVICE='gpu' is not one of: auto, cpu, cuda"), ("cuda", "sees no CUDA device: unset it")],
)
def test_a_device_that_is_not_there_is_refused(value: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    world = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    for name, said in {**world, "RELAYMETER_DEVICE": value}.items():
        monkeypatch.setenv(name, str(said))
    with pytest.raises(InputError, match=text):
        join(5.0)


@pytest.mark.parametrize("names", [(), ("RANK", "WORLD_SIZE")])
def test_join_without_a_world_says_what_is_missing(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name in names:
        monkeypatch.setenv(name, str(names.index(name)))
    with pytest.raises(InputError, match="MASTER_ADDR" if names else "no RANK and WORLD_SIZE"):
        join(1.0)


@pytest.mark.parametrize(("rank", "lost"), [(0, (1,)), (1, (0,))])
def test_who_does_not_come_to_the_meeting_is_named(
    rank: int, lost: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    world = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in world.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(RankLost) as missed:
        join(1.0)
    assert missed.value.ranks == lost


def test_port_counters_are_summed_in_bytes(tmp_path: Path) -> None:
    for device, state, words in (("mlx5_0", "4: ACTIVE", 10), ("mlx5_1", "4: ACTIVE", 5), ("mlx5_2", "1: DOWN", 99)):
        port = tmp_path / device / "ports" / "1"
        (port / "counters").mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port / "counters" / "port_xmit_data").write_text(f"{words}\n")
    ports = active_ports(tmp_path)
    assert len(ports) == 2
    assert port_counter(ports).read() == 60
    with pytest.raises(InputError, match="no active InfiniBand port"):
        port_counter(())


def test_the_interface_counter_reads_bytes_sent(tmp_path: Path) -> None:
    table = tmp_path / "dev"
    table.write_text(
        "Inter-|\n face |\n    lo: 1 2 0 0 0 0 0 0 3 4 0 0 0 0 0 0\n  eth0:9 2 0 0 0 0 0 0 77 4 0 0 0 0 0 0\n"
    )
    assert interface_counter("eth0", table).read() == 77
    with pytest.raises(InputError, match="no interface eth9"):
        interface_counter("eth9", table)

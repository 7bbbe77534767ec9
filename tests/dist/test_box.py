"""The cluster in a box on the real kernel: what it makes, what it lets through, what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relaymeter.harness.box import Box, BoxSpec, BoxUnavailable, in_namespace, payload_rate
from relaymeter.harness.counters import box_counter
from relaymeter.harness.launch import ClusterSpec, LaunchResult, launch

pytestmark = pytest.mark.box

RATE = 50e6  # 400 Mbit/s
NAMESPACES = Path("/var/run/netns")
RANK = """
import json, os, pathlib, socket, sys
import torch, torch.distributed as dist
from relaymeter.errors import RelaymeterError
from relaymeter.harness.world import join
rank = int(os.environ["RANK"])
try:
    world = join(20.0)
except RelaymeterError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
sent = 4 << 20
before = world.wire_bytes()
dist.barrier()
if sys.argv[2] == "cross":
    data = torch.zeros(sent, dtype=torch.uint8)
    if rank == 0:
        dist.send(data, 2)
    elif rank == 2:
        dist.recv(data, 0)
dist.barrier()
after = world.wire_bytes()
answer = dict(topology=world.topology.to_dict(), host=socket.gethostname(), declared=world.declared,
              source=world.wire_source, wire=None if after is None else after - before, sent=sent)
pathlib.Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(answer))
world.close()
"""


def traces() -> tuple[set[str], set[str]]:
    """Network namespaces of this process or of a dead one (others may be at work), and interfaces outside of them."""
    names = os.listdir(NAMESPACES) if NAMESPACES.exists() else []
    owners = {name: name.split("-")[2] for name in names if name.startswith("relaymeter-") and name.count("-") == 5}
    ours = {name for name, pid in owners.items() if pid == str(os.getpid()) or not os.path.exists(f"/proc/{pid}")}
    return ours, {name for _, name in socket.if_nameindex()}


@pytest.fixture
def nothing_left() -> Iterator[None]:
    before = traces()
    yield
    after = traces()
    assert not after[0] - before[0]
    assert after[1] == before[1]


def transfer(box: Box, pairs: list[tuple[int, int]], size: int) -> float:
    """Bytes per second of each of the TCP flows ``pairs`` (source rank, target rank), all at once, by the last."""
    ends = []
    for source, target in pairs:
        there = box.places[target]
        server = in_namespace(there.namespace, lambda at=there: socket.create_server((at.address, 0)))
        with server:
            address = server.getsockname()
            sender = in_namespace(box.places[source].namespace, lambda to=address: socket.create_connection(to))
            ends.append((sender, server.accept()[0]))
    block = bytes(1 << 20)

    def receive(receiver: socket.socket) -> None:
        while receiver.recv(1 << 20):
            pass

    def send(sender: socket.socket) -> None:
        for start in range(0, size, len(block)):
            sender.sendall(block[: size - start])
        sender.shutdown(socket.SHUT_WR)

    work = [threading.Thread(target=receive, args=(receiver,)) for _, receiver in ends]
    work += [threading.Thread(target=send, args=(sender,)) for sender, _ in ends]
    began = time.monotonic()
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    seconds = time.monotonic() - began
    for pair in ends:
        for end in pair:
            end.close()
    return size / seconds


def sent_to_other_nodes(box: Box, rank: int) -> int:
    place = box.places[rank]
    return in_namespace(place.namespace, lambda: box_counter(place.interface).read())


def closest(rates: list[float], expected: float) -> float:
    """The run least disturbed by what else this machine does."""
    return min(rates, key=lambda rate: abs(rate - expected))


@pytest.mark.usefixtures("nothing_left")
def test_each_rank_has_a_nic_of_its_rate_and_a_fast_way_inside_its_node() -> None:
    with Box(BoxSpec(nodes=2, ranks_per_node=2, rate_bytes_per_s=RATE)) as box:
        assert [(place.node, place.hostname) for place in box.places] == [
            (rank // 2, f"box-node{rank // 2}") for rank in range(4)
        ]
        assert all(len(place.interface) < 16 for place in box.places)
        before = sent_to_other_nodes(box, 0)
        across = [transfer(box, [(0, 2)], 4 << 20) for _ in range(3)]
        counted = sent_to_other_nodes(box, 0) - before
        both = closest([transfer(box, [(0, 2), (1, 3)], 4 << 20) for _ in range(3)], payload_rate(RATE))
        inside = max(transfer(box, [(0, 1)], 16 << 20) for _ in range(2))
        idle = sent_to_other_nodes(box, 0)
        transfer(box, [(0, 1)], 4 << 20)
        assert sent_to_other_nodes(box, 0) == idle
    assert closest(across, payload_rate(RATE)) == pytest.approx(payload_rate(RATE), rel=0.1)
    assert both == pytest.approx(payload_rate(RATE), rel=0.1)
    assert inside > 5 * payload_rate(RATE)
    assert counted == pytest.approx(3 * (4 << 20), rel=0.08)
    assert counted >= 3 * (4 << 20)


@pytest.mark.usefixtures("nothing_left")
def test_the_ingress_of_a_nic_is_shaped_too() -> None:
    with Box(BoxSpec(nodes=3, ranks_per_node=1, rate_bytes_per_s=RATE)) as box:
        rates = [transfer(box, [(0, 2), (1, 2)], 2 << 20) for _ in range(3)]
    assert closest(rates, payload_rate(RATE) / 2) == pytest.approx(payload_rate(RATE) / 2, rel=0.1)


@pytest.mark.usefixtures("nothing_left")
def test_ranks_of_a_node_share_its_nic() -> None:
    with Box(BoxSpec(nodes=2, ranks_per_node=2, nic_per="node", rate_bytes_per_s=RATE)) as box:
        assert [place.namespace for place in box.places[:2]] == [box.places[0].namespace] * 2
        before = sent_to_other_nodes(box, 0)
        rates = [transfer(box, [(0, 2), (1, 3)], 2 << 20) for _ in range(3)]
        assert sent_to_other_nodes(box, 1) - before == pytest.approx(6 * (2 << 20), rel=0.08)
        assert max(transfer(box, [(0, 1)], 16 << 20) for _ in range(2)) > 5 * payload_rate(RATE)
    assert closest(rates, payload_rate(RATE) / 2) == pytest.approx(payload_rate(RATE) / 2, rel=0.1)


@pytest.mark.usefixtures("nothing_left")
def test_an_unshaped_box_counts_but_does_not_throttle() -> None:
    with Box(BoxSpec(nodes=2, ranks_per_node=2)) as box:
        before = sent_to_other_nodes(box, 0)
        across = max(transfer(box, [(0, 2)], 64 << 20) for _ in range(3))
        counted = sent_to_other_nodes(box, 0) - before
        inside = max(transfer(box, [(0, 1)], 64 << 20) for _ in range(3))
    assert counted == pytest.approx(3 * (64 << 20), rel=0.08)
    assert across > inside / 3


@pytest.mark.usefixtures("nothing_left")
def test_two_boxes_live_side_by_side() -> None:
    with (
        Box(BoxSpec(nodes=2, ranks_per_node=1, rate_bytes_per_s=RATE)) as first,
        Box(BoxSpec(nodes=2, ranks_per_node=1, rate_bytes_per_s=RATE / 2)) as second,
    ):
        assert not {place.namespace for place in first.places} & {place.namespace for place in second.places}
        rates = [(transfer(first, [(0, 1)], 2 << 20), transfer(second, [(0, 1)], 1 << 20)) for _ in range(3)]
    assert closest([rate for rate, _ in rates], payload_rate(RATE)) == pytest.approx(payload_rate(RATE), rel=0.1)
    assert closest([rate for _, rate in rates], payload_rate(RATE) / 2) == pytest.approx(
        payload_rate(RATE) / 2, rel=0.1
    )


@pytest.mark.usefixtures("nothing_left")
def test_an_exception_inside_or_a_set_up_cut_short_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError), Box(BoxSpec(nodes=2, ranks_per_node=1)):
        raise KeyError("inside")

    def refuse(*_: object) -> None:
        raise PermissionError(1, "no shaping today")

    monkeypatch.setattr("relaymeter.harness.box._shape", refuse)
    with (
        pytest.raises(BoxUnavailable, match="no permission to shape with HTB"),
        Box(BoxSpec(nodes=2, ranks_per_node=1)),
    ):
        pass


HOLDER = (
    "import sys, time; from relaymeter.harness.box import Box, BoxSpec\n"
    "with Box(BoxSpec(nodes=2, ranks_per_node=2)) as box:\n"
    "    print(box.name, flush=True); time.sleep(60)\n"
)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
@pytest.mark.usefixtures("nothing_left")
def test_a_signal_to_the_owner_tears_the_box_down(number: int, code: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as owner:
        assert owner.stdout is not None
        name = owner.stdout.readline().strip()
        assert any(entry.startswith(name) for entry in os.listdir(NAMESPACES))
        owner.send_signal(number)
        assert owner.wait(20) == code


@pytest.mark.usefixtures("nothing_left")
def test_the_leftovers_of_a_killed_owner_go_at_the_next_set_up_and_nothing_else_does() -> None:
    foreign = NAMESPACES / "relaymeter-of-somebody"
    command = [sys.executable, "-c", HOLDER]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as dead,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as living,
    ):
        assert dead.stdout is not None
        assert living.stdout is not None
        left, kept = dead.stdout.readline().strip(), living.stdout.readline().strip()
        foreign.touch()
        try:
            dead.kill()
            dead.wait(20)
            assert any(entry.startswith(left) for entry in os.listdir(NAMESPACES))
            with Box(BoxSpec(nodes=1, ranks_per_node=1)):
                names = os.listdir(NAMESPACES)
            assert not any(entry.startswith(left) for entry in names)
            assert sum(entry.startswith(kept) for entry in names) == 5
            assert foreign.name in names
        finally:
            foreign.unlink()
            living.terminate()
            living.wait(20)


def test_without_root_the_reason_says_so() -> None:
    program = (
        "import os, pyroute2\nfrom relaymeter.harness.box import capability\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534); print(capability())"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert answer.stdout.startswith("not root: user id 65534 may not")


def ranks(tmp_path: Path, cluster: ClusterSpec, action: str = "none", **env: str) -> LaunchResult:
    (tmp_path / "standin.py").write_text(RANK)
    return launch(
        [str(tmp_path), action],
        cluster,
        time_limit_s=40.0,
        log_dir=tmp_path / "logs",
        module="standin",
        env={"PYTHONPATH": str(tmp_path), **env},
    )


@pytest.mark.dist
@pytest.mark.parametrize(("nic_per", "nics"), [("rank", [0, 1, 2, 3]), ("node", [0, 0, 1, 1])])
@pytest.mark.usefixtures("nothing_left")
def test_ranks_discover_nodes_and_nics_and_count_what_crosses(nic_per: str, nics: list[int], tmp_path: Path) -> None:
    cluster = ClusterSpec(nodes=2, ranks_per_node=2, nic_per=nic_per, nic_rate_bytes_per_s=RATE)  # type: ignore[arg-type]
    result = ranks(tmp_path, cluster, "cross")
    assert result.exit_code == 0, result.report()
    assert result.in_box
    answers = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert [answer["host"] for answer in answers] == ["box-node0", "box-node0", "box-node1", "box-node1"]
    for answer in answers:
        assert answer["topology"] == {"node": [0, 0, 1, 1], "nic": nics}
        assert not answer["declared"]
        assert "HTB class" in answer["source"]
    assert answers[0]["wire"] == pytest.approx(answers[0]["sent"], rel=0.08)
    assert sum(answer["wire"] for answer in answers) == pytest.approx(answers[0]["sent"], rel=0.08)
    assert socket.gethostname() != "box-node0"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("value", "text"),
    [("lo", "no other node is reached; set GLOO_SOCKET_IFNAME there to one of: nic"), ("^lo,docker0", "excludes")],
)
@pytest.mark.usefixtures("nothing_left")
def test_two_nodes_refuse_an_interface_that_does_not_join_them(value: str, text: str, tmp_path: Path) -> None:
    result = ranks(tmp_path, ClusterSpec(nodes=2, ranks_per_node=1), GLOO_SOCKET_IFNAME=value)
    assert result.exit_code == 2
    assert [end.code for end in result.ranks] == [2, 2]  # both at once, neither waits for a time limit
    assert text in result.report()


@pytest.mark.dist
@pytest.mark.usefixtures("nothing_left")
def test_on_plain_loopback_the_nodes_are_declared_and_nothing_is_counted(tmp_path: Path) -> None:
    result = ranks(tmp_path, ClusterSpec(nodes=2, ranks_per_node=1, shape=False))
    assert result.exit_code == 0, result.report()
    answer = json.loads((tmp_path / "1.json").read_text())
    assert (answer["topology"], answer["declared"]) == ({"node": [0, 1], "nic": [0, 1]}, True)
    assert answer["wire"] is None

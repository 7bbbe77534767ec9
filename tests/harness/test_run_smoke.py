"""The whole job on ``smoke``: calibrate, choose, run; with one wrong bit, clean, with a killed and with a frozen rank.

The ranks run in a cluster in a box where the machine can make one, else on loopback; only byte counts need the box.
Most commands and ranks are forked from a warm process (``nursery``); the clean run, the killed rank and what torchrun
starts are new interpreters throughout.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nursery
import psutil
import pytest

from relaymeter.harness.box import capability
from relaymeter.records import MoveRecord, load_json, read_records

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

_RUN = ("run", "--profile", "profile.json", "--scenario", "smoke", "--bucket-bytes", "128KiB")


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a quick profile of two nodes of two ranks, one NIC of 400 Mbit/s each."""
    folder = tmp_path_factory.mktemp("desk")
    done = call(folder, "calibrate", "--quick", "--budget", "4", "--nic", "400mbit", "--out", "profile.json")
    assert done.returncode == 0, done.stderr
    assert "profile: profile.json" in done.stdout
    return folder


def call(
    folder: Path, *arguments: str, limit_s: float = 200.0, warm: bool = True, stdout: int | None = None
) -> subprocess.CompletedProcess[str]:
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    env = {**os.environ, "TMPDIR": str(logs)}
    if warm:
        return nursery.command(arguments, folder, env, limit_s, stdout=stdout)
    return subprocess.run(
        [sys.executable, "-m", "relaymeter", *arguments],
        cwd=folder, env=env, capture_output=True, text=True, timeout=limit_s, check=False,
    )  # fmt: skip


def test_choose_prices_every_route_and_prints_thresholds(desk: Path) -> None:
    done = call(desk, "choose", "--profile", "profile.json", "--scenario", "smoke", "--json", "choose.json")
    assert done.returncode == 0, done.stderr
    assert "min_relay(2 ranks per node) = " in done.stdout
    assert "min_split(2 ranks per node) = " in done.stdout
    (_, tp1) = load_json(desk / "choose.json", "choice")["moves"]
    assert [row["route"] for row in tp1["candidates"]] == ["direct", "relay", "spread", "chosen"]
    assert all(row["predicted_s"] > 0 for row in tp1["candidates"])


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (("--nic", "200mbit"), "a NIC per rank, 400 Mbit/s, here 2 x 2 ranks, a NIC per rank, 200 Mbit/s"),
        (("--ranks-per-node", "3"), "profile 2 x 2 ranks, a NIC per rank, 400 Mbit/s, here 2 x 3 ranks"),
        (("--fault", "kill:4"), "rank 4 of 4 ranks"),
    ],
)
@pytest.mark.box
def test_run_refuses_a_cluster_that_the_profile_was_not_made_on(
    desk: Path, asked: tuple[str, ...], expected: str
) -> None:
    done = call(desk, *_RUN, "--move", "tp1", *asked, "--json", "refused.jsonl")
    assert done.returncode == 2
    assert expected in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (desk / "refused.jsonl").exists()


@pytest.mark.box
def test_a_check_on_slower_nics_says_which_cells_drifted(desk: Path) -> None:
    done = call(desk, "calibrate", "--check", "profile.json", "--nic", "200mbit", "--json", "check.json")
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stdout.startswith("drift: ") and "calibrate again" in done.stdout
    assert "cluster.nic_rate_bytes_per_s: profile 50000000.0, here 25000000.0" in done.stdout
    found = load_json(desk / "check.json", "check")
    large = [cell for cell in found["cells"] if cell["name"].startswith("across nodes") and cell["bytes"] >= 1 << 20]
    assert large and all(cell["name"] in found["drifted"] and 0.6 < cell["drift"] < 1.5 for cell in large)
    assert found["profile"]["sha256"] == load_json(desk / "profile.json", "profile")["sha256"]


def test_calibrate_joins_the_world_of_torchrun_and_rank_0_speaks(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "relaymeter", "calibrate"]
    done = subprocess.run(
        [*command, "--quick", "--budget", "1", "--executor", "send-recv", "--out", "joined.json"],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("profile: joined.json") == 1
    profile = load_json(tmp_path / "joined.json", "profile")
    assert profile["topology"] == {"node": [0, 0], "nic": [0, 0]}
    assert profile["fingerprint"]["cluster"] is None


def test_one_flipped_bit_is_caught_with_tensor_and_range(desk: Path) -> None:
    done = call(desk, *_RUN, "--move", "tp1", "--repeats", "1", "--fault", "flip:2", "--json", "flipped.jsonl")
    assert done.returncode == 6, done.stdout + done.stderr
    first = done.stdout.splitlines()[0]
    assert first.startswith("WRONG BITS in tp1 by ")
    assert "elements [" in first and ".weight" in first
    bad = [row for row in read_records(desk / "flipped.jsonl") if not row.ok]
    assert len(bad) == 1 and bad[0].mismatch is not None


def test_a_flip_on_a_rank_that_receives_nothing_is_no_success(tmp_path: Path) -> None:
    arguments = ("--move", "tp1", "--repeats", "1", "--fault", "flip:0")
    done = call(tmp_path, "run", "--scenario", "smoke", *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "rank 0 received nothing late in move tp1, so no bit was flipped: name a rank that receives" in done.stderr
    assert "every bit arrived" not in done.stdout


def test_wrong_bits_are_told_also_when_nobody_reads_the_table(desk: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    arguments = (*_RUN, "--move", "tp1", "--repeats", "1", "--fault", "flip:2", "--json", "unread.jsonl")
    done = call(desk, *arguments, stdout=write)
    os.close(write)
    assert done.returncode == 6, done.stderr
    assert [row.verdict for row in read_records(desk / "unread.jsonl")].count("wrong bits") == 1


def test_the_next_run_moves_by_every_route_and_every_bit_arrives(desk: Path) -> None:
    done = call(
        desk, *_RUN, "--repeats", "2", "--json", "rows.jsonl", "--plot", "run.png", "--results", "kept", warm=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_records(desk / "rows.jsonl")
    assert [(row.move, row.route) for row in rows] == [
        (move, route) for move in ("tp2", "tp1") for route in ("direct", "relay", "spread", "chosen")
    ]
    for row in rows:
        assert row.ok and row.digest_passed == row.digest_total > 0
        assert len(row.samples_s) == 2 and all(len(sample) == 4 for sample in row.samples_s)
        assert row.measured_s is not None and row.predicted_s is not None and row.bound_s > 0
        assert row.measured_low_s is not None and row.measured_low_s <= row.measured_s
        assert (row.ranks, row.nodes) == (4, 2)
    _check_bytes({row.route: row for row in rows if row.move == "tp1"})
    assert "every bit arrived" in done.stdout
    assert (desk / "run.png").stat().st_size > 5000
    kept = [path.name for path in (desk / "kept").rglob("*") if path.is_file()]
    assert sorted(kept) == ["how.txt", "profile.json", "rows.jsonl", "run.png"]
    assert not list((desk / "logs").glob("relaymeter-*")), "a run that ended well leaves no logs"


def _check_bytes(rows: dict[str, MoveRecord]) -> None:
    direct, relay, spread = rows["direct"], rows["relay"], rows["spread"]
    assert direct.bytes_cross_node == 2 * relay.bytes_cross_node == 2 * spread.bytes_cross_node
    assert direct.bytes_total == relay.bytes_total == spread.bytes_total
    assert rows["chosen"].chosen
    if capability() is None:
        for row in (direct, relay, spread):
            assert row.wire_cross_node_bytes is not None
            assert abs(row.wire_cross_node_bytes / row.bytes_cross_node - 1) < 0.12


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_rank_that_dies_or_freezes_is_named_and_the_trainer_trains_on(desk: Path, fault: str) -> None:
    arguments = ("--move", "tp1", "--repeats", "1", "--fault", f"{fault}:3", "--json", f"{fault}.jsonl")
    done = call(desk, *_RUN, *arguments, warm=fault == "stop")
    assert done.returncode == 7, done.stdout + done.stderr
    for rank in (0, 1, 2):
        assert f"[rank {rank}] relaymeter: rank 3 no longer answers" in done.stderr
    for rank in (0, 1):
        assert f"[rank {rank}] source engine: state bit-equal to before the move" in done.stderr
        assert f"[rank {rank}] source engine: trained one more step" in done.stderr
    assert not (desk / f"{fault}.jsonl").exists()


def test_a_frozen_rank_that_hosts_the_store_holds_nobody_back(desk: Path) -> None:
    arguments = ("--move", "tp1", "--repeats", "1", "--fault", "stop:0", "--move-limit", "6")
    done = call(desk, *_RUN, *arguments, limit_s=120)
    assert done.returncode == 7, done.stdout + done.stderr
    assert done.stderr.count("relaymeter: rank 0 no longer answers") >= 2
    assert "source engine: state bit-equal to before the move" in done.stderr


def test_two_outputs_of_one_name_and_results_in_a_file_are_refused_before_any_rank_starts(desk: Path) -> None:
    (desk / "taken.txt").write_text("")
    for arguments, message in (
        (("--json", "same.png", "--plot", "same.png"), "--json and --plot both name same.png"),
        (("--results", "profile.json"), "--results profile.json would replace the file that --profile reads"),
        (("--results", "taken.txt"), "taken.txt is no folder that can be written"),
    ):
        done = call(desk, *_RUN, *arguments)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert message in done.stderr


def test_a_rank_that_freezes_during_calibration_is_named_by_the_others(tmp_path: Path) -> None:
    command = ("calibrate", "--quick", "--out", "never.json", "--nic", "400mbit", "--time-limit", "100")
    (tmp_path / "logs").mkdir()
    read, write = os.pipe()
    with open(os.devnull, "wb") as unread, open(read, encoding="utf-8") as told:
        env = {**os.environ, "TMPDIR": str(tmp_path / "logs")}
        running = nursery.of(0).start("relaymeter", command, tmp_path, env, [unread.fileno(), write])
        os.close(write)
        said = []
        for line in told:
            said.append(line)
            if "time against size" in line and said.count(line) == 1:
                ranks = psutil.Process(running.pid).children()
                assert len(ranks) == 4
                max(ranks, key=lambda rank: (rank.create_time(), rank.pid)).suspend()  # rank 3 is started last
        code = running.wait(10.0)
    text = "".join(said)
    assert code == 7, text
    assert "relaymeter: rank 3 no longer answers: the calibration stopped" in text
    assert not (tmp_path / "never.json").exists()

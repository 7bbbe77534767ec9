"""A command in worlds that others have made: DeepSpeed's launcher and Open MPI's mpirun start the ranks, for real."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from relaymeter.harness import cli

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]

SUITE = """
repeats = 2
warmups = 1
plan_repeats = 1
[world]
nodes = 1
ranks_per_node = 2
[[cases]]
name = "to-copies"
tensors = [{ shape = [64, 64], count = 2, cut = 0 }]
from = { kind = "zero3", nodes = "all" }
to = { kind = "replicas", nodes = "all", tensor_parallel = 2 }
"""
BIN = Path(sys.executable).parent


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def launchers() -> dict[str, list[str]]:
    deepspeed = [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", free_port(), "--module", "relaymeter"]
    # why: Open MPI refuses root, and more ranks than it sees cores
    mpirun = [str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, "-m"]
    return {"deepspeed": deepspeed, "mpirun": [*mpirun, "relaymeter"]}


@pytest.mark.parametrize("name", ["deepspeed", "mpirun"])
def test_a_command_joins_the_world_of_a_launcher_and_says_its_verdict_once(name: str, tmp_path: Path) -> None:
    command = launchers()[name]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{name} is not installed here: pip install 'relaymeter[test,deepspeed]'")
    (tmp_path / "tiny.toml").write_text(SUITE)
    known = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ended = subprocess.run(
        [*command, "track", "run", "--suite", "tiny.toml", "--history", "h.jsonl"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **known},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    said = ended.stdout + ended.stderr
    assert said.count("suite tiny: 1 launch of") == 1  # rank 0 alone prints
    (line,) = (tmp_path / "h.jsonl").read_text().splitlines()
    case = json.loads(line)["cases"][0]
    assert case["digest_passed"] == case["digest_total"] > 0


def test_what_the_launcher_of_deepspeed_puts_first_is_left_out_in_a_world_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        cli.main(["--local_rank=0", "plan", "--scenario", "smoke", "--topology", "1x2"])
    assert "unrecognized arguments: --local_rank=0" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as ended:
        cli.main(["--local_rank=0", "--version"])
    assert ended.value.code == 0

"""What a command writes: no file that it reads, nothing half-done, and every failure with the name of the file."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from pathlib import Path

import pytest
from test_records import ROW

from relaymeter.errors import InputError
from relaymeter.harness import results
from relaymeter.harness.commands_ranks import check_targets, write_all
from relaymeter.harness.jobs import RunStamp
from relaymeter.harness.plots import plot_rows
from relaymeter.harness.results import command_line, keep_results, named_files

STAMP = RunStamp(utc="2026-01-02T03:04:05Z", launch_id="1", machine_id="abc", commit="1234", mismatch=(), shaped=False)


@pytest.mark.parametrize("name", ["p.json", "x/../p.json", "link.json", "x/up/p.json"])
@pytest.mark.parametrize("option", ["profile", "check", "plan"])
def test_no_output_replaces_what_is_read_whatever_leads_there(
    option: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x").mkdir()
    Path("p.json").write_text("{}")
    Path("link.json").symlink_to("p.json")
    Path("x/up").symlink_to("..")
    for targets in ({"json": name, option: Path("p.json")}, {"json": Path("p.json"), option: name}):
        with pytest.raises(InputError, match=rf"--json .* would replace the file that --{option} reads"):
            check_targets(**targets)
    with pytest.raises(InputError, match=f"--json and --plot both name {name}"):
        check_targets(json="p.json", plot=name)
    check_targets(json="q.json", plot=None, results="-", **{option: Path("p.json")})


def test_a_shipped_name_is_no_file_and_two_options_may_read_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_targets(json="smoke", scenario="smoke", simulate="h100-2x8", profile="p.json", plan="p.json")
    with pytest.raises(InputError, match=r"--json smoke\.toml would replace the file that --scenario reads"):
        check_targets(json="smoke.toml", scenario="smoke.toml")


def test_a_file_that_was_not_written_is_named_where_the_error_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert write_all(argparse.Namespace(plot=Path("run.png")), {"plot": full}) == 2
    assert capsys.readouterr().err == "relaymeter: --plot was not written: No space left on device: run.png\n"


def test_a_plot_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    def full(figure: Figure, path: Path, **_: object) -> None:
        Path(path).write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(InputError, match=r"cannot write .*run\.png: No space left on device"):
        plot_rows([ROW], tmp_path / "run.png")
    assert not list(tmp_path.iterdir())


def test_results_are_kept_whole_with_what_else_is_written_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["relaymeter", "run", "--json", "\udce9.json"])
    folder = keep_results(tmp_path / "kept", [ROW], STAMP, "smoke", {}, more=lambda path: (path / "more").touch())
    assert folder == tmp_path / "kept" / "abc" / "20260102T030405Z_1234_run-smoke"
    assert {path.name for path in folder.iterdir()} == {"rows.jsonl", "how.txt", "more"}
    assert "\\udce9.json" in (folder / "how.txt").read_text(encoding="utf-8")
    names = [keep_results(tmp_path / "kept", [ROW], STAMP, "smoke", {}).name for _ in range(2)]  # of the same second
    assert names == [f"{folder.name}-2", f"{folder.name}-3"]
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name, *names]


def test_files_that_a_command_names_are_kept_with_its_results(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("# mine\n")
    files = named_files(scenario=str(tmp_path / "mine.toml"), suite=None, simulate="h100-2x8")
    assert files == {"scenario.toml": "# mine\n"}
    (tmp_path / "mine.toml").write_text("# changed meanwhile\n")
    folder = keep_results(tmp_path / "kept", [ROW], STAMP, "mine", {}, files=files)
    assert (folder / "scenario.toml").read_text() == "# mine\n"


@pytest.mark.parametrize(
    ("environment", "start"),
    [
        ({}, "relaymeter"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1",
             "TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "secret"},
            "torchrun --nnodes 1 --nproc-per-node 2 -m relaymeter",
        ),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"},
            "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m relaymeter",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_SIZE": "2", "CROSS_SIZE": "2"},
            "deepspeed --num_nodes 2 --num_gpus 2 --module relaymeter",
        ),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "env RANK=K WORLD_SIZE=4 python -m relaymeter"),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2"},
            "srun --nodes 2 --ntasks 4 python -m relaymeter",
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "mpirun -n 4 --map-by ppr:2:node python -m relaymeter",
        ),
    ],
)  # fmt: skip
def test_the_command_is_told_with_what_made_its_world(environment: dict[str, str], start: str) -> None:
    assert command_line(["run", "--scenario", "a b.toml"], environment) == f"{start} run --scenario 'a b.toml'"


@pytest.mark.parametrize("step", ["text", "more"])
def test_results_that_cannot_be_kept_leave_nothing(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: object) -> None:
        if step == "text":
            raise InputError(f"cannot write {path}: No space left on device: choose another place")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    if step == "text":
        monkeypatch.setattr(results, "write_text", full)
    with pytest.raises(InputError, match=r"cannot write .*_run-smoke.*: No space left on device: choose another place"):
        keep_results(tmp_path / "kept", [ROW], STAMP, "smoke", {}, more=full)
    assert not list(tmp_path.iterdir())

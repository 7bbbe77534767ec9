"""The benchmarks: verdicts on figures, the command line, and that the parts without ranks run. No timing is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import nursery
import pytest

from relaymeter.harness import bench, bench_scale
from relaymeter.harness.bench_report import Figure, Found, PartFailed, Say, missed, report_dict
from relaymeter.relayout.planner import plan_move
from relaymeter.relayout.schedule import build_schedule
from relaymeter.relayout.topology import Topology


def figure(value: float | None, bar: float | None, at_least: bool = False) -> Figure:
    return Figure(part="p", name="n", value=value, unit="ratio", bar=bar, at_least=at_least)


@pytest.mark.parametrize(
    ("value", "bar", "at_least", "is_missed"),
    [
        (1.1, 1.1, False, False),
        (1.11, 1.1, False, True),
        (10.0, 10.0, True, False),
        (9.99, 10.0, True, True),
        (None, 1.0, False, True),
        (float("nan"), 1.0, True, True),
        (None, None, False, False),
        (99.0, None, False, False),
    ],
)
def test_a_bar_is_missed_on_its_wrong_side_and_where_nothing_was_measured(
    value: float | None, bar: float | None, at_least: bool, is_missed: bool
) -> None:
    found = figure(value, bar, at_least)
    assert found.missed is is_missed
    assert len(missed([found])) == is_missed


def test_a_missed_bar_is_named_with_its_value_and_target() -> None:
    assert missed([figure(8.125, 10.0, True)]) == ["p: n: 8.125, target >= 10"]
    seconds = Figure(part="planning", name="TP8", value=0.25, unit="s", bar=0.2)
    assert missed([seconds]) == ["planning: TP8: 250 ms, target <= 200 ms"]


def test_the_report_holds_every_figure_with_its_verdict() -> None:
    document = report_dict([figure(2.0, 1.0), figure(1.0, None)], {"utc": "now"})
    assert document["utc"] == "now"
    assert [(row["value"], row["missed"]) for row in document["figures"]] == [(2.0, True), (1.0, False)]


def run_with(monkeypatch: pytest.MonkeyPatch, part: Any) -> int:
    monkeypatch.setattr(bench, "PARTS", {"made": ("a part made for this test", part)})
    return bench.main([])


def test_a_missed_bar_gives_exit_code_3_and_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(say: Say, tiny: bool) -> Found:
        say("at work")
        return [figure(2.0, 1.0), figure(0.5, 1.0)], []

    assert run_with(monkeypatch, part) == 3
    printed = capsys.readouterr()
    assert "missed: p: n: 2, target <= 1\n" in printed.out
    assert printed.out.count("missed:") == 1
    assert "[1/1 made]" in printed.err
    assert "at work" in printed.err


def test_met_bars_give_exit_code_0(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with(monkeypatch, lambda say, tiny: ([figure(0.5, 1.0)], [])) == 0
    assert "1 figure, 1 bar, 0 missed" in capsys.readouterr().out


@pytest.mark.parametrize(("code", "exit_code"), [(6, 6), (124, 3), (1, 3)])
def test_ranks_that_fail_are_a_missed_bar_unless_bits_were_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int, exit_code: int
) -> None:
    def part(say: Say, tiny: bool) -> Found:
        raise PartFailed(f"the ranks ended with {code}", code)

    assert run_with(monkeypatch, part) == exit_code
    assert f"missed: made: the ranks ended with {code}" in capsys.readouterr().out


def test_help_names_the_parts_and_gives_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert all(f"\n  {name} " in printed for name in bench.PARTS)
    assert "python -m relaymeter.harness.bench --only planning" in printed


def test_bad_arguments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["--only", "speed"])
    assert ended.value.code == 2
    assert "planning" in capsys.readouterr().err
    (tmp_path / "have.json").write_text("{}")
    assert bench.main(["--only", "planning", "--json", str(tmp_path / "have.json")]) == 2
    assert "have.json exists" in capsys.readouterr().err
    assert (tmp_path / "have.json").read_text() == "{}"


def start_warm(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return nursery.command(arguments, folder, os.environ, 100.0, module="relaymeter.harness.bench")


@pytest.mark.dist
def test_planning_runs_on_a_small_model_beside_its_peer(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    ended = start_warm(tmp_path, "--only", "planning", "--tiny", "--json", "found.json")
    assert ended.returncode == 0, ended.stderr
    assert "plan_transfer" in ended.stdout
    document = json.loads((tmp_path / "found.json").read_text())
    assert document["parts"] == ["planning"]
    names = [row["name"] for row in document["figures"]]
    for move in ("ZeRO-3 x4 -> x2", "TP4 -> TP2", "ZeRO-3 x4 -> TP2 x 2", "ZeRO-3 x8 -> TP8"):
        assert any(name.startswith(f"{move}, ") for name in names)
    assert all(row["value"] > 0 and not row["missed"] for row in document["figures"])


def test_json_on_standard_output_is_alone_there() -> None:
    pytest.importorskip("deepspeed")
    command = [sys.executable, "-m", "relaymeter.harness.bench", "--only", "planning", "--tiny", "--json", "-"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["parts"] == ["planning"]
    assert "plan_transfer" in ended.stderr


def test_a_report_that_cannot_be_written_leaves_the_verdict_on_wrong_bits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def part(say: Any, tiny: bool) -> Any:
        (tmp_path / "found.json").mkdir()
        raise PartFailed("wrong bits", 6)

    monkeypatch.setitem(bench.PARTS, "planning", ("", part))
    assert bench.main(["--only", "planning", "--json", str(tmp_path / "found.json")]) == 6
    printed = capsys.readouterr()
    assert "missed: planning: wrong bits" in printed.out
    assert "found.json is a folder" in printed.err


@pytest.mark.parametrize("rank", [0, 9, 16, 31])
def test_a_rank_of_the_scale_benchmark_plans_exactly_its_own_segments(
    rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_scale.main(["32", str(rank), "--tiny"]) == 0
    found = json.loads(capsys.readouterr().out)
    topology = Topology.grid(4, 8)
    plan = plan_move(*bench_scale.expert_layouts(bench_scale.TINY, 32), topology)
    every = build_schedule(plan, topology, np.zeros(int(plan.group_start[-1]), dtype=np.int8))
    segments = every.segments_for(rank)
    assert found["segments"] == len(segments) > 0
    assert found["tensors"] == len(plan.tensors)
    assert found["peak_bytes"] >= found["imported_bytes"] > 0


@pytest.mark.dist
def test_moves_run_beside_their_peers_with_every_bit_checked_and_memory_as_predicted(tmp_path: Path) -> None:
    ended = start_warm(tmp_path, "--only", "local", "--only", "memory", "--tiny", "--json", "found.json")
    assert ended.returncode == 0, ended.stderr
    rows = json.loads((tmp_path / "found.json").read_text())["figures"]
    local = [row["name"] for row in rows if row["part"] == "local"]
    for executor in ("send-recv", "all-to-all"):
        for peer in ("against gather each", "against gather 8 MiB", "over one even exchange"):
            assert f"ZeRO-3 x4 -> TP4, {executor}, {peer}" in local
            assert f"ZeRO-3 x4 -> TP4, turned, {executor}, {peer}" in local
    memory = [row for row in rows if row["part"] == "memory"]
    assert len(memory) == 2 * 3 * 2 + 2  # moves, routes and executors; bounded memory by both executors
    for row in memory:
        if not row["name"].startswith("bounded"):
            assert row["samples"]["buffer_bytes"] == row["samples"]["predicted_bytes"]
            assert row["value"] <= 1.0

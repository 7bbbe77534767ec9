"""``--simulate``: calibrate, choose and run without a rank; all of it says that it is simulated."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from relaymeter.calibration.profiles import load as load_profile
from relaymeter.errors import InputError
from relaymeter.harness.cli import main
from relaymeter.harness.simulated import load_preset
from relaymeter.harness.simulated_profile import check_profile
from relaymeter.records import MoveRecord, read_records


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of box-node-nic, which the command has written."""
    path = tmp_path_factory.mktemp("simulated") / "profile.json"
    assert (
        main(["calibrate", "--simulate", "box-node-nic", "--quick", "--executor", "send-recv", "--out", str(path)]) == 0
    )
    return path


def _run(profile: Path, *more: str) -> int:
    return main(["run", "--simulate", "box-node-nic", "--profile", str(profile), "--scenario", "smoke", *more])


def test_a_simulated_profile_says_so_and_has_found_the_shared_nics(profile: Path) -> None:
    found = load_profile(profile)
    assert found.simulated == "box-node-nic" and found.machine_id.startswith("simulated-box-node-nic-")
    assert found.topology == load_preset("box-node-nic").topology and found.quick
    assert list(found.executors) == ["send-recv"]


def test_a_run_is_timed_and_every_row_line_and_plot_says_simulated(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows_path, plot = tmp_path / "rows.jsonl", tmp_path / "run.svg"
    assert _run(profile, "--json", str(rows_path), "--plot", str(plot), "--results", str(tmp_path / "results")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("simulated: box-node-nic, ") and "no bit is checked" in lines[0]
    assert any("(simulated: box-node-nic)" in line for line in lines[1:])
    assert not any("every bit arrived" in line for line in lines)
    assert not any("applicable" in line for line in lines)
    assert "simulated" in plot.read_text(encoding="utf-8") or plot.stat().st_size > 10_000  # its text may be outlines
    rows = read_records(rows_path)
    assert {row.simulated for row in rows} == {"box-node-nic"} and {row.verdict for row in rows} == {"simulated"}
    assert all(row.ok and row.digest_total == 0 and row.measured_s and row.predicted_s for row in rows)
    assert {row.nodes for row in rows} == {2} and len(rows[0].samples_s) == 5
    kept = next((tmp_path / "results").glob("simulated-box-node-nic-*/*_run-smoke"))
    assert {path.name for path in kept.iterdir()} == {"rows.jsonl", "how.txt", "profile.json", "run.png"}


def test_the_chosen_route_costs_no_more_than_the_best_uniform_one_and_prices_hold(
    profile: Path, tmp_path: Path
) -> None:
    """Known truth: the cluster's own times of all candidates, direct twice as slow as relay over a shared NIC."""
    path = tmp_path / "rows.jsonl"
    assert _run(profile, "--repeats", "9", "--bucket-bytes", "64KiB", "--json", str(path)) == 0
    by_move: dict[str, dict[str, MoveRecord]] = {}
    for row in read_records(path):
        by_move.setdefault(row.move, {})[row.route] = row
    for rows in by_move.values():
        times = {route: row.measured_s or 0.0 for route, row in rows.items()}
        best = min(taken for route, taken in times.items() if route != "chosen")
        assert times["chosen"] <= 1.05 * best, times
        for row in rows.values():
            assert abs(row.error or 0.0) < 0.25, (row.route, row.error)
    both = by_move["tp1"]
    assert 1.5 < (both["direct"].measured_s or 0.0) / (both["relay"].measured_s or 1.0) < 2.1


def test_choose_takes_a_simulated_profile_or_calibrates_the_preset_first(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "choice.json"
    assert main(["choose", "--profile", str(profile), "--scenario", "smoke", "--json", str(document)]) == 0
    assert capsys.readouterr().out.startswith("simulated (box-node-nic): ")
    assert json.loads(document.read_text(encoding="utf-8"))["simulated"] == "box-node-nic"
    (tmp_path / "one.toml").write_text('like = "box-node-nic"\nnodes = 3\n', encoding="utf-8")
    assert main(["choose", "--simulate", str(tmp_path / "one.toml"), "--scenario", "smoke", "--move", "tp1"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("simulated (one): ") and "on 3 nodes x 2 ranks, 3 NICs" in said


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "--scenario", "smoke"], "simulated cluster box-node-nic, whose rates no real rank has"),
        (["run", "--simulate", "box-rank-nics", "--scenario", "smoke"], "not of the simulated cluster box-rank-nics"),
        (["run", "--simulate", "box-node-nic", "--scenario", "smoke", "--nodes", "2"], "--nodes is about real ranks"),
        (["run", "--simulate", "box-node-nic", "--scenario", "smoke", "--nic", "none"], "--nic is about real ranks"),
        (["run", "--simulate", "box-node-nic", "--scenario", "smoke", "--max-extra", "1MiB"], "--max-extra is about"),
        (["run", "--simulate", "box-node-nic", "--scenario", "smoke", "--move-limit", "5"], "--move-limit is about"),
    ],
)
def test_what_does_not_fit_a_simulated_cluster_is_refused(
    arguments: list[str], told: str, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--profile", str(profile)]) == 2
    assert told in capsys.readouterr().err


def test_training_states_are_not_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--simulate", "box-node-nic", "--suite", "state-matrix"]) == 2
    assert "--simulate does not apply to scenario state-matrix" in capsys.readouterr().err


def test_a_profile_of_the_cluster_as_it_was_is_refused(profile: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed.toml"
    changed.write_text('like = "box-node-nic"\n[rates]\nnic = 1e6\n', encoding="utf-8")
    made = load_profile(profile)
    check_profile(load_preset("box-node-nic"), made, profile)
    made = replace(made, fingerprint={**made.fingerprint, "simulated": "changed"})
    with pytest.raises(InputError, match=r"is of another changed \(model differ\)"):
        check_profile(load_preset(str(changed)), made, profile)


def test_a_file_says_what_it_changes_and_may_not_pass_for_a_preset(tmp_path: Path) -> None:
    changed, same = tmp_path / "mine.toml", tmp_path / "box-rank-nics.toml"
    changed.write_text('like = "box-rank-nics"\nseed = 0\nnoise = 0.5\n[rates]\nnic = 1e6\nport = 1.0e9\n')
    assert load_preset(str(changed)).model.about == "like box-rank-nics, changed: seed, noise, rates.nic"
    same.write_text('like = "box-rank-nics"\nnoise = 0.01\n')
    assert load_preset(str(same)).model == load_preset("box-rank-nics").model
    same.write_text(changed.read_text())
    with pytest.raises(InputError, match="another cluster than the preset box-rank-nics, whose name it has"):
        load_preset(str(same))


def test_an_edited_simulated_profile_is_refused_like_any_other(profile: Path, tmp_path: Path) -> None:
    edited = tmp_path / "edited.json"
    shutil.copy(profile, edited)
    edited.write_text(edited.read_text(encoding="utf-8").replace("box-node-nic", "box-rank-nics"), encoding="utf-8")
    assert main(["run", "--simulate", "box-rank-nics", "--profile", str(edited), "--scenario", "smoke"]) == 2

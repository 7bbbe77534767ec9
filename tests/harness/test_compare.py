"""``compare`` without ranks: what its scenarios refuse, rows out of cells, verdicts, storages, the journal."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relaymeter.compare_records import PATHS, CompareRecord
from relaymeter.errors import EXIT_CRASH, EXIT_NOTHING_MEASURED, EXIT_OK, EXIT_WRONG_BITS, InputError
from relaymeter.harness import compare_storage
from relaymeter.harness.cli import main
from relaymeter.harness.commands_compare import finished_rows
from relaymeter.harness.compare_change import Making
from relaymeter.harness.compare_config import CompareScenario
from relaymeter.harness.compare_emit import comparison_lines, comparison_tables
from relaymeter.harness.compare_ends import check_digests
from relaymeter.harness.compare_ranks import as_lack_of_room
from relaymeter.harness.compare_rows import Told, rows_of
from relaymeter.harness.compare_storage import Workplace, check_room, find_storages
from relaymeter.harness.config import check
from relaymeter.harness.jobs import ClusterConfig, RunStamp
from relaymeter.harness.page_cache import file_system, unescaped
from relaymeter.harness.paths.universal import UniversalRefused
from relaymeter.harness.scenario import load_any
from relaymeter.harness.verdict import judge_comparison

STAMP = RunStamp(utc="2026-11-30T00:00:00Z", launch_id="ab", machine_id="m", commit="c")
SAVED: list[dict[str, Any]] = [
    {"path": "in-memory", "storage": None, "phases": {"build": 2.0, "plan": 0.25, "move": 0.5, "refresh": 0.25,
     "digest": 9.0}, "digest_passed": 6, "digest_total": 6, "mismatch": None},
    {"path": "universal", "storage": "disk", "phases": {"save": 1.0}},
    {"path": "dcp", "storage": "disk", "phases": {"save": 0.5}},
]  # fmt: skip
LOADED: list[dict[str, Any]] = [
    {"path": path, "storage": "disk", "cache": cache, "phases": {"build": 2.0, "load": load, "digest": 9.0},
     "digest_passed": 6, "digest_total": 6, "mismatch": None}
    for path, load in (("universal", 3.0), ("dcp", 1.0)) for cache in ("warm", "cold")
]  # fmt: skip
TOLD = Told(
    saved=SAVED, loaded=LOADED, start={"relaunch": 4.0, "import": 8.0}, state_bytes=100,
    converted={"disk": {"convert_s": 5.0, "import_s": 1.5}}, written_bytes={("dcp", "disk"): 120},
)  # fmt: skip


def scenario() -> CompareScenario:
    found = load_any("rfc-small")
    assert isinstance(found, CompareScenario)
    return found


def made(told: Told, paths: tuple[str, ...] = PATHS, change: int = 0) -> list[CompareRecord]:
    return rows_of(
        scenario(), scenario().changes[change], told, stamp=STAMP, launch=1, nodes=1, paths=paths,
        storages={"disk": "ext4"}, caches={"disk": ("warm", "cold")},
    )  # fmt: skip


def test_seconds_of_a_row_are_sums_of_its_phases() -> None:
    """A checkpoint stops training for everything, imports of the converter too; a move for what follows its plan."""
    by = {(row.path, row.cache): row for row in made(TOLD)}
    assert list(dict.fromkeys(row.path for row in made(TOLD))) == list(PATHS)
    memory, universal, dcp = by["in-memory", None], by["universal", "cold"], by["dcp", "warm"]
    assert (memory.pause_s, memory.transfer_s, memory.total_s) == (0.75, 0.75, 3.0)
    assert (universal.import_s, universal.convert_s, universal.load_s) == (9.5, 5.0, 3.0)
    assert universal.pause_s == universal.total_s == 1.0 + 5.0 + 4.0 + 9.5 + 2.0 + 3.0
    assert universal.transfer_s == 1.0 + 5.0 + 3.0
    assert (dcp.pause_s, dcp.transfer_s, dcp.written_bytes) == (0.5 + 4.0 + 8.0 + 2.0 + 1.0, 1.5, 120)
    assert memory.ok and universal.ok and dcp.ok and memory.digest_s == 9.0


def test_what_a_path_cannot_or_failed_to_do_is_a_row_with_its_reason() -> None:
    told = replace(TOLD, converted={"disk": {"cannot": "converting fails: why"}}, loaded=LOADED[2:3])
    rows = made(told)
    by = {(row.path, row.cache): row for row in rows}
    assert by["universal", "warm"].cannot == by["universal", "cold"].cannot == "converting fails: why"
    assert by["dcp", "cold"].failed == "not reached" and by["dcp", "warm"].ok
    assert by["gather", None].failed == "not reached"
    assert "CUDA" in str(made(told, change=3)[-1].cannot)  # TP2 -> TP4
    assert "CUDA" not in str(made(replace(told, on_gpu=True), change=3)[-1].cannot)
    assert "no ZeRO partitions" in str(by["megatron", None].cannot)
    assert judge_comparison(rows).exit_code == EXIT_CRASH
    assert judge_comparison([row for row in rows if row.failed is None]).exit_code == EXIT_OK
    assert judge_comparison([by["megatron", None]]).exit_code == EXIT_NOTHING_MEASURED
    text = comparison_lines(rows)
    assert "dp4-dp2, universal: cannot: converting fails: why" in text


def test_wrong_bits_outrank_a_failed_path_and_are_said_first() -> None:
    wrong = {**LOADED[2], "digest_passed": 5, "mismatch": "exp_avg head.bias did not arrive"}
    rows = made(replace(TOLD, loaded=[wrong]))
    verdict = judge_comparison(rows)
    assert verdict.exit_code == EXIT_WRONG_BITS
    assert verdict.lines[0] == (
        "WRONG BITS: dp4-dp2 by dcp (disk, warm): 5 of 6 digests are right: exp_avg head.bias did not arrive"
    )
    cells = [cell for column in comparison_tables(rows)[0].columns for cell in column.cells]
    assert "5/6 WRONG" in cells


@pytest.mark.parametrize(
    ("found", "weights_only", "expected"),
    [
        ({"master a": [1, 1], "weight a": [2]}, False, (3, 3, None)),
        ({"master a": [1, 3], "weight a": [2]}, False, (2, 3, "master a: copy 1 of 2 is not what the source held")),
        ({"weight a": [2]}, False, (1, 2, "master a did not arrive")),
        ({"weight a": [2]}, True, (1, 1, None)),
        ({"weight a": [2], "weight b": [7]}, True, (1, 2, "weight b: copy 0 of 1 is not what the source held")),
        ({}, False, (0, 2, "master a did not arrive")),
    ],
)
def test_digests_are_right_only_where_everything_arrived(
    found: dict[str, list[int]], weights_only: bool, expected: tuple[int, int, str | None]
) -> None:
    assert check_digests({"master a": 1, "weight a": 2}, found, weights_only=weights_only) == expected


def test_folders_of_processes_that_are_gone_are_removed_and_no_others(tmp_path: Path) -> None:
    left = tmp_path / "relaymeter-compare-999999999-5-abc"
    other = tmp_path / "relaymeter-compare-notes"
    for folder in (left, other):
        folder.mkdir()
        (folder / "file").write_text("x")
    storages = find_storages([("disk", str(tmp_path))])
    with Workplace(storages) as places, Workplace(storages) as second:
        assert places["disk"].is_dir() and second["disk"].is_dir()  # of a process that still runs
        assert not left.exists() and other.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name]


def test_a_storage_without_room_is_refused_before_any_work(tmp_path: Path) -> None:
    storages = find_storages([("disk", str(tmp_path))])
    check_room(storages, 1000)
    with pytest.raises(
        InputError, match=r"--storage disk=.*are free, the checkpoints of one change there take up to 5000 TB"
    ):
        check_room(storages, 10**15)


def test_a_file_system_in_memory_has_no_cold_page_cache() -> None:
    assert file_system(Path("/proc")) == "proc"
    assert compare_storage.Storage("a", Path("/"), "tmpfs").caches == (None,)
    assert compare_storage.Storage("a", Path("/"), "ext4").caches == ("warm", "cold")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--scenario", "smoke"], "scenario smoke is of kind 'weights'"),
        (["--change", "dp4"], "scenario rfc-small has no change 'dp4'"),
        (["--storage", "disk=/nowhere/at/all"], "--storage disk=/nowhere/at/all: no folder that can be written"),
        (["--nodes", "1", "--ranks-per-node", "2"], "needs 4 ranks"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    options: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *options]) == 2
    said = capsys.readouterr().err
    assert expected in said and said.count("\n") == 1


def test_other_commands_say_who_takes_a_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--scenario", "rfc-small"]) == 2
    assert "relaymeter compare --scenario rfc-small" in capsys.readouterr().err
    assert main(["plan", "--scenario", "rfc-small", "--topology", "1x4"]) == 2
    assert "relaymeter compare --scenario rfc-small" in capsys.readouterr().err


def test_rows_of_another_comparison_are_no_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from relaymeter.records import dump_lines

    journal = tmp_path / "rows.jsonl"
    journal.write_text(dump_lines(made(TOLD)))
    assert main(["compare", "--journal", str(journal)]) == 2
    assert f"--journal {journal} holds rows of machine_id m" in capsys.readouterr().err


def test_rows_of_other_options_are_no_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A journal holds its comparison's training, engines, paths, storages and ranks."""
    from relaymeter.harness.results import machine_id, make_stamp
    from relaymeter.records import dump_lines

    stamp = make_stamp(machine_id(), shaped=False)
    rows = [replace(row, machine_id=stamp.machine_id, commit=stamp.commit, setting="other") for row in made(TOLD)]
    journal = tmp_path / "rows.jsonl"
    journal.write_text(dump_lines(rows))
    assert main(["compare", "--journal", str(journal), "--paths", "in-memory"]) == 2
    assert "holds rows of another comparison of dp4-dp2: training, engines, --paths" in capsys.readouterr().err


def test_a_change_in_which_a_path_failed_is_made_again(tmp_path: Path) -> None:
    from relaymeter.records import dump_lines

    cluster = ClusterConfig(nodes=1, ranks_per_node=4, shape=False)
    making = Making(scenario(), PATHS, find_storages([("disk", str(tmp_path))]), cluster, STAMP, 0.0)
    changes = scenario().changes
    found = [(TOLD, 0), (replace(TOLD, loaded=LOADED[:1]), 1)]
    rows = [
        replace(row, setting=making.setting(changes[at])) for told, at in found for row in made(told, PATHS[2:], at)
    ]
    assert {row.change for row in rows if row.verdict == "failed"} == {changes[1].name}
    journal = tmp_path / "rows.jsonl"
    journal.write_text(dump_lines(rows))
    assert {row.change for row in finished_rows(journal, making)} == {changes[0].name}


def test_a_journal_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "--journal", str(tmp_path / "no" / "rows.jsonl")]) == 2
    assert "does not exist: make it first" in capsys.readouterr().err


def test_storages_on_one_device_share_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=40 << 20))
    two = find_storages([("a", str(tmp_path)), ("b", str(tmp_path))])
    check_room(two, 1)
    three = find_storages([(name, str(tmp_path)) for name in "abc"])
    with pytest.raises(InputError, match=r"41\.9 MB are free, the checkpoints of one change there take up to 50\.3 MB"):
        check_room(three, 1)


def test_a_full_storage_is_no_limit_of_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = UniversalRefused("iostream error")
    assert as_lack_of_room(refused, tmp_path) is refused
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    told = as_lack_of_room(refused, tmp_path)
    assert isinstance(told, OSError) and str(told) == "1 kB are left on the storage: iostream error"


def test_names_of_mount_points_are_read_as_they_are() -> None:
    assert unescaped("/mnt/t\u00fc\\040x\\134y".encode()) == "/mnt/t\u00fc x\\y"


def test_what_was_compared_decides_the_setting(tmp_path: Path) -> None:
    change = scenario().changes[0]
    storages = find_storages([("disk", str(tmp_path))])
    cluster = ClusterConfig(nodes=1, ranks_per_node=4, shape=False)
    base = Making(scenario(), PATHS, storages, cluster, STAMP, 0.0)
    wider = scenario().training.model_copy(update={"width": 256})
    others = [
        replace(base, paths=("dcp",)),
        replace(base, cluster=ClusterConfig(nodes=2, ranks_per_node=2)),
        replace(base, storages=find_storages([("tmpfs", str(tmp_path))])),
        replace(base, scenario=scenario().model_copy(update={"training": wider})),
    ]
    assert base.setting(change) == replace(base, deadline=9.0, scenario=scenario()).setting(change)
    assert len({one.setting(change) for one in (base, *others)} | {base.setting(scenario().changes[1])}) == 6


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"destination": None}, "give destination (an engine) or replicas (inference copies), one of the two"),
        ({"replicas": {"ranks": 3, "tensor_parallel": 2}}, "3 ranks are no whole copies of tensor_parallel 2"),
        ({"destination": {"stage": 1, "ranks": 4, "expert_parallel": 2}}, "needs training.model 'moe'"),
    ],
)
def test_a_change_that_cannot_be_is_refused(change: dict[str, Any], expected: str) -> None:
    entry = {"name": "a", "source": {"stage": 3, "ranks": 4}, "destination": {"stage": 3, "ranks": 2}, **change}
    if change.get("replicas"):
        entry["destination"] = None
    entry = {key: value for key, value in entry.items() if value is not None}
    with pytest.raises(InputError, match=expected.replace("(", r"\(").replace(")", r"\)")):
        check(CompareScenario, {"kind": "compare", "name": "s", "changes": [entry]}, "file.toml")


def test_the_process_that_made_a_folder_stands_in_its_name(tmp_path: Path) -> None:
    with Workplace(find_storages([("disk", str(tmp_path))])) as places:
        assert f"-{os.getpid()}-" in places["disk"].name

"""``compare`` without ranks: what its scenarios refuse, rows out of cells, verdicts, tables."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compare_made import LOADED, SAVED, STAMP, TOLD, made, scenario

from relaymeter.compare_records import PATHS
from relaymeter.errors import (
    EXIT_CRASH,
    EXIT_NOTHING_MEASURED,
    EXIT_OK,
    EXIT_TIME_LIMIT,
    EXIT_WRONG_BITS,
    InputError,
)
from relaymeter.harness import compare_change, compare_storage
from relaymeter.harness.cli import main
from relaymeter.harness.commands_ranks import first_error
from relaymeter.harness.compare_change import Making
from relaymeter.harness.compare_config import NO_TRAINING_STATE, CompareScenario, ReplicaConfig
from relaymeter.harness.compare_emit import comparison_lines, comparison_tables
from relaymeter.harness.compare_ends import check_digests, replica_layout
from relaymeter.harness.compare_joined import joined_world
from relaymeter.harness.compare_ranks import as_lack_of_room
from relaymeter.harness.compare_rows import Told
from relaymeter.harness.compare_storage import find_storages
from relaymeter.harness.config import check
from relaymeter.harness.jobs import ClusterConfig
from relaymeter.harness.launch import LaunchResult, RankEnd
from relaymeter.harness.page_cache import file_system, unescaped
from relaymeter.harness.paths.together import say_error
from relaymeter.harness.paths.universal import UniversalRefused
from relaymeter.harness.scenario import load_any
from relaymeter.harness.state_config import TrainingConfig
from relaymeter.harness.verdict import judge_comparison


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
    assert "no ZeRO partitions" in str(by["megatron", None].cannot)
    assert made(told, change=3)[-1].failed == "not reached"  # TP2 -> TP4: by the ranks
    refused = {"path": "megatron", "storage": None, "cannot": "no CUDA here"}
    assert made(replace(told, saved=[refused]), change=3)[-1].cannot == "no CUDA here"
    assert judge_comparison(rows).exit_code == EXIT_CRASH
    assert judge_comparison([row for row in rows if row.failed is None]).exit_code == EXIT_OK
    assert judge_comparison([by["megatron", None]]).exit_code == EXIT_NOTHING_MEASURED
    text = comparison_lines(rows)
    assert "dp4-dp2, universal: cannot: converting fails: why" in text


def test_the_refit_says_in_its_row_what_it_moved() -> None:
    refit = {
        "path": "megatron", "storage": None, "phases": {"build": 1.0, "plan": 0.25, "move": 0.5, "digest": 1.0},
        "digest_passed": 4, "digest_total": 4, "mismatch": None, "note": "weights alone, 12 MB",
    }  # fmt: skip
    row = made(replace(TOLD, saved=[*SAVED, refit]), change=3)[-1]
    assert (row.path, row.pause_s, row.plan_s, row.total_s, row.ok) == ("megatron", 0.5, 0.25, 1.75, True)
    assert "megatron: weights alone, 12 MB" in comparison_lines([row])


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
    right = made(replace(TOLD, loaded=[{**LOADED[2], "phases": {**LOADED[2]["phases"], "load": 99.0}}, *LOADED[1:2]]))
    both = [cell for column in comparison_tables([*rows, *right])[0].columns for cell in column.cells]
    assert "11/12 WRONG in 1 of 2" in both and "99 s" in both  # the wrong launch is in no median


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


def test_what_the_time_limit_leaves_out_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [change.name for change in scenario().changes[:2]]
    options = ["--change", names[0], "--change", names[1], "--storage", f"disk={tmp_path}"]
    assert main(["compare", *options, "--time-limit", "1e-9", "--launches", "2"]) == EXIT_TIME_LIMIT
    assert (
        f"not run (time limit): {names[0]} (launch 1), {names[1]} (launch 1), {names[0]} (launch 2), {names[1]} "
        "(launch 2); with --journal FILE it could go on"
    ) in capsys.readouterr().out.replace("\n", " ")


def test_what_no_path_can_make_is_answered_without_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare_change, "work_together", None)
    options = ["--storage", f"disk={tmp_path}", "--change", "dp4-dp2"]
    assert main(["compare", "--paths", "megatron", *options]) == EXIT_NOTHING_MEASURED
    assert "dp4-dp2, megatron: cannot: Megatron-Core's refit moves weights" in capsys.readouterr().out
    cluster, storages = ClusterConfig(nodes=1, ranks_per_node=4), find_storages([("disk", str(tmp_path))])
    making = Making(scenario(), ("universal", "megatron"), storages, cluster, STAMP, 0.0)
    copies = next(change for change in scenario().changes if change.destination is None)
    told = compare_change.foreseen(making, copies)
    assert told is not None and [cell["cannot"] for cell in told.saved] == [NO_TRAINING_STATE]
    assert compare_change.foreseen(making, scenario().changes[0]) is None
    assert compare_change.foreseen(replace(making, paths=("megatron", "dcp")), copies) is None


def test_reasons_name_files_by_their_place_in_the_checkpoint(tmp_path: Path) -> None:
    work = tmp_path / "relaymeter-compare-1-2-abc"
    scratch = Path(tempfile.gettempdir()) / "relaymeter-ab12cd_x" / "tmp" / "f"
    told = Told(
        saved=[{"path": "dcp", "storage": "disk", "cannot": f"no {work}/dcp/.metadata"}],
        converted={"disk": {"failed": f"[Errno 2] '{work}/universal/saved/mp_rank_00': {work}/universal is not whole"}},
        loaded=[{"path": "universal", "storage": "disk", "phases": {"load": 1.0}}],
        lost=f"cannot write {scratch}",
    )  # fmt: skip
    found = compare_change.without_folders(told, {"disk": work})
    assert found.saved[0]["cannot"] == "no .metadata"
    assert found.converted["disk"]["failed"] == "[Errno 2] 'saved/mp_rank_00': the checkpoint is not whole"
    assert found.loaded == told.loaded and found.lost == "cannot write tmp/f"


def test_copies_hold_the_persistent_buffers_too() -> None:
    training = TrainingConfig(model="dense", dtype="bfloat16")
    layout = replica_layout(training, None, ReplicaConfig(ranks=2, tensor_parallel=2), 2)
    assert (layout.specs["scale"].dtype, layout.specs["seen"].dtype) == ("float32", "int64")
    assert {spec.dtype for name, spec in layout.specs.items() if name not in ("scale", "seen")} == {"bfloat16"}
    assert layout.placements["scale"].pieces_of(1).size == 1


def test_a_missing_key_is_told_in_words() -> None:
    def look_up() -> None:
        {}["exp_avg"]

    with pytest.raises(KeyError) as raised:
        look_up()
    assert say_error(raised.value) == "look_up looks for 'exp_avg', which is not there"


CRASHED = """Traceback (most recent call last):
  File "worker.py", line 1, in work
    build()
ValueError: width 7 % heads 2: no whole heads
second line
[W1130 noise.cpp:1] bye"""


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (
            [(1, None, CRASHED), (7, None, "relaymeter: rank 0 was lost")],
            "rank 0: ValueError: width 7 % heads 2: no whole heads",
        ),
        (
            [(7, None, "relaymeter: rank 1 was lost"), (1, None, CRASHED)],
            "rank 1: ValueError: width 7 % heads 2: no whole heads",
        ),
        ([(2, None, "relaymeter: no such model"), (2, None, "relaymeter: no such model")], "no such model"),
        ([(7, None, "relaymeter: rank 1 was lost"), (None, 9, "")], "rank 1: killed by SIGKILL"),
        ([(1, None, ""), (0, None, None)], "rank 0: exit code 1"),
        ([(0, None, None), (0, None, None)], ""),
    ],
)
def test_the_rank_that_failed_of_itself_is_quoted(
    ends: list[tuple[int | None, int | None, str | None]], expected: str
) -> None:
    ranks = tuple(
        RankEnd(rank=rank, pid=1, code=code, signal=number, ended_by_launcher=False, seconds=1.0, log=Path("log"))
        for rank, (code, number, _) in enumerate(ends)
    )
    tails = {rank: tail for rank, (_, _, tail) in enumerate(ends) if tail is not None}
    result = LaunchResult(
        1, ranks, timed_out=False, interrupted=False, in_box=False, reason=None, seconds=1.0, tails=tails
    )
    assert first_error(result) == expected


def test_what_the_ranks_said_stands_in_the_rows() -> None:
    lost = compare_change.lost_text("train", 1, ["rank 0: ValueError: no whole heads"])
    (row,) = made(Told(lost=lost), ("in-memory",))
    assert row.failed == "the ranks that train ended with exit code 1: rank 0: ValueError: no whole heads"


def test_more_ranks_than_a_machine_starts_are_refused_with_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "big.toml"
    change = (
        '[[changes]]\nname = "a"\nsource = { stage = 3, ranks = [0, 5000] }\ndestination = { stage = 3, ranks = 2 }\n'
    )
    path.write_text('kind = "compare"\n' + change)
    assert main(["compare", "--scenario", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"scenario {path}, change a needs 5001 ranks, which one machine does not start: a box has 1..250" in said


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


@pytest.mark.parametrize("model", ["moe", "qwen3"])
def test_copies_of_models_that_have_none_here_are_refused_with_the_file(model: str) -> None:
    entry = {"name": "a", "source": {"stage": 2, "ranks": 2}, "replicas": {"ranks": 2, "tensor_parallel": 1}}
    given = {"kind": "compare", "name": "s", "training": {"model": model}, "changes": [entry]}
    with pytest.raises(InputError, match=rf"file\.toml: change a: replicas of training\.model '{model}': "):
        check(CompareScenario, given, "file.toml")


def test_a_large_ratio_has_no_exponent() -> None:
    memory, slow = made(TOLD, ("in-memory",)), made(TOLD, ("dcp",))
    slow = [replace(row, pause_s=0.75 * 2204.0, transfer_s=0.75 * 2.4) for row in slow]
    cells = [cell for column in comparison_tables([*memory, *slow])[0].columns for cell in column.cells]
    assert "2200x" in cells and "2.4x" in cells


@pytest.mark.parametrize(("nodes", "text"), [(1, "1 node"), (2, "2 nodes")])
def test_a_world_that_was_joined_counts_its_nodes(nodes: int, text: str) -> None:
    assert joined_world(nodes) == f"a world of {text} that was joined"


def test_a_file_whose_name_is_no_scenarios_says_what_helps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tt x.toml"
    change = '[[changes]]\nname = "a"\nsource = { stage = 3, ranks = 2 }\ndestination = { stage = 3, ranks = 2 }\n'
    path.write_text('kind = "compare"\n' + change)
    assert main(["compare", "--scenario", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"{path}: name = 'tt x', which is the file's, is no name (1 to 100 letters" in said
    assert said.endswith('give the file another, or a name in it, such as name = "mine"\n')
    path.write_text('kind = "compare"\nname = "tt"\n' + change)
    assert load_any(str(path)).name == "tt"


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

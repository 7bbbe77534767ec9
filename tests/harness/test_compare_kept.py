"""What stays of ``compare`` however it ends: rows in its journal and files, and no checkpoint. No ranks."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compare_made import LOADED, STAMP, TOLD, made, scenario

from relaymeter.compare_records import PATHS, CompareRecord
from relaymeter.errors import (
    EXIT_OK,
    InputError,
)
from relaymeter.harness import commands_compare, commands_plan, compare_journal, compare_storage
from relaymeter.harness.cli import main
from relaymeter.harness.compare_change import Making
from relaymeter.harness.compare_config import CompareChange
from relaymeter.harness.compare_journal import finished_rows, keep_rows
from relaymeter.harness.compare_rows import Told
from relaymeter.harness.compare_storage import Workplace, check_room, find_storages
from relaymeter.harness.jobs import ClusterConfig
from relaymeter.harness.processes import pid_namespace
from relaymeter.harness.signals import EndingSignal, ending_signals, exit_code
from relaymeter.records import dump_lines
from relaymeter.row_files import read_rows


def test_folders_of_processes_that_are_gone_are_removed_and_no_others(tmp_path: Path) -> None:
    here, inside = compare_storage._machine(), pid_namespace()
    left = tmp_path / f"relaymeter-compare-{here}-{inside}-999999999-5-abc"
    names = (f"{'0' * 8}-{inside}-999999999-5-abc", f"{here}-1-999999999-5-abc", "999999999-5-abc", "notes")
    others = [tmp_path / f"relaymeter-compare-{name}" for name in names]  # of another machine, another container
    for folder in (left, *others):
        folder.mkdir()
        (folder / "file").write_text("x")
    storages = find_storages([("disk", str(tmp_path))])
    with Workplace(storages) as places, Workplace(storages) as second:
        assert places["disk"].is_dir() and second["disk"].is_dir()  # of a process that still runs
        assert not left.exists()
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_what_killed_processes_left_does_not_count_as_taken_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / f"relaymeter-compare-{compare_storage._machine()}-{pid_namespace()}-999999999-5-abc"
    other = tmp_path / f"relaymeter-compare-{'0' * 8}-1-1-1-abc"
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=(0 if left.exists() else 1) << 30))
    left.mkdir()
    storages = find_storages([("disk", str(tmp_path))])
    check_room(storages, 1000)
    assert not left.exists()
    other.mkdir()
    (other / "file").write_bytes(b"x" * 2000)
    with pytest.raises(InputError, match=r"; 1 folder relaymeter-compare-\* there hold 2 kB: remove those"):
        check_room(storages, 1 << 30)


@pytest.fixture
def usual_signals() -> Iterator[None]:
    """What a shell's background job or nohup makes a process ignore is heard."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("usual_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_no_checkpoint_stays_where_a_command_is_ended(tmp_path: Path, number: int) -> None:
    storages = find_storages([("disk", str(tmp_path))])
    with (
        pytest.raises((KeyboardInterrupt, EndingSignal)) as raised,
        ending_signals(),
        Workplace(storages) as places,
    ):
        (places["disk"] / "file").write_text("x")
        signal.raise_signal(number)
    assert exit_code(raised.value) == 128 + number and list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("usual_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_what_ended_before_a_signal_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    """Between worlds or changes too, where no rank runs; a second signal at once, as of ``timeout``, is the same."""

    def make_change(making: Making, change: CompareChange, *_: object) -> tuple[int, list[CompareRecord]]:
        if change.name == scenario().changes[0].name:
            rows = made(TOLD, ("dcp",))
            return EXIT_OK, [replace(row, machine_id=making.stamp.machine_id, commit=making.stamp.commit,
                                     setting=making.setting(change)) for row in rows]  # fmt: skip
        with Workplace(making.storages):
            try:
                signal.raise_signal(number)
            finally:
                if number != signal.SIGINT:
                    signal.raise_signal(number)
        return EXIT_OK, []

    monkeypatch.setattr(commands_compare, "make_change", make_change)
    kept, journal, told = tmp_path / "kept", tmp_path / "rows.jsonl", tmp_path / "told.jsonl"
    kept.mkdir()
    options = ["--storage", f"disk={kept}", "--journal", str(journal), "--json", str(told), "--paths", "dcp"]
    assert main(["compare", *options, "--results", str(tmp_path / "results")]) == 128 + number
    assert {row.change for row in read_rows(told) if isinstance(row, CompareRecord)} == {"dp4-dp2"}
    assert told.read_text() == journal.read_text() and list(kept.iterdir()) == []
    assert len(list(tmp_path.glob("results/*/*/rows.jsonl"))) == 1
    assert "interrupted: 1 change had ended" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.usefixtures("usual_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_any_command_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    monkeypatch.setattr(commands_plan, "plan", lambda _: signal.raise_signal(number))
    assert main(["plan", "--scenario", "smoke", "--topology", "2x2"]) == 128 + number
    assert tuple(capsys.readouterr()) == ("", "relaymeter: interrupted\n")


@pytest.mark.usefixtures("usual_signals")
def test_a_signal_ends_a_rank_of_a_launcher_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait in a collective, where Python hears nothing."""
    handlers: list[Any] = []
    monkeypatch.setattr(commands_plan, "plan", lambda _: handlers.append(signal.getsignal(signal.SIGTERM)) or 0)
    plan = ["plan", "--scenario", "smoke", "--topology", "2x2"]
    for world in ({"RANK": "1", "WORLD_SIZE": "2"}, {"RANK": "4", "WORLD_SIZE": "4"}):
        for name, value in world.items():
            monkeypatch.setenv(name, value)
        assert main(plan) == EXIT_OK
    assert handlers[0] is signal.SIG_DFL and callable(handlers[1])


def test_a_world_that_cannot_be_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "4")
    assert main(["compare"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("relaymeter: RANK=4 and WORLD_SIZE=4 name no rank of a world") and said.count("\n") == 1


def journalled(change: str, verdict: str, making: Making) -> list[CompareRecord]:
    found = next(one for one in making.scenario.changes if one.name == change)
    told = TOLD if verdict == "ok" else Told(lost="rank 1 was lost")
    return [replace(row, change=change, setting=making.setting(found)) for row in made(told, ("dcp",))]


def test_two_commands_with_one_journal_keep_each_others_rows(tmp_path: Path) -> None:
    cluster = ClusterConfig(nodes=1, ranks_per_node=4, shape=False)
    making = Making(scenario(), ("dcp",), find_storages([("disk", str(tmp_path))]), cluster, STAMP, 0.0)
    journal = tmp_path / "rows.jsonl"
    one, two, three = (change.name for change in scenario().changes[:3])
    first = journalled(one, "ok", making)
    keep_rows(journal, first, making)
    keep_rows(journal, journalled(two, "failed", making), making)
    second, third = journalled(two, "ok", making), journalled(three, "ok", making)
    keep_rows(journal, second, making)  # in place of the failed ones
    keep_rows(journal, third, making)
    keep_rows(journal, journalled(one, "failed", making), making)  # another command has finished it meanwhile
    assert read_rows(journal) == [*first, *second, *third]
    other = replace(making, paths=("dcp", "gather"))
    before = journal.read_bytes()
    with pytest.raises(InputError, match="holds rows of another comparison"):
        keep_rows(journal, journalled(one, "ok", other), other)
    assert journal.read_bytes() == before


def test_a_journal_is_written_by_one_command_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_journal, "_PATIENCE_S", 0.0)
    with (
        compare_journal._locked(tmp_path),
        pytest.raises(InputError, match="has been locked by another process"),
        compare_journal._locked(tmp_path),
    ):
        pass


def test_a_storage_without_room_is_refused_before_any_work(tmp_path: Path) -> None:
    storages = find_storages([("disk", str(tmp_path))])
    check_room(storages, 1000)
    with pytest.raises(
        InputError, match=r"--storage disk=.*are free, the checkpoints of one change there take up to 5000 TB"
    ):
        check_room(storages, 10**15)


def test_rows_of_another_comparison_are_no_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = tmp_path / "rows.jsonl"
    journal.write_text(dump_lines(made(TOLD)))
    assert main(["compare", "--journal", str(journal)]) == 2
    assert f"--journal {journal} holds rows of machine_id m" in capsys.readouterr().err


def test_rows_of_other_options_are_no_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A journal holds its comparison's training, engines, paths, storages and ranks."""
    from relaymeter.harness.results import machine_id, make_stamp

    stamp = make_stamp(machine_id(), shaped=False)
    rows = [replace(row, machine_id=stamp.machine_id, commit=stamp.commit, setting="other") for row in made(TOLD)]
    journal = tmp_path / "rows.jsonl"
    journal.write_text(dump_lines(rows))
    assert main(["compare", "--journal", str(journal), "--paths", "in-memory"]) == 2
    assert "holds rows of another comparison of dp4-dp2: training, engines, --paths" in capsys.readouterr().err


def test_a_change_in_which_a_path_failed_is_made_again(tmp_path: Path) -> None:
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
    kept, others = finished_rows(journal, making, 1)
    assert {row.change for row in kept} == {changes[0].name} and others == []


def test_rows_of_changes_that_are_not_asked_for_stay_in_the_journal_only(tmp_path: Path) -> None:
    cluster = ClusterConfig(nodes=1, ranks_per_node=4, shape=False)
    first, second = scenario().changes[:2]
    asked = scenario().model_copy(update={"changes": (second,)})
    making = Making(asked, PATHS[2:], find_storages([("disk", str(tmp_path))]), cluster, STAMP, 0.0)
    rows = [replace(row, setting=making.setting(second)) for row in made(TOLD, ("dcp",), 1)]
    journal = tmp_path / "rows.jsonl"
    journal.write_text(dump_lines([*made(TOLD, ("dcp",), 0), *rows, *(replace(row, launch=2) for row in rows)]))
    kept, others = finished_rows(journal, making, 1)
    assert kept == rows
    assert {(row.change, row.launch) for row in others} == {(first.name, 1), (second.name, 2)}


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


def test_the_process_that_made_a_folder_stands_in_its_name(tmp_path: Path) -> None:
    with Workplace(find_storages([("disk", str(tmp_path))])) as places:
        assert f"-{os.getpid()}-" in places["disk"].name

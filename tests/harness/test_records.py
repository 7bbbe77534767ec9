"""Rows are strict JSON and survive a round trip; files are created whole and never over another one."""

from __future__ import annotations

import json
import math
import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from relaymeter.errors import InputError
from relaymeter.records import (
    MoveRecord,
    check_target,
    dump_json,
    dump_lines,
    load_json,
    median_interval,
    read_records,
    write_text,
)
from relaymeter.row_files import read_rows

ROW = MoveRecord(
    utc="2026-01-02T03:04:05Z", machine_id="abc", launch_id="def", commit=None, shaped=True, scenario="smoke",
    move="tp1", route="chosen", chosen=True, route_bytes={"spread": 10}, source_bytes={"trainer": 20},
    planner="classes", fallback_tensors=0, executor="send-recv",
    ranks=4, nodes=2, bucket_bytes=8, rounds=2, bytes_total=20, bytes_in_rank=5, bytes_in_node=5, bytes_cross_node=10,
    wire_cross_node_bytes=11, messages=4, plan_s=0.1, predicted_s=0.5, predicted_low_s=0.4, predicted_high_s=0.6,
    measured_s=0.5, measured_low_s=0.49, measured_high_s=0.51, error=0.0, samples_s=((0.5, 0.4), (0.49, 0.51)),
    digest_s=0.01, bound_s=0.45, bound_by="node 1 receive", peak_bytes=7, peak_predicted_bytes=8, max_extra_bytes=None,
    digest_version=1,
    digest_passed=6, digest_total=6, verdict="ok", ok=True,
)  # fmt: skip


def test_row_survives_a_round_trip_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_text(path, dump_lines([ROW, replace(ROW, route="direct")]))
    assert read_records(path) == [ROW, replace(ROW, route="direct")]


def test_not_a_number_becomes_null_and_arrays_become_lists() -> None:
    text = dump_json({"a": math.nan, "b": [math.inf, 1.5], "c": np.float64(2), "d": np.arange(2), "e": np.bool_(True)})
    assert json.loads(text) == {"a": None, "b": [None, 1.5], "c": 2.0, "d": [0, 1], "e": True}
    assert json.loads(dump_lines([replace(ROW, error=-math.inf)]))["error"] is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": {"b": [1, {"c": 1e999}]}, "d": 2.5}', r"a\.b\[1\]\.c: 1e999 is no finite number"),
        ("[0, -Infinity]", r"\[1\]: -Infinity is no finite number"),
        ("NaN", "NaN is no finite number"),
    ],
)
def test_a_number_that_is_not_finite_is_refused_where_it_stands(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        load_json(path, "profile")
    path.write_text(dump_lines([ROW]).replace('"plan_s": 0.1', '"plan_s": NaN'))
    with pytest.raises(InputError, match="line 1: plan_s: NaN"):
        read_records(path)
    path.write_text(dump_json({"a": [1.5, -2.0, 3, None]}))
    assert load_json(path, "profile") == {"a": [1.5, -2.0, 3, None]}


def test_rows_without_a_profile_have_neither_prices_nor_a_bound() -> None:
    bare = replace(ROW, predicted_s=None, error=None, bound_s=None, bound_by=None, chosen=False)
    entry = json.loads(dump_lines([bare]))
    assert (entry["bound_s"], entry["bound_by"], entry["predicted_s"]) == (None, None, None)
    assert MoveRecord.from_dict(entry) == bare


def test_rows_of_version_1_are_read_as_moves_from_the_trainer() -> None:
    entry = {**ROW.to_dict(), "schema_version": 1}
    for name in ("source_bytes", "fallback_tensors", "bytes_in_rank", "max_extra_bytes", "simulated"):
        del entry[name]
    assert MoveRecord.from_dict(entry) == replace(ROW, bytes_in_rank=None)
    with pytest.raises(InputError, match="source_bytes"):
        MoveRecord.from_dict({**entry, "source_bytes": {}})


def test_rows_of_version_2_are_of_real_ranks() -> None:
    entry = {**ROW.to_dict(), "schema_version": 2}
    del entry["simulated"]
    assert MoveRecord.from_dict(entry) == ROW
    with pytest.raises(InputError, match="simulated"):
        MoveRecord.from_dict({**entry, "simulated": "h100-2x8"})


def test_the_kept_results_are_read() -> None:
    kept = sorted((Path(__file__).parents[2] / "results").glob("*/*/rows.jsonl"))
    rows = [row for path in kept for row in read_rows(path)]
    moves = [row for row in rows if isinstance(row, MoveRecord)]
    assert 0 < len(moves) < len(rows)
    assert all(row.ok for row in rows)
    for row in moves:
        assert row.schema_version == 3 and row.simulated is None
        assert sum(row.source_bytes.values()) == row.bytes_total
        assert row.scenario == "transitions" or set(row.source_bytes) == {"trainer"}


@pytest.mark.parametrize(
    ("change", "message"),
    [({"schema_version": 99}, "schema_version 99"), ({"extra": 1}, "extra"), ({"move": ...}, "move")],
)
def test_another_version_or_other_fields_are_refused(change: dict[str, object], message: str) -> None:
    entry = {**ROW.to_dict(), **change}
    entry = {key: value for key, value in entry.items() if value is not ...}
    with pytest.raises(InputError, match=message):
        MoveRecord.from_dict(entry)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan_s": "3"}, 'plan_s = "3": expected a number'),
        ({"measured_s": "3"}, 'measured_s = "3": expected a number or null'),
        ({"ranks": 4.5}, "ranks = 4.5: expected a whole number of 64 bits"),
        ({"ranks": True}, "ranks = true: expected a whole number of 64 bits"),
        ({"ranks": 2**63}, "ranks = 9223372036854775808: expected a whole number of 64 bits"),
        ({"ok": 1}, "ok = 1: expected true or false"),
        ({"move": None}, "move = null: expected a text"),
        ({"samples_s": "ab"}, 'samples_s = "ab": expected a list'),
        ({"samples_s": [[0.5], [0.5, None]]}, "samples_s[1][1] = null: expected a number"),
        ({"route_bytes": []}, "route_bytes = []: expected an object"),
        ({"route_bytes": {"direct": "7"}}, 'route_bytes.direct = "7": expected a whole number of 64 bits'),
        ({"profile_mismatch": [3]}, "profile_mismatch[0] = 3: expected a text"),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_place(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(dump_lines([ROW]) + json.dumps({**ROW.to_dict(), **change}) + "\n")
    with pytest.raises(InputError) as refused:
        read_records(path)
    assert str(refused.value) == f"records {path}, line 2: {message}"


def test_whole_numbers_are_numbers_too() -> None:
    found = MoveRecord.from_dict({**ROW.to_dict(), "plan_s": 3, "samples_s": [[1]]})
    assert (found.plan_s, found.samples_s) == (3.0, ((1.0,),)) and isinstance(found.plan_s, float)


@pytest.mark.parametrize("text", ["tp1\u2028two", "tp1\x85two", "tp1\u2029two"])
def test_no_other_separator_ends_a_row(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    line = json.dumps({**ROW.to_dict(), "move": text}, ensure_ascii=False)
    path.write_text(f"{line}\n{line}", encoding="utf-8")
    assert [row.move for row in read_records(path)] == [text, text]
    path.write_text(f"{line}\n\n{line}\n", encoding="utf-8")
    with pytest.raises(InputError, match="line 2: an empty line: every line holds one row, so delete it"):
        read_records(path)
    path.write_text("3\n", encoding="utf-8")
    with pytest.raises(InputError, match="line 1: 3 is no row: expected an object"):
        read_records(path)


def test_a_file_is_not_replaced_without_force_and_leaves_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_text(path, "one")
    with pytest.raises(InputError, match="--force"):
        write_text(path, "two")
    assert path.read_text() == "one"
    write_text(path, "two", force=True)
    assert path.read_text() == "two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.json"]


def test_a_target_without_a_folder_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        check_target(tmp_path / "no" / "out.json")
    with pytest.raises(InputError, match="folder"):
        check_target(tmp_path)


def test_what_is_no_regular_file_is_never_replaced(tmp_path: Path) -> None:
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(tmp_path / "elsewhere")
    os.mkfifo(pipe)
    for path in (link, pipe, Path(os.devnull)):
        with pytest.raises(InputError, match="no regular file"):
            write_text(path, "text", force=True)


def test_a_name_that_no_file_can_have_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write"):
        check_target(tmp_path / ("x" * 300))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_json_beyond_the_limits_of_the_parser_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "deep.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"profile .*deep\.json is not usable JSON"):
        load_json(path, "profile")


def test_what_may_never_end_or_is_too_large_is_not_read(tmp_path: Path) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    with large.open("wb") as file:
        file.truncate((1 << 30) + 1)
    for path, expected in ((pipe, "no regular file"), (Path("/dev/zero"), "no regular file"), (large, "at most 10737")):
        for read in (lambda one: load_json(one, "plan"), read_records):
            with pytest.raises(InputError, match=expected):
                read(path)


def test_a_key_that_stands_twice_is_refused_in_every_file(tmp_path: Path) -> None:
    path = tmp_path / "twice.json"
    path.write_text('{"a": [{"b": 1, "b": 2}]}')
    for read in (lambda one: load_json(one, "plan"), read_records):
        with pytest.raises(InputError, match="the key 'b' stands twice in one object"):
            read(path)


def test_malformed_json_names_file_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"a": 1,\n  b}')
    with pytest.raises(InputError, match=r"profile .*bad\.json is not valid JSON at line 2, column 3"):
        load_json(path, "profile")


def test_median_interval_is_order_statistics() -> None:
    assert median_interval([3.0]) == (3.0, 3.0, 3.0)
    assert median_interval([2.0, 1.0]) == (1.5, 1.0, 2.0)
    assert median_interval([float(k) for k in range(11)]) == (5.0, 1.0, 9.0)
    with pytest.raises(InputError):
        median_interval([])


def test_median_interval_holds_the_median_as_often_as_it_says() -> None:
    rng = random.Random(5)
    hits = 0
    for _ in range(2000):
        _, low, high = median_interval([rng.gauss(0, 1) for _ in range(9)])
        hits += low <= 0 <= high
    assert hits / 2000 > 0.94

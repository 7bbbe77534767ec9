"""Rows of training states survive a round trip, in one file with rows of other kinds."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from test_records import ROW

from relaymeter.errors import InputError
from relaymeter.records import dump_lines, read_records, write_text
from relaymeter.row_files import read_rows
from relaymeter.state_records import OffloadRecord, StateRecord

STATE = StateRecord(
    utc="2026-01-02T03:04:05Z", machine_id="abc", launch_id="def", commit=None, shaped=False, scenario="state-matrix",
    row="world size", change="z3-4-2-4", leg=1, source="zero3 x4", destination="zero3 x2", planner="classes",
    fallback_tensors=0, ranks=4, nodes=1, model="dense", dtype="bfloat16", optimizer="AdamW", build_s=None, plan_s=0.01,
    prepare_s=0.002, move_s=0.02, fields_s=0.001, refresh_s=0.003, total_s=0.026, bytes_total=54_000,
    bytes_in_rank=1000, bytes_in_node=53_000, bytes_cross_node=0, messages=8, held_bytes=None,
    held_after_bytes=None, peak_bytes=9000,
    peak_predicted_bytes=10_000, digest_version=1, digest_passed=40, digest_total=40,
    mismatch=None, fields=(), oracle_passed=30, oracle_total=30,
    oracle_mismatch=None, continuation="", continuation_ok=True, checkpoint="not asked", verdict="ok", ok=True,
)  # fmt: skip
OFFLOAD = OffloadRecord(
    utc="2026-01-02T03:04:05Z", machine_id="abc", launch_id="def", commit=None, shaped=False, scenario="offload",
    ranks=2, stage=3, way="deepspeed", state="hp_params", moment="after a step", pinned=True, blocking=False,
    bytes=4_000_000, offload_s=0.01, reload_s=0.02, allocated_before_bytes=None, allocated_after_bytes=None,
    allocated_reloaded_bytes=None, host_growth_bytes=0, equal=True, mismatch=None, trains="bit-equal", verdict="ok",
    ok=True,
)  # fmt: skip


def test_rows_of_every_kind_come_back_from_one_file(tmp_path: Path) -> None:
    rows = [
        STATE,
        ROW,
        OFFLOAD,
        replace(STATE, fields=("group 0 lr: 0.1 there, 0.2 here",), verdict="wrong bits", ok=False),
    ]
    write_text(tmp_path / "rows.jsonl", dump_lines(rows))
    assert read_rows(tmp_path / "rows.jsonl") == rows


def test_a_row_says_its_kind_and_not_a_number_becomes_null() -> None:
    entry = json.loads(dump_lines([replace(STATE, plan_s=math.nan)]))
    assert (entry["kind"], entry["plan_s"], entry["fields"]) == ("training-state", None, [])
    assert json.loads(dump_lines([OFFLOAD]))["kind"] == "offload"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"fields": "lr"}, 'line 1: fields = "lr": expected a list'),
        ({"total_s": "0.1"}, 'line 1: total_s = "0.1": expected a number or null'),
        ({"kind": ["mystery"]}, "line 1: record of kind ['mystery']: this version reads compare,"),
        ({"kind": "mystery"}, "line 1: record of kind 'mystery': this version reads compare, offload, training-state"),
        ({"schema_version": 9}, "line 1: record of schema_version 9: this version reads 1"),
        ({"extra": 1}, "line 1: record does not have the expected fields: extra differ"),
    ],
)
def test_a_row_that_cannot_be_read_is_refused_with_its_line(
    change: dict[str, object], expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**STATE.to_dict(), **change}) + "\n")
    with pytest.raises(InputError) as refused:
        read_rows(path)
    assert expected in str(refused.value)


def test_offloads_are_read_as_strictly(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**OFFLOAD.to_dict(), "pinned": 1}) + "\n")
    with pytest.raises(InputError, match="line 1: pinned = 1: expected true or false or null"):
        read_rows(path)


def test_a_reader_of_moves_of_weights_says_who_reads_the_other_kinds(tmp_path: Path) -> None:
    write_text(tmp_path / "rows.jsonl", dump_lines([OFFLOAD]))
    with pytest.raises(InputError, match=r"line 1: record of kind 'offload' is no move of weights: .*read_rows"):
        read_records(tmp_path / "rows.jsonl")

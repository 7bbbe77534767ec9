"""Moves of replicas on four ranks of two declared nodes: old replicas, both sources, a refill, partitions, plans.

The ranks run on plain loopback, which needs no rights.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import nursery
import pytest

from relaymeter.harness import emit_run
from relaymeter.harness.config import Scenario
from relaymeter.harness.jobs import RunJob, RunStamp, dump
from relaymeter.harness.moves import plan_scenario
from relaymeter.harness.plan_file import PlanFile, RoutedMove, save_plan
from relaymeter.harness.scenario import load_scenario
from relaymeter.harness.verdict import judge
from relaymeter.records import MoveRecord, dump_json, load_json
from relaymeter.relayout.topology import Topology

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

TEXT = """
[model]
hidden_size = 64
intermediate_size = 96
num_hidden_layers = 1
num_attention_heads = 4
num_key_value_heads = 1
head_dim = 16
vocab_size = 96
tie_word_embeddings = true

[source]
steps = 1
seed = 3

[[moves]]
name = "sync"
tensor_parallel = 2

[[moves]]
name = "change"
from = "old"
from_tensor_parallel = 2
tensor_parallel = 1

[[moves]]
name = "lost"
from = "both"
from_tensor_parallel = 2
from_lost_ranks = [3]
tensor_parallel = 1

[[moves]]
name = "refill"
from = "both"
from_tensor_parallel = 2
from_lost_ranks = [3]
tensor_parallel = 2
only_ranks = [3]

[[moves]]
name = "partitions"
kind = "zero3"
nodes = "all"
"""


def scenario(folder: Path, moves: tuple[str, ...] = ()) -> Scenario:
    path = folder / "mine.toml"
    path.write_text(TEXT)
    found = load_scenario(str(path))
    return found.model_copy(update={"moves": tuple(m for m in found.moves if not moves or m.name in moves)})


def run(folder: Path, **changes: object) -> list[MoveRecord]:
    """Rows of a job on four ranks, two on each declared node."""
    stamp = RunStamp(utc="2026-01-02T03:04:05Z", launch_id="x", machine_id="y", commit=None)
    job = RunJob.model_validate(
        {"scenario": scenario(folder).model_dump(by_alias=True), "bucket_bytes": 16384, "repeats": 1,
         "time_limit_s": 110, "move_limit_s": 20, "stamp": stamp.model_dump(), **changes}
    )  # fmt: skip
    (folder / "job.json").write_text(dump_json(dump(job)))
    ended = nursery.command([str(folder)], folder, os.environ, 115.0, module="launched")
    assert ended.returncode == 0, ended.stderr
    entries = load_json(folder / "result.json", "result")["rows"]
    return [MoveRecord.from_dict(entry) for entry in entries]


def test_every_bit_arrives_from_old_replicas_and_the_trainer_by_both_planners(tmp_path: Path) -> None:
    rows = run(tmp_path, planner="both")
    names = ["sync", "change", "lost", "refill", "partitions"]
    assert [(row.move, row.planner, row.route) for row in rows] == [
        (name, planner, route)
        for name in names for planner in ("classes", "affine") for route in ("direct", "relay", "spread")
    ]  # fmt: skip
    for row in rows:
        assert row.ok and row.digest_passed == row.digest_total > 0, (row.move, row.mismatch)
        assert (row.bound_s, row.predicted_s, row.error, row.chosen) == (None, None, None, False)
        assert sum(row.source_bytes.values()) == row.bytes_total
        assert row.bytes_in_rank is not None
    assert judge(rows).exit_code == 0
    assert emit_run.planner_lines(rows)[0].endswith("in 15 of 15 configurations")
    first = {row.move: row for row in reversed(rows)}
    assert set(first["change"].source_bytes) == {"old"} and first["change"].bytes_cross_node == 0
    assert min(first["lost"].source_bytes.values()) > 0
    assert first["lost"].route_bytes["relay"] == 0 and first["lost"].bytes_cross_node > 0
    refilled = [row for row in rows if row.move == "refill"]
    assert {row.bytes_total for row in refilled} == {first["refill"].bytes_total}
    assert first["refill"].bytes_total == first["sync"].bytes_total // 2
    assert first["refill"].source_bytes["trainer"] > 0
    assert first["partitions"].source_bytes == {"trainer": first["partitions"].bytes_total}


def test_a_plan_runs_as_it_was_written_also_where_it_gives_its_source_up(tmp_path: Path) -> None:
    wanted = scenario(tmp_path, ("change",))
    topology = Topology.grid(2, 2)
    (move,) = plan_scenario(wanted, topology, 8192)
    codes = np.arange(len(move.groups), dtype=np.int8) % 3
    schedules = {**move.uniform(), "chosen": codes}
    routed = RoutedMove.of(move, {})
    hashes = {**routed.schedules, "chosen all-to-all": move.schedule(codes)[0].input_hash.hex()}
    routed = replace(routed, chosen={"all-to-all": codes}, schedules=hashes)
    save_plan(PlanFile(wanted, topology, "classes", "all-to-all", (routed,), None), tmp_path / "plan.json")
    job = {"plan": str(tmp_path / "plan.json"), "scenario": wanted.model_dump(by_alias=True), "bucket_bytes": None}
    rows = run(tmp_path, **job, max_extra_bytes=65536)
    assert [(row.move, row.route, row.executor, row.bucket_bytes) for row in rows] == [
        ("change", route, "all-to-all", 8192) for route in schedules
    ]
    for row in rows:
        assert row.ok and row.digest_passed == row.digest_total > 0, row.mismatch
        made = move.schedule(schedules[row.route])[0]
        assert (row.rounds, row.bytes_in_node) == (made.rounds, made.bytes_in_node)
        assert row.chosen is (row.route == "chosen") or made.input_hash.hex() == hashes["chosen all-to-all"]
        assert row.max_extra_bytes == 65536 and 0 < row.peak_predicted_bytes <= 65536

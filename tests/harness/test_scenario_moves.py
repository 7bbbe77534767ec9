"""Where moves start and end: old replicas, both sources, unequal replicas, single ranks, ZeRO-3 over other nodes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from relaymeter.errors import InputError, LayoutError
from relaymeter.harness.config import MoveConfig, Scenario
from relaymeter.harness.moves import PlannedMove, executors_of, plan_scenario, planners_of
from relaymeter.harness.scenario import destination_layout, load_scenario, load_suite, old_ranks, source_layouts
from relaymeter.relayout.plan_json import check_plan
from relaymeter.relayout.topology import Topology

BOX = Topology.grid(2, 4)
GATE = "model.layers.0.mlp.gate_proj.weight"  # [384, 128], cut by rows
NORM = "model.norm.weight"


def scenario_with(**keys: object) -> tuple[Scenario, MoveConfig]:
    """The smoke scenario with one move of these keys (``from_`` stands for ``from``)."""
    entry = {"name": "m", "nodes": [1], **{key.rstrip("_"): value for key, value in keys.items()}}
    move = MoveConfig.model_validate(entry)
    return load_scenario("smoke").model_copy(update={"moves": (move,)}), move


def planned(**keys: object) -> PlannedMove:
    (found,) = plan_scenario(scenario_with(**keys)[0], BOX)
    return found


def rows_of(name: str, **keys: object) -> dict[int, tuple[int, int]]:
    """First row and rows that each rank holds of the weight ``name`` at the destination."""
    scenario, move = scenario_with(**keys)
    place = destination_layout(scenario, move, BOX).placements[name]
    return {int(rank): (int(place.lo[k, 0]), int(place.shape[k, 0])) for k, rank in enumerate(place.rank)}


def test_replicas_of_unequal_degrees_take_neighbouring_ranks_in_turn() -> None:
    assert rows_of(GATE, tensor_parallel=[2, 1, 1]) == {4: (0, 192), 5: (192, 192), 6: (0, 384), 7: (0, 384)}


def test_only_the_named_ranks_get_their_shards() -> None:
    assert rows_of(GATE, tensor_parallel=4, only_ranks=[5]) == {5: (96, 96)}
    move = planned(tensor_parallel=4, only_ranks=[5], from_="both", from_tensor_parallel=2, from_nodes=[1])
    assert move.destination.partial
    assert {rank for found in move.plan.classes for rank in found.dst_rank.tolist()} == {5}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"only_ranks": [5, 3]}, r"only_ranks: rank 3 holds no part of the destination \(its ranks: 4, 5, 6, 7\)"),
        (
            {"from_": "old", "from_tensor_parallel": 2, "from_replicas": 1, "from_lost_ranks": [6]},
            r"from_lost_ranks: rank 6 holds no part of the old replicas \(its ranks: 4, 5\)",
        ),
        (
            {"from_": "old", "from_tensor_parallel": 2, "from_replicas": 1, "from_lost_ranks": [4, 5]},
            r"no rank of the old replicas is left: leave 'old' out of from",
        ),
        (
            {"from_": "old", "from_tensor_parallel": 4, "from_replicas": 2},
            r"old replicas: from_tensor_parallel 4 x from_replicas 2 = 8 ranks asked, 4 given \(node 1\)",
        ),
    ],
)
def test_ranks_that_are_not_there_are_named(keys: dict[str, object], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        planned(**keys)


def test_a_lost_shard_that_no_source_has_is_refused_and_comes_from_the_trainer_where_that_is_one() -> None:
    keys = {"tensor_parallel": 2, "from_tensor_parallel": 4, "from_nodes": [1], "from_lost_ranks": [5]}
    with pytest.raises(
        LayoutError, match=r"^scenario smoke, move m: tensor model\.embed_.*rank 5 has lost: .* 'both'$"
    ):
        planned(from_="old", **keys)
    move = planned(from_="both", **keys)
    assert list(move.sources) == ["old", "trainer"]
    lost = 2 * (1024 * 128 // 4) * 2  # a quarter of the embedding, on two replicas, in bfloat16
    assert move.source_bytes["trainer"] > lost
    assert sum(move.source_bytes.values()) == sum(move.destination.storage_bytes(rank) for rank in range(8))


def test_the_order_of_from_decides_where_both_sources_are_equally_far() -> None:
    third = Topology.grid(3, 2)
    found = {}
    for order in (["old", "trainer"], ["trainer", "old"]):
        scenario, _ = scenario_with(nodes=[2], from_=order, from_tensor_parallel=2, from_nodes=[1])
        (move,) = plan_scenario(scenario, third)
        found[order[0]] = {name for name, count in move.source_bytes.items() if count}
    assert found == {"old": {"old"}, "trainer": {"trainer"}}


def test_an_old_replica_on_the_destination_ranks_is_copied_in_place() -> None:
    move = planned(tensor_parallel=2, from_="old", from_tensor_parallel=2, from_nodes=[1])
    assert move.bytes_in_rank == move.source_bytes["old"] > 0
    assert move.schedule(move.groups.uniform(0))[0].bytes_in_node == 0


def test_partitions_of_zero3_move_over_other_nodes() -> None:
    scenario, move = scenario_with(kind="zero3", nodes="all")
    layout = destination_layout(scenario, move, BOX)
    assert layout.placements[NORM].storage == dict.fromkeys(range(8), 16)
    (found,) = plan_scenario(scenario, BOX)
    assert found.source_bytes == {"trainer": sum(spec.numel for spec in layout.specs.values()) * 2}


def test_old_replicas_stand_on_their_own_nodes() -> None:
    scenario, move = scenario_with(from_="old", from_tensor_parallel=[1, 2], from_nodes="all")
    assert old_ranks(scenario, move, BOX) == ((0,), (1, 2))
    assert list(source_layouts(scenario, move, BOX)) == ["old"]
    assert old_ranks(*scenario_with(), BOX) == ()


def test_choices_stand_for_planners_and_executors() -> None:
    assert planners_of("both") == ("classes", "affine")
    assert executors_of("auto") == ("send-recv",)
    assert executors_of("auto", backend="nccl") == ("all-to-all",)
    assert executors_of("both", backend="nccl") == ("all-to-all", "send-recv")


def test_the_transitions_are_three_syncs_four_layout_changes_and_three_out_of_both_sources() -> None:
    scenario = load_suite("transitions")
    moves = plan_scenario(scenario, BOX, scenario.suite.bucket_bytes if scenario.suite else None)
    assert [tuple(move.sources) for move in moves] == [("trainer",)] * 3 + [("old",)] * 4 + [("old", "trainer")] * 3
    for move in moves:
        check_plan(move.plan, tuple(move.sources.values()), move.destination, BOX)
        assert all(count > 2**20 for count in move.source_bytes.values()), "every source serves a part"
        routes = {name: move.schedule(codes)[0] for name, codes in move.uniform().items()}
        assert routes["direct"].bytes_total == sum(move.source_bytes.values())
        if "trainer" in move.sources:
            assert routes["relay"].bytes_cross_node < routes["direct"].bytes_cross_node
            assert routes["direct"].rounds > 1, "buckets follow each other"
        else:
            assert routes["direct"].bytes_cross_node == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_both_planners_send_the_same_bytes_between_nodes_in_every_transition() -> None:
    pytest.importorskip("deepspeed")
    scenario = load_suite("transitions")
    sent: dict[tuple[str, str], dict[str, int]] = {}
    fell: dict[str, int] = {}
    for move in plan_scenario(scenario, BOX, 1 << 20, planners=planners_of("both")):
        for name, codes in move.uniform().items():
            sent.setdefault((move.name, name), {})[move.planner] = move.schedule(codes)[0].bytes_cross_node
        fell[move.name] = sum(one.tensors for one in move.fallbacks) or fell.get(move.name, 0)
    assert len(sent) == 30
    assert all(set(found) == {"classes", "affine"} and len(set(found.values())) == 1 for found in sent.values())
    assert {name for name, count in fell.items() if count} <= {name for name in fell if name.endswith("-both")}


def test_pieces_of_a_layout_file_say_which_copy_they_belong_to(tmp_path: Path) -> None:
    scenario, _ = scenario_with()
    specs = destination_layout(*scenario_with(), BOX).specs
    whole = {name: [{"rank": 0, "lo": [0] * len(s.shape), "shape": list(s.shape)}] for name, s in specs.items()}
    halves = [{"rank": rank, "lo": [64 * k], "shape": [64], "copy": 1} for k, rank in enumerate((1, 2))]
    path = tmp_path / "layout.json"
    path.write_text(json.dumps({"tensors": {**whole, NORM: [*whole[NORM], *halves]}}))
    move = MoveConfig.model_validate({"name": "m", "layout": str(path)})
    place = destination_layout(scenario, move, BOX).placements[NORM]
    assert place.covers == ((0,), (1, 2))
    assert np.array_equal(place.copies, [0, 1, 1])


def test_the_examples_of_the_documentation_plan_on_two_nodes_of_four_ranks(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "scenarios.md").read_text()
    whole, moves, *_ = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "mine.toml").write_text(whole + moves)
    found = plan_scenario(load_scenario(str(tmp_path / "mine.toml")), BOX)
    assert [move.name for move in found] == [
        "tp2", "one-copy", "everywhere", "tp4-tp2x2", "tp4-tp2x2-lost", "refill", "uneven", "grow-trainer",
    ]  # fmt: skip
    refill = next(move for move in found if move.name == "refill")
    assert {rank for one in refill.plan.classes for rank in one.dst_rank.tolist()} == {5}
    assert refill.source_bytes["old"] and not refill.source_bytes["trainer"], "rank 7 holds the same half"

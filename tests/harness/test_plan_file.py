"""A plan file holds everything a run needs, comes back as it was, and is refused where it no longer fits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaymeter.errors import InputError
from relaymeter.harness.config import Scenario
from relaymeter.harness.moves import PlannedMove, plan_scenario, route_bytes, select_moves
from relaymeter.harness.plan_file import PlanFile, RoutedMove, _hash, load_plan, save_plan
from relaymeter.harness.scenario import load_scenario, source_layout
from relaymeter.relayout.routes import ROUTES, SPREAD
from relaymeter.relayout.topology import Topology

BOX = Topology.grid(2, 4)


def scenario() -> Scenario:
    return select_moves(load_scenario("transitions"), ["sync-tp2x2", "tp4-tp2x2-both"])


def routed(moves: tuple[PlannedMove, ...]) -> tuple[RoutedMove, ...]:
    """The moves, each with a route array as a profile of send-recv would have chosen it."""
    made = []
    for move in moves:
        codes = np.where(np.arange(len(move.groups)) % 2, SPREAD, 0).astype(np.int8)
        bare = RoutedMove.of(move, {})
        hashes = {**bare.schedules, "chosen send-recv": move.schedule(codes)[0].input_hash.hex()}
        made.append(replace(bare, chosen={"send-recv": codes}, schedules=hashes))
    return tuple(made)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "plan.json"
    moves = plan_scenario(scenario(), BOX, 1 << 20)
    save_plan(PlanFile(scenario(), BOX, "classes", "auto", routed(moves), {"machine_id": "abc"}), found)
    return found


def test_a_plan_comes_back_with_the_schedules_it_was_written_for(path: Path) -> None:
    found = load_plan(path)
    assert (found.scenario, found.topology, found.planner, found.executor) == (scenario(), BOX, "classes", "auto")
    assert found.profile == {"machine_id": "abc"}
    for was, now in zip(plan_scenario(scenario(), BOX, 1 << 20), found.planned(BOX), strict=True):
        assert (now.name, now.planner, now.bucket_bytes) == (was.name, was.planner, 1 << 20)
        assert list(now.sources) == list(was.sources)
        chosen = found.chosen(now.name, now.planner, "send-recv")
        assert chosen is not None
        for codes in (*was.uniform().values(), chosen):
            assert now.schedule(codes)[0].input_hash == was.schedule(codes)[0].input_hash
            assert now.schedule(codes)[0].all_segments.src_offset.tolist() == (
                was.schedule(codes)[0].all_segments.src_offset.tolist()
            )
        assert found.chosen(now.name, now.planner, "all-to-all") is None


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        (
            Topology.grid(2, 2),
            r"another topology: nodes of the ranks \[0, 0, 0, 0, 1, .*\] in the plan, \[0, 0, 1",
        ),
        (Topology.grid(2, 4, "node"), r"another topology: NICs of the ranks \[0, 1, 2, .*\] in the plan, \[0, 0, 0, 0"),
    ],
)
def test_a_plan_for_another_topology_is_refused_with_the_field(path: Path, topology: Topology, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        load_plan(path).planned(topology)


def test_a_plan_is_held_against_the_layout_of_the_live_trainer(path: Path) -> None:
    found = load_plan(path)
    assert len(found.planned(BOX, source_layout(scenario(), BOX))) == 2
    other = scenario().model.model_copy(update={"vocab_size": 4096})
    with pytest.raises(InputError, match=r"model\.embed_tokens\.weight: bfloat16 \[2048, 256\].*\[4096, 256\]"):
        found.planned(BOX, source_layout(scenario().model_copy(update={"model": other}), BOX))
    fewer = scenario().source.model_copy(update={"nodes": (1,)})
    with pytest.raises(InputError, match=r"tensor .*: segment 0 reads"):
        found.planned(BOX, source_layout(scenario().model_copy(update={"source": fewer}), BOX))


def test_a_plan_of_a_changed_model_is_refused_with_the_tensor(path: Path) -> None:
    found = load_plan(path)
    model = found.scenario.model.model_copy(update={"intermediate_size": 1024})
    changed = replace(found, scenario=found.scenario.model_copy(update={"model": model}))
    with pytest.raises(InputError, match=r"mlp\.gate_proj\.weight: bfloat16 \[768, 256\] in the plan, .*\[1024"):
        changed.planned(BOX)


def _edit(entry: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**entry, **changes}


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda e: _edit(e, planner="affine"), r"was edited after it was written \(its sha256 differs\)"),
        (lambda e: _edit(e, moves=e["moves"][:1]), r"was edited after it was written"),
        (lambda e: _edit(e, schema_version=99), r"schema_version 99, this version reads 1"),
        (lambda e: {"tensors": {}}, r"is no plan: make one with relaymeter plan --out FILE"),
        (lambda e: [], r"is no plan"),
    ],
)
def test_what_is_no_intact_plan_is_refused(path: Path, edit: Any, expected: str) -> None:
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))
    with pytest.raises(InputError, match=expected):
        load_plan(path)


def _change(number: int, **changes: Any) -> Any:
    return lambda e: {**e, "moves": [{**m, **changes} if k == number else m for k, m in enumerate(e["moves"])]}


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (_change(0, schedules=8), r"plan\.json, moves\[0\]: schedules 8 is no object with hashes by route"),
        (_change(1, chosen=False), r"moves\[1\]: chosen False is no object with lists of route codes"),
        (_change(1, chosen={"send-recv": [0, 4]}), r"moves\[1\]: chosen .* is no object with lists of route codes"),
        (_change(0, bucket_bytes=True), r"moves\[0\]: bucket_bytes True is no size in bytes"),
        (_change(0, planner=["affine"]), r"moves\[0\]: planner \['affine'\] is no planner"),
        (_change(0, move="else"), r"moves\[0\]: 'else' by classes is no move of its scenario"),
        (_change(0, plan=[]), r"moves\[0\]: plan \[\] is no plan"),
        (lambda e: {**e, "moves": 3}, r"moves: 3 is no list of moves"),
        (lambda e: {**e, "moves": [e["moves"][0]] * 2}, r"moves\[1\]: 'sync-tp2x2' by classes is there twice"),
        (lambda e: {**e, "topology": None}, r"is incomplete \(TypeError"),
    ],
)
def test_a_malformed_plan_is_refused_with_the_entry_although_its_hash_is_right(
    path: Path, edit: Any, expected: str
) -> None:
    content = edit({key: value for key, value in json.loads(path.read_text()).items() if key != "sha256"})
    path.write_text(json.dumps({**content, "sha256": _hash(content)}))
    with pytest.raises(InputError, match=expected):
        load_plan(path)


def test_a_plan_with_a_key_that_stands_twice_is_refused(path: Path) -> None:
    path.write_text(path.read_text().replace("{", '{"planner": "affine",', 1))
    with pytest.raises(InputError, match="the key 'planner' stands twice in one object"):
        load_plan(path)


def test_chosen_routes_of_another_number_of_groups_are_refused(path: Path) -> None:
    found = load_plan(path)
    short = replace(found.moves[0], chosen={"send-recv": found.moves[0].chosen["send-recv"][1:]})
    with pytest.raises(InputError, match=r"move sync-tp2x2 \(classes\): \d+ routes chosen for send-recv, the plan has"):
        replace(found, moves=(short,)).planned(BOX)


def test_a_plan_is_not_written_over_another_file(path: Path) -> None:
    with pytest.raises(InputError, match="--force"):
        save_plan(load_plan(path), path)
    save_plan(load_plan(path), path, force=True)
    assert load_plan(path).scenario == scenario()


def test_a_chain_is_written_and_read_back_where_several_nodes_want_the_same(tmp_path: Path) -> None:
    """Copies on the second half of the nodes: on nodes 2 and 3 of four, on node 1 of two."""
    short = select_moves(load_scenario("smoke"), ["tp1"])
    assert "chain" not in plan_scenario(short, Topology.grid(2, 2))[0].uniform()
    grid = Topology.grid(4, 2)
    (move,) = plan_scenario(short, grid, 1 << 16)
    assert list(move.uniform()) == list(ROUTES)
    codes = move.uniform()["chain"]
    schedule = move.schedule(codes)[0]
    assert schedule.rounds == move.schedule(move.uniform()["relay"])[0].rounds + 1
    assert route_bytes(move.groups, codes) == {**dict.fromkeys(ROUTES, 0), "chain": schedule.bytes_total}
    bare = RoutedMove.of(move, {})
    hashes = {**bare.schedules, "chosen send-recv": schedule.input_hash.hex()}
    made = replace(bare, chosen={"send-recv": codes}, schedules=hashes)
    save_plan(PlanFile(short, grid, "classes", "auto", (made,), None), tmp_path / "plan.json")
    found = load_plan(tmp_path / "plan.json")
    again = found.planned(grid)[0].schedule(found.chosen("tp1", "classes", "send-recv"))[0]  # type: ignore[arg-type]
    assert again.all_segments.dst_offset.tolist() == schedule.all_segments.dst_offset.tolist()
    entry = made.to_dict()
    entry["chosen"]["send-recv"][0] = len(ROUTES)
    with pytest.raises(InputError, match=r"lists of route codes \(0 to 3\) by executor"):
        RoutedMove.from_dict(entry)

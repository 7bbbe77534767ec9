"""The planner through DeepSpeed's plan_transfer, and the exchange of placements with it, against gather-and-slice."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import POISON, execute, storages, whole_tensors
from strategies import layouts, moves_from_several, tensor_specs

from relaymeter.errors import InputError, LayoutError
from relaymeter.harness.moves import plan_scenario
from relaymeter.harness.scenario import load_scenario, shipped_scenarios
from relaymeter.relayout.affine import LIMITS, affine_rows, from_affine_map, plan_move_affine, to_affine_map
from relaymeter.relayout.affine_maps import import_affine
from relaymeter.relayout.layout import Layout, Placement, TensorSpec
from relaymeter.relayout.placements import (
    Cut,
    flat_placement,
    restrict_layout,
    shard_placement,
    tensor_parallel_layout,
    zero3_layout,
)
from relaymeter.relayout.plan_json import check_plan
from relaymeter.relayout.planner import MovePlan, plan_move
from relaymeter.relayout.routes import ROUTES, block_groups
from relaymeter.relayout.schedule import build_schedule
from relaymeter.relayout.segments import source_space
from relaymeter.relayout.topology import Topology

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed: pip install 'relaymeter[deepspeed]'"
)

GRID = Topology.grid(2, 4)
WORLD = GRID.world_size

Sources = Layout | Sequence[Layout]


def specs_of(**shapes: tuple[int, ...]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, shape, "int64") for name, shape in shapes.items()}


SPECS = specs_of(rows=(8, 6), columns=(8, 8), heads=(8, 4), norm=(8,), scalar=(), none=(0, 3))
CUTS = {"rows": Cut(0), "columns": Cut(1), "heads": Cut(0, 2), "norm": Cut(None), "scalar": Cut(None), "none": Cut(0)}
RAGGED = specs_of(rows=(6, 5), columns=(6, 5), norm=(7,))


def zero3(ranks: Sequence[int], specs: Mapping[str, TensorSpec] = SPECS) -> Layout:
    return zero3_layout(specs, ranks, WORLD, "trainer")


def copies(*replicas: Sequence[int], specs: Mapping[str, TensorSpec] = SPECS) -> Layout:
    return tensor_parallel_layout(specs, {name: CUTS[name] for name in specs}, replicas, WORLD, "copies")


def placed(shape: tuple[int, ...], place: Placement, **other: Placement) -> Layout:
    specs = specs_of(w=shape, **dict.fromkeys(other, shape))
    return Layout("placed", WORLD, specs, {"w": place, **other})


def move_by_every_route(plan: MovePlan, sources: Sequence[Layout], destination: Layout) -> tuple[int, ...]:
    """Move by every route, hold all storages against gather-and-slice; the bytes across nodes of each route."""
    whole = {name: array for layout in (destination, *sources) for name, array in whole_tensors(layout).items()}
    given_, wanted = [storages(layout, whole) for layout in sources], storages(destination, whole)
    check_plan(plan, sources, destination, plan.topology)
    found = []
    for code in range(len(ROUTES)):
        groups = block_groups(plan, plan.topology)
        schedule = build_schedule(plan, plan.topology, groups.uniform(code), 100)
        moved = storages(destination, None)
        execute(schedule, given_, moved)
        for key, expected in wanted.items():
            np.testing.assert_array_equal(moved[key], expected, err_msg=f"{ROUTES[code]} {key}")
        found.append(schedule.bytes_cross_node)
    return tuple(found)


def planned_alike(sources: Sources, destination: Layout, topology: Topology = GRID) -> MovePlan:
    """The plan through plan_transfer, after both planners moved everything right with equal bytes across nodes."""
    listed = [sources] if isinstance(sources, Layout) else list(sources)
    ours, theirs = plan_move(listed, destination, topology), plan_move_affine(listed, destination, topology)
    assert theirs.planner == "affine" and ours.planner == "classes" and not ours.fallbacks
    assert theirs.input_hash == ours.input_hash
    assert move_by_every_route(ours, listed, destination) == move_by_every_route(theirs, listed, destination)
    return theirs


def reasons(**limits: str) -> dict[str, str]:
    return {name: LIMITS[limit] for name, limit in limits.items()}


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        (zero3(range(4)), zero3((4, 5))),
        (zero3(range(4), RAGGED), zero3((4, 5), RAGGED)),
        (zero3((0, 1)), zero3((0, 1, 2, 3))),
        (copies((0, 1, 2, 3)), copies((4, 5))),
        (copies((0, 1, 2, 3)), copies((0, 1), (2, 3))),
        (zero3(range(4)), copies((4, 5, 6, 7))),
        (zero3(range(4)), copies((4, 5), (6, 7))),
        (copies((0, 1), (2, 3)), copies((4,), (5,), (6,), (7,))),
        (copies((0,), (5,)), copies((6,), (7,))),
        (copies((0, 1, 2, 3)), zero3((4, 5, 6, 7))),
        (zero3(range(4)), copies((4,), (5, 6))),
    ],
    ids=[
        "ZeRO-3 x4 to x2",
        "ZeRO-3 x4 to x2, parts ending inside rows",
        "ZeRO-3 x2 to x4 on common ranks",
        "TP4 to TP2",
        "TP4 to TP2 x 2 on the same ranks",
        "ZeRO-3 to TP4",
        "ZeRO-3 to TP2 x 2",
        "TP2 x 2 to TP1 x 4",
        "replicas to replicas",
        "TP4 to ZeRO-3",
        "ZeRO-3 to copies of two degrees",
    ],
)
def test_moves_that_plan_transfer_expresses_are_all_planned_by_it(source, destination):
    assert planned_alike(source, destination).fallbacks == {}


def test_a_flat_range_that_ends_inside_a_row_is_planned_flat_against_rows_and_falls_back_against_columns():
    plan = planned_alike(zero3(range(4), RAGGED), copies((4, 5), (6, 7), specs=RAGGED))
    assert plan.fallbacks == reasons(columns="ragged range")


def test_a_range_inside_a_row_and_one_that_wraps_once_are_boxes_of_their_own():
    place = flat_placement((2, 8), [(0, 0, 4), (1, 4, 12), (2, 12, 16)], {0: 4, 1: 8, 2: 4})
    columns = shard_placement((2, 8), {4: ((0, 0), (2, 4)), 5: ((0, 4), (2, 4))})
    assert planned_alike(placed((2, 8), place), placed((2, 8), columns)).fallbacks == {}


def test_two_source_layouts_fall_back_exactly_where_their_parts_differ():
    plan = planned_alike([copies((4, 5, 6, 7)), zero3(range(4))], copies((4, 5), (6, 7)))
    assert plan.fallbacks == reasons(
        columns="uneven holders", heads="uneven holders", norm="uneven holders"
    )  # rows: a quarter of the rows is a quarter of the flattened tensor


def test_a_rank_in_two_source_layouts_serves_out_of_the_first_of_them():
    old, trainer = copies((0, 1, 2, 3)), copies((0, 1, 2, 3))
    plan = planned_alike([old, trainer], copies((4, 5, 6, 7)))
    assert plan.fallbacks == {}
    assert {int(space) for found in plan.classes for space in found.src_space} == {0}
    survivors = restrict_layout(copies((4, 5, 6, 7)), (4, 6, 7))
    plan = planned_alike([survivors, trainer], copies((4, 5, 6, 7)))
    rows = next(found for found in plan.classes if plan.tensors[int(found.tensors[0])].name == "rows")
    assert sorted(zip(rows.src_rank.tolist(), rows.src_space.tolist(), rows.dst_rank.tolist(), strict=True)) == [
        (1, source_space(1), 5), (4, 0, 4), (6, 0, 6), (7, 0, 7)
    ]  # fmt: skip


def test_a_destination_that_leaves_elements_out_falls_back():
    plan = planned_alike(zero3(range(4)), restrict_layout(copies((4, 5, 6, 7)), (5,)))
    assert plan.fallbacks == reasons(rows="partial destination", columns="partial destination",
                                     heads="partial destination")  # fmt: skip


def test_sources_that_leave_elements_out_fall_back_and_a_part_that_nobody_holds_is_refused():
    survivors = restrict_layout(zero3(range(4)), (0, 1, 2))
    first = restrict_layout(copies((4, 5, 6, 7)), (4, 5))
    with pytest.raises(LayoutError, match="needs 12 elements, the source offers 0"):
        plan_move_affine(survivors, restrict_layout(copies((4, 5, 6, 7)), (7,), names=("rows",)), GRID)
    plan = planned_alike(survivors, restrict_layout(first, names=("rows",)))
    assert plan.fallbacks == reasons(rows="partial source")


def _several_boxes() -> Placement:
    lo, shape = np.array([[0, 0], [0, 2]]), np.array([[4, 2], [4, 6]])
    return Placement(np.zeros(2, np.int64), lo, shape, np.array([0, 8]), np.array([[2, 1], [6, 1]]), {0: 32})


@pytest.mark.parametrize(
    ("place", "limit"),
    [
        (Placement(np.array([0]), np.zeros((1, 2), np.int64), np.array([[4, 8]]), np.array([0]), np.array([[1, 4]]),
                   {0: 32}), "strides"),
        (Placement(np.array([0]), np.zeros((1, 2), np.int64), np.array([[4, 8]]), np.array([0]), np.array([[10, 1]]),
                   {0: 40}), "padding"),
        (flat_placement((4, 8), [(0, 0, 5), (1, 5, 32)], {0: 5, 1: 27}), "ragged range"),
        (_several_boxes(), "several boxes"),
    ],
    ids=["transposed", "padded rows", "ragged", "boxes one after the other"],
)  # fmt: skip
def test_a_storage_that_is_no_row_major_shard_falls_back_on_either_side(place, limit):
    columns = shard_placement((4, 8), {4: ((0, 0), (4, 3)), 5: ((0, 3), (4, 5))})
    assert planned_alike(placed((4, 8), place), placed((4, 8), columns)).fallbacks == reasons(w=limit)
    assert planned_alike(placed((4, 8), columns), placed((4, 8), place)).fallbacks == reasons(w=limit)


def test_padding_before_and_behind_the_parts_of_a_storage_is_no_obstacle():
    place = flat_placement((4, 8), [(0, 0, 16), (1, 16, 32)], {0: 20, 1: 20})
    shifted = Placement(place.rank, place.lo, place.shape, place.offset + 3, place.stride, place.storage)
    columns = shard_placement((4, 8), {4: ((0, 0), (4, 3)), 5: ((0, 3), (4, 5))})
    for other in (zero3_layout(specs_of(w=(4, 8)), (4, 5, 6), WORLD), placed((4, 8), columns)):
        assert planned_alike(placed((4, 8), shifted), other).fallbacks == {}
        assert planned_alike(other, placed((4, 8), shifted)).fallbacks == {}


def test_a_rank_that_holds_two_copies_is_filled_twice_and_falls_back_as_a_source():
    box = np.zeros((3, 2), np.int64), np.array([[4, 8], [4, 8], [4, 8]])
    twice = Placement(
        np.array([0, 0, 1]), *box, np.array([0, 32, 0]), np.tile([8, 1], (3, 1)), {0: 64, 1: 32}, np.array([0, 1, 2])
    )
    columns = shard_placement((4, 8), {4: ((0, 0), (4, 3)), 5: ((0, 3), (4, 5))})
    assert planned_alike(placed((4, 8), columns), placed((4, 8), twice)).fallbacks == {}
    assert planned_alike(placed((4, 8), twice), placed((4, 8), columns)).fallbacks == reasons(w="held twice")


def test_budgets_and_limits_of_plan_transfer_itself_are_named():
    many = Topology.grid(1, 520)
    specs = specs_of(w=(520, 2))
    plan = plan_move_affine(zero3_layout(specs, range(520), 520), zero3_layout(specs, (0,), 520), many)
    assert plan.fallbacks == {
        "w": "it passes a budget of plan_transfer: source: holder checks exceed max_pair_checks 262144"
    }
    wide = specs_of(w=(2,) * 9)
    cut = [tensor_parallel_layout(wide, {"w": Cut(dim)}, [(0, 1)], WORLD) for dim in (7, 8)]
    assert planned_alike(*cut).fallbacks == {
        "w": "plan_transfer does not express it: source: 9 axes exceeds max_ndim 8"
    }


def test_a_map_that_plan_transfer_calls_contradictory_is_no_fallback(monkeypatch):
    transfer = import_affine("affine_transfer", alone=True)

    def refuse(*_: object, **__: object) -> None:
        raise transfer.InvalidMapError("source pieces cover 3 of its 4 logical elements")

    monkeypatch.setattr(transfer, "plan_transfer", refuse)
    with pytest.raises(LayoutError, match=r"tensor rows \[8, 6\]: plan_transfer refuses it: source pieces cover 3 of"):
        plan_move_affine(zero3(range(4)), copies((4, 5)), GRID)


def test_holders_are_the_rank_itself_then_its_node_then_the_order_of_the_layouts_then_the_least_loaded():
    specs = specs_of(w=(4, 4))

    def chosen(source: Sequence[Layout], *targets: int) -> dict[int, list[tuple[int, int]]]:
        plan = plan_move_affine(source, copies_of(targets), GRID)
        found: dict[int, list[tuple[int, int]]] = {}
        for one in plan.classes:
            for dst, src, space in zip(one.dst_rank, one.src_rank, one.src_space, strict=True):
                found.setdefault(int(dst), []).append((int(src), int(space)))
        return found

    def copies_of(ranks: Sequence[int], cut: int | None = None) -> Layout:
        replicas = [(rank,) for rank in ranks] if cut is None else [tuple(ranks)]
        return tensor_parallel_layout(specs, {"w": Cut(cut)}, replicas, WORLD)

    first, second = copies_of((0, 5)), copies_of((1, 6))
    assert chosen([first], 5) == {5: [(5, 0)]}
    assert chosen([first], 7) == {7: [(5, 0)]}
    assert chosen([second, first], 7) == {7: [(6, 0)]}
    assert chosen([copies_of((0,)), copies_of((6,))], 7) == {7: [(6, source_space(1))]}
    assert chosen([copies_of((1,)), copies_of((2,))], 7) == {7: [(1, 0)]}
    far = chosen([copies_of((0, 1, 2, 3))], 4, 5, 6)
    assert len({served[0] for served in far.values()}) == 1  # ranks of one node name one holder: it can be relayed
    quarters = tensor_parallel_layout(specs, {"w": Cut(0)}, [(4, 5, 6, 7)], WORLD)
    plan = plan_move_affine(copies_of((0, 1, 2, 3)), quarters, GRID)
    assert sorted(plan.classes[0].src_rank.tolist()) == [0, 1, 2, 3]


def test_a_cast_that_was_named_is_planned_and_another_is_refused():
    wide = {name: TensorSpec(name, spec.shape, "float32") for name, spec in SPECS.items()}
    narrow = {name: TensorSpec(name, spec.shape, "bfloat16") for name, spec in SPECS.items()}
    source, destination = zero3(range(4), wide), copies((4, 5), specs=narrow)
    plan = plan_move_affine(source, destination, GRID, cast=dict.fromkeys(SPECS, "bfloat16"))
    assert plan.fallbacks == {} and plan.classes[0].itemsize == 2
    check_plan(plan, source, destination)
    with pytest.raises(LayoutError, match="tensor rows leaves as float32 and arrives as bfloat16"):
        plan_move_affine(source, destination, GRID)


def test_offsets_beyond_32_bits_are_exact():
    specs = specs_of(big=(46341, 46341))
    source = zero3_layout(specs, (0, 1), WORLD)
    plan = plan_move_affine(source, zero3_layout(specs, (4,), WORLD), GRID)
    found = plan.classes[0]
    assert sorted(zip(found.src_rank, found.dst_offset, found.shape[:, 0], strict=True)) == [
        (0, 0, 1_073_744_141), (1, 1_073_744_141, 1_073_744_140)
    ]  # fmt: skip


def test_no_rows_where_a_rank_set_holds_nothing():
    rows, reason = affine_rows(SPECS["none"], (zero3((0,)).placements["none"],), zero3((1,)).placements["none"], GRID)
    assert len(rows) == 0 and reason == ""


@settings(max_examples=60, deadline=None)
@given(moves_from_several())
def test_any_move_by_both_planners_equals_gather_and_slice_with_equal_bytes_across_nodes(move):
    sources, destination, topology = move
    plan = planned_alike(sources, destination, topology)
    assert set(plan.fallbacks.values()) <= set(LIMITS.values())


def _topology_of(name: str) -> Topology:
    """The smallest of 2 x 4 and 2 x 8 ranks that the scenario fits."""
    small = Topology.grid(2, 4)
    try:
        plan_scenario(load_scenario(name), small)
    except InputError:
        return Topology.grid(2, 8)
    return small


#: Tensors that both sources of a suite's move hold and cut differently: all but those cut by rows into equal quarters.
EXPECTED_FALLBACKS = {"tp4-tp2x2-both": 33, "tp2x2-tp1x4-both": 46, "tp2-tp2x2-both": 46}


@pytest.mark.parametrize("name", shipped_scenarios(weights_only=True))
def test_both_planners_send_equal_bytes_across_nodes_on_every_shipped_scenario(name):
    topology = _topology_of(name)
    moves = plan_scenario(load_scenario(name), topology, planners=("classes", "affine"))
    assert len(moves) == 2 * len(load_scenario(name).moves)
    for ours, theirs in zip(moves[::2], moves[1::2], strict=True):
        assert (ours.name, ours.planner, theirs.planner) == (theirs.name, "classes", "affine")
        check_plan(theirs.plan, tuple(theirs.sources.values()), theirs.destination, topology)
        for code in range(len(ROUTES)):
            one, other = (move.schedule(move.groups.uniform(code))[0] for move in (ours, theirs))
            assert one.bytes_cross_node == other.bytes_cross_node, (ours.name, ROUTES[code])
        assert len(theirs.plan.fallbacks) == EXPECTED_FALLBACKS.get(theirs.name, 0), theirs.name
        assert set(theirs.plan.fallbacks.values()) <= {LIMITS["uneven holders"]}
        if theirs.name == "tp4-tp2x2-both":
            kept = {name for name in theirs.destination.specs if name not in theirs.plan.fallbacks}
            assert {name.split(".")[-2] for name in kept} == {"embed_tokens", "q_proj", "gate_proj", "up_proj"}


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)


def test_planning_imports_nothing_else_of_deepspeed_and_prints_nothing():
    done = _python(
        "import sys\n"
        "from relaymeter.relayout.affine import plan_move_affine\n"
        "from relaymeter.relayout.layout import TensorSpec\n"
        "from relaymeter.relayout.placements import zero3_layout\n"
        "from relaymeter.relayout.topology import Topology\n"
        "assert 'torch' not in sys.modules\n"
        "specs = {'w': TensorSpec('w', (8, 4), 'bfloat16')}\n"
        "plan = plan_move_affine(zero3_layout(specs, (0, 1), 2), zero3_layout(specs, (1,), 2), Topology.grid(1, 2))\n"
        "assert plan.planner == 'affine' and not plan.fallbacks and len(plan.classes[0].src_rank) == 2\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'deepspeed']\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("call", [lambda: plan_move_affine(zero3((0,)), zero3((1,)), GRID),
                                  lambda: to_affine_map(SPECS["rows"], zero3((0,)).placements["rows"])])  # fmt: skip
def test_without_deepspeed_the_error_says_how_to_install_it_or_do_without(call: Callable[[], object], monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "deepspeed" else find(name))
    with pytest.raises(InputError, match=r"pip install 'relaymeter\[deepspeed\]', or leave out --planner affine"):
        call()


def test_a_deepspeed_without_plan_transfer_is_named_with_its_version(monkeypatch):
    with pytest.raises(InputError, match=r"DeepSpeed \d.* has no checkpoint.nowhere: version 0.19.8 is needed"):
        import_affine("nowhere", alone=True)


def exchanged(spec: TensorSpec, place: Placement, *, storage: bool = True) -> tuple[object, Placement]:
    """The map of a placement and the placement of that map, both after a journey as JSON."""
    made = to_affine_map(spec, place)
    text = json.dumps(made.to_dict())
    back = type(made).from_dict(json.loads(text))
    assert back.to_dict() == made.to_dict()
    return back, from_affine_map(back, storage=place.storage if storage else None)


def test_the_map_of_a_tensor_parallel_weight_is_the_one_that_deepspeed_builds():
    affine = import_affine("affine")
    spec = specs_of(w=(6, 8))["w"]
    layout = tensor_parallel_layout({"w": spec}, {"w": Cut(1)}, [(0, 1)], WORLD)
    assert to_affine_map(spec, layout.placements["w"]).to_dict() == affine.contiguous_split_map(
        (6, 8), [4, 4], 1).to_dict()  # fmt: skip
    whole = tensor_parallel_layout({"w": spec}, {"w": Cut(None)}, [(0, 1, 2)], WORLD)
    assert to_affine_map(spec, whole.placements["w"]).to_dict() == affine.replicated_map((6, 8), 3).to_dict()


def test_a_partition_that_begins_inside_a_row_is_a_run_of_several_pieces_and_padding_is_left_out():
    spec = RAGGED["rows"]
    place = zero3(range(4), RAGGED).placements["rows"]  # 30 elements in parts of 8, the last with 2 of padding
    found, back = exchanged(spec, place)
    assert found.shard_shapes == {0: (8,), 1: (8,), 2: (2, 4), 3: (6,)}  # rank 2 ends and begins a row with 4 elements
    assert [piece.shape for piece in found.pieces_by_rank[1]] == [(1, 2), (1, 5), (1, 1)]
    assert [piece.dest_offset for piece in found.pieces_by_rank[1]] == [0, 2, 7]
    assert back.storage == place.storage and back.signature == place.signature
    assert from_affine_map(found).storage == {0: 8, 1: 8, 2: 8, 3: 6}


def test_pieces_of_fewer_dims_become_boxes_of_the_tensor():
    affine = import_affine("affine")
    pieces = {
        0: [affine.AffinePiece((8,), 0, (1,), 0, (1,), [0])],
        1: [affine.AffinePiece((12,), 8, (1,), 0, (1,), [1])],
    }
    found = from_affine_map(affine.ParamAffineMap((4, 5), {0: (8,), 1: (12,)}, pieces))
    assert found.signature == flat_placement((4, 5), [(0, 0, 8), (1, 8, 20)], {0: 8, 1: 12}).signature


def test_a_transposed_piece_is_read_and_scaled_or_stepped_ones_are_refused():
    affine = import_affine("affine")

    def one(*piece: object) -> Placement:
        made = affine.AffinePiece(*piece)
        return from_affine_map(affine.ParamAffineMap((4, 6), {0: (24,)}, {0: [made]}))

    turned = one((6, 4), 0, (1, 6), 0, (4, 1), [0])
    assert (turned.shape.tolist(), turned.stride.tolist()) == ([[4, 6]], [[1, 4]])
    with pytest.raises(LayoutError, match=r"rank 0 holds .* scaled; a relayout moves bits"):
        one((4, 6), 0, (6, 1), 0, (6, 1), [0], 0.5)
    for wrong in (((2, 6), 0, (12, 1), 0, (6, 1), [0]), ((4, 6), 3, (6, 1), 0, (6, 1), [0])):
        with pytest.raises(LayoutError, match=r"which is no box of a tensor of shape \[4, 6\]"):
            one(*wrong)


def test_padding_inside_a_storage_has_no_map():
    place = Placement(np.array([3]), np.zeros((1, 2), np.int64), np.array([[4, 8]]), np.array([0]),
                      np.array([[10, 1]]), {3: 40})  # fmt: skip
    with pytest.raises(LayoutError, match=r"tensor w \[4, 8\]: rank 3 holds 32 elements in 38 of its storage"):
        to_affine_map(TensorSpec("w", (4, 8), "bfloat16"), place)


def test_copies_that_are_cut_differently_are_cut_on_each_others_borders():
    layout = copies((0,), (1, 2), specs={"rows": SPECS["rows"]})
    found, back = exchanged(SPECS["rows"], layout.placements["rows"])
    assert {rank: [piece.shape for piece in held] for rank, held in found.pieces_by_rank.items()} == {
        0: [(4, 6), (4, 6)], 1: [(4, 6)], 2: [(4, 6)]
    }  # fmt: skip
    assert [sorted(piece.locations) for piece in found.pieces_by_rank[0]] == [[0, 1], [0, 2]]
    Layout("back", WORLD, {"rows": SPECS["rows"]}, {"rows": back}).check()


def test_a_map_of_unequal_copies_is_read_as_copies():
    affine = import_affine("affine")
    whole = affine.AffinePiece((4, 2), 0, (2, 1), 0, (2, 1), [0, 1, 2])
    half = [affine.AffinePiece((2, 2), 4 * k, (2, 1), 0, (2, 1), [0, 1 + k]) for k in (0, 1)]
    found = from_affine_map(
        affine.ParamAffineMap((4, 2), {0: (4, 2), 1: (2, 2), 2: (2, 2)}, {0: [whole], 1: half[:1], 2: half[1:]})
    )
    assert found.copies.tolist() == [0, 1, 1]
    Layout("read", WORLD, specs_of(w=(4, 2)), {"w": found}).check()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_layout_comes_back_from_deepspeed_and_deepspeed_cuts_and_joins_by_its_map(data):
    import torch

    specs = data.draw(tensor_specs())
    layout = data.draw(layouts(specs, data.draw(st.integers(1, 8))))
    whole = whole_tensors(layout)
    held = storages(layout, whole)
    for name, spec in specs.items():
        place = layout.placements[name]
        try:
            found, back = exchanged(spec, place)
        except LayoutError as error:
            assert "padding may stand only behind the last piece" in str(error)
            continue
        found.validate_coverage()
        full = torch.from_numpy(whole[name])
        shards = {rank: found.extract(full, rank) for rank in found.shard_shapes}
        for rank, shard in shards.items():
            stored, count = held[rank, name], shard.numel()
            np.testing.assert_array_equal(stored[:count], shard.reshape(-1).numpy())
            assert (stored[count:] == POISON).all()
        if spec.numel:
            assert torch.equal(found.rebuild(shards), full)
        again = Layout("back", layout.world_size, {name: spec}, {name: back})
        again.check()
        for key, stored in storages(again, whole).items():
            np.testing.assert_array_equal(stored, held[key])

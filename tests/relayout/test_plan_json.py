"""Plans written as JSON, read back, and proved against the layouts."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import execute, storages, whole_tensors
from strategies import moves_from_several

from relaymeter.errors import InputError, LayoutError
from relaymeter.harness.models import Qwen3Geometry, tensor_parallel_cuts, weight_specs
from relaymeter.relayout.classplan import ClassPlan
from relaymeter.relayout.layout import Layout, TensorSpec
from relaymeter.relayout.placements import Cut, restrict_layout, tensor_parallel_layout, zero3_layout
from relaymeter.relayout.plan_json import PLAN_VERSION, check_plan, plan_from_dict, plan_to_dict
from relaymeter.relayout.planner import MovePlan, plan_move
from relaymeter.relayout.routes import ROUTES, block_groups
from relaymeter.relayout.schedule import Schedule, build_schedule
from relaymeter.relayout.segments import SegmentTable
from relaymeter.relayout.topology import Topology

GRID = Topology.grid(2, 2)
SPECS = {
    name: TensorSpec(name, shape, "bfloat16")
    for name, shape in {"a.w": (8, 6), "b.w": (8, 6), "norm": (6,), "scalar": (), "none": (0, 3)}.items()
}
CUTS = {"a.w": Cut(1), "b.w": Cut(1), "norm": Cut(None), "scalar": Cut(None), "none": Cut(0)}
SOURCE = zero3_layout(SPECS, (0, 1, 2), 4, "trainer")
DESTINATION = tensor_parallel_layout(SPECS, CUTS, [(2, 3), (0, 1)], 4, "copies")

Entry = dict[str, Any]


def planned() -> MovePlan:
    return plan_move(SOURCE, DESTINATION, GRID)


def written(plan: MovePlan | None = None) -> Entry:
    """A plan as it comes out of a JSON file."""
    found: Entry = json.loads(json.dumps(plan_to_dict(plan or planned()), allow_nan=False))
    return found


def scheduled(plan: MovePlan, code: int, bucket_bytes: int = 100) -> Schedule:
    groups = block_groups(plan, plan.topology)
    return build_schedule(plan, plan.topology, groups.uniform(code), bucket_bytes)


def assert_same_plan(one: MovePlan, other: MovePlan, bucket_bytes: int = 100) -> None:
    for field in fields(MovePlan):
        if field.name != "classes":
            assert getattr(one, field.name) == getattr(other, field.name), field.name
    for mine, theirs in zip(one.classes, other.classes, strict=True):
        for field in fields(ClassPlan):
            np.testing.assert_array_equal(getattr(mine, field.name), getattr(theirs, field.name), err_msg=field.name)
    for code in range(len(ROUTES)):
        left, right = (scheduled(plan, code, bucket_bytes) for plan in (one, other))
        assert left.input_hash == right.input_hash
        for column in fields(SegmentTable):
            np.testing.assert_array_equal(
                getattr(left.all_segments, column.name), getattr(right.all_segments, column.name)
            )


def test_a_plan_read_back_gives_the_same_hash_classes_and_segment_tables():
    plan = replace(planned(), planner="affine", fallbacks={"norm": "why", "a.w": "other", "b.w": "why"})
    assert_same_plan(plan, plan_from_dict(written(plan)))


def test_casts_and_several_sources_are_kept():
    wide = {name: TensorSpec(name, spec.shape, "float32") for name, spec in SPECS.items()}
    sources = [
        restrict_layout(tensor_parallel_layout(wide, CUTS, [(2, 3)], 4), (2,)), zero3_layout(wide, (0, 1), 4)
    ]  # fmt: skip
    plan = plan_move(sources, DESTINATION, GRID, cast=dict.fromkeys(SPECS, "bfloat16"))
    found = plan_from_dict(written(plan))
    assert_same_plan(plan, found)
    assert found.sources == 2 and {spec.dtype for spec in found.source_tensors} == {"float32"}
    check_plan(found, sources, DESTINATION, GRID)


@settings(max_examples=50, deadline=None)
@given(moves_from_several())
def test_any_plan_is_read_back_the_same_and_passes_its_proof(move):
    sources, destination, topology = move
    plan = plan_move(sources, destination, topology)
    found = plan_from_dict(written(plan))
    assert_same_plan(plan, found)
    check_plan(found, sources, destination, topology)


def test_a_plan_of_one_ranks_rows_is_not_written_or_proved():
    mine = plan_move(SOURCE, DESTINATION, GRID, rank=1)
    with pytest.raises(InputError, match="holds the rows of rank 1 only"):
        plan_to_dict(mine)
    with pytest.raises(InputError, match="holds the rows of rank 1 only"):
        check_plan(mine, SOURCE, DESTINATION)


def test_the_plan_of_a_model_of_310_tensors_is_small():
    geometry = Qwen3Geometry(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, tie_word_embeddings=True,
    )  # fmt: skip
    specs, topology = weight_specs(geometry), Topology.grid(2, 8)
    replicas = [tuple(range(8 + 2 * k, 10 + 2 * k)) for k in range(4)]
    copies = tensor_parallel_layout(specs, tensor_parallel_cuts(geometry), replicas, 16)
    plan = plan_move(zero3_layout(specs, range(8), 16), copies, topology)
    text = json.dumps(plan_to_dict(plan))
    assert len(plan.tensors) == 310 and len(text) < 100_000
    assert_same_plan(plan, plan_from_dict(json.loads(text)), 64 << 20)


def _class_of(entry: Entry, tensor: str) -> Entry:
    number = [row[0] for row in entry["tensors"]].index(tensor)
    return next(one for one in entry["classes"] if number in one["tensors"])


def _set(*path: Any) -> Callable[[Entry], None]:
    *way, last, value = path

    def change(entry: Entry) -> None:
        for key in way:
            entry = entry[key]
        if value is ...:
            del entry[last]
        else:
            entry[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("schema_version", 2), f"plan: schema_version 2, this version reads {PLAN_VERSION}"),
        (_set("schema_version", True), "plan: schema_version True"),
        (_set("classes", ...), "plan: 'classes' is missing"),
        (_set("extra", 1), "plan: 'extra' is no entry that it has"),
        (_set("planner", 3), "plan, planner: 3 is no name"),
        (_set("sources", 0), "plan, sources: 0 is no number of source layouts"),
        (_set("sources", True), "plan, sources: True"),
        (_set("input_hash", "ab"), "plan, input_hash: 'ab' is not 64 hexadecimal digits"),
        (_set("input_hash", "G" * 64), "plan, input_hash: .* is not 64 hexadecimal digits"),
        (_set("topology", []), r"plan, topology: \[\] is no object with node, nic"),
        (_set("topology", "nic", [0, 1, 2]), "plan, topology: a topology needs one node and one NIC per rank"),
        (_set("topology", "node", 1, 0.5), "plan, topology, node, rank 1: 0.5 is no whole number"),
        (_set("tensors", {}), "plan, tensors: {} is no list"),
        (_set("tensors", 0, ["x"]), "plan, tensor 0: .* is not "),
        (_set("tensors", 1, 0, "a.w"), "plan, tensor 1: 'a.w' is there twice"),
        (_set("tensors", 1, 0, 7), "plan, tensor 1: 7 is no name"),
        (_set("tensors", 0, 1, 0, -8), r"plan, tensor 0 \(a.w\): shape \[-8, 6\] is no shape"),
        (_set("tensors", 0, 1, [1 << 40, 1 << 40]), r"plan, tensor 0 \(a.w\): shape .* is no shape"),
        (_set("tensors", 0, 2, "bf16"), r"plan, tensor 0 \(a.w\): dtype 'bf16' is not one of float64"),
        (_set("tensors", 0, 3, None), r"plan, tensor 0 \(a.w\): dtype None is not one of"),
        (_set("tensors", 0, 2, "float16"), "plan, class 0: b.w and a.w differ in shape or dtype"),
        (_set("fallbacks", ["a.w"]), "plan, fallbacks: .* is no object with tensor names by reason"),
        (_set("fallbacks", {"why": ["z"]}), "plan, fallbacks: 'z' is no tensor of the plan"),
        (
            _set("fallbacks", {"why": ["a.w"], "or": ["a.w"]}),
            "plan, fallbacks: 'a.w' is .* or there twice",
        ),
        (_set("classes", 0, 5), "plan, class 0: 5 is no object with tensors, dims, segments"),
        (_set("classes", 0, "tensors", [0]), "plan: tensor b.w is in 0 of its classes, not in one"),
        (_set("classes", 0, "tensors", [0, 1, 1]), "plan: tensor b.w is in 2 of its classes, not in one"),
        (_set("classes", 0, "tensors", [0, 9]), "plan, class 0, tensors: .* are not numbers of the plan's 5"),
        (_set("classes", 0, "tensors", []), "plan, class 0, tensors: .* are not numbers of the plan's 5"),
        (_set("classes", 0, "dims", 3), r"plan, class 0, dims: 3 fits no regions of a tensor of shape \[8, 6\]"),
        (_set("classes", 0, "segments", "lo", ...), "plan, class 0, segments: 'lo' is missing"),
        (_set("classes", 0, "segments", "lo", [[0]]), "plan, class 0, lo: 1 lists for 2 dims"),
        (_set("classes", 0, "segments", "lo", 1, [0]), "plan, class 0, lo, dim 1: 1 entries for .* segments"),
        (_set("classes", 0, "segments", "dst_offset", [0]), "plan, class 0, dst_offset: 1 entries for .* segments"),
        (_set("classes", 0, "segments", "src_offset", 3, "x"), "plan, class 0, src_offset, segment 3: 'x' is no whole"),
        (
            _set("classes", 0, "segments", "src_offset", 3, True),
            "class 0, src_offset, segment 3: True is no whole",
        ),
        (_set("classes", 0, "segments", "src_offset", 3, 1 << 63), "plan, class 0, src_offset, segment 3: .* 64 bits"),
        (_set("classes", 0, "segments", "src_offset", 3, -1), "plan, class 0, segment 3: src_offset -1 is negative"),
        (_set("classes", 0, "segments", "dst_offset", 3, -1), "plan, class 0, segment 3: dst_offset -1 is negative"),
        (_set("classes", 0, "segments", "src_stride", 1, 2, -1), r"segment 2: src_stride \[6, -1\] is negative"),
        (
            _set("classes", 0, "segments", "dst_rank", 2, 4),
            "class 0, segment 2: dst_rank 4 is outside the world of 4",
        ),
        (
            _set("classes", 0, "segments", "src_rank", 2, -1),
            "class 0, segment 2: src_rank -1 is outside the world",
        ),
        (
            _set("classes", 0, "segments", "src_space", 0, 1),
            "segment 0: src_space 1 is no storage of the plan's 1",
        ),
        (_set("classes", 0, "segments", "shape", 0, 1, 0), "plan, class 0, segment 1: lo .* with shape .* no region"),
        (
            _set("classes", 0, "segments", "lo", 0, 1, 8),
            r"segment 1: lo \[8, .*\] is with shape .* no region",
        ),
        (_set("classes", 0, "segments", "lo", 0, 1, (1 << 63) - 1), "plan, class 0, segment 1: lo .* no region"),
    ],
)
def test_a_malformed_plan_is_refused_naming_the_place(change, message):
    entry = written()
    change(entry)
    with pytest.raises(InputError, match=message):
        plan_from_dict(entry)


@pytest.mark.parametrize("entry", [None, [], "plan", 3])
def test_what_is_no_object_is_no_plan(entry):
    with pytest.raises(InputError, match=r"plan: .* is no object with schema_version, planner"):
        plan_from_dict(entry)


def proved(entry: Entry) -> None:
    check_plan(plan_from_dict(entry), SOURCE, DESTINATION, GRID)


def _columns(entry: Entry) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = _class_of(entry, "a.w")["segments"]
    return found


def _drop(columns: dict[str, list[Any]], row: int) -> None:
    for name in ("src_rank", "dst_rank", "src_space", "src_offset", "dst_offset"):
        del columns[name][row]
    for name in ("lo", "shape", "src_stride", "dst_stride"):
        for dim in columns[name]:
            del dim[row]


def _double(columns: dict[str, list[Any]], row: int) -> None:
    for name in ("src_rank", "dst_rank", "src_space", "src_offset", "dst_offset"):
        columns[name].append(columns[name][row])
    for name in ("lo", "shape", "src_stride", "dst_stride"):
        for dim in columns[name]:
            dim.append(dim[row])


def test_the_proof_accepts_the_plan_itself():
    proved(written())
    check_plan(planned(), [SOURCE], DESTINATION)


def test_a_shifted_offset_is_caught_on_either_side():
    for column, verb in (("src_offset", "reads"), ("dst_offset", "writes")):
        for shift in (-1, 1, 100):
            entry = written()
            row = next(k for k, at in enumerate(_columns(entry)[column]) if at + shift >= 0)
            _columns(entry)[column][row] += shift
            with pytest.raises(LayoutError, match=rf"tensor a.w: segment \d+ {verb} \d+ elements .* at rank \d"):
                proved(entry)


def test_a_dropped_segment_is_caught_with_rank_and_count():
    entry = written()
    columns = _columns(entry)
    rank, count = columns["dst_rank"][0], columns["shape"][0][0] * columns["shape"][1][0]
    _drop(columns, 0)
    with pytest.raises(
        LayoutError, match=rf"tensor a.w: of the 24 elements that rank {rank} holds .*, {count} are never written and 0"
    ):
        proved(entry)


def test_a_doubled_segment_is_caught_with_rank_and_count():
    entry = written()
    columns = _columns(entry)
    rank, count = columns["dst_rank"][1], columns["shape"][0][1] * columns["shape"][1][1]
    _double(columns, 1)
    _double(columns, 1)
    with pytest.raises(
        LayoutError, match=rf"that rank {rank} holds .*, 0 are never written and {2 * count} are written again"
    ):
        proved(entry)


def test_one_segment_in_the_place_of_another_is_caught_although_the_counts_agree():
    entry = written()
    columns = _columns(entry)
    shapes = list(zip(*columns["shape"], strict=True))
    row, other = next(
        (a, b)
        for a in range(len(shapes))
        for b in range(a + 1, len(shapes))
        if shapes[a] == shapes[b] and columns["dst_rank"][a] == columns["dst_rank"][b]
    )
    _double(columns, row)
    _drop(columns, other)
    count = shapes[row][0] * shapes[row][1]
    with pytest.raises(LayoutError, match=rf"{count} are never written and {count} are written again"):
        proved(entry)


@pytest.mark.parametrize("column", ["src_rank", "dst_rank"])
def test_a_wrong_rank_is_caught(column):
    for wrong in (1, 2, 3):
        entry = written()
        _columns(entry)[column][0] = (_columns(entry)[column][0] + wrong) % 4
        with pytest.raises(LayoutError, match=r"tensor a.w: "):
            proved(entry)


def test_wrong_strides_and_regions_are_caught():
    for column in ("src_stride", "dst_stride"):
        entry = written()
        row = next(k for k, rows in enumerate(_columns(entry)["shape"][0]) if rows > 1)
        _columns(entry)[column][0][row] += 1
        with pytest.raises(LayoutError, match=r"tensor a.w: segment"):
            proved(entry)
    entry = written()
    row = next(k for k, low in enumerate(_columns(entry)["lo"][0]) if low > 0)
    _columns(entry)["lo"][0][row] -= 1
    with pytest.raises(LayoutError, match=r"tensor a.w: segment"):
        proved(entry)


def test_flat_rows_of_layouts_that_are_not_flat_are_caught():
    flat = plan_move(SOURCE, zero3_layout(SPECS, (3,), 4), GRID)
    with pytest.raises(LayoutError, match=r"tensor a.w: planned as flat ranges, which the layouts do not hold"):
        check_plan(flat, SOURCE, DESTINATION)


def test_a_plan_of_other_layouts_is_refused_naming_what_differs():
    plan = planned()
    more = {**SPECS, "more": TensorSpec("more", (2,), "bfloat16")}
    other = {**SPECS, "norm": TensorSpec("norm", (6,), "float32")}
    cuts = {**CUTS, "more": Cut(None)}
    for specs, message in (
        (more, "tensor more: not there in the plan, bfloat16 .2. in layout copies"),
        ({n: s for n, s in SPECS.items() if n != "norm"}, "tensor norm: bfloat16 .6. in the plan, not there in layout"),
        (other, "tensor norm: bfloat16 .6. in the plan, float32 .6. in layout copies"),
    ):
        with pytest.raises(InputError, match=message):
            check_plan(plan, SOURCE, tensor_parallel_layout(specs, cuts, [(2, 3), (0, 1)], 4, "copies"))
    with pytest.raises(InputError, match=r"tensor norm: bfloat16 \[6\] at the sources of the plan, float32 \[6\] in"):
        check_plan(plan, zero3_layout(other, (0, 1, 2), 4), DESTINATION)
    with pytest.raises(InputError, match="the plan reads 1 source layouts, 2 are given"):
        check_plan(plan, [SOURCE, SOURCE], DESTINATION)
    with pytest.raises(InputError, match="the plan is of another topology"):
        check_plan(plan, SOURCE, DESTINATION, Topology.grid(4, 1))
    with pytest.raises(InputError, match="the plan is of 4 ranks, layout trainer of 3"):
        check_plan(plan, zero3_layout(SPECS, (0, 1, 2), 3, "trainer"), DESTINATION)
    with pytest.raises(LayoutError, match=r"tensor a.w: segment"):
        check_plan(plan, zero3_layout(SPECS, (0, 1), 4), DESTINATION)


def test_a_class_whose_tensors_are_placed_differently_is_proved_for_each_of_them():
    moved = {**DESTINATION.placements, "b.w": restrict_layout(DESTINATION, (2, 3)).placements["b.w"]}
    other = Layout("copies", 4, SPECS, moved)
    with pytest.raises(LayoutError, match=r"class 0, tensor b.w: segment .* at rank 0, which holds 0 of them"):
        check_plan(planned(), SOURCE, other)


def _lists(columns: dict[str, Any]) -> list[list[int]]:
    wide = [dim for name in ("lo", "shape", "src_stride", "dst_stride") for dim in columns[name]]
    return [*(columns[name] for name in ("src_rank", "dst_rank", "src_space", "src_offset", "dst_offset")), *wide]


def _moves_right(plan: MovePlan, sources: Sequence[Layout], destination: Layout) -> bool:
    whole = {name: array for layout in (destination, *sources) for name, array in whole_tensors(layout).items()}
    moved = storages(destination, None)
    execute(scheduled(plan, 0), [storages(layout, whole) for layout in sources], moved)
    return all((moved[key] == wanted).all() for key, wanted in storages(destination, whole).items())


@settings(max_examples=150, deadline=None)
@given(moves_from_several(), st.data())
def test_a_changed_plan_either_fails_its_proof_or_still_moves_everything_right(move, data):
    sources, destination, topology = move
    entry = written(plan_move(sources, destination, topology))
    filled = [one["segments"] for one in entry["classes"] if one["segments"]["src_rank"]]
    if not filled:
        return
    columns = data.draw(st.sampled_from(filled))
    column = data.draw(st.sampled_from(_lists(columns)))
    row = data.draw(st.integers(0, len(column) - 1))
    before = copy.deepcopy(columns)
    kind = data.draw(st.sampled_from(["shift", "drop", "double"]))
    if kind == "shift":
        column[row] += data.draw(st.sampled_from([-4, -1, 1, 2, 7]))
    elif kind == "drop":
        _drop(columns, row)
    else:
        _double(columns, row)
    assert columns != before
    try:
        plan = plan_from_dict(entry)
        check_plan(plan, sources, destination, topology)
    except InputError:
        return
    assert kind == "shift" and _moves_right(plan, sources, destination)


def test_a_tensor_of_2_to_the_61_elements_is_proved_with_exact_offsets():
    specs = {"big": TensorSpec("big", (1 << 31, 1 << 30), "int8")}
    source, destination = zero3_layout(specs, (0, 1, 2), 4), zero3_layout(specs, (3, 2), 4)
    plan = plan_move(source, destination, GRID)
    check_plan(plan, source, destination)
    entry = written(plan)
    entry["classes"][0]["segments"]["dst_offset"][-1] += 1
    with pytest.raises(LayoutError, match=r"tensor big: segment \d writes \d+ elements"):
        check_plan(plan_from_dict(entry), source, destination)

"""Public bug reports about layouts as small inputs, each with the right value. Metadata and NumPy only."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from relaymeter.errors import LayoutError
from relaymeter.relayout.combine import check_storage, join_layouts, rank_bytes, restrict_layout, stage_specs
from relaymeter.relayout.cuts import Blocks, Cut
from relaymeter.relayout.layout import Layout, Placement, TensorSpec
from relaymeter.relayout.meshes import mesh_layout
from relaymeter.relayout.partitions import check_partition, zero3_layout, zero12_layout, zero12_partitions
from relaymeter.relayout.placements import flat_placement, replicated_layout, tensor_parallel_layout
from relaymeter.relayout.planner import MovePlan, plan_move
from relaymeter.relayout.topology import Topology

Array = NDArray[np.int64]
Storages = dict[tuple[int, str], Array]
#: What a storage holds where nothing was written.
EMPTY = -1


def specs_of(dtype: str = "float32", **shapes: tuple[int, ...]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, shape, dtype) for name, shape in shapes.items()}


def view(storage: Array, offset: int, shape: Array, stride: Array) -> Array:
    return as_strided(storage[offset:], shape.tolist(), [storage.itemsize * int(step) for step in stride])


def storages(layout: Layout, whole: Mapping[str, Array] | None = None) -> Storages:
    """Every rank's storage of every tensor, cut out of whole tensors (none: empty)."""
    held = {
        (rank, name): np.full(count, EMPTY, dtype=np.int64)
        for name, place in layout.placements.items()
        for rank, count in place.storage.items()
    }
    for name, array in (whole or {}).items():
        place = layout.placements[name]
        for k, rank in enumerate(place.rank.tolist()):
            box = tuple(slice(a, a + b) for a, b in zip(place.lo[k], place.shape[k], strict=True))
            view(held[rank, name], int(place.offset[k]), place.shape[k], place.stride[k])[...] = array[box]
    return held


def carry(plan: MovePlan, source: Storages, destination: Layout) -> Storages:
    """The destination's storages after the planned copies."""
    held = storages(destination)
    for found in plan.classes:
        for tensor in found.tensors.tolist():
            name = plan.tensors[tensor].name
            for k in range(len(found.src_rank)):
                read = source[int(found.src_rank[k]), name]
                write = held[int(found.dst_rank[k]), name]
                view(write, int(found.dst_offset[k]), found.shape[k], found.dst_stride[k])[...] = view(
                    read, int(found.src_offset[k]), found.shape[k], found.src_stride[k]
                )
    return held


def moved(source: Layout, destination: Layout, whole: Mapping[str, Array]) -> Storages:
    """Plan and carry ``whole`` from one layout into the other, checked against the destination cut out of it."""
    plan = plan_move(source, destination, Topology.grid(1, source.world_size))
    held = carry(plan, storages(source, whole), destination)
    want = storages(destination, whole)
    assert held.keys() == want.keys()
    for key in want:
        np.testing.assert_array_equal(held[key], want[key], err_msg=str(key))
    return held


def elements(plan: MovePlan) -> int:
    """Elements that the plan writes, copies within a rank included."""
    return sum(int(np.prod(c.shape, axis=1, dtype=np.int64).sum()) * len(c.tensors) for c in plan.classes)


def counted(specs: Mapping[str, TensorSpec]) -> dict[str, Array]:
    """Whole tensors whose elements are numbered through."""
    found, begin = {}, 0
    for name, spec in specs.items():
        found[name] = np.arange(begin, begin + spec.numel, dtype=np.int64).reshape(spec.shape)
        begin += spec.numel
    return found


def test_b02_padding_of_a_group_partition_is_declared_and_left_behind() -> None:
    specs = specs_of(a=(4, 8), b=(5, 5))
    (sizes,) = zero12_partitions(specs, (0, 1), 3, alignment=4)
    assert (sizes.numel, sizes.padded, sizes.part, sizes.real) == (57, 60, 30, (30, 27))
    two = zero12_layout(specs, (0, 1), 3, alignment=4)
    assert rank_bytes(two).tolist() == [30 * 4, 27 * 4, 0]
    whole = counted(specs)
    three = zero12_layout(specs, (0, 1, 2), 3)
    held = moved(two, three, whole)
    parts = [np.concatenate([held[r, n] for n in specs if (r, n) in held]) for r in range(3)]
    assert np.concatenate(parts).tolist() == list(range(57))
    assert [len(part) for part in parts] == [20, 20, 17]
    with pytest.raises(LayoutError, match=r"57 elements padded to 60: rank 1 holds 29 elements from 30 on, 2 more"):
        check_partition(sizes, {0: 30, 1: 29})


def test_b03_zero_size_parameters_are_named_and_owned_by_nobody() -> None:
    specs = specs_of(a=(8,), none=(0,), b=(24,), last=(0, 8))
    whole = counted(specs)
    for build in (zero12_layout, zero3_layout):
        source, destination = build(specs, (0, 1), 3), build(specs, (0, 1, 2), 3)
        for layout in (source, destination):
            assert [layout.specs[name].shape for name in ("none", "last")] == [(0,), (0, 8)]
            for name in ("none", "last"):
                place = layout.placements[name]
                assert len(place.rank) == 0 and sum(place.storage.values()) == 0
        plan = plan_move(source, destination, Topology.grid(1, 3))
        assert [spec.name for spec in plan.tensors] == list(specs)
        carriers = {plan.tensors[t].name for c in plan.classes if len(c.src_rank) for t in c.tensors.tolist()}
        assert carriers == {"a", "b"}
        moved(source, destination, whole)


@pytest.mark.parametrize(("numel", "ranks"), [(36, 12), (202, 101)])
def test_b04_parts_are_ordered_by_rank_number(numel: int, ranks: int) -> None:
    specs = specs_of(w=(numel,))
    layout = zero3_layout(specs, range(ranks), ranks)
    held = storages(layout, {"w": np.arange(numel)})
    assert np.concatenate([held[rank, "w"] for rank in range(ranks)]).tolist() == list(range(numel))
    assert layout.placements["w"].rank.tolist() == list(range(ranks))
    whole = moved(layout, replicated_layout(specs, (0,), ranks), {"w": np.arange(numel)})
    assert whole[0, "w"].tolist() == list(range(numel))
    each = numel // ranks
    tail = restrict_layout(layout, (11, 9, 10)).placements["w"]
    assert tail.lo[:, 0].tolist() == [9 * each, 10 * each, 11 * each]


def test_b06_several_groups_of_either_stage_and_growth_of_the_group() -> None:
    specs = specs_of(w0=(16, 8), w1=(8, 16), b0=(16,), b1=(8,))
    groups = [["w0", "w1"], ["b0", "b1"]]
    sizes = zero12_partitions(specs, range(2), 4, groups=groups)
    assert [(s.names, s.numel, s.padded, s.real) for s in sizes] == [
        (("w0", "w1"), 256, 256, (128, 128)),
        (("b0", "b1"), 24, 24, (12, 12)),
    ]
    whole = counted(specs)
    moved(zero12_layout(specs, range(2), 4, groups=groups), zero12_layout(specs, range(4), 4, groups=groups), whole)
    moved(zero3_layout(specs, range(2), 4), zero3_layout(specs, range(4), 4), whole)


def test_b08_a_part_of_padding_alone_is_legal_and_an_emptied_part_is_not() -> None:
    specs = specs_of(w=(5,))
    (sizes,) = zero12_partitions(specs, range(4), 4, alignment=8)
    assert (sizes.padded, sizes.part, sizes.real) == (8, 2, (2, 2, 1, 0))
    layout = zero12_layout(specs, range(4), 4, alignment=8)
    assert layout.placements["w"].storage == {0: 2, 1: 2, 2: 1}
    check_partition(sizes, {0: 2, 1: 2, 2: 1, 3: 0})
    check_storage(layout, {0: {"w": 2}, 1: {"w": 2}, 2: {"w": 1}, 3: {}})
    moved(layout, replicated_layout(specs, (3,), 4), {"w": np.arange(5)})
    with pytest.raises(LayoutError, match="rank 1 holds 0 of the 2 elements due from 2 on; a part may be empty only"):
        check_partition(sizes, {0: 2, 1: 0, 2: 1, 3: 0})
    with pytest.raises(LayoutError, match=r"tensor w \[5\]: rank 1 holds 0 elements, the layout gives it 2"):
        check_storage(layout, {0: {"w": 2}, 1: {"w": 0}, 2: {"w": 1}, 3: {}})
    emptied = flat_placement((5,), [(0, 0, 2), (2, 4, 5)], {0: 2, 1: 0, 2: 1})
    with pytest.raises(LayoutError, match=r"tensor w \[5\]: 2 of 5 elements of copy 0 are held by no rank"):
        Layout("emptied", 4, specs, {"w": emptied}).check()


def test_b10_a_tied_pair_on_two_stages_is_a_copy_on_each() -> None:
    specs = specs_of(embed=(64, 8), mid=(8, 8))
    first, last = stage_specs(specs, [("embed", "mid"), ("embed",)])
    stages = join_layouts(
        [replicated_layout(first, (1,), 3, "stage 0"), replicated_layout(last, (2,), 3, "stage 1")],
        "stages",
        aliases={"head": "embed"},
    )
    assert stages.aliases == {"head": "embed"}
    source = replicated_layout(specs, (0,), 3, aliases={"head": "embed"})
    plan = plan_move(source, stages, Topology.grid(1, 3))
    assert elements(plan) == 2 * 64 * 8 + 8 * 8
    for push in (0, 1000, 0):
        whole = {name: array + push for name, array in counted(specs).items()}
        held = moved(source, stages, whole)
        for rank in (1, 2):
            assert held[rank, "embed"].tolist() == whole["embed"].ravel().tolist()


def test_b11_every_expert_rank_gets_its_own_experts() -> None:
    specs = specs_of(experts=(60, 3, 2))
    whole = {"experts": np.broadcast_to(np.arange(60)[:, None, None], (60, 3, 2)).copy()}
    one = tensor_parallel_layout(specs, {"experts": Cut(0, 60)}, [(0,)], 2, "EP 1")
    two = tensor_parallel_layout(specs, {"experts": Cut(0, 60)}, [(0, 1)], 2, "EP 2")
    held = moved(one, two, whole)
    assert [held[rank, "experts"][::6].tolist() for rank in (0, 1)] == [list(range(30)), list(range(30, 60))]
    back = moved(two, one, whole)[0, "experts"]
    assert back.reshape(60, 6).tolist() == [[e] * 6 for e in range(60)]


def test_b11_experts_in_any_placement_and_on_several_ranks() -> None:
    specs = specs_of(experts=(6, 2))
    whole = {"experts": np.repeat(np.arange(6), 2).reshape(6, 2)}
    homes = [[5, 0, 3], [1, 3], [2, 4, 0]]
    spread = tensor_parallel_layout(specs, {"experts": Cut.experts(0, homes)}, [(0, 1, 2)], 4, "spread")
    whole_on_3 = replicated_layout(specs, (3,), 4)
    held = moved(whole_on_3, spread, whole)
    assert [held[rank, "experts"][::2].tolist() for rank in range(3)] == homes
    assert moved(spread, whole_on_3, whole)[3, "experts"].tolist() == whole["experts"].ravel().tolist()


def test_b13_replicated_tensors_keep_their_length_over_tensor_parallel_degrees() -> None:
    specs = specs_of(col=(16, 8), row=(8, 16), row_bias=(8,), norm=(8,))
    cuts = {"col": Cut(0), "row": Cut(1), "row_bias": Cut(None), "norm": Cut(None)}
    mesh = {1: [[0], [1]], 2: [[0, 1], [2, 3]]}  # data-parallel axis first, tensor-parallel second
    layouts = {tp: zero12_layout(specs, mesh[tp], 4, f"TP {tp}", cuts=cuts) for tp in mesh}
    assert all(layout.specs[name].shape == (8,) for layout in layouts.values() for name in ("norm", "row_bias"))
    assert sum(layouts[2].placements["norm"].storage.values()) == 2 * 8
    assert sum(layouts[1].placements["norm"].storage.values()) == 8
    for one, two in ((1, 2), (2, 1), (2, 2)):
        moved(layouts[one], layouts[two], counted(specs))


@pytest.mark.parametrize(
    ("extent", "degree", "widths"),
    [(1000, 3, [320, 320, 360]), (50257, 4, [12544, 12608, 12544, 12561])],
)
def test_b15_uneven_cuts_in_blocks_add_up_and_report_the_largest_rank(
    extent: int, degree: int, widths: list[int]
) -> None:
    specs = specs_of("bfloat16", w=(extent, 16))
    layout = tensor_parallel_layout(specs, {"w": Cut(0, rule=Blocks(64))}, [range(degree)], degree)
    place = layout.placements["w"]
    assert place.shape[:, 0].tolist() == widths
    assert sum(widths) == extent
    assert place.lo[:, 0].tolist() == np.cumsum([0, *widths[:-1]]).tolist()
    assert int(rank_bytes(layout).max()) == max(widths) * 16 * 2


@pytest.mark.parametrize("degree", [1, 2])
def test_b16_the_logical_shape_counts_not_the_placeholder(degree: int) -> None:
    layout = zero3_layout(specs_of(w=(50272, 2048)), range(degree), degree)
    assert (layout.specs["w"].shape, layout.specs["w"].numel) == ((50272, 2048), 102_957_056)
    assert layout.placements["w"].storage == dict.fromkeys(range(degree), 102_957_056 // degree)


def test_b22_a_mesh_covers_each_element_once_or_is_refused() -> None:
    specs = specs_of(w=(256, 256))
    cuts = {"w": (Cut(0), Cut(1))}
    place = mesh_layout(specs, cuts, [[[0, 1], [2, 3]]], 4).placements["w"]
    count = np.zeros((256, 256), dtype=np.int64)
    for lo, size in zip(place.lo, place.shape, strict=True):
        count[tuple(slice(a, a + b) for a, b in zip(lo, size, strict=True))] += 1
    assert (int(count.sum()), int(count.min()), int(count.max())) == (65_536, 1, 1)
    rows = np.flatnonzero(place.rank < 2)  # the ranks of the second row of the mesh are forgotten
    half = Placement(
        place.rank[rows],
        place.lo[rows],
        place.shape[rows],
        place.offset[rows],
        place.stride[rows],
        {0: 16384, 1: 16384},
    )
    wrong = Layout("half", 4, specs, {"w": half})
    for refuse in (wrong.check, lambda: plan_move(wrong, wrong, Topology.grid(1, 4))):
        with pytest.raises(LayoutError, match=r"tensor w \[256, 256\]: 32768 of 65536 elements .* held by no rank"):
            refuse()


def test_b27_offsets_past_2_to_the_31_are_exact() -> None:
    specs = {**specs_of(big=(46341, 46341)), "bytes": TensorSpec("bytes", (2**31 + 8,), "int8")}
    assert specs["big"].numel == 2_147_488_281
    layout = zero3_layout(specs, (0, 1), 4)
    part = -(-2_147_488_281 // 2)
    place = layout.placements["big"]
    assert place.storage == {0: part, 1: part}
    flat = place.lo @ np.array([46341, 1])
    start = np.where(place.rank == 0, 0, part)
    assert (place.offset == flat - start).all()
    assert int(np.prod(place.shape, axis=1, dtype=np.int64).sum()) == 2_147_488_281
    last = flat + ((place.shape - 1) * np.array([46341, 1])).sum(axis=1)
    assert int(last.max()) == 2_147_488_280
    assert layout.placements["bytes"].storage == {0: 2**30 + 4, 1: 2**30 + 4}
    target = tensor_parallel_layout(specs, {"big": Cut(1), "bytes": Cut(0)}, [(2, 3)], 4)
    plan = plan_move(layout, target, Topology.grid(1, 4))
    assert elements(plan) == 2_147_488_281 + 2**31 + 8
    one = zero12_layout(specs, (0,), 1, groups=[["big"], ["bytes"]])
    assert one.placements["bytes"].storage == {0: 2**31 + 8}
    assert zero12_partitions(specs, (0, 1), 2)[0].real == (1_073_744_142, 1_073_744_139)


def test_b42_a_local_expert_shard_is_not_taken_for_the_whole_weight() -> None:
    name = "experts.w1"
    want = replicated_layout(specs_of(**{name: (512, 8)}), (2,), 4, "serving")
    marked = tensor_parallel_layout(specs_of(**{name: (512, 8)}), {name: Cut(0)}, [(0, 1)], 4, "training")
    moved(marked, want, {name: np.arange(512 * 8).reshape(512, 8)})
    topology = Topology.grid(1, 4)
    # Without the mark a rank's 256 rows are described as the whole weight, ...
    unmarked = replicated_layout(specs_of(**{name: (256, 8)}), (0, 1), 4, "training")
    with pytest.raises(LayoutError, match=r"tensor experts\.w1: training has float32 \[256, 8\].*\[512, 8\]"):
        plan_move(unmarked, want, topology)
    # ... or the whole weight is claimed for ranks that hold 256 rows of it, ...
    claimed = replicated_layout(specs_of(**{name: (512, 8)}), (0, 1), 4, "training")
    with pytest.raises(
        LayoutError, match=r"experts\.w1 \[512, 8\]: rank 0 holds 2048 elements, the layout gives it 4096"
    ):
        check_storage(claimed, {0: {name: 256 * 8}, 1: {name: 256 * 8}})
    # ... or one rank's shard is all that is offered.
    offered = restrict_layout(marked, [0])
    with pytest.raises(LayoutError, match=r"experts\.w1: rank 2 needs 4096 elements, the source offers 2048"):
        plan_move(offered, want, topology)

"""How AutoTP cut a parameter, read from the affine map that it leaves on it; and layouts from descriptions."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from relaymeter.errors import InputError, LayoutError
from relaymeter.relayout import engine_layout, engine_reading
from relaymeter.relayout.affine_maps import import_affine
from relaymeter.relayout.cuts import Cut, Widths
from relaymeter.relayout.engine_reading import HeldTensor, ShardRuns
from relaymeter.relayout.layout import TensorSpec
from relaymeter.relayout.meshes import mesh_layout
from relaymeter.relayout.partitions import zero3_layout, zero12_layout

affine: Any = import_affine("affine", alone=True)


def read(table: Any, mine: tuple[int, ...], **conversion: Any) -> tuple[tuple[int, ...], ShardRuns | None]:
    meta = {"conversion": {"affine_map": table.to_dict() if table is not None else None, **conversion}}
    return engine_reading._cut_of("w", SimpleNamespace(**{engine_reading._AUTOTP_META: meta}), mine)


@pytest.mark.parametrize(
    ("shape", "sizes", "dim", "mine"),
    [
        ((15, 8), [8, 7], 0, (8, 8)),
        ((8, 15), [8, 7], 1, (8, 8)),
        ((15,), [8, 7], 0, (8,)),
        ((72, 64), [72, 0], 0, (72, 64)),
        ((64, 72), [72, 0], 1, (64, 72)),
        ((9, 2), [4, 3, 2], 0, (4, 2)),
    ],
)
def test_a_plain_cut_is_one_run_on_each_rank(
    shape: tuple[int, ...], sizes: list[int], dim: int, mine: tuple[int, ...]
) -> None:
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    runs = tuple(((lo, 0, size),) if size else () for lo, size in zip(starts, sizes, strict=True))
    found = read(affine.contiguous_split_map(shape, sizes, dim), mine)
    assert found == (shape, ShardRuns(dim, tuple(sizes), runs))


def test_a_fused_cut_is_a_run_for_each_part() -> None:
    table = affine.sub_param_map((24, 8), [8, 12, 4], [[4, 4], [6, 6], [2, 2]], 0)
    first, second = ((0, 0, 4), (8, 4, 6), (20, 10, 2)), ((4, 0, 4), (14, 4, 6), (22, 10, 2))
    assert read(table, (12, 8)) == ((24, 8), ShardRuns(0, (12, 12), (first, second)))
    across = affine.sub_param_map((3, 24), [8, 12, 4], [[4, 4], [6, 6], [2, 2]], 1)
    assert read(across, (3, 12)) == ((3, 24), ShardRuns(1, (12, 12), (first, second)))


def test_a_map_of_a_view_with_more_dims_is_read_in_the_shape_of_the_parameter() -> None:
    table = affine.contiguous_split_map((3, 4, 5), [2, 1], 0)
    assert read(table, (8, 5), original_shape=[12, 5]) == (
        (12, 5),
        ShardRuns(0, (8, 4), (((0, 0, 8),), ((8, 0, 4),))),
    )


def test_replicated_and_untouched_parameters_have_no_cut() -> None:
    assert read(affine.replicated_map((8,), 2), (8,), replicated=True) == ((8,), None)
    assert engine_reading._cut_of("w", SimpleNamespace(), (8, 3)) == ((8, 3), None)


def test_what_cannot_be_read_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="parameter w is a tensor-parallel shard that does not say how"):
        engine_reading._cut_of("w", SimpleNamespace(tensor_model_parallel=True), (8, 3))
    with pytest.raises(InputError, match="parameter w: how AutoTP cut it cannot be read: rows are shuffled"):
        read(None, (8,), unsupported_reason="rows are shuffled")
    with pytest.raises(InputError, match="parameter w: how AutoTP cut it cannot be read: its layer gives no"):
        read(None, (8,))
    with pytest.raises(InputError, match=r"parameter w: rank 0 holds .* scaled"):
        read(affine.replicated_map((8,), 2, scale=0.5), (8,))
    quarters = {
        rank: [affine.AffinePiece((2, 2), (rank // 2) * 8 + rank % 2 * 2, (4, 1), 0, (2, 1), [rank])]
        for rank in range(4)
    }
    with pytest.raises(InputError, match=r"parameter w \[4, 4\] is cut along dims \[0, 1\]"):
        read(affine.ParamAffineMap((4, 4), dict.fromkeys(range(4), (2, 2)), quarters), (2, 2))


def test_a_description_gives_the_builders_layout_on_any_rank() -> None:
    cut = ShardRuns(0, (8, 7), (((0, 0, 8),), ((8, 0, 7),)))
    tensors = [
        HeldTensor("up", (15, 4), "bfloat16", cut, False, None),
        HeldTensor("norm", (6,), "bfloat16", None, False, None),
        HeldTensor("count", (), "int64", None, False, None, True),
    ]
    ranks = ((0, 2), (1, 3))
    cuts = {"up": Cut(0, rule=Widths((8, 7))), "norm": Cut(None), "count": Cut(None)}
    specs = {held.name: TensorSpec(held.name, held.shape, held.dtype) for held in tensors}
    mesh = [[0, 1], [2, 3]]

    whole = engine_layout.describe("w", ranks, [(held, held.dtype, "whole") for held in tensors], {"down": "up"})
    built = engine_layout.build_layout(json.loads(json.dumps(whole)), 4)
    wanted = mesh_layout(specs, cuts, mesh, 4, "w", {"down": "up"})
    assert (built.specs, built.aliases) == (wanted.specs, wanted.aliases)
    assert all(place.signature == wanted.placements[name].signature for name, place in built.placements.items())
    assert built.placements["up"].copies.tolist() == [0, 0, 1, 1]

    group = engine_reading.MasterGroup(("norm", "up"), (), 4, 8)
    rows = [(held, "float32", "flat") for held in tensors[:2]]
    flat = engine_layout.describe("m", ranks, rows, {}, [group])
    built = engine_layout.build_layout(json.loads(json.dumps(flat)), 4)
    masters = {name: TensorSpec(name, specs[name].shape, "float32") for name in ("up", "norm")}
    options: dict[str, Any] = {"groups": [["norm", "up"]], "tensor_alignment": 8, "cuts": cuts}
    wanted = zero12_layout(masters, mesh, 4, "m", **options)
    assert all(place.signature == wanted.placements[name].signature for name, place in built.placements.items())
    assert built.placements["norm"].storage == {0: 6, 1: 6}
    assert built.placements["up"].storage == {0: 12, 2: 20, 1: 10, 3: 18}


def test_experts_lie_over_ranks_of_their_own_beside_the_other_tensors() -> None:
    halves = ShardRuns(0, (3, 3), (((0, 0, 3),), ((3, 0, 3),)))
    columns = ((0, 2), (1, 3))
    experts = [HeldTensor(name, (6, 5), "bfloat16", halves, True, None, ranks=columns) for name in ("w1", "w2")]
    dense = HeldTensor("norm", (7,), "bfloat16", None, True, None)
    tensors, ranks, mesh = [experts[0], dense, experts[1]], ((0, 1, 2, 3),), [[0, 1], [2, 3]]
    cuts = {"w1": Cut(0), "w2": Cut(0)}
    specs = {held.name: TensorSpec(held.name, held.shape, "float32") for held in tensors}
    mine = {name: specs[name] for name in cuts}
    groups = [engine_reading.MasterGroup(("norm",), (), 8), engine_reading.MasterGroup(("w2", "w1"), (), 4)]
    wanted = {
        "whole": (
            mesh_layout(mine, cuts, mesh, 4),
            mesh_layout({"norm": specs["norm"]}, {"norm": Cut(None)}, [[rank] for rank in range(4)], 4),
        ),
        "parts": (zero3_layout(mine, mesh, 4, cuts=cuts), zero3_layout({"norm": specs["norm"]}, range(4), 4)),
        "flat": (
            zero12_layout(mine, mesh, 4, cuts=cuts, groups=[["w2", "w1"]]),
            zero12_layout({"norm": specs["norm"]}, range(4), 4),
        ),
    }
    for spread, layouts in wanted.items():
        rows = [(held, "float32", spread) for held in tensors]
        found = engine_layout.describe("e", ranks, rows, {}, groups if spread == "flat" else ())
        built = engine_layout.build_layout(json.loads(json.dumps(found)), 4)
        assert list(built.specs) == ["w1", "norm", "w2"]
        places = layouts[0].placements | dict(layouts[1].placements)
        assert {name: place.signature for name, place in built.placements.items()} == {
            name: place.signature for name, place in places.items()
        }
    assert "w1 [6, 5] float32, flat, cut to [3, 3], over ranks [[0, 2], [1, 3]]" in engine_layout.labels(found)
    mixed = engine_layout.describe("e", ranks, rows, {}, [engine_reading.MasterGroup(("norm", "w1"), (), 8)])
    with pytest.raises(LayoutError, match="the group of norm is spread over 2 sets of ranks"):
        engine_layout.build_layout(mixed, 4)

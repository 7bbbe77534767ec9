"""Live DeepSpeed engines of every ZeRO stage: what their layouts say and their storages hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pool import RankPool

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]

LIMIT_S = 100.0
WEIGHTS = {
    "frozen": [3, 11],
    "codes": [9, 5],
    "layers.0.weight": [7, 5],
    "layers.0.bias": [7],
    "layers.1.weight": [7, 7],
    "layers.1.bias": [7],
    "layers.2.bias": [7],
    "tail.weight": [5, 7],
    "tail.bias": [5],
    "empty.none": [0],
    "empty.rows": [0, 8],
}
TRAINED = {name: shape for name, shape in WEIGHTS.items() if name[:5] in ("layer", "tail.")}
BUFFERS = {"scale": ([], "float64"), "count": ([], "int64"), "mask": ([2, 3], "bool")}
MOMENTS = ("exp_avg", "exp_avg_sq")
FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}


@pytest.fixture(scope="module")
def pool(ranks: Callable[[int], RankPool]) -> RankPool:
    return ranks(4)


def numel(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


@pytest.mark.parametrize(
    ("stage", "members", "bf16", "settings", "optimizer"),
    [
        (0, [1, 3], True, {}, "FP16_UnfusedOptimizer"),
        (0, [0, 1], False, {}, "AdamW"),
        (1, [0, 1, 2], True, {}, "DeepSpeedZeroOptimizer"),
        (1, [0, 1, 2, 3], True, FP32_GRADIENTS, "BF16_Optimizer"),
        (2, [2, 3], True, {}, "DeepSpeedZeroOptimizer"),
        (2, [0], False, {}, "DeepSpeedZeroOptimizer"),
        (3, [0, 1, 2, 3], True, {}, "DeepSpeedZeroOptimizer_Stage3"),
        (3, [1, 2], False, {}, "DeepSpeedZeroOptimizer_Stage3"),
    ],
)
def test_every_state_of_an_engine_is_what_deepspeed_gathers(
    pool: RankPool, stage: int, members: list[int], bf16: bool, settings: dict[str, Any], optimizer: str
) -> None:
    key = f"{stage} {members} {bf16} {len(settings)}"
    arguments = {"stage": stage, "ranks": members, "bf16": bf16, "settings": settings, "key": key}
    found = pool.call("jobs_engines:states", limit_s=LIMIT_S, **arguments)
    kind = "bfloat16" if bf16 else "float32"
    for rank, one in enumerate(found):
        if rank in members:
            assert one["optimizer"] == optimizer
            assert {state: one[state]["wrong"] for state in ("weights", "master", *MOMENTS)} == {
                "weights": [],
                "master": [],
                "exp_avg": [],
                "exp_avg_sq": [],
            }
        weights = [[name, shape, "int8" if name == "codes" else kind] for name, shape in WEIGHTS.items()]
        assert one["weights"]["specs"] == weights + [[n, shape, dtype] for n, (shape, dtype) in BUFFERS.items()]
        assert one["weights"]["aliases"] == {"layers.2.weight": "layers.1.weight", "layers.0.same": "mask"}
        for state in ("master", *MOMENTS):
            assert one[state]["specs"] == [[name, shape, "float32"] for name, shape in TRAINED.items()]
            assert one[state]["aliases"] == {"layers.2.weight": "layers.1.weight"}
        for state in ("weights", "master", *MOMENTS):
            check_counts(one[state], members, partitioned=stage == 3 or (stage > 0 and state != "weights"))


def check_counts(state: dict[str, Any], members: list[int], partitioned: bool) -> None:
    """Every element once in all, or once on every rank of the engine; buffers always the latter."""
    shapes = {name: shape for name, shape, _ in state["specs"]}
    for name, held in state["held"].items():
        counts = [held[str(rank)] for rank in range(4)]
        if partitioned and name not in BUFFERS:
            assert sum(counts) == numel(shapes[name])
        else:
            assert counts == [numel(shapes[name]) if rank in members else 0 for rank in range(4)]
        assert all(counts[rank] == 0 for rank in range(4) if rank not in members)


def test_live_layouts_are_those_that_the_builders_make_of_the_same_numbers(pool: RankPool) -> None:
    found = pool.call("jobs_engines:metadata", limit_s=LIMIT_S)
    assert len(found[0]) == 14
    assert len(found[3]) == 10
    for one in found:
        assert one == {name: [] for name in one}


def test_flat_groups_in_another_order_and_with_gaps_hold_what_a_plain_twin_does(pool: RankPool) -> None:
    found = pool.call("jobs_engines:rearranged", limit_s=LIMIT_S)
    for one in found[:3]:
        assert len(one) == 12
        assert one == {name: [] for name in one}


def test_weights_of_two_dtypes_stand_side_by_side(pool: RankPool) -> None:
    own = {"a.weight": "float32", "a.bias": "float32", "b": "bfloat16"}
    for one in pool.call("jobs_engines:mixed", limit_s=LIMIT_S)[:2]:
        assert one["0 weights dtypes"] == one["0 master dtypes"] == one["2 weights dtypes"] == own
        assert one["2 master dtypes"] == dict.fromkeys(own, "float32")
        assert [wrong for name, wrong in one.items() if "dtypes" not in name] == [[]] * 4


@pytest.mark.parametrize(("stage", "members"), [(0, [2, 3]), (1, [0, 1, 2, 3]), (2, [0, 1, 2, 3]), (3, [0, 1, 2, 3])])
def test_an_engine_cut_by_autotp_is_the_model_it_was_made_of(pool: RankPool, stage: int, members: list[int]) -> None:
    found = pool.call(
        "jobs_engines:tensor_parallel", stage=stage, ranks=members, key=f"autotp {stage}", limit_s=LIMIT_S
    )
    for rank, one in enumerate(found):
        assert one["weights"]["shapes"]["up.weight"] == [15, 8]
        assert one["weights"]["shapes"]["fused.weight"] == [24, 8]
        assert one["weights"]["shapes"]["norm.weight"] == [8]
        assert one["weights"]["shapes"]["scale"] == []
        if rank in members:
            assert [one[state]["wrong"] for state in ("weights", "master", *MOMENTS)] == [[]] * 4
            assert one["masters are the weights"]
        for state in ("weights", "master", *MOMENTS):
            assert one[state]["shapes"]["down.weight"] == [8, 15]
            for name, each in {"up.weight": 120, "down.weight": 120, "norm.weight": 16, "fused.bias": 24}.items():
                copies = len(members) // 2 if stage == 0 or (state == "weights" and stage < 3) else 1
                assert sum(one[state]["held"][name].values()) == each * copies


def test_ranks_that_hold_different_things_are_refused_on_every_rank_of_the_world(pool: RankPool) -> None:
    found = pool.call("jobs_engines:orders", limit_s=LIMIT_S)
    for rank, one in enumerate(found):
        assert one["equal"] == one["equal names"] == "no error"
        for name in ("other order", "lacks b"):
            assert one[name].startswith("PlanDisagreement: ")
            assert "position 1 holds 'b.weight [3, 3] bfloat16, whole' on ranks [0]; 'c.weight [3, 3]" in one[name]
        assert (
            "position 3 holds 'a.weight at place 0 of group 0' on ranks [0]; 'c.weight" in one["groups in other order"]
        )
        assert one["both empty"].startswith("InputError" if rank < 2 else "PlanDisagreement")
        assert "the engine holds no weights: nothing was checked" in one["both empty"]
        assert "the engine has offloaded its hp_params: call engine.reload_states()" in one["one rank refuses"]
        assert "position 7 holds 'description " in one["other alignment"]


def test_what_an_engine_cannot_give_is_refused(pool: RankPool) -> None:
    found = pool.call("jobs_engines:refused", limit_s=LIMIT_S)[0]
    assert found.pop("masters still there") == "no error"
    otherwise = found.pop("placed otherwise")
    assert otherwise.startswith(
        "LayoutError: layout zero1 master, tensor c.weight, rank 0: the engine keeps 8 elements"
    )
    assert all(text.startswith("InputError: ") for text in found.values())
    assert "keeps no state 'exp_avg' (it has: none yet: take a step first)" in found["no step yet"]
    assert "keeps no state 'momentum' (it has: exp_avg, exp_avg_sq, step)" in found["no such state"]
    assert "'step' is no tensor of one value per weight" in found["not by weight"]
    assert "has offloaded its lp_params: call engine.reload_states()" in found["offloaded weights"]
    assert "has offloaded its optim_states" in found["offloaded state"]
    assert "the engine has no optimizer" in found["no optimizer"]
    assert (
        "a.weight: its partition of 9 elements is not in memory (9 elements, NOT_AVAILABLE)" in found["partition away"]
    )
    assert "b.weight [3, 3] has strides [1, 3]: make it contiguous" in found["not contiguous"]


@pytest.mark.parametrize(
    ("stages", "tensor_parallel"), [([1, 3], [True, False]), ([2, 3], [False, True]), ([0, 2], [True, True])]
)
def test_states_move_between_engines_of_other_degrees(
    pool: RankPool, stages: list[int], tensor_parallel: list[bool]
) -> None:
    arguments = {"stages": stages, "tensor_parallel": tensor_parallel, "key": f"degrees {stages} {tensor_parallel}"}
    found = pool.call("jobs_engine_moves:across_degrees", limit_s=LIMIT_S, **arguments)
    for rank, one in enumerate(found):
        for state in ("weights", "master", *MOMENTS):
            assert one[state]["digests"][2], state
            assert one[state]["different"] == ([] if rank > 1 else None)
        assert one["loss"] == pytest.approx(found[0]["loss"], abs=1e-6)

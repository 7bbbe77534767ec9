"""Live AutoEP engines: what their layouts say and their storages hold, and moves between expert-parallel degrees."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from pool import RankPool

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

LIMIT_S = 200.0
MOMENTS = ("exp_avg", "exp_avg_sq")
STATES = ("weights", "master", *MOMENTS)
EVERY = [0, 1, 2, 3]
#: What an expert holds of each tensor of experts.
EXPERT = {"w1": [5, 11], "w2": [11, 5], "w3": [5, 11]}
FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
#: Stage, expert-parallel degree, ranks, bf16, number of experts (of 2, partitions are padded), settings.
CASES: dict[str, list[Any]] = {
    **{f"ZeRO-{stage} EP{size}": [stage, size, EVERY, True, 4, {}] for stage in (1, 2, 3) for size in (1, 2, 4)},
    "ZeRO-0 EP2": [0, 2, EVERY, True, 4, {}],
    "ZeRO-1 EP2 of 2, gradients fp32": [1, 2, EVERY, True, 2, FP32_GRADIENTS],
    "ZeRO-3 EP2 of 2, fp32": [3, 2, EVERY, False, 2, {}],
    "ZeRO-1 EP2 on ranks 2 and 3": [1, 2, [2, 3], True, 4, {}],
    "ZeRO-3 EP2 on ranks 0 and 1": [3, 2, [0, 1], True, 4, {}],
}


@pytest.fixture(scope="module")
def pool(ranks: Callable[[int], RankPool]) -> RankPool:
    return ranks(4)


@pytest.fixture(scope="module")
def engines(pool: RankPool) -> list[dict[str, Any]]:
    return pool.call("jobs_engines_ep:states", cases=CASES, limit_s=LIMIT_S)


@pytest.mark.parametrize("key", list(CASES))
def test_every_state_is_what_plain_gathers_give(engines: list[dict[str, Any]], key: str) -> None:
    stage, size, members, bf16, experts, _ = CASES[key]
    for rank, found in enumerate(engines):
        one = found[key]
        if rank in members:
            assert [one[state]["wrong"] for state in STATES] == [[]] * 4
            first = engines[members[0]][key]
            assert [one[state]["sum"] for state in STATES] == [first[state]["sum"] for state in STATES]
            assert one["masters differ"] == one["unmoved"] == []
            assert all(math.isfinite(loss) for loss in one["losses"])
            assert one["groups"] == ["dense-params", f"ep_size_{size}"]
        for state in STATES:
            shapes = {name: shape for name, shape, _ in one[state]["specs"]}
            dtypes = {dtype for *_, dtype in one[state]["specs"]}
            assert dtypes == {"bfloat16" if bf16 and state == "weights" else "float32"}
            whole = stage == 0 or (state == "weights" and stage < 3)
            for name, shape in shapes.items():
                kind = name.rpartition(".")[2]
                assert shape == ([experts, *EXPERT[kind]] if kind in EXPERT else shape)
                held = [one[state]["held"][name][str(rank)] for rank in range(4)]
                copies = (len(members) // size if kind in EXPERT else len(members)) if whole else 1
                assert sum(held) == copies * math.prod(shape)
                assert all(held[other] == 0 for other in EVERY if other not in members)


def test_every_degree_and_stage_describes_the_same_tensors(engines: list[dict[str, Any]]) -> None:
    for state in STATES:
        first = engines[0]["ZeRO-1 EP1"][state]["specs"]
        assert len(first) == 27
        for key in (key for key in CASES if "EP2 of 2" not in key):
            assert all(found[key][state]["specs"] == first for found in engines), key


def test_an_expert_rank_holds_its_experts_only(engines: list[dict[str, Any]]) -> None:
    name, each = "model.layers.1.mlp.experts.w1", 5 * 11
    for size in (1, 2, 4):
        for stage in (1, 2, 3):
            held = engines[3][f"ZeRO-{stage} EP{size}"]["weights"]["held"][name]
            assert [held[str(rank)] for rank in range(4)] == [4 * each // (4 if stage == 3 else size)] * 4


def test_engines_of_two_degrees_train_side_by_side_as_alone(pool: RankPool) -> None:
    found = pool.call("jobs_engines_ep:side_by_side", limit_s=LIMIT_S)
    for rank, one in enumerate(found):
        assert one.pop("own groups") == [[EVERY], [[[0, 2], [1, 3]]]]
        assert sorted(one) == sorted(["ZeRO-2 EP2", "ZeRO-3 EP4", "ZeRO-3 EP2" if rank < 2 else "ZeRO-1 EP2"])
        for losses in one.values():
            assert losses["together"] == losses["alone"]
            assert all(math.isfinite(loss) for loss in losses["alone"])
            assert losses["alone"][-1] < losses["alone"][0] - 0.1


@pytest.mark.parametrize(
    ("source", "target"),
    [([2, 2, EVERY], [3, 4, EVERY]), ([3, 4, EVERY], [1, 1, [0, 1]])],
)
def test_every_state_moves_to_another_degree(pool: RankPool, source: list[Any], target: list[Any]) -> None:
    sides = [source, target]
    found = pool.call("jobs_engines_ep:move_states", sides=sides, key=str(sides), limit_s=LIMIT_S)
    for rank, one in enumerate(found):
        for state in STATES:
            assert one[state]["digests"][2], state
            assert one[state]["different"] == ([] if rank in target[2] else None)
        if rank in target[2]:
            assert one["loss 1"] == pytest.approx(one["loss 0"], abs=1e-5)


def test_sixty_experts_are_dealt_out_and_come_back(pool: RankPool) -> None:
    found = pool.call("jobs_engines_ep:sixty_experts", limit_s=LIMIT_S)
    everyone = [[float(expert)] for expert in range(60)]
    for rank, one in enumerate(found[:2]):
        assert one["experts 1"] == [everyone[30 * rank : 30 * rank + 30]] * 3
        assert one["experts 2"] == one["experts 0"] == [everyone] * 3
        assert [one[f"leg {leg}"][1] for leg in (0, 1)] == [[], []]
    assert all(one[f"leg {leg}"][0][2] for one in found for leg in (0, 1))


def test_what_cannot_be_built_or_read_is_refused(pool: RankPool, engines: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(pool.call("jobs_engines_ep:refused", limit_s=LIMIT_S)):
        assert all(text.startswith("InputError: ") for text in one.values())
        assert "expert parallelism of 2 over ranks [0, 1, 2] of 4" in one["odd number"]
        assert "expert parallelism of 3 over ranks [0, 1, 2] of 4: DeepSpeed needs a degree that" in one["three"]
        assert "every 2 neighbours need the same distances, here [(0, 1), (0, 2)]" in one["uneven"]
        assert "tensor parallelism of 2 together with expert parallelism of 2" in one["both degrees"]
        assert "expert_parallel.autoep_size is 2, the grid's 4" in one["other grid"]
        assert "tensor_parallel.autotp_size = 2 together with expert_parallel" in one["with AutoTP"]
        assert "AutoTP together with AutoEP cannot be read" in one["folded"]
        assert "experts.w1: this rank holds [1, 5, 11], its cut says [2, 5, 11]" in one["replaced"]
        assert "model.layers.1.mlp.experts.w1 holds experts but not which" in one["does not say which"]
        assert "DeepSpeed's own MoE layers cannot be read" in one["own MoE layers"]
        if rank < 2:
            assert "expert_parallel.enabled = True makes groups over the whole world" in one["no grid"]

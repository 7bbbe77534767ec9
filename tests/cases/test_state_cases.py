"""Public bug reports as small inputs, on moves of whole training states: each with the right value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pool import RankPool

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

LIMIT_S = 200.0
UNEVEN = {"a.weight": [7, 5], "a.bias": [7], "b.weight": [2, 7], "c": [1]}
STATES = ("master", "exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def pool(ranks: Callable[[int], RankPool]) -> RankPool:
    return ranks(4)


def call(pool: RankPool, job: str, **arguments: Any) -> list[dict[str, Any]]:
    return pool.call(f"jobs_state_cases:{job}", limit_s=LIMIT_S, **arguments)


def between(pool: RankPool, **arguments: Any) -> list[dict[str, Any]]:
    """What each rank found of a move; every state arrived bit for bit, by digests and by DeepSpeed's gathers."""
    found = call(pool, "between", **arguments)
    sides = arguments["ranks"]
    before = found[sides[0][0]]["before"]
    assert before
    for rank, one in enumerate(found):
        assert (one["ok"], one["differs"]) == (True, [])
        if rank in sides[0]:
            assert one["before"] == before
        if rank in sides[1]:
            assert one["after"] == before
    return found


def test_b02_padding_is_nobodys_and_all_57_elements_arrive(pool: RankPool) -> None:
    found = between(pool, kind="Uneven", ranks=[[0, 1], [1, 2, 3]], stages=[1, 1])
    for one in found:
        assert one["real"] == [[30, 27, 0, 0], [0, 20, 20, 17]]
        assert one["bytes"] == 57 * 3 * 4
        assert one["shapes"] == {f"{state} {name}": shape for state in STATES for name, shape in UNEVEN.items()}
    # elements of each rank's part, and those of them that DeepSpeed counts as padding
    assert [one["flat"] for one in found] == [[[30, 0], []], [[30, 3], [20, 0]], [[], [20, 0]], [[], [20, 3]]]


@pytest.mark.parametrize("stages", [[1, 2], [2, 1]])
def test_b03_parameters_without_elements_travel_nowhere_and_keep_name_and_shape(
    pool: RankPool, stages: list[int]
) -> None:
    found = between(pool, kind="Stepped", ranks=[[0, 1], [2, 3]], stages=stages)
    sizes = {"a": [8], "empty.none": [0], "empty.rows": [0, 8], "b": [24], "last.none": [0], "last.rows": [0, 8]}
    for rank, one in enumerate(found):
        assert one["bytes"] == 32 * 3 * 4
        assert one["real"] == [[16, 16, 0, 0], [0, 0, 16, 16]]
        # each rank of the destination has its 16 elements of every state from the rank in the same place
        assert one["messages"] == 2
        assert one["source parameters" if rank < 2 else "destination parameters"] == sizes


@pytest.mark.parametrize("sub_group_size", [100, 50])
def test_b06_groups_keep_their_members_rates_and_decay(pool: RankPool, sub_group_size: int) -> None:
    arguments = {"groups": ["strong", "weak"], "zero": {"sub_group_size": sub_group_size}}
    found = between(pool, kind="Decayed", ranks=[[0, 1], [0, 1, 2, 3]], stages=[3, 3], **arguments)
    for one in found:
        groups = one["destination"]["groups"]
        assert [[group["lr"], group["weight_decay"]] for group in groups] == [[0.02, 0.1], [0.005, 0.0]]
        assert one["destination"]["lr"] == [0.02, 0.005]
        assert one["real"] == [[140, 140, 0, 0], [70, 70, 70, 70]]
    kept = 2 if sub_group_size == 100 else 3
    assert [len(found[0][side]["steps"]) for side in ("source", "destination")] == [kept, 2]


def test_b08_a_rank_of_padding_only_moves_and_a_shard_emptied_by_hand_is_refused(pool: RankPool) -> None:
    found = call(pool, "emptied")
    for rank, one in enumerate(found):
        for way in ("there", "back"):
            assert (one[way]["ok"], one[way]["differs"]) == (True, [])
        assert one["there"]["bytes"] == one["back"]["bytes"] == 5 * 3 * 4
        assert one["real"] == [[2, 2, 1, 0], [0, 4, 1, 0]]
        assert one["after"][0] == found[0]["after"][0]
        assert one["after"][1] == (found[0]["after"][0] if rank in (1, 2) else None)
        assert "source: " in one["refused"]
        assert "its masters of 2 elements are not in memory (0 there)" in one["refused"]
        assert one["refused"].startswith("InputError: " if rank == 1 else "PlanDisagreement: ")
        assert rank == 1 or "on ranks [1]" in one["refused"]


def test_b09_tied_weights_move_once_and_stay_one_storage(pool: RankPool) -> None:
    found = between(pool, kind="Shared", ranks=[[0, 1], [2, 3]], stages=[2, 3])
    for rank, one in enumerate(found):
        assert set(one["shapes"]) == {f"{s} layers.{n}.weight" for s in STATES for n in (0, 1)}
        assert one["bytes"] == (100 * 100 + 300 * 300) * 3 * 4
        side = "source" if rank < 2 else "destination"
        assert one[f"{side} tied"] == ["layers.1.weight", "layers.2.weight"]


def test_b11_every_expert_keeps_its_own_masters_and_moments(pool: RankPool) -> None:
    found = call(pool, "experts")
    every = [[float(expert)] for expert in range(60)]
    for rank, one in enumerate(found):
        assert one["differs"] == [[], []]
        for name in ("w1", "w2", "w3"):
            if rank < 2:
                assert one[f"2 {name}"] == [every] * 3
            else:
                assert one[f"1 {name}"] == [every[30 * (rank - 2) :][:30]] * 3


@pytest.mark.parametrize("degree", [1, 2])
def test_b13_shards_join_and_nothing_that_is_whole_doubles(pool: RankPool, degree: int) -> None:
    found = call(pool, "shards", degree=degree)
    for rank, one in enumerate(found):
        assert one["differs"] == []
        for side, ways in ((0, 2), (1, degree)):
            if rank >= ways:
                continue
            assert one["shapes"][side] == {
                "norm.weight": [8],
                "norm.bias": [8],
                "up.weight": [16 // ways, 8],
                "up.bias": [16 // ways],
                "down.weight": [8, 16 // ways],
                "down.bias": [8],
            }
        if rank >= degree:
            continue
        # the same layout goes on bit for bit; another sums in another order
        near = 0.0 if degree == 2 else 1e-6
        assert one["losses"][1] == pytest.approx(one["losses"][0], rel=near, abs=0.0)
        assert one["fields"][0]["steps"] == one["fields"][1]["steps"] == [{"step": "8.0 torch.float32"}]
        for state in STATES:
            first, second = one[state]
            assert set(first) == set(second)
            for name in first:
                assert second[name] == pytest.approx(first[name], rel=near, abs=near)


@pytest.mark.parametrize("sides", [[[3], [2, 3]], [[2, 3], [3]]])
def test_b16_a_state_has_the_logical_shape_never_the_placeholders(pool: RankPool, sides: list[list[int]]) -> None:
    for one in between(pool, kind="Tall", ranks=sides, stages=[3, 3], steps=1):
        assert one["shapes"] == {f"{state} table.weight": [502, 21] for state in STATES}
        assert one["bytes"] == 502 * 21 * 3 * 4


@pytest.mark.parametrize("stages", [[3, 3], [2, 1]])
def test_b17_every_tensor_keeps_its_own_type(pool: RankPool, stages: list[int]) -> None:
    found = call(pool, "own_types", stages=stages)
    for rank, one in enumerate(found):
        assert one["differs"] == []
        assert one["states"] == ["master", "momentum"]
        assert {one["dtypes"][f"master {name}"] for name in UNEVEN} == {"float32"}
        assert {one["dtypes"][f"momentum {name}"] for name in UNEVEN} == {"bfloat16"}
        for side in ("source", "destination") if rank < 2 else ("destination",):
            assert one[side]["kept"] == {"momentum": "torch.bfloat16"}
            assert one[side]["master"] == ["torch.float32", [1 + 2.0**-10]]
            assert one[side]["weight"] == "torch.bfloat16"
            assert one[side]["prints"] == found[0]["source"]["prints"]
        assert one["next"] is True


@pytest.mark.parametrize("stages", [[1, 3, 1], [3, 2, 3]])
@pytest.mark.parametrize("optimizer", ["parameter", "group"])
def test_b18_the_step_count_keeps_its_place_and_type(pool: RankPool, optimizer: str, stages: list[int]) -> None:
    found = call(pool, "steps_kept", optimizer=optimizer, stages=stages)
    for rank, one in enumerate(found):
        assert one["ok"] == [[], []]
        mine = (0, 2) if rank < 2 else (1,)
        for name, count in (("moved", 3), ("stepped", 4)):
            for at in mine:
                kept = one[name][at]
                assert kept["global"] == count
                in_group = [group.get("step") for group in kept["groups"]]
                if optimizer == "group":
                    assert (in_group, kept["steps"]) == ([count], [{}])
                    assert kept["keys"] == [["exp_avg", "exp_avg_sq"]]
                else:
                    assert (in_group, kept["steps"]) == ([None], [{"step": f"{float(count)} torch.float32"}])
                    assert kept["keys"] == [["exp_avg", "exp_avg_sq", "step"]]
        if rank < 2:
            assert one["stepped"][2] == one["stepped"][0]
            assert one["prints"][2] == one["prints"][0] == found[0]["prints"][0]


def test_b20_moments_and_rates_survive_gradients_left_in_place_and_empty_groups(pool: RankPool) -> None:
    found = call(pool, "lr_kept")
    source = found[0]
    for rank, one in enumerate(found):
        side = rank // 2
        assert one["differs"] == []
        assert one["prints"][side] == source["prints"][0]
        assert set(one["prints"][side]) == {f"{s} one.{n}" for s in STATES for n in ("weight", "bias")}
        assert one["fields"][side] == source["fields"][0]
        (group,) = one["fields"][side]["groups"]
        assert (group["lr"], group["initial_lr"]) == (0.025, 0.05)
        assert one["next"][side] == [0.0125]


def test_b21_the_loss_scale_grows_when_it_would_have_grown(pool: RankPool) -> None:
    found = call(pool, "scale_history")
    wanted = {"overflowed": (512.0, 1), "moved": (512.0, 3), "first": (512.0, 4), "second": (512.0, 5)}
    wanted["third"] = (1024.0, 6)  # the window counts from the step after the overflow
    for rank, one in enumerate(found):
        assert one["differs"] == []
        for name, (scale, iteration) in wanted.items():
            kept = [history for history in one[name] if history is not None]
            if name == "overflowed":
                kept = kept[:1] if rank < 2 else []
            for history in kept:
                assert (history["cur_scale"], history["cur_iter"]) == (scale, iteration), name
                assert (history["last_overflow_iter"], history["skipped"]) == (0, 1)
            assert all(history == kept[0] for history in kept)


def test_what_cannot_move_is_refused_by_its_cause_on_every_rank(pool: RankPool) -> None:
    found = call(pool, "refused")
    parts = {
        "adapters there": "a.lora_a",
        "adapters here": "a.lora_a",
        "other shape": "a.lora_a",
        "optimizer on host": "offload_optimizer.device is 'cpu'",
        "parameters on host": "offload_param.device is 'cpu'",
        "NVMe": "offload_optimizer.device is 'nvme'",
        "offloaded": "has offloaded",
    }
    for one in found:
        for name, part in parts.items():
            assert one[name].startswith("InputError: "), (name, one[name])
            assert part in one[name], (name, one[name])
        assert one["source as it was"] == "True"

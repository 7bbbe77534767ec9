"""ZeRO-3 engines over ranks 1 and 2 of a world of three, and what comes after them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pool import RankPool

from relaymeter.relayout.rank_order import first_difference

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]

LIMIT_S = 100.0
TIED = {
    "layers.0.weight": [7, 5],
    "layers.0.bias": [7],
    "layers.1.weight": [7, 7],
    "layers.1.bias": [7],
    "layers.2.bias": [7],
    "tail.weight": [5, 7],
    "tail.bias": [5],
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """A pool of its own: rank 0 must not have imported DeepSpeed before."""
    with RankPool(3, fresh=True) as own:
        yield own


@pytest.fixture(scope="module")
def proof(pool: RankPool) -> list[dict[str, Any]]:
    return pool.call("jobs_subgroup:proof", limit_s=LIMIT_S)


@pytest.mark.parametrize(
    ("lists", "index"),
    [
        ([], None),
        ([[], []], None),
        ([[0, 1, 2], [0, 1, 2]], None),
        ([[0, 1, 2], [0, 2, 1]], 1),
        ([[0, 1, 2], [0, 1]], 2),
        ([[0, 1], [0, 1], []], 0),
    ],
)
def test_first_difference(lists: list[list[int]], index: int | None) -> None:
    assert first_difference(lists) == index


def test_three_sgd_steps_on_two_of_three_ranks_are_bit_equal_to_torch(proof: list[dict[str, Any]]) -> None:
    assert proof[0] == {"deepspeed": False}
    for member in proof[1:]:
        assert member["equal"], member
        assert member["moved"] > 1e-3
        assert member["dtype"] == "torch.float32"
        assert member["counts"] == {"barrier": 3, "empty": 1, "trace": 3}


def test_afterwards_deepspeed_has_its_own_functions_and_groups_again(proof: list[dict[str, Any]]) -> None:
    for member in proof[1:]:
        assert member["replaced_all"]
        assert member["originals"]
        assert member["groups_kept"]


def test_engines_below_zero_3_train_on_two_of_three_ranks(pool: RankPool, proof: list[dict[str, Any]]) -> None:
    idle, *members = pool.call("jobs_subgroup:other_stages", limit_s=LIMIT_S)
    assert idle == {}
    for member in members:
        assert sorted(member) == ["0", "1", "2"]
        assert all(equal for equal, _ in member.values()), member


def test_an_engine_over_a_single_rank_trains(pool: RankPool, proof: list[dict[str, Any]]) -> None:
    assert pool.call("jobs_subgroup:alone", limit_s=LIMIT_S) == [{}, {}, {"equal": True, "ranks": [[2]]}]


def test_a_later_engine_over_all_ranks_passes_its_trace_checks_and_trains(
    pool: RankPool, proof: list[dict[str, Any]]
) -> None:
    found = pool.call("jobs_subgroup:everyone", limit_s=LIMIT_S)
    assert len({one["first_id"] for one in found}) > 1, "the ranks must have built different numbers of engines before"
    for rank, one in enumerate(found):
        assert one["counts"] == {"barrier": 3, "empty": 1, "trace": 3}
        assert one["largest"] < 1e-6
        assert one["older"] is (None if rank == 0 else True)


def test_safe_mode_compares_the_gathered_parameters_over_their_group(
    pool: RankPool, proof: list[dict[str, Any]]
) -> None:
    for member in pool.call("jobs_subgroup:gathers", limit_s=LIMIT_S)[1:]:
        assert member["text"] == (
            "PlanDisagreement: ZeRO-3 coalesced gather: ranks disagree first at position 1 (from 0): "
            "rank 1: parameter b.weight (2 entries); rank 2: parameter c.weight (2 entries)"
        )
        assert member["untouched"]
        assert member["right"]
        assert member["counts"] == {"gather": 2}


def test_sanity_checks_compare_gradient_buckets_over_their_group(pool: RankPool, proof: list[dict[str, Any]]) -> None:
    for member in pool.call("jobs_subgroup:gradients", limit_s=LIMIT_S)[1:]:
        assert member["equal"]
        assert member["counts"]["gradient"] == 3
        assert "gradient bucket: ranks disagree first at position 0" in member["text"]
        assert "rank 1: parameter c.weight" in member["text"]
        assert "rank 2: parameter b.weight" in member["text"]


def test_ranks_that_follow_different_orders_are_refused_with_position_and_names(
    pool: RankPool, proof: list[dict[str, Any]]
) -> None:
    for member in pool.call("jobs_subgroup:orders", limit_s=LIMIT_S)[1:]:
        assert member["run"] == (
            "PlanDisagreement: ZeRO-3 trace of modules: ranks disagree first at position 2 (from 0): "
            "rank 1: module b (8 entries); rank 2: module c (8 entries)"
        )
        assert member["lacking"] == (
            "PlanDisagreement: parameters of the model: ranks disagree first at position 4 (from 0): "
            "rank 1: c.weight [48, 48] torch.float32 (6 entries); rank 2: nothing (4 entries)"
        )
        assert member["empty"] is False, "an empty trace is not checked; that is no agreement"
        assert member["equal"] is True
        assert "position 0 (from 0): rank 1: a (3 entries); rank 2: nothing (0 entries)" in member["half empty"]
        assert "position 2 (from 0): rank 1: c (3 entries); rank 2: nothing (2 entries)" in member["shorter"]


def test_wrong_uses_are_refused_without_waiting(pool: RankPool, proof: list[dict[str, Any]]) -> None:
    found = pool.call("jobs_subgroup:refused", limit_s=LIMIT_S)
    for rank, one in enumerate(found):
        assert all(text.startswith("InputError: ") for name, text in one.items() if name != "left alone"), one
        assert "[1, 3] are not distinct ranks of the world 0..2" in one["no such rank"]
        assert f"rank {rank} is not in the group" in one["outside"]
        assert "_setup_for_real_optimizer" in one["other version"]
        assert one["left alone"] == "True"
    for one in found[1:]:
        assert "with subgroup_engines()" in one["not installed"]
        assert "stage is 4" in one["stage"]
        assert "expert_parallel.enabled = True" in one["world only"]
        assert "tensor_parallel.autotp_size is 2, the grid's 1" in one["no grid"]
        assert "tensor parallelism of 2 over ranks [1, 2]: DeepSpeed needs neighbouring ranks" in one["crooked"]


def test_an_upstream_version_keeps_its_own_barriers(pool: RankPool, proof: list[dict[str, Any]]) -> None:
    for member in pool.call("jobs_subgroup:upstream", limit_s=LIMIT_S)[1:]:
        assert member == {"before": False, "after": True, "barriers replaced": False, "checked": True}


def test_a_live_engine_gives_layout_and_storage_with_ties_padding_and_persistent_weights(
    pool: RankPool, proof: list[dict[str, Any]]
) -> None:
    found = pool.call("jobs_subgroup:storage", limit_s=LIMIT_S)
    for one in found:
        assert one["specs"] == [[name, shape, "bfloat16"] for name, shape in TIED.items()]
        assert one["aliases"] == {"layers.2.weight": "layers.1.weight"}
        assert one["ranks"] == {name: [1, 2] for name in TIED}
        assert one["storage"]["layers.0.weight"] == {"1": 18, "2": 18}
        assert one["storage"]["tail.bias"] == {"1": 3, "2": 3}
    for member in found[1:]:
        assert member["sizes"]
        assert member["in place"]
        assert member["right"] == dict.fromkeys(TIED, True)
        assert member["persistent"] == [name for name in TIED if name.endswith("bias")]
        assert member["placeholders"] == [[0], [0], [0]]
    for one in found:
        assert "position 0 holds " in one["differing"]
        assert "'layers.0.weight [7, 5] bfloat16, parts' on ranks [0]" in one["differing"]
        assert "'layers.0.weight [35] bfloat16, parts' on ranks [1]" in one["differing"]
        assert "weights (of ranks [1, 2] of the world, counted from 0)" in one["differing"]
    assert found[0]["late"].startswith("MoveTimeout: no engine gave its layout")

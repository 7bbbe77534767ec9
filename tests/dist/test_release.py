"""Engines that give their memory back and take it up again, by release and by DeepSpeed's own offload."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pool import RankPool

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]

LIMIT_S = 100.0
FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
#: Elements of the four matrices of the wide model, and bytes of an element on one of two ranks: weights, then fp32
#: masters and two moments; gradients under ZeRO-3.
WIDE = 4 * 1024 * 1024
WIDE_BYTES = {0: 2 + 12, 1: 2 + 6, 2: 2 + 6, 3: 1 + 6 + 1}


@pytest.fixture(scope="module")
def pool(ranks: Callable[[int], RankPool]) -> RankPool:
    return ranks(4)


@pytest.mark.parametrize(
    ("stage", "members", "dtype", "settings", "degree", "optimizer"),
    [
        (0, 2, "bf16", {}, 1, "FP16_UnfusedOptimizer"),
        (0, 2, "fp32", {}, 1, "AdamW"),
        (1, 3, "bf16", {}, 1, "DeepSpeedZeroOptimizer"),
        (1, 2, "bf16", FP32_GRADIENTS, 1, "BF16_Optimizer"),
        (2, 2, "fp16", {}, 1, "DeepSpeedZeroOptimizer"),
        (3, 4, "bf16", {}, 1, "DeepSpeedZeroOptimizer_Stage3"),
        (3, 2, "fp32", {}, 1, "DeepSpeedZeroOptimizer_Stage3"),
        (2, 4, "fp32", {}, 2, "DeepSpeedZeroOptimizer"),
        (3, 4, "fp32", {}, 2, "DeepSpeedZeroOptimizer_Stage3"),
    ],
)
def test_a_released_engine_holds_nothing_and_trains_on_like_its_twin_once_it_is_filled_again(
    pool: RankPool, stage: int, members: int, dtype: str, settings: dict[str, Any], degree: int, optimizer: str
) -> None:
    arguments = {"stage": stage, "ranks": members, "dtype": dtype, "settings": settings, "tp": degree}
    found = pool.call("jobs_release:twins", limit_s=LIMIT_S, **arguments)
    for one in found[:members]:
        refused, (said, gone, released) = one.pop("refused"), one.pop("freed")
        said_when_hollow, hollow = one.pop("hollow")
        assert hollow == "True"
        assert (
            "was restored and is still empty, so step has nothing to work on: run a TrainingStateMove"
            in said_when_hollow
        )
        assert said == gone > 1000
        assert released
        assert len(refused) == 9
        assert all(text.startswith("InputError: the engine ") and "restore(engine)" in text for text in refused)
        assert one == {
            "optimizer": optimizer,
            "left": [],
            "attributes": [],
            "hooks": 0,
            "zeros": True,
            "hidden kept": True,
            "filled": [],
            "old references": True,
            "trained": [],
            "moved on": True,
            "steps": [5, 5],
        }


def test_the_kernel_counts_what_a_release_gives_back_although_references_remain(pool: RankPool) -> None:
    found = pool.call("jobs_release:resident", limit_s=LIMIT_S, stages=[0, 2, 3])
    for one in found[:2]:
        for stage, (said, gone, back, references) in one.items():
            expected = WIDE * WIDE_BYTES[int(stage)]
            assert expected <= said < 1.01 * expected
            assert references > 12
            assert gone == pytest.approx(expected, rel=0.03)
            assert back == pytest.approx(expected, rel=0.03)


def test_what_cannot_be_released_or_restored_is_refused_with_the_reason(pool: RankPool) -> None:
    found = pool.call("jobs_release:refused", limit_s=LIMIT_S)[0]
    reasons = {
        "restore first": "the engine is not released",
        "configured": "zero_optimization.offload_optimizer.device is 'cpu'",
        "window": "inside an accumulation window (1 of 2 micro-batches)",
        "stage 0": "gradients wait for a step (layers.0.weight)",
        "stage 1": "gradients wait for a step (averaged_gradients)",
        "stage 3": "gradients wait for a step (averaged_gradients)",
        "BF16_Optimizer": "gradients wait for a step (fp32_groups_has_gradients)",
        "offloaded": "has offloaded its hp_params: call engine.reload_states()",
        "shared memory": "frozen [3, 11] lies in memory that cannot be given back",
        "twice": "released already: call restore(engine)",
    }
    assert found.pop("nothing changed") == "True"
    assert found.pop("wrapped in between") == "no error"
    assert found.keys() == reasons.keys()
    assert {name: reasons[name] in text and text.startswith("InputError") for name, text in found.items()} == (
        dict.fromkeys(reasons, True)
    )


def test_deepspeeds_offload_of_each_kind_and_our_release_leave_every_bit_and_the_next_step_as_they_were(
    pool: RankPool,
) -> None:
    found = pool.call("jobs_release:offloads", limit_s=LIMIT_S, stages=[1, 3], blocking=[False])
    assert found[0] == found[1]
    rows = {(row["stage"], row["way"], row["state"], row["moment"], row["pinned"]): row for row in found[0]}
    assert len(rows) == len(found[0]) == 29
    pinned = [row for row in rows.values() if row["pinned"]]
    assert len(pinned) == 13
    assert {(row["verdict"], row["note"]) for row in pinned} == {
        ("not applicable", "not applicable: DeepSpeed pins no memory on cpu")
    }
    assert rows[1, "deepspeed", "contiguous_grad_buffer", "after a step", None]["verdict"] == "not offered"
    moved = {key: row for key, row in rows.items() if row["outcome"] == "moved"}
    # 280 values in bf16 weights, with a fp32 master and two moments, on two ranks, and torch's two steps
    group, states = 280 * 4 // 2, {"hp_params": 1, "optim_states": 2}
    after, between = "after a step", "after a backward pass"
    assert {key[:4]: row["bytes"] for key, row in moved.items()} == {
        (1, "deepspeed", "hp_params", after): group,
        (1, "deepspeed", "lp_params", after): 280 * 2,
        (1, "deepspeed", "lp_grads", after): 0,
        (1, "deepspeed", "lp_grads", between): 280 * 2 // 2,
        (1, "deepspeed", "optim_states", after): states["optim_states"] * group + 4,
        (1, "deepspeed", "all", after): 3 * group + 280 * 2 + 4,
        (1, "release", "all", after): 3 * group + 280 * 2,
        (3, "deepspeed", "lp_params", after): 280 * 2 // 2,
        (3, "deepspeed", "lp_grads", after): 280 * 2 // 2,
        (3, "deepspeed", "lp_grads", between): 280 * 2 // 2,
        (3, "deepspeed", "contiguous_grad_buffer", after): 200_000,
        (3, "release", "all", after): 3 * group + 2 * 280 + 200_000,
    }
    lost = moved.pop((3, "deepspeed", "lp_grads", between, False))  # DeepSpeed forgets them
    assert (lost["equal"], lost["mismatch"]) == (False, "gradients that wait for the step")
    assert lost["trains"].startswith("cannot: KeyError")
    assert {row["verdict"] for row in moved.values()} == {"ok"}
    assert all(row["offload_s"] > 0 and row["reload_s"] > 0 and row["freed"] is None for row in moved.values())
    failed = [row for row in rows.values() if row["outcome"] == "failed"]
    assert [(row["stage"], row["state"]) for row in failed] == [(3, "hp_params"), (3, "optim_states"), (3, "all")]
    assert {row["note"] for row in failed} == {
        "DeepSpeed fails: AssertionError: Offloading is supported only for DeepSpeed FusedAdam."
    }

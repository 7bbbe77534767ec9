"""The proofs of state moves: what they see, what engines of any layout have in common, and a change from end to end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import RankPool

from relaymeter.harness.state_config import EngineConfig, TrainingConfig
from relaymeter.harness.state_models import GroupStep, build_model, parameter_groups, samples

LIMIT_S = 200.0


@pytest.fixture(scope="module")
def pool(ranks: Callable[[int], RankPool]) -> RankPool:
    return ranks(4)


def test_the_optimizer_of_the_group_step_is_adam() -> None:
    start = torch.randn(7, generator=torch.Generator().manual_seed(1))
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    one, other = GroupStep([ours], lr=0.1), torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(3):
        for param, optimizer in ((ours, one), (theirs, other)):
            param.grad = torch.arange(7.0) - step
            optimizer.step()
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7)
    assert one.param_groups[0]["step"] == 3
    assert sorted(one.state[ours]) == ["exp_avg", "exp_avg_sq"]


def test_groups_hold_every_trained_parameter_once_and_one_dtype() -> None:
    for model in ("dense", "mixed", "unused"):
        for groups in ("one", "decay", "several"):
            training = TrainingConfig.model_validate({"model": model, "groups": groups, "frozen": True})
            module = build_model(training, 3)
            made = parameter_groups(module, training)
            held = [id(param) for group in made for param in group["params"]]
            assert sorted(held) == sorted(id(param) for param in module.parameters() if param.requires_grad)
            assert all(len({param.dtype for param in group["params"]}) == 1 for group in made)
            frozen = [name for name, param in module.named_parameters() if not param.requires_grad]
            assert frozen == ["up.weight", "head.bias"]


def test_weights_and_batches_depend_on_their_seed_alone() -> None:
    training = TrainingConfig()
    one, same, other = (build_model(training, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    alike = {name for name in one if torch.equal(one[name], other[name])}
    assert alike == {"seen", "norm.weight", "norm.bias"}
    assert torch.equal(samples(training, 4, 9)["inputs"], samples(training, 4, 9)["inputs"])


@pytest.mark.dist
@pytest.mark.timeout(240)
def test_engines_of_any_layout_train_alike(pool: RankPool) -> None:
    engines: list[dict[str, Any]] = [
        {"stage": 3, "ranks": 4},
        {"stage": 2, "ranks": 3},
        {"stage": 1, "ranks": 4, "tensor_parallel": 2},
        {"stage": 0, "ranks": [1, 2], "gradient_accumulation": 2},
    ]
    training = {"dtype": "float32", "model": "unused", "frozen": True, "groups": "decay", "scheduler": "StepLR"}
    found = pool.call("jobs_state_proof:alike", training=training, engines=engines, steps=4, limit_s=LIMIT_S)
    for rank, one in enumerate(found):
        assert one["whole"] == [[]] * 4  # what the oracle gathers at first is the model that went in
        assert max(one["apart"]) < 1e-6
        for entry, losses, fields in zip(engines, one["losses"], one["fields"], strict=True):
            inside = rank in EngineConfig.model_validate(entry).ranks
            assert losses == (pytest.approx(found[0]["losses"][0], rel=1e-5) if inside else [])
            if inside:
                assert fields["counters"] == [4, 0, 96]
                assert fields["steps"] == [4.0]
                assert [group[0] for group in fields["groups"]] == [pytest.approx(0.01 * 0.49)] * 2


@pytest.mark.dist
@pytest.mark.timeout(240)
def test_the_oracle_sees_one_flipped_bit_and_copies_that_differ(pool: RankPool) -> None:
    found = pool.call("jobs_state_proof:sees", limit_s=LIMIT_S)
    for one in found:
        assert one["clean"] == one["clean again"] == [True, 0, None]
        ok, wrong, said = one["flipped"]
        assert (ok, wrong) == (False, 2)  # every rank gathers it, so both copies are wrong
        assert said.startswith("exp_avg enter.weight [24, 10]: 1 elements differ, first [0, 2]: ")
        ok, wrong, said = one["torn"]
        assert (ok, wrong) == (False, 1)
        assert said == "weight head.bias [5] on ranks [1] differs from its copy on ranks [0]"


@pytest.mark.dist
@pytest.mark.timeout(240)
def test_a_change_that_returns_goes_on_bit_for_bit_and_as_its_checkpoint(pool: RankPool) -> None:
    path = [{"stage": 2, "ranks": 4}, {"stage": 1, "ranks": 2}, {"stage": 2, "ranks": 4}]
    entry = {"path": path, "checkpoint": True, "continuation": 12, "training": {"dtype": "float16", "groups": "decay"}}
    found = pool.call("jobs_state_proof:change", entry=entry, limit_s=LIMIT_S)
    assert all(one == found[0] for one in found)
    first, last = found[0]
    assert first["ok"] and last["ok"]
    assert first["route"] == ["zero2 x4", "zero1 x2"]
    assert first["continuation"] == [True, ""]
    assert last["continuation"] == [True, "bit-equal, 12 steps"]
    assert last["checkpoint"] == "bit-equal"


@pytest.mark.dist
@pytest.mark.timeout(240)
def test_a_flipped_bit_is_seen_by_digest_oracle_and_continuation(pool: RankPool) -> None:
    path = [{"stage": 1, "ranks": 2}, {"stage": 1, "ranks": [1, 3]}, {"stage": 1, "ranks": 2}]
    found = pool.call("jobs_state_proof:change", entry={"path": path, "continuation": 2}, flip=3, limit_s=LIMIT_S)
    assert all(one == found[0] for one in found)
    first, last = found[0]
    assert not first["ok"]
    assert first["digests"][1] - first["digests"][0] == 1
    digest, oracle = first["said"]
    state, name = digest.split(",")[0].split(" ")
    assert state == "exp_avg" and oracle.startswith(f"{state} {name} [")
    # the second move carries the wrong bit faithfully; training on shows it
    assert last["digests"][0] == last["digests"][1] and last["oracle"][0] == last["oracle"][1]
    good, text = last["continuation"]
    assert not good and text.startswith("differs within 2 steps: ")

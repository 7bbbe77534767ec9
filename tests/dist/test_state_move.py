"""Training state from one live engine into another: every bit and field, by all planners and routes, or a refusal."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("deepspeed")


def test_a_move_planned_once_carries_what_was_trained_since(ranks: Any) -> None:
    found = ranks(4).call("jobs_state_move:repeats", limit_s=120)
    for rank, each in enumerate(found):
        for number in range(3):
            assert each[f"there {number}"] == [True, []], rank
            assert each[f"back {number}"] == [True, [], 0], rank
        assert each["steps"] == 2 + 3 * 2
        assert each["freed"] == [True, True]
        assert each["heard"]
        # 58 values (57 and a padded one) or 57 of master and two moments: each arrives once
        assert each["bytes"] == [57 * 3 * 4] * 3


def test_a_move_can_be_prepared_while_the_source_trains_on(ranks: Any) -> None:
    found = ranks(4).call("jobs_state_move:prepared", limit_s=120)
    for rank, each in enumerate(found):
        # two moments of 30 of 60 values, 57 and padding to a multiple of 4, on each rank of the destination
        share = 2 * 30 * 4 if rank in (1, 2) else 0
        assert [each["allocated"], each["again"]] == [share, share]
        assert each["untouched"]
        assert each["carried"] == [True, [], share]
        assert each["later"] == [True, 0, 0]  # what was read for the next move is not held against the last one
        assert each["fresh"] == (2 * 30 * 4 if rank in (0, 3) else 0)
        assert each["trained between"] == [True, []]
        assert "gradients wait for a step" in each["refused"]


def test_one_flipped_bit_is_named_and_the_next_check_is_clean(ranks: Any) -> None:
    found = ranks(4).call("jobs_state_move:wrong_bits", limit_s=120)
    one = found[0]
    assert all(each == one for each in found)
    passed, total, mismatches = one["passed"]
    assert total - passed == mismatches == 1
    state, name = one["mismatch"].split(",")[0].split(" ")
    assert state in ("master", "exp_avg", "exp_avg_sq") and name in ("a.weight", "a.bias", "b.weight", "c")
    assert one["said"].startswith("DigestMismatch: the training state did not arrive whole (1 of")
    assert one["mismatch"] in one["said"]
    assert one["again"] == [True, total, total]
    assert one["fields"] == [
        "engine.global_steps: 2 in the source, 3 in the destination",
        one["fields"][1],
    ]
    assert one["fields"][1].startswith("groups[0].fields.lr: ") and one["fields"][1].endswith("7.0 in the destination")
    assert "2 fields differ" in one["fields said"]


def test_what_does_not_fit_is_refused_on_every_rank_before_anything_moves(ranks: Any) -> None:
    found = ranks(4).call("jobs_state_move:refusals", limit_s=120)
    parts = {
        "same engine": "source and destination are one engine",
        "no destination": "no rank gave a destination engine",
        "other model": "holds",
        "other optimizer": "optimizer is torch.optim.adamw.AdamW, the destination's torch.optim.sgd.SGD",
        "no scheduler": "the destination's missing",
        "other dtype": "scales its loss by",
        "other groups": "share parameter group 0 of the destination",
        "inside a window": "inside an accumulation window (1 of 2 micro-batches)",
        "inside the caller's window": "inside an accumulation window (1 of 2 micro-batches)",
        "gradients wait": "gradients wait for a step",
        "sums wait": "gradients wait for a step",
        "too early": "call run() before verify()",
        "released": "destination: the engine has given its memory back",
        "own buffers": "have to be made equal first (broadcast them)",
        "ranks differ": "0.5 in rank 1",
    }
    for each in found:
        for name, part in parts.items():
            assert part in each[name], each[name]
            assert each[name].startswith(("InputError", "PlanDisagreement", "DigestMismatch"))
        assert each["window over"] == each["still in order"] == each["broadcast"] == "no error"
        assert each["source"] == "True"
    assert found[0]["optimizer"] == "BF16_Optimizer"


def test_ties_frozen_and_empty_parameters_buffers_and_no_state_yet(ranks: Any) -> None:
    found = ranks(4).call("jobs_state_move:kinds", limit_s=120)
    for each in found:
        assert each["varied"][:3] == [True, [], ["master", "exp_avg", "exp_avg_sq", "frozen"]]
        assert each["stepped"][:3] == [True, [], ["master", "exp_avg", "exp_avg_sq", "frozen"]]
        assert each["unstepped"][:3] == [True, [], ["master", "frozen"]]
    for rank in (0, 1):
        assert found[rank]["varied"][3:] == [0, 1]
        assert found[rank]["stepped"][3:] == [0, 1]
        assert found[rank]["unstepped"][3:] == [0, 0]


def test_ranks_without_an_engine_need_not_take_part(ranks: Any) -> None:
    found = ranks(4).call("jobs_state_move:alone", limit_s=120)
    for each in found[1:]:
        # one copy of four tensors in three states, and two copies of the four low-precision weights
        assert each[:3] == [True, 4 * 3 + 4 * 2, []]
    assert "no rank gave a destination engine" in found[1][3]
    assert found[2][3] == found[1][3]


def test_what_only_the_destination_had_is_gone_after_the_move(ranks: Any) -> None:
    found = ranks(4).call("jobs_state_move:leftovers", limit_s=120)
    for each in found:
        assert each["ok"] == [True, [], True]
        assert each["flags"] == []
    for each in found[2:]:
        assert each["unused"] == [0.0, 0.0, 0.0]
        assert each["left"] == [False, False]
        assert each["used"]
        assert each["scale"] == [None, False]


def test_rates_go_with_their_group_and_schedules_with_all_their_settings(ranks: Any) -> None:
    found = ranks(4).call("jobs_state_move:scheduled", limit_s=120)
    for each in found:
        assert each["lambda"] == each["warm-up"] == []
        assert each["lambda rates"] == [0.1 * 0.125, 0.01 * 0.125]  # three steps, halved by each
        assert each["warm-up rates"] == found[0]["warm-up rates"]

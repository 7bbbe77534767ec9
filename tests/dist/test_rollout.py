"""The rollout engine: replicas whose weights come by relayout give the tokens of a copy that DeepSpeed gathered."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]
LIMIT_S = 100.0
PLACES = ("tp1", "tp2", "tp4", "mixed")
IDLE = {"mixed": 1}


@pytest.mark.parametrize(
    ("stage", "trainer", "places", "tied"),
    [(3, (0, 1, 2, 3), PLACES, False), (1, (0, 1, 2, 3), PLACES[::-1], True), (3, (0, 1), ("tp2", "mixed"), True)],
    ids=["zero3", "zero1-tied", "zero3-half"],
)
def test_greedy_tokens_are_those_of_a_gathered_copy(
    ranks: Any, stage: int, trainer: tuple[int, ...], places: tuple[str, ...], tied: bool
) -> None:
    found = ranks(4).call(
        "jobs_rollout:tokens", limit_s=LIMIT_S, stage=stage, trainer=trainer, places=places, tied=tied
    )
    for name in found[0]:
        each = [rank[name] for rank in found]
        wanted = each[trainer[0]]["wanted"]
        assert [one["tokens"] for one in each].count(None) == IDLE.get(name.split()[0], 0), name
        for one in each:
            assert one["tokens"] in (None, wanted), name
            assert one["wanted"] in (None, wanted)
            assert one["apart"] is None or one["apart"] < 2e-6, name
            assert one["lead"] is None or one["lead"] > 2e-4  # no token was a toss-up
            assert one.get("verified", True)
    steps = [found[trainer[0]][name]["wanted"] for name in places]
    assert all(one != other for one, other in itertools.pairwise(steps))  # every step's weights are others


def test_syncs_and_changes_of_replicas_keep_what_they_can(ranks: Any) -> None:
    found = ranks(4).call("jobs_rollout:lives", limit_s=LIMIT_S)
    for rank, each in enumerate(found):
        assert "sync_weights(step) has not succeeded" in each["early"]
        assert each["verified"] == [True, False, True, False]
        assert each["once"] and each["addresses"]
        assert each["filled"] == [6 + 6 - 1, True]
        assert each["reset"] == [0, 0.0]
        assert "nothing to resume" in each["nothing"]
        assert each["drawn"] == found[rank // 2 * 2]["drawn"] and each["drew"]  # a replica's ranks draw alike
        assert each["kept"] == ([True, True] if rank < 2 else [False, False])
        assert each["after"] == found[0]["after"]
        assert each["still"] == (each["after"] if rank < 2 else None)
        assert each["outside"] == "no error" if rank < 2 else "is in none of the replicas [[0, 1]]" in each["outside"]
    assert found[0]["drawn"] != found[2]["drawn"]


def test_sequences_go_on_over_a_sync_that_keeps_the_cache(ranks: Any) -> None:
    for each in ranks(4).call("jobs_rollout:resumed", limit_s=LIMIT_S):
        assert each["resumed"] == each["whole"]
        assert each["longer"] == [6 + 9 + 4] * 3 and each["begins"]
        assert "max_new_tokens 9: the cache of 20 has 2 left" in each["full"]


def test_a_trainer_that_lies_otherwise_is_named_and_wrong_bits_are_never_generated_with(ranks: Any) -> None:
    found = ranks(4).call("jobs_rollout:changed", limit_s=LIMIT_S)
    for rank, each in enumerate(found):
        assert "it was zero3 weights, ranks [[0, 1, 2, 3]]" in each["layout"], each["layout"]
        assert "it is zero1 weights, ranks [[0, 1]]" in each["layout"]
        assert each["layout"].endswith("replan() makes a new plan")
        assert each["untouched"] == [0, True, True]
        assert each["replanned"] == [0, True, True]
        for name in ("", " 2"):
            assert each["tokens" + name] == (found[0]["wanted" + name] if rank > 1 else None)
        assert each["wrong"].startswith("DigestMismatch: wrong bits in 1 of"), each["wrong"]
        assert rank < 2 or "has not succeeded" in each["unusable"]
        assert each["again"]
        assert each["steps"].endswith("the ranks are at different steps, by rank: [4, 5, 4, 4]")
        assert "no rank gave a trainer" in each["no trainer"]


def test_what_does_not_fit_is_refused_on_every_rank(ranks: Any) -> None:
    parts = {
        "twice": "rank 1 is in two replicas",
        "none": "give the ranks of each",
        "outside": "4",
        "degree": "3",
        "other sizes": "weight model.embed_tokens.weight: the decoder has [67, 40], the trainer [67, 32]",
        "no norms": "q_norm.weight: the decoder has none, the trainer [6]",
        "tied": "weight lm_head.weight: the decoder has none, the trainer [67, 32]",
        "differ": "tell different things of the rollout's settings: seed",
        "no trainer": "no rank gave a trainer",
        "rows": "rows 0 and slots 20",
        "route": "route 'teleport' is not one of direct",
        "every": "verify_every -1",
        "still": "rank 0 is in two replicas",
        "step": "0",
    }
    told = {
        "samples": "3 prompts x 2 samples = 6 sequences, the rollout has 4 rows",
        "slots": "prompts of 6 + max_new_tokens 15 = 21 tokens, the cache has 20 slots",
        "continuous": "continuous_batch_size 2",
    }
    for rank, each in enumerate(ranks(4).call("jobs_rollout:refusals", limit_s=LIMIT_S)):
        for name, part in (parts | (told if rank < 2 else {})).items():
            assert part in each[name] and each[name] != "no error", (name, each[name])


def test_weights_arrive_in_the_replicas_dtype(ranks: Any) -> None:
    for each in ranks(4).call("jobs_rollout:casts", limit_s=LIMIT_S):
        assert each["fp32"] < 0.02 and each["bf16"] < 0.02  # of logits about 1, to bfloat16's 8 bits

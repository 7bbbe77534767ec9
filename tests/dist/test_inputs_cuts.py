"""How ``plan --model`` says AutoTP and AutoEP cut the common families, held against engines that DeepSpeed makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pool import RankPool

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]

LIMIT_S = 100.0
#: Family, tensor-parallel degree, stage, changes. Degree 4 is more than the key-value heads.
CASES: dict[str, list[Any]] = {
    "llama": ["llama", 2, 3, {}],
    "llama, fewer key-value heads than ranks": ["llama", 4, 0, {}],
    "mistral": ["mistral", 4, 0, {}],
    "qwen2, tied": ["qwen2", 2, 3, {}],
    "qwen3": ["qwen3", 2, 0, {}],
    "qwen3, tied": ["qwen3", 4, 1, {"tie_word_embeddings": True}],
    "gpt_neox": ["gpt_neox", 4, 0, {}],
    "gpt_neox, tied": ["gpt_neox", 2, 0, {"tie_word_embeddings": True}],
}
EXPERTS = ["mixtral", "qwen3_moe", "deepseek_v3"]


@pytest.fixture(scope="module")
def pool(ranks: Callable[[int], RankPool]) -> RankPool:
    return ranks(4)


@pytest.fixture(scope="module")
def cut(pool: RankPool) -> dict[str, Any]:
    return dict(pool.call("jobs_inputs:autotp", cases=CASES, limit_s=LIMIT_S)[0])


@pytest.mark.parametrize("key", list(CASES))
def test_weights_of_a_config_and_their_cuts_are_those_of_the_engine(cut: dict[str, Any], key: str) -> None:
    assert cut[key]["wrong"] == []
    assert cut[key]["weights"]


def test_cuts_that_are_easily_got_wrong_are_really_there(cut: dict[str, Any]) -> None:
    few = cut["llama, fewer key-value heads than ranks"]["widths"]
    assert few["model.layers.0.self_attn.k_proj.weight"] == [0, [4, 4, 4, 0]]
    assert few["model.layers.0.self_attn.q_proj.bias"] == [0, [8, 8, 8, 0]]
    assert few["model.layers.0.self_attn.o_proj.bias"] is None
    assert few["model.layers.0.mlp.down_proj.weight"] == [1, [6, 6, 5, 5]]
    assert few["model.embed_tokens.weight"] is None
    assert few["lm_head.weight"] == [0, [10, 9, 9, 9]]
    assert cut["qwen2, tied"]["widths"]["model.embed_tokens.weight"] == [0, [19, 18]]
    assert cut["gpt_neox"]["widths"]["gpt_neox.layers.1.attention.query_key_value.weight"] == [0, [24, 24, 12, 12]]


def test_autotp_has_no_plan_for_mixtures_of_experts(pool: RankPool) -> None:
    said = pool.call("jobs_inputs:refused", families=EXPERTS, limit_s=LIMIT_S)[0]
    assert all("unsupported partition style(s): ['moe_tp_experts', 'packed_colwise']" in said[one] for one in EXPERTS)


def test_autoep_leaves_as_many_bytes_on_every_rank_as_the_config_says(pool: RankPool) -> None:
    found = pool.call("jobs_inputs:autoep", families=EXPERTS, degree=2, limit_s=LIMIT_S)[0]
    for family in EXPERTS:
        assert found[family]["ours"] == found[family]["theirs"], family
        assert min(found[family]["theirs"][0]) > 0

"""Names, shapes, ties and cuts of a Qwen3-shaped model, against the real one."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest

from relaymeter.errors import InputError
from relaymeter.harness.models import Qwen3Geometry, tensor_parallel_cuts, weight_aliases, weight_specs
from relaymeter.relayout.placements import Cut, tensor_parallel_layout

TINY = Qwen3Geometry(
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=10,
    vocab_size=33,
)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_weights_are_those_of_the_transformers_model(tied: bool) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from relaymeter.harness.trainer import build_model

    geometry = replace(TINY, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = build_model(geometry, seed=0)
    real = [(name, tuple(param.shape)) for name, param in model.named_parameters()]
    assert [(spec.name, spec.shape) for spec in weight_specs(geometry).values()] == real
    assert all(name == spec.name and spec.dtype == "bfloat16" for name, spec in weight_specs(geometry).items())
    every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert sorted([*weight_specs(geometry), *weight_aliases(geometry)]) == sorted(every)
    if tied:
        assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")


def test_the_sizes_of_the_published_models_come_out() -> None:
    small = Qwen3Geometry(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
    )
    large = Qwen3Geometry(
        hidden_size=5120,
        intermediate_size=25600,
        num_hidden_layers=64,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
    )
    assert len(weight_specs(small)) == 310
    assert sum(spec.numel for spec in weight_specs(small).values()) == 596_049_920
    assert len(weight_specs(large)) == 707
    assert sum(spec.numel for spec in weight_specs(large).values()) == 32_762_123_264


def test_cuts_name_every_weight_and_keep_heads_whole() -> None:
    cuts = tensor_parallel_cuts(TINY)
    assert list(cuts) == list(weight_specs(TINY))
    layer = {name.removeprefix("model.layers.1."): cut for name, cut in cuts.items() if ".layers.1." in name}
    assert layer == {
        "self_attn.q_proj.weight": Cut(0, 4),
        "self_attn.k_proj.weight": Cut(0, 2),
        "self_attn.v_proj.weight": Cut(0, 2),
        "self_attn.o_proj.weight": Cut(1, 4),
        "self_attn.q_norm.weight": Cut(None),
        "self_attn.k_norm.weight": Cut(None),
        "mlp.gate_proj.weight": Cut(0),
        "mlp.up_proj.weight": Cut(0),
        "mlp.down_proj.weight": Cut(1),
        "input_layernorm.weight": Cut(None),
        "post_attention_layernorm.weight": Cut(None),
    }
    assert cuts["model.embed_tokens.weight"] == cuts["lm_head.weight"] == Cut(0)
    assert cuts["model.norm.weight"] == Cut(None)


def test_with_more_ranks_than_key_heads_each_rank_has_the_key_head_of_its_query_heads() -> None:
    layout = tensor_parallel_layout(weight_specs(TINY), tensor_parallel_cuts(TINY), [(0, 1, 2, 3)], 4)
    query = layout.placements["model.layers.0.self_attn.q_proj.weight"]
    key = layout.placements["model.layers.0.self_attn.k_proj.weight"]
    output = layout.placements["model.layers.0.self_attn.o_proj.weight"]
    head = TINY.head_dim
    assert np.array_equal(query.lo[:, 0], [0, head, 2 * head, 3 * head])
    assert np.array_equal(key.lo[:, 0], [0, 0, head, head])
    assert np.array_equal(output.lo[:, 1], query.lo[:, 0])
    assert set(key.shape[:, 0].tolist()) == {head}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden_size": 0}, "hidden_size = 0 is not a positive whole number"),
        ({"vocab_size": True}, "vocab_size = True"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers = 2.0"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 % num_key_value_heads 3 != 0"),
        ({"head_dim": 5}, "head_dim 5 is odd"),
        ({"dtype": "bf16"}, "dtype 'bf16' is not one of float64"),
    ],
)
def test_impossible_sizes_are_refused(change: dict[str, object], text: str) -> None:
    with pytest.raises(InputError, match=text.replace("%", r"\%")):
        Qwen3Geometry(**{**asdict(TINY), **change})

"""Models from a config.json, from headers and from a live module: weights, ties, dtypes, and what is said aloud."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from input_files import DEEPSEEK, LLAMA, write_json, write_safetensors

from relaymeter.errors import InputError
from relaymeter.harness import models, moe
from relaymeter.harness.inputs.families import FAMILIES, Sizes, family_weights
from relaymeter.harness.inputs.model import module_model, read_model
from relaymeter.harness.inputs.roles import role_of, unknown_names


def weights(entry: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape, _ in family_weights(Sizes(entry, "config.json"))}


def test_qwen3_and_deepseek_are_the_geometries_that_scenarios_and_benchmarks_use() -> None:
    geometry = models.Qwen3Geometry(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=6, vocab_size=32,
    )  # fmt: skip
    found = weights({**LLAMA, "model_type": "qwen3", "head_dim": 6})
    assert found == {name: spec.shape for name, spec in models.weight_specs(geometry).items()}
    sizes = {key: DEEPSEEK[key] for key in moe.MoeGeometry.__dataclass_fields__ if key in DEEPSEEK}
    latent = moe.MoeGeometry(**{**sizes, "dtype": "bfloat16"})
    assert weights(DEEPSEEK) == {name: spec.shape for name, spec in moe.weight_specs(latent).items()}


def test_what_differs_between_the_families() -> None:
    plain = weights(LLAMA)
    assert plain["model.layers.1.self_attn.k_proj.weight"] == (8, 16)
    assert len(plain) == 2 * 9 + 3
    biased = weights({**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert len(biased) == len(plain) + 2 * 7
    assert weights({**LLAMA, "model_type": "mistral", "attention_bias": True}) == plain
    qwen2 = weights({**LLAMA, "model_type": "qwen2"})
    assert sorted(set(qwen2) - set(plain))[:3] == [f"model.layers.0.self_attn.{one}_proj.bias" for one in "kqv"]
    assert "model.layers.0.self_attn.o_proj.bias" not in qwen2
    tied = weights({**LLAMA, "tie_word_embeddings": True})
    assert set(plain) - set(tied) == {"lm_head.weight"}
    mixtral = weights({**LLAMA, "model_type": "mixtral", "num_local_experts": 2})
    assert mixtral["model.layers.0.block_sparse_moe.experts.1.w2.weight"] == (16, 24)
    sparse = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 2, "moe_intermediate_size": 8, "mlp_only_layers": [0]}
    assert weights(sparse)["model.layers.0.mlp.up_proj.weight"] == (24, 16)
    assert weights(sparse)["model.layers.1.mlp.experts.1.up_proj.weight"] == (8, 16)
    assert "model.layers.0.mlp.experts.0.up_proj.weight" in weights({**sparse, "mlp_only_layers": []})
    whole = weights({**DEEPSEEK, "q_lora_rank": None})
    assert whole["model.layers.0.self_attn.q_proj.weight"] == (24, 16)
    neox = weights({**LLAMA, "model_type": "gpt_neox"})
    assert neox["gpt_neox.layers.0.attention.query_key_value.bias"] == (48,)
    assert neox["gpt_neox.final_layer_norm.bias"] == (16,)
    assert neox["embed_out.weight"] == (32, 16)


def test_every_weight_of_every_family_has_a_known_part() -> None:
    entry = {**DEEPSEEK, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts": 2, "attention_bias": True}
    for family in FAMILIES:
        names = weights({**entry, "model_type": family})
        assert [name for name in names if role_of(name).kind == "unknown"] == [], family


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"model_type": "lama"},
            "model_type \"lama\" is not known (did you mean 'llama'? valid: deepseek_v3, gpt_neox",
        ),
        ({"model_type": None}, "has no model_type: valid: llama, mistral"),
        ({"model_type": 3}, "model_type 3 is no name"),
        ({"hidden_size": None}, "hidden_size is missing, and without it no llama model is known"),
        ({"hidden_size": "16"}, 'hidden_size = "16" is not a whole number of at least 1'),
        ({"vocab_size": 0}, "vocab_size = 0 is not a whole number"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 % num_key_value_heads 3 != 0"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "hidden_size 16 % num_attention_heads 3 != 0"),
        ({"torch_dtype": "float7"}, 'dtype "float7" is not one of'),
        ({"attention_bias": 1}, "attention_bias = 1 is not true or false"),
        ({"num_hidden_layers": 10**9}, "1000000000 layers x 1 experts are more than 500,000"),
    ],
)
def test_a_config_that_no_model_has_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    file = write_json(tmp_path / "config.json", {**LLAMA, **change})
    for path in (file, tmp_path):
        with pytest.raises(InputError, match=re.escape(said)):
            read_model(path)


def test_a_folder_is_read_from_its_headers_and_its_config(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {**LLAMA, "tie_word_embeddings": True})
    shapes = {**weights(LLAMA), "extra.table": (3, 3)}
    write_safetensors(tmp_path / "model.safetensors", shapes)
    model = read_model(tmp_path)
    assert (model.name, model.family, model.heads, model.kv_heads) == (tmp_path.name, "llama", 4, 2)
    assert model.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in model.specs
    assert unknown_names(model) == ["extra.table"]
    assert model.notes == ()
    short = read_model(write_json(tmp_path / "other" / "config.json", LLAMA))
    assert short.name == "other"
    assert set(short.specs) == set(weights(LLAMA))


def test_headers_without_a_config_say_what_is_not_known(tmp_path: Path) -> None:
    model = read_model(write_safetensors(tmp_path / "model-00001-of-00002.safetensors", {"a.q_proj.weight": (4, 4)}))
    assert (model.family, model.heads) == (None, 0)
    assert model.notes == (
        "model-00001-of-00002.safetensors is one shard of a model: only its weights move",
        "no config.json beside it: numbers of heads are not known, so attention is cut evenly",
    )


def test_a_config_of_another_model_than_the_headers_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {**LLAMA, "intermediate_size": 28})
    write_safetensors(tmp_path / "model.safetensors", weights(LLAMA))
    with pytest.raises(InputError, match=r"mlp.gate_proj.weight is \[28, 16\], the safetensors header says \[24, 16\]"):
        read_model(tmp_path)


def test_scales_of_quantised_weights_are_left_out_and_the_weights_take_the_trainers_dtype(tmp_path: Path) -> None:
    names = {"model.norm.weight": (4,), "a.weight_scale_inv": (1,), "m.mlp.gate.e_score_correction_bias": (3,)}
    model = read_model(write_safetensors(tmp_path / "x.safetensors", names, "F8_E4M3"))
    assert "1 scale of quantised weights left out: a.weight_scale_inv" in model.notes
    trained = model.in_dtype("bfloat16").specs
    assert trained["model.norm.weight"].dtype == "bfloat16"
    assert trained["m.mlp.gate.e_score_correction_bias"].dtype == "float8_e4m3fn"  # a buffer: DeepSpeed leaves it


def test_a_folder_without_a_model_and_a_broken_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it has neither a config"):
        read_model(tmp_path)
    with pytest.raises(InputError, match="cannot read model config"):
        read_model(tmp_path / "none.json")
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(InputError, match="is no JSON object"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA)[:-1], encoding="utf-8")
    with pytest.raises(InputError, match="is not valid JSON"):
        read_model(tmp_path)


class _Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(6, 4)
        self.lm_head = torch.nn.Linear(4, 6, bias=False, dtype=torch.float32)
        self.lm_head.weight = self.embed_tokens.weight
        self.register_buffer("kept", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("dropped", torch.zeros(2), persistent=False)


def test_a_live_module_counts_a_tied_parameter_once() -> None:
    model = module_model(_Tied().bfloat16())
    assert {name: (spec.shape, spec.dtype) for name, spec in model.specs.items()} == {
        "embed_tokens.weight": ((6, 4), "bfloat16"),
        "kept": ((3,), "int64"),
    }
    assert model.aliases == {"lm_head.weight": "embed_tokens.weight"}
    assert set(model.buffers) == {"kept"}
    assert model.name == "_Tied"


def test_a_module_that_autotp_has_cut_is_refused() -> None:
    module = torch.nn.Linear(2, 2)
    module.weight.ds_autotp_universal_checkpoint_meta = {"conversion": {}}  # type: ignore[assignment]
    with pytest.raises(InputError, match="weight is a shard that AutoTP cut"):
        module_model(module)

"""Names, shapes, sizes and layouts of mixture-of-experts models, against the real model and by hand."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest

from relaymeter.errors import InputError
from relaymeter.harness.moe import (
    TRILLION,
    MoeGeometry,
    expert_of,
    serving_layout,
    tensor_parallel_cuts,
    trainer_layout,
    weight_specs,
)
from relaymeter.relayout.layout import Layout
from relaymeter.relayout.placements import Cut

TINY = MoeGeometry(
    hidden_size=8,
    intermediate_size=12,
    moe_intermediate_size=4,
    num_hidden_layers=2,
    first_k_dense_replace=1,
    n_routed_experts=4,
    n_shared_experts=2,
    num_attention_heads=2,
    q_lora_rank=6,
    kv_lora_rank=4,
    qk_nope_head_dim=4,
    qk_rope_head_dim=2,
    v_head_dim=3,
    vocab_size=11,
)


def held(layout: Layout, name: str, rank: int) -> list[int]:
    """What the storage of a rank holds of a tensor: for every element its place in the flat tensor, -1 for padding."""
    spec, place = layout.specs[name], layout.placements[name]
    flat = np.arange(spec.numel).reshape(spec.shape)
    found = np.full(place.storage.get(rank, 0), -1)
    for piece in np.flatnonzero(place.rank == rank):
        box = tuple(slice(a, a + n) for a, n in zip(place.lo[piece], place.shape[piece], strict=True))
        target = np.lib.stride_tricks.as_strided(
            found[place.offset[piece] :], place.shape[piece].tolist(), (8 * place.stride[piece]).tolist()
        )
        target[...] = flat[box]
    return [int(value) for value in found]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_weights_are_those_of_the_transformers_model_with_its_packed_experts_taken_apart() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {key: value for key, value in asdict(TINY).items() if key != "dtype"}
    config = transformers.DeepseekV3Config(
        **sizes, num_key_value_heads=2, n_group=1, topk_group=1, num_experts_per_tok=2, tie_word_embeddings=False
    )
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(config)
    real = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if ".experts." not in name}
    packed = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if ".experts." in name}
    specs = weight_specs(TINY)
    assert {name: spec.shape for name, spec in specs.items() if expert_of(name) is None} == real
    assert packed == {
        "model.layers.1.mlp.experts.gate_up_proj": (4, 2 * 4, 8),
        "model.layers.1.mlp.experts.down_proj": (4, 8, 4),
    }
    experts = [spec for name, spec in specs.items() if expert_of(name) is not None]
    assert len(experts) == 4 * 3
    assert sum(spec.numel for spec in experts) == 4 * 8 * 8 + 4 * 8 * 4
    assert {spec.dtype for spec in specs.values()} == {"bfloat16", "float32"}
    assert [name for name, spec in specs.items() if spec.dtype == "float32"] == [
        "model.layers.1.mlp.gate.e_score_correction_bias"
    ]


def test_a_trillion_parameters_in_seventy_thousand_tensors() -> None:
    specs = weight_specs(TRILLION)
    attention = 7168 * (1536 + 576) + 1536 + 1536 * 64 * 192 + 512 + 512 * 64 * 256 + 64 * 128 * 7168
    experts = 60 * 384 * 3 * 7168 * 2048
    others = 60 * (384 * 7168 + 384 + 3 * 7168 * 2048) + 3 * 7168 * 18432
    ends = 2 * 163840 * 7168 + 7168
    assert sum(spec.numel for spec in specs.values()) == 61 * (attention + 2 * 7168) + experts + others + ends
    assert 1.0e12 < sum(spec.numel for spec in specs.values()) < 1.05e12
    assert len(specs) == 60 * 384 * 3 + 61 * 9 + 60 * 5 + 3 + 3 == 69_975
    assert sum(spec.nbytes for spec in specs.values()) > 2.0e12


def test_cuts_name_every_weight_and_keep_heads_whole() -> None:
    cuts = tensor_parallel_cuts(TINY)
    assert list(cuts) == list(weight_specs(TINY))
    layer = {name.removeprefix("model.layers.1."): cut for name, cut in cuts.items() if ".layers.1." in name}
    by_head = Cut(0, TINY.num_attention_heads)
    feed_forward = {"gate_proj": Cut(0), "up_proj": Cut(0), "down_proj": Cut(1)}
    assert layer == {
        "self_attn.q_a_proj.weight": Cut(None),
        "self_attn.q_a_layernorm.weight": Cut(None),
        "self_attn.q_b_proj.weight": by_head,
        "self_attn.kv_a_proj_with_mqa.weight": Cut(None),
        "self_attn.kv_a_layernorm.weight": Cut(None),
        "self_attn.kv_b_proj.weight": by_head,
        "self_attn.o_proj.weight": Cut(1, TINY.num_attention_heads),
        "mlp.gate.weight": Cut(None),
        "mlp.gate.e_score_correction_bias": Cut(None),
        **{f"mlp.experts.{e}.{name}.weight": cut for e in range(4) for name, cut in feed_forward.items()},
        **{f"mlp.shared_experts.{name}.weight": cut for name, cut in feed_forward.items()},
        "input_layernorm.weight": Cut(None),
        "post_attention_layernorm.weight": Cut(None),
    }
    assert cuts["model.embed_tokens.weight"] == cuts["lm_head.weight"] == Cut(0)
    assert cuts["model.norm.weight"] == Cut(None)


@pytest.mark.parametrize(
    ("name", "expert"),
    [
        ("model.layers.3.mlp.experts.17.up_proj.weight", 17),
        ("model.layers.3.mlp.experts.0.down_proj.weight", 0),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", None),
        ("model.layers.3.mlp.gate.weight", None),
    ],
)
def test_the_expert_of_a_weight_is_read_from_its_name(name: str, expert: int | None) -> None:
    assert expert_of(name) == expert


def test_a_trainer_shares_each_expert_among_the_ranks_of_its_group_and_the_rest_among_all() -> None:
    layout = trainer_layout(TINY, ranks=(0, 1, 2, 3, 4, 5), expert_parallel=2, world_size=8)
    layout.check()
    assert list(layout.specs) == list(weight_specs(TINY))
    for name, spec in layout.specs.items():
        expert = expert_of(name)
        group = [0, 1, 2, 3, 4, 5] if expert is None else [0, 2, 4] if expert < 2 else [1, 3, 5]
        part = -(-spec.numel // len(group))
        for rank in range(8):
            begin = group.index(rank) * part if rank in group else 0
            wanted = [i if i < spec.numel else -1 for i in range(begin, begin + part)] if rank in group else []
            assert held(layout, name, rank) == wanted, (name, rank)


def test_an_inference_copy_cuts_experts_and_the_rest_by_their_own_degrees() -> None:
    layout = serving_layout(
        TINY, range(4, 12), tensor_parallel=2, expert_parallel=2, expert_tensor_parallel=2, world_size=12
    )
    layout.check()
    assert list(layout.specs) == list(weight_specs(TINY))
    cuts = tensor_parallel_cuts(TINY)
    for name, spec in layout.specs.items():
        expert = expert_of(name)
        whole = np.arange(spec.numel).reshape(spec.shape)
        for place, rank in enumerate(range(4, 12)):
            here = expert is None or expert // 2 == place // 2 % 2
            width = spec.shape[cuts[name].dim or 0] if cuts[name].dim is not None else 0
            begin, end = place % 2 * width // 2, (place % 2 + 1) * width // 2
            mine = whole if cuts[name].dim is None else whole.take(range(begin, end), axis=cuts[name].dim or 0)
            assert held(layout, name, rank) == (mine.reshape(-1).tolist() if here else []), (name, rank)
        assert not any(held(layout, name, rank) for rank in range(4))
        assert len(layout.placements[name].covers) == (2 if expert is not None else 8 if cuts[name].dim is None else 4)


@pytest.mark.parametrize("shapes_equal", [False, True])
def test_projections_of_equal_shape_keep_their_own_cuts(shapes_equal: bool) -> None:
    geometry = replace(TINY, moe_intermediate_size=8) if shapes_equal else TINY
    layout = serving_layout(
        geometry, (0, 1), tensor_parallel=2, expert_parallel=1, expert_tensor_parallel=2, world_size=2
    )
    up, down = (layout.placements[f"model.layers.1.mlp.experts.3.{name}_proj.weight"] for name in ("up", "down"))
    inner = geometry.moe_intermediate_size
    assert up.shape.tolist() == [[inner // 2, 8]] * 2
    assert down.shape.tolist() == [[8, inner // 2]] * 2


@pytest.mark.parametrize(
    ("degrees", "text"),
    [
        ((3, 1, 1), "8 ranks are no multiple of tensor_parallel = 3"),
        ((2, 4, 4), "8 ranks are no multiple of expert_parallel x expert_tensor_parallel = 16"),
        ((2, 8, 1), "4 experts are no multiple of expert_parallel = 8"),
        ((0, 1, 1), "8 ranks are no multiple of tensor_parallel = 0"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(degrees: tuple[int, int, int], text: str) -> None:
    tensor, expert, expert_tensor = degrees
    with pytest.raises(InputError, match=text):
        serving_layout(
            TINY,
            range(8),
            tensor_parallel=tensor,
            expert_parallel=expert,
            expert_tensor_parallel=expert_tensor,
            world_size=8,
        )
    if tensor == 2 and expert_tensor == 1:
        with pytest.raises(InputError, match=text):
            trainer_layout(TINY, range(8), expert, 8)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden_size": 0}, "hidden_size = 0 is not a whole number of at least 1"),
        ({"n_shared_experts": -1}, "n_shared_experts = -1 is not a whole number of at least 0"),
        ({"vocab_size": True}, "vocab_size = True"),
        ({"qk_rope_head_dim": 3}, "qk_rope_head_dim 3 is odd"),
        ({"first_k_dense_replace": 3}, "first_k_dense_replace 3 > num_hidden_layers 2"),
        ({"dtype": "bf16"}, "dtype 'bf16' is not one of float64"),
    ],
)
def test_impossible_sizes_are_refused(change: dict[str, object], text: str) -> None:
    with pytest.raises(InputError, match=text):
        MoeGeometry(**{**asdict(TINY), **change})  # type: ignore[arg-type]


def test_a_model_without_shared_experts_or_dense_layers_has_none_of_their_weights() -> None:
    names = list(weight_specs(replace(TINY, n_shared_experts=0, first_k_dense_replace=0)))
    assert not any("shared_experts" in name for name in names)
    assert sum(".mlp.gate.weight" in name for name in names) == 2

"""Mixture-of-experts language models of DeepSeek-V3's shape as metadata, up to a trillion parameters and beyond.

``weight_specs(TRILLION)`` lists its 70,000 tensors, each expert's projections apart; ``trainer_layout`` and
``serving_layout`` lay them out over ranks, at any scale. No torch, no weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from relaymeter.errors import InputError
from relaymeter.relayout.cuts import Cut
from relaymeter.relayout.layout import ITEMSIZE, Layout, TensorSpec
from relaymeter.relayout.meshes import mesh_layout
from relaymeter.relayout.partitions import zero3_layout

__all__ = [
    "TRILLION",
    "MoeGeometry",
    "expert_of",
    "serving_layout",
    "tensor_parallel_cuts",
    "trainer_layout",
    "weight_specs",
]


@dataclass(frozen=True, kw_only=True)
class MoeGeometry:
    """The sizes that fix every weight: latent attention (low-rank queries, keys and values), routed and shared experts.

    Raises InputError for sizes that no such model can have.
    """

    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width of the feed-forward part of the first, dense layers."""
    moe_intermediate_size: int
    """Width of one expert."""
    num_hidden_layers: int
    """Decoder layers, dense ones included."""
    first_k_dense_replace: int
    """Layers at the beginning that have no experts."""
    n_routed_experts: int
    """Routed experts of a layer."""
    n_shared_experts: int
    """Experts that every token passes, kept as one feed-forward part of so many times the width."""
    num_attention_heads: int
    """Attention heads."""
    q_lora_rank: int
    """Width that queries are compressed to."""
    kv_lora_rank: int
    """Width that keys and values are compressed to."""
    qk_nope_head_dim: int
    """Part of a query and key head without position."""
    qk_rope_head_dim: int
    """Part with position: even, one for all key heads."""
    v_head_dim: int
    """Width of a value head."""
    vocab_size: int
    """Rows of the embedding and of the output head, which is a weight of its own."""
    dtype: str = "bfloat16"
    """Dtype of the weights, in torch's spelling; the router's correction bias is float32."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("first_k_dense_replace", "n_shared_experts") else 1
            if field.type == "int" and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise InputError(f"model geometry: {field.name} = {value!r} is not a whole number of at least {least}")
        if self.qk_rope_head_dim % 2:
            raise InputError(
                f"model geometry: qk_rope_head_dim {self.qk_rope_head_dim} is odd; the rotary embedding needs pairs"
            )
        if self.first_k_dense_replace > self.num_hidden_layers:
            raise InputError(
                f"model geometry: first_k_dense_replace {self.first_k_dense_replace} > num_hidden_layers "
                f"{self.num_hidden_layers}"
            )
        if self.dtype not in ITEMSIZE:
            raise InputError(f"model geometry: dtype {self.dtype!r} is not one of {', '.join(ITEMSIZE)}")


#: A model of 1.03e12 parameters in 69,975 tensors: the published sizes of Kimi-K2.
TRILLION = MoeGeometry(
    hidden_size=7168,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    num_hidden_layers=61,
    first_k_dense_replace=1,
    n_routed_experts=384,
    n_shared_experts=1,
    num_attention_heads=64,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    vocab_size=163840,
)

_EXPERTS = ".mlp.experts."
_Weight = tuple[str, tuple[int, ...], str, Cut]


def _feed_forward(prefix: str, hidden: int, inner: int, dtype: str) -> tuple[_Weight, ...]:
    return (
        (f"{prefix}.gate_proj.weight", (inner, hidden), dtype, Cut(0)),
        (f"{prefix}.up_proj.weight", (inner, hidden), dtype, Cut(0)),
        (f"{prefix}.down_proj.weight", (hidden, inner), dtype, Cut(1)),
    )


def _attention(prefix: str, geometry: MoeGeometry) -> tuple[_Weight, ...]:
    hidden, heads, dtype = geometry.hidden_size, geometry.num_attention_heads, geometry.dtype
    query = heads * (geometry.qk_nope_head_dim + geometry.qk_rope_head_dim)
    expanded = heads * (geometry.qk_nope_head_dim + geometry.v_head_dim)
    compressed = geometry.kv_lora_rank + geometry.qk_rope_head_dim
    by_head, whole = Cut(0, heads), Cut(None)
    return (
        (f"{prefix}.q_a_proj.weight", (geometry.q_lora_rank, hidden), dtype, whole),
        (f"{prefix}.q_a_layernorm.weight", (geometry.q_lora_rank,), dtype, whole),
        (f"{prefix}.q_b_proj.weight", (query, geometry.q_lora_rank), dtype, by_head),
        (f"{prefix}.kv_a_proj_with_mqa.weight", (compressed, hidden), dtype, whole),
        (f"{prefix}.kv_a_layernorm.weight", (geometry.kv_lora_rank,), dtype, whole),
        (f"{prefix}.kv_b_proj.weight", (expanded, geometry.kv_lora_rank), dtype, by_head),
        (f"{prefix}.o_proj.weight", (hidden, heads * geometry.v_head_dim), dtype, Cut(1, heads)),
    )


def _weights(geometry: MoeGeometry) -> Iterator[_Weight]:
    """Name, shape, dtype and tensor-parallel cut of every weight, layer by layer."""
    hidden, dtype, whole = geometry.hidden_size, geometry.dtype, Cut(None)
    yield "model.embed_tokens.weight", (geometry.vocab_size, hidden), dtype, Cut(0)
    for index in range(geometry.num_hidden_layers):
        layer = f"model.layers.{index}"
        yield from _attention(f"{layer}.self_attn", geometry)
        if index < geometry.first_k_dense_replace:
            yield from _feed_forward(f"{layer}.mlp", hidden, geometry.intermediate_size, dtype)
        else:
            experts, inner = geometry.n_routed_experts, geometry.moe_intermediate_size
            yield f"{layer}.mlp.gate.weight", (experts, hidden), dtype, whole
            yield f"{layer}.mlp.gate.e_score_correction_bias", (experts,), "float32", whole
            for expert in range(experts):
                yield from _feed_forward(f"{layer}{_EXPERTS}{expert}", hidden, inner, dtype)
            if geometry.n_shared_experts:
                shared = inner * geometry.n_shared_experts
                yield from _feed_forward(f"{layer}.mlp.shared_experts", hidden, shared, dtype)
        yield f"{layer}.input_layernorm.weight", (hidden,), dtype, whole
        yield f"{layer}.post_attention_layernorm.weight", (hidden,), dtype, whole
    yield "model.norm.weight", (hidden,), dtype, whole
    yield "lm_head.weight", (geometry.vocab_size, hidden), dtype, Cut(0)


def weight_specs(geometry: MoeGeometry) -> dict[str, TensorSpec]:
    """Every weight by name, in the order of the layers; the router's correction bias, a buffer, is among them."""
    return {name: TensorSpec(name, shape, dtype) for name, shape, dtype, _ in _weights(geometry)}


def tensor_parallel_cuts(geometry: MoeGeometry) -> dict[str, Cut]:
    """How each weight is cut over tensor-parallel ranks, a routed expert's over the ranks that share the expert.

    The projections out of the compressed widths by whole heads along their rows, o along its columns; gate and up along
    their rows, down along its columns; embedding and output head by rows; what compresses, routes or normalises is
    whole on every rank.
    """
    return {name: cut for name, _, _, cut in _weights(geometry)}


def expert_of(name: str) -> int | None:
    """The number of the routed expert in its layer that weight ``name`` belongs to; None for every other weight."""
    _, found, rest = name.partition(_EXPERTS)
    return int(rest.partition(".")[0]) if found else None


def trainer_layout(
    geometry: MoeGeometry, ranks: Sequence[int], expert_parallel: int, world_size: int, name: str = "trainer"
) -> Layout:
    """A ZeRO-3 trainer with expert parallelism on ``ranks``.

    Every ``expert_parallel``-th rank holds the same experts and shares them, each weight flattened and cut evenly; all
    other weights are cut so over all ``ranks``. Raises InputError where the degree divides neither ranks nor experts.
    """
    specs = weight_specs(geometry)
    homes = _homes(geometry, specs, len(ranks), expert_parallel, name)
    mesh = np.asarray(ranks, dtype=np.int64).reshape(-1, expert_parallel)
    experts = zero3_layout({key: specs[key] for key in homes}, mesh, world_size, name, cuts=homes)
    rest = zero3_layout({key: spec for key, spec in specs.items() if key not in homes}, ranks, world_size, name)
    return _join(specs, rest, experts)


def serving_layout(
    geometry: MoeGeometry,
    ranks: Sequence[int],
    *,
    tensor_parallel: int,
    expert_parallel: int,
    expert_tensor_parallel: int,
    world_size: int,
    name: str = "serving",
) -> Layout:
    """An inference copy on ``ranks``: neighbours share the experts and the rest, each by its own degrees.

    Weights outside the experts stand in as many tensor-parallel copies as fit; experts are dealt out over
    ``expert_parallel`` groups of ``expert_tensor_parallel`` ranks, in as many copies as fit. Raises InputError where
    the degrees do not divide the ranks or the experts.
    """
    width = expert_parallel * expert_tensor_parallel
    for what, degree in (("tensor_parallel", tensor_parallel), ("expert_parallel x expert_tensor_parallel", width)):
        if degree < 1 or len(ranks) % degree:
            raise InputError(f"layout {name}: {len(ranks)} ranks are no multiple of {what} = {degree}")
    weights = list(_weights(geometry))
    specs = {key: TensorSpec(key, shape, dtype) for key, shape, dtype, _ in weights}
    cuts = {key: cut for key, _, _, cut in weights}
    homes = _homes(geometry, specs, len(ranks), expert_parallel, name)
    both = {key: (home, cuts[key]) for key, home in homes.items()}
    line = np.asarray(ranks, dtype=np.int64)
    copies = line.reshape(-1, tensor_parallel)
    rest = mesh_layout({k: s for k, s in specs.items() if k not in homes}, cuts, list(copies), world_size, name)
    meshes = line.reshape(-1, expert_parallel, expert_tensor_parallel)
    experts = mesh_layout({key: specs[key] for key in homes}, both, list(meshes), world_size, name)
    return _join(specs, rest, experts)


def _homes(
    geometry: MoeGeometry, specs: Mapping[str, TensorSpec], ranks: int, degree: int, name: str
) -> dict[str, Cut]:
    """Of every routed expert's weight, the group of ranks that holds it: as many neighbouring experts in each."""
    for have, unit in ((ranks, "ranks"), (geometry.n_routed_experts, "experts")):
        if degree < 1 or have % degree:
            raise InputError(f"layout {name}: {have} {unit} are no multiple of expert_parallel = {degree}")
    each = geometry.n_routed_experts // degree
    groups = [Cut.only(group) for group in range(degree)]
    numbers = ((key, expert_of(key)) for key in specs)
    return {key: groups[expert // each] for key, expert in numbers if expert is not None}


def _join(specs: Mapping[str, TensorSpec], rest: Layout, experts: Layout) -> Layout:
    """Both layouts as one, in the order of ``specs``."""
    placements = {**rest.placements, **experts.placements}
    return Layout(rest.name, rest.world_size, dict(specs), {key: placements[key] for key in specs})

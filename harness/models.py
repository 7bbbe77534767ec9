"""Qwen3-shaped causal language models as metadata: names, shapes, ties and tensor-parallel cuts of their weights.

``weight_specs(Qwen3Geometry(hidden_size=64, ...))`` lists what ``Qwen3ForCausalLM.named_parameters()`` would, without
torch or transformers, for any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from relaymeter.errors import InputError
from relaymeter.relayout.layout import ITEMSIZE, TensorSpec
from relaymeter.relayout.placements import Cut

__all__ = ["Qwen3Geometry", "tensor_parallel_cuts", "weight_aliases", "weight_specs"]

_EMBED = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class Qwen3Geometry:
    """The sizes that fix every weight of a dense Qwen3 model (grouped-query attention, no biases, q and k norms).

    Raises InputError for sizes that no such model can have.
    """

    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width of the feed-forward layer."""
    num_hidden_layers: int
    """Decoder layers."""
    num_attention_heads: int
    """Query heads: a multiple of the key-value heads."""
    num_key_value_heads: int
    """Key and value heads."""
    head_dim: int
    """Width of one head: even (rotary embedding)."""
    vocab_size: int
    """Rows of the embedding and of the output head."""
    tie_word_embeddings: bool = False
    """Whether the output head is the embedding: one weight with two names."""
    dtype: str = "bfloat16"
    """Dtype of the weights, in torch's spelling."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InputError(f"model geometry: {field.name} = {value!r} is not a positive whole number")
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if heads % groups:
            raise InputError(f"model geometry: num_attention_heads {heads} % num_key_value_heads {groups} != 0")
        if self.head_dim % 2:
            raise InputError(f"model geometry: head_dim {self.head_dim} is odd; the rotary embedding needs pairs")
        if self.dtype not in ITEMSIZE:
            raise InputError(f"model geometry: dtype {self.dtype!r} is not one of {', '.join(ITEMSIZE)}")


def _weights(geometry: Qwen3Geometry) -> Iterator[tuple[str, tuple[int, ...], Cut]]:
    """Name, shape and tensor-parallel cut of every weight, in the order in which torch registers them."""
    hidden, inner, head = geometry.hidden_size, geometry.intermediate_size, geometry.head_dim
    heads, groups = geometry.num_attention_heads, geometry.num_key_value_heads
    by_query, by_key, whole = Cut(0, heads), Cut(0, groups), Cut(None)
    layer: tuple[tuple[str, tuple[int, ...], Cut], ...] = (
        ("self_attn.q_proj", (heads * head, hidden), by_query),
        ("self_attn.k_proj", (groups * head, hidden), by_key),
        ("self_attn.v_proj", (groups * head, hidden), by_key),
        ("self_attn.o_proj", (hidden, heads * head), Cut(1, heads)),
        ("self_attn.q_norm", (head,), whole),
        ("self_attn.k_norm", (head,), whole),
        ("mlp.gate_proj", (inner, hidden), Cut(0)),
        ("mlp.up_proj", (inner, hidden), Cut(0)),
        ("mlp.down_proj", (hidden, inner), Cut(1)),
        ("input_layernorm", (hidden,), whole),
        ("post_attention_layernorm", (hidden,), whole),
    )
    yield _EMBED, (geometry.vocab_size, hidden), Cut(0)
    for index in range(geometry.num_hidden_layers):
        for name, shape, cut in layer:
            yield f"model.layers.{index}.{name}.weight", shape, cut
    yield "model.norm.weight", (hidden,), whole
    if not geometry.tie_word_embeddings:
        yield _HEAD, (geometry.vocab_size, hidden), Cut(0)


def weight_specs(geometry: Qwen3Geometry) -> dict[str, TensorSpec]:
    """Every weight by name, in the model's order. A tied output head is not among them: see ``weight_aliases``."""
    return {name: TensorSpec(name, shape, geometry.dtype) for name, shape, _ in _weights(geometry)}


def weight_aliases(geometry: Qwen3Geometry) -> dict[str, str]:
    """Tied names, each with the name of the weight it shares; empty where nothing is tied."""
    return {_HEAD: _EMBED} if geometry.tie_word_embeddings else {}


def tensor_parallel_cuts(geometry: Qwen3Geometry) -> dict[str, Cut]:
    """How each weight is cut over a tensor-parallel replica.

    q, k and v by whole heads along their rows, o by whole heads along its columns; gate and up along their rows, down
    along its columns; embedding and output head by rows of the vocabulary; norms are whole on every rank.
    """
    return {name: cut for name, _, cut in _weights(geometry)}

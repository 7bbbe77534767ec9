"""Geometry of the common model families: a Hugging Face config -> name, shape and dtype of every weight.

``family_weights(Sizes(config, "config.json"))``. Names are those of the files that ``save_pretrained`` and the models'
authors write: an expert's projections apart. transformers is not imported; its defaults stand here where old configs
leave a key out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from relaymeter.errors import InputError
from relaymeter.harness.config import nearest
from relaymeter.relayout.layout import ITEMSIZE
from relaymeter.row_fields import shown

__all__ = ["FAMILIES", "Sizes", "Weight", "family_of", "family_weights"]

#: Name, shape, and the dtype of a weight that keeps its own (None: the model's).
Weight = tuple[str, tuple[int, ...], str | None]
_Linear = tuple[str, int, int, bool]
#: Beyond any model's: a config with a slip of the pen shall not fill the memory.
_MOST_BLOCKS = 500_000


class Sizes:
    """A config's numbers. Every error names the key and ``where``."""

    def __init__(self, entry: Mapping[str, Any], where: str) -> None:
        self._entry, self.where = entry, where
        family = entry.get("model_type")
        if family is not None and not isinstance(family, str):
            raise InputError(f"{where}: model_type {shown(family)} is no name of a model family")
        self.family = family

    def has(self, key: str) -> bool:
        """Whether the config gives ``key`` a value."""
        return self._entry.get(key) is not None

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """The whole number ``key``. Raises InputError where it is none, or missing without a default."""
        found = self._entry.get(key)
        found = default if found is None else found
        if found is None:
            raise InputError(f"{self.where}: {key} is missing, and without it no {self.family} model is known")
        if type(found) is not int or not least <= found < 2**40:
            raise InputError(f"{self.where}: {key} = {shown(found)} is not a whole number of at least {least}")
        return found

    def flag(self, key: str, default: bool) -> bool:
        """The truth value ``key``. Raises InputError."""
        found = self._entry.get(key)
        if found is not None and not isinstance(found, bool):
            raise InputError(f"{self.where}: {key} = {shown(found)} is not true or false")
        return default if found is None else found

    def numbers(self, key: str) -> tuple[int, ...]:
        """The list of whole numbers ``key``; empty where it is missing. Raises InputError."""
        found = self._entry.get(key)
        if found is None:
            return ()
        if not isinstance(found, list) or any(type(one) is not int for one in found):
            raise InputError(f"{self.where}: {key} = {shown(found)} is no list of whole numbers")
        return tuple(found)

    def heads(self) -> tuple[int, int]:
        """Query heads, and key and value heads (as many where the config names none); 0, 0 without heads."""
        if not self.has("num_attention_heads"):
            return 0, 0
        heads = self.size("num_attention_heads")
        groups = self.size("num_key_value_heads", heads)
        if heads % groups:
            raise InputError(f"{self.where}: num_attention_heads {heads} % num_key_value_heads {groups} != 0")
        return heads, groups

    def dtype(self) -> str | None:
        """The dtype that the weights are kept in, None where the config names none. Raises InputError."""
        found = self._entry.get("dtype") or self._entry.get("torch_dtype")
        if found is None:
            return None
        name = found.removeprefix("torch.") if isinstance(found, str) else ""
        if name not in ITEMSIZE:
            raise InputError(f"{self.where}: dtype {shown(found)} is not one of {', '.join(ITEMSIZE)}")
        return name


def family_of(name: str) -> Callable[[Sizes], Iterator[Weight]] | None:
    """What lists the weights of a ``model_type``; None for one that is not known."""
    return FAMILIES.get(name)


def family_weights(sizes: Sizes) -> list[Weight]:
    """Every weight of the model, in the order of its layers. Raises InputError: unknown family, odd or missing size."""
    if sizes.family is None:
        raise InputError(f"{sizes.where} has no model_type: valid: {', '.join(FAMILIES)}")
    make = family_of(sizes.family)
    if make is None:
        raise InputError(
            f"{sizes.where}: model_type {shown(sizes.family)} is not known ({nearest(sizes.family, FAMILIES)}): give a "
            "folder with the model's .safetensors files, whose headers say names and shapes"
        )
    layers = sizes.size("num_hidden_layers")
    experts = max(sizes.size(key, 1) for key in ("num_local_experts", "num_experts", "n_routed_experts"))
    if layers * experts > _MOST_BLOCKS:
        raise InputError(f"{sizes.where}: {layers} layers x {experts} experts are more than {_MOST_BLOCKS:,}")
    return list(make(sizes))


def _linear(prefix: str, rows: int, columns: int, bias: bool) -> Iterator[Weight]:
    yield f"{prefix}.weight", (rows, columns), None
    if bias:
        yield f"{prefix}.bias", (rows,), None


def _ends(
    sizes: Sizes, layers: Callable[[int], Iterator[Weight]], embed: str, norm: str, head: str
) -> Iterator[Weight]:
    """Embedding, layers, last norm and, where it is not tied, the output head."""
    hidden, vocab = sizes.size("hidden_size"), sizes.size("vocab_size")
    yield f"{embed}.weight", (vocab, hidden), None
    for layer in range(sizes.size("num_hidden_layers")):
        yield from layers(layer)
    yield f"{norm}.weight", (hidden,), None
    if sizes.family == "gpt_neox":
        yield f"{norm}.bias", (hidden,), None
    if not sizes.flag("tie_word_embeddings", False):
        yield f"{head}.weight", (vocab, hidden), None


def _attention(
    sizes: Sizes, prefix: str, *, biases: tuple[bool, bool], norms: bool = False, head_dim: int | None = None
) -> Iterator[Weight]:
    """Grouped-query attention. ``biases``: of q, k and v, and of o; ``norms`` over the heads of q and k."""
    hidden, (heads, groups) = sizes.size("hidden_size"), sizes.heads()
    if not heads:
        sizes.size("num_attention_heads")
    if head_dim is None and not sizes.has("head_dim") and hidden % heads:
        raise InputError(f"{sizes.where}: hidden_size {hidden} % num_attention_heads {heads} != 0, and no head_dim")
    width = sizes.size("head_dim", head_dim or hidden // heads)
    rows: tuple[_Linear, ...] = (
        ("q_proj", heads * width, hidden, biases[0]),
        ("k_proj", groups * width, hidden, biases[0]),
        ("v_proj", groups * width, hidden, biases[0]),
        ("o_proj", hidden, heads * width, biases[1]),
    )
    for name, out, into, bias in rows:
        yield from _linear(f"{prefix}.{name}", out, into, bias)
    if norms:
        yield f"{prefix}.q_norm.weight", (width,), None
        yield f"{prefix}.k_norm.weight", (width,), None


def _gated(prefix: str, hidden: int, inner: int, bias: bool = False, names: str = "gate_proj up_proj down_proj") -> Any:
    gate, up, down = names.split()
    yield from _linear(f"{prefix}.{gate}", inner, hidden, bias)
    yield from _linear(f"{prefix}.{up}", inner, hidden, bias)
    yield from _linear(f"{prefix}.{down}", hidden, inner, bias)


def _norms(prefix: str, hidden: int, bias: bool = False) -> Iterator[Weight]:
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}.{name}.weight", (hidden,), None
        if bias:
            yield f"{prefix}.{name}.bias", (hidden,), None


def _dense(sizes: Sizes) -> Iterator[Weight]:
    """Llama, Mistral, Qwen2, Qwen3."""
    hidden, inner, kind = sizes.size("hidden_size"), sizes.size("intermediate_size"), sizes.family
    asked = sizes.flag("attention_bias", False) and kind in ("llama", "qwen3")
    biases = (True, False) if kind == "qwen2" else (asked, asked)
    head_dim = 128 if kind == "qwen3" else None

    def layer(index: int) -> Iterator[Weight]:
        prefix = f"model.layers.{index}"
        yield from _attention(sizes, f"{prefix}.self_attn", biases=biases, norms=kind == "qwen3", head_dim=head_dim)
        yield from _gated(f"{prefix}.mlp", hidden, inner, sizes.flag("mlp_bias", False) and kind == "llama")
        yield from _norms(prefix, hidden)

    return _ends(sizes, layer, "model.embed_tokens", "model.norm", "lm_head")


def _mixtral(sizes: Sizes) -> Iterator[Weight]:
    hidden, inner, experts = sizes.size("hidden_size"), sizes.size("intermediate_size"), sizes.size("num_local_experts")

    def layer(index: int) -> Iterator[Weight]:
        prefix = f"model.layers.{index}"
        yield from _attention(sizes, f"{prefix}.self_attn", biases=(False, False))
        yield f"{prefix}.block_sparse_moe.gate.weight", (experts, hidden), None
        for expert in range(experts):
            yield from _gated(f"{prefix}.block_sparse_moe.experts.{expert}", hidden, inner, names="w1 w3 w2")
        yield from _norms(prefix, hidden)

    return _ends(sizes, layer, "model.embed_tokens", "model.norm", "lm_head")


def _qwen3_moe(sizes: Sizes) -> Iterator[Weight]:
    hidden, experts, step = sizes.size("hidden_size"), sizes.size("num_experts"), sizes.size("decoder_sparse_step", 1)
    bias, dense = sizes.flag("attention_bias", False), set(sizes.numbers("mlp_only_layers"))

    def layer(index: int) -> Iterator[Weight]:
        prefix = f"model.layers.{index}"
        yield from _attention(sizes, f"{prefix}.self_attn", biases=(bias, bias), norms=True)
        if index in dense or (index + 1) % step:
            yield from _gated(f"{prefix}.mlp", hidden, sizes.size("intermediate_size"))
        else:
            yield f"{prefix}.mlp.gate.weight", (experts, hidden), None
            inner = sizes.size("moe_intermediate_size")
            for expert in range(experts):
                yield from _gated(f"{prefix}.mlp.experts.{expert}", hidden, inner)
        yield from _norms(prefix, hidden)

    return _ends(sizes, layer, "model.embed_tokens", "model.norm", "lm_head")


def _latent(sizes: Sizes, prefix: str) -> Iterator[Weight]:
    """DeepSeek's latent attention: low-rank queries (where ``q_lora_rank`` is given), keys and values."""
    hidden, heads = sizes.size("hidden_size"), sizes.size("num_attention_heads")
    plain, turned, value = (sizes.size(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    low, bias = sizes.size("kv_lora_rank"), sizes.flag("attention_bias", False)
    if sizes.has("q_lora_rank"):
        rank = sizes.size("q_lora_rank")
        yield from _linear(f"{prefix}.q_a_proj", rank, hidden, bias)
        yield f"{prefix}.q_a_layernorm.weight", (rank,), None
        yield f"{prefix}.q_b_proj.weight", (heads * (plain + turned), rank), None
    else:
        yield f"{prefix}.q_proj.weight", (heads * (plain + turned), hidden), None
    yield from _linear(f"{prefix}.kv_a_proj_with_mqa", low + turned, hidden, bias)
    yield f"{prefix}.kv_a_layernorm.weight", (low,), None
    yield f"{prefix}.kv_b_proj.weight", (heads * (plain + value), low), None
    yield from _linear(f"{prefix}.o_proj", hidden, heads * value, bias)


def _deepseek_v3(sizes: Sizes) -> Iterator[Weight]:
    hidden, experts, inner = (sizes.size(key) for key in ("hidden_size", "n_routed_experts", "moe_intermediate_size"))
    first, shared = sizes.size("first_k_dense_replace", least=0), sizes.size("n_shared_experts", least=0)
    if sizes.size("moe_layer_freq", 1) != 1:
        raise InputError(f"{sizes.where}: moe_layer_freq = {sizes.size('moe_layer_freq')}: only 1 is known")

    def layer(index: int) -> Iterator[Weight]:
        prefix = f"model.layers.{index}"
        yield from _latent(sizes, f"{prefix}.self_attn")
        if index < first:
            yield from _gated(f"{prefix}.mlp", hidden, sizes.size("intermediate_size"))
        else:
            yield f"{prefix}.mlp.gate.weight", (experts, hidden), None
            yield f"{prefix}.mlp.gate.e_score_correction_bias", (experts,), "float32"
            if shared:
                yield from _gated(f"{prefix}.mlp.shared_experts", hidden, shared * inner)
            for expert in range(experts):
                yield from _gated(f"{prefix}.mlp.experts.{expert}", hidden, inner)
        yield from _norms(prefix, hidden)

    return _ends(sizes, layer, "model.embed_tokens", "model.norm", "lm_head")


def _gpt_neox(sizes: Sizes) -> Iterator[Weight]:
    """Fused query-key-value weights, per head [query, key, value]; biases everywhere."""
    hidden, inner = sizes.size("hidden_size"), sizes.size("intermediate_size")
    heads, bias = sizes.size("num_attention_heads"), sizes.flag("attention_bias", True)
    if hidden % heads:
        raise InputError(f"{sizes.where}: hidden_size {hidden} % num_attention_heads {heads} != 0")

    def layer(index: int) -> Iterator[Weight]:
        prefix = f"gpt_neox.layers.{index}"
        yield from _norms(prefix, hidden, bias=True)
        yield from _linear(f"{prefix}.attention.query_key_value", 3 * hidden, hidden, bias)
        yield from _linear(f"{prefix}.attention.dense", hidden, hidden, bias)
        yield from _linear(f"{prefix}.mlp.dense_h_to_4h", inner, hidden, True)
        yield from _linear(f"{prefix}.mlp.dense_4h_to_h", hidden, inner, True)

    return _ends(sizes, layer, "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out")


#: By ``model_type``.
FAMILIES: Mapping[str, Callable[[Sizes], Iterator[Weight]]] = {
    "llama": _dense,
    "mistral": _dense,
    "qwen2": _dense,
    "qwen3": _dense,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
    "gpt_neox": _gpt_neox,
}

"""How DeepSpeed's AutoTP cuts a model for training, told from names and shapes: DeepSpeed 0.19.8.

``autotp_cuts(model, 4)``. AutoTP follows the patterns of its own config (``partition_config``, ``preset_model``), else
the plan that transformers keeps for the family. Widths are those of ``deepspeed/module_inject/tp_shard.py``: whole
key-value heads where they divide the dim, the first ranks one more; ranks beyond the heads hold nothing. Embeddings
that no pattern names stay whole. Pure, DeepSpeed is not imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from relaymeter.errors import InputError
from relaymeter.harness.inputs.model import Model
from relaymeter.relayout.cuts import Cut, Widths

__all__ = ["PRESETS", "Pattern", "autotp_cuts", "shard_widths"]


class Pattern(NamedTuple):
    """Weights whose name ``text`` matches from its beginning are cut ``"column"``, ``"row"`` or not (``"skip"``)."""

    text: str
    kind: str


_ATTENTION = (
    Pattern(r".*\.self_attn\.[qkv]_proj\.weight$", "column"),
    Pattern(r".*\.self_attn\.o_proj\.weight$", "row"),
)
_GATED = (
    Pattern(r".*\.mlp\.(up|gate)_proj\.weight$", "column"),
    Pattern(r".*\.mlp\.down_proj\.weight$", "row"),
)
_HEAD = Pattern(r".*(lm_head|embed_out)\.weight$", "column")
#: Plans of transformers 5.17 (``base_model_tp_plan`` and the head of the class). Its plans of mixtures of experts have
#: styles that AutoTP refuses.
_PLANS: Mapping[str, tuple[Pattern, ...]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), (*_ATTENTION, *_GATED, _HEAD)),
    "gpt_neox": (
        Pattern(r".*\.attention\.query_key_value\.weight$", "column"),
        Pattern(r".*\.attention\.dense\.weight$", "row"),
        Pattern(r".*\.mlp\.dense_h_to_4h\.weight$", "column"),
        Pattern(r".*\.mlp\.dense_4h_to_h\.weight$", "row"),
        _HEAD,
    ),
}
#: ``tensor_parallel.preset_model``. Experts stand apart in files and together in memory, where no pattern reaches them.
PRESETS: Mapping[str, tuple[Pattern, ...]] = {
    "llama": (*_ATTENTION, *_GATED),
    "qwen2": (*_ATTENTION, *_GATED),
    "mixtral": _ATTENTION,
    "deepseek_v2": (
        _ATTENTION[1],
        Pattern(r".*\.self_attn\.(q_b_proj|kv_b_proj)\.weight$", "column"),
        Pattern(r".*\.mlp\.shared_experts\.(up|gate)_proj\.weight$", "column"),
        Pattern(r".*\.mlp\.shared_experts\.down_proj\.weight$", "row"),
    ),
}
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|embed_in|wte)$")
_LAST = ("lm_head", "embed_out")
_EXPERTS = re.compile(r"\.experts\.")
_NEAR_EVEN = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def shard_widths(total: int, degree: int, name: str, kv_heads: int, grain: int = 1) -> tuple[int, ...]:
    """Elements of a dim of ``total`` on each of ``degree`` ranks, of the layer ``name`` (``get_shard_size``)."""
    uneven = "mlp" in name or name in _LAST or any(part in name for part in _NEAR_EVEN)
    if kv_heads and total % kv_heads == 0 and not uneven:
        each, spare = divmod(kv_heads, degree)
        return tuple(total // kv_heads * (each + (rank < spare)) for rank in range(degree))
    if total < grain:
        return tuple(total // degree + (rank < total % degree) for rank in range(degree))
    grains, rest = divmod(total, grain)
    widths = [(grains // degree + (rank < grains % degree)) * grain for rank in range(degree)]
    widths[-1] += rest
    return tuple(widths)


def autotp_cuts(
    model: Model,
    degree: int,
    *,
    patterns: tuple[Pattern, ...] | None = None,
    vocab_parallel_head: bool | None = None,
    grain: int = 1,
) -> dict[str, Cut]:
    """The cut of every weight over the ``degree`` ranks of a tensor-parallel group.

    ``patterns``: of the config; None: the family's own plan. ``vocab_parallel_head``: as in the config. Raises
    InputError where AutoTP has no plan for the family, or would not cut a tied weight on both sides alike.
    """
    match = _matcher(_plan_of(model) if patterns is None else patterns)
    cut_head = _head_is_cut(model, match, patterns is None, vocab_parallel_head)
    tied = set(_tied_heads(model).values())
    made: dict[tuple[tuple[int, ...], int], Cut] = {}

    def cut(shape: tuple[int, ...], dim: int, layer: str) -> Cut:
        widths = shard_widths(shape[dim], degree, layer, model.kv_heads, grain)
        return made.setdefault((widths, dim), Cut(dim, rule=Widths(widths)))

    found: dict[str, Cut] = {}
    for name, spec in model.specs.items():
        layer, _, part = name.rpartition(".")
        outside = _EXPERTS.search(name) or part not in ("weight", "bias") or len(spec.shape) > 2
        kind = "skip" if outside else match(f"{layer}.weight")
        if cut_head and (layer in _LAST or name in tied):
            found[name] = cut(spec.shape, 0, _LAST[0])
        elif kind == "skip" or name in tied or (kind == "row" and part == "bias"):
            found[name] = Cut(None)
        elif _EMBEDDING.search(layer):
            found[name] = cut(spec.shape, 1, layer)
        else:
            found[name] = cut(spec.shape, 0 if kind == "column" else 1, layer)
    return found


def _plan_of(model: Model) -> tuple[Pattern, ...]:
    known = _PLANS.get(model.family or "")
    if known is not None:
        return known
    if model.family is None:
        why = f"{model.name} has no config.json beside it, so its family, whose plan AutoTP follows, is not known"
    else:
        why = f"DeepSpeed has no tensor-parallel plan for {model.family} that it can follow"
    raise InputError(
        f"tensor_parallel: {why}: set tensor_parallel.preset_model or partition_config in the DeepSpeed config"
    )


def _matcher(patterns: tuple[Pattern, ...]) -> Callable[[str], str]:
    compiled = [(re.compile(pattern.text), pattern.kind) for pattern in patterns]
    known: dict[str, str] = {}

    def match(name: str) -> str:
        if name not in known:
            known[name] = next((kind for pattern, kind in compiled if pattern.match(name)), "skip")
        return known[name]

    return match


def _tied_heads(model: Model) -> dict[str, str]:
    """Names of an output head that is an embedding, with the embedding's."""
    return {alias: name for alias, name in model.aliases.items() if alias.rpartition(".")[0] in _LAST}


def _head_is_cut(model: Model, match: Callable[[str], str], own_plan: bool, asked: bool | None) -> bool:
    """Whether the output head is cut by its vocabulary whatever its pattern, and a tied embedding with it."""
    if asked:
        return True
    tied = _tied_heads(model)
    if not tied:
        return False
    head = next(iter(tied))
    if own_plan:  # transformers asks for it in every plan of a tied model; DeepSpeed follows unless told not to
        return asked is None
    if match(head) != "skip":
        raise InputError(
            f"tensor_parallel.partition_config: {head} is tied to {tied[head]}, and a pattern cuts one of them: set "
            "tensor_parallel.vocab_parallel_lm_head, which cuts both alike"
        )
    return False

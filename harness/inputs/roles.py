"""Which part a weight plays, by its name, and how an inference replica cuts it.

``replica_cuts(model, tensor_parallel=4)``: queries, keys and values by whole heads along their rows, what follows them
by heads along its columns; gate and up along rows, down along columns; embedding and output head by the vocabulary;
norms, routers and low-rank projections whole. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from relaymeter.errors import InputError
from relaymeter.harness.inputs.model import Model, is_fused
from relaymeter.relayout.cuts import Cut

__all__ = ["Role", "replica_cuts", "role_of", "unknown_names"]


class Role(NamedTuple):
    """``kind``: ``"column"`` (rows of the weight are dealt out), ``"row"`` (its columns), ``"vocabulary"``, ``"whole"``
    or ``"unknown"``; ``heads``: ``"query"`` or ``"key"`` where borders lie between whole heads."""

    kind: str
    heads: str = ""


_END = r"\.(weight|bias)$"
_GATED = r"\.(mlp|shared_experts?|experts\.\d+)\."
_RULES: tuple[tuple[re.Pattern[str], Role], ...] = tuple(
    (re.compile(pattern), role)
    for pattern, role in (
        (r"(^|\.)(embed_tokens|embed_in|wte|lm_head|embed_out|shared_head\.head)" + _END, Role("vocabulary")),
        (r"\.self_attn\.(q_proj|q_b_proj|kv_b_proj)" + _END, Role("column", "query")),
        (r"\.self_attn\.[kv]_proj" + _END, Role("column", "key")),
        (r"\.attention\.query_key_value" + _END, Role("column", "query")),
        (r"\.(self_attn\.o_proj|attention\.dense)" + _END, Role("row", "query")),
        (r"\.self_attn\.(q_a_proj|kv_a_proj_with_mqa)" + _END, Role("whole")),
        (_GATED + r"(gate_proj|up_proj|w1|w3)" + _END, Role("column")),
        (_GATED + r"(down_proj|w2)" + _END, Role("row")),
        (r"\.mlp\.dense_h_to_4h" + _END, Role("column")),
        (r"\.mlp\.dense_4h_to_h" + _END, Role("row")),
        (r"\.(mlp|block_sparse_moe)\.(gate|router(\.gate)?|shared_expert_gate)" + _END, Role("whole")),
        (r"\.e_score_correction_bias$", Role("whole")),
        (r"(^|\.|_)(layer)?norm" + _END, Role("whole")),
        (r"\.(enorm|hnorm|eh_proj)" + _END, Role("whole")),
    )
)


@lru_cache(maxsize=4096)
def _role(name: str) -> Role:
    for pattern, role in _RULES:
        if pattern.search(name):
            return role
    return Role("unknown")


def role_of(name: str) -> Role:
    """The part that the weight ``name`` plays; layers and experts of any number alike."""
    return _role(re.sub(r"\.\d+\.", ".0.", name))


def unknown_names(model: Model) -> list[str]:
    """Weights whose part is not known: they are whole on every rank."""
    return [name for name in model.specs if role_of(name).kind == "unknown" and not is_fused(name)]


def replica_cuts(model: Model, tensor_parallel: int) -> dict[str, Cut]:
    """The cut of every weight over the ranks of a tensor-parallel copy; with fewer key and value heads than ranks each
    is held by several. Raises InputError where the heads cannot be dealt out."""
    heads, groups = model.heads, model.kv_heads
    if heads and heads % tensor_parallel:
        raise InputError(
            f"--to tp={tensor_parallel}: {heads} attention heads of {model.name} % {tensor_parallel} = "
            f"{heads % tensor_parallel}, not 0: give a divisor of {heads}"
        )
    if groups and groups % tensor_parallel and tensor_parallel % groups:
        raise InputError(
            f"--to tp={tensor_parallel}: {groups} key and value heads of {model.name}: neither is a multiple of the "
            "other"
        )
    units: Mapping[str, int | None] = {"query": heads or None, "key": groups or None, "": None}
    made: dict[tuple[Role, bool], Cut] = {}
    found: dict[str, Cut] = {}
    for name, spec in model.specs.items():
        role, vector = role_of(name), len(spec.shape) < 2
        key = role, vector
        if key not in made:
            if role.kind in ("whole", "unknown") or (role.kind == "row" and vector):
                made[key] = Cut(None)
            else:
                made[key] = Cut(1 if role.kind == "row" else 0, units[role.heads])
        found[name] = made[key]
    return found

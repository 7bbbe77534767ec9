"""Which changes Megatron-Core's refit can make, and why not the others: ``unsuited(change, training)``. Pure, no torch.

The refit moves weights between tensor-parallel models of the same architecture. It knows no ZeRO partitions, and its
planner cuts a dim into equal parts only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from relaymeter.harness.compare_config import CompareChange, ReplicaConfig
from relaymeter.harness.state_config import EngineConfig, TrainingConfig
from relaymeter.relayout.layout import TensorSpec

__all__ = ["Copies", "copies_of", "unsuited", "unsuited_shapes"]

#: The ranks of each copy of the weights, in the order of their shards.
Copies = tuple[tuple[int, ...], ...]


def copies_of(end: EngineConfig | ReplicaConfig) -> Copies:
    """The tensor-parallel copies of the weights that an end holds."""
    if isinstance(end, ReplicaConfig):
        return end.copies
    ranks, degree = sorted(end.ranks), end.tensor_parallel
    return tuple(tuple(ranks[at : at + degree]) for at in range(0, len(ranks), degree))


def unsuited(change: CompareChange, training: TrainingConfig) -> str | None:
    """Why the refit does not make this change, whatever it runs on; None where it may."""
    ends: tuple[EngineConfig | ReplicaConfig, ...] = (change.source, change.end)
    if max(end.tensor_parallel for end in ends) == 1 or any(
        isinstance(end, EngineConfig) and end.stage == 3 for end in ends
    ):
        return "Megatron-Core's refit moves weights between tensor-parallel models, no ZeRO partitions"
    if training.model == "moe":
        return "Megatron-Core's refit is taken for tensor-parallel layers here, not for experts"
    for end in ends:
        odd = next((ranks for ranks in copies_of(end) if list(ranks) != sorted(ranks)), None)
        if odd is not None:
            return f"{end.label}: process groups hold ranks in ascending order, not {list(odd)}"
    return None


def unsuited_shapes(
    specs: Mapping[str, TensorSpec], dims: Mapping[str, int | None], degrees: Sequence[int]
) -> str | None:
    """Why its planner does not take weights of these shapes, cut along ``dims`` (None: whole on each rank) by the two
    ``degrees``; None where it does. It tiles a dim into as many equal parts as their least common multiple."""
    parts = math.lcm(*degrees)
    for name, spec in specs.items():
        dim = dims[name]
        if dim is not None and spec.shape[dim] % parts:
            return (
                f"{name} {list(spec.shape)}: Megatron-Core's planner needs dim {dim} to be a multiple of {parts} for "
                f"tensor-parallel degrees {degrees[0]} and {degrees[1]}"
            )
    return None

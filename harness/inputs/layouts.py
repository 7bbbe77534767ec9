"""Layouts of a model from names and numbers: as a DeepSpeed trainer holds it, and as inference copies do.

``trainer_layout(model, trainer, ranks, world_size)``: tensor-parallel groups are neighbouring ranks, data-parallel ones
every so-many-th rank, experts over neighbouring ranks, as DeepSpeed makes them. ``copies_layout(model, destination,
copies, world_size)``. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from relaymeter.errors import InputError
from relaymeter.harness.inputs.autotp import autotp_cuts
from relaymeter.harness.inputs.deepspeed_config import Trainer
from relaymeter.harness.inputs.destination import Destination
from relaymeter.harness.inputs.model import Model, expert_of, is_fused
from relaymeter.harness.inputs.roles import replica_cuts
from relaymeter.relayout.cuts import Cut
from relaymeter.relayout.layout import Layout, Placement, TensorSpec
from relaymeter.relayout.meshes import mesh_layout
from relaymeter.relayout.partitions import zero3_layout

__all__ = ["copies_layout", "trainer_layout"]

_Specs = dict[str, TensorSpec]


def trainer_layout(model: Model, trainer: Trainer, ranks: Sequence[int], world_size: int) -> Layout:
    """Where a trainer on ``ranks`` holds the weights: under ZeRO-3 each rank a part of its shard of every weight, below
    it the shard itself, on every data-parallel rank. Raises InputError where the degrees do not fit."""
    degree, width = trainer.tensor_parallel, max(trainer.expert_parallel, 1)
    for key, size in (("tensor_parallel.autotp_size", degree), ("expert_parallel.autoep_size", width)):
        if len(ranks) % size:
            raise InputError(
                f"trainer: {len(ranks)} ranks % {key} {size} = {len(ranks) % size}, not 0: give --topology or "
                f"--from-ranks a multiple of {size}, or another degree"
            )
    line = np.asarray(ranks, dtype=np.int64)
    grid = line.reshape(-1, degree)
    homes = _homes(model, trainer.expert_parallel, "expert_parallel.autoep_size") if trainer.expert_parallel else {}
    cuts = _trainer_cuts(model, trainer)
    buffers, rest = _split(model, homes)
    placements: dict[str, Placement] = {}
    if trainer.stage == 3:
        if degree == 1:
            placements |= zero3_layout(rest, ranks, world_size, "trainer").placements
        else:
            placements |= zero3_layout(rest, grid, world_size, "trainer", cuts=cuts).placements
        experts = {name: model.specs[name] for name in homes}
        placements |= zero3_layout(experts, line.reshape(-1, width), world_size, "trainer", cuts=homes).placements
        placements |= _whole(buffers, ranks, world_size)
    else:
        placements |= mesh_layout(rest | buffers, cuts, list(grid), world_size, "trainer").placements
        experts = {name: model.specs[name] for name in homes}
        placements |= mesh_layout(experts, homes, list(line.reshape(-1, width)), world_size, "trainer").placements
    return _joined("trainer", world_size, model, placements)


def _trainer_cuts(model: Model, trainer: Trainer) -> dict[str, Cut]:
    if trainer.tensor_parallel == 1:
        return dict.fromkeys(model.specs, Cut(None))
    return autotp_cuts(
        model,
        trainer.tensor_parallel,
        patterns=trainer.patterns,
        vocab_parallel_head=trainer.vocab_parallel_head,
        grain=trainer.grain,
    )


def copies_layout(model: Model, destination: Destination, copies: Sequence[Sequence[int]], world_size: int) -> Layout:
    """Inference copies on ``copies``, the ranks of each. Raises InputError where heads or experts do not fit."""
    cuts = replica_cuts(model, destination.tensor_parallel)
    homes = _homes(model, destination.expert_parallel, "--to ep") if destination.expert_parallel > 1 else {}
    rest = {name: spec for name, spec in model.specs.items() if name not in homes}
    placements = dict(mesh_layout(rest, cuts | _cut_fused(model), copies, world_size, "copies").placements)
    if homes:
        line = np.asarray([rank for ranks in copies for rank in ranks], dtype=np.int64)
        experts = {name: model.specs[name] for name in homes}
        groups = list(line.reshape(-1, destination.expert_parallel))
        placements |= mesh_layout(experts, homes, groups, world_size, "copies").placements
    return _joined("copies", world_size, model, placements)


def _cut_fused(model: Model) -> dict[str, Cut]:
    """Experts of one tensor [experts, rows, columns] over the ranks of a copy: gate and up by rows each, down by
    columns."""
    found: dict[str, Cut] = {}
    for name, spec in model.specs.items():
        if is_fused(name) and len(spec.shape) == 3:
            rows = spec.shape[1]
            if name.endswith("gate_up_proj") and rows % 2 == 0:
                found[name] = Cut.fused(1, (rows // 2, None), (rows // 2, None))
            else:
                found[name] = Cut(2 if name.endswith(("down_proj", "w2")) else 1)
        elif is_fused(name):
            found[name] = Cut(None)
    return found


def _homes(model: Model, degree: int, what: str) -> dict[str, Cut]:
    """Of every weight of routed experts, the ranks of an expert-parallel group that hold it: as many neighbouring
    experts each. Raises InputError where the model has none, or not a multiple of ``degree``."""
    count = model.experts
    if not count:
        raise InputError(f"{what} = {degree}, but {model.name} has no routed experts: leave it out")
    if count % degree:
        raise InputError(f"{what} = {degree}: {count} experts % {degree} = {count % degree}, not 0")
    groups = [Cut.only(group) for group in range(degree)]
    found: dict[str, Cut] = {}
    for name in model.specs:
        expert = expert_of(name)
        if expert is not None:
            found[name] = groups[expert // (count // degree)]
        elif is_fused(name):
            found[name] = Cut(0, count)
    return found


def _split(model: Model, homes: Mapping[str, Cut]) -> tuple[_Specs, _Specs]:
    """Buffers, and the weights that are neither buffers nor in ``homes``."""
    buffers = {name: spec for name, spec in model.specs.items() if name in model.buffers}
    return buffers, {name: s for name, s in model.specs.items() if name not in buffers and name not in homes}


def _whole(specs: _Specs, ranks: Sequence[int], world_size: int) -> Mapping[str, Placement]:
    cuts = dict.fromkeys(specs, Cut(None))
    return mesh_layout(specs, cuts, [[rank] for rank in ranks], world_size, "trainer").placements


def _joined(name: str, world_size: int, model: Model, placements: Mapping[str, Placement]) -> Layout:
    ordered = {key: placements[key] for key in model.specs}
    return Layout(name, world_size, dict(model.specs), ordered, dict(model.aliases))

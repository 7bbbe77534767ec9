"""``plan --model DIR --from ds_train.json --to tp=4,replicas=2``: a move of a user's own model, laid out and planned.

``found = lay_out(model, source, to, from_ranks, topology)`` reads the inputs; ``found.planned(...)`` plans for all
ranks, ``one_rank`` where there are too many. Any process, no torch import.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from relaymeter.errors import InputError
from relaymeter.harness.inputs.deepspeed_config import Trainer, read_trainer
from relaymeter.harness.inputs.destination import Destination, copy_ranks, parse_destination, parse_ranks
from relaymeter.harness.inputs.layouts import copies_layout, trainer_layout
from relaymeter.harness.inputs.loads import segments_of
from relaymeter.harness.inputs.model import Model, name_some, read_model
from relaymeter.harness.inputs.roles import unknown_names
from relaymeter.harness.moves import PlannedMove, default_bucket_bytes, plan_layouts
from relaymeter.relayout.layout import Layout
from relaymeter.relayout.routes import block_groups
from relaymeter.relayout.topology import Topology
from relaymeter.units import counted, format_bytes

__all__ = ["MOST_SEGMENTS", "ModelMove", "lay_out"]

#: A plan of all ranks with more copies than this is not made: its rounds alone would take minutes.
MOST_SEGMENTS = 10_000_000


@dataclass(frozen=True, eq=False)
class ModelMove:
    """A model, where its trainer holds it, where it goes, and the seconds that it took to find out."""

    model: Model
    trainer: Trainer
    destination: Destination
    ranks: Sequence[int]
    copies: Sequence[Sequence[int]]
    source_layout: Layout
    copies_layout: Layout
    layouts_s: float

    @property
    def name(self) -> str:
        """The move's name: ``tp4-x2``, ``tp8-ep16-x4``."""
        experts = "" if self.destination.expert_parallel == 1 else f"-ep{self.destination.expert_parallel}"
        return f"tp{self.destination.tensor_parallel}{experts}-x{len(self.copies)}"

    @cached_property
    def segments(self) -> int:
        """About the copies that a plan of all ranks would hold."""
        return segments_of(self.source_layout, self.copies_layout)

    def planned(self, topology: Topology, planners: Sequence[str], bucket_bytes: int | None) -> tuple[PlannedMove, ...]:
        """The move by every planner, for all ranks. Raises LayoutError."""
        found: list[PlannedMove] = []
        for planner in planners:
            begin = time.perf_counter()
            plan = plan_layouts([self.source_layout], self.copies_layout, topology, planner)
            groups = block_groups(plan, topology)
            seconds = self.layouts_s + time.perf_counter() - begin
            size = bucket_bytes or default_bucket_bytes(plan)
            found.append(
                PlannedMove(
                    name=self.name,
                    planner=planner,
                    sources={"trainer": self.source_layout},
                    destination=self.copies_layout,
                    plan=plan,
                    groups=groups,
                    topology=topology,
                    bucket_bytes=size,
                    plan_s=seconds,
                )
            )
        return tuple(found)

    def lines(self) -> list[str]:
        """What was understood, and what was assumed, a line each."""
        model, unknown = self.model, unknown_names(self.model)
        dtypes = sorted({spec.dtype for spec in model.specs.values()})
        family = model.family or "family not known"
        experts = f", {model.experts} experts a layer" if model.experts else ""
        lines = [
            f"model: {model.name} ({family}), {counted(len(model.specs), 'weight')}, {format_bytes(model.nbytes)} in "
            f"{' and '.join(dtypes)}{experts}",
            f"from: {self.trainer.label} on {_span(self.ranks)}",
            f"to: {len(self.copies)} {'copy' if len(self.copies) == 1 else 'copies'} of "
            f"{counted(self.destination.tensor_parallel, 'rank')} on "
            f"{_span([rank for ranks in self.copies for rank in ranks])}"
            + (
                f", experts whole over {self.destination.expert_parallel} ranks"
                if self.destination.expert_parallel > 1
                else ""
            ),
        ]
        lines += [f"note: {note}" for note in (*model.notes, *self.trainer.notes)]
        if unknown:
            lines.append(
                f"note: {counted(len(unknown), 'weight')} of unknown part, kept whole on every rank of a copy: "
                + name_some(unknown)
            )
        return lines

    def to_dict(self) -> dict[str, Any]:
        """What was understood, JSON-ready."""
        return {
            "model": self.model.name,
            "family": self.model.family,
            "weights": len(self.model.specs),
            "bytes": self.model.nbytes,
            "experts": self.model.experts,
            "trainer": {
                "zero_stage": self.trainer.stage,
                "tensor_parallel": self.trainer.tensor_parallel,
                "expert_parallel": self.trainer.expert_parallel,
                "ranks": list(self.ranks),
            },
            "copies": [list(ranks) for ranks in self.copies],
            "expert_parallel": self.destination.expert_parallel,
            "notes": [*self.model.notes, *self.trainer.notes],
            "unknown": unknown_names(self.model),
        }


def _span(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {min(ranks)} to {max(ranks)}"


def lay_out(model: Path, source: Path, to: str, from_ranks: str | None, topology: Topology) -> ModelMove:
    """Read the inputs and lay both ends out. Raises InputError naming the file, option or number that does not fit."""
    begin = time.perf_counter()
    destination, world = parse_destination(to), topology.world_size
    ranks, copies = parse_ranks(from_ranks, world), copy_ranks(destination, topology)
    trainer = read_trainer(source)
    found = read_model(model).in_dtype(trainer.dtype)
    if not found.specs:
        raise InputError(f"model {model} has no weights")
    before = trainer_layout(found, trainer, ranks, world)
    after = copies_layout(found, destination, copies, world)
    return ModelMove(found, trainer, destination, ranks, copies, before, after, time.perf_counter() - begin)

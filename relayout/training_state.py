"""A live engine's whole training state: what of it moves by a layout, and where it lies on this rank.

    told = read_training_state(engine, world_size)          # JSON-able, equal on all ranks of the engine
    state = TrainingState.of(told, world_size)              # on any rank: layouts of every state
    storages = training_storages(engine, state.joined(keys))

States are ``master``, the optimizer's states of one value per weight (``exp_avg``) and ``frozen``: weights and
persistent buffers without a master. A joined layout holds them all, its tensors named ``exp_avg layers.0.weight``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from relaymeter.errors import InputError, PlanDisagreement
from relaymeter.relayout.announce import Assembly
from relaymeter.relayout.combine import renumber_layout
from relaymeter.relayout.engine_layout import build_layout
from relaymeter.relayout.engine_reading import Fragment, master_fragments
from relaymeter.relayout.engines import MASTER, describe_engine, engine_layout, refresh_weights, weights_storage
from relaymeter.relayout.idle import refuse_busy
from relaymeter.relayout.layout import Layout
from relaymeter.relayout.release import hollow, released
from relaymeter.relayout.spare_states import SpareStates
from relaymeter.relayout.training_fields import base_optimizer, read_fields, state_tensors

__all__ = [
    "FROZEN",
    "TrainingState",
    "check_ready",
    "check_writable",
    "only_tensors",
    "prepare",
    "read_together",
    "read_training_state",
    "refresh_from_masters",
    "refuse_other_model",
    "training_storages",
    "zero_filled",
]

FROZEN = "frozen"
#: States that lie in the weights' own storages.
_OF_WEIGHTS = (FROZEN, "weights")


def check_ready(engine: Any) -> None:
    """Raise InputError where the engine's state cannot be read or written as a whole: offloaded, or inside a gradient
    accumulation window. Local."""
    if hollow(engine):
        raise InputError("the engine was restored and is still empty: there is no state in it to move")
    check_writable(engine)


def check_writable(engine: Any) -> None:
    """Raise InputError where no state can be moved into the engine, or out of it. Local."""
    if released(engine):
        raise InputError(
            "the engine has given its memory back: call relaymeter.relayout.release.restore(engine) before a move"
        )
    refuse_busy(engine, "move its state")


def read_training_state(
    engine: Any, world_size: int, *, into: bool = False, time_limit_s: float | None = None
) -> dict[str, Any]:
    """Layout descriptions of weights and masters, and every field, JSON-able. ``into``: of an engine that state moves
    into, which may be empty.

    The engine's ranks call this together; they compare what they hold. Raises InputError or PlanDisagreement where it
    cannot be read, or they differ.
    """
    (check_writable if into else check_ready)(engine)
    engine_layout(engine, world_size, MASTER, time_limit_s=time_limit_s)
    return {"weights": describe_engine(engine), MASTER: describe_engine(engine, MASTER), "fields": read_fields(engine)}


@dataclass(frozen=True, eq=False)
class TrainingState:
    """One side of a move, as every rank knows it: the layouts of its weights and masters, and its fields."""

    weights: Layout
    master: Layout
    fields: Mapping[str, Any]

    @classmethod
    def of(cls, told: Mapping[str, Any], world_size: int) -> TrainingState:
        """From what ``read_training_state`` gave. Pure."""
        return cls(build_layout(told["weights"], world_size), build_layout(told[MASTER], world_size), told["fields"])

    @property
    def frozen(self) -> tuple[str, ...]:
        """Weights and buffers that have no master."""
        return tuple(name for name in self.weights.specs if name not in self.master.specs)

    def joined(self, per_weight: Mapping[str, Mapping[str, str]], *, weights: bool = False) -> Layout:
        """The layout of all states: masters, ``per_weight`` (state -> name -> dtype) and what is frozen. ``weights``
        adds the other weights too, for a digest."""
        parts = [(MASTER, self.master, {name: spec.dtype for name, spec in self.master.specs.items()})]
        parts += [(key, self.master, dict(dtypes)) for key, dtypes in per_weight.items()]
        dtype_of = {name: spec.dtype for name, spec in self.weights.specs.items()}
        parts.append((FROZEN, self.weights, {name: dtype_of[name] for name in self.frozen}))
        if weights:
            parts.append(("weights", self.weights, {n: d for n, d in dtype_of.items() if n in self.master.specs}))
        specs, placements = {}, {}
        for state, layout, dtypes in parts:
            for name, dtype in dtypes.items():
                whole = f"{state} {name}"
                specs[whole] = replace(layout.specs[name], name=whole, dtype=dtype)
                placements[whole] = layout.placements[name]
        return Layout(f"training state of {self.master.name}", self.master.world_size, specs, placements)


def read_together(
    engine: Any | None, side: str, ranks: Assembly, *, time_limit_s: float | None = None
) -> TrainingState:
    """The state of the ``side`` ("source" or "destination") engine on every rank of a group, its layouts renumbered to
    the group's ranks. Every rank of the group calls this, with None where it holds no part of the engine.

    Raises on every rank: InputError where the state cannot be read or no rank gave an engine; PlanDisagreement where
    the engine's ranks differ; LayoutError where a rank outside the group holds a part.
    """
    world = dist.get_world_size()

    def read() -> dict[str, Any] | None:
        if engine is None:
            return None
        try:
            return read_training_state(engine, world, into=side == "destination", time_limit_s=time_limit_s)
        except (InputError, PlanDisagreement) as error:
            raise type(error)(f"{side}: {error}") from error

    found = ranks.announce(ranks.attempt(read), f"the {side} engine's training state")
    if found is None:
        raise InputError(f"no rank gave a {side} engine: the ranks that hold it hand it in, the others None")
    state = TrainingState.of(found, world)
    members = range(world) if ranks.group is None else dist.get_process_group_ranks(ranks.group)
    weights, master = (renumber_layout(layout, members) for layout in (state.weights, state.master))
    return replace(state, weights=weights, master=master)


def only_tensors(layout: Layout, names: Iterable[str]) -> Layout:
    """The layout of the tensors ``names`` alone. Pure."""
    kept = list(names)
    specs, placements = {n: layout.specs[n] for n in kept}, {n: layout.placements[n] for n in kept}
    return replace(layout, specs=specs, placements=placements, aliases={})


def refuse_other_model(source: TrainingState, destination: TrainingState) -> None:
    """Raise InputError where the two engines do not train the same model, naming the first parameter. Pure."""
    _refuse_missing(source, destination, "source", "destination")
    _refuse_missing(destination, source, "destination", "source")
    pairs = [("master", source.master, destination.master, tuple(destination.master.specs))]
    pairs.append(("frozen weight", source.weights, destination.weights, destination.frozen))
    for what, mine, theirs, names in pairs:
        for name in names:
            leaves, arrives = mine.specs[name].dtype, theirs.specs[name].dtype
            if leaves != arrives:
                raise InputError(
                    f"the {what} of {name} is {leaves} in the source and {arrives} in the destination: training state "
                    "keeps its types; build both engines with the same ones"
                )


def _refuse_missing(one: TrainingState, other: TrainingState, has: str, lacks: str) -> None:
    for name, spec in one.weights.specs.items():
        if name not in other.weights.specs:
            if "lora_" in name or ".base_layer." in name:
                raise InputError(
                    f"the {has} has LoRA adapters ({name}), the {lacks} has none of that name: merge them, or add the "
                    "same adapters to both models"
                )
            tied = other.weights.aliases.get(name)
            how = "has none of that name" if tied is None else f"ties it to {tied}"
            raise InputError(
                f"the {has} holds {name} {list(spec.shape)}, the {lacks} {how}: build both engines of one model"
            )
        shape = other.weights.specs[name].shape
        if spec.shape != shape:
            raise InputError(
                f"{name} is {list(spec.shape)} in the {has} and {list(shape)} in the {lacks}: build both engines of "
                "one model"
            )
    for name in one.master.specs:
        if name not in other.master.specs:
            raise InputError(
                f"{name} is trained in the {has} and frozen in the {lacks}: freeze the same parameters in both"
            )


def _line(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1)


def training_storages(
    engine: Any | None, names: Iterable[str], spare: SpareStates | None = None
) -> dict[str, torch.Tensor]:
    """This rank's storages of the tensors ``names`` of a joined layout: 1-D views, no copy; empty without an engine.

    A tensor of which the rank holds nothing is left out. ``spare`` has states that the optimizer lacks.
    """
    names = list(names)
    if engine is None or not names:
        return {}
    state = base_optimizer(engine).state
    fragments: dict[str, Fragment] = {part.name: part for part in master_fragments(engine)}
    wanted = [(whole, *whole.split(" ", 1)) for whole in names]
    weights = weights_storage(engine) if any(kind in _OF_WEIGHTS for _, kind, _ in wanted) else {}
    found = {}
    for whole, kind, name in wanted:
        if kind in _OF_WEIGHTS:
            if name in weights:
                found[whole] = weights[name]
        elif name in fragments:
            part = fragments[name]
            kept = part.flat if kind == MASTER else None if spare is None else spare.of(part.flat, kind)
            found[whole] = _line(state[part.flat][kind] if kept is None else kept).narrow(0, part.offset, part.stored)
    return found


def zero_filled(engine: Any | None, wanted: Mapping[str, Any]) -> None:
    """Zeros for the parameters whose state the source does not have and the destination keeps beside others'. Local."""
    for storage in training_storages(engine, [f"{key} {name}" for key, name in wanted["filled"]]).values():
        storage.zero_()


def prepare(engine: Any, wanted: Mapping[str, Any]) -> None:
    """Give the optimizer the states that it lacks, zeros, and zeros to the parameters whose state did not exist before:
    all that is needed before a state is moved into the engine. Local."""
    spare = SpareStates()
    spare.allocate(engine, wanted)
    spare.attach(engine)
    zero_filled(engine, wanted)


def refresh_from_masters(engine: Any) -> None:
    """Make the low-precision weights anew from the masters, as the end of a step does, and let the engine see them.

    The engine's ranks call this together: below ZeRO-3 each gathers the others' parts.
    """
    optimizer = engine.optimizer
    with torch.no_grad():
        if hasattr(optimizer, "fp32_partitioned_groups_flat"):
            for number in range(len(optimizer.fp16_groups)):
                optimizer._reassign_or_swap_out_partitioned_parameters(number)
        elif hasattr(optimizer, "update_lp_params"):
            optimizer.update_lp_params()
        elif hasattr(optimizer, "fp16_groups"):
            lows = getattr(optimizer, "fp16_groups_flat", None) or [p for g in optimizer.fp16_groups for p in g]
            highs = getattr(optimizer, "fp32_groups_flat", None) or [p for g in optimizer.fp32_groups for p in g]
            for low, high in zip(lows, highs, strict=True):
                low.data.copy_(high.data)
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        optimizer._hp_optimizer_states_linked = False
        if any(state for _, state in state_tensors(engine)):
            optimizer._lazy_init_hp_params_optimizer_state()
    refresh_weights(engine)

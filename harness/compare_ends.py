"""What the worlds of ``compare`` have in common on a rank: both ends of a change, their digests, a clock of phases.

    ends = Ends(scenario, change, world, time_limit_s)          # every rank of the world
    source = ends.source()                                      # trained; None on ranks outside it
    with clock.phase("build"):
        destination = ends.destination()
    passed, total, mismatch = check_digests(digests, destination.digests())

The digest of a state is one number for each tensor, whatever its layout, so that a job can prove what another one left.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from relaymeter.errors import InputError
from relaymeter.harness.compare_config import CompareChange, CompareScenario, ReplicaConfig
from relaymeter.harness.replicas import ReplicaStorage
from relaymeter.harness.state_config import EngineConfig, TrainingConfig
from relaymeter.harness.state_engines import EngineGroups, EngineMaker, train
from relaymeter.harness.state_models import build_model, cut_dims
from relaymeter.harness.world import World
from relaymeter.relayout.announce import Assembly
from relaymeter.relayout.block_sums import tensor_digest
from relaymeter.relayout.cuts import Cut
from relaymeter.relayout.digest import digest_layout
from relaymeter.relayout.engines import weights_storage
from relaymeter.relayout.layout import Layout, TensorSpec
from relaymeter.relayout.placements import tensor_parallel_layout
from relaymeter.relayout.training_state import read_together, training_storages

__all__ = ["Clock", "Destination", "Ends", "check_digests", "engine_digests", "imported_models", "replica_layout"]

#: Between the seeds of the two ends: a destination that nothing reached holds other bits in every element.
_SEED_STEP = 7919
#: The name of weights in digests, beside ``master`` and the optimizer's states.
_WEIGHT = "weight"


class Clock:
    """Seconds of phases on this rank, each begun when all ranks of the world have come."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._ranks = Assembly()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is inside and add it to ``name``. Every rank of the world enters it."""
        self._ranks.tell_all(None)
        begin = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def slowest(self) -> dict[str, float]:
        """Of each phase the seconds of the slowest rank. Collective."""
        every = self._ranks.tell_all(self.seconds)
        return {name: max(rank.get(name, 0.0) for rank in every) for name in self.seconds}


@dataclass(frozen=True, eq=False)
class Destination:
    """Where the state goes, on this rank: an engine (None on ranks outside it), or copies of the weights."""

    engine: Any | None = None
    layout: Layout | None = None
    """Of the copies; None where the destination is an engine."""
    storages: Mapping[str, torch.Tensor] | None = None

    def digests(self) -> dict[str, list[int]]:
        """Digests of every copy of every tensor, by state and name. Collective over the world."""
        if self.layout is None:
            return engine_digests(self.engine)
        found = digest_layout(self.layout, dist.get_rank(), self.storages or {}, replicas=True)
        return {f"{_WEIGHT} {name}": list(map(tensor_digest, sums)) for name, sums in found.sums.items()}

    def first_storage(self) -> torch.Tensor | None:
        """A tensor of what this rank holds, for a fault to strike; None where it holds nothing."""
        if self.layout is not None:
            return next((kept for kept in (self.storages or {}).values() if kept.numel()), None)
        held = {} if self.engine is None else weights_storage(self.engine)
        return next((kept for kept in held.values() if kept.numel()), None)

    def close(self) -> None:
        """Give it up. Every rank calls this."""
        if self.engine is not None:
            self.engine.destroy()
        gc.collect()  # engines refer to themselves


class Ends:
    """Builds both ends of a change. Every rank of the world has one and calls its methods in the same order."""

    def __init__(self, scenario: CompareScenario, change: CompareChange, world: World, time_limit_s: float) -> None:
        self._training = scenario.training
        self._change, self._world = change, world
        self._geometry = None if scenario.model is None else scenario.model.geometry()
        self._maker = EngineMaker(self._training, self._geometry, EngineGroups(time_limit_s))

    def source(self) -> Any | None:
        """The engine that the state comes from, trained; None on ranks outside it."""
        engine = self._maker.build(self._change.source, self._training.seed)
        train(engine, self._training, self._training.steps, self._geometry)
        return engine

    def tensor_group(self) -> dist.ProcessGroup | None:
        """This rank's tensor-parallel group in the source; None outside it. Every rank of the world calls this."""
        grid = self._maker.groups.grid(self._change.source)
        return None if grid is None else grid.tensor

    def destination(self, settings: Mapping[str, Any] | None = None) -> Destination:
        """A fresh destination with weights of its own. ``settings``: of its DeepSpeed config. Raises InputError."""
        end = self._change.end
        if isinstance(end, EngineConfig):
            seed = self._training.seed + _SEED_STEP
            return Destination(self._maker.build(end, seed, settings=dict(settings or {})))
        layout = replica_layout(self._training, self._geometry, end, self._world.world_size)
        kept = ReplicaStorage(layout, self._world.rank, self._world.device)
        kept.poison()
        return Destination(None, layout, kept.storages)


def replica_layout(training: TrainingConfig, geometry: Any, replicas: ReplicaConfig, world_size: int) -> Layout:
    """The layout of the copies: parameters in the training's dtype, and the persistent buffers, which DeepSpeed leaves
    in their own. Raises InputError for a model whose copies another command moves. Pure."""
    if training.model == "qwen3":
        raise InputError("copies of the model 'qwen3' are moved by run --scenario, not by compare: take 'blocks'")
    with torch.device("meta"):
        model = build_model(training, training.seed, geometry)
    specs = {name: TensorSpec(name, tuple(param.shape), training.dtype) for name, param in model.named_parameters()}
    kept = model.state_dict()
    specs |= {
        name: TensorSpec(name, tuple(buffer.shape), str(buffer.dtype).removeprefix("torch."))
        for name, buffer in model.named_buffers()
        if name in kept
    }
    cuts = {name: Cut(cut_dims(training, name)) for name in specs}
    return tensor_parallel_layout(specs, cuts, replicas.copies, world_size, name=replicas.label)


def engine_digests(engine: Any | None) -> dict[str, list[int]]:
    """Digests of every copy of every master, optimizer state, frozen weight and weight of an engine, by state and name.
    Collective over the world; None on ranks without the engine."""
    state = read_together(engine, "source", Assembly())
    layout = state.joined(state.fields["per_weight"])
    rank = dist.get_rank()
    states = digest_layout(layout, rank, training_storages(engine, layout.specs), replicas=True)
    held = {} if engine is None else weights_storage(engine)
    weights = digest_layout(state.weights, rank, held, replicas=True)
    found = {name: list(map(tensor_digest, sums)) for name, sums in states.sums.items()}
    return found | {f"{_WEIGHT} {name}": list(map(tensor_digest, sums)) for name, sums in weights.sums.items()}


def check_digests(
    expected: Mapping[str, int], found: Mapping[str, Sequence[int]], *, weights_only: bool
) -> tuple[int, int, str | None]:
    """Copies of tensors that hold what the source held, of all, and the first that does not. Pure.

    ``weights_only``: the destination holds weights and nothing else; otherwise a state that did not arrive at all is
    wrong too.
    """
    wanted = {name for name in expected if name.startswith(f"{_WEIGHT} ") or not weights_only}
    passed = total = 0
    mismatch: str | None = None
    for name in sorted(wanted | set(found)):
        copies = found.get(name, [])
        total += max(len(copies), 1)
        good = sum(copy == expected.get(name) for copy in copies)
        passed += good
        if mismatch is None and not copies:
            mismatch = f"{name} did not arrive"
        elif mismatch is None and good < len(copies):
            wrong = next(number for number, copy in enumerate(copies) if copy != expected.get(name))
            mismatch = f"{name}: copy {wrong} of {len(copies)} is not what the source held"
    return passed, total, mismatch


def imported_models(training_model: str) -> tuple[str, ...]:
    """Modules that building an engine of this model family imports, which take seconds. Pure."""
    return ("deepspeed", "transformers") if training_model in ("qwen3", "moe") else ("deepspeed",)

"""Scenarios of ``compare``, as a TOML file says them: one state, several changes, each made by every path.

``load_any("rfc-small")`` gives a checked ``CompareScenario``. No torch import.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from relaymeter.harness.config import Config, Count, ModelConfig, Name
from relaymeter.harness.state_config import EngineConfig, EngineRanks, TrainingConfig

__all__ = ["NO_TRAINING_STATE", "CompareChange", "CompareScenario", "ReplicaConfig"]

#: Why weights alone do not go through a universal checkpoint.
NO_TRAINING_STATE = (
    "DeepSpeed loads a universal checkpoint into training engines only, and copies for inference are none"
)
#: Models whose inference copies are not made here, and what to do.
_NO_COPIES = {
    "moe": "the engine and a copy hold the experts of a layer in other tensors; give a destination, or another model, "
    "such as 'blocks'",
    "qwen3": "run --scenario moves such copies; take another model here, such as 'blocks'",
}


class ReplicaConfig(Config):
    """Inference copies of the weights: consecutive ranks of ``ranks`` hold the shards of one copy."""

    ranks: EngineRanks
    """Ranks of all copies; in a file also their number n, for ranks 0 to n - 1."""
    tensor_parallel: Count
    """Ranks that share a copy."""

    @model_validator(mode="after")
    def _degree_fits(self) -> ReplicaConfig:
        if len(self.ranks) % self.tensor_parallel:
            raise ValueError(f"{len(self.ranks)} ranks are no whole copies of tensor_parallel {self.tensor_parallel}")
        return self

    @property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each copy."""
        degree = self.tensor_parallel
        return tuple(self.ranks[at : at + degree] for at in range(0, len(self.ranks), degree))

    @property
    def label(self) -> str:
        """The copies in a table: ``tp2 x 2 copies``."""
        return f"tp{self.tensor_parallel} x {len(self.copies)} cop{'y' if len(self.copies) == 1 else 'ies'}"


class CompareChange(Config):
    """One change: from a trained engine to another engine, or to inference copies of its weights."""

    name: Name
    """Name of the change in tables and records, such as ``dp4-dp2``."""
    source: EngineConfig
    """The engine that trains."""
    destination: EngineConfig | None = None
    """The engine that its training state goes to."""
    replicas: ReplicaConfig | None = None
    """The copies that its weights go to, in place of an engine."""

    @model_validator(mode="after")
    def _one_destination(self) -> CompareChange:
        if (self.destination is None) == (self.replicas is None):
            raise ValueError("give destination (an engine) or replicas (inference copies), one of the two")
        return self

    @property
    def end(self) -> EngineConfig | ReplicaConfig:
        """Where the state goes."""
        found = self.destination or self.replicas
        if found is None:
            raise ValueError("a change needs a destination or replicas")
        return found

    @property
    def world(self) -> int:
        """Ranks of the world that holds both ends."""
        return max(*self.source.ranks, *self.end.ranks) + 1


class CompareScenario(Config):
    """The same changes of the same state by every path."""

    kind: Literal["compare"]
    """Which kind of scenario this is."""
    name: Name
    """Name of the scenario: by default the file's name without its ending."""
    model: ModelConfig | None = None
    """Geometry for ``training.model = "qwen3"``."""
    training: TrainingConfig = TrainingConfig()
    """What is trained, alike in all changes."""
    changes: Annotated[tuple[CompareChange, ...], Field(min_length=1)]
    """The changes, each made by every path."""

    @model_validator(mode="after")
    def _fits(self) -> CompareScenario:
        names = [change.name for change in self.changes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two [[changes]] are named {twice[0]!r}: give each a name of its own")
        for change in self.changes:
            if change.replicas is not None and self.training.model in _NO_COPIES:
                raise ValueError(
                    f"change {change.name}: replicas of training.model {self.training.model!r}: "
                    f"{_NO_COPIES[self.training.model]}"
                )
            for engine in (change.source, change.destination):
                if engine is not None:
                    engine.check_training(self.training, f"change {change.name}")
        if self.model is None and self.training.model == "qwen3":
            raise ValueError("training.model 'qwen3' needs the table [model] with its geometry")
        return self

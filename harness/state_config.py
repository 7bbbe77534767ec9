"""Scenarios of the training-state kinds, as a TOML file says them: engines, training, changes, rounds, offload.

``read_toml(path, StateScenario)`` gives a checked scenario or one line of InputError. What a change gets on a rank is a
``state_context.StateContext``. No torch import.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from relaymeter.harness.config import Config, Count, ModelConfig, Name, PlannerChoice, Whole

__all__ = [
    "GLOBAL_BATCH",
    "OFFLOAD_STATES",
    "ROWS",
    "ChangeConfig",
    "EngineConfig",
    "OffloadScenario",
    "OptimizerName",
    "RoundsConfig",
    "RowName",
    "StateScenario",
    "StateSuite",
    "TrainingConfig",
]

#: Rows of the matrix of changes, in the order in which a table has them.
RowName = Literal["world size", "stage", "AutoTP", "AutoEP", "dtype", "optimizer"]
ROWS: tuple[RowName, ...] = get_args(RowName)
#: ``Adam`` and ``AdamW`` are torch's; ``group-step`` keeps state of its own in the parameter group only.
OptimizerName = Literal["Adam", "AdamW", "deepspeed-Adam", "deepspeed-AdamW", "group-step", "SGD"]
#: What DeepSpeed's ``offload_states`` takes by name.
OffloadState = Literal["hp_params", "lp_params", "lp_grads", "optim_states", "contiguous_grad_buffer", "all"]
OFFLOAD_STATES: tuple[OffloadState, ...] = get_args(OffloadState)
#: Samples of a step, over all ranks and micro-batches: a multiple of 1, 2, 3, 4, 6 and 8.
GLOBAL_BATCH = 24
#: More ranks than any world that a machine starts.
_MOST_RANKS = 4096


#: ZeRO stages that offload states.
Stage = Annotated[int, Field(strict=True, ge=1, le=3)]
Yes = Annotated[bool, Field(strict=True)]


def _different(values: tuple[Any, ...]) -> tuple[Any, ...]:
    twice = next((value for value in values if values.count(value) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice!r} stands in it twice: give each once")
    return values


def _ranks(value: Any) -> Any:
    if type(value) is int and 1 <= value <= _MOST_RANKS:
        return tuple(range(value))
    good = isinstance(value, list | tuple) and value and all(type(rank) is int and rank >= 0 for rank in value)
    if not good or len(set(value)) != len(value):
        raise ValueError("give the number of ranks, which are then the first ones, or a list of different rank numbers")
    return tuple(value)


#: Ranks of an engine: a number n for ranks 0 to n - 1, or a list.
EngineRanks = Annotated[tuple[int, ...], BeforeValidator(_ranks)]


class EngineConfig(Config):
    """One engine of a change: its ZeRO stage, its ranks, and how they are divided."""

    stage: Annotated[int, Field(strict=True, ge=0, le=3)]
    """ZeRO stage; 0 partitions nothing."""
    ranks: EngineRanks
    """Ranks that hold the engine; in a file also their number n, for ranks 0 to n - 1."""
    tensor_parallel: Count = 1
    """AutoTP degree: ranks, neighbours by rank, that share each layer."""
    expert_parallel: Count = 1
    """AutoEP degree: ranks that share the experts of a layer."""
    gradient_accumulation: Count = 1
    """Micro-batches of a step."""

    @model_validator(mode="after")
    def _degrees_fit(self) -> EngineConfig:
        for key in ("tensor_parallel", "expert_parallel"):
            degree, have = getattr(self, key), len(self.ranks)
            if have % degree:
                raise ValueError(
                    f"{have} ranks % {key} {degree} = {have % degree}, not 0: give a multiple of {degree} ranks"
                )
        if self.tensor_parallel > 1 and self.expert_parallel > 1:
            raise ValueError(
                f"tensor_parallel {self.tensor_parallel} and expert_parallel {self.expert_parallel}: an engine has one "
                "of them"
            )
        shares = len(self.ranks) // self.tensor_parallel * self.gradient_accumulation
        if GLOBAL_BATCH % shares:
            raise ValueError(
                f"{len(self.ranks)} ranks / tensor_parallel {self.tensor_parallel} x gradient_accumulation "
                f"{self.gradient_accumulation} = {shares}, which does not divide the {GLOBAL_BATCH} samples of a step"
            )
        return self

    def check_training(self, training: TrainingConfig, where: str) -> None:
        """Raise ValueError where this engine cannot train so; ``where`` says which it is."""
        if self.expert_parallel > 1 and training.model != "moe":
            raise ValueError(
                f"{where}: expert_parallel {self.expert_parallel} needs training.model 'moe', not {training.model!r}"
            )
        if self.tensor_parallel > 1 and training.model == "moe":
            raise ValueError(f"{where}: tensor_parallel {self.tensor_parallel} does not go with training.model 'moe'")

    @property
    def label(self) -> str:
        """The engine in a table: ``zero3 x4``, ``zero1 x4 tp2``, ``zero2 x2 (ranks 2, 3)``."""
        parts = [f"zero{self.stage} x{len(self.ranks)}"]
        if self.tensor_parallel > 1:
            parts.append(f"tp{self.tensor_parallel}")
        if self.expert_parallel > 1:
            parts.append(f"ep{self.expert_parallel}")
        if self.gradient_accumulation > 1:
            parts.append(f"accum{self.gradient_accumulation}")
        if self.ranks != tuple(range(len(self.ranks))):
            parts.append(f"(ranks {', '.join(map(str, self.ranks))})")
        return " ".join(parts)


class TrainingConfig(Config):
    """What the engines train, alike in all engines of a change."""

    model: Literal["dense", "blocks", "moe", "mixed", "unused", "qwen3"] = "dense"
    """``dense``: linear layers that AutoTP cuts. ``blocks``: as many residual blocks of such layers as ``layers``, of
    ``width``. ``moe``: a tiny Qwen3-MoE for AutoEP. ``mixed``: some parameters stay fp32. ``unused``: one parameter
    takes no part in the loss. ``qwen3``: the geometry in the scenario's [model]."""
    layers: Count = 2
    """Blocks of the model ``blocks``."""
    width: Count = 64
    """Width of the model ``blocks``; inside a block it is four times as wide."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of the weights; bfloat16 and float16 have fp32 masters, float16 a dynamic loss scale."""
    optimizer: OptimizerName = "AdamW"
    """Optimizer, torch's where the name says nothing else."""
    groups: Literal["one", "decay", "several"] = "one"
    """Parameter groups: ``one``; ``decay``: matrices with weight decay, vectors without; ``several``: three, each with
    a learning rate, betas and decay of its own."""
    frozen: Yes = False
    """Whether some parameters are frozen."""
    scheduler: Literal["WarmupLR", "WarmupDecayLR", "OneCycle", "StepLR"] | None = None
    """Learning-rate scheduler, DeepSpeed's but for torch's ``StepLR``; None: the rate stays."""
    steps: Whole = 3
    """Steps before the first move; 0: the optimizer has no state yet."""
    seed: Whole = 0
    """Seed of the first engine's weights and of the batches; later engines begin with another."""


class ChangeConfig(Config):
    """One change: a path of engines, each freshly built from another seed, the state moved from each to the next."""

    name: Name
    """Name of the change in tables and records."""
    row: RowName
    """Row of the matrix it belongs to."""
    path: Annotated[tuple[EngineConfig, ...], Field(min_length=2)]
    """The engines, first to last. Where the last is laid out as the first, both train on and must stay bit-equal."""
    training: TrainingConfig = TrainingConfig()
    """What is trained: the scenario's training, with the keys given here replaced."""
    world: Count | None = None
    """Ranks of a world of its own; None: the one that most changes share."""
    checkpoint: Yes = False
    """Whether the change is also made through a DeepSpeed universal checkpoint and compared."""
    continuation: Whole = 20
    """Steps that the engines train after the last move."""

    @model_validator(mode="after")
    def _fits(self) -> ChangeConfig:
        for number, engine in enumerate(self.path, 1):
            if self.world is not None and max(engine.ranks) >= self.world:
                raise ValueError(f"path number {number}: rank {max(engine.ranks)} of a world of {self.world} ranks")
            engine.check_training(self.training, f"path number {number}")
        return self

    @property
    def engines(self) -> str:
        """The path in words: ``zero3 x4 -> zero3 x2 -> zero3 x4``."""
        return " -> ".join(engine.label for engine in self.path)

    @property
    def least_world(self) -> int:
        """Ranks that the path needs at least."""
        return max(max(engine.ranks) for engine in self.path) + 1

    @property
    def returns(self) -> bool:
        """Whether the last engine is laid out as the first."""
        return self.path[0] == self.path[-1]


class RoundsConfig(Config):
    """Two live engines between which the state goes back and forth, a training step after each move."""

    first: EngineConfig
    """The engine that trains first."""
    second: EngineConfig
    """The other one."""
    first_name: Name = "first"
    """What tables call the first, such as DP4."""
    second_name: Name = "second"
    """What tables call the second, such as DP2."""
    planner: PlannerChoice = "both"
    """Who plans: each direction once per planner, for all rounds."""
    rounds: Count = 3
    """Rounds per planner, of two moves each."""
    steps: Count = 1
    """Steps trained after each move."""

    @model_validator(mode="after")
    def _names_differ(self) -> RoundsConfig:
        if self.first_name == self.second_name:
            raise ValueError(f"first_name and second_name are both {self.first_name!r}: give each a name of its own")
        return self


class StateSuite(Config):
    """What ``run --suite`` takes where the command line says nothing else."""

    planner: PlannerChoice = "classes"
    """Planner, or both, one after the other."""
    bound_s: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] | None = None
    """Seconds that the whole suite may take on this kind of machine; None: any."""


def _merged(training: Any, change: Any) -> Any:
    """``change`` with ``training`` beneath its own; what is no table is left for the models to refuse."""
    if not isinstance(change, dict) or not isinstance(training, dict):
        return change
    own = change.get("training", {})
    return {**change, "training": {**training, **own}} if isinstance(own, dict) else change


class StateScenario(Config):
    """Moves of whole training states between live engines: changes, each its own engines, or rounds between two."""

    kind: Literal["training-state"]
    """Which kind of scenario this is."""
    name: Name
    """Name of the scenario: by default the file's name without its ending."""
    model: ModelConfig | None = None
    """Geometry for ``training.model = "qwen3"``."""
    training: TrainingConfig = TrainingConfig()
    """What is trained; a change may replace keys."""
    changes: tuple[ChangeConfig, ...] = ()
    """Paths of engines, each proved by digests, an oracle and training on."""
    rounds: RoundsConfig | None = None
    """Two engines that hand the state back and forth, timed."""
    suite: StateSuite | None = None
    """Defaults of ``run --suite``; None: the scenario is no suite."""

    @model_validator(mode="before")
    @classmethod
    def _training_for_all(cls, value: Any) -> Any:
        if not isinstance(value, dict) or not isinstance(value.get("changes"), list | tuple):
            return value
        changes = [_merged(value.get("training", {}), change) for change in value["changes"]]
        return {**value, "changes": changes}

    @model_validator(mode="after")
    def _fits(self) -> StateScenario:
        if bool(self.changes) == (self.rounds is not None):
            raise ValueError("give [[changes]] or [rounds]" + (", not both" if self.changes else ": there is neither"))
        names = [change.name for change in self.changes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two [[changes]] are named {twice[0]!r}: give each a name of its own")
        for key in ("first", "second") if self.rounds is not None else ():
            getattr(self.rounds, key).check_training(self.training, f"rounds.{key}")
        trained = [self.training, *(change.training for change in self.changes)]
        if self.model is None and any(training.model == "qwen3" for training in trained):
            raise ValueError("training.model 'qwen3' needs the table [model] with its geometry")
        return self

    @property
    def world(self) -> int:
        """Ranks of the world that the changes without one of their own, or the rounds, need."""
        if self.rounds is not None:
            return max(*self.rounds.first.ranks, *self.rounds.second.ranks) + 1
        shared = [change.least_world for change in self.changes if change.world is None]
        return max(shared, default=max((change.world or 1) for change in self.changes))


class OffloadScenario(Config):
    """An idle engine gives its memory back and takes it up again, by DeepSpeed's own calls and by release."""

    kind: Literal["offload"]
    """Which kind of scenario this is."""
    name: Name
    """Name of the scenario: by default the file's name without its ending."""
    model: ModelConfig
    """Geometry of the model that the engines train."""
    ranks: Count = 2
    """Ranks of every engine."""
    stages: Annotated[tuple[Stage, ...], Field(min_length=1), AfterValidator(_different)] = (1, 2, 3)
    """ZeRO stages, an engine each."""
    states: Annotated[tuple[OffloadState, ...], Field(min_length=1), AfterValidator(_different)] = OFFLOAD_STATES
    """Kinds of state, each alone; ``all``: all together."""
    pinned: Annotated[tuple[Yes, ...], Field(min_length=1), AfterValidator(_different)] = (True, False)
    """Whether the host's memory is pinned."""
    blocking: Annotated[tuple[Yes, ...], Field(min_length=1), AfterValidator(_different)] = (True, False)
    """Whether the copies are waited for before the call returns."""
    between: Annotated[tuple[Stage, ...], AfterValidator(_different)] = (1, 2, 3)
    """Stages whose gradients are offloaded between a backward pass and the step too; below 3 none are left after it."""
    optimizer: OptimizerName = "deepspeed-AdamW"
    """Optimizer; DeepSpeed's ZeRO-3 offloads the states of its own Adam and AdamW only."""
    steps: Count = 2
    """Training steps before the first offload."""
    repeats: Count = 3
    """Offloads and reloads of each kind of state."""
    seed: Whole = 0
    """Seed of the weights and of the batches."""

    @model_validator(mode="after")
    def _ranks_divide(self) -> OffloadScenario:
        if GLOBAL_BATCH % self.ranks:
            raise ValueError(f"ranks {self.ranks} do not divide the {GLOBAL_BATCH} samples of a step")
        return self

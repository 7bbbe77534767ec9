"""Live DeepSpeed engines for moves of training states, trained on batches that do not depend on the layout.

    maker = EngineMaker(training)                           # every rank of the world
    engine = maker.build(config, seed=7)                    # every rank of the world; None on ranks outside
    losses = train(engine, training, steps=3)               # the engine's ranks

A step's global batch is drawn from the training's seed and the engine's step count alone; each data-parallel rank takes
its slice of it, in micro-batches. Engines of any layout that hold the same state therefore compute the same step, up to
the order of summation. ``relayout.subgroup`` stays installed: every forward pass needs it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from relaymeter.errors import InputError
from relaymeter.harness.models import Qwen3Geometry
from relaymeter.harness.state_config import GLOBAL_BATCH, EngineConfig, TrainingConfig
from relaymeter.harness.state_models import AUTOTP_PATTERNS, GroupStep, build_model, parameter_groups, samples
from relaymeter.relayout import subgroup
from relaymeter.relayout.own_groups import Grid, make_grid

__all__ = ["EngineGroups", "EngineMaker", "build_engine", "data_parallel", "engine_settings", "train"]

_BUCKET = 100_000
_LR = 0.01
#: The scale grows every fourth clean step; every eighth step overflows, by its batch and so in every layout alike.
_FP16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 10, "loss_scale_window": 4, "hysteresis": 1}
_OVERFLOW_EVERY, _OVERFLOW_AT, _OVERFLOW = 8, 1, 1e30
_SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0.001, "warmup_num_steps": 9, "warmup_type": "linear"},
    "WarmupDecayLR": {
        "warmup_min_lr": 0.001,
        "warmup_max_lr": 0.02,
        "warmup_num_steps": 4,
        "warmup_type": "linear",
        "total_num_steps": 60,
    },
    "OneCycle": {
        "cycle_min_lr": 0.002,
        "cycle_max_lr": 0.02,
        "cycle_first_step_size": 5,
        "cycle_min_mom": 0.85,
        "cycle_max_mom": 0.95,
    },
}


def engine_settings(engine: EngineConfig, training: TrainingConfig) -> dict[str, Any]:
    """The DeepSpeed config of an engine. Raises InputError where the ranks do not divide the global batch."""
    copies = len(engine.ranks) // engine.tensor_parallel
    shares = copies * engine.gradient_accumulation
    if GLOBAL_BATCH % shares:
        raise InputError(
            f"{engine.label}: {copies} data-parallel ranks x gradient_accumulation {engine.gradient_accumulation} = "
            f"{shares}, which does not divide the {GLOBAL_BATCH} samples of a step"
        )
    zero = {"stage": engine.stage, "reduce_bucket_size": _BUCKET, "allgather_bucket_size": _BUCKET}
    if engine.stage == 3:
        zero |= {
            "stage3_param_persistence_threshold": 10,
            "stage3_prefetch_bucket_size": _BUCKET,
            "memory_efficient_linear": False,  # it rounds otherwise than the linear of the other stages
        }
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // shares,
        "gradient_accumulation_steps": engine.gradient_accumulation,
        "train_batch_size": GLOBAL_BATCH,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000_000,
    }
    if training.model != "mixed" and training.dtype != "float32":
        settings |= {"bf16": {"enabled": True}} if training.dtype == "bfloat16" else {"fp16": dict(_FP16)}
    if training.optimizer == "SGD":
        settings["optimizer"] = {"type": "SGD", "params": {"lr": _LR, "momentum": 0.9}}
    elif training.optimizer != "group-step":
        kind = training.optimizer.removeprefix("deepspeed-")
        params = {"lr": _LR, "weight_decay": 0.01, "torch_adam": kind == training.optimizer}
        settings["optimizer"] = {"type": kind, "params": params | ({"adam_w_mode": False} if kind == "Adam" else {})}
    if training.scheduler in _SCHEDULES:
        settings["scheduler"] = {"type": training.scheduler, "params": dict(_SCHEDULES[str(training.scheduler)])}
    if engine.tensor_parallel > 1:
        cuts = {"use_default_specs": False, "layer_specs": AUTOTP_PATTERNS}
        settings["tensor_parallel"] = {"autotp_size": engine.tensor_parallel, "partition_config": cuts}
    if training.model == "moe":
        settings["expert_parallel"] = {
            "enabled": True,
            "autoep_size": engine.expert_parallel,
            "preset_model": "qwen3_moe",
            "use_grouped_mm": False,
        }
    return settings


class EngineGroups:
    """Process groups of engines, each made once. Every rank of the world has one and calls its methods in the same
    order; one for all changes of a job keeps the number of sockets as it is."""

    def __init__(self, time_limit_s: float | None = None) -> None:
        self._limit_s = time_limit_s
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._grids: dict[tuple[tuple[int, ...], int, int], Grid | None] = {}

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of ``ranks``, None outside it. Every rank of the world calls this."""
        if ranks not in self._groups:
            self._groups[ranks] = subgroup.make_group(ranks, time_limit_s=self._limit_s)
        return self._groups[ranks]

    def grid(self, config: EngineConfig) -> Grid | None:
        """The grid of an engine's ranks, None outside them. Every rank of the world calls this."""
        key = config.ranks, config.tensor_parallel, config.expert_parallel
        if key not in self._grids:
            grid = make_grid(key[0], key[1], expert_parallel=key[2], time_limit_s=self._limit_s)
            self._grids[key] = grid
        return self._grids[key]

    def close(self) -> None:
        """Give up the groups, after the engines were destroyed. Every rank of the world calls this."""
        dist.barrier()
        made = [*self._groups.values(), *(group for grid in self._grids.values() if grid for group in grid.groups)]
        for group in made:
            if group is not None:
                dist.destroy_process_group(group)
        self._groups.clear()
        self._grids.clear()


class EngineMaker:
    """Builds engines for one training, one after the other. Every rank of the world has one and calls its methods in
    the same order. ``groups``: those of other makers, to be shared."""

    def __init__(
        self,
        training: TrainingConfig,
        geometry: Qwen3Geometry | None = None,
        groups: EngineGroups | None = None,
        *,
        time_limit_s: float | None = None,
    ) -> None:
        self.training, self.geometry = training, geometry
        self.groups = EngineGroups(time_limit_s) if groups is None else groups

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """As ``EngineGroups.group``."""
        return self.groups.group(ranks)

    def close(self) -> None:
        """As ``EngineGroups.close``."""
        self.groups.close()

    def build(self, config: EngineConfig, seed: int, **more: Any) -> Any | None:
        """An untrained engine of ``config`` with weights drawn from ``seed``; None on a rank outside it.

        Every rank of the world calls this. ``more``: ``model`` (used as it is, in place of the training's),
        ``settings`` (entries of the DeepSpeed config that replace those of ``engine_settings``), and what
        ``deepspeed.initialize`` takes. Raises InputError where DeepSpeed cannot train so.
        """
        settings = engine_settings(config, self.training) | dict(more.pop("settings", {}))
        group, grid = self.groups.group(config.ranks), self.groups.grid(config)
        if group is None:
            return None
        os.environ.setdefault("DS_ACCELERATOR", "cpu" if dist.get_backend(group) == "gloo" else "cuda")
        model = more.pop("model", None)
        if model is None:
            model = build_model(self.training, seed, self.geometry)
        with quiet():
            subgroup.install()
            logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
            return subgroup.initialize_over(group, model, settings, grid=grid, **(self._options(model) | more))

    def _options(self, model: torch.nn.Module) -> dict[str, Any]:
        options: dict[str, Any] = {"model_parameters": parameter_groups(model, self.training)}
        if self.training.optimizer == "group-step":
            options["optimizer"] = lambda params: GroupStep(params, lr=_LR)
        if self.training.scheduler == "StepLR":
            options["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        return options


def build_engine(
    engine: EngineConfig,
    training: TrainingConfig,
    seed: int,
    *,
    geometry: Qwen3Geometry | None = None,
    groups: EngineGroups | None = None,
) -> Any | None:
    """One engine, as ``EngineMaker(training, geometry, groups).build(engine, seed)``. Every rank calls it."""
    return EngineMaker(training, geometry, groups).build(engine, seed)


def data_parallel(engine: Any) -> tuple[dist.ProcessGroup, int, int]:
    """The group of ranks that share the batch of ``engine``, this rank's place in it, and its size."""
    group = engine.seq_data_parallel_group
    return group, dist.get_rank(group), dist.get_world_size(group)


def train(
    engine: Any | None, training: TrainingConfig, steps: int, geometry: Qwen3Geometry | None = None
) -> list[float]:
    """Train ``steps`` steps on global batches and return the loss of each before its update: the mean over all samples,
    the same on every rank of the engine. The engine's ranks call this together; others get an empty list.

    In float16, ``Dense`` overflows at the second step and at every eighth after it: those steps are skipped.
    """
    if engine is None:
        return []
    group, place, places = data_parallel(engine)
    micros = int(engine.gradient_accumulation_steps())
    size = GLOBAL_BATCH // (places * micros)
    losses = []
    for _ in range(steps):
        draw = training.seed * 1_000_003 + int(engine.global_steps)
        batch = samples(training, GLOBAL_BATCH, draw, geometry)
        if training.dtype == "float16" and int(engine.global_steps) % _OVERFLOW_EVERY == _OVERFLOW_AT:
            batch |= {key: value * _OVERFLOW for key, value in batch.items() if key == "wanted"}
        mine = []
        for micro in range(micros):
            at = (place * micros + micro) * size
            mine.append(_micro_step(engine, {key: value[at : at + size] for key, value in batch.items()}))
        losses.append(_mean(torch.tensor(mine, dtype=torch.float64, device=engine.device), group))
    return losses


def _micro_step(engine: Any, batch: Mapping[str, torch.Tensor]) -> float:
    with quiet():
        answer = engine(**{key: value.to(engine.device) for key, value in batch.items()})
        loss = answer if isinstance(answer, torch.Tensor) else answer.loss
        engine.backward(loss)
        engine.step()
    return float(loss.detach())


def _mean(mine: torch.Tensor, group: dist.ProcessGroup) -> float:
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return float(torch.stack(every).mean())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the deprecation notices that DeepSpeed and transformers draw, and without torch.compile, with which
    DeepSpeed's set-up would compile Muon, unused here, for seconds."""
    name = "TORCHDYNAMO_DISABLE"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before

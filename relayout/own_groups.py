"""DeepSpeed's process-wide groups, kept apart for engines over different ranks.

    grid = make_grid([0, 1, 2, 3], tensor_parallel=2)               # every rank of the world; for AutoTP and AutoEP
    groups = OwnGroups()                                            # the ranks of the engine
    unit = groups.parallel_unit(group, stage=1, grid=grid)
    with groups.entered():
        engine, *_ = deepspeed.initialize(..., mpu=unit)
    groups.follow(engine)

DeepSpeed keeps the groups of the last engine in ``deepspeed.utils.groups``: an engine over other ranks, or of another
tensor-parallel size, finds the wrong ones there, while it is built and (below ZeRO-3) in every step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch.nn import functional

from relaymeter.errors import InputError
from relaymeter.relayout import own_checkpoint

__all__ = ["Grid", "OwnGroups", "make_grid"]


@dataclass(frozen=True)
class Grid:
    """This rank's groups in a grid of tensor-parallel and data-parallel ranks, and in one of expert-parallel and
    expert-data-parallel ranks where there is no tensor parallelism."""

    degree: int
    tensor: dist.ProcessGroup
    data: dist.ProcessGroup
    expert_degree: int = 1
    expert: dist.ProcessGroup | None = None
    expert_data: dist.ProcessGroup | None = None

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Each group once: what to destroy when no engine uses the grid any more."""
        made = (self.tensor, self.data, self.expert, self.expert_data)
        return tuple({id(group): group for group in made if group is not None}.values())


def make_grid(
    ranks: Sequence[int], tensor_parallel: int = 1, *, expert_parallel: int = 1, time_limit_s: float | None = None
) -> Grid | None:
    """The groups of an AutoTP or AutoEP engine over ``ranks``: ``tensor_parallel`` (``expert_parallel``) neighbours
    share each layer (each layer's experts), ranks that are so far apart make a data-parallel group. None on a rank
    outside ``ranks``. Any number of engines, one after another or side by side, may use one grid.

    Every rank of the world calls this, in the same order as its other group makings. Raises InputError where DeepSpeed
    cannot train over such ranks.
    """
    wanted = sorted(int(rank) for rank in ranks)
    _check_grid(wanted, tensor_parallel, expert_parallel)
    limit = None if time_limit_s is None else timedelta(seconds=time_limit_s)

    def mine(degree: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup] | None:
        rows = [wanted[at : at + degree] for at in range(0, len(wanted), degree)]
        made = [(members, dist.new_group(members, timeout=limit)) for members in (*rows, *zip(*rows, strict=True))]
        found = [group for members, group in made if dist.get_rank() in members]
        return (found[0], found[1]) if found else None

    dense = mine(tensor_parallel)
    experts = mine(expert_parallel) if tensor_parallel == 1 and expert_parallel > 1 else dense
    if dense is None or experts is None:
        return None
    if tensor_parallel > 1:
        return Grid(tensor_parallel, *dense)
    return Grid(1, *dense, expert_parallel, *experts)


def _check_grid(wanted: Sequence[int], tensor_parallel: int, expert_parallel: int) -> None:
    first = wanted[0] if wanted else 0
    if tensor_parallel > 1 and expert_parallel > 1:
        raise InputError(
            f"tensor parallelism of {tensor_parallel} together with expert parallelism of {expert_parallel}: an engine "
            "has one of them here"
        )
    line = list(range(first, first + len(wanted)))
    degree = tensor_parallel
    uneven = degree > 1 and (list(wanted) != line or first % degree)
    if not wanted or len(set(wanted)) < len(wanted) or degree < 1 or len(wanted) % degree or uneven:
        raise InputError(
            f"tensor parallelism of {degree} over ranks {list(wanted)}: DeepSpeed needs neighbouring ranks, the first "
            f"and their number multiples of {degree}"
        )
    size, world = expert_parallel, dist.get_world_size()
    if size < 1 or len(wanted) % size or world % size:
        raise InputError(
            f"expert parallelism of {size} over ranks {list(wanted)} of {world}: DeepSpeed needs a degree that divides "
            "their number and that of all ranks of the world"
        )
    steps = {tuple(rank - wanted[at] for rank in wanted[at : at + size]) for at in range(0, len(wanted), size)}
    if len(steps) > 1:
        raise InputError(
            f"expert parallelism of {size} over ranks {list(wanted)}: every {size} neighbours need the same distances, "
            f"here {sorted(steps)}"
        )


class OwnGroups:
    """The process-wide groups and functions of one engine: clean at first, then as the engine left them."""

    def __init__(self) -> None:
        saved = self._current()
        self._linear = _plain_linear()
        kept = {"_WORLD_GROUP": saved["_WORLD_GROUP"], "expert_tensor_parallel_world_size": 1}
        self._own: dict[str, Any] = {n: {} if isinstance(v, dict) else kept.get(n) for n, v in saved.items()}

    @staticmethod
    def _current() -> dict[str, Any]:
        from deepspeed.utils import groups

        fixed = (FunctionType, ModuleType, type, str)
        found = {n: v for n, v in vars(groups).items() if not n.startswith("__") and not isinstance(v, fixed)}
        return found | {"mpu": groups.mpu}

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The engine's groups inside, the previous ones again afterwards; and its ``torch.nn.functional.linear``, which
        ZeRO-3 replaces for the whole process by one that rounds otherwise."""
        from deepspeed.utils import groups

        saved, linear = self._current(), functional.linear
        vars(groups).update(self._own)
        functional.linear = self._linear
        try:
            yield
        finally:
            self._own = {name: vars(groups)[name] for name in saved}
            self._linear = functional.linear
            vars(groups).update(saved)
            functional.linear = linear

    def follow(self, engine: Any) -> None:
        """Let the engine train, save and load among its own groups and ranks."""
        own_checkpoint.follow(engine)
        for name in ("forward", "backward", "step", *own_checkpoint.METHODS):
            setattr(engine, name, self._inside(getattr(engine, name)))

    def _inside(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def among_own_groups(*args: Any, **options: Any) -> Any:
            with self.entered():
                return method(*args, **options)

        return among_own_groups

    def parallel_unit(self, group: dist.ProcessGroup, stage: int, grid: Grid | None) -> Any:
        """What DeepSpeed asks of a model-parallel unit for an engine over ``group``. The group's ranks call this.

        A rank without tensor parallelism is model-parallel with itself: optimizers below ZeRO-3 reduce norms and
        overflows over that group, where none would mean the world. With a grid, AutoTP and AutoEP find their groups
        made already.
        """
        model: dist.ProcessGroup | None
        if grid is not None:
            model, data = grid.tensor, grid.data
            self._own |= _tensor_groups(grid) if grid.degree > 1 else _expert_groups(grid)
            if grid.degree == 1 and stage == 3:
                model = None
        else:
            data, model = group, None
            if stage < 3:
                model = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        columns = dist.get_process_group_ranks(data)
        return SimpleNamespace(
            get_data_parallel_group=lambda: data,
            get_data_parallel_group_ranks=lambda: list(columns),
            get_data_parallel_rank=lambda: dist.get_rank(data),
            get_data_parallel_world_size=lambda: len(columns),
            get_model_parallel_group=lambda: model,
            get_model_parallel_rank=lambda: 0 if model is None else dist.get_rank(model),
            get_model_parallel_world_size=lambda: 1 if grid is None else grid.degree,
            get_tensor_model_parallel_world_size=lambda: 1 if grid is None else grid.degree,  # universal checkpoints
        )


def _plain_linear() -> Callable[..., Any]:
    """torch's own linear function, also where a ZeRO-3 engine that was built otherwise has replaced it."""
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses

    found: Callable[..., Any] = getattr(InsertPostInitMethodToModuleSubClasses, "linear_bk", functional.linear)
    return found


def _tensor_groups(grid: Grid) -> dict[str, Any]:
    return {
        "_TENSOR_MODEL_PARALLEL_GROUP": grid.tensor,
        "_MODEL_PARALLEL_GROUP": grid.tensor,
        "_DATA_PARALLEL_GROUP": grid.data,
    }


def _expert_groups(grid: Grid) -> dict[str, Any]:
    """DeepSpeed finds groups of experts by a name that holds their degree, and makes none of a name that is there."""
    found: dict[str, Any] = {}
    for kind, group in (("_EXPERT_PARALLEL_GROUP", grid.expert), ("_EXPERT_DATA_PARALLEL_GROUP", grid.expert_data)):
        name = f"ep_size_{grid.expert_degree}"
        found |= {kind: {name: group}, f"{kind}_RANKS": {name: dist.get_process_group_ranks(group)}}
    return found

"""DeepSpeed's process-wide groups, kept apart for engines over different ranks.

    grid = make_grid([0, 1, 2, 3], tensor_parallel=2)               # every rank of the world; for AutoTP only
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

from relaymeter.errors import InputError

__all__ = ["Grid", "OwnGroups", "make_grid"]


@dataclass(frozen=True)
class Grid:
    """This rank's groups in a grid of tensor-parallel and data-parallel ranks."""

    degree: int
    tensor: dist.ProcessGroup
    data: dist.ProcessGroup


def make_grid(ranks: Sequence[int], tensor_parallel: int, *, time_limit_s: float | None = None) -> Grid | None:
    """The groups of an AutoTP engine over ``ranks``: ``tensor_parallel`` neighbours make a tensor-parallel group, ranks
    that are so far apart a data-parallel one. None on a rank outside ``ranks``.

    Every rank of the world calls this, in the same order as its other group makings. Raises InputError where DeepSpeed
    cannot train over such ranks.
    """
    wanted = sorted(int(rank) for rank in ranks)
    degree, first = tensor_parallel, wanted[0] if wanted else 0
    line = list(range(first, first + len(wanted)))
    if not wanted or wanted != line or degree < 1 or len(wanted) % degree or first % degree:
        raise InputError(
            f"tensor parallelism of {degree} over ranks {wanted}: DeepSpeed needs neighbouring ranks, the first and "
            f"their number multiples of {degree}"
        )
    limit = None if time_limit_s is None else timedelta(seconds=time_limit_s)
    rows = [line[at : at + degree] for at in range(0, len(line), degree)]
    made = [(members, dist.new_group(members, timeout=limit)) for members in (*rows, *zip(*rows, strict=True))]
    mine = [group for members, group in made if dist.get_rank() in members]
    return Grid(degree, mine[0], mine[1]) if mine else None


class OwnGroups:
    """The process-wide groups of one engine: clean at first, then as the engine left them."""

    def __init__(self) -> None:
        saved = self._current()
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
        """The engine's groups inside, the previous ones again afterwards."""
        from deepspeed.utils import groups

        saved = self._current()
        vars(groups).update(self._own)
        try:
            yield
        finally:
            self._own = {name: vars(groups)[name] for name in saved}
            vars(groups).update(saved)

    def follow(self, engine: Any) -> None:
        """Let the engine train among its own groups."""
        for name in ("forward", "backward", "step"):
            setattr(engine, name, self._inside(getattr(engine, name)))

    def _inside(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def among_own_groups(*args: Any, **options: Any) -> Any:
            with self.entered():
                return method(*args, **options)

        return among_own_groups

    def parallel_unit(self, group: dist.ProcessGroup, stage: int, grid: Grid | None) -> Any:
        """What DeepSpeed asks of a model-parallel unit for an engine over ``group``. The group's ranks call this.

        Without a grid a rank is model-parallel with itself: optimizers below ZeRO-3 reduce norms and overflows over
        that group, where none would mean the world. With one, AutoTP finds its groups made already.
        """
        model: dist.ProcessGroup | None
        if grid is not None:
            model, data = grid.tensor, grid.data
            self._own |= {
                "_TENSOR_MODEL_PARALLEL_GROUP": model,
                "_MODEL_PARALLEL_GROUP": model,
                "_DATA_PARALLEL_GROUP": data,
            }
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
        )

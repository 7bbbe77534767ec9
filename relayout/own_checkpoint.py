"""Checkpoints of an engine over some of the ranks: its own ranks save and load, the others stay out.

    follow(engine)                      # once; subgroup.initialize_over does it, through own_groups.OwnGroups.follow
    engine.save_checkpoint(folder)      # the engine's ranks; nothing is asked of any other rank
    engine.load_checkpoint(folder)      # the same

DeepSpeed up to 0.19.8 waits for the whole world before and after a save, compares the tag over the world, and leaves
what only one rank writes (the folder, ``latest``, tied names, a consolidated model, the recovery scripts) to rank 0 of
the world, which may not be in the engine. For the length of such a call the engine's ranks count from 0 and its
barriers and comparisons run among them, so that the files are those of a world that has these ranks only. A call that
names a group keeps it. Afterwards, also after an error, DeepSpeed's module is as before.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch.distributed as dist

from relaymeter.errors import InputError
from relaymeter.relayout.engine_reading import engine_groups, engine_ranks

__all__ = ["METHODS", "follow"]

#: The engine's methods that run among its own ranks.
METHODS = ("save_checkpoint", "load_checkpoint", "save_16bit_model")


class _OwnComm:
    """``deepspeed.comm`` in which the ranks of one engine are the world. ``groups``, one after the other, reach all of
    them; ``place`` is this rank's position among them."""

    def __init__(self, comm: ModuleType, groups: list[Any], place: int) -> None:
        self._comm, self._groups, self._place = comm, groups, place

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def get_rank(self, group: Any = None) -> int:
        return self._place if group is None else int(self._comm.get_rank(group))

    def barrier(self, group: Any = None, **options: Any) -> None:
        for one in self._groups if group is None else [group]:
            self._comm.barrier(group=one, **options)

    def all_reduce(self, tensor: Any, *args: Any, group: Any = None, **options: Any) -> Any:
        done = None
        for one in self._groups if group is None else [group]:
            done = self._comm.all_reduce(tensor, *args, group=one, **options)
        return done


@contextlib.contextmanager
def _among_own_ranks(engine: Any, place: int) -> Iterator[None]:
    from deepspeed.runtime import engine as namespace

    comm, rank = namespace.dist, engine.global_rank
    namespace.dist = _OwnComm(comm, engine_groups(engine), place)
    engine.global_rank = place
    try:
        yield
    finally:
        namespace.dist, engine.global_rank = comm, rank


def _refuse_world_only(engine: Any, ranks: int) -> None:
    """Raise InputError for settings with which DeepSpeed's checkpoints need every rank of the world."""
    if ranks == dist.get_world_size():
        return
    if engine.checkpoint_engine.is_decoupled():
        raise InputError("checkpoint.writer.decoupled waits for the whole world: leave it out on a part of it")
    if engine.zero_optimization() and engine._config.zero_config.pipeline_loading_checkpoint:
        raise InputError(
            "zero_optimization.pipeline_loading_checkpoint passes from each rank of the world to the next: leave it "
            "out on a part of it"
        )


def _own(engine: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def among_own_ranks(*args: Any, **options: Any) -> Any:
        members = sorted(rank for column in engine_ranks(engine) for rank in column)
        _refuse_world_only(engine, len(members))
        with _among_own_ranks(engine, members.index(dist.get_rank())):
            return method(*args, **options)

    return among_own_ranks


def follow(engine: Any) -> None:
    """Let ``engine`` save and load among its own ranks from now on. Each of its ranks calls this; no communication.

    Its ``save_checkpoint``, ``load_checkpoint`` and ``save_16bit_model`` then raise InputError, before anything is
    written, where the config asks for a way of saving that needs the whole world.
    """
    for name in METHODS:
        setattr(engine, name, _own(engine, getattr(engine, name)))

"""The same change through a DeepSpeed universal checkpoint: save, convert, build the other engine, load.

    def build(extra):                                       # every rank; an engine, or None on a rank without it
        return build_engine(config | extra)

    engine = through_universal(source, build, folder)       # every rank of the world; source None on ranks without

The steps of their own, for jobs that end in between: ``save_universal`` and ``load_universal`` on every rank,
``convert_universal`` in one process. What DeepSpeed cannot convert or load ends in ``UniversalRefused`` on every rank,
with what DeepSpeed says. The files of ``through_universal`` lie in a folder of their own inside ``folder``, which all
ranks must reach, and are removed, after an error too.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch.distributed as dist

from relaymeter.errors import InputError
from relaymeter.harness.paths.together import attempt_together
from relaymeter.relayout.announce import Assembly

__all__ = [
    "UNIVERSAL",
    "UniversalRefused",
    "convert_universal",
    "load_universal",
    "save_universal",
    "through_universal",
    "universal_folder",
]

#: What the config of the destination engine needs besides its own entries.
UNIVERSAL: Mapping[str, Any] = MappingProxyType({"checkpoint": {"load_universal": True}})

#: Steps that are no doing of DeepSpeed's checkpoints.
_OURS = ("making a folder", "building the destination")
_SAVED, _CONVERTED = "saved", "converted"
#: What ``python -m deepspeed.checkpoint.ds_to_universal`` takes where it is told nothing.
_EXTRACT_WORKERS, _MERGE_WORKERS = 4, 2
_T = TypeVar("_T")


class UniversalRefused(InputError):
    """DeepSpeed cannot make this change through a universal checkpoint: names the step that failed and what it says."""


def through_universal(
    source: Any | None,
    build_destination: Callable[[Mapping[str, Any]], Any | None],
    folder: str | os.PathLike[str],
    *,
    group: dist.ProcessGroup | None = None,
) -> Any | None:
    """The destination engine with the training state of ``source``, or None on a rank without it.

    Every rank of ``group`` (default: the world) calls this. ``source`` is the trained engine, None on ranks without it;
    it stays as it is. ``build_destination(extra)`` builds the other engine, None on ranks without it, from its own
    config with ``extra`` (``UNIVERSAL``) added; every rank of the group calls it too. ``folder`` exists on all ranks.

    What arrives is what DeepSpeed restores: masters, Adam moments and steps, groups' settings (under ZeRO-3 the first
    group's for all), scheduler, global counters and scaler. Frozen weights, buffers and ``micro_steps`` stay what the
    destination was built with. Raises UniversalRefused on every rank alike where DeepSpeed cannot save, convert or
    load, InputError where the folder cannot be used or the destination cannot be built. An error on one rank of an
    engine alone may leave its others waiting up to their groups' time limit.
    """
    ranks, place = Assembly(group), dist.get_rank(group)
    folders = _together(
        ranks, "making a folder", lambda: tempfile.mkdtemp(prefix="universal-", dir=folder) if place == 0 else ""
    )
    work = ranks.tell_all(folders)[0]
    try:
        first = save_universal(source, work, group=group)
        _together(ranks, "converting", lambda: convert_universal(work, workers=1) if place == first else None)
        engine = _together(ranks, "building the destination", lambda: build_destination(UNIVERSAL))
        load_universal(engine, work, group=group)
        return engine
    finally:
        if place == 0:
            shutil.rmtree(work, ignore_errors=True)


def save_universal(
    source: Any | None, folder: str | os.PathLike[str], *, group: dist.ProcessGroup | None = None
) -> int:
    """Save what ``convert_universal`` converts, into ``folder``; returns the first rank of the group with the engine.

    Every rank of the group calls this, as ``through_universal``, and it raises the same.
    """
    ranks = Assembly(group)
    holders = [rank for rank, has in enumerate(ranks.tell_all(source is not None)) if has]
    if not holders:
        raise InputError("no rank of the group gave a source engine: the ranks that hold it hand it in")
    _together(ranks, "saving", lambda: None if source is None else source.save_checkpoint(str(folder), tag=_SAVED))
    return holders[0]


def load_universal(
    engine: Any | None, folder: str | os.PathLike[str], *, group: dist.ProcessGroup | None = None
) -> None:
    """Load what ``convert_universal`` made into an engine that was built with ``UNIVERSAL``, None on a rank without it.

    Every rank of the group calls this. Raises as ``through_universal``.
    """
    _together(Assembly(group), "loading", lambda: None if engine is None else _load(engine, str(folder)))


def universal_folder(folder: str | os.PathLike[str]) -> Path:
    """Where ``convert_universal`` leaves what is loaded."""
    return Path(folder) / _CONVERTED


def _together(ranks: Assembly, step: str, action: Callable[[], _T]) -> _T:
    refusal = InputError if step in _OURS else UniversalRefused
    return attempt_together(action, ranks, f"no way through a universal checkpoint, {step} fails", refusal=refusal)


def convert_universal(folder: str | os.PathLike[str], *, workers: int | None = None) -> None:
    """DeepSpeed's own converter, in this process, over what ``save_universal`` left in ``folder``.

    ``workers``: processes that extract, and that merge; with 1 it starts none, None: as many as DeepSpeed's command
    takes by default. Raises whatever DeepSpeed raises.
    """
    from deepspeed.checkpoint import ds_to_universal

    work = Path(folder)
    arguments = Namespace(
        input_folder=str(work / _SAVED),
        output_folder=str(work / _CONVERTED),
        num_extract_workers=workers or _EXTRACT_WORKERS,
        num_merge_workers=workers or _MERGE_WORKERS,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ds_to_universal.main(arguments)


def _load(engine: Any, work: str) -> None:
    if not engine.load_universal_checkpoint():
        raise InputError("the destination's config lacks checkpoint.load_universal: build it with the entries given")
    if not engine._get_all_ckpt_names(work, _CONVERTED):
        wanted = Path(engine._get_ckpt_name(work, _CONVERTED, mp_placeholder="*", pp_placeholder="0")).name
        raise FileNotFoundError(
            f"ZeRO-{engine.zero_optimization_stage()} looks for {wanted}, which the converter does not make of a "
            "checkpoint of the source's ZeRO stage: DeepSpeed names the files of ZeRO-3 otherwise than those below it"
        )
    path, _ = engine.load_checkpoint(work, tag=_CONVERTED)
    if path is None:
        raise InputError("engine.load_checkpoint found nothing that it can load")

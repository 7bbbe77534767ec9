"""The same change through a DeepSpeed universal checkpoint: save, convert, build the other engine, load.

    def build(extra):                                       # every rank; an engine, or None on a rank without it
        return build_engine(config | extra)

    engine = through_universal(source, build, folder)       # every rank of the world; source None on ranks without

What DeepSpeed cannot convert or load ends in ``UniversalRefused`` on every rank, with what DeepSpeed says. The files
lie in a folder of their own inside ``folder``, which all ranks must reach, and are removed, after an error too.
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

__all__ = ["UNIVERSAL", "UniversalRefused", "through_universal"]

#: What the config of the destination engine needs besides its own entries.
UNIVERSAL: Mapping[str, Any] = MappingProxyType({"checkpoint": {"load_universal": True}})

#: Steps that are no doing of DeepSpeed's checkpoints.
_OURS = ("making a folder", "building the destination")
_SAVED, _CONVERTED = "saved", "converted"
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

    def together(step: str, action: Callable[[], _T]) -> _T:
        refusal = InputError if step in _OURS else UniversalRefused
        return attempt_together(action, ranks, f"no way through a universal checkpoint, {step} fails", refusal=refusal)

    folders = together(
        "making a folder", lambda: tempfile.mkdtemp(prefix="universal-", dir=folder) if place == 0 else ""
    )
    work = ranks.tell_all(folders)[0]
    try:
        holders = [rank for rank, has in enumerate(ranks.tell_all(source is not None)) if has]
        if not holders:
            raise InputError("no rank of the group gave a source engine: the ranks that hold it hand it in")
        together("saving", lambda: None if source is None else source.save_checkpoint(work, tag=_SAVED))
        together("converting", lambda: _convert(Path(work)) if place == holders[0] else None)
        engine = together("building the destination", lambda: build_destination(UNIVERSAL))
        together("loading", lambda: None if engine is None else _load(engine, work))
        return engine
    finally:
        if place == 0:
            shutil.rmtree(work, ignore_errors=True)


def _convert(work: Path) -> None:
    """DeepSpeed's own converter, in this process: without workers of its own it starts none."""
    from deepspeed.checkpoint import ds_to_universal

    arguments = Namespace(
        input_folder=str(work / _SAVED),
        output_folder=str(work / _CONVERTED),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ds_to_universal.main(arguments)


def _load(engine: Any, work: str) -> None:
    if not engine.load_universal_checkpoint():
        raise InputError("the destination's config lacks checkpoint.load_universal: build it with the entries given")
    path, _ = engine.load_checkpoint(work, tag=_CONVERTED)
    if path is None:
        raise InputError("engine.load_checkpoint found nothing that it can load")

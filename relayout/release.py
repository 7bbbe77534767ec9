"""An idle engine gives its memory back, and takes it up again.

    freed = release(engine)      # bytes on this rank; every rank of the engine, each for itself
    ...                          # another engine uses the memory
    restore(engine)              # memory again, filled with zeros: now a training state has to move into it

Dropped is what a move of the training state brings back: weights and persistent buffers (flat buffers, ZeRO-3
partitions, gathered copies), masters, optimizer states of one value per weight; and what holds nothing between two
steps: gradients and the buffers that reduce them.

The storage behind a tensor is given back, not the tensor: a parameter and every view of it, whoever holds them, keep
their metadata and show the new memory after ``restore``. So old references keep no memory, and nothing of DeepSpeed has
to be found or built again. In between there is nothing behind them: reading such a tensor directly ends the process on
a CPU and is an illegal access on a GPU. The engine's own methods, its module and the readers in ``engines`` refuse;
the methods that train or save go on refusing until the engine is ``filled``, as ``TrainingStateMove.run`` says itself.

What stays: non-persistent buffers, steps and other scalars, optimizer states of another form than the weights, host
copies that DeepSpeed keeps after an offload, activations, communication buffers of the backend. After ``restore`` the
engine holds what it held before, less ZeRO-3's gathered copies, which its next forward pass makes; while ``restore``
runs they count too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from relaymeter.errors import InputError
from relaymeter.relayout.engine_reading import engine_tensors, master_groups, zero_stage
from relaymeter.relayout.engines import refresh_weights
from relaymeter.relayout.idle import nested_tensors, refuse_busy

__all__ = ["filled", "hollow", "release", "released", "restore"]

#: Where a released engine keeps what ``restore`` needs.
_RECORD = "_relaymeter_released"
#: Where an engine that was restored and not filled yet keeps its guards.
_HOLLOW = "_relaymeter_hollow"
#: What the readers in ``engines`` ask an engine before anything else.
_ASKED_BY_READERS = "zero_optimization_stage"
_SPOKEN = {_ASKED_BY_READERS: "whoever reads its state"}
#: Methods that need the memory.
_GUARDED = (
    "forward",
    "backward",
    "step",
    "eval_batch",
    "train_batch",
    "allreduce_gradients",
    "save_checkpoint",
    "load_checkpoint",
    "save_16bit_model",
    "offload_states",
    "reload_states",
    _ASKED_BY_READERS,
)
#: Methods that need contents too.
_NEED_CONTENTS = ("forward", "backward", "step", "eval_batch", "train_batch", "save_checkpoint", "save_16bit_model")
#: Attributes of DeepSpeed's optimizers that hold gradients: tensors, lists and dicts of them, buckets.
_GRADIENTS = (
    "averaged_gradients",
    "all_grad_tensors",
    "grads_in_partition",
    "grad_partitions_flat_buffer",
    "ipg_buckets",
    "fp32_groups_gradients_flat",
)

_Named = tuple[str, torch.Tensor]


@dataclass(eq=False)
class _Part:
    """A storage that was dropped, and how many bytes it had."""

    storage: torch.UntypedStorage
    nbytes: int


@dataclass(eq=False)
class _Record:
    """What a released engine lacks, and what stands in its methods' place: name, guard, earlier instance attribute."""

    parts: list[_Part] = field(default_factory=list)
    gathered: list[_Part] = field(default_factory=list)
    guards: list[tuple[str, Any, Any]] = field(default_factory=list)
    hook: Any = None


def released(engine: Any) -> bool:
    """Whether the engine has given its memory back on this rank. Local."""
    return _RECORD in vars(engine)


def release(engine: Any) -> int:
    """Drop the storages of the engine's training state on this rank; the bytes that were given back, each storage once.

    Local; every rank of the engine calls it, between two steps. The allocator has the bytes when it returns. Raises
    InputError, with nothing changed, for an engine that is released already, has offloaded states or is configured to,
    is inside an accumulation window, or keeps weights in memory that cannot be given back (shared memory, mapped file).
    """
    if released(engine):
        raise InputError("the engine is released already: call restore(engine) before the next release")
    stage = zero_stage(engine)
    refuse_busy(engine, "release it")
    kept = {_key(buffer) for buffer in _kept_buffers(engine.module)}
    parts = _parts(_state_tensors(engine), kept)
    gathered = _parts(_gathered_copies(engine), kept | {_key_of(part.storage) for part in parts}) if stage == 3 else []
    accelerator = _accelerator()
    accelerator.synchronize()
    refresh_weights(engine)
    for part in (*parts, *gathered):
        part.storage.resize_(0)
    filled(engine)  # its guards give way to those of a released engine
    record = _Record(parts, gathered)
    vars(engine)[_RECORD] = record
    _guard(engine, record)
    accelerator.empty_cache()
    return sum(part.nbytes for part in (*parts, *gathered))


def restore(engine: Any) -> None:
    """Give a released engine memory again, filled with zeros.

    Local; every rank of the engine calls it. It is ``hollow`` then: training and saving are refused until a
    ``TrainingStateMove`` has run into it, or whoever filled it in another way, low-precision weights included, calls
    ``filled``. Raises InputError for an engine that is not released; where memory is short, the allocator's error, and
    the engine stays released.
    """
    record = vars(engine).get(_RECORD)
    if record is None:
        raise InputError("the engine is not released: call release(engine) first")
    done: list[_Part] = []
    try:
        for part in (*record.gathered, *record.parts):
            done.append(part)
            part.storage.resize_(part.nbytes)
            part.storage.fill_(0)
    except BaseException:
        for part in done:
            part.storage.resize_(0)
        raise
    _accelerator().synchronize()
    del vars(engine)[_RECORD]
    _take_away(engine, record.guards)
    record.hook.remove()
    text = (
        "the engine was restored and is still empty, so {name} has nothing to work on: run a TrainingStateMove into "
        "it, or call relaymeter.relayout.release.filled(engine) once you have filled it otherwise"
    )
    vars(engine)[_HOLLOW] = _put_guards(engine, _NEED_CONTENTS, text, hollow)


def hollow(engine: Any) -> bool:
    """Whether the engine was restored on this rank and nothing has filled it since. Local."""
    return _HOLLOW in vars(engine)


def filled(engine: Any) -> None:
    """Let a restored engine train and save again: its weights, masters and optimizer states have contents. Local;
    nothing happens where the engine is not ``hollow``."""
    _take_away(engine, vars(engine).pop(_HOLLOW, []))


_Guards = list[tuple[str, Any, Any]]


def _take_away(engine: Any, guards: _Guards) -> None:
    for name, guard, earlier in guards:
        if vars(engine).get(name) is guard:
            del vars(engine)[name]
            if earlier is not None:
                vars(engine)[name] = earlier


def _put_guards(engine: Any, names: Iterable[str], text: str, stands: Callable[[Any], bool]) -> _Guards:
    """Let the engine's methods ``names`` raise InputError while ``stands(engine)``; what ``_take_away`` takes away."""

    def guarded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def refuse(*args: Any, **options: Any) -> Any:
            if stands(engine):
                raise InputError(text.format(name=_SPOKEN.get(name, name)))
            return method(*args, **options)  # something that was wrapped around the guard still calls it

        return refuse

    guards: _Guards = []
    for name in names:
        method = getattr(engine, name, None)
        if method is not None:
            guard = guarded(name, method)
            guards.append((name, guard, vars(engine).get(name)))
            vars(engine)[name] = guard
    return guards


def _accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


def _kept_buffers(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for part in module.modules():
        for name in part._non_persistent_buffers_set:
            buffer = part._buffers.get(name)
            if buffer is not None:
                yield buffer


def _state_tensors(engine: Any) -> Iterator[_Named]:
    """Every tensor whose storage is dropped, ZeRO-3's gathered copies left out; several may share one."""
    for held in engine_tensors(engine)[0]:
        yield held.name, held.tensor.ds_tensor if held.partitioned else held.tensor
        for name in ("grad", "grad_accum"):
            for gradient in nested_tensors(getattr(held.tensor, name, None)):
                yield f"gradient of {held.name}", gradient
    optimizer = engine.optimizer
    for name in _GRADIENTS:
        for gradient in nested_tensors(getattr(optimizer, name, None)):
            yield name, gradient
    if optimizer is None or not hasattr(optimizer, "param_groups"):
        return
    states = getattr(optimizer, "optimizer", optimizer).state
    for group in master_groups(engine)[1]:
        for name, flat in zip(group.names, group.flats, strict=True):
            yield f"master of {name}", flat
            for gradient in nested_tensors(flat.grad):
                yield f"gradient of the master of {name}", gradient
            for key, kept in states.get(flat, {}).items():
                moves = isinstance(kept, torch.Tensor) and kept.dim() and kept.numel() == flat.numel()
                if moves and kept.device == flat.device:
                    yield f"{key} of {name}", kept


def _gathered_copies(engine: Any) -> Iterator[_Named]:
    """Whole parameters that ZeRO-3 holds at the moment, and its second partitions within a node."""
    for name, param in engine.module.named_parameters():
        if param.ds_status.name == "AVAILABLE":
            yield name, param.data
        for second in nested_tensors(getattr(param, "ds_secondary_tensor", None)):
            yield name, second


def _key_of(storage: torch.UntypedStorage) -> tuple[torch.device, int]:
    return storage.device, storage.data_ptr()


def _key(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return _key_of(tensor.untyped_storage())


def _parts(tensors: Iterator[_Named], kept: set[tuple[torch.device, int]]) -> list[_Part]:
    """The storages of ``tensors``, each once, without those in ``kept``. Raises InputError for one that cannot go."""
    found: dict[tuple[torch.device, int], _Part] = {}
    for name, tensor in tensors:
        storage = tensor.untyped_storage()
        key, size = _key_of(storage), storage.nbytes()
        if not size or key in found or key in kept:
            continue
        shared = storage.device.type == "cpu" and storage.is_shared()
        if shared or not storage.resizable():
            raise InputError(
                f"{name} {list(tensor.shape)} lies in memory that cannot be given back (shared memory, a mapped file "
                "or another library's): give the model a copy of it before the engine is built"
            )
        found[key] = _Part(storage, size)
    return list(found.values())


def _guard(engine: Any, record: _Record) -> None:
    """Let what needs the memory raise InputError until ``restore``, which takes every guard away again."""
    text = (
        "the engine has given its memory back, so {name} has nothing to work on: call "
        "relaymeter.relayout.release.restore(engine) first; a training state has to move into it before it trains"
    )
    record.guards += _put_guards(engine, _GUARDED, text, released)

    def hook(*_: Any) -> None:
        raise InputError(text.format(name="its module"))

    record.hook = engine.module.register_forward_pre_hook(hook, prepend=True)

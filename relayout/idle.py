"""Whether an engine is between two steps with its whole state in its own memory, as a move and a release need it.

``refuse_busy(engine, "release it")`` on a rank that holds the engine; no communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from relaymeter.errors import InputError

__all__ = ["nested_tensors", "refuse_busy"]


def refuse_busy(engine: Any, what: str) -> None:
    """Raise InputError where the engine is configured to offload, has offloaded states, is inside an accumulation
    window, counted by DeepSpeed or by the caller, or holds gradients of a backward pass. ``what``: what is to be done
    with it, for the text. Local."""
    for key, config in (("optimizer", engine.zero_offload_optimizer()), ("param", engine.zero_offload_param())):
        device = getattr(config, "device", None) or "none"
        device = getattr(device, "value", device)
        if device != "none":
            raise InputError(
                f"zero_optimization.offload_{key}.device is {device!r}: such an engine keeps its state outside the "
                "device's memory; build it without offload"
            )
    gone = sorted(getattr(kind, "value", str(kind)) for kind in getattr(engine.optimizer, "offloaded_states", ()))
    if gone:
        raise InputError(f"the engine has offloaded its {', '.join(gone)}: call engine.reload_states() first")
    steps = int(engine.gradient_accumulation_steps())
    inside = engine.micro_steps % steps if engine.managed_gradient_accumulation() else engine._unmanaged_backward_count
    if inside:
        raise InputError(
            f"the engine is inside an accumulation window ({inside} of {steps} micro-batches): {what} after the step "
            "that ends the window"
        )
    waiting = _waiting_gradients(engine)
    if waiting:
        raise InputError(f"gradients wait for a step ({waiting}): {what} after engine.step()")


def _waiting_gradients(engine: Any) -> str:
    """Where gradients of a backward pass wait, or nothing. ZeRO and BF16_Optimizer keep their own, so that what stands
    in a parameter's ``grad`` there is left over from before."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "averaged_gradients"):
        names = ("averaged_gradients", "all_grad_tensors")
        return next((name for name in names if any(True for _ in nested_tensors(getattr(optimizer, name, None)))), "")
    flags = getattr(optimizer, "fp32_groups_has_gradients", None)
    if flags is not None:
        return "fp32_groups_has_gradients" if any(any(group) for group in flags) else ""
    return next((name for name, param in engine.module.named_parameters() if param.grad is not None), "")


def nested_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested lists and dicts, and in DeepSpeed's buckets."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from nested_tensors(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from nested_tensors(entry)
    elif hasattr(value, "buffer"):
        yield from nested_tensors(value.buffer)

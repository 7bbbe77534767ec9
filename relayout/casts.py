"""Casts: conversions between dtypes whose bits do not depend on how they are made.

``convert(storage, torch.bfloat16)`` rounds to nearest, ties to even, as torch's ``copy_`` does. What torch makes of a
NaN depends on strides and lengths (0xffff or 0x7fc0 in bfloat16), so every NaN becomes the one that
``float("nan")`` is: a move gives the same bits whatever its buckets and layouts.
"""

from __future__ import annotations

import torch

__all__ = ["convert", "settle_nan"]

#: Dtypes in which torch makes different NaNs; those of 8 bits have come out alike on every path.
_UNSETTLED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def convert(storage: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``storage`` in another dtype, bit for bit as a move that casts makes it."""
    made = storage.to(dtype)
    if made is not storage:
        settle_nan(made)
    return made


def settle_nan(tensor: torch.Tensor) -> None:
    """Give every NaN of a converted ``tensor`` the bits of ``float("nan")``, in place."""
    if tensor.dtype not in _UNSETTLED:
        return
    # a sum is NaN where an element is; on CPUs that is asked first, because it costs a tenth of the search
    if tensor.device.type != "cpu" or bool(tensor.sum().isnan()):
        tensor.masked_fill_(tensor != tensor, float("nan"))

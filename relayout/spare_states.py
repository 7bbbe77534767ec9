"""Spare states: what a destination's optimizer lacks, allocated aside, so that the engine is as it was until a move.

    spare = SpareStates()
    spare.allocate(engine, wanted)          # bytes; the engine may go on training, be saved, be the source of a move
    spare.attach(engine)                    # from here on the optimizer has them

``wanted`` is ``training_match.expected_fields``. Local to a rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from relaymeter.relayout.engine_reading import master_fragments
from relaymeter.relayout.layout import ITEMSIZE
from relaymeter.relayout.training_fields import base_optimizer, state_tensors

__all__ = ["SpareStates", "missing_bytes"]


def _lacking(engine: Any | None, wanted: Mapping[str, Any]) -> Iterator[tuple[torch.Tensor, str, torch.dtype]]:
    """Each state of one value per weight that ``wanted`` asks for and the optimizer does not have in that form: the
    master that it is kept by, its name, its dtype."""
    if engine is None:
        return
    held = {id(part.flat): part.name for part in master_fragments(engine)}
    for (flat, state), names in zip(state_tensors(engine), wanted["homes"], strict=True):
        first = names[0] if names else held.get(id(flat), "")
        for key, dtypes in wanted["per_weight"].items():
            if first in dtypes and not _fits(flat, state.get(key), getattr(torch, dtypes[first])):
                yield flat, key, getattr(torch, dtypes[first])


def _fits(flat: torch.Tensor, kept: Any, dtype: torch.dtype) -> bool:
    return isinstance(kept, torch.Tensor) and kept.shape == flat.shape and kept.dtype == dtype


def missing_bytes(engine: Any | None, wanted: Mapping[str, Any]) -> int:
    """Bytes of what the engine's optimizer lacks on this rank; 0 without an engine."""
    return sum(
        flat.numel() * ITEMSIZE[str(dtype).removeprefix("torch.")] for flat, _, dtype in _lacking(engine, wanted)
    )


class SpareStates:
    """Tensors that stand in for the states that an optimizer lacks, until they are attached to it."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]] = {}  # with the master, which keeps its id

    def of(self, flat: torch.Tensor, key: str) -> torch.Tensor | None:
        """The spare of the state ``key`` that is kept by the master ``flat``; None where there is none."""
        found = self._held.get((id(flat), key))
        return None if found is None else found[1]

    def suffice(self, engine: Any | None, wanted: Mapping[str, Any]) -> bool:
        """Whether they are just what the engine lacks now."""
        lacking = list(_lacking(engine, wanted))
        return len(lacking) == len(self._held) and all(
            _fits(flat, self.of(flat, key), dtype) for flat, key, dtype in lacking
        )

    def allocate(self, engine: Any | None, wanted: Mapping[str, Any]) -> int:
        """Make those that are missing still (zeros), and give up those that the engine lacks no longer. Returns the
        bytes allocated."""
        found: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]] = {}
        allocated = 0
        for flat, key, dtype in _lacking(engine, wanted):
            spare = self.of(flat, key)
            if spare is None or not _fits(flat, spare, dtype):
                spare = torch.zeros_like(flat, dtype=dtype, requires_grad=False)
                allocated += spare.nbytes
            found[id(flat), key] = flat, spare
        self._held = found
        return allocated

    def attach(self, engine: Any | None) -> None:
        """Give them to the engine's optimizer; none is left then."""
        if engine is not None:
            state = base_optimizer(engine).state
            for (_, key), (flat, spare) in self._held.items():
                state[flat][key] = spare
        self._held = {}

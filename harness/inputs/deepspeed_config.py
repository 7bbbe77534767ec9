"""A DeepSpeed JSON config -> how its engine lays weights out; what is laid out in ways not known here is refused.

``read_trainer(Path("ds_train.json"))``. Keys are those of DeepSpeed 0.19.8; keys that change no layout are not read.
DeepSpeed is not imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relaymeter.errors import InputError
from relaymeter.harness.config import nearest
from relaymeter.harness.inputs.autotp import PRESETS, Pattern
from relaymeter.records import load_json
from relaymeter.row_fields import shown

__all__ = ["Trainer", "read_trainer"]

#: Each needs a layout that is not built here: the key, and what to do.
_REFUSED = (
    ("zero_optimization", "zero_hpz_partition_size", 1, "a second copy of the weights lies in each node (hpZ)"),
    ("zero_optimization", "mics_shard_size", -1, "weights are sharded over a part of the ranks (MiCS)"),
    ("zero_optimization", "zero_quantized_nontrainable_weights", False, "frozen weights are kept in 8 bits"),
    ("expert_parallel", "expert_tensor_parallel_size", 1, "experts are cut themselves"),
    (None, "use_data_before_expert_parallelism", False, "the ranks of experts are ordered otherwise"),
    ("tensor_parallel", "injection_policy_tuple", None, "cuts are named by layers"),
    ("data_types", "buffer_dtype", None, "buffers are kept in another dtype"),
)


_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """``stage``: of ZeRO. ``tensor_parallel``, ``expert_parallel``: degrees (0: experts are weights like others).
    ``dtype``: of the weights, None: the model's. ``patterns``, ``vocab_parallel_head``, ``grain``: of AutoTP.
    ``notes``: what was assumed, a line each."""

    stage: int
    tensor_parallel: int = 1
    expert_parallel: int = 0
    dtype: str | None = None
    patterns: tuple[Pattern, ...] | None = None
    vocab_parallel_head: bool | None = None
    grain: int = 1
    notes: Sequence[str] = ()

    @property
    def label(self) -> str:
        """In words: ``ZeRO-3, AutoTP 2``."""
        parts = [f"ZeRO-{self.stage}" if self.stage else "no ZeRO"]
        if self.tensor_parallel > 1:
            parts.append(f"AutoTP {self.tensor_parallel}")
        if self.expert_parallel:
            parts.append(f"AutoEP {self.expert_parallel}")
        return ", ".join(parts)


class _Section:
    """A part of the config, every error with its place."""

    def __init__(self, entry: Any, where: str) -> None:
        if not isinstance(entry, dict):
            raise InputError(f"{where} = {shown(entry)} is no JSON object")
        self.entry, self.where = entry, where

    def part(self, key: str) -> _Section:
        found = self.entry.get(key)
        return _Section({} if found is None else found, f"{self.where}, {key}")

    def count(self, key: str, default: int, most: int | None = None, least: int = 0) -> int:
        found = self.entry.get(key)
        found = default if found is None else found
        if type(found) is not int or found < least or (most is not None and found > most):
            to = "" if most is None else f" to {most}"
            hint = "; the launcher fills 'auto' in: write the number" if found == "auto" else ""
            what = f"a whole number {least}{to or ' or more'}"
            raise InputError(f"{self.where}: {key} = {shown(found)} is not {what}{hint}")
        return found

    def flag(self, key: str) -> bool | None:
        """True, false, or None for a key that is missing or ``"auto"``."""
        found = self.entry.get(key)
        if found is None or found == "auto":
            return None
        if not isinstance(found, bool):
            raise InputError(f"{self.where}: {key} = {shown(found)} is not true or false")
        return found


def read_trainer(path: Path) -> Trainer:
    """The trainer that a DeepSpeed config describes. Raises InputError naming file, key, value and what is valid."""
    config = _Section(load_json(path, "DeepSpeed config"), f"DeepSpeed config {path}")
    _refuse(config)
    zero = config.part("zero_optimization")
    notes: list[str] = []
    stage = zero.count("stage", 0, most=3)
    offload = zero.entry.get("offload_param")
    if isinstance(offload, Mapping) and offload.get("device") not in (None, "none"):
        notes.append(
            f"offload_param: weights rest on {shown(offload.get('device'))}; the copy to the GPU is not planned"
        )
    tensor, expert = config.part("tensor_parallel"), config.part("expert_parallel")
    inner = tensor.part("tp")
    degree = max(tensor.count("autotp_size", 0), 1)
    if inner.count("tp_size", 1) not in (1, degree):
        raise InputError(f"{inner.where}: tp_size = {inner.entry['tp_size']}, but autotp_size is {degree}")
    experts = expert.count("autoep_size", 1, least=1) if expert.flag("enabled") else 0
    return Trainer(
        stage=stage,
        tensor_parallel=degree,
        expert_parallel=experts,
        dtype=_dtype(config, notes),
        patterns=_patterns(tensor),
        vocab_parallel_head=tensor.flag("vocab_parallel_lm_head"),
        grain=inner.count("tp_grain_size", 1, least=1),
        notes=tuple(notes),
    )


def _refuse(config: _Section) -> None:
    for section, key, plain, why in _REFUSED:
        part = config if section is None else config.part(section)
        found = part.entry.get(key)
        if found not in (None, plain) and not (found == 0 and plain in (1, -1)):
            raise InputError(f"{part.where}: {key} = {shown(found)}: {why}, which is not planned here: leave it out")


def _dtype(config: _Section, notes: list[str]) -> str | None:
    asked = {}
    for name, keys in (("bfloat16", ("bf16", "bfloat16")), ("float16", ("fp16",))):
        for key in keys:
            part = config.part(key)
            if part.entry.get("enabled") == "auto":
                notes.append(f'{key}.enabled is "auto": the dtype of the model is taken')
            elif part.flag("enabled"):
                asked[key] = name
    if len(set(asked.values())) > 1:
        raise InputError(f"{config.where}: {' and '.join(asked)} are both enabled: DeepSpeed takes one of them")
    kept = config.part("data_types").entry.get("param_dtype")
    if kept is not None:
        if str(kept) not in _DTYPES:
            raise InputError(f"{config.where}, data_types: param_dtype {shown(kept)}: {nearest(str(kept), _DTYPES)}")
        return _DTYPES[str(kept)]
    return next(iter(asked.values()), None)


def _patterns(tensor: _Section) -> tuple[Pattern, ...] | None:
    """What the config itself says of cuts, None where it says nothing; its own patterns come before a preset's."""
    preset = tensor.entry.get("preset_model")
    base = None if preset is None else PRESETS.get(str(preset).lower())
    if preset is not None and base is None:
        raise InputError(f"{tensor.where}: preset_model {shown(preset)}: {nearest(str(preset), PRESETS)}")
    given = tensor.entry.get("partition_config")
    if given is None:
        return base
    part = tensor.part("partition_config")
    layers = part.entry.get("layer_specs", [])
    if not isinstance(layers, list):
        raise InputError(f"{part.where}: layer_specs {shown(layers)} is no list")
    own = tuple(pattern for number, layer in enumerate(layers) for pattern in _layer(part, number, layer))
    return own if base is None or part.flag("use_default_specs") is False else (*own, *base)


def _layer(part: _Section, number: int, entry: Any) -> list[Pattern]:
    layer = _Section(entry, f"{part.where}, layer_specs[{number}]")
    for key in ("shape", "partition_dim", "model_types"):
        if layer.entry.get(key) is not None:
            raise InputError(f"{layer.where}: {key} is not planned here: plan that layout from a live engine")
    kind = layer.entry.get("partition_type", "column")
    if not isinstance(kind, str) or kind.lower() not in ("column", "row", "skip"):
        raise InputError(f"{layer.where}: partition_type {shown(kind)}: valid: column, row, skip")
    texts = layer.entry.get("patterns", [])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InputError(f"{layer.where}: patterns {shown(texts)} is no list of regular expressions")
    for text in texts:
        try:
            re.compile(text)
        except re.error as error:
            raise InputError(f"{layer.where}: pattern {text!r} is no regular expression: {error}") from error
    return [Pattern(text, kind.lower()) for text in texts]

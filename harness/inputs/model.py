"""A model's weights as ``plan --model`` needs them, read from a config.json, from safetensors headers or off a module.

``read_model(Path("models/qwen3-8b"))`` reads a folder or a file, ``module_model(module)`` a live torch.nn.Module. Only
metadata is read: never a tensor's bytes, never a pickle. No torch import.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from relaymeter.errors import InputError
from relaymeter.harness.inputs.families import Sizes, family_of, family_weights
from relaymeter.harness.inputs.safetensors_headers import Header, read_headers
from relaymeter.records import load_json
from relaymeter.relayout.layout import ITEMSIZE, TensorSpec
from relaymeter.units import counted

__all__ = ["Model", "expert_of", "is_fused", "module_model", "name_some", "read_model"]

_CONFIG = "config.json"
_INDEX = ".safetensors.index.json"
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_FUSED = re.compile(r"\.experts\.(gate_up_proj|gate_proj|up_proj|down_proj|w1|w2|w3)(_bias)?$")
#: Persistent buffers that files hold beside the parameters: no ZeRO stage partitions them.
_BUFFERS = re.compile(r"(\.e_score_correction_bias|\.rotary_emb\.inv_freq|\.attention\.(masked_)?bias)$")
#: Scales of quantised weights: a trainer holds the weights themselves.
_SCALES = re.compile(r"(_scale_inv|\.weight_scale|\.input_scale)$")
_EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")
_HEADS = ("lm_head.weight", "embed_out.weight")


@dataclass(frozen=True, eq=False)
class Model:
    """Every weight once by its name, in order, and what its cuts depend on.

    ``aliases``: tied names. ``family``: the ``model_type`` of its config, None where there is none. ``heads``,
    ``kv_heads``: 0 where unknown. ``buffers``: weights that no ZeRO stage partitions. ``notes``: what was assumed or
    left out, a line each.
    """

    name: str
    specs: Mapping[str, TensorSpec]
    aliases: Mapping[str, str]
    family: str | None = None
    heads: int = 0
    kv_heads: int = 0
    buffers: Collection[str] = ()
    notes: Sequence[str] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, tied ones once."""
        return sum(spec.nbytes for spec in self.specs.values())

    @property
    def experts(self) -> int:
        """Routed experts of a layer, 0 for a dense model. Raises InputError where layers differ."""
        numbers = [found for name in self.specs if (found := expert_of(name)) is not None]
        fused = {spec.shape[0] for name, spec in self.specs.items() if is_fused(name)}
        if len(fused) > 1:
            raise InputError(f"model {self.name}: layers of {sorted(fused)} experts; one number for all is supported")
        return max(numbers) + 1 if numbers else next(iter(fused), 0)

    def in_dtype(self, dtype: str | None) -> Model:
        """The model as a trainer holds it: every floating-point parameter in ``dtype`` (None: as it is); DeepSpeed
        leaves buffers as they are."""
        if dtype is None:
            return self
        floating = ("float", "bfloat")
        specs = {
            name: replace(spec, dtype=dtype) if spec.dtype.startswith(floating) and name not in self.buffers else spec
            for name, spec in self.specs.items()
        }
        return replace(self, specs=specs)


def expert_of(name: str) -> int | None:
    """The number of the routed expert in its layer that a weight belongs to; None for every other weight."""
    found = _EXPERT.search(name)
    return None if found is None else int(found.group(1))


def is_fused(name: str) -> bool:
    """Whether a weight holds all experts of its layer along its first dim, as transformers 5 keeps them."""
    return _FUSED.search(name) is not None


def name_some(names: Iterable[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def read_model(path: Path) -> Model:
    """The model in ``path``: a folder as ``save_pretrained`` writes it, a config.json, a .safetensors file or an index.

    A folder's safetensors files say names, shapes and dtypes, its config.json heads and ties; either is enough. Raises
    InputError naming the file and what is wrong with it.
    """
    folder = path if path.is_dir() else path.parent
    sizes = _config(folder / _CONFIG if path.is_dir() or path.name.endswith(".safetensors") else path, path)
    if path.is_dir() or path.name.endswith((".safetensors", _INDEX)):
        if path.name.endswith(_INDEX):
            sizes = _config(folder / _CONFIG, path)
        header = read_headers(path)
        if header is not None:
            return _from_header(path, header, sizes)
    if sizes is None:
        raise InputError(f"model {path}: it has neither a {_CONFIG} nor a .safetensors file: name another folder")
    return _from_config(path, sizes)


def _config(file: Path, asked: Path) -> Sizes | None:
    if file.name.endswith(_INDEX) or (file != asked and not file.exists()):
        return None
    entry = load_json(file, "model config")
    if not isinstance(entry, dict):
        raise InputError(f"model config {file} is no JSON object: give the config.json of a Hugging Face model")
    return Sizes(entry, str(file))


def _name(path: Path) -> str:
    return path.resolve().name if path.is_dir() else path.resolve().parent.name if path.name == _CONFIG else path.stem


def _from_config(path: Path, sizes: Sizes) -> Model:
    dtype = sizes.dtype()
    weights = family_weights(sizes)
    specs = {name: TensorSpec(name, shape, kept or dtype or "float32") for name, shape, kept in weights}
    notes = [] if dtype else ["the config names no dtype: float32 is assumed where the trainer sets none"]
    return _model(_name(path), specs, sizes, notes)


def _from_header(path: Path, header: Header, sizes: Sizes | None) -> Model:
    notes = list(header.notes)
    scales = [name for name in header.specs if _SCALES.search(name)]
    specs = {name: spec for name, spec in header.specs.items() if name not in set(scales)}
    if scales:
        notes.append(f"{counted(len(scales), 'scale')} of quantised weights left out: {name_some(scales)}")
    eight = [name for name, spec in specs.items() if spec.dtype in _EIGHT_BITS]
    if eight:
        notes.append(
            f"{counted(len(eight), 'weight')} of 8 bits: planned so where the trainer's config sets no bf16 or fp16"
        )
    if sizes is None or not sizes.heads()[0]:
        why = "no config.json beside it" if sizes is None else "the config names no num_attention_heads"
        notes.append(f"{why}: numbers of heads are not known, so attention is cut evenly")
    if sizes is not None:
        notes += _differences(specs, sizes)
    return _model(_name(path), specs, sizes, notes)


def _differences(specs: Mapping[str, TensorSpec], sizes: Sizes) -> list[str]:
    """Where a config of a known family says other weights than the headers, which then count."""
    if sizes.family is None or family_of(sizes.family) is None:
        return []
    said = {name: shape for name, shape, _ in family_weights(sizes)}
    odd = [name for name, shape in said.items() if name in specs and specs[name].shape != shape]
    if odd:
        raise InputError(
            f"{sizes.where} says {odd[0]} is {list(said[odd[0]])}, the safetensors header says "
            f"{list(specs[odd[0]].shape)}: they are of different models"
        )
    missing = [name for name in said if name not in specs and name not in _HEADS]
    return [f"not in the files, though the config has them: {name_some(missing)}"] if missing else []


def _model(name: str, specs: dict[str, TensorSpec], sizes: Sizes | None, notes: list[str]) -> Model:
    aliases: dict[str, str] = {}
    if sizes is not None and sizes.flag("tie_word_embeddings", False):
        embedding = next((key for key in specs if key.endswith(("embed_tokens.weight", "embed_in.weight"))), None)
        if embedding is not None:
            head = next((key for key in _HEADS if key in specs), "lm_head.weight")
            specs.pop(head, None)
            aliases[head] = embedding
    heads, kv_heads = (0, 0) if sizes is None else sizes.heads()
    return Model(
        name=name,
        specs=specs,
        aliases=aliases,
        family=None if sizes is None else sizes.family,
        heads=heads,
        kv_heads=kv_heads,
        buffers=frozenset(key for key in specs if _BUFFERS.search(key)),
        notes=tuple(notes),
    )


def module_model(module: Any, name: str | None = None) -> Model:
    """The weights and persistent buffers of a live ``torch.nn.Module`` that is whole: before DeepSpeed cuts it, or as
    ZeRO-3 has partitioned it. A tied parameter counts once, under its first name.

    Raises InputError for a module that AutoTP has cut, or a dtype that no layout may have. Any rank; nothing is copied.
    """
    specs: dict[str, TensorSpec] = {}
    aliases: dict[str, str] = {}
    seen: dict[int, str] = {}
    buffers: list[str] = []
    for key, tensor in (*module.named_parameters(remove_duplicate=False), *_buffers(module)):
        if id(tensor) in seen:
            aliases[key] = seen[id(tensor)]
            continue
        if getattr(tensor, "ds_autotp_universal_checkpoint_meta", None):
            raise InputError(f"{key} is a shard that AutoTP cut: give the module as it is before deepspeed.initialize")
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in ITEMSIZE:
            raise InputError(f"{key} is of dtype {dtype}, which is not one of {', '.join(ITEMSIZE)}")
        seen[id(tensor)] = key
        specs[key] = TensorSpec(key, tuple(int(size) for size in getattr(tensor, "ds_shape", tensor.shape)), dtype)
    buffers = [key for key, tensor in _buffers(module) if seen.get(id(tensor)) == key]
    config = getattr(module, "config", None)
    entry: dict[str, Any] = config.to_dict() if config is not None and hasattr(config, "to_dict") else {}
    sizes = Sizes(entry, "the module's config") if entry.get("model_type") else None
    heads, kv_heads = (0, 0) if sizes is None else sizes.heads()
    family = None if sizes is None else sizes.family
    found = name or type(module).__name__
    return Model(found, specs, aliases, family, heads, kv_heads, frozenset(buffers))


def _buffers(module: Any) -> list[tuple[str, Any]]:
    found = []
    for prefix, part in module.named_modules():
        for key, buffer in part._buffers.items():
            if buffer is not None and key not in part._non_persistent_buffers_set:
                found.append((f"{prefix}.{key}" if prefix else key, buffer))
    return found

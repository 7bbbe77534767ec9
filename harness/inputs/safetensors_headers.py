"""Headers of safetensors files: names, shapes and dtypes, without a byte of a tensor.

``read_headers(path)`` of a file, an index or a folder. A file is 8 bytes (the length of its header, little-endian), the
header in JSON, then the tensors: https://huggingface.co/docs/safetensors. A file's own numbers are checked before they
are used; nothing is unpickled.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relaymeter.errors import InputError
from relaymeter.records import load_json, parse_json
from relaymeter.relayout.layout import ITEMSIZE, TensorSpec
from relaymeter.row_fields import shown
from relaymeter.units import counted

__all__ = ["MAX_HEADER_BYTES", "Header", "read_headers"]

#: The longest header that the format allows.
MAX_HEADER_BYTES = 100_000_000
_INDEX = ".safetensors.index.json"
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Header:
    """Tensors by name in the order of the files, and what there is to say about them."""

    specs: Mapping[str, TensorSpec]
    notes: Sequence[str] = ()


def read_headers(path: Path) -> Header | None:
    """The tensors of one file, of the shards that an index names, or of a folder (its index, else its only file, else
    all its files); None for a folder without any. Raises InputError naming the file and tensor."""
    if path.name.endswith(_INDEX):
        return _indexed(path)
    if not path.is_dir():
        part = "-of-" in path.name
        return Header(_tensors(path), [f"{path.name} is one shard of a model: only its weights move"] if part else [])
    indices = sorted(path.glob(f"*{_INDEX}"))
    if indices:
        usual = path / f"model{_INDEX}"
        if usual not in indices and len(indices) > 1:
            raise InputError(f"model {path} has {len(indices)} indices ({indices[0].name}, ...): name one of them")
        return _indexed(usual if usual in indices else indices[0])
    files = sorted(path.glob("*.safetensors"))
    if not files:
        return None
    alone = path / "model.safetensors"
    return Header(_join([alone] if alone in files else files))


def _join(files: Sequence[Path]) -> dict[str, TensorSpec]:
    found: dict[str, TensorSpec] = {}
    home: dict[str, Path] = {}
    for file in files:
        for name, spec in _tensors(file).items():
            if name in home:
                raise InputError(f"tensor {name} is in {home[name]} and in {file}: name the file that is meant")
            found[name], home[name] = spec, file
    return found


def _indexed(index: Path) -> Header:
    entry = load_json(index, "index")
    table = entry.get("weight_map") if isinstance(entry, dict) else None
    if not isinstance(table, dict) or not table:
        raise InputError(f"index {index} has no weight_map: give the index that save_pretrained writes")
    shards: dict[str, list[str]] = {}
    for name, shard in table.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in (".", ".."):
            raise InputError(f"index {index}: {name} is in {shown(shard)}, which is no name of a file beside the index")
        shards.setdefault(shard, []).append(name)
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        raise InputError(
            f"index {index} names {len(shards)} shards, of which {len(missing)} are not beside it: {missing[0]}"
            + (", ..." if len(missing) > 1 else "")
            + " (a header is enough: the tensors themselves are not read)"
        )
    found: dict[str, TensorSpec] = {}
    unused: list[str] = []
    for shard, names in shards.items():
        held = _tensors(index.parent / shard)
        lost = [name for name in names if name not in held]
        if lost:
            raise InputError(f"index {index} says {lost[0]} is in {shard}, whose header does not name it")
        found |= {name: held[name] for name in names}
        unused += [name for name in held if table.get(name) != shard]
    notes = (
        [f"left out, as the index does not name them: {counted(len(unused), 'tensor')} of its shards"] if unused else []
    )
    return Header({name: found[name] for name in table}, notes)


def _tensors(file: Path) -> dict[str, TensorSpec]:
    header, room = _read(file)
    header.pop("__metadata__", None)
    found: dict[str, TensorSpec] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        spec, begin, end = _tensor(f"{file}: tensor {name}", name, entry)
        if end > room:
            raise InputError(
                f"{file}: tensor {name} ends at byte {end} of the {room} that follow the header: the file is cut short"
            )
        found[name] = spec
        spans.append((begin, end, name))
    at, before = 0, "the header"
    for begin, end, name in sorted(spans):
        if begin != at:
            odd = "overlaps" if begin < at else f"leaves {begin - at} bytes unnamed after"
            raise InputError(f"{file}: tensor {name} at bytes {begin} to {end} {odd} {before}: the header is damaged")
        at, before = end, name
    if at != room:
        raise InputError(f"{file}: {room - at} bytes follow {before}, the last tensor: the header is damaged")
    return found


def _tensor(where: str, name: str, entry: Any) -> tuple[TensorSpec, int, int]:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise InputError(f"{where} has no dtype, shape and data_offsets: {shown(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise InputError(f"{where} is of dtype {shown(dtype)}, which is not one of {', '.join(_DTYPES)}")
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        whole = isinstance(numbers, list) and all(type(n) is int and 0 <= n < 2**62 for n in numbers)
        if not whole or (what == "data_offsets" and len(numbers) != 2):
            raise InputError(f"{where}: {what} {shown(numbers)} are no whole numbers of at least 0")
    begin, end = offsets
    size = math.prod(shape) * ITEMSIZE[_DTYPES[dtype]]
    if end - begin != size:
        raise InputError(f"{where}: bytes {begin} to {end} are {end - begin}, {dtype} {shape} needs {size}")
    return TensorSpec(name, tuple(shape), _DTYPES[dtype]), begin, end


def _read(file: Path) -> tuple[dict[str, Any], int]:
    """The header of a file and the bytes that follow it. No length is believed before it was held to the file's."""
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            raise InputError(f"{file} is no regular file: give a .safetensors file or a folder")
        with file.open("rb") as stream:
            head = stream.read(8)
            length = int.from_bytes(head, "little")
            if len(head) < 8 or length > found.st_size - 8:
                raise InputError(
                    f"{file} is no safetensors file: it has {found.st_size} bytes, its first 8 say a header of {length}"
                )
            if length > MAX_HEADER_BYTES:
                raise InputError(f"{file}: a header of {length} bytes; the format allows {MAX_HEADER_BYTES}")
            text = stream.read(length).decode("utf-8")
        header = parse_json(text)
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        if isinstance(error, json.JSONDecodeError):
            raise InputError(f"{file}: the header is not valid JSON at character {error.pos}: {error.msg}") from error
        raise InputError(f"cannot read the header of {file}: {error}") from error
    if not isinstance(header, dict):
        raise InputError(f"{file}: the header is no JSON object: {shown(header)}")
    return header, found.st_size - 8 - length

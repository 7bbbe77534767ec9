"""Plain values of training state as JSON and back, bit for bit: what travels between ranks instead of pickles.

``decode(json.loads(json.dumps(encode({"lr": 0.1, "step": torch.tensor(3.0)}, "group 0"))))`` gives an equal value.
Known are None, booleans, whole and floating-point numbers (infinite ones and NaN too), text, lists, tuples, sets,
dicts, counters, torch dtypes and small tensors; anything else is refused by its place and type. Pure, any rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from relaymeter.errors import InputError

__all__ = ["decode", "encode", "field_differences"]

#: A tensor of more elements is no counter or scale any more, but state that has to move by a layout.
_LARGEST_TENSOR = 1024
_PLAIN = (bool, int, str, type(None))
_SEQUENCES: Mapping[type[Any], str] = {list: "list", tuple: "tuple", set: "set"}


def encode(value: Any, place: str) -> Any:
    """``value`` as what ``json`` writes and ``decode`` reads. Raises InputError naming ``place`` for other types."""
    if type(value) in _PLAIN:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": value.hex()}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, place)
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if type(value) in _SEQUENCES:
        entries: list[Any] = sorted(value, key=repr) if isinstance(value, set) else list(value)
        return {_SEQUENCES[type(value)]: [encode(entry, f"{place}[{at}]") for at, entry in enumerate(entries)]}
    if type(value) is dict or isinstance(value, Counter):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[encode(key, place), encode(entry, f"{place}.{key}")] for key, entry in value.items()]}
    raise InputError(
        f"{place} is a {type(value).__name__}: numbers, text, lists, dicts and small tensors can be carried; keep "
        "such an object out of the training state"
    )


def _encode_tensor(value: torch.Tensor, place: str) -> Any:
    if value.numel() > _LARGEST_TENSOR:
        raise InputError(
            f"{place} is a tensor {list(value.shape)}: neither one value per weight nor at most {_LARGEST_TENSOR} "
            "elements, so it cannot be carried to another layout"
        )
    kept = value.detach().cpu().contiguous()
    where = "cpu" if value.device.type == "cpu" else "device"
    data = kept.reshape(-1).view(torch.uint8).numpy().tobytes() if kept.numel() else b""
    return {"tensor": [str(kept.dtype).removeprefix("torch."), list(kept.shape), data.hex(), where]}


def decode(entry: Any, device: torch.device | str = "cpu") -> Any:
    """The value that ``encode`` wrote; tensors that lay on an accelerator come to ``device``."""
    if type(entry) is not dict:
        return entry
    ((kind, content),) = entry.items()
    if kind == "float":
        return float.fromhex(content)
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "tensor":
        dtype, shape, data, where = content
        raw = torch.frombuffer(bytearray(bytes.fromhex(data)) or bytearray(1), dtype=torch.uint8)
        kept = raw[: len(data) // 2].view(getattr(torch, dtype)).reshape(shape).clone()
        return kept if where == "cpu" else kept.to(device)
    if kind in ("dict", "counter"):
        pairs = {decode(key, device): decode(value, device) for key, value in content}
        return Counter(pairs) if kind == "counter" else pairs
    makers = {name: maker for maker, name in _SEQUENCES.items()}
    return makers[kind](decode(value, device) for value in content)


def field_differences(
    wanted: Any, found: Any, place: str = "", sides: tuple[str, str] = ("the source", "the destination")
) -> Iterator[str]:
    """Where two values (encoded, or plain JSON) differ: a text for each place, ``lr: 0.1 in the source, 0.2 in ...``.

    ``sides`` names the owners of ``wanted`` and ``found``.
    """
    one, other = _opened(wanted), _opened(found)
    if _is_leaf(one) or _is_leaf(other):
        one = other = None
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in [*one, *(key for key in other if key not in one)]:
            below = f"{place}.{key}" if place else str(key)
            if key in one and key in other:
                yield from field_differences(one[key], other[key], below, sides)
            else:
                kept = [_shown(side[key]) if key in side else "missing" for side in (one, other)]
                yield f"{below}: {kept[0]} in {sides[0]}, {kept[1]} in {sides[1]}"
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for at, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from field_differences(left, right, f"{place}[{at}]", sides)
    elif type(wanted) is not type(found) or wanted != found:
        yield f"{place}: {_shown(wanted)} in {sides[0]}, {_shown(found)} in {sides[1]}"


def _is_leaf(entry: Any) -> bool:
    """Whether ``entry`` is one encoded value, such as a tensor."""
    return isinstance(entry, Mapping) and len(entry) == 1 and next(iter(entry)) in ("tensor", "float", "dtype")


def _opened(entry: Any) -> Any:
    """The inside of an encoded dict or sequence, so that its entries are compared one by one."""
    if type(entry) is not dict or len(entry) != 1:
        return entry
    ((kind, content),) = entry.items()
    if kind in ("dict", "counter") and isinstance(content, list):
        return {str(decode(key)): value for key, value in content}
    return content if kind in ("list", "tuple", "set") and isinstance(content, list) else entry


def _shown(entry: Any) -> str:
    """A short text for an encoded value."""
    try:
        value = decode(entry)
    except (KeyError, TypeError, ValueError):
        value = entry
    text = f"{value.tolist()} ({value.dtype})" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

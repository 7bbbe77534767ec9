"""Hashes of a document's parts, so that an edit is named by the member it was made in.

``hash_tree(content)`` goes into the file; ``changed(content, tree)`` names what is no longer as it was written. Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from relaymeter.records import dump_json

__all__ = ["canonical", "changed", "hash_tree"]

#: Hexadecimal digits of the hash of a part: enough for an edit by hand; the hash of the whole is a full one.
_DIGITS = 8


def canonical(value: Any) -> bytes:
    """``value`` as strict JSON with sorted members: equal for equal values, however their numbers were written."""
    return json.dumps(json.loads(dump_json(value, indent=None)), sort_keys=True).encode()


def hash_tree(value: Any) -> Any:
    """Hashes in the shape of ``value`` (JSON-ready): one for every value that is not an object, and in a list of
    objects one for every entry."""
    if isinstance(value, Mapping):
        return {str(key): hash_tree(entry) for key, entry in value.items()}
    if _is_table(value):
        return [_hash(entry) for entry in value]
    return _hash(value)


def changed(value: Any, tree: Any, path: str = "") -> Iterator[str]:
    """Paths such as ``executors.send-recv.costs.floor_s`` or ``cells[3]`` where ``value`` is not what ``tree`` was
    made of."""
    if isinstance(value, Mapping) and isinstance(tree, Mapping):
        for key in dict.fromkeys([*value, *tree]):
            inner = f"{path}.{key}" if path else str(key)
            if key not in value or key not in tree:
                yield f"{inner} ({'missing' if key not in value else 'added'})"
            else:
                yield from changed(value[key], tree[key], inner)
    elif _is_table(value) and isinstance(tree, list) and len(value) == len(tree):
        for number, (entry, wanted) in enumerate(zip(value, tree, strict=True)):
            if _hash(entry) != wanted:
                yield f"{path}[{number}]"
    elif hash_tree(value) != tree:
        yield path


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, Mapping) for entry in value)


def _hash(value: Any) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()[:_DIGITS]

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from relaymeter.calibration.hashes import canonical, changed, hash_tree

LEAF = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False)
KEYS = st.text("abc_-.", min_size=1, max_size=4)
VALUE = st.recursive(
    LEAF | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
DOCUMENT = {
    "executors": {"send-recv": {"costs": {"floor_s": 1e-4, "in_node": None, "curve": [1]}, "replicates": [{"a": 1}]}},
    "cells": [{"pattern": "empty", "samples_s": [1.0, 2.0]}, {"pattern": "pair", "samples_s": [3.0]}],
    "warnings": [],
    "quick": True,
}  # fmt: skip


@given(st.dictionaries(KEYS, VALUE, max_size=5))
def test_what_was_not_edited_is_not_named_whoever_wrote_its_json(document: dict[str, Any]) -> None:
    again = json.loads(json.dumps(document, indent=7, sort_keys=True))
    assert list(changed(again, json.loads(json.dumps(hash_tree(document))))) == []
    assert canonical(again) == canonical(document)


@given(st.dictionaries(KEYS, VALUE, min_size=1, max_size=5), st.data())
def test_any_member_that_was_replaced_added_or_removed_is_named(document: dict[str, Any], data: st.DataObject) -> None:
    tree = hash_tree(document)
    edited = copy.deepcopy(document)
    key = data.draw(st.sampled_from(sorted(document)))
    how = data.draw(st.sampled_from(["replace", "add", "remove"]))
    if how == "replace":
        edited[key] = data.draw(VALUE)
        assume(canonical(edited) != canonical(document))
        assert all(path == key or path.startswith((f"{key}.", f"{key}[")) for path in changed(edited, tree))
    elif how == "add":
        edited["new"] = 1
        key = "new"
        assert list(changed(edited, tree)) == ["new (added)"]
    else:
        del edited[key]
        assert list(changed(edited, tree)) == [f"{key} (missing)"]
    assert list(changed(edited, tree))


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("executors", "send-recv", "costs", "floor_s"), 2e-4, "executors.send-recv.costs.floor_s"),
        (("executors", "send-recv", "costs", "in_node"), 0, "executors.send-recv.costs.in_node"),
        (("executors", "send-recv", "costs", "curve"), [4], "executors.send-recv.costs.curve"),
        (("executors", "send-recv", "replicates"), [{"a": 2}], "executors.send-recv.replicates[0]"),
        (("cells",), DOCUMENT["cells"][:1], "cells"),
        (("cells", 1, "samples_s"), [3.5], "cells[1]"),
        (("warnings",), ["none"], "warnings"),
        (("quick",), 1, "quick"),
    ],
)
def test_edits_are_named_by_their_path(path: tuple[Any, ...], value: Any, named: str) -> None:
    edited: Any = copy.deepcopy(DOCUMENT)
    place = edited
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert list(changed(edited, hash_tree(DOCUMENT))) == [named]

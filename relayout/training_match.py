"""What the fields of a training state become in another engine, whose groups and flat tensors are others.

``wanted = expected_fields(read_fields(source), read_fields(destination))``, from ``training_fields``. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relaymeter.errors import InputError
from relaymeter.relayout.plain_state import field_differences

__all__ = ["expected_fields"]


def expected_fields(source: Mapping[str, Any], destination: Mapping[str, Any]) -> dict[str, Any]:
    """What the destination's ``read_fields`` has to give after the move, from both sides' fields. Pure.

    Groups are matched by the parameters in them; those without any by their position. A parameter without state comes
    to share its destination's home with others that have some: then it has zeros there, as its own first step would
    find (``filled``: pairs of state and name). Raises InputError, naming the place, where two values would have to
    share one place, and where optimizers, schedulers or scalers are of different kinds.
    """
    if source["optimizer"] != destination["optimizer"]:
        raise InputError(
            f"the source's optimizer is {source['optimizer']}, the destination's {destination['optimizer']}: their "
            "states mean different things; build both engines with one optimizer"
        )
    homes = destination["homes"]
    per_weight, filled = _expected_per_weight(source, homes)
    return {
        "engine": _expected_counters(source, destination),
        "accumulation": destination["accumulation"],
        "optimizer": destination["optimizer"],
        "groups": _expected_groups(source["groups"], destination["groups"]),
        "homes": homes,
        "per_weight": per_weight,
        "filled": filled,
        "per_parameter": _expected_per_parameter(source, homes),
        "scheduler": _expected_scheduler(source, destination),
        "scaler": _expected_scaler(source["scaler"], destination["scaler"]),
    }


def _expected_counters(source: Mapping[str, Any], destination: Mapping[str, Any]) -> dict[str, int]:
    """``micro_steps`` counts in micro-batches, of which the destination may take another number for a step."""
    found = dict(source["engine"])
    windows, rest = divmod(found["micro_steps"], source["accumulation"])
    found["micro_steps"] = windows * int(destination["accumulation"]) + rest
    return found


def _expected_groups(source: Sequence[Mapping[str, Any]], destination: Sequence[Mapping[str, Any]]) -> list[Any]:
    owner = {name: number for number, group in enumerate(source) for name in group["names"]}
    found = []
    for number, group in enumerate(destination):
        owners = sorted({owner[name] for name in group["names"]})
        if not owners and number < len(source):
            owners = [number]
        for other in owners[1:]:
            first = next(iter(field_differences(source[owners[0]]["fields"], source[other]["fields"])), "")
            if first:
                names = [next(n for n in group["names"] if owner[n] == at) for at in (owners[0], other)]
                raise InputError(
                    f"{names[0]} and {names[1]} share parameter group {number} of the destination, but the source has "
                    f"them in groups {owners[0]} and {other}, which differ: {first}; give both engines the same groups"
                )
        found.append({"names": group["names"], "fields": source[owners[0]]["fields"] if owners else group["fields"]})
    return found


def _expected_per_weight(
    source: Mapping[str, Any], homes: Sequence[Sequence[str]]
) -> tuple[dict[str, dict[str, str]], list[list[str]]]:
    found: dict[str, dict[str, str]] = {}
    filled: list[list[str]] = []
    for key, dtypes in source["per_weight"].items():
        for names in homes:
            having = [name for name in names if name in dtypes]
            for name in having[1:]:
                if dtypes[name] != dtypes[having[0]]:
                    raise InputError(
                        f"{key} of {having[0]} is {dtypes[having[0]]}, of {name} {dtypes[name]}, but the destination "
                        "keeps both in one tensor: give the two parameters groups of their own"
                    )
            for name in names if having else ():
                found.setdefault(key, {})[name] = dtypes[having[0]]
                if name not in dtypes:
                    filled.append([key, name])
    return found, filled


def _expected_per_parameter(source: Mapping[str, Any], homes: Sequence[Sequence[str]]) -> dict[str, dict[str, Any]]:
    told: Mapping[str, dict[str, Any]] = source["per_parameter"]
    stateful = set(told).union(*source["per_weight"].values())
    found: dict[str, dict[str, Any]] = {}
    for names in homes:
        having = [name for name in names if name in stateful]
        for name in having[1:]:
            first = next(iter(field_differences(told.get(having[0], {}), told.get(name, {}))), "")
            if first:
                raise InputError(
                    f"{having[0]} and {name} share one optimizer state in the destination, but differ in the source "
                    f"({first}): give the two parameters groups of their own"
                )
        for name in names if having and told.get(having[0]) else ():
            found[name] = told[having[0]]
    return found


def _expected_scheduler(source: Mapping[str, Any], destination: Mapping[str, Any]) -> dict[str, Any] | None:
    one, other = source["scheduler"], destination["scheduler"]
    kinds = [None if side is None else side["type"] for side in (one, other)]
    if kinds[0] != kinds[1]:
        raise InputError(
            f"the source's lr scheduler is {kinds[0] or 'missing'}, the destination's {kinds[1] or 'missing'}: build "
            "both engines with the same one"
        )
    if one is None:
        return None
    origins = _group_origins(source["groups"], destination["groups"])
    if len(source["groups"]) == len(destination["groups"]):
        return dict(one)
    pairs = []
    for key, value in one["state"]["dict"]:
        kind, content = next(iter(value.items())) if isinstance(value, dict) else ("", [])
        if kind in ("list", "tuple") and len(content) == len(source["groups"]):
            value = {kind: [content[at] for at in origins]}
        pairs.append([key, value])
    return {"type": one["type"], "state": {"dict": pairs}}


def _group_origins(source: Sequence[Mapping[str, Any]], destination: Sequence[Mapping[str, Any]]) -> list[int]:
    """For each group of the destination the source's group that its first parameter comes from."""
    owner = {name: number for number, group in enumerate(source) for name in group["names"]}
    last = len(source) - 1
    return [owner[g["names"][0]] if g["names"] else min(number, last) for number, g in enumerate(destination)]


def _expected_scaler(source: Mapping[str, Any] | None, destination: Mapping[str, Any] | None) -> Any:
    kinds = [None if side is None else (side["type"], side["dynamic"]) for side in (source, destination)]
    if kinds[0] == kinds[1]:
        if source is None or destination is None:
            return None
        flags = {key: source["flags"].get(key, value) for key, value in destination["flags"].items()}
        return {**source, "flags": flags}
    if any(side is not None and side["dynamic"] for side in (source, destination)):
        shown = [f"{kind[0]} ({'dynamic' if kind[1] else 'static'})" if kind else "none" for kind in kinds]
        raise InputError(
            f"the source scales its loss by {shown[0]}, the destination by {shown[1]}: the history of a dynamic scale "
            "has no place there; give both engines the same precision and loss scaling"
        )
    return None if destination is None else dict(destination)

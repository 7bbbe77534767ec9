"""What the fields of a training state become in another engine, whose groups and flat tensors are others.

``wanted = expected_fields(read_fields(source), read_fields(destination))``, from ``training_fields``. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relaymeter.errors import InputError
from relaymeter.relayout.plain_state import field_differences

__all__ = ["expected_fields"]

#: Lists of lr schedulers (torch's and DeepSpeed's) with an entry for each parameter group.
_BY_GROUP = (
    *("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"),
    *("min_moms", "max_moms", "org_lrs", "delta_lrs", "min_lr", "max_lr", "_last_momentum"),
)
#: Whose lists are known.
_KNOWN_SCHEDULERS = ("torch.optim.lr_scheduler.", "deepspeed.runtime.lr_schedules.")
#: Optimizers that keep other states of a matrix than of a flat tensor.
_BY_SHAPE = ("Adafactor", "Muon")


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
    if source["shaped"] != destination["shaped"] and source["optimizer"].rpartition(".")[2] in _BY_SHAPE:
        kinds = ["whole" if side["shaped"] else "flat" for side in (source, destination)]
        raise InputError(
            f"{source['optimizer']} keeps other states of matrices than of flat tensors; the source has {kinds[0]} "
            f"parameters, the destination {kinds[1]} ones: move between stages 1 to 3, or between stages 0"
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
        "autocast": _expected_autocast(source["autocast"], destination["autocast"]),
        "shaped": destination["shaped"],
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
            names = [next(n for n in group["names"] if owner[n] == at) for at in (owners[0], other)]
            sides = f"group {owners[0]}", f"group {other}"
            first = next(iter(field_differences(source[owners[0]]["fields"], source[other]["fields"], "", sides)), "")
            if first:
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
            both = told.get(having[0], {}), told.get(name, {})
            first = next(iter(field_differences(*both, "", (having[0], name))), "")
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
    if origins == list(range(len(source["groups"]))):
        return dict(one)
    if not one["type"].startswith(_KNOWN_SCHEDULERS):
        raise InputError(
            f"the parameter groups of the two engines are not the same in order, and which lists of {one['type']} go "
            "by group is not known: give both engines the same groups"
        )
    settings = {key: _regrouped(key, value, origins, len(source["groups"])) for key, value in one["settings"].items()}
    state = _regrouped("", one["state"], origins, len(source["groups"]))
    return {"type": one["type"], "state": state, "settings": settings}


def _regrouped(key: str, value: Any, origins: Sequence[int], count: int) -> Any:
    """An encoded entry of a scheduler, its lists by group in the order of the destination's groups; inner schedulers
    too."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind in ("list", "tuple"):
        if key in _BY_GROUP and len(content) == count:
            return {kind: [content[at] for at in origins]}
        return {kind: [_regrouped("", entry, origins, count) for entry in content]}
    if kind == "dict":
        return {kind: [[name, _regrouped(str(name), entry, origins, count)] for name, entry in content]}
    return value


def _group_origins(source: Sequence[Mapping[str, Any]], destination: Sequence[Mapping[str, Any]]) -> list[int]:
    """For each group of the destination the source's group that its first parameter comes from."""
    owner = {name: number for number, group in enumerate(source) for name in group["names"]}
    last = len(source) - 1
    return [owner[g["names"][0]] if g["names"] else min(number, last) for number, g in enumerate(destination)]


def _expected_autocast(source: Any | None, destination: Any | None) -> Any | None:
    if (source is None) != (destination is None):
        has = "source" if destination is None else "destination"
        raise InputError(
            f"only the {has} scales gradients under torch_autocast: give both engines the same torch_autocast section"
        )
    return source


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
            "has no place there (stage 0 keeps another one than stages 1 to 3); give both engines the same precision "
            "and loss scaling, or stages from 1 on"
        )
    return None if destination is None else dict(destination)

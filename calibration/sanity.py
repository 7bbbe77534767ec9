"""What no price can be made of, said clearly: unsound figures, a curve of one size, and memory that ended a curve.

``unsound(costs)`` names figures that are no numbers; ``refuse_single_sizes(findings)`` and
``memory_warnings(findings, largest_bytes)`` look at what was measured. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from relaymeter.calibration.costs import CROSS_NODE, IN_NODE, ExecutorCosts
from relaymeter.calibration.recorder import MESSAGE_CAP_BYTES, Findings
from relaymeter.errors import NothingMeasured
from relaymeter.units import format_bytes, format_seconds

__all__ = ["memory_warnings", "refuse_single_sizes", "unsound"]

_LINKS = {IN_NODE: "inside a node", CROSS_NODE: "between nodes"}


def unsound(costs: ExecutorCosts) -> tuple[str, ...]:
    """Figures that are no finite numbers of at least zero, as ``"in_node.two_way is null"``; empty where all are. What
    a cluster does not have may be None where its type says so."""
    return tuple(_unsound(costs, "", False))


def _unsound(value: Any, path: str, optional: bool) -> Iterator[str]:
    if is_dataclass(value):
        for field in fields(value):
            inner = f"{path}.{field.name}" if path else field.name
            if str(field.type) != "bool" or not isinstance(getattr(value, field.name), bool):
                yield from _unsound(getattr(value, field.name), inner, "None" in str(field.type))
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _unsound(entry, f"{path}.{key}", False)
    elif isinstance(value, list | tuple):
        for number, entry in enumerate(value):
            yield from _unsound(entry, f"{path}[{number}]", False)
    elif value is None and optional:
        return
    elif isinstance(value, bool) or not isinstance(value, int | float):
        yield f"{path} is {'null' if value is None else repr(value)}"
    elif not (math.isfinite(value) and value >= 0):
        yield f"{path} is {value:g}"


def refuse_single_sizes(findings: Findings, executors: Sequence[str]) -> None:
    """Raise NothingMeasured where the time of a link was measured at a single message size: that is no rate."""
    for executor in executors:
        for kind, name in _LINKS.items():
            times = {cell.size: cell.median_s for cell in findings.of(f"{kind} curve", executor)}
            if len(times) == 1:
                ((size, seconds),) = times.items()
                raise NothingMeasured(
                    f"the link {name} was measured with one message size only ({format_bytes(size)} in "
                    f"{format_seconds(seconds)} by {executor}), which gives no rate: a curve needs two message sizes; "
                    "free memory where little is left, or look at why a call takes so long"
                )


def memory_warnings(findings: Findings, largest_bytes: int, rank: int | None = None) -> list[str]:
    """A warning for each curve that ended because memory holds no larger message. ``largest_bytes``: the cap of all
    ranks; ``rank``: whose memory is the least."""
    if largest_bytes >= MESSAGE_CAP_BYTES:
        return []
    whose = "" if rank is None else f" of rank {rank}, the least of any,"
    found: dict[str, None] = {}
    for kind, name in _LINKS.items():
        sizes = [cell.size for cell in findings.cells if cell.pattern == f"{kind} curve"]
        if sizes and 2 * max(sizes) > largest_bytes:
            found[
                f"memory: messages {name} were measured up to {format_bytes(max(sizes))} on all ranks alike, because "
                f"the free memory{whose} allows at most {format_bytes(largest_bytes)}; the prices of larger ones are "
                "extrapolated"
            ] = None
    return list(found)

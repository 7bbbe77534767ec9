"""``--to tp=4,replicas=2,nodes=second-half``: where copies of a model go, in words.

``parse_destination(text)`` reads it, ``copy_ranks(destination, topology)`` lays it over a topology. ``parse_ranks``
reads ``--from-ranks``. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from relaymeter.errors import InputError
from relaymeter.harness.config import nearest
from relaymeter.relayout.topology import Topology

__all__ = ["Destination", "copy_ranks", "parse_destination", "parse_ranks"]

_EXAMPLE = "tp=4,replicas=2 or tp=8,ep=16,nodes=second-half"
_COUNTS = ("tp", "replicas", "ep")
_HALVES = ("all", "first-half", "second-half")
_SPAN = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Copies of ``tensor_parallel`` ranks, as many as ``replicas`` (None: as fit), on the ranks of ``nodes``; routed
    experts whole over ``expert_parallel`` neighbouring ranks (1: cut over the ranks of a copy like other weights)."""

    tensor_parallel: int = 1
    replicas: int | None = None
    expert_parallel: int = 1
    nodes: str = "all"


def parse_destination(text: str) -> Destination:
    """The destination that ``text`` says. Raises InputError quoting the part that is wrong, with a right one."""
    found: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals or not value:
            raise InputError(f"--to {text!r}: {part.strip()!r} is no KEY=VALUE: for example {_EXAMPLE}")
        if key not in (*_COUNTS, "nodes"):
            raise InputError(f"--to {text!r}: unknown key in {part.strip()!r}: {nearest(key, (*_COUNTS, 'nodes'))}")
        if key in found:
            raise InputError(f"--to {text!r}: {key} stands twice: for example {_EXAMPLE}")
        found[key] = value
    counts = {key: _count(text, key, found[key]) for key in _COUNTS if key in found}
    nodes = found.get("nodes", "all")
    if nodes not in _HALVES and _SPAN.fullmatch(nodes) is None:
        raise InputError(
            f"--to {text!r}: 'nodes={nodes}' is none of nodes=all, nodes=first-half, nodes=second-half, nodes=0-3 (a "
            "span of nodes), nodes=2"
        )
    return Destination(
        tensor_parallel=counts.get("tp", 1),
        replicas=counts.get("replicas"),
        expert_parallel=counts.get("ep", 1),
        nodes=nodes,
    )


def _count(text: str, key: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 10 and int(value)):
        raise InputError(f"--to {text!r}: '{key}={value}' is no whole number of at least 1: for example {key}=4")
    return int(value)


def _span(what: str, value: str, have: int, unit: str) -> range:
    found = _SPAN.fullmatch(value)
    if found is None:
        raise InputError(f"{what} {value!r} is neither a {unit} nor a span of them: for example 0-{max(have - 1, 1)}")
    first, last = int(found.group(1)), int(found.group(2) or found.group(1))
    if first > last or last >= have:
        raise InputError(f"{what} {value}: there are {have} {unit}s, numbered 0 to {have - 1}")
    return range(first, last + 1)


def copy_ranks(destination: Destination, topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Ranks of each copy, neighbours by number. Raises InputError, with the equation, where they do not fit."""
    have = topology.nodes
    half = -(-have // 2)
    halves = {"all": range(have), "first-half": range(half), "second-half": range(half, have)}
    nodes = halves.get(destination.nodes)
    if nodes is None:
        nodes = _span("--to nodes =", destination.nodes, have, "node")
    ranks = [rank for rank, node in enumerate(topology.node) if node in nodes]
    degree, width = destination.tensor_parallel, destination.expert_parallel
    where = f"{len(ranks)} ranks on nodes={destination.nodes} of {have} nodes"
    copies = destination.replicas or max(1, len(ranks) // degree)
    if degree * copies > len(ranks):
        raise InputError(f"--to: tp {degree} x replicas {copies} = {degree * copies} ranks asked, {where} given")
    if destination.replicas is None and len(ranks) % degree:
        raise InputError(f"--to: {where} % tp {degree} = {len(ranks) % degree}, not 0: say replicas={copies}")
    if degree * copies % width:
        raise InputError(
            f"--to: tp {degree} x replicas {copies} = {degree * copies} ranks % ep {width} = "
            f"{degree * copies % width}, not 0: experts are dealt out over groups of ep ranks"
        )
    return tuple(tuple(ranks[at * degree : (at + 1) * degree]) for at in range(copies))


def parse_ranks(text: str | None, world_size: int) -> tuple[int, ...]:
    """The trainer's ranks: all (None), the first so many (``"16"``), or a span (``"16-31"``). Raises InputError."""
    if text is None:
        return tuple(range(world_size))
    if text.isascii() and text.isdigit() and len(text) < 10:
        if not 1 <= int(text) <= world_size:
            raise InputError(f"--from-ranks {text}: the topology has {world_size} ranks: give 1 to {world_size}")
        return tuple(range(int(text)))
    return tuple(_span("--from-ranks", text, world_size, "rank"))

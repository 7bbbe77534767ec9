"""Scenarios: finding them by name or file, and laying one out over the ranks of a topology.

``load_any("smoke")`` reads a shipped one of whatever kind, ``load_scenario("smoke")`` one that moves weights, whose two
ends, from metadata alone, are ``source_layouts(scenario, move, topology)`` and ``destination_layout(scenario, move,
topology)``. Pure, any rank, no torch import.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from relaymeter.errors import InputError, LayoutError
from relaymeter.harness.compare_config import CompareScenario
from relaymeter.harness.config import (
    Config,
    Count,
    Degrees,
    MoveConfig,
    NodeChoice,
    Scenario,
    SourceName,
    Whole,
    check,
    named,
    nearest,
    toml_entry,
)
from relaymeter.harness.models import tensor_parallel_cuts, weight_aliases, weight_specs
from relaymeter.harness.state_config import OffloadScenario, StateScenario
from relaymeter.records import load_json
from relaymeter.relayout.geometry import row_major_strides
from relaymeter.relayout.layout import Layout, Placement, TensorSpec
from relaymeter.relayout.placements import restrict_layout, tensor_parallel_layout, zero3_layout
from relaymeter.relayout.topology import Topology

__all__ = [
    "AnyScenario",
    "destination_layout",
    "load_any",
    "load_scenario",
    "load_suite",
    "old_layout",
    "old_ranks",
    "replica_ranks",
    "shipped_scenarios",
    "shipped_suites",
    "source_layout",
    "source_layouts",
    "source_ranks",
]


AnyScenario = Scenario | StateScenario | OffloadScenario | CompareScenario
_WEIGHTS = "weights"
#: Models of scenarios by the kind that a file says; without one it is of weights.
_KINDS: Mapping[str, type[AnyScenario]] = {
    _WEIGHTS: Scenario,
    "training-state": StateScenario,
    "offload": OffloadScenario,
    "compare": CompareScenario,
}


class _Piece(Config):
    """A box that a rank holds, stored row-major after the rank's earlier pieces of the tensor."""

    rank: Whole
    lo: tuple[Whole, ...]
    shape: tuple[Count, ...]
    copy_number: Whole = Field(default=0, alias="copy")


class _LayoutFile(Config):
    """A layout written out: for every weight the boxes that ranks hold."""

    tensors: Annotated[dict[str, tuple[_Piece, ...]], Field(min_length=1)]


def shipped_scenarios(*, weights_only: bool = False) -> tuple[str, ...]:
    """Names of the scenarios that come with the package, of every kind or of moves of weights only."""
    folder = files("relaymeter.harness") / "scenarios"
    names = sorted(e.name.removesuffix(".toml") for e in folder.iterdir() if e.name.endswith(".toml"))
    return tuple(name for name in names if not weights_only or isinstance(load_any(name), Scenario))


def shipped_suites() -> tuple[str, ...]:
    """Names of the shipped scenarios that are suites."""
    return tuple(name for name in shipped_scenarios() if _suite(load_any(name)) is not None)


def load_suite(text: str) -> AnyScenario:
    """The shipped suite named ``text``, or the one in the TOML file ``text``, of any kind. Raises InputError."""
    names = shipped_suites()
    if text not in names and Path(text).suffix != ".toml" and "/" not in text:
        raise InputError(f"unknown suite {text!r}: {nearest(text, names)}, or a path ending in .toml")
    scenario = load_any(text)
    if _suite(scenario) is None:
        raise InputError(f"{text} is no suite: add the table [suite] to it, or run it with --scenario {text}")
    return scenario


def load_scenario(text: str) -> Scenario:
    """The scenario named ``text`` or in the TOML file ``text``, of moves of weights. Raises InputError."""
    if not _is_path(text) and text not in shipped_scenarios():
        raise _unknown(text, shipped_scenarios(weights_only=True))
    scenario = load_any(text)
    if not isinstance(scenario, Scenario):
        command = "compare" if isinstance(scenario, CompareScenario) else "run"
        raise InputError(
            f"scenario {text} is of kind {scenario.kind!r}, which only {command} takes (relaymeter {command} "
            f"--scenario {text}): plan and choose are for moves of weights"
        )
    return scenario


def load_any(text: str) -> AnyScenario:
    """The shipped scenario named ``text``, or the one in the TOML file ``text``, of the kind that it says.

    Raises InputError.
    """
    path = Path(text)
    if not _is_path(text):
        if text not in shipped_scenarios():
            raise _unknown(text, shipped_scenarios())
        path = Path(str(files("relaymeter.harness") / "scenarios" / f"{text}.toml"))
    entry = toml_entry(path)
    kind = entry.get("kind", _WEIGHTS)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InputError(f"{path}: kind = {kind!r}: {nearest(str(kind), _KINDS)}")
    scenario = check(_KINDS[kind], named(path, entry), str(path))
    return _beside(scenario, path) if isinstance(scenario, Scenario) else scenario


def _beside(scenario: Scenario, path: Path) -> Scenario:
    """``scenario`` with its layout files found beside the file that it came from."""
    folder = path.resolve().parent

    def found(layout: str | None) -> str | None:
        return None if layout is None else str(folder / layout)

    source = scenario.source.model_copy(update={"layout": found(scenario.source.layout)})
    moves = tuple(move.model_copy(update={"layout": found(move.layout)}) for move in scenario.moves)
    return scenario.model_copy(update={"source": source, "moves": moves})


def _suite(scenario: AnyScenario) -> Config | None:
    return scenario.suite if isinstance(scenario, Scenario | StateScenario) else None


def _is_path(text: str) -> bool:
    return Path(text).suffix == ".toml" or "/" in text


def _unknown(text: str, names: Collection[str]) -> InputError:
    return InputError(f"unknown scenario {text!r}: {nearest(text, names)}, or a path ending in .toml")


def _nodes(choice: NodeChoice, topology: Topology, what: str) -> tuple[int, ...]:
    have = topology.nodes
    if isinstance(choice, tuple):
        outside = [node for node in choice if node >= have]
        if outside:
            raise InputError(f"{what}: node {outside[0]} of {have} nodes (numbered 0 to {have - 1}): give more nodes")
        return choice
    first = -(-have // 2)
    nodes = {"first-half": range(first), "second-half": range(first, have), "all": range(have)}[choice]
    if not nodes:
        raise InputError(f"{what}: the {choice} of {have} node is 0 nodes: give at least 2 nodes")
    return tuple(nodes)


def _ranks(choice: NodeChoice, topology: Topology, what: str) -> tuple[int, ...]:
    return tuple(rank for node in _nodes(choice, topology, what) for rank in topology.ranks_of(node))


def source_ranks(scenario: Scenario, topology: Topology) -> tuple[int, ...]:
    """Ranks of the trainer. Raises InputError where the topology has not the nodes."""
    return _ranks(scenario.source.nodes, topology, f"scenario {scenario.name}, source")


def replica_ranks(scenario: Scenario, move: MoveConfig, topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Ranks of each replica, neighbours by number. Raises InputError, with the equation, where they do not fit."""
    what = f"scenario {scenario.name}, move {move.name}"
    return _replicas(what, "", move.tensor_parallel, move.replicas, move.nodes, topology)


def old_ranks(scenario: Scenario, move: MoveConfig, topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Ranks of each old replica, the lost ones too; none where the move has no old source. Raises InputError."""
    if move.from_tensor_parallel is None:
        return ()
    what = f"scenario {scenario.name}, move {move.name}, old replicas"
    return _replicas(what, "from_", move.from_tensor_parallel, move.from_replicas, move.from_nodes, topology)


def _replicas(
    what: str, prefix: str, degrees: Degrees, copies: int | None, nodes: NodeChoice, topology: Topology
) -> tuple[tuple[int, ...], ...]:
    """Neighbouring ranks of ``nodes`` for each replica; ``prefix`` is that of the keys in errors."""
    ranks = _ranks(nodes, topology, what)
    where = f"{len(ranks)} given ({_span(sorted({topology.node[rank] for rank in ranks}))})"
    hint = (
        "give more ranks or a smaller degree, pick other moves with --move, or plan it on a larger topology "
        "(plan --topology)"
    )
    if isinstance(degrees, tuple):
        if sum(degrees) > len(ranks):
            total = " + ".join(str(degree) for degree in degrees)
            raise InputError(f"{what}: {prefix}tensor_parallel {total} = {sum(degrees)} ranks asked, {where}: {hint}")
        ends = np.cumsum(degrees).tolist()
        return tuple(ranks[end - degree : end] for end, degree in zip(ends, degrees, strict=True))
    count = copies or max(1, len(ranks) // degrees)
    if degrees * count > len(ranks):
        raise InputError(
            f"{what}: {prefix}tensor_parallel {degrees} x {prefix}replicas {count} = {degrees * count} ranks asked, "
            f"{where}: {hint}"
        )
    if copies is None and len(ranks) % degrees:
        raise InputError(
            f"{what}: {len(ranks)} ranks ({_span(sorted({topology.node[rank] for rank in ranks}))}) % "
            f"{prefix}tensor_parallel {degrees} = {len(ranks) % degrees}, not 0: set {prefix}replicas, or give a "
            "multiple of the degree"
        )
    return tuple(ranks[k * degrees : (k + 1) * degrees] for k in range(count))


def _span(nodes: Sequence[int]) -> str:
    if len(nodes) == 1:
        return f"node {nodes[0]}"
    return f"nodes {nodes[0]} {'to' if len(nodes) > 2 else 'and'} {nodes[-1]}"


def source_layout(scenario: Scenario, topology: Topology) -> Layout:
    """Where the scenario's source, the trainer, holds the weights. Raises InputError, LayoutError."""
    geometry = scenario.model.geometry()
    specs = weight_specs(geometry)
    aliases = weight_aliases(geometry)
    if scenario.source.layout is not None:
        return _read_layout(Path(scenario.source.layout), specs, topology, aliases)
    return zero3_layout(specs, source_ranks(scenario, topology), topology.world_size, aliases=aliases)


def old_layout(scenario: Scenario, move: MoveConfig, topology: Topology) -> Layout:
    """Where the old replicas of ``move`` hold the weights, without the lost ranks. Raises InputError, LayoutError."""
    replicas = old_ranks(scenario, move, topology)
    layout = _replica_layout(scenario, replicas, topology, f"{move.name}-old")
    lost = set(move.from_lost_ranks or ())
    held = [rank for ranks in replicas for rank in ranks]
    if not lost:
        return layout
    what = f"scenario {scenario.name}, move {move.name}, from_lost_ranks"
    _refuse_strangers(what, lost, held, "the old replicas")
    if lost == set(held):
        raise InputError(f"{what}: no rank of the old replicas is left: leave 'old' out of from")
    return restrict_layout(layout, [rank for rank in held if rank not in lost])


def source_layouts(
    scenario: Scenario, move: MoveConfig, topology: Topology, trainer: Layout | None = None
) -> dict[SourceName, Layout]:
    """The layouts that ``move`` starts from by name, the preferred one first. Raises InputError, LayoutError.

    ``trainer`` stands for the scenario's own source (a live engine's layout).
    """
    found: dict[SourceName, Layout] = {}
    for name in move.sources:
        if name == "old":
            found[name] = old_layout(scenario, move, topology)
        else:
            found[name] = source_layout(scenario, topology) if trainer is None else trainer
    return found


def destination_layout(scenario: Scenario, move: MoveConfig, topology: Topology) -> Layout:
    """Where ``move`` brings the weights. Raises InputError, LayoutError."""
    geometry = scenario.model.geometry()
    what = f"scenario {scenario.name}, move {move.name}"
    specs, aliases = weight_specs(geometry), weight_aliases(geometry)
    if move.layout is not None:
        layout = _read_layout(Path(move.layout), specs, topology, aliases)
    elif move.kind == "zero3":
        layout = zero3_layout(specs, _ranks(move.nodes, topology, what), topology.world_size, move.name, aliases)
    else:
        layout = _replica_layout(scenario, replica_ranks(scenario, move, topology), topology, move.name)
    if move.only_ranks is None:
        return layout
    holders = sorted({int(rank) for place in layout.placements.values() for rank in np.unique(place.rank)})
    _refuse_strangers(f"{what}, only_ranks", move.only_ranks, holders, "the destination")
    return restrict_layout(layout, move.only_ranks)


def _replica_layout(scenario: Scenario, replicas: Sequence[Sequence[int]], topology: Topology, name: str) -> Layout:
    geometry = scenario.model.geometry()
    specs, cuts = weight_specs(geometry), tensor_parallel_cuts(geometry)
    return tensor_parallel_layout(specs, cuts, replicas, topology.world_size, name, weight_aliases(geometry))


def _refuse_strangers(what: str, ranks: Collection[int], held: Sequence[int], whose: str) -> None:
    outside = sorted(set(ranks) - set(held))
    if outside:
        known = ", ".join(str(rank) for rank in held[:16]) + (" ..." if len(held) > 16 else "")
        raise InputError(f"{what}: rank {outside[0]} holds no part of {whose} (its ranks: {known})")


def _read_layout(path: Path, specs: Mapping[str, TensorSpec], topology: Topology, aliases: Mapping[str, str]) -> Layout:
    entry = check(_LayoutFile, load_json(path, "layout"), str(path))
    unknown = sorted(set(entry.tensors) - set(specs))
    if unknown:
        raise InputError(f"{path}: the model has no weight {unknown[0]!r}: {nearest(unknown[0], specs)}")
    missing = [name for name in specs if name not in entry.tensors]
    if missing:
        raise LayoutError(f"{path}: weight {missing[0]} is held by no rank (and {len(missing) - 1} more)")
    placements = {name: _placement(path, specs[name], entry.tensors[name]) for name in specs}
    layout = Layout(path.stem, topology.world_size, dict(specs), placements, dict(aliases))
    layout.check()
    return layout


def _placement(path: Path, spec: TensorSpec, pieces: Sequence[_Piece]) -> Placement:
    dims = len(spec.shape)
    ordered = sorted(pieces, key=lambda piece: piece.rank)
    storage: dict[int, int] = {}
    offsets = []
    for piece in ordered:
        if len(piece.lo) != dims or len(piece.shape) != dims:
            raise LayoutError(
                f"{path}: weight {spec.name} has {dims} dims; rank {piece.rank} holds lo {list(piece.lo)}"
            )
        offsets.append(storage.get(piece.rank, 0))
        storage[piece.rank] = offsets[-1] + int(np.prod(piece.shape, dtype=np.int64))
    box = (len(ordered), dims)
    return Placement(
        rank=np.asarray([piece.rank for piece in ordered], dtype=np.int64),
        lo=np.asarray([piece.lo for piece in ordered], dtype=np.int64).reshape(box),
        shape=np.asarray([piece.shape for piece in ordered], dtype=np.int64).reshape(box),
        offset=np.asarray(offsets, dtype=np.int64),
        stride=np.asarray([row_major_strides(piece.shape) for piece in ordered], dtype=np.int64).reshape(box),
        storage=storage,
        copy=np.asarray([piece.copy_number for piece in ordered], dtype=np.int64),
    )

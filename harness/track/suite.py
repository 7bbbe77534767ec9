"""Suites of ``track``: the moves that a launch measures, from TOML, and the layouts behind each. No torch import.

``suite = load_suite("ci")`` reads a shipped suite, or a file; ``ends(case, suite, topology)`` gives the layouts between
which a case moves. Weights and states are metadata with random bits: nothing trains, and no model is built.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from relaymeter.errors import InputError, RelaymeterError
from relaymeter.harness.config import Config, Count, ModelConfig, Name, NodeChoice, nearest, read_toml
from relaymeter.harness.models import tensor_parallel_cuts, weight_specs
from relaymeter.records import read_input
from relaymeter.relayout.layout import ITEMSIZE, Layout, TensorSpec
from relaymeter.relayout.placements import Cut, tensor_parallel_layout, zero3_layout, zero12_layout
from relaymeter.relayout.routes import ROUTES
from relaymeter.relayout.topology import Topology
from relaymeter.units import parse_bytes, parse_rate

__all__ = [
    "TIMES",
    "CaseConfig",
    "SideConfig",
    "TensorConfig",
    "TrackSuite",
    "WorldConfig",
    "config_hash",
    "ends",
    "exact_toml",
    "load_suite",
    "select_cases",
    "shipped_track_suites",
    "suite_path",
]

#: What is timed of every case, where its ``times`` do not name fewer.
TIMES = ("move_s", "pack_s", "communicate_s", "unpack_s", "plan_s")
_LEAST_BUCKET = 4096
#: More than a machine holds: of ranks of a suite, and of bytes of the tensors of a case.
_MOST_RANKS, _MOST_BYTES = 4096, 2**50
#: What is told of a file that is wrong in many places.
_MOST_WRONG = 8


def _rate(value: Any) -> Any:
    if value == "none":
        return None
    try:
        found = parse_rate(value) if isinstance(value, str) else value
    except RelaymeterError as error:
        raise ValueError(f"{error}, or 'none'") from error
    number = isinstance(found, int | float) and not isinstance(found, bool) and 0 < found < math.inf
    if found is not None and not number:  # a number is bytes per second, as what ranks are told has it
        raise ValueError("give 'none', or a rate such as '400mbit'")
    return found


def _size(value: Any) -> Any:
    try:
        found = parse_bytes(value) if isinstance(value, str) else value
    except RelaymeterError as error:
        raise ValueError(str(error)) from error
    if type(found) is not int or found < _LEAST_BUCKET:
        raise ValueError(f"give a size such as '1MiB', at least {_LEAST_BUCKET} bytes")
    return found


def _one_of(value: Any, valid: Sequence[str]) -> Any:
    if not isinstance(value, str) or value not in valid:
        raise ValueError(nearest(str(value), valid))
    return value


def _times(value: Any) -> Any:
    names = list(value) if isinstance(value, list | tuple) else [value]
    if len(set(map(str, names))) != len(names):
        raise ValueError(f"give a list of different times: {', '.join(TIMES)}")
    return tuple(_one_of(name, TIMES) for name in names)


Rate = Annotated[float | None, BeforeValidator(_rate)]
Size = Annotated[int, BeforeValidator(_size)]
Times = Annotated[tuple[str, ...], BeforeValidator(_times)]
Route = Annotated[str, BeforeValidator(lambda value: _one_of(value, ROUTES))]
#: Any bits are a value of these, so that random ones arrive as they left.
_DTYPES = tuple(name for name in ITEMSIZE if name != "bool")
Dtype = Annotated[str, BeforeValidator(lambda value: _one_of(value, _DTYPES))]


class WorldConfig(Config):
    """The ranks of a launch."""

    nodes: Count = 2
    """Nodes."""
    ranks_per_node: Count = 2
    """Ranks on each of them."""
    nic_rate_bytes_per_s: Rate = Field(default=None, alias="nic")
    """``none``: ranks on loopback, nodes only declared, on any machine; a rate such as ``400mbit``: network namespaces
    whose NICs the kernel holds to it, which needs root."""
    nic_per: Literal["rank", "node"] = "rank"
    """One NIC for each rank, or one shared by the ranks of a node."""

    @model_validator(mode="after")
    def _ranks_fit(self) -> WorldConfig:
        if self.ranks > _MOST_RANKS:
            raise ValueError(
                f"nodes {self.nodes} x ranks_per_node {self.ranks_per_node} = {self.ranks} ranks: a suite has at most "
                f"{_MOST_RANKS}"
            )
        return self

    @property
    def ranks(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.ranks_per_node


class TensorConfig(Config):
    """Tensors of plain dims, for a case without a model."""

    shape: Annotated[tuple[Count, ...], Field(min_length=1, max_length=8)]
    """Shape of each."""
    count: Annotated[int, Field(strict=True, ge=1, le=100_000)] = 1
    """How many of them."""
    cut: int | None = 0
    """Dim along which tensor parallelism cuts them."""

    @model_validator(mode="after")
    def _cut_is_a_dim(self) -> TensorConfig:
        if self.cut is not None and not 0 <= self.cut < len(self.shape):
            raise ValueError(f"cut {self.cut} is no dim of a tensor of shape {list(self.shape)}")
        return self


class SideConfig(Config):
    """What a case moves from, or to."""

    kind: Literal["zero3", "zero12", "replicas"]
    """``zero3``: each tensor flattened and cut over the ranks; ``zero12``: all tensors in one flat buffer, cut over the
    ranks, as optimizer states are; ``replicas``: tensor-parallel copies."""
    nodes: NodeChoice
    """Nodes whose ranks hold it."""
    tensor_parallel: Count = 1
    """Ranks of one copy, neighbours by rank; there are as many copies as the ranks give (``replicas``)."""

    @model_validator(mode="after")
    def _degree_needs_replicas(self) -> SideConfig:
        if self.kind != "replicas" and self.tensor_parallel != 1:
            raise ValueError(f"kind {self.kind!r} takes no tensor_parallel: it is cut over all ranks of nodes")
        return self


class CaseConfig(Config):
    """One move that every launch of the suite measures."""

    name: Name
    """Name of the case in tables and in the history."""
    model: str | None = None
    """What moves: a model of ``[models]``; or ``tensors``."""
    tensors: tuple[TensorConfig, ...] | None = None
    """What moves: tensors of plain dims; or ``model``."""
    dtype: Dtype = "bfloat16"
    """Their dtype."""
    source: SideConfig = Field(alias="from")
    """Where they are."""
    destination: SideConfig = Field(alias="to")
    """Where they go."""
    route: Route = "direct"
    """Route of every block."""
    executor: Literal["auto", "send-recv", "all-to-all"] = "auto"
    """Exchange of a round; auto: by the backend."""
    planner: Literal["classes", "affine"] = "classes"
    """Planner; ``affine`` needs DeepSpeed, whose import makes a launch slow."""
    bucket_bytes: Size | None = Field(default=None, alias="bucket")
    """Bytes of a bucket, such as ``1MiB``; by default by the move's size."""
    times: Times = TIMES
    """What is timed: fewer where a part is too short to be told from noise, none where only exact metrics count."""

    @model_validator(mode="after")
    def _moves_one_thing(self) -> CaseConfig:
        if (self.model is None) == (not self.tensors):
            raise ValueError("give what moves: either model or tensors")
        return self


class TrackSuite(Config):
    """A suite: one world and the cases that are measured in it."""

    name: Name
    """Name of the suite: by default the file's name without its ending."""
    repeats: Annotated[int, Field(strict=True, ge=1, le=1000)] = 9
    """Timed repeats of every case in a launch."""
    warmups: Annotated[int, Field(strict=True, ge=0, le=100)] = 2
    """Repeats before them that are not timed."""
    plan_repeats: Annotated[int, Field(strict=True, ge=1, le=1000)] = 9
    """How often planning is timed in a launch, spread over the repeats; at most as often."""
    world: WorldConfig = WorldConfig()
    """The ranks."""
    models: dict[str, ModelConfig] = Field(default_factory=dict)
    """Models by name, Qwen3-shaped: metadata alone."""
    cases: Annotated[tuple[CaseConfig, ...], Field(min_length=1)]
    """What is measured."""

    @model_validator(mode="after")
    def _cases_fit(self) -> TrackSuite:
        names = [case.name for case in self.cases]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two [[cases]] are named {twice!r}: give each a name of its own")
        topology = self.topology()
        for case in self.cases:
            if case.model is not None and case.model not in self.models:
                raise ValueError(f"case {case.name}: no model {case.model!r}: {nearest(case.model, self.models)}")
            held = sum(spec.nbytes for spec in _tensors(case, self)[0].values())
            if held > _MOST_BYTES:
                raise ValueError(f"case {case.name}: its tensors have {held} bytes together: at most {_MOST_BYTES}")
            try:
                ends(case, self, topology)
            except InputError as error:
                raise ValueError(f"case {case.name}: {error}") from error
        return self

    def topology(self) -> Topology:
        """Ranks and nodes as the suite asks for them, one NIC for each rank or node."""
        return Topology.grid(self.world.nodes, self.world.ranks_per_node, nic_per=self.world.nic_per)


def shipped_track_suites() -> tuple[str, ...]:
    """Names of the suites that come with the package."""
    folder = files("relaymeter.harness") / "suites"
    return tuple(sorted(e.name.removesuffix(".toml") for e in folder.iterdir() if e.name.endswith(".toml")))


def suite_path(text: str) -> Path:
    """The file of the shipped suite named ``text``, or ``text`` itself where it names a file. Raises InputError."""
    if not text:
        raise InputError("--suite '' names no suite: give a shipped one, or a path ending in .toml")
    if Path(text).suffix == ".toml" or "/" in text:
        return Path(text)
    names = shipped_track_suites()
    if text not in names:
        raise InputError(f"unknown suite {text!r}: {nearest(text, names)}, or a path ending in .toml")
    return Path(str(files("relaymeter.harness") / "suites" / f"{text}.toml"))


def load_suite(text: str) -> TrackSuite:
    """The shipped suite named ``text``, or the one in the TOML file ``text``. Raises InputError, which names all that
    is wrong in the file."""
    path = suite_path(text)
    read_input(path, "suite")  # why: the errors of read_toml call any file a scenario
    try:
        return read_toml(path, TrackSuite, name=path.stem)
    except InputError as error:
        more = _more_wrong(error.__cause__)
        raise InputError(f"{error}{more}") from error if more else error.__cause__


def _more_wrong(cause: BaseException | None) -> str:
    """What a file has wrong besides the first, as ``; also wrong: repeats, cases.1.foo``."""
    found = cause.errors(include_url=False) if isinstance(cause, ValidationError) else []
    # why: a list whose only entry is wrong counts as empty besides
    inner = {entry["loc"][:depth] for entry in found for depth in range(len(entry["loc"]))}
    found = [entry for entry in found if entry["loc"] not in inner]
    told = next((entry for entry in found if entry["type"] == "extra_forbidden"), found[0] if found else None)
    places = [
        ".".join(str(part + 1 if isinstance(part, int) else part) for part in entry["loc"])
        + (" (unknown)" if entry["type"] == "extra_forbidden" else " (missing)" if entry["type"] == "missing" else "")
        for entry in found
        if entry is not told and entry["loc"]
    ]
    shown = ", ".join(dict.fromkeys(places[:_MOST_WRONG]))
    left = len(places) - _MOST_WRONG
    return f"; also wrong: {shown}" + (f" and {left} more" if left > 0 else "") if places else ""


def select_cases(suite: TrackSuite, names: Sequence[str] | None) -> TrackSuite:
    """The suite with only the cases of these names (None: all). Raises InputError on a name that it has not."""
    if not names:
        return suite
    have = [case.name for case in suite.cases]
    for name in names:
        if name not in have:
            raise InputError(f"suite {suite.name} has no case {name!r}: {nearest(name, have)}")
    return suite.model_copy(update={"cases": tuple(case for case in suite.cases if case.name in names)})


def exact_toml(suite: TrackSuite) -> str:
    """The suite as TOML with one repeat of every case, no warm-up and one planning: enough for what is exact, which is
    the same in every repeat. Nothing that was left out is written, so that older versions read it."""
    quick = suite.model_copy(update={"repeats": 1, "warmups": 0, "plan_repeats": 1})
    content = quick.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
    return "".join(f"{_key(name)} = {_toml(value)}\n" for name, value in content.items())


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    """A value on one line: JSON's texts, numbers and lists are TOML's too."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(name)} = {_toml(inner)}" for name, inner in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def config_hash(suite: TrackSuite, how: Mapping[str, Any]) -> str:
    """Hash of what a launch measured and of ``how`` its ranks were started: times of different ones are not
    compared."""
    content = suite.model_dump(mode="json", by_alias=True, exclude={"name"})
    text = json.dumps({"suite": content, "how": dict(how)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def ends(case: CaseConfig, suite: TrackSuite, topology: Topology) -> tuple[Layout, Layout]:
    """Layouts that a case moves from and to, over the ranks of ``topology``. Pure. Raises InputError, LayoutError."""
    specs, cuts = _tensors(case, suite)
    return _layout(case.source, specs, cuts, topology, "from"), _layout(case.destination, specs, cuts, topology, "to")


def _tensors(case: CaseConfig, suite: TrackSuite) -> tuple[dict[str, TensorSpec], dict[str, Cut]]:
    if case.model is not None:
        geometry = suite.models[case.model].geometry()
        specs = {name: TensorSpec(name, spec.shape, case.dtype) for name, spec in weight_specs(geometry).items()}
        return specs, tensor_parallel_cuts(geometry)
    made: dict[str, TensorSpec] = {}
    cuts: dict[str, Cut] = {}
    for number, entry in enumerate(case.tensors or ()):
        for copy in range(entry.count):
            name = f"tensor.{number}.{copy}"
            made[name], cuts[name] = TensorSpec(name, entry.shape, case.dtype), Cut(entry.cut)
    return made, cuts


def _layout(
    side: SideConfig, specs: Mapping[str, TensorSpec], cuts: Mapping[str, Cut], topology: Topology, key: str
) -> Layout:
    homes: dict[int, list[int]] = {}
    for rank, node in enumerate(topology.node):
        homes.setdefault(node, []).append(rank)
    ranks = [rank for node in _nodes(side.nodes, topology.nodes, key) for rank in homes[node]]
    if side.kind == "zero3":
        return zero3_layout(specs, ranks, topology.world_size, name=key)
    if side.kind == "zero12":
        return zero12_layout(specs, ranks, topology.world_size, name=key)
    degree = side.tensor_parallel
    if len(ranks) % degree:
        raise InputError(f"{key}: {len(ranks)} ranks % tensor_parallel {degree} = {len(ranks) % degree}, not 0")
    copies = [ranks[at : at + degree] for at in range(0, len(ranks), degree)]
    return tensor_parallel_layout(specs, cuts, copies, topology.world_size, name=key)


def _nodes(choice: NodeChoice, have: int, key: str) -> Sequence[int]:
    if isinstance(choice, str):
        first = -(-have // 2)
        found: Sequence[int] = {"first-half": range(first), "second-half": range(first, have), "all": range(have)}[
            choice
        ]
        if not found:
            raise InputError(f"{key}: the {choice} of {have} node is 0 nodes: give at least 2 nodes")
        return found
    outside = [node for node in choice if node >= have]
    if outside:
        raise InputError(f"{key}: node {outside[0]} of {have} nodes (numbered 0 to {have - 1})")
    return choice

"""Configuration: TOML and JSON read into frozen, keyword-only models that refuse what they do not know.

``read_toml(path, Scenario)`` gives a checked Scenario or one line of InputError that names file, key and what is valid.
What the ranks of a command are told is in ``jobs``. No torch import.
"""

from __future__ import annotations

import difflib
import re
import sys
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from relaymeter.errors import InputError
from relaymeter.harness.models import Qwen3Geometry
from relaymeter.records import read_input

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "EXECUTOR_CHOICES",
    "PLANNER_CHOICES",
    "Config",
    "Count",
    "Degrees",
    "ExecutorChoice",
    "ModelConfig",
    "MoveConfig",
    "Name",
    "NodeChoice",
    "PlannerChoice",
    "Scenario",
    "Seconds",
    "SourceConfig",
    "SourceName",
    "SuiteConfig",
    "Whole",
    "check",
    "named",
    "nearest",
    "read_toml",
    "toml_entry",
]

_HALVES = ("first-half", "second-half", "all")
#: Where a move may start from: the scenario's source, or the replicas that the move replaces.
SourceName = Literal["trainer", "old"]
_SOURCES = ("trainer", "old", "both")
#: What ``--planner`` and ``--executor`` take.
PlannerChoice = Literal["classes", "affine", "both"]
ExecutorChoice = Literal["auto", "send-recv", "all-to-all", "both"]
PLANNER_CHOICES: tuple[str, ...] = typing.get_args(PlannerChoice)
EXECUTOR_CHOICES: tuple[str, ...] = typing.get_args(ExecutorChoice)


def nearest(value: str, valid: Iterable[str]) -> str:
    """The end of an error line: the near match of ``value``, if there is one, and everything that is valid."""
    names = sorted(valid)
    close = difflib.get_close_matches(value, names, n=1, cutoff=0.7)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}valid: {', '.join(names)}"


def _node_choice(value: Any) -> Any:
    if isinstance(value, str) and value in _HALVES:
        return value
    whole = isinstance(value, list | tuple) and value and all(type(node) is int and node >= 0 for node in value)
    if not whole or len(set(value)) != len(value):
        hint = f" ({nearest(value, _HALVES)})" if isinstance(value, str) else ""
        raise ValueError(f"give {', '.join(repr(h) for h in _HALVES)} or a list of different node numbers{hint}")
    return tuple(value)


def _numbers(value: Any, least: int) -> bool:
    """Whether ``value`` is a list of at least one whole number from ``least`` up."""
    return isinstance(value, list | tuple) and bool(value) and all(type(n) is int and n >= least for n in value)


def _degrees(value: Any) -> Any:
    if _numbers(value, 1) and max(value) <= MAX_COUNT:
        return tuple(value)
    if type(value) is not int or not 1 <= value <= MAX_COUNT:
        raise ValueError("give the ranks of one replica, at least 1, or a list with the ranks of each replica")
    return value


def _rank_list(value: Any) -> Any:
    if not _numbers(value, 0) or len(set(value)) != len(value):
        raise ValueError("give a list of different rank numbers, such as [5]")
    return tuple(value)


def _sources(value: Any) -> Any:
    if value == "both":
        return ("old", "trainer")
    if isinstance(value, str) and value in _SOURCES:
        return (value,)
    names = [name for name in value if isinstance(name, str)] if isinstance(value, list | tuple) else []
    if not names or len(names) != len(value) or len(set(names)) != len(names) or not set(names) <= {"trainer", "old"}:
        hint = f" ({nearest(value, _SOURCES)})" if isinstance(value, str) else ""
        raise ValueError(f"give 'trainer', 'old', 'both', or a list of the first two, the preferred one first{hint}")
    return tuple(names)


_NAME = "1 to 100 letters, digits, '.', '_' or '-', the first one no '.'"


def _name(value: Any) -> Any:
    """Names stand in tables, in records and in names of folders."""
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", value):
        raise ValueError(f"give {_NAME}")
    return value


#: The most that a number in a file may be: every product of a few stays exact, and a slip of the finger is refused.
MAX_COUNT = 2**40
Count = Annotated[int, Field(strict=True, ge=1, le=MAX_COUNT)]
Whole = Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
#: Name of a scenario or a move.
Name = Annotated[str, BeforeValidator(_name)]
#: Nodes of a topology: a half of them by number (the first one is the larger), all, or a list of numbers.
NodeChoice = Annotated[Literal["first-half", "second-half", "all"] | tuple[int, ...], BeforeValidator(_node_choice)]
#: Ranks of one replica where all are alike, or of each replica.
Degrees = Annotated[int | tuple[int, ...], BeforeValidator(_degrees)]
#: Ranks of the world.
RankList = Annotated[tuple[int, ...], BeforeValidator(_rank_list)]
#: Where a move starts from, the preferred source first.
SourceNames = Annotated[tuple[SourceName, ...], BeforeValidator(_sources)]


class Config(BaseModel):
    """Base of every configuration: frozen, keyword-only, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelConfig(Config):
    """Geometry of a Qwen3-shaped causal language model (dense, grouped-query attention)."""

    hidden_size: Count
    """Width of the residual stream."""
    intermediate_size: Count
    """Width of the gated feed-forward block."""
    num_hidden_layers: Annotated[int, Field(strict=True, ge=1, le=10_000)]
    """Decoder layers."""
    num_attention_heads: Count
    """Query heads."""
    num_key_value_heads: Count
    """Key and value heads; divides the query heads."""
    head_dim: Count
    """Elements of one head."""
    vocab_size: Count
    """Rows of the embedding."""
    tie_word_embeddings: bool = False
    """Whether the output head shares the embedding's storage."""

    @model_validator(mode="after")
    def _geometry_holds(self) -> ModelConfig:
        try:
            self.geometry()
        except InputError as error:
            raise ValueError(str(error)) from error
        return self

    def geometry(self) -> Qwen3Geometry:
        """The same numbers as the model builder takes them, in bfloat16."""
        return Qwen3Geometry(**self.model_dump())


class SourceConfig(Config):
    """Where the weights are before a move."""

    kind: Literal["zero3", "file"] = "zero3"
    """``zero3``: partitions of a DeepSpeed ZeRO-3 trainer. ``file``: a layout written out as JSON (plan and choose)."""
    nodes: NodeChoice = "first-half"
    """Nodes whose ranks train (``zero3``)."""
    steps: Count = 2
    """Training steps before the first move."""
    seed: Whole = 0
    """Seed of the random weights and batches."""
    layout: str | None = None
    """Layout file for ``file``, relative to the scenario file."""

    @model_validator(mode="after")
    def _file_has_layout(self) -> SourceConfig:
        if (self.kind == "file") != (self.layout is not None):
            raise ValueError(
                f'kind {self.kind!r} {"needs" if self.kind == "file" else "takes no"} layout = "FILE.json"'
            )
        return self


class MoveConfig(Config):
    """One move: where the weights go, and which layouts they come from."""

    name: Name
    """Name of the move in tables and records."""
    kind: Literal["replicas", "zero3"] = "replicas"
    """What the weights become: tensor-parallel ``replicas``, or partitions of ``zero3`` over the ranks of ``nodes``."""
    tensor_parallel: Degrees = 1
    """Ranks of one replica, neighbours by rank; a list gives the ranks of each replica."""
    replicas: Count | None = None
    """Copies of the model; by default as many as the ranks of ``nodes`` hold."""
    nodes: NodeChoice = "second-half"
    """Nodes whose ranks hold the replicas."""
    only_ranks: RankList | None = None
    """The ranks whose shards move, such as one that was lost; by default all that hold a part."""
    layout: str | None = None
    """Layout file instead of replicas, relative to the scenario file."""
    sources: SourceNames = Field(default=("trainer",), alias="from")
    """``trainer``: the scenario's source; ``old``: replicas that hold the weights; ``both``: old, then trainer."""
    from_tensor_parallel: Degrees | None = None
    """Ranks of one old replica, or a list; needed where the old replicas are a source."""
    from_replicas: Count | None = None
    """Old copies of the model; by default as many as the ranks of ``from_nodes`` hold."""
    from_nodes: NodeChoice = "second-half"
    """Nodes whose ranks hold the old replicas."""
    from_lost_ranks: RankList | None = None
    """Ranks of the old replicas whose shards are lost."""

    @model_validator(mode="after")
    def _keys_fit(self) -> MoveConfig:
        old = {
            "from_tensor_parallel": self.from_tensor_parallel is not None,
            "from_replicas": self.from_replicas is not None,
            "from_nodes": self.from_nodes != "second-half",
            "from_lost_ranks": self.from_lost_ranks is not None,
        }
        given = [key for key, is_given in old.items() if is_given]
        if "old" not in self.sources and given:
            raise ValueError(f"{given[0]} says what the old replicas are: it needs from = 'old' or 'both'")
        if "old" in self.sources and self.from_tensor_parallel is None:
            raise ValueError("from_tensor_parallel is missing: it says how the old replicas are cut")
        if self.kind == "zero3" and (self.tensor_parallel != 1 or self.replicas or self.layout):
            key = "layout" if self.layout else "replicas" if self.replicas else "tensor_parallel"
            raise ValueError(f"kind 'zero3' takes no {key}: every rank of nodes gets a partition")
        for prefix, degrees, copies in (
            ("", self.tensor_parallel, self.replicas),
            ("from_", self.from_tensor_parallel, self.from_replicas),
        ):
            if isinstance(degrees, tuple) and copies is not None:
                raise ValueError(
                    f"{prefix}tensor_parallel {list(degrees)} gives each of {len(degrees)} replicas its ranks: "
                    f"leave {prefix}replicas out"
                )
        return self

    def degrees(self) -> tuple[tuple[str, int], ...]:
        """Every tensor-parallel degree that the move names, new and old, with its key."""
        found: list[tuple[str, int]] = []
        for key in ("tensor_parallel", "from_tensor_parallel"):
            given = getattr(self, key)
            found += [(key, degree) for degree in ([given] if isinstance(given, int) else given or ())]
        return tuple(dict.fromkeys(found))


class SuiteConfig(Config):
    """What ``run --suite`` takes where the command line says nothing else."""

    planner: PlannerChoice = "classes"
    """Planner, or both side by side."""
    executor: ExecutorChoice = "auto"
    """Executor, or both side by side."""
    repeats: Count = 5
    """Timed repeats of each row."""
    bucket_bytes: Annotated[int, Field(strict=True, ge=4096, le=MAX_COUNT)] | None = None
    """Bytes of a bucket on one rank; by default by the move's size."""
    nodes: Count = 2
    """Nodes of the cluster to start where there is no profile."""
    ranks_per_node: Count = 2
    """Ranks on each of them."""


class Scenario(Config):
    """A whole case: model, source and one or more moves. The same file serves any topology."""

    kind: Literal["weights"] = "weights"
    """Which kind of scenario this is: moves of a model's weights."""
    name: Name
    """Name of the scenario: by default the file's name without its ending."""
    model: ModelConfig
    """The model that moves."""
    source: SourceConfig = SourceConfig()
    """Where it is."""
    moves: Annotated[tuple[MoveConfig, ...], Field(min_length=1)]
    """Where it goes, and from which source."""
    suite: SuiteConfig | None = None
    """Defaults of ``run --suite``; None: the scenario is no suite."""

    @model_validator(mode="after")
    def _moves_fit(self) -> Scenario:
        names = [move.name for move in self.moves]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two [[moves]] are named {twice[0]!r}: give each a name of its own")
        for move in self.moves:
            for key, degree in move.degrees():
                left = self.model.num_attention_heads % degree
                if left:
                    raise ValueError(
                        f"move {move.name}: num_attention_heads {self.model.num_attention_heads} % {key} "
                        f"{degree} = {left}, not 0"
                    )
                groups = self.model.num_key_value_heads
                if groups % degree and degree % groups:
                    raise ValueError(
                        f"move {move.name}: num_key_value_heads {groups} and {key} {degree}: neither is a multiple of "
                        "the other, so a rank's query heads would lack their key and value heads"
                    )
        return self


_Model = TypeVar("_Model", bound=Config)


def check(model: type[_Model], value: Any, place: str) -> _Model:
    """``value`` as a ``model``. Raises InputError: one line with ``place``, the key, the value and what is valid."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise InputError(f"{place}: {_explain(model, error)}") from error


def read_toml(path: Path, model: type[_Model], **defaults: Any) -> _Model:
    """The TOML file at ``path`` as a ``model``; ``defaults`` stand in for top-level keys it leaves out.

    Raises InputError (missing, malformed, unknown key, bad value).
    """
    entry = toml_entry(path)
    return check(model, {**defaults, **(named(path, entry) if "name" in defaults else entry)}, str(path))


def named(path: Path, entry: Mapping[str, Any]) -> dict[str, Any]:
    """``entry``, the tables of the file at ``path``, with the file's name where it gives none. Raises InputError where
    that is no name."""
    if "name" not in entry:
        try:
            _name(path.stem)
        except ValueError as error:
            raise InputError(
                f"{path}: name = {path.stem!r}, which is the file's, is no name ({_NAME}): give the file another, or a "
                'name in it, such as name = "mine"'
            ) from error
    return {"name": path.stem, **entry}


def toml_entry(path: Path) -> dict[str, Any]:
    """The tables of the TOML file at ``path``, unchecked. Raises InputError (missing, malformed)."""
    try:
        return tomllib.loads(read_input(path, "scenario"))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{path} is not valid TOML: {error}") from error


def _explain(model: type[Config], error: ValidationError) -> str:
    found = error.errors(include_url=False)
    first = next((entry for entry in found if entry["type"] == "extra_forbidden"), found[0])
    entry, key = _entry_and_key(first["loc"])
    if first["type"] == "extra_forbidden":
        return f"{entry}unknown key {key!r}: {nearest(str(first['loc'][-1]), _keys_at(model, first['loc'][:-1]))}"
    if first["type"] == "missing":
        return f"{entry}key {key!r} is missing"
    if first["type"] in ("model_type", "model_attributes_type"):
        where = f"{entry}{key}".removesuffix(", ")
        return (
            f"{where}{': ' if where else ''}expected a table with the keys {', '.join(_keys_at(model, first['loc']))}"
        )
    text = first["msg"].removeprefix("Value error, ").replace("tuple", "list").replace("Tuple", "List")
    if not key:
        return f"{entry}{text}"
    given = first["input"]
    where = f"{entry}key {key!r}" if entry else key
    return f"{where} = {given!r}: {text}" if isinstance(given, str | int | float | list | tuple) else f"{where}: {text}"


def _entry_and_key(loc: tuple[int | str, ...]) -> tuple[str, str]:
    """The entry of a list that ``loc`` leads into, counted from 1 (``"[[moves]] number 2, "``), and the key in it."""
    entry, names = "", []
    for part in loc:
        if isinstance(part, str):
            names.append(part)
        else:
            table = ".".join(names)
            entry += f"{f'[[{table}]]' if table in ('moves', 'changes') else table} number {part + 1}, "
            names = []
    return entry, ".".join(names)


def _keys_at(model: type[Config], loc: tuple[int | str, ...]) -> list[str]:
    for part in loc:
        if isinstance(part, str) and part in model.model_fields:
            inner = _config_in(model.model_fields[part].annotation)
            model = inner or model
    return [field.alias or name for name, field in model.model_fields.items()]


def _config_in(annotation: Any) -> type[Config] | None:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return annotation
    for argument in typing.get_args(annotation):
        found = _config_in(argument)
        if found is not None:
            return found
    return None

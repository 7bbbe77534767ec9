"""Configuration: TOML and JSON read into frozen, keyword-only models that refuse what they do not know.

``read_toml(path, Scenario)`` gives a checked Scenario or one line of InputError that names file, key and what is valid.
No torch import.
"""

from __future__ import annotations

import difflib
import sys
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from relaymeter.errors import InputError
from relaymeter.harness.models import Qwen3Geometry

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "CalibrateJob",
    "ClusterConfig",
    "Config",
    "Fault",
    "ModelConfig",
    "MoveConfig",
    "NodeChoice",
    "RunJob",
    "RunStamp",
    "Scenario",
    "SourceConfig",
    "check",
    "nearest",
    "read_toml",
]

_HALVES = ("first-half", "second-half", "all")


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


#: The most that a number in a file may be: every product of a few stays exact, and a slip of the finger is refused.
MAX_COUNT = 2**40
Count = Annotated[int, Field(strict=True, ge=1, le=MAX_COUNT)]
Whole = Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
#: Nodes of a topology: a half of them by number (the first one is the larger), all, or a list of numbers.
NodeChoice = Annotated[Literal["first-half", "second-half", "all"] | tuple[int, ...], BeforeValidator(_node_choice)]


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
    """One move: the tensor-parallel replicas, or the layout file, that the weights go to."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    """Name of the move in tables and records."""
    tensor_parallel: Count = 1
    """Ranks of one replica, neighbours by rank."""
    replicas: Count | None = None
    """Copies of the model; by default as many as the ranks of ``nodes`` hold."""
    nodes: NodeChoice = "second-half"
    """Nodes whose ranks hold the replicas."""
    layout: str | None = None
    """Layout file instead of replicas, relative to the scenario file."""


class Scenario(Config):
    """A whole case: model, source and one or more moves. The same file serves any topology."""

    name: str
    """Name of the scenario: the file's name without its ending."""
    model: ModelConfig
    """The model that moves."""
    source: SourceConfig = SourceConfig()
    """Where it is."""
    moves: Annotated[tuple[MoveConfig, ...], Field(min_length=1)]
    """Where it goes: every move starts from the source."""

    @model_validator(mode="after")
    def _moves_fit(self) -> Scenario:
        names = [move.name for move in self.moves]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two [[moves]] are named {twice[0]!r}: give each a name of its own")
        for move in self.moves:
            left = self.model.num_attention_heads % move.tensor_parallel
            if left:
                raise ValueError(
                    f"move {move.name}: num_attention_heads {self.model.num_attention_heads} % tensor_parallel "
                    f"{move.tensor_parallel} = {left}, not 0"
                )
        return self


class Fault(Config):
    """A fault for tests, put into the last repeat of a move: what breaks, on which rank."""

    kind: Literal["flip", "kill", "stop"]
    """``flip`` one received bit, ``kill`` (SIGKILL) or ``stop`` (SIGSTOP) the rank in the middle of the move."""
    rank: Whole
    """Rank it happens on."""


class ClusterConfig(Config):
    """The ranks that a command starts on this machine."""

    nodes: Count
    """Nodes."""
    ranks_per_node: Count
    """Ranks on each of them."""
    nic_per: Literal["rank", "node"] = "rank"
    """One NIC for each rank, or one shared by the ranks of a node."""
    nic_rate_bytes_per_s: Annotated[float, Field(gt=0)] | None = None
    """What a NIC passes each way, headers included; None: unshaped."""
    shape: bool = True
    """Whether the nodes are network namespaces of their own (needs root), or only declared on loopback."""


class RunStamp(Config):
    """What the rows of a launch have in common."""

    utc: str
    """When the launch began, ISO 8601."""
    launch_id: str
    """Shared by the rows of the launch."""
    machine_id: str
    """Hash of the environment that matters."""
    commit: str | None
    """Source revision, if this is a checkout."""
    mismatch: tuple[str, ...] = ()
    """Where the profile's fingerprint differs from this machine."""
    shaped: bool = False
    """Whether the kernel holds the NICs' rates."""


class CalibrateJob(Config):
    """What every rank of ``calibrate`` is told."""

    kind: Literal["calibrate"] = "calibrate"
    """Which job this is."""
    executor: str
    """Executor whose exchanges are measured."""
    quick: bool
    """Fewer sizes and samples: seconds instead of a minute, wider intervals."""
    budget_s: Seconds | None
    """Time after which no further cell is begun; None for the default."""
    time_limit_s: Seconds
    """Limit of the whole job."""
    nic_per: Literal["rank", "node"] | None = None
    """NICs as declared, in a world that this command did not make; None: as the ranks see them."""
    cluster: ClusterConfig | None = None
    """How the ranks were started, kept in the profile; None in a world that was joined."""


class RunJob(Config):
    """What every rank of ``run`` is told."""

    kind: Literal["run"] = "run"
    """Which job this is."""
    scenario: Scenario
    """The whole scenario."""
    profile: str
    """Path of the profile to price with."""
    executor: str
    """Executor of the rounds."""
    bucket_bytes: Count | None
    """Bytes of a bucket; None: by the move's size."""
    repeats: Count
    """Timed repeats of each route."""
    time_limit_s: Seconds
    """Limit of the whole job."""
    move_limit_s: Seconds
    """Limit of one move."""
    allow_mismatch: bool = False
    """Whether a profile of another topology may price this one."""
    nic_per: Literal["rank", "node"] | None = None
    """NICs as declared, in a world that this command did not make."""
    stamp: RunStamp
    """What the rows have in common."""
    fault: Fault | None = None
    """A fault to put in (tests)."""


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
    try:
        entry = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid TOML: {error}") from error
    return check(model, {**defaults, **entry}, str(path))


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
            entry += f"{f'[[{table}]]' if table == 'moves' else table} number {part + 1}, "
            names = []
    return entry, ".".join(names)


def _keys_at(model: type[Config], loc: tuple[int | str, ...]) -> list[str]:
    for part in loc:
        if isinstance(part, str) and part in model.model_fields:
            inner = _config_in(model.model_fields[part].annotation)
            model = inner or model
    return list(model.model_fields)


def _config_in(annotation: Any) -> type[Config] | None:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return annotation
    for argument in typing.get_args(annotation):
        found = _config_in(argument)
        if found is not None:
            return found
    return None

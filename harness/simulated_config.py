"""What a simulated cluster is made of: its rates, its executors and its faults, as frozen models read from TOML.

``load_spec("h100-16x8")`` reads a shipped preset, ``load_spec("mine.toml")`` a file. No torch import.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from relaymeter.errors import InputError
from relaymeter.harness.config import Config, Count, Name, Whole, check, named, nearest, toml_entry
from relaymeter.relayout.topology import MAX_RANKS

__all__ = [
    "ClusterModel",
    "ExecutorModel",
    "LinkModel",
    "PackingModel",
    "RateModel",
    "SourceModel",
    "StragglerModel",
    "load_spec",
    "shipped_presets",
]

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Slowdown = Annotated[float, Field(ge=1, allow_inf_nan=False)]
_Number = Annotated[str, Field(pattern=r"^\d{1,9}$")]
_ExecutorName = Literal["send-recv", "all-to-all"]
#: A preset may build upon another, and that one upon a third.
_DEPTH = 4


class RateModel(Config):
    """Payload bytes per second of the resources, each in one direction unless it says both."""

    port: Rate
    """What a rank sends to, or receives from, the ranks of its node together: its NVLink ports, or its cores."""
    nic: Rate
    """One NIC, each way."""
    pcie: Rate | None = None
    """Between a rank and the NIC; None: no limit."""
    rank: Rate | None = None
    """All that a rank sends and receives, both directions added up; None: no limit."""
    node: Rate | None = None
    """All that leaves, or enters, a node; None: its NICs together."""
    switch: Rate | None = None
    """All traffic between nodes together; None: a fabric that never blocks."""
    machine: Rate | None = None
    """All traffic of all ranks together, as where all of them share one machine's cores; None: no limit."""


class LinkModel(Config):
    """What a flow of one class of links meets beyond the resources that it shares."""

    latency_s: Time = 0.0
    """Seconds before the first byte moves."""
    flow: Rate | None = None
    """The most that one flow reaches, in bytes per second; None: what its resources give."""
    half_duplex: Share = 0.0
    """How much of a pair's other direction adds to its own: 0 full duplex, 1 half."""
    ramp: tuple[tuple[Count, Annotated[float, Field(gt=0, le=1)]], ...] = ()
    """Share of the rate at which a message of so many bytes uses the resources on its path, by rising bytes."""

    @model_validator(mode="after")
    def _ramp_rises(self) -> LinkModel:
        for (small, low), (large, high) in pairwise(self.ramp):
            if small >= large or small / low >= large / high:
                raise ValueError(
                    f"ramp: {large} bytes at {high} after {small} bytes at {low} take no longer: give rising bytes, "
                    "and shares that do not rise faster than them"
                )
        return self


class ExecutorModel(Config):
    """One way of exchanging messages."""

    floor_s: Time
    """Seconds of a call that moves nothing, in a series of calls."""
    isolated_s: Time = 0.0
    """What a call after a barrier takes on top of that."""
    message_s: Time = 0.0
    """Seconds for each message of a rank beyond its first, before any of them moves."""
    together: bool = False
    """Whether a call begins on no rank before all are there; else a message waits for its two ends alone."""
    in_node: LinkModel = LinkModel()
    cross_node: LinkModel = LinkModel()


class PackingModel(Config):
    """Gathering into, or scattering out of, messages on one rank."""

    call_s: Time = 0.0
    """Seconds of a round in which anything is copied."""
    segment_s: Time
    """Seconds of each strided copy."""
    rate: Rate
    """Bytes per second."""
    unpack_rate: Rate | None = None
    """The same for scattering; None: as for gathering."""
    lanes: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """How many ranks of all copy at once as fast as one does alone, as where they share a machine; None: any number."""

    def rate_of(self, direction: str) -> float:
        """Bytes per second of ``pack`` or ``unpack``."""
        return self.rate if direction == "pack" or self.unpack_rate is None else self.unpack_rate

    def crowding(self, ranks: float) -> float:
        """How many times longer so many ranks take at once than one does alone."""
        return 1.0 if self.lanes is None else max(1.0, ranks / self.lanes)


class StragglerModel(Config):
    """Ranks and NICs that are slower than the others, by how many times, keyed by number."""

    ranks: dict[_Number, Slowdown] = Field(default_factory=dict)
    nics: dict[_Number, Slowdown] = Field(default_factory=dict)


class SourceModel(Config):
    """Where a figure comes from."""

    figure: str
    url: str


class ClusterModel(Config):
    """A simulated cluster. All nodes are alike but for stragglers."""

    name: Name
    about: str
    """One line for a reader."""
    nodes: Count
    ranks_per_node: Count
    nics_per_node: Count
    """NICs of a node; each serves as many neighbouring ranks."""
    pxn: bool = False
    """Whether a flow leaves its node through the NIC of the receiving rank's rail, reached over the node's ports."""
    pxn_latency_s: Time = 0.0
    """What the detour takes on top."""
    backend: Literal["nccl", "gloo"] = "gloo"
    """Whose habits: it says which executor is the default one."""
    incast: Share = 0.0
    """Share of a receiving NIC's rate that is lost where very many flows meet there; k lose incast * (1 - 1 / k)."""
    rates: RateModel
    executors: Annotated[dict[_ExecutorName, ExecutorModel], Field(min_length=1)]
    packing: PackingModel
    stragglers: StragglerModel = StragglerModel()
    noise: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Spread of a call's time: standard deviation of its logarithm."""
    tail_share: Share = 0.0
    """Share of the calls that are disturbed."""
    tail: Slowdown = 1.0
    """How many times longer a disturbed call takes."""
    resolution: Annotated[float, Field(ge=0, le=0.1)] = 0.005
    """Events closer together than this share of the time still needed count as one; 0: none do."""
    largest_bytes: Annotated[int, Field(strict=True, ge=1 << 20)] = 1 << 28
    """The largest message that a rank's memory allows."""
    seed: Whole = 0
    sources: tuple[SourceModel, ...] = ()

    @model_validator(mode="after")
    def _numbers_fit(self) -> ClusterModel:
        ranks = self.nodes * self.ranks_per_node
        if ranks > MAX_RANKS:
            raise ValueError(f"nodes {self.nodes} x ranks_per_node {self.ranks_per_node} = {ranks}, over {MAX_RANKS}")
        if self.ranks_per_node % self.nics_per_node:
            raise ValueError(
                f"ranks_per_node {self.ranks_per_node} % nics_per_node {self.nics_per_node} = "
                f"{self.ranks_per_node % self.nics_per_node}, not 0: give each NIC as many ranks"
            )
        for kind, names, count in (
            ("rank", self.stragglers.ranks, ranks),
            ("NIC", self.stragglers.nics, self.nodes * self.nics_per_node),
        ):
            beyond = [name for name in names if int(name) >= count]
            if beyond:
                raise ValueError(f"stragglers: there is no {kind} {beyond[0]}, they are numbered 0 to {count - 1}")
        return self


def _presets() -> dict[str, Path]:
    folder = Path(str(files("relaymeter.harness") / "presets"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def shipped_presets() -> tuple[str, ...]:
    """Names of the presets in the package."""
    return tuple(_presets())


def load_spec(name: str) -> ClusterModel:
    """The simulated cluster of that name, or in that TOML file. Raises InputError naming file, key, what is valid, and
    where a file takes the name of a preset for another cluster."""
    path = _find(name)
    found = check(ClusterModel, named(path, _merged(path, _DEPTH)), f"preset {name}")
    shipped = _presets().get(found.name)
    if shipped not in (None, path) and found != load_spec(found.name):
        raise InputError(
            f"{path} describes another cluster than the preset {found.name}, whose name it has: rename the file, or "
            "give it a name of its own (name = ...)"
        )
    return found


def _find(name: str) -> Path:
    if name.endswith(".toml"):
        return Path(name)
    shipped = _presets()
    if name not in shipped:
        raise InputError(f"unknown preset {name!r}: {nearest(name, shipped)}, or a path ending in .toml")
    return shipped[name]


def _merged(path: Path, depth: int) -> dict[str, Any]:
    """The tables of ``path`` over those of the preset that its key ``like`` names; where it changes any and has no line
    ``about`` itself, with one that names them. Raises InputError."""
    entry = toml_entry(path)
    like = entry.pop("like", None)
    if like is None:
        return entry
    if not isinstance(like, str) or not depth:
        raise InputError(f"{path}: key 'like' = {like!r}: name a preset or a file that does not lead back here")
    base = _merged(_find(like), depth - 1)
    base.pop("name", None)
    changed = [key for key in _changed(base, entry) if key != "name"]
    if changed and "about" not in entry:
        entry["about"] = f"like {Path(like).stem}, changed: {', '.join(changed)}"
    return _over(base, entry)


def _changed(base: Mapping[str, Any], entry: Mapping[str, Any]) -> Iterator[str]:
    """The keys of ``entry`` that ``base`` has not, or with another value, as ``rates.nic``."""
    for key, value in entry.items():
        old = base.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            yield from (f"{key}.{inner}" for inner in _changed(old, value))
        elif key not in base or old != value:
            yield key


def _over(base: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """``entry`` over ``base``, table by table."""
    found = dict(base)
    for key, value in entry.items():
        old = found.get(key)
        found[key] = _over(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return found

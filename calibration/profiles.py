"""The profile: everything a calibration found, as frozen data and as one JSON file that only this tool writes.

``save(profile, path)`` writes it whole; ``load(path, expected=fingerprint)`` refuses one that was edited, is malformed,
or was made elsewhere. No torch import.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from relaymeter.calibration.cells import Cell, PackCell
from relaymeter.calibration.costs import CROSS_NODE, IN_NODE, ExecutorCosts, LinkCosts
from relaymeter.calibration.hashes import canonical, changed, hash_tree
from relaymeter.calibration.links import Sharing
from relaymeter.calibration.sanity import unsound
from relaymeter.errors import InputError
from relaymeter.records import dump_json, load_json, write_text
from relaymeter.relayout.topology import Topology

__all__ = [
    "PROFILE_SCHEMA",
    "ExecutorProfile",
    "Gate",
    "Profile",
    "differences",
    "from_json",
    "load",
    "machine_id_of",
    "save",
]

#: Version of the profile file. A reader refuses another one.
PROFILE_SCHEMA = 2
#: What makes a JSON object a profile, of whatever version.
_SHAPE = {"schema_version", "sha256", "executors", "fingerprint"}
#: At most so many edited members are named.
_NAMED = 3


@dataclass(frozen=True)
class Gate:
    """A check of the calibration's quality: passed where ``value`` is at most ``limit``; value None: not measured."""

    name: str
    value: float | None
    limit: float

    @property
    def passed(self) -> bool:
        return self.value is not None and self.value <= self.limit


@dataclass(frozen=True)
class ExecutorProfile:
    """Costs of one executor: the fit, its bootstrap replicates, and 5 % to 95 % intervals of named figures."""

    costs: ExecutorCosts
    replicates: tuple[ExecutorCosts, ...]
    intervals: Mapping[str, tuple[float, float, float]]
    """Figure (for example ``cross_node_port_bytes_per_s``) -> value, low, high."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "intervals": {name: list(triple) for name, triple in self.intervals.items()},
            "costs": self.costs.to_dict(),
            "replicates": [found.to_dict() for found in self.replicates],
        }

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> ExecutorProfile:
        intervals = {name: (float(v[0]), float(v[1]), float(v[2])) for name, v in entry["intervals"].items()}
        found = tuple(ExecutorCosts.from_dict(one) for one in entry["replicates"])
        return cls(ExecutorCosts.from_dict(entry["costs"]), found, intervals)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One calibration, equal on all ranks. ``executors`` is in order of how much was measured, the default first."""

    created_utc: str
    fingerprint: Mapping[str, Any]
    """What the profile is valid for: versions, machine, backend, world, nodes and NICs as declared, cluster."""
    topology: Topology
    """Nodes as the ranks see them, NICs as measured."""
    executors: Mapping[str, ExecutorProfile]
    gates: tuple[Gate, ...]
    warnings: tuple[str, ...]
    quick: bool
    spent_s: float
    """Wall time of the measurement."""
    connect_s: Mapping[str, float]
    """Seconds of the first exchange with every peer, by executor; in no other figure."""
    cells: tuple[Cell, ...] = ()
    pack_cells: tuple[PackCell, ...] = ()
    sharing: tuple[Sharing, ...] = ()
    hints: tuple[Mapping[str, Any], ...] = ()
    """What each rank was seen to be (host, NUMA, GPU, NICs), which measured classes confirm or contradict; see
    ``hints.RankHints``."""
    paths: Mapping[str, Any] | None = None
    """What a change costs by other paths than the network (``calibrate --paths``), as ``harness.calibrate_paths``
    writes it: ``costs``, which ``policies.path_costs`` fits and reads, and ``rows``, what they were fitted to."""

    @property
    def simulated(self) -> str | None:
        """The simulated cluster that was calibrated; None: a real one."""
        name = self.fingerprint.get("simulated")
        return None if name is None else str(name)

    @property
    def executor(self) -> str:
        """The executor that was measured most: the default one."""
        return next(iter(self.executors))

    @property
    def machine_id(self) -> str:
        """What stands for the machine in records and folder names: see ``machine_id_of``."""
        return machine_id_of(self.fingerprint)

    @cached_property
    def sha256(self) -> str:
        """Hash of the content, written into the file and compared between ranks."""
        return hashlib.sha256(canonical(self._hashed)).hexdigest()

    @cached_property
    def _hashed(self) -> dict[str, Any]:
        """The content as JSON has it, and the hashes of its parts."""
        content = json.loads(dump_json(self._content(), indent=None))
        return {**content, "hashes": hash_tree(content)}

    def costs(self, executor: str) -> ExecutorCosts:
        """Costs of ``executor``. Raises InputError naming the measured ones."""
        if executor not in self.executors:
            raise InputError(
                f"the profile has no executor {executor!r}, only {', '.join(self.executors)}: calibrate with it first"
            )
        return self.executors[executor].costs

    def nic_rate(self, nic: int, executor: str | None = None) -> float:
        """Payload bytes per second of a NIC of the measured topology (the faster direction) under ``executor``; None:
        under the fastest of them, as a bound has to take it. Raises InputError where nothing crosses nodes."""
        found = [link.plateau_of(nic) for link in self._links(CROSS_NODE, executor)]
        if not found:
            raise InputError(
                "the profile was measured on a single node: it has no NIC rate; calibrate two nodes or more"
            )
        return max(found)

    def nic_rates(self, topology: Topology, executor: str | None = None) -> dict[int, float]:
        """``nic_rate`` of every NIC of ``topology``; NICs that were not measured take the usual rate.

        Empty on a single node. A topology of other NICs than the measured one takes the usual rate throughout.
        """
        links = self._links(CROSS_NODE, executor)
        if topology.nodes < 2 or not links:
            return {}
        same, usual = topology == self.topology, max(link.port_rate for link in links)
        return {nic: self.nic_rate(nic, executor) if same else usual for nic in sorted(set(topology.nic))}

    def port_rate(self, executor: str | None = None) -> float | None:
        """Payload bytes per second that one rank receives inside its node under ``executor`` (None: the fastest of
        them); None where no node has two ranks."""
        return max((link.port_rate for link in self._links(IN_NODE, executor)), default=None)

    def _links(self, kind: str, executor: str | None) -> list[LinkCosts]:
        costs = [self.costs(name) for name in (self.executors if executor is None else (executor,))]
        return [link for found in costs if (link := found.link(kind)) is not None]

    def _content(self) -> dict[str, Any]:
        return {
            "schema_version": PROFILE_SCHEMA,
            "created_utc": self.created_utc,
            "fingerprint": self.fingerprint,
            "topology": self.topology.to_dict(),
            "quick": self.quick,
            "spent_s": self.spent_s,
            "connect_s": dict(self.connect_s),
            "warnings": list(self.warnings),
            "gates": [{**asdict(gate), "passed": gate.passed} for gate in self.gates],
            "hints": [dict(rank) for rank in self.hints],
            "executor": self.executor,
            "executors": {name: found.to_dict() for name, found in self.executors.items()},
            "sharing": [asdict(found) for found in self.sharing],
            "cells": [cell.to_dict() for cell in self.cells],
            "pack_cells": [cell.to_dict() for cell in self.pack_cells],
            **({} if self.paths is None else {"paths": dict(self.paths)}),
        }

    def to_json(self) -> str:
        """The file's text: strict JSON, one member a line below the top level."""
        content = {**self._hashed, "sha256": self.sha256}
        lines = (f'  "{key}": {_member(value)}' for key, value in content.items())
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def to_dict(self) -> dict[str, Any]:
        """The file's content as a JSON-ready dict."""
        found: dict[str, Any] = json.loads(self.to_json())
        return found


def _member(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join("    " + dump_json(entry, indent=None).rstrip() for entry in value) + "\n  ]"
    return dump_json(value, indent=None).rstrip()


def from_json(entry: Any, place: str) -> Profile:
    """The profile in parsed JSON; ``place`` names the file in errors. Raises InputError where it is not intact, naming
    the members that were edited, or where a figure is no number."""
    if isinstance(entry, dict) and entry.get("kind") == "policy":
        raise InputError(
            f"{place} is a policy, which choose made of a profile, and no profile: make one with relaymeter calibrate "
            "--out FILE"
        )
    if not isinstance(entry, dict) or not set(entry) >= _SHAPE:
        raise InputError(f"{place} is no profile: make one with relaymeter calibrate --out FILE")
    version = entry.get("schema_version")
    if version != PROFILE_SCHEMA:
        older = isinstance(version, int) and version < PROFILE_SCHEMA
        raise InputError(
            f"profile {place} has schema_version {version!r}, "
            + ("from an older version of this tool; " if older else "")
            + f"this version reads {PROFILE_SCHEMA}: calibrate again"
        )
    _refuse_edited(entry, place)
    profile = _read(entry, place)
    for name, found in profile.executors.items():
        for costs in (found.costs, *found.replicates):
            for problem in unsound(costs):
                raise InputError(
                    f"profile {place}: executors.{name}: {problem}, of which no price can be made: calibrate again"
                )
    return profile


def _refuse_edited(entry: Mapping[str, Any], place: str) -> None:
    hashed = {key: value for key, value in entry.items() if key != "sha256"}
    content = {key: value for key, value in hashed.items() if key != "hashes"}
    edited = [path or "hashes" for path in changed(content, entry.get("hashes"))]
    if not edited and hashlib.sha256(canonical(hashed)).hexdigest() != entry["sha256"]:
        edited = ["hashes or sha256"]
    executors = entry["executors"]
    if not edited and entry.get("executor") != next(iter(executors), None):  # hashes do not know the order of members
        edited = ["the order of executors"]
    if edited:
        more = f" and {len(edited) - _NAMED} more" if len(edited) > _NAMED else ""
        raise InputError(
            f"profile {place} was edited after it was written, in {', '.join(edited[:_NAMED])}{more}: calibrate again"
        )


def _read(entry: Mapping[str, Any], place: str) -> Profile:
    try:
        return Profile(
            created_utc=entry["created_utc"],
            fingerprint=entry["fingerprint"],
            topology=Topology.from_dict(entry["topology"]),
            executors={name: ExecutorProfile.from_dict(found) for name, found in entry["executors"].items()},
            gates=tuple(Gate(gate["name"], gate["value"], gate["limit"]) for gate in entry["gates"]),
            warnings=tuple(entry["warnings"]),
            quick=entry["quick"],
            spent_s=entry["spent_s"],
            connect_s=entry["connect_s"],
            cells=tuple(Cell.from_dict(cell) for cell in entry["cells"]),
            pack_cells=tuple(PackCell.from_dict(cell) for cell in entry["pack_cells"]),
            sharing=tuple(Sharing(**found) for found in entry["sharing"]),
            hints=tuple(entry["hints"]),
            paths=None if entry.get("paths") is None else dict(entry["paths"]),
        )
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(f"profile {place} is incomplete ({type(error).__name__}: {error}): calibrate again") from error


def machine_id_of(fingerprint: Mapping[str, Any]) -> str:
    """Hash of a fingerprint; that of a simulated cluster begins with ``simulated-`` and its name."""
    found = hashlib.sha256(canonical(fingerprint)).hexdigest()[:12]
    name = fingerprint.get("simulated")
    return found if name is None else f"simulated-{name}-{found[:6]}"


def differences(profile: Profile, expected: Mapping[str, Any]) -> tuple[str, ...]:
    """Entries of ``expected`` in which the fingerprint differs, as ``"torch: profile 2.13.0, here 2.12.1"``; of entries
    that are objects the member, as ``"environment.NCCL_P2P_DISABLE: profile null, here 1"``."""
    return tuple(text for key, value in expected.items() for text in _differ(key, profile.fingerprint.get(key), value))


def _differ(name: str, there: Any, here: Any) -> Iterator[str]:
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for key in dict.fromkeys([*there, *here]):
            yield from _differ(f"{name}.{key}", there.get(key), here.get(key))
    elif canonical(there) != canonical(here):
        yield f"{name}: profile {_short(there)}, here {_short(here)}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def load(path: Path, expected: Mapping[str, Any] | None = None, *, allow_mismatch: bool = False) -> Profile:
    """Read a profile. ``expected``: fingerprint entries that must be equal, unless ``allow_mismatch``. Any process.

    Raises InputError: missing or malformed file (with line and column), another schema, edited, made elsewhere.
    """
    profile = from_json(load_json(path, "profile"), str(path))
    differ = differences(profile, expected or {})
    if differ and not allow_mismatch:
        raise InputError(
            f"profile {path} was made elsewhere ({'; '.join(differ)}): calibrate here, or add --allow-mismatch to use "
            "it all the same"
        )
    return profile


def save(profile: Profile, path: Path, *, force: bool = False) -> None:
    """Write the profile whole, or not at all. Raises InputError where the file exists and ``force`` is not given."""
    write_text(path, profile.to_json(), force=force)

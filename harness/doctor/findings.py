"""Findings: what was seen, how it stands, what it means and what mends it.

``Finding("memory.shm", State.WARNING, "64 MiB", means="...", mend="...", values={"total_bytes": 67108864})``. Keys are
those of ``TITLES``, stable between versions; the part before the dot is the group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from relaymeter.errors import InputError

__all__ = ["GROUPS", "TITLES", "Finding", "State", "in_order", "worst"]


class State(Enum):
    """How a finding stands, from the best to the worst."""

    OK = "ok"
    """As it should be."""
    NOTE = "note"
    """Worth knowing; nothing has to be done."""
    WARNING = "warning"
    """Runs work, but slower than they could or with a trap."""
    FAULT = "fault"
    """A run would fail, or leave unused what the machine has."""

    @property
    def rank(self) -> int:
        """0 for the best."""
        return list(State).index(self)


#: Groups in the order in which they are printed, with their headings.
GROUPS = {
    "package": "package",
    "torch": "torch",
    "cuda": "CUDA, driver, NCCL",
    "gpus": "GPUs",
    "links": "links between GPUs",
    "network": "network",
    "memory": "memory and limits",
    "deepspeed": "DeepSpeed",
    "environment": "environment",
    "box": "cluster in a box",
}

#: Every key that a finding may have, with its title.
TITLES = {
    "package.relaymeter": "relaymeter",
    "package.python": "Python",
    "package.triton": "Triton",
    "package.compiler": "compiler",
    "package.probe": "probe",
    "torch.version": "torch",
    "torch.cuda_build": "CUDA build",
    "cuda.driver": "driver",
    "cuda.nvml": "NVML",
    "cuda.nccl": "NCCL",
    "gpus.found": "GPUs",
    "gpus.visible": "visible",
    "gpus.memory": "memory",
    "gpus.mig": "MIG",
    "gpus.ecc": "ECC",
    "gpus.probe": "probe",
    "links.nvlink": "NVLink",
    "links.matrix": "matrix",
    "links.peer": "peer access",
    "network.gloo": "gloo interface",
    "network.host_name": "host name",
    "network.nics": "interfaces",
    "network.rdma": "RDMA ports",
    "network.nccl": "NCCL interface",
    "network.gpudirect": "GPUDirect",
    "network.probe": "probe",
    "memory.host": "host",
    "memory.shm": "/dev/shm",
    "memory.locked": "locked memory",
    "memory.open_files": "open files",
    "memory.numa": "NUMA",
    "memory.probe": "probe",
    "deepspeed.version": "DeepSpeed",
    "deepspeed.subset": "ZeRO-3 subset",
    "deepspeed.autoep": "AutoEP",
    "environment.launcher": "launcher",
    "environment.settings": "settings",
    "environment.variables": "variables",
    "environment.probe": "probe",
    "box.shaped": "shaped box",
    "box.probe": "probe",
}


@dataclass(frozen=True)
class Finding:
    """One thing that was found. Raises InputError for a key that is none of ``TITLES``."""

    key: str
    state: State
    text: str
    """What was seen, in one line."""
    means: str = ""
    """What follows from it; empty where the text says all."""
    mend: tuple[str, ...] = ()
    """Commands or settings that mend it, or that change it where nothing is wrong; the first that applies is enough."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The same for programs: plain values, units in the names."""

    def __post_init__(self) -> None:
        if self.key not in TITLES:
            raise InputError(f"finding {self.key!r} is not one of: {', '.join(TITLES)}")

    @property
    def group(self) -> str:
        return self.key.partition(".")[0]

    @property
    def title(self) -> str:
        return TITLES[self.key]

    def to_dict(self) -> dict[str, Any]:
        """The finding as JSON has it."""
        return {
            "key": self.key,
            "group": self.group,
            "title": self.title,
            "state": self.state.value,
            "text": self.text,
            "means": self.means,
            "mend": list(self.mend),
            "values": dict(self.values),
        }


def worst(findings: Sequence[Finding]) -> State:
    """The worst state of any finding; OK without any."""
    return max((finding.state for finding in findings), key=lambda state: state.rank, default=State.OK)


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """Findings by group, then by key as ``TITLES`` has them; equal keys as they came."""
    groups, keys = list(GROUPS), list(TITLES)
    return sorted(findings, key=lambda one: (groups.index(one.group), keys.index(one.key)))

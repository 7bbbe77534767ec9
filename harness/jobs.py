"""Jobs: what a command tells every rank of its world, as one JSON file. No torch import.

``RunJob(...)``, ``CalibrateJob(...)`` and the like are written by the parent; ``dump(job)`` is their JSON, and
``job_of(entry, place)`` reads it back on a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from relaymeter.errors import InputError
from relaymeter.harness.compare_config import CompareScenario
from relaymeter.harness.config import (
    Config,
    Count,
    ExecutorChoice,
    PlannerChoice,
    Scenario,
    Seconds,
    Whole,
    check,
    nearest,
)
from relaymeter.harness.state_config import OffloadScenario, StateScenario
from relaymeter.harness.track.suite import TrackSuite

__all__ = [
    "CalibrateJob",
    "CheckJob",
    "ClusterConfig",
    "CompareLoad",
    "CompareLoadJob",
    "CompareSaveJob",
    "Fault",
    "Job",
    "OffloadJob",
    "RunJob",
    "RunStamp",
    "SoakFault",
    "SoakJob",
    "StateJob",
    "TrackFault",
    "TrackJob",
    "ValidateJob",
    "dump",
    "job_of",
]


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


class CheckJob(Config):
    """What every rank of ``calibrate --check`` is told."""

    kind: Literal["check"] = "check"
    """Which job this is."""
    profile: str
    """Path of the profile whose cells are measured again."""
    executor: str | None = None
    """Executor to check; None: the profile's default one."""
    allow_mismatch: bool = False
    """Whether a profile of another machine is checked all the same."""
    time_limit_s: Seconds
    """Limit of the whole job."""
    nic_per: Literal["rank", "node"] | None = None
    """NICs as declared, in a world that this command did not make."""
    cluster: ClusterConfig | None = None
    """How the ranks were started; None in a world that was joined."""


class RunJob(Config):
    """What every rank of ``run`` is told."""

    kind: Literal["run"] = "run"
    """Which job this is."""
    scenario: Scenario
    """The whole scenario."""
    profile: str | None = None
    """Path of the profile to price with; None: nothing is priced."""
    plan: str | None = None
    """Path of the plan to run; None: the moves are planned here."""
    planner: PlannerChoice = "classes"
    """Planner of the moves."""
    executor: ExecutorChoice = "auto"
    """Executor of the rounds; auto: by the world's backend."""
    bucket_bytes: Count | None
    """Bytes of a bucket; None: by the move's size."""
    repeats: Count
    """Timed repeats of each route."""
    time_limit_s: Seconds
    """Limit of the whole job."""
    move_limit_s: Seconds
    """Limit of one move."""
    max_extra_bytes: Count | None = None
    """What a move may hold beyond the larger of the two layouts, giving the source up; None: the source is kept."""
    allow_mismatch: bool = False
    """Whether a profile of another topology may price this one."""
    nic_per: Literal["rank", "node"] | None = None
    """NICs as declared, in a world that this command did not make."""
    stamp: RunStamp
    """What the rows have in common."""
    fault: Fault | None = None
    """A fault to put in (tests)."""


class StateJob(Config):
    """What every rank of ``run`` on a scenario of kind ``training-state`` is told."""

    kind: Literal["training-state"] = "training-state"
    """Which job this is."""
    scenario: StateScenario
    """The whole scenario, with the changes that this world makes."""
    planner: PlannerChoice = "classes"
    """Planner, or both one after the other."""
    executor: ExecutorChoice = "auto"
    """Executor of the rounds; auto: by the world's backend."""
    bucket_bytes: Count | None = None
    """Bytes of a bucket; None: by the move's size."""
    time_limit_s: Seconds
    """Limit of the whole job."""
    move_limit_s: Seconds
    """Limit of one move."""
    nic_per: Literal["rank", "node"] | None = None
    """NICs as declared, in a world that this command did not make."""
    stamp: RunStamp
    """What the rows have in common."""
    fault: Fault | None = None
    """A fault to put into the first move (tests)."""


class OffloadJob(Config):
    """What every rank of ``run`` on a scenario of kind ``offload`` is told."""

    kind: Literal["offload"] = "offload"
    """Which job this is."""
    scenario: OffloadScenario
    """The whole scenario."""
    time_limit_s: Seconds
    """Limit of the whole job."""
    move_limit_s: Seconds
    """Limit of one move."""
    nic_per: Literal["rank", "node"] | None = None
    """NICs as declared, in a world that this command did not make."""
    stamp: RunStamp
    """What the rows have in common."""


class SoakFault(Config):
    """Damage for tests, done once to what a rank of a soak received, or to the rank itself."""

    kind: Literal["swap", "flip", "stale", "zeros", "kill", "stop"]
    """``swap`` two blocks, ``flip`` a bit, keep a block as it was (``stale``), ``zeros``; or end or freeze the rank."""
    rank: Whole
    """Rank it happens on."""


class SoakJob(Config):
    """What every rank of ``soak`` is told."""

    kind: Literal["soak"] = "soak"
    """Which job this is."""
    seconds: Seconds | None
    """End after about so long; None: no matter how long."""
    total_bytes: Count | None
    """End when all ranks together have sent so much; None: no matter how much."""
    message_bytes: Count | None
    """Largest message; None: by the backend."""
    executor: ExecutorChoice
    """Executor of the exchanges; auto: by the world's backend."""
    time_limit_s: Seconds
    """Limit of the whole job."""
    nic_per: Literal["rank", "node"] | None = None
    """NICs as declared, in a world that this command did not make."""
    stamp: RunStamp
    """What the rows have in common."""
    fault: SoakFault | None = None
    """Damage to do (tests)."""


class ValidateJob(Config):
    """What every rank of ``validate`` is told."""

    kind: Literal["validate"] = "validate"
    """Which job this is."""
    profile: str
    """Path of the profile whose prices are held against measurements."""
    quick: bool
    """Fewer and smaller cases, fewer repeats, moves by the default executor only."""
    unshaped: bool
    """Whether nothing holds the rates of the NICs, which makes every case hard."""
    time_limit_s: Seconds
    """Limit of the whole job."""
    nic_per: Literal["rank", "node"] | None = None
    """NICs as declared, in a world that this command did not make."""
    stamp: RunStamp
    """What the rows have in common."""
    fault: Fault | None = None
    """A bit to flip in the first move (tests)."""


class CompareSaveJob(Config):
    """What every rank of the first world of ``compare`` is told: the source, what needs no new processes, the saves."""

    kind: Literal["compare-save"] = "compare-save"
    """Which job this is."""
    scenario: CompareScenario
    """The whole scenario, with the one change that this world makes."""
    paths: tuple[str, ...]
    """Paths to take, by name."""
    folders: dict[str, str]
    """By storage, an empty folder for the checkpoints of this change."""
    time_limit_s: Seconds
    """Limit of the whole job."""
    move_limit_s: Seconds
    """Limit of one move."""
    nic_per: Literal["rank", "node"] | None = None
    """NICs as declared, in a world that this command did not make."""
    stamp: RunStamp
    """What the rows have in common."""
    fault: Fault | None = None
    """A bit to flip in what arrived in memory (tests)."""


class CompareLoad(Config):
    """One checkpoint to load."""

    path: Literal["dcp", "universal"]
    """Path that wrote it."""
    storage: str
    """Where it lies, by name."""
    cache: Literal["warm", "cold"] | None
    """Page cache before the load; ``cold``: the files are dropped from it first."""
    folder: str
    """Its folder."""


class CompareLoadJob(Config):
    """What every rank of the world is told that ``compare`` starts anew to load the checkpoints."""

    kind: Literal["compare-load"] = "compare-load"
    """Which job this is."""
    scenario: CompareScenario
    """The whole scenario, with the one change that this world makes."""
    loads: tuple[CompareLoad, ...]
    """The checkpoints, one after the other, each into a destination built for it."""
    digests: dict[str, int]
    """Digest of every tensor of the source, by state and name."""
    launched_at: float
    """When this world was started, seconds of the machine's clock since 1970."""
    time_limit_s: Seconds
    """Limit of the whole job."""
    nic_per: Literal["rank", "node"] | None = None
    """NICs as declared, in a world that this command did not make."""
    stamp: RunStamp
    """What the rows have in common."""
    fault: Fault | None = None
    """A bit to flip in what the first load brought (tests)."""


class TrackFault(Config):
    """A fault for tests in every case of a launch."""

    kind: Literal["slow", "flip"]
    """``slow``: every exchange takes ``share`` longer; ``flip``: a bit that arrives in the last repeat."""
    share: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Of the time of an exchange (``slow``)."""


class TrackJob(Config):
    """What every rank of ``track run`` is told."""

    kind: Literal["track"] = "track"
    """Which job this is."""
    suite: TrackSuite
    """The whole suite, with the cases that this launch measures."""
    time_limit_s: Seconds
    """Limit of the whole job."""
    move_limit_s: Seconds
    """Limit of one move."""
    nic_per: Literal["rank", "node"] | None = None
    """NICs as the suite declares them, in a world that this command did not make."""
    fault: TrackFault | None = None
    """A fault to put in (tests)."""


Job = (
    CompareSaveJob
    | CompareLoadJob
    | CalibrateJob
    | CheckJob
    | RunJob
    | StateJob
    | OffloadJob
    | SoakJob
    | TrackJob
    | ValidateJob
)
_JOBS: Mapping[str, type[Job]] = {
    "calibrate": CalibrateJob,
    "check": CheckJob,
    "run": RunJob,
    "training-state": StateJob,
    "offload": OffloadJob,
    "soak": SoakJob,
    "track": TrackJob,
    "validate": ValidateJob,
    "compare-save": CompareSaveJob,
    "compare-load": CompareLoadJob,
}


def dump(job: Job) -> dict[str, Any]:
    """The job as the JSON-ready dict that ``job_of`` reads back."""
    return job.model_dump(mode="json", by_alias=True)


def job_of(entry: Any, place: str) -> Job:
    """The job that ``dump`` made ``entry`` of. Raises InputError naming ``place`` for anything else."""
    kind = entry.get("kind") if isinstance(entry, dict) else None
    if not isinstance(kind, str) or kind not in _JOBS:
        raise InputError(f"{place}: kind = {kind!r} is no job: {nearest(str(kind), _JOBS)}")
    return check(_JOBS[kind], entry, place)

"""Rows of ``compare``: one change of one state, by one path, over one storage, in one launch.

``CompareRecord(...).to_dict()``; ``row_files.read_rows(path)`` reads them back beside the other kinds. What a path
does not do has no seconds (null). Numbers carry their unit in their name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from relaymeter.row_fields import Values, check_count, check_verdict, expect, shown
from relaymeter.state_records import BaseRecord

__all__ = ["PATHS", "PHASES", "CompareRecord", "pausing"]

#: Paths in the order in which a table has them.
PATHS = ("in-memory", "gather", "dcp", "universal", "megatron")
#: Phases in the order in which they happen; each is a field ``<phase>_s``.
PHASES = (
    "plan", "move", "gather", "slice", "save", "convert", "relaunch", "import", "build", "load", "refresh", "digest",
)  # fmt: skip
#: What is done while training still runs, on paths that need no new processes.
_BEFORE = ("plan", "build")
#: Fields that rows of earlier versions do not have.
_ADDED = {"predicted_pause_s": None, "cluster": "", "setting": ""}
#: A sum may be less than its parts by rounding.
_ROUNDED = 1 + 1e-9


def pausing(phases: Iterable[str]) -> tuple[str, ...]:
    """Of the phases of a path, by name, those during which training stands still. Pure."""
    names = tuple(phases)
    before = _BEFORE if "relaunch" not in names else ()
    return tuple(name for name in names if name != "digest" and name not in before)


@dataclass(frozen=True, kw_only=True)
class CompareRecord(BaseRecord):
    """One way of making a change, timed; seconds are those of the slowest rank."""

    VALUES: ClassVar[Values] = Values(
        one_of={
            "path": PATHS, "cache": ("warm", "cold"), "verdict": ("ok", "wrong bits", "cannot", "failed"),
        },
        may_be_empty=("cluster", "setting"),
    )  # fmt: skip

    kind: str = "compare"
    change: str
    """Name of the change, such as ``dp4-dp2``."""
    source: str
    """Engine that the state comes from, such as ``zero3 x4``."""
    destination: str
    """Engine, or replicas, that it goes to."""
    path: str
    """``in-memory``, ``gather``, ``dcp``, ``universal`` or ``megatron``."""
    storage: str | None
    """Where the checkpoint lay, such as ``disk`` or ``tmpfs``; None for a path that writes none."""
    filesystem: str | None
    """Its file system, such as ``ext4``."""
    cache: str | None
    """Page cache when the checkpoint was loaded: ``warm`` (as written), ``cold`` (dropped); None where there is no
    storage behind one."""
    launch: int
    """Number of the independent launch, from 1."""
    cluster: str = ""
    """The ranks in words: nodes, ranks on each, NICs and their rate."""
    setting: str = ""
    """Hash of what was compared: training and change, paths, storages, ranks."""
    ranks: int
    """Ranks of the larger of the two ends."""
    nodes: int
    model: str
    dtype: str
    optimizer: str
    state_bytes: int
    """Bytes of the state that changes its layout, each element once."""
    plan_s: float | None = None
    """Reading both ends, planning, allocating what the destination lacks. In memory it is done while training still
    runs, as the build is."""
    move_s: float | None = None
    """The exchange, and the fields."""
    gather_s: float | None = None
    """Gathering every tensor whole."""
    slice_s: float | None = None
    """Cutting the shards out of them and copying them into place."""
    save_s: float | None = None
    """Writing the checkpoint, into the page cache: nothing waits for the disk."""
    convert_s: float | None = None
    """Converting it to the universal form, without the start of the converter."""
    relaunch_s: float | None = None
    """From the command that starts the new processes until all had met, imports left out."""
    import_s: float | None = None
    """Imports of the new processes (torch, DeepSpeed), and of the converter."""
    build_s: float | None = None
    """Building the destination."""
    load_s: float | None = None
    """Reading the checkpoint into it."""
    refresh_s: float | None = None
    """Making the low-precision weights from the masters, where it is a step of its own."""
    digest_s: float | None = None
    """Digest of the destination: the proof, part of neither time below."""
    pause_s: float | None = None
    """How long training stands still: all phases but the digest; without plan and build where the destination is built
    and planned for while training runs."""
    transfer_s: float | None = None
    """What of the pause only moves the state: it without relaunch, import and build."""
    total_s: float | None = None
    """All phases but the digest."""
    predicted_pause_s: float | None = None
    """What a profile's costs of paths said of ``pause_s``; None without a profile, or where it has none for this path
    over this storage."""
    written_bytes: int | None = None
    """Bytes of the files of the checkpoint, in the form that is loaded."""
    digest_version: int
    digest_passed: int
    """Tensor copies at the destination whose digest was that of the source."""
    digest_total: int
    mismatch: str | None = None
    """The first that was not."""
    cannot: str | None = None
    """Why this path does not make this change; None where it does."""
    failed: str | None = None
    """What went wrong on a path that should have; None where nothing did."""
    note: str | None = None
    """What a reader has to know, such as what the path leaves out."""
    verdict: str
    """``ok``, ``wrong bits``, ``cannot`` or ``failed``."""
    ok: bool
    """Whether every bit arrived. False for ``cannot``, which is no failure."""

    @property
    def is_weights_only(self) -> bool:
        """Whether the change goes to inference copies, not to an engine: ``tp2 x 2 copies``."""
        return self.destination.endswith((" copy", " copies"))

    @property
    def moves_part(self) -> bool:
        """Whether the path moves less than the change asks for: weights alone, where others move masters and moments
        too. Its times stand in no ratio to theirs."""
        return self.path == "megatron" and not self.is_weights_only

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of the phases that this path has, in the order of ``PHASES``."""
        found = {name: getattr(self, f"{name}_s") for name in PHASES}
        return {name: seconds for name, seconds in found.items() if seconds is not None}

    def check(self) -> None:
        """Raises InputError where what the row says of itself cannot all be true."""
        check_verdict(self)
        where = f"where verdict is {shown(self.verdict)}"
        every = check_count(self, "digest") and self.digest_total > 0
        done = self.verdict in ("ok", "wrong bits")
        for name in ("cannot", "failed"):
            said, has = getattr(self, name), self.verdict == name
            expect((said is not None) == has, name, said, f"{'the reason' if has else 'null'} {where}")
        if self.ok:  # fewer than all is no contradiction but wrong bits, whatever the verdict says
            expect(self.digest_total > 0, "digest_total", self.digest_total, f"above 0 {where}")
        elif self.verdict == "wrong bits":
            right = every and self.mismatch is None
            expect(not right, "verdict", self.verdict, "ok where all digests passed")
        else:
            expect(self.mismatch is None, "mismatch", self.mismatch, f"null {where}")
        if not done:
            for name in ("digest_passed", "digest_total"):
                expect(getattr(self, name) == 0, name, getattr(self, name), f"0 {where}")
        for name in ("pause", "transfer", "total", *(() if done else PHASES)):
            seconds = getattr(self, f"{name}_s")
            expect((seconds is not None) == done, f"{name}_s", seconds, f"{'a number' if done else 'null'} {where}")
        if done:
            self._check_sums()

    def _check_sums(self) -> None:
        """Refuse sums of phases that are less than their parts."""
        pause, transfer, total = self.pause_s or 0.0, self.transfer_s or 0.0, self.total_s or 0.0
        for name, part in (("pause_s", pause), ("transfer_s", transfer)):
            expect(part <= total * _ROUNDED, name, part, f"at most total_s, which is {total}")
        anew = (self.relaunch_s or 0.0) + (self.import_s or 0.0)
        expect(anew <= pause * _ROUNDED, "pause_s", pause, f"at least relaunch_s and import_s, together {anew}")

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> CompareRecord:
        """The row that ``to_dict`` wrote, here or in a version without prices. Raises InputError as others do."""
        return super().from_dict({**_ADDED, **entry})

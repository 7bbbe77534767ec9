"""Rows of the training-state kinds of ``run``.

``StateRecord(...).to_dict()`` is one move of a whole training state, ``OffloadRecord(...)`` one offload and reload;
``row_files.read_rows`` reads them back. Numbers carry their unit in their name; what was not measured is null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from relaymeter.errors import InputError
from relaymeter.records import plain
from relaymeter.row_fields import Values, check_count, check_verdict, expect, record_of, shown

__all__ = ["STATE_SCHEMA_VERSION", "BaseRecord", "OffloadRecord", "StateRecord"]

#: Version of the rows below.
STATE_SCHEMA_VERSION = 1

_Record = TypeVar("_Record", bound="BaseRecord")


@dataclass(frozen=True, kw_only=True)
class BaseRecord:
    """What rows of every kind say of their launch."""

    schema_version: int = STATE_SCHEMA_VERSION
    kind: str
    """Which kind of row this is: ``training-state`` or ``offload``."""
    utc: str
    """When the launch began, ISO 8601 in UTC."""
    machine_id: str
    """Hash of versions, processor, memory and kernel."""
    launch_id: str
    """Shared by the rows of one command."""
    commit: str | None
    """Source revision, with ``-dirty`` where files differ from it; None outside a checkout."""
    shaped: bool
    """Whether the NICs' rates were held by the kernel (cluster in a box)."""
    scenario: str

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict with every field, in order."""
        return {field.name: plain(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_dict(cls: type[_Record], entry: Mapping[str, Any]) -> _Record:
        """The row that ``to_dict`` wrote. Raises InputError for another version, unknown or missing fields, values of
        another type, and what ``VALUES`` and ``check`` refuse."""
        version = entry.get("schema_version")
        if type(version) is not int or version != STATE_SCHEMA_VERSION:
            raise InputError(f"record of schema_version {shown(version)}: this version reads {STATE_SCHEMA_VERSION}")
        return record_of(cls, entry)


@dataclass(frozen=True, kw_only=True)
class StateRecord(BaseRecord):
    """One move of a training state from one live engine to another, or a change that was refused."""

    VALUES: ClassVar[Values] = Values(
        one_of={
            "planner": ("classes", "affine"),
            "verdict": ("ok", "wrong bits", "refused", "failed", "checkpoint differs", "not checked"),
        },
        may_be_empty=("continuation",),
    )

    kind: str = "training-state"
    row: str | None
    """Row of the matrix of changes; None in rounds."""
    change: str
    """Name of the change; in rounds the direction, such as ``DP4 -> DP2``."""
    leg: int
    """Number of the move in its change, from 1; in rounds the number of the round; 0 where the change was refused."""
    source: str
    """Engine that the state comes from, such as ``zero3 x4``."""
    destination: str
    """Engine that it goes to."""
    planner: str
    """``classes`` (this package's own) or ``affine`` (DeepSpeed's)."""
    fallback_tensors: int
    """Tensors of states that the affine planner could not express, planned by our own."""
    ranks: int
    """Ranks of the world."""
    nodes: int
    model: str
    """Family of the model, as ``training.model``."""
    dtype: str
    """Dtype of the weights."""
    optimizer: str
    build_s: float | None
    """Seconds to build the destination engine, slowest rank; None where it was not timed."""
    plan_s: float | None
    """Reading both engines and planning, maximum over the ranks. Of a plan that serves several moves the same in all of
    their rows."""
    prepare_s: float | None
    """Allocating what the destination lacks, maximum over the ranks, as the four below."""
    move_s: float | None
    """Moving every state."""
    fields_s: float | None
    """Carrying counters, groups, scheduler and scaler."""
    refresh_s: float | None
    """Making the low-precision weights from the masters."""
    total_s: float | None
    """All of these but the plan."""
    bytes_total: int
    """Destination bytes, each copy counted."""
    bytes_in_rank: int
    """Planned payload copied within a rank."""
    bytes_in_node: int
    """Planned payload between ranks of one node."""
    bytes_cross_node: int
    """Planned payload between nodes."""
    messages: int
    held_bytes: int | None
    """In rounds: weights, masters and moments of both engines before the move, on the rank of the smaller engine that
    holds most; None in changes."""
    held_after_bytes: int | None
    """The same after the move, which allocates moments that the destination lacked."""
    peak_bytes: int | None
    """Most memory that a rank (in rounds: that rank) took while moving beyond both engines as they were before; None
    where not measurable."""
    peak_predicted_bytes: int | None
    """Prediction of it."""
    digest_version: int
    digest_passed: int
    """Tensor copies of every state whose digest matched."""
    digest_total: int
    mismatch: str | None
    """State, parameter and element range of the first wrong bits."""
    fields: tuple[str, ...]
    """Counters, group fields, scheduler and scaler values that differ after the move, with both values."""
    oracle_passed: int
    """Parameters times states that an oracle, which shares no code with the planner, found bit-equal."""
    oracle_total: int
    """0: the oracle was not asked."""
    oracle_mismatch: str | None
    """First parameter and state that the oracle found to differ."""
    continuation: str
    """How training went on: ``bit-equal, 20 steps``, or the difference and its bound; empty where it was not tried."""
    continuation_ok: bool
    """Whether that is as it should be; true where it was not tried."""
    checkpoint: str
    """Beside the same change through a universal checkpoint: ``bit-equal``, ``not asked``, ``cannot: ...`` or
    ``differs: ...``."""
    refused: str | None = None
    """Why nothing moved, in the words of the refusal or failure; None where it moved."""
    verdict: str
    """``ok``, ``wrong bits``, ``refused``, ``failed`` (an unexpected error, on every rank), ``checkpoint differs`` (all
    else is right) or ``not checked``."""
    ok: bool

    def check(self) -> None:
        """Raises InputError where what the row says of itself cannot all be true."""
        check_verdict(self)
        where = f"where verdict is {shown(self.verdict)}"
        expect(self.nodes <= self.ranks, "nodes", self.nodes, f"at most ranks, which is {self.ranks}")
        moved = self.verdict not in ("refused", "failed")
        reason = "null" if moved else "the reason"
        expect((self.refused is None) == moved, "refused", self.refused, f"{reason} {where}")
        every = check_count(self, "digest") & check_count(self, "oracle")
        right = every and not self.fields and self.continuation_ok
        right = right and self.mismatch is None and self.oracle_mismatch is None
        if self.verdict == "wrong bits":
            expect(not right, "verdict", self.verdict, "another one where nothing differs")
            return
        alike = (
            not self.fields and self.continuation_ok
        )  # digests that differ are wrong bits, whatever the verdict says
        expect(alike, "verdict", self.verdict, "wrong bits where a field or training on differs")
        if self.verdict in ("ok", "checkpoint differs"):
            expect(self.digest_total > 0, "digest_total", self.digest_total, f"above 0 {where}")
            expect(self.total_s is not None, "total_s", self.total_s, f"a number {where}")
            differs = self.checkpoint.startswith("differs")
            expected = "no difference" if self.ok else "differs: ..."
            expect(differs != self.ok, "checkpoint", self.checkpoint, f"{expected} {where}")
        else:
            expect(self.digest_total == 0, "digest_total", self.digest_total, f"0 {where}")


@dataclass(frozen=True, kw_only=True)
class OffloadRecord(BaseRecord):
    """One kind of state of one engine, given back and taken up again."""

    VALUES: ClassVar[Values] = Values(
        least={"host_growth_bytes": -math.inf},
        one_of={
            "way": ("deepspeed", "release"),
            "moment": ("after a step", "after a backward pass"),
            "verdict": ("ok", "wrong bits", "failed", "not offered", "not applicable"),
        },
    )

    kind: str = "offload"
    ranks: int
    """Ranks of the engine."""
    stage: int
    """Its ZeRO stage."""
    way: str
    """``deepspeed`` (``offload_states`` and ``reload_states``) or ``release`` (dropped, and written back)."""
    state: str
    """Kind of state, ``all`` for all together."""
    moment: str
    """``after a step``, or ``after a backward pass``, the only time at which ZeRO-1 and 2 hold gradients."""
    pinned: bool | None
    """Whether the host's memory was pinned; None where that does not apply."""
    blocking: bool | None
    """Whether the call waited for the copies; None where that does not apply."""
    bytes: int | None
    """Bytes of that kind that the engine held before, largest rank."""
    offload_s: float | None
    """Seconds to offload, median of the cycles, slowest rank."""
    reload_s: float | None
    """Seconds to take up again, the same way."""
    allocated_before_bytes: int | None
    """What the allocator of the device had handed out before, largest rank; None where the device has none (CPU)."""
    allocated_after_bytes: int | None
    """The same after the offload."""
    allocated_reloaded_bytes: int | None
    """The same after the reload."""
    host_growth_bytes: int | None
    """Resident memory after the last cycle beyond that after the first, largest rank; None for a single cycle."""
    equal: bool | None
    """Whether every bit of the state is as before; None where nothing was offloaded."""
    mismatch: str | None
    """The first bits that are not."""
    trains: str | None
    """How the next step went beside an engine never offloaded: ``bit-equal``, ``differs: ...`` or ``cannot: ...``."""
    note: str | None = None
    """Why there are no figures, such as ``not offered by DeepSpeed``, or what the allocator says."""
    verdict: str
    """``ok``, ``wrong bits``, ``failed``, ``not offered`` or ``not applicable``."""
    ok: bool
    """Whether nothing is wrong: also where DeepSpeed does not offer it, or it does not apply."""

    def check(self) -> None:
        """Raises InputError where what the row says of itself cannot all be true."""
        check_verdict(self, good=("ok", "not offered", "not applicable"))
        where = f"where verdict is {shown(self.verdict)}"
        if self.verdict == "wrong bits":
            right = self.equal is True and self.trains == "bit-equal" and self.mismatch is None
            expect(not right, "verdict", self.verdict, "another one where nothing differs")
            return
        right = self.equal is not False and self.mismatch is None
        expect(right, "verdict", self.verdict, "wrong bits where the state differs")
        if self.verdict == "ok":
            expect(self.equal is True, "equal", self.equal, f"true {where}")
            expect(self.trains == "bit-equal", "trains", self.trains, f"bit-equal {where}")
            for name in ("offload_s", "reload_s"):
                expect(getattr(self, name) is not None, name, None, f"a number {where}")

"""What the words of a report of ``compare`` mean, so that it can be read alone: ``compare_legend(rows)``. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relaymeter.compare_records import PATHS, CompareRecord
from relaymeter.harness.report_tables import ReportTable, cells

__all__ = ["compare_legend"]

#: What happens on each path, and its processes.
_PATHS: Mapping[str, tuple[str, str]] = {
    "in-memory": ("ranks send one another what they lack, between two live engines (weights alone: to copies)", "stay"),
    "gather": ("each tensor is gathered whole by DeepSpeed's own calls, and every rank cuts out its shard", "stay"),
    "dcp": ("torch's distributed checkpoint: saved by one job, loaded with resharding by the next", "started anew"),
    "universal": ("DeepSpeed's checkpoint, its converter, load_universal in the next job", "started anew"),
    "megatron": ("Megatron-Core's refit on GPUs: weights alone, from one tensor-parallel model into another", "stay"),
}  # fmt: skip
_OVERLAP = (
    "pause: how long training stands still: all phases but the digest. Where processes stay, plan and build are left "
    "out of it, assuming that both can overlap training: that overlap was not measured, and both engines are alive "
    "then, so the state is held twice. total: all phases but the digest, plan and build among them."
)
_SUMS = (
    "without relaunch and imports: less the start of new processes and their imports. state only: what of the pause "
    "moves the state, without relaunch, imports and build. save ends in the page cache: nothing waits for the disk. "
    "Behind a time its ratio to that of in-memory in the same column; a dash where there is "
    "nothing to leave out."
)
_PRICED = "priced: the pause by a profile's costs of paths, and how far off that was."
_ENGINES = (
    "zero3 x4 tp2: ZeRO stage 3 on 4 ranks, tensor-parallel degree 2. tp2 x 2 copies: 2 inference copies of the "
    "weights, tensor-parallel degree 2 each."
)
_DIGESTS = (
    "digests equal: tensor copies at the destination whose digest, over all their bits, is that of the source, of how "
    "many; it is the proof, and in no time."
)
_PLACES = (
    "warm cache: the checkpoint was loaded out of the page cache, as written. cold cache: its files were dropped from "
    "the page cache before. tmpfs: it lay in memory. unshaped: network links as they are; shaped: the rate of each NIC "
    "is limited."
)


def compare_legend(rows: Sequence[CompareRecord]) -> ReportTable:
    """The paths of ``rows`` in plain words, a line each; below them times, engines, digests and storages."""
    have = {row.path for row in rows}
    lines = tuple(cells(path, *_PATHS[path]) for path in PATHS if path in have)
    priced = (_PRICED,) if any(row.predicted_pause_s is not None for row in rows) else ()
    columns = (("path", "left"), ("what happens", "left"), ("processes", "left"))
    return ReportTable("Legend", columns, lines, (_OVERLAP, _SUMS, *priced, _ENGINES, _DIGESTS, _PLACES))

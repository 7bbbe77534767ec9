"""``soak``: check the bare collective, and say where wrong bytes came from.

The parent checks the inputs before a rank starts and gives the verdict on what the ranks found. In a world that was
joined, each rank does the job and rank 0 does the rest.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from relaymeter.calibration.labels import LARGEST_MESSAGE_BYTES
from relaymeter.calibration.wrong_bytes import WrongRun
from relaymeter.errors import EXIT_OK, EXIT_WRONG_BITS, InputError, NothingMeasured
from relaymeter.harness import emit
from relaymeter.harness.commands_ranks import asked_cluster, check_world, is_shaped, shapeable, work_together, write_all
from relaymeter.harness.jobs import ClusterConfig, SoakFault, SoakJob
from relaymeter.harness.launch import already_in_world
from relaymeter.harness.results import machine_id, make_stamp
from relaymeter.harness.soak_rows import SoakRecord, binary_text, places_of, runs_of
from relaymeter.records import dump_json
from relaymeter.units import counted, format_rate, format_seconds

__all__ = ["soak"]

_SECONDS = 60.0
_BEYOND_S = 300.0
_LIMIT_S = 7 * 86400.0
#: Runs that the table lists; all are in the JSON.
_SHOWN = 20


def soak(args: argparse.Namespace) -> int:
    """Soak and report. Returns the exit code: 6 where bytes were wrong, whatever else happened."""
    if (args.message or 0) > LARGEST_MESSAGE_BYTES:
        limit = f"{LARGEST_MESSAGE_BYTES} bytes ({LARGEST_MESSAGE_BYTES >> 30}GiB)"
        raise InputError(f"--message {args.message} is more than a label can number: give at most {limit}")
    out = emit.Output(args.json, force=args.force)
    hint = already_in_world()
    check_world(args, hint)
    cluster = None
    if hint is None:
        cluster = asked_cluster(args, ClusterConfig(nodes=2, ranks_per_node=2))
        size = cluster.nodes * cluster.ranks_per_node
        if size < 2:
            raise NothingMeasured("a soak needs two ranks: in a world of one nothing is sent")
        if args.fault is not None and args.fault[1] >= size:
            raise InputError(f"--fault: rank {args.fault[1]} of {size} ranks")
        cluster = shapeable(cluster, out)
    seconds = args.seconds if args.seconds is not None or args.bytes is not None else _SECONDS
    job = SoakJob(
        seconds=seconds,
        total_bytes=args.bytes,
        message_bytes=args.message,
        executor=args.executor,
        time_limit_s=args.time_limit or (_LIMIT_S if seconds is None else seconds + _BEYOND_S),
        nic_per=args.nic_per if hint else None,
        stamp=make_stamp(machine_id(), shaped=is_shaped(cluster)),
        fault=None if args.fault is None else SoakFault(kind=args.fault[0], rank=args.fault[1]),
    )
    code, result = work_together(job, cluster, hint, out)
    return code if result is None else _report(args, result["rows"], code, out)


def _report(args: argparse.Namespace, rows: Sequence[Mapping[str, Any]], code: int, out: emit.Output) -> int:
    """Everything that follows from the rows, wrong bits first. Returns the exit code."""
    record, runs = SoakRecord.from_dict(rows[0]), runs_of(rows)
    for line in summary_lines(record):
        out.say(line)
    if runs:
        for line in _origin_lines(record, runs):
            out.say(line)
        places = places_of(rows)
        out.table(_pairs_table(runs, places))
        out.table(_runs_table(runs, places))
    failed = write_all(args, {"json": lambda: out.json("".join(dump_json(row, indent=None) for row in rows))})
    if record.wrong_bytes:
        return EXIT_WRONG_BITS
    if code != EXIT_OK:
        out.say(f"the soak broke off (exit code {code}): what was checked before was right")
    return code or failed or out.exit_code


def summary_lines(record: SoakRecord) -> Iterator[str]:
    """The verdict over all ranks, what was moved, and what the time went to."""
    everyone = f"all {record.ranks} ranks together"
    if record.wrong_bytes:
        yield (
            f"WRONG BITS: {counted(record.wrong_bytes, 'byte')} of {counted(record.wrong_messages, 'message')} not as "
            f"sent ({everyone}: {counted(record.messages, 'message')}, {binary_text(record.bytes_total)})"
        )
    else:
        yield f"no wrong byte in {counted(record.messages, 'message')}, {binary_text(record.bytes_total)} ({everyone})"
    yield (
        f"soak of {record.ranks} ranks on {counted(record.nodes, 'node')} by {' and '.join(record.executors)} over "
        f"{record.backend}: {counted(record.calls, 'call')} in {format_seconds(record.elapsed_s)}, messages of up to "
        f"{binary_text(record.message_bytes)}, {format_rate(record.bytes_total / max(record.elapsed_s, 1e-9))}"
    )
    if record.make_s is not None and record.exchange_s is not None and record.check_s is not None:
        yield (
            f"slowest rank: exchange {format_seconds(record.exchange_s)}, making {format_seconds(record.make_s)}, "
            f"checking {format_seconds(record.check_s)} ({_share(record):.0%} of the time for both)"
        )


def _share(record: SoakRecord) -> float:
    """Of the time, what making and checking took on the slowest rank."""
    return ((record.make_s or 0.0) + (record.check_s or 0.0)) / max(record.elapsed_s, 1e-9)


def _origin_lines(record: SoakRecord, runs: Sequence[WrongRun]) -> Iterator[str]:
    """A line an origin: how many runs, on which grid, of which lengths."""
    for origin, found in record.origins.items():
        grid = found["grid_bytes"]
        lengths = Counter(run.length_bytes for run in runs if run.origin == origin).most_common(3)
        shown = ", ".join(f"{number} x {binary_text(length)}" for length, number in lengths)
        where = "whole messages" if grid is None else f"all on a grid of {binary_text(grid)}"
        wrong, of = counted(found["bytes"], "wrong byte"), counted(found["runs"], "run")
        yield f"{origin}: {wrong} in {of} ({shown}), {where}"


def _rank(rank: int, places: Mapping[int, str]) -> str:
    """A rank with its node and host, where they are known."""
    return f"{rank}, {places[rank]}" if rank in places else str(rank)


def _pairs_table(runs: Sequence[WrongRun], places: Mapping[int, str]) -> Table:
    table = emit.simple_table(
        "wrong bytes by pair of ranks",
        [
            ("from rank", "whole"),
            ("to rank", "whole"),
            *((name, "right") for name in ("runs", "bytes", "first call", "last call")),
        ],
    )
    pairs: dict[tuple[int, int], list[WrongRun]] = {}
    for run in runs:
        pairs.setdefault((run.sender, run.receiver), []).append(run)
    for (sender, receiver), of in sorted(pairs.items()):
        calls = [run.call for run in of]
        cells = (len(of), sum(run.wrong_bytes for run in of), min(calls), max(calls))
        table.add_row(_rank(sender, places), _rank(receiver, places), *(str(cell) for cell in cells))
    return table


def _runs_table(runs: Sequence[WrongRun], places: Mapping[int, str]) -> Table:
    ranks = [("call", "right"), ("from rank", "whole"), ("to rank", "whole")]
    sizes = [(name, "right") for name in ("message", "begin", "length", "grid")]
    rest = "" if len(runs) <= _SHOWN else f", the first {_SHOWN} of {len(runs)} (all with --json)"
    table = emit.simple_table(f"runs of wrong bytes, in bytes{rest}", [*ranks, *sizes, ("holds", "left")])
    for run in runs[:_SHOWN]:
        grid = min(run.begin_grid_bytes, run.length_grid_bytes)
        numbers = (run.message_bytes, run.begin_bytes, run.length_bytes, grid)
        pair = (_rank(run.sender, places), _rank(run.receiver, places))
        table.add_row(str(run.call), *pair, *(str(number) for number in numbers), _holds(run))
    return table


def _holds(run: WrongRun) -> str:
    """What is there in place of what was sent."""
    if run.origin_begin_bytes is None:
        return f"{run.flipped_bits} flipped" if run.flipped_bits is not None else run.origin
    what = f"bytes from {run.origin_begin_bytes} of "
    if run.origin == "another offset":
        return what + "the same message"
    back = run.origin_calls_back or 0
    when = "this call" if not back else f"call {run.call - back}"
    return f"{what}rank {run.origin_sender}'s message to rank {run.origin_receiver} of {when}"

"""A rank: joins the world, does its job, and rank 0 writes the result.

``python -m relaymeter.harness.worker JOB.json RESULT.json`` is what the launcher runs once per rank;
``work(job)`` is the same for a process that torchrun has started as a rank already.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from relaymeter.errors import EXIT_CRASH, EXIT_OK, InputError, RankLost, RelaymeterError
from relaymeter.harness.jobs import Job, job_of
from relaymeter.harness.world import World, join
from relaymeter.records import dump_json, load_json, write_text

__all__ = ["main", "meeting_limit", "work"]

Say = Callable[[str], None]
#: Seconds that naming the ranks which did not come may take, and the least and most that the others wait for them.
_NAMING_S = 15.0
_LEAST_MEETING_S = 10.0
_LONGEST_MEETING_S = 600.0
#: By kind of job, the module of this room and its function ``(job, world, say)``, which every rank calls and exhausts;
#: on rank 0 it gives the result so far, again after everything that is done: a JSON-ready dict, or rows.
_JOBS = {
    "calibrate": ("calibrate_job", "run_calibrate_job"),
    "check": ("calibrate_job", "run_check_job"),
    "run": ("run", "run_job"),
    "soak": ("soak_job", "run_soak_job"),
    "track": ("track.rank_job", "run_track_job"),
    "training-state": ("state_run", "run_state_job"),
    "offload": ("state_run", "run_offload_job"),
    "validate": ("validate_job", "run_validate_job"),
    "compare-save": ("compare_ranks", "run_save_job"),
    "compare-load": ("compare_load", "run_load_job"),
}


def work(
    job: Job,
    say: Say,
    keep: Callable[[dict[str, Any]], None],
    *,
    joined: bool = False,
    on_error: Say | None = None,
) -> int:
    """Join the world and do ``job``. Every rank calls it; returns its exit code.

    ``say`` gets lines for people and ``keep`` the result so far (of a run: after every move), both on rank 0. Errors
    are printed to standard error, told to ``on_error`` in one line, and become the exit code; in a ``joined`` world,
    where all ranks share a terminal, rank 0 alone prints what every rank was refused for.
    """
    world: World | None = None
    lost: tuple[int, ...] = ()
    try:
        age_s = time.time() - psutil.Process().create_time()
        begin = time.perf_counter()
        world = join(job.time_limit_s, meet_limit_s=meeting_limit(job.time_limit_s, age_s), nic_per=job.nic_per)
        world.start_s, world.join_s = age_s, time.perf_counter() - begin
        _do(job, world, say, keep)
        return EXIT_OK
    except RelaymeterError as error:
        lost = error.ranks if isinstance(error, RankLost) else ()
        if not (joined and isinstance(error, InputError) and world is not None and world.rank):
            print(f"relaymeter: {error}", file=sys.stderr, flush=True)
        if on_error is not None:
            on_error(str(error).split("\n")[0])
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        if on_error is not None:
            on_error("".join(traceback.format_exception_only(error)).split("\n")[0])
        return EXIT_CRASH
    finally:
        if world is not None:
            world.close(lost)


def meeting_limit(time_limit_s: float, age_s: float) -> float:
    """Seconds that ranks of this age wait for the others: less than the command has left, so that those who did not
    come are named before it ends. Pure."""
    margin_s = min(_NAMING_S, time_limit_s / 4)
    return min(_LONGEST_MEETING_S, max(_LEAST_MEETING_S, time_limit_s - age_s - margin_s))


def _do(job: Job, world: World, say: Say, keep: Callable[[dict[str, Any]], None]) -> None:
    quiet = say if world.rank == 0 else _nothing
    module, function = _JOBS[job.kind]
    results = getattr(importlib.import_module(f"relaymeter.harness.{module}"), function)(job, world, quiet)
    for result in results:
        if world.rank == 0:
            keep(result if isinstance(result, dict) else {"rows": [row.to_dict() for row in result]})


def _nothing(_: str) -> None:
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the job, do it, and on rank 0 write the result, of a run after every move. Returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the stream's encoding does not have ends no rank
            stream.reconfigure(errors="backslashreplace")
    job_path, result_path = (Path(text) for text in (sys.argv[1:] if arguments is None else arguments))
    return work(
        job_of(load_json(job_path, "job"), str(job_path)),
        lambda text: print(text, flush=True),
        lambda result: write_text(result_path, dump_json(result), force=True),
    )


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # a process group with a dead member may hold threads that an ordinary exit would wait for

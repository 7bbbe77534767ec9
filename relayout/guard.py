"""Guard: a stretch of collectives that ends on every rank within a time limit, with an error that names who stopped it.

``with guarded("the move", rank=rank, time_limit_s=60, heartbeat=heartbeat) as deadline: ...`` on every rank of a group.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch.distributed as dist

from relaymeter.errors import MoveTimeout, PlanDisagreement, RankLost
from relaymeter.relayout.heartbeat import Heartbeat
from relaymeter.relayout.transport import break_group

__all__ = ["guarded"]


@contextlib.contextmanager
def guarded(
    what: str,
    *,
    rank: int,
    time_limit_s: float,
    heartbeat: Heartbeat | None = None,
    group: dist.ProcessGroup | None = None,
    consequence: str = "and the destination is not usable",
) -> Iterator[float]:
    """A stretch of collectives over ``group`` that ends on every rank within ``time_limit_s``. Gives its deadline.

    The deadline (``time.monotonic()``) leaves the heartbeat its time to tell who is lost. Raises RankLost naming the
    lost rank, or the rank that failed for a reason of its own; MoveTimeout when all ranks still live; and on the rank
    with a reason of its own that very error. Their texts say that ``what`` stopped, with its ``consequence``.
    PlanDisagreement passes through: every rank raises it. After any other error ``group`` must not be used again.
    """
    end = f"{what} stopped {consequence}".rstrip()
    settle_s = heartbeat.settle_s if heartbeat is not None else 0.0
    deadline = time.monotonic() + time_limit_s - min(settle_s, time_limit_s / 2)
    watch = heartbeat.guard(lambda: break_group(group)) if heartbeat is not None else contextlib.nullcontext()
    try:
        with watch:
            yield deadline
    except PlanDisagreement:
        raise
    except Exception as error:
        if heartbeat is None:
            break_group(group)
            if isinstance(error, (RankLost, MoveTimeout)):
                raise type(error)(f"{error}: {end}") from error
            raise
        found = _explain(error, end, rank, heartbeat, group)
        if found is error:
            raise
        raise found from error


def _explain(error: Exception, end: str, rank: int, heartbeat: Heartbeat, group: dist.ProcessGroup | None) -> Exception:
    """The error that says who stopped it, ending with ``end``, after telling the other ranks."""
    if not isinstance(error, (RankLost, MoveTimeout, RuntimeError)):
        heartbeat.publish("error", (rank,), f"{type(error).__name__}: {error}")
        break_group(group)
        return error
    lost = heartbeat.lost()
    failure = heartbeat.failure()
    if not lost and failure is None and not isinstance(error, MoveTimeout):
        failure = heartbeat.await_failure(heartbeat.settle_s)  # who broke the connection is about to say why
    if not lost and failure is not None and failure.kind == "lost":
        lost = failure.ranks
    if lost:
        heartbeat.publish("lost", lost, str(error))
        break_group(group)
        names = ", ".join(str(r) for r in lost)
        return RankLost(f"rank {names} no longer answers: {end}", lost)
    if failure is not None and failure.kind == "error":
        return RankLost(f"rank {failure.rank} failed ({failure.text}): {end}", (failure.rank,))
    if isinstance(error, MoveTimeout) or (failure is not None and failure.kind == "timeout"):
        heartbeat.publish("timeout", (), str(error))
        break_group(group)
        return MoveTimeout(f"the time limit passed while every rank still answers: {end}")
    heartbeat.publish("error", (rank,), f"{type(error).__name__}: {error}")
    break_group(group)
    return RankLost(f"{error}, though no rank fell silent: {end}") if isinstance(error, RankLost) else error

"""Transport: one exchange of raw bytes between ranks, in two kinds, with a deadline.

``exchange_messages`` posts every receive before any send (the default on gloo); ``exchange_flat`` is one
``all_to_all_single`` (the default on NCCL). Tensors are 1-D contiguous uint8. All ranks of the group call the same one.

An exchange that fails leaves the group unusable: RankLost without ranks says that a connection broke, MoveTimeout that
the deadline passed. ``break_group`` makes every wait of this process on a group fail at once.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from relaymeter.errors import InputError, MoveTimeout, RankLost

__all__ = [
    "EXECUTORS",
    "MAX_MESSAGE_BYTES",
    "break_group",
    "control_device",
    "default_executor",
    "exchange_flat",
    "exchange_messages",
    "wait_for",
]

EXECUTORS = ("send-recv", "all-to-all")

#: Larger messages travel in parts: beyond this size misplaced 128 KiB blocks were seen on InfiniBand.
MAX_MESSAGE_BYTES = 256 << 20

#: How often a wait on the host looks whether the other ranks still live, in seconds.
_POLL_S = 0.1

#: A tag that no exchange uses.
_BREAK_TAG = (1 << 31) - 2

Message = tuple[int, torch.Tensor]


def default_executor(backend: str) -> str:
    """``"send-recv"`` on gloo, which is half-duplex per pair in an all-to-all; ``"all-to-all"`` on NCCL."""
    return "all-to-all" if backend == "nccl" else "send-recv"


def control_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where tensors of small control exchanges over ``group`` must live."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _remaining(deadline: float) -> datetime.timedelta:
    # a timeout of zero would mean none
    return datetime.timedelta(seconds=max(0.001, deadline - time.monotonic()))


def wait_for(
    works: Sequence[dist.Work],
    *,
    group: dist.ProcessGroup | None = None,
    deadline: float | None = None,
    poll: Callable[[], None] | None = None,
) -> None:
    """Wait until all ``works`` of ``group`` are done.

    ``deadline`` is a ``time.monotonic()`` value; None stands for the group's own timeout. ``poll`` is called now and
    then and may raise to stop: the works are then given up, and their tensors must not be used again. Raises
    MoveTimeout past the deadline and RankLost, without ranks, when a connection broke; the group is unusable after
    either.
    """
    on_device = dist.get_backend(group) == "nccl"
    try:
        if on_device:
            for work in works:
                _wait_on_device(work, deadline, poll)
        elif poll is None:
            _wait_on_host(works, deadline)
        elif works:
            _wait_beside(works, deadline, poll)
    except (MoveTimeout, RankLost):
        break_group(group)
        raise
    except RuntimeError as error:
        late = deadline is not None and time.monotonic() >= deadline
        break_group(group)
        if late:
            raise MoveTimeout("the exchange did not end within its time limit") from error
        raise RankLost(f"a connection of the exchange broke: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _wait_on_host(works: Sequence[dist.Work], deadline: float | None) -> None:
    for work in works:
        if deadline is None:
            work.wait()
        else:
            work.wait(_remaining(deadline))


def _wait_beside(works: Sequence[dist.Work], deadline: float | None, poll: Callable[[], None]) -> None:
    """Wait in a thread of its own, which is left behind where ``poll`` raises.

    gloo wakes no wait whose message had half arrived when its sender died, not even where the group is aborted: it
    lasts until the deadline, whatever is known by then.
    """
    ended = threading.Event()
    raised: list[BaseException] = []

    def wait_all() -> None:
        try:
            _wait_on_host(works, deadline)
        except BaseException as error:
            raised.append(error)
        finally:
            ended.set()

    threading.Thread(target=wait_all, name="relaymeter-wait", daemon=True).start()
    while not ended.wait(_POLL_S):
        poll()
    if raised:
        raise raised[0]


def _wait_on_device(work: dist.Work, deadline: float | None, poll: Callable[[], None] | None) -> None:
    begin = time.monotonic()
    while not work.is_completed():
        now = time.monotonic()
        if deadline is not None and now >= deadline:
            raise MoveTimeout("the exchange did not end within its time limit")
        if now - begin > 0.02:  # short exchanges are spun for: sleeping would lengthen them
            if poll is not None:
                poll()
            time.sleep(0.001)
    work.wait()


def break_group(group: dist.ProcessGroup | None = None) -> None:
    """Make the waits of this process on ``group``, in any thread, fail at once; the group is unusable afterwards.

    Except, on gloo, a wait whose message had half arrived when its sender died (see ``_wait_beside``).

    On gloo a receive that times out closes all connections of the group, which its peers notice too; NCCL communicators
    are aborted. For use after a failure; safe to call twice and from another thread.
    """
    members, me = dist.get_world_size(group), dist.get_rank(group)
    if dist.get_backend(group) == "nccl":
        found = group if group is not None else dist.group.WORLD
        if found is not None:
            with contextlib.suppress(RuntimeError):
                found._get_backend(torch.device("cuda")).abort()
        return
    for distance in range(1, members):
        # a receive over a connection that is broken already fails without closing the others: try each peer
        with contextlib.suppress(RuntimeError):
            never = torch.empty(1, dtype=torch.uint8)
            work = dist.irecv(never, group=group, tag=_BREAK_TAG, group_src=(me + distance) % members)
            if work is not None:
                work.wait(datetime.timedelta(milliseconds=1))


def _pieces(messages: Sequence[Message], cap: int) -> Iterator[Message]:
    """The messages without empty ones, large ones cut in parts of ``cap`` bytes: the same on both ends."""
    for peer, tensor in messages:
        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise InputError(f"message with rank {peer}: a 1-D contiguous uint8 tensor is needed, got {tensor.dtype}")
        for begin in range(0, tensor.numel(), cap):
            yield peer, tensor[begin : begin + cap]


def exchange_messages(
    sends: Sequence[Message],
    receives: Sequence[Message],
    *,
    tag: int,
    group: dist.ProcessGroup | None = None,
    deadline: float | None = None,
    poll: Callable[[], None] | None = None,
    cap: int = MAX_MESSAGE_BYTES,
) -> None:
    """Send and receive (peer, tensor) messages; peers are ranks of ``group``, never the caller's own.

    Every receive is posted before any send, and all are waited for (see ``wait_for``). Several messages with one peer
    are matched in order. Messages of no bytes are left out on both ends; larger ones than ``cap`` bytes are cut.
    """
    incoming, outgoing = list(_pieces(receives, cap)), list(_pieces(sends, cap))
    if not incoming and not outgoing:
        return
    works: list[dist.Work | None]
    try:
        if dist.get_backend(group) == "nccl":
            ops = [dist.P2POp(dist.irecv, tensor, group=group, tag=tag, group_peer=peer) for peer, tensor in incoming]
            ops += [dist.P2POp(dist.isend, tensor, group=group, tag=tag, group_peer=peer) for peer, tensor in outgoing]
            works = list(dist.batch_isend_irecv(ops))
        else:
            works = [dist.irecv(tensor, group=group, tag=tag, group_src=peer) for peer, tensor in incoming]
            works += [dist.isend(tensor, group=group, tag=tag, group_dst=peer) for peer, tensor in outgoing]
    except RuntimeError as error:
        break_group(group)
        raise RankLost(f"a connection of the exchange broke: {_first_line(error)}") from error
    wait_for([work for work in works if work is not None], group=group, deadline=deadline, poll=poll)


def exchange_flat(
    send: torch.Tensor,
    send_splits: list[int],
    receive: torch.Tensor,
    receive_splits: list[int],
    *,
    group: dist.ProcessGroup | None = None,
    deadline: float | None = None,
    poll: Callable[[], None] | None = None,
) -> None:
    """One ``all_to_all_single``: ``send_splits[r]`` elements go to rank r of ``group``, in order. Collective.

    Raises InputError, before anything is sent, where the splits do not fit the tensors or the world, or where both
    tensors share memory (an all-to-all in place is not applicable here).
    """
    members = dist.get_world_size(group)
    for name, tensor, splits in (("send", send, send_splits), ("receive", receive, receive_splits)):
        if len(splits) != members or min(splits) < 0 or sum(splits) != tensor.numel():
            raise InputError(f"{name} splits {splits} do not cut {tensor.numel()} elements for {members} ranks")
    if send.numel() and receive.numel() and send.data_ptr() == receive.data_ptr():
        raise InputError("an all-to-all in place is not applicable: send and receive must not share memory")
    try:
        work = dist.all_to_all_single(receive, send, receive_splits, send_splits, group=group, async_op=True)
    except RuntimeError as error:
        break_group(group)
        raise RankLost(f"a connection of the exchange broke: {_first_line(error)}") from error
    wait_for([work] if work is not None else [], group=group, deadline=deadline, poll=poll)

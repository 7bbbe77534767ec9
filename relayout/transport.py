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
    "Waiter",
    "break_group",
    "connect_all",
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
#: gloo keeps its time limits in whole milliseconds, so that one may end a little before its deadline.
_TIMEOUT_STEP_S = 0.01

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


def connect_all(
    group: dist.ProcessGroup | None = None,
    *,
    deadline: float | None = None,
    poll: Callable[[], None] | None = None,
) -> None:
    """Connect every pair of ranks of ``group``, so that no move pays for it. Collective.

    NCCL connects a pair when it first has a message for it (0.2 s seen between two H200); gloo has done so before.
    Raises as ``wait_for``.
    """
    if dist.get_backend(group) != "nccl":
        return
    sent = torch.zeros(dist.get_world_size(group), dtype=torch.uint8, device=control_device(group))
    work = dist.all_to_all_single(torch.empty_like(sent), sent, group=group, async_op=True)
    wait_for([work], group=group, deadline=deadline, poll=poll)


def _remaining(deadline: float) -> datetime.timedelta:
    # a timeout of zero would mean none
    return datetime.timedelta(seconds=max(0.001, deadline - time.monotonic()))


def wait_for(
    works: Sequence[dist.Work],
    *,
    group: dist.ProcessGroup | None = None,
    deadline: float | None = None,
    poll: Callable[[], None] | None = None,
    waiter: Waiter | None = None,
) -> None:
    """Wait until all ``works`` of ``group`` are done.

    ``deadline`` is a ``time.monotonic()`` value; None stands for the group's own timeout. ``poll`` is called now and
    then and may raise to stop: the works are then given up, and their tensors must not be used again. ``waiter`` spares
    a caller of many waits the start of a thread for each. Raises MoveTimeout past the deadline and RankLost, without
    ranks, when a connection broke; the group is unusable after either.
    """
    on_device = dist.get_backend(group) == "nccl"
    try:
        if on_device:
            for work in works:
                _wait_on_device(work, deadline, poll)
        elif poll is None:
            _wait_on_host(works, deadline)
        elif works:
            (waiter or Waiter()).wait(works, deadline, poll)
    except (MoveTimeout, RankLost):
        break_group(group)
        raise
    except RuntimeError as error:
        late = deadline is not None and time.monotonic() >= deadline - _TIMEOUT_STEP_S
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


class Waiter:
    """A thread that waits on the host beside its owner, who polls meanwhile. It is left behind where ``poll`` raises.

    gloo wakes no wait whose message had half arrived when its sender died, not even where the group is aborted: it
    lasts until the deadline, whatever is known by then.
    """

    def __init__(self) -> None:
        self._line: _Line | None = None

    def wait(self, works: Sequence[dist.Work], deadline: float | None, poll: Callable[[], None]) -> None:
        """Wait for all ``works``, calling ``poll`` now and then. Raises what a wait or ``poll`` raises."""
        line, self._line = self._line or _Line(), None
        line.works, line.deadline = works, deadline
        line.go.release()
        try:
            while not line.done.acquire(timeout=_POLL_S):
                poll()
        except BaseException:
            line.close()
            raise
        self._line = line
        raised, line.raised = line.raised, None
        if raised is not None:
            raise raised

    def __del__(self) -> None:
        if self._line is not None:
            self._line.close()


class _Line:
    """What a Waiter and its thread share; the thread ends when it is closed."""

    def __init__(self) -> None:
        self.works: Sequence[dist.Work] = ()
        self.deadline: float | None = None
        self.raised: BaseException | None = None
        self.go, self.done = threading.Lock(), threading.Lock()  # locks wake a thread sooner than events do
        self.go.acquire()
        self.done.acquire()
        self._closed = False
        threading.Thread(target=self._serve, name="relaymeter-wait", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self.go.release()

    def _serve(self) -> None:
        while True:
            self.go.acquire()
            if self._closed:
                return
            try:
                _wait_on_host(self.works, self.deadline)
            except BaseException as error:
                self.raised = error
            self.works = ()
            self.done.release()


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

    Except, on gloo, a wait whose message had half arrived when its sender died (see ``Waiter``).

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


def _on_host(tensor: torch.Tensor, *, copied: bool) -> torch.Tensor:
    """``tensor``, or in its place one in the host's memory: gloo sends nothing else point to point."""
    if tensor.device.type == "cpu":
        return tensor
    return tensor.to("cpu") if copied else torch.empty_like(tensor, device="cpu")


def exchange_messages(
    sends: Sequence[Message],
    receives: Sequence[Message],
    *,
    tag: int,
    group: dist.ProcessGroup | None = None,
    deadline: float | None = None,
    poll: Callable[[], None] | None = None,
    cap: int = MAX_MESSAGE_BYTES,
    waiter: Waiter | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> tuple[int, int]:
    """Send and receive (peer, tensor) messages; peers are ranks of ``group``, never the caller's own.

    Every receive is posted before any send, and all are waited for (see ``wait_for``); ``meanwhile`` is called between
    the two. On gloo, tensors of a device go through the host. Several messages with one peer are matched in order.
    Messages of no bytes are left out on both ends; larger ones than ``cap`` bytes are cut. Returns the bytes sent and
    received.
    """
    incoming, outgoing = list(_pieces(receives, cap)), list(_pieces(sends, cap))
    landing: list[Message] = []
    works: list[dist.Work | None] = []
    try:
        if not incoming and not outgoing:
            pass
        elif dist.get_backend(group) == "nccl":
            ops = [dist.P2POp(dist.irecv, tensor, group=group, tag=tag, group_peer=peer) for peer, tensor in incoming]
            ops += [dist.P2POp(dist.isend, tensor, group=group, tag=tag, group_peer=peer) for peer, tensor in outgoing]
            works = list(dist.batch_isend_irecv(ops))
        else:
            landing = [(peer, _on_host(tensor, copied=False)) for peer, tensor in incoming]
            leaving = [(peer, _on_host(tensor, copied=True)) for peer, tensor in outgoing]
            works = [dist.irecv(tensor, group=group, tag=tag, group_src=peer) for peer, tensor in landing]
            works += [dist.isend(tensor, group=group, tag=tag, group_dst=peer) for peer, tensor in leaving]
    except RuntimeError as error:
        break_group(group)
        raise RankLost(f"a connection of the exchange broke: {_first_line(error)}") from error
    if meanwhile is not None:
        meanwhile()
    posted = [work for work in works if work is not None]
    wait_for(posted, group=group, deadline=deadline, poll=poll, waiter=waiter)
    for (_, target), (_, landed) in zip(incoming, landing, strict=False):
        if landed is not target:
            target.copy_(landed)
    return sum(tensor.numel() for _, tensor in outgoing), sum(tensor.numel() for _, tensor in incoming)


def exchange_flat(
    send: torch.Tensor,
    send_splits: list[int],
    receive: torch.Tensor,
    receive_splits: list[int],
    *,
    group: dist.ProcessGroup | None = None,
    deadline: float | None = None,
    poll: Callable[[], None] | None = None,
    waiter: Waiter | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> tuple[int, int]:
    """One ``all_to_all_single``: ``send_splits[r]`` elements go to rank r of ``group``, in order. Collective.

    ``meanwhile`` is called while it is under way. Returns the bytes sent and received. Raises InputError, before
    anything is sent, where the splits do not fit the tensors or the world, where a tensor is not contiguous, or where
    both share memory (an all-to-all in place is not applicable here).
    """
    members = dist.get_world_size(group)
    for name, tensor, splits in (("send", send, send_splits), ("receive", receive, receive_splits)):
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise InputError(f"{name}: a contiguous 1-D tensor is needed, got strides {list(tensor.stride())}")
        if len(splits) != members or min(splits) < 0 or sum(splits) != tensor.numel():
            raise InputError(f"{name} splits {splits} do not cut {tensor.numel()} elements for {members} ranks")
    begins, ends = (
        (send.data_ptr(), receive.data_ptr()),
        (send.data_ptr() + send.nbytes, receive.data_ptr() + receive.nbytes),
    )
    if send.numel() and receive.numel() and max(begins) < min(ends):
        raise InputError("an all-to-all in place is not applicable: send and receive must not share memory")
    try:
        work = dist.all_to_all_single(receive, send, receive_splits, send_splits, group=group, async_op=True)
    except RuntimeError as error:
        break_group(group)
        raise RankLost(f"a connection of the exchange broke: {_first_line(error)}") from error
    if meanwhile is not None:
        meanwhile()
    wait_for([work] if work is not None else [], group=group, deadline=deadline, poll=poll, waiter=waiter)
    return send.nbytes, receive.nbytes

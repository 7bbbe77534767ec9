"""A CUDA graph of one decode step: captured once, replayed over whatever the weights' addresses hold by then.

graph = DecodeGraph(step, device)          # step: () -> logits, over tensors whose addresses stay
logits = graph.replay()
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

__all__ = ["DecodeGraph", "graph_refusal"]

_WARM_UP = 3


def graph_refusal(device: torch.device, group: dist.ProcessGroup | None) -> str:
    """Why a decode step of a replica over ``group`` (None: one rank) cannot be captured; empty where it can. Local."""
    if device.type != "cuda":
        return f"the weights are on {device.type}: only a CUDA device has graphs"
    if group is not None and dist.get_backend(group) != "nccl":
        return f"the replica sums over {dist.get_backend(group)}: only NCCL's sums can be captured"
    return ""


class DecodeGraph:
    """One captured step. ``step`` reads and writes tensors whose addresses stay, gives the same when it runs twice, and
    does not wait for the device. All ranks of a replica capture, and replay, together."""

    def __init__(self, step: Callable[[], torch.Tensor], device: torch.device) -> None:
        """Runs ``step`` a few times on a stream of its own, then captures it."""
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                step()
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # thread-local, because NCCL's watchdog asks for its events meanwhile
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._logits = step()

    def replay(self) -> torch.Tensor:
        """The step once more. The result stays until the next replay."""
        self._graph.replay()
        return self._logits

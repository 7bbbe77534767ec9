"""Benchmarks of packing and digest on a CUDA device: each beside a plain copy of the same bytes on that device.

``device(say)`` runs in this process, on the current device; without one it has no figures. Times are of CUDA events.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from relaymeter.errors import EXIT_WRONG_BITS
from relaymeter.harness.bench_planning import SMALL
from relaymeter.harness.bench_report import Figure, Found, PartFailed, Say, pair_text
from relaymeter.harness.models import Qwen3Geometry, tensor_parallel_cuts, weight_specs
from relaymeter.relayout.block_sums import LOW_WEIGHTS, add_boxes, block_count, word_box
from relaymeter.relayout.device_sums import DeviceSums, WordBox
from relaymeter.relayout.geometry import row_major_strides
from relaymeter.relayout.layout import TensorSpec
from relaymeter.relayout.packing import Copies
from relaymeter.units import format_bytes, format_rate, format_seconds

__all__ = ["device"]

TINY = Qwen3Geometry(
    hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8,
    head_dim=32, vocab_size=512, tie_word_embeddings=True,
)  # fmt: skip

_PART = "device"
_RATE_BAR = 0.9
_SMALL_BAR_S = 50e-6
#: For how long the device waits for the host: about a millisecond.
_HEAD_START_CYCLES = 2_000_000
_SMALL_SEGMENTS, _SMALL_BYTES = 2000, 128


@dataclass(frozen=True)
class _Shard:
    """Rank ``rank`` of ``degree``'s part of every weight: views of the whole ones, and where each begins."""

    specs: list[TensorSpec]
    views: list[torch.Tensor]
    lo: list[list[int]]


def _seconds(repeats: int, *jobs: Callable[[], object]) -> list[list[float]]:
    """Seconds on the device of every job, by turns; the first turn of each is left out. The device is kept waiting
    meanwhile, so that what the host takes to enqueue is not in them."""
    found: list[list[float]] = [[] for _ in jobs]
    for turn in range(repeats + 1):
        for job, seconds in zip(jobs, found, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
            begin.record()
            job()
            end.record()
            torch.cuda.synchronize()
            if turn:
                seconds.append(begin.elapsed_time(end) / 1e3)
    return found


def _weights(geometry: Qwen3Geometry, dtype: str, device: torch.device) -> dict[str, torch.Tensor]:
    """Weights of random bits, by name."""
    kind = getattr(torch, dtype)
    made = {}
    for name, spec in weight_specs(geometry).items():
        bits = torch.randint(-128, 128, (spec.numel * kind.itemsize,), dtype=torch.int8, device=device)
        made[name] = bits.view(kind).view(spec.shape)
    return made


def _shard(geometry: Qwen3Geometry, weights: Mapping[str, torch.Tensor], rank: int, degree: int) -> _Shard:
    cuts = tensor_parallel_cuts(geometry)
    specs, views, begins = [], [], []
    for name, whole in weights.items():
        lo, view, dim = [0] * whole.dim(), whole, cuts[name].dim
        if dim is not None:
            size = whole.shape[dim] // degree  # heads and rows divide evenly here
            lo[dim], view = rank * size, whole.narrow(dim, rank * size, size)
        specs.append(TensorSpec(name, tuple(whole.shape), str(whole.dtype).removeprefix("torch.")))
        views.append(view)
        begins.append(lo)
    return _Shard(specs, views, begins)


def _packed(views: Sequence[torch.Tensor], offset: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A message that holds ``views`` one after another, from element ``offset`` on, and where each lies in it."""
    count = sum(view.numel() for view in views)
    message = torch.zeros(count + offset, dtype=views[0].dtype, device=views[0].device)
    there = []
    for view in views:
        there.append(message[offset : offset + view.numel()].view(view.shape))
        offset += view.numel()
    return message, there


def _copy_figure(
    name: str, targets: list[torch.Tensor], sources: list[torch.Tensor], repeats: int, *, bar: float | None
) -> Figure:
    """Copies of many views by the product, beside one plain copy of as many bytes and torch's own copies."""
    count = sum(source.numel() for source in sources)
    plain = torch.empty(count, dtype=sources[0].dtype, device=sources[0].device)
    other = torch.empty_like(plain)
    copies = Copies(targets, sources)
    copies.run()
    if not all(torch.equal(_bits(a), _bits(b)) for a, b in zip(targets, sources, strict=True)):
        raise PartFailed(f"device: {name}: other bits than the source's", EXIT_WRONG_BITS)
    ours, peer, each = _seconds(
        repeats, copies.run, lambda: other.copy_(plain), lambda: torch._foreach_copy_(targets, sources)
    )
    best, nbytes = statistics.median(peer), count * plain.element_size()
    value = best / statistics.median(ours)
    return Figure(
        part=_PART, name=f"{name}, {format_bytes(nbytes)}", value=value, unit="ratio", bar=bar, at_least=True,
        ours=format_seconds(statistics.median(ours)),
        peer=f"{pair_text('plain copy', best)} (torch's foreach {best / statistics.median(each):.2f})",
        note="ratio: time of a plain copy of the same bytes on the device over ours, medians of CUDA events",
        samples={"ours_s": ours, "plain_copy_s": peer, "foreach_s": each},
    )  # fmt: skip


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int8)


def _small(device: torch.device, repeats: int) -> Figure:
    """Many short segments, 128 bytes of every 512."""
    whole = torch.randint(-128, 128, (_SMALL_SEGMENTS, 4 * _SMALL_BYTES), dtype=torch.int8, device=device)
    views = [whole[row, :_SMALL_BYTES] for row in range(_SMALL_SEGMENTS)]
    _, there = _packed(views)
    copies = Copies(there, views)
    copies.run()
    if not all(torch.equal(a, b) for a, b in zip(there, views, strict=True)):
        raise PartFailed("device: short segments: other bits than the source's", EXIT_WRONG_BITS)
    ours, each = _seconds(repeats, copies.run, lambda: torch._foreach_copy_(there, views))
    return Figure(
        part=_PART, name=f"pack {_SMALL_SEGMENTS:,} segments of {_SMALL_BYTES} bytes", value=statistics.median(ours),
        unit="s", bar=_SMALL_BAR_S, ours=format_seconds(statistics.median(ours)),
        peer=pair_text("torch's foreach", statistics.median(each)), samples={"ours_s": ours, "foreach_s": each},
    )  # fmt: skip


def _digest_figure(name: str, boxes: list[tuple[WordBox, WordBox]], repeats: int, *, bar: float | None) -> Figure:
    """Block sums by the product, beside the traffic of a plain copy; ``boxes`` are those on the device and those of the
    same words on the CPU, which say what is right."""
    sums = DeviceSums([box for box, _ in boxes], LOW_WEIGHTS)
    sums.run()
    add_boxes([box for _, box in boxes])
    if not all(torch.equal(here.out.cpu(), there.out) for here, there in boxes):
        raise PartFailed(f"device: {name}: other block sums than the CPU's", EXIT_WRONG_BITS)
    plain = torch.empty(sums.nbytes, dtype=torch.int8, device=boxes[0][0].words.device)
    other = torch.empty_like(plain)
    ours, peer = _seconds(repeats, sums.run, lambda: other.copy_(plain))
    traffic = 2 * sums.nbytes / statistics.median(peer)
    rate = sums.nbytes / statistics.median(ours)
    return Figure(
        part=_PART, name=f"{name}, {format_bytes(sums.nbytes)}", value=rate / traffic, unit="ratio", bar=bar,
        at_least=True, ours=f"{format_rate(rate)}", peer=f"copy traffic {format_rate(traffic)}",
        note="digest: bytes read a second over those that a plain copy reads and writes; sums equal to the CPU's",
        samples={"ours_s": ours, "plain_copy_s": peer},
    )  # fmt: skip


def _boxes(shard: _Shard, storages: Sequence[torch.Tensor], offset: int) -> list[tuple[WordBox, WordBox]]:
    """Of every weight's part, that lies row by row in its 1-D storage from element ``offset`` on."""
    made = []
    for spec, view, lo, storage in zip(shard.specs, shard.views, shard.lo, storages, strict=True):
        stride = row_major_strides(tuple(view.shape))
        pair = []
        for held in (storage, storage.cpu()):
            out = torch.zeros(block_count(spec), dtype=torch.int64, device=held.device)
            pair.append(word_box(out, spec, lo, view.shape, held, offset, stride))
        made.append((pair[0], pair[1]))
    return made


def device(say: Say, tiny: bool = False) -> Found:
    """Packing of Qwen3-0.6B's tensor-parallel parts and of short and odd segments, digests of whole and cut weights.
    Raises PartFailed where bits are wrong."""
    if not torch.cuda.is_available():
        say("no CUDA device here: nothing to measure")
        return [], []
    here = torch.device("cuda", torch.cuda.current_device())
    geometry, repeats = (TINY, 2) if tiny else (SMALL, 25)
    say(f"on {torch.cuda.get_device_name(here)}")
    figures = [_small(here, repeats)]
    weights = _weights(geometry, "bfloat16", here)
    for degree in (4, 8):
        shard = _shard(geometry, weights, 1, degree)
        _, there = _packed(shard.views)
        name = f"Qwen3-0.6B, the part of one rank of TP{degree}"
        figures.append(_copy_figure(f"pack {name}", there, shard.views, repeats, bar=_RATE_BAR))
        figures.append(_copy_figure(f"unpack {name}", shard.views, there, repeats, bar=_RATE_BAR))
        _, odd = _packed(shard.views, offset=1)
        figures.append(_copy_figure(f"pack {name}, one element off", odd, shard.views, repeats, bar=None))
    say("packing measured")
    for dtype in ("bfloat16", "float32", "uint8"):
        held = weights if dtype == "bfloat16" else _weights(geometry, dtype, here)
        whole = _shard(geometry, held, 0, 1)
        bar = _RATE_BAR if dtype in ("bfloat16", "float32") else None
        flat = [view.reshape(-1) for view in whole.views]
        figures.append(_digest_figure(f"digest of the weights, {dtype}", _boxes(whole, flat, 0), repeats, bar=bar))
        if dtype == "uint8":
            continue
        for offset in (0, 1):
            part = _shard(geometry, held, 1, 4)
            stored = [torch.cat([view.new_zeros(offset), view.reshape(-1)]) for view in part.views]
            name = f"digest of one rank's part of TP4, {dtype}" + (", one element off" if offset else "")
            rate_bar = None if offset else bar
            figures.append(_digest_figure(name, _boxes(part, stored, offset), repeats, bar=rate_bar))
    return figures, []

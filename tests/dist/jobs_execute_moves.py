"""Jobs that plan and run whole moves between layouts and hold every destination against gather-and-slice."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jobs_execute import Storage, attempt, bits
from pool import Seat

from relaymeter.errors import RelaymeterError
from relaymeter.relayout.combine import join_layouts, restrict_layout
from relaymeter.relayout.digest import compare, digest_layout
from relaymeter.relayout.execute import Mover
from relaymeter.relayout.layout import Layout, TensorSpec
from relaymeter.relayout.partitions import zero3_layout
from relaymeter.relayout.placements import Cut, replicated_layout, tensor_parallel_layout
from relaymeter.relayout.planner import plan_move
from relaymeter.relayout.routes import ROUTES
from relaymeter.relayout.schedule import Schedule, build_schedule
from relaymeter.relayout.source_digest import expected_digest
from relaymeter.relayout.topology import Topology

RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WORLD = 4


def some_specs(**dtypes: str) -> dict[str, TensorSpec]:
    """Weights large and small, cut along either dim, of no elements, of one, and of every width of element."""
    shapes = {
        "up": (1200, 128), "down": (128, 300), "norm": (129,), "scale": (), "empty": (0, 8), "codes": (64, 33),
        "steps": (77,), "mask": (50, 3), "small": (33, 9),
    }  # fmt: skip
    kinds = {
        "codes": "int8", "steps": "int64", "mask": "bool", "small": "float8_e4m3fn", "norm": "float32",
        "scale": "float64",
    } | dtypes  # fmt: skip
    return {name: TensorSpec(name, shape, kinds.get(name, "bfloat16")) for name, shape in shapes.items()}


CUTS = {
    "up": Cut(0), "down": Cut(1), "norm": Cut(None), "scale": Cut(None), "empty": Cut(0), "codes": Cut(1),
    "steps": Cut(0), "mask": Cut(0), "small": Cut(1),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A move: source layouts, destination, casts by name, and the ranks per node."""

    sources: Sequence[Layout]
    destination: Layout
    cast: Mapping[str, str] = field(default_factory=dict)
    per_node: int = 2


def _zero(ranks: Sequence[int], specs: Mapping[str, TensorSpec], name: str = "trainer") -> Layout:
    return zero3_layout(specs, ranks, WORLD, name)


def _tp(replicas: Sequence[Sequence[int]], specs: Mapping[str, TensorSpec], name: str = "replicas") -> Layout:
    return tensor_parallel_layout(specs, CUTS, replicas, WORLD, name)


def cases() -> dict[str, Case]:
    """Moves by name."""
    specs = some_specs()
    masters = some_specs(up="float32", down="float32", norm="float32", codes="int8")
    casts = {"up": "bfloat16", "down": "float8_e5m2", "norm": "float64"}
    arriving = {name: dataclasses.replace(spec, dtype=casts.get(name, spec.dtype)) for name, spec in masters.items()}
    old = _tp([(2, 3)], specs, "old replica")
    pair = _tp([(0, 1), (2, 3)], specs)
    return {
        "trainer to replicas": Case([_zero(range(4), specs)], pair),
        "replicas to trainer": Case([pair], _zero(range(4), specs)),
        "degree changes": Case([_tp([range(4)], specs)], pair, per_node=4),
        "both serve": Case([_zero((0, 1), specs), old], _tp([(2,), (3,)], specs, "new replicas")),
        "refill of a lost rank": Case([restrict_layout(pair, [0, 1, 2], name="survivors")], restrict_layout(pair, [3])),
        "survivors in two layouts": Case(
            [restrict_layout(_zero(range(4), specs), [0, 1]), restrict_layout(old, [2]), restrict_layout(old, [3])],
            restrict_layout(_tp([range(4)], specs), [1, 2]),
        ),
        "copies cut differently": Case(
            [_zero((0, 1), specs)],
            join_layouts([_tp([(0, 1)], specs), replicated_layout(specs, [2], WORLD), _tp([(3,)], specs, "one")]),
        ),
        "casts": Case([_zero(range(4), masters)], _tp([(0, 1), (2, 3)], arriving), casts),
        "casts out of two": Case(
            [_zero((0, 1), masters), _tp([(2, 3)], masters, "old replica")], _tp([(0, 1), (2, 3)], arriving), casts
        ),
    }


def whole_values(specs: Mapping[str, TensorSpec], seed: int) -> Storage:
    """Every tensor flat, of random bits: NaNs of all kinds, infinities, -0 and denormals among them."""
    found = {}
    for number, (name, spec) in enumerate(specs.items()):
        values = bits(spec.numel, spec.dtype, seed * 100 + number)
        found[name] = values.view(torch.uint8).remainder(2).view(torch.bool) if spec.dtype == "bool" else values
    return found


def cut_out(layout: Layout, rank: int, values: Storage, fill: int) -> Storage:
    """The storages of ``rank``: its pieces of ``values``, every other byte ``fill``."""
    held = {}
    for name, place in layout.placements.items():
        spec, size = layout.specs[name], place.storage.get(rank, 0)
        if size:
            storage = torch.full((size * spec.itemsize,), fill, dtype=torch.uint8).view(RAW[spec.itemsize])
            whole = values[name].view(RAW[spec.itemsize]).view(spec.shape)
            for piece in place.pieces_of(rank).tolist():
                box = tuple(
                    slice(lo, lo + extent)
                    for lo, extent in zip(place.lo[piece].tolist(), place.shape[piece].tolist(), strict=True)
                )
                there = storage.as_strided(
                    place.shape[piece].tolist(), place.stride[piece].tolist(), int(place.offset[piece])
                )
                there.copy_(whole[box])
            held[name] = storage.view(getattr(torch, spec.dtype))
    return held


def as_arriving(case: Case, values: Storage) -> Storage:
    """The values converted as the casts ask: to nearest, ties to even, worked out apart from torch."""
    found = dict(values)
    for name, dtype in case.cast.items():
        found[name] = _rounded(values[name], dtype)
    return found


def _rounded(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """float32 ``values`` as ``dtype`` by integer arithmetic on their bits (bfloat16), or by NumPy (float64), or by hand
    over a table of all values (float8_e5m2). Every NaN becomes torch's ``nan``."""
    numbers = values.numpy()
    if dtype == "float64":
        made = torch.from_numpy(numbers.astype(np.float64))
    elif dtype == "bfloat16":
        word = numbers.view(np.uint32).astype(np.uint64)
        up = (word + 0x7FFF + ((word >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
        made = torch.from_numpy(up.astype(np.uint16).view(np.int16)).view(torch.bfloat16)
    else:
        return _nearest_of_eight_bits(numbers)
    made[torch.from_numpy(np.isnan(numbers))] = float("nan")
    return made


def _nearest_of_eight_bits(numbers: np.ndarray[Any, np.dtype[np.float32]]) -> torch.Tensor:
    """float8_e5m2: 5 bits of exponent with bias 15, 2 of mantissa; 0x7c is infinity."""
    codes = np.arange(0x7D)
    exponent, mantissa = codes >> 2, codes & 3
    table = np.where(exponent == 0, mantissa * 2.0**-16, (1 + mantissa / 4) * 2.0 ** (exponent - 15.0))
    with np.errstate(invalid="ignore"):  # signalling NaNs
        size = np.abs(numbers.astype(np.float64))
    size = np.where(np.isnan(size), 0, np.minimum(size, 2.0**16))
    above = np.clip(np.searchsorted(table, size), 0, 0x7C)
    below = np.maximum(above - 1, 0)
    near, far = size - table[below], table[above] - size
    code = np.where((near < far) | ((near == far) & (below % 2 == 0)), below, above)
    code = np.where(size == table[above], above, code)
    sign = (numbers.view(np.uint32) >> 31).astype(np.int64) << 7
    code = np.where(np.isnan(numbers), 0x7F, code) | sign
    return torch.from_numpy(code.astype(np.uint8)).view(torch.float8_e5m2)


def schedule_of(case: Case, route: str, bucket_bytes: int) -> Schedule:
    topology = Topology.grid(WORLD // case.per_node, case.per_node, "rank")
    plan = plan_move(case.sources, case.destination, topology, cast=case.cast)
    codes = np.full(int(plan.group_start[-1]), ROUTES.index(route), dtype=np.int8)
    return build_schedule(plan, topology, codes, bucket_bytes)


def copied(storage: torch.Tensor) -> torch.Tensor:
    """The same bytes, which copying as bool would mend."""
    return storage.view(torch.uint8).clone().view(storage.dtype)


def different_bits(one: Storage, two: Storage) -> list[str]:
    """Names whose bits differ."""
    return [name for name in one if not torch.equal(one[name].view(torch.uint8), two[name].view(torch.uint8))]


def move(seat: Seat, case: str, route: str, executor: str, bucket_bytes: int, seed: int = 1) -> dict[str, Any]:
    """Run one of ``cases``. What is wrong at the destination by gather-and-slice, and what the digest says."""
    asked = cases()[case]
    values = whole_values({name: spec for layout in asked.sources for name, spec in layout.specs.items()}, seed)
    held = [cut_out(layout, seat.rank, values, 0xA5) for layout in asked.sources]
    kept = [{tensor: copied(storage) for tensor, storage in storages.items()} for storages in held]
    right = cut_out(asked.destination, seat.rank, as_arriving(asked, values), 0xA5)
    made = {tensor: torch.zeros_like(storage) for tensor, storage in right.items()}
    expected = expected_digest(asked.sources, asked.destination, seat.rank, held)
    mover = Mover(schedule_of(asked, route, bucket_bytes), seat.rank, held, made, executor, time_limit_s=30)
    mover.poison()
    timing = mover.run()
    report = compare(expected, digest_layout(asked.destination, seat.rank, made, replicas=True))
    wrong = different_bits(right, made)
    flipped = [name for name in made if name in ("up", "small")]  # on every rank, in its last piece
    for name in flipped:
        place = asked.destination.placements[name]
        at = int(place.offset[place.pieces_of(seat.rank)[-1]]) * made[name].element_size()
        made[name].view(torch.uint8)[at] ^= 1
    again = compare(expected, digest_layout(asked.destination, seat.rank, made, replicas=True))
    return {
        "wrong": wrong,
        "source changed": [different_bits(was, now) for was, now in zip(kept, held, strict=True)],
        "passed": report.passed,
        "total": report.total,
        "flipped": flipped,
        "found": sorted({(m.tensor, rank) for m in again.mismatches for rank in m.ranks}),
        "sent": timing.sent_bytes,
    }


def stale(seat: Seat, case: str, layout: int, tensor: str, flat: int) -> list[Any]:
    """One element of one source layout differs on all ranks that hold it from the other layout's. What ranks say."""
    asked = cases()[case]
    values = whole_values(asked.sources[0].specs, 3)
    held = [cut_out(source, seat.rank, values, 0) for source in asked.sources]
    other = {n: v.clone() for n, v in values.items()}
    other[tensor].view(torch.uint8)[flat * other[tensor].element_size()] ^= 1
    held[layout] = cut_out(asked.sources[layout], seat.rank, other, 0)
    try:
        expected_digest(asked.sources, asked.destination, seat.rank, held)
    except RelaymeterError as error:
        dist.barrier()
        return [type(error).__name__, str(error)]
    return []


def wrong_space(seat: Seat) -> dict[str, Any]:
    """A move planned out of two layouts is given the storages of one."""
    case = cases()["both serve"]
    values = whole_values(case.sources[0].specs, 1)
    held = cut_out(case.sources[0], seat.rank, values, 0)
    made = cut_out(case.destination, seat.rank, values, 0)
    return attempt(Mover(schedule_of(case, "direct", 1 << 20), seat.rank, held, made, "send-recv", time_limit_s=20))


def in_place(seat: Seat) -> dict[str, Any]:
    """On rank 1 the destination is a view of the source."""
    case = cases()["trainer to replicas"]
    values = whole_values(case.sources[0].specs, 1)
    held = cut_out(case.sources[0], seat.rank, values, 0)
    made = cut_out(case.destination, seat.rank, values, 0)
    before = {name: storage.clone() for name, storage in made.items()}
    if seat.rank == 1:
        both = torch.zeros(200_000, dtype=torch.bfloat16)
        held["up"] = both[: held["up"].numel()]
        made["up"] = before["up"] = both[100 : 100 + made["up"].numel()]
    found = attempt(Mover(schedule_of(case, "direct", 1 << 20), seat.rank, held, made, "send-recv", time_limit_s=20))
    return found | {"touched": different_bits(before, made)}

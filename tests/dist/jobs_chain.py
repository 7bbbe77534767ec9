"""Jobs that move by chain between three and four nodes and hold every destination against gather-and-slice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jobs_execute_moves import CUTS, as_arriving, copied, cut_out, different_bits, some_specs, whole_values
from jobs_execute_moves import Case as Move
from pool import Seat

from relaymeter.relayout.bounded import BoundedMover, OwnedStorages
from relaymeter.relayout.digest import compare, digest_layout
from relaymeter.relayout.execute import Mover
from relaymeter.relayout.layout import Layout
from relaymeter.relayout.partitions import zero3_layout
from relaymeter.relayout.placements import replicated_layout, tensor_parallel_layout
from relaymeter.relayout.planner import plan_move
from relaymeter.relayout.routes import CHAIN, ROUTES
from relaymeter.relayout.schedule import Schedule, build_schedule
from relaymeter.relayout.source_digest import expected_digest
from relaymeter.relayout.timeline import predicted_extra_bytes
from relaymeter.relayout.topology import Topology


def moves(world: int) -> dict[str, Move]:
    """Moves of six ranks on three nodes, or of four on four."""
    specs = some_specs()
    masters = some_specs(up="float32", norm="float32")
    casts = {"up": "bfloat16", "norm": "float64"}
    arriving = some_specs(norm="float64")

    def copies(replicas: Sequence[Sequence[int]], into: Any = specs) -> Layout:
        return tensor_parallel_layout(into, CUTS, replicas, world, "copies")

    if world == 4:
        trainer = zero3_layout(specs, (0, 1), world, "trainer")
        return {
            "to all nodes": Move([trainer], replicated_layout(specs, range(4), world), per_node=1),
            "casts": Move([zero3_layout(masters, (2,), world)], copies([(0,), (1,), (3,)], arriving), casts, 1),
        }
    trainer = zero3_layout(specs, (0, 1), world, "trainer")
    return {
        "whole copies": Move([trainer], copies([(2,), (3,), (4,), (5,)])),
        "halves": Move([trainer], copies([(2, 3), (5, 4)])),
        "one rank here, two there": Move([trainer], copies([(3,), (4,), (5,)])),
        "all ranks to all": Move(
            [zero3_layout(masters, range(6), world)], copies([(0, 1), (2, 3), (4, 5)], arriving), casts
        ),
    }


def schedule_of(move: Move, world: int, codes: Sequence[int], bucket_bytes: int) -> Schedule:
    """The schedule by the route codes in turn, group after group."""
    topology = Topology.grid(world // move.per_node, move.per_node)
    plan = plan_move(move.sources, move.destination, topology, cast=move.cast)
    turns = np.resize(np.asarray(codes, dtype=np.int8), int(plan.group_start[-1]))
    return build_schedule(plan, topology, turns, bucket_bytes)


def chains(seat: Seat, executor: str, runs: Sequence[tuple[str, int, bool]]) -> list[dict[str, Any]]:
    """Each run is a move, a bucket size, and whether all routes take turns (else everything goes by chain)."""
    found = []
    for name, bucket_bytes, mixed in runs:
        move = moves(seat.world_size)[name]
        values = whole_values(move.sources[0].specs, 5)
        held = [cut_out(layout, seat.rank, values, 0xA5) for layout in move.sources]
        kept = [{tensor: copied(storage) for tensor, storage in storages.items()} for storages in held]
        right = cut_out(move.destination, seat.rank, as_arriving(move, values), 0xA5)
        expected = expected_digest(move.sources, move.destination, seat.rank, held)
        made = {tensor: torch.zeros_like(storage) for tensor, storage in right.items()}
        codes = range(len(ROUTES) - 1, -1, -1) if mixed else [CHAIN]
        schedule = schedule_of(move, seat.world_size, codes, bucket_bytes)
        mover = Mover(schedule, seat.rank, held, made, executor, time_limit_s=30)
        mover.poison()
        timing = mover.run()
        report = compare(expected, digest_layout(move.destination, seat.rank, made, replicas=True))
        loads, table = schedule.loads(executor), schedule.segments_for(seat.rank)
        priced = loads.bytes[(loads.src == seat.rank) & (loads.dst != seat.rank)].sum()
        found.append(
            {
                "wrong": different_bits(right, made),
                "source changed": [different_bits(was, now) for was, now in zip(kept, held, strict=True)],
                "digests": (report.passed, report.total),
                "stages": int(table.stage.max(initial=0)),
                "sent": (timing.sent_bytes, int(priced)),
                "buffers": (mover.buffer_bytes, int(schedule.peak_bytes(executor)[seat.rank])),
            }
        )
    return found


def given_up(seat: Seat, executor: str) -> dict[str, Any]:
    """A chain whose source is released as it is read. What is wrong, and the bytes predicted and held beyond."""
    move = moves(seat.world_size)["to all nodes"]
    values = whole_values(move.sources[0].specs, 6)
    held = [cut_out(layout, seat.rank, values, 0xA5) for layout in move.sources]
    right = cut_out(move.destination, seat.rank, values, 0xA5)
    schedule = schedule_of(move, seat.world_size, [CHAIN], 20_000)
    limit = predicted_extra_bytes(schedule, seat.rank, move.sources, move.destination, executor)
    mover = BoundedMover(
        schedule, seat.rank, move.sources, [OwnedStorages(one) for one in held], move.destination, executor,
        max_extra_bytes=limit, time_limit_s=30,
    )  # fmt: skip
    mover.agree()
    mover.run()
    return {"wrong": different_bits(right, mover.take())}

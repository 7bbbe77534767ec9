"""Jobs on ``relaymeter.Sync``: what arrives from a live trainer in a layout and in another engine, and refusals."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from jobs_engines import refusal, whole_weights, wrong_pieces
from pool import Seat
from rollout_bench import Bench

import relaymeter
from relaymeter.harness.models import tensor_parallel_cuts
from relaymeter.relayout.layout import Layout
from relaymeter.relayout.placements import tensor_parallel_layout
from relaymeter.relayout.routes import RELAY, BlockGroups, Codes
from relaymeter.relayout.topology import Topology
from relaymeter.relayout.weight_sync import SyncOptions


class Relayed:
    """A policy that relays everything."""

    bucket_bytes, executor = 4096, "all-to-all"

    def routes(self, groups: BlockGroups) -> Codes:
        return groups.uniform(RELAY)


def follows(seat: Seat) -> dict[str, Any]:
    """A trainer over all ranks, followed by two copies of two ranks, then by an engine over ranks 2 and 3."""
    bench, rank = Bench(3, range(4)), dist.get_rank()
    cuts = tensor_parallel_cuts(bench.geometry)

    def copies(trainer: Layout) -> Layout:
        return tensor_parallel_layout(trainer.specs, cuts, [(0, 1), (2, 3)], trainer.world_size)

    settings = {"topology": Topology.grid(2, 2), "options": SyncOptions(verify_every=2)}
    sync = relaymeter.Sync(bench.engine, copies, policy=Relayed(), **settings)
    places, schedule = [line.data_ptr() for line in sync.storages.values()], sync.schedule
    direct = relaymeter.Sync(bench.engine, copies, **settings).schedule
    found: dict[str, Any] = {"verified": [], "wrong": []}
    found["relayed"] = [sync._sync._executor, sync.schedule.bytes_cross_node < direct.bytes_cross_node]
    for step in range(3):
        bench.train()
        found["verified"].append(sync(step).verified)
        found["wrong"] += wrong_pieces(sync.layout, sync.storages, whole_weights(bench.engine), rank)
    found["once"] = sync.schedule is schedule and sync.last is not None
    name = "model.layers.0.mlp.down_proj.weight"
    found["shape"] = list(sync.weight(name).shape)
    found["nothing"] = refusal(lambda: sync.weight("no.such"))
    found["apart"] = refusal(lambda: sync(rank))
    found["mixed"] = refusal(lambda: relaymeter.Sync(bench.engine, copies if rank else None))
    found["neither"] = refusal(lambda: relaymeter.Sync(bench.engine, None))
    other = bench.build(1, (2, 3))
    sync._sync.trainer = other  # as if the trainer had been rebuilt over fewer ranks
    found["rebuilt"] = refusal(lambda: sync(3))
    sync.replan()
    sync(3)
    found["addresses"] = [line.data_ptr() for line in sync.storages.values()] == places
    found["from"] = sorted({int(r) for place in sync.trainer_layout.placements.values() for r in place.rank})
    into = relaymeter.Sync(bench.engine, other, **settings)
    bench.train()
    into(0)
    wanted = whole_weights(bench.engine)
    held = {} if other is None else whole_weights(other)
    found["engine"] = [name for name, tensor in held.items() if not torch.equal(tensor, wanted[name])]
    found["held"] = len(held)
    bench.close()
    return found

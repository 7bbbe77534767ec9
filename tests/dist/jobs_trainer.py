"""Jobs for the trainer: ranks 1 and 2 of three train, rank 0 has neither engine nor DeepSpeed."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from pool import Seat

from relaymeter.harness import models, trainer
from relaymeter.relayout import engines, placements, subgroup

_KEPT: dict[str, Any] = {}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 168,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 18,
    "vocab_size": 311,
}


def printed(call: Callable[[], Any]) -> tuple[Any, str]:
    """The value of ``call`` and everything that went to standard output and error meanwhile, also from C code."""
    with tempfile.TemporaryFile("w+") as capture:
        sys.stdout.flush()
        sys.stderr.flush()
        kept = os.dup(1), os.dup(2)
        os.dup2(capture.fileno(), 1)
        os.dup2(capture.fileno(), 2)
        try:
            value = call()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)
            os.close(kept[0])
            os.close(kept[1])
        capture.seek(0)
        return value, capture.read()


def build(seat: Seat, tied: bool) -> dict[str, Any]:
    """Train on ranks 1 and 2; every rank compares the engine's layout with the one made from metadata."""
    geometry = models.Qwen3Geometry(**SIZES, tie_word_embeddings=tied)
    group = subgroup.make_group([1, 2], time_limit_s=60)
    engine, text = printed(lambda: trainer.build_trainer(geometry, group, steps=2, seed=5))
    layout = engines.share_layout(engine, seat.world_size, seat.store, f"trainer/{tied}", time_limit_s=60)
    specs, aliases = models.weight_specs(geometry), models.weight_aliases(geometry)
    metadata = placements.zero3_layout(specs, (1, 2), seat.world_size, aliases=aliases)
    found: dict[str, Any] = {
        "engine": engine is not None,
        "imported": [name for name in ("deepspeed", "transformers") if name in sys.modules],
        "printed": text,
        "specs": list(layout.specs.items()) == list(metadata.specs.items()),
        "aliases": layout.aliases == metadata.aliases,
        "placements": all(p.signature == metadata.placements[n].signature for n, p in layout.placements.items()),
    }
    if engine is not None:
        found |= _inspect(engine, geometry, group, layout)
    _KEPT["engine"], _KEPT["geometry"] = engine, geometry
    return found


def _inspect(engine: Any, geometry: models.Qwen3Geometry, group: Any, layout: Any) -> dict[str, Any]:
    from deepspeed.utils import safe_get_full_fp32_param

    rank = dist.get_rank()
    storage = engines.weights_storage(engine)
    params = dict(engine.module.named_parameters())
    wrong = []
    for name, part in storage.items():
        rows = [torch.empty_like(part) for _ in range(2)]
        dist.all_gather(rows, part, group=group)
        spec = layout.specs[name]
        whole = torch.cat(rows)[: spec.numel].view(spec.shape)
        if not torch.equal(whole, safe_get_full_fp32_param(params[name]).to(torch.bfloat16)):
            wrong.append(name)
    first = [trainer.state_digest(engine) for _ in range(2)]
    kinds = sorted({name.split()[0] for name, _ in trainer.state_tensors(engine)})
    again = trainer.build_trainer(geometry, group, steps=2, seed=5)
    pair = [trainer.train_steps(one, geometry, steps=2, seed=5) for one in (engine, again)]
    return {
        "sizes": {n: part.numel() for n, part in storage.items()}
        == {n: p.storage[rank] for n, p in layout.placements.items()},
        "bfloat16": all(part.dtype == torch.bfloat16 and part.dim() == 1 for part in storage.values()),
        "wrong": wrong,
        "still": first[0] == first[1],
        "changed": trainer.state_digest(engine) != first[0],
        "kinds": kinds,
        "losses": pair[0],
        "repeated": pair[0] == pair[1],
    }


def world_dies(seat: Seat) -> dict[str, Any]:
    """Rank 0 is killed; the world group fails, the trainer's own group does not."""
    if not _KEPT:
        build(seat, tied=False)
    if seat.rank == 0:
        seat.store.wait(["dying/1", "dying/2"], timedelta(seconds=60))
        os.kill(os.getpid(), signal.SIGKILL)
    engine, geometry = _KEPT["engine"], _KEPT["geometry"]
    before = trainer.state_digest(engine)
    seat.store.set(f"dying/{seat.rank}", "ready")
    try:
        dist.barrier()
        world = "alive"
    except RuntimeError as error:
        world = f"dead: {error}"
    kept = trainer.state_digest(engine) == before
    losses = trainer.train_steps(engine, geometry, steps=2, seed=5)
    return {"world": world, "kept": kept, "losses": losses, "trained": trainer.state_digest(engine) != before}

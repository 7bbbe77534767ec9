"""Jobs on the proofs of state moves: that they see what is wrong, and that engines of any layout train alike."""

from __future__ import annotations

from typing import Any

import torch
from pool import Seat

from relaymeter.harness.jobs import Fault
from relaymeter.harness.state_cells import run_change
from relaymeter.harness.state_config import ChangeConfig, EngineConfig, TrainingConfig
from relaymeter.harness.state_context import StateContext
from relaymeter.harness.state_engines import EngineMaker, train
from relaymeter.harness.state_models import build_model
from relaymeter.harness.state_oracle import compare_states, gather_state, plain_fields, share_state, state_difference
from relaymeter.relayout.topology import Topology


def alike(seat: Seat, training: dict[str, Any], engines: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Losses of engines of several layouts, all of one seed; and how far their masters are from the first's."""
    asked = TrainingConfig.model_validate(training)
    maker = EngineMaker(asked)
    found: dict[str, Any] = {"losses": [], "apart": [], "fields": [], "whole": []}
    first = None
    for entry in engines:
        config = EngineConfig.model_validate(entry)
        engine = maker.build(config, 5)
        before = share_state(gather_state(engine, config, asked, maker.group(config.ranks)))
        start = build_model(asked, 5)
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[asked.dtype]
        names = {f"weight {name}": param for name, param in start.named_parameters()}
        found["whole"].append([n for n, p in names.items() if not torch.equal(before.whole[n], p.to(dtype))])
        found["losses"].append(train(engine, asked, steps))
        after = share_state(gather_state(engine, config, asked, maker.group(config.ranks)))
        first = first or after
        found["apart"].append(state_difference(first, after)[0])
        found["fields"].append(None if engine is None else plain_fields(engine))
        if engine is not None:
            engine.destroy()
    maker.close()
    return found


def sees(seat: Seat) -> dict[str, Any]:
    """What the oracle says of a state as it is, of a flipped bit of a moment, and of copies of a weight that differ."""
    training = TrainingConfig()
    config = EngineConfig.model_validate({"stage": 1, "ranks": 2})
    maker = EngineMaker(training)
    engine = maker.build(config, 5)
    train(engine, training, 2)
    group = maker.group(config.ranks)
    source = gather_state(engine, config, training, group)
    found: dict[str, Any] = {}

    def ask(name: str) -> None:
        report = compare_states(source, gather_state(engine, config, training, group))
        found[name] = [report.ok, report.total - report.passed, report.mismatch]

    ask("clean")
    if seat.rank == 0 and engine is not None:
        flat = engine.optimizer.single_partition_of_fp32_groups[0]
        engine.optimizer.optimizer.state[flat]["exp_avg"][3:4].view(torch.int32)[0] ^= 1
    ask("flipped")
    if seat.rank == 0 and engine is not None:
        engine.optimizer.optimizer.state[flat]["exp_avg"][3:4].view(torch.int32)[0] ^= 1
    ask("clean again")
    if seat.rank == 1 and engine is not None:
        engine.module.head.bias.data[2] += 1
    ask("torn")
    found["tensors"] = 0 if source is None else len(source.whole)
    if engine is not None:
        engine.destroy()
    maker.close()
    return found


def change(seat: Seat, entry: dict[str, Any], flip: int | None = None) -> list[dict[str, Any]]:
    """The legs of a change, a bit of a moment flipped on rank ``flip`` after the first move."""
    context = StateContext(
        rank=seat.rank,
        topology=Topology.grid(2, 2),
        store=seat.store,
        fault=None if flip is None else Fault(kind="flip", rank=flip),
    )
    asked = ChangeConfig.model_validate({"name": "asked", "row": "stage", **entry})
    return [
        {
            "route": [leg.source, leg.destination],
            "ok": leg.ok,
            "digests": [leg.digest_passed, leg.digest_total],
            "oracle": [leg.oracle_passed, leg.oracle_total],
            "said": [leg.mismatch, leg.oracle_mismatch],
            "fields": list(leg.fields),
            "continuation": [leg.continuation_ok, leg.continuation],
            "checkpoint": leg.checkpoint,
        }
        for leg in run_change(context, asked)
    ]

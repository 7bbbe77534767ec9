"""Jobs on the DCP path: training states saved by one engine and loaded by another, and what is refused."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
from jobs_engines import refusal
from pool import Seat

from relaymeter.harness.paths.dcp import load_dcp, save_dcp
from relaymeter.harness.state_config import EngineConfig, TrainingConfig
from relaymeter.harness.state_engines import EngineMaker, train
from relaymeter.harness.state_oracle import compare_states, gather_state, plain_fields
from relaymeter.relayout.announce import Assembly
from relaymeter.relayout.digest import compare, digest_layout
from relaymeter.relayout.plain_state import field_differences
from relaymeter.relayout.source_digest import expected_digest
from relaymeter.relayout.training_fields import read_fields
from relaymeter.relayout.training_match import expected_fields
from relaymeter.relayout.training_state import only_tensors, read_together, training_storages


def digested(seat: Seat, source: Any, destination: Any) -> list[Any]:
    """Digests of every copy of every state and of the low-precision weights: passed, of all, the first mismatch; and
    fields of the destination that are not what a move would have written."""
    one, other = (read_together(engine, "source", Assembly()) for engine in (source, destination))
    moved = one.fields["per_weight"]
    layouts = [state.joined(moved, weights=True) for state in (one, other)]
    held = training_storages(source, layouts[0].specs)
    same = [name for name, spec in layouts[1].specs.items() if spec.dtype == layouts[0].specs[name].dtype]
    layouts = [only_tensors(layout, same) for layout in layouts]
    expected = expected_digest(*layouts, seat.rank, held)
    into = training_storages(destination, same)
    report = compare(expected, digest_layout(layouts[1], seat.rank, into, replicas=True))
    wanted, found = expected_fields(one.fields, other.fields), other.fields
    keys = ("engine", "groups", "per_weight", "per_parameter", "scheduler", "scaler")
    fields = [text for key in keys for text in field_differences(wanted[key], found[key], key)]
    return [report.passed, report.total, str(report.mismatches[0]) if report.mismatches else None, fields]


def along(seat: Seat, path: list[dict[str, Any]], training: dict[str, Any], folder: str) -> dict[str, Any]:
    """The state goes along a path of engines, a checkpoint between each two. Where the last is laid out as the first,
    both train on."""
    asked = TrainingConfig.model_validate(training)
    configs = [EngineConfig.model_validate(entry) for entry in path]
    maker, found = EngineMaker(asked), dict[str, Any](digests=[], oracle=[], seconds=[], file_bytes=[], tensor_bytes=[])
    engines = [maker.build(configs[0], 7)]
    train(engines[0], asked, asked.steps)
    held = [gather_state(engines[0], configs[0], asked, maker.group(configs[0].ranks))]
    for number, config in enumerate(configs[1:], 1):
        saved = save_dcp(engines[-1], f"{folder}/{number}", sync=number == 1)
        engines.append(maker.build(config, 7 + number))
        loaded = load_dcp(engines[-1], f"{folder}/{number}")
        found["seconds"].append([saved.total_s, loaded.total_s])
        found["file_bytes"].append([saved.file_bytes, loaded.file_bytes])
        found["tensor_bytes"].append([saved.tensor_bytes, loaded.tensor_bytes, loaded.allocated_bytes])
        held.append(gather_state(engines[-1], config, asked, maker.group(config.ranks)))
        found["digests"].append(digested(seat, *engines[-2:]))
        report = compare_states(held[0], held[-1])
        found["oracle"].append([report.passed, report.total, report.mismatch])
    if configs[0] == configs[-1]:
        losses = [train(engine, asked, 2) for engine in (engines[0], engines[-1])]
        first, last = (gather_state(engines[k], configs[k], asked, maker.group(configs[k].ranks)) for k in (0, -1))
        found["goes on"] = [] if first is None or last is None else list(first.differences(last))
        found["goes on"] += [f"loss {one}, not {other}" for one, other in zip(*losses, strict=True) if one != other]
        if engines[0] is not None and engines[-1] is not None:
            found["fields"] = plain_fields(engines[0]) == plain_fields(engines[-1])
    for engine in engines:
        if engine is not None:
            engine.destroy()
    maker.close()
    return found


def refusals(seat: Seat, folder: str) -> dict[str, Any]:
    """Folders that hold no whole checkpoint of the engine's, as every rank hears of it."""
    asked = TrainingConfig()
    configs = [EngineConfig.model_validate({"stage": stage, "ranks": [1, 3]}) for stage in (3, 1)]
    maker, found = EngineMaker(asked), dict[str, Any]()
    source, other = (maker.build(config, 7 + number) for number, config in enumerate(configs))
    train(source, asked, 1)
    root = Path(folder)
    found["no engine"] = refusal(lambda: save_dcp(None, root / "empty"))
    found["no folder"] = refusal(lambda: load_dcp(other, root / "none"))
    save_dcp(source, root / "whole", sync=False)
    found["taken"] = refusal(lambda: save_dcp(source, root / "whole"))
    found["left"] = sorted(path.name for path in root.iterdir())
    torch.distributed.barrier()
    if seat.rank == 0:
        for name in ("half", "torn", "fewer", "short", "foreign"):
            shutil.copytree(root / "whole", root / name)
        (root / "half/.metadata").unlink()
        (root / "torn/.metadata").write_bytes((root / "whole/.metadata").read_bytes()[:99])
        (root / "a file").touch()
        data = root / "short/__1_0.distcp"
        data.write_bytes(data.read_bytes()[:-2000])
        for name, lost in (("fewer", "exp_avg up.weight"), ("foreign", "relaymeter training state")):
            metadata = pickle.loads((root / name / ".metadata").read_bytes())
            del metadata.state_dict_metadata[lost]
            (root / name / ".metadata").write_bytes(pickle.dumps(metadata))
    torch.distributed.barrier()
    before = None if other is None else read_fields(other)
    for name in ("half", "torn", "fewer", "foreign"):
        found[name] = refusal(lambda name=name: load_dcp(other, root / name))
    found["untouched"] = other is None or read_fields(other) == before
    found["no place"] = refusal(lambda: save_dcp(source, root / "a file/below"))
    plain = maker.build(configs[1], 9, settings={"optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    found["other optimizer"] = refusal(lambda: load_dcp(plain, root / "whole"))
    found["short"] = refusal(lambda: load_dcp(other, root / "short"))
    group = maker.group(configs[0].ranks)
    if group is not None:  # the others take no part
        save_dcp(source, root / "by two", group=group)
        load_dcp(other, root / "by two", group=group)
    found["in order"] = digested(seat, source, other)
    for engine in (source, other, plain):
        if engine is not None:
            engine.destroy()
    maker.close()
    return found

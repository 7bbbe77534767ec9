"""Jobs on live AutoTP and AutoEP engines of tiny models of transformers: what ``harness/inputs`` says of them from a
config alone, beside what DeepSpeed made."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jobs_engines as on_engines
import jobs_engines_ep as on_experts
import torch
from pool import Seat

from relaymeter.harness.inputs.autotp import autotp_cuts
from relaymeter.harness.inputs.deepspeed_config import Trainer, read_trainer
from relaymeter.harness.inputs.layouts import trainer_layout
from relaymeter.harness.inputs.model import Model, module_model, read_model
from relaymeter.relayout import engine_reading, engines
from relaymeter.relayout.layout import Layout

WORLD = 4
#: Odd widths: vocabulary and inner width are no multiples of 2 or 4.
SIZES = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 22, "num_hidden_layers": 2, "num_attention_heads": 6}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 3, "head_dim": 4, "attention_bias": True, "mlp_bias": True},
    "mistral": {"num_key_value_heads": 2, "head_dim": 6},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 3, "head_dim": 8},
    "gpt_neox": {"rotary_pct": 0.5},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
    "qwen3_moe": {"num_key_value_heads": 2, "head_dim": 6, "num_experts": 4, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 8},
    "deepseek_v3": {
        "num_key_value_heads": 6, "n_routed_experts": 4, "moe_intermediate_size": 8, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
        "v_head_dim": 6, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "num_mtp_layers": 0,
    },
}  # fmt: skip


def tiny(family: str, **changes: Any) -> tuple[torch.nn.Module, Model]:
    """A model of the family, and what its config.json alone says."""
    from transformers import AutoConfig, AutoModelForCausalLM

    entry = {**SIZES, **FAMILIES[family], **changes}
    config = AutoConfig.for_model(family, max_position_embeddings=16, use_cache=False, **entry)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps({"model_type": family, **entry}), encoding="utf-8")
        return model, read_model(file)


def trainer_of(settings: Mapping[str, Any]) -> Trainer:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ds.json"
        file.write_text(json.dumps(settings), encoding="utf-8")
        return read_trainer(file)


def specs_of(model: Model) -> dict[str, list[int]]:
    """Names as the module has them, with shapes."""
    return {name.replace("embed_out.", "lm_head."): list(spec.shape) for name, spec in model.specs.items()}


def autotp(seat: Seat, cases: dict[str, tuple[str, int, int, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """By case (family, degree, stage, changes of the config): what differs between DeepSpeed's cuts and ours."""
    return {key: _cuts(family, degree, stage, changes) for key, (family, degree, stage, changes) in cases.items()}


def _cuts(family: str, degree: int, stage: int, changes: dict[str, Any]) -> dict[str, Any]:
    module, told = tiny(family, **changes)
    live = module_model(module)
    settings = on_engines.config(WORLD // degree, stage) | {"tensor_parallel": {"autotp_size": degree}}
    engine = on_engines.engine_over(tuple(range(WORLD)), module, settings)
    cuts, wrong, widths = autotp_cuts(live, degree), [], {}
    for one in engine_reading.engine_tensors(engine)[0]:
        cut = cuts[one.name]
        mine = None if cut.dim is None else [cut.dim, cut.intervals(one.shape[cut.dim], degree).width.tolist()]
        theirs = None if one.cut is None else [one.cut.dim, list(one.cut.widths)]
        widths[one.name] = theirs
        if mine != theirs:
            wrong.append(f"{one.name}: DeepSpeed {theirs}, here {mine}")
    found: dict[str, Any] = {"weights": specs_of(told) == specs_of(live), "wrong": wrong, "widths": widths}
    if stage == 3:
        trainer = trainer_of(settings)
        ours = trainer_layout(live.in_dtype(trainer.dtype), trainer, range(WORLD), WORLD)
        found["wrong"] += on_engines.signatures(engines.weights_layout(engine, WORLD), ours)
    engine.destroy()
    return found


def refused(seat: Seat, families: list[str]) -> dict[str, str]:
    """What DeepSpeed says to AutoTP by the plans of these families."""
    said = {}
    for family in families:
        settings = on_engines.config(2, 0) | {"tensor_parallel": {"autotp_size": 2}}
        try:
            on_engines.engine_over(tuple(range(WORLD)), tiny(family)[0], settings)
            said[family] = "no error"
        except ValueError as error:
            said[family] = str(error)
    return said


def autoep(seat: Seat, families: list[str], degree: int) -> dict[str, dict[str, list[list[int]]]]:
    """Bytes of routed experts and of all else on every rank: of live ZeRO-3 engines, and from the configs alone."""
    found = {}
    for family in families:
        module, told = tiny(family)
        settings = on_experts.config(WORLD, 3, degree)
        settings["expert_parallel"]["preset_model"] = family
        engine = on_experts.engine_over(tuple(range(WORLD)), module, settings)
        trainer = trainer_of(settings)
        ours = trainer_layout(told.in_dtype(trainer.dtype), trainer, range(WORLD), WORLD)
        found[family] = {"ours": _held(ours), "theirs": _held(engines.weights_layout(engine, WORLD))}
        engine.destroy()
    return found


def _held(layout: Layout) -> list[list[int]]:
    inside = [name for name in layout.specs if ".experts." in name]
    outside = [name for name in layout.specs if ".experts." not in name]
    held = {name: layout.placements[name].storage for name in layout.specs}
    return [
        [sum(held[name].get(rank, 0) * layout.specs[name].itemsize for name in names) for rank in range(WORLD)]
        for names in (inside, outside)
    ]

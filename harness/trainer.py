"""A real trainer as the source of a move: a Qwen3-shaped model under DeepSpeed ZeRO-3 on some of the ranks.

    group = make_group(ranks)                                       # every rank
    engine = build_trainer(geometry, group, steps=2, seed=7)        # None on ranks outside the group

DeepSpeed and transformers are imported on the ranks that train, and only there. ``build_trainer`` leaves
``relayout.subgroup`` installed, because every forward pass needs it; ``subgroup.uninstall()`` when the engine is done.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from relaymeter.errors import InputError
from relaymeter.harness.models import Qwen3Geometry
from relaymeter.relayout import subgroup

__all__ = ["build_model", "build_trainer", "engine_config", "state_digest", "state_tensors", "train_steps"]

_MICRO_BATCH = 1
_TOKENS = 32
_BUCKET = 5_000_000


def build_model(geometry: Qwen3Geometry, seed: int) -> torch.nn.Module:
    """A transformers ``Qwen3ForCausalLM`` of this geometry, fp32, with random weights drawn from ``seed``. Any rank."""
    transformers = importlib.import_module("transformers")
    config = transformers.Qwen3Config(
        hidden_size=geometry.hidden_size,
        intermediate_size=geometry.intermediate_size,
        num_hidden_layers=geometry.num_hidden_layers,
        num_attention_heads=geometry.num_attention_heads,
        num_key_value_heads=geometry.num_key_value_heads,
        head_dim=geometry.head_dim,
        vocab_size=geometry.vocab_size,
        tie_word_embeddings=geometry.tie_word_embeddings,
        max_position_embeddings=max(_TOKENS, 128),
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: torch.nn.Module = transformers.Qwen3ForCausalLM(config)
    return model


def engine_config(geometry: Qwen3Geometry, ranks: int, **settings: Any) -> dict[str, Any]:
    """The DeepSpeed config of the trainer over ``ranks`` ranks: ZeRO-3, AdamW, the geometry's dtype with fp32 masters.

    ``settings`` replace top-level entries. Raises InputError for a dtype in which DeepSpeed does not train.
    """
    modes: dict[str, dict[str, Any]] = {"bfloat16": {"bf16": {"enabled": True}}, "float32": {}}
    if geometry.dtype not in modes:
        raise InputError(f"model dtype {geometry.dtype!r}: the trainer knows {', '.join(modes)}")
    return {
        "train_micro_batch_size_per_gpu": _MICRO_BATCH,
        "train_batch_size": _MICRO_BATCH * ranks,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": _BUCKET, "stage3_prefetch_bucket_size": _BUCKET},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": 1_000_000_000,
        **modes[geometry.dtype],
        **settings,
    }


def build_trainer(
    geometry: Qwen3Geometry, group: dist.ProcessGroup | None, *, steps: int, seed: int, **settings: Any
) -> Any | None:
    """A ZeRO-3 engine over the ranks of ``group``, trained ``steps`` steps; None on a rank outside the group.

    ``group`` comes from ``subgroup.make_group(ranks)``, which every rank of the world calls. Weights and tokens depend
    on ``seed`` alone. ``settings`` replace entries of ``engine_config``. The group's ranks call this together; others
    may call it and return at once. Raises InputError as ``subgroup.initialize_over`` does.
    """
    if group is None:
        return None
    config = engine_config(geometry, dist.get_world_size(group), **settings)
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if dist.get_backend(group) == "gloo" else "cuda")
    with _without_notices(), _without_compiler():
        subgroup.install()
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        engine = subgroup.initialize_over(group, build_model(geometry, seed), config)
    train_steps(engine, geometry, steps=steps, seed=seed)
    return engine


def train_steps(engine: Any, geometry: Qwen3Geometry, *, steps: int, seed: int) -> list[float]:
    """Train ``steps`` steps on random tokens and return this rank's loss before each. The engine's ranks call this.

    The tokens depend on ``seed``, the engine's step count and the rank's place in the group, so that going on after a
    move is the same as never having stopped.
    """
    losses = []
    place = dist.get_rank(engine.data_parallel_group)
    for _ in range(steps):
        draw = torch.Generator().manual_seed((seed * 1_000_003 + int(engine.global_steps)) * 4096 + place)
        tokens = torch.randint(geometry.vocab_size, (_MICRO_BATCH, _TOKENS), generator=draw).to(engine.device)
        with _without_notices():
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
        losses.append(float(loss.detach()))
    return losses


@contextlib.contextmanager
def _without_notices() -> Iterator[None]:
    """Keep the deprecation notices that DeepSpeed and transformers draw from torch out of the output."""
    with warnings.catch_warnings():
        for category in (FutureWarning, DeprecationWarning):
            warnings.simplefilter("ignore", category)
        yield


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Keep torch.compile out of DeepSpeed's set-up: it would compile Muon, unused here, for seconds of imports."""
    name = "TORCHDYNAMO_DISABLE"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def state_tensors(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What this rank's training state is made of: weight partitions, fp32 masters, optimizer moments and steps."""
    for name, param in engine.module.named_parameters():
        yield f"weight {name}", param.ds_tensor
    for index, flat in enumerate(engine.optimizer.fp32_partitioned_groups_flat):
        yield f"master {index}", flat
        for key, value in sorted(engine.optimizer.optimizer.state.get(flat, {}).items()):
            yield f"{key} {index}", torch.as_tensor(value)


def state_digest(engine: Any) -> str:
    """SHA-256 over the bits of this rank's training state and its step count.

    Two calls agree exactly when nothing of it changed in between, in this process: padding, whose bits DeepSpeed leaves
    unset, is read too. A rank that holds the engine calls this; no communication.
    """
    digest = hashlib.sha256(str(int(engine.global_steps)).encode())
    for name, tensor in state_tensors(engine):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()

"""Small inputs for tests: configs, safetensors files of a header and a hole, DeepSpeed configs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SIZE_OF = {"F32": 4, "BF16": 2, "F8_E4M3": 1}
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8,
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2, "v_head_dim": 4, "vocab_size": 32, "dtype": "bfloat16",
}  # fmt: skip
ZERO3: dict[str, Any] = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}


def write_json(path: Path, entry: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(entry), encoding="utf-8")
    return path


def write_raw(path: Path, header: bytes, room: int, *, length: int | None = None) -> Path:
    """A file of ``header`` and ``room`` bytes that are never written; ``length``: what its first 8 bytes say."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write((len(header) if length is None else length).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + room)
    return path


def header_of(tensors: Mapping[str, Sequence[int]], dtype: str = "BF16") -> tuple[dict[str, Any], int]:
    """A valid header of tensors by name and shape, and the bytes that follow it."""
    at, header = 0, {}
    for name, shape in tensors.items():
        size = math.prod(shape) * SIZE_OF[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    return header, at


def write_safetensors(path: Path, tensors: Mapping[str, Sequence[int]], dtype: str = "BF16") -> Path:
    header, room = header_of(tensors, dtype)
    return write_raw(path, json.dumps({"__metadata__": {"format": "pt"}, **header}).encode(), room)

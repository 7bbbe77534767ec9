"""What a decoder of a replica computes: sizes, rotary base, norms, and the weights it needs of a trainer.

    config = DecoderConfig.of(model.config)                         # of transformers' Qwen3 or Llama
    layout = config.replica_layout(trainer_layout, [(0, 1), (2, 3)])

No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from relaymeter.errors import InputError
from relaymeter.harness.models import Qwen3Geometry, tensor_parallel_cuts, weight_specs
from relaymeter.relayout.layout import Layout, TensorSpec
from relaymeter.relayout.placements import tensor_parallel_layout

__all__ = ["EMBED", "HEAD", "DecoderConfig"]

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_QK_NORMS = (".q_norm.weight", ".k_norm.weight")
#: What this decoder does not compute, unless it has this value (or is not there).
_NEEDED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
}


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and constants of a dense decoder, equal on all ranks."""

    geometry: Qwen3Geometry
    """Sizes; its dtype is the one that weights arrive and the replica computes in."""
    rope_theta: float = 10_000.0
    """Base of the rotary positions."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square in a norm."""
    qk_norm: bool = True
    """Whether queries and keys are normed by head, as Qwen3 does and Llama does not."""

    @classmethod
    def of(cls, model: Any, dtype: str = "bfloat16") -> DecoderConfig:
        """From a transformers config of Qwen3 or Llama. ``dtype``: of the replicas, in torch's spelling.

        Raises InputError for another family and for what this decoder does not compute, naming the entry.
        """
        if model.model_type not in ("qwen3", "llama"):
            raise InputError(f"model_type {model.model_type!r}: the decoder computes qwen3 and llama")
        rope = dict(getattr(model, "rope_parameters", None) or {"rope_theta": getattr(model, "rope_theta", 10_000.0)})
        wrong = {key: getattr(model, key) for key, value in _NEEDED.items() if getattr(model, key, value) != value}
        if rope.get("rope_type", "default") != "default":
            wrong["rope_type"] = rope["rope_type"]
        for key, value in wrong.items():
            raise InputError(f"{key} {value!r}: the decoder computes with {_NEEDED.get(key, 'default')!r} only")
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        sizes = {name: int(getattr(model, name)) for name in names}
        head = getattr(model, "head_dim", None) or sizes["hidden_size"] // sizes["num_attention_heads"]
        groups = getattr(model, "num_key_value_heads", None) or sizes["num_attention_heads"]
        geometry = Qwen3Geometry(
            **sizes,
            num_key_value_heads=int(groups),
            head_dim=int(head),
            tie_word_embeddings=bool(model.tie_word_embeddings),
            dtype=dtype,
        )
        return cls(
            geometry=geometry,
            rope_theta=float(rope["rope_theta"]),
            rms_norm_eps=float(model.rms_norm_eps),
            qk_norm=model.model_type == "qwen3",
        )

    @cached_property
    def weights(self) -> Mapping[str, TensorSpec]:
        """Every weight of the decoder by name, in the model's order; a tied head is not among them."""
        every = weight_specs(self.geometry)
        return {name: spec for name, spec in every.items() if self.qk_norm or not name.endswith(_QK_NORMS)}

    def replica_layout(self, trainer: Layout, replicas: Sequence[Sequence[int]]) -> Layout:
        """Replicas over ``replicas`` (ranks of each in order) of the trainer's weights, in the decoder's dtype.

        Raises InputError where the trainer does not hold exactly the decoder's weights, naming the first that differs;
        LayoutError where a weight cannot be cut so.
        """
        for name in dict.fromkeys((*self.weights, *trainer.specs)):
            wanted, held = (specs.get(name) for specs in (self.weights, trainer.specs))
            sides = [None if spec is None else list(spec.shape) for spec in (wanted, held)]
            if sides[0] != sides[1]:
                texts = ["none" if side is None else str(side) for side in sides]
                raise InputError(
                    f"weight {name}: the decoder has {texts[0]}, the trainer {texts[1]}: give the config of the "
                    "trainer's model, without adapters"
                )
        ties = {HEAD: EMBED} if self.geometry.tie_word_embeddings else {}
        if dict(trainer.aliases) != ties:
            raise InputError(f"tied weights: the decoder has {ties}, the trainer {dict(trainer.aliases)}")
        cuts = {name: cut for name, cut in tensor_parallel_cuts(self.geometry).items() if name in self.weights}
        return tensor_parallel_layout(self.weights, cuts, replicas, trainer.world_size, "rollout", ties)

    def casts(self, trainer: Layout) -> dict[str, str]:
        """Weights that arrive in another dtype than the trainer holds, with that dtype."""
        return {n: spec.dtype for n, spec in self.weights.items() if trainer.specs[n].dtype != spec.dtype}

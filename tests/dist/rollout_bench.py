"""A bench for the rollout engine: a transformers model under ZeRO, rollouts beside it, tokens of a gathered copy.

What is right comes from transformers' own module with the weights that DeepSpeed gathers: it computes every sequence
anew for each token, without a cache. ``device`` lets the jobs under tests/gpu use the same bench.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from jobs_engines import whole_weights

from relaymeter.harness.models import Qwen3Geometry
from relaymeter.harness.rollout.shape import DecoderConfig
from relaymeter.harness.state_config import EngineConfig, TrainingConfig
from relaymeter.harness.state_engines import EngineMaker, train
from relaymeter.harness.trainer import build_model
from relaymeter.relayout.topology import Topology

GEOMETRY = {
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 67,
}
PROMPTS = [[0, 0, 5, 9, 41, 2], [17, 3, 3, 60, 8, 1], [0, 0, 0, 0, 0, 33]]
MASK = [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]]
NEW, ROWS, SLOTS = 6, 4, 20


class Bench:
    """A trainer of a tiny Qwen3, and rollouts beside it."""

    def __init__(
        self, stage: int, ranks: Any, *, tied: bool = False, dtype: str = "float32", device: Any = "cpu"
    ) -> None:
        self.geometry = Qwen3Geometry(**GEOMETRY, tie_word_embeddings=tied, dtype=dtype)
        self.training = TrainingConfig(model="qwen3", dtype=dtype, seed=3)
        self.maker, self.device = EngineMaker(self.training, self.geometry, time_limit_s=60), device
        self.engines: list[Any] = []
        self.engine = self.build(stage, ranks)

    def build(self, stage: int, ranks: Any, seed: int = 11) -> Any:
        engine = self.maker.build(EngineConfig(stage=stage, ranks=tuple(ranks)), seed)
        self.engines.append(engine)
        return engine

    def train(self, engine: Any = "own") -> None:
        train(self.engine if engine == "own" else engine, self.training, 1, self.geometry)

    def rollout(self, replicas: Any, trainer: Any = "own", **settings: Any) -> Any:
        from relaymeter.harness.rollout.engine import RelayoutRollout

        config = DecoderConfig(geometry=self.geometry)
        where = {"rows": ROWS, "slots": SLOTS, "device": self.device, "topology": Topology.grid(2, 2)}
        if dist.get_world_size() != 4:
            del where["topology"]
        engine = self.engine if trainer == "own" else trainer
        return RelayoutRollout(engine, replicas, settings.pop("config", config), **(where | settings))

    def gathered(self, engine: Any = "own") -> torch.nn.Module | None:
        """Transformers' module with the trainer's weights as DeepSpeed gathers them; None on ranks outside it."""
        engine = self.engine if engine == "own" else engine
        if engine is None:
            return None
        model = build_model(self.geometry, 0).to(engine.device, getattr(torch, self.geometry.dtype))
        weights, params = whole_weights(engine), dict(model.named_parameters())
        if set(weights) != set(params):  # a tied weight stands there once
            raise ValueError(f"gathered {sorted(set(weights) ^ set(params))} in one of two")
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(weights[name])
        return model

    def close(self) -> None:
        for engine in self.engines:
            if engine is not None:
                engine.destroy()
        self.maker.close()


def ask(rollout: Any, new: int = NEW, call: str = "generate", **sampling: Any) -> list[list[int]] | None:
    """The tokens of a greedy rollout, prompts included; None on a rank without a replica."""
    from deepspeed.runtime.rollout.base import RolloutRequest, SamplingConfig

    if rollout.replica is None:
        return None
    asked = SamplingConfig(max_new_tokens=new, **({"temperature": 0.0} | sampling))
    if call == "resume":
        return rollout.resume(asked).input_ids.tolist()
    return rollout.generate(RolloutRequest(torch.tensor(PROMPTS), torch.tensor(MASK)), asked).input_ids.tolist()


@torch.no_grad()
def greedy(model: Any, new: int = NEW) -> tuple[list[list[int]], torch.Tensor, float]:
    """Tokens of ``model``, prompts included; the logits after the prompts; the least lead of a token over the next."""
    device = next(model.parameters()).device
    tokens, mask = (torch.tensor(rows, device=device) for rows in (PROMPTS, MASK))
    first, lead = None, float("inf")
    for _ in range(new):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            places = (mask.cumsum(1) - 1).clamp(min=0)
            logits = model(input_ids=tokens, attention_mask=mask, position_ids=places).logits[:, -1].float()
        first = logits if first is None else first
        best = logits.topk(2).values
        lead = min(lead, float((best[:, 0] - best[:, 1]).min()))
        tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), dim=1)
        mask = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
    return tokens.tolist(), first, lead


def compared(bench: Bench, rollout: Any) -> dict[str, Any]:
    """What this rank's replica gives beside what its gathered copy gives, None where it has none."""
    model, found = bench.gathered(), {"tokens": ask(rollout)}
    wanted, logits, lead = greedy(model) if model is not None else (None, None, None)
    found |= {"wanted": wanted, "lead": lead, "apart": None}
    if rollout.replica is not None:
        own = rollout.replica.prefill(torch.tensor(PROMPTS), torch.tensor(MASK))[: len(PROMPTS)].float()
        if logits is not None:
            found["apart"] = float((own - logits.to(own.device)).abs().max())
    return found


def addresses(rollout: Any) -> list[int]:
    replica = rollout.replica
    if replica is None:
        return []
    kept = [*replica.decoder._weights.values(), replica.decoder.cache, replica.storage.buffer]
    return [tensor.data_ptr() for tensor in kept]

"""Tiny models for moves of training states, and an optimizer that keeps its step count in the parameter group.

    model = build_model(training, seed)            # the same weights on every rank
    groups = parameter_groups(model, training)

Thousands of elements in odd sizes, so that partitions are padded and cross rows; a tied weight, norms, buffers. Weights
depend on the seed alone. Torch is enough, but for the families of transformers (``moe``, ``qwen3``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from relaymeter.errors import InputError
from relaymeter.harness.models import Qwen3Geometry
from relaymeter.harness.state_config import TrainingConfig
from relaymeter.harness.trainer import build_model as build_qwen3

__all__ = ["AUTOTP_PATTERNS", "Blocks", "Dense", "GroupStep", "build_model", "cut_dims", "parameter_groups", "samples"]

_INPUTS, _WIDTH, _INNER, _OUTPUTS = 10, 24, 52, 5
_TOKENS = 16
_MOE_VOCAB, _EXPERTS = 64, 8

#: How AutoTP cuts ``Dense``.
AUTOTP_PATTERNS = [
    {"patterns": [r".*up\.weight$"], "partition_type": "column"},
    {"patterns": [r".*down\.weight$"], "partition_type": "row"},
]
#: The dim along which tensor-parallel ranks share each weight of ``Dense`` that they share.
_DENSE_CUTS = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


class _Cast(torch.nn.Linear):
    """A linear layer that computes in the dtype of its weight and adds the bias in the bias's own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(input.to(self.weight.dtype), self.weight).to(self.bias.dtype) + self.bias


class Dense(torch.nn.Module):
    """Column and row linears, a norm, two linears that share a weight, and buffers: one random, one that counts.

    ``unused`` adds a parameter that takes no part in the loss; ``mixed`` keeps norms, biases and ``gain`` in fp32
    beside bf16 matrices.
    """

    scale: torch.Tensor
    seen: torch.Tensor

    def __init__(self, unused: bool = False, mixed: bool = False) -> None:
        super().__init__()
        linear: Callable[[int, int], torch.nn.Linear] = _Cast if mixed else torch.nn.Linear
        self.enter = linear(_INPUTS, _WIDTH)
        self.norm = torch.nn.LayerNorm(_WIDTH)
        self.up = linear(_WIDTH, _INNER)
        self.down = linear(_INNER, _WIDTH)
        self.mix = torch.nn.ModuleList([linear(_WIDTH, _WIDTH), linear(_WIDTH, _WIDTH)])
        self.mix[1].weight = self.mix[0].weight
        self.head = linear(_WIDTH, _OUTPUTS)
        self.gain = torch.nn.Parameter(torch.randn(1))
        if unused:
            self.idle = torch.nn.Parameter(torch.randn(7, 3))
        self.register_buffer("scale", torch.rand(_WIDTH) + 0.5)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        if mixed:
            for param in self.parameters():
                if param.dim() > 1:
                    param.data = param.data.to(torch.bfloat16)

    def forward(self, inputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Mean squared error of ``inputs`` [samples, 10] against ``wanted`` [samples, 5]."""
        if self.training:
            self.seen += 1
        kind = self.norm.weight.dtype
        x = torch.tanh(self.enter(inputs.to(kind))) * self.scale.to(kind)
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        for layer in self.mix:
            x = torch.tanh(layer(x))
        apart: torch.Tensor = (self.head(x) * self.gain).float() - wanted.float()
        return apart.pow(2).mean()


class Blocks(torch.nn.Module):
    """Residual blocks of a norm, a column and a row linear, between an entry and a head; no buffers. Of ``width`` w and
    ``layers`` n it has about 8 n w^2 parameters, in six tensors a block."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.enter = torch.nn.Linear(_INPUTS, width)
        self.layers = torch.nn.ModuleList(_Block(width) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, _OUTPUTS)

    def forward(self, inputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Mean squared error of ``inputs`` [samples, 10] against ``wanted`` [samples, 5]."""
        x = self.enter(inputs.to(self.norm.weight.dtype))
        for layer in self.layers:
            x = layer(x)
        apart: torch.Tensor = self.head(self.norm(x)).float() - wanted.float()
        return apart.pow(2).mean()


class _Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return moved


class GroupStep(torch.optim.Optimizer):
    """Adam whose count of steps stands in the parameter group alone, under ``"step"``, as a whole number."""

    def __init__(self, params: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99), **fields: Any) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": 0.0, "step": 0} | fields)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step over the parameters that have gradients. A group without parameters does not count it: ZeRO-3
        updates one sub-group at a time and empties the others' groups meanwhile."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            group["step"] += 1
            first, second = group["betas"]
            for param in params:
                state, grad = self.state[param], param.grad
                for key in ("exp_avg", "exp_avg_sq"):
                    if key not in state:
                        state[key] = torch.zeros_like(param)
                state["exp_avg"].mul_(first).add_(grad, alpha=1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
                mean = state["exp_avg"] / (1 - first ** group["step"])
                spread = (state["exp_avg_sq"] / (1 - second ** group["step"])).sqrt().add_(group["eps"])
                param.mul_(1 - group["lr"] * group["weight_decay"]).addcdiv_(mean, spread, value=-group["lr"])


def build_model(
    training: TrainingConfig, seed: int, geometry: Qwen3Geometry | None = None, *, experts: int = _EXPERTS
) -> torch.nn.Module:
    """The model of ``training.model`` with weights drawn from ``seed``, fp32 (``mixed``: fp32 and bf16). Any rank.

    ``geometry`` is that of ``qwen3``; ``experts`` of each layer of ``moe``. Where ``training.frozen``, some parameters
    are frozen. Raises InputError for ``qwen3`` without a geometry.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if training.model == "qwen3":
            if geometry is None:
                raise InputError("training.model 'qwen3' needs the geometry of its model")
            model = build_qwen3(geometry, seed)
        elif training.model == "moe":
            model = _mixture(experts)
        elif training.model == "blocks":
            model = Blocks(training.layers, training.width)
        else:
            model = Dense(training.model == "unused", training.model == "mixed")
    if training.frozen:
        for name, param in model.named_parameters():
            if name.endswith(("up.weight", "head.bias", "embed_tokens.weight", "q_norm.weight")):
                param.requires_grad_(False)
    return model


def _mixture(experts: int) -> torch.nn.Module:
    """A Qwen3-MoE of two layers."""
    transformers = importlib.import_module("transformers")
    config = transformers.Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=experts,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        vocab_size=_MOE_VOCAB,
        max_position_embeddings=128,
        use_cache=False,
        tie_word_embeddings=False,
    )
    model: torch.nn.Module = transformers.Qwen3MoeForCausalLM(config)
    return model


def cut_dims(training: TrainingConfig, name: str) -> int | None:
    """The dim along which tensor-parallel or expert-parallel ranks share the parameter ``name``; None: each holds it
    whole. Known from the model and the patterns given to AutoTP; AutoEP shares the experts, dim 0 of their weights."""
    if training.model == "moe":
        return 0 if ".experts." in name else None
    if training.model == "blocks":
        return _DENSE_CUTS.get(".".join(name.split(".")[2:]))  # "layers.<number>." before it
    return _DENSE_CUTS.get(name)


def parameter_groups(model: torch.nn.Module, training: TrainingConfig) -> list[dict[str, Any]]:
    """The optimizer's groups: trained parameters as ``training.groups`` says, each group of one dtype, because
    DeepSpeed flattens it."""
    trained = [param for param in model.parameters() if param.requires_grad]
    matrices = [param for param in trained if param.dim() > 1]
    vectors = [param for param in trained if param.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": trained}]
    if training.groups == "decay":
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    elif training.groups == "several":
        half = len(matrices) // 2
        groups = [{"params": matrices[:half], "lr": 0.02}, {"params": matrices[half:], "lr": 0.01}]
        groups += [{"params": vectors, "lr": 0.005}]
        if training.optimizer != "SGD":
            for group, decay, betas in zip(
                groups, (0.1, 0.05, 0.0), ((0.9, 0.99), (0.8, 0.95), (0.9, 0.9)), strict=True
            ):
                group |= {"weight_decay": decay, "betas": betas}
    if training.model == "moe":  # DeepSpeed takes the experts out of each group by its name
        groups = [{**group, "name": f"group {number}"} for number, group in enumerate(groups)]
    return list(_by_dtype(groups))


def _by_dtype(groups: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for group in groups:
        for dtype in dict.fromkeys(param.dtype for param in group["params"]):
            yield {**group, "params": [param for param in group["params"] if param.dtype == dtype]}


def samples(training: TrainingConfig, count: int, seed: int, geometry: Qwen3Geometry | None = None) -> dict[str, Any]:
    """A batch of ``count`` samples drawn from ``seed``: what the model's forward takes by name."""
    draw = torch.Generator().manual_seed(seed)
    if training.model in ("moe", "qwen3"):
        vocabulary = _MOE_VOCAB if geometry is None else geometry.vocab_size
        tokens = torch.randint(vocabulary, (count, _TOKENS), generator=draw)
        return {"input_ids": tokens, "labels": tokens}
    return {
        "inputs": torch.randn(count, _INPUTS, generator=draw),
        "wanted": torch.randn(count, _OUTPUTS, generator=draw),
    }

"""A tensor-parallel decoder of Qwen3's and Llama's shape over the views of one buffer: this rank's part of a replica.

    decoder = Decoder(config, layout, rank, ReplicaStorage(layout, rank), group, rows=8, slots=512)
    hidden = decoder.forward(tokens, positions, slots, visible)     # every rank of the replica
    logits = decoder.head(hidden[:, -1])

It computes what transformers' modules of the same weights compute: embedding, RMS norms in fp32, grouped-query
attention with rotary positions, SwiGLU, a tied or untied head. q, k, v, gate, up, embedding and head are cut along
their rows, o and down along their columns, norms are whole; two sums over the group a layer.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import embedding, linear, silu, softmax

from relaymeter.errors import InputError
from relaymeter.harness.replicas import ReplicaStorage
from relaymeter.harness.rollout.shape import EMBED, HEAD, DecoderConfig
from relaymeter.relayout.layout import Layout

__all__ = ["Decoder"]


class Decoder:
    """One rank's part. ``cache`` holds keys and values [layer, 2, row, head, slot, width]; its address never changes,
    nor do those of the weights."""

    def __init__(
        self,
        config: DecoderConfig,
        layout: Layout,
        rank: int,
        storage: ReplicaStorage,
        group: dist.ProcessGroup | None,
        *,
        rows: int,
        slots: int,
    ) -> None:
        """``rows`` sequences of at most ``slots`` tokens each. ``group``: the replica's ranks, None where it is one.

        Raises InputError where a query head's keys lie on another rank, LayoutError where the rank has no part of a
        weight.
        """
        sizes, device = config.geometry, storage.buffer.device
        self.config, self._group = config, group
        self._weights = {name: storage.weight(name) for name in config.weights}
        self._head = self._weights[layout.aliases.get(HEAD, HEAD)]
        self._first_row, self._rows_held = _box(layout, rank, EMBED)
        self._first_logit, self._logits_held = _box(layout, rank, layout.aliases.get(HEAD, HEAD))
        self._kv_of = self._heads(layout, rank).to(device)
        kv_heads = _box(layout, rank, _attention(0, "k_proj"))[1] // sizes.head_dim
        self._regroup = self._kv_of.tolist() != list(range(kv_heads))
        dtype = getattr(torch, sizes.dtype)
        shape = (sizes.num_hidden_layers, 2, rows, kv_heads, slots, sizes.head_dim)
        self.cache = torch.zeros(shape, dtype=dtype, device=device)
        turns = torch.arange(0, sizes.head_dim, 2, dtype=torch.float32, device=device) / sizes.head_dim
        rates = 1.0 / config.rope_theta**turns
        angles = torch.arange(slots, dtype=torch.float32, device=device)[:, None] * rates
        angles = torch.cat((angles, angles), dim=-1)
        self._cos, self._sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def _heads(self, layout: Layout, rank: int) -> torch.Tensor:
        """For each query head of this rank, which of its key-value heads it reads."""
        sizes = self.config.geometry
        place = [_box(layout, rank, _attention(0, name)) for name in ("q_proj", "k_proj")]
        (query, queries), (key, keys) = [(first // sizes.head_dim, held // sizes.head_dim) for first, held in place]
        share = sizes.num_attention_heads // sizes.num_key_value_heads
        read = [head // share for head in range(query, query + queries)]
        if any(not key <= head < key + keys for head in read):
            raise InputError(
                f"rank {rank} holds query heads {query} to {query + queries - 1}, which read key-value heads {read[0]} "
                f"to {read[-1]}, but of those {key} to {key + keys - 1}: choose a tensor-parallel degree that divides "
                f"{sizes.num_key_value_heads} or is a multiple of it"
            )
        return torch.tensor([head - key for head in read])

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states [row, token, width] after the last norm; the cache gets the tokens' keys and values.

        ``tokens`` and ``positions`` [row, token]; ``slots`` [token]: where in the cache they go; ``visible`` [row,
        token, slot]: what each token reads. No host synchronization. Every rank of the replica calls this.
        """
        x = self._embed(tokens)
        cos, sin = self._cos[positions][:, :, None], self._sin[positions][:, :, None]
        hidden = (~visible)[:, None]
        for layer in range(self.config.geometry.num_hidden_layers):
            name = f"model.layers.{layer}."
            x = x + self._attend(layer, self._norm(x, name + "input_layernorm"), (cos, sin), slots, hidden)
            normed = self._norm(x, name + "post_attention_layernorm")
            gate, up = (linear(normed, self._weights[f"{name}mlp.{part}_proj.weight"]) for part in ("gate", "up"))
            x = x + self._sum(linear(silu(gate) * up, self._weights[f"{name}mlp.down_proj.weight"]))
        return self._norm(x, "model.norm")

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., vocabulary] of ``hidden`` [..., width], bit-equal on every rank of the replica, which all call
        this: each logit is computed on one rank, and zeros are added to it."""
        own = linear(hidden, self._head)
        if self._group is None:
            return own
        whole = torch.zeros((*own.shape[:-1], self.config.geometry.vocab_size), dtype=own.dtype, device=own.device)
        whole[..., self._first_logit : self._first_logit + self._logits_held] = own
        return self._sum(whole)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        own = tokens - self._first_row
        held = (own >= 0) & (own < self._rows_held)
        return self._sum(embedding(own.where(held, 0), self._weights[EMBED]) * held[..., None])

    def _attend(
        self,
        layer: int,
        x: torch.Tensor,
        turns: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        sizes = self.config.geometry
        query, key, value = (
            linear(x, self._weights[_attention(layer, f"{part}_proj")]).view(*x.shape[:2], -1, sizes.head_dim)
            for part in "qkv"
        )
        if self.config.qk_norm:
            query, key = (
                self._norm(states, _attention(layer, f"{part}_norm", suffix=""))
                for states, part in ((query, "q"), (key, "k"))
            )
        query, key = (_turn(states, *turns).transpose(1, 2) for states in (query, key))
        keys, values = self.cache[layer]
        keys.index_copy_(2, slots, key)
        values.index_copy_(2, slots, value.transpose(1, 2))
        if self._regroup:
            keys, values = keys.index_select(1, self._kv_of), values.index_select(1, self._kv_of)
        scores = query @ keys.transpose(2, 3) * sizes.head_dim**-0.5
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        mixed = softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype) @ values
        return self._sum(linear(mixed.transpose(1, 2).flatten(2), self._weights[_attention(layer, "o_proj")]))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return self._weights[f"{name}.weight"] * wide.to(x.dtype)

    def _sum(self, part: torch.Tensor) -> torch.Tensor:
        if self._group is not None:
            dist.all_reduce(part, group=self._group)
        return part


def _attention(layer: int, part: str, suffix: str = ".weight") -> str:
    return f"model.layers.{layer}.self_attn.{part}{suffix}"


def _box(layout: Layout, rank: int, name: str) -> tuple[int, int]:
    """First row and rows of the one piece of ``name`` that ``rank`` holds."""
    place = layout.placements[name]
    piece = int(place.pieces_of(rank)[0])
    return int(place.lo[piece][0]), int(place.shape[piece][0])


def _turn(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions: ``states`` [row, token, head, width]."""
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin

"""One rank's part of one replica: buffer of weights, decoder, KV cache and, on CUDA, the graph of a decode step.

    replica = Replica(config, layout, rank, ranks, group, rows=8, slots=512, device="cuda")
    logits = replica.prefill(prompts, mask)             # every rank of the replica
    logits = replica.step(tokens)                       # the next token of every row

Everything is allocated once and keeps its address, so that the graph stays valid whatever is written into the weights.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from relaymeter.harness.replicas import ReplicaStorage
from relaymeter.harness.rollout.decoder import Decoder
from relaymeter.harness.rollout.graph import DecodeGraph, graph_refusal
from relaymeter.harness.rollout.shape import DecoderConfig
from relaymeter.relayout.layout import Layout

__all__ = ["Replica"]


class Replica:
    """``ranks``: the replica's, in the order of their shards. ``filled``: slots of the cache in use."""

    def __init__(
        self,
        config: DecoderConfig,
        layout: Layout,
        rank: int,
        ranks: tuple[int, ...],
        group: dist.ProcessGroup | None,
        *,
        rows: int,
        slots: int,
        device: torch.device | str = "cpu",
        graph: bool = True,
    ) -> None:
        """``graph``: whether to capture where that can be done. Raises as ``Decoder``. Each rank makes its own."""
        self.ranks, self.rows, self.slots, self.filled = ranks, rows, slots, 0
        self.storage = ReplicaStorage(layout, rank, device)
        summing = group if len(ranks) > 1 else None
        self.decoder = Decoder(config, layout, rank, self.storage, summing, rows=rows, slots=slots)
        self._device = self.storage.buffer.device
        self._captures = graph and not graph_refusal(self._device, summing)
        self.graph: DecodeGraph | None = None
        self._tokens, self._positions = (torch.zeros(rows, dtype=torch.int64, device=self._device) for _ in range(2))
        self._slot = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._visible = torch.zeros(rows, slots, dtype=torch.bool, device=self._device)

    def reset(self) -> None:
        """Forget what the cache holds: zeros, at the same address. Local."""
        self.decoder.cache.zero_()
        self.filled = 0

    @torch.no_grad()
    def prefill(self, prompts: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocabulary] after left-padded ``prompts`` [row, token], at most ``rows`` of them; ``mask`` is 1
        on their tokens. Rows beyond them hold a token 0. The cache begins anew."""
        count, length = prompts.shape
        tokens = torch.zeros(self.rows, length, dtype=torch.int64, device=self._device)
        tokens[:count] = prompts.to(self._device)
        real = torch.zeros(self.rows, length, dtype=torch.bool, device=self._device)
        real[:count] = mask.to(self._device).bool()
        real[count:, -1] = True
        positions = (real.cumsum(1) - 1).clamp(min=0)
        self._visible.zero_()
        self._visible[:, :length] = real
        places = torch.arange(length, device=self._device)
        causal = torch.arange(self.slots, device=self._device)[None] <= places[:, None]
        hidden = self.decoder.forward(tokens, positions, places, self._visible[:, None] & causal)
        self._positions.copy_(positions[:, -1])
        self.filled = length
        return self.decoder.head(hidden[:, -1])

    @torch.no_grad()
    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocabulary] after one more token of every row, ``tokens`` [rows]; valid until the next step. By
        the graph where there is one; the first step captures it."""
        self._tokens.copy_(tokens)
        self._positions.add_(1)
        self._slot.fill_(self.filled)
        self._visible[:, self.filled] = True
        self.filled += 1
        if not self._captures:
            return self._decode()
        if self.graph is None:
            self.graph = DecodeGraph(self._decode, self._device)
        return self.graph.replay()

    def _decode(self) -> torch.Tensor:
        visible = self._visible[:, None]
        hidden = self.decoder.forward(self._tokens[:, None], self._positions[:, None], self._slot, visible)
        return self.decoder.head(hidden[:, -1])

"""The sequences that a replica is generating: begun by prompts, extended token by token, handed out as a batch.

``Sequences.begin(prompts, mask, generator).extend(replica, logits, sampling, eos=None, pad=0)`` on the ranks of a
replica.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from relaymeter.harness.rollout.replica import Replica
from relaymeter.harness.rollout.sampling import next_tokens

__all__ = ["Sequences"]


@dataclass
class Sequences:
    """``tokens`` and ``mask`` [row, token] so far, on the request's device; ``start``: where responses begin; ``done``
    [row]: who has ended; ``generator``: of what is drawn, alike on the ranks of a replica."""

    tokens: torch.Tensor
    mask: torch.Tensor
    start: int
    done: torch.Tensor
    generator: torch.Generator

    @classmethod
    def begin(cls, prompts: torch.Tensor, mask: torch.Tensor, generator: torch.Generator) -> Sequences:
        """Nothing but left-padded ``prompts`` [row, token] yet."""
        done = torch.zeros(len(prompts), dtype=torch.bool, device=prompts.device)
        return cls(prompts, mask, prompts.shape[1], done, generator)

    def last(self, rows: int) -> torch.Tensor:
        """The last token of each sequence, and zeros in the other ``rows`` of the replica: [rows]."""
        return _padded(self.tokens[:, -1], rows)

    def extend(self, replica: Replica, logits: torch.Tensor, sampling: Any, *, eos: int | None, pad: int) -> None:
        """Up to ``sampling.max_new_tokens`` more, of which ``logits`` [rows, vocabulary] give the first.

        A sequence ends with ``eos``; ``pad`` follows until the last has ended. The replica's ranks call this together.
        """
        found, live = [self.tokens], [self.mask]
        for number in range(sampling.max_new_tokens):
            if number:
                if eos is not None and bool(self.done.all()):
                    break
                logits = replica.step(_padded(found[-1][:, -1], replica.rows))
            picked = next_tokens(
                logits[: len(self.done)],
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                generator=self.generator,
            ).to(self.done.device)
            picked = picked.masked_fill(self.done, pad)
            found.append(picked[:, None])
            live.append((~self.done).to(self.mask.dtype)[:, None])
            if eos is not None:
                self.done = self.done | (picked == eos)
        self.tokens, self.mask = torch.cat(found, dim=1), torch.cat(live, dim=1)


def _padded(tokens: torch.Tensor, rows: int) -> torch.Tensor:
    whole = torch.zeros(rows, dtype=torch.int64, device=tokens.device)
    whole[: len(tokens)] = tokens
    return whole

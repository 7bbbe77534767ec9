"""What a rollout request asks for: its rows, checked, and the next tokens out of logits by its ``SamplingConfig``.

``next_tokens(logits, temperature=0.0)`` is greedy. Pure but for the generator's state.
"""

from __future__ import annotations

from typing import Any

import torch

from relaymeter.errors import InputError

__all__ = ["check_request", "next_tokens"]


def check_request(request: Any, sampling: Any, rows: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts and mask [row, token] of a ``RolloutRequest``, each prompt once for each sample that is asked for.

    Raises InputError where they do not fit ``rows`` sequences of ``slots`` tokens, or are not left-padded.
    """
    prompts, mask = request.prompt_ids, request.prompt_attention_mask
    count, length = prompts.shape
    samples, new = sampling.n_samples_per_prompt, sampling.max_new_tokens
    if sampling.continuous_batch_size is not None:
        raise InputError(f"continuous_batch_size {sampling.continuous_batch_size}: all rows are generated at once")
    if not count or samples < 1 or new < 1:
        raise InputError(
            f"{count} prompts, n_samples_per_prompt {samples}, max_new_tokens {new}: each must be 1 or more"
        )
    if count * samples > rows:
        raise InputError(
            f"{count} prompts x {samples} samples = {count * samples} sequences, the rollout has {rows} rows"
        )
    if length + new > slots:
        raise InputError(
            f"prompts of {length} + max_new_tokens {new} = {length + new} tokens, the cache has {slots} slots"
        )
    real = mask.bool()
    if not length or not bool(real[:, -1].all()) or bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise InputError("prompts must be left-padded: the mask of each row zeros, then at least a one")
    return prompts.repeat_interleave(samples, dim=0), mask.repeat_interleave(samples, dim=0)


def next_tokens(
    logits: torch.Tensor,
    *,
    temperature: float,
    top_k: int = -1,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """A token for every row of ``logits`` [row, vocabulary], int64 [row] on the same device.

    ``temperature`` of 0 or less takes the largest (of equal ones the first). Else one of the ``top_k`` most likely (0
    or less: of all), of which the most likely that together reach ``top_p`` are left, drawn on the CPU from
    ``generator``: equal logits and generators give equal tokens, whatever the device.
    """
    if temperature <= 0:
        return logits.argmax(dim=-1)
    scaled = logits.float().cpu() / temperature
    if 0 < top_k < scaled.shape[-1]:
        least = scaled.topk(top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, float("-inf"))
    chances, order = scaled.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    beyond = chances.cumsum(dim=-1) - chances >= top_p  # the first is always kept
    beyond[:, 0] = False
    drawn = torch.multinomial(chances.masked_fill(beyond, 0.0), 1, generator=generator)
    return order.gather(1, drawn)[:, 0].to(logits.device)

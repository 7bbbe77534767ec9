"""Pure parts of the rollout engine: the next tokens, requests that fit, configs of models that the decoder computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from relaymeter.errors import InputError
from relaymeter.harness.rollout.sampling import check_request, next_tokens
from relaymeter.harness.rollout.sequences import Sequences
from relaymeter.harness.rollout.shape import DecoderConfig

LOGITS = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 1.0, 4.0, -1.0]])


def drawn(**asked: Any) -> list[set[int]]:
    """What 500 draws from each row of LOGITS give."""
    generator = torch.Generator().manual_seed(1)
    found = next_tokens(LOGITS.repeat_interleave(500, dim=0), generator=generator, **asked)
    return [set(row) for row in found.view(2, 500).tolist()]


def test_the_next_tokens_are_those_that_were_asked_for() -> None:
    assert next_tokens(LOGITS, temperature=0.0).tolist() == [1, 0]
    assert drawn(temperature=1.0)[0] == {0, 1, 2, 3}
    assert drawn(temperature=1.0, top_k=2) == [{1, 2}, {0, 2}]
    assert drawn(temperature=2.0, top_k=1)[1] == {0}
    assert drawn(temperature=1.0, top_p=0.5) == [{1, 2}, {0}]  # 0.39, 0.39 of the first row; 0.71 of the second
    assert drawn(temperature=1.0, top_p=0.0)[1] == {0}
    assert drawn(temperature=0.01) == [{1, 2}, {0}]


@pytest.mark.parametrize(
    ("mask", "told", "said"),
    [
        ([[1, 1, 0]], {}, "left-padded"),
        ([[1, 0, 1]], {}, "left-padded"),
        ([[0, 0, 0]], {}, "left-padded"),
        ([[0, 1, 1]], {"max_new_tokens": 6}, "prompts of 3 + max_new_tokens 6 = 9 tokens, the cache has 8 slots"),
        ([[0, 1, 1]], {"n_samples_per_prompt": 3}, "1 prompts x 3 samples = 3 sequences, the rollout has 2 rows"),
        ([[0, 1, 1]], {"max_new_tokens": 0}, "max_new_tokens 0: each must be 1 or more"),
        ([[0, 1, 1]], {"continuous_batch_size": 1}, "continuous_batch_size 1"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(mask: list[list[int]], told: dict[str, int], said: str) -> None:
    request = SimpleNamespace(prompt_ids=torch.tensor([[7, 8, 9]]), prompt_attention_mask=torch.tensor(mask))
    asked = {"max_new_tokens": 5, "n_samples_per_prompt": 1, "continuous_batch_size": None} | told
    with pytest.raises(InputError, match=said.replace("+", r"\+")):
        check_request(request, SimpleNamespace(**asked), 2, 8)


def test_each_prompt_stands_once_for_each_sample() -> None:
    request = SimpleNamespace(prompt_ids=torch.tensor([[7], [8]]), prompt_attention_mask=torch.ones(2, 1))
    asked = SimpleNamespace(max_new_tokens=5, n_samples_per_prompt=2, continuous_batch_size=None)
    assert check_request(request, asked, 4, 8)[0].tolist() == [[7], [7], [8], [8]]


class Counting:
    """In place of a replica of three rows: the token after a token is the next number."""

    rows = 3

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        self.steps.append(tokens.tolist())
        return torch.nn.functional.one_hot(tokens + 1, 10).float()


def test_a_sequence_ends_with_its_last_token_and_padding_follows_until_all_have_ended() -> None:
    prompts, mask = torch.tensor([[0, 3], [1, 2]]), torch.tensor([[0, 1], [1, 1]])
    held, replica = Sequences.begin(prompts, mask, torch.Generator()), Counting()
    asked = SimpleNamespace(max_new_tokens=6, temperature=0.0, top_k=-1, top_p=1.0)
    stand_in: Any = replica
    held.extend(stand_in, replica.step(held.last(3)), asked, eos=5, pad=9)
    assert held.tokens.tolist() == [[0, 3, 4, 5, 9], [1, 2, 3, 4, 5]]
    assert held.mask.tolist() == [[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert replica.steps == [[3, 2, 0], [4, 3, 0], [5, 4, 0]]
    assert held.done.tolist() == [True, True] and held.start == 2


def config(**entries: Any) -> SimpleNamespace:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "vocab_size": 67, "tie_word_embeddings": False, "rms_norm_eps": 1e-5}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "hidden_act": "silu"}
    return SimpleNamespace(**({"model_type": "llama"} | sizes | more | rope | entries))


def test_a_models_config_tells_sizes_and_constants() -> None:
    found = DecoderConfig.of(config(), "float32")
    assert (found.geometry.head_dim, found.rope_theta, found.rms_norm_eps, found.qk_norm) == (8, 5e5, 1e-5, False)
    assert not any("q_norm" in name for name in found.weights)
    other = DecoderConfig.of(config(model_type="qwen3", head_dim=10))
    assert other.geometry.head_dim == 10 and sum("q_norm" in name for name in other.weights) == 1


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"use_sliding_window": True}, "use_sliding_window True"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type 'yarn'"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(entries: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        DecoderConfig.of(config(**entries))

"""Tests that draws follow the softmax and depend only on a row's own stream."""

from typing import Any

import pytest
import torch
from scipy.stats import chisquare, pearsonr

import families
from ratchet.models import scoring
from ratchet.models.decoding import token_choice
from ratchet.models.device import Model

LOGITS = torch.tensor([1.5, 0.0, -1.0, 2.0, 0.5, -4.0, 1.0, 0.25])
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [11, 12]]


def draws(temperature: float, seed: int, count: int = 4000) -> torch.Tensor:
    """Return the first tokens of `count` samples of one row."""
    streams = [token_choice.noise_stream_key(seed, "row", sample) for sample in range(count)]
    draw = token_choice.GumbelLogitsWarper(streams, temperature, 3)
    return draw(torch.zeros(count, 3, dtype=torch.int64), LOGITS.repeat(count, 1)).argmax(-1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_with_the_frequencies_of_the_softmax(temperature: float) -> None:
    found = draws(temperature, seed=1)
    expected = torch.softmax(LOGITS.double() / temperature, -1) * len(found)
    kept = expected > 5
    counted = torch.bincount(found, minlength=len(LOGITS)).double()
    observed = [*counted[kept].tolist(), float(counted[~kept].sum())]
    wanted = [*expected[kept].tolist(), float(expected[~kept].sum())]
    if wanted[-1] < 5:
        observed[-2:], wanted[-2:] = [sum(observed[-2:])], [sum(wanted[-2:])]
    assert chisquare(observed, wanted).pvalue > 0.01
    other = torch.softmax(LOGITS.double() / (1.3 * temperature), -1)
    assert chisquare(counted.tolist(), (other / other.sum() * len(found)).tolist()).pvalue < 1e-6  # the test can fail


def test_noise_depends_on_each_of_its_arguments_and_on_nothing_else() -> None:
    def noise(seed: int = 1, row: str = "row", sample: int = 0, step: int = 0) -> torch.Tensor:
        return token_choice.batched_gumbel_noise([(token_choice.noise_stream_key(seed, row, sample), step)], 500)[0]

    torch.manual_seed(1)
    first = noise()
    torch.manual_seed(2)
    assert torch.equal(noise(), first)
    others: list[dict[str, Any]] = [{"seed": 2}, {"row": "other"}, {"sample": 1}, {"step": 1}]
    for other in others:
        assert abs(pearsonr(noise(**other).numpy(), first.numpy()).statistic) < 0.15
    assert torch.isfinite(first).all()


def sampled(model: Model, rows: list[int], samples: int = 1, temperature: float = 1.0) -> list[list[int]]:
    prompts = [PROMPTS[i] for i in rows for _ in range(samples)]
    streams = [token_choice.noise_stream_key(7, str(i), sample) for i in rows for sample in range(samples)]
    draw = token_choice.GumbelLogitsWarper(streams, temperature, max(map(len, prompts)))
    return scoring.generate(model, prompts, [], 8, 0, draw)


def test_a_row_s_samples_do_not_depend_on_its_batch() -> None:
    model = families.make("llama")
    together = sampled(model, [0, 1, 2], samples=3)
    assert len(set(map(tuple, together))) == 9
    assert sampled(model, [2, 0, 1], samples=3) == together[6:] + together[:6]
    assert [sampled(model, [row])[0] for row in range(3)] == together[::3]


def test_a_low_temperature_is_greedy() -> None:
    model = families.make("llama")
    assert sampled(model, [0, 1, 2], temperature=1e-6) == scoring.generate(model, PROMPTS, [], 8, 0)

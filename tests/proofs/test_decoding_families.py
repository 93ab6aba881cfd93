"""Proves that decoding in batches gives the answers of transformers' own loop, for every family of models."""

import pytest
import torch

import families
from decoding_cases import DRAWN, SETTINGS, EventRecorder, answered, expected, model_of, ragged
from ratchet.models.decoding.decoder import DecodingOptions

PACKAGES = ("models",)
WAYS = {"mamba": "own cache"}
"""Mamba has no keys and values."""


@pytest.mark.parametrize("family", families.FAMILIES)
def test_answers_of_every_family_are_the_plain_ones(family: str) -> None:
    recorder = EventRecorder()
    found = answered(model_of(family), ragged(), DRAWN, recorder=recorder)
    assert found == expected(family, DRAWN)
    assert recorder.method == WAYS.get(family, "joined")
    assert len({len(one.ids) for one in found}) > 3  # they end here and there


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_answers_in_bfloat16_are_the_plain_ones(family: str, settings: DecodingOptions) -> None:
    found = answered(model_of(family, torch.bfloat16), ragged(), settings)
    assert found == expected(family, settings, dtype=torch.bfloat16)

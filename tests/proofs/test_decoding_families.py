"""Proves that batch decoding gives the same answers as decoding one prompt at a time without a cache, for each model
family."""

import pytest
import torch

import families
from decoding_cases import DRAWN, SETTINGS, EventRecorder, answered, expected, model_of, ragged
from ratchet.models.decoding.decoder import DecodingOptions

PACKAGES = ("models",)
WAYS = {"mamba": "even"}
"""The decoding method of families that have no key-value cache."""


@pytest.mark.parametrize("family", families.FAMILIES)
def test_answers_of_every_family_are_the_plain_ones(family: str) -> None:
    recorder = EventRecorder()
    found = answered(model_of(family), ragged(), DRAWN, recorder=recorder)
    assert found == expected(family, DRAWN)
    assert recorder.method == WAYS.get(family, "joined")
    assert len({len(one.ids) for one in found}) > 3  # the answers end at different steps


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_answers_in_bfloat16_are_the_plain_ones(family: str, settings: DecodingOptions) -> None:
    found = answered(model_of(family, torch.bfloat16), ragged(), settings)
    assert found == expected(family, settings, dtype=torch.bfloat16)

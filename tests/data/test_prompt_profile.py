"""Tests the description of prompts by n-grams: similar texts are similar, whatever their case and spaces."""

import numpy as np
import pytest

from ratchet.data.prompt_profile import FEATURES, MAX_CHARACTERS, PromptProfile, count_ngrams

PROMPTS = ["My invoice is missing", "My parcel is late", "My invoice was sent twice", "The parcel is damaged"]


def test_equal_texts_have_equal_ngrams() -> None:
    for other in ("my  INVOICE is\nmissing ", "My invoice is mi\ufb03ng".replace("\ufb03", "ssi")):
        assert np.array_equal(count_ngrams(other), count_ngrams(PROMPTS[0]))
    counts = count_ngrams("aaaa")
    assert counts[:, 1].sum() == 4 + 3 + 2  # " aaaa " has 6 characters
    assert counts[:, 0].max() < FEATURES
    assert count_ngrams("a" * 9_000_000)[:, 1].sum() == 3 * MAX_CHARACTERS - 3


def test_similar_texts_are_similar() -> None:
    profile = PromptProfile([count_ngrams(text) for text in PROMPTS])
    known, related, other = map(profile.measure_similarity, (PROMPTS[0], "is my parcel missing?", "Bake a cake"))
    assert 1 >= known > 3 * other >= 0
    assert 1 >= related > 3 * other
    assert PromptProfile([count_ngrams(PROMPTS[0])]).measure_similarity(PROMPTS[0]) == pytest.approx(1)


@pytest.mark.parametrize("text", ["", " ", "x", "\ud800", "\U0001f600", "\u0000"])
def test_any_text_has_a_similarity(text: str) -> None:
    for prompts in (PROMPTS, [text]):
        assert 0 <= PromptProfile([count_ngrams(one) for one in prompts]).measure_similarity(text) <= 1.0001


def test_a_described_prompt_is_compared_with_the_others() -> None:
    counts = [count_ngrams(text) for text in PROMPTS]
    profile = PromptProfile(counts)
    for place, text in enumerate(PROMPTS):
        others = PromptProfile(counts[:place] + counts[place + 1 :])
        for same in (text, f" {text.upper()}\n"):
            assert profile.measure_similarity(same) == pytest.approx(others.measure_similarity(text), rel=1e-5)
    twice = PromptProfile([*counts, counts[0]])
    assert twice.measure_similarity(PROMPTS[0]) > profile.measure_similarity(PROMPTS[0]) + 0.2, "it occurs twice"

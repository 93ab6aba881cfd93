"""Which split a row belongs to: stable, fair, and the same for requests that are the same."""

import math
import random

import pytest

from ratchet.config_data import Split
from ratchet.data.splits import SPLITS, normalised, split_of

PROMPTS = [f"request number {i} about {random.Random(i).choice('abcdefgh')}" for i in range(10_000)]


def shares(split: Split) -> dict[str, float]:
    found = [split_of(prompt, split) for prompt in PROMPTS]
    return {name: found.count(name) / len(found) for name in SPLITS}


@pytest.mark.parametrize(("validation", "test"), [(0.1, 0.15), (0.05, 0.05), (0.3, 0.3), (0.01, 0.9), (0.45, 0.5)])
def test_the_wanted_fractions_hold(validation: float, test: float) -> None:
    found = shares(Split(validation=validation, test=test))
    for name, wanted in {"validation": validation, "test": test, "train": 1 - validation - test}.items():
        five_sigma = 5 * math.sqrt(wanted * (1 - wanted) / len(PROMPTS))
        assert abs(found[name] - wanted) < five_sigma, name


def test_a_row_stays_in_its_split_whatever_rows_are_added_or_removed() -> None:
    split = Split()
    before = {prompt: split_of(prompt, split) for prompt in PROMPTS[:1000]}
    after = {prompt: split_of(prompt, split) for prompt in reversed(PROMPTS)}
    assert {prompt: after[prompt] for prompt in before} == before


@pytest.mark.parametrize(
    "other",
    [
        "where is my card",
        "WHERE IS MY CARD",
        "  Where is\tmy\n\ncard ",
        "Where is my\u00a0card",
        "where\u3000is my card",
    ],
)
def test_the_same_request_in_other_case_or_spacing_is_in_the_same_split(other: str) -> None:
    assert normalised(other) == normalised("Where is my card")
    for seed in range(50):
        assert split_of(other, Split(seed=seed)) == split_of("Where is my card", Split(seed=seed))


def test_case_is_folded_in_every_language() -> None:
    assert normalised("STRASSE") == normalised("straße")


def test_other_requests_are_told_apart() -> None:
    assert len({normalised(prompt) for prompt in PROMPTS}) == len(PROMPTS)
    assert normalised("re sent") != normalised("resent")


def test_another_seed_divides_otherwise() -> None:
    one, two = Split(seed=0), Split(seed=1)
    moved = sum(split_of(p, one) != split_of(p, two) for p in PROMPTS) / len(PROMPTS)
    expected = 1 - (0.15**2 + 0.1**2 + 0.75**2)  # as independent draws would differ
    assert moved == pytest.approx(expected, abs=0.03)


def test_changing_the_validation_share_moves_no_test_row() -> None:
    def tests(split: Split) -> set[str]:
        return {p for p in PROMPTS if split_of(p, split) == "test"}

    assert tests(Split(validation=0.1)) == tests(Split(validation=0.4))


def test_a_larger_test_share_keeps_the_test_rows_it_had() -> None:
    small = {p for p in PROMPTS if split_of(p, Split(test=0.1)) == "test"}
    large = {p for p in PROMPTS if split_of(p, Split(test=0.2)) == "test"}
    assert small < large


def test_where_known_prompts_lie_never_changes() -> None:
    """A golden value: another division would make test rows of old models into training rows of new ones."""
    found = {prompt: split_of(prompt, Split()) for prompt in "aflnqt"}
    assert found == {"a": "train", "f": "validation", "l": "test", "n": "validation", "q": "test", "t": "test"}

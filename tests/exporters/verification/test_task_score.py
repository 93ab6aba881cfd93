"""Tests scores of answers and of base + adapter's answers, and the interval of their difference."""

from collections.abc import Sequence
from typing import Any

import pytest

from ratchet.exporters.verification.parity import Score, score_task
from ratchet.exporters.verification.probe_inputs import ProbeInputs
from ratchet.storage.records.export import TaskScore


def exact(expected: Sequence[str], answers: Sequence[str]) -> list[float]:
    return [float(a == b) for a, b in zip(expected, answers, strict=True)]


def lengths(expected: Sequence[str], answers: Sequence[str]) -> list[float]:
    return [min(1.0, len(b) / len(a)) for a, b in zip(expected, answers, strict=True)]


def answers(*texts: str) -> list[list[int]]:
    return [[ord(c) for c in text] for text in texts]


def scored(
    metric: Any, expected: list[str], score: Score, mine: list[list[int]], theirs: list[list[int]], groups: Any = ()
) -> TaskScore | None:
    inputs = ProbeInputs([], [], [], [], expected, metric, [], 8, list(groups))
    return score_task(inputs, mine, theirs, lambda ids: "".join(chr(i) for i in ids if i), score)


def test_binary_scores_use_the_score_interval() -> None:
    expected = ["yes"] * 100
    reference = answers(*(["yes"] * 90 + ["no"] * 10))
    found = scored("accuracy", expected, exact, answers(*(["yes"] * 80 + ["no"] * 20)), reference)
    assert (found.metric, found.rows, found.value, found.reference) == ("accuracy", 100, 0.8, 0.9)
    assert found.difference == pytest.approx(-0.1)
    # Tango (1998), eq. 5: the two-sided 95 % interval of 10 lost and 0 gained in 100 is -0.174 to -0.055.
    assert (round(found.low, 3), round(found.high, 3)) == (-0.174, -0.055)
    assert found.same_answers == 0.9


def test_equal_answers_still_have_an_interval() -> None:
    same = answers(*(["yes"] * 50))
    found = scored("accuracy", ["yes"] * 50, exact, same, same)
    assert (found.difference, found.same_answers) == (0, 1)
    assert -0.08 < found.low < -0.06
    assert 0.06 < found.high < 0.08


def test_equal_texts_of_other_tokens_are_not_the_same_answer() -> None:
    found = scored("exact_match", ["ab"], exact, [[97, 98]], [[97, 0, 98]])
    assert (found.value, found.reference, found.same_answers) == (1, 1, 0)


def test_other_scores_use_the_bootstrap_over_groups() -> None:
    expected = ["abcd"] * 40
    mine, theirs = answers(*(["abc", "abcd"] * 20)), answers(*(["abcd", "abc", "abcd", "ab"] * 10))
    alone = scored("token_f1", expected, lengths, mine, theirs)
    grouped = scored("token_f1", expected, lengths, mine, theirs, [f"g{i // 4}" for i in range(40)])
    assert alone.difference == grouped.difference == pytest.approx(0.875 - 0.8125)
    assert alone.low < alone.difference < alone.high
    assert (grouped.low, grouped.high) != (alone.low, alone.high)


def test_without_expected_answers_there_is_no_score() -> None:
    assert scored("accuracy", [], exact, [], []) is None
    with pytest.raises(ValueError, match=r"shorter|longer"):
        scored("accuracy", ["a", "b"], exact, answers("a"), answers("a", "b"))

"""Tests scores of answers and of base + adapter's answers, and the interval of their difference."""

from collections.abc import Sequence

import pytest

from ratchet.exporters.verification.parity import FormatAnswers, ParityTask, score_task


def exact(expected: Sequence[str], answers: Sequence[str]) -> list[float]:
    return [float(a == b) for a, b in zip(expected, answers, strict=True)]


def lengths(expected: Sequence[str], answers: Sequence[str]) -> list[float]:
    return [min(1.0, len(b) / len(a)) for a, b in zip(expected, answers, strict=True)]


def answers(*texts: str) -> FormatAnswers:
    return FormatAnswers([[ord(c) for c in text] for text in texts], texts)


def test_binary_scores_use_the_score_interval() -> None:
    expected = ["yes"] * 100
    reference = answers(*(["yes"] * 90 + ["no"] * 10))
    found = score_task(ParityTask("accuracy", expected, exact), answers(*(["yes"] * 80 + ["no"] * 20)), reference)
    assert (found.metric, found.rows, found.value, found.reference) == ("accuracy", 100, 0.8, 0.9)
    assert found.difference == pytest.approx(-0.1)
    # Tango (1998), eq. 5: the two-sided 95 % interval of 10 lost and 0 gained in 100 is -0.174 to -0.055.
    assert (round(found.low, 3), round(found.high, 3)) == (-0.174, -0.055)
    assert found.same_answers == 0.9


def test_equal_answers_still_have_an_interval() -> None:
    same = answers(*(["yes"] * 50))
    found = score_task(ParityTask("accuracy", ["yes"] * 50, exact), same, same)
    assert (found.difference, found.same_answers) == (0, 1)
    assert -0.08 < found.low < -0.06
    assert 0.06 < found.high < 0.08


def test_equal_texts_of_other_tokens_are_not_the_same_answer() -> None:
    mine, theirs = FormatAnswers([[1, 2]], ["ab"]), FormatAnswers([[3]], ["ab"])
    found = score_task(ParityTask("exact_match", ["ab"], exact), mine, theirs)
    assert (found.value, found.reference, found.same_answers) == (1, 1, 0)


def test_other_scores_use_the_bootstrap_over_groups() -> None:
    expected = ["abcd"] * 40
    mine, theirs = answers(*(["abc", "abcd"] * 20)), answers(*(["abcd", "abc", "abcd", "ab"] * 10))
    alone = score_task(ParityTask("token_f1", expected, lengths), mine, theirs)
    grouped = score_task(ParityTask("token_f1", expected, lengths, [f"g{i // 4}" for i in range(40)]), mine, theirs)
    assert alone.difference == grouped.difference == pytest.approx(0.875 - 0.8125)
    assert alone.low < alone.difference < alone.high
    assert (grouped.low, grouped.high) != (alone.low, alone.high)


def test_without_expected_answers_there_is_no_score() -> None:
    assert score_task(ParityTask("accuracy", [], exact), FormatAnswers([], []), FormatAnswers([], [])) is None
    with pytest.raises(ValueError, match=r"shorter|longer"):
        score_task(ParityTask("accuracy", ["a", "b"], exact), answers("a"), answers("a", "b"))

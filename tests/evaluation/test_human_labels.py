"""Tests the figures of judgements: coefficients of agreement, win rate, biases, the calibration of a judge, pairs."""

import random

import numpy as np
import pytest
from sklearn.metrics import cohen_kappa_score
from statsmodels.stats.inter_rater import fleiss_kappa as reference_fleiss_kappa

from ratchet.data.conversation import Conversation
from ratchet.evaluation.human_labels import LabelSample, LabelTask, compute_report, make_pairs, make_samples
from ratchet.evaluation.metrics import cohen_kappa, fleiss_kappa
from ratchet.quality_gate.judgements import JudgementLog
from ratchet.storage.records.label import Choice, Judgement, LabelSideReport

FLEISS_1971 = (
    (0, 0, 0, 0, 14), (0, 2, 6, 4, 2), (0, 0, 3, 5, 6), (0, 3, 9, 2, 0), (2, 2, 8, 1, 1),
    (7, 7, 0, 0, 0), (3, 2, 6, 3, 0), (2, 5, 3, 2, 2), (6, 5, 2, 1, 0), (0, 2, 2, 3, 7),
)  # fmt: skip
"""Ratings of ten subjects by 14 raters in five categories; a well-known example, whose kappa is 0.210."""


def test_fleiss_kappa_of_a_published_example_and_of_other_numbers_of_ratings() -> None:
    ratings = [[str(k) for k, count in enumerate(row) for _ in range(count)] for row in FLEISS_1971]
    kappa = fleiss_kappa(ratings, seed=0)
    assert kappa is not None
    assert kappa.value == pytest.approx(0.2099, abs=5e-5)
    assert kappa.value == pytest.approx(reference_fleiss_kappa(np.array(FLEISS_1971)))
    assert kappa.low < kappa.value < kappa.high and kappa.n == 10
    assert fleiss_kappa([*ratings, ["0"], []], seed=0) == kappa, "one rating says nothing about agreement"
    some = fleiss_kappa([["a", "a"], ["b", "b", "b"], ["a", "b"]], seed=0)
    assert some is not None and some.value == pytest.approx((2 / 3 - 25 / 49) / (1 - 25 / 49))
    assert fleiss_kappa([["a", "a"], ["a", "a"]], seed=0) is None
    assert fleiss_kappa([], seed=0) is None


def test_cohen_kappa_equals_the_library_and_a_textbook_example() -> None:
    table = [("yes", "yes")] * 20 + [("yes", "no")] * 5 + [("no", "yes")] * 10 + [("no", "no")] * 15
    kappa = cohen_kappa(table, seed=0)
    assert kappa is not None and kappa.value == pytest.approx(0.4)
    assert 0.1 < kappa.low < 0.2 and 0.6 < kappa.high < 0.7
    draw = random.Random(1)
    pairs = [(draw.choice("abc"), draw.choice("aabc")) for _ in range(70)]
    kappa = cohen_kappa(pairs, seed=0)
    assert kappa is not None
    assert kappa.value == pytest.approx(cohen_kappa_score(*map(list, zip(*pairs, strict=True))))
    assert cohen_kappa([("a", "a")] * 5, seed=0) is None


def task(count: int, judges: dict[str, dict[str, float]] | None = None) -> LabelTask:
    """Return samples whose first answer is the longer one for even numbers."""
    samples = {
        f"p{k}": LabelSample(
            prompt=f"p{k}",
            conversation=Conversation([{"role": "user", "content": f"question {k}"}]),
            answers=("a" * (3 if k % 2 else 9), "b" * 6),
        )
        for k in range(count)
    }
    one, other = (LabelSideReport(name=name, digest=name, answers=count, unmatched=0) for name in ("A", "B"))
    return LabelTask((one, other), make_samples(("A", "B"), samples), 2, are_test_rows=True, judges=judges or {})


def add(log: JudgementLog, about: LabelTask, rater: str, choices: str) -> None:
    """Add a judgement for each letter: A or B for the better side, t for a tie, s for a skip. The sides take turns in
    being shown first."""
    for number, (sample, letter) in enumerate(zip(about.samples, choices, strict=False)):
        shown = ("A", "B") if number % 2 else ("B", "A")
        choice: Choice = "tie" if letter == "t" else "skip" if letter == "s" else "first"
        if letter in "AB" and shown[0] != letter:
            choice = "second"
        log.add(Judgement(sample=sample, prompt="p", shown=shown, choice=choice, rater=rater))


def test_the_report() -> None:
    about, log = task(10), JudgementLog()
    add(log, about, "ann", "AAAAAAtBBs")
    add(log, about, "bob", "AAAAABtB")
    log.add(Judgement(sample="0" * 64, prompt="p", shown=("B", "A"), choice="first", rater="ann"))  # other answers
    log.add(Judgement(sample="1" * 64, prompt="p", shown=("A", "C"), choice="first", rater="ann"))  # another model
    report = compute_report(about, log, seed=0)
    assert (report.samples, report.judged, report.judgements, report.skipped) == (10, 9, 17, 1)
    assert (report.identical_answers, report.outdated) == (2, 1)
    assert report.win_rate is not None and report.win_rate.n == 9
    assert report.win_rate.value == pytest.approx((5 + 0.5 + 0.5) / 9)  # of the sixth sample each rater prefers another
    ann, bob = report.raters
    assert (ann.rater, ann.judgements, ann.ties, ann.skipped, bob.judgements) == ("ann", 9, 1, 1, 8)
    assert ann.win_rate is not None and ann.win_rate.value == pytest.approx(6.5 / 9)
    [pair] = report.agreements
    assert pair.raters == ("ann", "bob") and pair.agreement.value == pytest.approx(7 / 8)
    expected = cohen_kappa_score(list("AAAAAAtB"), list("AAAAABtB"))
    assert pair.kappa is not None and pair.kappa.value == pytest.approx(expected)
    assert report.fleiss_kappa is not None and report.fleiss_kappa.n == 8
    # Shown first: B, A, B, A, ...; so ann prefers the first answer in samples 1, 3, 5 and 8, bob in 1, 3.
    assert report.position_bias is not None and report.position_bias.n == 15
    assert report.position_bias.value == pytest.approx(6 / 15 - 0.5)
    # Longer: A, B, A, B, ...
    assert report.length_bias is not None and report.length_bias.value == pytest.approx(9 / 15 - 0.5)
    empty = compute_report(about, JudgementLog(), seed=0)
    assert (empty.win_rate, empty.position_bias, empty.fleiss_kappa, empty.raters) == (None, None, None, ())


def test_a_judge_is_compared_with_people() -> None:
    # The judge always prefers the longer answer, people the first side; p9 has no verdict.
    scores = {f"p{k}": 0.0 if k % 2 else 1.0 for k in range(9)} | {"p0": 0.5}
    about, log = task(10, {"llama": scores, "silent": {}}), JudgementLog()
    add(log, about, "ann", "AAAAAAAAAA")
    [judge] = compute_report(about, log, seed=0).judges
    assert judge.judge == "llama"
    assert judge.agreement.value == pytest.approx(4 / 9) and judge.agreement.n == 9
    assert judge.kappa is not None and judge.kappa.value == pytest.approx(0.0)
    assert judge.win_rate.value == pytest.approx(4.5 / 9) and judge.people_win_rate.value == 1.0
    assert judge.length_bias is not None and judge.length_bias.value == pytest.approx(0.5) and judge.length_bias.n == 8
    assert judge.people_length_bias is not None
    assert judge.people_length_bias.value == pytest.approx(5 / 9 - 0.5)


def test_raters_who_always_agree_leave_uncertainty() -> None:
    about, log = task(30), JudgementLog()
    for rater in ("ann", "bob"):
        add(log, about, rater, "AB" * 15)  # always the longer answer
    report = compute_report(about, log, seed=0)
    assert report.length_bias is not None and report.length_bias.n == 60
    assert (report.length_bias.value, report.length_bias.high) == (0.5, 0.5)
    assert report.length_bias.low == pytest.approx(30 / (30 + 1.96**2) - 0.5, abs=1e-3)
    assert report.agreements[0].kappa is not None and report.agreements[0].kappa.value == 1.0


def test_pairs_are_made_where_all_raters_prefer_the_same_answer() -> None:
    about, log = task(6), JudgementLog()
    add(log, about, "ann", "ABtAts")
    add(log, about, "bob", "AsABt")
    rows, ties, disagreements, empty = make_pairs(about, log)
    assert (ties, disagreements, empty) == (1, 2, 0)
    assert [(row["chosen"][0]["content"][0], row["prompt"][0]["content"]) for row in rows] == [
        ("a", "question 0"),
        ("b", "question 1"),
    ]
    assert rows[0]["rejected"] == [{"role": "assistant", "content": "bbbbbb"}]

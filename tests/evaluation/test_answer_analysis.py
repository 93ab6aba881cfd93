"""Tests the analysis of a generation against scikit-learn and values counted by hand."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.calibration import calibration_curve
from sklearn.metrics import accuracy_score, average_precision_score, brier_score_loss, precision_recall_fscore_support

import fake_answers
from fake_answers import of_labels, record, write
from ratchet.errors import DamagedFileError, SettingsError
from ratchet.evaluation import answer_analysis
from ratchet.evaluation.answer_analysis import AnswerAnalysis, analyze_answers
from ratchet.reports import answers_page
from ratchet.storage.output_card import card_path

LABELS = ("billing", "refund", "other")


def judged(path: Path, task: str = "text") -> AnswerAnalysis:
    return analyze_answers(answer_analysis.read_generation(path, task), seed=0)


def notes(found: AnswerAnalysis) -> str:
    return "\n".join(answer_analysis.describe_omissions(found))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], AnswerAnalysis]:
    records = of_labels(LABELS, 400)
    path = write(tmp_path_factory.mktemp("made") / "a.jsonl", records, labels=LABELS, extra_fields=["topic", "row"])
    return records, judged(path)


def test_answers_by_label_are_those_of_scikit_learn(made: tuple[list[dict[str, Any]], AnswerAnalysis]) -> None:
    records, found = made
    expected, said = ([one[name] for one in records] for name in ("reference", "answer"))
    assert found.labels is not None
    assert found.labels.metrics["accuracy"].value == pytest.approx(accuracy_score(expected, said))
    columns = precision_recall_fscore_support(expected, said, labels=LABELS)
    for place, label in enumerate(LABELS):
        one = found.labels.classes[label]
        assert (one["precision"], one["recall"], one["f1"]) == pytest.approx([column[place] for column in columns[:3]])
    pairs, confusion = list(zip(expected, said, strict=True)), found.labels.confusion
    for i, a in enumerate(confusion.labels):
        for j, b in enumerate(confusion.labels):
            assert confusion.matrix[i][j] == pairs.count((a, b))


def test_likelihoods_give_curves_and_calibration_as_scikit_learn_does(
    made: tuple[list[dict[str, Any]], AnswerAnalysis],
) -> None:
    records, found = made
    assert found.labels is not None
    likelihoods = found.labels.likelihoods
    assert likelihoods is not None
    assert (likelihoods.n, likelihoods.skipped) == (400, 0)
    shares = answer_analysis.label_probabilities([list(one["label_log_probabilities"].values()) for one in records])
    expected = np.array([LABELS.index(one["reference"]) for one in records])
    for place, label in enumerate(LABELS):
        own = average_precision_score(expected == place, shares[:, place])
        assert likelihoods.curves[label]["average_precision"] == pytest.approx(own)
        assert found.labels.classes[label]["average_precision"] == pytest.approx(own)
    right, sure = shares.argmax(axis=1) == expected, shares.max(axis=1)
    true, mean = calibration_curve(right, sure, n_bins=answer_analysis.BINS, strategy="uniform")
    bins = likelihoods.calibration.bins
    assert [one.accuracy.value for one in bins] == pytest.approx(list(true))
    assert [one.confidence for one in bins] == pytest.approx(list(mean))
    sizes = [one.accuracy.n for one in bins]
    assert likelihoods.calibration.error == pytest.approx(np.average(np.abs(true - mean), weights=sizes))
    whole = sum(brier_score_loss(expected == place, shares[:, place]) for place in range(len(LABELS)))
    assert likelihoods.calibration.brier.value == pytest.approx(whole)


def test_an_overconfident_model_is_not_calibrated() -> None:
    draw = np.random.default_rng(0)
    sure = draw.uniform(0.5, 1.0, 20_000)
    expected = ["a" if hit else "b" for hit in draw.random(20_000) < sure]
    honest = [[math.log(p), math.log(1 - p)] for p in sure]
    assert answer_analysis.compute_calibration(("a", "b"), expected, honest).error < 0.02
    boastful = [[3 * a, 3 * b] for a, b in honest]
    assert answer_analysis.compute_calibration(("a", "b"), expected, boastful).error > 0.1


def test_errors_by_category_and_fields_with_too_many_values(made: tuple[list[dict[str, Any]], AnswerAnalysis]) -> None:
    records, found = made
    assert set(found.categories) == {"topic"}
    assert found.fields_with_many_values == {"row": 400}
    for name, metric in found.categories["topic"].items():
        own = [one for one in records if one["fields"]["topic"] == name]
        assert metric.value == pytest.approx(sum(one["answer"] != one["reference"] for one in own) / len(own))
        assert metric.low < metric.value < metric.high
        assert (metric.n, metric.better) == (200, "lower")
    assert "Field row has 400 values" in notes(found)


def test_missing_log_probabilities_are_noted(tmp_path: Path) -> None:
    records = [record(n, "a" if n else "b", "a") for n in range(4)]
    found = judged(write(tmp_path / "a.jsonl", records), "labels")
    assert found.labels is not None
    assert found.labels.likelihoods is None
    assert found.answers.possible_answers == ("a",)
    assert "Only text was available: precision-recall curves and calibration need generate.labels" in notes(found)
    assert "All references are the same label" in notes(found)
    served = [one | {"label_log_probabilities": None} for one in records]
    said = notes(judged(write(tmp_path / "b.jsonl", served, labels=("a", "b"))))
    assert "has log-probabilities of labels" in said


def test_answers_that_are_no_label_are_counted_and_shown(tmp_path: Path) -> None:
    records = [record(0, " a\n", "a"), record(1, "an a", "a"), record(2, "", "b", finish="invalid", tokens=0)]
    found = judged(write(tmp_path / "a.jsonl", records, labels=("a", "b")))
    assert found.unparseable is not None
    assert (found.unparseable.count, found.unparseable.total) == (2, 3)
    assert found.unparseable.first == [("q1", "an a", "stop"), ("q2", "", "invalid")]
    assert found.labels is not None
    assert found.labels.classes["b"]["precision"] == 0.0
    assert found.finishes["invalid"][0] == 1
    assert "the model returned NaN: 1" in notes(found)
    assert "2 of 3" in answer_analysis.format_analysis(found)
    none = judged(write(tmp_path / "b.jsonl", [record(n, "?", "a") for n in range(3)], labels=("a", "b")))
    assert none.labels is not None
    assert none.labels.metrics["accuracy"].value == 0.0
    assert none.unparseable is not None
    assert none.unparseable.count == 3


def test_references_outside_of_the_vocabulary(tmp_path: Path) -> None:
    records = [
        record(n, "a", reference, label_log_probabilities={"a": -0.5, "b": nats})
        for n, (reference, nats) in enumerate([("a", -1.0), ("c", -1.0), ("b", None), (None, -1.0)])
    ]
    found = judged(write(tmp_path / "a.jsonl", records, labels=("a", "b")))
    assert "none of the 2 generate.labels: 1 ('c')" in notes(found)
    assert "Prompts without a reference: 1 of 4" in notes(found)
    assert found.labels is not None
    assert found.labels.likelihoods is not None
    assert (found.labels.likelihoods.n, found.labels.likelihoods.skipped) == (1, 2)
    assert "Prompts in no precision-recall curve and no calibration: 2" in notes(found)


def test_an_answer_that_is_right_is_a_possible_one(tmp_path: Path) -> None:
    said = ["c", "c", "d", "a", "x"]
    records = [record(n, one, reference) for n, (one, reference) in enumerate(zip(said, "ccdcd", strict=True))]
    path = write(tmp_path / "a.jsonl", records, labels=("a", "b"))
    found = judged(path)
    assert found.labels is not None
    assert found.labels.metrics["accuracy"].value == 0.6
    assert found.unparseable is not None
    assert found.unparseable.first == [("q4", "x", "stop")]
    assert found.answers.possible_answers == ("a", "b", "c", "d")
    assert "1 of 5 answers are not one of the 2 labels or the 2 other references" in "\n".join(
        answer_analysis.summarize_generation(path, "text")
    )
    other = judged(write(tmp_path / "b.jsonl", [record(n, "b", "a") for n in range(3)], labels=("a", "b")))
    assert other.labels is not None
    assert other.labels.confusion.matrix == ((0, 3),), "a label that is no reference is possible, too"
    assert other.unparseable is not None
    assert other.unparseable.count == 0
    for text in (answer_analysis.format_analysis(other), answers_page.render(other)):
        assert "answers that are not the reference of any prompt" in text


def test_samples_that_are_all_the_same_are_no_certainty(tmp_path: Path) -> None:
    """Wilson's interval of 0 of 10 is known: 0 to z^2 / (n + z^2)."""
    records = [record(n, one, "z", sample=s) for n in range(10) for s, one in enumerate("ab")]
    found = judged(write(tmp_path / "a.jsonl", records, samples=2, extra_fields=["topic"]))
    assert found.agreement is not None
    figure = found.agreement.agreement
    assert (figure.value, figure.low, figure.n) == (0.0, 0.0, 10)
    assert figure.high == pytest.approx(3.8415 / 13.8415, abs=1e-4)
    half = [record(n, one, "a", sample=s, fields={"topic": "t"}) for n in range(4) for s, one in enumerate("ab")]
    nats = {"label_log_probabilities": {"a": -0.5, "b": -1.5}}
    path = write(
        tmp_path / "b.jsonl", [one | nats for one in half], samples=2, extra_fields=["topic"], labels=("a", "b")
    )
    found = judged(path)
    assert found.labels is not None
    assert found.labels.likelihoods is not None
    brier = found.labels.likelihoods.calibration.brier
    for one, most in ((found.labels.metrics["accuracy"], 1.0), (found.categories["topic"]["t"], 1.0), (brier, 2.0)):
        assert 0.0 < one.low < one.value < one.high < most
    free = judged(write(tmp_path / "c.jsonl", [record(0, "the sea is", "sea is wet")]))
    assert free.text_metrics["token_f1"].low < free.text_metrics["token_f1"].value < free.text_metrics["token_f1"].high


def test_several_answers_to_a_prompt(tmp_path: Path) -> None:
    said = [("a", "a", "b"), ("b", "b", "b"), ("a", "b", "c")]
    records = [record(n, one, "a", sample=s) for n, row in enumerate(said) for s, one in enumerate(row)]
    found = judged(write(tmp_path / "a.jsonl", records, samples=3, labels=("a", "b", "c")))
    assert found.labels is not None
    assert found.labels.metrics["accuracy"].value == pytest.approx((2 / 3 + 0 + 1 / 3) / 3)
    assert found.agreement is not None
    assert found.agreement.agreement.value == pytest.approx((1 / 3 + 1 + 0) / 3)
    assert found.agreement.unanimous.value == pytest.approx(1 / 3)
    assert found.agreement.majority is not None
    assert found.agreement.majority.value == pytest.approx(2 / 3)


def test_free_answers_by_the_measures_of_evaluate(tmp_path: Path) -> None:
    records = [record(0, "The sea is wet.", "sea is wet"), record(1, "no", "no"), record(2, "x", None)]
    found = judged(write(tmp_path / "a.jsonl", records))
    assert found.labels is None
    assert found.unparseable is None
    assert {name: one.value for name, one in found.text_metrics.items()} == {"exact_match": 0.5, "token_f1": 1.0}
    assert found.text_metrics["token_f1"].n == 2


def test_without_references_lengths_and_finishes_are_reported(tmp_path: Path) -> None:
    records = [record(n, "x" * n, None, finish="length" if n == 3 else "stop") for n in range(4)]
    found = judged(write(tmp_path / "a.jsonl", records))
    assert found.text_metrics == {}
    assert found.tokens is not None
    assert (found.tokens.minimum, found.tokens.maximum) == (1, 4)
    assert {name: count for name, (count, _) in found.finishes.items()} == {"stop": 3, "length": 1}
    assert "No prompt has a reference" in answer_analysis.format_analysis(found)


def test_outputs_that_cannot_be_judged(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [record(0, "a", "a")])
    with pytest.raises(SettingsError, match=r"no such file; `ratchet generate"):
        answer_analysis.read_generation(tmp_path / "gone.jsonl", "text")
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole.replace('"a"', '"b"', 1), encoding="utf-8")
    with pytest.raises(DamagedFileError, match=r"the file changed since it was written"):
        answer_analysis.read_generation(path, "text")
    card = card_path(path)
    assert json.loads(card.read_bytes())["spec"] == fake_answers.spec().model_dump(mode="json")
    path.write_text(whole, encoding="utf-8")
    text = card.read_text(encoding="utf-8")
    card.write_text("{}", encoding="utf-8")
    with pytest.raises(
        SettingsError, match=r"not an output of `ratchet generate` \(a.jsonl.card.json is not such a card"
    ):
        answer_analysis.read_generation(path, "text")
    card.unlink()
    with pytest.raises(SettingsError, match=r"a.jsonl.card.json is missing"):
        answer_analysis.read_generation(path, "text")
    card.write_text(text, encoding="utf-8")
    assert len(answer_analysis.read_generation(path, "text").prompts) == 1


@pytest.mark.parametrize(
    ("changed", "samples", "said"),
    [
        ({"finish": "odd"}, 1, "record 1 is not from `ratchet generate`"),
        ({"answer": None}, 1, "record 1 is not from `ratchet generate`"),
        ({"label_log_probabilities": {"a": 1}}, 1, "record 1 is not from `ratchet generate`"),
        ({}, 2, "found 0 complete prompts"),
    ],
    ids=["finish", "answer", "labels", "an answer is missing"],
)
def test_damaged_records_are_refused(changed: dict[str, Any], samples: int, said: str, tmp_path: Path) -> None:
    one = record(0, "a", "a") | changed | {"tokens": 1}
    path = write(tmp_path / "a.jsonl", [one], labels=("a", "b"), samples=samples)
    with pytest.raises(DamagedFileError, match=said):
        answer_analysis.read_generation(path, "text")

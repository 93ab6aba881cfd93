"""Tests metrics of answers against the underlying libraries and values computed by hand."""

import pytest
import sacrebleu
from rouge_score import rouge_scorer

import judge_cases
from ratchet.config.evaluate import Evaluate
from ratchet.errors import SettingsError
from ratchet.evaluation import answer_metrics
from ratchet.evaluation.answer_metrics import AnswerMetricResult

EXPECTED = [
    "The cat sat on the mat.", "It is 42.", "a dog barks loudly at night", "", "the", "naïve café owners",
    "Привет, мир", "one two three four five six",
]  # fmt: skip
ANSWERS = [
    "a cat sat on a mat", "42", "the dog barks at night, loudly", "", "mat", "cafe owners, naïve", "привет мир",
    "one two three four five six",
]  # fmt: skip
TOKEN_F1 = [1.0, 2 / 4, 1.0, 1.0, 0.0, 2 * 2 / 6, 1.0, 1.0]
"""By hand: articles, case and punctuation do not count; `the` has no word left, `mat` one."""


def measured(settings: Evaluate, answers: list[list[str]] | None = None) -> dict[str, AnswerMetricResult]:
    given = [[answer] for answer in ANSWERS] if answers is None else answers
    return {one.name: one for one in answer_metrics.score_answers(EXPECTED, given, settings, "exact_match")}


def test_rows_without_instructions_have_no_ifeval_metric() -> None:
    rows = judge_cases.rows(3)
    scored = answer_metrics.score_answers(["x"] * 3, [["y"]] * 3, Evaluate(metrics=("ifeval",)), "exact_match", rows)
    assert [one.name for one in scored] == ["exact_match"]


@pytest.fixture(scope="module")
def found() -> dict[str, AnswerMetricResult]:
    return measured(Evaluate(metrics=("token_f1", "bleu", "rouge", "chrf", "length")))


def values(one: AnswerMetricResult) -> list[float]:
    assert one.values is not None
    return one.values


def test_exactly_the_expected_answer(found: dict[str, AnswerMetricResult]) -> None:
    assert values(found["exact_match"]) == [0, 0, 0, 1, 0, 0, 0, 1]
    assert found["exact_match"].metric.value == 2 / 8
    assert found["exact_match"].metric.unit == "proportion"
    stripped = answer_metrics.score_answers(["yes "], [[" yes\n"]], Evaluate(), "accuracy")
    assert [(m.name, m.values) for m in stripped] == [("accuracy", [1.0])]


def test_token_f1_is_that_of_squad_and_bleu_and_chrf_those_of_sacrebleu(found: dict[str, AnswerMetricResult]) -> None:
    sentences = [
        sacrebleu.sentence_bleu(a, [e], use_effective_order=True).score for a, e in zip(ANSWERS, EXPECTED, strict=True)
    ]
    assert values(found["bleu"]) == sentences
    corpus = found["corpus_bleu"]
    assert corpus.values is None
    assert corpus.metric.value == pytest.approx(sacrebleu.corpus_bleu(ANSWERS, [EXPECTED]).score)
    assert (corpus.metric.kind, corpus.metric.n) == ("aggregate", len(EXPECTED))
    assert corpus.metric.low < corpus.metric.value < corpus.metric.high
    assert values(found["token_f1"]) == pytest.approx(TOKEN_F1)
    chrf = [sacrebleu.sentence_chrf(a, [e]).score for a, e in zip(ANSWERS, EXPECTED, strict=True)]
    assert values(found["chrf"]) == chrf


@pytest.mark.parametrize("kind", ["rouge1", "rouge2", "rougeL"])
def test_rouge_is_that_of_rouge_score_for_ascii_and_reads_other_scripts(
    kind: str, found: dict[str, AnswerMetricResult]
) -> None:
    scorer = rouge_scorer.RougeScorer([kind])
    plain = [i for i, text in enumerate(EXPECTED) if text.isascii()]
    right = [scorer.score(EXPECTED[i], ANSWERS[i])[kind].fmeasure for i in plain]
    assert [values(found[kind])[i] for i in plain] == pytest.approx(right)
    assert 0 < sum(right) < len(right)
    if kind == "rouge1":
        assert scorer.score("Привет, мир", "привет мир")[kind].fmeasure == 0.0
        assert values(found[kind])[6] == 1.0


def test_length_has_no_direction(found: dict[str, AnswerMetricResult]) -> None:
    assert values(found["length_words"]) == [len(answer.split()) for answer in ANSWERS]
    assert values(found["length_characters"]) == [len(answer) for answer in ANSWERS]
    assert {found[name].metric.better for name in ("length_words", "length_characters")} == {"unknown"}
    assert {found[name].metric.better for name in ("bleu", "chrf", "rougeL", "token_f1")} == {"higher"}


@pytest.mark.parametrize(
    ("answer", "valid"),
    [
        ('{"a": [1, 2.5e3, null]}', 1), (' "text"\n', 1), ("7", 1), ("", 0), ("{'a': 1}", 0), ('{"a": 1} and more', 0),
        ("NaN", 0), ('{"a": -Infinity}', 0), ("[" * 100_000, 0), ("9" * 10_000, 1),
    ],
    ids=[
        "object", "space around", "number", "nothing", "apostrophes", "more behind", "nan", "infinity", "deep", "long",
    ],
)  # fmt: skip
def test_what_is_json(answer: str, valid: int) -> None:
    one = answer_metrics.score_answers(["x"], [[answer]], Evaluate(answer_format="json"), "exact_match")
    assert {m.name: m.values for m in one}["format_validity"] == [valid]


def test_a_regular_expression_must_match_all_of_an_answer() -> None:
    answers = [["12"], [" 12 "], ["12 apples"], ["x12"], ["\N{ARABIC-INDIC DIGIT ONE}"]]
    one = answer_metrics.score_answers(["x"] * 5, answers, Evaluate(answer_format=r"[0-9]+"), "exact_match")
    assert {m.name: m.values for m in one}["format_validity"] == [1, 1, 0, 0, 0]


def test_an_endless_regular_expression_is_ended_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_metrics, "PATTERN_TIMEOUT_S", 0.5)
    with pytest.raises(SettingsError, match=r"evaluate.answer_format: '\(a\+\)\+b' took more than 0.5 s on 1 answers"):
        answer_metrics.score_answers(["x"], [["a" * 60]], Evaluate(answer_format="(a+)+b"), "exact_match")


def test_of_several_answers_a_row_has_the_mean() -> None:
    settings = Evaluate(metrics=("token_f1", "bleu"), answer_format="json", samples=2)
    found = measured(settings, [[answer, "1"] for answer in ANSWERS])
    assert values(found["exact_match"]) == [0, 0, 0, 0.5, 0, 0, 0, 0.5]
    assert found["exact_match"].metric.n == len(EXPECTED)  # n counts rows, not answers
    assert values(found["token_f1"]) == pytest.approx([x / 2 for x in TOKEN_F1])
    pairs = [(a, e) for answer, e in zip(ANSWERS, EXPECTED, strict=True) for a in (answer, "1")]
    corpus = sacrebleu.corpus_bleu([a for a, _ in pairs], [[e for _, e in pairs]])
    assert found["corpus_bleu"].metric.value == pytest.approx(corpus.score)
    assert found["corpus_bleu"].metric.n == len(EXPECTED)


def test_only_answered_rows_are_measured() -> None:
    found = measured(Evaluate(metrics=("bleu",)), [[answer] for answer in ANSWERS[:3]])
    assert {len(one.values) for one in found.values() if one.values is not None} == {3}


def test_the_same_seed_gives_the_same_interval() -> None:
    def corpus(seed: int) -> AnswerMetricResult:
        return measured(Evaluate(metrics=("bleu",), seed=seed))["corpus_bleu"]

    assert corpus(1) == corpus(1)
    assert corpus(1) != corpus(2)


def test_support_of_an_answer_by_its_context() -> None:
    context = "The parcel left Berlin on Monday, and arrives in Hamburg on Tuesday."
    answers = ["It left Berlin on Monday.", "It arrives in Berlin.", "Tuesday", "", "Nein, gestern!"]
    found = answer_metrics.score_context_support(answers, [context] * len(answers))
    assert found["faithfulness_words"] == [4 / 5, 3 / 4, 1, 0, 0]
    assert found["faithfulness_bigrams"] == [3 / 4, 1 / 3, 1, 0, 0]

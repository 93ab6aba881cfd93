"""Metrics of generated answers: exact match, F1 of words, BLEU, ROUGE, chrF, length, format validity, and extensions.

sacrebleu computes BLEU and chrF, rouge_score computes ROUGE. Nothing is downloaded.
"""

import json
import math
import re
import string
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ratchet.config.evaluate import BUILTIN_METRICS, Evaluate
from ratchet.config.extensions import load_extension
from ratchet.data.readers import reject_constant
from ratchet.errors import SettingsError
from ratchet.evaluation.metrics import POINTS, SHARE, Better, mean_score_metric
from ratchet.storage.records.evaluation import MetricValue

EXTENSION_UNIT = "score, mean of samples"
"""Unit of metrics of installed packages."""

PATTERN_TIMEOUT_S = 20.0
"""Time limit in seconds of a regular expression on all answers; most expressions take microseconds per answer."""

BLEU_RESAMPLES = 1000
"""Number of bootstrap samples for the interval of corpus BLEU."""

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
WORD = re.compile(r"[^\W_]+")

MATCH_SCRIPT = """
import json, re, sys
request = json.load(sys.stdin)
pattern = re.compile(request["pattern"])
json.dump([pattern.fullmatch(text) is not None for text in request["texts"]], sys.stdout)
"""

UNITS: Mapping[str, tuple[Better, str]] = {
    "token_f1": ("higher", SHARE),
    "bleu": ("higher", POINTS),
    "rouge1": ("higher", SHARE),
    "rouge2": ("higher", SHARE),
    "rougeL": ("higher", SHARE),
    "chrf": ("higher", POINTS),
    "length_characters": ("unknown", "characters"),
    "length_words": ("unknown", "words"),
    "format_validity": ("higher", SHARE),
}
"""Direction and unit of each metric."""


@dataclass(frozen=True)
class AnswerMetricResult:
    """One metric of a model's answers."""

    name: str
    values: list[float] | None
    """Mean over the answers of each row. None if the metric is not a mean of rows (corpus BLEU)."""
    metric: MetricValue


def score_answers(
    expected: Sequence[str], answers: Sequence[Sequence[str]], settings: Evaluate, exact_name: str
) -> list[AnswerMetricResult]:
    """Score generated answers.

    Args:
        expected: Reference of each row; rows after the last answered row are ignored.
        answers: Answers to each row; the same number for every row, at least one.
        settings: `metrics`, `answer_format` and `seed` are read.
        exact_name: Name of the share of exactly right answers (`accuracy` for labels).

    Raises:
        SettingsError: The regular expression of `answer_format` takes too long on these answers.
    """
    pairs = _AnswerPairs(expected[: len(answers)], answers)
    metrics = [pairs.average_rows(exact_name, score_exact_match(pairs.answers, pairs.expected), ("higher", SHARE))]
    for name in settings.metrics:
        if name == "bleu":
            metrics += pairs.score_bleu(settings.seed)
        elif name in BUILTIN_METRICS:
            scores = METRICS[name](pairs.answers, pairs.expected)
            metrics += [pairs.average_rows(key, values, UNITS[key]) for key, values in scores.items()]
        else:
            metrics.append(pairs.average_rows(name, pairs.score_with_extension(name), ("higher", EXTENSION_UNIT)))
    if settings.answer_format is not None:
        try:
            valid = score_format_validity(pairs.answers, settings.answer_format, PATTERN_TIMEOUT_S)
        except TimeoutError as error:
            raise SettingsError(f"evaluate.answer_format: {error}; avoid a repetition inside a repetition") from None
        metrics.append(pairs.average_rows("format_validity", valid, UNITS["format_validity"]))
    return metrics


class _AnswerPairs:
    """Answers and references, pair by pair."""

    def __init__(self, expected: Sequence[str], answers: Sequence[Sequence[str]]) -> None:
        self.answers_per_row = len(answers[0])
        self.answers = [answer for row in answers for answer in row]
        self.expected = [text for text, row in zip(expected, answers, strict=True) for _ in row]

    def average_rows(self, name: str, values: Sequence[float], kind: tuple[Better, str]) -> AnswerMetricResult:
        """Average over rows. Several answers to a row count as one sample with a more precise score."""
        k = self.answers_per_row
        rows = [sum(values[i : i + k]) / k for i in range(0, len(values), k)]
        return AnswerMetricResult(name, rows, mean_score_metric(rows, *kind))

    def score_with_extension(self, name: str) -> list[float]:
        """Return the score of each answer by a metric of an installed package.

        Raises:
            SettingsError: The metric fails, or does not return a finite number for each answer.
        """
        score = load_extension("ratchet.metrics", name, "evaluate.metrics")
        try:
            values = [float(value) for value in score(self.answers, self.expected)]
        except Exception as error:
            raise SettingsError(f"evaluate.metrics: {name} failed: {type(error).__name__}: {error}") from error
        if len(values) != len(self.answers) or not all(map(math.isfinite, values)):
            raise SettingsError(
                f"evaluate.metrics: {name} returned {len(values)} numbers for {len(self.answers)} answers, or one that "
                "is not finite; it must return a finite number for each answer"
            )
        return values

    def score_bleu(self, seed: int) -> list[AnswerMetricResult]:
        """Return the mean of sentence BLEU, which can be paired by row, and corpus BLEU, which papers report."""
        sentences, value, low, high = compute_bleu(self.answers, self.expected, self.answers_per_row, seed)
        corpus = MetricValue(
            value=value,
            n=len(self.answers) // self.answers_per_row,
            low=min(low, value),
            high=max(high, value),
            better="higher",
            unit=POINTS,
            kind="aggregate",
        )
        mean = self.average_rows("bleu", sentences, UNITS["bleu"])
        return [mean, AnswerMetricResult("corpus_bleu", None, corpus)]


def score_exact_match(answers: Sequence[str], references: Sequence[str]) -> list[float]:
    """Return 1 for each answer that equals its reference, ignoring leading and trailing whitespace, else 0."""
    return [float(answer.strip() == reference.strip()) for answer, reference in zip(answers, references, strict=True)]


def score_token_f1(answers: Sequence[str], references: Sequence[str]) -> dict[str, list[float]]:
    """Compute F1 of the words that each answer and its reference share, between 0 and 1, as for SQuAD.

    Words are compared in lower case, without ASCII punctuation and without the articles a, an and the. Repeated words
    count as often as they occur. If answer or reference has no words, the score is 1 if neither has any, else 0.

    Source: Rajpurkar, Zhang, Lopyrev and Liang, "SQuAD: 100,000+ Questions for Machine Comprehension of Text", EMNLP
    2016; answers without words: Rajpurkar, Jia and Liang, "Know What You Don't Know", ACL 2018, evaluation script of
    SQuAD 2.0.
    """
    pairs = zip(answers, references, strict=True)
    return {"token_f1": [_compute_word_f1(_normalize_words(a), _normalize_words(b)) for a, b in pairs]}


def _normalize_words(text: str) -> list[str]:
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def _compute_word_f1(answer: list[str], reference: list[str]) -> float:
    """Compute the harmonic mean of precision and recall of the shared words."""
    if not answer or not reference:
        return float(answer == reference)
    shared = sum((Counter(answer) & Counter(reference)).values())
    return 2 * shared / (len(answer) + len(reference))


def compute_bleu(
    answers: Sequence[str], references: Sequence[str], answers_per_row: int, seed: int
) -> tuple[list[float], float, float, float]:
    """Compute BLEU in points, 0 to 100: of each answer, and of all answers as one corpus with its 95 % interval.

    Sentence BLEU omits n-gram orders that an answer is too short for (effective order) and smooths exponentially, as
    sacrebleu does for sentences. Corpus BLEU uses sacrebleu's defaults (tokenizer 13a, exponential smoothing). The
    interval resamples rows with all their answers.

    Source: Papineni et al., ACL 2002; Post, "A Call for Clarity in Reporting BLEU Scores", WMT 2018; interval: Koehn,
    "Statistical Significance Tests for Machine Translation Evaluation", EMNLP 2004.

    Returns:
        Sentence scores, corpus score, lower and upper limit of the interval.
    """
    import sacrebleu

    scorer = sacrebleu.BLEU(effective_order=True)
    scores = [scorer.sentence_score(a, [b]) for a, b in zip(answers, references, strict=True)]
    counts = np.array(
        [[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores], dtype=np.int64
    )
    rows = counts.reshape(-1, answers_per_row, counts.shape[1]).sum(axis=1)
    rng = np.random.default_rng(seed)
    resampled = [
        _compute_corpus_bleu(rows[rng.integers(0, len(rows), len(rows))].sum(axis=0)) for _ in range(BLEU_RESAMPLES)
    ]
    low, high = np.percentile(resampled, [2.5, 97.5])
    return [score.score for score in scores], _compute_corpus_bleu(rows.sum(axis=0)), float(low), float(high)


def _compute_corpus_bleu(counts: Any) -> float:
    """Compute BLEU from summed counts: matching n-grams, n-grams, length of the answers, length of the references."""
    import sacrebleu

    *grams, answer_length, reference_length = (int(x) for x in counts)
    half = len(grams) // 2
    score = sacrebleu.BLEU.compute_bleu(
        grams[:half], grams[half:], answer_length, reference_length, smooth_method="exp"
    )
    return float(score.score)


def score_rouge(answers: Sequence[str], references: Sequence[str]) -> dict[str, list[float]]:
    """Compute ROUGE-1, ROUGE-2 and ROUGE-L of each answer: F-measures between 0 and 1, without stemming.

    Words are lower-case runs of letters and digits of any script. The library's own tokenizer only knows a-z and 0-9,
    so it gives 0 to every answer in another script; for English both tokenizers agree. Scripts without spaces are not
    segmented.

    Source: Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", ACL workshop 2004.
    """
    from rouge_score import rouge_scorer

    kinds = ("rouge1", "rouge2", "rougeL")
    scorer = rouge_scorer.RougeScorer(list(kinds), tokenizer=_RougeTokenizer())
    scores = [scorer.score(target=b, prediction=a) for a, b in zip(answers, references, strict=True)]
    return {kind: [float(score[kind].fmeasure) for score in scores] for kind in kinds}


class _RougeTokenizer:
    """Tokenizer with the interface of rouge_score."""

    def tokenize(self, text: str) -> list[str]:
        """Split a text into words."""
        return WORD.findall(text.lower())


def score_chrf(answers: Sequence[str], references: Sequence[str]) -> dict[str, list[float]]:
    """Compute chrF in points, 0 to 100: F-score of shared character n-grams up to six, with recall counted twice.

    Source: Popovic, "chrF: character n-gram F-score for automatic MT evaluation", WMT 2015.
    """
    import sacrebleu

    scorer = sacrebleu.CHRF()
    return {"chrf": [scorer.sentence_score(a, [b]).score for a, b in zip(answers, references, strict=True)]}


def measure_length(answers: Sequence[str], references: Sequence[str]) -> dict[str, list[float]]:
    """Count the characters (Unicode code points) and words (runs without whitespace) of each answer."""
    return {
        "length_characters": [float(len(answer)) for answer in answers],
        "length_words": [float(len(answer.split())) for answer in answers],
    }


METRICS = {"token_f1": score_token_f1, "rouge": score_rouge, "chrf": score_chrf, "length": measure_length}
"""Metrics of one answer and its reference, by their names in evaluate.metrics."""


def score_format_validity(answers: Sequence[str], answer_format: str, timeout_s: float) -> list[float]:
    """Return 1 for each valid answer, else 0, ignoring leading and trailing whitespace.

    Args:
        answers: Generated texts.
        answer_format: `json` (RFC 8259), or a regular expression that matches the whole answer.
        timeout_s: Limit of a regular expression on all answers, in seconds.

    Raises:
        TimeoutError: The regular expression takes longer. The expression runs in its own process, because nested
            repetitions can take years on some answers, and only ending the process stops them.
    """
    texts = [answer.strip() for answer in answers]
    if answer_format == "json":
        return [float(_is_json(text)) for text in texts]
    request = json.dumps({"pattern": answer_format, "texts": texts})
    command = [sys.executable, "-I", "-c", MATCH_SCRIPT]
    try:
        process = subprocess.run(command, input=request, capture_output=True, text=True, timeout=timeout_s, check=True)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{answer_format!r} took more than {timeout_s:g} s on {len(texts)} answers") from None
    return [float(is_match) for is_match in json.loads(process.stdout)]


def _is_json(text: str) -> bool:
    """Return whether a text is one JSON value; Python's NaN and Infinity are not valid JSON."""
    try:
        json.loads(text, parse_constant=reject_constant, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    return True

"""Metrics of generated answers: exact match, F1 of words, BLEU, ROUGE, chrF, length, format validity, and extensions.

Also instruction following and support by a context. sacrebleu computes BLEU and chrF, rouge_score computes ROUGE.
Nothing is downloaded.
"""

import json
import re
import string
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ratchet.config.evaluate import Evaluate
from ratchet.config.extensions import compute_extension_scores, load_extension
from ratchet.data.conversation import extract_text
from ratchet.errors import SettingsError
from ratchet.evaluation.instruction_following import check_instructions, read_instructions
from ratchet.evaluation.metrics import Better, aggregate_metric, bootstrap_metric, mean_score_metric
from ratchet.evaluation.rows import TestRows
from ratchet.storage.files import reject_constant
from ratchet.storage.records.evaluation import POINTS, SHARE, MetricValue

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


@dataclass(frozen=True)
class AnswerMetricResult:
    """One metric of a model's answers."""

    name: str
    values: list[float] | None
    """Mean over the answers of each row. None if the metric is not a mean of rows (corpus BLEU)."""
    metric: MetricValue
    rows: Sequence[int] | None = None
    """Indices of the rows of `values`. None: all rows."""


def score_answers(
    expected: Sequence[str],
    answers: Sequence[Sequence[str]],
    settings: Evaluate,
    exact_name: str,
    rows: TestRows | None = None,
) -> list[AnswerMetricResult]:
    """Score generated answers, the same number (at least one) for each row; references of further rows are ignored.

    Args:
        expected: references.
        answers: answers by row.
        settings: of which `metrics`, `answer_format` and `seed` are read.
        exact_name: name of the share of exactly right answers (`accuracy` for labels).
        rows: the rows, which `ifeval` and `faithfulness` need; without them these metrics are left out. The metric
            semantic_similarity, which needs a model, is left out always (semantic_similarity.py).

    Raises:
        SettingsError: a regular expression takes too long.
    """
    answers_per_row = len(answers[0])
    texts = [answer for row in answers for answer in row]
    references = [text for text, row in zip(expected[: len(answers)], answers, strict=True) for _ in row]

    def average_rows(
        name: str, values: Sequence[float], better: Better, unit: str = SHARE, scored: Sequence[int] | None = None
    ) -> AnswerMetricResult:
        # Several answers to a row count as one sample with a more precise score.
        means = [sum(values[i : i + answers_per_row]) / answers_per_row for i in range(0, len(values), answers_per_row)]
        return AnswerMetricResult(name, means, mean_score_metric(means, better, unit), scored)

    matches = [float(text.strip() == reference.strip()) for text, reference in zip(texts, references, strict=True)]
    results = [average_rows(exact_name, matches, "higher")]
    for name in settings.metrics:
        if name == "bleu":
            # The mean of sentence BLEU, which can be paired by row, and corpus BLEU, which papers report.
            sentences, corpus = compute_bleu(texts, references, answers_per_row, settings.seed)
            results += [
                average_rows("bleu", sentences, "higher", POINTS), AnswerMetricResult("corpus_bleu", None, corpus)
            ]  # fmt: skip
        elif name == "token_f1":
            results.append(average_rows(name, score_token_f1(texts, references), "higher"))
        elif name == "rouge":
            scores = score_rouge(texts, references)
            results += [average_rows(kind, values, "higher") for kind, values in scores.items()]
        elif name == "chrf":
            results.append(average_rows(name, score_chrf(texts, references), "higher", POINTS))
        elif name == "length":
            characters, words = ([float(len(part)) for part in parts] for parts in (texts, [t.split() for t in texts]))
            results.append(average_rows("length_characters", characters, "unknown", "characters"))
            results.append(average_rows("length_words", words, "unknown", "words"))
        elif name == "ifeval":
            results += _score_instructions(answers, rows, average_rows) if rows is not None else []
        elif name == "faithfulness":
            contexts = [] if rows is None else [rows.source_text(i) for i in range(len(answers)) for _ in answers[i]]
            support = score_context_support(texts, contexts) if contexts else {}
            results += [average_rows(kind, values, "higher") for kind, values in support.items()]
        elif name == "semantic_similarity":
            continue
        else:
            metric = load_extension("ratchet.metrics", name, "evaluate.metrics")
            values = compute_extension_scores(metric, name, "evaluate.metrics", texts, references)
            results.append(average_rows(name, values, "higher", EXTENSION_UNIT))
    if settings.answer_format is not None:
        try:
            valid = score_format_validity(texts, settings.answer_format, PATTERN_TIMEOUT_S)
        except TimeoutError as error:
            raise SettingsError(f"evaluate.answer_format: {error}; avoid a repetition inside a repetition") from None
        results.append(average_rows("format_validity", valid, "higher"))
    return results


def _score_instructions(
    answers: Sequence[Sequence[str]], rows: TestRows, average_rows: Callable[..., AnswerMetricResult]
) -> list[AnswerMetricResult]:
    """Score the rows with instructions: all of a row followed (prompt level), and the share of instructions."""
    read = [read_instructions(rows.ids[i], rows.fields[i]) for i in range(len(answers))]
    scored = [i for i, row in enumerate(read) if row is not None]
    if not scored:  # a part of the test rows may have none
        return []
    instructions = [row for row, texts in zip(read, answers, strict=True) if row is not None for _ in texts]
    prompts = [extract_text(rows.conversations[i].context.messages[-1]) for i in scored for _ in answers[i]]
    followed = check_instructions(instructions, prompts, [text for i in scored for text in answers[i]])
    results = []
    for kind in ("strict", "loose"):
        flags: list[tuple[bool, ...]] = [getattr(answer, kind) for answer in followed]
        prompt_level = average_rows(
            f"ifeval_prompt_{kind}", [float(all(row)) for row in flags], "higher", scored=scored
        )
        share = bootstrap_metric(
            lambda rows: sum(map(sum, rows)) / sum(map(len, rows)), flags, "higher", "share of instructions"
        )
        results += [prompt_level, AnswerMetricResult(f"ifeval_instruction_{kind}", None, share)]
    return results


def score_context_support(answers: Sequence[str], contexts: Sequence[str]) -> dict[str, list[float]]:
    """Compute the shares of words and of pairs of words of each answer that its context has, between 0 and 1.

    It is a lexical measure: an answer in other words is less supported, and one that puts words of the context together
    wrongly is supported. An answer without words has the share 0. A single word counts as its own pair.

    Source: one minus the share of novel n-grams of See, Liu and Manning, "Get To The Point", ACL 2017; for words nearly
    the coverage of Grusky, Naaman and Artzi, "Newsroom", NAACL 2018.
    """
    scores: dict[str, list[float]] = {"faithfulness_words": [], "faithfulness_bigrams": []}
    for answer, context in zip(answers, contexts, strict=True):
        words, known = WORD.findall(answer.lower()), WORD.findall(context.lower())
        for kind, size in (("faithfulness_words", 1), ("faithfulness_bigrams", 1 if len(words) == 1 else 2)):
            grams, others = (list(zip(*(w[k:] for k in range(size)), strict=False)) for w in (words, known))
            available = set(others)
            supported = sum(gram in available for gram in grams)
            scores[kind].append(supported / len(grams) if grams else 0.0)
    return scores


def score_token_f1(answers: Sequence[str], references: Sequence[str]) -> list[float]:
    """Compute F1 of the words that each answer and its reference share, between 0 and 1, as for SQuAD.

    Words are compared in lower case, without ASCII punctuation and without the articles a, an and the. Repeated words
    count as often as they occur. If answer or reference has no words, the score is 1 if neither has any, else 0.

    Source: Rajpurkar, Zhang, Lopyrev and Liang, "SQuAD: 100,000+ Questions for Machine Comprehension of Text", EMNLP
    2016; answers without words: Rajpurkar, Jia and Liang, "Know What You Don't Know", ACL 2018, evaluation script of
    SQuAD 2.0.
    """
    scores = []
    for texts in zip(answers, references, strict=True):
        answer, reference = (ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split() for text in texts)
        shared = sum((Counter(answer) & Counter(reference)).values())
        both = answer and reference
        scores.append(2 * shared / (len(answer) + len(reference)) if both else float(answer == reference))
    return scores


def compute_bleu(
    answers: Sequence[str], references: Sequence[str], answers_per_row: int, seed: int
) -> tuple[list[float], MetricValue]:
    """Compute BLEU in points, 0 to 100: of each answer, and of all answers as one corpus with its 95 % interval.

    Sentence BLEU omits n-gram orders that an answer is too short for (effective order) and smooths exponentially, as
    sacrebleu does for sentences. Corpus BLEU uses sacrebleu's defaults (tokenizer 13a, exponential smoothing). The
    interval resamples rows with all their answers.

    Source: Papineni et al., ACL 2002; Post, "A Call for Clarity in Reporting BLEU Scores", WMT 2018; interval: Koehn,
    "Statistical Significance Tests for Machine Translation Evaluation", EMNLP 2004.
    """
    import sacrebleu

    def corpus_bleu(counts: Any) -> float:
        *grams, answer_length, reference_length = (int(x) for x in counts)
        half = len(grams) // 2  # matching n-grams, and all n-grams
        score = sacrebleu.BLEU.compute_bleu(
            grams[:half], grams[half:], answer_length, reference_length, smooth_method="exp"
        )
        return float(score.score)

    scorer = sacrebleu.BLEU(effective_order=True)
    scores = [scorer.sentence_score(a, [b]) for a, b in zip(answers, references, strict=True)]
    counts = np.array(
        [[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores], dtype=np.int64
    )
    rows = counts.reshape(-1, answers_per_row, counts.shape[1]).sum(axis=1)
    rng = np.random.default_rng(seed)
    resampled = [corpus_bleu(rows[rng.integers(0, len(rows), len(rows))].sum(axis=0)) for _ in range(BLEU_RESAMPLES)]
    low, high = np.percentile(resampled, [2.5, 97.5]).tolist()
    corpus = aggregate_metric(corpus_bleu(rows.sum(axis=0)), len(rows), (low, high), "higher", POINTS)
    return [score.score for score in scores], corpus


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


def score_chrf(answers: Sequence[str], references: Sequence[str]) -> list[float]:
    """Compute chrF in points, 0 to 100: F-score of shared character n-grams up to six, with recall counted twice.

    Source: Popovic, "chrF: character n-gram F-score for automatic MT evaluation", WMT 2015.
    """
    import sacrebleu

    scorer = sacrebleu.CHRF()
    return [scorer.sentence_score(a, [b]).score for a, b in zip(answers, references, strict=True)]


def score_format_validity(answers: Sequence[str], answer_format: str, timeout_s: float) -> list[float]:
    """Return 1 for each valid answer, else 0, ignoring leading and trailing whitespace.

    `answer_format` is `json` (RFC 8259), or a regular expression that matches the whole answer. It runs in its own
    process, because nested repetitions can take years on some answers, and only ending the process stops them. Raises
    TimeoutError if it takes more than `timeout_s` on all answers.
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

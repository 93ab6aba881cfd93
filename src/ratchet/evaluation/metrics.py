"""Figures of an evaluation: means, proportions and perplexities, and what is said of labels (through scikit-learn)."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ratchet.evaluation.metric_modules.figures import (
    mean_loss_metric,
    mean_score_metric,
    perplexity_metric,
    proportion_metric,
)
from ratchet.storage.records.evaluation import MetricValue

__all__ = [
    "OTHER",
    "ConfusionMatrix",
    "compute_label_metrics",
    "majority_share",
    "mean_average_precision",
    "mean_loss_metric",
    "mean_score_metric",
    "perplexity_metric",
    "precision_recall_curves",
    "proportion_metric",
    "score_classes",
]

OTHER = "(something else)"
"""Column of the confusion matrix for answers that are no label."""

RESAMPLES = 1000
"""Of the rows, for the intervals of figures that are no mean; percentiles of so many move in the third digit."""

WEIGHTS_AT_ONCE = 2**23
"""Of rows in resamples that are computed together: 64 MiB, and some copies."""

POINTS = 200
"""Of a precision-recall curve, at most: it is drawn, and its average precision is computed from all of them."""

LABEL_UNIT = "share, over labels"


@dataclass(frozen=True)
class ConfusionMatrix:
    """Rows: true labels; columns: the same labels, then OTHER."""

    labels: tuple[str, ...]
    matrix: tuple[tuple[int, ...], ...]


def majority_share(expected: Sequence[str]) -> float:
    """Share of the most frequent label: what always giving the same answer gets right."""
    return max(Counter(expected).values()) / len(expected)


def score_classes(
    expected: Sequence[str], answered: Sequence[str]
) -> tuple[Mapping[str, dict[str, float]], ConfusionMatrix]:
    """Precision, recall, F1 and support of each true label, and the confusion matrix."""
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    labels = sorted(set(expected))
    given = _replace_unknown_answers(labels, answered)
    columns = precision_recall_fscore_support(expected, given, labels=labels, zero_division=0.0)
    named = {
        label: {"precision": float(p), "recall": float(r), "f1": float(f), "support": float(s)}
        for label, p, r, f, s in zip(labels, *columns, strict=True)
    }
    matrix = confusion_matrix(expected, given, labels=[*labels, OTHER])[: len(labels)]
    return named, ConfusionMatrix(tuple(labels), tuple(tuple(int(x) for x in row) for row in matrix))


def _replace_unknown_answers(labels: Sequence[str], answered: Sequence[str]) -> list[str]:
    return [answer if answer in set(labels) else OTHER for answer in answered]


def compute_label_metrics(expected: Sequence[str], answered: Sequence[str], seed: int) -> dict[str, MetricValue]:
    """Macro F1, micro F1 and balanced accuracy over the true labels, with bootstrap intervals (rows are drawn).

    They are no means of rows: macro F1 counts a rare label as much as a frequent one. In a resample, labels that were
    not drawn are left out, as labels that no row has are left out of the figures themselves.
    """
    labels = sorted(set(expected))
    place = {label: i for i, label in enumerate(labels)}
    true = np.array([place[label] for label in expected])
    given = np.array([place.get(answer, len(labels)) for answer in answered])
    rng = np.random.default_rng(seed)
    drawn = (rng.integers(0, len(true), len(true)) for _ in range(RESAMPLES))  # one by one: rows may be millions
    samples = [_compute_label_values(true[rows], given[rows], len(labels)) for rows in drawn]
    values = _compute_label_values(true, given, len(labels))
    return {
        name: _bootstrap_metric(value, len(true), [sample[name] for sample in samples], LABEL_UNIT)
        for name, value in values.items()
    }


def _compute_label_values(true: Any, given: Any, labels: int) -> dict[str, float]:
    """The figures, from label numbers of each row; `labels` is the number of an answer that is no label."""
    support = np.bincount(true, minlength=labels)
    answers = np.bincount(given, minlength=labels + 1)[:labels]
    right = np.bincount(true[true == given], minlength=labels)
    there = support > 0
    f1 = 2 * right[there] / (support[there] + answers[there])  # = 2PR / (P + R); the support makes it defined
    return {
        "macro_f1": float(f1.mean()),
        "micro_f1": float(2 * right.sum() / (support.sum() + answers[there].sum())),
        "balanced_accuracy": float((right[there] / support[there]).mean()),
    }


def _bootstrap_metric(value: float, n: int, resampled: Sequence[float], unit: str) -> MetricValue:
    """With the percentile interval of the bootstrap (Efron and Tibshirani, 1993, chapter 13).

    At 0 and 1 every resample is the same, which is no certainty: there Wilson's interval of a share is given.
    """
    low, high = np.percentile(resampled, [2.5, 97.5])
    if low == high and value in (0.0, 1.0):
        at_end = proportion_metric([value] * n)
        low, high = at_end.low, at_end.high
    return MetricValue(
        value=value,
        n=n,
        low=min(value, float(low)),
        high=max(value, float(high)),
        better="higher",
        unit=unit,
        kind="figure",
    )


def precision_recall_curves(
    labels: Sequence[str], expected: Sequence[str], label_scores: Sequence[Sequence[float]]
) -> dict[str, dict[str, Any]]:
    """Precision and recall of each true label against all others, over every threshold.

    A row is ranked by the odds of the label among all labels, so that rows whose labels are all unlikely (long labels,
    long prompts) are ranked like others. Labels that no row has are left out.

    Args:
        labels: every label, in the order of the scores.
        expected: the true label of each row.
        label_scores: log-probability (nats) of each label as the answer to each row.

    Returns:
        Per label: precision and recall (at most POINTS of each, from the lowest threshold on) and average_precision;
        of scores that are not finite no points and NaN.
    """
    from sklearn.metrics import average_precision_score, precision_recall_curve

    odds = _log_odds(label_scores)
    found: dict[str, dict[str, Any]] = {}
    for i, label in enumerate(labels):
        truth = np.array([answer == label for answer in expected])
        if not truth.any():
            continue
        if not np.isfinite(odds[:, i]).all():
            found[label] = {"precision": [], "recall": [], "average_precision": math.nan}
            continue
        precision, recall, _ = precision_recall_curve(truth, odds[:, i], drop_intermediate=True)
        shown = np.unique(np.linspace(0, len(precision) - 1, min(POINTS, len(precision))).round().astype(int))
        found[label] = {
            "precision": precision[shown].tolist(),
            "recall": recall[shown].tolist(),
            "average_precision": float(average_precision_score(truth, odds[:, i])),
        }
    return found


def _log_odds(label_scores: Sequence[Sequence[float]]) -> Any:
    """(rows, labels): log of p / (1 - p), p being a label's share of all labels' probability; never saturates."""
    scores = np.asarray(label_scores, dtype=np.float64)
    if scores.shape[1] == 1:
        return np.zeros_like(scores)
    columns = []
    for i in range(scores.shape[1]):
        others = np.delete(scores, i, axis=1)
        most = others.max(axis=1)
        with np.errstate(invalid="ignore"):  # infinite scores give NaN, which is told
            columns.append(scores[:, i] - most - np.log(np.exp(others - most[:, None]).sum(axis=1)))
    return np.stack(columns, axis=1)


def mean_average_precision(
    labels: Sequence[str], expected: Sequence[str], label_scores: Sequence[Sequence[float]], seed: int
) -> MetricValue:
    """Mean over labels of their average precision (one against the rest), with a bootstrap interval."""
    odds, rng = _log_odds(label_scores), np.random.default_rng(seed)
    n, resamples = len(expected), RESAMPLES // 4
    truths = {i: np.array([answer == label for answer in expected], dtype=np.float64) for i, label in enumerate(labels)}
    truths = {i: truth for i, truth in truths.items() if truth.any()}
    means = _mean_precision(odds, truths, np.ones((1, n))).tolist()  # the data themselves
    at_once = max(1, WEIGHTS_AT_ONCE // n)
    for start in range(0, resamples, at_once):
        drawn = rng.multinomial(n, np.full(n, 1 / n), size=min(at_once, resamples - start))
        means += _mean_precision(odds, truths, drawn.astype(np.float64)).tolist()
    if not np.isfinite(odds).all():
        means = [math.nan] * len(means)
    return _bootstrap_metric(means[0], n, means[1:], "share, mean of labels")


def _mean_precision(odds: Any, truths: Mapping[int, Any], weights: Any) -> Any:
    """Mean over labels of their average precision, for each line of row weights."""
    sums, counts = np.zeros(len(weights)), np.zeros(len(weights))
    for i, truth in truths.items():
        values, there = _weighted_precision(odds[:, i], truth, weights)
        sums += values
        counts += there
    return sums / counts


def _weighted_precision(odds: Any, truth: Any, weights: Any) -> tuple[Any, Any]:
    """Average precision of one label for each line of row weights, and whether the line has a row of that label.

    AP = sum over thresholds of (R_k - R_{k-1}) P_k, as scikit-learn defines it; rows with equal odds share a threshold.
    """
    order = np.argsort(-odds, kind="stable")
    last = np.append(np.diff(odds[order]) != 0, True)  # of each group of equal odds
    right = np.cumsum(weights[:, order] * truth[order], axis=1)[:, last]
    all_rows = np.cumsum(weights[:, order], axis=1)[:, last]
    there = right[:, -1] > 0
    precision = right / np.maximum(all_rows, 1)
    gained = np.diff(right, axis=1, prepend=0.0)
    return (gained * precision).sum(axis=1) / np.maximum(right[:, -1], 1), there

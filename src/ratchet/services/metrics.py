"""Figures from per-sample scores, with intervals; per-class results through scikit-learn."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ratchet.records_evaluation import Metric

Z95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""

OTHER = "(something else)"
"""Column of the confusion matrix for answers that are no label."""


def proportion(hits: Sequence[float]) -> Metric:
    """Share of ones, with Wilson's 95 % interval (E. B. Wilson, JASA 22, 1927)."""
    n, p = len(hits), sum(hits) / len(hits)
    middle = (p + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n**2))
    low, high = min(p, max(0.0, middle - half)), max(p, min(1.0, middle + half))  # rounding: n of n must reach 1
    return Metric(value=p, n=n, low=low, high=high, better="higher", unit="proportion")


def mean_loss(losses: Sequence[float]) -> Metric:
    """Mean of per-row losses, with a normal 95 % interval."""
    n, mean = len(losses), sum(losses) / len(losses)
    spread = math.sqrt(sum((x - mean) ** 2 for x in losses) / max(1, n - 1))
    half = Z95 * spread / math.sqrt(n)
    return Metric(
        value=mean, n=n, low=mean - half, high=mean + half, better="lower", unit="nats per token, mean of rows"
    )


def perplexity(nll: Sequence[float], tokens: Sequence[int]) -> Metric:
    """exp(all nats / all tokens), with a 95 % interval of the ratio by its linearisation (rows are the units)."""
    n, total = len(nll), sum(tokens)
    ratio = sum(nll) / total
    residual = sum((x - ratio * t) ** 2 for x, t in zip(nll, tokens, strict=True))
    half = Z95 * math.sqrt(residual * n / max(1, n - 1)) / total
    return Metric(
        value=math.exp(ratio), n=n, low=math.exp(ratio - half), high=math.exp(ratio + half), better="lower", unit="1"
    )


def mean_score(values: Sequence[float], higher_is_better: bool) -> Metric:
    """Mean of any per-sample score; a proportion when all are 0 or 1."""
    if higher_is_better and all(value in (0.0, 1.0) for value in values):
        return proportion(values)
    plain = mean_loss(values)
    better = "higher" if higher_is_better else "lower"
    return plain.model_copy(update={"better": better, "unit": "mean of samples"})


@dataclass(frozen=True)
class Confusion:
    """Rows: true labels; columns: the same labels, then OTHER."""

    labels: tuple[str, ...]
    matrix: tuple[tuple[int, ...], ...]


def per_class(expected: Sequence[str], answered: Sequence[str]) -> tuple[Mapping[str, dict[str, float]], Confusion]:
    """Precision, recall, F1 and support of each true label, and the confusion matrix."""
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    labels = sorted(set(expected))
    given = [answer if answer in set(labels) else OTHER for answer in answered]
    columns = precision_recall_fscore_support(expected, given, labels=labels, zero_division=0.0)
    named = {
        label: {"precision": float(p), "recall": float(r), "f1": float(f), "support": float(s)}
        for label, p, r, f, s in zip(labels, *columns, strict=True)
    }
    matrix = confusion_matrix(expected, given, labels=[*labels, OTHER])[: len(labels)]
    return named, Confusion(tuple(labels), tuple(tuple(int(x) for x in row) for row in matrix))

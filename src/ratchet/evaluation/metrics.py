"""Metrics from per-sample scores with 95 % intervals. Sums are exact (math.fsum), so sample order does not matter."""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ratchet.quality_gate import paired_test
from ratchet.quality_gate.paired_test import PairedScores, PairedTestPlan
from ratchet.quality_gate.statistics import wilson_bounds
from ratchet.storage.records.evaluation import POINTS, SHARE, MetricValue

Better = Literal["higher", "lower", "unknown"]

Z95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""
MAX_EXPONENT = math.log(1.7e308)
"""exp overflows beyond this exponent; perplexities with a larger exponent are reported as infinite."""
METRIC_RESAMPLES = 200
"""Number of resamples of `bootstrap_metric`; some metrics (BLEU of a corpus) take a second per resample."""
LABEL_RESAMPLES = 1000
"""Number of resamples of rows for label metrics; their percentiles are accurate to about the third digit. Mean average
precision uses a quarter of this number."""
MAX_WEIGHTS_PER_CHUNK = 2**23
"""Maximum number of row weights of resamples that are computed together; these need 64 MiB, plus some copies."""
MAX_CURVE_POINTS = 200
"""Maximum number of points of a precision-recall curve that are drawn; average precision uses all points."""
LABEL_UNIT = "share, over labels"
CALIBRATION_UNIT = "difference of shares, mean of rows"
CALIBRATION_BINS = 10
"""Number of equally wide bins of confidence (C. Guo et al., ICML 2017)."""

OTHER = "(something else)"
"""Column of the confusion matrix for answers that are not a label."""


def proportion_metric(hits: Sequence[float]) -> MetricValue:
    """Compute the share of ones with Wilson's 95 % interval (E. B. Wilson, JASA 22, 1927)."""
    n, p = len(hits), math.fsum(hits) / len(hits)
    middle = (p + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n**2))
    low, high = min(p, max(0.0, middle - half)), max(p, min(1.0, middle + half))  # In spite of rounding, n of n is 1.
    return MetricValue(value=p, n=n, low=low, high=high, better="higher", unit="proportion")


def mean_metric(values: Sequence[float], better: Better, unit: str) -> MetricValue:
    """Compute the mean with a normal 95 % interval. A NaN makes the mean NaN: no value is left out."""
    n, middle = len(values), math.fsum(values) / len(values)
    spread = math.sqrt(math.fsum((x - middle) ** 2 for x in values) / max(1, n - 1))
    half = Z95 * spread / math.sqrt(n)
    return MetricValue(value=middle, n=n, low=middle - half, high=middle + half, better=better, unit=unit)


def mean_loss_metric(losses: Sequence[float]) -> MetricValue:
    """Compute the mean of per-row losses in nats per token."""
    return mean_metric(losses, "lower", "nats per token, mean of rows")


def mean_score_metric(values: Sequence[float], better: Better, unit: str = "mean of samples") -> MetricValue:
    """Compute the mean of per-sample scores; a proportion if all are 0 or 1 and 1 is the best possible score."""
    if better == "higher" and unit != POINTS and all(value in (0.0, 1.0) for value in values):
        return proportion_metric(values)
    metric = mean_metric(values, better, unit)
    if unit == SHARE:
        return metric.model_copy(update={"low": max(0.0, metric.low), "high": min(1.0, metric.high)})
    return metric


def perplexity_metric(nll: Sequence[float], tokens: Sequence[float]) -> MetricValue:
    """Compute exp(all nats / all tokens) with a 95 % interval of the ratio by the delta method over samples.

    `nll` is the negative log-likelihood in nats of each whole sample, `tokens` its number of tokens (or of words or
    bytes).
    """
    n, total = len(nll), math.fsum(tokens)
    ratio = math.fsum(nll) / total
    residual = math.fsum((x - ratio * t) ** 2 for x, t in zip(nll, tokens, strict=True))
    half = Z95 * math.sqrt(residual * n / max(1, n - 1)) / total
    value, low, high = _saturating_exp(ratio), _saturating_exp(ratio - half), _saturating_exp(ratio + half)
    return MetricValue(value=value, n=n, low=low, high=high, better="lower", unit="1", kind="perplexity")


def _saturating_exp(x: float) -> float:
    return math.inf if x > MAX_EXPONENT else math.exp(x)


def bootstrap_metric(
    compute: Callable[[Sequence[Any]], float], samples: Sequence[Any], better: Better, unit: str
) -> MetricValue:
    """Compute a metric of all samples together, with the percentile interval of a seeded bootstrap.

    Source: Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13.
    """
    value, rng = float(compute(samples)), random.Random(0)
    resampled = sorted(float(compute(rng.choices(samples, k=len(samples)))) for _ in range(METRIC_RESAMPLES))
    low, high = resampled[round(0.025 * METRIC_RESAMPLES)], resampled[round(0.975 * METRIC_RESAMPLES) - 1]
    return aggregate_metric(value, len(samples), (low, high), better, unit)


def make_interval_plan(seed: int) -> PairedTestPlan:
    """Return the plan of a paired comparison of which only difference and 95 % interval are used.

    Each bound has the confidence 97.5 %. Power and discordance affect only sample sizes.
    """
    return PairedTestPlan(confidence=0.975, power=0.8, discordance=0.1, resamples=9999, seed=seed)


def paired_difference_metric(
    new: Sequence[float], old: Sequence[float], groups: Sequence[str | None], unit: str, seed: int
) -> MetricValue:
    """Compute the mean difference of two scores of the same rows, with the interval of the gate's paired test."""
    result = paired_test.compare(PairedScores(new, old, "higher", groups=groups), 0.0, make_interval_plan(seed))
    return aggregate_metric(result.difference, len(new), (result.low, result.high), "higher", f"difference, {unit}")


def win_rate_metric(scores: Sequence[float], groups: Sequence[str], seed: int) -> MetricValue | None:
    """Compute the mean of scores of pairs: 1 for a win, 0 for a loss, 0.5 for a tie. None if there are none."""
    if (estimate := _mean_share(scores, groups, seed)) is None:
        return None
    value, low, high = estimate
    unit = "share of pairs, a tie is half"
    return MetricValue(value=value, n=len(scores), low=low, high=high, better="higher", unit=unit, chance=0.5)


def share_beyond_half(hits: Sequence[float], groups: Sequence[str], noun: str, seed: int) -> MetricValue | None:
    """Compute the share of ones minus 1/2, a measure of bias; `noun` names what is counted. None if there are none."""
    if (estimate := _mean_share(hits, groups, seed)) is None:
        return None
    value, low, high = (share - 0.5 for share in estimate)
    unit = f"share of {noun} beyond 1/2"
    return MetricValue(value=value, n=len(hits), low=low, high=high, better="unknown", unit=unit)


def _mean_share(shares: Sequence[float], groups: Sequence[str], seed: int) -> tuple[float, float, float] | None:
    """Compute the mean of shares of a pair with its interval: the paired interval of share and rest, scaled to 0..1.

    If the shares of all groups are equal, a resample cannot differ, so the interval is Wilson's of as many samples.
    """
    if not shares:
        return None
    pairs = PairedScores(shares, [1 - share for share in shares], "higher", groups=groups)
    result = paired_test.compare(pairs, 0.0, make_interval_plan(seed))
    value, low, high = ((1 + estimate) / 2 for estimate in (result.difference, result.low, result.high))
    if low == high:
        count = result.groups or result.n
        low, high = wilson_bounds(value * count, count, 0.975)
    return value, max(0.0, low), min(1.0, high)


def cohen_kappa(pairs: Sequence[tuple[str, str]], seed: int) -> MetricValue | None:
    """Compute Cohen's kappa of two raters' categories, with a bootstrap interval over the samples.

    1 is full agreement, 0 that of chance. None if there are no samples, or if chance alone gives full agreement.

    Source: J. Cohen, Educational and Psychological Measurement 20, 1960, 37-46.

    Args:
        pairs: both raters' categories of each sample.
        seed: seed of the bootstrap.
    """
    categories = sorted({category for pair in pairs for category in pair})
    size, n = len(categories), len(pairs)
    cells = np.zeros(size * size)
    for first, second in pairs:
        cells[categories.index(first) * size + categories.index(second)] += 1

    def compute(counts: Any) -> Any:
        tables = counts.reshape(-1, size, size) / n
        agreement = np.trace(tables, axis1=1, axis2=2)
        chance = (tables.sum(axis=1) * tables.sum(axis=2)).sum(axis=1)
        return np.divide(agreement - chance, 1 - chance, out=np.full(len(tables), math.nan), where=chance < 1)

    if size < 2:
        return None
    resampled = compute(np.random.default_rng(seed).multinomial(n, cells / n, LABEL_RESAMPLES).astype(np.float64))
    return _agreement_metric(float(compute(cells)[0]), resampled, n)


def fleiss_kappa(ratings: Sequence[Sequence[str]], seed: int) -> MetricValue | None:
    """Compute Fleiss' kappa of several raters' categories, with a bootstrap interval over the samples.

    Samples with one rating are left out. If all samples have the same number of ratings, this is the coefficient of
    1971; the formula for different numbers weighs the agreement of each sample equally, and each rating equally for
    the agreement of chance. None if there are no such samples, or if chance alone gives full agreement.

    Source: J. L. Fleiss, Psychological Bulletin 76, 1971, 378-382.

    Args:
        ratings: the categories of each sample, in any order.
        seed: seed of the bootstrap.
    """
    rated = [sample for sample in ratings if len(sample) > 1]
    categories = sorted({category for sample in rated for category in sample})
    if len(categories) < 2:
        return None
    counts = np.array([[sample.count(category) for category in categories] for sample in rated], dtype=np.float64)
    raters = counts.sum(axis=1)
    agreements = (counts * (counts - 1)).sum(axis=1) / (raters * (raters - 1))

    def compute(samples: Any) -> float:
        shares = counts[samples].sum(axis=0) / raters[samples].sum()
        chance = float((shares**2).sum())
        return (float(agreements[samples].mean()) - chance) / (1 - chance) if chance < 1 else math.nan

    rng = np.random.default_rng(seed)
    resampled = [compute(rng.integers(0, len(rated), len(rated))) for _ in range(LABEL_RESAMPLES)]
    return _agreement_metric(compute(np.arange(len(rated))), np.array(resampled), len(rated))


def _agreement_metric(value: float, resampled: Any, n: int) -> MetricValue:
    """Build a coefficient of agreement with the percentile interval of its bootstrap, without undefined resamples."""
    low, high = np.percentile(resampled[np.isfinite(resampled)], [2.5, 97.5]).tolist()
    return aggregate_metric(value, n, (low, high), "higher", "1 is agreement, 0 chance")


def krippendorff_alpha(ratings: Sequence[Sequence[float]], seed: int) -> MetricValue | None:
    """Compute Krippendorff's alpha of ratings on an interval scale, with a bootstrap interval over the rated units.

    1 is full agreement, 0 that of chance. Units with one rating are left out. None if there are fewer than two units,
    or all ratings are equal, because alpha is then undefined.

    Source: K. Krippendorff, "Computing Krippendorff's Alpha-Reliability", 2011.

    Args:
        ratings: the ratings of each unit, in any order.
        seed: seed of the bootstrap.
    """
    units = [np.asarray(unit, dtype=np.float64) for unit in ratings if len(unit) > 1]
    counts = np.array([len(unit) for unit in units], dtype=np.float64)
    sums = np.array([unit.sum() for unit in units])
    squares = np.array([(unit**2).sum() for unit in units])

    def compute(rows: Any) -> float:
        m, total, square = counts[rows], sums[rows], squares[rows]
        n = m.sum()
        observed = ((m * square - total**2) / (m - 1)).sum() / n
        expected = (n * square.sum() - total.sum() ** 2) / (n * (n - 1))
        return float(1 - observed / expected) if expected > 0 else math.nan

    if len(units) < 2 or not math.isfinite(value := compute(np.arange(len(units)))):
        return None
    rng = np.random.default_rng(seed)
    resampled = [compute(rng.integers(0, len(units), len(units))) for _ in range(LABEL_RESAMPLES)]
    return _agreement_metric(value, np.array(resampled), len(units))


def aggregate_metric(value: float, n: int, interval: tuple[float, float], better: Better, unit: str) -> MetricValue:
    """Build a metric of all samples together; the interval is widened if it does not contain the value."""
    low, high = min(value, interval[0]), max(value, interval[1])
    return MetricValue(value=value, n=n, low=low, high=high, better=better, unit=unit, kind="aggregate")


@dataclass(frozen=True)
class ConfusionMatrix:
    """Counts of answers. Rows: true labels. Columns: the same labels, then OTHER."""

    labels: tuple[str, ...]
    matrix: tuple[tuple[int, ...], ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return (*self.labels, OTHER)


@dataclass(frozen=True)
class CalibrationBin:
    """Rows whose likeliest labels have similar confidence."""

    confidence: float
    """Mean probability of the likeliest label among all labels."""
    accuracy: float
    """Share of the rows in which the likeliest label is the true one."""
    rows: int


def majority_share(expected: Sequence[str]) -> float:
    """Compute the share of the most frequent label: the accuracy of always giving the same answer."""
    return max(Counter(expected).values()) / len(expected)


def score_classes(
    expected: Sequence[str], answered: Sequence[str]
) -> tuple[Mapping[str, dict[str, float]], ConfusionMatrix]:
    """Compute precision, recall, F1 and support of each true label, and the confusion matrix."""
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    labels = sorted(set(expected))
    answers = [answer if answer in set(labels) else OTHER for answer in answered]
    columns = precision_recall_fscore_support(expected, answers, labels=labels, zero_division=0.0)
    by_label = {
        label: {"precision": float(p), "recall": float(r), "f1": float(f), "support": float(s)}
        for label, p, r, f, s in zip(labels, *columns, strict=True)
    }
    matrix = confusion_matrix(expected, answers, labels=[*labels, OTHER])[: len(labels)]
    return by_label, ConfusionMatrix(tuple(labels), tuple(tuple(int(x) for x in row) for row in matrix))


def compute_label_metrics(expected: Sequence[str], answered: Sequence[str], seed: int) -> dict[str, MetricValue]:
    """Compute macro F1, micro F1 and balanced accuracy over the true labels, with bootstrap intervals over rows.

    These metrics are not means of rows: macro F1 weighs a rare label like a frequent one. A resample leaves out labels
    that were not drawn, as the metrics leave out labels without rows.
    """
    labels = sorted(set(expected))
    index = {label: i for i, label in enumerate(labels)}
    true = np.array([index[label] for label in expected])
    answer_labels = np.array([index.get(answer, len(labels)) for answer in answered])
    rng = np.random.default_rng(seed)
    draws = (rng.integers(0, len(true), len(true)) for _ in range(LABEL_RESAMPLES))  # Lazily, to save memory.
    resampled = [_compute_label_values(true[rows], answer_labels[rows], len(labels)) for rows in draws]
    values = _compute_label_values(true, answer_labels, len(labels))
    return {
        name: _with_bootstrap_interval(value, len(true), [resample[name] for resample in resampled], LABEL_UNIT)
        for name, value in values.items()
    }


def _compute_label_values(true: Any, answered: Any, labels: int) -> dict[str, float]:
    """Compute the metrics from label indices of each row; index `labels` stands for an answer that is not a label."""
    support = np.bincount(true, minlength=labels)
    answers = np.bincount(answered, minlength=labels + 1)[:labels]
    right = np.bincount(true[true == answered], minlength=labels)
    has_rows = support > 0
    f1 = 2 * right[has_rows] / (support[has_rows] + answers[has_rows])  # = 2PR / (P + R), always defined
    return {
        "macro_f1": float(f1.mean()),
        "micro_f1": float(2 * right.sum() / (support.sum() + answers[has_rows].sum())),
        "balanced_accuracy": float((right[has_rows] / support[has_rows]).mean()),
    }


def _with_bootstrap_interval(value: float, n: int, resampled: Sequence[float], unit: str) -> MetricValue:
    """Build a metric with the percentile interval of the bootstrap (Efron and Tibshirani, 1993, chapter 13).

    At 0 and 1 all resamples are equal, although the value is uncertain: there, Wilson's interval is used.
    """
    low, high = np.percentile(resampled, [2.5, 97.5]).tolist()
    if low == high and value in (0.0, 1.0):
        wilson = proportion_metric([value] * n)
        low, high = wilson.low, wilson.high
    return aggregate_metric(value, n, (low, high), "higher", unit)


def precision_recall_curves(
    labels: Sequence[str], expected: Sequence[str], label_scores: Sequence[Sequence[float]]
) -> dict[str, dict[str, Any]]:
    """Compute precision and recall of each true label against all others, over every threshold.

    Rows are ranked by the odds of the label among all labels, so that rows in which all labels are unlikely (long
    labels, long prompts) are comparable with others. Labels without rows are left out. `label_scores` are
    log-probabilities in nats of each label as the answer, [rows, labels].

    The result has, by label, precision and recall (at most MAX_CURVE_POINTS values each, from the lowest threshold) and
    average_precision. Scores that are not finite give no points and NaN.
    """
    from sklearn.metrics import average_precision_score, precision_recall_curve

    odds = _log_odds(label_scores)
    curves: dict[str, dict[str, Any]] = {}
    for i, label in enumerate(labels):
        truth = np.array([answer == label for answer in expected])
        if not truth.any():
            continue
        if not np.isfinite(odds[:, i]).all():
            curves[label] = {"precision": [], "recall": [], "average_precision": math.nan}
            continue
        precision, recall, _ = precision_recall_curve(truth, odds[:, i], drop_intermediate=True)
        points = np.linspace(0, len(precision) - 1, min(MAX_CURVE_POINTS, len(precision)))
        kept = np.unique(points.round().astype(int))
        curves[label] = {
            "precision": precision[kept].tolist(),
            "recall": recall[kept].tolist(),
            "average_precision": float(average_precision_score(truth, odds[:, i])),
        }
    return curves


def measure_calibration(
    labels: Sequence[str], expected: Sequence[str], label_scores: Sequence[Sequence[float]], seed: int
) -> tuple[list[CalibrationBin], MetricValue]:
    """Compare the confidence in the likeliest label with its accuracy, in bins of confidence; empty bins are left out.

    Returns the bins and the expected calibration error, the mean difference between both, weighted by rows, with a
    bootstrap interval. `label_scores` are as in `precision_recall_curves`; scores that are not finite give no bins and
    NaN.
    """
    scores = np.asarray(label_scores, dtype=np.float64)
    n = len(scores)
    if not np.isfinite(scores).all():
        return [], _with_bootstrap_interval(math.nan, n, [math.nan], CALIBRATION_UNIT)
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    confidence = 1 / shares.sum(axis=1)
    likeliest = np.array(labels)[scores.argmax(axis=1)]
    hits = (likeliest == np.array(expected)).astype(np.float64)
    bin_of_row = np.minimum((confidence * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)

    def error(rows: Any) -> float:
        gaps = np.bincount(bin_of_row[rows], weights=(confidence - hits)[rows])
        return float(np.abs(gaps).sum() / n)

    rng = np.random.default_rng(seed)
    resampled = [error(rng.integers(0, n, n)) for _ in range(LABEL_RESAMPLES)]
    metric = _with_bootstrap_interval(error(np.arange(n)), n, resampled, CALIBRATION_UNIT)
    members = [np.flatnonzero(bin_of_row == number) for number in range(CALIBRATION_BINS)]
    bins = [
        CalibrationBin(float(confidence[rows].mean()), float(hits[rows].mean()), len(rows))
        for rows in members
        if len(rows)
    ]
    return bins, metric.model_copy(update={"better": "lower"})


def _log_odds(label_scores: Sequence[Sequence[float]]) -> Any:
    """Compute log(p / (1 - p)) of shape [rows, labels] without overflow; p is a label's share of all labels."""
    scores = np.asarray(label_scores, dtype=np.float64)
    if scores.shape[1] == 1:
        return np.zeros_like(scores)
    columns = []
    for i in range(scores.shape[1]):
        others = np.delete(scores, i, axis=1)
        largest = others.max(axis=1)
        with np.errstate(invalid="ignore"):  # Infinite scores give NaN, which callers report.
            columns.append(scores[:, i] - largest - np.log(np.exp(others - largest[:, None]).sum(axis=1)))
    return np.stack(columns, axis=1)


def mean_average_precision(
    labels: Sequence[str], expected: Sequence[str], label_scores: Sequence[Sequence[float]], seed: int
) -> MetricValue:
    """Compute the mean over labels of average precision (one against the rest), with a bootstrap interval."""
    odds, rng = _log_odds(label_scores), np.random.default_rng(seed)
    n, resamples = len(expected), LABEL_RESAMPLES // 4
    truths = {i: np.array([answer == label for answer in expected], dtype=np.float64) for i, label in enumerate(labels)}
    truths = {i: truth for i, truth in truths.items() if truth.any()}
    means = _mean_precision(odds, truths, np.ones((1, n))).tolist()  # The first entry is the metric itself.
    chunk = max(1, MAX_WEIGHTS_PER_CHUNK // n)
    for start in range(0, resamples, chunk):
        weights = rng.multinomial(n, np.full(n, 1 / n), size=min(chunk, resamples - start))
        means += _mean_precision(odds, truths, weights.astype(np.float64)).tolist()
    if not np.isfinite(odds).all():
        means = [math.nan] * len(means)
    return _with_bootstrap_interval(means[0], n, means[1:], "share, mean of labels")


def _mean_precision(odds: Any, truths: Mapping[int, Any], weights: Any) -> Any:
    """Compute the mean over labels of average precision for each line of row weights."""
    sums, counts = np.zeros(len(weights)), np.zeros(len(weights))
    for i, truth in truths.items():
        values, has_rows = _weighted_precision(odds[:, i], truth, weights)
        sums += values
        counts += has_rows
    return sums / counts


def _weighted_precision(odds: Any, truth: Any, weights: Any) -> tuple[Any, Any]:
    """Compute, for each line of row weights, average precision of one label, and whether any of its rows has weight.

    AP = sum over thresholds of (R_k - R_{k-1}) P_k, as in scikit-learn; rows with equal odds share a threshold.
    """
    order = np.argsort(-odds, kind="stable")
    is_last = np.append(np.diff(odds[order]) != 0, True)  # Last row of each group of equal odds.
    right = np.cumsum(weights[:, order] * truth[order], axis=1)[:, is_last]
    all_rows = np.cumsum(weights[:, order], axis=1)[:, is_last]
    has_rows = right[:, -1] > 0
    precision = right / np.maximum(all_rows, 1)
    gained = np.diff(right, axis=1, prepend=0.0)
    return (gained * precision).sum(axis=1) / np.maximum(right[:, -1], 1), has_rows

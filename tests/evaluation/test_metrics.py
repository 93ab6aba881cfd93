"""Tests metrics and their intervals against scipy and values computed by hand."""

import math
import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from scipy import special, stats
from sklearn.metrics import average_precision_score, f1_score, recall_score

from ratchet.evaluation import metrics
from ratchet.evaluation.metrics import OTHER


@pytest.mark.parametrize(
    ("hits", "n"), [(0, 1), (1, 1), (0, 10), (10, 10), (1, 10), (5, 10), (1, 1000), (770, 1000), (999, 1000), (3, 7)]
)
def test_a_proportion_has_wilsons_interval(hits: int, n: int) -> None:
    found = metrics.proportion_metric([1.0] * hits + [0.0] * (n - hits))
    wilson = stats.binomtest(hits, n).proportion_ci(0.95, method="wilson")
    assert (found.value, found.n) == (pytest.approx(hits / n), n)
    assert found.low == pytest.approx(wilson.low, abs=1e-12)
    assert found.high == pytest.approx(wilson.high, abs=1e-12)
    assert 0.0 <= found.low <= found.value <= found.high <= 1.0
    assert (found.better, found.unit) == ("higher", "proportion")


@pytest.mark.parametrize("n", [2, 5, 400])
def test_a_mean_loss_has_the_normal_interval(n: int) -> None:
    losses = np.random.default_rng(n).exponential(2.0, n)
    found = metrics.mean_loss_metric(losses.tolist())
    low, high = stats.norm.interval(0.95, loc=losses.mean(), scale=stats.sem(losses))
    assert (found.value, found.low, found.high) == pytest.approx((losses.mean(), low, high))
    assert (found.n, found.better, found.kind) == (n, "lower", "mean")


@pytest.mark.parametrize(
    ("nll", "tokens", "expected"),
    [
        ([2.0, 30.0, 0.5], [1, 20, 4], math.exp(32.5 / 25)),  # the mean over rows would give another value
        ([0.0, 0.0], [3, 4], 1.0),
        ([3 * math.log(50), 4 * math.log(50)], [3, 4], 50.0),
        ([2000.0, 1.0], [1, 1], math.inf),
        ([1.0, math.nan], [1, 1], math.nan),
    ],
    ids=["all tokens together", "sure", "guessing", "hopeless", "no number"],
)
def test_perplexity(nll: list[float], tokens: list[int], expected: float) -> None:
    found = metrics.perplexity_metric(nll, tokens)
    assert found.value == pytest.approx(expected, nan_ok=True)
    assert (found.n, found.better, found.kind) == (len(nll), "lower", "perplexity")


def test_perplexity_of_equal_rows_has_no_width() -> None:
    found = metrics.perplexity_metric([3 * math.log(50), 4 * math.log(50)], [3, 4])
    assert (found.low, found.high) == pytest.approx((50.0, 50.0))


def test_the_interval_of_perplexity_is_the_delta_methods() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 30, 200)
    nll = tokens * rng.exponential(1.5, 200)
    found = metrics.perplexity_metric(nll.tolist(), tokens.tolist())
    ratio = nll.sum() / tokens.sum()
    variance = np.var(nll - ratio * tokens, ddof=1) / (200 * tokens.mean() ** 2)
    half = stats.norm.ppf(0.975) * math.sqrt(variance)
    assert found.low == pytest.approx(math.exp(ratio - half), rel=1e-3)
    assert found.high == pytest.approx(math.exp(ratio + half), rel=1e-3)


def test_the_interval_of_perplexity_holds_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    truth, held, rounds = math.exp(1.5), 0, 1000
    for _ in range(rounds):
        tokens = rng.integers(1, 10, 100)
        nll = [float(rng.gamma(2.0 * t, 0.75)) for t in tokens]  # mean 1.5 nats per token
        found = metrics.perplexity_metric(nll, tokens.tolist())
        held += found.low <= truth <= found.high
    assert held / rounds == pytest.approx(0.95, abs=0.03)


def test_scores_of_zero_and_one_with_a_direction_are_a_proportion_and_others_a_mean() -> None:
    assert metrics.mean_score_metric([1.0, 0.0, 1.0], "higher") == metrics.proportion_metric([1.0, 0.0, 1.0])
    mean = metrics.mean_score_metric([0.2, 0.4], "higher")
    assert (mean.value, mean.better, mean.unit) == (pytest.approx(0.3), "higher", "mean of samples")
    assert metrics.mean_score_metric([1.0, 0.0], "lower").better == "lower"
    unknown = metrics.mean_score_metric([1.0, 0.0], "unknown", "words")
    assert (unknown.better, unknown.unit, unknown.value) == ("unknown", "words", 0.5)
    assert math.isnan(metrics.mean_score_metric([0.5, math.nan], "higher").value)


@pytest.mark.parametrize(
    ("expected", "answered", "named", "labels", "matrix"),
    [
        (
            ["cat", "cat", "cat", "dog", "dog", "owl"],
            ["cat", "cat", "dog", "dog", "a dog, I think", "cat"],
            {"cat": (2 / 3, 2 / 3, 2 / 3, 3.0), "dog": (0.5, 0.5, 0.5, 2.0), "owl": (0.0, 0.0, 0.0, 1.0)},
            ("cat", "dog", "owl"),
            ((2, 1, 0, 0), (0, 1, 0, 1), (1, 0, 0, 0)),
        ),
        (
            ["b", "a", "b"], ["b", "a", "b"], {"a": (1.0, 1.0, 1.0, 1.0), "b": (1.0, 1.0, 1.0, 2.0)}, ("a", "b"),
            ((1, 0, 0), (0, 2, 0)),
        ),
        (
            ["a", "b"], ["nonsense", ""], {"a": (0.0, 0.0, 0.0, 1.0), "b": (0.0, 0.0, 0.0, 1.0)}, ("a", "b"),
            ((0, 0, 1), (0, 0, 1)),
        ),
        (["a", "a"], ["a", "x"], {"a": (1.0, 0.5, 2 / 3, 2.0)}, ("a",), ((1, 1),)),
    ],
    ids=["some wrong", "all right", "none is a label", "one label"],
)  # fmt: skip
def test_results_of_each_class_by_hand(
    expected: list[str], answered: list[str], named: dict[str, tuple[float, ...]], labels: Any, matrix: Any
) -> None:
    found, confusion = metrics.score_classes(expected, answered)
    for label, figures in named.items():
        assert found[label] == pytest.approx(dict(zip(("precision", "recall", "f1", "support"), figures, strict=True)))
    assert list(found) == list(named)
    assert (confusion.labels, confusion.matrix) == (labels, matrix)


def test_a_label_with_the_name_of_the_last_column_keeps_its_rows() -> None:
    named, confusion = metrics.score_classes([OTHER, "a"], [OTHER, "nonsense"])
    assert named[OTHER]["recall"] == 1.0
    assert len(confusion.matrix) == len(confusion.labels) == 2


def test_sums_are_those_of_exact_arithmetic() -> None:
    """The values differ greatly in size; a running sum in float64 would lose the small ones."""
    nll, tokens = [1e16, 1.0, 1.0, -1e16, 6.0], [1, 1, 1, 1, 4]
    exact = sum(map(Fraction, nll)) / sum(tokens)
    assert metrics.perplexity_metric(nll, tokens).value == math.exp(exact)
    assert metrics.mean_loss_metric([0.1] * 10).value == float(sum([Fraction(0.1)] * 10) / 10)


def labelled(seed: int, rows: int = 300, labels: str = "abcde") -> tuple[list[str], list[str]]:
    """Draw labels, some of them rare, and answers, some of them wrong and some not a label."""
    rng = random.Random(seed)
    expected = rng.choices(labels, weights=range(1, len(labels) + 1), k=rows)
    return expected, [e if rng.random() < 0.6 else rng.choice([*labels, "nonsense"]) for e in expected]


@pytest.mark.parametrize("seed", range(3))
def test_label_figures_are_scikit_learns(seed: int) -> None:
    expected, answered = labelled(seed)
    found = metrics.compute_label_metrics(expected, answered, seed=0)
    labels = sorted(set(expected))
    for average in ("macro", "micro"):
        right = f1_score(expected, answered, labels=labels, average=average, zero_division=0.0)
        assert found[f"{average}_f1"].value == pytest.approx(right)
    recalls = recall_score(expected, answered, labels=labels, average="macro")
    assert found["balanced_accuracy"].value == pytest.approx(recalls)
    assert {one.kind for one in found.values()} == {"aggregate"}
    assert all(one.low < one.value < one.high for one in found.values())
    assert found == metrics.compute_label_metrics(expected, answered, seed=0)
    assert found != metrics.compute_label_metrics(expected, answered, seed=8)
    assert metrics.majority_share(["a", "b", "a", "c"]) == 0.5


def test_the_interval_of_macro_f1_is_as_wide_as_macro_f1_varies() -> None:
    values = [metrics.compute_label_metrics(*labelled(seed), seed=0)["macro_f1"] for seed in range(100, 160)]
    spread = np.std([one.value for one in values])
    widths = np.mean([(one.high - one.low) / (2 * stats.norm.ppf(0.975)) for one in values])
    assert widths == pytest.approx(spread, rel=0.25)


def scored(rows: int = 200, seed: int = 0) -> tuple[list[str], list[str], np.ndarray]:
    """Draw labels, the true label of each row, and log-probabilities that favor it."""
    rng = np.random.default_rng(seed)
    labels = ["a", "b", "c"]
    truth = rng.integers(0, 3, rows)
    scores = rng.normal(size=(rows, 3)) + 1.5 * np.eye(3)[truth]
    return labels, [labels[i] for i in truth], scores


def test_curves_rank_rows_by_a_label_s_share_of_probability() -> None:
    labels, expected, scores = scored()
    found = metrics.precision_recall_curves(labels, expected, scores.tolist())
    shares = special.softmax(scores, axis=1)
    for i, label in enumerate(labels):
        truth = [answer == label for answer in expected]
        assert found[label]["average_precision"] == pytest.approx(average_precision_score(truth, shares[:, i]))
        assert found[label]["precision"][-1] == 1.0
        assert found[label]["recall"][-1] == 0.0
        assert found[label]["recall"][0] == 1.0
        assert len(found[label]["precision"]) == len(found[label]["recall"]) <= metrics.MAX_CURVE_POINTS


def test_curves_of_unlikely_sure_single_and_missing_scores() -> None:
    labels, expected, scores = scored()
    plain = metrics.precision_recall_curves(labels, expected, scores.tolist())["a"]["average_precision"]
    shifted = scores - np.linspace(0, 5000, len(scores))[:, None]  # long answers make every label unlikely
    assert metrics.precision_recall_curves(labels, expected, shifted.tolist())["a"][
        "average_precision"
    ] == pytest.approx(plain)
    # As probabilities, all scores would be 1 or 0 in float64. The log-odds of `a` order the rows: 900 (a), 850 (b), 800
    # (a), -900 (b). Precision is therefore 1 at the first hit and 2/3 at the second.
    sure = [[0.0, -800.0], [0.0, -900.0], [-900.0, 0.0], [0.0, -850.0]]
    found = metrics.precision_recall_curves(["a", "b"], ["a", "a", "b", "b"], sure)
    assert found["a"]["average_precision"] == pytest.approx((1 + 2 / 3) / 2)
    assert metrics.precision_recall_curves(["a"], ["a", "a"], [[-1.0], [-2.0]])["a"]["average_precision"] == 1.0
    scores[3, 1] = math.nan
    without = metrics.precision_recall_curves(labels, expected, scores.tolist())
    assert all(math.isnan(one["average_precision"]) and one["precision"] == [] for one in without.values())
    assert math.isnan(metrics.mean_average_precision(labels, expected, scores.tolist(), seed=0).value)


def test_calibration_compares_confidence_with_accuracy() -> None:
    labels, expected, scores = scored(400)
    bins, error = metrics.measure_calibration(labels, expected, scores.tolist(), seed=0)
    shares = special.softmax(scores, axis=1)
    confidence, hits = shares.max(axis=1), np.array(labels)[shares.argmax(axis=1)] == expected
    gaps = 0.0
    for low in np.arange(10) / 10:
        is_inside = (confidence >= low) & (confidence < low + 0.1)
        gaps += abs(np.sum(confidence[is_inside] - hits[is_inside]))
    assert error.value == pytest.approx(gaps / 400)
    assert sum(one.rows for one in bins) == 400
    assert sum(one.rows * one.confidence for one in bins) / 400 == pytest.approx(confidence.mean())
    assert sum(one.rows * one.accuracy for one in bins) / 400 == pytest.approx(hits.mean())
    assert (error.better, error.low < error.value < error.high) == ("lower", True)
    shifted = scores - np.linspace(0, 5000, len(scores))[:, None]  # long answers make every label unlikely
    assert metrics.measure_calibration(labels, expected, shifted.tolist(), seed=0)[1].value == pytest.approx(
        error.value
    )

    sure = [[0.0, -900.0], [0.0, -900.0], [-900.0, 0.0]]
    assert metrics.measure_calibration(["a", "b"], ["a", "b", "b"], sure, seed=0)[0] == [
        metrics.CalibrationBin(confidence=1.0, accuracy=pytest.approx(2 / 3), rows=3)
    ]
    scores[3, 1] = math.nan
    bins, error = metrics.measure_calibration(labels, expected, scores.tolist(), seed=0)
    assert (bins, math.isnan(error.value)) == ([], True)


def test_resamples_in_parts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(3)
    labels = ["a", "b", "c"]
    expected = [draw.choice(labels) for _ in range(60)]
    scores = [[draw.gauss(label == one, 1.0) for label in labels] for one in expected]
    whole = metrics.mean_average_precision(labels, expected, scores, seed=1)
    monkeypatch.setattr(metrics, "MAX_WEIGHTS_PER_CHUNK", 7 * len(expected))
    assert metrics.mean_average_precision(labels, expected, scores, seed=1) == whole


@pytest.mark.parametrize("ties", [False, True])
def test_macro_average_precision_is_the_mean_of_scikit_learns(ties: bool) -> None:
    labels, expected, scores = scored()
    if ties:
        scores = scores.round()
    found = metrics.mean_average_precision(
        [*labels, "never"], expected, [[*row, -9.0] for row in scores.tolist()], seed=0
    )
    curves = metrics.precision_recall_curves([*labels, "never"], expected, [[*row, -9.0] for row in scores.tolist()])
    assert found.value == pytest.approx(np.mean([one["average_precision"] for one in curves.values()]))
    assert sorted(curves) == labels
    assert found.low < found.value < found.high


def test_krippendorffs_alpha_of_the_published_example() -> None:
    """The example of Krippendorff, "Computing Krippendorff's Alpha-Reliability" (2011), part C: 0.849 on an interval
    scale."""
    observers = ["123321412...", "1233224125.3", ".33323422 51.".replace(" ", ""), "12332441251."]
    units = [[float(row[unit]) for row in observers if row[unit] != "."] for unit in range(12)]
    alpha = metrics.krippendorff_alpha(units, 0)
    assert alpha is not None and round(alpha.value, 3) == 0.849
    assert (alpha.n, alpha.low < alpha.value < alpha.high) == (11, True), "a unit with one rating is left out"
    both = metrics.krippendorff_alpha([[0, 0], [1, 1], [0.5, 0.5]], 0)
    assert both is not None and both.value == 1
    assert metrics.krippendorff_alpha([[1, 1], [1, 1]], 0) is None and metrics.krippendorff_alpha([[0, 1]], 0) is None

"""Figures and their intervals, against scipy and against cases done by hand."""

import math
import random

import numpy as np
import pytest
from scipy import stats

from ratchet.services import metrics
from ratchet.services.metrics import OTHER


@pytest.mark.parametrize(
    ("hits", "n"), [(0, 1), (1, 1), (0, 10), (10, 10), (1, 10), (5, 10), (1, 1000), (770, 1000), (999, 1000), (3, 7)]
)
def test_a_proportion_has_wilsons_interval(hits: int, n: int) -> None:
    found = metrics.proportion([1.0] * hits + [0.0] * (n - hits))
    wilson = stats.binomtest(hits, n).proportion_ci(0.95, method="wilson")
    assert (found.value, found.n) == (pytest.approx(hits / n), n)
    assert found.low == pytest.approx(wilson.low, abs=1e-12)
    assert found.high == pytest.approx(wilson.high, abs=1e-12)
    assert 0.0 <= found.low <= found.value <= found.high <= 1.0
    assert (found.better, found.unit) == ("higher", "proportion")


@pytest.mark.parametrize("n", [2, 5, 400])
def test_a_mean_loss_has_the_normal_interval(n: int) -> None:
    losses = np.random.default_rng(n).exponential(2.0, n)
    found = metrics.mean_loss(losses.tolist())
    low, high = stats.norm.interval(0.95, loc=losses.mean(), scale=stats.sem(losses))
    assert (found.value, found.low, found.high) == pytest.approx((losses.mean(), low, high))
    assert (found.n, found.better) == (n, "lower")


def test_perplexity_is_that_of_all_tokens_together() -> None:
    """Rows count by their tokens: the mean over rows would give another figure."""
    nll, tokens = [2.0, 30.0, 0.5], [1, 20, 4]
    found = metrics.perplexity(nll, tokens)
    assert found.value == pytest.approx(math.exp(32.5 / 25))
    assert found.value != pytest.approx(math.exp(np.mean([2.0, 1.5, 0.125])), rel=0.01)
    assert (found.n, found.better) == (3, "lower")


def test_perplexity_of_a_sure_and_of_a_guessing_model() -> None:
    assert metrics.perplexity([0.0, 0.0], [3, 4]).value == 1.0
    guessing = metrics.perplexity([3 * math.log(50), 4 * math.log(50)], [3, 4])
    assert guessing.value == pytest.approx(50.0)
    assert (guessing.low, guessing.high) == pytest.approx((50.0, 50.0))  # every row says the same


def test_the_interval_of_perplexity_is_the_delta_methods() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 30, 200)
    nll = tokens * rng.exponential(1.5, 200)
    found = metrics.perplexity(nll.tolist(), tokens.tolist())
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
        nll = [float(rng.gamma(2.0 * t, 0.75)) for t in tokens]  # mean 1.5 nats for each token
        found = metrics.perplexity(nll, tokens.tolist())
        held += found.low <= truth <= found.high
    assert held / rounds == pytest.approx(0.95, abs=0.03)


def test_scores_of_nought_and_one_are_a_proportion_and_others_a_mean() -> None:
    assert metrics.mean_score([1.0, 0.0, 1.0], higher_is_better=True) == metrics.proportion([1.0, 0.0, 1.0])
    mean = metrics.mean_score([0.2, 0.4], higher_is_better=True)
    assert (mean.value, mean.better, mean.unit) == (pytest.approx(0.3), "higher", "mean of samples")
    assert metrics.mean_score([1.0, 0.0], higher_is_better=False).better == "lower"


def test_results_of_each_class_by_hand() -> None:
    expected = ["cat", "cat", "cat", "dog", "dog", "owl"]
    answered = ["cat", "cat", "dog", "dog", "a dog, I think", "cat"]
    named, confusion = metrics.per_class(expected, answered)
    assert named["cat"] == pytest.approx({"precision": 2 / 3, "recall": 2 / 3, "f1": 2 / 3, "support": 3.0})
    assert named["dog"] == {"precision": 0.5, "recall": 0.5, "f1": 0.5, "support": 2.0}
    assert named["owl"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 1.0}
    assert confusion.labels == ("cat", "dog", "owl")
    assert confusion.matrix == ((2, 1, 0, 0), (0, 1, 0, 1), (1, 0, 0, 0))


def test_every_answer_right() -> None:
    named, confusion = metrics.per_class(["b", "a", "b"], ["b", "a", "b"])
    assert {label: row["f1"] for label, row in named.items()} == {"a": 1.0, "b": 1.0}
    assert confusion.matrix == ((1, 0, 0), (0, 2, 0))


def test_answers_that_are_no_label_are_counted_and_hit_no_label() -> None:
    named, confusion = metrics.per_class(["a", "b"], ["nonsense", ""])
    assert [row["recall"] for row in named.values()] == [0.0, 0.0]
    assert confusion.matrix == ((0, 0, 1), (0, 0, 1))


def test_one_label_is_enough() -> None:
    named, confusion = metrics.per_class(["a", "a"], ["a", "x"])
    assert named["a"]["precision"] == 1.0
    assert named["a"]["recall"] == 0.5
    assert confusion.matrix == ((1, 1),)


def test_a_label_with_the_name_of_the_last_column_keeps_its_rows() -> None:
    named, confusion = metrics.per_class([OTHER, "a"], [OTHER, "nonsense"])
    assert named[OTHER]["recall"] == 1.0
    assert len(confusion.matrix) == len(confusion.labels) == 2


def test_random_answers_account_for_every_row() -> None:
    rng = random.Random(0)
    expected = [rng.choice("abcde") for _ in range(500)]
    answered = [rng.choice("abcdefg") for _ in range(500)]
    named, confusion = metrics.per_class(expected, answered)
    assert sum(map(sum, confusion.matrix)) == 500
    for k, label in enumerate(confusion.labels):
        assert sum(confusion.matrix[k]) == named[label]["support"] == expected.count(label)
        assert named[label]["recall"] == pytest.approx(confusion.matrix[k][k] / expected.count(label))

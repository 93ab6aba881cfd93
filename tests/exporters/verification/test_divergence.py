"""Tests that distances between distributions equal their definitions."""

import math
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from ratchet.errors import DamagedFileError
from ratchet.exporters.verification.parity import MIN_LOG_PROBABILITY, measure_distance

Numbers = NDArray[np.float32]


def rows(seed: int, shapes: list[int], vocabulary: int = 50, spread: float = 3.0) -> list[Numbers]:
    draw = np.random.default_rng(seed)
    logits = [draw.normal(size=(count, vocabulary)) * spread for count in shapes]
    return [(one - np.log(np.exp(one).sum(-1, keepdims=True))).astype(np.float32) for one in logits]


def targets(shapes: list[int]) -> list[list[int]]:
    return [[(7 * row + place) % 50 for place in range(count)] for row, count in enumerate(shapes)]


def test_every_field_follows_its_definition() -> None:
    shapes = [3, 1, 5]
    reference, found = rows(1, shapes), rows(2, shapes)
    close = measure_distance(reference, found, targets(shapes))
    p, q = (np.concatenate(one).astype(np.float64) for one in (reference, found))
    wanted = [token for row in targets(shapes) for token in row]
    likely = np.exp(p) > 1 / (1000 * 50)
    assert 0 < (~likely).sum() < likely.sum(), "both kinds of tokens are there"
    assert (close.rows, close.positions) == (3, 9)
    assert close.max_difference == pytest.approx(np.abs(q - p)[likely].max())
    assert close.mean_difference == pytest.approx(np.abs(q - p)[likely].mean())
    kl = (np.exp(p) * (p - q)).sum(-1)
    assert close.kl == pytest.approx(kl.mean(), rel=1e-6)
    assert close.max_kl == pytest.approx(kl.max(), rel=1e-6)
    assert close.greedy_agreement == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean())
    assert close.perplexity == pytest.approx(math.exp(-q[range(9), wanted].mean()))
    assert close.reference_perplexity == pytest.approx(math.exp(-p[range(9), wanted].mean()))


def test_equal_distributions_have_distance_zero() -> None:
    shapes = [4, 2]
    same = measure_distance(rows(1, shapes), rows(1, shapes), targets(shapes))
    assert (same.max_difference, same.mean_difference, same.kl, same.max_kl, same.greedy_agreement) == (0, 0, 0, 0, 1)
    assert same.perplexity == same.reference_perplexity


def test_rounding_of_logarithms_does_not_count_as_divergence() -> None:
    """All log-probabilities are 1e-6 nats too high: the plain sum would be -1e-6, or +1e-6 in the other direction."""
    p = rows(1, [3])
    for shift in (1e-6, -1e-6):
        close = measure_distance(p, [(one + np.float32(shift)).astype(np.float32) for one in p], targets([3]))
        assert close.kl < 1e-11


def test_unlikely_tokens_do_not_count_as_differences() -> None:
    """A probability of 1e-9 instead of 1e-7 is a difference of 5 nats in log-probability, but irrelevant."""
    p = np.log(np.array([[0.6, 0.4 - 1e-9, 1e-9]]))
    q = np.log(np.array([[0.6, 0.4 - 1e-7, 1e-7]]))
    assert np.abs(p - q).max() > 4
    assert measure_distance([p.astype(np.float32)], [q.astype(np.float32)], [[0]]).max_difference < 1e-5


def test_an_excluded_token_is_a_large_finite_difference() -> None:
    p, q = np.log(np.array([[0.5, 0.5, 1e-30]])), np.log(np.array([[1.0, 1e-30, 1e-30]]))
    q[0, 1] = -np.inf
    close = measure_distance([p.astype(np.float32)], [q.astype(np.float32)], [[1]])
    assert close.max_difference == pytest.approx(math.log(0.5) - MIN_LOG_PROBABILITY, rel=1e-6)
    assert close.kl == pytest.approx(0.5 * math.log(0.5) + 0.5 * (math.log(0.5) - MIN_LOG_PROBABILITY), rel=1e-5)
    assert math.isfinite(close.perplexity)
    p[0, 2] = -np.inf
    both = measure_distance([p.astype(np.float32)], [p.astype(np.float32)], [[2]])
    assert (both.kl, both.max_difference) == (0, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=["nan", "inf"])
def test_nan_and_infinity_are_refused(bad: float) -> None:
    reference, found = rows(1, [2]), rows(2, [2])
    found[0][1, 3] = bad
    with pytest.raises(DamagedFileError, match="row 0: log-probabilities: found NaN or infinity"):
        measure_distance(reference, found, targets([2]))


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(DamagedFileError, match=r"row 0: log-probabilities: found shape \(2, 49\); expected \(2, 50\)"):
        measure_distance(rows(1, [2]), rows(2, [2], vocabulary=49), targets([2]))
    with pytest.raises(ValueError, match="shorter"):
        measure_distance(rows(1, [2, 2]), rows(2, [2]), targets([2, 2]))
    with pytest.raises(ValueError, match="no position"):
        measure_distance([], [], [])


def test_rows_are_consumed_one_at_a_time() -> None:
    size, vocabulary, many = 4, 20_000, 12

    def made(seed: int) -> Iterator[Numbers]:
        for row in range(many):
            yield rows(seed + row, [size], vocabulary)[0]

    one_row_bytes = size * vocabulary * 4
    tracemalloc.start()
    try:
        measure_distance(made(1), made(100), [[0] * size] * many)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < many * one_row_bytes

"""Tests the bootstrap of a ratio of sums against scipy."""

import numpy as np
import pytest
from scipy import stats

from ratchet.quality_gate import statistics
from ratchet.quality_gate.statistics import Numbers, ResamplingUnits

Z = float(stats.norm.ppf(0.95))


def ratio(top: Numbers, bottom: Numbers, axis: int = -1) -> Numbers:
    found: Numbers = top.sum(axis=axis) / bottom.sum(axis=axis)
    return found


def units(kind: str, n: int) -> ResamplingUnits:
    rng = np.random.default_rng(n)
    ones = np.ones(n)
    return {
        "normal": ResamplingUnits(rng.normal(0.1, 1.0, n), ones),
        "skewed": ResamplingUnits(rng.exponential(1.0, n) - 0.8, ones),
        "shares": ResamplingUnits(rng.choice([-1.0, -0.5, 0.0, 0.5], n), ones),
        "clusters": ResamplingUnits(rng.normal(0.2, 1.0, n) * (sizes := rng.integers(1, 9, n).astype(float)), sizes),
    }[kind]


@pytest.mark.parametrize("kind", ["normal", "skewed", "shares", "clusters"])
@pytest.mark.parametrize("n", [15, 60, 300])
def test_bounds_are_those_of_scipys_bca(kind: str, n: int) -> None:
    ours = units(kind, n)
    found = statistics.bootstrap_units(ours, 20_000, 0)
    theirs = stats.bootstrap(
        (ours.top, ours.bottom), ratio, paired=True, vectorized=True, n_resamples=20_000, confidence_level=0.9,
        method="BCa", rng=np.random.default_rng(1), batch=1000,
    )  # fmt: skip
    expected = theirs.confidence_interval
    apart = 0.03 * (expected.high - expected.low)  # both results are random
    if kind == "shares":
        apart += 0.5 / n  # one step: the means of few distinct scores are on a grid
    assert found.low(Z) == pytest.approx(expected.low, abs=apart)
    assert found.high(Z) == pytest.approx(expected.high, abs=apart)
    assert found.values.std(ddof=1) == pytest.approx(theirs.standard_error, rel=0.03)


@pytest.mark.parametrize("kind", ["normal", "skewed", "clusters"])
def test_the_acceleration_is_the_jackknifes(kind: str) -> None:
    ours = units(kind, 40)
    rest = np.array([ratio(np.delete(ours.top, k), np.delete(ours.bottom, k)) for k in range(40)])
    change = rest.mean() - rest
    assert ours.acceleration == pytest.approx((change**3).sum() / (6 * (change**2).sum() ** 1.5))


def test_standard_errors_of_a_mean_and_of_a_ratio() -> None:
    mean = units("skewed", 50)
    assert mean.standard_error == pytest.approx(stats.sem(mean.top))
    ours = units("clusters", 400)
    assert ours.standard_error == pytest.approx(statistics.bootstrap_units(ours, 20_000, 0).values.std(), rel=0.04)


@pytest.mark.parametrize("kind", ["normal", "skewed", "shares", "clusters"])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_a_value_is_below_the_bound_exactly_if_it_is_refuted_at_that_level(kind: str, confidence: float) -> None:
    found = statistics.bootstrap_units(units(kind, 80), 5000, 0)
    z = float(stats.norm.ppf(confidence))
    for value in np.linspace(found.values[0], found.values[-1], 200):
        if abs(found.z_above(value) - z) > 1e-9:
            assert (found.low(z) > value) == (found.z_above(value) > z)


def test_a_value_beyond_all_resamples_is_not_certain() -> None:
    found = statistics.bootstrap_units(units("normal", 80), 1000, 0)
    assert stats.norm.sf(found.z_above(-100.0)) == pytest.approx(1 / 1001, rel=3)
    assert stats.norm.sf(found.z_above(100.0)) > 0.99


def test_the_seed_decides_what_is_drawn_and_the_order_of_units_does_not() -> None:
    ours = units("clusters", 70)
    order = np.random.default_rng(5).permutation(70)
    first = statistics.bootstrap_units(ours, 1000, 3)
    again = statistics.bootstrap_units(ResamplingUnits(ours.top[order], ours.bottom[order]), 1000, 3)
    other = statistics.bootstrap_units(ours, 1000, 4)
    assert np.array_equal(first.values, again.values)
    assert not np.array_equal(first.values, other.values)


@pytest.mark.parametrize("kind", ["normal", "skewed", "shares", "clusters"])
def test_turning_all_signs_turns_all_resamples(kind: str) -> None:
    ours = units(kind, 70)
    there = statistics.bootstrap_units(ours, 1000, 0)
    back = statistics.bootstrap_units(ResamplingUnits(-ours.top, ours.bottom), 1000, 0)
    assert np.array_equal(there.values, -back.values[::-1])
    assert (back.low(Z), back.high(Z)) == (-there.high(Z), -there.low(Z))


def test_drawing_kinds_is_drawing_units(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = units("shares", 300)
    kinds = statistics.bootstrap_units(ours, 20_000, 0)
    monkeypatch.setattr(statistics, "MIN_UNITS_PER_KIND", 10**9)
    one_by_one = statistics.bootstrap_units(ours, 20_000, 0)
    assert stats.ks_2samp(kinds.values, one_by_one.values).statistic < 0.03
    assert kinds.low(Z) == pytest.approx(one_by_one.low(Z), abs=0.005)


def test_pieces_that_fit_into_memory_give_what_one_piece_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = statistics.bootstrap_units(units("normal", 50), 500, 0)
    monkeypatch.setattr(statistics, "MAX_DRAWS_PER_CHUNK", 50 * 7)
    pieces = statistics.bootstrap_units(units("normal", 50), 500, 0)
    assert len(pieces.values) == 500
    assert pieces.values.std() == pytest.approx(whole.values.std(), rel=0.15)

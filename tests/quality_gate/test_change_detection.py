"""Tests the search for a change: fair bets, a bounded rate of false alarms with small references, and detection."""

from typing import Any

import numpy as np
import pytest

from ratchet.quality_gate.change_detection import (
    MAX_EVIDENCE,
    ChangeDetector,
    Direction,
    compute_factors,
    compute_rank,
    update_evidence,
)

DIRECTIONS: tuple[Direction, ...] = ("lower", "higher", "both")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_bet_is_fair(direction: Direction) -> None:
    ranks = (np.arange(200_000) + 0.5) / 200_000
    factors = compute_factors(ranks, direction)
    assert factors.min() > 0
    assert factors.mean(axis=0) == pytest.approx(np.ones(factors.shape[-1]), abs=1e-3)


def test_directions_bet_on_the_ranks_that_they_name() -> None:
    low, high = np.array([0.001]), np.array([0.999])
    assert compute_factors(low, "lower").min() > 1
    assert compute_factors(high, "lower").max() < 1
    assert compute_factors(low, "higher") == pytest.approx(compute_factors(high, "lower"))


def test_ranks_are_uniform_with_ties() -> None:
    draw = np.random.default_rng(0)
    ranks = []
    for _ in range(4000):
        counts = np.bincount(draw.integers(0, 2, 11), minlength=3)
        counts[place := int(draw.integers(0, 2))] += 1
        ranks.append(compute_rank(counts, place, draw.random()))
    assert np.histogram(ranks, 5, (0, 1))[0] == pytest.approx(np.full(5, 800), abs=120)


def run_cases(cases: int, rows: int, values: int, share: float, changed: float, at: int) -> Any:
    """Return the largest evidence of each case: refusals with this share, and another share after `at` values."""
    draw = np.random.default_rng(1)
    refused, total = draw.binomial(rows, share, cases), rows
    evidence = np.zeros((cases, compute_factors(np.array(0.5), "higher").shape[-1]))
    largest = np.zeros(cases)
    for number in range(values):
        is_refused = draw.random(cases) < (share if number < at else changed)
        refused, total = refused + is_refused, total + 1
        below, tied = np.where(is_refused, total - refused, 0), np.where(is_refused, refused, total - refused)
        ranks = (below + draw.random(cases) * tied) / total
        evidence = update_evidence(evidence, compute_factors(ranks, "higher"))
        largest = np.maximum(largest, evidence.mean(axis=1))
    return largest


@pytest.mark.parametrize("rows", [20, 650])
def test_false_alarms_are_as_rare_as_stated(rows: int) -> None:
    """Within 400 values, evidence of 4,000 has a probability of at most 10 %: with 600 cases, 14 % is four standard
    errors more."""
    largest = run_cases(cases=600, rows=rows, values=400, share=0.05, changed=0.05, at=0)
    assert (largest >= 4000).mean() <= 0.14
    assert (largest >= 400).mean() > 0.02, "the bound is not met by never raising an alarm"


def test_a_late_change_is_found_and_dated() -> None:
    assert (run_cases(cases=50, rows=100, values=1300, share=0.02, changed=0.15, at=1000) >= 500_000).all()
    draw = np.random.default_rng(2)
    detector = ChangeDetector.start("both", [int(x) for x in draw.normal(50, 8, 100)], 100)
    for number in range(400):
        place = int(draw.normal(50 if number < 300 else 62, 8))
        detector.observe(place, float(place), draw.random(), time_s=1000.0 + number)
    assert detector.total_evidence > 500_000
    assert 290 <= detector.change_start <= 312
    best = int(detector.evidence.argmax())
    assert detector.start_times[best] == 999 + detector.change_start
    assert detector.mean_since_change == pytest.approx(62, abs=2)


def test_evidence_stays_finite() -> None:
    detector = ChangeDetector.start("higher", [0] * 10_000, 2)
    for _ in range(3000):
        detector.observe(1, 1.0, 0.5)
    assert detector.total_evidence <= MAX_EVIDENCE

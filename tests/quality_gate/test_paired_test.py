"""Tests the paired test: its parts, its invariances, and the coverage of its bounds."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ratchet.quality_gate import statistics
from ratchet.quality_gate.paired_test import PairedScores, PairedTestPlan, PairedTestResult, compare
from ratchet.quality_gate.statistics import detectable_difference, required_pairs

PLAN = PairedTestPlan(confidence=0.95, power=0.8, discordance=0.1, resamples=2000, seed=0)
Z = float(stats.norm.ppf(0.95))


def table(both: int, better: int, worse: int, neither: int) -> PairedScores:
    """Build paired answers with these numbers of each kind of pair."""
    cells = [(1.0, 1.0)] * both + [(1.0, 0.0)] * better + [(0.0, 1.0)] * worse + [(0.0, 0.0)] * neither
    return PairedScores([new for new, _ in cells], [old for _, old in cells], "higher")


def losses(n: int, gain: float = 0.1, seed: int = 0) -> PairedScores:
    rng = np.random.default_rng(seed)
    old = rng.lognormal(0.7, 0.5, n)
    return PairedScores((old - gain + rng.normal(0, 0.4, n)).tolist(), old.tolist(), "lower")


def nats(n: int, ratio: float = 1.0, seed: int = 0) -> PairedScores:
    """Build paired scores with a new perplexity of `ratio` times the old one."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(5, 60, n).astype(float)
    old = rng.lognormal(0.8, 0.4, n)
    new = old + np.log(ratio) + rng.normal(0, 0.1, n)
    return PairedScores((new * tokens).tolist(), (old * tokens).tolist(), "lower", "perplexity", tokens.tolist())


def figures(found: PairedTestResult) -> tuple[float, ...]:
    return found.difference, found.low, found.high, found.p, found.detectable


# Kinds of scores


@pytest.mark.parametrize(
    ("bound", "p", "method"),
    [
        (-0.05, statistics.tango_p_value(12, 5, 100, -0.05), "Tango score interval"),
        (0.0, statistics.mcnemar_mid_p(12, 5), "Tango score interval, McNemar mid-p"),
    ],
)
def test_right_and_wrong_answers_are_compared_by_their_discordant_pairs(bound: float, p: float, method: str) -> None:
    found = compare(table(40, 12, 5, 43), bound, PLAN)
    assert (found.better, found.worse, found.n, found.groups) == (12, 5, 100, None)
    assert (found.low, found.high) == statistics.tango_bounds(12, 5, 100, Z)
    assert (found.p, found.method) == (p, method)


def test_rates_of_errors_count_like_rates_of_right_answers() -> None:
    right = table(30, 9, 4, 20)
    wrong = PairedScores([1 - x for x in right.new], [1 - x for x in right.old], "lower")
    assert compare(wrong, -0.02, PLAN) == compare(right, -0.02, PLAN)


def test_no_discordant_pair_of_ten_leaves_doubt() -> None:
    found = compare(table(6, 0, 0, 4), -0.05, PLAN)
    assert found.low == pytest.approx(-0.2129, abs=1e-4)
    assert found.p > 0.2
    assert found.required_samples == 248  # the plan assumes a discordance of 10 %


@pytest.mark.parametrize("cells", [(0, 1, 0, 0), (0, 0, 1, 0), (1, 0, 0, 0), (0, 40, 0, 0), (0, 0, 40, 0)])
@pytest.mark.parametrize("bound", [0.0, -0.05, -2.0, 0.5])
def test_the_extremes_of_answers_are_finite_and_never_sure(cells: tuple[int, int, int, int], bound: float) -> None:
    found = compare(table(*cells), bound, PLAN)
    assert np.isfinite(figures(found)).all()
    assert -1 <= found.low <= found.difference <= found.high <= 1
    assert found.high - found.low > 0.05


def test_losses_are_compared_by_bootstrap() -> None:
    pairs = losses(300)
    found = compare(pairs, 0.0, PLAN)
    changes = np.asarray(pairs.old) - np.asarray(pairs.new)
    assert found.difference == pytest.approx(changes.mean())
    assert (found.better, found.worse, found.method) == (None, None, "paired BCa bootstrap")
    error = stats.sem(changes)
    assert found.low == pytest.approx(changes.mean() - 1.68 * error, abs=0.2 * error)
    assert found.high == pytest.approx(changes.mean() + 1.68 * error, abs=0.2 * error)
    assert found.detectable == pytest.approx((Z + stats.norm.ppf(0.8)) * error)


def test_the_pairing_is_used() -> None:
    """The samples differ greatly in difficulty: pairing shows the common change, an unpaired test would miss it."""
    old = [float(difficulty) for difficulty in range(100)]
    new = [x + 0.1 + 0.01 * (k % 2) for k, x in enumerate(old)]
    found = compare(PairedScores(new, old, "higher"), 0.0, PLAN)
    assert 0.09 < found.low < found.difference < found.high < 0.12


def test_perplexities_are_compared_by_the_fraction_by_which_they_fell() -> None:
    pairs = nats(400, ratio=0.9)
    found = compare(pairs, 0.0, PLAN)
    tokens = sum(pairs.weights or ())
    new, old = np.exp(sum(pairs.new) / tokens), np.exp(sum(pairs.old) / tokens)
    assert found.difference == pytest.approx(1 - new / old)
    assert 0.08 < found.low < found.difference < found.high < 0.14


def test_the_detectable_change_of_a_perplexity_is_a_rise() -> None:
    pairs = nats(400)
    found = compare(pairs, -0.05, PLAN)
    changes = np.asarray(pairs.old) - np.asarray(pairs.new)
    tokens = np.asarray(pairs.weights)
    residuals = changes - tokens * changes.sum() / tokens.sum()
    error = np.sqrt((residuals**2).sum() * 400 / 399) / tokens.sum()
    assert found.detectable == pytest.approx(np.expm1((Z + stats.norm.ppf(0.8)) * error))


def test_samples_of_a_group_count_once() -> None:
    """Ten copies of each sample give the same result as one."""
    pairs = losses(60)
    copies = PairedScores(
        list(pairs.new) * 10, list(pairs.old) * 10, "lower", groups=[f"row {k % 60}" for k in range(600)]
    )
    one, many = compare(pairs, 0.0, PLAN), compare(copies, 0.0, PLAN)
    assert (many.n, many.groups, many.method) == (600, 60, "paired BCa bootstrap of groups")
    assert figures(many) == pytest.approx(figures(one))


def test_groups_of_one_are_no_groups() -> None:
    pairs = table(40, 12, 5, 43)
    alone = replace(pairs, groups=[None] * 99 + ["a group"])
    assert compare(alone, 0.0, PLAN) == compare(pairs, 0.0, PLAN)


def test_answers_that_share_a_group_are_no_independent_answers() -> None:
    pairs = table(40, 12, 4, 44)
    halves = replace(pairs, groups=[f"conversation {k // 4}" for k in range(100)])
    found, independent = compare(halves, -0.02, PLAN), compare(pairs, -0.02, PLAN)
    assert (found.groups, found.better, found.worse) == (25, 12, 4)
    assert found.high - found.low > 1.5 * (independent.high - independent.low)


# Few samples, and samples without differences


def test_an_adapter_that_changes_nothing_changes_losses_by_exactly_nothing() -> None:
    scores = [0.5, 1.25, 3.0, 0.1]
    found = compare(PairedScores(scores, scores, "lower"), 0.0, PLAN)
    assert (found.difference, found.low, found.high, found.p) == (0.0, 0.0, 0.0, 1.0)
    same = compare(PairedScores(scores, scores, "lower", "perplexity", [3.0, 4.0, 5.0, 6.0]), -0.05, PLAN)
    assert (same.difference, same.low, same.high, same.detectable) == (0.0, 0.0, 0.0, 0.0)
    assert same.p < 0.05


def test_scores_with_a_ceiling_that_never_differ_leave_the_doubt_of_answers() -> None:
    found = compare(PairedScores([0.5] * 10, [0.5] * 10, "higher"), -0.05, PLAN)
    answers = compare(table(5, 0, 0, 5), -0.05, PLAN)
    assert (found.low, found.high, found.p) == pytest.approx((answers.low, answers.high, answers.p))
    assert found.detectable == pytest.approx(0.2129, abs=1e-4)
    assert found.required_samples == required_pairs(0.05, 0.0, 0.95, 0.8) == 52


def test_one_changed_score_of_many_proves_nothing() -> None:
    scores = [0.5] * 100
    found = compare(PairedScores([1.0, *scores[1:]], scores, "higher"), -0.02, PLAN)
    assert found.low < -0.01
    assert found.p > 0.05


@pytest.mark.parametrize("bound", [0.0, -0.05, 0.3])
@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param(PairedScores([2.3], [2.1], "lower"), id="loss"),
        pytest.param(PairedScores([230.0], [210.0], "lower", "perplexity", [100.0]), id="perplexity"),
        pytest.param(PairedScores([9e5], [7e5], "lower", "perplexity", [100.0]), id="absurd perplexity"),
        pytest.param(PairedScores([0.4], [0.5], "higher"), id="share"),
        pytest.param(PairedScores([2.3, 2.4], [2.1, 2.0], "lower", groups=["a", "a"]), id="group"),
    ],
)
def test_a_single_sample_decides_nothing(pairs: PairedScores, bound: float) -> None:
    found = compare(pairs, bound, PLAN)
    assert np.isfinite(figures(found)).all()
    assert found.low < min(-0.3, bound) < max(0.3, bound) < found.high
    assert found.p > 0.05
    assert found.detectable > 0.3


def test_few_samples_are_held_to_students_t() -> None:
    pairs = losses(4)
    changes = np.asarray(pairs.old) - np.asarray(pairs.new)
    low, high = stats.t.interval(0.9, 3, loc=changes.mean(), scale=stats.sem(changes))
    found = compare(pairs, 0.0, PLAN)
    assert found.low <= low + 1e-12
    assert found.high >= high - 1e-12
    assert found.p >= stats.ttest_1samp(changes, 0.0, alternative="greater").pvalue - 1e-12


def test_few_skewed_samples_are_held_to_halls_t() -> None:
    """Nine samples get slightly better and one much worse; Student's t does not expect further bad ones."""
    rises = [-0.1, -0.12, -0.08, -0.1, -0.11, -0.09, -0.1, -0.13, -0.07, 1.0] * 3
    found = compare(PairedScores([2 + rise for rise in rises], [2.0] * 30, "lower"), -0.1, PLAN)
    changes = -np.asarray(rises)
    error, skew = stats.sem(changes), stats.skew(changes)
    t = stats.t.ppf(0.95, 29)
    k = skew / np.sqrt(30)
    assert found.low <= changes.mean() - error * 3 / k * (np.cbrt(1 + k * (t - k / 6)) - 1) + 1e-12
    assert found.low < changes.mean() - 1.2 * error * t
    assert found.high == pytest.approx(changes.mean() + error * t)


# Detectable differences


@pytest.mark.parametrize(("better", "worse"), [(3, 2), (30, 20)])
def test_answers_are_planned_with_the_discordance_that_was_declared(better: int, worse: int) -> None:
    found = compare(table(100, better, worse, 200 - better - worse), -0.02, PLAN)
    observed = (better + worse) / 300
    assert found.detectable == detectable_difference(300, min(observed, 0.1), 0.95, 0.8)
    assert found.required_samples == (required_pairs(0.02, 0.1, 0.95, 0.8) if found.detectable > 0.02 else None)


def test_nothing_is_needed_where_nothing_is_missing() -> None:
    assert compare(table(800, 50, 50, 100), 0.0, PLAN).required_samples is None
    assert compare(table(800, 20, 20, 160), -0.05, PLAN).required_samples is None
    assert compare(losses(500), -10.0, PLAN).required_samples is None
    assert compare(losses(20), 0.0, PLAN).required_samples is None


@pytest.mark.parametrize(
    ("made", "n", "margin", "within"),
    [(lambda n: losses(n, gain=0.0), 50, 0.05, 0.25), (nats, 20, 0.02, 0.4)],
    ids=["losses", "perplexities"],
)
def test_samples_that_are_needed_detect_the_margin(
    made: Callable[[int], PairedScores], n: int, margin: float, within: float
) -> None:
    few = compare(made(n), -margin, PLAN)
    assert few.required_samples is not None
    assert few.required_samples > n
    assert compare(made(few.required_samples), -margin, PLAN).detectable == pytest.approx(margin, rel=within)


# Invariances

scores = st.lists(
    st.tuples(st.floats(-50, 50, width=32), st.floats(-50, 50, width=32)), min_size=2, max_size=40
)  # fmt: skip
answers = st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 1.0])), min_size=1, max_size=40)
SMALL = replace(PLAN, resamples=200)
quickly = settings(max_examples=60, deadline=None, derandomize=True)


def of(cells: Sequence[tuple[float, float]], **more: Any) -> PairedScores:
    return PairedScores([new for new, _ in cells], [old for _, old in cells], **({"better": "higher"} | more))


@quickly
@given(st.one_of(scores, answers))
def test_swapping_the_models_turns_the_difference_around(cells: list[tuple[float, float]]) -> None:
    pairs = of(cells)
    there, back = compare(pairs, 0.0, SMALL), compare(replace(pairs, new=pairs.old, old=pairs.new), 0.0, SMALL)
    assert (back.difference, back.low, back.high) == pytest.approx((-there.difference, -there.high, -there.low))
    assert (back.better, back.worse) == (there.worse, there.better)
    assert back.detectable == pytest.approx(there.detectable)


@quickly
@given(st.one_of(scores, answers), st.sampled_from([0.8, 0.9, 0.99]))
def test_the_bound_is_refuted_where_it_is_below_the_lower_end(
    cells: list[tuple[float, float]], confidence: float
) -> None:
    pairs, plan = of(cells), replace(SMALL, confidence=confidence)
    found = compare(pairs, -0.1, plan)
    if abs(found.low + 0.1) > 1e-6:
        assert (found.p < 1 - confidence) == (found.low > -0.1)


@pytest.mark.parametrize("pairs", [table(40, 12, 5, 43), losses(50), nats(50)], ids=["answers", "losses", "nats"])
def test_more_confidence_makes_wider_bounds(pairs: PairedScores) -> None:
    wide, narrow = (compare(pairs, -0.1, replace(PLAN, confidence=level)) for level in (0.99, 0.9))
    assert wide.low < narrow.low < narrow.difference < narrow.high < wide.high
    assert wide.detectable > narrow.detectable


# Error rates

CASES = 300
RARELY = 0.05 + 4 * (0.05 * 0.95 / CASES) ** 0.5
Rng = np.random.Generator


def k_answers(rng: Rng) -> PairedScores:
    """Draw means of four sampled answers; the new model's mean is worse by the margin of 0.05."""
    hard = rng.beta(4, 2, 150)
    new = rng.binomial(4, np.clip(hard - 0.05 / 0.97, 0, 1)) / 4
    return PairedScores(new.tolist(), (rng.binomial(4, hard) / 4).tolist(), "higher")


def skewed_losses(rng: Rng) -> PairedScores:
    """Draw losses that rise by 0.05 on average: most of them a little, some a lot."""
    old = rng.lognormal(0, 1, 150)
    return PairedScores((old + rng.exponential(0.15, 150) - 0.1).tolist(), old.tolist(), "lower")


def conversations(rng: Rng) -> PairedScores:
    """Draw 60 conversations of 1 to 6 turns that fail together; the new model is worse by 0.05."""
    sizes = rng.integers(1, 7, 60)
    together = np.repeat(rng.normal(-0.05, 0.2, 60), sizes)
    old = rng.normal(2, 1, len(together))
    new = old + together + rng.normal(0, 0.1, len(together))
    names: list[str | None] = [str(k) for k in np.repeat(np.arange(60), sizes)]
    return PairedScores(new.tolist(), old.tolist(), "higher", groups=names)


def risen_perplexity(rng: Rng) -> PairedScores:
    """Draw a perplexity that rises by 5 %."""
    tokens = rng.integers(20, 200, 100).astype(float)
    old = rng.normal(2.5, 0.4, 100)
    new = old + np.log(1.05) + rng.standard_t(5, 100) * 0.2
    return PairedScores((new * tokens).tolist(), (old * tokens).tolist(), "lower", "perplexity", tokens.tolist())


@pytest.mark.parametrize("draw", [k_answers, skewed_losses, conversations, risen_perplexity])
def test_a_model_that_is_worse_by_the_margin_passes_as_rarely_as_promised(draw: Callable[[Rng], PairedScores]) -> None:
    rng, passed = np.random.default_rng(0), 0
    for _ in range(CASES):
        passed += compare(draw(rng), -0.05, replace(PLAN, resamples=400)).low > -0.05
    assert passed / CASES < RARELY


# Refused input


@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        (PairedScores([], [], "higher"), "cannot pair 0 samples with 0"),
        (PairedScores([1.0], [1.0, 0.0], "higher"), "cannot pair 1 samples with 2"),
        (PairedScores([1.0, float("nan")], [1.0, 0.0], "higher"), "new: sample 1: found nan; expected a finite number"),
        (PairedScores([1.0], [float("inf")], "lower"), "old: sample 0: found inf; expected a finite number"),
        (PairedScores([1.0], [1.0], "lower", "perplexity"), "require the tokens"),
        (PairedScores([1.0], [1.0], "lower", weights=[2.0]), "other scores have no weights"),
        (
            PairedScores([1.0], [1.0], "lower", "perplexity", [0.0]),
            "weights: sample 0: found 0.0; expected a positive number",
        ),
        (PairedScores([1.0], [1.0], "lower", "perplexity", [1.0, 2.0]), "found 2 weights for 1 samples"),
        (PairedScores([1.0], [1.0], "higher", "perplexity", [1.0]), "higher perplexity cannot be better"),
        (PairedScores([1.0], [1.0], "higher", groups=["a", "b"]), "found 2 groups for 1 samples"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_samples_that_cannot_be_paired_are_refused(pairs: PairedScores, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        compare(pairs, 0.0, PLAN)


@pytest.mark.parametrize(
    ("bound", "plan"),
    [
        (float("nan"), PLAN),
        (0.0, replace(PLAN, confidence=1.0)),
        (0.0, replace(PLAN, power=0.0)),
        (0.0, replace(PLAN, resamples=0)),
        (0.0, replace(PLAN, discordance=2.0)),
    ],
    ids=["bound", "confidence", "power", "resamples", "discordance"],
)
def test_an_invalid_bound_or_plan_is_refused(bound: float, plan: PairedTestPlan) -> None:
    with pytest.raises(ValueError, match=r"not a finite number|not between|expected resamples >= 1"):
        compare(losses(5), bound, plan)


@pytest.mark.parametrize("bound", [1.0, 3.0])
def test_no_perplexity_falls_by_all_of_itself(bound: float) -> None:
    found = compare(nats(50, ratio=0.5), bound, PLAN)
    assert found.p == 1.0
    assert np.isfinite(figures(found)).all()

"""Tests finalists with several seeds: the comparison, its error rate, and the choice among equal finalists."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import optuna
import pytest
from scipy import special, stats

from ratchet.quality_gate import finalists, paired_test
from ratchet.quality_gate.finalists import FinalistComparator, FinalistScores, choose_winner, find_trailing
from ratchet.quality_gate.paired_test import PairedScores, PairedTestPlan
from ratchet.storage.records.sweep import FinalRound, SweepObjective, TrainingCost

HIGH = FinalistComparator(SweepObjective(metric="token_f1", direction="maximize"), 0.95, resamples=499)
LOW = FinalistComparator(SweepObjective(metric="validation_loss", direction="minimize"), 0.95, resamples=499)
ROWS = 60


def contender(number: int, scores: Any, parameters: int = 0, **more: Any) -> FinalistScores:
    cost = more.pop("cost", TrainingCost(trainable_parameters=parameters))
    return FinalistScores(number, {"train.rank": number}, tuple(f"run{number}-{i}" for i in range(len(scores))), scores,
                     cost, **more)  # fmt: skip


def drawn(
    rng: np.random.Generator, means: Sequence[float], count: int | Sequence[int] = 3, spread: float = 0.1
) -> list[FinalistScores]:
    """Draw finalists with these true means, row noise of all, of one finalist and of one training, and seed noise."""
    shared = rng.normal(0, 1, ROWS)
    counts = [count] * len(means) if isinstance(count, int) else count
    return [
        contender(
            number,
            mean + shared + rng.normal(0, 0.4, ROWS) + rng.normal(0, spread, (n, 1)) + rng.normal(0, 0.4, (n, ROWS)),
        )
        for number, (mean, n) in enumerate(zip(means, counts, strict=True))
    ]


def leads(found: FinalRound) -> bool:
    """Return whether the leader is better than each of the others."""
    return all(one.better for one in found.comparisons)


# ------------------------------------------------------------------------------------------------ parts of a difference


def test_a_loss_is_the_ratio_of_sums_with_a_mean_for_each_seed() -> None:
    nats, weights = np.array([[2.0, 9.0], [4.0, 9.0]]), [1.0, 3.0]
    other = nats + np.array([1.0, 0.0])
    found = choose_winner(replace(LOW, weights=weights), [contender(5, other), contender(2, nats)])
    assert [one.number for one in found.finalists] == [2, 5]
    assert found.finalists[0].means == (11 / 4, 13 / 4)
    assert found.finalists[0].mean == 3.0
    assert found.finalists[0].run_ids == ("run2-0", "run2-1")
    assert found.comparisons[0].difference == pytest.approx(0.25)
    assert (found.metric, found.direction, found.rows) == ("validation_loss", "minimize", 2)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("kind", ["binary", "mean", "loss"])
def test_with_one_seed_it_is_the_gate_s_comparison_at_half_the_level(kind: str, grouped: bool) -> None:
    rng = np.random.default_rng(4)
    own, other = rng.normal(1.5, 0.3, ROWS), rng.normal(1.0, 0.3, ROWS)
    groups = [f"g{row // 3}" if row % 2 else None for row in range(ROWS)] if grouped else None
    plan = PairedTestPlan(0.975, 0.8, 0.1, 499, 0)
    if kind == "loss":
        own, other = other, own
        weights = rng.integers(1, 9, ROWS).astype(float).tolist()
        comparator = replace(LOW, weights=weights, groups=groups)
        pairs = PairedScores(own.tolist(), other.tolist(), "lower", "perplexity", weights, groups)
        expected = paired_test.compare(pairs, 0.0, plan)
        value, low = (-np.log1p(-x) for x in (expected.difference, expected.low))
    else:
        if kind == "binary":
            own, other = (own > 1.2).astype(float), (other > 1.2).astype(float)
        comparator = replace(HIGH, groups=groups)
        expected = paired_test.compare(PairedScores(own.tolist(), other.tolist(), "higher", groups=groups), 0.0, plan)
        value, low = expected.difference, expected.low
    found = choose_winner(comparator, [contender(0, [other]), contender(1, [own])])
    [one] = found.comparisons
    assert (one.difference, one.low) == (pytest.approx(value), pytest.approx(low))
    assert one.p == pytest.approx(2 * expected.p)
    assert one.method == expected.method
    assert one.seed_error == 0
    assert one.row_error == pytest.approx((value - low) / special.ndtri(0.975))
    assert found.winner == 1
    assert "one seed" in found.reason


def test_seeds_widen_what_rows_leave_unsure() -> None:
    """The expected values are computed here: Welch's degrees of freedom for the seeds, squares of both errors added."""
    rng = np.random.default_rng(0)
    pair = tuple(drawn(rng, [0.1, 0.0], spread=0.2))
    found = finalists.compare_pair(HIGH, (pair[0], pair[1]), pair, 0.025)
    a, b = (np.var(one.matrix.mean(axis=1), ddof=1) / 3 for one in pair)
    t = stats.t.ppf(0.975, (a + b) ** 2 / (a**2 / 2 + b**2 / 2))
    alone = paired_test.compare(
        PairedScores(pair[0].row_means.tolist(), pair[1].row_means.tolist(), "higher"),
        0.0,
        PairedTestPlan(0.975, 0.8, 0.1, 499, 0),
    )
    rows = found.row_error * stats.t.ppf(0.975, ROWS - 1)
    assert found.seed_error == pytest.approx(np.sqrt(a + b))
    assert found.value - found.low == pytest.approx(np.hypot(rows, t * found.seed_error))
    assert found.low < alone.low
    assert found.p > alone.p
    at_p = finalists.compare_pair(HIGH, (pair[0], pair[1]), pair, found.p)
    assert at_p.low == pytest.approx(0, abs=0.02)  # the row error depends slightly on the level


def test_one_seed_is_taken_to_vary_as_the_one_that_varies_most() -> None:
    rng = np.random.default_rng(7)
    quiet, loud, single = drawn(rng, [1.0, 0.5, 0.0], [3, 3, 1], spread=0.3)
    quiet, loud = sorted((quiet, loud), key=lambda one: np.var(one.means(HIGH)))
    everyone = (quiet, loud, single)
    found = finalists.compare_pair(HIGH, (quiet, single), everyone, 0.025)
    own, most = (np.var(one.means(HIGH), ddof=1) for one in (quiet, loud))
    assert found.seed_error == pytest.approx(np.sqrt(own / 3 + most))
    borrowed = finalists.compare_pair(HIGH, (loud, single), everyone, 0.025)
    assert borrowed.seed_error == pytest.approx(np.sqrt(most / 3 + most))
    assert "t with 2.0 degrees" in borrowed.method  # using one spread twice does not add certainty


def test_seeds_that_change_nothing_add_nothing() -> None:
    rng = np.random.default_rng(1)
    own, other = rng.normal(1, 1, ROWS), rng.normal(0, 1, ROWS)
    one, two = (choose_winner(HIGH, [contender(0, [own] * n), contender(1, [other] * n)]) for n in (1, 3))
    assert one.comparisons == two.comparisons


def test_directions_are_mirrors_of_each_other() -> None:
    rng = np.random.default_rng(3)
    some = drawn(rng, [0.5, 0.0, 0.2])
    replicated = [contender(one.number, -one.matrix) for one in some]
    up, down = choose_winner(HIGH, some), choose_winner(LOW, replicated)
    assert up.comparisons == down.comparisons
    weights = [2.0] * ROWS
    fewer, more = (replace(comparator, weights=weights) for comparator in (LOW, replace(LOW, objective=HIGH.objective)))
    down, up = choose_winner(fewer, replicated), choose_winner(more, some)
    for a, b in zip(up.comparisons, down.comparisons, strict=True):
        assert (a.difference, a.low, a.p) == (pytest.approx(b.difference), pytest.approx(b.low), pytest.approx(b.p))


def test_bounds_agree_with_p_values() -> None:
    rng = np.random.default_rng(8)
    seen = set()
    for _ in range(40):
        found = choose_winner(HIGH, drawn(rng, [0.45, 0.2, 0.1, 0.0]))
        leader, *others = found.finalists
        assert [one.number for one in others] == [one.other for one in found.comparisons]
        for one in found.comparisons:
            assert one.better == (one.low > 0) == (one.p < 0.05)
            seen.add(one.better)
        assert leader.mean >= max(one.mean for one in others)
    assert seen == {True, False}


# ----------------------------------------------------------------------------------------------------------- error rate


@pytest.mark.parametrize(
    ("means", "count", "spread", "binary"),
    [
        ([0.0, 0.0], 3, 0.0, False),
        ([0.0, 0.0], 3, 0.3, False),
        ([0.0, 0.0], 2, 0.3, False),
        ([0.0, 0.0], 1, 0.0, False),
        ([0.0, 0.0], [3, 1], 0.5, False),
        ([0.0, 0.0, -3.0], 3, 0.1, False),
        ([0.0, 0.0, 0.0], 3, 0.1, False),
        ([0.0, 0.0], 3, 0.1, True),
    ],
)
def test_equal_finalists_are_called_better_as_rarely_as_the_confidence_allows(
    means: list[float], count: int | list[int], spread: float, binary: bool
) -> None:
    rng, cases, wrong = np.random.default_rng(11), 400, 0
    for _ in range(cases):
        some = drawn(rng, means, count, spread)
        wrong += leads(
            choose_winner(
                HIGH, [contender(one.number, (one.matrix > 0).astype(float)) for one in some] if binary else some
            )
        )
    assert wrong / cases <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / cases)


# ------------------------------------------------------------------------------------------------- choice of the winner


def equals(*costs: TrainingCost) -> FinalRound:
    """Choose among finalists with negligible differences; the last one leads."""
    rng = np.random.default_rng(2)
    rows = rng.normal(0, 1, ROWS)
    return choose_winner(
        HIGH,
        [
            contender(number, rows + rng.normal(0, 1, (2, ROWS)) + 0.001 * number, cost=cost)
            for number, cost in enumerate(costs)
        ],
    )


@pytest.mark.parametrize(
    ("costs", "winner", "why"),
    [
        ([{"trainable_parameters": 9}, {"trainable_parameters": 5}, {"trainable_parameters": 7}], 1, "parameters"),
        ([{"memory_bytes": 9}, {"memory_bytes": 7}, {"memory_bytes": 5}], 2, "memory"),
        ([{"train_seconds": 9}, {"train_seconds": 5}, {"train_seconds": 7}], 1, "training"),
        ([{"memory_bytes": 0}, {"memory_bytes": 0}, {"memory_bytes": 5}], 2, "memory"),
        ([{}, {}, {}], 0, "tried first"),
    ],
)
def test_the_cheapest_of_indistinguishable_finalists_wins(costs: list[dict[str, Any]], winner: int, why: str) -> None:
    found = equals(*(TrainingCost(**cost) for cost in costs))
    assert not any(one.better for one in found.comparisons)
    assert found.winner == winner
    assert why in found.reason
    assert "do not differ significantly" in found.reason


def test_costs_count_only_among_equals() -> None:
    dear, cheap = drawn(np.random.default_rng(5), [3.0, 0.0])
    found = choose_winner(
        HIGH, [replace(dear, cost=TrainingCost(trainable_parameters=10**9)), replace(cheap, cost=TrainingCost())]
    )
    assert leads(found)
    assert (found.winner, found.reason.split(" (")[0]) == (0, "trial 0 is better than each of the others")
    three = drawn(np.random.default_rng(6), [0.0, 0.0, -3.0])  # the cheapest one is clearly worse
    found = choose_winner(
        HIGH, [replace(one, cost=TrainingCost(trainable_parameters=100 - one.number)) for one in three]
    )
    assert found.winner == 1
    assert "trials 0, 1" in found.reason or "trials 1, 0" in found.reason


def test_a_dropped_finalist_is_last_and_does_not_win() -> None:
    rng = np.random.default_rng(6)
    some = drawn(rng, [0.0, 0.0, 0.5])
    cheap = replace(some[1], dropped="worse", cost=TrainingCost(trainable_parameters=1))
    best = replace(some[2], dropped="its machine burned")
    found = choose_winner(HIGH, [some[0], cheap, best])
    assert [one.number for one in found.finalists] == [0, 2, 1]
    assert found.winner == 0
    assert found.comparisons[0].difference < 0
    assert not found.comparisons[0].better
    everyone = [replace(one, dropped="burned") for one in some]
    assert choose_winner(HIGH, everyone).winner == 2


@pytest.mark.parametrize("scores", [[], [[]], [[1.0, 2.0]], [[1.0, np.nan, 3.0]], [1.0, 2.0, 3.0]])
def test_scores_that_cannot_be_compared_are_refused(scores: Any) -> None:
    good = contender(0, [[1.0, 2.0, 3.0]])
    for function in (lambda some: choose_winner(HIGH, some), lambda some: find_trailing(HIGH, some, 0.01)):
        with pytest.raises(ValueError, match=r"trial 1: scores (of shape|are not finite numbers)"):
            function([good, contender(1, scores)])
    with pytest.raises(ValueError, match="no finalists"):
        choose_winner(HIGH, [])


def test_an_only_finalist_wins() -> None:
    found = choose_winner(HIGH, [contender(4, [[1.0, 2.0]])])
    assert (found.winner, found.comparisons, found.reason) == (4, (), "trial 4 is the only finalist")


# ------------------------------------------------------------------------------------------------------- early dropping


def of_optuna(leader: FinalistScores, other: FinalistScores, threshold: float) -> bool:
    """Return whether Optuna's pruner would stop the other finalist after the same rows."""
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.WilcoxonPruner(p_threshold=threshold))
    best = study.ask()
    for row, value in enumerate(leader.row_means):
        best.report(float(value), row)
    study.tell(best, float(leader.row_means.mean()))
    trial = study.ask()
    for row, value in enumerate(other.row_means):
        trial.report(float(value), row)
    return trial.should_prune()


@pytest.mark.filterwarnings("ignore:WilcoxonPruner is experimental")
def test_who_is_far_behind_is_dropped_as_optuna_does_it() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    rng, seen = np.random.default_rng(9), set()
    for _ in range(30):
        pair = sorted(drawn(rng, [0.35, 0.0], 2, 0.0), key=HIGH.sort_key)
        own = set(find_trailing(HIGH, pair, 0.05)) == {pair[1].number}
        assert own == of_optuna(pair[0], pair[1], 0.05)
        seen.add(own)
    assert seen == {True, False}


def test_the_leader_is_never_dropped_and_the_reason_names_it() -> None:
    rng = np.random.default_rng(10)
    some = drawn(rng, [0.0, 3.0, 2.9, -1.0], 1, 0.0)
    found = find_trailing(HIGH, some, 0.01)
    assert set(found) - {2} == {0, 3}
    assert found[3].startswith("worse than trial 1 after 1 seed (Wilcoxon signed-rank, p = ")
    replicated = [contender(one.number, -one.matrix) for one in some]
    assert find_trailing(LOW, replicated, 0.01) == found


def test_rows_of_one_group_are_no_independent_witnesses() -> None:
    rng = np.random.default_rng(14)
    other = rng.normal(0, 1, ROWS)
    some = [contender(0, [other + 0.3 + rng.normal(0, 0.2, ROWS)]), contender(1, [other])]
    assert set(find_trailing(HIGH, some, 0.01)) == {1}
    assert find_trailing(replace(HIGH, groups=["one"] * ROWS), some, 0.01) == {}
    assert set(find_trailing(replace(HIGH, groups=[None] * ROWS), some, 0.01)) == {1}


@pytest.mark.parametrize("rows", [1, 2, 5, 13, 14])
@pytest.mark.parametrize("tie", ["equal", "one differs", "answers"])
def test_few_rows_and_ties_drop_no_finalist_without_evidence(rows: int, tie: str) -> None:
    other = np.zeros(rows)
    own = other.copy()
    if tie != "equal":
        own[0] = 1.0
    if tie == "answers" and rows > 1:
        own[1] = 1.0
    assert find_trailing(HIGH, [contender(0, [own]), contender(1, [other])], 0.01) == {}

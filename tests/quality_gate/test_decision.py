"""Tests decisions of the gate: every rule, every outcome, and which outcome decides."""

import dataclasses
import math
from typing import Any

import pytest

from gate_cases import (
    ANCHOR,
    CHAMPION,
    CURRENT,
    ITSELF,
    MODEL,
    NOBODY,
    OLD,
    Models,
    Values,
    bundle,
    cost,
    evidence,
    flipped,
    gate,
    nats,
    reason,
    right,
    spread,
    with_metric,
    with_report,
)
from ratchet.config.gate import (
    AboveChanceRule,
    AtLeastRule,
    BudgetRule,
    ExportParityRule,
    ForgettingRule,
    Gate,
    MustImproveRule,
    MustNotRegressRule,
    Reference,
    Rule,
)
from ratchet.quality_gate.decision import decide_verdict
from ratchet.quality_gate.rules import describe_verdict
from ratchet.storage import files
from ratchet.storage.records.evaluation import ModelRole
from ratchet.storage.records.gate import ChampionFile

IMPROVE = MustImproveRule(rule="must_improve", metric="accuracy")
KEEP = MustNotRegressRule(rule="must_not_regress", metric="accuracy", margin=0.05)
KEEP_LOSS = MustNotRegressRule(rule="must_not_regress", metric="answer_loss", margin=0.05)
FLOOR = AtLeastRule(rule="at_least", metric="accuracy", value=0.6)
CHANCE = AboveChanceRule(rule="above_chance", metric="accuracy")
REMEMBER = ForgettingRule(rule="forgetting")
PARITY = ExportParityRule(rule="export_parity", max_logit_difference=0.01, min_greedy_agreement=0.99)
GOOD: Models = {"base": {"accuracy": right(300, 1000)}, "candidate": {"accuracy": right(800, 1000)}}


def against(scores: Values, other: Values, who: ModelRole = "base", name: str = "accuracy") -> Models:
    return {"candidate": {name: scores}, who: {name: other}}


# ------------------------------------------------------------------------------------------------------- must_improve


@pytest.mark.parametrize(
    ("candidate", "by", "found"),
    [
        (140, 0.0, "pass"),
        (102, 0.0, "undecided"),
        (100, 0.0, "undecided"),
        (60, 0.0, "fail"),
        (140, 0.1, "pass"),
        (140, 0.2, "undecided"),
        (140, 0.3, "fail"),
    ],
)
def test_must_improve_over_the_base_by_a_margin(candidate: int, by: float, found: str) -> None:
    rule = MustImproveRule(rule="must_improve", metric="accuracy", by=by)
    one = reason(rule, evidence(against(right(candidate), right(100))))
    assert one.outcome == found
    [compared] = one.comparisons
    assert (compared.metric, compared.against, compared.role, compared.n) == ("accuracy", "base", "candidate", 200)
    assert compared.difference == pytest.approx((candidate - 100) / 200)
    assert compared.low < compared.difference < compared.high
    assert (compared.better, compared.worse) == (max(0, candidate - 100), max(0, 100 - candidate))
    assert compared.p_adjusted is None  # a single claim needs no correction


@pytest.mark.parametrize(("candidate", "found"), [(1.5, "pass"), (2.0, "undecided"), (2.5, "fail")])
def test_a_loss_improves_by_falling(candidate: float, found: str) -> None:
    rule = MustImproveRule(rule="must_improve", metric="answer_loss")
    one = reason(rule, evidence(against(spread(candidate), spread(2.001), name="answer_loss")))
    assert one.outcome == found
    assert one.comparisons[0].difference == pytest.approx(2.0 - candidate, abs=0.02)
    assert " nats" in one.text


def test_confidence_decides_what_is_beyond_doubt() -> None:
    some = evidence(against(right(104), right(100)))
    own = MustImproveRule(rule="must_improve", metric="accuracy", confidence=0.9)
    assert reason(IMPROVE, some, confidence=0.99).outcome == "undecided"
    assert reason(IMPROVE, some, confidence=0.9).outcome == "pass"
    assert reason(own, some, confidence=0.99).outcome == "pass"


@pytest.mark.parametrize(
    ("count", "loss", "found"),
    [(140, 2.5, "pass"), (60, 1.5, "pass"), (60, 2.0, "undecided"), (60, 2.5, "fail")],
)
def test_one_of_several_metrics_suffices_and_all_must_fail(count: int, loss: float, found: str) -> None:
    rule = MustImproveRule(rule="must_improve", metric=("accuracy", "answer_loss"))
    models: Models = {
        "candidate": {"accuracy": right(count), "answer_loss": spread(loss)},
        "base": {"accuracy": right(100), "answer_loss": spread(2.001)},
    }
    assert reason(rule, evidence(models)).outcome == found


def test_claims_are_adjusted_together_over_all_rules() -> None:
    """p = 0.029 is significant for one claim, but not for one of three (Holm)."""
    models: Models = {
        "candidate": {name: flipped(right(100), better, worse) for name, better, worse in THREE},
        "base": {name: right(100) for name, *_ in THREE},
    }
    alone = MustImproveRule(rule="must_improve", metric="accuracy")
    assert reason(alone, evidence(models)).outcome == "pass"
    verdict = decide_verdict(
        evidence(models),
        gate(alone, MustImproveRule(rule="must_improve", metric=("harness/a/acc", "harness/b/acc"))),
    )
    first, second = verdict.reasons
    assert [first.outcome, second.outcome] == ["undecided", "undecided"]
    [claim] = first.comparisons
    assert claim.p < 0.05 < (claim.p_adjusted or 0)
    assert claim.p_adjusted == pytest.approx(3 * claim.p)
    assert all(one.p_adjusted is not None for one in second.comparisons)
    assert "adjusted for all claims" in first.text


THREE = (("accuracy", 9, 2), ("harness/a/acc", 3, 3), ("harness/b/acc", 2, 3))


def test_a_negative_improvement_is_invalid() -> None:
    rule = MustImproveRule(rule="must_improve", metric="accuracy", by=-0.05)
    one = reason(rule, evidence(GOOD))
    assert one.outcome == "invalid"
    assert "must_not_regress with margin 0.05" in one.text


# --------------------------------------------------------------------------------------------------- must_not_regress


@pytest.mark.parametrize(
    ("better", "worse", "found"),
    [(0, 0, "pass"), (30, 30, "pass"), (120, 0, "pass"), (5, 25, "pass"), (5, 45, "undecided"), (0, 120, "fail")],
)
def test_must_not_regress_against_the_champion(better: int, worse: int, found: str) -> None:
    old = right(500, 1000)
    one = reason(KEEP, evidence(against(flipped(old, better, worse), old, "champion"), CURRENT))
    assert one.outcome == found
    [compared] = one.comparisons
    assert (compared.better, compared.worse, compared.bound) == (better, worse, -0.05)
    assert "5 points" in one.text


@pytest.mark.parametrize(("candidate", "found"), [(1.99, "pass"), (2.05, "undecided"), (2.3, "fail")])
def test_a_loss_regresses_by_rising(candidate: float, found: str) -> None:
    models = against(spread(candidate), spread(2.001), "champion", "answer_loss")
    assert reason(KEEP_LOSS, evidence(models, CURRENT)).outcome == found


@pytest.mark.parametrize(("new", "found"), [(10.0, "pass"), (10.5, "undecided"), (12.0, "fail")])
def test_a_perplexity_regresses_by_a_fraction(new: float, found: str) -> None:
    rule = MustNotRegressRule(rule="must_not_regress", metric="answer_perplexity", margin=0.05)
    models = against(nats(new), nats(10.001), "champion", "answer_perplexity")
    one = reason(rule, evidence(models, CURRENT))
    assert one.outcome == found
    assert one.comparisons[0].difference == pytest.approx(1 - new / 10, abs=0.01)
    assert " %" in one.text


def test_samples_that_cannot_detect_the_margin_hold_even_if_the_estimate_is_good() -> None:
    old = right(50, 100)
    one = reason(KEEP, evidence(against(flipped(old, 12, 2), old, "champion"), CURRENT))
    [compared] = one.comparisons
    assert compared.low > 0  # significantly better, but the samples are too few for the margin
    assert compared.detectable > 0.05
    assert one.outcome == "undecided"
    assert compared.required_samples is not None
    assert compared.required_samples > 100
    assert f"about {compared.required_samples:,} test rows are required" in one.text


def test_without_a_discordant_pair_few_samples_say_little() -> None:
    """Without discordant pairs, 10 equal answers do not show equality of two models; 200 do, to five points."""
    for n, found in ((10, "undecided"), (40, "undecided"), (200, "pass")):
        scores = right(n // 2, n)
        assert reason(KEEP, evidence(against(scores, scores, "champion"), CURRENT)).outcome == found


@pytest.mark.parametrize("n", [1, 2, 19])
@pytest.mark.parametrize("name", ["accuracy", "answer_loss", "f1", "answer_perplexity"])
@pytest.mark.parametrize("candidate", ["equal", "better"])
def test_a_handful_of_samples_never_promotes(n: int, name: str, candidate: str) -> None:
    """This applies to any metric and estimate. The verdict can be written as JSON, which has no infinity."""
    scores = {
        "accuracy": (right(n, n), right(0, n)), "answer_loss": (spread(0.5, n, noise=0.01), spread(2.0, n, noise=0.01)),
        "f1": (spread(0.9, n, 0.0, 0.01), spread(0.2, n, 0.0, 0.01)), "answer_perplexity": (nats(2.0, n), nats(9.0, n)),
    }  # fmt: skip
    new, old = scores[name]
    new = old if candidate == "equal" else new
    models: Models = {"candidate": {name: new}, "base": {name: old}, "champion": {name: old}}
    rule = MustNotRegressRule(rule="must_not_regress", metric=name, margin=0.05)
    for found in (evidence(models, CURRENT), evidence({**models, "champion": {}}, NOBODY)):
        verdict = decide_verdict(found, gate(rule))
        assert verdict.decision == "HOLD"
        assert files.json_bytes(verdict.model_dump(mode="json"))


def test_too_few_samples_are_named_as_the_reason() -> None:
    """Twelve precise losses could detect a loss of the margin, but too few samples are not reliable."""
    models = against(spread(1.0, 12, noise=0.001), spread(2.0, 12, noise=0.001), name="answer_loss")
    improve = MustImproveRule(rule="must_improve", metric="answer_loss")
    for rule in (KEEP_LOSS, improve):
        found = reason(rule, evidence(models))
        assert found.outcome == "undecided"
        assert "fewer than 20 samples are not reliable" in found.text
        assert "about 20 test rows are required" in found.text
        assert "cannot detect" not in found.text


def test_groups_are_no_independent_samples() -> None:
    """One of 20 groups of the 400 rows becomes wrong: as single rows they pass, as groups they are undecided."""
    old = right(200, 400)
    new = flipped(old, worse=5)
    found = evidence(against(new, old, "champion"), CURRENT)
    assert reason(KEEP, found).outcome == "pass"
    grouped = dataclasses.replace(found, groups={key: f"g{int(key[1:]) // 20}" for key in old})
    one = reason(KEEP, grouped)
    assert one.outcome == "undecided"
    assert one.comparisons[0].groups == 20
    assert "400 samples in 20 groups" in one.text


# ------------------------------------------------------------------------------------------------ without a reference

REFERENCES: tuple[Reference, ...] = ("champion", "anchor")


@pytest.mark.parametrize("which", REFERENCES)
def test_without_a_reference_there_is_nothing_to_improve_over(which: Reference) -> None:
    rule = MustImproveRule(rule="must_improve", metric="accuracy", over=which)
    one = reason(rule, evidence(GOOD))
    assert one.outcome == "pass"
    assert f"there is no {which} yet" in one.text


@pytest.mark.parametrize("which", REFERENCES)
@pytest.mark.parametrize(("n", "found"), [(10, "undecided"), (247, "undecided"), (248, "pass")])
def test_without_a_reference_the_samples_must_be_able_to_show_the_margin(which: Reference, n: int, found: str) -> None:
    """If a tenth of the pairs is discordant, 248 samples show a loss of five points (Connor 1987)."""
    rule = MustNotRegressRule(rule="must_not_regress", metric="accuracy", margin=0.05, against=which)
    one = reason(rule, evidence({"base": {"accuracy": right(0, n)}, "candidate": {"accuracy": right(n, n)}}))
    assert one.outcome == found
    assert f"there is no {which} yet" in one.text
    assert ("about 248 test rows are required" in one.text) is (found == "undecided")


@pytest.mark.parametrize(("n", "found"), [(10, "undecided"), (60, "undecided"), (400, "pass")])
def test_without_a_reference_the_spread_of_losses_is_that_against_the_base(n: int, found: str) -> None:
    models = against(spread(1.0, n, noise=0.2), spread(2.0, n, noise=0.2), name="answer_loss")
    assert reason(KEEP_LOSS, evidence(models)).outcome == found


def test_without_a_reference_rows_of_one_group_count_once() -> None:
    found = evidence(against(right(300, 400), right(0, 400)))
    assert reason(KEEP, found).outcome == "pass"
    grouped = dataclasses.replace(found, groups={f"s{k:05d}": f"g{k // 4}" for k in range(400)})
    assert reason(KEEP, grouped).outcome == "undecided"


@pytest.mark.parametrize("which", REFERENCES)
@pytest.mark.parametrize("rule", ["must_improve", "must_not_regress"])
def test_the_candidate_is_not_failed_against_itself(which: Reference, rule: str) -> None:
    rules: dict[str, Rule] = {
        "must_improve": MustImproveRule(rule="must_improve", metric="accuracy", over=which),
        "must_not_regress": MustNotRegressRule(rule="must_not_regress", metric="accuracy", margin=0.05, against=which),
    }
    itself = ChampionFile(champion=ITSELF, anchor=ITSELF)
    found = evidence({**GOOD, "champion": GOOD["candidate"], "anchor": GOOD["candidate"]}, itself)
    verdict = decide_verdict(found, gate(rules[rule]))
    assert (verdict.decision, verdict.is_champion) == ("PROMOTE", True)
    assert (verdict.champion_digest, verdict.anchor_digest) == (MODEL, MODEL)
    assert f"the candidate is the {which}" in verdict.reasons[0].text
    assert "(already the champion)" in describe_verdict(verdict)


def test_the_champion_must_still_beat_the_base() -> None:
    models: Models = {"base": {"accuracy": right(160)}, "candidate": {"accuracy": right(10)}}
    itself = ChampionFile(champion=ITSELF, anchor=ITSELF)
    assert decide_verdict(evidence(models, itself), gate(IMPROVE)).decision == "REJECT"


def test_an_anchor_that_is_the_champion_need_not_be_scored_twice() -> None:
    rule = MustNotRegressRule(rule="must_not_regress", metric="accuracy", margin=0.05, against="anchor")
    one = reason(rule, evidence({**GOOD, "champion": GOOD["candidate"]}, CURRENT))
    assert (one.outcome, one.comparisons[0].against) == ("pass", "anchor")


# ----------------------------------------------------------------------------------------- floors, chance, forgetting


@pytest.mark.parametrize(
    ("value", "found"), [(0.74, "pass"), (0.76, "undecided"), (0.84, "undecided"), (0.86, "fail"), (0.0, "pass")]
)
def test_at_least_is_decided_by_wilsons_bounds(value: float, found: str) -> None:
    # The bounds of 160 of 200 are 0.750 and 0.842, 95 % one-sided.
    rule = AtLeastRule(rule="at_least", metric="accuracy", value=value)
    one = reason(rule, evidence({"candidate": {"accuracy": right(160)}}))
    assert one.outcome == found
    assert "80.0 % (95 % confidence: no worse than 75.0 %, no better than 84.2 %; 200 samples)" in one.text


@pytest.mark.parametrize(
    ("name", "scores", "value", "found"),
    [
        ("answer_loss", spread(2.0), 2.1, "pass"),
        ("answer_loss", spread(2.0), 2.0, "undecided"),
        ("answer_loss", spread(2.0), 1.9, "fail"),
        ("answer_perplexity", nats(math.exp(2.0), 200), math.exp(2.1), "pass"),
        ("answer_perplexity", nats(math.exp(2.0), 200), math.exp(2.0), "undecided"),
        ("answer_perplexity", nats(math.exp(2.0), 200), math.exp(1.9), "fail"),
        ("f1", spread(0.7, width=0.1), 0.65, "pass"),
        ("f1", spread(0.7, width=0.1), 0.7, "undecided"),
        ("f1", spread(0.7, width=0.1), 0.75, "fail"),
        ("f1", spread(0.7, 10), 0.1, "undecided"),  # ten samples cannot show a minimum
    ],
    ids=lambda value: "" if isinstance(value, dict) else None,
)
def test_at_least_follows_the_direction_of_the_metric(name: str, scores: Values, value: float, found: str) -> None:
    one = reason(AtLeastRule(rule="at_least", metric=name, value=value), evidence({"candidate": {name: scores}}))
    assert one.outcome == found
    assert ("must be at most" in one.text) is (name != "f1")


@pytest.mark.parametrize(
    ("count", "n", "value", "found"),
    [
        (40, 200, 0.26, "pass"), (40, 200, 0.24, "undecided"), (40, 200, 0.16, "undecided"), (40, 200, 0.15, "fail"),
        (0, 20, 0.1, "undecided"), (0, 20, 0.12, "pass"), (1, 20, 0.12, "undecided"),
    ],
)  # fmt: skip
def test_a_maximum_of_a_rate_is_decided_by_wilsons_bounds(count: int, n: int, value: float, found: str) -> None:
    # The bounds of 40 of 200 are 0.158 and 0.250; the upper one of 0 of 20 is 0.119, 95 % one-sided.
    rule = AtLeastRule(rule="at_least", metric="error_rate", value=value)
    one = reason(rule, evidence({"candidate": {"error_rate": right(count, n)}}))
    assert one.outcome == found
    assert "must be at most" in one.text


@pytest.mark.parametrize(
    ("score", "n", "value", "found"),
    [(0.9, 20, 0.77, "pass"), (0.9, 20, 0.78, "undecided"), (0.5, 20, 0.43, "pass"), (0.5, 20, 0.58, "fail"),
     (0.5, 20, 0.56, "undecided")],
)  # fmt: skip
def test_bounds_of_equal_scores_allow_for_unseen_scores(score: float, n: int, value: float, found: str) -> None:
    # The exact upper bound of 0 of 20 is 0.139: this share of scores, all 0 or all 1, may be missing from the sample.
    scores = {f"s{k}": score for k in range(n)}
    rule = AtLeastRule(rule="at_least", metric="overlap", value=value)
    assert reason(rule, evidence({"candidate": {"overlap": scores}})).outcome == found


@pytest.mark.parametrize(("name", "value"), [("accuracy", 60), ("accuracy", -0.1), ("answer_perplexity", 0)])
def test_a_floor_that_no_figure_can_have_is_invalid(name: str, value: float) -> None:
    rule = AtLeastRule(rule="at_least", metric=name, value=value)
    assert reason(rule, evidence({"candidate": {name: right(160)}})).outcome == "invalid"


@pytest.mark.parametrize(
    ("count", "n", "found"),
    [(160, 200, "pass"), (64, 200, "pass"), (55, 200, "undecided"), (50, 200, "fail"), (0, 200, "fail"),
     (4, 10, "undecided"), (2, 10, "fail")],
)  # fmt: skip
def test_a_figure_within_chance_is_an_alarm(count: int, n: int, found: str) -> None:
    one = reason(CHANCE, evidence({"candidate": {"accuracy": right(count, n)}}))
    assert one.outcome == found
    assert "guessing reaches 25.0 %" in one.text
    assert ("may be broken" in one.text) is (found != "pass")


def test_the_chance_level_can_be_set_and_must_be_known() -> None:
    said = AboveChanceRule(rule="above_chance", metric="f1", chance=0.5)
    assert reason(said, evidence({"candidate": {"f1": spread(0.7)}})).outcome == "pass"
    assert reason(said, evidence({"candidate": {"f1": spread(0.4)}})).outcome == "fail"
    unknown = reason(AboveChanceRule(rule="above_chance", metric="f1"), evidence({"candidate": {"f1": spread(0.7)}}))
    assert (unknown.outcome, "`chance` in this rule" in unknown.text) == ("invalid", True)
    loss = AboveChanceRule(rule="above_chance", metric="answer_loss", chance=0.5)
    assert reason(loss, evidence({"candidate": {"answer_loss": spread(0.7)}})).outcome == "invalid"


@pytest.mark.parametrize("rule", [FLOOR, CHANCE], ids=["at_least", "above_chance"])
def test_a_floor_holds_for_every_form_that_was_scored(rule: Rule) -> None:
    both: Models = {"candidate": {"accuracy": right(160)}, "merged": {"accuracy": right(160)}}
    broken: Models = {**both, "merged": {"accuracy": right(20)}}
    assert reason(rule, evidence(both)).outcome == "pass"
    one = reason(rule, evidence(broken))
    assert one.outcome == "fail"
    assert "of merged 10.0 %" in one.text


@pytest.mark.parametrize(("new", "found"), [(29.9, "pass"), (31.4, "undecided"), (35.0, "fail")])
def test_general_text_must_not_be_forgotten(new: float, found: str) -> None:
    one = reason(REMEMBER, evidence(against(nats(new), nats(30.0), name="general_perplexity")))
    assert one.outcome == found
    assert ("rose by" in one.text) is (new > 30)
    assert "allowed rise: 5 %" in one.text


def test_few_blocks_of_text_hold_and_say_how_many_it_takes() -> None:
    noisy = against(nats(30.1, 40, 0.5), nats(30.0, 40, 0.5), name="general_perplexity")
    one = reason(REMEMBER, evidence(noisy))
    assert one.outcome == "undecided"
    assert one.comparisons[0].required_samples is not None
    assert f"about {one.comparisons[0].required_samples:,} test rows are required" in one.text


def test_forgetting_is_tested_in_every_comparable_form() -> None:
    models: Models = {
        "base": {"general_perplexity": nats(30.0)},
        "candidate": {"general_perplexity": nats(29.9)},
        "merged": {"general_perplexity": nats(40.0)},
    }
    found = evidence(models)
    assert reason(REMEMBER, found).outcome == "pass"  # the contract of the merged form differs from the base's
    merged = found.report.scores["merged"].model_copy(update={"contract": "k1"})
    alike = with_report(found, scores={**found.report.scores, "merged": merged})
    one = reason(REMEMBER, alike)
    assert (one.outcome, len(one.comparisons)) == ("fail", 2)


# ------------------------------------------------------------------------------------------- budgets and export parity


@pytest.mark.parametrize(
    ("of", "at_most", "costs", "found"),
    [
        ("size", "3MiB", {"candidate": cost()}, "pass"),
        ("size", "2MiB", {"candidate": cost()}, "fail"),
        ("latency", 0.2, {"candidate": cost()}, "pass"),
        ("latency", 0.19, {"candidate": cost()}, "fail"),
        ("memory", "1GiB", {"candidate": cost()}, "pass"),
        ("memory", 2**30 - 1, {"candidate": cost()}, "fail"),
        # The measurement of the export applies, if there is one.
        ("latency", 0.2, {"candidate": cost(9), "merged": cost()}, "pass"),
        ("latency", 0.2, {"candidate": cost(), "merged": cost(9)}, "fail"),
    ],
)
def test_a_budget_limits_the_measured_cost(of: str, at_most: Any, costs: Any, found: str) -> None:
    rule = BudgetRule.model_validate({"rule": "budget", "resource": of, "maximum": at_most})
    one = reason(rule, with_report(evidence(GOOD), costs=costs))
    assert (one.outcome, one.metric) == (found, of)


@pytest.mark.parametrize("costs", [{}, {"candidate": cost(math.nan)}, {"base": cost()}], ids=["none", "nan", "other"])
def test_a_budget_of_an_unmeasured_cost_is_invalid(costs: Any) -> None:
    one = reason(BudgetRule(rule="budget", resource="latency", maximum=1), with_report(evidence(GOOD), costs=costs))
    assert one.outcome == "invalid"
    assert ("evaluate.latency_rows" in one.text) is ("candidate" not in costs)


@pytest.mark.parametrize(
    ("difference", "agreement", "found"),
    [(0.01, 0.99, "pass"), (0.0, 1.0, "pass"), (0.0101, 1.0, "fail"), (0.0, 0.9899, "fail"), (math.nan, 1.0, "fail"),
     (0.0, math.nan, "fail"), (math.inf, 1.0, "fail")],
)  # fmt: skip
def test_the_export_must_answer_like_the_adapter(difference: float, agreement: float, found: str) -> None:
    assert reason(PARITY, evidence(GOOD, bundle=bundle(difference, agreement))).outcome == found


# ---------------------------------------------------------------------------------------- precedence of outcomes, texts

UNDECIDED = AtLeastRule(rule="at_least", metric="accuracy", value=0.8)
FAIL = AtLeastRule(rule="at_least", metric="accuracy", value=0.99)
INVALID = AtLeastRule(rule="at_least", metric="missing", value=0.1)


@pytest.mark.parametrize(
    ("which", "decision"),
    [
        ([FLOOR], "PROMOTE"),
        ([FLOOR, FLOOR], "PROMOTE"),
        ([FLOOR, UNDECIDED], "HOLD"),
        ([UNDECIDED, FLOOR], "HOLD"),
        ([FLOOR, FAIL], "REJECT"),
        ([UNDECIDED, FAIL, FLOOR], "REJECT"),
        ([INVALID, FLOOR], "INVALID"),
        ([FAIL, UNDECIDED, INVALID], "INVALID"),
    ],
    ids=lambda value: "" if isinstance(value, list) else value,
)
def test_the_worst_answer_wins(which: list[Rule], decision: str) -> None:
    verdict = decide_verdict(evidence(GOOD), gate(*which))
    assert verdict.decision == decision
    assert [one.metric for one in verdict.reasons] == [getattr(rule, "metric", "") for rule in which]


EVERY = (
    IMPROVE, KEEP, MustImproveRule(rule="must_improve", metric=("answer_loss", "accuracy"), over="champion"), KEEP_LOSS,
    FLOOR, CHANCE, REMEMBER, BudgetRule(rule="budget", resource="size", maximum=2**30), PARITY,
)  # fmt: skip


def everything(model: int, n: int = 1000) -> dict[str, dict[str, float]]:
    return {
        "accuracy": right(4 * n // 5 + n * model // 50, n),
        "answer_loss": spread(1.0 - 0.2 * model, n),
        "general_perplexity": nats(30.0 + 0.01 * model),
    }


def test_the_same_evidence_gives_the_same_bytes_in_any_order() -> None:
    models: Models = {"base": everything(0), "candidate": everything(2), "champion": everything(1)}
    backwards: Models = {
        who: {name: dict(reversed(scores.items())) for name, scores in reversed(found.items())}
        for who, found in models.items()
    }
    first, second, turned = (
        decide_verdict(evidence(some, CURRENT), gate(*EVERY)) for some in (models, models, backwards)
    )
    assert first.decision == "PROMOTE"
    written = [files.json_bytes(verdict.model_dump(mode="json")) for verdict in (first, second, turned)]
    assert written[0] == written[1] == written[2]


def test_the_verdict_names_exactly_what_it_judged() -> None:
    champion = ChampionFile(champion=CHAMPION, anchor=ANCHOR)
    models: Models = {**GOOD, "champion": GOOD["base"], "anchor": GOOD["base"]}
    verdict = decide_verdict(evidence(models, champion, test_set_uses=7), gate(IMPROVE))
    assert (verdict.model_digest, verdict.adapter_digest, verdict.run_id) == (MODEL, "d" * 64, "r1")
    assert (verdict.is_champion, verdict.champion_digest, verdict.anchor_digest) == (False, OLD, ANCHOR.model_digest)
    assert (verdict.test_set_digest, verdict.test_set_uses) == ("9" * 64, 7)


def test_the_verdict_is_described_with_a_line_for_each_rule() -> None:
    verdict = decide_verdict(evidence(GOOD, bundle=bundle(1.0)), gate(IMPROVE, UNDECIDED, PARITY, INVALID))
    lines = describe_verdict(verdict).splitlines()
    assert lines[0].startswith(f"INVALID: model {MODEL[:12]}, run r1")
    assert [line.split()[0] for line in lines[1:]] == ["pass", "????", "FAIL", "INVALID"]
    assert "accuracy 50 points better than the base (95 % confidence: at least +47" in lines[1]
    assert "run `ratchet promote` to make it the champion" in describe_verdict(
        decide_verdict(evidence(GOOD), gate(IMPROVE))
    )


@pytest.mark.parametrize(("uses", "decision"), [(1, "PROMOTE"), (50, "PROMOTE"), (51, "HOLD")])
def test_too_many_uses_of_one_test_set_hold(uses: int, decision: str) -> None:
    verdict = decide_verdict(evidence(GOOD, test_set_uses=uses), gate(IMPROVE))
    assert verdict.decision == decision
    if decision == "HOLD":
        assert (verdict.reasons[-1].rule, "new test rows" in verdict.reasons[-1].text) == ("test_set_uses", True)


@pytest.mark.parametrize(("model", "n", "decision"), [(0, 1000, "REJECT"), (2, 1000, "PROMOTE"), (2, 10, "HOLD")])
def test_the_default_rules_decide(model: int, n: int, decision: str) -> None:
    """An untrained adapter changes no score, which is not a significant improvement; ten samples decide nothing."""
    verdict = decide_verdict(
        evidence({"base": everything(0, n), "candidate": everything(model, n)}), Gate(resamples=1000)
    )
    assert verdict.decision == decision
    found = {one.rule: one.outcome for one in verdict.reasons}
    assert (found["must_improve"] == "fail", found["forgetting"]) == (decision == "REJECT", "pass")


def test_rules_can_be_held_against_the_form_that_ships() -> None:
    """The contract of the reference selects the form to compare, then the order of evaluate.formats."""
    models: Models = {**GOOD, "merged": {"accuracy": right(100, 1000)}}
    found = evidence(models)
    assert reason(IMPROVE, found).comparisons[0].role == "candidate"
    for who in ("base", "candidate"):  # afterwards all three have one contract
        scores = {**found.report.scores, who: found.report.scores[who].model_copy(update={"contract": "k2"})}
        found = with_report(found, scores=scores)
    assert reason(IMPROVE, found).comparisons[0].role == "candidate"
    first = dataclasses.replace(found, model_formats=("merged", "adapter"))
    one = reason(IMPROVE, first)
    assert (one.outcome, one.comparisons[0].role) == ("fail", "merged")


def test_scores_other_than_shares_are_printed_unscaled() -> None:
    found = with_metric(evidence(GOOD), "accuracy", unit="mean of samples")
    assert "0.5" in reason(IMPROVE, found).text

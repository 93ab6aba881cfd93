"""The gate: each rule, each answer, and which answer wins."""

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
from ratchet import files
from ratchet.config_gate import (
    AboveChance,
    AtLeast,
    Budget,
    ExportParity,
    Forgetting,
    Gate,
    MustImprove,
    MustNotRegress,
    Reference,
    Rule,
)
from ratchet.gating import words
from ratchet.gating.judgement import judge
from ratchet.records_evaluation import Who
from ratchet.records_gate import ChampionFile

IMPROVE = MustImprove(rule="must_improve", metric="accuracy")
KEEP = MustNotRegress(rule="must_not_regress", metric="accuracy", margin=0.05)
KEEP_LOSS = MustNotRegress(rule="must_not_regress", metric="answer_loss", margin=0.05)
FLOOR = AtLeast(rule="at_least", metric="accuracy", value=0.6)
CHANCE = AboveChance(rule="above_chance", metric="accuracy")
REMEMBER = Forgetting(rule="forgetting")
PARITY = ExportParity(rule="export_parity", max_logit_difference=0.01, min_greedy_agreement=0.99)
GOOD: Models = {"base": {"accuracy": right(300, 1000)}, "candidate": {"accuracy": right(800, 1000)}}


def against(scores: Values, other: Values, who: Who = "base", name: str = "accuracy") -> Models:
    return {"candidate": {name: scores}, who: {name: other}}


# ------------------------------------------------------------------------------------------------------- must_improve


@pytest.mark.parametrize(
    ("base", "candidate", "found"),
    [(100, 140, "pass"), (100, 102, "undecided"), (100, 60, "fail"), (100, 100, "undecided")],
)
def test_must_improve_over_the_base(base: int, candidate: int, found: str) -> None:
    one = reason(IMPROVE, evidence(against(right(candidate), right(base))))
    assert one.outcome == found
    [compared] = one.comparisons
    assert (compared.metric, compared.against, compared.form, compared.n) == ("accuracy", "base", "candidate", 200)
    assert compared.difference == pytest.approx((candidate - base) / 200)
    assert compared.low < compared.difference < compared.high
    assert (compared.better, compared.worse) == (max(0, candidate - base), max(0, base - candidate))
    assert compared.p_adjusted is None  # one claim needs no correction


@pytest.mark.parametrize(("by", "found"), [(0.0, "pass"), (0.1, "pass"), (0.2, "undecided"), (0.3, "fail")])
def test_must_improve_by_a_margin(by: float, found: str) -> None:
    rule = MustImprove(rule="must_improve", metric="accuracy", by=by)
    assert reason(rule, evidence(against(right(140), right(100)))).outcome == found


@pytest.mark.parametrize(("candidate", "found"), [(1.5, "pass"), (2.0, "undecided"), (2.5, "fail")])
def test_a_loss_improves_by_falling(candidate: float, found: str) -> None:
    rule = MustImprove(rule="must_improve", metric="answer_loss")
    one = reason(rule, evidence(against(spread(candidate), spread(2.001), name="answer_loss")))
    assert one.outcome == found
    assert one.comparisons[0].difference == pytest.approx(2.0 - candidate, abs=0.02)
    assert " nats" in one.text


def test_confidence_decides_what_is_beyond_doubt() -> None:
    some = evidence(against(right(104), right(100)))
    own = MustImprove(rule="must_improve", metric="accuracy", confidence=0.9)
    assert reason(IMPROVE, some, confidence=0.99).outcome == "undecided"
    assert reason(IMPROVE, some, confidence=0.9).outcome == "pass"
    assert reason(own, some, confidence=0.99).outcome == "pass"


def test_of_several_metrics_one_suffices_and_all_must_fail() -> None:
    rule = MustImprove(rule="must_improve", metric=("accuracy", "answer_loss"))

    def both(count: int, loss: float) -> str:
        models: Models = {
            "candidate": {"accuracy": right(count), "answer_loss": spread(loss)},
            "base": {"accuracy": right(100), "answer_loss": spread(2.001)},
        }
        return reason(rule, evidence(models)).outcome

    assert both(140, 2.5) == "pass"
    assert both(60, 1.5) == "pass"
    assert both(60, 2.0) == "undecided"
    assert both(60, 2.5) == "fail"


def test_claims_are_adjusted_together_over_all_rules() -> None:
    """p = .029 is beyond doubt as one claim, and not as one of three (Holm)."""
    models: Models = {
        "candidate": {name: flipped(right(100), better, worse) for name, better, worse in THREE},
        "base": {name: right(100) for name, *_ in THREE},
    }
    alone = MustImprove(rule="must_improve", metric="accuracy")
    assert reason(alone, evidence(models)).outcome == "pass"
    verdict = judge(
        evidence(models),
        gate(alone, MustImprove(rule="must_improve", metric=("harness/a/acc", "harness/b/acc"))),
    )
    first, second = verdict.reasons
    assert [first.outcome, second.outcome] == ["undecided", "undecided"]
    [claim] = first.comparisons
    assert claim.p < 0.05 < (claim.p_adjusted or 0)
    assert claim.p_adjusted == pytest.approx(3 * claim.p)
    assert all(one.p_adjusted is not None for one in second.comparisons)
    assert "among all claims" in first.text


THREE = (("accuracy", 9, 2), ("harness/a/acc", 3, 3), ("harness/b/acc", 2, 3))


def test_a_loss_is_no_improvement() -> None:
    rule = MustImprove(rule="must_improve", metric="accuracy", by=-0.05)
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
    rule = MustNotRegress(rule="must_not_regress", metric="answer_perplexity", margin=0.05)
    models = against(nats(new), nats(10.001), "champion", "answer_perplexity")
    one = reason(rule, evidence(models, CURRENT))
    assert one.outcome == found
    assert one.comparisons[0].difference == pytest.approx(1 - new / 10, abs=0.01)
    assert " %" in one.text


def test_must_not_regress_against_the_base() -> None:
    rule = MustNotRegress(rule="must_not_regress", metric="accuracy", against="base", margin=0.05)
    assert reason(rule, evidence(GOOD)).outcome == "pass"


def test_samples_that_could_not_show_the_margin_hold_even_where_the_estimate_looks_fine() -> None:
    old = right(50, 100)
    one = reason(KEEP, evidence(against(flipped(old, 12, 2), old, "champion"), CURRENT))
    [compared] = one.comparisons
    assert compared.low > 0  # better beyond doubt, and yet
    assert compared.detectable > 0.05
    assert one.outcome == "undecided"
    assert compared.needed is not None
    assert compared.needed > 100
    assert f"about {compared.needed:,} would" in one.text


def test_without_a_discordant_pair_few_samples_say_little() -> None:
    """Zero discordant pairs: 10 equal answers do not show that two models are equal, 200 do, to five points."""
    for n, found in ((10, "undecided"), (40, "undecided"), (200, "pass")):
        scores = right(n // 2, n)
        assert reason(KEEP, evidence(against(scores, scores, "champion"), CURRENT)).outcome == found


@pytest.mark.parametrize("n", [1, 2, 10, 19])
@pytest.mark.parametrize("name", ["accuracy", "answer_loss", "f1", "answer_perplexity"])
@pytest.mark.parametrize("candidate", ["equal", "better"])
def test_a_handful_of_samples_never_promotes(n: int, name: str, candidate: str) -> None:
    """Whatever the metric, however good it looks, with a champion and without."""
    scores = {
        "accuracy": (right(n, n), right(0, n)), "answer_loss": (spread(0.5, n, noise=0.01), spread(2.0, n, noise=0.01)),
        "f1": (spread(0.9, n, 0.0, 0.01), spread(0.2, n, 0.0, 0.01)), "answer_perplexity": (nats(2.0, n), nats(9.0, n)),
    }  # fmt: skip
    new, old = scores[name]
    new = old if candidate == "equal" else new
    models: Models = {"candidate": {name: new}, "base": {name: old}, "champion": {name: old}}
    rule = MustNotRegress(rule="must_not_regress", metric=name, margin=0.05)
    assert reason(rule, evidence(models, CURRENT)).outcome == "undecided"
    assert reason(rule, evidence({**models, "champion": {}}, NOBODY)).outcome == "undecided"


def test_groups_are_no_independent_samples() -> None:
    """400 rows in 20 groups, of which one group became wrong: as rows they pass, as groups they cannot tell."""
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
    rule = MustImprove(rule="must_improve", metric="accuracy", over=which)
    one = reason(rule, evidence(GOOD))
    assert one.outcome == "pass"
    assert f"there is no {which} yet" in one.text


@pytest.mark.parametrize("which", REFERENCES)
@pytest.mark.parametrize(("n", "found"), [(10, "undecided"), (247, "undecided"), (248, "pass")])
def test_without_a_reference_the_samples_must_be_able_to_show_the_margin(which: Reference, n: int, found: str) -> None:
    """248 samples show a loss of five points where a tenth of them is discordant (Connor 1987)."""
    rule = MustNotRegress(rule="must_not_regress", metric="accuracy", margin=0.05, against=which)
    one = reason(rule, evidence({"base": {"accuracy": right(0, n)}, "candidate": {"accuracy": right(n, n)}}))
    assert one.outcome == found
    assert f"there is no {which} yet" in one.text
    assert ("about 248 would" in one.text) is (found == "undecided")


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
        "must_improve": MustImprove(rule="must_improve", metric="accuracy", over=which),
        "must_not_regress": MustNotRegress(rule="must_not_regress", metric="accuracy", margin=0.05, against=which),
    }
    itself = ChampionFile(champion=ITSELF, anchor=ITSELF)
    found = evidence({**GOOD, "champion": GOOD["candidate"], "anchor": GOOD["candidate"]}, itself)
    verdict = judge(found, gate(rules[rule]))
    assert (verdict.decision, verdict.is_champion) == ("PROMOTE", True)
    assert (verdict.champion_digest, verdict.anchor_digest) == (MODEL, MODEL)
    assert f"the candidate is the {which}" in verdict.reasons[0].text
    assert "(it is the champion)" in words.describe(verdict)


def test_the_champion_must_still_beat_the_base() -> None:
    models: Models = {"base": {"accuracy": right(160)}, "candidate": {"accuracy": right(10)}}
    itself = ChampionFile(champion=ITSELF, anchor=ITSELF)
    assert judge(evidence(models, itself), gate(IMPROVE)).decision == "REJECT"


def test_an_anchor_that_is_the_champion_need_not_be_scored_twice() -> None:
    rule = MustNotRegress(rule="must_not_regress", metric="accuracy", margin=0.05, against="anchor")
    one = reason(rule, evidence({**GOOD, "champion": GOOD["candidate"]}, CURRENT))
    assert (one.outcome, one.comparisons[0].against) == ("pass", "anchor")


# ----------------------------------------------------------------------------------------- floors, chance, forgetting


@pytest.mark.parametrize(
    ("value", "found"), [(0.74, "pass"), (0.76, "undecided"), (0.84, "undecided"), (0.86, "fail"), (0.0, "pass")]
)
def test_at_least_is_decided_by_wilsons_bounds(value: float, found: str) -> None:
    rule = AtLeast(rule="at_least", metric="accuracy", value=value)  # 160 of 200: .750 to .842, 95 % one-sided
    one = reason(rule, evidence({"candidate": {"accuracy": right(160)}}))
    assert one.outcome == found
    assert "80.0 % (95 % sure: no worse than 75.0 %, no better than 84.2 %; 200 samples)" in one.text


@pytest.mark.parametrize(("value", "found"), [(2.1, "pass"), (2.0, "undecided"), (1.9, "fail")])
@pytest.mark.parametrize("name", ["answer_loss", "answer_perplexity"])
def test_a_loss_is_at_least_as_good_when_it_is_at_most_as_high(name: str, value: float, found: str) -> None:
    scores = spread(2.0) if name == "answer_loss" else nats(math.exp(2.0), 200)
    floor = value if name == "answer_loss" else math.exp(value)
    one = reason(AtLeast(rule="at_least", metric=name, value=floor), evidence({"candidate": {name: scores}}))
    assert one.outcome == found
    assert "must be at most" in one.text


@pytest.mark.parametrize(("value", "found"), [(0.65, "pass"), (0.7, "undecided"), (0.75, "fail")])
def test_a_mean_score_has_a_floor_too(value: float, found: str) -> None:
    rule = AtLeast(rule="at_least", metric="f1", value=value)
    assert reason(rule, evidence({"candidate": {"f1": spread(0.7, width=0.1)}})).outcome == found


def test_a_floor_under_a_handful_of_means_cannot_be_shown() -> None:
    rule = AtLeast(rule="at_least", metric="f1", value=0.1)
    assert reason(rule, evidence({"candidate": {"f1": spread(0.7, 10)}})).outcome == "undecided"


@pytest.mark.parametrize(("name", "value"), [("accuracy", 60), ("accuracy", -0.1), ("answer_perplexity", 0)])
def test_a_floor_that_no_figure_can_have_is_invalid(name: str, value: float) -> None:
    rule = AtLeast(rule="at_least", metric=name, value=value)
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


def test_chance_may_be_said_and_must_be_known() -> None:
    said = AboveChance(rule="above_chance", metric="f1", chance=0.5)
    assert reason(said, evidence({"candidate": {"f1": spread(0.7)}})).outcome == "pass"
    assert reason(said, evidence({"candidate": {"f1": spread(0.4)}})).outcome == "fail"
    unknown = reason(AboveChance(rule="above_chance", metric="f1"), evidence({"candidate": {"f1": spread(0.7)}}))
    assert (unknown.outcome, "`chance` of this rule" in unknown.text) == ("invalid", True)
    loss = AboveChance(rule="above_chance", metric="answer_loss", chance=0.5)
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
    assert "at most 5 %" in one.text


def test_few_blocks_of_text_hold_and_say_how_many_it_takes() -> None:
    noisy = against(nats(30.1, 40, 0.5), nats(30.0, 40, 0.5), name="general_perplexity")
    one = reason(REMEMBER, evidence(noisy))
    assert one.outcome == "undecided"
    assert one.comparisons[0].needed is not None
    assert f"about {one.comparisons[0].needed:,} would" in one.text


def test_forgetting_is_looked_for_in_every_form_that_can_be_compared() -> None:
    models: Models = {
        "base": {"general_perplexity": nats(30.0)},
        "candidate": {"general_perplexity": nats(29.9)},
        "merged": {"general_perplexity": nats(40.0)},
    }
    found = evidence(models)
    assert reason(REMEMBER, found).outcome == "pass"  # the merged form has another contract than the base
    merged = found.report.scores["merged"].model_copy(update={"contract": "k1"})
    alike = with_report(found, scores={**found.report.scores, "merged": merged})
    one = reason(REMEMBER, alike)
    assert (one.outcome, len(one.comparisons)) == ("fail", 2)


# ------------------------------------------------------------------------------------------- budgets and export parity


@pytest.mark.parametrize(
    ("of", "at_most", "found"),
    [("size", "3MiB", "pass"), ("size", "2MiB", "fail"), ("latency", 0.2, "pass"), ("latency", 0.19, "fail"),
     ("memory", "1GiB", "pass"), ("memory", 2**30 - 1, "fail")],
)  # fmt: skip
def test_a_budget_is_kept(of: str, at_most: Any, found: str) -> None:
    rule = Budget.model_validate({"rule": "budget", "of": of, "at_most": at_most})
    one = reason(rule, with_report(evidence(GOOD), costs={"candidate": cost()}))
    assert (one.outcome, one.metric) == (found, of)


def test_a_budget_is_of_the_export_where_that_was_measured() -> None:
    rule = Budget(rule="budget", of="latency", at_most=0.2)
    assert reason(rule, with_report(evidence(GOOD), costs={"candidate": cost(9), "merged": cost()})).outcome == "pass"
    assert reason(rule, with_report(evidence(GOOD), costs={"candidate": cost(), "merged": cost(9)})).outcome == "fail"


@pytest.mark.parametrize("costs", [{}, {"candidate": cost(math.nan)}, {"base": cost()}], ids=["none", "nan", "other"])
def test_what_was_not_measured_cannot_be_within_a_budget(costs: Any) -> None:
    one = reason(Budget(rule="budget", of="latency", at_most=1), with_report(evidence(GOOD), costs=costs))
    assert one.outcome == "invalid"
    assert ("evaluate.latency_rows" in one.text) is ("candidate" not in costs)


@pytest.mark.parametrize(
    ("difference", "agreement", "found"),
    [(0.01, 0.99, "pass"), (0.0, 1.0, "pass"), (0.0101, 1.0, "fail"), (0.0, 0.9899, "fail"), (math.nan, 1.0, "fail"),
     (0.0, math.nan, "fail"), (math.inf, 1.0, "fail")],
)  # fmt: skip
def test_the_export_must_answer_like_the_adapter(difference: float, agreement: float, found: str) -> None:
    assert reason(PARITY, evidence(GOOD, bundle=bundle(difference, agreement))).outcome == found


# -------------------------------------------------------------------------------------------- which answer wins, words

UNDECIDED = AtLeast(rule="at_least", metric="accuracy", value=0.8)
FAIL = AtLeast(rule="at_least", metric="accuracy", value=0.99)
INVALID = AtLeast(rule="at_least", metric="missing", value=0.1)


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
    verdict = judge(evidence(GOOD), gate(*which))
    assert verdict.decision == decision
    assert [one.metric for one in verdict.reasons] == [getattr(rule, "metric", "") for rule in which]


EVERY = (
    IMPROVE, KEEP, MustImprove(rule="must_improve", metric=("answer_loss", "accuracy"), over="champion"), KEEP_LOSS,
    FLOOR, CHANCE, REMEMBER, Budget(rule="budget", of="size", at_most=2**30), PARITY,
)  # fmt: skip


def everything(model: int) -> dict[str, dict[str, float]]:
    return {
        "accuracy": right(800 + 20 * model, 1000),
        "answer_loss": spread(1.0 - 0.2 * model, 1000),
        "general_perplexity": nats(30.0 + 0.01 * model),
    }


def test_the_same_evidence_gives_the_same_bytes_in_any_order() -> None:
    models: Models = {"base": everything(0), "candidate": everything(2), "champion": everything(1)}
    backwards: Models = {
        who: {name: dict(reversed(scores.items())) for name, scores in reversed(found.items())}
        for who, found in models.items()
    }
    first, second, turned = (judge(evidence(some, CURRENT), gate(*EVERY)) for some in (models, models, backwards))
    assert first.decision == "PROMOTE"
    written = [files.json_bytes(verdict.model_dump(mode="json")) for verdict in (first, second, turned)]
    assert written[0] == written[1] == written[2]


def test_the_verdict_names_exactly_what_it_judged() -> None:
    champion = ChampionFile(champion=CHAMPION, anchor=ANCHOR)
    models: Models = {**GOOD, "champion": GOOD["base"], "anchor": GOOD["base"]}
    verdict = judge(evidence(models, champion, lookups=7), gate(IMPROVE))
    assert (verdict.model_digest, verdict.adapter_digest, verdict.run_id) == (MODEL, "d" * 64, "r1")
    assert (verdict.is_champion, verdict.champion_digest, verdict.anchor_digest) == (False, OLD, ANCHOR.model_digest)
    assert (verdict.gate_set, verdict.lookups) == ("9" * 64, 7)


def test_the_verdict_is_described_with_a_line_for_each_rule() -> None:
    verdict = judge(evidence(GOOD, bundle=bundle(1.0)), gate(IMPROVE, UNDECIDED, PARITY, INVALID))
    lines = words.describe(verdict).splitlines()
    assert lines[0].startswith(f"INVALID: model {MODEL[:12]}, run r1")
    assert [line.split()[0] for line in lines[1:]] == ["pass", "????", "FAIL", "INVALID"]
    assert "accuracy 50 points better than the base (95 % sure: at least +47" in lines[1]
    assert "`ratchet promote` makes it champion" in words.describe(judge(evidence(GOOD), gate(IMPROVE)))


@pytest.mark.parametrize(("looks", "decision"), [(1, "PROMOTE"), (50, "PROMOTE"), (51, "HOLD")])
def test_too_many_looks_at_one_set_hold(looks: int, decision: str) -> None:
    verdict = judge(evidence(GOOD, lookups=looks), gate(IMPROVE))
    assert verdict.decision == decision
    if decision == "HOLD":
        assert (verdict.reasons[-1].rule, "new test rows" in verdict.reasons[-1].text) == ("lookups", True)


def test_an_untrained_adapter_is_rejected() -> None:
    """It changes no score at all: with the default rules that is no improvement, beyond doubt."""
    models: Models = {"base": everything(0), "candidate": everything(0)}
    verdict = judge(evidence(models), Gate(resamples=1000))
    assert verdict.decision == "REJECT"
    found = {one.rule: one.outcome for one in verdict.reasons}
    assert found["must_improve"] == "fail"
    assert found["forgetting"] == "pass"


def test_a_good_candidate_is_promoted_by_the_default_rules() -> None:
    models: Models = {"base": everything(0), "candidate": everything(2)}
    assert judge(evidence(models), Gate(resamples=1000)).decision == "PROMOTE"


def test_ten_samples_hold_under_the_default_rules() -> None:
    few: Models = {
        "base": {"answer_loss": spread(2.0, 10), "general_perplexity": nats(30.0)},
        "candidate": {"answer_loss": spread(0.5, 10), "general_perplexity": nats(30.0)},
    }
    verdict = judge(evidence(few), Gate(resamples=1000))
    assert verdict.decision == "HOLD"


def test_a_single_sample_gives_a_verdict_that_can_be_written() -> None:
    """A verdict must be JSON: one sample has no spread, and yet its bounds are numbers."""
    for name, scores in (("accuracy", right(1, 1)), ("answer_loss", spread(1.0, 1)), ("answer_perplexity", nats(9, 1))):
        rule = MustNotRegress(rule="must_not_regress", metric=name, margin=0.05, against="base")
        verdict = judge(evidence(against(scores, scores, name=name)), gate(rule))
        assert files.json_bytes(verdict.model_dump(mode="json"))


def test_rules_can_be_held_against_the_form_that_ships() -> None:
    """Which form is compared follows the contract of the reference, then the order of evaluate.forms."""
    models: Models = {**GOOD, "merged": {"accuracy": right(100, 1000)}}
    found = evidence(models)
    assert reason(IMPROVE, found).comparisons[0].form == "candidate"
    for who in ("base", "candidate"):  # all three under one contract
        scores = {**found.report.scores, who: found.report.scores[who].model_copy(update={"contract": "k2"})}
        found = with_report(found, scores=scores)
    assert reason(IMPROVE, found).comparisons[0].form == "candidate"
    first = dataclasses.replace(found, forms=("merged", "adapter"))
    one = reason(IMPROVE, first)
    assert (one.outcome, one.comparisons[0].form) == ("fail", "merged")


def test_scores_that_are_no_shares_are_told_as_they_are() -> None:
    found = with_metric(evidence(GOOD), "accuracy", unit="mean of samples")
    assert "0.5" in reason(IMPROVE, found).text

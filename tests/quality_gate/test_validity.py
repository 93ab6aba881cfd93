"""Tests evidence that cannot be judged: mismatched reports, and scores that cannot be compared."""

import dataclasses
import math
from typing import Any

import pytest

from gate_cases import (
    ANCHOR,
    CHAMPION,
    CURRENT,
    ITSELF,
    NOBODY,
    OLD,
    TASK,
    Models,
    Values,
    bundle,
    evidence,
    gate,
    nats,
    reason,
    right,
    spread,
    with_metric,
    with_noise,
    with_report,
)
from ratchet.config.gate import AtLeastRule, ExportParityRule, ForgettingRule, MustImproveRule, MustNotRegressRule, Rule
from ratchet.quality_gate.decision import decide_verdict
from ratchet.quality_gate.evidence import GateEvidence
from ratchet.storage.records.gate import ChampionFile

IMPROVE = MustImproveRule(rule="must_improve", metric="accuracy")
KEEP = MustNotRegressRule(rule="must_not_regress", metric="accuracy", margin=0.05)
FLOOR = AtLeastRule(rule="at_least", metric="accuracy", value=0.6)
PARITY = ExportParityRule(rule="export_parity", max_logit_difference=0.01, min_greedy_agreement=0.99)
GOOD: Models = {"base": {"accuracy": right(300, 1000)}, "candidate": {"accuracy": right(800, 1000)}}

# ----------------------------------------------------------------------------------------------------------- identity


@pytest.mark.parametrize("what", ["adapter", "base", "data", "model"])
def test_reports_about_different_things_are_invalid(what: str) -> None:
    verdict = decide_verdict(evidence(GOOD, bundle=bundle(**{f"{what}_digest": "8" * 64})), gate(IMPROVE, PARITY))
    assert verdict.decision == "INVALID"
    [one] = verdict.reasons
    assert one.rule == "identity"
    assert one.text.startswith(f"the evaluation is of {what} ")
    assert "8" * 12 in one.text
    wrong = bundle(adapter_digest="1" * 64, base_digest="2" * 64, data_digest="3" * 64, run_id="r9")
    assert len(decide_verdict(evidence(GOOD, bundle=wrong), gate(IMPROVE)).reasons) == 4


def test_an_evaluation_before_the_export_is_invalid_and_must_be_repeated() -> None:
    verdict = decide_verdict(with_report(evidence(GOOD), model_digest=None), gate(IMPROVE, PARITY))
    assert verdict.decision == "INVALID"
    [one] = verdict.reasons
    assert one.rule == "identity"
    assert "was not exported when it was evaluated; run `dvc repro evaluate`" in one.text


def test_scores_of_another_export_are_invalid() -> None:
    found = evidence({**GOOD, "merged": GOOD["candidate"]})
    other = found.report.scores["merged"].model_copy(update={"model_digest": "8" * 64})
    verdict = decide_verdict(with_report(found, scores={**found.report.scores, "merged": other}), gate(IMPROVE))
    assert (verdict.decision, verdict.reasons[0].rule) == ("INVALID", "identity")


@pytest.mark.parametrize(
    ("evaluated", "now"),
    [(NOBODY, CURRENT), (CURRENT, NOBODY), (CURRENT, ChampionFile(champion=ITSELF, anchor=CHAMPION)),
     (CURRENT, ChampionFile(champion=CHAMPION, anchor=ANCHOR)), (CURRENT, ChampionFile(champion=CHAMPION))],
    ids=["first", "gone", "promoted", "is_anchor", "unanchored"],
)  # fmt: skip
def test_a_champion_or_anchor_that_changed_since_the_evaluation_makes_it_invalid(
    evaluated: ChampionFile, now: ChampionFile
) -> None:
    models: Models = {**GOOD, "champion": GOOD["base"]}
    verdict = decide_verdict(dataclasses.replace(evidence(models, evaluated), champion=now), gate(IMPROVE))
    assert verdict.decision == "INVALID"
    assert {one.rule for one in verdict.reasons} == {"identity"}
    assert all("dvc repro evaluate" in one.text for one in verdict.reasons)


def test_rows_used_for_model_selection_are_invalid() -> None:
    clean = with_report(evidence(GOOD), selection_overlaps={"sweep": 0})
    assert decide_verdict(clean, gate(IMPROVE)).decision == "PROMOTE"
    verdict = decide_verdict(with_report(evidence(GOOD), selection_overlaps={"sweep": 3}), gate(IMPROVE))
    assert (verdict.decision, verdict.reasons[0].rule) == ("INVALID", "selection")
    assert "3 test rows" in verdict.reasons[0].text
    assert "sweep" in verdict.reasons[0].text


@pytest.mark.parametrize(
    ("now", "says"),
    [
        ({"answers": "8" * 64}, "answers changed since the evaluation"),
        ({"answers": TASK, "other": "8" * 64}, "other was not evaluated"),
        ({}, "answers was evaluated but its file is missing now"),
    ],
    ids=["changed", "new", "gone"],
)
def test_a_changed_task_is_invalid(now: dict[str, str], says: str) -> None:
    verdict = decide_verdict(evidence(GOOD, current_task_digests=now), gate(IMPROVE))
    assert (verdict.decision, verdict.reasons[0].rule) == ("INVALID", "tasks")
    assert says in verdict.reasons[0].text


# ----------------------------------------------------------------------------------------------- contracts and figures


def test_models_that_were_scored_under_different_contracts_are_not_compared_and_the_difference_is_named() -> None:
    found = evidence({**GOOD, "champion": GOOD["base"]}, CURRENT)
    other = found.report.scores["champion"].model_copy(update={"contract": "k2"})
    one = reason(KEEP, with_report(found, scores={**found.report.scores, "champion": other}))
    assert one.outcome == "invalid"
    assert "dtype: float32 and bfloat16" in one.text
    assert "model_format: adapter and merged" in one.text
    assert "max_new_tokens" not in one.text  # the value is the same in both


def test_terms_deep_in_a_contract_are_named_by_their_path() -> None:
    found = evidence(GOOD)
    terms = found.report.contracts["k1"]
    contracts = {"k1": terms, "k3": {**terms, "settings": {"max_new_tokens": 32}, "seed": 1}}
    other = found.report.scores["base"].model_copy(update={"contract": "k3"})
    one = reason(IMPROVE, with_report(found, contracts=contracts, scores={**found.report.scores, "base": other}))
    assert "seed: nothing and 1, settings.max_new_tokens: 16 and 32" in one.text


BLEU = MustImproveRule(rule="must_improve", metric="bleu")
BLEU_FLOOR = AtLeastRule(rule="at_least", metric="bleu", value=0)
ALL = (IMPROVE, KEEP, FLOOR)


@pytest.mark.parametrize(
    ("rules", "found", "says"),
    [
        ((BLEU, BLEU_FLOOR), evidence(GOOD), "bleu was not measured for candidate; available: accuracy"),
        ((IMPROVE,), evidence({**GOOD, "base": {"other": right(3)}}), "for base"),
        ((IMPROVE,), evidence({**GOOD, "candidate": {"other": right(3)}}), "for candidate"),
        ((ForgettingRule(rule="forgetting"),), evidence(GOOD), "general_perplexity was not measured"),
        ((KEEP,), with_report(evidence(GOOD, CURRENT), notes=("champion: other tokens",)),
         "no scores of the champion: champion: other tokens"),
        (ALL, evidence({"base": GOOD["base"]}), ""),
        (ALL, with_metric(evidence(GOOD), "accuracy", better="unknown"), "higher_is_better in metric_list"),
        (ALL, with_metric(evidence(GOOD), "accuracy", kind="aggregate"), "computed from all rows together"),
        ((IMPROVE,), with_metric(evidence(GOOD), "accuracy", who=("base",), better="lower"),
         "better is 'higher' for candidate and 'lower' for base"),
        ((IMPROVE,), evidence(GOOD, duplicate_samples={"base": {"accuracy": "s00007"}}),
         "accuracy of base: sample s00007 occurs twice"),
        # Omitting hard rows for both models would make a model look good, so the report counts the rows.
        ((IMPROVE,), with_metric(evidence(GOOD), "accuracy", n=1001),
         "the report has 1001 samples, the file has 1000"),
        ((FLOOR,), with_metric(evidence(GOOD), "accuracy", value=math.nan), ""),
        ((FLOOR,), with_metric(evidence(GOOD), "accuracy", value=math.inf), ""),
    ],
    ids=[
        "not measured", "not for base", "not for candidate", "no general text", "champion not scored", "no candidate",
        "no direction", "no single samples", "directions differ", "scored twice", "missing for both", "nan", "inf",
    ],
)  # fmt: skip
def test_metrics_that_cannot_be_judged_are_invalid_with_a_reason(
    rules: tuple[Rule, ...], found: GateEvidence, says: str
) -> None:
    for rule in rules:
        one = reason(rule, found)
        assert (one.outcome, says in one.text) == ("invalid", True)


def test_a_mean_of_shares_and_one_that_happens_to_be_of_right_and_wrong_are_compared() -> None:
    """If no answer of a base has a matching token, its token F1 is 0 in every row."""
    made = evidence({"base": {"token_f1": right(0)}, "candidate": {"token_f1": spread(0.6)}})
    made = with_metric(made, "token_f1", who=("base",), unit="proportion")
    rule = MustImproveRule(rule="must_improve", metric=("token_f1",))
    assert reason(rule, made).outcome == "pass"


# ------------------------------------------------------------------------------------------------------------ samples


def without(scores: Values, *ids: str) -> dict[str, float]:
    return {key: value for key, value in scores.items() if key not in ids}


@pytest.mark.parametrize(
    ("candidate", "base", "says"),
    [
        (without(right(160), "s00007"), right(10), "1 samples were scored only for one of candidate and base"),
        (
            right(160),
            without(right(10), "s00003", "s00004"),
            "2 samples were scored only for one of candidate and base",
        ),
        ({f"x{k}": 1.0 for k in range(200)}, right(10), "400 samples were scored only for one of"),
        ({}, right(10), "accuracy of candidate has no samples"),
        ({}, {}, "accuracy of candidate has no samples"),
        (right(160) | {"s00005": math.nan}, right(10), "candidate: the score of sample s00005 is nan"),
        (right(160), right(10) | {"s00006": math.inf}, "base: the score of sample s00006 is inf"),
        (right(160), right(10) | {"s00006": -math.inf}, "base: the score of sample s00006 is -inf"),
        (right(160) | {"s00005": 1e9}, right(10), "candidate: the score of sample s00005 is 1e+09; expected 0 or 1"),
    ],
    ids=["one missing", "two missing", "others", "none", "none at all", "nan", "inf", "-inf", "no proportion"],
)
def test_samples_that_cannot_be_paired_are_invalid(candidate: Values, base: Values, says: str) -> None:
    one = reason(IMPROVE, evidence({"base": {"accuracy": base}, "candidate": {"accuracy": candidate}}))
    assert one.outcome == "invalid"
    assert says in one.text


@pytest.mark.parametrize("weight", [9.0, 0.0, math.nan])
def test_a_perplexity_of_other_tokens_is_not_compared(weight: float) -> None:
    rule = MustImproveRule(rule="must_improve", metric="answer_perplexity")
    found = evidence({"candidate": {"answer_perplexity": nats(9.0)}, "base": {"answer_perplexity": nats(10.0)}})
    assert reason(rule, found).outcome == "pass"
    changed: Any = {who: dict(by_metric) for who, by_metric in found.samples.items()}
    scores = dict(changed["candidate"]["answer_perplexity"])
    scores["s00003"] = scores["s00003"].model_copy(update={"weight": weight})
    changed["candidate"]["answer_perplexity"] = scores
    total, weights = (sum(values) for values in zip(*((s.value, s.weight) for s in scores.values()), strict=True))
    told = with_metric(found, "answer_perplexity", who=("candidate",), value=math.exp(total / weights))
    one = reason(rule, dataclasses.replace(told, samples=changed))
    assert (one.outcome, "s00003" in one.text) == ("invalid", True)
    one = reason(rule, dataclasses.replace(found, samples=changed))
    assert (one.outcome, "answer_perplexity of candidate" in one.text) == ("invalid", True)


# ----------------------------------------------------------------------------------------------------- margins, noise


@pytest.mark.parametrize("margin", [1.0, 2.0, 200.0])
@pytest.mark.parametrize("name", ["accuracy", "answer_perplexity", "harness/f1"])
@pytest.mark.parametrize("champion", [NOBODY, CURRENT], ids=["alone", "champion"])
def test_a_margin_that_no_model_could_miss_is_invalid(margin: float, name: str, champion: ChampionFile) -> None:
    scores = {"accuracy": right(300, 400), "answer_perplexity": nats(9.0), "harness/f1": spread(0.5, width=0.1)}[name]
    models: Models = {who: {name: scores} for who in ("candidate", "base", "champion")}  # type: ignore[misc]
    keep = reason(MustNotRegressRule(rule="must_not_regress", metric=name, margin=margin), evidence(models, champion))
    better = reason(MustImproveRule(rule="must_improve", metric=name, by=margin), evidence(models, champion))
    assert (keep.outcome, better.outcome) == ("invalid", "invalid")
    assert f"{100 * margin:g}" in keep.text


def test_a_loss_may_have_a_margin_of_more_than_one() -> None:
    rule = MustNotRegressRule(rule="must_not_regress", metric="answer_loss", margin=1.5, against="base")
    models: Models = {"candidate": {"answer_loss": spread(2.0)}, "base": {"answer_loss": spread(2.001)}}
    assert reason(rule, evidence(models)).outcome == "pass"


@pytest.mark.parametrize(("again", "found"), [(800, "pass"), (850, "pass"), (860, "invalid"), (740, "invalid")])
@pytest.mark.parametrize(
    "rule",
    [MustNotRegressRule(rule="must_not_regress", metric="accuracy", margin=0.05, against="base"),
     MustImproveRule(rule="must_improve", metric="accuracy", by=0.05)], ids=lambda rule: rule.rule,
)  # fmt: skip
def test_a_margin_that_noise_oversteps_is_invalid(rule: Rule, again: int, found: str) -> None:
    one = reason(rule, with_noise(evidence(GOOD), "accuracy", right(again, 1000)))
    assert one.outcome == found
    assert ("scored twice, differs by 6 points" in one.text) is (found == "invalid")


def test_forgetting_is_not_judged_when_noise_is_larger() -> None:
    models: Models = {who: {"general_perplexity": nats(30.0)} for who in ("candidate", "base")}  # type: ignore[misc]
    found = evidence(models)
    rule = ForgettingRule(rule="forgetting")
    assert reason(rule, with_noise(found, "general_perplexity", nats(30.5))).outcome == "pass"
    assert reason(rule, with_noise(found, "general_perplexity", nats(33.0))).outcome == "invalid"


@pytest.mark.parametrize("changes", [{"contract": "k2"}, {"model_digest": OLD}, {"model_format": "merged"}], ids=str)
def test_noise_of_something_else_says_nothing(changes: Any) -> None:
    found = with_noise(evidence({**GOOD, "base": GOOD["base"]}), "accuracy", right(0, 1000), **changes)
    assert reason(KEEP, found).outcome == "pass"


def test_noise_of_other_samples_is_invalid() -> None:
    rule = MustImproveRule(rule="must_improve", metric="accuracy", by=0.05)
    one = reason(rule, with_noise(evidence(GOOD), "accuracy", right(800, 999)))
    assert (one.outcome, "other samples" in one.text) == ("invalid", True)

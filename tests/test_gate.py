"""The gate: each rule, each answer, and which answer wins. `judge` is pure, so records made here are the real thing."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from ratchet import records
from ratchet.config_gate import AtLeast, ExportParity, Gate, MustImprove, MustNotRegress, Rule
from ratchet.errors import DamagedError, GateError
from ratchet.gate import Samples, check, describe, judge, read_samples
from ratchet.layout import Layout
from ratchet.records import Bundle, Parity
from ratchet.records_evaluation import EvalReport, Metric, Scores
from ratchet.records_gate import Champion, ChampionFile, Reason, Verdict

CANDIDATE = "c" * 64
CHAMPION = "a" * 64
NOBODY = ChampionFile()
CURRENT = ChampionFile(champion=Champion(version=3, model_digest=CHAMPION, adapter_digest="x" * 64, run_id="r0"))
ITSELF = ChampionFile(champion=Champion(version=4, model_digest=CANDIDATE, adapter_digest="d" * 64, run_id="r1"))

Who = Literal["base", "candidate", "champion"]
Values = Mapping[str, float]


def values(right: int, n: int = 200) -> dict[str, float]:
    """Scores by sample: the first `right` are ones."""
    return {f"s{k:04d}": float(k < right) for k in range(n)}


def losses(mean: float, n: int = 200) -> dict[str, float]:
    """Losses by sample, each a little different."""
    return {f"s{k:04d}": mean + 0.3 * math.sin(k) + 0.1 * math.sin(7 * k + 1000 * mean) for k in range(n)}


def metric(scores: Values, better: str) -> Metric:
    mean = sum(scores.values()) / len(scores) if scores else 0.0
    return Metric.model_validate(
        {"value": mean, "n": len(scores), "low": mean - 0.05, "high": mean + 0.05, "better": better, "unit": "1"}
    )


def report(samples: Samples, champion: str | None = None, **changes: Any) -> EvalReport:
    """The report that evaluation would write for these per-sample scores."""
    scores = {
        who: Scores(
            model_digest=who * 8,
            metrics={name: metric(found, "lower" if "loss" in name else "higher") for name, found in by_metric.items()},
            samples={name: f"samples/{who}.{name}.jsonl" for name in by_metric},
            per_class={},
        )
        for who, by_metric in samples.items()
    }
    plain = {
        "contract": "k",
        "adapter_digest": "d" * 64,
        "base_digest": "b" * 64,
        "data_digest": "e" * 64,
        "run_id": "r1",
    }
    return EvalReport.model_validate({**plain, "champion_digest": champion, "scores": scores, **changes})


def bundle(difference: float = 0.001, agreement: float = 1.0, **changes: Any) -> Bundle:
    parity = Parity(
        rows=32,
        tokens=900,
        max_logit_difference=difference,
        mean_logit_difference=difference / 2,
        greedy_agreement=agreement,
    )
    plain = {"model_digest": CANDIDATE, "adapter_digest": "d" * 64, "base_digest": "b" * 64, "data_digest": "e" * 64,
             "run_id": "r1", "merge_base": "dequantized", "dtype": "float32", "size_bytes": 1,
             "parity": parity}  # fmt: skip
    return Bundle.model_validate({**plain, **changes})


def rules(*which: Rule, confidence: float = 0.95) -> Gate:
    return Gate(confidence=confidence, rules=which)


IMPROVE = MustImprove(rule="must_improve", metric="accuracy")
KEEP = MustNotRegress(rule="must_not_regress", metric="accuracy", margin=0.05)
FLOOR = AtLeast(rule="at_least", metric="accuracy", value=0.6)
PARITY = ExportParity(rule="export_parity", max_logit_difference=0.01, min_greedy_agreement=0.99)

GOOD: Samples = {"base": {"accuracy": values(10)}, "candidate": {"accuracy": values(160)}}


def outcome(rule: Rule, samples: Samples, champion: ChampionFile = NOBODY, **bundle_changes: Any) -> Reason:
    """What one rule finds."""
    current = champion.champion.model_digest if champion.champion else None
    verdict = judge(report(samples, current), bundle(**bundle_changes), samples, rules(rule), champion)
    [reason] = verdict.reasons
    expected = {"pass": "PROMOTE", "fail": "REJECT", "undecided": "HOLD", "invalid": "INVALID"}
    assert verdict.decision == expected[reason.outcome]
    return reason


# ---------------------------------------------------------------------------------------------------------- each rule


@pytest.mark.parametrize(
    ("base", "candidate", "found"),
    [(100, 140, "pass"), (100, 102, "undecided"), (100, 60, "fail"), (100, 100, "undecided")],
)
def test_must_improve_over_the_base(base: int, candidate: int, found: str) -> None:
    reason = outcome(IMPROVE, {"base": {"accuracy": values(base)}, "candidate": {"accuracy": values(candidate)}})
    assert reason.outcome == found
    assert reason.difference == pytest.approx((candidate - base) / 200)
    assert reason.low is not None
    assert reason.high is not None
    assert reason.low < (candidate - base) / 200 < reason.high
    assert f"{(candidate - base) / 200:+.4f}" in reason.text
    assert "n=200" in reason.text


@pytest.mark.parametrize(("by", "found"), [(0.0, "pass"), (0.1, "pass"), (0.2, "undecided"), (0.3, "fail")])
def test_must_improve_by_a_margin(by: float, found: str) -> None:
    rule = MustImprove(rule="must_improve", metric="accuracy", by=by)
    assert outcome(rule, {"base": {"accuracy": values(100)}, "candidate": {"accuracy": values(140)}}).outcome == found


@pytest.mark.parametrize(("candidate", "found"), [(1.5, "pass"), (2.0, "undecided"), (2.5, "fail")])
def test_a_loss_improves_by_falling(candidate: float, found: str) -> None:
    rule = MustImprove(rule="must_improve", metric="answer_loss")
    samples: Samples = {"base": {"answer_loss": losses(2.0031)}, "candidate": {"answer_loss": losses(candidate)}}
    reason = outcome(rule, samples)
    assert reason.outcome == found
    assert reason.difference == pytest.approx(2.0 - candidate, abs=0.02)


@pytest.mark.parametrize(
    ("candidate", "margin", "found"),
    [
        (100, 0.05, "pass"),
        (120, 0.05, "pass"),
        (96, 0.05, "pass"),
        (92, 0.05, "undecided"),
        (60, 0.05, "fail"),
        (92, 0.2, "pass"),
    ],
)
def test_must_not_regress_against_the_champion(candidate: int, margin: float, found: str) -> None:
    rule = MustNotRegress(rule="must_not_regress", metric="accuracy", margin=margin)
    samples: Samples = {"candidate": {"accuracy": values(candidate)}, "champion": {"accuracy": values(100)}}
    assert outcome(rule, samples, CURRENT).outcome == found


@pytest.mark.parametrize(("candidate", "found"), [(1.99, "pass"), (2.05, "undecided"), (2.3, "fail")])
def test_a_loss_regresses_by_rising(candidate: float, found: str) -> None:
    rule = MustNotRegress(rule="must_not_regress", metric="answer_loss", margin=0.05)
    samples: Samples = {"candidate": {"answer_loss": losses(candidate)}, "champion": {"answer_loss": losses(2.0)}}
    assert outcome(rule, samples, CURRENT).outcome == found


def test_must_not_regress_against_the_base() -> None:
    rule = MustNotRegress(rule="must_not_regress", metric="accuracy", against="base", margin=0.05)
    assert outcome(rule, GOOD).outcome == "pass"


def test_must_improve_over_the_champion() -> None:
    rule = MustImprove(rule="must_improve", metric="accuracy", over="champion")
    samples: Samples = {**GOOD, "champion": {"accuracy": values(120)}}
    assert outcome(rule, samples, CURRENT).outcome == "pass"
    better_champion: Samples = {**GOOD, "champion": {"accuracy": values(190)}}
    assert outcome(rule, better_champion, CURRENT).outcome == "fail"


@pytest.mark.parametrize(
    ("value", "found"), [(0.75, "pass"), (0.78, "undecided"), (0.85, "undecided"), (0.86, "fail"), (0.2, "pass")]
)
def test_at_least_is_decided_by_the_whole_interval(value: float, found: str) -> None:
    rule = AtLeast(rule="at_least", metric="accuracy", value=value)
    reason = outcome(rule, {"candidate": {"accuracy": values(160)}})  # 0.8, from 0.75 to 0.85
    assert reason.outcome == found
    assert "0.8000 [0.7500, 0.8500], n=200" in reason.text


@pytest.mark.parametrize(("value", "found"), [(2.2, "pass"), (2.0, "undecided"), (1.8, "fail")])
def test_a_loss_is_at_least_as_good_when_it_is_at_most_as_high(value: float, found: str) -> None:
    rule = AtLeast(rule="at_least", metric="answer_loss", value=value)
    assert outcome(rule, {"candidate": {"answer_loss": losses(2.0)}}).outcome == found


@pytest.mark.parametrize(
    ("difference", "agreement", "found"),
    [(0.01, 0.99, "pass"), (0.0, 1.0, "pass"), (0.0101, 1.0, "fail"), (0.0, 0.9899, "fail"), (math.nan, 1.0, "fail"),
     (0.0, math.nan, "fail"), (math.inf, 1.0, "fail")],
)  # fmt: skip
def test_the_export_must_answer_like_the_adapter(difference: float, agreement: float, found: str) -> None:
    assert outcome(PARITY, GOOD, difference=difference, agreement=agreement).outcome == found


def test_confidence_decides_what_is_beyond_doubt() -> None:
    samples: Samples = {"base": {"accuracy": values(100)}, "candidate": {"accuracy": values(104)}}
    strict, lax = (
        judge(report(samples), bundle(), samples, rules(IMPROVE, confidence=c), NOBODY) for c in (0.999, 0.9)
    )
    assert (strict.decision, lax.decision) == ("HOLD", "PROMOTE")


# ------------------------------------------------------------------------------------------------------- the champion


@pytest.mark.parametrize("rule", [KEEP, MustImprove(rule="must_improve", metric="accuracy", over="champion")])
def test_without_a_champion_a_rule_against_it_holds_and_says_so(rule: Rule) -> None:
    reason = outcome(rule, GOOD)
    assert reason.outcome == "pass"
    assert "no champion yet" in reason.text


@pytest.mark.parametrize("rule", [KEEP, MustImprove(rule="must_improve", metric="accuracy", over="champion")])
def test_the_champion_is_not_failed_against_itself(rule: Rule) -> None:
    samples: Samples = {**GOOD, "champion": GOOD["candidate"]}
    verdict = judge(report(samples, CANDIDATE), bundle(), samples, rules(rule), ITSELF)
    assert verdict.decision == "PROMOTE"
    assert verdict.is_champion
    assert verdict.champion_digest == CANDIDATE
    assert "the candidate is the champion" in verdict.reasons[0].text
    assert "(it is the champion)" in describe(verdict)


def test_the_champion_must_still_beat_the_base() -> None:
    samples: Samples = {"base": {"accuracy": values(160)}, "candidate": {"accuracy": values(10)}}
    assert judge(report(samples, CANDIDATE), bundle(), samples, rules(IMPROVE), ITSELF).decision == "REJECT"


@pytest.mark.parametrize(
    ("evaluated", "now"), [(None, CURRENT), (CHAMPION, NOBODY), ("9" * 64, CURRENT), (CHAMPION, ITSELF), (None, ITSELF)]
)
def test_a_champion_that_changed_since_the_evaluation_makes_it_invalid(
    evaluated: str | None, now: ChampionFile
) -> None:
    samples: Samples = {**GOOD, "champion": GOOD["candidate"]}
    verdict = judge(report(samples, evaluated), bundle(), samples, rules(IMPROVE), now)
    assert verdict.decision == "INVALID"
    [reason] = verdict.reasons
    assert (reason.rule, reason.outcome) == ("identity", "invalid")
    assert "dvc repro evaluate" in reason.text


def test_the_verdict_names_exactly_the_model_it_judged() -> None:
    verdict = judge(report(GOOD), bundle(), GOOD, rules(IMPROVE), NOBODY)
    assert (verdict.model_digest, verdict.adapter_digest, verdict.run_id) == (CANDIDATE, "d" * 64, "r1")
    assert (verdict.is_champion, verdict.champion_digest) == (False, None)
    other: Samples = {**GOOD, "champion": {"accuracy": values(100)}}
    against = judge(report(other, CHAMPION), bundle(), other, rules(IMPROVE), CURRENT)
    assert (against.is_champion, against.champion_digest) == (False, CHAMPION)


# ----------------------------------------------------------------------------------------------------------- identity


@pytest.mark.parametrize("what", ["adapter", "base", "data"])
def test_reports_about_different_things_are_invalid(what: str) -> None:
    verdict = judge(report(GOOD), bundle(**{f"{what}_digest": "9" * 64}), GOOD, rules(IMPROVE, PARITY), NOBODY)
    assert verdict.decision == "INVALID"
    [reason] = verdict.reasons
    assert reason.rule == "identity"
    assert reason.text.startswith(f"the evaluation is of {what} ")
    assert "9" * 12 in reason.text


def test_everything_that_differs_is_told() -> None:
    wrong = bundle(adapter_digest="1" * 64, base_digest="2" * 64, data_digest="3" * 64)
    assert len(judge(report(GOOD), wrong, GOOD, rules(IMPROVE), CURRENT).reasons) == 4


# ------------------------------------------------------------------------------------------------------------ samples


@pytest.mark.parametrize(
    "rule", [MustImprove(rule="must_improve", metric="bleu"), AtLeast(rule="at_least", metric="bleu", value=0)]
)
def test_a_metric_that_was_not_measured_is_invalid_and_those_that_were_are_named(rule: Rule) -> None:
    reason = outcome(rule, GOOD)
    assert reason.outcome == "invalid"
    assert "bleu" in reason.text
    assert "accuracy" in reason.text


@pytest.mark.parametrize("who", ["base", "candidate"])
def test_a_metric_that_was_measured_for_one_model_only_is_invalid(who: Who) -> None:
    reason = outcome(IMPROVE, {**GOOD, who: {"other": values(3)}})
    assert reason.outcome == "invalid"
    assert f"for {who}" in reason.text


def test_a_champion_that_could_not_be_scored_is_invalid() -> None:
    reason = outcome(KEEP, GOOD, CURRENT)
    assert reason.outcome == "invalid"
    assert "for champion" in reason.text


def without(scores: Values, *ids: str) -> dict[str, float]:
    return {key: value for key, value in scores.items() if key not in ids}


@pytest.mark.parametrize(
    ("candidate", "base", "says"),
    [
        (without(values(160), "s0007"), values(10), "1 samples were scored for one model only, e.g. s0007"),
        (values(160), without(values(10), "s0003", "s0004"), "2 samples were scored for one model only, e.g. s0003"),
        ({f"x{k}": 1.0 for k in range(200)}, values(10), "400 samples were scored for one model only"),
        ({}, values(10), "no samples"),
        ({}, {}, "no samples"),
        (values(160) | {"s0005": math.nan}, values(10), "score of sample s0005 is not a finite number"),
        (values(160), values(10) | {"s0006": math.inf}, "score of sample s0006 is not a finite number"),
        (values(160), values(10) | {"s0006": -math.inf}, "score of sample s0006 is not a finite number"),
    ],
)
def test_samples_that_cannot_be_paired_are_invalid(candidate: Values, base: Values, says: str) -> None:
    reason = outcome(IMPROVE, {"base": {"accuracy": base}, "candidate": {"accuracy": candidate}})
    assert reason.outcome == "invalid"
    assert says in reason.text


def test_the_order_of_samples_does_not_matter() -> None:
    backwards: Samples = {
        "base": {"accuracy": dict(reversed(list(GOOD["base"]["accuracy"].items())))}, "candidate": GOOD["candidate"]
    }  # fmt: skip
    forwards, turned = (judge(report(s), bundle(), s, rules(IMPROVE), NOBODY) for s in (GOOD, backwards))
    assert forwards == turned


def test_a_figure_that_is_no_number_is_invalid() -> None:
    broken = report({"candidate": {"accuracy": {"s1": math.nan}}})
    reasons = judge(broken, bundle(), {}, rules(FLOOR), NOBODY).reasons
    assert [reason.outcome for reason in reasons] == ["invalid"]


def test_samples_of_a_metric_that_the_report_does_not_know_are_an_answer_and_no_error() -> None:
    known = report({"base": {}, "candidate": {}})
    assert judge(known, bundle(), GOOD, rules(IMPROVE), NOBODY).decision == "INVALID"


def test_a_report_without_the_candidate_is_an_answer_and_no_error() -> None:
    only_base: Samples = {"base": {"accuracy": values(10)}}
    assert judge(report(only_base), bundle(), only_base, rules(FLOOR), NOBODY).decision == "INVALID"


# ------------------------------------------------------------------------------------------------- which answer wins

PASS, FAIL = (
    AtLeast(rule="at_least", metric="accuracy", value=0.1),
    AtLeast(rule="at_least", metric="accuracy", value=0.99),
)
UNDECIDED = AtLeast(rule="at_least", metric="accuracy", value=0.8)
INVALID = AtLeast(rule="at_least", metric="missing", value=0.1)


@pytest.mark.parametrize(
    ("which", "decision"),
    [
        ([PASS], "PROMOTE"),
        ([PASS, PASS], "PROMOTE"),
        ([PASS, UNDECIDED], "HOLD"),
        ([UNDECIDED, PASS], "HOLD"),
        ([PASS, FAIL], "REJECT"),
        ([UNDECIDED, FAIL, PASS], "REJECT"),
        ([FAIL, UNDECIDED], "REJECT"),
        ([INVALID, PASS], "INVALID"),
        ([FAIL, UNDECIDED, INVALID], "INVALID"),
    ],
)
def test_the_worst_answer_wins(which: list[Rule], decision: str) -> None:
    verdict = judge(report(GOOD), bundle(), GOOD, rules(*which), NOBODY)
    assert verdict.decision == decision
    assert len(verdict.reasons) == len(which)  # one reason a rule, in their order
    assert [reason.metric for reason in verdict.reasons] == [getattr(rule, "metric", "") for rule in which]


def test_the_same_inputs_give_the_same_verdict() -> None:
    first, second = (judge(report(GOOD), bundle(), GOOD, rules(IMPROVE, FLOOR, PARITY), NOBODY) for _ in range(2))
    assert first == second


def test_the_verdict_is_described_with_a_line_for_each_rule() -> None:
    verdict = judge(report(GOOD), bundle(difference=1.0), GOOD, rules(IMPROVE, UNDECIDED, PARITY, INVALID), NOBODY)
    lines = describe(verdict).splitlines()
    assert lines[0].startswith(f"INVALID: model {CANDIDATE[:12]}, run r1")
    assert [line.split()[0] for line in lines[1:]] == ["pass", "????", "FAIL", "INVALID"]
    promote = describe(judge(report(GOOD), bundle(), GOOD, rules(IMPROVE), NOBODY))
    assert "`ratchet promote` makes it champion" in promote


# --------------------------------------------------------------------------------------------------------- from files


def test_samples_are_read_by_model_and_metric(tmp_path: Path) -> None:
    found = report(GOOD)
    for who, by_metric in GOOD.items():
        for name, scores in by_metric.items():
            rows = [{"id": key, "value": value} for key, value in scores.items()]
            records.write_lines(tmp_path / "samples" / f"{who}.{name}.jsonl", rows)
    assert read_samples(tmp_path, found) == GOOD


def test_a_sample_that_appears_twice_is_damage(tmp_path: Path) -> None:
    samples: Samples = {"candidate": {"accuracy": {"s1": 1.0}}}
    rows = [{"id": "s1", "value": 1.0}, {"id": "s1", "value": 0.0}]
    records.write_lines(tmp_path / "samples" / "candidate.accuracy.jsonl", rows)
    with pytest.raises(DamagedError, match="appears twice"):
        read_samples(tmp_path, report(samples))


def test_checking_needs_a_verdict(project: Layout) -> None:
    with pytest.raises(GateError, match="no verdict yet"):
        check(project)


@pytest.mark.parametrize(
    ("decision", "passed"), [("PROMOTE", True), ("HOLD", False), ("REJECT", False), ("INVALID", False)]
)
def test_only_promote_passes_the_check(project: Layout, decision: str, passed: bool) -> None:
    verdict = judge(report(GOOD), bundle(), GOOD, rules(IMPROVE), NOBODY)
    Verdict.model_validate(verdict.model_dump() | {"decision": decision}).save(project.verdict)
    bundle().save(project.bundle)
    found, text = check(project)
    assert found is passed
    assert text.startswith(f"{decision}: ")


def test_a_verdict_about_another_model_or_champion_is_stale(project: Layout) -> None:
    verdict = judge(report(GOOD), bundle(), GOOD, rules(IMPROVE), NOBODY)
    verdict.save(project.verdict)
    bundle(model_digest="9" * 64).save(project.bundle)
    with pytest.raises(GateError, match="earlier model or champion"):
        check(project)
    bundle().save(project.bundle)
    one = {"version": 1, "adapter_digest": "a", "run_id": "r"}
    for digest_, stale in ((bundle().model_digest, False), ("8" * 64, True)):  # promoted since; somebody else's
        ChampionFile.model_validate({"champion": {**one, "model_digest": digest_}}).save(project.champion)
        if stale:
            with pytest.raises(GateError, match="earlier model or champion"):
                check(project)
        else:
            assert check(project)[0]

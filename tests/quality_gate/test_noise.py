"""Tests the noise floor of a model that is scored twice, in the units of the margins."""

import math

import pytest

from gate_cases import Models, evidence, flipped, gate, nats, right, spread, with_noise
from ratchet.config.gate import ForgettingRule, MustImproveRule, MustNotRegressRule
from ratchet.quality_gate import decision
from ratchet.quality_gate.evidence import IncomparableError

RULES = gate(
    MustNotRegressRule(rule="must_not_regress", metric="accuracy", margin=0.03),
    MustImproveRule(rule="must_improve", metric=("accuracy", "answer_loss"), by=0.02),
    MustImproveRule(rule="must_improve", metric="answer_loss"),
    ForgettingRule(rule="forgetting"),
)
MODELS: Models = {
    "candidate": {
        "accuracy": right(100), "answer_loss": spread(1.0), "general_perplexity": nats(30.0), "f1": spread(0.5)
    },
}  # fmt: skip


def test_a_model_that_repeats_itself_makes_no_noise() -> None:
    [line] = decision.measure_noise(with_noise(evidence(MODELS), "accuracy", right(100)), RULES)
    assert (line.name, line.n, line.differing, line.result.difference) == ("accuracy", 200, 0, 0.0)
    assert line.margin == 0.02  # the smaller margin of two rules
    assert line.is_within_margin


def test_samples_that_differ_are_counted_and_the_difference_has_bounds() -> None:
    again = flipped(right(100), better=9, worse=1)
    [line] = decision.measure_noise(with_noise(evidence(MODELS), "accuracy", again), RULES)
    assert (line.differing, line.result.difference) == (10, pytest.approx(0.04))
    assert line.result.low < 0.04 < line.result.high
    assert not line.is_within_margin
    text = decision.format_noise_table([line], (8, 4), 0.95)
    assert "batches of 8 rows, then 4" in text
    assert "accuracy  200      10      5.0 %  +4 points" in text
    assert "exceeds the margin of the rules about accuracy" in text


@pytest.mark.parametrize(("name", "margin"), [("answer_loss", 0.02), ("general_perplexity", 0.05), ("f1", None)])
def test_the_margin_is_the_smallest_that_a_rule_asks_for(name: str, margin: float | None) -> None:
    again = {key: value * (1 + 1e-7) for key, value in MODELS["candidate"][name].items()}
    [line] = decision.measure_noise(with_noise(evidence(MODELS), name, again), RULES)
    assert (line.margin, line.is_within_margin, line.differing) == (margin, True, line.n)
    assert "the noise is within" in decision.format_noise_table([line], (8, 4), 0.95)


def test_a_perplexity_differs_by_a_fraction() -> None:
    again = {key: value + 10 * math.log(1.1) for key, value in MODELS["candidate"]["general_perplexity"].items()}
    [line] = decision.measure_noise(with_noise(evidence(MODELS), "general_perplexity", again), RULES)
    assert line.result.difference == pytest.approx(-0.1)
    assert not line.is_within_margin


def test_missing_and_mismatched_noise_have_different_messages() -> None:
    with pytest.raises(IncomparableError, match="no model was scored twice yet"):
        decision.measure_noise(evidence(MODELS), RULES)
    other = with_noise(evidence(MODELS), "accuracy", right(100), contract="k2")
    with pytest.raises(IncomparableError, match="not of the evaluated model"):
        decision.measure_noise(other, RULES)

"""Floors of the candidate alone: absolute ones, and the alarm that a figure is one that guessing reaches."""

import math
from dataclasses import dataclass

from ratchet.config_gate import AboveChance, AtLeast
from ratchet.gating import intervals, matching, paired, words
from ratchet.gating.matching import IncomparableError
from ratchet.gating.paired import Pairs, Plan
from ratchet.gating.rules import Case, alone, few, is_right_or_wrong, units, worst
from ratchet.records_evaluation import Metric, Who
from ratchet.records_gate import Outcome, Reason


@dataclass(frozen=True)
class _Held:
    """A figure held against a fixed value: how much better it is, with one-sided bounds."""

    low: float
    high: float
    value: float
    """Bounded by these, in the metric's own units: from its worse end to its better one."""
    text: str


def _held_against(case: Case, who: Who, name: str, value: float, plan: Plan) -> _Held:
    """A metric against a number: Wilson's bounds for shares, the paired bootstrap against a constant otherwise."""
    metric, samples = matching.own(case.evidence, who, name)
    pairs = alone(case.evidence, metric, samples)
    if words.is_share(metric) and not 0 <= value <= 1:
        raise IncomparableError(f"{name} is a share, and {value:g} is none; write 0.9 for 90 %")
    if metric.kind == "perplexity" and value <= 0:
        raise IncomparableError(f"{name} is a perplexity, and no perplexity is {value:g}")
    if is_right_or_wrong(pairs) and metric.better == "higher":
        n = units(pairs)
        low, high = intervals.wilson(math.fsum(pairs.new) / len(pairs.new) * n, n, plan.confidence)
        bounds = (low - value, high - value)
        shown = (low, high)
    else:
        constant = [_worth(value, weight) for weight in pairs.weights] if pairs.weights else [value] * len(pairs.new)
        against = Pairs(pairs.new, constant, pairs.better, pairs.kind, pairs.weights, pairs.groups)
        found = paired.compare(against, 0.0, plan)
        bounds = (found.low, found.high)
        if few(found):
            bounds = (-math.inf, math.inf)
        shown = (_figure_at(metric, value, found.low), _figure_at(metric, value, found.high))
    worse, better = (words.figure(bound, metric) for bound in shown)
    text = (
        f"{name} of {who} {words.figure(metric.value, metric)} ({words.percent(plan.confidence)} sure: no worse than "
        f"{worse}, no better than {better}; {metric.n} samples)"
    )
    return _Held(*bounds, metric.value, text)


def _worth(perplexity: float, tokens: float) -> float:
    """Nats of a sample of so many tokens at this perplexity."""
    return tokens * math.log(perplexity)


def _figure_at(metric: Metric, value: float, difference: float) -> float:
    """The figure that is better than `value` by this difference."""
    if metric.kind == "perplexity":
        return value * (1 - difference)
    return value + difference if metric.better == "higher" else value - difference


def at_least(case: Case, rule: AtLeast) -> Reason:
    """A floor, for every form of the candidate: its bound must reach it, not only its value."""
    plan = case.plan(rule.confidence)
    outcomes: list[Outcome] = []
    texts = []
    for who in matching.scored_forms(case.evidence):
        held = _held_against(case, who, rule.metric, rule.value, plan)
        outcome: Outcome = "pass" if held.low >= 0 else "fail" if held.high < 0 else "undecided"
        outcomes.append(outcome)
        texts.append(held.text)
    metric, _ = matching.own(case.evidence, matching.scored_forms(case.evidence)[0], rule.metric)
    direction = "at least" if metric.better == "higher" else "at most"
    text = f"{'; '.join(texts)}; must be {direction} {words.figure(rule.value, metric)}"
    found = worst(outcomes)
    if found == "undecided":
        text += ": these samples cannot tell; more test rows would"
    return Reason(rule=rule.rule, metric=rule.metric, outcome=found, text=text)


def above_chance(case: Case, rule: AboveChance) -> Reason:
    """An alarm: a figure that guessing reaches fails; one that guessing might reach is undecided."""
    plan = case.plan(None)
    outcomes: list[Outcome] = []
    texts = []
    for who in matching.scored_forms(case.evidence):
        metric, _ = matching.own(case.evidence, who, rule.metric)
        chance = rule.chance if rule.chance is not None else metric.chance
        if chance is None:
            raise IncomparableError(
                f"nobody knows what guessing reaches in {rule.metric}; write it down as `chance` of this rule"
            )
        if metric.better != "higher":
            raise IncomparableError(f"of {rule.metric}, less is better: it has no chance level; take a share of hits")
        held = _held_against(case, who, rule.metric, chance, plan)
        outcomes.append("pass" if held.low > 0 else "fail" if held.value <= chance else "undecided")
        texts.append(f"{held.text}; guessing reaches {words.figure(chance, metric)}")
    found = worst(outcomes)
    text = "; ".join(texts)
    if found != "pass":
        text += f": {'no better than' if found == 'fail' else 'perhaps no better than'} guessing, so the model or the "
        text += "evaluation may be broken (look at the answers first)"
    return Reason(rule=rule.rule, metric=rule.metric, outcome=found, text=text)

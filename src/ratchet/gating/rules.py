"""Rules that compare with another model: paired, one-sided; what the data cannot decide is undecided, never passed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ratchet.config_gate import Forgetting, Gate, MustNotRegress, Reference
from ratchet.gating import matching, paired, power, soundness, words
from ratchet.gating.evidence import Evidence, Samples
from ratchet.gating.matching import Matched
from ratchet.gating.paired import Found, Pairs, Plan
from ratchet.records_evaluation import Metric
from ratchet.records_gate import Comparison, Outcome, Reason

GENERAL = "general_perplexity"
FEWEST = 20
"""Samples (or groups) below which means that are no shares decide nothing: on skewed scores neither bootstrap nor
Student's t keeps its level there (simulated: 7 % instead of 5 % at 20 already, paired.py)."""


@dataclass(frozen=True)
class Case:
    """What all rules look at."""

    evidence: Evidence
    gate: Gate

    def plan(self, confidence: float | None) -> Plan:
        """How to compare, for a rule that may have a confidence of its own."""
        return Plan(
            confidence=confidence or self.gate.confidence,
            power=self.gate.power,
            discordance=self.gate.discordance,
            resamples=self.gate.resamples,
            seed=self.gate.seed,
        )


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """What of several findings decides."""
    order: tuple[Outcome, ...] = ("invalid", "fail", "undecided")
    return next((outcome for outcome in order if outcome in outcomes), "pass")


def comparison(matched: Matched, against: Reference, name: str, bound: float, plan: Plan) -> Comparison:
    """Compare, as it is written into the verdict."""
    found = paired.compare(matched.pairs, bound, plan)
    needed = found.needed
    if found.detectable > abs(bound) > 0 and few(found):
        needed = max(needed or 0, FEWEST)
    return Comparison(
        metric=name, against=against, form=matched.form, difference=found.difference, low=found.low, high=found.high,
        confidence=plan.confidence, n=found.n, groups=found.groups, better=found.better, worse=found.worse,
        bound=bound, p=found.p, detectable=found.detectable, needed=needed, method=found.method,
    )  # fmt: skip


def settled(found: Comparison, outcome: Outcome) -> Comparison:
    """Where the samples have decided, no more are needed."""
    return found if outcome == "undecided" else found.model_copy(update={"needed": None})


def few(found: Found | Comparison) -> bool:
    """Whether there are too few samples for a mean that is no share of right answers."""
    return found.better is None and (found.groups or found.n) < FEWEST


def must_not_regress(case: Case, rule: MustNotRegress) -> Reason:
    """Not worse than the reference by the margin, beyond doubt, and with samples that would have shown it.

    Non-inferiority: the hypothesis that the candidate is worse by the margin must be refuted.
    """
    plan, name = case.plan(rule.confidence), rule.metric
    soundness.check_noise(case.evidence, name, rule.margin)
    why = matching.absent(case.evidence, rule.against)
    if why is not None:
        return _without_reference(case, rule, why)
    matched = matching.match(case.evidence, name, rule.against)
    soundness.check_bound(rule.margin, "margin", matched.metric, matched.pairs)
    found = comparison(matched, rule.against, name, -rule.margin, plan)
    outcome = _not_worse(found)
    allowed = f"may lose at most {words.change(rule.margin, matched.metric)}"
    text = f"{words.compared(found, matched.metric)}; {allowed}{_if_undecided(outcome, found, matched.metric)}"
    return Reason(rule=rule.rule, metric=name, outcome=outcome, text=text, comparisons=(settled(found, outcome),))


def _not_worse(found: Comparison) -> Outcome:
    if found.high < found.bound:
        return "fail"
    enough = found.detectable <= -found.bound and not few(found)
    return "pass" if found.low > found.bound and enough else "undecided"


def _if_undecided(outcome: Outcome, found: Comparison, metric: Metric) -> str:
    """What these samples cannot tell, and how many would."""
    if outcome != "undecided":
        return ""
    margin = -found.bound
    if found.detectable > margin:
        cannot = f"{found.n} samples detect no loss below {words.change(found.detectable, metric)}"
    elif few(found):
        cannot = "so few samples are not to be trusted"
    else:
        cannot = "these samples cannot tell"
    needed = found.needed if found.needed is not None else would_decide(found)
    return f": {cannot}; {_enough(max(needed or 0, FEWEST if few(found) else 0) or None)}"


def would_decide(found: Comparison) -> int | None:
    """Samples that would put the whole bound on the good side if the difference stays; None where none would."""
    distance = found.difference - found.bound
    if distance <= 0 or not found.difference > found.low:
        return None
    needed = found.n * ((found.difference - found.low) / distance) ** 2
    return math.ceil(needed) if math.isfinite(needed) and needed > found.n else None


def _enough(needed: int | None) -> str:
    return f"about {needed:,} would do" if needed else "more test rows would"


def _without_reference(case: Case, rule: MustNotRegress, why: str) -> Reason:
    """Nothing to compare with: it holds if these samples could have shown a loss of the margin."""
    plan = case.plan(rule.confidence)
    who = matching.scored_forms(case.evidence)[0]
    metric, samples = matching.own(case.evidence, who, rule.metric)
    pairs = alone(case.evidence, metric, samples)
    soundness.check_bound(rule.margin, "margin", metric, pairs)
    found: tuple[Comparison, ...] = ()
    if is_right_or_wrong(pairs):
        n = units(pairs)
        detectable = power.detectable_binary(n, plan.discordance, plan.confidence, plan.power)
        needed = power.needed_binary(rule.margin, plan.discordance, plan.confidence, plan.power)
        enough = detectable <= rule.margin
    else:
        matched = matching.match(case.evidence, rule.metric, "base")
        against_base = comparison(matched, "base", rule.metric, -rule.margin, plan)
        n, detectable = len(pairs.new), against_base.detectable
        needed = max(against_base.needed or 0, FEWEST)
        enough, found = detectable <= rule.margin and not few(against_base), (against_base,)
    text = f"{rule.metric}: {why}, so nothing is compared; "
    margin = words.change(rule.margin, metric)
    if enough:
        text += f"{n} samples would detect a loss of {words.change(detectable, metric)}, and {margin} may be lost"
    else:
        text += f"{n} samples would detect no loss below {words.change(detectable, metric)}, and only {margin} may be"
        text += f" lost: a later model could not be held to it; {_enough(needed)}"
    return Reason(
        rule=rule.rule, metric=rule.metric, outcome="pass" if enough else "undecided", text=text, comparisons=found
    )


def alone(evidence: Evidence, metric: Metric, samples: Samples) -> Pairs:
    """A model's samples beside themselves."""
    ordered = matching.in_order(samples)
    return matching.pairs_of(metric, ordered, ordered, evidence.groups)


def is_right_or_wrong(pairs: Pairs) -> bool:
    return pairs.kind == "mean" and set(pairs.new) <= {0.0, 1.0}


def units(pairs: Pairs) -> int:
    """Independent samples, cautiously: rows of one group count once."""
    groups = pairs.groups
    if groups is None:
        return len(pairs.new)
    return len({group for group in groups if group is not None}) + sum(group is None for group in groups)


def forgetting(case: Case, rule: Forgetting) -> Reason:
    """Perplexity of general text must not rise over the base's, for every form that can be compared with the base."""
    plan = case.plan(rule.confidence)
    soundness.check_noise(case.evidence, GENERAL, rule.max_rise)
    outcomes: list[Outcome] = []
    texts, found = [], []
    for matched in matching.matches(case.evidence, GENERAL, "base"):
        one = comparison(matched, "base", GENERAL, -rule.max_rise, plan)
        outcome = _not_worse(one)
        way = f"{'fell' if one.difference >= 0 else 'rose'} by {words.change(one.difference, matched.metric)}"
        texts.append(
            f"perplexity of general text {way} ({matched.form} against the base; {words.percent(one.confidence)} sure: "
            f"a rise of at most {words.signed(-one.low, matched.metric)}; {one.n} blocks)"
            f"{_if_undecided(outcome, one, matched.metric)}"
        )
        outcomes.append(outcome)
        found.append(one)
    text = f"{'; '.join(texts)}; it may rise by at most {words.percent(rule.max_rise)}"
    return Reason(
        rule=rule.rule,
        metric=GENERAL,
        outcome=worst(outcomes),
        text=text,
        comparisons=tuple(settled(one, outcome) for one, outcome in zip(found, outcomes, strict=True)),
    )

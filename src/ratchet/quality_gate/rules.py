"""Applies the rules of the gate: each rule yields an outcome and a text for the verdict.

Comparisons are paired and one-sided. A rule passes only if the samples show that it is met, and is undecided if there
are too few samples.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ratchet.config.gate import (
    AboveChanceRule,
    AtLeastRule,
    BudgetRule,
    ExportParityRule,
    FailureRateRule,
    ForgettingRule,
    Gate,
    MustImproveRule,
    MustNotRegressRule,
    Reference,
)
from ratchet.config.units import format_bytes, format_count
from ratchet.quality_gate import evidence, paired_test, sequential_test, statistics
from ratchet.quality_gate.evidence import (
    ROLE_OF_FORMAT,
    GateEvidence,
    IncomparableError,
    MatchedScores,
    Samples,
    build_pairs,
    compute_difference,
    select_scores,
)
from ratchet.quality_gate.judgements import HUMAN_PREFERENCE
from ratchet.quality_gate.paired_test import PairedScores, PairedTestPlan, PairedTestResult
from ratchet.storage.digests import SHORT
from ratchet.storage.records.evaluation import ANSWERED_SAFE, HARMFUL, REFUSED_UNSAFE, MetricValue, ModelRole
from ratchet.storage.records.export import ExportArtifact, MergeParity
from ratchet.storage.records.gate import ModelComparison, Outcome, RuleResult, Verdict

REFERENCES: dict[Reference, str] = {"base": "the base", "champion": "the champion", "anchor": "the anchor"}
OUTCOME_LABELS = {"pass": "pass", "fail": "FAIL", "undecided": "????", "invalid": "INVALID"}
GENERAL_PERPLEXITY = "general_perplexity"
EXACT = "float32"
"""Type of merged weights for which every logit must be within max_logit_difference of the rule. In 16-bit types,
rounding alone exceeds this limit, so such merges are judged by their divergence (max_kl of the rule)."""


@dataclass(frozen=True)
class RuleContext:
    """Input of every rule."""

    evidence: GateEvidence
    gate: Gate

    def build_plan(self, confidence: float | None) -> PairedTestPlan:
        """Return the plan of a comparison; `confidence` overrides gate.confidence unless it is None."""
        return PairedTestPlan(
            confidence=confidence or self.gate.confidence,
            power=self.gate.power,
            discordance=self.gate.expected_discordance,
            resamples=self.gate.resamples,
            seed=self.gate.seed,
            alpha_share=statistics.compute_alpha_share(self.evidence.model_number or 1),
        )


def worst_outcome(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the worst of several outcomes, which decides the verdict or the rule."""
    order: tuple[Outcome, ...] = ("invalid", "fail", "undecided")
    return next((outcome for outcome in order if outcome in outcomes), "pass")


def compare_matched(
    matched: MatchedScores, against: Reference, name: str, bound: float, plan: PairedTestPlan
) -> ModelComparison:
    """Compare matched scores and return the record for the verdict."""
    if name == HUMAN_PREFERENCE:
        # On most judged rows one answer is preferred, so few rows with equal scores are to be expected.
        plan = replace(plan, discordance=1.0)
    result = paired_test.compare(matched.pairs, bound, plan)
    required_samples = result.required_samples
    if result.detectable > abs(bound) > 0 and has_too_few_samples(result):
        required_samples = max(required_samples or 0, result.min_units)
    low_confidence = None
    if result.is_sequential and plan.alpha_share < 1:
        low_confidence = 1 - (1 - plan.confidence) * plan.alpha_share
    return ModelComparison(
        metric=name,
        against=against,
        role=matched.role,
        difference=result.difference,
        low=result.low,
        high=result.high,
        confidence=plan.confidence,
        n=result.n,
        groups=result.groups,
        better=result.better,
        worse=result.worse,
        bound=bound,
        p=result.p,
        detectable=result.detectable,
        required_samples=required_samples,
        method=result.method,
        min_units=result.min_units,
        is_sequential=result.is_sequential,
        low_confidence=low_confidence,
    )


def clear_required_samples(comparison: ModelComparison, outcome: Outcome) -> ModelComparison:
    """Remove `required_samples` from a comparison that is decided."""
    return comparison if outcome == "undecided" else comparison.model_copy(update={"required_samples": None})


def has_too_few_samples(comparison: PairedTestResult | ModelComparison) -> bool:
    """Return whether scores that are not binary have too few samples (or groups) for a reliable mean."""
    return (comparison.groups or comparison.n) < comparison.min_units


# must_not_regress.


def apply_must_not_regress(context: RuleContext, rule: MustNotRegressRule) -> RuleResult:
    """Require that the candidate is not worse than the reference by the margin or more (a non-inferiority test).

    The test must reject the hypothesis that the candidate is worse by the margin, and the samples must be enough to
    detect such a loss.
    """
    plan, name = context.build_plan(rule.confidence), rule.metric
    check_noise(context.evidence, name, rule.margin)
    reason = evidence.missing_reference_reason(context.evidence, rule.against)
    if reason is not None and name == HUMAN_PREFERENCE:
        return RuleResult(
            rule=rule.rule, metric=name, outcome="pass", text=f"{name}: {reason}, so there is no comparison"
        )
    if reason is not None:
        return _judge_without_reference(context, rule, reason)
    matched = evidence.match_scores(context.evidence, name, rule.against)
    check_bound(rule.margin, "margin", matched.metric, matched.pairs)
    comparison = compare_matched(matched, rule.against, name, -rule.margin, plan)
    outcome = _non_inferiority_outcome(comparison)
    allowed = f"allowed loss: {format_change(rule.margin, matched.metric)}"
    missing = _describe_missing_samples(outcome, comparison, matched.metric)
    return RuleResult(
        rule=rule.rule,
        metric=name,
        outcome=outcome,
        text=f"{describe_comparison(comparison, matched.metric)}; {allowed}{missing}",
        comparisons=(clear_required_samples(comparison, outcome),),
    )


def _non_inferiority_outcome(comparison: ModelComparison) -> Outcome:
    if comparison.is_sequential and has_too_few_samples(comparison):
        return "undecided"
    if comparison.high < comparison.bound:
        return "fail"
    is_powerful = comparison.is_sequential or comparison.detectable <= -comparison.bound
    has_enough = is_powerful and not has_too_few_samples(comparison)
    return "pass" if comparison.low > comparison.bound and has_enough else "undecided"


def _describe_missing_samples(outcome: Outcome, comparison: ModelComparison, metric: MetricValue) -> str:
    """Explain why an undecided comparison is undecided, and how many samples would decide it."""
    if outcome != "undecided":
        return ""
    margin = -comparison.bound
    has_too_few = has_too_few_samples(comparison)
    if comparison.detectable > margin:
        change = format_change(comparison.detectable, metric)
        problem = f"{comparison.n} samples cannot detect a loss below {change}"
    elif has_too_few:
        problem = _describe_min_units(comparison)
    else:
        problem = "these samples cannot decide it"
    required = comparison.required_samples
    if required is None:
        required = count_samples_to_decide(comparison)
    required = max(required or 0, comparison.min_units if has_too_few else 0) or None
    return f": {problem}; {_describe_required_samples(required, comparison)}"


def _describe_min_units(comparison: ModelComparison) -> str:
    return f"fewer than {comparison.min_units} samples are not reliable"


def count_samples_to_decide(comparison: ModelComparison) -> int | None:
    """Estimate the number of samples with which the whole interval exceeds the bound, if the difference stays the same.

    None if no number of samples is enough, or the present number is enough.
    """
    distance = comparison.difference - comparison.bound
    if distance <= 0 or not comparison.difference > comparison.low:
        return None
    required = comparison.n * ((comparison.difference - comparison.low) / distance) ** 2
    return math.ceil(required) if math.isfinite(required) and required > comparison.n else None


def _describe_required_samples(required: int | None, comparison: ModelComparison) -> str:
    """Describe how many samples would decide a comparison: test rows, or rows that people have yet to judge."""
    if comparison.metric != HUMAN_PREFERENCE:
        return _describe_required_rows(required)
    if not required:
        return "more judgements are required"
    return f"about {required - comparison.n:,} more judgements, of other rows, are required"


def _describe_required_rows(required: int | None) -> str:
    return f"about {required:,} test rows are required" if required else "more test rows are required"


def _judge_without_reference(context: RuleContext, rule: MustNotRegressRule, reason: str) -> RuleResult:
    """Judge a rule that has no reference to compare with: pass if these samples could detect a loss of the margin.

    If the scores are not binary, the spread is estimated from the comparison with the base.
    """
    plan = context.build_plan(rule.confidence)
    role = evidence.list_scored_roles(context.evidence)[0]
    metric, samples = evidence.select_scores(context.evidence, role, rule.metric)
    pairs = pair_with_itself(context, rule.metric, metric, samples)
    price = sequential_test.PRICE if pairs.planned is not None else 1.0
    check_bound(rule.margin, "margin", metric, pairs)
    comparisons: tuple[ModelComparison, ...] = ()
    too_few = ""
    if is_binary(pairs):
        n = count_independent_samples(pairs)
        detectable = statistics.detectable_difference(n / price, plan.discordance, plan.confidence, plan.power)
        required_samples = math.ceil(
            price * statistics.required_pairs(rule.margin, plan.discordance, plan.confidence, plan.power)
        )
        has_enough = detectable <= rule.margin
    else:
        matched = evidence.match_scores(context.evidence, rule.metric, "base")
        against_base = compare_matched(matched, "base", rule.metric, -rule.margin, plan)
        n, detectable = len(pairs.new), against_base.detectable
        required_samples = max(against_base.required_samples or 0, against_base.min_units)
        comparisons = (against_base,)
        too_few = _describe_min_units(against_base) if has_too_few_samples(against_base) else ""
        has_enough = detectable <= rule.margin and not too_few
    text = f"{rule.metric}: {reason}, so there is no comparison; "
    margin = format_change(rule.margin, metric)
    change = format_change(detectable, metric)
    if has_enough:
        text += f"{n} samples detect a loss of {change}, and the allowed loss is {margin}"
    else:
        problem = f"{n} samples cannot detect a loss below {change}, and the allowed loss is {margin}"
        text += f"{problem if detectable > rule.margin else too_few}, so a later model could not be compared with "
        text += f"this one; {_describe_required_rows(required_samples)}"
    return RuleResult(
        rule=rule.rule,
        metric=rule.metric,
        outcome="pass" if has_enough else "undecided",
        text=text,
        comparisons=comparisons,
    )


def pair_with_itself(context: RuleContext, name: str, metric: MetricValue, samples: Samples) -> PairedScores:
    """Pair the samples of a model with themselves."""
    places = evidence.find_places(context.evidence, name, samples)
    return build_pairs(metric, samples, samples, context.evidence.groups, places)


def is_binary(pairs: PairedScores) -> bool:
    """Return whether all scores of the new model are 0 or 1."""
    return pairs.kind == "mean" and set(pairs.new) <= {0.0, 1.0}


def count_independent_samples(pairs: PairedScores) -> int:
    """Count the independent samples conservatively: all rows of one group count as one."""
    return len(pairs.new) if pairs.groups is None else max(statistics.number_groups(pairs.groups)) + 1


# forgetting.


def apply_forgetting(context: RuleContext, rule: ForgettingRule) -> RuleResult:
    """Limit the rise of general-text perplexity over the base, for every format that can be compared with the base."""
    plan = context.build_plan(rule.confidence)
    check_noise(context.evidence, GENERAL_PERPLEXITY, rule.max_rise)
    outcomes: list[Outcome] = []
    texts, comparisons = [], []
    for matched in evidence.iterate_matches(context.evidence, GENERAL_PERPLEXITY, "base"):
        comparison = compare_matched(matched, "base", GENERAL_PERPLEXITY, -rule.max_rise, plan)
        outcome = _non_inferiority_outcome(comparison)
        direction = "fell" if comparison.difference >= 0 else "rose"
        texts.append(
            f"general-text perplexity {direction} by {format_change(comparison.difference, matched.metric)} "
            f"({matched.role} against the base; {format_percent(comparison.confidence)} confidence: "
            f"a rise of at most {format_signed_change(-comparison.low, matched.metric)}; "
            f"{comparison.n} blocks)"
            f"{_describe_missing_samples(outcome, comparison, matched.metric)}"
        )
        outcomes.append(outcome)
        comparisons.append(clear_required_samples(comparison, outcome))
    return RuleResult(
        rule=rule.rule,
        metric=GENERAL_PERPLEXITY,
        outcome=worst_outcome(outcomes),
        text=f"{'; '.join(texts)}; allowed rise: {format_percent(rule.max_rise)}",
        comparisons=tuple(comparisons),
    )


# must_improve: all rules are applied together.

ImprovementClaim = tuple[MetricValue, ModelComparison]
"""One metric of a must_improve rule, and its comparison."""


def apply_must_improve_rules(context: RuleContext) -> dict[int, RuleResult]:
    """Apply all must_improve rules together and return the results by index of the rule.

    The p-values of all claims are adjusted together (S. Holm, Scandinavian Journal of Statistics 6, 1979), so that a
    model without any improvement passes with a probability below 1 - confidence, however many claims there are.
    """
    rules = {index: rule for index, rule in enumerate(context.gate.rules) if isinstance(rule, MustImproveRule)}
    results = {index: _compare_claims(context, rule) for index, rule in rules.items()}
    p = [comparison.p for claims in results.values() if isinstance(claims, list) for _, comparison in claims]
    adjusted = iter(statistics.adjust_p_values(p) if len(p) > 1 else [None] * len(p))
    applied: dict[int, RuleResult] = {}
    for index, claims in results.items():
        if isinstance(claims, RuleResult):
            applied[index] = claims
        else:
            with_p = [(metric, c.model_copy(update={"p_adjusted": next(adjusted)})) for metric, c in claims]
            applied[index] = _apply_must_improve(context, rules[index], with_p)
    return applied


def _compare_claims(context: RuleContext, rule: MustImproveRule) -> list[ImprovementClaim] | RuleResult:
    """Compare each metric of a rule; without a reference, or for incomparable scores, return the rule's result."""
    names = ", ".join(rule.metric)
    reason = evidence.missing_reference_reason(context.evidence, rule.over)
    if reason is not None:
        text = f"{names}: {reason}, so there is no comparison"
        return RuleResult(rule=rule.rule, metric=names, outcome="pass", text=text)
    plan, claims = context.build_plan(rule.confidence), []
    try:
        if rule.by < 0:
            raise IncomparableError(
                f"by is {rule.by:g}: a loss is not an improvement; use must_not_regress with margin {-rule.by:g}"
            )
        for name in dict.fromkeys(rule.metric):
            check_noise(context.evidence, name, rule.by)
            matched = evidence.match_scores(context.evidence, name, rule.over)
            check_bound(rule.by, "by", matched.metric, matched.pairs)
            claims.append((matched.metric, compare_matched(matched, rule.over, name, rule.by, plan)))
    except IncomparableError as error:
        return RuleResult(rule=rule.rule, metric=names, outcome=error.outcome, text=str(error))
    return claims


def _apply_must_improve(context: RuleContext, rule: MustImproveRule, claims: Sequence[ImprovementClaim]) -> RuleResult:
    """Pass if at least one metric is significantly better; fail if no upper bound exceeds the claimed improvement."""
    plan = context.build_plan(rule.confidence)
    has_won, texts = False, []
    for metric, comparison in claims:
        adjusted = comparison.p_adjusted
        # A p-value that is NaN is not below alpha.
        alpha = (1 - plan.confidence) * (plan.alpha_share if comparison.is_sequential else 1.0)
        is_better = (comparison.p if adjusted is None else adjusted) < alpha
        has_won = has_won or (is_better and not has_too_few_samples(comparison))
        required = f"more than {format_change(rule.by, metric)} better" if rule.by else "better"
        p = f"p = {comparison.p:.2g}" + ("" if adjusted is None else f", {adjusted:.2g} adjusted for all claims")
        texts.append(f"{describe_comparison(comparison, metric)}; must be {required} ({p})")
    has_lost = all(
        comparison.high <= comparison.bound and not (comparison.is_sequential and has_too_few_samples(comparison))
        for _, comparison in claims
    )
    outcome: Outcome = "pass" if has_won else "fail" if has_lost else "undecided"
    text = "; or: ".join(texts)
    if outcome == "undecided":
        counts = [(count_samples_to_decide(comparison), comparison) for _, comparison in claims]
        count, closest = min(counts, key=lambda found: found[0] or math.inf)
        is_reliable = not has_too_few_samples(closest)
        problem = "these samples cannot decide it" if is_reliable else _describe_min_units(closest)
        needed = count if is_reliable else max(count or 0, closest.min_units)
        text += f": {problem}; {_describe_required_samples(needed, closest)}"
        text += " if the difference stays the same" if count else ""
    return RuleResult(
        rule=rule.rule,
        metric=", ".join(rule.metric),
        outcome=outcome,
        text=text,
        comparisons=tuple(clear_required_samples(comparison, outcome) for _, comparison in claims),
    )


# at_least and above_chance: rules about the candidate alone.


@dataclass(frozen=True)
class _ThresholdComparison:
    """Comparison of a metric with a fixed value; positive differences are better."""

    low: float
    """One-sided lower bound of the difference."""
    high: float
    """One-sided upper bound of the difference."""
    value: float
    """Value of the metric."""
    text: str


def _compare_with_value(
    context: RuleContext, role: ModelRole, name: str, value: float, plan: PairedTestPlan
) -> _ThresholdComparison:
    """Compare a metric with a number: Wilson's bounds for proportions, else the paired test against a constant.

    For scores with an upper limit, the bounds also allow for values that are missing from the sample.
    """
    metric, samples = evidence.select_scores(context.evidence, role, name)
    pairs = pair_with_itself(context, name, metric, samples)
    if is_share(metric) and not 0 <= value <= 1:
        raise IncomparableError(f"{name} is a proportion: found {value:g}, expected 0 to 1; write 0.9 for 90 %")
    if metric.kind == "perplexity" and value <= 0:
        raise IncomparableError(f"{name} is a perplexity: found {value:g}, expected a positive number")
    n, mean = count_independent_samples(pairs), math.fsum(pairs.new) / len(pairs.new)

    def subtract_value(low: float, high: float) -> tuple[float, float]:
        return (low - value, high - value) if metric.better == "higher" else (value - high, value - low)

    is_reliable = True
    if is_binary(pairs) and pairs.planned is None:
        low, high = subtract_value(*statistics.wilson_bounds(mean * n, n, plan.confidence))
    else:
        constant = (
            [tokens * math.log(value) for tokens in pairs.weights]  # Nats of each sample at this perplexity.
            if pairs.weights
            else [value] * len(pairs.new)
        )
        result = paired_test.compare(replace(pairs, old=constant), 0.0, plan)
        low, high, is_reliable = result.low, result.high, not has_too_few_samples(result)
        if pairs.limit is not None and pairs.planned is None:  # the bootstrap does not see missing values
            unseen = subtract_value(*statistics.bound_unseen_scores(mean, pairs.limit, n, plan.confidence))
            low, high = min(low, unseen[0]), max(high, unseen[1])
    bounds = [_value_at_difference(metric, value, difference) for difference in (low, high)]
    if is_share(metric):
        bounds = [min(1.0, max(0.0, bound)) for bound in bounds]
    worst, best = (format_value(bound, metric) for bound in bounds)
    differences = (low, high) if is_reliable else (-math.inf, math.inf)
    text = (
        f"{name} of {role} {format_value(metric.value, metric)} "
        f"({format_percent(plan.confidence)} confidence: no worse than {worst}, "
        f"no better than {best}; {metric.n} samples)"
    )
    return _ThresholdComparison(*differences, metric.value, text)


def _value_at_difference(metric: MetricValue, value: float, difference: float) -> float:
    """Return the value of the metric that is better than `value` by `difference`."""
    if metric.kind == "perplexity":
        return value * (1 - difference)
    return value + difference if metric.better == "higher" else value - difference


def apply_at_least(context: RuleContext, rule: AtLeastRule) -> RuleResult:
    """Require a fixed value of every format of the candidate: a minimum, or a maximum if lower is better.

    The confidence bound must reach the value; it is not enough that the measured metric reaches it.
    """
    plan = context.build_plan(rule.confidence)
    outcomes: list[Outcome] = []
    texts = []
    roles = evidence.list_scored_roles(context.evidence)
    for role in roles:
        comparison = _compare_with_value(context, role, rule.metric, rule.value, plan)
        outcomes.append("pass" if comparison.low >= 0 else "fail" if comparison.high < 0 else "undecided")
        texts.append(comparison.text)
    metric, _ = evidence.select_scores(context.evidence, roles[0], rule.metric)
    direction = "at least" if metric.better == "higher" else "at most"
    text = f"{'; '.join(texts)}; must be {direction} {format_value(rule.value, metric)}"
    outcome = worst_outcome(outcomes)
    if outcome == "undecided":
        text += f": these samples cannot decide it; {_describe_required_rows(None)}"
    return RuleResult(rule=rule.rule, metric=rule.metric, outcome=outcome, text=text)


def apply_above_chance(context: RuleContext, rule: AboveChanceRule) -> RuleResult:
    """Fail if the metric is at most the chance level; undecided if only its lower confidence bound is."""
    plan = context.build_plan(None)
    outcomes: list[Outcome] = []
    texts = []
    for role in evidence.list_scored_roles(context.evidence):
        metric, _ = evidence.select_scores(context.evidence, role, rule.metric)
        chance = rule.chance if rule.chance is not None else metric.chance
        if chance is None:
            raise IncomparableError(f"the chance level of {rule.metric} is unknown; set `chance` in this rule")
        if metric.better != "higher":
            raise IncomparableError(
                f"{rule.metric} has no chance level because lower is better; use a share of right answers"
            )
        comparison = _compare_with_value(context, role, rule.metric, chance, plan)
        # With many looks, the measured value alone would fail a good model at one of them.
        is_at_chance = comparison.high <= 0 if context.gate.test == "sequential" else comparison.value <= chance
        outcomes.append("pass" if comparison.low > 0 else "fail" if is_at_chance else "undecided")
        texts.append(f"{comparison.text}; guessing reaches {format_value(chance, metric)}")
    outcome = worst_outcome(outcomes)
    text = "; ".join(texts)
    if outcome != "pass":
        conclusion = "no better than guessing" if outcome == "fail" else "perhaps no better than guessing"
        text += f": {conclusion}, so the model or the evaluation may be broken (check the answers first)"
    return RuleResult(rule=rule.rule, metric=rule.metric, outcome=outcome, text=text)


# must_refuse, must_answer and harmful_rate: rates of failures on the prompts of evaluate.safety.


@dataclass(frozen=True)
class _FailureKind:
    """Metric of a rule about failures, and the words for them."""

    metric: str
    prompts: str
    failed: str


FAILURES = {
    "must_refuse": _FailureKind(REFUSED_UNSAFE, "unsafe prompts", "not refused"),
    "must_answer": _FailureKind(ANSWERED_SAFE, "safe prompts", "refused"),
    "harmful_rate": _FailureKind(HARMFUL, "unsafe prompts", "answered harmfully"),
}
"""By rule."""


def apply_failure_rate(context: RuleContext, rule: FailureRateRule) -> RuleResult:
    """Require a low rate of failures of every format of the candidate.

    The rule passes if the exact upper bound of the rate is at most max_rate, and fails if the lower bound is above it.
    Otherwise these prompts cannot decide it, and the text has the number of prompts that would suffice.
    """
    kind, confidence = FAILURES[rule.rule], rule.confidence or context.gate.confidence
    outcomes: list[Outcome] = []
    texts, missing = [], []
    for role in evidence.list_scored_roles(context.evidence):
        if rule.rule == "harmful_rate" and kind.metric not in context.evidence.report.scores[role].metrics:
            raise IncomparableError(
                f"{kind.metric} was not measured for {role}: it needs evaluate.safety.prompts, and a judge or a "
                "classifier with a label for harm as evaluate.safety.scorer, because patterns find refusals only"
            )
        metric, samples = evidence.select_scores(context.evidence, role, kind.metric)
        good, n = (1.0 if metric.better == "higher" else 0.0), len(samples)
        failures = sum(sample.value != good for sample in samples.values())
        low, high = statistics.clopper_pearson_bounds(failures, n, confidence)
        outcome: Outcome = "pass" if high <= rule.max_rate else "fail" if low > rule.max_rate else "undecided"
        rule_of_three = ", about 3/n" if not failures and confidence == 0.95 else ""
        texts.append(
            f"{failures} of {n} {kind.prompts} {kind.failed} by {role} ({format_percent(confidence)} confidence: a "
            f"rate of at least {100 * low:.2f} %, at most {100 * high:.2f} %{rule_of_three})"
        )
        if outcome == "undecided":
            required = statistics.required_without_failure(failures, rule.max_rate, confidence)
            missing.append(f"{required:,} prompts would suffice, if the other {required - n:,} are without failure")
        outcomes.append(outcome)
    text = f"{'; '.join(texts)}; allowed: {format_percent(rule.max_rate)}"
    outcome = worst_outcome(outcomes)
    if outcome == "undecided":
        text += f": these prompts cannot decide it; {'; '.join(dict.fromkeys(missing))}"
    return RuleResult(rule=rule.rule, metric=kind.metric, outcome=outcome, text=text)


# budget.


def apply_budget(context: RuleContext, rule: BudgetRule) -> RuleResult:
    """Limit the size of the export, or the latency or memory of an answer (of the merged model if it was measured)."""
    costs = context.evidence.report.costs
    cost = costs.get("merged") or costs.get("candidate")
    if rule.resource == "size":
        measured: float = context.evidence.bundle.size_bytes
        text, allowed = f"the export has {format_bytes(measured)}", format_bytes(rule.maximum)
    elif cost is None:
        raise IncomparableError(
            f"{rule.resource} was not measured; set evaluate.latency_rows above 0 and run `dvc repro evaluate`"
        )
    elif rule.resource == "latency":
        measured = cost.latency_s
        text = f"an answer takes {measured:.3g} s ({cost.rows} prompts, {cost.device})"
        allowed = f"{rule.maximum:g} s"
    else:
        measured = cost.memory_bytes
        text = f"answering takes {format_bytes(measured)} of memory ({cost.device})"
        allowed = format_bytes(rule.maximum)
    if not math.isfinite(measured):
        raise IncomparableError(f"{rule.resource} is {measured}, not a finite number")
    outcome: Literal["pass", "fail"] = "pass" if measured <= rule.maximum else "fail"
    return RuleResult(rule=rule.rule, metric=rule.resource, outcome=outcome, text=f"{text}; allowed: {allowed}")


# export_parity.


def apply_export_parity(context: RuleContext, rule: ExportParityRule) -> RuleResult:
    """Require that every exported format, run in its own runtime, answers as base + adapter does.

    The limit of the logits applies to float32 merges, and to bundles without formats, which have no divergence.
    """
    bundle = context.evidence.bundle
    is_exact = bundle.dtype == EXACT or not bundle.artifacts
    faults = list(_find_merge_faults(bundle.parity, rule, is_exact))
    for artifact in bundle.artifacts:
        faults += (f"{artifact.name}: {text}" for text in _find_artifact_faults(artifact, rule))
    if faults:
        return RuleResult(rule=rule.rule, metric="export_parity", outcome="fail", text="; ".join(faults))
    names = ", ".join(artifact.name for artifact in bundle.artifacts)
    parity, condition = bundle.parity, "" if is_exact else " in float32"
    text = (
        f"merged model against base + adapter: logits differ by at most {parity.max_logit_difference:.2g} (allowed "
        f"{rule.max_logit_difference:g}{condition}), same greedy token at {parity.greedy_agreement:.4f} of the answer "
        f"positions (required {rule.min_greedy_agreement:g})"
        + (f"; within the limits of their types: {names}" if names else "")
    )
    return RuleResult(rule=rule.rule, metric="export_parity", outcome="pass", text=text)


def _find_merge_faults(parity: MergeParity, rule: ExportParityRule, is_exact: bool) -> Iterator[str]:
    # `not <=` instead of `>`: NaN must be a fault.
    if is_exact and not parity.max_logit_difference <= rule.max_logit_difference:
        yield (
            f"merged model: a logit differs by {parity.max_logit_difference:.2g} from base + adapter "
            f"(allowed {rule.max_logit_difference:g})"
        )
    if not parity.greedy_agreement >= rule.min_greedy_agreement:
        yield (
            f"merged model: same greedy token at {parity.greedy_agreement:.4f} of the answer positions "
            f"(required {rule.min_greedy_agreement:g})"
        )


def _find_artifact_faults(artifact: ExportArtifact, rule: ExportParityRule) -> Iterator[str]:
    allowed, distance = rule.kl_bound(artifact.type), artifact.distance
    if allowed is None:
        yield f"type {artifact.type} has no limit; add it to max_kl of the rule export_parity"
    elif not distance.kl <= allowed:
        yield (
            f"diverges from base + adapter by {distance.kl:.2g} nats per token in {artifact.runtime} "
            f"(allowed {allowed:g})"
        )
    if artifact.texts_tokenised < rule.min_tokenizer_agreement * artifact.texts:
        yield (
            f"its tokenizer gives other tokens for {artifact.texts - artifact.texts_tokenised} of {artifact.texts} "
            f"texts (required share of equal texts: {rule.min_tokenizer_agreement:g})"
        )
    task = artifact.task
    if task is not None and task.high < -rule.max_score_drop:
        yield (
            f"{task.metric} is {task.value:.4g}, {task.reference:.4g} for base + adapter, on {task.rows} rows "
            f"(difference {task.low:+.3g} to {task.high:+.3g}, allowed {-rule.max_score_drop:g})"
        )


# Checks: evidence that no rule can use, bounds larger than any possible difference, and margins below the noise.


def find_problems(evidence: GateEvidence, test: Literal["fixed", "sequential"]) -> tuple[RuleResult, ...]:
    """Return the reasons for INVALID that do not depend on the rules; `test` is gate.test."""
    problems = [("identity", text) for text in _find_identity_problems(evidence)]
    problems += [
        (
            "selection",
            f"{count} test rows or tasks also belong to {name}, a set by which models are selected, so they cannot "
            "be used to judge a selected model; select models by the validation rows, or use other test rows",
        )
        for name, count in sorted(evidence.report.selection_overlaps.items())
        if count
    ]
    problems += [
        (
            "start_adapter",
            f"{format_count(count, 'test row')} found among the training and validation rows of {name}, from which "
            "this training starts (train.init_adapter), or of a run before it, so they cannot show what the model "
            "learned; prepare the data with the prepare.split.seed of that run, or set a start adapter that was "
            "trained with this split",
        )
        for name, count in sorted(evidence.report.start_overlaps.items())
    ]
    problems += [("tasks", text) for text in _find_changed_tasks(evidence)]
    if evidence.missing_uses_problem is not None:
        problems.append(("test_set_uses", evidence.missing_uses_problem))
    if test == "sequential" and evidence.test_set is None:
        problems.append(
            ("test_set", "the rows of this test set are not recorded with an order; run `dvc repro -f evaluate`")
        )
    if test == "fixed" and evidence.report.remaining_rows:
        text = "the evaluation ended early, as only a sequential test may; run `dvc repro -f evaluate`"
        problems.append(("test_set", text))
    return tuple(RuleResult(rule=rule, metric="-", outcome="invalid", text=text) for rule, text in problems)


def _find_identity_problems(evidence: GateEvidence) -> Iterator[str]:
    report, bundle, champion = evidence.report, evidence.bundle, evidence.champion
    for name in ("adapter", "base", "data", "model"):
        evaluated, exported = (getattr(record, f"{name}_digest") for record in (report, bundle))
        if evaluated is None:
            yield (
                "this adapter was not exported when it was evaluated; run `dvc repro evaluate` (existing scores are "
                "reused)"
            )
        elif evaluated != exported:
            yield (
                f"the evaluation is of {name} {evaluated[:SHORT]}, the export is of {exported[:SHORT]}; run `dvc repro`"
            )
    if report.run_id != bundle.run_id:
        yield f"the evaluation is of run {report.run_id}, the export is of run {bundle.run_id}; run `dvc repro`"
    merged = report.scores.get("merged")
    if merged is not None and merged.model_digest != bundle.model_digest:
        yield (
            f"the merged model was scored as {merged.model_digest[:SHORT]}, the export is "
            f"{bundle.model_digest[:SHORT]}; run `dvc repro evaluate`"
        )
    for reference, evaluated, current in (
        ("champion", report.champion_digest, champion.champion_digest),
        ("anchor", report.anchor_digest, champion.anchor_digest),
    ):
        if evaluated != current:
            yield (
                f"the {reference} was {(evaluated or 'none')[:SHORT]} at the evaluation and is now "
                f"{(current or 'none')[:SHORT]}; run `dvc repro evaluate`"
            )


def _find_changed_tasks(evidence: GateEvidence) -> Iterator[str]:
    contracts = evidence.report.contracts
    evaluated = [contracts.get(scores.contract, {}).get("tasks", {}) for scores in evidence.report.scores.values()]
    for name in sorted(evidence.current_task_digests.keys() | {name for tasks in evaluated for name in tasks}):
        digests, current = {tasks.get(name) for tasks in evaluated}, evidence.current_task_digests.get(name)
        if digests == {current}:
            continue
        change = "changed since the evaluation (its YAML file or its data)"
        if current is None:
            change = "was evaluated but its file is missing now, or evaluate.harness.tasks does not name it"
        elif digests <= {None}:
            change = "was not evaluated"
        yield f"harness task {name} {change}; run `dvc repro evaluate`"


def check_bound(bound: float, setting: str, metric: MetricValue, pairs: PairedScores) -> None:
    """Raise IncomparableError for a bound that is larger than any possible difference between two models.

    Args:
        bound: Value of the setting.
        setting: Name of the setting: `by` or `margin`.
        metric: Metric of the rule.
        pairs: Scores that are compared.
    """
    scores = (*pairs.new, *pairs.old)
    are_shares = metric.better == "higher" and min(scores) >= 0 and max(scores) <= 1
    if bound >= 1 and (is_share(metric) or metric.kind == "perplexity" or are_shares):
        unit = "%" if metric.kind == "perplexity" else "points"
        raise IncomparableError(
            f"{setting} is {bound:g}, which is {100 * bound:g} {unit}: no two models can differ by that much; "
            f"write 0.02 for 2 {unit}"
        )


def pair_rescored_samples(evidence: GateEvidence, name: str) -> tuple[ModelRole, MetricValue, PairedScores] | None:
    """Pair the second scoring of the candidate with the first.

    Returns:
        The role under which the candidate was scored, its metric, and the pairs. None if this metric was not scored
        twice, or the second scoring is of another model or contract.

    Raises:
        IncomparableError: The second scoring has other samples.
    """
    noise = evidence.noise
    if noise is None or name not in noise.metrics:
        return None
    role = ROLE_OF_FORMAT[noise.model_format]
    scores = evidence.report.scores.get(role)
    if scores is None or (scores.model_digest, scores.contract) != (noise.model_digest, noise.contract):
        return None
    metric, first = select_scores(evidence, role, name)
    second = evidence.noise_samples.get(name, {})
    if first.keys() != second.keys():
        raise IncomparableError(
            f"{name}: the second scoring of {role} has other samples; run `ratchet gate --aa` again"
        )
    return role, metric, build_pairs(metric, second, first, evidence.groups)


def check_noise(evidence: GateEvidence, name: str, bound: float) -> None:
    """Raise IncomparableError for a margin that is smaller than the noise of the evaluation."""
    rescored = pair_rescored_samples(evidence, name) if bound > 0 else None
    if rescored is None:
        return
    role, metric, pairs = rescored
    difference = abs(compute_difference(pairs))
    if not difference <= bound:  # Also refuses NaN.
        raise IncomparableError(
            f"{name} of {role}, scored twice, differs by {format_change(difference, metric)}, more than the "
            f"margin of {format_change(bound, metric)}: the evaluation is too noisy for this rule "
            "(run `ratchet gate --aa`)"
        )


# Text of verdicts, comparisons and values.


def describe_verdict(verdict: Verdict, is_promoted: bool = False) -> str:
    """Format a verdict for the terminal: the decision, then one line per rule.

    `is_promoted`: the model has become the champion since.
    """
    head = f"{verdict.decision}: model {verdict.model_digest[:SHORT]}, run {verdict.run_id}"
    if verdict.is_champion:
        head += " (already the champion)"
    elif is_promoted:
        head += " (now the champion)"
    elif verdict.decision == "PROMOTE":
        head += "; run `ratchet promote` to make it the champion"
    lines = [f"  {OUTCOME_LABELS[r.outcome]:4}  {r.rule}: {r.text}" for r in verdict.reasons]
    if verdict.remaining_rows and verdict.decision == "HOLD":
        lines.append(
            f"  note  {verdict.remaining_rows:,} test rows were not scored; run `dvc repro -f evaluate` to score as "
            "many as these rules need"
        )
    lines += [f"  note  {note}" for note in verdict.notes]
    if verdict.earlier_decisions:
        lines.append(f"  note  {describe_changed_rules(verdict)}")
    return "\n".join([head, *lines])


def describe_changed_rules(verdict: Verdict) -> str:
    """Return a warning that these samples were judged under different rules before."""
    return (
        f"under different rules the gate decided {', '.join(verdict.earlier_decisions)} for this model on these "
        "samples; a margin set after the results were seen is weaker evidence"
    )


def describe_comparison(comparison: ModelComparison, metric: MetricValue) -> str:
    """Describe a comparison: direction, size, bounds and number of samples."""
    amount = "the same as"
    if comparison.difference:
        direction = "better" if comparison.difference > 0 else "worse"
        amount = f"{format_change(comparison.difference, metric)} {direction} than"
    counts = f"{comparison.n} samples"
    if comparison.groups is not None:
        counts += f" in {comparison.groups} groups"
    if comparison.better is not None and comparison.worse is not None:
        counts += f", {comparison.better} better, {comparison.worse} worse"
    low, high = (format_signed_change(bound, metric) for bound in (comparison.low, comparison.high))
    bounds = f"{format_percent(comparison.confidence)} confidence: at least {low}, at most {high}"
    if comparison.low_confidence:
        bounds = (
            f"{100 * comparison.low_confidence:.6g} % confidence, because of earlier models on these rows: at least "
            f"{low}; {format_percent(comparison.confidence)}: at most {high}"
        )
    return f"{comparison.metric} {amount} {REFERENCES[comparison.against]} ({bounds}; {counts})"


def is_share(metric: MetricValue) -> bool:
    """Return whether the metric is a proportion, such as the share of right answers."""
    return metric.unit == "proportion"


def format_value(value: float, metric: MetricValue) -> str:
    """Format a value of a metric: `84.5 %`, `1.234 nats`, `12.3`."""
    if is_share(metric):
        return f"{100 * value:.1f} %"
    return f"{value:.4g}{' nats' if metric.unit.startswith('nats') else ''}"


def format_change(difference: float, metric: MetricValue) -> str:
    """Format a difference without its sign: `2.5 points`, `3.1 %`, `0.031 nats`."""
    if metric.kind == "perplexity":
        return f"{format_number(100 * abs(difference))} %"
    if is_share(metric):
        number = format_number(100 * abs(difference))
        return f"{number} point{'' if number == '1' else 's'}"
    return f"{abs(difference):.3g}{' nats' if metric.unit.startswith('nats') else ''}"


def format_signed_change(difference: float, metric: MetricValue) -> str:
    """Format a difference with its sign."""
    return f"{'-' if difference < 0 else '+'}{format_change(difference, metric)}"


def format_percent(share: float) -> str:
    """Format a confidence or a fraction: `95 %`, `97.5 %`."""
    return f"{format_number(100 * share)} %"


def format_number(value: float) -> str:
    """Format with two decimals without trailing zeros, or with one significant digit below 0.01."""
    if value == 0 or abs(value) >= 0.01:
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return f"{value:.1g}"

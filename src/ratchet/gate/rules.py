"""Rules that compare with another model: paired, one-sided; what the data cannot decide is undecided, never passed."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

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
)
from ratchet.gate import evidence, messages, paired_test, statistics, validity
from ratchet.gate import evidence as matching
from ratchet.gate.evidence import GateEvidence, IncomparableError, MatchedScores, Samples
from ratchet.gate.paired_test import PairedScores, PairedTestPlan, PairedTestResult
from ratchet.storage.records.evaluation import MetricValue, Who
from ratchet.storage.records.export import ExportArtifact, MergeParity
from ratchet.storage.records.gate import ModelComparison, Outcome, RuleResult

GENERAL = "general_perplexity"
FEWEST = 20
"""Samples (or groups) below which means that are no shares decide nothing: on skewed scores neither bootstrap nor
Student's t keeps its level there (simulated: 7 % instead of 5 % at 20 already, paired.py)."""


@dataclass(frozen=True)
class RuleContext:
    """What all rules look at."""

    evidence: GateEvidence
    gate: Gate

    def plan(self, confidence: float | None) -> PairedTestPlan:
        """How to compare, for a rule that may have a confidence of its own."""
        return PairedTestPlan(
            confidence=confidence or self.gate.confidence,
            power=self.gate.power,
            discordance=self.gate.discordance,
            resamples=self.gate.resamples,
            seed=self.gate.seed,
        )


def worst_outcome(outcomes: Sequence[Outcome]) -> Outcome:
    """What of several findings decides."""
    order: tuple[Outcome, ...] = ("invalid", "fail", "undecided")
    return next((outcome for outcome in order if outcome in outcomes), "pass")


def compare_matched(
    matched: MatchedScores, against: Reference, name: str, bound: float, plan: PairedTestPlan
) -> ModelComparison:
    """Compare, as it is written into the verdict."""
    found = paired_test.compare(matched.pairs, bound, plan)
    needed = found.needed
    if found.detectable > abs(bound) > 0 and has_too_few_samples(found):
        needed = max(needed or 0, FEWEST)
    return ModelComparison(
        metric=name, against=against, form=matched.form, difference=found.difference, low=found.low, high=found.high,
        confidence=plan.confidence, n=found.n, groups=found.groups, better=found.better, worse=found.worse,
        bound=bound, p=found.p, detectable=found.detectable, needed=needed, method=found.method,
    )  # fmt: skip


def clear_needed_samples(found: ModelComparison, outcome: Outcome) -> ModelComparison:
    """Where the samples have decided, no more are needed."""
    return found if outcome == "undecided" else found.model_copy(update={"needed": None})


def has_too_few_samples(found: PairedTestResult | ModelComparison) -> bool:
    """Whether there are too few samples for a mean that is no share of right answers."""
    return found.better is None and (found.groups or found.n) < FEWEST


def apply_must_not_regress(case: RuleContext, rule: MustNotRegressRule) -> RuleResult:
    """Not worse than the reference by the margin, beyond doubt, and with samples that would have shown it.

    Non-inferiority: the hypothesis that the candidate is worse by the margin must be refuted.
    """
    plan, name = case.plan(rule.confidence), rule.metric
    validity.check_noise(case.evidence, name, rule.margin)
    why = matching.missing_reference_reason(case.evidence, rule.against)
    if why is not None:
        return _judge_without_reference(case, rule, why)
    matched = matching.match_scores(case.evidence, name, rule.against)
    validity.check_bound(rule.margin, "margin", matched.metric, matched.pairs)
    found = compare_matched(matched, rule.against, name, -rule.margin, plan)
    outcome = _non_inferiority_outcome(found)
    allowed = f"may lose at most {messages.format_change(rule.margin, matched.metric)}"
    missing = _describe_missing_samples(outcome, found, matched.metric)
    text = f"{messages.describe_comparison(found, matched.metric)}; {allowed}{missing}"
    return RuleResult(
        rule=rule.rule, metric=name, outcome=outcome, text=text, comparisons=(clear_needed_samples(found, outcome),)
    )


def _non_inferiority_outcome(found: ModelComparison) -> Outcome:
    if found.high < found.bound:
        return "fail"
    enough = found.detectable <= -found.bound and not has_too_few_samples(found)
    return "pass" if found.low > found.bound and enough else "undecided"


def _describe_missing_samples(outcome: Outcome, found: ModelComparison, metric: MetricValue) -> str:
    """What these samples cannot tell, and how many would."""
    if outcome != "undecided":
        return ""
    margin = -found.bound
    if found.detectable > margin:
        cannot = f"{found.n} samples detect no loss below {messages.format_change(found.detectable, metric)}"
    elif has_too_few_samples(found):
        cannot = "so few samples are not to be trusted"
    else:
        cannot = "these samples cannot tell"
    needed = found.needed if found.needed is not None else count_samples_to_decide(found)
    return f": {cannot}; {_describe_needed_rows(max(needed or 0, FEWEST if has_too_few_samples(found) else 0) or None)}"


def count_samples_to_decide(found: ModelComparison) -> int | None:
    """Samples that would put the whole bound on the good side if the difference stays; None where none would."""
    distance = found.difference - found.bound
    if distance <= 0 or not found.difference > found.low:
        return None
    needed = found.n * ((found.difference - found.low) / distance) ** 2
    return math.ceil(needed) if math.isfinite(needed) and needed > found.n else None


def _describe_needed_rows(needed: int | None) -> str:
    return f"about {needed:,} would do" if needed else "more test rows would"


def _judge_without_reference(case: RuleContext, rule: MustNotRegressRule, why: str) -> RuleResult:
    """Nothing to compare with: it holds if these samples could have shown a loss of the margin."""
    plan = case.plan(rule.confidence)
    who = matching.list_scored_forms(case.evidence)[0]
    metric, samples = matching.select_scores(case.evidence, who, rule.metric)
    pairs = pair_with_itself(case.evidence, metric, samples)
    validity.check_bound(rule.margin, "margin", metric, pairs)
    found: tuple[ModelComparison, ...] = ()
    if is_binary(pairs):
        n = count_independent_samples(pairs)
        detectable = statistics.detectable_difference(n, plan.discordance, plan.confidence, plan.power)
        needed = statistics.required_pairs(rule.margin, plan.discordance, plan.confidence, plan.power)
        enough = detectable <= rule.margin
    else:
        matched = matching.match_scores(case.evidence, rule.metric, "base")
        against_base = compare_matched(matched, "base", rule.metric, -rule.margin, plan)
        n, detectable = len(pairs.new), against_base.detectable
        needed = max(against_base.needed or 0, FEWEST)
        enough, found = detectable <= rule.margin and not has_too_few_samples(against_base), (against_base,)
    text = f"{rule.metric}: {why}, so nothing is compared; "
    margin = messages.format_change(rule.margin, metric)
    if enough:
        text += (
            f"{n} samples would detect a loss of {messages.format_change(detectable, metric)}, and {margin} may be lost"
        )
    else:
        text += f"{n} samples would detect no loss below {messages.format_change(detectable, metric)}, "
        text += f"and only {margin} may be lost: a later model could not be held to it; {_describe_needed_rows(needed)}"
    return RuleResult(
        rule=rule.rule, metric=rule.metric, outcome="pass" if enough else "undecided", text=text, comparisons=found
    )


def pair_with_itself(evidence: GateEvidence, metric: MetricValue, samples: Samples) -> PairedScores:
    """A model's samples beside themselves."""
    ordered = matching.sort_samples(samples)
    return matching.build_pairs(metric, ordered, ordered, evidence.groups)


def is_binary(pairs: PairedScores) -> bool:
    return pairs.kind == "mean" and set(pairs.new) <= {0.0, 1.0}


def count_independent_samples(pairs: PairedScores) -> int:
    """Independent samples, cautiously: rows of one group count once."""
    groups = pairs.groups
    if groups is None:
        return len(pairs.new)
    return len({group for group in groups if group is not None}) + sum(group is None for group in groups)


def apply_forgetting(case: RuleContext, rule: ForgettingRule) -> RuleResult:
    """Perplexity of general text must not rise over the base's, for every form that can be compared with the base."""
    plan = case.plan(rule.confidence)
    validity.check_noise(case.evidence, GENERAL, rule.max_rise)
    outcomes: list[Outcome] = []
    texts, found = [], []
    for matched in matching.iterate_matches(case.evidence, GENERAL, "base"):
        one = compare_matched(matched, "base", GENERAL, -rule.max_rise, plan)
        outcome = _non_inferiority_outcome(one)
        way = f"{'fell' if one.difference >= 0 else 'rose'} by {messages.format_change(one.difference, matched.metric)}"
        texts.append(
            f"perplexity of general text {way} ({matched.form} against the base; "
            f"{messages.format_percent(one.confidence)} sure: "
            f"a rise of at most {messages.format_signed_change(-one.low, matched.metric)}; "
            f"{one.n} blocks)"
            f"{_describe_missing_samples(outcome, one, matched.metric)}"
        )
        outcomes.append(outcome)
        found.append(one)
    text = f"{'; '.join(texts)}; it may rise by at most {messages.format_percent(rule.max_rise)}"
    return RuleResult(
        rule=rule.rule,
        metric=GENERAL,
        outcome=worst_outcome(outcomes),
        text=text,
        comparisons=tuple(clear_needed_samples(one, outcome) for one, outcome in zip(found, outcomes, strict=True)),
    )


# Claims that the candidate is better: all of them together, for with each further claim one may be true by luck.


@dataclass(frozen=True)
class ImprovementClaim:
    """One metric of a must_improve rule, compared."""

    metric: MetricValue
    found: ModelComparison


def apply_must_improve_rules(case: RuleContext) -> dict[int, RuleResult]:
    """What each must_improve rule finds, by its place among the rules.

    p-values of all claims are adjusted together (S. Holm, Scandinavian Journal of Statistics 6, 1979): the chance
    that any claim of a model that improved nothing is believed stays below 1 - confidence.
    """
    rules = {place: rule for place, rule in enumerate(case.gate.rules) if isinstance(rule, MustImproveRule)}
    made = {place: _compare_claims(case, rule) for place, rule in rules.items()}
    p = [claim.found.p for some in made.values() if isinstance(some, list) for claim in some]
    adjusted = iter(statistics.adjust_p_values(p) if len(p) > 1 else [None] * len(p))
    return {
        place: some
        if isinstance(some, RuleResult)
        else _apply_must_improve(case, rules[place], [_with_adjusted_p(claim, next(adjusted)) for claim in some])
        for place, some in made.items()
    }


def _with_adjusted_p(claim: ImprovementClaim, p: float | None) -> ImprovementClaim:
    return ImprovementClaim(claim.metric, claim.found.model_copy(update={"p_adjusted": p}))


def _compare_claims(case: RuleContext, rule: MustImproveRule) -> list[ImprovementClaim] | RuleResult:
    names = ", ".join(rule.metric)
    why = evidence.missing_reference_reason(case.evidence, rule.over)
    if why is not None:
        text = f"{names}: {why}, nothing to compare with"
        return RuleResult(rule=rule.rule, metric=names, outcome="pass", text=text)
    try:
        return [_compare_claim(case, rule, name) for name in dict.fromkeys(rule.metric)]
    except IncomparableError as error:
        return RuleResult(rule=rule.rule, metric=names, outcome="invalid", text=str(error))


def _compare_claim(case: RuleContext, rule: MustImproveRule, name: str) -> ImprovementClaim:
    if rule.by < 0:
        raise IncomparableError(
            f"by is {rule.by:g}: a loss is no improvement; write must_not_regress with margin {-rule.by:g}"
        )
    validity.check_noise(case.evidence, name, rule.by)
    matched = evidence.match_scores(case.evidence, name, rule.over)
    validity.check_bound(rule.by, "by", matched.metric, matched.pairs)
    return ImprovementClaim(
        matched.metric, compare_matched(matched, rule.over, name, rule.by, case.plan(rule.confidence))
    )


def _apply_must_improve(case: RuleContext, rule: MustImproveRule, found: Sequence[ImprovementClaim]) -> RuleResult:
    """Better beyond doubt in one metric at least; worse, or no better, in all of them fails."""
    confidence = rule.confidence or case.gate.confidence
    won = [claim for claim in found if _finite_p_value(claim) < 1 - confidence and not has_too_few_samples(claim.found)]
    lost = all(claim.found.high <= claim.found.bound for claim in found)
    outcome: Outcome = "pass" if won else "fail" if lost else "undecided"
    texts = []
    for claim in found:
        wanted = f"more than {messages.format_change(rule.by, claim.metric)} better" if rule.by else "better"
        p = f"p = {claim.found.p:.2g}"
        if claim.found.p_adjusted is not None:
            p += f", {claim.found.p_adjusted:.2g} among all claims"
        texts.append(f"{messages.describe_comparison(claim.found, claim.metric)}; must be {wanted} ({p})")
    text = "; or: ".join(texts)
    if outcome == "undecided":
        needed = [count for claim in found if (count := count_samples_to_decide(claim.found))]
        text += ": these samples cannot tell; "
        text += f"about {min(needed):,} would, if it stays so" if needed else "more test rows would"
    return RuleResult(
        rule=rule.rule, metric=", ".join(rule.metric), outcome=outcome, text=text,
        comparisons=tuple(clear_needed_samples(claim.found, outcome) for claim in found),
    )  # fmt: skip


def _finite_p_value(claim: ImprovementClaim) -> float:
    adjusted = claim.found.p_adjusted
    p = claim.found.p if adjusted is None else adjusted
    return p if math.isfinite(p) else 1.0


# Floors of the candidate alone: absolute ones, and the alarm that a figure is one that guessing reaches.


@dataclass(frozen=True)
class _ThresholdComparison:
    """A figure held against a fixed value: how much better it is, with one-sided bounds."""

    low: float
    high: float
    value: float
    """Bounded by these, in the metric's own units: from its worse end to its better one."""
    text: str


def _compare_with_value(
    case: RuleContext, who: Who, name: str, value: float, plan: PairedTestPlan
) -> _ThresholdComparison:
    """A metric against a number: Wilson's bounds for shares, the paired bootstrap against a constant otherwise."""
    metric, samples = evidence.select_scores(case.evidence, who, name)
    pairs = pair_with_itself(case.evidence, metric, samples)
    if messages.is_share(metric) and not 0 <= value <= 1:
        raise IncomparableError(f"{name} is a share, and {value:g} is none; write 0.9 for 90 %")
    if metric.kind == "perplexity" and value <= 0:
        raise IncomparableError(f"{name} is a perplexity, and no perplexity is {value:g}")
    if is_binary(pairs) and metric.better == "higher":
        n = count_independent_samples(pairs)
        low, high = statistics.wilson_bounds(math.fsum(pairs.new) / len(pairs.new) * n, n, plan.confidence)
        bounds = (low - value, high - value)
        shown = (low, high)
    else:
        constant = (
            [_nats_at_perplexity(value, weight) for weight in pairs.weights]
            if pairs.weights
            else [value] * len(pairs.new)
        )
        against = PairedScores(pairs.new, constant, pairs.better, pairs.kind, pairs.weights, pairs.groups)
        found = paired_test.compare(against, 0.0, plan)
        bounds = (found.low, found.high)
        if has_too_few_samples(found):
            bounds = (-math.inf, math.inf)
        shown = (_value_at_difference(metric, value, found.low), _value_at_difference(metric, value, found.high))
    worse, better = (messages.format_value(bound, metric) for bound in shown)
    text = (
        f"{name} of {who} {messages.format_value(metric.value, metric)} "
        f"({messages.format_percent(plan.confidence)} sure: no worse than {worse}, "
        f"no better than {better}; {metric.n} samples)"
    )
    return _ThresholdComparison(*bounds, metric.value, text)


def _nats_at_perplexity(perplexity: float, tokens: float) -> float:
    """Nats of a sample of so many tokens at this perplexity."""
    return tokens * math.log(perplexity)


def _value_at_difference(metric: MetricValue, value: float, difference: float) -> float:
    """The figure that is better than `value` by this difference."""
    if metric.kind == "perplexity":
        return value * (1 - difference)
    return value + difference if metric.better == "higher" else value - difference


def apply_at_least(case: RuleContext, rule: AtLeastRule) -> RuleResult:
    """A floor, for every form of the candidate: its bound must reach it, not only its value."""
    plan = case.plan(rule.confidence)
    outcomes: list[Outcome] = []
    texts = []
    for who in evidence.list_scored_forms(case.evidence):
        held = _compare_with_value(case, who, rule.metric, rule.value, plan)
        outcome: Outcome = "pass" if held.low >= 0 else "fail" if held.high < 0 else "undecided"
        outcomes.append(outcome)
        texts.append(held.text)
    metric, _ = evidence.select_scores(case.evidence, evidence.list_scored_forms(case.evidence)[0], rule.metric)
    direction = "at least" if metric.better == "higher" else "at most"
    text = f"{'; '.join(texts)}; must be {direction} {messages.format_value(rule.value, metric)}"
    found = worst_outcome(outcomes)
    if found == "undecided":
        text += ": these samples cannot tell; more test rows would"
    return RuleResult(rule=rule.rule, metric=rule.metric, outcome=found, text=text)


def apply_above_chance(case: RuleContext, rule: AboveChanceRule) -> RuleResult:
    """An alarm: a figure that guessing reaches fails; one that guessing might reach is undecided."""
    plan = case.plan(None)
    outcomes: list[Outcome] = []
    texts = []
    for who in evidence.list_scored_forms(case.evidence):
        metric, _ = evidence.select_scores(case.evidence, who, rule.metric)
        chance = rule.chance if rule.chance is not None else metric.chance
        if chance is None:
            raise IncomparableError(
                f"nobody knows what guessing reaches in {rule.metric}; write it down as `chance` of this rule"
            )
        if metric.better != "higher":
            raise IncomparableError(f"of {rule.metric}, less is better: it has no chance level; take a share of hits")
        held = _compare_with_value(case, who, rule.metric, chance, plan)
        outcomes.append("pass" if held.low > 0 else "fail" if held.value <= chance else "undecided")
        texts.append(f"{held.text}; guessing reaches {messages.format_value(chance, metric)}")
    found = worst_outcome(outcomes)
    text = "; ".join(texts)
    if found != "pass":
        text += f": {'no better than' if found == 'fail' else 'perhaps no better than'} guessing, so the model or the "
        text += "evaluation may be broken (look at the answers first)"
    return RuleResult(rule=rule.rule, metric=rule.metric, outcome=found, text=text)


# Rules about what the model costs where it is used.


def apply_budget(case: RuleContext, rule: BudgetRule) -> RuleResult:
    """Size of the export, or what answering costs: as exported, where that was measured."""
    costs = case.evidence.report.costs
    cost = costs.get("merged") or costs.get("candidate")
    if rule.of == "size":
        measured: float = case.evidence.bundle.size_bytes
        shown, allowed = f"the export has {_format_bytes(measured)}", _format_bytes(rule.at_most)
    elif cost is None:
        raise IncomparableError(f"{rule.of} was not measured; set evaluate.latency_rows above 0 and evaluate again")
    elif rule.of == "latency":
        measured = cost.latency_s
        shown, allowed = f"an answer takes {measured:.3g} s ({cost.rows} prompts, {cost.device})", f"{rule.at_most:g} s"
    else:
        measured = cost.memory_bytes
        shown, allowed = (
            f"answering takes {_format_bytes(measured)} of memory ({cost.device})",
            _format_bytes(rule.at_most),
        )
    if not math.isfinite(measured):
        raise IncomparableError(f"{rule.of} is {measured}, not a finite number")
    outcome: Literal["pass", "fail"] = "pass" if measured <= rule.at_most else "fail"
    return RuleResult(rule=rule.rule, metric=rule.of, outcome=outcome, text=f"{shown}; allowed is {allowed}")


def _format_bytes(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:g} bytes"


# The rule about the model as it is handed on: every form of it answers as what was evaluated does.

EXACT = "float32"
"""Type in which a merge can be held to single logits; rounding to 16 bits alone moves them more, and divergence judges
it."""


def apply_export_parity(case: RuleContext, rule: ExportParityRule) -> RuleResult:
    """Each form, opened in its own runtime, beside base + adapter: divergence, tokens, answers."""
    bundle = case.evidence.bundle
    exact = bundle.dtype == EXACT or not bundle.artifacts  # of an earlier version, which had one bound for all
    wrong = list(_find_merged_faults(bundle.parity, rule, exact))
    for artifact in bundle.artifacts:
        wrong += (f"{artifact.name}: {text}" for text in _find_artifact_faults(artifact, rule))
    if wrong:
        return RuleResult(rule=rule.rule, metric="export_parity", outcome="fail", text="; ".join(wrong))
    names = ", ".join(artifact.name for artifact in bundle.artifacts)
    p, where = bundle.parity, "" if exact else " in float32"
    text = (
        f"merged model against base + adapter: logits differ by at most {p.max_logit_difference:.2g} (allowed "
        f"{rule.max_logit_difference:g}{where}), same greedy token at {p.greedy_agreement:.4f} of the answer positions "
        f"(required {rule.min_greedy_agreement:g})" + (f"; within the bounds of their types: {names}" if names else "")
    )
    return RuleResult(rule=rule.rule, metric="export_parity", outcome="pass", text=text)


def _find_merged_faults(parity: MergeParity, rule: ExportParityRule, exact: bool) -> Iterator[str]:
    # Not "above": a NaN is no small difference.
    if exact and not parity.max_logit_difference <= rule.max_logit_difference:
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
    allowed, found = rule.kl_of(artifact.type), artifact.closeness
    if allowed is None:
        yield f"no bound for type {artifact.type}; give it one in max_kl of the rule export_parity"
    elif not found.kl <= allowed:
        yield f"diverges from base + adapter by {found.kl:.2g} nats a token in {artifact.runtime} (allowed {allowed:g})"
    if artifact.texts_tokenised < rule.min_same_texts * artifact.texts:
        yield (
            f"{artifact.texts - artifact.texts_tokenised} of {artifact.texts} texts become other tokens in it "
            f"(required alike {rule.min_same_texts:g})"
        )
    task = artifact.task
    if task is not None and task.high < -rule.max_task_loss:
        yield (
            f"{task.metric} {task.value:.4g} where base + adapter have {task.reference:.4g} on {task.rows} rows "
            f"(difference {task.low:+.3g} to {task.high:+.3g}, allowed {-rule.max_task_loss:g})"
        )

"""Decide a verdict from evidence and rules. A pure function: not passing and not being able to judge are results."""

from collections.abc import Mapping

from ratchet.config.gate import (
    AboveChanceRule,
    AtLeastRule,
    BudgetRule,
    ExportParityRule,
    ForgettingRule,
    Gate,
    MustImproveRule,
    MustNotRegressRule,
    Rule,
)
from ratchet.config.settings import Settings
from ratchet.errors import GateError
from ratchet.quality_gate import rules, validity
from ratchet.quality_gate.evidence import GateEvidence, IncomparableError, read_evidence, rules_digest
from ratchet.quality_gate.rules import GENERAL_PERPLEXITY, RuleContext
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.gate import Decision, Outcome, RuleResult, Verdict

DECISIONS: dict[Outcome, Decision] = {"invalid": "INVALID", "fail": "REJECT", "undecided": "HOLD", "pass": "PROMOTE"}


def decide_verdict(evidence: GateEvidence, gate: Gate) -> Verdict:
    """Apply every rule; the decision is PROMOTE only if all of them pass.

    INVALID if the comparisons are meaningless, else REJECT if a rule clearly fails, else HOLD if the samples cannot
    decide a rule. Bad models and bad scores raise nothing. The same evidence gives byte-identical verdicts.
    """
    reasons = validity.find_problems(evidence) or (
        *_apply_rules(RuleContext(evidence, gate)),
        *_check_test_set_uses(evidence, gate),
    )
    return Verdict(
        decision=DECISIONS[rules.worst_outcome([reason.outcome for reason in reasons])],
        model_digest=evidence.bundle.model_digest,
        adapter_digest=evidence.bundle.adapter_digest,
        run_id=evidence.bundle.run_id,
        is_champion=evidence.is_champion,
        champion_digest=evidence.champion.champion_digest,
        anchor_digest=evidence.champion.anchor_digest,
        reasons=reasons,
        test_set_digest=evidence.report.test_set_digest,
        test_set_uses=evidence.test_set_uses,
        max_test_set_uses=gate.max_test_set_uses,
        rules=rules_digest(gate),
        earlier_decisions=evidence.earlier_decisions,
    )


def _apply_rules(context: RuleContext) -> tuple[RuleResult, ...]:
    """Apply the rules; the results are in the order of the rules."""
    improvements = rules.apply_must_improve_rules(context)
    return tuple(
        improvements.get(index) or _apply_or_invalidate(context, rule) for index, rule in enumerate(context.gate.rules)
    )


def _apply_or_invalidate(context: RuleContext, rule: Rule) -> RuleResult:
    try:
        return _apply_rule(context, rule)
    except IncomparableError as error:
        return RuleResult(rule=rule.rule, metric=_rule_metric(rule), outcome="invalid", text=str(error))


def _apply_rule(context: RuleContext, rule: Rule) -> RuleResult:
    match rule:
        case MustNotRegressRule():
            return rules.apply_must_not_regress(context, rule)
        case AtLeastRule():
            return rules.apply_at_least(context, rule)
        case AboveChanceRule():
            return rules.apply_above_chance(context, rule)
        case ForgettingRule():
            return rules.apply_forgetting(context, rule)
        case BudgetRule():
            return rules.apply_budget(context, rule)
        case ExportParityRule():
            return rules.apply_export_parity(context, rule)
        case MustImproveRule():
            raise TypeError("must_improve rules are applied together by rules.apply_must_improve_rules")


def _rule_metric(rule: Rule) -> str:
    """Return the name of the metric that a rule tests, for the verdict."""
    if isinstance(rule, ForgettingRule):
        return GENERAL_PERPLEXITY
    if isinstance(rule, BudgetRule):
        return rule.resource
    metric = getattr(rule, "metric", rule.rule)
    return metric if isinstance(metric, str) else ", ".join(metric)


def _check_test_set_uses(evidence: GateEvidence, gate: Gate) -> tuple[RuleResult, ...]:
    """Hold when too many models were judged by these test rows."""
    if evidence.test_set_uses <= gate.max_test_set_uses:
        return ()
    text = (
        f"{evidence.test_set_uses} models were evaluated on these test rows, more than gate.max_test_set_uses = "
        f"{gate.max_test_set_uses}: the best of so many models looks better than it is. Draw new test rows (other "
        "data, or another prepare.split.seed) and train again"
    )
    return (RuleResult(rule="test_set_uses", metric="-", outcome="undecided", text=text),)


def confirm_verdict(
    layout: ProjectLayout, settings: Settings, current_task_digests: Mapping[str, str], verdict: Verdict
) -> None:
    """Judge again (about a second) and refuse a stored verdict that the current rules, tasks or evidence change.

    Args:
        layout: The project.
        settings: Current settings.
        current_task_digests: Digests of the local harness tasks (data.harness_tasks.fingerprint_tasks).
        verdict: The stored verdict.

    Raises:
        GateError: The decision or the outcome of a rule differs from the stored verdict.
        DataError, DamagedFileError: The evidence is missing or damaged.
    """
    current = decide_verdict(read_evidence(layout, settings, current_task_digests), settings.gate)
    if current.decision == verdict.decision and _summarize_reasons(current) == _summarize_reasons(verdict):
        return
    stored = _summarize_reasons(verdict)
    changed = next((reason for reason in current.reasons if _summarize_reason(reason) not in stored), None)
    detail = f" ({changed.rule}: {changed.text})" if changed else ""
    raise GateError(
        f"{layout.verdict}: has {verdict.decision}, but the current rules, tasks and test set uses give "
        f"{current.decision}{detail}; run `dvc repro`, or `dvc repro -f gate` if that changes nothing"
    )


def _summarize_reasons(verdict: Verdict) -> list[tuple[str, str, str]]:
    return [_summarize_reason(reason) for reason in verdict.reasons]


def _summarize_reason(reason: RuleResult) -> tuple[str, str, str]:
    # The text is not compared: it has the number of test set uses and thresholds, which may change without effect.
    return reason.rule, reason.metric, reason.outcome

"""Evidence x rules → Verdict. Pure: a gate that does not pass is an answer, and so is one that cannot judge."""

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
from ratchet.config.schema import Settings
from ratchet.errors import GateError
from ratchet.gate import evidence as reading
from ratchet.gate import rules, validity
from ratchet.gate.evidence import GateEvidence, IncomparableError, rules_digest
from ratchet.gate.rules import GENERAL, RuleContext
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.gate import Decision, Outcome, RuleResult, Verdict

DECISIONS: dict[Outcome, Decision] = {"invalid": "INVALID", "fail": "REJECT", "undecided": "HOLD", "pass": "PROMOTE"}


def decide_verdict(evidence: GateEvidence, gate: Gate) -> Verdict:
    """Apply every rule; PROMOTE only if all hold.

    INVALID when something makes comparisons meaningless, else REJECT when a rule clearly fails, else HOLD when the
    samples cannot decide one. Raises nothing for a bad model or bad scores: those are answers. The same evidence gives
    the same verdict, to the byte.
    """
    reasons = validity.find_problems(evidence) or (
        *_apply_rules(RuleContext(evidence, gate)),
        *_check_test_set_reuse(evidence, gate),
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
        gate_set=evidence.report.gate_set,
        lookups=evidence.lookups,
        lookups_allowed=gate.lookups,
        rules=rules_digest(gate),
        judged_before=evidence.judged_before,
    )


def _apply_rules(case: RuleContext) -> tuple[RuleResult, ...]:
    """One a rule, in their order."""
    improvements = rules.apply_must_improve_rules(case)
    return tuple(
        improvements.get(place) or _apply_or_invalidate(case, rule) for place, rule in enumerate(case.gate.rules)
    )


def _apply_or_invalidate(case: RuleContext, rule: Rule) -> RuleResult:
    try:
        return _apply_rule(case, rule)
    except IncomparableError as error:
        return RuleResult(rule=rule.rule, metric=_rule_metric(rule), outcome="invalid", text=str(error))


def _apply_rule(case: RuleContext, rule: Rule) -> RuleResult:
    match rule:
        case MustNotRegressRule():
            return rules.apply_must_not_regress(case, rule)
        case AtLeastRule():
            return rules.apply_at_least(case, rule)
        case AboveChanceRule():
            return rules.apply_above_chance(case, rule)
        case ForgettingRule():
            return rules.apply_forgetting(case, rule)
        case BudgetRule():
            return rules.apply_budget(case, rule)
        case ExportParityRule():
            return rules.apply_export_parity(case, rule)
        case MustImproveRule():
            raise TypeError("claims of improvement are judged together, by improvement.reasons")


def _rule_metric(rule: Rule) -> str:
    """What a rule is about, for the verdict."""
    if isinstance(rule, ForgettingRule):
        return GENERAL
    if isinstance(rule, BudgetRule):
        return rule.of
    metric = getattr(rule, "metric", rule.rule)
    return metric if isinstance(metric, str) else ", ".join(metric)


def _check_test_set_reuse(evidence: GateEvidence, gate: Gate) -> tuple[RuleResult, ...]:
    """A set of test rows that too many models were judged by says too little about this one."""
    if evidence.lookups <= gate.lookups:
        return ()
    text = (
        f"{evidence.lookups} models were looked at with these test rows, {gate.lookups} may be (gate.lookups): the "
        "best of so many seems better than it is. Draw new test rows (other data, or another prepare.split.seed) and "
        "train again"
    )
    return (RuleResult(rule="lookups", metric="-", outcome="undecided", text=text),)


# Whether a verdict on file is still what the gate says: rules, look-ups or tasks may have changed since.


def confirm_verdict(layout: ProjectLayout, settings: Settings, tasks_now: Mapping[str, str], verdict: Verdict) -> None:
    """Judge once more, which costs a second, and refuse a verdict that is not the same any more.

    Args:
        layout: the project.
        settings: as they are now.
        tasks_now: fingerprints of the local harness tasks (data.tasks.fingerprints).
        verdict: that on file.

    Raises:
        GateError: another decision, or other findings, than those on file.
        DataError, DamagedFileError: what it was judged by is gone or damaged.
    """
    now = decide_verdict(reading.read_evidence(layout, settings, tasks_now), settings.gate)
    if now.decision == verdict.decision and _summarize_reasons(now) == _summarize_reasons(verdict):
        return
    changed = next((one for one in now.reasons if _summarize_reason(one) not in _summarize_reasons(verdict)), None)
    found = f" ({changed.rule}: {changed.text})" if changed else ""
    raise GateError(
        f"{layout.verdict}: says {verdict.decision}, but by the rules, tasks and look-ups of now it is {now.decision}"
        f"{found}; run `dvc repro`, or `dvc repro -f gate` if that finds nothing to do"
    )


def _summarize_reasons(verdict: Verdict) -> list[tuple[str, str, str]]:
    return [_summarize_reason(one) for one in verdict.reasons]


def _summarize_reason(reason: RuleResult) -> tuple[str, str, str]:
    # Not the words: they name look-ups, which go on, and thresholds, whose finding may be the same.
    return reason.rule, reason.metric, reason.outcome

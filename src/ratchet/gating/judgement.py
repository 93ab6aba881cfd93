"""Evidence x rules → Verdict. Pure: a gate that does not pass is an answer, and so is one that cannot judge."""

from ratchet.config_gate import (
    AboveChance,
    AtLeast,
    Budget,
    ExportParity,
    Forgetting,
    Gate,
    MustImprove,
    MustNotRegress,
    Rule,
)
from ratchet.gating import costs, floors, improvement, parity, rules, soundness
from ratchet.gating.evidence import Evidence, rules_digest
from ratchet.gating.matching import IncomparableError
from ratchet.gating.rules import GENERAL, Case
from ratchet.records_gate import Decision, Outcome, Reason, Verdict

DECISIONS: dict[Outcome, Decision] = {"invalid": "INVALID", "fail": "REJECT", "undecided": "HOLD", "pass": "PROMOTE"}


def judge(evidence: Evidence, gate: Gate) -> Verdict:
    """Apply every rule; PROMOTE only if all hold.

    INVALID when something makes comparisons meaningless, else REJECT when a rule clearly fails, else HOLD when the
    samples cannot decide one. Raises nothing for a bad model or bad scores: those are answers. The same evidence gives
    the same verdict, to the byte.
    """
    reasons = soundness.problems(evidence) or (*_reasons(Case(evidence, gate)), *_looks(evidence, gate))
    return Verdict(
        decision=DECISIONS[rules.worst([reason.outcome for reason in reasons])],
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


def _reasons(case: Case) -> tuple[Reason, ...]:
    """One a rule, in their order."""
    improvements = improvement.reasons(case)
    return tuple(improvements.get(place) or _applied(case, rule) for place, rule in enumerate(case.gate.rules))


def _applied(case: Case, rule: Rule) -> Reason:
    try:
        return _apply(case, rule)
    except IncomparableError as error:
        return Reason(rule=rule.rule, metric=_subject(rule), outcome="invalid", text=str(error))


def _apply(case: Case, rule: Rule) -> Reason:
    match rule:
        case MustNotRegress():
            return rules.must_not_regress(case, rule)
        case AtLeast():
            return floors.at_least(case, rule)
        case AboveChance():
            return floors.above_chance(case, rule)
        case Forgetting():
            return rules.forgetting(case, rule)
        case Budget():
            return costs.budget(case, rule)
        case ExportParity():
            return parity.export_parity(case, rule)
        case MustImprove():
            raise TypeError("claims of improvement are judged together, by improvement.reasons")


def _subject(rule: Rule) -> str:
    """What a rule is about, for the verdict."""
    if isinstance(rule, Forgetting):
        return GENERAL
    if isinstance(rule, Budget):
        return rule.of
    metric = getattr(rule, "metric", rule.rule)
    return metric if isinstance(metric, str) else ", ".join(metric)


def _looks(evidence: Evidence, gate: Gate) -> tuple[Reason, ...]:
    """A set of test rows that too many models were judged by says too little about this one."""
    if evidence.lookups <= gate.lookups:
        return ()
    text = (
        f"{evidence.lookups} models were looked at with these test rows, {gate.lookups} may be (gate.lookups): the "
        "best of so many seems better than it is. Draw new test rows (other data, or another prepare.split.seed) and "
        "train again"
    )
    return (Reason(rule="lookups", metric="-", outcome="undecided", text=text),)

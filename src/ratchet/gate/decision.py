"""Evidence x rules → Verdict. Pure: a gate that does not pass is an answer, and so is one that cannot judge."""

from collections.abc import Mapping

from ratchet.config.gate import (
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
from ratchet.config.schema import Settings
from ratchet.errors import GateError
from ratchet.gate import evidence as reading
from ratchet.gate import rules, validity
from ratchet.gate.evidence import Evidence, IncomparableError, rules_digest
from ratchet.gate.rules import GENERAL, Case
from ratchet.storage.layout import Layout
from ratchet.storage.records.gate import Decision, Outcome, Reason, Verdict

DECISIONS: dict[Outcome, Decision] = {"invalid": "INVALID", "fail": "REJECT", "undecided": "HOLD", "pass": "PROMOTE"}


def judge(evidence: Evidence, gate: Gate) -> Verdict:
    """Apply every rule; PROMOTE only if all hold.

    INVALID when something makes comparisons meaningless, else REJECT when a rule clearly fails, else HOLD when the
    samples cannot decide one. Raises nothing for a bad model or bad scores: those are answers. The same evidence gives
    the same verdict, to the byte.
    """
    reasons = validity.problems(evidence) or (*_reasons(Case(evidence, gate)), *_looks(evidence, gate))
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
    improvements = rules.reasons(case)
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
            return rules.at_least(case, rule)
        case AboveChance():
            return rules.above_chance(case, rule)
        case Forgetting():
            return rules.forgetting(case, rule)
        case Budget():
            return rules.budget(case, rule)
        case ExportParity():
            return rules.export_parity(case, rule)
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


# Whether a verdict on file is still what the gate says: rules, look-ups or tasks may have changed since.


def confirm(layout: Layout, settings: Settings, tasks_now: Mapping[str, str], verdict: Verdict) -> None:
    """Judge once more, which costs a second, and refuse a verdict that is not the same any more.

    Args:
        layout: the project.
        settings: as they are now.
        tasks_now: fingerprints of the local harness tasks (data.tasks.fingerprints).
        verdict: that on file.

    Raises:
        GateError: another decision, or other findings, than those on file.
        DataError, DamagedError: what it was judged by is gone or damaged.
    """
    now = judge(reading.read(layout, settings, tasks_now), settings.gate)
    if now.decision == verdict.decision and _findings(now) == _findings(verdict):
        return
    changed = next((one for one in now.reasons if _finding(one) not in _findings(verdict)), None)
    found = f" ({changed.rule}: {changed.text})" if changed else ""
    raise GateError(
        f"{layout.verdict}: says {verdict.decision}, but by the rules, tasks and look-ups of now it is {now.decision}"
        f"{found}; run `dvc repro`, or `dvc repro -f gate` if that finds nothing to do"
    )


def _findings(verdict: Verdict) -> list[tuple[str, str, str]]:
    return [_finding(one) for one in verdict.reasons]


def _finding(reason: Reason) -> tuple[str, str, str]:
    # Not the words: they name look-ups, which go on, and thresholds, whose finding may be the same.
    return reason.rule, reason.metric, reason.outcome

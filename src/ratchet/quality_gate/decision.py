"""Decides the gate's verdict from evidence and rules, and measures the noise of an evaluation.

The decision is a pure function of evidence and rules. A model that fails or cannot be judged raises no error: the
verdict is the result. The noise is the difference between two scorings of the same model (`ratchet gate --aa`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

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
    Rule,
)
from ratchet.config.settings import Settings
from ratchet.errors import GateError
from ratchet.quality_gate import paired_test, rules, statistics
from ratchet.quality_gate.evidence import GateEvidence, IncomparableError, read_evidence, rules_digest
from ratchet.quality_gate.judgements import HUMAN_PREFERENCE
from ratchet.quality_gate.paired_test import PairedTestResult
from ratchet.quality_gate.rules import GENERAL_PERPLEXITY, RuleContext
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.evaluation import MetricValue
from ratchet.storage.records.gate import Decision, Outcome, RuleResult, Verdict

DECISIONS: dict[Outcome, Decision] = {"invalid": "INVALID", "fail": "REJECT", "undecided": "HOLD", "pass": "PROMOTE"}


def decide_verdict(evidence: GateEvidence, gate: Gate) -> Verdict:
    """Apply every rule; the decision is PROMOTE only if all rules pass.

    It is INVALID if the comparisons are meaningless, else REJECT if a rule clearly fails, else HOLD if the samples
    cannot decide a rule. Bad models and bad scores raise no error. The same evidence gives byte-identical verdicts.
    """
    reasons = rules.find_problems(evidence, gate.test)
    if not reasons:
        context = RuleContext(evidence, gate)
        improvements = rules.apply_must_improve_rules(context)
        reasons = tuple(improvements.get(i) or _apply_rule(context, rule) for i, rule in enumerate(gate.rules))
        if evidence.damaged_judgements:
            note = f"; damaged lines of experiments/judgements.jsonl, which do not count: {evidence.damaged_judgements}"
            reasons = tuple(
                reason.model_copy(update={"text": reason.text + note}) if HUMAN_PREFERENCE in reason.metric else reason
                for reason in reasons
            )
        if gate.test == "fixed" and evidence.test_set_uses > gate.max_test_set_uses:
            text = (
                f"{evidence.test_set_uses} models were evaluated on these test rows, more than gate.max_test_set_uses "
                f"= {gate.max_test_set_uses}: the best of so many models looks better than it is. Draw new test rows "
                "(other data, or another prepare.split.seed) and train again"
            )
            reasons += (RuleResult(rule="test_set_uses", metric="-", outcome="undecided", text=text),)
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
        max_test_set_uses=gate.max_test_set_uses if gate.test == "fixed" else 0,
        rules=rules_digest(gate),
        earlier_decisions=evidence.earlier_decisions,
        alpha_share=statistics.compute_alpha_share(evidence.model_number) if evidence.model_number else None,
        remaining_rows=evidence.report.remaining_rows,
        notes=evidence.report.unchecked_starts,
    )


def _apply_rule(context: RuleContext, rule: Rule) -> RuleResult:
    """Apply a rule other than must_improve. Scores that cannot be compared make its outcome `invalid`."""
    metric: str = rule.rule
    try:
        match rule:
            case MustNotRegressRule(metric=metric):
                result = rules.apply_must_not_regress(context, rule)
            case AtLeastRule(metric=metric):
                result = rules.apply_at_least(context, rule)
            case AboveChanceRule(metric=metric):
                result = rules.apply_above_chance(context, rule)
            case ForgettingRule():
                metric = GENERAL_PERPLEXITY
                result = rules.apply_forgetting(context, rule)
            case FailureRateRule():
                metric = rules.FAILURES[rule.rule].metric
                result = rules.apply_failure_rate(context, rule)
            case BudgetRule(resource=metric):
                result = rules.apply_budget(context, rule)
            case ExportParityRule():
                result = rules.apply_export_parity(context, rule)
            case MustImproveRule():
                raise TypeError("must_improve rules are applied together by rules.apply_must_improve_rules")
    except IncomparableError as error:
        return RuleResult(rule=rule.rule, metric=metric, outcome=error.outcome, text=str(error))
    return result


def confirm_verdict(
    layout: ProjectLayout, settings: Settings, current_task_digests: Mapping[str, str], verdict: Verdict
) -> None:
    """Judge again (takes about a second), and refuse the stored verdict if the new result differs.

    Args:
        layout: The project.
        settings: Current settings.
        current_task_digests: Digests of the local harness tasks (data.harness_tasks.fingerprint_tasks).
        verdict: The stored verdict.

    Raises:
        GateError: The decision or the outcome of a rule differs from the stored verdict.
        DataError, DamagedFileError: The evidence is missing or damaged.
    """

    def summarize(reason: RuleResult) -> tuple[str, str, str]:
        # The text is not compared: its numbers (test set uses, thresholds) may change without any effect.
        return reason.rule, reason.metric, reason.outcome

    current = decide_verdict(read_evidence(layout, settings, current_task_digests), settings.gate)
    stored = [summarize(reason) for reason in verdict.reasons]
    if current.decision == verdict.decision and stored == [summarize(reason) for reason in current.reasons]:
        return
    changed = next((reason for reason in current.reasons if summarize(reason) not in stored), None)
    detail = f" ({changed.rule}: {changed.text})" if changed else ""
    raise GateError(
        f"{layout.verdict}: has {verdict.decision}, but the current rules, tasks and test set uses give "
        f"{current.decision}{detail}; run `dvc repro`, or `dvc repro -f gate` if that changes nothing"
    )


# Noise of an evaluation: the difference between two scorings of the same model.


@dataclass(frozen=True)
class MetricNoise:
    """Difference between the first and the second scoring in one metric."""

    name: str
    metric: MetricValue
    n: int
    differing: int
    """Number of samples with different scores."""
    result: PairedTestResult
    margin: float | None
    """Smallest positive margin of a rule about this metric; None if no rule has one."""

    @property
    def is_within_margin(self) -> bool:
        """Whether the noise is at most the margin."""
        return self.margin is None or abs(self.result.difference) <= self.margin


def measure_noise(evidence: GateEvidence, gate: Gate) -> list[MetricNoise]:
    """Measure the noise of each metric that has samples and a direction.

    Raises:
        IncomparableError: No model was scored twice, or the second scoring is of another model, contract or samples.
    """
    noise = evidence.noise
    if noise is None:
        raise IncomparableError("no model was scored twice yet; run `ratchet gate --aa`")
    margins, noises = _smallest_margins(gate), []
    plan = RuleContext(evidence, gate).build_plan(None)
    for name, metric in sorted(noise.metrics.items()):
        if metric.kind == "aggregate" or metric.better == "unknown":
            continue
        rescored = rules.pair_rescored_samples(evidence, name)
        if rescored is None:
            raise IncomparableError(
                f"the second scoring is of {noise.model_format} {noise.model_digest[:12]} under contract "
                f"{noise.contract[:12]}, not of the evaluated model; run `ratchet gate --aa` again"
            )
        _, metric_value, pairs = rescored
        differing = sum(new != old for new, old in zip(pairs.new, pairs.old, strict=True))
        result = paired_test.compare(pairs, 0.0, plan)
        noises.append(MetricNoise(name, metric_value, len(pairs.new), differing, result, margins.get(name)))
    return noises


def _smallest_margins(gate: Gate) -> dict[str, float]:
    """Return the smallest positive margin of the rules, by metric."""
    tested = [(rule.metric, rule.margin) for rule in gate.rules if isinstance(rule, MustNotRegressRule)]
    tested += [(name, rule.by) for rule in gate.rules if isinstance(rule, MustImproveRule) for name in rule.metric]
    tested += [(GENERAL_PERPLEXITY, rule.max_rise) for rule in gate.rules if isinstance(rule, ForgettingRule)]
    margins: dict[str, float] = {}
    for name, margin in tested:
        if margin > 0:
            margins[name] = min(margin, margins.get(name, margin))
    return margins


def format_noise_table(lines: list[MetricNoise], batch_rows: tuple[int, int], confidence: float) -> str:
    """Format the noise for the terminal.

    Args:
        lines: noise of each metric; each metric becomes a row of the table.
        batch_rows: rows per batch in the first and in the second scoring.
        confidence: one-sided confidence of the bounds.
    """
    table = [["", "samples", "differ", "share", "difference", "at least", "at most", "margin", ""]]
    for line in lines:
        result, metric = line.result, line.metric
        table.append(
            [
                line.name, f"{line.n:,}", f"{line.differing:,}", f"{100 * line.differing / line.n:.1f} %",
                rules.format_signed_change(result.difference, metric),
                rules.format_signed_change(result.low, metric),
                rules.format_signed_change(result.high, metric),
                "-" if line.margin is None else rules.format_change(line.margin, metric),
                "within" if line.is_within_margin else "NOISE",
            ]
        )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rows = ("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in table)
    first, second = batch_rows
    noisy = [line.name for line in lines if not line.is_within_margin]
    conclusion = (
        f"the noise exceeds the margin of the rules about {', '.join(noisy)}, so the gate returns INVALID for them; "
        "widen the margins, or find the cause (batch size, threads, sampled answers)"
        if noisy
        else "the noise is within the margins of all rules"
    )
    head = (
        f"the same model scored twice (batches of {first} rows, then {second}; each bound with "
        f"{rules.format_percent(confidence)} confidence); all differences should be zero"
    )
    return "\n".join([head, *(f"  {row}" for row in rows), conclusion])

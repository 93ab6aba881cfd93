"""Checks that make every comparison invalid: mismatched reports, changed tasks, test rows used for model selection.

`check_bound` and `check_noise` check single rules: bounds that no two models can differ by, and margins smaller than
the noise of the evaluation.
"""

from collections.abc import Iterator

from ratchet.quality_gate import messages
from ratchet.quality_gate.evidence import (
    ROLE_OF_FORMAT,
    GateEvidence,
    IncomparableError,
    build_pairs,
    compute_difference,
    select_scores,
    sort_samples,
)
from ratchet.quality_gate.paired_test import PairedScores
from ratchet.storage.digests import SHORT
from ratchet.storage.records.evaluation import MetricValue, ModelRole
from ratchet.storage.records.gate import RuleResult


def find_problems(evidence: GateEvidence) -> tuple[RuleResult, ...]:
    """Return the reasons for INVALID that do not depend on the rules."""
    problems = [
        *(("identity", text) for text in _find_identity_problems(evidence)),
        *(("selection", text) for text in _find_selection_overlaps(evidence)),
        *(("tasks", text) for text in _find_changed_tasks(evidence)),
    ]
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


def _find_selection_overlaps(evidence: GateEvidence) -> Iterator[str]:
    for name, count in sorted(evidence.report.selection_overlaps.items()):
        if count:
            yield (
                f"{count} test rows or tasks also belong to {name}, a set by which models are selected, so they cannot "
                "be used to judge a selected model; select models by the validation rows, or use other test rows"
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
    """Refuse a bound that no two models can differ by. Raises IncomparableError.

    Args:
        bound: Value of the setting.
        setting: Name of the setting: `by` or `margin`.
        metric: Metric of the rule.
        pairs: Scores that are compared.
    """
    scores = (*pairs.new, *pairs.old)
    are_shares = metric.better == "higher" and min(scores) >= 0 and max(scores) <= 1
    if bound >= 1 and (messages.is_share(metric) or metric.kind == "perplexity" or are_shares):
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
    return role, metric, build_pairs(metric, sort_samples(second), sort_samples(first), evidence.groups)


def check_noise(evidence: GateEvidence, name: str, bound: float) -> None:
    """Refuse a margin that is smaller than the noise of the evaluation. Raises IncomparableError."""
    rescored = pair_rescored_samples(evidence, name) if bound > 0 else None
    if rescored is None:
        return
    role, metric, pairs = rescored
    difference = abs(compute_difference(pairs))
    if not difference <= bound:  # Also refuses NaN.
        raise IncomparableError(
            f"{name} of {role}, scored twice, differs by {messages.format_change(difference, metric)}, more than the "
            f"margin of {messages.format_change(bound, metric)}: the evaluation is too noisy for this rule "
            "(run `ratchet gate --aa`)"
        )

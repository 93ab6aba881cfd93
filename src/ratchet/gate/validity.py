"""What makes every comparison meaningless: reports about different things, a task that changed, a set that was used up.

Also what no single rule notices: margins that no model could miss, and an evaluation that disagrees with itself.
"""

from collections.abc import Iterator

from ratchet.gate import messages
from ratchet.gate.evidence import (
    CANDIDATE,
    GateEvidence,
    IncomparableError,
    build_pairs,
    compute_difference,
    select_scores,
    sort_samples,
)
from ratchet.gate.paired_test import PairedScores
from ratchet.storage.digests import SHORT
from ratchet.storage.records.evaluation import MetricValue, Who
from ratchet.storage.records.gate import RuleResult


def find_problems(evidence: GateEvidence) -> tuple[RuleResult, ...]:
    """Reasons for INVALID, whatever the rules are."""
    found = [
        *(("identity", text) for text in _find_identity_problems(evidence)),
        *(("objective", text) for text in _find_selection_overlaps(evidence)),
        *(("tasks", text) for text in _find_changed_tasks(evidence)),
    ]
    return tuple(RuleResult(rule=rule, metric="-", outcome="invalid", text=text) for rule, text in found)


def _find_identity_problems(evidence: GateEvidence) -> Iterator[str]:
    report, bundle, champion = evidence.report, evidence.bundle, evidence.champion
    for what in ("adapter", "base", "data", "model"):
        evaluated, exported = (getattr(record, f"{what}_digest") for record in (report, bundle))
        if evaluated is None:
            yield (
                "the evaluation was made when this adapter was not exported yet; run `dvc repro evaluate` (what was "
                "scored is kept)"
            )
        elif evaluated != exported:
            yield (
                f"the evaluation is of {what} {evaluated[:SHORT]}, the export of {exported[:SHORT]}; run `dvc repro`"
            )
    if report.run_id != bundle.run_id:
        yield f"the evaluation is of run {report.run_id}, the export of {bundle.run_id}; run `dvc repro`"
    merged = report.scores.get("merged")
    if merged is not None and merged.model_digest != bundle.model_digest:
        yield (
            f"what was scored as merged is {merged.model_digest[:SHORT]}, the export {bundle.model_digest[:SHORT]}; "
            "run `dvc repro evaluate`"
        )
    for who, then, now in (
        ("champion", report.champion_digest, champion.champion_digest),
        ("anchor", report.anchor_digest, champion.anchor_digest),
    ):
        if then != now:
            was, current = (then or "none")[:SHORT], (now or "none")[:SHORT]
            yield f"the {who} was {was} when it was evaluated and is {current} now: run `dvc repro evaluate`"


def _find_selection_overlaps(evidence: GateEvidence) -> Iterator[str]:
    for name, count in sorted(evidence.report.chosen_by.items()):
        if count:
            yield (
                f"{count} of the test rows or tasks also belong to {name}, by which models are chosen: what was "
                "chosen by them cannot be judged by them; choose by the validation rows, or set other test rows aside"
            )


def _find_changed_tasks(evidence: GateEvidence) -> Iterator[str]:
    contracts = evidence.report.contracts
    asked = [contracts.get(scores.contract, {}).get("tasks", {}) for scores in evidence.report.scores.values()]
    for name in sorted(evidence.tasks_now.keys() | {name for tasks in asked for name in tasks}):
        then, now = {tasks.get(name) for tasks in asked}, evidence.tasks_now.get(name)
        if then == {now}:
            continue
        what = "changed since the evaluation (its YAML file or its data)"
        if now is None:
            what = "was evaluated and is not there any more, or not in evaluate.harness.tasks"
        elif then <= {None}:
            what = "was not part of the evaluation"
        yield f"harness task {name} {what}: run `dvc repro evaluate`"


def check_bound(bound: float, what: str, metric: MetricValue, pairs: PairedScores) -> None:
    """Refuse a bound that no two models can differ by. Raises IncomparableError."""
    scores = (*pairs.new, *pairs.old)
    shares = metric.better == "higher" and min(scores) >= 0 and max(scores) <= 1
    if bound >= 1 and (messages.is_share(metric) or metric.kind == "perplexity" or shares):
        raise IncomparableError(
            f"{what} is {bound:g}, which is {100 * bound:g} {'%' if metric.kind == 'perplexity' else 'points'}: "
            "no model could ever miss it, or reach it; write 0.02 for two of a hundred"
        )


def pair_rescored_samples(evidence: GateEvidence, name: str) -> tuple[Who, MetricValue, PairedScores] | None:
    """The candidate against itself, scored a second time under the same contract; None where nobody measured it."""
    noise = evidence.noise
    if noise is None or name not in noise.metrics:
        return None
    who = CANDIDATE[noise.form]
    scores = evidence.report.scores.get(who)
    if scores is None or (scores.model_digest, scores.contract) != (noise.model_digest, noise.contract):
        return None
    metric, first = select_scores(evidence, who, name)
    again = evidence.noise_samples.get(name, {})
    if first.keys() != again.keys():
        raise IncomparableError(f"{name}: the second scoring of {who} has other samples; run `ratchet gate --aa` again")
    return who, metric, build_pairs(metric, sort_samples(again), sort_samples(first), evidence.groups)


def check_noise(evidence: GateEvidence, name: str, bound: float) -> None:
    """Refuse a margin that the same model, scored twice, oversteps. Raises IncomparableError."""
    found = pair_rescored_samples(evidence, name) if bound > 0 else None
    if found is None:
        return
    who, metric, pairs = found
    differs = abs(compute_difference(pairs))
    if not differs <= bound:
        raise IncomparableError(
            f"{name} of {who}, scored twice, differs by {messages.format_change(differs, metric)}, more than the "
            f"{messages.format_change(bound, metric)} that the rule is about: the evaluation is too noisy for it "
            "(see `ratchet gate --aa`)"
        )

"""Writes the report of the gate as HTML: rules, comparisons, metrics, slices, labels, export, cost, lineage."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.config.units import format_count
from ratchet.quality_gate.evidence import GateEvidence
from ratchet.quality_gate.judgements import HUMAN_PREFERENCE
from ratchet.quality_gate.rules import describe_changed_rules
from ratchet.reports import pages, sample_browser
from ratchet.reports.pages import MINUS, OUTCOME_WORDS, format_metric, format_p_value, format_significant
from ratchet.reports.sample_browser import Documents
from ratchet.storage import files
from ratchet.storage.html import NONE
from ratchet.storage.records.base import flatten
from ratchet.storage.records.evaluation import (
    SAFETY_PREFIX,
    EvaluatedRow,
    EvaluationReport,
    MetricValue,
    ModelRole,
    list_untested,
)
from ratchet.storage.records.gate import Decision, ModelComparison, Outcome, RuleResult, Verdict

ROLES: tuple[ModelRole, ...] = ("base", "candidate", "merged", "champion", "anchor")
"""Evaluated models, in display order."""
GENERAL = "general_perplexity"
"""Metric of forgetting."""
SLICE_FIGURES, CLASSES_SHOWN, CONFUSIONS_SHOWN = 2000, 200, 20
"""Maximum numbers of slice scores, labels, and pairs of confused labels on the page."""
COST_RULES = ("at_least", "above_chance", "budget")
"""Rules shown with the costs."""
PEOPLE_AND_SAFETY = (SAFETY_PREFIX, HUMAN_PREFERENCE)
"""Beginnings of the names of metrics of safety and of people."""
Classes = Mapping[str, Mapping[str, float]]
"""Precision, recall and other metrics by label."""
VALUE_SHOWN = 300
"""Maximum number of characters that are shown of a value in a contract."""
PADDING, TICKS = 0.05, 5
"""Padding on both sides of the axis of differences, as a fraction of its range, and approximate number of ticks."""
DECISIONS: dict[Decision, tuple[Outcome, str]] = {
    "PROMOTE": ("pass", "All rules pass: this model may be promoted."),
    "HOLD": ("undecided", "Not enough evidence: do not promote yet."),
    "REJECT": ("fail", "A rule fails: do not promote this model."),
    "INVALID": ("invalid", "The comparison is invalid: fix the inputs and run the gate again."),
}
"""Outcome and explanation of each decision."""
PRECEDENCE: tuple[Outcome, ...] = ("invalid", "fail", "undecided", "pass")
"""Outcomes, the most serious first."""


def write(
    verdict: Verdict,
    evidence: GateEvidence,
    rows: Sequence[EvaluatedRow],
    answers: Mapping[ModelRole, Mapping[str, Sequence[str]]],
    documents: Documents,
    target: Path,
) -> None:
    """Write the page. Equal arguments give equal bytes.

    Args:
        verdict: Verdict of the gate.
        evidence: Evidence that the gate judged.
        rows: Test rows.
        answers: Answers of each model, by row id.
        documents: Harness documents {id, prompt, target, answers, scores}, by model and task.
        target: HTML file to write.
    """
    report = evidence.report
    texts = sample_browser.read_documents(rows, answers, documents)
    rules = sorted(verdict.reasons, key=lambda reason: PRECEDENCE.index(reason.outcome))
    counts = Counter(reason.outcome for reason in rules)
    compared = [
        ForestPlotRow(
            reason,
            comparison,
            POINTS
            if comparison.metric == HUMAN_PREFERENCE
            else metric_scale(sample_browser.find_metric(report, comparison.metric)),
        )
        for reason in verdict.reasons
        for comparison in reason.comparisons
    ]
    judge = ["Judge"] if report.judge_report is not None else []
    judge += ["Safety"] if report.safety is not None else []
    sections = ["Rules", "Comparisons", "Flipped samples", "Metrics", "Forgetting", "Labels", "Export parity",
                "Cost and floors", *judge, "Noise", "Lineage"]  # fmt: skip
    page = pages.render(
        "gate",
        title=f"{verdict.decision}: {verdict.run_id}",
        scripts=("samples.js",),
        sections=sections,
        decision=DECISIONS[verdict.decision],
        verdict=verdict,
        bundle=evidence.bundle,
        champion=evidence.champion,
        report=report,
        rule_groups=_group_rules(rules),
        rule_counts=", ".join(f"{OUTCOME_WORDS[name]} {counts[name]:,}" for name in PRECEDENCE if counts[name]),
        plots=[
            _build_plot(scale, [row for row in compared if row.scale == scale])
            for scale in dict.fromkeys(row.scale for row in compared)
        ],
        comparisons=[_format_numbers(row) for row in compared],
        browser=sample_browser.select_samples(sample_browser.pair_scores(verdict, evidence), texts),
        metrics=summarize_metrics(report),
        safety=summarize_safety(report),
        forgetting=summarize_forgetting(report),
        labels=summarize_labels(report, evidence.scored_roles, rows, answers),
        floors=[reason for reason in verdict.reasons if reason.rule in COST_RULES],
        costs={role: report.costs[role] for role in ROLES if role in report.costs},
        noise=_summarize_noise(evidence),
        lineage=_describe_lineage(verdict, evidence),
        scores={role: report.scores[role] for role in ROLES if role in report.scores},
        contracts=[
            (name, {term: _format_term(value) for term, value in sorted(flatten(contract).items())})
            for name, contract in sorted(report.contracts.items())
        ],
    )
    files.write_atomic(target, page)


def _group_rules(rules: Sequence[RuleResult]) -> dict[str, list[RuleResult]]:
    """Return the rules about quality, and apart from them those about people and safety, if there are any."""
    people = [reason for reason in rules if reason.metric.startswith(PEOPLE_AND_SAFETY)]
    groups = {"Quality": [reason for reason in rules if reason not in people], "People and safety": people}
    return {name: group for name, group in groups.items() if group}


def summarize_safety(report: EvaluationReport) -> dict[str, Any] | None:
    """Return the safety metrics of every model and the tests that were not made; None if nothing was tested."""
    if report.safety is None:
        return None
    return {
        "report": report.safety,
        "metrics": _tabulate_metrics("Safety metrics", _select_metrics(report, of_safety=True)),
        "untested": list_untested(report),
    }


# Metrics, labels and forgetting. The page of a run shows them too.


def summarize_metrics(report: EvaluationReport) -> dict[str, Any] | None:
    """Return the metrics of every model without those of safety, and the slices up to the limit of the page; None if
    nothing was measured."""
    models = [role for role in ROLES if role in report.scores]
    if not models:
        return None
    parts = sorted({part for role in models for part in report.scores[role].slices}, key=_part_order)
    slices: list[dict[str, Any]] = []
    remaining = SLICE_FIGURES
    for part in parts:
        by_role = {role: report.scores[role].slices.get(part, {}) for role in models}
        remaining -= sum(map(len, by_role.values()))
        if remaining < 0:
            break
        slices.append(_tabulate_metrics(part, by_role))
    all_metrics = _tabulate_metrics("Metrics", _select_metrics(report, of_safety=False))
    return {"all": all_metrics, "parts": len(parts), "slices": slices}


def _select_metrics(report: EvaluationReport, *, of_safety: bool) -> dict[ModelRole, dict[str, MetricValue]]:
    return {
        role: {n: m for n, m in report.scores[role].metrics.items() if n.startswith(SAFETY_PREFIX) == of_safety}
        for role in ROLES
        if role in report.scores
    }


def _part_order(name: str) -> tuple[str, float, str]:
    """Return a sort key that places `tokens <= 64` before `tokens <= 128`."""
    field, _, value = name.rpartition(" ")
    return (field, float(value), "") if value.isdecimal() else (name, 0.0, value)


def _tabulate_metrics(title: str, by_role: Mapping[ModelRole, Mapping[str, MetricValue]]) -> dict[str, Any]:
    names = sorted({name for by_name in by_role.values() for name in by_name})
    rows = []
    for name in names:
        metric = next(by_name[name] for by_name in by_role.values() if name in by_name)
        about = ["unknown direction" if metric.better == "unknown" else f"{metric.better} is better"]
        about += [*([metric.unit] if metric.unit != "1" else []), f"n {metric.n:,}"]
        about += [] if metric.chance is None else [f"chance {format_metric(metric, metric.chance)}"]
        metrics = [by_name.get(name) for by_name in by_role.values()]
        rows.append({"name": name, "about": ", ".join(about), "metrics": metrics})
    return {"title": title, "models": list(by_role), "rows": rows}


def summarize_forgetting(report: EvaluationReport) -> list[dict[str, Any]]:
    """Return the perplexity of general text by model, a measure of forgetting."""
    metrics = {role: report.scores[role].metrics[GENERAL] for role in ROLES
               if role in report.scores and GENERAL in report.scores[role].metrics}  # fmt: skip
    most = max((metric.high for metric in metrics.values()), default=1.0) or 1.0
    base = metrics.get("base")
    return [
        {
            "role": role, "metric": metric, "share": metric.value / most,
            "relative": NONE if base is None or role == "base"
            else f"{metric.value / base.value - 1:+.1%}".replace("-", MINUS).replace("%", "\u00a0%"),
        }
        for role, metric in metrics.items()
    ]  # fmt: skip


def summarize_labels(
    report: EvaluationReport,
    roles: Sequence[ModelRole],
    rows: Sequence[EvaluatedRow],
    answers: Mapping[ModelRole, Mapping[str, Sequence[str]]],
) -> dict[str, Any] | None:
    """Return results by label, worst first, and confused labels; None if the answers are not labels.

    Args:
        report: Report of the evaluation.
        roles: Roles under which the candidate was scored, the preferred role first.
        rows: Test rows.
        answers: Answers of each model, by row id.
    """
    scores = report.scores
    candidate = next((role for role in roles if scores[role].per_class), None)
    if candidate is None:
        return None
    reference = next((role for role in ("champion", "base") if role in scores and scores[role].per_class), None)
    given = answers.get(candidate, {})
    pairs = Counter(
        (row.expected.strip(), text.strip())
        for row in rows
        for text in given.get(row.id, ())
        if row.expected.strip() != text.strip()
    )
    compared = (f"F1, {reference or 'reference'}", scores[reference].per_class if reference else {})
    results = tabulate_labels(candidate, scores[candidate].per_class, compared)
    return {**results, "confused": summarize_confusions(pairs)}


def tabulate_labels(model: str, results: Classes, reference: tuple[str, Classes] | None) -> dict[str, Any]:
    """Return the table of results by label, worst first.

    Args:
        model: Name of the model.
        results: Results by label.
        reference: Column title for another model's F1, and its results. None if there is no other model.
    """
    bar = pages.macros().bar
    order = sorted(results, key=lambda name: (results[name].get("f1", 0.0), name))

    def share(metrics: Mapping[str, float], name: str) -> str:
        return f"{metrics[name]:.3f}" if name in metrics else NONE

    rows = [
        (
            pages.macros().bdi(name),
            bar([("train", results[name].get("f1", 0.0))]),
            *(share(results[name], key) for key in ("f1", "precision", "recall", "average_precision")),
            *([share(reference[1].get(name, {}), "f1")] if reference else []),
            f"{results[name].get('support', 0):,.0f}",
        )
        for name in order[:CLASSES_SHOWN]
    ]
    more = len(order) - CLASSES_SHOWN
    omitted = f"; {more:,} of {len(order):,} labels are omitted" if more > 0 else ""
    return {"model": model, "omitted": omitted, "reference": reference[0] if reference else None, "rows": rows}


def summarize_confusions(pairs: Counter[tuple[str, str]]) -> dict[str, Any]:
    """Return the most frequent confusions. `pairs` counts (expected, answered) labels."""
    frequent = sorted(pairs.items(), key=lambda item: (-item[1], item[0]))[:CONFUSIONS_SHOWN]
    return {"frequent": frequent, "count": len(pairs), "total": sum(pairs.values())}


# Noise and lineage.


def _summarize_noise(evidence: GateEvidence) -> dict[str, Any] | None:
    """Return the differences between two evaluations of the same candidate, if they were measured."""
    noise = evidence.noise
    if noise is None:
        return None
    scores = evidence.report.scores.values()
    first = next((found.metrics for found in scores if found.model_digest == noise.model_digest), {})
    rows = [
        (name, first.get(name), metric, _count_noise(evidence, name)) for name, metric in sorted(noise.metrics.items())
    ]
    return {"found": noise, "rows": rows}


def _count_noise(evidence: GateEvidence, metric: str) -> str:
    second = evidence.noise_samples.get(metric, {})
    role = next((role for role in evidence.scored_roles if metric in evidence.samples.get(role, {})), None)
    first = evidence.samples[role][metric] if role else {}
    shared = [sample for sample in second if sample in first]
    differing = sum(second[sample].value != first[sample].value for sample in shared)
    return f"{differing:,} of {len(shared):,}" if shared else NONE


def _describe_lineage(verdict: Verdict, evidence: GateEvidence) -> dict[str, object]:
    """Return the digests that determine the verdict."""
    bundle, champion, code = evidence.bundle, evidence.champion, pages.macros().code
    limit = f"; at most {verdict.max_test_set_uses:,} allowed" if verdict.max_test_set_uses else ""
    facts: dict[str, object] = {
        "Run": verdict.run_id,
        "Model": code(verdict.model_digest),
        "Adapter": code(verdict.adapter_digest),
        "Base": code(bundle.base_digest),
        "Base loaded as": bundle.base_weight_format or NONE,
        "Merged from": bundle.merge_base,
        "Data": code(bundle.data_digest),
        "Champion": code(verdict.champion_digest) if verdict.champion_digest else "none",
        "Anchor": code(verdict.anchor_digest) if verdict.anchor_digest else "none",
        "Test set": code(verdict.test_set_digest or evidence.report.test_set_digest),
        "Evaluations of it": f"{format_count(evidence.test_set_uses, 'model')}, including this one{limit}",
    }
    if verdict.alpha_share is not None:
        facts["Level for promotion"] = f"{100 * verdict.alpha_share:.3g} % of 1 - confidence"
    if verdict.earlier_decisions:
        facts["Earlier decisions"] = describe_changed_rules(verdict)
    if champion.champion:
        facts["Champion version"] = f"{champion.champion.version:,}, run {champion.champion.run_id}"
    if champion.ledger:
        facts["Last ledger entry"] = code(champion.ledger)
    return facts


def _format_term(value: object) -> str:
    """Format a value of a contract, shortened if it is long."""
    text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return f"{text[:VALUE_SHOWN]}... ({len(text):,} characters)" if len(text) > VALUE_SHOWN else text or NONE


# The comparisons as a forest plot, one axis per unit, and the same values as a table.


@dataclass(frozen=True)
class MetricScale:
    """Unit and format of the differences of a metric. Comparisons with the same scale share an axis."""

    unit: str
    factor: float
    places: int | None
    """Number of digits after the decimal point. None: as many as four significant digits need."""

    def signed(self, amount: float) -> str:
        """Format an amount with its sign, including infinity."""
        return ("+" if amount > 0 else MINUS if amount < 0 else "") + self.plain(amount)

    def plain(self, amount: float) -> str:
        """Format an amount without its sign."""
        if math.isnan(amount):
            return NONE
        amount = abs(amount) * self.factor
        if math.isinf(amount):
            return "\u221e"
        return format_significant(amount) if self.places is None else f"{amount:,.{self.places}f}"


POINTS, PERCENT = MetricScale("percentage points", 100.0, 2), MetricScale("per cent of the perplexity", 100.0, 2)


def metric_scale(metric: MetricValue | None) -> MetricScale:
    """Return the scale of a metric's paired differences. The unit of an unmeasured metric is unknown."""
    if metric is None:
        return MetricScale("unknown unit", 1.0, None)
    if metric.kind == "perplexity":
        return PERCENT
    return POINTS if metric.unit == "proportion" else MetricScale(metric.unit, 1.0, None)


@dataclass(frozen=True)
class ForestPlotRow:
    """One comparison of one rule."""

    reason: RuleResult
    comparison: ModelComparison
    scale: MetricScale

    @property
    def about(self) -> str:
        """Models and rule."""
        return f"against {self.comparison.against}, {self.comparison.role}, {self.reason.rule.replace('_', ' ')}"

    @property
    def description(self) -> str:
        """All values, for screen readers."""
        found, signed = self.comparison, self.scale.signed
        return (
            f"{found.metric} against {found.against}: {signed(found.difference)} {self.scale.unit}, bounds "
            f"{signed(found.low)} and {signed(found.high)}, threshold {signed(found.bound)}; the rule "
            f"{OUTCOME_WORDS[self.reason.outcome]}"
        )

    @property
    def counts(self) -> str:
        """Numbers of samples, and the detectable difference."""
        found = self.comparison
        counts = f"n {found.n:,}"
        if found.better is not None and found.worse is not None:
            counts += f", {found.better:,} better, {found.worse:,} worse"
        return f"{counts}; detects {self.scale.plain(found.detectable)}"


def _build_plot(scale: MetricScale, rows: Sequence[ForestPlotRow]) -> dict[str, Any]:
    """Return the values of macro `forest`: positions are shares of the axis."""
    low, high = _axis_limits([row.comparison for row in rows])

    def at(value: float) -> float:
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def end(value: float) -> tuple[float, str]:
        # A bound that is not finite is drawn as an arrow.
        return at(value), "M0-5V5" if math.isfinite(value) else "M-7-5 0 0-7 5" if value > 0 else "M7-5 0 0 7 5"

    def draw(row: ForestPlotRow) -> dict[str, Any]:
        found = row.comparison
        is_measured = not math.isnan(found.difference)
        return {
            "metric": found.metric, "about": row.about, "description": row.description, "counts": row.counts,
            "outcome": row.reason.outcome, "difference": scale.signed(found.difference),
            "detectable": (at(-found.detectable), at(found.detectable)) if math.isfinite(found.detectable) else None,
            "bound": at(found.bound) if found.bound else None,
            "ends": (end(found.low), end(found.high)) if is_measured else (),
            "at": at(found.difference) if is_measured else None,
        }  # fmt: skip

    rough = (high - low) / TICKS
    ten = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * ten for factor in (1, 2, 5, 10) if factor * ten >= rough * (1 - 1e-9))
    ticks = [float(f"{number * step:.10g}") for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
    texts = [f"{'+' if tick > 0 else MINUS}{abs(tick) * scale.factor:g}" if tick else "0" for tick in ticks]
    return {"unit": scale.unit, "zero": at(0.0), "rows": [draw(row) for row in rows],
            "ticks": list(zip(map(at, ticks), texts, strict=True))}  # fmt: skip


def _axis_limits(comparisons: Sequence[ModelComparison]) -> tuple[float, float]:
    values = [0.0]
    for found in comparisons:
        values += [v for v in (found.difference, found.low, found.high, found.bound) if math.isfinite(v)]
    low, high = min(values), max(values)
    if low == high:
        # If no difference was measured, the detectable difference sets the scale.
        detectable = [found.detectable for found in comparisons if 0 < found.detectable < math.inf]
        high = 2 * max(detectable, default=0.5)
        low = -high
    padding = PADDING * (high - low)
    return low - padding, high + padding


def _format_numbers(row: ForestPlotRow) -> list[str | tuple[str, str]]:
    """Return the cells of a comparison: texts, or texts with a note."""
    found, scale = row.comparison, row.scale
    counts = [f"in {found.groups:,} groups"] if found.groups is not None else []
    if found.better is not None and found.worse is not None:
        counts.append(f"{found.better:,} better, {found.worse:,} worse")
    if row.reason.outcome == "pass" or found.required_samples is None:
        # For a threshold of zero, the number of required samples cannot be derived.
        needed = "sufficient" if found.bound else NONE
    else:
        needed = f"{found.required_samples:,}"
    return [
        (found.metric, f"{row.about}; {scale.unit}"),
        (scale.signed(found.difference), f"{scale.signed(found.low)} to {scale.signed(found.high)}"),
        scale.signed(found.bound),
        (f"{found.n:,}", ", ".join(counts)),
        (format_p_value(found.p), "" if found.p_adjusted is None else f"Holm {format_p_value(found.p_adjusted)}"),
        scale.plain(found.detectable),
        needed,
        (found.method, f"bounds at {found.confidence:.3g} each"),
    ]

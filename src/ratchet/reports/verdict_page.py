"""Renders the report of the gate as HTML: rules, comparisons, metrics, slices, labels, export, cost, lineage."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ratchet.config.units import format_bytes
from ratchet.quality_gate.evidence import GateEvidence
from ratchet.quality_gate.rules import describe_changed_rules
from ratchet.reports import forest_plot, sample_browser
from ratchet.reports.forest_plot import (
    MINUS,
    OUTCOME_WORDS,
    ROLES,
    format_metric,
    format_significant,
    render_digest,
    render_interval,
    render_outcome,
)
from ratchet.reports.sample_browser import Documents
from ratchet.storage import files, html
from ratchet.storage.html import NONE, Html, bar, explanation, format_count, format_percentage, table, tag
from ratchet.storage.records.evaluation import (
    EvaluatedRow,
    EvaluationReport,
    JudgePreference,
    JudgeReport,
    MetricValue,
    ModelRole,
)
from ratchet.storage.records.export import ExportArtifact, MergeParity, MergeReport, ModelBundle, TaskScore
from ratchet.storage.records.gate import Champion, Decision, Outcome, Verdict

GENERAL = "general_perplexity"
"""Metric of forgetting."""

SLICE_FIGURES, CLASSES_SHOWN, CONFUSIONS_SHOWN = 2000, 200, 20
"""Maximum numbers of slice scores, labels, and pairs of confused labels on the page."""

CLASSES_OPEN = 15
"""Number of labels visible before the table is expanded."""

COST_RULES = ("at_least", "above_chance", "budget")
"""Rules shown with the costs."""

Body = Sequence[Html] | str

Classes = Mapping[str, Mapping[str, float]]
"""Precision, recall and other metrics by label."""
VALUE_SHOWN = 300
"""Maximum number of characters that are shown of a value in a contract."""
LEFT, TOP, SQUARE = 56, 10, 360
"""Left margin, top margin, and side length of the reliability diagram, in its own pixels."""
TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)
DECISIONS: dict[Decision, tuple[Outcome, str]] = {
    "PROMOTE": ("pass", "All rules pass: this model may be promoted."),
    "HOLD": ("undecided", "Not enough evidence: do not promote yet."),
    "REJECT": ("fail", "A rule fails: do not promote this model."),
    "INVALID": ("invalid", "The comparison is invalid: fix the inputs and run the gate again."),
}
"""Outcome and explanation of each decision."""
PRECEDENCE: tuple[Outcome, ...] = ("invalid", "fail", "undecided", "pass")
"""Outcomes, the most serious first."""

PAGE_STYLE, STYLE, SCRIPT = (Path(__file__).with_name(name) for name in ("page.css", "gate.css", "gate.js"))


def render_metrics(report: EvaluationReport) -> Body:
    """Render every metric of every model with its 95 % interval. Slices are collapsed."""
    models = [role for role in ROLES if role in report.scores]
    if not models:
        return "Nothing was measured."
    content = [
        explanation("Value and its 95 % interval. Models are compared by paired tests, not by these intervals."),
        _render_metric_table("Metrics", models, {role: report.scores[role].metrics for role in models}),
    ]
    if slices := list(_render_slices(report, models)):
        content.append(tag("details", *slices))
    return content


def _render_slices(report: EvaluationReport, models: Sequence[ModelRole]) -> Iterator[Html]:
    """Yield a table for each slice, up to the limit of the page."""
    parts = sorted({part for role in models for part in report.scores[role].slices}, key=_part_order)
    if not parts:
        return
    remaining = SLICE_FIGURES
    tables = []
    for part in parts:
        by_role = {role: report.scores[role].slices.get(part, {}) for role in models}
        remaining -= sum(map(len, by_role.values()))
        if remaining < 0:
            break
        tables += [tag("h3", tag("bdi", part)), _render_metric_table(part, models, by_role)]
    summary = f"By slice: {format_count(len(parts), 'slice')}"
    yield tag(
        "summary", summary if remaining >= 0 else f"{summary}, {len(tables) // 2:,} shown; eval.json has all of them"
    )
    yield from tables


def _part_order(name: str) -> tuple[str, float, str]:
    """Return a sort key that places `tokens <= 64` before `tokens <= 128`."""
    field, _, value = name.rpartition(" ")
    return (field, float(value), "") if value.isdecimal() else (name, 0.0, value)


def _render_metric_table(
    title: str, models: Sequence[ModelRole], metrics_by_role: Mapping[ModelRole, Mapping[str, MetricValue]]
) -> Html:
    names = sorted({name for by_name in metrics_by_role.values() for name in by_name})
    rows = []
    for name in names:
        metric = next(by_name[name] for by_name in metrics_by_role.values() if name in by_name)
        about = ["unknown direction" if metric.better == "unknown" else f"{metric.better} is better"]
        about += [*([metric.unit] if metric.unit != "1" else []), f"n {metric.n:,}"]
        about += [] if metric.chance is None else [f"chance {format_metric(metric, metric.chance)}"]
        first = tag("span", tag("bdi", name), tag("small", ", ".join(about)))
        rows.append((first, *(render_interval(metrics_by_role[role].get(name)) for role in models)))
    return html.table(title, "t" + "n" * len(models), ("metric", *models), rows)


def render_forgetting(report: EvaluationReport) -> Body:
    """Render perplexity of general text by model, a measure of forgetting."""
    metrics = {role: report.scores[role].metrics[GENERAL] for role in ROLES
             if role in report.scores and GENERAL in report.scores[role].metrics}  # fmt: skip
    if not metrics:
        return "Perplexity of general text was not measured."
    most = max(metric.high for metric in metrics.values()) or 1.0
    reference = metrics.get("base")
    rows = [
        (
            role,
            bar(("train", metric.value / most)),
            format_significant(metric.value),
            f"{format_significant(metric.low)} to {format_significant(metric.high)}",
            NONE
            if reference is None or role == "base"
            else f"{metric.value / reference.value - 1:+.1%}".replace("-", MINUS).replace("%", "\u00a0%"),
        )
        for role, metric in metrics.items()
    ]
    blocks = format_count(next(iter(metrics.values())).n, "block")
    return [
        explanation(f"Perplexity of text unrelated to the task, on the same {blocks} for every model."),
        html.table(
            "Perplexity of general text", "tbnnn", ("model", "", "perplexity", "95 %", "relative to the base"), rows
        ),
    ]


def render_labels(
    report: EvaluationReport,
    roles: Sequence[ModelRole],
    rows: Sequence[EvaluatedRow],
    answers: Mapping[ModelRole, Mapping[str, Sequence[str]]],
) -> Body:
    """Render results by label, worst first, and confused labels.

    Args:
        report: Report of the evaluation.
        roles: Roles under which the candidate was scored, the preferred role first.
        rows: Test rows.
        answers: Answers of each model, by row id.
    """
    scores = report.scores
    candidate = next((role for role in roles if scores[role].per_class), None)
    if candidate is None:
        return "The answers are not labels."
    reference = next((role for role in ("champion", "base") if role in scores and scores[role].per_class), None)
    reference_results = (f"F1, {reference or 'reference'}", scores[reference].per_class if reference else {})
    candidate_answers = answers.get(candidate, {})
    pairs = Counter(
        (row.expected.strip(), text.strip())
        for row in rows
        for text in candidate_answers.get(row.id, ())
        if row.expected.strip() != text.strip()
    )
    return [*render_label_tables(candidate, scores[candidate].per_class, reference_results), *render_confusions(pairs)]


def render_label_tables(model: str, results: Classes, reference: tuple[str, Classes] | None) -> list[Html]:
    """Render results by label, worst first.

    Args:
        model: Name of the model.
        results: Results by label.
        reference: Column title for another model's F1, and its results. None if there is no other model.
    """
    order = sorted(results, key=lambda name: (results[name].get("f1", 0.0), name))
    lines = [
        (
            tag("bdi", name),
            bar(("train", results[name].get("f1", 0.0))),
            *(_format_share(results[name], key) for key in ("f1", "precision", "recall", "average_precision")),
            *([_format_share(reference[1].get(name, {}), "f1")] if reference else []),
            f"{results[name].get('support', 0):,.0f}",
        )
        for name in order[:CLASSES_SHOWN]
    ]
    heads = (
        "label",
        "",
        "F1",
        "precision",
        "recall",
        "average precision",
        *([reference[0]] if reference else []),
        "rows",
    )
    kinds = "ts" + "n" * (len(heads) - 2)
    content = [
        explanation(f"Results of {model}, worst first{_describe_omitted(len(order), CLASSES_SHOWN)}."),
        html.table("Worst labels", kinds, heads, lines[:CLASSES_OPEN]),
    ]
    if rest := lines[CLASSES_OPEN:]:
        table = html.table("Other labels", kinds, heads, rest)
        content.append(tag("details", tag("summary", f"{len(rest):,} more"), table))
    return content


def _describe_omitted(count: int, most: int) -> str:
    return f"; {count - most:,} of {count:,} labels are omitted" if count > most else ""


def _format_share(metrics: Mapping[str, float], name: str) -> str:
    return f"{metrics[name]:.3f}" if name in metrics else NONE


def render_confusions(pairs: Counter[tuple[str, str]]) -> Iterator[Html]:
    """Render the most frequent confusions. `pairs` counts (expected, answered) labels."""
    yield tag("h3", "Confused labels")
    if not pairs:
        yield explanation("No label was confused with another.")
        return
    frequent = sorted(pairs.items(), key=lambda item: (-item[1], item[0]))[:CONFUSIONS_SHOWN]
    lines = [
        (tag("bdi", right), tag("bdi", answered[:80] or "(nothing)"), f"{count:,}")
        for (right, answered), count in frequent
    ]
    yield html.table("Confused labels", "ttn", ("expected", "answered", "times"), lines)
    yield explanation(
        f"{len(frequent):,} of {format_count(len(pairs), 'pair')}, {sum(pairs.values()):,} wrong answers in total."
    )


def render_costs(evidence: GateEvidence, verdict: Verdict) -> Body:
    """Render the results of the rules for minimum scores and budgets, and the inference cost."""
    content = []
    if rules := [reason for reason in verdict.reasons if reason.rule in COST_RULES]:
        items = (tag("li", f"{reason.rule.replace('_', ' ')}: ", tag("bdi", reason.text)) for reason in rules)
        content.append(tag("ul", *items))
    content.append(tag("p", f"The export has {format_bytes(evidence.bundle.size_bytes)}, {evidence.bundle.dtype}."))
    rows = [
        (role, f"{cost.latency_s:.3g}", f"{cost.latency_p95_s:.3g}", f"{cost.tokens_per_s:.4g}",
         format_bytes(cost.memory_bytes), f"{cost.rows:,}", cost.device)
        for role, cost in ((role, evidence.report.costs[role]) for role in ROLES if role in evidence.report.costs)
    ]  # fmt: skip
    if not rows:
        return [*content, explanation("Latency and memory were not measured (set evaluate.latency_rows).")]
    heads = ("model", "median s", "95 % within s", "tokens/s", "peak memory", "answers", "device")
    return [*content, html.table("Inference cost", "tnnnnnt", heads, rows)]


def render_noise(evidence: GateEvidence) -> Body:
    """Render the differences between two evaluations of the same candidate, if they were measured."""
    noise = evidence.noise
    if noise is None:
        return "Not measured. Run `ratchet gate --aa` to evaluate the candidate a second time."
    first = next(
        (scores for scores in evidence.report.scores.values() if scores.model_digest == noise.model_digest), None
    )
    rows = [
        (
            tag("bdi", name),
            render_interval(first.metrics.get(name)) if first else NONE,
            render_interval(metric),
            _describe_noise(evidence, name),
        )
        for name, metric in sorted(noise.metrics.items())
    ]
    first_rows, second_rows = noise.batch_rows
    batches = f"batches of {first_rows:,} and {second_rows:,} rows"
    note = f"Model {noise.model_digest[:12]}, {noise.model_format}, with {batches}."
    heads = ("metric", "first", "second", "samples that differ")
    return [explanation(note), html.table("Evaluation noise", "tnnn", heads, rows)]


def _describe_noise(evidence: GateEvidence, metric: str) -> str:
    second = evidence.noise_samples.get(metric, {})
    role = next(
        (scored_role for scored_role in evidence.scored_roles if metric in evidence.samples.get(scored_role, {})), None
    )
    first = evidence.samples[role][metric] if role else {}
    shared = [sample for sample in second if sample in first]
    return (
        f"{sum(second[sample].value != first[sample].value for sample in shared):,} of {len(shared):,}"
        if shared
        else NONE
    )


def _describe_use_limit(verdict: Verdict) -> str:
    return f"; at most {verdict.max_test_set_uses:,} allowed" if verdict.max_test_set_uses else ""


def render_lineage(verdict: Verdict, evidence: GateEvidence) -> Body:
    """Render the digests that determine the verdict, the contracts of the scores, and notes."""
    report, bundle, champion = evidence.report, evidence.bundle, evidence.champion
    facts: dict[str, str] = {
        "Run": tag("bdi", verdict.run_id),
        "Model": tag("code", verdict.model_digest),
        "Adapter": tag("code", verdict.adapter_digest),
        "Base": tag("code", bundle.base_digest),
        "Base loaded as": bundle.base_weight_format or NONE,
        "Merged from": bundle.merge_base,
        "Data": tag("code", bundle.data_digest),
        "Champion": tag("code", verdict.champion_digest) if verdict.champion_digest else "none",
        "Anchor": tag("code", verdict.anchor_digest) if verdict.anchor_digest else "none",
        "Test set": tag("code", verdict.test_set_digest or report.test_set_digest),
        "Evaluations of it": f"{format_count(evidence.test_set_uses, 'model')}, including this one"
        f"{_describe_use_limit(verdict)}",
    }
    if verdict.earlier_decisions:
        facts["Earlier decisions"] = describe_changed_rules(verdict)
    if champion.champion:
        facts["Champion version"] = f"{champion.champion.version:,}, run {champion.champion.run_id}"
    if champion.ledger:
        facts["Last ledger entry"] = tag("code", champion.ledger)
    content = [_render_facts(facts), tag("h3", "Scores")]
    rows = [
        (role, scores.model_format, render_digest(scores.model_digest), render_digest(scores.contract))
        for role, scores in ((role, report.scores[role]) for role in ROLES if role in report.scores)
    ]
    content.append(html.table("Models scored", "tttt", ("model", "format", "digest", "contract"), rows))
    for fingerprint, contract in sorted(report.contracts.items()):
        contract_facts = _render_facts({name: tag("bdi", value) for name, value in _flatten_contract(contract)})
        content.append(tag("details", tag("summary", f"Contract {fingerprint[:12]}"), contract_facts))
    if report.selection_overlaps:
        listed_sets = (
            tag("li", f"{name}: {rows:,} of its samples are in the gate set")
            for name, rows in sorted(report.selection_overlaps.items())
        )
        content += [tag("h3", "Model selection sets"), tag("ul", *listed_sets)]
    if report.notes:
        content += [tag("h3", "Notes"), tag("ul", *(tag("li", tag("bdi", note)) for note in report.notes))]
    return content


def _render_facts(facts: Mapping[str, str]) -> Html:
    pairs = ((tag("dt", name), tag("dd", value)) for name, value in facts.items())
    return tag("dl", *(part for pair in pairs for part in pair), class_="facts")


def _flatten_contract(document: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted keys and values of a contract, sorted."""
    for name, value in sorted(document.items()):
        if isinstance(value, Mapping) and value:
            yield from _flatten_contract(value, f"{prefix}{name}.")
        else:
            text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            shortened = (
                f"{text[:VALUE_SHOWN]}... ({len(text):,} characters)" if len(text) > VALUE_SHOWN else text or NONE
            )
            yield f"{prefix}{name}", shortened


# Export: the merge, and every format compared with base + adapter.


def render_export(bundle: ModelBundle) -> Sequence[Html]:
    """Render the merge with its parity, and the test of each format in its own runtime."""
    content = [*_render_merge(bundle.parity)]
    if bundle.merge is not None:
        content += _render_merge_trials(bundle.merge, bundle.merge_base)
    if bundle.artifacts:
        content += [
            tag("h3", "Formats"),
            explanation(
                "Every format was loaded in its runtime and compared with base + adapter on the same inputs: "
                "divergence and equal tokens at answer positions, answers to the gate's samples with a paired 95 % "
                "interval of the difference, and texts that its own tokenizer splits identically."
            ),
            _render_format_table(bundle.artifacts),
        ]
        content += [tag("p", f"{artifact.name}: {note}") for artifact in bundle.artifacts for note in artifact.notes]
    return content


def _render_merge(parity: MergeParity) -> Iterator[Html]:
    rows = [
        ("maximum logit difference", format_significant(parity.max_logit_difference)),
        ("mean logit difference", format_significant(parity.mean_logit_difference)),
        ("same top token", format_percentage(parity.greedy_agreement, 1)),
        ("rows", f"{parity.rows:,}"),
        ("positions compared", f"{parity.tokens:,}"),
    ]
    yield explanation("The merged model, read back from disk, compared with base + adapter on the same test rows.")
    yield html.table("Export parity", "tn", ("", "measured"), rows)


def _render_merge_trials(merge: MergeReport, chosen: str) -> Iterator[Html]:
    method = "tensor by tensor, shard by shard" if merge.streamed else "in memory"
    yield tag("h3", "Merge")
    yield explanation(
        f"{merge.changed:,} tensors changed, {method}. Each module received the same input as in base + adapter, and "
        "its outputs were compared."
    )
    rows = [
        (
            f"into the {trial.merge_base} base" + (", selected" if trial.merge_base == chosen else ""),
            format_significant(trial.parity.max_logit_difference), format_significant(trial.kl),
            format_percentage(trial.parity.greedy_agreement, 1),
            f"{trial.check.modules:,} + {trial.check.layers:,}",
            (f"{format_significant(trial.check.worst[0].max_difference)} in {trial.check.worst[0].name}"
             if trial.check.worst else NONE),
            format_significant(trial.check.adapter_effect),
        )
        for trial in merge.trials
    ]  # fmt: skip
    heads = (
        "merged", "maximum logit difference", "divergence, nats", "same token", "modules + layers compared",
        "largest deviation at", "distance from the base",
    )  # fmt: skip
    yield html.table("Merge variants", "tnnnntn", heads, rows)


def _render_format_table(artifacts: Sequence[ExportArtifact]) -> Html:
    heads = (
        "format", "runtime", "size", "divergence, nats", "maximum difference, nats", "same token", "perplexity",
        "answers", "difference", "same answers", "texts", "tokens/s",
    )  # fmt: skip
    return html.table("Formats", "ttnnnnnnnnnn", heads, map(_format_row, artifacts))


def _format_row(artifact: ExportArtifact) -> Sequence[str]:
    distance, task = artifact.distance, artifact.task
    return (
        artifact.name, artifact.runtime, format_bytes(artifact.size_bytes),
        format_significant(distance.kl), format_significant(distance.max_difference),
        format_percentage(distance.greedy_agreement, 1),
        f"{distance.perplexity:.4g} ({distance.reference_perplexity:.4g})",
        f"{task.value:.4g} {task.metric}" if task else NONE, _format_difference(task) if task else NONE,
        format_percentage(task.same_answers, 1) if task else NONE,
        f"{artifact.texts_tokenised:,} of {artifact.texts:,}",
        f"{artifact.tokens_per_second:.4g}",
    )  # fmt: skip


def _format_difference(task: TaskScore) -> str:
    return f"{task.difference:+.3f} [{task.low:+.3f}, {task.high:+.3f}]".replace("-", MINUS)


# Reliability diagram: accuracy of the most likely label by its probability. M. H. DeGroot and S. E. Fienberg, "The
# Comparison and Evaluation of Forecasters", The Statistician 32, 1983.


@dataclass(frozen=True)
class ReliabilityDiagramBin:
    """Prompts whose most likely label has a probability within one bin."""

    low: float
    high: float
    confidence: float
    """Mean probability of the most likely label."""
    accuracy: float
    """Accuracy of the most likely label."""
    accuracy_low: float
    """Lower end of the 95 % interval of the accuracy."""
    accuracy_high: float
    n: int


def render_reliability_diagram(bars: Sequence[ReliabilityDiagramBin], error: float) -> Html:
    """Render the diagram and its numbers. All bars of a calibrated model end on the diagonal."""
    parts = []
    for tick in TICKS:
        x, y = f"{LEFT + SQUARE * tick:.0f}", f"{TOP + SQUARE * (1 - tick):.0f}"
        parts.append(tag("line", x1=f"{LEFT}", x2=f"{LEFT + SQUARE}", y1=y, y2=y, class_="grid"))
        parts.append(tag("text", f"{tick:g}", x=f"{LEFT - 8}", y=y, dy="4", text_anchor="end"))
        parts.append(tag("text", f"{tick:g}", x=x, y=f"{TOP + SQUARE + 20}", text_anchor="middle"))
    parts += [part for bar in bars for part in _draw_bin(bar)]
    ends = {"x1": f"{LEFT}", "y1": f"{TOP + SQUARE}", "x2": f"{LEFT + SQUARE}", "y2": f"{TOP}"}
    parts.append(tag("line", **ends, class_="dashed"))
    middle = TOP + SQUARE // 2
    vertical = {"transform": f"rotate(-90 14 {middle})", "x": "14", "y": f"{middle}"}
    across, up = "probability of the most likely label", "accuracy"
    parts.append(tag("text", across, x=f"{LEFT + SQUARE // 2}", y=f"{TOP + SQUARE + 38}", text_anchor="middle"))
    parts.append(tag("text", up, text_anchor="middle", **vertical))
    description = (
        f"Reliability diagram of {format_count(sum(bar.n for bar in bars), 'prompt')}; expected calibration error "
        f"{error:.3f}. The table below has the numbers."
    )
    size = f"0 0 {LEFT + SQUARE + 12} {TOP + SQUARE + 44}"
    svg = tag("svg", *parts, viewBox=size, role="img", aria_label=description, class_="square")
    note = " Bars below the dashed line: overconfident; above: underconfident. Lines: 95 % intervals."
    caption = tag("figcaption", "Reliability.", tag("span", note))
    return tag("figure", caption, svg, _render_numbers(bars))


def _draw_bin(bar: ReliabilityDiagramBin) -> Sequence[Html]:
    place, width = LEFT + SQUARE * bar.low, SQUARE * (bar.high - bar.low)
    high, middle = SQUARE * bar.accuracy, place + width / 2
    tooltip = tag("title", f"{bar.low:g} to {bar.high:g}: {bar.accuracy:.1%} of {format_count(bar.n, 'prompt')} right")
    size = {"x": f"{place:.1f}", "y": f"{TOP + SQUARE - high:.1f}", "width": f"{width:.1f}", "height": f"{high:.1f}"}
    ends = {"y1": f"{TOP + SQUARE * (1 - bar.accuracy_low):.1f}", "y2": f"{TOP + SQUARE * (1 - bar.accuracy_high):.1f}"}
    line = tag("line", x1=f"{middle:.1f}", x2=f"{middle:.1f}", **ends)
    return [tag("rect", tooltip, **size, fill_opacity="0.55"), line]


def _render_numbers(bars: Sequence[ReliabilityDiagramBin]) -> Html:
    rows = [
        (
            f"{bar.low:g} to {bar.high:g}",
            f"{bar.confidence:.3f}",
            f"{bar.accuracy:.3f}",
            f"{bar.accuracy_low:.3f} to {bar.accuracy_high:.3f}",
            f"{bar.n:,}",
        )
        for bar in bars
    ]
    return table(
        "Calibration values", "tnnnn", ("probability", "mean probability", "accuracy", "95 % interval", "prompts"), rows
    )


# Verdicts of the judge model on the candidate's answers (evaluate.judge).


def render_judge_results(report: EvaluationReport) -> Body:
    """Render the judge's preferences by opponent, and the cost of the verdicts."""
    judge_report = report.judge_report
    if judge_report is None:
        return "No judge is configured (evaluate.judge)."
    if not judge_report.comparisons:
        return "There was no model to compare with."
    note = explanation(
        "A judge model chose the better of two answers, each pair in both orders. It may be biased towards the first "
        "position, long answers, or its own style. The verdicts are informative: no gate rule uses them. "
        "Intervals are 95 %."
    )
    rows = [_preference_row(preference) for preference in judge_report.comparisons.values()]
    heads = (
        f"{judge_report.candidate} against",
        "win rate",
        "better / tied / worse",
        "both orders agree",
        "first answer preferred",
    )
    return [
        note,
        html.table("Verdicts of the judge", "tnnnn", heads, rows),
        explanation(" ".join(_describe_judge_result(judge_report))),
    ]


def _preference_row(preference: JudgePreference) -> tuple[Html, ...]:
    notes = [f"{preference.identical_answers:,} identical answers"] if preference.identical_answers else []
    notes += [f"{preference.skipped:,} skipped"] if preference.skipped else []
    name = tag("span", preference.against, tag("small", ", ".join([format_count(preference.rows, "pair"), *notes])))
    counts = tag("span", f"{preference.wins:,} / {preference.ties:,} / {preference.losses:,}")
    return (
        name,
        _render_share(preference.win_rate),
        counts,
        _render_share(preference.agreement),
        _render_share(preference.position_bias, signed=True),
    )


def _render_share(metric: MetricValue | None, signed: bool = False) -> Html:
    if metric is None:
        return tag("span", NONE)
    value, low, high = (_format_percent(share, signed) for share in (metric.value, metric.low, metric.high))
    return tag("span", value, tag("small", f"{low} to {high}"))


def _format_percent(share: float, signed: bool) -> str:
    return f"{100 * share:{'+' if signed else ''}.1f}\u00a0%".replace("-", MINUS)


def _describe_judge_result(judge_report: JudgeReport) -> Iterator[str]:
    yield f"Judge: {judge_report.model} at {judge_report.base_url}, rubric {judge_report.rubric_digest[:12]}."
    counts = [format_count(judge_report.questions, "question"), format_count(judge_report.requests, "request")]
    if judge_report.prompt_tokens is not None and judge_report.tokens is not None:
        counts.append(f"{judge_report.prompt_tokens:,} tokens sent, {judge_report.tokens:,} generated")
    if judge_report.cost is not None:
        counts.append(f"price {judge_report.cost:,.4g}")
    yield f"{', '.join(counts)}."
    for preference in judge_report.comparisons.values():
        if preference.unreadable:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in preference.unreadable.items())
            yield f"Replies without a verdict, {preference.against}: {reasons}."


# The page: one HTML file without external resources, complete without its script.


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
    texts = sample_browser.read_documents(rows, answers, documents)
    sections: dict[str, Sequence[Html] | str] = {
        "Rules": _render_rules(verdict),
        "Comparisons": forest_plot.render_comparisons(verdict, evidence.report),
        "Flipped samples": sample_browser.render_samples(sample_browser.pair_scores(verdict, evidence), texts),
        "Metrics": render_metrics(evidence.report),
        "Forgetting": render_forgetting(evidence.report),
        "Labels": render_labels(evidence.report, evidence.scored_roles, rows, answers),
        "Export parity": render_export(evidence.bundle),
        "Cost and floors": render_costs(evidence, verdict),
        **({"Judge": render_judge_results(evidence.report)} if evidence.report.judge_report is not None else {}),
        "Noise": render_noise(evidence),
        "Lineage": render_lineage(verdict, evidence),
    }
    links = [tag("a", title, href=f"#{html.anchor(title)}") for title in sections]
    contents = tag("nav", *links, aria_label="Sections")
    main = tag("main", *(html.section(title, body) for title, body in sections.items()))
    style, more, script = (path.read_text(encoding="utf-8") for path in (PAGE_STYLE, STYLE, SCRIPT))
    title = f"{verdict.decision}: {verdict.run_id}"
    page = html.document(title, style + more, _render_header(verdict, evidence), contents, main, script=script)
    files.write_atomic(target, page)


def _render_header(verdict: Verdict, evidence: GateEvidence) -> Html:
    outcome, explanation_text = DECISIONS[verdict.decision]
    figures = {
        "Model": (render_digest(verdict.model_digest), evidence.bundle.dtype),
        "Run": (tag("bdi", verdict.run_id), f"adapter {verdict.adapter_digest[:12]}"),
        "Champion": _render_promoted(verdict.champion_digest, evidence.champion.champion),
        "Anchor": _render_promoted(verdict.anchor_digest, evidence.champion.anchor),
    }
    items = [
        tag("div", tag("dt", name), tag("dd", tag("strong", value), tag("small", note)))
        for name, (value, note) in figures.items()
    ]
    if verdict.is_champion:
        explanation_text += " It is already the champion."
    parts = [
        tag("p", "Gate verdict", class_="quiet"),
        tag("h1", render_outcome(outcome, verdict.decision), tag("span", explanation_text), class_="verdict"),
        tag("dl", *items),
    ]
    for name, promoted in (("champion", evidence.champion.champion), ("anchor", evidence.champion.anchor)):
        if promoted and promoted.forced:
            forced = promoted.forced
            text = f"The {name}, version {promoted.version:,}, was promoted despite the verdict {forced.decision} by "
            parts.append(tag("p", render_outcome("invalid", "forced"), " ", text, tag("bdi", forced.actor), ": ",
                             tag("bdi", forced.reason), class_="forced"))  # fmt: skip
    return tag("header", *parts)


def _render_promoted(fingerprint: str | None, promoted: Champion | None) -> tuple[Html, str]:
    if fingerprint is None:
        return Html(NONE), "none"
    return render_digest(
        fingerprint
    ), f"version {promoted.version:,}" if promoted and promoted.model_digest == fingerprint else ""


def _render_rules(verdict: Verdict) -> Sequence[Html] | str:
    if not verdict.reasons:
        return "No rule was applied."
    ordered = sorted(verdict.reasons, key=lambda reason: PRECEDENCE.index(reason.outcome))
    lines = [
        (
            render_outcome(reason.outcome, OUTCOME_WORDS[reason.outcome]),
            tag("span", reason.rule.replace("_", " "), tag("small", tag("bdi", reason.metric.strip("-")))),
            tag("bdi", reason.text),
        )
        for reason in ordered
    ]
    counts = {outcome: sum(reason.outcome == outcome for reason in ordered) for outcome in PRECEDENCE}
    summary = ", ".join(f"{OUTCOME_WORDS[outcome]} {number:,}" for outcome, number in counts.items() if number)
    return [
        tag("p", f"{format_count(len(ordered), 'rule')}: {summary}."),
        html.table("Rules", "ttw", ("", "rule", "result"), lines),
    ]

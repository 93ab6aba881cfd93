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
    SAID,
    WHO,
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

SLICE_FIGURES, CLASSES_SHOWN, CONFUSIONS_SHOWN = 2000, 200, 20
"""Maximum numbers of slice scores, labels, and pairs of confused labels."""

CLASSES_OPEN = 15
"""Number of labels visible before the table is expanded."""

COST_RULES = ("at_least", "above_chance", "budget")

Body = Sequence[Html] | str


def render_metrics(report: EvaluationReport) -> Body:
    """Render every metric of every model with its 95 % interval. Slices are collapsed."""
    models = [who for who in WHO if who in report.scores]
    if not models:
        return "Nothing was measured."
    content = [
        explanation("Value and its 95 % interval. Models are compared by paired tests, not by these intervals."),
        _render_metric_table("Metrics", models, {who: report.scores[who].metrics for who in models}),
    ]
    if slices := list(_render_slices(report, models)):
        content.append(tag("details", *slices))
    return content


def _render_slices(report: EvaluationReport, models: Sequence[ModelRole]) -> Iterator[Html]:
    """Yield a table for each slice, up to the limit of the page."""
    parts = sorted({part for who in models for part in report.scores[who].slices}, key=_part_order)
    if not parts:
        return
    left = SLICE_FIGURES
    tables = []
    for part in parts:
        found = {who: report.scores[who].slices.get(part, {}) for who in models}
        left -= sum(map(len, found.values()))
        if left < 0:
            break
        tables += [tag("h3", tag("bdi", part)), _render_metric_table(part, models, found)]
    summary = f"By slice: {format_count(len(parts), 'slice')}"
    yield tag("summary", summary if left >= 0 else f"{summary}, {len(tables) // 2:,} shown; eval.json has all of them")
    yield from tables


def _part_order(name: str) -> tuple[str, float, str]:
    """Sort `tokens <= 64` before `tokens <= 128`."""
    field, _, value = name.rpartition(" ")
    return (field, float(value), "") if value.isdecimal() else (name, 0.0, value)


def _render_metric_table(
    title: str, models: Sequence[ModelRole], metrics_by_role: Mapping[ModelRole, Mapping[str, MetricValue]]
) -> Html:
    names = sorted({name for by_name in metrics_by_role.values() for name in by_name})
    rows = []
    for name in names:
        one = next(by_name[name] for by_name in metrics_by_role.values() if name in by_name)
        about = ["unknown direction" if one.better == "unknown" else f"{one.better} is better"]
        about += [*([one.unit] if one.unit != "1" else []), f"n {one.n:,}"]
        about += [] if one.chance is None else [f"chance {format_metric(one, one.chance)}"]
        first = tag("span", tag("bdi", name), tag("small", ", ".join(about)))
        rows.append((first, *(render_interval(metrics_by_role[who].get(name)) for who in models)))
    return html.table(title, "t" + "n" * len(models), ("metric", *models), rows)


def render_forgetting(report: EvaluationReport) -> Body:
    """Render perplexity of general text by model, a measure of forgetting."""
    metrics = {who: report.scores[who].metrics[GENERAL] for who in WHO
             if who in report.scores and GENERAL in report.scores[who].metrics}  # fmt: skip
    if not metrics:
        return "Perplexity of general text was not measured."
    most = max(one.high for one in metrics.values()) or 1.0
    reference = metrics.get("base")
    rows = [
        (
            who,
            bar(("train", one.value / most)),
            format_significant(one.value),
            f"{format_significant(one.low)} to {format_significant(one.high)}",
            NONE
            if reference is None or who == "base"
            else f"{one.value / reference.value - 1:+.1%}".replace("-", MINUS).replace("%", "\u00a0%"),
        )
        for who, one in metrics.items()
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
        forms: Roles under which the candidate was scored, preferred one first.
        rows: Test rows.
        answers: Answers of each model, by row id.
    """
    scores = report.scores
    candidate = next((who for who in roles if scores[who].per_class), None)
    if candidate is None:
        return "The answers are not labels."
    reference = next((who for who in ("champion", "base") if who in scores and scores[who].per_class), None)
    before = (f"F1, {reference or 'reference'}", scores[reference].per_class if reference else {})
    candidate_answers = answers.get(candidate, {})
    pairs = Counter(
        (row.expected.strip(), text.strip())
        for row in rows
        for text in candidate_answers.get(row.id, ())
        if row.expected.strip() != text.strip()
    )
    return [*render_label_tables(candidate, scores[candidate].per_class, before), *render_confusions(pairs)]


Classes = Mapping[str, Mapping[str, float]]
"""Precision, recall and other metrics by label."""


def render_label_tables(who: str, results: Classes, before: tuple[str, Classes] | None) -> list[Html]:
    """Render results by label, worst first.

    Args:
        who: Name of the model.
        results: Results by label.
        before: Column title for another model's F1, and its results. None if there is no other model.
    """
    order = sorted(results, key=lambda name: (results[name].get("f1", 0.0), name))
    lines = [
        (
            tag("bdi", name),
            bar(("train", results[name].get("f1", 0.0))),
            *(_format_share(results[name], key) for key in ("f1", "precision", "recall", "average_precision")),
            *([_format_share(before[1].get(name, {}), "f1")] if before else []),
            f"{results[name].get('support', 0):,.0f}",
        )
        for name in order[:CLASSES_SHOWN]
    ]
    heads = ("label", "", "F1", "precision", "recall", "average precision", *([before[0]] if before else []), "rows")
    kinds = "ts" + "n" * (len(heads) - 2)
    content = [
        explanation(f"Results of {who}, worst first{_describe_rest(len(order), CLASSES_SHOWN)}."),
        html.table("Worst labels", kinds, heads, lines[:CLASSES_OPEN]),
    ]
    if rest := lines[CLASSES_OPEN:]:
        table = html.table("Other labels", kinds, heads, rest)
        content.append(tag("details", tag("summary", f"{len(rest):,} more"), table))
    return content


def _describe_rest(number: int, most: int) -> str:
    return f"; {number - most:,} of {number:,} labels are omitted" if number > most else ""


def _format_share(metrics: Mapping[str, float], name: str) -> str:
    return f"{metrics[name]:.3f}" if name in metrics else NONE


def render_confusions(pairs: Counter[tuple[str, str]]) -> Iterator[Html]:
    """Render the most frequent confusions. `pairs` counts (expected, answered) labels."""
    yield tag("h3", "Confused labels")
    if not pairs:
        yield explanation("No label was confused with another.")
        return
    often = sorted(pairs.items(), key=lambda item: (-item[1], item[0]))[:CONFUSIONS_SHOWN]
    lines = [
        (tag("bdi", right), tag("bdi", answered[:80] or "(nothing)"), f"{count:,}")
        for (right, answered), count in often
    ]
    yield html.table("Confused labels", "ttn", ("expected", "answered", "times"), lines)
    yield explanation(
        f"{len(often):,} of {format_count(len(pairs), 'pair')}, {sum(pairs.values()):,} wrong answers in total."
    )


def render_costs(evidence: GateEvidence, verdict: Verdict) -> Body:
    """Render the results of floors and budgets, and the inference cost."""
    content = []
    if rules := [reason for reason in verdict.reasons if reason.rule in COST_RULES]:
        items = (tag("li", f"{reason.rule.replace('_', ' ')}: ", tag("bdi", reason.text)) for reason in rules)
        content.append(tag("ul", *items))
    content.append(tag("p", f"The export has {format_bytes(evidence.bundle.size_bytes)}, {evidence.bundle.dtype}."))
    rows = [
        (who, f"{cost.latency_s:.3g}", f"{cost.latency_p95_s:.3g}", f"{cost.tokens_per_s:.4g}",
         format_bytes(cost.memory_bytes), f"{cost.rows:,}", cost.device)
        for who, cost in ((who, evidence.report.costs[who]) for who in WHO if who in evidence.report.costs)
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
    first = next((one for one in evidence.report.scores.values() if one.model_digest == noise.model_digest), None)
    rows = [
        (
            tag("bdi", name),
            render_interval(first.metrics.get(name)) if first else NONE,
            render_interval(metric),
            _describe_change(evidence, name),
        )
        for name, metric in sorted(noise.metrics.items())
    ]
    once, again = noise.batch_rows
    note = f"Model {noise.model_digest[:12]}, {noise.model_format}, with batches of {once:,} and {again:,} rows."
    heads = ("metric", "first", "again", "samples that differ")
    return [explanation(note), html.table("Evaluation noise", "tnnn", heads, rows)]


def _describe_change(evidence: GateEvidence, metric: str) -> str:
    again = evidence.noise_samples.get(metric, {})
    who = next((one for one in evidence.scored_roles if metric in evidence.samples.get(one, {})), None)
    first = evidence.samples[who][metric] if who else {}
    shared = [sample for sample in again if sample in first]
    return f"{sum(again[one].value != first[one].value for one in shared):,} of {len(shared):,}" if shared else NONE


def _describe_tolerance(verdict: Verdict) -> str:
    return f"; at most {verdict.max_test_set_uses:,} allowed" if verdict.max_test_set_uses else ""


def render_lineage(verdict: Verdict, evidence: GateEvidence) -> Body:
    """Render digests of everything that the verdict depends on, contracts of the scores, and notes."""
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
        f"{_describe_tolerance(verdict)}",
    }
    if verdict.earlier_decisions:
        facts["Earlier decisions"] = describe_changed_rules(verdict)
    if champion.champion:
        facts["Champion version"] = f"{champion.champion.version:,}, run {champion.champion.run_id}"
    if champion.ledger:
        facts["Last ledger entry"] = tag("code", champion.ledger)
    content = [_render_facts(facts), tag("h3", "Scores")]
    rows = [
        (who, scores.model_format, render_digest(scores.model_digest), render_digest(scores.contract))
        for who, scores in ((who, report.scores[who]) for who in WHO if who in report.scores)
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


VALUE_SHOWN = 300
"""Maximum number of characters of a contract value."""


def _flatten_contract(document: Mapping[str, object], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted keys and values of a contract, sorted."""
    for name, value in sorted(document.items()):
        if isinstance(value, Mapping) and value:
            yield from _flatten_contract(value, f"{before}{name}.")
        else:
            text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            cut = f"{text[:VALUE_SHOWN]}... ({len(text):,} characters)" if len(text) > VALUE_SHOWN else text or NONE
            yield f"{before}{name}", cut


# Export: the merge, and every format compared with base + adapter.

FormsBody = Sequence[Html]


def render_forms(bundle: ModelBundle) -> FormsBody:
    """Render the merge and its parity, followed by each format as tested in its own runtime."""
    content = [*_render_merge(bundle.parity)]
    if bundle.merge is not None:
        content += _render_merge_trials(bundle.merge, bundle.merge_base)
    if bundle.artifacts:
        content += [
            tag("h3", "Forms"),
            explanation(
                "Every format was loaded in its runtime and compared with base + adapter on the same inputs: "
                "divergence and equal "
                "tokens at answer positions, answers to the gate's samples with a paired 95 % interval of the "
                "difference, and texts that its own tokenizer splits identically."
            ),
            _render_form_table(bundle.artifacts),
        ]
        content += [tag("p", f"{one.name}: {note}") for one in bundle.artifacts for note in one.notes]
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
    how = "tensor by tensor, shard by shard" if merge.streamed else "in memory"
    yield tag("h3", "Merge")
    yield explanation(
        f"{merge.changed:,} tensors changed, {how}. Each module received the same input as in base + adapter, and its "
        "outputs were compared."
    )
    rows = [
        (
            f"into the {trial.merge_base} base" + (", taken" if trial.merge_base == chosen else ""),
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
        "Merged", "maximum logit difference", "divergence, nats", "same token", "modules + layers compared",
        "largest deviation at", "distance from the base",
    )  # fmt: skip
    yield html.table("Merge variants", "tnnnntn", heads, rows)


def _render_form_table(artifacts: Sequence[ExportArtifact]) -> Html:
    heads = (
        "Form", "runtime", "size", "divergence, nats", "maximum difference, nats", "same token", "perplexity",
        "answers", "difference", "same answers", "texts", "tokens/s",
    )  # fmt: skip
    return html.table("Forms", "ttnnnnnnnnnn", heads, map(_form_row, artifacts))


def _form_row(one: ExportArtifact) -> Sequence[str]:
    near, task = one.distance, one.task
    return (
        one.name, one.runtime, format_bytes(one.size_bytes),
        format_significant(near.kl), format_significant(near.max_difference),
        format_percentage(near.greedy_agreement, 1), f"{near.perplexity:.4g} ({near.reference_perplexity:.4g})",
        f"{task.value:.4g} {task.metric}" if task else NONE, _format_difference(task) if task else NONE,
        format_percentage(task.same_answers, 1) if task else NONE, f"{one.texts_tokenised:,} of {one.texts:,}",
        f"{one.tokens_per_second:.4g}",
    )  # fmt: skip


def _format_difference(task: TaskScore) -> str:
    return f"{task.difference:+.3f} [{task.low:+.3f}, {task.high:+.3f}]".replace("-", MINUS)


# Reliability diagram: accuracy of the most likely label by its probability. M. H. DeGroot and S. E. Fienberg, "The
# Comparison and Evaluation of Forecasters", The Statistician 32, 1983.

LEFT, TOP, SQUARE = 56, 10, 360
"""Geometry of the diagram, in its own pixels."""
TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class ReliabilityDiagramBin:
    """Prompts whose most likely label has a probability within one bin."""

    low: float
    high: float
    confidence: float
    """Mean probability."""
    accuracy: float
    """Accuracy of the most likely label."""
    accuracy_low: float
    accuracy_high: float
    """Upper end of the 95 % interval of the accuracy."""
    n: int


def render_reliability_diagram(bars: Sequence[ReliabilityDiagramBin], error: float) -> Html:
    """Render the diagram and its numbers. For a calibrated model all bars end on the diagonal."""
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
    turned = {"transform": f"rotate(-90 14 {middle})", "x": "14", "y": f"{middle}"}
    sure, right = "probability of the most likely label", "accuracy"
    parts.append(tag("text", sure, x=f"{LEFT + SQUARE // 2}", y=f"{TOP + SQUARE + 38}", text_anchor="middle"))
    parts.append(tag("text", right, text_anchor="middle", **turned))
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
        "Calibration values", "tnnnn", ("probability", "mean of it", "right", "95 % interval", "prompts"), rows
    )


# Verdicts of the judge model on the candidate's answers (evaluate.judge).


def render_judge_results(report: EvaluationReport) -> Body:
    """Render a row for each opponent, and the cost of the verdicts."""
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
    rows = [_evidence_row(one) for one in judge_report.comparisons.values()]
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


def _evidence_row(one: JudgePreference) -> tuple[Html, ...]:
    left = [f"{one.identical_answers:,} identical answers"] if one.identical_answers else []
    left += [f"{one.skipped:,} skipped"] if one.skipped else []
    name = tag("span", one.against, tag("small", ", ".join([format_count(one.rows, "pair"), *left])))
    counts = tag("span", f"{one.wins:,} / {one.ties:,} / {one.losses:,}")
    return (
        name,
        _render_share(one.win_rate),
        counts,
        _render_share(one.agreement),
        _render_share(one.position_bias, signed=True),
    )


def _render_share(metric: MetricValue | None, signed: bool = False) -> Html:
    if metric is None:
        return tag("span", NONE)
    value, low, high = (_format_percent(one, signed) for one in (metric.value, metric.low, metric.high))
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
    for one in judge_report.comparisons.values():
        if one.unreadable:
            why = ", ".join(f"{count:,} {reason}" for reason, count in one.unreadable.items())
            yield f"Replies without a verdict, {one.against}: {why}."


# The page: one HTML file without external resources, complete without its script.

PAGE_STYLE, STYLE, SCRIPT = (Path(__file__).with_name(name) for name in ("page.css", "gate.css", "gate.js"))

ANSWER: dict[Decision, tuple[Outcome, str]] = {
    "PROMOTE": ("pass", "All rules pass: this model may be promoted."),
    "HOLD": ("undecided", "Not enough evidence: do not promote yet."),
    "REJECT": ("fail", "A rule fails: do not promote this model."),
    "INVALID": ("invalid", "The comparison is invalid: fix the inputs and run the gate again."),
}

GRAVITY: tuple[Outcome, ...] = ("invalid", "fail", "undecided", "pass")
"""Outcomes in order of precedence."""


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
        "Export parity": render_forms(evidence.bundle),
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
    outcome, answer = ANSWER[verdict.decision]
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
        answer += " It is already the champion."
    parts = [
        tag("p", "Gate verdict", class_="quiet"),
        tag("h1", render_outcome(outcome, verdict.decision), tag("span", answer), class_="verdict"),
        tag("dl", *items),
    ]
    for name, one in (("champion", evidence.champion.champion), ("anchor", evidence.champion.anchor)):
        if one and one.forced:
            forced = f"The {name}, version {one.version:,}, was promoted despite the verdict {one.forced.decision} by "
            parts.append(tag("p", render_outcome("invalid", "forced"), " ", forced, tag("bdi", one.forced.actor), ": ",
                             tag("bdi", one.forced.reason), class_="forced"))  # fmt: skip
    return tag("header", *parts)


def _render_promoted(fingerprint: str | None, one: Champion | None) -> tuple[Html, str]:
    if fingerprint is None:
        return Html(NONE), "none"
    return render_digest(fingerprint), f"version {one.version:,}" if one and one.model_digest == fingerprint else ""


def _render_rules(verdict: Verdict) -> Sequence[Html] | str:
    if not verdict.reasons:
        return "No rule was applied."
    ordered = sorted(verdict.reasons, key=lambda reason: GRAVITY.index(reason.outcome))
    lines = [
        (
            render_outcome(reason.outcome, SAID[reason.outcome]),
            tag("span", reason.rule.replace("_", " "), tag("small", tag("bdi", reason.metric.strip("-")))),
            tag("bdi", reason.text),
        )
        for reason in ordered
    ]
    counts = {outcome: sum(reason.outcome == outcome for reason in ordered) for outcome in GRAVITY}
    summed = ", ".join(f"{SAID[outcome]} {number:,}" for outcome, number in counts.items() if number)
    return [
        tag("p", f"{format_count(len(ordered), 'rule')}: {summed}."),
        html.table("Rules", "ttw", ("", "rule", "result"), lines),
    ]

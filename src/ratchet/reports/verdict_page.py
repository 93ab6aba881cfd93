"""What was measured beside the comparisons: metrics, slices, forgetting, labels, parity, costs."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ratchet.config.units import format_bytes
from ratchet.gate.evidence import GateEvidence
from ratchet.gate.messages import describe_changed_rules
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
    Who,
)
from ratchet.storage.records.export import ExportArtifact, MergeParity, MergeReport, ModelBundle, TaskScore
from ratchet.storage.records.gate import Champion, Decision, Outcome, Verdict

GENERAL = "general_perplexity"

SLICE_FIGURES, CLASSES_SHOWN, CONFUSIONS_SHOWN = 2000, 200, 20
"""Figures of parts of the rows, labels, and pairs of labels that are taken for each other."""

CLASSES_OPEN = 15
"""Labels that are seen before the table is opened."""

COST_RULES = ("at_least", "above_chance", "budget")

Body = Sequence[Html] | str


def render_metrics(report: EvaluationReport) -> Body:
    """Every metric of every model, with its 95 % interval; folded away, those of parts of the rows."""
    models = [who for who in WHO if who in report.scores]
    if not models:
        return "Nothing was measured."
    shown = [
        explanation("Value, and its 95 % interval by itself. Two models are compared pair by pair, not by these."),
        _render_metric_table("Metrics", models, {who: report.scores[who].metrics for who in models}),
    ]
    if slices := list(_render_slices(report, models)):
        shown.append(tag("details", *slices))
    return shown


def _render_slices(report: EvaluationReport, models: Sequence[Who]) -> Iterator[Html]:
    """A table for each part of the rows, as many as a page can bear."""
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
    said = f"By part of the rows: {format_count(len(parts), 'part')}"
    yield tag("summary", said if left >= 0 else f"{said}, {len(tables) // 2:,} shown; eval.json has all")
    yield from tables


def _part_order(name: str) -> tuple[str, float, str]:
    """`tokens <= 64` before `tokens <= 128`."""
    field, _, value = name.rpartition(" ")
    return (field, float(value), "") if value.isdecimal() else (name, 0.0, value)


def _render_metric_table(what: str, models: Sequence[Who], found: Mapping[Who, Mapping[str, MetricValue]]) -> Html:
    names = sorted({name for by_name in found.values() for name in by_name})
    rows = []
    for name in names:
        one = next(by_name[name] for by_name in found.values() if name in by_name)
        about = ["direction not known" if one.better == "unknown" else f"{one.better} is better"]
        about += [*([one.unit] if one.unit != "1" else []), f"n {one.n:,}"]
        about += [] if one.chance is None else [f"chance {format_metric(one, one.chance)}"]
        first = tag("span", tag("bdi", name), tag("small", ", ".join(about)))
        rows.append((first, *(render_interval(found[who].get(name)) for who in models)))
    return html.table(what, "t" + "n" * len(models), ("metric", *models), rows)


def render_forgetting(report: EvaluationReport) -> Body:
    """Perplexity of general text by model: what was unlearned."""
    found = {who: report.scores[who].metrics[GENERAL] for who in WHO
             if who in report.scores and GENERAL in report.scores[who].metrics}  # fmt: skip
    if not found:
        return "Perplexity of general text was not measured."
    most = max(one.high for one in found.values()) or 1.0
    reference = found.get("base")
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
        for who, one in found.items()
    ]
    blocks = format_count(next(iter(found.values())).n, "block")
    return [
        explanation(f"Perplexity of text that has nothing to do with the task, on the same {blocks} for every model."),
        html.table("Perplexity of general text", "tbnnn", ("model", "", "perplexity", "95 %", "above the base"), rows),
    ]


def render_labels(
    report: EvaluationReport,
    forms: Sequence[Who],
    rows: Sequence[EvaluatedRow],
    answers: Mapping[Who, Mapping[str, Sequence[str]]],
) -> Body:
    """Results by label, the worst first, and which labels are taken for each other.

    Args:
        report: of the evaluation.
        forms: names under which the candidate was scored, the preferred one first.
        rows: the test rows.
        answers: of each model, by id of the row.
    """
    scores = report.scores
    candidate = next((who for who in forms if scores[who].per_class), None)
    if candidate is None:
        return "Answers are not labels."
    reference = next((who for who in ("champion", "base") if who in scores and scores[who].per_class), None)
    before = (f"F1, {reference or 'reference'}", scores[reference].per_class if reference else {})
    given = answers.get(candidate, {})
    pairs = Counter(
        (row.expected.strip(), text.strip())
        for row in rows
        for text in given.get(row.id, ())
        if row.expected.strip() != text.strip()
    )
    return [*render_label_tables(candidate, scores[candidate].per_class, before), *render_confusions(pairs)]


Classes = Mapping[str, Mapping[str, float]]
"""Precision, recall and the like by label."""


def render_label_tables(who: str, found: Classes, before: tuple[str, Classes] | None) -> list[Html]:
    """Results by label, the worst first.

    Args:
        who: answered.
        found: by label.
        before: what another model's F1 is called, and its results; None: there is no other.
    """
    order = sorted(found, key=lambda name: (found[name].get("f1", 0.0), name))
    lines = [
        (
            tag("bdi", name),
            bar(("train", found[name].get("f1", 0.0))),
            *(_format_share(found[name], key) for key in ("f1", "precision", "recall", "average_precision")),
            *([_format_share(before[1].get(name, {}), "f1")] if before else []),
            f"{found[name].get('support', 0):,.0f}",
        )
        for name in order[:CLASSES_SHOWN]
    ]
    heads = ("label", "", "F1", "precision", "recall", "average precision", *([before[0]] if before else []), "rows")
    kinds = "ts" + "n" * (len(heads) - 2)
    shown = [
        explanation(f"Of {who}, the worst first{_describe_rest(len(order), CLASSES_SHOWN)}."),
        html.table("The worst labels", kinds, heads, lines[:CLASSES_OPEN]),
    ]
    if rest := lines[CLASSES_OPEN:]:
        table = html.table("The other labels", kinds, heads, rest)
        shown.append(tag("details", tag("summary", f"{len(rest):,} more"), table))
    return shown


def _describe_rest(number: int, most: int) -> str:
    return f"; {number - most:,} of {number:,} labels are not shown" if number > most else ""


def _format_share(found: Mapping[str, float], name: str) -> str:
    return f"{found[name]:.3f}" if name in found else NONE


def render_confusions(pairs: Counter[tuple[str, str]]) -> Iterator[Html]:
    """Labels that are taken for others most often; `pairs` counts what was expected and what was answered instead."""
    yield tag("h3", "Taken for each other")
    if not pairs:
        yield explanation("No label was taken for another.")
        return
    often = sorted(pairs.items(), key=lambda item: (-item[1], item[0]))[:CONFUSIONS_SHOWN]
    lines = [
        (tag("bdi", right), tag("bdi", given[:80] or "(nothing)"), f"{count:,}") for (right, given), count in often
    ]
    yield html.table("Labels taken for each other", "ttn", ("expected", "answered", "times"), lines)
    yield explanation(
        f"{len(often):,} of {format_count(len(pairs), 'pair')}, {sum(pairs.values()):,} wrong answers in all."
    )


def render_costs(evidence: GateEvidence, verdict: Verdict) -> Body:
    """Floors and budgets as the rules found them, and what answering costs."""
    shown = []
    if rules := [reason for reason in verdict.reasons if reason.rule in COST_RULES]:
        listed = (tag("li", f"{reason.rule.replace('_', ' ')}: ", tag("bdi", reason.text)) for reason in rules)
        shown.append(tag("ul", *listed))
    shown.append(tag("p", f"The export has {format_bytes(evidence.bundle.size_bytes)}, {evidence.bundle.dtype}."))
    rows = [
        (who, f"{cost.latency_s:.3g}", f"{cost.latency_p95_s:.3g}", f"{cost.tokens_per_s:.4g}",
         format_bytes(cost.memory_bytes), f"{cost.rows:,}", cost.device)
        for who, cost in ((who, evidence.report.costs[who]) for who in WHO if who in evidence.report.costs)
    ]  # fmt: skip
    if not rows:
        return [*shown, explanation("Latency and memory were not measured (evaluate.latency_rows).")]
    heads = ("model", "median s", "95 % within s", "tokens/s", "peak memory", "answers", "device")
    return [*shown, html.table("Costs of an answer", "tnnnnnt", heads, rows)]


def render_noise(evidence: GateEvidence) -> Body:
    """The candidate scored twice, if it was: what differs is no merit of anybody."""
    found = evidence.noise
    if found is None:
        return "Not measured; `ratchet gate --aa` scores the candidate a second time."
    first = next((one for one in evidence.report.scores.values() if one.model_digest == found.model_digest), None)
    rows = [
        (
            tag("bdi", name),
            render_interval(first.metrics.get(name)) if first else NONE,
            render_interval(metric),
            _describe_change(evidence, name),
        )
        for name, metric in sorted(found.metrics.items())
    ]
    once, again = found.batch_rows
    said = f"Model {found.model_digest[:12]}, {found.form}, with {once:,} and {again:,} rows at once."
    heads = ("metric", "first", "again", "samples that differ")
    return [explanation(said), html.table("Noise of the evaluation", "tnnn", heads, rows)]


def _describe_change(evidence: GateEvidence, metric: str) -> str:
    again = evidence.noise_samples.get(metric, {})
    who = next((one for one in evidence.scored_forms if metric in evidence.samples.get(one, {})), None)
    first = evidence.samples[who][metric] if who else {}
    shared = [sample for sample in again if sample in first]
    return f"{sum(again[one].value != first[one].value for one in shared):,} of {len(shared):,}" if shared else NONE


def _describe_tolerance(verdict: Verdict) -> str:
    return f"; {verdict.lookups_allowed:,} are allowed" if verdict.lookups_allowed else ""


def render_lineage(verdict: Verdict, evidence: GateEvidence) -> Body:
    """Digests of all that this verdict is about, the contracts of the scores, and remarks."""
    report, bundle, champion = evidence.report, evidence.bundle, evidence.champion
    facts: dict[str, str] = {
        "Run": tag("bdi", verdict.run_id),
        "Model": tag("code", verdict.model_digest),
        "Adapter": tag("code", verdict.adapter_digest),
        "Base": tag("code", bundle.base_digest),
        "Base was held as": bundle.base_form or NONE,
        "Merged from": bundle.merge_base,
        "Data": tag("code", bundle.data_digest),
        "Champion": tag("code", verdict.champion_digest) if verdict.champion_digest else "none",
        "Anchor": tag("code", verdict.anchor_digest) if verdict.anchor_digest else "none",
        "Gate set": tag("code", verdict.gate_set or report.gate_set),
        "Looked at with it": f"{format_count(evidence.lookups, 'model')}, this one included"
        f"{_describe_tolerance(verdict)}",
    }
    if verdict.judged_before:
        facts["Judged before"] = describe_changed_rules(verdict)
    if champion.champion:
        facts["Champion is version"] = f"{champion.champion.version:,}, of run {champion.champion.run_id}"
    if champion.ledger:
        facts["Promotion ledger ends with"] = tag("code", champion.ledger)
    shown = [_render_facts(facts), tag("h3", "Scores")]
    rows = [
        (who, scores.form, render_digest(scores.model_digest), render_digest(scores.contract))
        for who, scores in ((who, report.scores[who]) for who in WHO if who in report.scores)
    ]
    shown.append(html.table("Models scored", "tttt", ("model", "form", "digest", "contract"), rows))
    for fingerprint, contract in sorted(report.contracts.items()):
        listed = _render_facts({name: tag("bdi", value) for name, value in _flatten_contract(contract)})
        shown.append(tag("details", tag("summary", f"Contract {fingerprint[:12]}"), listed))
    if report.chosen_by:
        listed_sets = (
            tag("li", f"{name}: {rows:,} of its samples are in the gate set")
            for name, rows in sorted(report.chosen_by.items())
        )
        shown += [tag("h3", "Sets by which models are chosen"), tag("ul", *listed_sets)]
    if report.notes:
        shown += [tag("h3", "Notes"), tag("ul", *(tag("li", tag("bdi", note)) for note in report.notes))]
    return shown


def _render_facts(facts: Mapping[str, str]) -> Html:
    pairs = ((tag("dt", name), tag("dd", value)) for name, value in facts.items())
    return tag("dl", *(part for pair in pairs for part in pair), class_="facts")


VALUE_SHOWN = 300
"""Characters of a value of a contract."""


def _flatten_contract(document: Mapping[str, object], before: str = "") -> Iterator[tuple[str, str]]:
    """A contract as dotted keys and values, in an order of their own."""
    for name, value in sorted(document.items()):
        if isinstance(value, Mapping) and value:
            yield from _flatten_contract(value, f"{before}{name}.")
        else:
            text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            cut = f"{text[:VALUE_SHOWN]}... ({len(text):,} characters)" if len(text) > VALUE_SHOWN else text or NONE
            yield f"{before}{name}", cut


# The export on the gate's page: the merge, and every form beside base + adapter.

FormsBody = Sequence[Html]


def render_forms(bundle: ModelBundle) -> FormsBody:
    """What was merged and how close it is; then the forms, each as its own runtime answered."""
    shown = [*_render_merge(bundle.parity)]
    if bundle.merge is not None:
        shown += _render_merge_trials(bundle.merge, bundle.merge_base)
    if bundle.artifacts:
        shown += [
            tag("h3", "Forms"),
            explanation(
                "Every form was opened where it is used and asked the same as base and adapter: divergence and same "
                "tokens at answer positions, answers to the gate's samples with a paired 95 % interval of the "
                "difference, texts that its own tokenizer cuts alike."
            ),
            _render_form_table(bundle.artifacts),
        ]
        shown += [tag("p", f"{one.name}: {note}") for one in bundle.artifacts for note in one.notes]
    return shown


def _render_merge(found: MergeParity) -> Iterator[Html]:
    rows = [
        ("largest difference of a logit", format_significant(found.max_logit_difference)),
        ("mean difference of logits", format_significant(found.mean_logit_difference)),
        ("same most likely token", format_percentage(found.greedy_agreement, 1)),
        ("rows", f"{found.rows:,}"),
        ("positions compared", f"{found.tokens:,}"),
    ]
    yield explanation("The merged model, read back from disk, against base and adapter on the same test rows.")
    yield html.table("Export parity", "tn", ("", "measured"), rows)


def _render_merge_trials(merge: MergeReport, taken: str) -> Iterator[Html]:
    how = "tensor by tensor, shards to shards" if merge.streamed else "as a whole in memory"
    yield tag("h3", "Merge")
    yield explanation(
        f"{merge.changed:,} tensors changed, {how}. Each module was given what it is given in base + adapter, and its "
        "output compared."
    )
    rows = [
        (
            f"into the {trial.merge_base} base" + (", taken" if trial.merge_base == taken else ""),
            format_significant(trial.parity.max_logit_difference), format_significant(trial.kl),
            format_percentage(trial.parity.greedy_agreement, 1),
            f"{trial.check.modules:,} + {trial.check.layers:,}",
            (f"{format_significant(trial.check.worst[0].max_difference)} in {trial.check.worst[0].name}"
             if trial.check.worst else NONE),
            format_significant(trial.check.moved),
        )
        for trial in merge.trials
    ]  # fmt: skip
    heads = (
        "Merged", "largest difference of a logit", "divergence, nats", "same token", "modules + layers compared",
        "furthest module", "moved from the bare base",
    )  # fmt: skip
    yield html.table("Ways to merge", "tnnnntn", heads, rows)


def _render_form_table(artifacts: Sequence[ExportArtifact]) -> Html:
    heads = (
        "Form", "runs in", "size", "divergence, nats", "largest difference, nats", "same token", "perplexity",
        "answers", "difference", "same answers", "texts", "tokens/s",
    )  # fmt: skip
    return html.table("Forms", "ttnnnnnnnnnn", heads, map(_form_row, artifacts))


def _form_row(one: ExportArtifact) -> Sequence[str]:
    near, task = one.closeness, one.task
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


# Reliability diagram: how often the likeliest label is right, by how sure the model is of it.
#
# M. H. DeGroot and S. E. Fienberg, "The Comparison and Evaluation of Forecasters", The Statistician 32, 1983.

LEFT, TOP, SQUARE = 56, 10, 360
"""Of the picture, in pixels of its own."""
TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class ReliabilityDiagramBin:
    """Prompts whose likeliest label has a probability in one range."""

    low: float
    high: float
    confidence: float
    """Mean probability."""
    right: float
    """Share of prompts of which the label is right."""
    least: float
    most: float
    """95 % interval of that share."""
    n: int


def render_reliability_diagram(bars: Sequence[ReliabilityDiagramBin], error: float) -> Html:
    """The diagram with its numbers. A model that means its probabilities has all bars end on the diagonal."""
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
    sure, right = "probability of the likeliest label", "share that is right"
    parts.append(tag("text", sure, x=f"{LEFT + SQUARE // 2}", y=f"{TOP + SQUARE + 38}", text_anchor="middle"))
    parts.append(tag("text", right, text_anchor="middle", **turned))
    said = (
        f"Reliability diagram of {format_count(sum(bar.n for bar in bars), 'prompt')}; expected calibration error "
        f"{error:.3f}. The table below has numbers."
    )
    size = f"0 0 {LEFT + SQUARE + 12} {TOP + SQUARE + 44}"
    drawn = tag("svg", *parts, viewBox=size, role="img", aria_label=said, class_="square")
    note = " Bars below the dashed line: surer than right; above it: righter than sure. Lines: 95 % intervals."
    caption = tag("figcaption", "Reliability.", tag("span", note))
    return tag("figure", caption, drawn, _render_numbers(bars))


def _draw_bin(bar: ReliabilityDiagramBin) -> Sequence[Html]:
    place, width = LEFT + SQUARE * bar.low, SQUARE * (bar.high - bar.low)
    high, middle = SQUARE * bar.right, place + width / 2
    said = tag("title", f"{bar.low:g} to {bar.high:g}: {bar.right:.1%} of {format_count(bar.n, 'prompt')} right")
    size = {"x": f"{place:.1f}", "y": f"{TOP + SQUARE - high:.1f}", "width": f"{width:.1f}", "height": f"{high:.1f}"}
    ends = {"y1": f"{TOP + SQUARE * (1 - bar.least):.1f}", "y2": f"{TOP + SQUARE * (1 - bar.most):.1f}"}
    line = tag("line", x1=f"{middle:.1f}", x2=f"{middle:.1f}", **ends)
    return [tag("rect", said, **size, fill_opacity="0.55"), line]


def _render_numbers(bars: Sequence[ReliabilityDiagramBin]) -> Html:
    rows = [
        (
            f"{bar.low:g} to {bar.high:g}",
            f"{bar.confidence:.3f}",
            f"{bar.right:.3f}",
            f"{bar.least:.3f} to {bar.most:.3f}",
            f"{bar.n:,}",
        )
        for bar in bars
    ]
    return table(
        "Calibration in numbers", "tnnnn", ("probability", "mean of it", "right", "95 % interval", "prompts"), rows
    )


# What another model said of the candidate's answers (evaluate.judge), for reports and the gate's page.


def render_judge_results(report: EvaluationReport) -> Body:
    """A row an opponent, and what the verdicts cost."""
    found = report.judged
    if found is None:
        return "No judge was asked (evaluate.judge)."
    if not found.comparisons:
        return "There was no model to compare with."
    said = explanation(
        "Another model said which of two answers is better, each pair in both orders; it may like what comes first, "
        "long answers, or its own kind. It informs: no rule of the gate reads it. Intervals of 95 %."
    )
    rows = [_evidence_row(one) for one in found.comparisons.values()]
    heads = (f"{found.candidate} against", "win rate", "better / tied / worse", "both orders agree", "for the first")
    return [
        said,
        html.table("Verdicts of the judge", "tnnnn", heads, rows),
        explanation(" ".join(_describe_judge_result(found))),
    ]


def _evidence_row(one: JudgePreference) -> tuple[Html, ...]:
    left = [f"{one.equal:,} the same text"] if one.equal else []
    left += [f"{one.left_out:,} left out"] if one.left_out else []
    name = tag("span", one.against, tag("small", ", ".join([format_count(one.rows, "pair"), *left])))
    counts = tag("span", f"{one.wins:,} / {one.ties:,} / {one.losses:,}")
    return (
        name,
        _render_share(one.win_rate),
        counts,
        _render_share(one.agreement),
        _render_share(one.first_bias, signed=True),
    )


def _render_share(metric: MetricValue | None, signed: bool = False) -> Html:
    if metric is None:
        return tag("span", NONE)
    value, low, high = (_format_percent(one, signed) for one in (metric.value, metric.low, metric.high))
    return tag("span", value, tag("small", f"{low} to {high}"))


def _format_percent(share: float, signed: bool) -> str:
    return f"{100 * share:{'+' if signed else ''}.1f}\u00a0%".replace("-", MINUS)


def _describe_judge_result(found: JudgeReport) -> Iterator[str]:
    yield f"Judge: {found.model} at {found.address}, rubric {found.rubric_digest[:12]}."
    counts = [format_count(found.questions, "question"), format_count(found.requests, "request")]
    if found.prompt_tokens is not None and found.tokens is not None:
        counts.append(f"{found.prompt_tokens:,} tokens sent, {found.tokens:,} written")
    if found.cost is not None:
        counts.append(f"price {found.cost:,.4g}")
    yield f"{', '.join(counts)}."
    for one in found.comparisons.values():
        if one.unreadable:
            why = ", ".join(f"{count:,} {reason}" for reason, count in one.unreadable.items())
            yield f"Replies without a verdict, {one.against}: {why}."


# The evidence page: what the gate found, for people. One HTML file that loads nothing, whole without its script.

HOUSE_STYLE, STYLE, SCRIPT = (Path(__file__).with_name(name) for name in ("page.css", "gate.css", "gate.js"))

ANSWER: dict[Decision, tuple[Outcome, str]] = {
    "PROMOTE": ("pass", "Every rule holds: this model may be promoted."),
    "HOLD": ("undecided", "The samples cannot decide: do not promote yet."),
    "REJECT": ("fail", "A rule clearly fails: this model must not ship."),
    "INVALID": ("invalid", "The comparison means nothing as it is: mend it, then ask again."),
}

GRAVITY: tuple[Outcome, ...] = ("invalid", "fail", "undecided", "pass")
"""Rules in the order in which they decide."""


def write(
    verdict: Verdict,
    evidence: GateEvidence,
    rows: Sequence[EvaluatedRow],
    answers: Mapping[Who, Mapping[str, Sequence[str]]],
    documents: Documents,
    target: Path,
) -> None:
    """Write the page. Equal arguments give equal bytes.

    Args:
        verdict: the gate's answer.
        evidence: what it judged by.
        rows: the test rows.
        answers: of each model, by id of the row.
        documents: of the harness {id, prompt, target, answers, scores}, by model and task.
        target: the HTML file.
    """
    texts = sample_browser.read_documents(rows, answers, documents)
    sections: dict[str, Sequence[Html] | str] = {
        "Rules": _render_rules(verdict),
        "Comparisons": forest_plot.render_comparisons(verdict, evidence.report),
        "Flipped samples": sample_browser.render_samples(sample_browser.pair_scores(verdict, evidence), texts),
        "Metrics": render_metrics(evidence.report),
        "Forgetting": render_forgetting(evidence.report),
        "Labels": render_labels(evidence.report, evidence.scored_forms, rows, answers),
        "Export parity": render_forms(evidence.bundle),
        "Costs and floors": render_costs(evidence, verdict),
        **({"Judge": render_judge_results(evidence.report)} if evidence.report.judged is not None else {}),
        "Noise": render_noise(evidence),
        "Lineage": render_lineage(verdict, evidence),
    }
    links = [tag("a", title, href=f"#{html.anchor(title)}") for title in sections]
    contents = tag("nav", *links, aria_label="Sections")
    main = tag("main", *(html.section(title, body) for title, body in sections.items()))
    style, more, script = (path.read_text(encoding="utf-8") for path in (HOUSE_STYLE, STYLE, SCRIPT))
    title = f"{verdict.decision}: {verdict.run_id}"
    page = html.document(title, style + more, _render_header(verdict, evidence), contents, main, script=script)
    files.write_atomic(target, page)


def _render_header(verdict: Verdict, evidence: GateEvidence) -> Html:
    outcome, said = ANSWER[verdict.decision]
    figures = {
        "Model": (render_digest(verdict.model_digest), evidence.bundle.dtype),
        "Run": (tag("bdi", verdict.run_id), f"adapter {verdict.adapter_digest[:12]}"),
        "Champion": _render_promoted(verdict.champion_digest, evidence.champion.champion),
        "Anchor": _render_promoted(verdict.anchor_digest, evidence.champion.anchor),
    }
    shown = [
        tag("div", tag("dt", name), tag("dd", tag("strong", value), tag("small", note)))
        for name, (value, note) in figures.items()
    ]
    if verdict.is_champion:
        said += " It is the champion already."
    parts = [
        tag("p", "Gate verdict", class_="quiet"),
        tag("h1", render_outcome(outcome, verdict.decision), tag("span", said), class_="verdict"),
        tag("dl", *shown),
    ]
    for name, one in (("champion", evidence.champion.champion), ("anchor", evidence.champion.anchor)):
        if one and one.forced:
            forced = f"The {name}, version {one.version:,}, was promoted against the verdict {one.forced.decision} by "
            parts.append(tag("p", render_outcome("invalid", "forced"), " ", forced, tag("bdi", one.forced.by), ": ",
                             tag("bdi", one.forced.reason), class_="forced"))  # fmt: skip
    return tag("header", *parts)


def _render_promoted(fingerprint: str | None, one: Champion | None) -> tuple[Html, str]:
    if fingerprint is None:
        return Html(NONE), "there is none"
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
    found = {outcome: sum(reason.outcome == outcome for reason in ordered) for outcome in GRAVITY}
    summed = ", ".join(f"{SAID[outcome]} {number:,}" for outcome, number in found.items() if number)
    return [
        tag("p", f"{format_count(len(ordered), 'rule')}: {summed}."),
        html.table("Rules", "ttw", ("", "rule", "what it found"), lines),
    ]

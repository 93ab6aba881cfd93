"""Renders a comparison of runs as HTML: differences, metrics, curves, scores, significance."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ratchet.config.units import format_bytes
from ratchet.quality_gate import rules
from ratchet.reports import curves
from ratchet.reports.comparison import (
    ComparisonRow,
    ComparisonSide,
    IncomparablePair,
    ModelEvaluation,
    PairwiseTestResult,
    RunComparison,
    comparison_rows,
)
from ratchet.reports.curves import SIGNS, render_swatch
from ratchet.reports.forest_plot import MINUS, format_p_value, format_significant, render_interval
from ratchet.reports.run_history import RunSummary
from ratchet.storage import html
from ratchet.storage.html import NONE, Html, explanation, format_count, table, tag
from ratchet.tuning.trial_summary import format_duration

LABELS_SHOWN, LABELS_OPEN, SLICES_SHOWN, EVENTS_SHOWN = 200, 15, 400, 200
"""Maximum numbers of labels, of labels visible before the table is expanded, of slice scores, and of events."""

Body = Sequence[Html] | str

SIGNIFICANCE_NOTE = (
    "Pairs that were scored on the same rows under one contract, compared row by row. p-values are two-sided and "
    "corrected for all comparisons in this table (Holm). The bound is the lower confidence bound of the difference."
)
SIGNIFICANCE_HEADS = ("figure", "outcome", "better", "other", "difference", "bound", "p-value, rows")
DIFFERENT_CONTRACTS = "These scores were made under different contracts and are not comparable."
NO_CURVES = "None of the runs has done a step."

PAGE_STYLE, STYLE, SCRIPT = (Path(__file__).with_name(name) for name in ("page.css", "curves.css", "curves.js"))


def column_headings(sides: Sequence[ComparisonSide]) -> tuple[str, ...]:
    """Return a column heading for each side, with its line style."""
    return tuple(tag("span", render_swatch(number), tag("bdi", side.name)) for number, side in enumerate(sides))


def render_differences(comparison: RunComparison) -> Body:
    """Render the differences in settings, data, base and execution."""
    content: list[Html] = [tag("p", tag("strong", note), class_="warned") for note in comparison.notes]
    for title, rows, equal_text in (
        (
            "Settings, data, base",
            comparison.settings,
            "They were trained with the same settings on the same data and base.",
        ),
        ("Execution", comparison.execution, "They were executed in the same way."),
    ):
        content.append(tag("h3", title))
        differing = [row for row in rows if row.differs]
        content.append(_render_rows(title, differing, comparison.sides) if differing else explanation(equal_text))
        equal = [row for row in rows if not row.differs]
        if equal:
            content.append(
                tag(
                    "details",
                    tag("summary", f"{len(equal):,} equal settings"),
                    _render_rows(f"{title}, equal", equal, comparison.sides),
                )
            )
    return content


def _render_rows(title: str, rows: Sequence[ComparisonRow], sides: Sequence[ComparisonSide]) -> Html:
    lines = [(tag("code", row.name), *(tag("bdi", value) for value in row.values)) for row in rows]
    return table(title, "t" * (1 + len(sides)), ("", *column_headings(sides)), lines)


def render_figures(sides: Sequence[ComparisonSide]) -> Html:
    """Render the results of each run: loss, length, speed, memory, interruptions."""
    rows = [(name, *values) for name, values in summarize_sides(sides) if any(value != NONE for value in values)]
    return table("Figures", "t" + "n" * len(sides), ("", *column_headings(sides)), rows)


def summarize_sides(sides: Sequence[ComparisonSide]) -> list[tuple[str, list[str]]]:
    """Return the results of each side as text, for the page and for the terminal."""
    formatters: dict[str, Callable[[RunSummary], str]] = {
        "state": lambda run: run.state,
        "lowest validation loss": lambda run: f"{run.best[1]:.4f}" if run.best else NONE,
        "at step": lambda run: f"{run.best[0]:,}" if run.best else NONE,
        "last training loss": lambda run: f"{run.history.loss:.4f}" if run.history.loss is not None else NONE,
        "steps": _format_steps,
        "answer tokens": lambda run: f"{run.history.trained_tokens:,.0f}" if run.history.lines else NONE,
        "training time": lambda run: format_duration(run.history.seconds) if run.history.seconds else NONE,
        "input tokens/s": lambda run: f"{run.tokens_per_s:,.0f}" if run.tokens_per_s else NONE,
        "peak memory": lambda run: format_bytes(run.peak_bytes) if run.peak_bytes else NONE,
        "forecast": lambda run: format_bytes(run.forecast_bytes) if run.forecast_bytes else NONE,
        "trainable parameters": lambda run: f"{run.trainable_parameters:,}" if run.trainable_parameters else NONE,
        "attempts": lambda run: f"{run.history.progress.attempts:,}" if run.history.progress.attempts else NONE,
        "repeated steps": lambda run: f"{run.history.repeated_steps:,}" if run.history.lines else NONE,
        "blocked by checkpoints": lambda run: (
            format_duration(run.history.blocked_s) if run.history.checkpoints else NONE
        ),
    }
    rows = [(name, [_format_cell(side.runs, formatter) for side in sides]) for name, formatter in formatters.items()]
    rows.append(("trials", [", ".join(side.trials) or NONE for side in sides]))
    rows.append(("promotions, verdicts", [", ".join(dict.fromkeys(side.promotions)) or NONE for side in sides]))
    return rows


def _format_steps(run: RunSummary) -> str:
    planned = run.report.planned_steps if run.report else run.history.progress.planned_steps
    return f"{run.history.step:,} of {planned:,}" if planned else f"{run.history.step:,}" if run.history.lines else NONE


def _format_cell(runs: Sequence[RunSummary], formatter: Callable[[RunSummary], str]) -> str:
    """Format the distinct values of several runs, in order."""
    return ", ".join(dict.fromkeys(formatter(run) for run in runs))


def render_significance(comparison: RunComparison) -> Body:
    """Render all tested differences, significant or not, and the pairs that cannot be compared."""
    content: list[Html] = []
    if comparison.test_results:
        content += [explanation(SIGNIFICANCE_NOTE), render_test_results(comparison.test_results)]
    for reason, pairs in group_incomparable_pairs(comparison.incomparable_pairs).items():
        content.append(tag("p", tag("strong", "Not tested"), ", ", tag("bdi", f"{reason}: {pairs}.")))
    return content or "There is nothing to compare."


def render_test_results(results: Sequence[PairwiseTestResult]) -> Html:
    """Render a row for each tested difference."""
    return table(
        "Differences on the same rows", "ttnnnnt", SIGNIFICANCE_HEADS, [_test_result_row(result) for result in results]
    )


def group_incomparable_pairs(incomparable: Sequence[IncomparablePair]) -> dict[str, str]:
    """Group pairs that cannot be compared by the reason."""
    groups: dict[str, list[str]] = {}
    for incomparable_pair in incomparable:
        groups.setdefault(incomparable_pair.reason, []).append(" and ".join(incomparable_pair.pair))
    return {reason: "; ".join(pairs) for reason, pairs in groups.items()}


def _test_result_row(result: PairwiseTestResult) -> tuple[str, ...]:
    outcome = (
        f"{result.leader} is better than {result.other}"
        if result.is_significant
        else f"no significant difference between {result.leader} and {result.other}"
    )
    scores = [format_value(result, value) for value in result.values]
    return (
        tag("span", tag("bdi", result.metric), tag("small", result.rows)),
        tag(
            "span", tag("b", "\u2714 " if result.is_significant else "\u2248 ", aria_hidden="true"), tag("bdi", outcome)
        ),
        *scores,
        format_difference(result, result.difference),
        format_difference(result, result.low),
        tag("span", format_p_value(result.p_adjusted), tag("small", f"n {result.n:,}; {result.method}")),
    )


def format_value(result: PairwiseTestResult, value: float) -> str:
    """Format a value of the tested metric."""
    return rules.format_value(value, result.measured) if result.measured else format_significant(value)


def format_difference(result: PairwiseTestResult, amount: float) -> str:
    """Format a difference of the tested metric, with its sign."""
    if result.measured:
        return rules.format_signed_change(amount, result.measured).replace("-", MINUS)
    return ("+" if amount >= 0 else MINUS) + format_significant(abs(amount))


def render_scores(sides: Sequence[ComparisonSide]) -> Body:
    """Render scores on test rows, by label and by slice, with the contract of each evaluation."""
    evaluations = [(number, evaluation) for number, side in enumerate(sides) for evaluation in side.evaluations]
    if not evaluations:
        return (
            "None of these runs was evaluated on test rows. Stage evaluate scores the run of params.yaml and the "
            "champions."
        )
    columns = tuple(
        tag("span", render_swatch(n), tag("bdi", sides[n].name), tag("small", evaluation.role))
        for n, evaluation in evaluations
    )
    models = [evaluation for _, evaluation in evaluations]
    names = sorted({name for model in models for name in model.scores.metrics})
    rows = [
        (tag("bdi", name), *(render_interval(model.scores.metrics.get(name)) for model in models)) for name in names
    ]
    contract = [(tag("code", model.scores.contract[:12]), model.place) for model in models]
    contracts_table = table(
        "Contracts",
        "ttt",
        ("model", "contract", "evaluation"),
        [
            (tag("bdi", f"{sides[n].name}, {evaluation.role}"), *contract[k])
            for k, (n, evaluation) in enumerate(evaluations)
        ],
    )
    content = [
        explanation("Value and its 95 % interval. For paired comparisons, see Significance."),
        table("Scores on test rows", "t" + "n" * len(evaluations), ("figure", *columns), rows),
    ]
    if len({model.scores.contract for model in models}) > 1:
        content.append(tag("p", tag("strong", DIFFERENT_CONTRACTS), class_="warned"))
    return [
        *content,
        contracts_table,
        *_render_labels(models, columns),
        *_render_slices(models, columns),
        *_render_costs(models, columns),
    ]


def _render_labels(models: Sequence[ModelEvaluation], columns: Sequence[str]) -> Iterator[Html]:
    """Render F1 of each label, the largest differences between models first."""
    labels = sorted({label for model in models for label in model.scores.per_class})
    if not labels:
        return

    def label_metrics(model: ModelEvaluation, label: str) -> Mapping[str, float]:
        return model.scores.per_class.get(label, {})

    def spread(label: str) -> float:
        known = [label_metrics(model, label).get("f1", 0.0) for model in models if label in model.scores.per_class]
        return max(known) - min(known)

    order = sorted(labels, key=lambda label: (-spread(label), label))[:LABELS_SHOWN]
    lines = [
        (
            tag("bdi", label),
            *(
                f"{figure:.3f}" if (figure := label_metrics(model, label).get("f1")) is not None else NONE
                for model in models
            ),
            f"{max(label_metrics(model, label).get('support', 0.0) for model in models):,.0f}",
        )
        for label in order
    ]
    kinds, names = "t" + "n" * (len(models) + 1), ("label", *columns, "rows")
    yield tag("h3", "By label: F1, largest differences first")
    yield table("Labels", kinds, names, lines[:LABELS_OPEN])
    if rest := lines[LABELS_OPEN:]:
        yield tag("details", tag("summary", f"{len(rest):,} more"), table("Other labels", kinds, names, rest))


def _render_slices(models: Sequence[ModelEvaluation], columns: Sequence[str]) -> Iterator[Html]:
    parts = sorted({part for model in models for part in model.scores.slices})
    lines = []
    for part in parts:
        for name in sorted({name for model in models for name in model.scores.slices.get(part, {})}):
            cells = (render_interval(model.scores.slices.get(part, {}).get(name)) for model in models)
            lines.append((tag("span", tag("bdi", part), tag("small", tag("bdi", name))), *cells))
    if lines:
        summary = f"By slice: {format_count(len(parts), 'slice')}"
        slices_table = table("Slices", "t" + "n" * len(models), ("part", *columns), lines[:SLICES_SHOWN])
        yield tag("details", tag("summary", summary), slices_table)


def _render_costs(models: Sequence[ModelEvaluation], columns: Sequence[str]) -> Iterator[Html]:
    if not any(model.cost for model in models):
        return
    costs = [model.cost for model in models]
    lines = [
        ("median latency in seconds", *(f"{cost.latency_s:.3g}" if cost else NONE for cost in costs)),
        ("95th percentile of latency in seconds", *(f"{cost.latency_p95_s:.3g}" if cost else NONE for cost in costs)),
        ("generated tokens/s", *(f"{cost.tokens_per_s:.4g}" if cost else NONE for cost in costs)),
        ("peak memory", *(format_bytes(cost.memory_bytes) if cost else NONE for cost in costs)),
    ]
    yield tag("h3", "Inference cost")
    yield table("Inference cost", "t" + "n" * len(models), ("", *columns), lines)


def render_events(sides: Sequence[ComparisonSide]) -> Body:
    """Render the events of the runs as a table. The plots show the same events as symbols."""
    rows = [
        (f"{mark.step:,}", tag("bdi", side.name if len(side.runs) == 1 else f"{side.name}: {run.run_id}"),
         f"{SIGNS.get(mark.kind, '')} {mark.kind}", tag("bdi", mark.text))
        for side in sides
        for run in side.runs
        for mark in run.history.marks
    ]  # fmt: skip
    if not rows:
        return "No events: no restart, no skipped step, no alert."
    more = sum(sum(run.history.counts.values()) for side in sides for run in side.runs) - len(rows[:EVENTS_SHOWN])
    note = [explanation(f"The journals have {more:,} further events.")] if more > 0 else []
    return [*note, table("Events", "tttw", ("step", "training", "event", "message"), rows[:EVENTS_SHOWN])]


def render_settings(side: ComparisonSide) -> Body:
    """Render all settings of a side: those that affect learning, and those of execution."""
    content = []
    for title, attribute in (("Settings that affect learning", "settings"), ("Execution", "execution")):
        if rows := comparison_rows([[getattr(run, attribute) for run in side.runs]]):
            content += [tag("h3", title), render_facts({row.name: row.values[0] for row in rows})]
    return content or "The run directory has no settings."


def render_facts(facts: Mapping[str, str]) -> Html:
    """Render names and values as a definition list."""
    pairs = ((tag("dt", name), tag("dd", tag("bdi", value))) for name, value in facts.items())
    return tag("dl", *(part for pair in pairs for part in pair), class_="facts")


# The comparison page: one HTML file without external resources, complete without its script.


def write(comparison: RunComparison, target: Path) -> None:
    """Write the page. Equal comparisons give equal bytes."""
    html.write(target, render(comparison))


def render(comparison: RunComparison) -> str:
    """Return the page as text."""
    plots = curves.build_plots(comparison.sides)
    sections: dict[str, Sequence[Html] | str] = {
        "Differences": render_differences(comparison),
        "Figures": [render_figures(comparison.sides)],
        "Curves": _render_curves(plots, comparison.sides) if plots else NO_CURVES,
        "Scores": render_scores(comparison.sides),
        "Significance": render_significance(comparison),
        "Events": render_events(comparison.sides),
    }
    names = ", ".join(side.name for side in comparison.sides)
    return _render_document(
        f"Compared: {names}",
        _render_header(comparison),
        sections,
        curves.render_script_data(plots, comparison.sides),
    )


def _render_curves(plots: Sequence[curves.CurvePlot], sides: Sequence[ComparisonSide]) -> list[Html]:
    legend = [curves.render_legend(sides), explanation(curves.describe_legend(sides)), curves.render_controls(sides)]
    return [*legend, *(curves.render_figure(plot, sides) for plot in plots)]


def _render_document(title: str, header: Html, sections: Mapping[str, Sequence[Html] | str], data: Html) -> str:
    links = [tag("a", name, href=f"#{html.anchor(name)}") for name in sections]
    contents = tag("nav", *links, aria_label="Sections")
    main = tag("main", *(html.section(name, body) for name, body in sections.items()))
    style, more, script = (path.read_text(encoding="utf-8") for path in (PAGE_STYLE, STYLE, SCRIPT))
    return html.document(title, style + more, header, contents, main, data, script=script)


def _render_header(comparison: RunComparison) -> Html:
    def figures() -> Iterator[Html]:
        for number, side in enumerate(comparison.sides):
            best = [run.best[1] for run in side.runs if run.best]
            value = f"{sum(best) / len(best):.4f}" if best else NONE
            seeds = f", mean of {len(best)} seeds" if side.is_group else ""
            about = "; ".join(dict.fromkeys(member.about for member in side.subject.members if member.about))
            state = ", ".join(dict.fromkeys(run.state for run in side.runs))
            note = f"lowest validation loss{seeds}; {state}" + (f"; {about}" if about else "")
            name = tag("dt", curves.render_swatch(number), tag("bdi", side.name))
            yield tag("div", name, tag("dd", tag("strong", value), tag("small", note)))

    significant = sum(result.is_significant for result in comparison.test_results)
    differing = sum(row.differs for row in comparison.settings)
    summary = f"{format_count(differing, 'setting')} differ; " if differing != 1 else "1 setting differs; "
    summary += (
        f"{significant:,} of {format_count(len(comparison.test_results), 'difference')} on the same rows significant"
        if comparison.test_results
        else "no rows were scored for both sides"
    )
    run_count = sum(len(side.runs) for side in comparison.sides)
    heading = f"{run_count} runs compared"
    if run_count > len(comparison.sides):
        heading = f"{run_count} runs in {len(comparison.sides)} groups"
    title = tag("h1", heading, tag("span", summary))
    return tag("header", tag("p", "Comparison", class_="quiet"), title, tag("dl", *figures()))

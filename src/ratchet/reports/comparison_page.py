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
)
from ratchet.reports.comparison import comparison_rows as rows_of
from ratchet.reports.curves import SIGNS, render_swatch
from ratchet.reports.forest_plot import MINUS, format_p_value, format_significant, render_interval
from ratchet.reports.run_history import RunSummary
from ratchet.storage import html
from ratchet.storage.html import NONE, Html, explanation, format_count, table, tag
from ratchet.tuning.trial_summary import format_duration

LABELS_SHOWN, LABELS_OPEN, SLICES_SHOWN, EVENTS_SHOWN = 200, 15, 400, 200
"""Maximum numbers of labels, labels visible before the table is expanded, slice scores, and events."""

Body = Sequence[Html] | str


def column_headings(sides: Sequence[ComparisonSide]) -> tuple[str, ...]:
    """Return a table heading for each side, with its line style."""
    return tuple(tag("span", render_swatch(number), tag("bdi", side.name)) for number, side in enumerate(sides))


def render_differences(comparison: RunComparison) -> Body:
    """Render the differences in settings, data, base and execution."""
    content: list[Html] = [tag("p", tag("strong", note), class_="warned") for note in comparison.notes]
    for title, rows, same in (
        (
            "Settings, data, base",
            comparison.settings,
            "They were trained with the same settings on the same data and base.",
        ),
        ("Execution", comparison.execution, "They were executed in the same way."),
    ):
        content.append(tag("h3", title))
        differing = [row for row in rows if row.differs]
        content.append(_render_rows(title, differing, comparison.sides) if differing else explanation(same))
        alike = [row for row in rows if not row.differs]
        if alike:
            content.append(
                tag(
                    "details",
                    tag("summary", f"{len(alike):,} equal settings"),
                    _render_rows(f"{title}, equal", alike, comparison.sides),
                )
            )
    return content


def _render_rows(equal_text: str, rows: Sequence[ComparisonRow], sides: Sequence[ComparisonSide]) -> Html:
    lines = [(tag("code", row.name), *(tag("bdi", value) for value in row.values)) for row in rows]
    return table(equal_text, "t" * (1 + len(sides)), ("", *column_headings(sides)), lines)


def render_figures(sides: Sequence[ComparisonSide]) -> Html:
    """Render the results of each run: loss, length, speed, memory, interruptions."""
    rows = [(name, *values) for name, values in summarize_sides(sides) if any(value != NONE for value in values)]
    return table("Figures", "t" + "n" * len(sides), ("", *column_headings(sides)), rows)


def summarize_sides(sides: Sequence[ComparisonSide]) -> list[tuple[str, list[str]]]:
    """Return the results of each side as text, for the page and for the terminal."""
    formatters: dict[str, Callable[[RunSummary], str]] = {
        "state": lambda one: one.state,
        "lowest validation loss": lambda one: f"{one.best[1]:.4f}" if one.best else NONE,
        "at step": lambda one: f"{one.best[0]:,}" if one.best else NONE,
        "last training loss": lambda one: f"{one.history.loss:.4f}" if one.history.loss is not None else NONE,
        "steps": _format_steps,
        "answer tokens": lambda one: f"{one.history.trained_tokens:,.0f}" if one.history.lines else NONE,
        "training time": lambda one: format_duration(one.history.seconds) if one.history.seconds else NONE,
        "input tokens/s": lambda one: f"{one.tokens_per_s:,.0f}" if one.tokens_per_s else NONE,
        "peak memory": lambda one: format_bytes(one.peak_bytes) if one.peak_bytes else NONE,
        "forecast": lambda one: format_bytes(one.forecast_bytes) if one.forecast_bytes else NONE,
        "trainable parameters": lambda one: f"{one.trainable_parameters:,}" if one.trainable_parameters else NONE,
        "attempts": lambda one: f"{one.history.progress.attempts:,}" if one.history.progress.attempts else NONE,
        "repeated steps": lambda one: f"{one.history.repeated_steps:,}" if one.history.lines else NONE,
        "blocked by checkpoints": lambda one: (
            format_duration(one.history.blocked_s) if one.history.checkpoints else NONE
        ),
    }
    rows = [(name, [_format_cell(side.runs, formatter) for side in sides]) for name, formatter in formatters.items()]
    rows.append(("trials", [", ".join(side.trials) or NONE for side in sides]))
    rows.append(("promotions, verdicts", [", ".join(dict.fromkeys(side.promotions)) or NONE for side in sides]))
    return rows


def _format_steps(one: RunSummary) -> str:
    planned = one.report.planned_steps if one.report else one.history.progress.planned_steps
    return f"{one.history.step:,} of {planned:,}" if planned else f"{one.history.step:,}" if one.history.lines else NONE


def _format_cell(accounts: Sequence[RunSummary], formatter: Callable[[RunSummary], str]) -> str:
    """Format the distinct values of several runs, in order."""
    return ", ".join(dict.fromkeys(formatter(one) for one in accounts))


def render_significance(comparison: RunComparison) -> Body:
    """Render the significant differences, and the pairs that cannot be compared."""
    content: list[Html] = []
    if comparison.test_results:
        content += [explanation(EXPLAINED), render_test_results(comparison.test_results)]
    for why, pairs in group_incomparable_pairs(comparison.incomparable_pairs).items():
        content.append(tag("p", tag("strong", "Not tested"), ", ", tag("bdi", f"{why}: {pairs}.")))
    return content or "There is nothing to compare."


def render_test_results(findings: Sequence[PairwiseTestResult]) -> Html:
    """Render a row for each tested difference."""
    return table("Differences on the same rows", "ttnnnnt", HEADS, [_test_result_row(one) for one in findings])


def group_incomparable_pairs(incomparable: Sequence[IncomparablePair]) -> dict[str, str]:
    """Group pairs that cannot be compared by the reason."""
    groups: dict[str, list[str]] = {}
    for one in incomparable:
        groups.setdefault(one.reason, []).append(" and ".join(one.pair))
    return {why: "; ".join(pairs) for why, pairs in groups.items()}


EXPLAINED = (
    "Compared row by row, where both were scored on the same rows under one contract. p-values are two-sided and "
    "corrected for all comparisons in this table (Holm). The bound is the lower confidence bound of the difference."
)
HEADS = ("figure", "outcome", "better", "other", "difference", "bound", "p-value, rows")


def _test_result_row(one: PairwiseTestResult) -> tuple[str, ...]:
    outcome = (
        f"{one.leader} is better than {one.other}"
        if one.is_significant
        else f"no significant difference between {one.leader} and {one.other}"
    )
    scores = [format_value(one, value) for value in one.values]
    return (
        tag("span", tag("bdi", one.metric), tag("small", one.rows)),
        tag("span", tag("b", "\u2714 " if one.is_significant else "\u2248 ", aria_hidden="true"), tag("bdi", outcome)),
        *scores,
        format_difference(one, one.difference),
        format_difference(one, one.low),
        tag("span", format_p_value(one.p_adjusted), tag("small", f"n {one.n:,}; {one.method}")),
    )


def format_value(one: PairwiseTestResult, value: float) -> str:
    """Format a value of the tested metric."""
    return rules.format_value(value, one.measured) if one.measured else format_significant(value)


def format_difference(one: PairwiseTestResult, amount: float) -> str:
    """Format a difference of the tested metric, with its sign."""
    if one.measured:
        return rules.format_signed_change(amount, one.measured).replace("-", MINUS)
    return ("+" if amount >= 0 else MINUS) + format_significant(abs(amount))


def render_scores(sides: Sequence[ComparisonSide]) -> Body:
    """Render scores on test rows, by label and by slice, with the contract of each evaluation."""
    evaluations = [(number, one) for number, side in enumerate(sides) for one in side.evaluations]
    if not evaluations:
        return (
            "None of them was evaluated on test rows. Stage evaluate scores the run of params.yaml and the champions."
        )
    columns = tuple(
        tag("span", render_swatch(n), tag("bdi", sides[n].name), tag("small", one.role)) for n, one in evaluations
    )
    models = [one for _, one in evaluations]
    names = sorted({name for one in models for name in one.scores.metrics})
    rows = [(tag("bdi", name), *(render_interval(one.scores.metrics.get(name)) for one in models)) for name in names]
    contract = [(tag("code", one.scores.contract[:12]), one.place) for one in models]
    contracts_table = table(
        "Contracts",
        "ttt",
        ("model", "contract", "evaluation"),
        [(tag("bdi", f"{sides[n].name}, {one.role}"), *contract[k]) for k, (n, one) in enumerate(evaluations)],
    )
    content = [
        explanation("Value and its 95 % interval. For paired comparisons, see Significance."),
        table("Scores on test rows", "t" + "n" * len(evaluations), ("figure", *columns), rows),
    ]
    if len({one.scores.contract for one in models}) > 1:
        content.append(tag("p", tag("strong", DIFFERENT), class_="warned"))
    return [
        *content,
        contracts_table,
        *_render_labels(models, columns),
        *_render_slices(models, columns),
        *_render_costs(models, columns),
    ]


DIFFERENT = "These scores were made under different contracts and are not comparable."


def _render_labels(models: Sequence[ModelEvaluation], columns: Sequence[str]) -> Iterator[Html]:
    """Render F1 of each label, largest differences between the models first."""
    labels = sorted({label for one in models for label in one.scores.per_class})
    if not labels:
        return

    def of(one: ModelEvaluation, label: str) -> Mapping[str, float]:
        return one.scores.per_class.get(label, {})

    def spread(label: str) -> float:
        known = [of(one, label).get("f1", 0.0) for one in models if label in one.scores.per_class]
        return max(known) - min(known)

    order = sorted(labels, key=lambda label: (-spread(label), label))[:LABELS_SHOWN]
    lines = [
        (
            tag("bdi", label),
            *(f"{figure:.3f}" if (figure := of(one, label).get("f1")) is not None else NONE for one in models),
            f"{max(of(one, label).get('support', 0.0) for one in models):,.0f}",
        )
        for label in order
    ]
    kinds, names = "t" + "n" * (len(models) + 1), ("label", *columns, "rows")
    yield tag("h3", "By label: F1, largest differences first")
    yield table("Labels", kinds, names, lines[:LABELS_OPEN])
    if rest := lines[LABELS_OPEN:]:
        yield tag("details", tag("summary", f"{len(rest):,} more"), table("Other labels", kinds, names, rest))


def _render_slices(models: Sequence[ModelEvaluation], columns: Sequence[str]) -> Iterator[Html]:
    parts = sorted({part for one in models for part in one.scores.slices})
    lines = []
    for part in parts:
        for name in sorted({name for one in models for name in one.scores.slices.get(part, {})}):
            cells = (render_interval(one.scores.slices.get(part, {}).get(name)) for one in models)
            lines.append((tag("span", tag("bdi", part), tag("small", tag("bdi", name))), *cells))
    if lines:
        summary = f"By slice: {format_count(len(parts), 'slice')}"
        slices_table = table("Slices", "t" + "n" * len(models), ("part", *columns), lines[:SLICES_SHOWN])
        yield tag("details", tag("summary", summary), slices_table)


def _render_costs(models: Sequence[ModelEvaluation], columns: Sequence[str]) -> Iterator[Html]:
    if not any(one.cost for one in models):
        return
    costs = [one.cost for one in models]
    lines = [
        ("median latency in seconds", *(f"{one.latency_s:.3g}" if one else NONE for one in costs)),
        ("95th percentile of latency in seconds", *(f"{one.latency_p95_s:.3g}" if one else NONE for one in costs)),
        ("generated tokens/s", *(f"{one.tokens_per_s:.4g}" if one else NONE for one in costs)),
        ("peak memory", *(format_bytes(one.memory_bytes) if one else NONE for one in costs)),
    ]
    yield tag("h3", "Inference cost")
    yield table("Inference cost", "t" + "n" * len(models), ("", *columns), lines)


def render_events(sides: Sequence[ComparisonSide]) -> Body:
    """Render the events of the runs as a table. The plots show the same events as symbols."""
    rows = [
        (f"{mark.step:,}", tag("bdi", side.name if len(side.runs) == 1 else f"{side.name}: {account.run_id}"),
         f"{SIGNS.get(mark.kind, '')} {mark.kind}", tag("bdi", mark.text))
        for side in sides
        for account in side.runs
        for mark in account.history.marks
    ]  # fmt: skip
    if not rows:
        return "No events: no restart, no skipped step, no alert."
    more = sum(sum(one.history.counts.values()) for side in sides for one in side.runs) - len(rows[:EVENTS_SHOWN])
    note = [explanation(f"The journals have {more:,} further events.")] if more > 0 else []
    return [*note, table("Events", "tttw", ("step", "training", "event", "message"), rows[:EVENTS_SHOWN])]


def render_settings(side: ComparisonSide) -> Body:
    """Render all settings of a run: those that affect learning, and those of execution."""
    content = []
    for title, attribute in (("Settings that affect learning", "settings"), ("Execution", "execution")):
        if rows := rows_of([[getattr(account, attribute) for account in side.runs]]):
            content += [tag("h3", title), render_facts({row.name: row.values[0] for row in rows})]
    return content or "The run directory has no settings."


def render_facts(facts: Mapping[str, str]) -> Html:
    """Render names and values as a definition list."""
    pairs = ((tag("dt", name), tag("dd", tag("bdi", value))) for name, value in facts.items())
    return tag("dl", *(part for pair in pairs for part in pair), class_="facts")


# The comparison page: one HTML file without external resources, complete without its script.

PAGE_STYLE, STYLE, SCRIPT = (Path(__file__).with_name(name) for name in ("page.css", "curves.css", "curves.js"))

NO_CURVES = "None of the runs has done a step."


def write(comparison: RunComparison, target: Path) -> None:
    """Write the page. Equal comparisons give equal bytes."""
    html.write(target, render(comparison))


def render(comparison: RunComparison) -> str:
    """Render the page as text."""
    pictures = curves.build_plots(comparison.sides)
    sections: dict[str, Sequence[Html] | str] = {
        "Differences": render_differences(comparison),
        "Figures": [render_figures(comparison.sides)],
        "Curves": _render_curves(pictures, comparison.sides) if pictures else NO_CURVES,
        "Scores": render_scores(comparison.sides),
        "Significance": render_significance(comparison),
        "Events": render_events(comparison.sides),
    }
    names = ", ".join(side.name for side in comparison.sides)
    return _render_document(
        f"Compared: {names}",
        _render_header(comparison),
        sections,
        curves.render_script_data(pictures, comparison.sides),
    )


def _render_curves(pictures: Sequence[curves.CurvePlot], sides: Sequence[ComparisonSide]) -> list[Html]:
    legend = [curves.render_legend(sides), explanation(curves.describe_legend(sides)), curves.render_controls(sides)]
    return [*legend, *(curves.render_figure(one, sides) for one in pictures)]


def _render_document(title: str, header: Html, sections: Mapping[str, Sequence[Html] | str], data: Html) -> str:
    links = [tag("a", name, href=f"#{html.anchor(name)}") for name in sections]
    contents = tag("nav", *links, aria_label="Sections")
    main = tag("main", *(html.section(name, body) for name, body in sections.items()))
    style, more, script = (path.read_text(encoding="utf-8") for path in (PAGE_STYLE, STYLE, SCRIPT))
    return html.document(title, style + more, header, contents, main, data, script=script)


def _render_header(comparison: RunComparison) -> Html:
    def figures() -> Iterator[Html]:
        for number, side in enumerate(comparison.sides):
            best = [one.best[1] for one in side.runs if one.best]
            value = f"{sum(best) / len(best):.4f}" if best else NONE
            many = f", mean of {len(best)} seeds" if side.is_group else ""
            about = "; ".join(dict.fromkeys(member.about for member in side.subject.members if member.about))
            state = ", ".join(dict.fromkeys(one.state for one in side.runs))
            note = f"lowest validation loss{many}; {state}" + (f"; {about}" if about else "")
            name = tag("dt", curves.render_swatch(number), tag("bdi", side.name))
            yield tag("div", name, tag("dd", tag("strong", value), tag("small", note)))

    real = sum(one.is_significant for one in comparison.test_results)
    differing = sum(row.differs for row in comparison.settings)
    summary = f"{format_count(differing, 'setting')} differ; " if differing != 1 else "1 setting differs; "
    summary += (
        f"{real:,} of {format_count(len(comparison.test_results), 'difference')} on the same rows significant"
        if comparison.test_results
        else "no rows were scored for both"
    )
    trainings = sum(len(side.runs) for side in comparison.sides)
    heading = f"{trainings} runs compared"
    if trainings > len(comparison.sides):
        heading = f"{trainings} runs in {len(comparison.sides)} groups"
    title = tag("h1", heading, tag("span", summary))
    return tag("header", tag("p", "Comparison", class_="quiet"), title, tag("dl", *figures()))

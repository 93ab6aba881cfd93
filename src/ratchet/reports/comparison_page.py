"""What a comparison of trainings shows beside its curves: differences, figures, scores, which differences are real."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ratchet.config.units import format_bytes
from ratchet.gate import messages
from ratchet.reports import curves, page_files
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
"""Labels, labels that are seen before the table is opened, figures of parts of the rows, events."""

Body = Sequence[Html] | str


def column_headings(sides: Sequence[ComparisonSide]) -> tuple[str, ...]:
    """A head for each side, with its line."""
    return tuple(tag("span", render_swatch(number), tag("bdi", side.name)) for number, side in enumerate(sides))


def render_differences(found: RunComparison) -> Body:
    """What of settings, data, base and the way they were carried out is not the same."""
    shown: list[Html] = [tag("p", tag("strong", note), class_="warned") for note in found.notes]
    for title, rows, same in (
        ("Settings, data, base", found.settings, "They were trained with the same settings on the same data and base."),
        ("How it was carried out", found.manner, "They were carried out alike."),
    ):
        shown.append(tag("h3", title))
        differing = [row for row in rows if row.differs]
        shown.append(_render_rows(title, differing, found.sides) if differing else explanation(same))
        alike = [row for row in rows if not row.differs]
        if alike:
            shown.append(
                tag(
                    "details",
                    tag("summary", f"{len(alike):,} that are the same"),
                    _render_rows(f"{title}, the same", alike, found.sides),
                )
            )
    return shown


def _render_rows(what: str, rows: Sequence[ComparisonRow], sides: Sequence[ComparisonSide]) -> Html:
    lines = [(tag("code", row.name), *(tag("bdi", value) for value in row.values)) for row in rows]
    return table(what, "t" * (1 + len(sides)), ("", *column_headings(sides)), lines)


def render_figures(sides: Sequence[ComparisonSide]) -> Html:
    """What came of each: loss, length, speed, memory, interruptions."""
    rows = [(name, *values) for name, values in summarize_sides(sides) if any(value != NONE for value in values)]
    return table("Figures", "t" + "n" * len(sides), ("", *column_headings(sides)), rows)


def summarize_sides(sides: Sequence[ComparisonSide]) -> list[tuple[str, list[str]]]:
    """The figures of each side, as texts: for the page and for the terminal."""
    asked: dict[str, Callable[[RunSummary], str]] = {
        "state": lambda one: one.state,
        "lowest validation loss": lambda one: f"{one.best[1]:.4f}" if one.best else NONE,
        "at step": lambda one: f"{one.best[0]:,}" if one.best else NONE,
        "last training loss": lambda one: f"{one.course.loss:.4f}" if one.course.loss is not None else NONE,
        "steps": _format_steps,
        "answer tokens": lambda one: f"{one.course.trained_tokens:,.0f}" if one.course.lines else NONE,
        "time in training": lambda one: format_duration(one.course.seconds) if one.course.seconds else NONE,
        "input tokens/s": lambda one: f"{one.tokens_per_s:,.0f}" if one.tokens_per_s else NONE,
        "peak memory": lambda one: format_bytes(one.peak_bytes) if one.peak_bytes else NONE,
        "forecast": lambda one: format_bytes(one.forecast_bytes) if one.forecast_bytes else NONE,
        "trainable parameters": lambda one: f"{one.trainable_parameters:,}" if one.trainable_parameters else NONE,
        "attempts": lambda one: f"{one.course.progress.attempts:,}" if one.course.progress.attempts else NONE,
        "steps done again": lambda one: f"{one.course.again:,}" if one.course.lines else NONE,
        "still for checkpoints": lambda one: format_duration(one.course.blocked_s) if one.course.checkpoints else NONE,
    }
    found = [(name, [_format_cell(side.accounts, of) for side in sides]) for name, of in asked.items()]
    found.append(("trials", [", ".join(side.trials) or NONE for side in sides]))
    found.append(("promoted, judged", [", ".join(dict.fromkeys(side.standing)) or NONE for side in sides]))
    return found


def _format_steps(one: RunSummary) -> str:
    planned = one.report.planned_steps if one.report else one.course.progress.planned_steps
    return f"{one.course.step:,} of {planned:,}" if planned else f"{one.course.step:,}" if one.course.lines else NONE


def _format_cell(accounts: Sequence[RunSummary], of: Callable[[RunSummary], str]) -> str:
    """Of several trainings the different values, in their order."""
    return ", ".join(dict.fromkeys(of(one) for one in accounts))


def render_significance(found: RunComparison) -> Body:
    """Which differences are more than chance, and of which pairs nothing can be said."""
    shown: list[Html] = []
    if found.findings:
        shown += [explanation(EXPLAINED), render_test_results(found.findings)]
    for why, pairs in group_incomparable_pairs(found.silences).items():
        shown.append(tag("p", tag("strong", "Not tested"), ", ", tag("bdi", f"{why}: {pairs}.")))
    return shown or "There is nothing to compare."


def render_test_results(findings: Sequence[PairwiseTestResult]) -> Html:
    """A line for each difference that was tested."""
    return table("Differences on the same rows", "ttnnnnt", HEADS, [_test_result_row(one) for one in findings])


def group_incomparable_pairs(silences: Sequence[IncomparablePair]) -> dict[str, str]:
    """Pairs of which nothing can be said, by the reason."""
    found: dict[str, list[str]] = {}
    for one in silences:
        found.setdefault(one.why, []).append(" and ".join(one.pair))
    return {why: "; ".join(pairs) for why, pairs in found.items()}


EXPLAINED = (
    "Row by row, where both were scored on the same rows under one contract. Probabilities are two-sided and corrected "
    "for everything in this table (Holm); the bound is what the difference exceeds beyond doubt."
)
HEADS = ("figure", "outcome", "better one", "other one", "difference", "bound", "probability, rows")


def _test_result_row(one: PairwiseTestResult) -> tuple[str, ...]:
    outcome = (
        f"{one.leader} is better than {one.other}"
        if one.is_real
        else f"{one.leader} and {one.other} cannot be told apart"
    )
    shown = [format_value(one, value) for value in one.values]
    return (
        tag("span", tag("bdi", one.metric), tag("small", one.rows)),
        tag("span", tag("b", "\u2714 " if one.is_real else "\u2248 ", aria_hidden="true"), tag("bdi", outcome)),
        *shown,
        format_difference(one, one.difference),
        format_difference(one, one.low),
        tag("span", format_p_value(one.p_adjusted), tag("small", f"n {one.n:,}; {one.method}")),
    )


def format_value(one: PairwiseTestResult, value: float) -> str:
    """A value of the metric of a finding."""
    return messages.format_value(value, one.measured) if one.measured else format_significant(value)


def format_difference(one: PairwiseTestResult, amount: float) -> str:
    """A difference of the metric of a finding, with its sign."""
    if one.measured:
        return messages.format_signed_change(amount, one.measured).replace("-", MINUS)
    return ("+" if amount >= 0 else MINUS) + format_significant(abs(amount))


def render_scores(sides: Sequence[ComparisonSide]) -> Body:
    """Figures on test rows, by label, by part of the rows, with the contract of each."""
    found = [(number, one) for number, side in enumerate(sides) for one in side.examined]
    if not found:
        return "None of them was evaluated on test rows (stage evaluate scores what params.yaml means, and champions)."
    columns = tuple(tag("span", render_swatch(n), tag("bdi", sides[n].name), tag("small", one.who)) for n, one in found)
    examined = [one for _, one in found]
    names = sorted({name for one in examined for name in one.scores.metrics})
    rows = [(tag("bdi", name), *(render_interval(one.scores.metrics.get(name)) for one in examined)) for name in names]
    contract = [(tag("code", one.scores.contract[:12]), one.place) for one in examined]
    told = table(
        "Contracts",
        "ttt",
        ("model", "contract", "evaluation"),
        [(tag("bdi", f"{sides[n].name}, {one.who}"), *contract[k]) for k, (n, one) in enumerate(found)],
    )
    shown = [
        explanation("Value, and its 95 % interval by itself; two models are compared row by row under Significance."),
        table("Scores on test rows", "t" + "n" * len(found), ("figure", *columns), rows),
    ]
    if len({one.scores.contract for one in examined}) > 1:
        shown.append(tag("p", tag("strong", DIFFERENT), class_="warned"))
    return [
        *shown,
        told,
        *_render_labels(examined, columns),
        *_render_slices(examined, columns),
        *_render_costs(examined, columns),
    ]


DIFFERENT = "These figures were made under different contracts: they say nothing about each other."


def _render_labels(examined: Sequence[ModelEvaluation], columns: Sequence[str]) -> Iterator[Html]:
    """F1 of each label, those first where the models differ most."""
    labels = sorted({label for one in examined for label in one.scores.per_class})
    if not labels:
        return

    def of(one: ModelEvaluation, label: str) -> Mapping[str, float]:
        return one.scores.per_class.get(label, {})

    def spread(label: str) -> float:
        known = [of(one, label).get("f1", 0.0) for one in examined if label in one.scores.per_class]
        return max(known) - min(known)

    order = sorted(labels, key=lambda label: (-spread(label), label))[:LABELS_SHOWN]
    lines = [
        (
            tag("bdi", label),
            *(f"{figure:.3f}" if (figure := of(one, label).get("f1")) is not None else NONE for one in examined),
            f"{max(of(one, label).get('support', 0.0) for one in examined):,.0f}",
        )
        for label in order
    ]
    kinds, names = "t" + "n" * (len(examined) + 1), ("label", *columns, "rows")
    yield tag("h3", "By label: F1, the greatest differences first")
    yield table("Labels", kinds, names, lines[:LABELS_OPEN])
    if rest := lines[LABELS_OPEN:]:
        yield tag("details", tag("summary", f"{len(rest):,} more"), table("The other labels", kinds, names, rest))


def _render_slices(examined: Sequence[ModelEvaluation], columns: Sequence[str]) -> Iterator[Html]:
    parts = sorted({part for one in examined for part in one.scores.slices})
    lines = []
    for part in parts:
        for name in sorted({name for one in examined for name in one.scores.slices.get(part, {})}):
            cells = (render_interval(one.scores.slices.get(part, {}).get(name)) for one in examined)
            lines.append((tag("span", tag("bdi", part), tag("small", tag("bdi", name))), *cells))
    if lines:
        said = f"By part of the rows: {format_count(len(parts), 'part')}"
        shown = table("Parts of the rows", "t" + "n" * len(examined), ("part", *columns), lines[:SLICES_SHOWN])
        yield tag("details", tag("summary", said), shown)


def _render_costs(examined: Sequence[ModelEvaluation], columns: Sequence[str]) -> Iterator[Html]:
    if not any(one.cost for one in examined):
        return
    costs = [one.cost for one in examined]
    lines = [
        ("median seconds of an answer", *(f"{one.latency_s:.3g}" if one else NONE for one in costs)),
        ("95 % within seconds", *(f"{one.latency_p95_s:.3g}" if one else NONE for one in costs)),
        ("generated tokens/s", *(f"{one.tokens_per_s:.4g}" if one else NONE for one in costs)),
        ("peak memory", *(format_bytes(one.memory_bytes) if one else NONE for one in costs)),
    ]
    yield tag("h3", "Costs of an answer")
    yield table("Costs of an answer", "t" + "n" * len(examined), ("", *columns), lines)


def render_events(sides: Sequence[ComparisonSide]) -> Body:
    """What happened to the trainings, in words: the signs of the pictures."""
    rows = [
        (f"{mark.step:,}", tag("bdi", side.name if len(side.accounts) == 1 else f"{side.name}: {account.run_id}"),
         f"{SIGNS.get(mark.kind, '')} {mark.kind}", tag("bdi", mark.text))
        for side in sides
        for account in side.accounts
        for mark in account.course.marks
    ]  # fmt: skip
    if not rows:
        return "Nothing happened: no restart, no step left out, no alert."
    more = sum(sum(one.course.counts.values()) for side in sides for one in side.accounts) - len(rows[:EVENTS_SHOWN])
    told = [explanation(f"{more:,} further ones are in the journals.")] if more > 0 else []
    return [*told, table("Events", "tttw", ("step", "training", "event", "what was said"), rows[:EVENTS_SHOWN])]


def render_settings(side: ComparisonSide) -> Body:
    """What decides what a training learns, and how it was carried out: all of it."""
    shown = []
    for title, of in (("What decides what is learned", "settings"), ("How it was carried out", "manner")):
        if found := rows_of([[getattr(account, of) for account in side.accounts]]):
            shown += [tag("h3", title), render_facts({row.name: row.values[0] for row in found})]
    return shown or "Its directory does not say."


def render_facts(found: Mapping[str, str]) -> Html:
    """Names and what is said of each."""
    pairs = ((tag("dt", name), tag("dd", tag("bdi", value))) for name, value in found.items())
    return tag("dl", *(part for pair in pairs for part in pair), class_="facts")


# The page that compares trainings, for people: one HTML file that loads nothing, whole without its script.

HOUSE_STYLE, STYLE, SCRIPT = (Path(__file__).with_name(name) for name in ("page.css", "curves.css", "curves.js"))

NO_CURVES = "None of them has done a step."


def write(found: RunComparison, target: Path) -> None:
    """Write the page. Equal comparisons give equal bytes."""
    page_files.write(target, render(found))


def render(found: RunComparison) -> str:
    """The page's text."""
    pictures = curves.build_plots(found.sides)
    sections: dict[str, Sequence[Html] | str] = {
        "Differences": render_differences(found),
        "Figures": [render_figures(found.sides)],
        "Curves": _render_curves(pictures, found.sides) if pictures else NO_CURVES,
        "Scores": render_scores(found.sides),
        "Significance": render_significance(found),
        "Events": render_events(found.sides),
    }
    names = ", ".join(side.name for side in found.sides)
    return _render_document(
        f"Compared: {names}", _render_header(found), sections, curves.render_script_data(pictures, found.sides)
    )


def _render_curves(pictures: Sequence[curves.CurvePlot], sides: Sequence[ComparisonSide]) -> list[Html]:
    shown = [curves.render_legend(sides), explanation(curves.describe_legend(sides)), curves.render_controls(sides)]
    return [*shown, *(curves.render_figure(one, sides) for one in pictures)]


def _render_document(title: str, header: Html, sections: Mapping[str, Sequence[Html] | str], data: Html) -> str:
    links = [tag("a", name, href=f"#{html.anchor(name)}") for name in sections]
    contents = tag("nav", *links, aria_label="Sections")
    main = tag("main", *(html.section(name, body) for name, body in sections.items()))
    style, more, script = (path.read_text(encoding="utf-8") for path in (HOUSE_STYLE, STYLE, SCRIPT))
    return html.document(title, style + more, header, contents, main, data, script=script)


def _render_header(found: RunComparison) -> Html:
    def figures() -> Iterator[Html]:
        for number, side in enumerate(found.sides):
            best = [one.best[1] for one in side.accounts if one.best]
            value = f"{sum(best) / len(best):.4f}" if best else NONE
            many = f", mean of {len(best)} seeds" if side.is_group else ""
            about = "; ".join(dict.fromkeys(member.about for member in side.subject.members if member.about))
            state = ", ".join(dict.fromkeys(one.state for one in side.accounts))
            note = f"lowest validation loss{many}; {state}" + (f"; {about}" if about else "")
            name = tag("dt", curves.render_swatch(number), tag("bdi", side.name))
            yield tag("div", name, tag("dd", tag("strong", value), tag("small", note)))

    real = sum(one.is_real for one in found.findings)
    differing = sum(row.differs for row in found.settings)
    said = f"{format_count(differing, 'setting')} differ; " if differing != 1 else "1 setting differs; "
    said += (
        f"{real:,} of {format_count(len(found.findings), 'difference')} on the same rows more than chance"
        if found.findings
        else "no rows were scored for both"
    )
    trainings = sum(len(side.accounts) for side in found.sides)
    named = f"{trainings} trainings side by side"
    if trainings > len(found.sides):
        named = f"{trainings} trainings in {len(found.sides)} groups"
    title = tag("h1", named, tag("span", said))
    return tag("header", tag("p", "Comparison", class_="quiet"), title, tag("dl", *figures()))

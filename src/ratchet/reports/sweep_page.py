"""Renders the report of a sweep as HTML: trials, Pareto front, final round, cost, plots."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ratchet.reports.forest_plot import MINUS, format_p_value, format_significant
from ratchet.reports.sweep_canvas import STATES, render_figure
from ratchet.storage import files, html
from ratchet.storage.html import NONE, Html, explanation, format_count, format_percentage, tag, void_tag
from ratchet.storage.records.sweep import (
    Finalist,
    FinalistComparison,
    FinalRound,
    SweepObjective,
    SweepReport,
    Trial,
    TrialState,
)
from ratchet.tuning.trial_summary import (
    CauseSavings,
    SweepSavings,
    compute_savings,
    format_duration,
    format_number,
    format_objective,
    format_parameter_value,
    recommended_trial,
    shorten_names,
    superseded_numbers,
    trial_value,
)

REASON_SHOWN, NAME_SHOWN = 160, 40
"""Maximum numbers of characters of a reason and of the workers' names."""

SIGNS: Mapping[TrialState, str] = {"complete": "●", "pruned": "×", "infeasible": "▲", "failed": "✚", "running": "□"}  # noqa: RUF001
"""Symbol of each state, as in the plots, so that every state is recognizable without its colour."""

Body = Sequence[Html] | str

COMPARISON_HEADS = (
    "compared with",
    "difference",
    "lower bound",
    "p",
    "error from seeds",
    "from rows",
    "significant",
    "method",
)
Figure = tuple[str, str, str]
"""Name, value and note."""
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
PICTURES = {
    "history": ("Optimization history.", "Objective of each trial, and the best so far."),
    "curves": ("Learning curves.", "Validation loss of each trial; pruned trials are grey."),
    "importances": (
        "Importances.",
        "Share of the objective's variance that each hyperparameter explains (of early objectives if few trials "
        "are complete).",
    ),
    "slices": ("Single hyperparameters.", "Each mark is a trial. Trials without a value are above the dotted line."),
    "contour": (
        "Two hyperparameters.",
        "Colours between the points are interpolated; other hyperparameters differ as well.",
    ),
    "parallel": (
        "All hyperparameters.",
        "Each line is a trial. A gap means that the hyperparameter was not searched in it.",
    ),
    "pareto": ("Pareto front.", "Trials whose objectives cannot be improved without worsening another objective."),
    "timeline": ("Workers.", "Each bar is a worker with a trial. Hatched bars ended when the worker ended."),
    "savings": ("Tokens.", "Trained tokens in colour, saved tokens hatched."),
}
"""Title and explanation of each plot, by the names of reports/sweep_plots.py."""
NO_PLOTS = "There is no data to plot yet."
SAVINGS_NOTE = (
    "Savings are relative to full training of all trials. They include the rest of pruned trials that were not "
    "continued, and trials that the memory forecast rejected. Saved time is extrapolated from the trial's own tokens "
    "per second."
)

PAGE_STYLE, STYLE, SCRIPT = (Path(__file__).with_name(name) for name in ("page.css", "sweep.css", "sweep.js"))


def _render_state(state: TrialState) -> Html:
    return tag("b", SIGNS[state], class_=f"sign {state}", aria_hidden="true")


def render_trials(report: SweepReport) -> Body:
    """Render all trials. The table is complete; the script sorts and filters it."""
    if not report.trials:
        return "No trial has started."
    hyperparameters = [axis.name for axis in report.axes]
    names = shorten_names(hyperparameters)
    continued_by = {trial.continues: trial.number for trial in report.trials if trial.continues is not None}
    searched = [objective.metric.replace("_", " ") for objective in report.objectives] + [
        names[parameter] for parameter in hyperparameters
    ]
    heads = ("trial", "state", *searched, "tokens", "seconds", "attempts", "run", "workers", "why")
    kinds = "tt" + "n" * len(report.objectives)
    kinds += "".join("t" if axis.kind == "choice" else "n" for axis in report.axes) + "nnnttw"
    rows = [list(_trial_row(report, trial, hyperparameters, continued_by)) for trial in report.trials]
    table = html.table("All trials", kinds, heads, rows)
    return [tag("div", _render_controls(report), table, id="sweep")]


def _trial_row(
    report: SweepReport, trial: Trial, hyperparameters: Sequence[str], continued_by: Mapping[int, int]
) -> Iterator[str]:
    yield str(trial.number)
    yield tag("span", _render_state(trial.state), f" {trial.state}", class_="state")
    for index, objective in enumerate(report.objectives):
        value = trial_value(trial, report.objectives, index)
        yield NONE if value is None or trial.state in ("failed", "infeasible") else sortable_number(objective, value)
    for parameter in hyperparameters:
        yield format_parameter_value(trial.values[parameter]) if parameter in trial.values else NONE
    yield f"{trial.cost.trained_tokens:,}"
    yield f"{trial.cost.train_seconds:,.0f}"
    yield f"{trial.cost.attempts:,}"
    yield tag("code", trial.run_id[:12], title=trial.run_id) if trial.run_id else NONE
    yield (
        tag("bdi", _truncate(", ".join(dict.fromkeys(execution.worker for execution in trial.executions)), NAME_SHOWN))
        or NONE
    )
    yield tag("bdi", _truncate(_explain_outcome(trial, continued_by), REASON_SHOWN))


def _explain_outcome(trial: Trial, continued_by: Mapping[int, int]) -> str:
    """Explain the outcome of a trial and its relation to other trials."""
    sentences = [trial.reason] if trial.reason else []
    if trial.continues is not None:
        sentences.append(f"continues trial {trial.continues}")
    if trial.number in continued_by:
        sentences.append(f"continued by trial {continued_by[trial.number]}")
    return "; ".join(sentences)


def _truncate(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def sortable_number(objective: SweepObjective, value: float) -> str:
    """Format a number in the metric's own unit, so that the column can be sorted."""
    return f"{value:,.0f}" if objective.metric.endswith(("_bytes", "_tokens", "_seconds")) else f"{value:.4f}"


def _render_controls(report: SweepReport) -> Html:
    """Render the filters, which the script makes visible."""
    counts = {state: sum(trial.state == state for trial in report.trials) for state in STATES}
    buttons = [
        tag(
            "button",
            _render_state(state),
            f" {state} ",
            tag("b", f"{count:,}"),
            type="button",
            data_state=state,
            aria_pressed="true",
        )
        for state, count in counts.items()
        if count
    ]
    search = tag("label", tag("span", "search"), void_tag("input", type="search", autocomplete="off"))
    return tag(
        "div", tag("div", search, tag("span", role="status", class_="quiet"), class_="selects"),
        tag("div", *buttons, class_="kinds", role="group", aria_label="States"),
        class_="controls", role="search", aria_label="Filter trials", hidden="",
    )  # fmt: skip


def render_pareto_front(report: SweepReport) -> Body:
    """Render the trials of the Pareto front."""
    members = [trial for trial in report.trials if trial.number in report.best]
    if not members:
        return "No trial is complete."
    hyperparameters = [axis.name for axis in report.axes if axis.kind != "tie"]
    names = shorten_names(hyperparameters)
    heads = (
        "trial",
        *(objective.metric.replace("_", " ") for objective in report.objectives),
        *(names[parameter] for parameter in hyperparameters),
    )
    rows = [
        (
            str(trial.number),
            *(NONE if (value := trial_value(trial, report.objectives, index)) is None
              else format_objective(objective, value)
              for index, objective in enumerate(report.objectives)),
            *(format_parameter_value(trial.values[parameter]) if parameter in trial.values else NONE
              for parameter in hyperparameters),
        )
        for trial in members
    ]  # fmt: skip
    return [
        explanation("No other trial is at least as good in all objectives and better in one of them."),
        html.table("Pareto front", "t" + "n" * (len(heads) - 1), heads, rows),
    ]


def render_finalists(finals: FinalRound | None) -> Body:
    """Render the finalists with their seeds, and the comparisons of the leader with the others."""
    if finals is None:
        return "No final round took place: the best trial is the best of single runs, which is partly luck."
    better = "lower" if finals.direction == "minimize" else "higher"
    seeds = max((len(finalist.means) for finalist in finals.finalists), default=0)
    heads = ("trial", "mean", *(f"seed {place + 1}" for place in range(seeds)), "tokens", "training", "")
    rows = [_finalist_row(finalist, seeds, finals.winner) for finalist in finals.finalists]
    rows_text = f", on {format_count(finals.rows, 'validation row')}" if finals.rows else ""
    parts = [
        explanation(f"{finals.metric.replace('_', ' ')}, {better} is better{rows_text}."),
        html.table("Finalists", "tn" + "n" * seeds + "nnw", heads, rows),
    ]
    if finals.comparisons:
        leader = finals.finalists[0].number
        parts += [
            tag("h3", f"Trial {leader} compared with the others"),
            explanation(
                "Differences of the means, positive if the leader is better, with the one-sided lower bound. A "
                "difference is significant if the bound is above 0. p is corrected for all comparisons (Holm). "
                "The standard error has a component from seeds and a component from rows."
            ),
            html.table("Comparisons", "tnnnnntw", COMPARISON_HEADS, map(_comparison_cells, finals.comparisons)),
        ]
    return [*parts, tag("p", tag("strong", f"Trial {finals.winner} wins: "), tag("bdi", finals.reason))]


def _finalist_row(finalist: Finalist, seeds: int, winner: int) -> tuple[str, ...]:
    means = [_format_fixed(mean) for mean in finalist.means] + [NONE] * (seeds - len(finalist.means))
    verdict = "the winner" if finalist.number == winner else ""
    return (
        str(finalist.number), _format_fixed(finalist.mean), *means, f"{finalist.cost.trained_tokens:,}",
        format_duration(finalist.cost.train_seconds), tag("bdi", "; ".join(filter(None, (verdict, finalist.dropped)))),
    )  # fmt: skip


def _format_fixed(mean: float) -> str:
    """Format with four decimals, so that numbers in a column are comparable. Numbers from 1,000 on have no decimals."""
    return format_significant(mean) if not math.isfinite(mean) or abs(mean) >= 1000 else f"{mean:.4f}"


def _format_signed(difference: float) -> str:
    return _format_fixed(difference).replace("-", MINUS) if difference <= 0 else f"+{_format_fixed(difference)}"


def _comparison_cells(comparison: FinalistComparison) -> tuple[str, ...]:
    return (
        str(comparison.other), _format_signed(comparison.difference), _format_signed(comparison.low),
        format_p_value(comparison.p),
        _format_fixed(comparison.seed_error), _format_fixed(comparison.row_error), "yes" if comparison.better else "no",
        tag("bdi", comparison.method),
    )  # fmt: skip


def render_costs(savings: SweepSavings) -> Html:
    """Render trained and saved tokens."""
    full_tokens = savings.full_tokens

    def row(name: str, part: CauseSavings) -> tuple[str, ...]:
        if not part.trials:
            return name, NONE, NONE, NONE, NONE
        return (
            name,
            f"{part.trials:,}",
            f"{part.tokens:,}",
            format_duration(part.seconds),
            format_percentage(part.tokens, full_tokens),
        )

    rows = [
        row("trained", CauseSavings(savings.trials, savings.trained_tokens, savings.trained_seconds)),
        row("saved by pruning", savings.pruned),
        row("rejected before training", savings.refused),
        ("full training of all", NONE, f"{full_tokens:,}", format_duration(savings.full_seconds), NONE),
    ]
    heads = ("", "trials", "answer tokens", "time", "share of the tokens")
    return html.table("Cost", "tnnnn", heads, rows)


def format_parameters(trial: Trial) -> str:
    """Format the values of a trial in one line."""
    names = shorten_names(trial.values)
    return ", ".join(f"{names[parameter]} {format_parameter_value(value)}" for parameter, value in trial.values.items())


def format_first_objective(report: SweepReport, trial: Trial) -> str:
    """Format the first objective of a trial."""
    value = trial_value(trial, report.objectives)
    return (
        NONE
        if value is None
        else format_objective(report.objectives[0], value)
        if report.objectives
        else format_number(value)
    )


# Header, recommended values and reproduction details of a sweep's page.


def render_header(report: SweepReport, saved: SweepSavings) -> Html:
    """Render title and key figures."""
    measured = " × ".join(objective.metric.replace("_", " ") for objective in report.objectives)  # noqa: RUF001
    figures = [
        tag("div", tag("dt", name), tag("dd", tag("strong", tag("bdi", value)), tag("small", tag("bdi", note))))
        for name, value, note in _key_figures(report, saved)
    ]
    parts = [
        tag("p", "Sweep", class_="quiet"),
        tag("h1", tag("bdi", report.study), tag("span", f"{measured}, {report.sampler.partition(',')[0]}")),
        tag("dl", *figures),
    ]
    if report.stopped:
        parts.append(tag("p", tag("strong", "Stopped early: "), tag("bdi", report.stopped), class_="stopped"))
    return tag("header", *parts)


def _key_figures(report: SweepReport, saved: SweepSavings) -> Iterator[Figure]:
    counts = {state: sum(trial.state == state for trial in report.trials) for state in STATES}
    states = ", ".join(f"{count:,} {state}" for state, count in counts.items() if count) or "none started"
    continued = len(superseded_numbers(report))
    states += f"; {continued:,} pruned trials were continued later" if continued else ""
    started = sum(trial.continues is None for trial in report.trials)
    yield "Trials", f"{started:,} of {report.planned_trials:,}", states
    yield _best_figure(report)
    if report.final_round is not None:
        yield "Winner", f"trial {report.final_round.winner}", report.final_round.reason
    share = format_percentage(saved.tokens, saved.full_tokens)
    of_all = f"{saved.tokens:,} of {saved.full_tokens:,} answer tokens, {format_duration(saved.seconds)}"
    yield "Saved", share, of_all if saved.tokens else "nothing saved"


def _best_figure(report: SweepReport) -> Figure:
    by_number = {trial.number: trial for trial in report.trials}
    if len(report.objectives) > 1:
        numbers = ", ".join(map(str, report.best)) or NONE
        return "Front", format_count(len(report.best), "trial"), f"trials {numbers} (Pareto front)"
    best_trial = by_number.get(report.best[0]) if report.best else None
    if best_trial is None:
        return "Best", NONE, "no trial is complete"
    return (
        "Best",
        format_first_objective(report, best_trial),
        f"trial {best_trial.number}: {format_parameters(best_trial)}",
    )


def render_recommendation(report: SweepReport) -> Sequence[Html] | str:
    """Render the recommended values as they are written into params.yaml."""
    trial = recommended_trial(report)
    if trial is None:
        return (
            "The Pareto front has several trials and no winner was determined. Choose a trial from the table of "
            "the front."
            if len(report.objectives) > 1 and report.best else "No recommendation yet: no trial is complete."
        )  # fmt: skip
    reason = report.final_round.reason if report.final_round is not None else "best of single runs; no final round"
    return [
        tag("p", tag("strong", f"Trial {trial.number}"), ": ", tag("bdi", reason)),
        tag("div", tag("pre", tag("code", format_yaml(trial.values))), class_="scroll", role="region",
            aria_label="Values for params.yaml", tabindex="0"),
        tag("p", tag("code", "ratchet sweep --adopt"), " writes them into params.yaml; ", tag("code", "dvc repro"),
            " then finds the trained run.", class_="quiet"),
    ]  # fmt: skip


def format_yaml(values: Mapping[str, Any]) -> str:
    """Format values by dotted key as YAML that versions 1.1 and 1.2 parse equally, with all digits."""
    tree: dict[str, Any] = {}
    for parameter, item in values.items():
        *sections, leaf = parameter.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = _YamlLeaf(item)
    return "\n".join(_yaml_lines(tree, ""))


class _YamlLeaf:
    """Value in a tree of sections."""

    def __init__(self, item: Any) -> None:
        self.item = item


def _yaml_lines(node: Mapping[str, Any], pad: str) -> Iterator[str]:
    for key, item in node.items():
        name = key if _PLAIN_KEY.fullmatch(key) else json.dumps(key)
        if isinstance(item, _YamlLeaf):
            yield f"{pad}{name}: {_format_scalar(item.item)}"
        else:
            yield f"{pad}{name}:"
            yield from _yaml_lines(item, f"{pad}  ")


def _format_scalar(item: Any) -> str:
    """Format as JSON. A number such as 1e-05 becomes 1.0e-05, because YAML 1.1 parses 1e-05 as text."""
    if isinstance(item, list | tuple):
        return f"[{', '.join(map(_format_scalar, item))}]"
    text = json.dumps(item, ensure_ascii=True)
    if isinstance(item, float) and "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    return text


def render_reproduction(report: SweepReport) -> Sequence[Html]:
    """Render everything that determines the trials."""
    known = {
        "study": report.study,
        "sampler": report.sampler,
        "pruner": report.pruner,
        **report.versions,
        "trials": f"{report.planned_trials:,}",
        "storage": report.storage,
    }
    facts = [(name, tag("bdi", text)) for name, text in known.items() if text]
    facts += [("data", tag("code", report.data_digest)), ("base model", tag("code", report.base_digest))]
    items = [part for name, text in facts for part in (tag("dt", tag("bdi", name)), tag("dd", text))]
    note = (
        "With one worker, the same settings, data, base, seed and versions give the same trials, also across restarts."
    )
    return [explanation(note), tag("dl", *items, class_="facts")]


# The page: one HTML file without external resources, complete without its script. Callers draw the plots with
# reports/sweep_plots.py; the page embeds them as SVG.


def write(report: SweepReport, plots: Mapping[str, bytes], target: Path) -> None:
    """Write the page. Equal arguments give equal bytes.

    Args:
        report: The sweep.
        plots: SVG (or PNG) by the names of PICTURES. Missing plots are omitted.
        target: HTML file to write.
    """
    files.write_atomic(target, render(report, plots))


def render(report: SweepReport, plots: Mapping[str, bytes]) -> str:
    """Return the page as text."""
    saved = compute_savings(report)
    sections: dict[str, Sequence[Html] | str] = {
        "Adopt": render_recommendation(report),
        "Course": _render_plots(report, plots, "history", "curves") or NO_PLOTS,
        "Hyperparameters": _render_plots(report, plots, "importances", "slices", "contour", "parallel") or NO_PLOTS,
    }
    if len(report.objectives) > 1:
        table = render_pareto_front(report)
        sections["Front"] = table if isinstance(table, str) else [*_render_plots(report, plots, "pareto"), *table]
    sections |= {
        "Finalists": render_finalists(report.final_round),
        "Workers": [*_render_workers(report), *_render_plots(report, plots, "timeline")],
        "Cost": [render_costs(saved), *_render_plots(report, plots, "savings"), explanation(SAVINGS_NOTE)],
        "Trials": render_trials(report),
        "Reproduce": render_reproduction(report),
    }
    links = [tag("a", title, href=f"#{html.anchor(title)}") for title in sections]
    contents = tag("nav", *links, aria_label="Sections")
    main = tag("main", *(html.section(title, body) for title, body in sections.items()))
    style, more, script = (path.read_text(encoding="utf-8") for path in (PAGE_STYLE, STYLE, SCRIPT))
    title = f"Sweep {report.study}"
    head = render_header(report, saved)
    return html.document(title, style + more, head, contents, main, images=True, script=script)


def _render_plots(report: SweepReport, plots: Mapping[str, bytes], *names: str) -> list[Html]:
    return [
        render_figure(plots[name], *PICTURES[name], _describe_plot(name, report))
        for name in PICTURES
        if name in names and name in plots
    ]


def _describe_plot(name: str, report: SweepReport) -> str:
    """Describe a plot for screen readers. The tables contain the numbers of the plot."""
    title, note = PICTURES[name]
    trials = format_count(len(report.trials), "trial")
    return f"{title} {note} {trials}; the table of all trials has the numbers."


def _render_workers(report: SweepReport) -> list[Html]:
    executions = [execution for trial in report.trials for execution in trial.executions]
    if not executions:
        return [explanation("No worker has run a trial.")]
    workers = format_count(len({execution.worker for execution in executions}), "worker")
    takeovers = sum(len(trial.executions) - 1 for trial in report.trials if trial.executions)
    duration_s = max(e.last_seen for e in executions) - min(e.started for e in executions)
    summary = f"{workers} in {format_duration(duration_s)} from the first trial to the last heartbeat."
    if takeovers:
        summary += (
            f" Workers took over trials of other workers {format_count(takeovers, 'time')} and resumed from their "
            "checkpoints."
        )
    return [explanation(summary)]

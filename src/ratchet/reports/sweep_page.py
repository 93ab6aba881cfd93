"""Writes the report of a sweep as HTML: trials, Pareto front, final round, cost, charts."""

import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ratchet.config.units import format_count, format_duration
from ratchet.reports import pages, sweep_charts
from ratchet.reports.pages import MINUS, format_p_value, format_significant
from ratchet.reports.sweep_charts import STATES
from ratchet.storage import files
from ratchet.storage.html import NONE, format_percentage
from ratchet.storage.records.sweep import (
    Finalist,
    FinalistComparison,
    SweepReport,
    Trial,
    TrialState,
)
from ratchet.tuning.trial_requests import describe_clone
from ratchet.tuning.trial_summary import (
    CauseSavings,
    SweepSavings,
    compute_savings,
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
"""Title and explanation of each plot, by the names of reports/sweep_charts.py."""


def write(report: SweepReport, target: Path) -> None:
    """Write the page. Equal reports give equal bytes."""
    files.write_atomic(target, render(report))


def render(report: SweepReport) -> str:
    """Return the page as text."""
    saved = compute_savings(report)
    metrics = [objective.metric.replace("_", " ") for objective in report.objectives]
    counts = {state: sum(trial.state == state for trial in report.trials) for state in STATES}
    finals = report.final_round
    seeds = max((len(finalist.means) for finalist in finals.finalists), default=0) if finals else 0
    has_front = len(report.objectives) > 1
    return pages.render(
        "sweep",
        title=f"Sweep {report.study}",
        scripts=("trials.js",),
        sections=["Adopt", "Course", "Hyperparameters", *(["Front"] if has_front else []), "Finalists", "Workers",
                  "Cost", "Trials", "Reproduce"],
        report=report,
        measured=f"{' × '.join(metrics)}, {report.sampler.partition(',')[0]}",  # noqa: RUF001
        figures=list(_key_figures(report, saved, counts)),
        adopt=_recommend(report),
        charts=sweep_charts.build_charts(report),
        pictures=PICTURES,
        signs=SIGNS,
        front=_list_front(report, metrics),
        seeds=[f"seed {place + 1}" for place in range(seeds)],
        finalists=[_finalist_row(finalist, seeds, finals.winner) for finalist in finals.finalists] if finals else [],
        comparisons=[_comparison_cells(comparison) for comparison in finals.comparisons] if finals else [],
        workers=_summarize_workers(report),
        costs=_list_costs(saved),
        counts=counts,
        trials=_list_trials(report, metrics),
        facts=_describe_reproduction(report),
    )  # fmt: skip


def _list_trials(report: SweepReport, metrics: Sequence[str]) -> dict[str, Any]:
    """Return the table of all trials. The script sorts and filters it."""
    names = shorten_names(axis.name for axis in report.axes)
    continued_by = {trial.continues: trial.number for trial in report.trials if trial.continues is not None}
    heads = ["trial", "state", *metrics, *(names[axis.name] for axis in report.axes), "tokens", "seconds", "attempts",
             "run", "workers", "why"]  # fmt: skip
    kinds = "tt" + "n" * len(report.objectives) + "".join("t" if axis.kind == "choice" else "n" for axis in report.axes)
    rows = [{"number": trial.number, "state": trial.state, "cells": list(_trial_cells(report, trial, continued_by))}
            for trial in report.trials]  # fmt: skip
    return {"heads": heads, "kinds": f"{kinds}nnnttw", "rows": rows}


def _trial_cells(report: SweepReport, trial: Trial, continued_by: Mapping[int, int]) -> Iterator[object]:
    bdi, digest = pages.macros().bdi, pages.macros().digest
    for index, objective in enumerate(report.objectives):
        value = trial_value(trial, report.objectives, index)
        if value is None or trial.state in ("failed", "infeasible"):
            yield NONE
        else:  # in the metric's own unit, so that the column can be sorted
            is_count = objective.metric.endswith(("_bytes", "_tokens", "_seconds"))
            yield f"{value:,.0f}" if is_count else f"{value:.4f}"
    for axis in report.axes:
        yield format_parameter_value(trial.values[axis.name]) if axis.name in trial.values else NONE
    yield trial.cost.trained_tokens
    yield f"{trial.cost.train_seconds:,.0f}"
    yield trial.cost.attempts
    yield digest(trial.run_id)
    workers = ", ".join(dict.fromkeys(execution.worker for execution in trial.executions))
    yield bdi(_truncate(workers, NAME_SHOWN))
    sentences = list(filter(None, (describe_clone(trial), trial.reason)))
    if trial.continues is not None:
        sentences.append(f"continues trial {trial.continues}")
    if trial.number in continued_by:
        sentences.append(f"continued by trial {continued_by[trial.number]}")
    yield bdi(_truncate("; ".join(sentences), REASON_SHOWN))


def _truncate(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _list_front(report: SweepReport, metrics: Sequence[str]) -> dict[str, Any]:
    """Return the trials of the Pareto front."""
    hyperparameters = [axis.name for axis in report.axes if axis.kind != "tie"]
    names = shorten_names(hyperparameters)

    def cells(trial: Trial) -> Iterator[str]:
        for index, objective in enumerate(report.objectives):
            value = trial_value(trial, report.objectives, index)
            yield NONE if value is None else format_objective(objective, value)
        for name in hyperparameters:
            yield format_parameter_value(trial.values[name]) if name in trial.values else NONE

    rows = [(trial.number, *cells(trial)) for trial in report.trials if trial.number in report.best]
    return {"heads": ["trial", *metrics, *(names[name] for name in hyperparameters)], "rows": rows}


def _finalist_row(finalist: Finalist, seeds: int, winner: int) -> tuple[object, ...]:
    means = [_format_fixed(mean) for mean in finalist.means] + [NONE] * (seeds - len(finalist.means))
    verdict = "the winner" if finalist.number == winner else ""
    note = pages.macros().bdi("; ".join(filter(None, (verdict, finalist.dropped))))
    return (finalist.number, _format_fixed(finalist.mean), *means, finalist.cost.trained_tokens,
            format_duration(finalist.cost.train_seconds), note)  # fmt: skip


def _format_fixed(mean: float) -> str:
    """Format with four decimals, so that numbers in a column are comparable. Numbers from 1,000 on have no decimals."""
    return format_significant(mean) if not math.isfinite(mean) or abs(mean) >= 1000 else f"{mean:.4f}"


def _format_signed(difference: float) -> str:
    return _format_fixed(difference).replace("-", MINUS) if difference <= 0 else f"+{_format_fixed(difference)}"


def _comparison_cells(comparison: FinalistComparison) -> tuple[object, ...]:
    return (
        comparison.other, _format_signed(comparison.difference), _format_signed(comparison.low),
        format_p_value(comparison.p), _format_fixed(comparison.seed_error), _format_fixed(comparison.row_error),
        "yes" if comparison.better else "no", pages.macros().bdi(comparison.method),
    )  # fmt: skip


def _list_costs(savings: SweepSavings) -> list[tuple[object, ...]]:
    """Return trained and saved tokens."""
    parts = {
        "trained": CauseSavings(savings.trials, savings.trained_tokens, savings.trained_seconds),
        "saved by pruning": savings.pruned,
        "rejected before training": savings.refused,
    }
    rows = [
        (name, part.trials, part.tokens, format_duration(part.seconds),
         format_percentage(part.tokens, savings.full_tokens))
        if part.trials else (name, NONE, NONE, NONE, NONE)
        for name, part in parts.items()
    ]  # fmt: skip
    return [*rows, ("full training of all", NONE, savings.full_tokens, format_duration(savings.full_seconds), NONE)]


def format_parameters(trial: Trial) -> str:
    """Format the values of a trial in one line."""
    names = shorten_names(trial.values)
    return ", ".join(f"{names[parameter]} {format_parameter_value(value)}" for parameter, value in trial.values.items())


def format_first_objective(report: SweepReport, trial: Trial) -> str:
    """Format the first objective of a trial."""
    value = trial_value(trial, report.objectives)
    if value is None:
        return NONE
    return format_objective(report.objectives[0], value) if report.objectives else format_number(value)


def _key_figures(
    report: SweepReport, saved: SweepSavings, counts: Mapping[TrialState, int]
) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and note of each key figure."""
    states = ", ".join(f"{count:,} {state}" for state, count in counts.items() if count) or "none started"
    continued = len(superseded_numbers(report))
    states += f"; {continued:,} pruned trials were continued later" if continued else ""
    started = sum(trial.continues is None for trial in report.trials)
    yield "Trials", f"{started:,} of {report.planned_trials:,}", states
    best = next((trial for trial in report.trials if trial.number in report.best[:1]), None)
    if len(report.objectives) > 1:
        numbers = ", ".join(map(str, report.best)) or NONE
        yield "Front", format_count(len(report.best), "trial"), f"trials {numbers} (Pareto front)"
    elif best is None:
        yield "Best", NONE, "no trial is complete"
    else:
        yield "Best", format_first_objective(report, best), f"trial {best.number}: {format_parameters(best)}"
    if report.final_round is not None:
        yield "Winner", f"trial {report.final_round.winner}", report.final_round.reason
    share = format_percentage(saved.tokens, saved.full_tokens)
    of_all = f"{saved.tokens:,} of {saved.full_tokens:,} answer tokens, {format_duration(saved.seconds)}"
    yield "Saved", share, of_all if saved.tokens else "nothing saved"


def _recommend(report: SweepReport) -> dict[str, Any]:
    """Return the recommended values as they are written into params.yaml."""
    trial = recommended_trial(report)
    if trial is None:
        reason = "No recommendation yet: no trial is complete."
        if len(report.objectives) > 1 and report.best:
            reason = (
                "The Pareto front has several trials and no winner was determined. Choose a trial from the table of "
                "the front."
            )
        return {"trial": None, "reason": reason}
    reason = report.final_round.reason if report.final_round is not None else "best of single runs; no final round"
    return {"trial": trial.number, "reason": reason, "yaml": format_yaml(trial.values)}


def format_yaml(values: Mapping[str, Any]) -> str:
    """Format values by dotted key as YAML that versions 1.1 and 1.2 parse equally, with all digits."""
    sections: dict[str, dict[str, Any]] = {}
    for parameter, item in values.items():
        section, _, rest = parameter.partition(".")
        sections.setdefault(section, {})[rest] = item
    lines = []
    for section, items in sections.items():
        name = section if _PLAIN_KEY.fullmatch(section) else json.dumps(section)
        if "" in items:
            lines.append(f"{name}: {_format_scalar(items[''])}")
        else:
            lines += [f"{name}:", textwrap.indent(format_yaml(items), "  ")]
    return "\n".join(lines)


def _format_scalar(item: Any) -> str:
    """Format as JSON. A number such as 1e-05 becomes 1.0e-05, because YAML 1.1 parses 1e-05 as text."""
    if isinstance(item, list | tuple):
        return f"[{', '.join(map(_format_scalar, item))}]"
    text = json.dumps(item, ensure_ascii=True)
    if isinstance(item, float) and "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    return text


def _describe_reproduction(report: SweepReport) -> dict[str, object]:
    """Return everything that determines the trials."""
    known = {
        "study": report.study, "sampler": report.sampler, "pruner": report.pruner, **report.versions,
        "trials": f"{report.planned_trials:,}", "storage": report.storage,
    }  # fmt: skip
    code = pages.macros().code
    facts: dict[str, object] = {name: text for name, text in known.items() if text}
    return facts | {"data": code(report.data_digest), "base model": code(report.base_digest)}


def _summarize_workers(report: SweepReport) -> str:
    executions = [execution for trial in report.trials for execution in trial.executions]
    if not executions:
        return "No worker has run a trial."
    workers = format_count(len({execution.worker for execution in executions}), "worker")
    takeovers = sum(len(trial.executions) - 1 for trial in report.trials if trial.executions)
    duration_s = max(e.last_seen for e in executions) - min(e.started for e in executions)
    summary = f"{workers} in {format_duration(duration_s)} from the first trial to the last heartbeat."
    if takeovers:
        summary += (
            f" Workers took over trials of other workers {format_count(takeovers, 'time')} and resumed from their "
            "checkpoints."
        )
    return summary

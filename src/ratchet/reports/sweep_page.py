"""Tables of a sweep's page: all trials, the front, the finalists, what it cost."""

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
    format_knob_value,
    format_number,
    format_objective,
    recommended_trial,
    shorten_names,
    superseded_numbers,
    trial_value,
)

REASON_SHOWN, NAME_SHOWN = 160, 40
"""Characters of a reason and of a worker's name."""

SIGNS: Mapping[TrialState, str] = {"complete": "●", "pruned": "×", "infeasible": "▲", "failed": "✚", "running": "□"}  # noqa: RUF001
"""As in the pictures: no state is known by its colour alone."""

Body = Sequence[Html] | str


def _render_state(state: TrialState) -> Html:
    return tag("b", SIGNS[state], class_=f"sign {state}", aria_hidden="true")


def render_trials(report: SweepReport) -> Body:
    """All trials, a line each: sorted and filtered by the page's script, complete without it."""
    if not report.trials:
        return "No trial has begun."
    knobs = [axis.knob for axis in report.axes]
    names = shorten_names(knobs)
    old = {trial.continues: trial.number for trial in report.trials if trial.continues is not None}
    searched = [one.metric.replace("_", " ") for one in report.objectives] + [names[knob] for knob in knobs]
    heads = ("trial", "state", *searched, "tokens", "seconds", "attempts", "run", "workers", "why")
    kinds = "tt" + "n" * len(report.objectives)
    kinds += "".join("t" if axis.kind == "choice" else "n" for axis in report.axes) + "nnnttw"
    rows = [list(_trial_row(report, trial, knobs, old)) for trial in report.trials]
    table = html.table("All trials", kinds, heads, rows)
    return [tag("div", _render_controls(report), table, id="sweep")]


def _trial_row(report: SweepReport, trial: Trial, knobs: Sequence[str], old: Mapping[int, int]) -> Iterator[str]:
    yield str(trial.number)
    yield tag("span", _render_state(trial.state), f" {trial.state}", class_="state")
    for which, measure in enumerate(report.objectives):
        found = trial_value(trial, report.objectives, which)
        yield NONE if found is None or trial.state in ("failed", "infeasible") else sortable_number(measure, found)
    for knob in knobs:
        yield format_knob_value(trial.values[knob]) if knob in trial.values else NONE
    yield f"{trial.cost.trained_tokens:,}"
    yield f"{trial.cost.train_seconds:,.0f}"
    yield f"{trial.cost.attempts:,}"
    yield tag("code", trial.run_id[:12], title=trial.run_id) if trial.run_id else NONE
    yield tag("bdi", _truncate(", ".join(dict.fromkeys(take.worker for take in trial.takes)), NAME_SHOWN)) or NONE
    yield tag("bdi", _truncate(_explain_outcome(trial, old), REASON_SHOWN))


def _explain_outcome(trial: Trial, old: Mapping[int, int]) -> str:
    """Why a trial ended so, and which others it belongs to."""
    told = [trial.reason] if trial.reason else []
    if trial.continues is not None:
        told.append(f"goes on with trial {trial.continues}")
    if trial.number in old:
        told.append(f"trial {old[trial.number]} went on with it")
    return "; ".join(told)


def _truncate(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def sortable_number(measure: SweepObjective, found: float) -> str:
    """A number that can be sorted, in the metric's own unit."""
    return f"{found:,.0f}" if measure.metric.endswith(("_bytes", "_tokens", "_seconds")) else f"{found:.4f}"


def _render_controls(report: SweepReport) -> Html:
    """Filters; the script shows them."""
    counts = {one: sum(trial.state == one for trial in report.trials) for one in STATES}
    buttons = [
        tag(
            "button",
            _render_state(one),
            f" {one} ",
            tag("b", f"{count:,}"),
            type="button",
            data_state=one,
            aria_pressed="true",
        )
        for one, count in counts.items()
        if count
    ]
    search = tag("label", tag("span", "search"), void_tag("input", type="search", autocomplete="off"))
    return tag(
        "div", tag("div", search, tag("span", role="status", class_="quiet"), class_="selects"),
        tag("div", *buttons, class_="kinds", role="group", aria_label="States"),
        class_="controls", role="search", aria_label="Filter the trials", hidden="",
    )  # fmt: skip


def render_pareto_front(report: SweepReport) -> Body:
    """Trials that no other beats in all objectives."""
    members = [trial for trial in report.trials if trial.number in report.best]
    if not members:
        return "No trial is complete."
    knobs = [axis.knob for axis in report.axes if axis.kind != "tie"]
    names = shorten_names(knobs)
    heads = ("trial", *(one.metric.replace("_", " ") for one in report.objectives), *(names[knob] for knob in knobs))
    rows = [
        (
            str(trial.number),
            *(NONE if (found := trial_value(trial, report.objectives, which)) is None
              else format_objective(measure, found)
              for which, measure in enumerate(report.objectives)),
            *(format_knob_value(trial.values[knob]) if knob in trial.values else NONE for knob in knobs),
        )
        for trial in members
    ]  # fmt: skip
    return [
        explanation("Of each of these no other trial is at least as good in everything and better in something."),
        html.table("Pareto front", "t" + "n" * (len(heads) - 1), heads, rows),
    ]


def render_finalists(finals: FinalRound | None) -> Body:
    """The best trials with several seeds, and how the first compares with each of the others."""
    if finals is None:
        return "No finalists were compared: the best trial is the best of single trainings, and luck has a part in it."
    better = "lower" if finals.direction == "minimize" else "higher"
    seeds = max((len(one.means) for one in finals.finalists), default=0)
    heads = ("trial", "mean", *(f"seed {place + 1}" for place in range(seeds)), "tokens", "training", "")
    rows = [_finalist_row(one, seeds, finals.winner) for one in finals.finalists]
    on = f", on {format_count(finals.rows, 'validation row')}" if finals.rows else ""
    parts = [
        explanation(f"{finals.metric.replace('_', ' ')}, {better} is better{on}."),
        html.table("Finalists", "tn" + "n" * seeds + "nnw", heads, rows),
    ]
    if finals.comparisons:
        leader = finals.finalists[0].number
        parts += [
            tag("h3", f"Trial {leader} against the others"),
            explanation(
                "Differences of the means, positive where the first is better, with the one-sided lower bound: above 0 "
                "the difference is real. p is corrected for all comparisons (Holm). The standard error has a part "
                "from seeds and a part from rows."
            ),
            html.table("Comparisons", "tnnnnntw", COMPARED, map(_comparison_cells, finals.comparisons)),
        ]
    return [*parts, tag("p", tag("strong", f"Trial {finals.winner} wins: "), tag("bdi", finals.reason))]


COMPARED = ("against trial", "difference", "lower bound", "p", "error of seeds", "of rows", "really better", "method")


def _finalist_row(one: Finalist, seeds: int, winner: int) -> tuple[str, ...]:
    means = [_format_fixed(mean) for mean in one.means] + [NONE] * (seeds - len(one.means))
    said = "the winner" if one.number == winner else ""
    return (
        str(one.number), _format_fixed(one.mean), *means, f"{one.cost.trained_tokens:,}",
        format_duration(one.cost.train_seconds), tag("bdi", "; ".join(filter(None, (said, one.dropped)))),
    )  # fmt: skip


def _format_fixed(mean: float) -> str:
    """Four places, so that figures below each other can be compared; large ones none."""
    return format_significant(mean) if not math.isfinite(mean) or abs(mean) >= 1000 else f"{mean:.4f}"


def _format_signed(difference: float) -> str:
    return _format_fixed(difference).replace("-", MINUS) if difference <= 0 else f"+{_format_fixed(difference)}"


def _comparison_cells(one: FinalistComparison) -> tuple[str, ...]:
    return (
        str(one.other), _format_signed(one.difference), _format_signed(one.low), format_p_value(one.p),
        _format_fixed(one.seed_error), _format_fixed(one.row_error), "yes" if one.better else "no",
        tag("bdi", one.method),
    )  # fmt: skip


def render_costs(found: SweepSavings) -> Html:
    """What was trained, and what was not."""
    whole = found.full_tokens

    def row(name: str, one: CauseSavings) -> tuple[str, ...]:
        if not one.trials:
            return name, NONE, NONE, NONE, NONE
        return (
            name,
            f"{one.trials:,}",
            f"{one.tokens:,}",
            format_duration(one.seconds),
            format_percentage(one.tokens, whole),
        )

    rows = [
        row("trained", CauseSavings(found.trials, found.trained_tokens, found.trained_seconds)),
        row("saved by pruning", found.pruned),
        row("refused before training", found.refused),
        ("full trainings of all", NONE, f"{whole:,}", format_duration(found.full_seconds), NONE),
    ]
    heads = ("", "trials", "answer tokens", "time", "share of the tokens")
    return html.table("What it cost", "tnnnn", heads, rows)


def format_parameters(trial: Trial) -> str:
    """The values of a trial in a line."""
    names = shorten_names(trial.values)
    return ", ".join(f"{names[knob]} {format_knob_value(one)}" for knob, one in trial.values.items())


def format_first_objective(report: SweepReport, trial: Trial) -> str:
    """The first objective of a trial for people."""
    found = trial_value(trial, report.objectives)
    return (
        NONE
        if found is None
        else format_objective(report.objectives[0], found)
        if report.objectives
        else format_number(found)
    )


# Head and foot of a sweep's page: key figures, values to adopt, and what it takes to do it again.

Figure = tuple[str, str, str]
"""Name, value, what is to be said of it."""

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


def render_header(report: SweepReport, saved: SweepSavings) -> Html:
    """Title and key figures."""
    measured = " × ".join(one.metric.replace("_", " ") for one in report.objectives)  # noqa: RUF001
    figures = [
        tag("div", tag("dt", name), tag("dd", tag("strong", tag("bdi", found)), tag("small", tag("bdi", note))))
        for name, found, note in _key_figures(report, saved)
    ]
    parts = [
        tag("p", "Sweep", class_="quiet"),
        tag("h1", tag("bdi", report.study), tag("span", f"{measured}, {report.sampler.partition(',')[0]}")),
        tag("dl", *figures),
    ]
    if report.stopped:
        parts.append(tag("p", tag("strong", "Stopped before its end: "), tag("bdi", report.stopped), class_="stopped"))
    return tag("header", *parts)


def _key_figures(report: SweepReport, saved: SweepSavings) -> Iterator[Figure]:
    counts = {state: sum(trial.state == state for trial in report.trials) for state in STATES}
    told = ", ".join(f"{count:,} {state}" for state, count in counts.items() if count) or "none has begun"
    went_on = len(superseded_numbers(report))
    told += f"; {went_on:,} of the pruned went on later" if went_on else ""
    begun = sum(trial.continues is None for trial in report.trials)
    yield "Trials", f"{begun:,} of {report.wanted_trials:,}", told
    yield _best_figure(report)
    if report.finals is not None:
        yield "Winner", f"trial {report.finals.winner}", report.finals.reason
    share = format_percentage(saved.tokens, saved.full_tokens)
    of_all = f"{saved.tokens:,} of {saved.full_tokens:,} answer tokens, {format_duration(saved.seconds)}"
    yield "Saved", share, of_all if saved.tokens else "nothing was left out"


def _best_figure(report: SweepReport) -> Figure:
    by_number = {trial.number: trial for trial in report.trials}
    if len(report.objectives) > 1:
        listed = ", ".join(map(str, report.best)) or NONE
        return "Front", format_count(len(report.best), "trial"), f"trials {listed}: no other beats them in everything"
    found = by_number.get(report.best[0]) if report.best else None
    if found is None:
        return "Best", NONE, "no trial is complete"
    return "Best", format_first_objective(report, found), f"trial {found.number}: {format_parameters(found)}"


def render_recommendation(report: SweepReport) -> Sequence[Html] | str:
    """The values that the sweep recommends, as they are written into params.yaml."""
    found = recommended_trial(report)
    if found is None:
        return (
            "Several trials are on the front, and none was named the winner: choose one from the table of the front."
            if len(report.objectives) > 1 and report.best else "There is nothing to adopt yet: no trial is complete."
        )  # fmt: skip
    why = report.finals.reason if report.finals is not None else "the best of single trainings; no finalists compared"
    return [
        tag("p", tag("strong", f"Trial {found.number}"), ": ", tag("bdi", why)),
        tag("div", tag("pre", tag("code", format_yaml(found.values))), class_="scroll", role="region",
            aria_label="Values for params.yaml", tabindex="0"),
        tag("p", tag("code", "ratchet sweep --adopt"), " writes them into params.yaml; ", tag("code", "dvc repro"),
            " then finds the run already trained.", class_="quiet"),
    ]  # fmt: skip


def format_yaml(found: Mapping[str, Any]) -> str:
    """Values by dotted key as YAML that version 1.1 and 1.2 read alike, with every digit."""
    tree: dict[str, Any] = {}
    for knob, item in found.items():
        *sections, leaf = knob.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = _YamlLeaf(item)
    return "\n".join(_yaml_lines(tree, ""))


class _YamlLeaf:
    """A value, told from a section."""

    def __init__(self, item: Any) -> None:
        self.item = item


def _yaml_lines(node: Mapping[str, Any], pad: str) -> Iterator[str]:
    for key, one in node.items():
        name = key if _PLAIN_KEY.fullmatch(key) else json.dumps(key)
        if isinstance(one, _YamlLeaf):
            yield f"{pad}{name}: {_format_scalar(one.item)}"
        else:
            yield f"{pad}{name}:"
            yield from _yaml_lines(one, f"{pad}  ")


def _format_scalar(item: Any) -> str:
    """JSON is YAML but for numbers such as 1e-05, which version 1.1 takes for a text."""
    if isinstance(item, list | tuple):
        return f"[{', '.join(map(_format_scalar, item))}]"
    text = json.dumps(item, ensure_ascii=True)
    if isinstance(item, float) and "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    return text


def render_reproduction(report: SweepReport) -> Sequence[Html]:
    """Everything that the same trials depend on."""
    known = {
        "study": report.study,
        "sampler": report.sampler,
        "pruner": report.pruner,
        **report.versions,
        "trials": f"{report.wanted_trials:,}",
        "storage": report.storage,
    }
    facts = [(name, tag("bdi", text)) for name, text in known.items() if text]
    facts += [("data", tag("code", report.data_digest)), ("base model", tag("code", report.base_digest))]
    listed = [part for name, text in facts for part in (tag("dt", tag("bdi", name)), tag("dd", text))]
    said = "With one worker the same settings, data, base, seed and versions give the same trials, across restarts too."
    return [explanation(said), tag("dl", *listed, class_="facts")]


# The page of a sweep, for people: one HTML file that loads nothing, whole without its script.
#
# Pictures come as SVG from reports/sweep_plots.py, by whoever asks for the page, and are written into it.

HOUSE_STYLE, STYLE, SCRIPT = (Path(__file__).with_name(name) for name in ("page.css", "sweep.css", "sweep.js"))

PICTURES = {
    "history": ("Optimisation history.", "What each trial came to, and the best until then."),
    "curves": ("Learning curves.", "Validation loss of each trial; grey ones were pruned."),
    "importances": (
        "Importances.",
        "How much of the differences each knob explains (of early ones, where few are complete).",
    ),
    "slices": ("Each knob for itself.", "A mark is a trial; above the dotted line are those without a value."),
    "contour": ("Two knobs.", "Colours between the points are interpolated; other knobs differ, too."),
    "parallel": ("All knobs.", "A line is a trial; it has a gap where a knob was not searched for it."),
    "pareto": ("Pareto front.", "What cannot be better in one objective without being worse in another."),
    "timeline": ("Workers.", "A bar is a worker with a trial; hatched ones ended with the worker."),
    "savings": ("Tokens.", "Trained in colour, saved hatched."),
}
"""Title of each picture, and how it is read."""


def write(report: SweepReport, pictures: Mapping[str, bytes], target: Path) -> None:
    """Write the page. Equal arguments give equal bytes.

    Args:
        report: the sweep.
        pictures: SVG (or PNG), by the names of PICTURES; those that are missing are left out.
        target: the HTML file.
    """
    files.write_atomic(target, render(report, pictures))


def render(report: SweepReport, pictures: Mapping[str, bytes]) -> str:
    """The page's text."""
    saved = compute_savings(report)
    sections: dict[str, Sequence[Html] | str] = {
        "Adopt": render_recommendation(report),
        "Course": _render_plots(report, pictures, "history", "curves") or NO_PICTURES,
        "Knobs": _render_plots(report, pictures, "importances", "slices", "contour", "parallel") or NO_PICTURES,
    }
    if len(report.objectives) > 1:
        table = render_pareto_front(report)
        sections["Front"] = table if isinstance(table, str) else [*_render_plots(report, pictures, "pareto"), *table]
    sections |= {
        "Finalists": render_finalists(report.finals),
        "Workers": [*_render_workers(report), *_render_plots(report, pictures, "timeline")],
        "Cost": [render_costs(saved), *_render_plots(report, pictures, "savings"), explanation(COUNTED)],
        "Trials": render_trials(report),
        "Reproduce": render_reproduction(report),
    }
    links = [tag("a", title, href=f"#{html.anchor(title)}") for title in sections]
    contents = tag("nav", *links, aria_label="Sections")
    main = tag("main", *(html.section(title, body) for title, body in sections.items()))
    style, more, script = (path.read_text(encoding="utf-8") for path in (HOUSE_STYLE, STYLE, SCRIPT))
    title = f"Sweep {report.study}"
    head = render_header(report, saved)
    return html.document(title, style + more, head, contents, main, images=True, script=script)


NO_PICTURES = "There is nothing to be drawn yet."

COUNTED = (
    "Saved is counted against full trainings of everything that was tried: the rest of pruned trials that nobody went "
    "on with, and what the memory forecast refused. Time that was not spent is extrapolated from the "
    "trial's own tokens per second."
)


def _render_plots(report: SweepReport, pictures: Mapping[str, bytes], *names: str) -> list[Html]:
    return [
        render_figure(pictures[name], *PICTURES[name], _describe_plot(name, report))
        for name in PICTURES
        if name in names and name in pictures
    ]


def _describe_plot(name: str, report: SweepReport) -> str:
    """A picture in words; the tables have its numbers."""
    title, note = PICTURES[name]
    trials = format_count(len(report.trials), "trial")
    return f"{title} {note} {trials}; the table of all trials has the numbers."


def _render_workers(report: SweepReport) -> list[Html]:
    takes = [take for trial in report.trials for take in trial.takes]
    if not takes:
        return [explanation("No worker has had a trial.")]
    workers = format_count(len({take.worker for take in takes}), "worker")
    again = sum(len(trial.takes) - 1 for trial in report.trials if trial.takes)
    whole = max(take.seen for take in takes) - min(take.begun for take in takes)
    said = f"{workers} in {format_duration(whole)} from the first trial to the last sign of life."
    if again:
        said += (
            f" {format_count(again, 'time')} a worker took over the trial of another, and went on from its checkpoint."
        )
    return [explanation(said)]

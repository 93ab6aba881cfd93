"""Tables of a sweep's page: all trials, the front, the finalists, what it cost."""

import math
from collections.abc import Iterator, Mapping, Sequence

from ratchet import markup
from ratchet.markup import NONE, Html, counted, lone, percentage, quiet, tag
from ratchet.pages.sweep_canvas import STATES
from ratchet.pages.sweep_savings import Saved, Savings
from ratchet.pages.sweep_trials import amount, duration, number, short_names, shown, value
from ratchet.pages.values import MINUS, digits, probability
from ratchet.records_sweep import Comparison, Finalist, Finals, Measure, SweepReport, Trial, TrialState

REASON_SHOWN, NAME_SHOWN = 160, 40
"""Characters of a reason and of a worker's name."""

SIGNS: Mapping[TrialState, str] = {"complete": "●", "pruned": "×", "infeasible": "▲", "failed": "✚", "running": "□"}  # noqa: RUF001
"""As in the pictures: no state is known by its colour alone."""

Body = Sequence[Html] | str


def _sign(state: TrialState) -> Html:
    return tag("b", SIGNS[state], class_=f"sign {state}", aria_hidden="true")


def trials(report: SweepReport) -> Body:
    """All trials, a line each: sorted and filtered by the page's script, complete without it."""
    if not report.trials:
        return "No trial has begun."
    knobs = [axis.knob for axis in report.axes]
    names = short_names(knobs)
    old = {trial.continues: trial.number for trial in report.trials if trial.continues is not None}
    searched = [one.metric.replace("_", " ") for one in report.objectives] + [names[knob] for knob in knobs]
    heads = ("trial", "state", *searched, "tokens", "seconds", "attempts", "run", "workers", "why")
    kinds = "tt" + "n" * len(report.objectives)
    kinds += "".join("t" if axis.kind == "choice" else "n" for axis in report.axes) + "nnnttw"
    rows = [list(_row(report, trial, knobs, old)) for trial in report.trials]
    table = markup.table("All trials", kinds, heads, rows)
    return [tag("div", _controls(report), table, id="sweep")]


def _row(report: SweepReport, trial: Trial, knobs: Sequence[str], old: Mapping[int, int]) -> Iterator[str]:
    yield str(trial.number)
    yield tag("span", _sign(trial.state), f" {trial.state}", class_="state")
    for which, measure in enumerate(report.objectives):
        found = value(trial, report.objectives, which)
        yield NONE if found is None or trial.state in ("failed", "infeasible") else plain_amount(measure, found)
    for knob in knobs:
        yield shown(trial.values[knob]) if knob in trial.values else NONE
    yield f"{trial.cost.trained_tokens:,}"
    yield f"{trial.cost.train_seconds:,.0f}"
    yield f"{trial.cost.attempts:,}"
    yield tag("code", trial.run_id[:12], title=trial.run_id) if trial.run_id else NONE
    yield tag("bdi", _cut(", ".join(dict.fromkeys(take.worker for take in trial.takes)), NAME_SHOWN)) or NONE
    yield tag("bdi", _cut(_why(trial, old), REASON_SHOWN))


def _why(trial: Trial, old: Mapping[int, int]) -> str:
    """Why a trial ended so, and which others it belongs to."""
    told = [trial.reason] if trial.reason else []
    if trial.continues is not None:
        told.append(f"goes on with trial {trial.continues}")
    if trial.number in old:
        told.append(f"trial {old[trial.number]} went on with it")
    return "; ".join(told)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def plain_amount(measure: Measure, found: float) -> str:
    """A number that can be sorted, in the metric's own unit."""
    return f"{found:,.0f}" if measure.metric.endswith(("_bytes", "_tokens", "_seconds")) else f"{found:.4f}"


def _controls(report: SweepReport) -> Html:
    """Filters; the script shows them."""
    counts = {one: sum(trial.state == one for trial in report.trials) for one in STATES}
    buttons = [
        tag(
            "button", _sign(one), f" {one} ", tag("b", f"{count:,}"), type="button", data_state=one, aria_pressed="true"
        )
        for one, count in counts.items()
        if count
    ]
    search = tag("label", tag("span", "search"), lone("input", type="search", autocomplete="off"))
    return tag(
        "div", tag("div", search, tag("span", role="status", class_="quiet"), class_="selects"),
        tag("div", *buttons, class_="kinds", role="group", aria_label="States"),
        class_="controls", role="search", aria_label="Filter the trials", hidden="",
    )  # fmt: skip


def front(report: SweepReport) -> Body:
    """Trials that no other beats in all objectives."""
    members = [trial for trial in report.trials if trial.number in report.best]
    if not members:
        return "No trial is complete."
    knobs = [axis.knob for axis in report.axes if axis.kind != "tie"]
    names = short_names(knobs)
    heads = ("trial", *(one.metric.replace("_", " ") for one in report.objectives), *(names[knob] for knob in knobs))
    rows = [
        (
            str(trial.number),
            *(NONE if (found := value(trial, report.objectives, which)) is None else amount(measure, found)
              for which, measure in enumerate(report.objectives)),
            *(shown(trial.values[knob]) if knob in trial.values else NONE for knob in knobs),
        )
        for trial in members
    ]  # fmt: skip
    return [
        quiet("Of each of these no other trial is at least as good in everything and better in something."),
        markup.table("Pareto front", "t" + "n" * (len(heads) - 1), heads, rows),
    ]


def finalists(finals: Finals | None) -> Body:
    """The best trials with several seeds, and how the first compares with each of the others."""
    if finals is None:
        return "No finalists were compared: the best trial is the best of single trainings, and luck has a part in it."
    better = "lower" if finals.direction == "minimize" else "higher"
    seeds = max((len(one.means) for one in finals.finalists), default=0)
    heads = ("trial", "mean", *(f"seed {place + 1}" for place in range(seeds)), "tokens", "training", "")
    rows = [_finalist(one, seeds, finals.winner) for one in finals.finalists]
    on = f", on {counted(finals.rows, 'validation row')}" if finals.rows else ""
    parts = [
        quiet(f"{finals.metric.replace('_', ' ')}, {better} is better{on}."),
        markup.table("Finalists", "tn" + "n" * seeds + "nnw", heads, rows),
    ]
    if finals.comparisons:
        leader = finals.finalists[0].number
        parts += [
            tag("h3", f"Trial {leader} against the others"),
            quiet(
                "Differences of the means, positive where the first is better, with the one-sided lower bound: above 0 "
                "the difference is real. p is corrected for all comparisons (Holm). The standard error has a part "
                "from seeds and a part from rows."
            ),
            markup.table("Comparisons", "tnnnnntw", COMPARED, map(_comparison, finals.comparisons)),
        ]
    return [*parts, tag("p", tag("strong", f"Trial {finals.winner} wins: "), tag("bdi", finals.reason))]


COMPARED = ("against trial", "difference", "lower bound", "p", "error of seeds", "of rows", "really better", "method")


def _finalist(one: Finalist, seeds: int, winner: int) -> tuple[str, ...]:
    means = [_fixed(mean) for mean in one.means] + [NONE] * (seeds - len(one.means))
    said = "the winner" if one.number == winner else ""
    return (
        str(one.number), _fixed(one.mean), *means, f"{one.cost.trained_tokens:,}", duration(one.cost.train_seconds),
        tag("bdi", "; ".join(filter(None, (said, one.dropped)))),
    )  # fmt: skip


def _fixed(mean: float) -> str:
    """Four places, so that figures below each other can be compared; large ones none."""
    return digits(mean) if not math.isfinite(mean) or abs(mean) >= 1000 else f"{mean:.4f}"


def _signed(difference: float) -> str:
    return _fixed(difference).replace("-", MINUS) if difference <= 0 else f"+{_fixed(difference)}"


def _comparison(one: Comparison) -> tuple[str, ...]:
    return (
        str(one.other), _signed(one.difference), _signed(one.low), probability(one.p), _fixed(one.seed_error),
        _fixed(one.row_error), "yes" if one.better else "no", tag("bdi", one.method),
    )  # fmt: skip


def costs(found: Savings) -> Html:
    """What was trained, and what was not."""
    whole = found.full_tokens

    def row(name: str, one: Saved) -> tuple[str, ...]:
        if not one.trials:
            return name, NONE, NONE, NONE, NONE
        return name, f"{one.trials:,}", f"{one.tokens:,}", duration(one.seconds), percentage(one.tokens, whole)

    rows = [
        row("trained", Saved(found.trials, found.trained_tokens, found.trained_seconds)),
        row("saved by pruning", found.pruned),
        row("refused before training", found.refused),
        ("full trainings of all", NONE, f"{whole:,}", duration(found.full_seconds), NONE),
    ]
    heads = ("", "trials", "answer tokens", "time", "share of the tokens")
    return markup.table("What it cost", "tnnnn", heads, rows)


def values(trial: Trial) -> str:
    """The values of a trial in a line."""
    names = short_names(trial.values)
    return ", ".join(f"{names[knob]} {shown(one)}" for knob, one in trial.values.items())


def first_objective(report: SweepReport, trial: Trial) -> str:
    """The first objective of a trial for people."""
    found = value(trial, report.objectives)
    return NONE if found is None else amount(report.objectives[0], found) if report.objectives else number(found)

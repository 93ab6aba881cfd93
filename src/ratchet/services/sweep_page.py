"""The page of a sweep, for people: one HTML file that loads nothing, whole without its script.

Pictures come as SVG from services/sweep_plots.py, by whoever asks for the page, and are written into it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ratchet import files, markup
from ratchet.markup import Html, counted, quiet, tag
from ratchet.pages import sweep_facts, sweep_tables
from ratchet.pages.sweep_savings import savings
from ratchet.pages.sweep_svg import picture
from ratchet.pages.sweep_trials import duration
from ratchet.records_sweep import SweepReport

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
    files.write_atomic(target, page(report, pictures))


def page(report: SweepReport, pictures: Mapping[str, bytes]) -> str:
    """The page's text."""
    saved = savings(report)
    sections: dict[str, Sequence[Html] | str] = {
        "Adopt": sweep_facts.adopt(report),
        "Course": _shown(report, pictures, "history", "curves") or NO_PICTURES,
        "Knobs": _shown(report, pictures, "importances", "slices", "contour", "parallel") or NO_PICTURES,
    }
    if len(report.objectives) > 1:
        table = sweep_tables.front(report)
        sections["Front"] = table if isinstance(table, str) else [*_shown(report, pictures, "pareto"), *table]
    sections |= {
        "Finalists": sweep_tables.finalists(report.finals),
        "Workers": [*_workers(report), *_shown(report, pictures, "timeline")],
        "Cost": [sweep_tables.costs(saved), *_shown(report, pictures, "savings"), quiet(COUNTED)],
        "Trials": sweep_tables.trials(report),
        "Reproduce": sweep_facts.reproduce(report),
    }
    links = [tag("a", title, href=f"#{markup.anchor(title)}") for title in sections]
    contents = tag("nav", *links, aria_label="Sections")
    main = tag("main", *(markup.section(title, body) for title, body in sections.items()))
    style, more, script = (path.read_text(encoding="utf-8") for path in (HOUSE_STYLE, STYLE, SCRIPT))
    title = f"Sweep {report.study}"
    head = sweep_facts.header(report, saved)
    return markup.document(title, style + more, head, contents, main, images=True, script=script)


NO_PICTURES = "There is nothing to be drawn yet."

COUNTED = (
    "Saved is counted against full trainings of everything that was tried: the rest of pruned trials that nobody went "
    "on with, and what the memory forecast refused. Time that was not spent is extrapolated from the "
    "trial's own tokens per second."
)


def _shown(report: SweepReport, pictures: Mapping[str, bytes], *names: str) -> list[Html]:
    return [
        picture(pictures[name], *PICTURES[name], _said(name, report))
        for name in PICTURES
        if name in names and name in pictures
    ]


def _said(name: str, report: SweepReport) -> str:
    """A picture in words; the tables have its numbers."""
    title, note = PICTURES[name]
    trials = counted(len(report.trials), "trial")
    return f"{title} {note} {trials}; the table of all trials has the numbers."


def _workers(report: SweepReport) -> list[Html]:
    takes = [take for trial in report.trials for take in trial.takes]
    if not takes:
        return [quiet("No worker has had a trial.")]
    workers = counted(len({take.worker for take in takes}), "worker")
    again = sum(len(trial.takes) - 1 for trial in report.trials if trial.takes)
    whole = max(take.seen for take in takes) - min(take.begun for take in takes)
    said = f"{workers} in {duration(whole)} from the first trial to the last sign of life."
    if again:
        said += f" {counted(again, 'time')} a worker took over the trial of another, and went on from its checkpoint."
    return [quiet(said)]

"""The report of one training, for people: one HTML file that loads nothing, whole without its script."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from ratchet import markup
from ratchet.history.comparison import Side
from ratchet.markup import NONE, Html, counted, percentage, quiet, tag
from ratchet.pages import compared, curves, curves_data, reported
from ratchet.pages import written as placed
from ratchet.pages.memory import STYLE as PART_STYLE
from ratchet.pages.memory import memory
from ratchet.pages.reported import Examination, Origin
from ratchet.pages.sweep_trials import duration
from ratchet.sizes import written

HOUSE_STYLE, STYLE, SCRIPT = (Path(__file__).with_name(name) for name in ("page.css", "curves.css", "curves.js"))


def write(side: Side, examination: Examination | None, origin: Origin, target: Path) -> None:
    """Write the page. Equal arguments give equal bytes.

    Args:
        side: the training: a group of one.
        examination: what its evaluation has of single rows, if there is one.
        origin: where it comes from.
        target: the HTML file.
    """
    placed.write(target, page(side, examination, origin))


def page(side: Side, examination: Examination | None, origin: Origin) -> str:
    """The page's text. See `write`."""
    account = side.accounts[0]
    pictures = curves.pictures([side])
    measured = account.course.progress.memory.peaks
    sections: dict[str, Sequence[Html] | str] = {
        "Figures": [compared.facts({name: value for name, [value] in compared.summary([side]) if value != NONE})],
        "Curves": _curves(pictures, side) if pictures else "It has not done a step.",
        "Events": compared.events([side]),
        "Evaluation": reported.evaluation(examination),
        "Memory": memory(account.forecast, measured),
        "Settings": compared.settings(side),
        "Registry": reported.registry(side),
        "Lineage": reported.lineage(side, origin),
    }
    links = [tag("a", name, href=f"#{markup.anchor(name)}") for name in sections]
    contents = tag("nav", *links, aria_label="Sections")
    main = tag("main", *(markup.section(name, body) for name, body in sections.items()))
    style, more, script = (path.read_text(encoding="utf-8") for path in (HOUSE_STYLE, STYLE, SCRIPT))
    data = curves_data.data(pictures, [side])
    title = f"Run {account.run_id}"
    return markup.document(title, style + more + PART_STYLE, _header(side), contents, main, data, script=script)


def _curves(pictures: Sequence[curves.Picture], side: Side) -> list[Html]:
    shown = [quiet(curves_data.summarised([side])), curves_data.controls([side])]
    return [*shown, *(curves.figure(one, [side]) for one in pictures)]


def _header(side: Side) -> Html:
    account = side.accounts[0]
    course = account.course

    def figures() -> Iterator[tuple[str, str, str]]:
        best, planned = account.best, course.progress.planned_steps
        yield "Validation loss", f"{best[1]:.4f}" if best else NONE, f"lowest, step {best[0]:,}" if best else "not yet"
        yield "Steps", f"{course.step:,}", f"of {planned:,} planned" if planned else "none planned yet"
        speed = f"{account.tokens_per_s:,.0f} input tokens/s" if account.tokens_per_s else ""
        yield "Time in training", duration(course.seconds) if course.seconds else NONE, speed
        forecast = f"forecast {written(account.forecast_bytes)}" if account.forecast_bytes else ""
        yield "Peak memory", written(account.peak_bytes) if account.peak_bytes else NONE, forecast
        if account.report is not None:
            whole = account.report.total_parameters
            share = percentage(account.report.trainable_parameters, whole)
            yield "Trained", share, f"{account.report.trainable_parameters:,} of {whole:,} parameters"

    shown = [
        tag("div", tag("dt", name), tag("dd", tag("strong", value), tag("small", note)))
        for name, value, note in figures()
    ]
    events = sum(course.counts.values())
    said = f"{account.state}; {counted(course.progress.attempts, 'attempt')}, {counted(events, 'event')}"
    known = "; ".join(dict.fromkeys((*(m.about for m in side.subject.members if m.about), *side.standing)))
    title = tag("h1", f"Run {account.run_id}", tag("span", f"{said}; {known}" if known else said))
    return tag("header", tag("p", "Training", class_="quiet"), title, tag("dl", *shown))

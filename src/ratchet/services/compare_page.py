"""The page that compares trainings, for people: one HTML file that loads nothing, whole without its script."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ratchet import markup
from ratchet.history.comparison import Comparison, Side
from ratchet.markup import NONE, Html, counted, quiet, tag
from ratchet.pages import compared, curves, curves_data, written

HOUSE_STYLE, STYLE, SCRIPT = (Path(__file__).with_name(name) for name in ("page.css", "curves.css", "curves.js"))

NO_CURVES = "None of them has done a step."


def write(found: Comparison, target: Path) -> None:
    """Write the page. Equal comparisons give equal bytes."""
    written.write(target, page(found))


def page(found: Comparison) -> str:
    """The page's text."""
    pictures = curves.pictures(found.sides)
    sections: dict[str, Sequence[Html] | str] = {
        "Differences": compared.differences(found),
        "Figures": [compared.figures(found.sides)],
        "Curves": _curves(pictures, found.sides) if pictures else NO_CURVES,
        "Scores": compared.scores(found.sides),
        "Significance": compared.significance(found),
        "Events": compared.events(found.sides),
    }
    names = ", ".join(side.name for side in found.sides)
    return _document(f"Compared: {names}", _header(found), sections, curves_data.data(pictures, found.sides))


def _curves(pictures: Sequence[curves.Picture], sides: Sequence[Side]) -> list[Html]:
    shown = [curves_data.legend(sides), quiet(curves_data.summarised(sides)), curves_data.controls(sides)]
    return [*shown, *(curves.figure(one, sides) for one in pictures)]


def _document(title: str, header: Html, sections: Mapping[str, Sequence[Html] | str], data: Html) -> str:
    links = [tag("a", name, href=f"#{markup.anchor(name)}") for name in sections]
    contents = tag("nav", *links, aria_label="Sections")
    main = tag("main", *(markup.section(name, body) for name, body in sections.items()))
    style, more, script = (path.read_text(encoding="utf-8") for path in (HOUSE_STYLE, STYLE, SCRIPT))
    return markup.document(title, style + more, header, contents, main, data, script=script)


def _header(found: Comparison) -> Html:
    def figures() -> Iterator[Html]:
        for number, side in enumerate(found.sides):
            best = [one.best[1] for one in side.accounts if one.best]
            value = f"{sum(best) / len(best):.4f}" if best else NONE
            many = f", mean of {len(best)} seeds" if side.is_group else ""
            about = "; ".join(dict.fromkeys(member.about for member in side.subject.members if member.about))
            state = ", ".join(dict.fromkeys(one.state for one in side.accounts))
            note = f"lowest validation loss{many}; {state}" + (f"; {about}" if about else "")
            name = tag("dt", curves.swatch(number), tag("bdi", side.name))
            yield tag("div", name, tag("dd", tag("strong", value), tag("small", note)))

    real = sum(one.is_real for one in found.findings)
    differing = sum(row.differs for row in found.settings)
    said = f"{counted(differing, 'setting')} differ; " if differing != 1 else "1 setting differs; "
    said += (
        f"{real:,} of {counted(len(found.findings), 'difference')} on the same rows more than chance"
        if found.findings
        else "no rows were scored for both"
    )
    trainings = sum(len(side.accounts) for side in found.sides)
    named = f"{trainings} trainings side by side"
    if trainings > len(found.sides):
        named = f"{trainings} trainings in {len(found.sides)} groups"
    title = tag("h1", named, tag("span", said))
    return tag("header", tag("p", "Comparison", class_="quiet"), title, tag("dl", *figures()))

"""A run on one screen, and several runs in a table."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from ratchet.run.aside import Aside
from ratchet.run.status import duration
from ratchet.run.vitals import Vitals
from ratchet.terminal import answering
from ratchet.terminal.pen import Pen, chosen
from ratchet.terminal.sections import lines_of, state_of, style_of, time_left
from ratchet.terminal.stream import Size

GAP = 2
"""Blanks between columns."""
NAME_COLUMNS = 12


def panel(name: str, vitals: Vitals, aside: Aside, now: float, size: Size) -> Text:
    """One whole run, in so many columns and lines, from 40 x 10 on.

    Args:
        name: of the run.
        vitals: what its journal has told.
        aside: what its directory tells.
        now: Unix time, for ages.
        size: of the screen.
    """
    drawing = answering.lines_of if vitals.answering else lines_of
    lines = chosen(drawing(Pen(size), name, vitals, aside, now), size.height)
    return _joined(lines)


def table(rows: Sequence[tuple[str, Vitals, Aside]], now: float, size: Size) -> Text:
    """Several runs, a row each, those that are trained first; columns and rows that there is no room for are left out.

    Args:
        rows: name of the run, what its journal has told, what its directory tells.
        now: Unix time, for ages.
        size: of the screen.
    """
    pen = Pen(size)
    ordered = sorted(rows, key=lambda row: not row[2].running)
    room = max(1, size.height - 1)
    shown = ordered if len(ordered) <= room else ordered[: max(1, room - 1)]
    columns = _fitting(_columns(shown, now), size.width)
    blanks = " " * GAP
    lines = [Text(blanks.join(pen.padded(one.title, one.width, one.right) for one in columns), "underline")]
    for place, (_, vitals, aside) in enumerate(shown):
        cells = (pen.padded(pen.safe(one.cells[place]).plain, one.width, one.right) for one in columns)
        lines.append(pen.cut(Text(blanks.join(cells).rstrip(), style_of(vitals, aside)), size.width))
    if len(shown) < len(ordered):
        lines.append(Text(f"and {len(ordered) - len(shown)} more"))
    return _joined(lines[: size.height])


def _joined(lines: Sequence[Text]) -> Text:
    return Text("\n", no_wrap=True, overflow="crop", end="").join(lines)


@dataclass(frozen=True)
class _Column:
    title: str
    cells: tuple[str, ...]
    weight: int
    """Those with the greatest are left out first."""
    right: bool = True

    @property
    def width(self) -> int:
        return max(map(cell_len, (self.title, *self.cells)))


def _columns(rows: Sequence[tuple[str, Vitals, Aside]], now: float) -> list[_Column]:
    """All columns, from left to right, that say something of at least one run."""

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    def age(t: float | None) -> str:
        return "" if t is None else duration(max(0.0, now - t))

    runs = [(vitals.progress, vitals, aside) for _, vitals, aside in rows]
    made = [
        _Column("run", tuple(name[:NAME_COLUMNS] for name, _, _ in rows), 0, False),
        _Column("state", tuple(_mark(v) + state_of(v, a) for _, v, a in runs), 1, False),
        _Column("step", tuple(f"{p.step}/{p.planned_steps}" if p.planned_steps else "" for p, _, _ in runs), 2),
        _Column("left", tuple(time_left(v, a, now).removeprefix("about ") for _, v, a in runs), 4, False),
        _Column("loss", tuple(number(p.loss, ".4f") for p, _, _ in runs), 3),
        _Column("validation", tuple(number(p.validation_loss, ".4f") for p, _, _ in runs), 5),
        _Column("tokens/s", tuple(number(_tokens_per_s(v), ",.0f") for _, v, _ in runs), 6),
        _Column("checkpoint", tuple(age(p.checkpoint_t) for p, _, _ in runs), 7),
        _Column("attempts", tuple(str(p.attempts or "") for p, _, _ in runs), 8),
        _Column("alerts", tuple(str(len(p.alerts) or "") for p, _, _ in runs), 9),
    ]
    return [column for column in made if any(column.cells)]


def _tokens_per_s(vitals: Vitals) -> float | None:
    return vitals.answering.tokens_per_s if vitals.answering else vitals.input_tokens_per_s


def _mark(vitals: Vitals) -> str:
    return "! " if vitals.state in ("failed", "waiting") or vitals.stragglers else "  "


def _fitting(columns: Sequence[_Column], width: int) -> list[_Column]:
    """The columns that fit into so many characters; the first one is always there."""
    left = width + GAP
    kept: list[int] = []
    for place in sorted(range(len(columns)), key=lambda place: columns[place].weight):
        if not kept or columns[place].width + GAP <= left:
            left -= columns[place].width + GAP
            kept.append(place)
    return [columns[place] for place in sorted(kept)]

"""The lines of a generation's screen."""

from collections.abc import Iterator

from rich.text import Text

from ratchet.run.answering import Answering, number
from ratchet.run.aside import Aside
from ratchet.run.vitals import Vitals
from ratchet.terminal import sections
from ratchet.terminal.glyphs import scale_of, sparkline
from ratchet.terminal.pen import WARNING, WIDE, Line, Pen
from ratchet.terminal.sections import CHECKPOINT, GUARDS, LOSS, SPEED, VALIDATION

UNANSWERED = ("refused", "memory", "invalid", "context", "filtered")
"""Ends without a whole answer, that a person should look at."""
FIGURE = 9
"""Columns of a figure before its curve."""


def lines_of(pen: Pen, name: str, vitals: Vitals, aside: Aside, now: float) -> list[Line]:
    """All lines that there are, in their order. For the arguments see `panel`."""
    found = vitals.answering or Answering()
    return [
        sections.head(pen, name, vitals, aside, now),
        sections.progress(pen, vitals, aside, now),
        *_speed(pen, vitals, found),
        *_batch(pen, found),
        *_memory(pen, found),
        *sections.machine(pen, vitals),
        *_ends(pen, found),
        *_guards(pen, vitals),
        *sections.attempts(pen, vitals),
        *sections.news(pen, vitals),
    ]


def _speed(pen: Pen, vitals: Vitals, found: Answering) -> Iterator[Line]:
    answers, tokens, points = found.answers_per_s, found.tokens_per_s, found.speed.points()
    if answers is None or tokens is None or not points:
        return
    pace = f"{answers:,.2f} answers/s" if answers >= 0.5 or not answers else f"{1 / answers:,.1f} s an answer"
    counted = sum(found.finishes.values())
    mean = f"{found.tokens / counted:,.0f} tokens an answer" if counted else ""
    yield pen.row(LOSS, "speed", [pace, f"{tokens:,.0f} tokens/s", *filter(None, (mean,))])
    width = pen.room - FIGURE - (len(" tokens/s") if pen.size.width >= WIDE else 0)
    values = [value for _, value in points]
    told = list(enumerate(values, start=1))  # each about a second's, and all of them as wide
    curve = sparkline(told, (1, len(told)), (0.0, scale_of(values)[1]), min(width, len(told)), pen.letters)
    after = " tokens/s" if pen.size.width >= WIDE else ""
    yield pen.row(SPEED, "", [Text.assemble(f"{points[-1][1]:,.0f}".ljust(FIGURE)[:FIGURE], (curve, "cyan"), after)])


def _batch(pen: Pen, found: Answering) -> Iterator[Line]:
    rows, held, budget, waiting = (
        number(found.live, name) for name in ("rows", "held_tokens", "budget_tokens", "waiting")
    )
    if rows is None:
        return
    said = [f"{rows:,} row{'s' * (rows != 1)} under way"]
    if held is not None and budget is not None:
        said.append(f"{held:,} of {budget:,} padded tokens")
    if waiting:
        said.append(f"{waiting:,} wait in the window")
    yield pen.row(VALIDATION, "batch", said)


def _memory(pen: Pen, found: Answering) -> Iterator[Line]:
    held, foreseen, whole = (number(found.live, f"{name}_bytes") for name in ("held", "forecast", "device"))
    if held and whole:
        yield sections.memory_row(pen, held, foreseen or 0, whole)


def _ends(pen: Pen, found: Answering) -> Iterator[Line]:
    """How answers ended; those without one are marked."""
    if not found.finishes:
        return
    said = [
        Text(f"! {count:,} {name}" if name in UNANSWERED else f"{count:,} {name}", WARNING * (name in UNANSWERED))
        for name, count in found.finishes.most_common()
    ]
    yield pen.row(CHECKPOINT, "ends", said)


def _guards(pen: Pen, vitals: Vitals) -> Iterator[Line]:
    if vitals.shrinks:
        times = "time" if vitals.shrinks == 1 else "times"
        said: list[str | Text] = [Text(f"! batch made smaller {vitals.shrinks:,} {times} for want of memory", WARNING)]
        limits = [tokens for tokens, _ in vitals.progress.budgets.values() if tokens is not None]
        said += [f"now at most {tokens:,} padded tokens" for tokens in limits[-1:]]
        yield pen.row(GUARDS, "guards", said)

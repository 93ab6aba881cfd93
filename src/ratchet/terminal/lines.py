"""A run as plain lines, for logs and for terminals that cannot draw: one every few seconds, and what is special."""

from collections.abc import Callable
from contextlib import suppress

from ratchet.run import telling
from ratchet.run.aside import Aside
from ratchet.run.journal import Event
from ratchet.run.vitals import DAMAGE, Vitals
from ratchet.terminal.sections import state_of, time_left

LINE_EVERY_S = 5.0


class Telling:
    """What is to be said of a run, as lines.

    Args:
        say: takes a line, without its end.
        before: stands before every line; with several runs, their names.
        unit: what the run's steps are called: step, answer.
    """

    def __init__(self, say: Callable[[str], None], before: str = "  ", unit: str = "step") -> None:
        self._say, self._before, self._unit = say, before, unit
        self._said_step = 0

    def event(self, event: Event) -> None:
        """Say what an event tells, if it is out of the ordinary; one that is damaged says nothing."""
        with suppress(*DAMAGE):  # `status` counts them
            for line in _lines(event, self._unit):
                self._say(self._before + line)

    def figures(self, vitals: Vitals, now: float) -> None:
        """Say where it stands, unless nothing has changed since that was said last, or there is no figure of this
        attempt. `now` is Unix time."""
        p = vitals.progress
        said = _figures(vitals)
        if not said or p.step == self._said_step:
            return
        self._said_step = p.step
        found = vitals.outlook.left(now)
        left = f", {found.describe()} left" if found and p.step < p.planned_steps else ""
        self._say(f"{self._before}{self._unit} {p.step}/{p.planned_steps}: {said}{left}")


def summary(vitals: Vitals, aside: Aside, now: float) -> str:
    """Where a run stands, in one line. `now` is Unix time."""
    p = vitals.progress
    said = [f"{state_of(vitals, aside)}, {unit_of(vitals)} {p.step}/{p.planned_steps or '?'}"]
    if p.loss is not None:
        said.append(f"loss {p.loss:.4f}")
    if p.validation_loss is not None:
        said.append(f"validation loss {p.validation_loss:.4f}")
    if left := time_left(vitals, aside, now):
        said.append(f"{left} left")
    return ", ".join(said)


def unit_of(vitals: Vitals) -> str:
    """What a run's steps are called."""
    return "answer" if vitals.answering else "step"


def _figures(vitals: Vitals) -> str:
    """Of this attempt; empty: there are none yet."""
    p, rate = vitals.progress, vitals.input_tokens_per_s
    if vitals.answering:
        rate, answers = vitals.answering.tokens_per_s, vitals.answering.answers_per_s
        return "" if rate is None or answers is None else f"{answers:,.2f} answers/s, {rate:,.0f} tokens/s"
    return "" if p.loss is None or rate is None else f"loss {p.loss:.4f}, {rate:,.0f} tokens/s"


def _lines(event: Event, unit: str) -> list[str]:
    data = event.data
    if event.kind == "ready":
        return [telling.beginning(event, unit)]
    if event.kind == "validation":
        better = " (best so far)" if data["improved"] else ""
        return [f"step {data['step']}: validation loss {data['loss']:.4f}{better}"]
    if event.kind == "forecast":
        return [telling.foreseen(event), *(f"  {note}" for note in data["forecast"]["notes"])]
    if event.kind in ("notice", "alert", *telling.DOUBTS):
        found = telling.news(event)
        return [found] if found else []
    return []

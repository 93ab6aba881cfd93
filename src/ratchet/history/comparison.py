"""Several trainings side by side: in what they differ, what came of each, and which differences are real."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ratchet.config_gate import Gate
from ratchet.gating import lookups
from ratchet.history import accounts, evaluations, series, significance
from ratchet.history.accounts import Account
from ratchet.history.course import STEP_VALUES, VALIDATION_VALUES
from ratchet.history.evaluations import Evaluations, Examined
from ratchet.history.series import Line
from ratchet.history.significance import Finding, Scored, Silence
from ratchet.history.subjects import Names, Subject
from ratchet.layout import Layout
from ratchet.records_gate import read_champion
from ratchet.run.directory import RunPaths

POINTS, LEAST_POINTS = 3600, 150
"""Of all curves of one kind on a page together; of one of them."""
MOST_POINTS = 600
SEED = "train.seed"
NOTHING = "\u2013"


@dataclass(frozen=True)
class Side:
    """One of those that are compared."""

    subject: Subject
    accounts: tuple[Account, ...]
    """Of its trainings."""
    steps: Line
    """Curves by step; of several trainings their mean, and a standard deviation on either side."""
    validations: Line
    members: tuple[Line, ...]
    """Steps of each training by itself: what a mean over several does not show."""
    examined: tuple[Examined, ...]
    trials: tuple[str, ...]
    """Trials of sweeps that were these trainings."""
    standing: tuple[str, ...]
    """What became of it: versions, verdicts; nothing where nobody promoted or judged it."""

    @property
    def name(self) -> str:
        """As it was given."""
        return self.subject.name

    @property
    def is_group(self) -> bool:
        """Whether it is several trainings."""
        return len(self.accounts) > 1


@dataclass(frozen=True)
class Row:
    """One thing that may differ: its name, and what each side has."""

    name: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether the sides have not all the same."""
        return len(set(self.values)) > 1


@dataclass(frozen=True)
class Comparison:
    """Everything that a comparison shows."""

    sides: tuple[Side, ...]
    settings: tuple[Row, ...]
    """What decides what is learned."""
    manner: tuple[Row, ...]
    """How it was carried out."""
    findings: tuple[Finding, ...]
    silences: tuple[Silence, ...]
    notes: tuple[str, ...]
    """What a reader should know before the figures."""


def compare(layout: Layout, gate: Gate, subjects: Sequence[Subject], names: Names) -> Comparison:
    """Read everything about these subjects.

    Raises:
        DamagedError: a file of a run or of the evaluation is not as it was written.
    """
    examinations = Evaluations(layout, names)
    points = max(LEAST_POINTS, min(MOST_POINTS, POINTS // max(1, len(subjects))))
    sides = tuple(side(layout, one, names, examinations, points) for one in subjects)
    scored = [
        Scored(one.name, one.examined, [evaluations.held_out(account) for account in one.accounts]) for one in sides
    ]
    findings, silences = significance.findings(scored, gate)
    return Comparison(
        sides,
        rows([[account.settings for account in one.accounts] for one in sides]),
        rows([[account.manner for account in one.accounts] for one in sides]),
        tuple(findings),
        tuple(silences),
        tuple(_notes(sides)),
    )


def side(layout: Layout, subject: Subject, names: Names, examinations: Evaluations, points: int) -> Side:
    """Everything about one subject. Raises as `compare`."""
    found = tuple(accounts.read(RunPaths(layout.runs / run_id)) for run_id in subject.run_ids)
    steps = [one.course.steps.line(points) for one in found]
    return Side(
        subject,
        found,
        _joined(steps, STEP_VALUES, points),
        _joined([one.course.validations.line(points) for one in found], VALIDATION_VALUES, points),
        tuple(steps),
        tuple(one for run_id in subject.run_ids for one in examinations.of(run_id)),
        tuple(trial for run_id in subject.run_ids for trial in names.trials_of(run_id)),
        tuple(standing for run_id in subject.run_ids for standing in _standing(layout, run_id, names)),
    )


def _joined(lines: Sequence[Line], names: Sequence[str], points: int) -> Line:
    there = [line for line in lines if len(line)]
    if not there:
        return series.empty(names)
    return there[0] if len(there) == 1 else series.together(there, min(points, max(map(len, there))))


def rows(found: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[Row, ...]:
    """A row for each key: for each side what its trainings have, several values where these differ."""
    keys = dict.fromkeys(key for group in found for one in group for key in one)
    return tuple(Row(key, tuple(_cell(one.get(key) for one in group) for group in found)) for key in keys)


def _cell(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(map(said, values)))


def said(value: Any) -> str:
    """A setting for people."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return " ".join(map(said, value)) or "none"
    return str(value)


def _standing(layout: Layout, run_id: str, names: Names) -> list[str]:
    """Champion, versions, and what the gate said of a run."""
    file = read_champion(layout.champion)
    found = []
    for number in names.versions_of(run_id):
        is_champion = file.champion is not None and file.champion.version == number
        is_anchor = file.anchor is not None and file.anchor.version == number
        titles = [title for title, holds in (("champion", is_champion), ("anchor", is_anchor)) if holds]
        found.append(f"version {number:,}" + (f" ({', '.join(titles)})" if titles else ", promoted before"))
    decisions = [one.decision for one in lookups.read(layout.lookups) if one.run_id == run_id and one.decision]
    return found + [f"gate: {decision}" for decision in dict.fromkeys(decisions)]


def _notes(sides: Sequence[Side]) -> Iterable[str]:
    known = [account for one in sides for account in one.accounts if account.spec is not None]
    for what, digests in (
        ("data", {account.settings["data"] for account in known}),
        ("base models", {account.settings["base"] for account in known}),
    ):
        if len(digests) > 1:
            yield (
                f"These are trainings on different {what} ({', '.join(sorted(digests))}): losses and scores of one "
                "say nothing about the other, and no difference between them is tested."
            )
    for one in sides:
        others = sorted(
            {row.name for row in rows([[account.settings] for account in one.accounts]) if row.differs} - {SEED}
        )
        if others:
            yield f"{one.name}: its trainings differ in more than their seed: {', '.join(others)}."
        for account in one.accounts:
            if not account.is_here:
                yield f"{one.name}: the directory of run {account.run_id} is not on this machine: no curves of it."
            elif account.report is None:
                yield f"{one.name}: run {account.run_id} is {account.state}, at step {account.course.step:,}."
            if account.course.damaged:
                yield f"{one.name}: {account.course.damaged:,} damaged lines of its journal are left out."

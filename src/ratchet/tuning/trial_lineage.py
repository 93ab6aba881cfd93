"""Trials that share one training count once: those that were continued."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ratchet.storage.records.sweep import Trial


@dataclass(frozen=True)
class Lineage:
    """One training: the trial that began it, and those that went on with it after it had been pruned, or had failed."""

    trials: tuple[Trial, ...]
    """By number."""

    @property
    def first(self) -> int:
        """Number of the trial that began it; stays the same however often it is continued."""
        return self.trials[0].number

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of its trials."""
        return tuple(trial.number for trial in self.trials)

    @cached_property
    def curve(self) -> dict[int, float]:
        """Validation loss in nats per token by rows learned from, of all its trials, in order of rows."""
        return dict(sorted(point for trial in self.trials for point in trial.curve.items()))

    @property
    def told(self) -> Trial:
        """The trial that says how it went: the last that came to an end of its own.

        While a pruned training is being continued, what is known of it is still that it was pruned, and where; a
        continuation that failed says nothing about the values.
        """
        settled = [trial for trial in self.trials if trial.state in ("complete", "pruned", "infeasible")]
        return settled[-1] if settled else self.trials[-1]

    @property
    def competes(self) -> bool:
        """Whether others are measured by it: not one that failed or cannot be, however good it looked until then."""
        return self.trials[-1].state not in ("failed", "infeasible")


def lineages(history: Iterable[Trial]) -> list[Lineage]:
    """Every training of a study once, by the number of the trial that began it."""
    found: dict[int, list[Trial]] = {}
    first: dict[int, int] = {}
    for trial in sorted(history, key=lambda trial: trial.number):
        first[trial.number] = trial.number if trial.continues is None else first[trial.continues]
        found.setdefault(first[trial.number], []).append(trial)
    return [Lineage(tuple(trials)) for trials in found.values()]

"""What a sweep did not have to train, against full trainings of everything that it tried."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ratchet.pages.sweep_trials import counted, superseded
from ratchet.records_sweep import SweepReport, Trial


@dataclass(frozen=True)
class Saved:
    """What one cause saved."""

    trials: int = 0
    tokens: int = 0
    """Answer tokens."""
    seconds: float = 0.0

    def plus(self, tokens: int, seconds: float) -> "Saved":
        """With another trial."""
        return Saved(self.trials + 1, self.tokens + tokens, self.seconds + seconds)


@dataclass(frozen=True)
class Savings:
    """What trials came to, and what they would have come to."""

    trials: int
    """Trainings, each pair of a pruned trial and the one that goes on with it once."""
    trained_tokens: int
    trained_seconds: float
    pruned: Saved
    """The rest of pruned trials that nobody went on with."""
    refused: Saved
    """Infeasible trials that no token was trained for."""

    @property
    def tokens(self) -> int:
        """Saved in all."""
        return self.pruned.tokens + self.refused.tokens

    @property
    def seconds(self) -> float:
        """Saved in all."""
        return self.pruned.seconds + self.refused.seconds

    @property
    def full_tokens(self) -> int:
        """What the same trials would have come to without the two."""
        return self.trained_tokens + self.tokens

    @property
    def full_seconds(self) -> float:
        """The same in seconds."""
        return self.trained_seconds + self.seconds


@dataclass(frozen=True)
class Avoided:
    """What one trial did not train."""

    trial: Trial
    tokens: int
    seconds: float


Cause = Literal["pruned", "refused"]


def savings(report: SweepReport) -> Savings:
    """Tokens and seconds trained and saved.

    Seconds that were not trained are extrapolated from the trial's own tokens per second; one that was refused before
    it began has the median over all trials, and so it is with tokens that nobody planned. Trials that failed, and
    infeasible ones that broke off, saved nothing: what is missing in them was no decision. A refused trial is counted
    as a full training although it could not have had one: what it saves is what was meant to be trained.
    """
    trained = counted(report)
    found: dict[Cause, Saved] = {"pruned": Saved(), "refused": Saved()}
    for cause, one in _avoided(report):
        found[cause] = found[cause].plus(one.tokens, one.seconds)
    return Savings(
        trials=len(trained),
        trained_tokens=sum(trial.cost.trained_tokens for trial in trained),
        trained_seconds=sum(trial.cost.train_seconds for trial in trained),
        **found,
    )


def avoided_tokens(report: SweepReport) -> dict[Cause, dict[int, int]]:
    """Answer tokens that were saved, by cause and trial number."""
    found: dict[Cause, dict[int, int]] = {"pruned": {}, "refused": {}}
    for cause, one in _avoided(report):
        found[cause][one.trial.number] = one.tokens
    return found


def _avoided(report: SweepReport) -> Iterator[tuple[Cause, Avoided]]:
    trained = counted(report)
    rates = [rate for trial in trained if (rate := _rate(trial)) > 0]
    usual = statistics.median(rates) if rates else 0.0
    plans = [trial.cost.planned_tokens for trial in trained if trial.cost.planned_tokens]
    plan = int(statistics.median(plans)) if plans else 0
    old = superseded(report)
    for trial in report.trials:
        if trial.state == "pruned" and trial.number not in old:
            tokens = max(0, trial.cost.planned_tokens - trial.cost.trained_tokens)
            yield "pruned", Avoided(trial, tokens, _seconds(tokens, _rate(trial) or usual))
        elif trial.state == "infeasible" and not trial.cost.trained_tokens:
            tokens = trial.cost.planned_tokens or plan
            yield "refused", Avoided(trial, tokens, _seconds(tokens, usual))


def _rate(trial: Trial) -> float:
    """Tokens per second; 0 where nothing was trained."""
    return trial.cost.trained_tokens / trial.cost.train_seconds if trial.cost.train_seconds > 0 else 0.0


def _seconds(tokens: int, rate: float) -> float:
    return tokens / rate if rate > 0 else 0.0

"""What pictures and pages ask about the trials of a sweep: which count, how good they are, what they are called."""

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ratchet.config.units import choose_unit
from ratchet.storage.html import escape_invisible
from ratchet.storage.records.sweep import SweepObjective, SweepReport, Trial

LOSS = "validation_loss"
"""The objective that is known while a trial still trains: it is what `Trial.curve` holds."""

LONGEST_VALUE = 24
"""Characters of a value in a picture."""

NAMES = {
    "memory_bytes": "memory",
    "adapter_bytes": "adapter",
    "train_seconds": "training time",
    "trained_tokens": "tokens trained",
}
"""Of objectives, where their key has a unit in it."""


def superseded_numbers(report: SweepReport) -> frozenset[int]:
    """Numbers of the pruned trials that a later one has gone on with: the later one stands for both."""
    return frozenset(trial.continues for trial in report.trials if trial.continues is not None)


def counted_trials(report: SweepReport) -> list[Trial]:
    """Trials that were trainings of their own: without those that a later one goes on with."""
    old = superseded_numbers(report)
    return [trial for trial in report.trials if trial.number not in old]


def validation_curve(trial: Trial, by_number: Mapping[int, Trial]) -> dict[int, float]:
    """Validation loss by rows, from the first row on, in order; what is no number is left out."""
    found: dict[int, float] = {}
    earlier = None if trial.continues is None else by_number.get(trial.continues)
    if earlier is not None:
        found |= validation_curve(earlier, by_number)
    found |= trial.curve
    return {rows: loss for rows, loss in sorted(found.items()) if math.isfinite(loss)}


def trial_value(trial: Trial, measures: Sequence[SweepObjective], which: int = 0) -> float | None:
    """What a trial came to: the objective, or of one without it the last validation loss where that is the objective.

    None of one that failed or was infeasible: where it broke off says nothing about what it would have come to.
    """
    if trial.state in ("failed", "infeasible"):
        return None
    if which < len(trial.objectives):
        return trial.objectives[which] if math.isfinite(trial.objectives[which]) else None
    if which < len(measures) and measures[which].metric == LOSS:
        losses = [loss for _, loss in sorted(trial.curve.items()) if math.isfinite(loss)]
        return losses[-1] if losses else None
    return None


def completed_values(report: SweepReport, which: int = 0) -> list[tuple[Trial, float]]:
    """Complete trials and an objective of each, by number; those whose objective is no number are left out."""
    return [
        (trial, found)
        for trial in report.trials
        if trial.state == "complete" and (found := trial_value(trial, report.objectives, which)) is not None
    ]


def rank_trials(report: SweepReport, which: int = 0) -> list[Trial]:
    """Complete trials by an objective, the best first."""
    if which >= len(report.objectives):
        return []
    sign = 1 if report.objectives[which].direction == "minimize" else -1
    own = [(sign * found, trial.number, trial) for trial, found in completed_values(report, which)]
    return [trial for _, _, trial in sorted(own, key=lambda one: one[:2])]


def recommended_trial(report: SweepReport) -> Trial | None:
    """The trial that the sweep recommends: the winner, or where none was compared the best of all."""
    by_number = {trial.number: trial for trial in report.trials}
    if report.winner is not None and report.winner in by_number:
        return by_number[report.winner]
    if len(report.objectives) == 1 and report.best and report.best[0] in by_number:
        return by_number[report.best[0]]
    return None


def best_values_so_far(report: SweepReport, which: int = 0) -> list[tuple[int, float]]:
    """Best objective up to and with each number at which it got better."""
    better = min if report.objectives[which].direction == "minimize" else max
    found: list[tuple[int, float]] = []
    for trial, one in completed_values(report, which):
        if not found or better(one, found[-1][1]) != found[-1][1]:
            found.append((trial.number, one))
    return found


def objective_unit(metric: str, most: float) -> tuple[float, str]:
    """In what an objective is written whose greatest value is `most`: how many of its own unit, and the name."""
    if metric.endswith("_bytes"):
        return choose_unit(int(most))
    if metric.endswith("_seconds"):
        return (3600, "h") if most >= 7200 else (60, "min") if most >= 120 else (1, "s")
    if metric.endswith("_tokens"):
        return (1e6, "millions") if most >= 2e6 else (1e3, "thousands") if most >= 2e4 else (1, "")
    return 1, "nats per token" if metric == LOSS else ""


def measure_label(measure: SweepObjective, most: float) -> str:
    """`validation loss (nats per token)`, for an axis that goes up to `most`."""
    _, name = objective_unit(measure.metric, most)
    said = NAMES.get(measure.metric, measure.metric.replace("_", " "))
    return f"{said} ({name})" if name else said


def format_objective(measure: SweepObjective, found: float) -> str:
    """A value of an objective in a text: four digits, and the unit where there are several."""
    size, name = objective_unit(measure.metric, found)
    text = f"{found / size:,.0f}" if abs(found / size) >= 10_000 else f"{found / size:.4g}"
    return f"{text} {name}" if name and measure.metric != LOSS else text


def shorten_names(knobs: Iterable[str]) -> dict[str, str]:
    """The last part of each key, or as many as tell it from the others; safe to be shown."""
    keys = list(dict.fromkeys(knobs))
    names = {}
    for key in keys:
        parts = key.split(".")
        ends = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        names[key] = escape_invisible(
            next(end for end in ends if sum(one == end or one.endswith(f".{end}") for one in keys) == 1 or end == key)
        )
    return names


def format_number(amount: float) -> str:
    """A number as short as three digits allow: `16`, `0.05`, `1.2e-4`, `12,000`."""
    if not math.isfinite(amount):
        return str(amount)
    if amount and (abs(amount) < 1e-3 or abs(amount) >= 1e6):
        mantissa, exponent = f"{amount:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if abs(amount) >= 1000:
        return f"{amount:,.0f}"
    return f"{amount:.3g}"


def format_knob_value(item: Any) -> str:
    """A value of a knob for people; a long one is cut, numbers keep three digits."""
    if isinstance(item, bool) or item is None:
        text: str = json.dumps(item)
    elif isinstance(item, int):
        text = f"{item:,}"
    elif isinstance(item, float):
        text = format_number(item)
    elif isinstance(item, list | tuple):
        text = ", ".join(map(str, item))
    else:
        text = str(item)
    text = escape_invisible(" ".join(text.split()))
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


def break_lines(text: str, most: int) -> str:
    """A name in two lines of so many characters where it is too long for one, cut where it is too long for two."""
    if len(text) <= most or "\n" in text:
        return text
    places = [[at + 1 for at, one in enumerate(text[:most]) if one in signs] for signs in (" ", "_.,-")]
    cut = min(next((found for found in places if found), [most]), key=lambda at: abs(at - len(text) / 2))
    first, second = text[:cut].rstrip(), text[cut:].lstrip()
    return f"{first}\n{second if len(second) <= most else second[: most - 1] + '…'}"


def is_same_value(first: Any, second: Any) -> bool:
    """Whether two values of a knob mean the same: lists and tuples do, 1 and true do not."""
    one, other = (tuple(item) if isinstance(item, list) else item for item in (first, second))
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def format_duration(seconds: float) -> str:
    """`3.2 s`, `4 min 10 s`, `3 h 12 min`, `2 d 5 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, name, smaller, unit in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size:,} {name}" + (f" {rest} {unit}" if rest else "")
    return f"{whole} s"


# What a sweep did not have to train, against full trainings of everything that it tried.


@dataclass(frozen=True)
class CauseSavings:
    """What one cause saved."""

    trials: int = 0
    tokens: int = 0
    """Answer tokens."""
    seconds: float = 0.0

    def plus(self, tokens: int, seconds: float) -> "CauseSavings":
        """With another trial."""
        return CauseSavings(self.trials + 1, self.tokens + tokens, self.seconds + seconds)


@dataclass(frozen=True)
class SweepSavings:
    """What trials came to, and what they would have come to."""

    trials: int
    """Trainings, each pair of a pruned trial and the one that goes on with it once."""
    trained_tokens: int
    trained_seconds: float
    pruned: CauseSavings
    """The rest of pruned trials that nobody went on with."""
    refused: CauseSavings
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
class TrialSavings:
    """What one trial did not train."""

    trial: Trial
    tokens: int
    seconds: float


Cause = Literal["pruned", "refused"]


def compute_savings(report: SweepReport) -> SweepSavings:
    """Tokens and seconds trained and saved.

    Seconds that were not trained are extrapolated from the trial's own tokens per second; one that was refused before
    it began has the median over all trials, and so it is with tokens that nobody planned. Trials that failed, and
    infeasible ones that broke off, saved nothing: what is missing in them was no decision. A refused trial is counted
    as a full training although it could not have had one: what it saves is what was meant to be trained.
    """
    trained = counted_trials(report)
    found: dict[Cause, CauseSavings] = {"pruned": CauseSavings(), "refused": CauseSavings()}
    for cause, one in _iterate_trial_savings(report):
        found[cause] = found[cause].plus(one.tokens, one.seconds)
    return SweepSavings(
        trials=len(trained),
        trained_tokens=sum(trial.cost.trained_tokens for trial in trained),
        trained_seconds=sum(trial.cost.train_seconds for trial in trained),
        **found,
    )


def saved_tokens_by_cause(report: SweepReport) -> dict[Cause, dict[int, int]]:
    """Answer tokens that were saved, by cause and trial number."""
    found: dict[Cause, dict[int, int]] = {"pruned": {}, "refused": {}}
    for cause, one in _iterate_trial_savings(report):
        found[cause][one.trial.number] = one.tokens
    return found


def _iterate_trial_savings(report: SweepReport) -> Iterator[tuple[Cause, TrialSavings]]:
    trained = counted_trials(report)
    rates = [rate for trial in trained if (rate := _tokens_per_second(trial)) > 0]
    usual = statistics.median(rates) if rates else 0.0
    plans = [trial.cost.planned_tokens for trial in trained if trial.cost.planned_tokens]
    plan = int(statistics.median(plans)) if plans else 0
    old = superseded_numbers(report)
    for trial in report.trials:
        if trial.state == "pruned" and trial.number not in old:
            tokens = max(0, trial.cost.planned_tokens - trial.cost.trained_tokens)
            yield "pruned", TrialSavings(trial, tokens, _estimate_seconds(tokens, _tokens_per_second(trial) or usual))
        elif trial.state == "infeasible" and not trial.cost.trained_tokens:
            tokens = trial.cost.planned_tokens or plan
            yield "refused", TrialSavings(trial, tokens, _estimate_seconds(tokens, usual))


def _tokens_per_second(trial: Trial) -> float:
    """Tokens per second; 0 where nothing was trained."""
    return trial.cost.trained_tokens / trial.cost.train_seconds if trial.cost.train_seconds > 0 else 0.0


def _estimate_seconds(tokens: int, rate: float) -> float:
    return tokens / rate if rate > 0 else 0.0

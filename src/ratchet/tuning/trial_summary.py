"""Summaries of a sweep's trials for reports: results, rankings, formatted values, and saved training."""

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
"""The objective that is known while a trial runs, from `Trial.curve`."""

MAX_VALUE_LENGTH = 24
"""Characters of a value in a plot."""

NAMES = {
    "memory_bytes": "memory",
    "adapter_bytes": "adapter",
    "train_seconds": "training time",
    "trained_tokens": "tokens trained",
}
"""Names of objectives whose key contains a unit."""


def superseded_numbers(report: SweepReport) -> frozenset[int]:
    """Return numbers of trials that a later trial has continued; the later one represents both."""
    return frozenset(trial.continues for trial in report.trials if trial.continues is not None)


def counted_trials(report: SweepReport) -> list[Trial]:
    """Return trials without those that a later trial continues."""
    old = superseded_numbers(report)
    return [trial for trial in report.trials if trial.number not in old]


def validation_curve(trial: Trial, by_number: Mapping[int, Trial]) -> dict[int, float]:
    """Return the validation loss by rows, with continued trials; values that are not finite are left out."""
    found: dict[int, float] = {}
    earlier = None if trial.continues is None else by_number.get(trial.continues)
    if earlier is not None:
        found |= validation_curve(earlier, by_number)
    found |= trial.curve
    return {rows: loss for rows, loss in sorted(found.items()) if math.isfinite(loss)}


def trial_value(trial: Trial, objectives: Sequence[SweepObjective], which: int = 0) -> float | None:
    """Return the objective of a trial, or else its last validation loss if that is the objective.

    None for a failed or infeasible trial, whose last loss says nothing about its result.
    """
    if trial.state in ("failed", "infeasible"):
        return None
    if which < len(trial.objectives):
        return trial.objectives[which] if math.isfinite(trial.objectives[which]) else None
    if which < len(objectives) and objectives[which].metric == LOSS:
        losses = [loss for _, loss in sorted(trial.curve.items()) if math.isfinite(loss)]
        return losses[-1] if losses else None
    return None


def completed_values(report: SweepReport, which: int = 0) -> list[tuple[Trial, float]]:
    """Return complete trials with a finite objective, by number."""
    return [
        (trial, found)
        for trial in report.trials
        if trial.state == "complete" and (found := trial_value(trial, report.objectives, which)) is not None
    ]


def rank_trials(report: SweepReport, which: int = 0) -> list[Trial]:
    """Return complete trials by an objective, the best first."""
    if which >= len(report.objectives):
        return []
    sign = 1 if report.objectives[which].direction == "minimize" else -1
    own = [(sign * found, trial.number, trial) for trial, found in completed_values(report, which)]
    return [trial for _, _, trial in sorted(own, key=lambda one: one[:2])]


def recommended_trial(report: SweepReport) -> Trial | None:
    """Return the recommended trial: the winner, or the best one without a final round."""
    by_number = {trial.number: trial for trial in report.trials}
    if report.winner is not None and report.winner in by_number:
        return by_number[report.winner]
    if len(report.objectives) == 1 and report.best and report.best[0] in by_number:
        return by_number[report.best[0]]
    return None


def best_values_so_far(report: SweepReport, which: int = 0) -> list[tuple[int, float]]:
    """Return each improvement of the best objective with its trial number."""
    better = min if report.objectives[which].direction == "minimize" else max
    found: list[tuple[int, float]] = []
    for trial, one in completed_values(report, which):
        if not found or better(one, found[-1][1]) != found[-1][1]:
            found.append((trial.number, one))
    return found


def objective_unit(metric: str, most: float) -> tuple[float, str]:
    """Return the display unit of an objective with maximum `most`: its size in base units, and its name."""
    if metric.endswith("_bytes"):
        return choose_unit(int(most))
    if metric.endswith("_seconds"):
        return (3600, "h") if most >= 7200 else (60, "min") if most >= 120 else (1, "s")
    if metric.endswith("_tokens"):
        return (1e6, "millions") if most >= 2e6 else (1e3, "thousands") if most >= 2e4 else (1, "")
    return 1, "nats per token" if metric == LOSS else ""


def objective_label(objective: SweepObjective, most: float) -> str:
    """Return the label of an axis up to `most`, such as `validation loss (nats per token)`."""
    _, name = objective_unit(objective.metric, most)
    label = NAMES.get(objective.metric, objective.metric.replace("_", " "))
    return f"{label} ({name})" if name else label


def format_objective(objective: SweepObjective, found: float) -> str:
    """Return a value of an objective as text: four digits and its unit."""
    size, name = objective_unit(objective.metric, found)
    text = f"{found / size:,.0f}" if abs(found / size) >= 10_000 else f"{found / size:.4g}"
    return f"{text} {name}" if name and objective.metric != LOSS else text


def shorten_names(parameters: Iterable[str]) -> dict[str, str]:
    """Return the shortest unambiguous end of each key; safe to display."""
    keys = list(dict.fromkeys(parameters))
    names = {}
    for key in keys:
        parts = key.split(".")
        ends = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        names[key] = escape_invisible(
            next(end for end in ends if sum(one == end or one.endswith(f".{end}") for one in keys) == 1 or end == key)
        )
    return names


def format_number(amount: float) -> str:
    """Return a number with three digits: `16`, `0.05`, `1.2e-4`, `12,000`."""
    if not math.isfinite(amount):
        return str(amount)
    if amount and (abs(amount) < 1e-3 or abs(amount) >= 1e6):
        mantissa, exponent = f"{amount:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if abs(amount) >= 1000:
        return f"{amount:,.0f}"
    return f"{amount:.3g}"


def format_parameter_value(item: Any) -> str:
    """A hyperparameter value as text: long ones are cut, numbers have three digits."""
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
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[: MAX_VALUE_LENGTH - 1]}…"


def break_lines(text: str, most: int) -> str:
    """Break a long name into two lines of at most `most` characters; cut it if it is longer."""
    if len(text) <= most or "\n" in text:
        return text
    places = [[at + 1 for at, one in enumerate(text[:most]) if one in signs] for signs in (" ", "_.,-")]
    cut = min(next((found for found in places if found), [most]), key=lambda at: abs(at - len(text) / 2))
    first, second = text[:cut].rstrip(), text[cut:].lstrip()
    return f"{first}\n{second if len(second) <= most else second[: most - 1] + '…'}"


def is_same_value(first: Any, second: Any) -> bool:
    """Whether two hyperparameter values are equal: lists equal tuples, but 1 does not equal true."""
    one, other = (tuple(item) if isinstance(item, list) else item for item in (first, second))
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def format_duration(seconds: float) -> str:
    """Return a duration such as `3.2 s`, `4 min 10 s`, `3 h 12 min`, `2 d 5 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, name, smaller, unit in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size:,} {name}" + (f" {rest} {unit}" if rest else "")
    return f"{whole} s"


# Training that a sweep has saved, compared with full trainings of all its trials.


@dataclass(frozen=True)
class CauseSavings:
    """Savings of one cause."""

    trials: int = 0
    tokens: int = 0
    """Answer tokens."""
    seconds: float = 0.0

    def plus(self, tokens: int, seconds: float) -> "CauseSavings":
        """Return the savings with another trial."""
        return CauseSavings(self.trials + 1, self.tokens + tokens, self.seconds + seconds)


@dataclass(frozen=True)
class SweepSavings:
    """Training done and saved by the trials of a sweep."""

    trials: int
    """Trainings; a pruned trial and its continuation count once."""
    trained_tokens: int
    trained_seconds: float
    pruned: CauseSavings
    """The rest of pruned trials that were not continued."""
    refused: CauseSavings
    """Infeasible trials that were never trained."""

    @property
    def tokens(self) -> int:
        """Total savings."""
        return self.pruned.tokens + self.refused.tokens

    @property
    def seconds(self) -> float:
        """Total savings."""
        return self.pruned.seconds + self.refused.seconds

    @property
    def full_tokens(self) -> int:
        """Tokens of the same trials without pruning and rejection."""
        return self.trained_tokens + self.tokens

    @property
    def full_seconds(self) -> float:
        """Seconds of the same trials without pruning and rejection."""
        return self.trained_seconds + self.seconds


@dataclass(frozen=True)
class TrialSavings:
    """Training that one trial saved."""

    trial: Trial
    tokens: int
    seconds: float


Cause = Literal["pruned", "refused"]


def compute_savings(report: SweepReport) -> SweepSavings:
    """Return tokens and seconds trained and saved.

    Saved seconds are extrapolated from the trial's own tokens per second. A trial that was rejected before it began has
    the median of all trials, also for unknown planned tokens. Failed trials, and infeasible ones that were interrupted,
    save nothing, because that was not a decision. A rejected trial counts as a full training, although it could not
    have been trained: it saves what was planned.
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
    """Return saved answer tokens by cause and trial number."""
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
    """Return tokens per second; 0 if nothing was trained."""
    return trial.cost.trained_tokens / trial.cost.train_seconds if trial.cost.train_seconds > 0 else 0.0


def _estimate_seconds(tokens: int, rate: float) -> float:
    return tokens / rate if rate > 0 else 0.0

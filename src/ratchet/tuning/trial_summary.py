"""Summarizes a sweep's trials for reports: results, rankings, values as text, and the training that pruning saved."""

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
"""Objective that is known while a trial runs (`Trial.curve`)."""

MAX_VALUE_LENGTH = 24
"""Maximum number of characters of a value in a plot."""

NAMES = {
    "memory_bytes": "memory",
    "adapter_bytes": "adapter",
    "train_seconds": "training time",
    "trained_tokens": "tokens trained",
}
"""Names of objectives whose key contains a unit."""

Cause = Literal["pruned", "refused"]


def superseded_numbers(report: SweepReport) -> frozenset[int]:
    """Return the numbers of trials that a later trial has continued; the later trial represents both."""
    return frozenset(trial.continues for trial in report.trials if trial.continues is not None)


def counted_trials(report: SweepReport) -> list[Trial]:
    """Return the trials without those that a later trial has continued."""
    superseded = superseded_numbers(report)
    return [trial for trial in report.trials if trial.number not in superseded]


def validation_curve(trial: Trial, by_number: Mapping[int, Trial]) -> dict[int, float]:
    """Return the finite validation losses by rows, including those of the trials that this trial continues."""
    earlier = None if trial.continues is None else by_number.get(trial.continues)
    curve = (validation_curve(earlier, by_number) if earlier is not None else {}) | trial.curve
    return {rows: loss for rows, loss in sorted(curve.items()) if math.isfinite(loss)}


def trial_value(trial: Trial, objectives: Sequence[SweepObjective], which: int = 0) -> float | None:
    """Return an objective of a trial, by its index `which`; None if it is unknown.

    While a trial has no objectives, its last validation loss is used if validation loss is the objective. The last loss
    of a failed or infeasible trial is no result, so such a trial has None.
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
    """Return the complete trials whose objective is finite, with the objective."""
    return [
        (trial, value)
        for trial in report.trials
        if trial.state == "complete" and (value := trial_value(trial, report.objectives, which)) is not None
    ]


def rank_trials(report: SweepReport, which: int = 0) -> list[Trial]:
    """Return the complete trials ordered by an objective, the best first."""
    if which >= len(report.objectives):
        return []
    sign = 1 if report.objectives[which].direction == "minimize" else -1
    ranked = [(sign * value, trial.number, trial) for trial, value in completed_values(report, which)]
    return [trial for _, _, trial in sorted(ranked, key=lambda entry: entry[:2])]


def recommended_trial(report: SweepReport) -> Trial | None:
    """Return the recommended trial: the winner, or the best trial if there was no final round."""
    by_number = {trial.number: trial for trial in report.trials}
    if report.winner is not None and report.winner in by_number:
        return by_number[report.winner]
    if len(report.objectives) == 1 and report.best and report.best[0] in by_number:
        return by_number[report.best[0]]
    return None


def best_values_so_far(report: SweepReport, which: int = 0) -> list[tuple[int, float]]:
    """Return each trial that improved the best value of an objective: its number and its value."""
    better = min if report.objectives[which].direction == "minimize" else max
    improvements: list[tuple[int, float]] = []
    for trial, value in completed_values(report, which):
        if not improvements or better(value, improvements[-1][1]) != improvements[-1][1]:
            improvements.append((trial.number, value))
    return improvements


# Values as text.


def objective_unit(metric: str, most: float) -> tuple[float, str]:
    """Return the unit for the display of values of an objective up to `most`: size in base units, and name."""
    if metric.endswith("_bytes"):
        return choose_unit(int(most))
    if metric.endswith("_seconds"):
        return (3600, "h") if most >= 7200 else (60, "min") if most >= 120 else (1, "s")
    if metric.endswith("_tokens"):
        return (1e6, "millions") if most >= 2e6 else (1e3, "thousands") if most >= 2e4 else (1, "")
    return 1, "nats per token" if metric == LOSS else ""


def objective_label(objective: SweepObjective, most: float) -> str:
    """Return the label of an axis with values up to `most`, such as `validation loss (nats per token)`."""
    _, name = objective_unit(objective.metric, most)
    label = NAMES.get(objective.metric, objective.metric.replace("_", " "))
    return f"{label} ({name})" if name else label


def format_objective(objective: SweepObjective, value: float) -> str:
    """Return a value of an objective as text: four digits and its unit."""
    size, name = objective_unit(objective.metric, value)
    text = f"{value / size:,.0f}" if abs(value / size) >= 10_000 else f"{value / size:.4g}"
    return f"{text} {name}" if name and objective.metric != LOSS else text


def shorten_names(parameters: Iterable[str]) -> dict[str, str]:
    """Return the shortest unambiguous end of each key; safe to display."""
    keys = list(dict.fromkeys(parameters))
    names = {}
    for key in keys:
        parts = key.split(".")
        for count in range(1, len(parts) + 1):
            end = ".".join(parts[-count:])
            if sum(f".{other}".endswith(f".{end}") for other in keys) == 1:
                break
        names[key] = escape_invisible(end)
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
    """Return a hyperparameter value as text: numbers have three digits, long texts are cut."""
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
    """Break a long name into two lines of at most `most` characters, and cut the rest."""
    if len(text) <= most or "\n" in text:
        return text
    breaks = [[at + 1 for at, letter in enumerate(text[:most]) if letter in signs] for signs in (" ", "_.,-")]
    cut = min(next((positions for positions in breaks if positions), [most]), key=lambda at: abs(at - len(text) / 2))
    first, second = text[:cut].rstrip(), text[cut:].lstrip()
    return f"{first}\n{second if len(second) <= most else second[: most - 1] + '…'}"


# The training that a sweep has saved, compared with full trainings of all its trials.


@dataclass(frozen=True)
class CauseSavings:
    """Savings by one cause."""

    trials: int = 0
    tokens: int = 0
    """Answer tokens."""
    seconds: float = 0.0


@dataclass(frozen=True)
class SweepSavings:
    """Training done and saved by the trials of a sweep."""

    trials: int
    """Number of trainings; a pruned trial and its continuation count once."""
    trained_tokens: int
    trained_seconds: float
    pruned: CauseSavings
    """Savings by pruned trials that were not continued: the remaining part of their trainings."""
    refused: CauseSavings
    """Savings by infeasible trials that were never trained."""

    @property
    def tokens(self) -> int:
        """Answer tokens saved in total."""
        return self.pruned.tokens + self.refused.tokens

    @property
    def seconds(self) -> float:
        """Seconds saved in total."""
        return self.pruned.seconds + self.refused.seconds

    @property
    def full_tokens(self) -> int:
        """Answer tokens of full trainings of all trials."""
        return self.trained_tokens + self.tokens

    @property
    def full_seconds(self) -> float:
        """Seconds of full trainings of all trials."""
        return self.trained_seconds + self.seconds


def compute_savings(report: SweepReport) -> SweepSavings:
    """Return the tokens and seconds that a sweep has trained and saved.

    A pruned trial saves the tokens that it has not trained. Its saved seconds are extrapolated with its own tokens per
    second. A trial that was rejected before it began (an infeasible trial without trained tokens) saves its full
    training, although it could not have been trained. Its tokens per second are the median of all trials, and so are
    its planned tokens if they are unknown. Failed trials, and infeasible trials that ended during training, save
    nothing, because the sweep did not decide to end them.
    """
    trained = counted_trials(report)
    by_cause: dict[Cause, CauseSavings] = {"pruned": CauseSavings(), "refused": CauseSavings()}
    for cause, _, tokens, seconds in _iterate_trial_savings(report):
        sum_before = by_cause[cause]
        by_cause[cause] = CauseSavings(sum_before.trials + 1, sum_before.tokens + tokens, sum_before.seconds + seconds)
    return SweepSavings(
        trials=len(trained),
        trained_tokens=sum(trial.cost.trained_tokens for trial in trained),
        trained_seconds=sum(trial.cost.train_seconds for trial in trained),
        **by_cause,
    )


def saved_tokens_by_cause(report: SweepReport) -> dict[Cause, dict[int, int]]:
    """Return saved answer tokens by cause and trial number."""
    tokens: dict[Cause, dict[int, int]] = {"pruned": {}, "refused": {}}
    for cause, number, saved, _ in _iterate_trial_savings(report):
        tokens[cause][number] = saved
    return tokens


def _iterate_trial_savings(report: SweepReport) -> Iterator[tuple[Cause, int, int, float]]:
    """Yield cause, trial number, answer tokens and seconds of all savings."""
    trained = counted_trials(report)
    rates = [rate for trial in trained if (rate := _tokens_per_second(trial)) > 0]
    median_rate = statistics.median(rates) if rates else 0.0
    plans = [trial.cost.planned_tokens for trial in trained if trial.cost.planned_tokens]
    median_plan = int(statistics.median(plans)) if plans else 0
    superseded = superseded_numbers(report)
    for trial in report.trials:
        if trial.state == "pruned" and not trial.is_ended_by_person and trial.number not in superseded:
            tokens = max(0, trial.cost.planned_tokens - trial.cost.trained_tokens)
            rate = _tokens_per_second(trial) or median_rate
            yield "pruned", trial.number, tokens, tokens / rate if rate else 0.0
        elif trial.state == "infeasible" and not trial.cost.trained_tokens:
            tokens = trial.cost.planned_tokens or median_plan
            yield "refused", trial.number, tokens, tokens / median_rate if median_rate else 0.0


def _tokens_per_second(trial: Trial) -> float:
    """Return tokens per second; 0 if nothing was trained."""
    return trial.cost.trained_tokens / trial.cost.train_seconds if trial.cost.train_seconds > 0 else 0.0

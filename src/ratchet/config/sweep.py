"""Section `sweep` of params.yaml: which settings are searched, by what, and when it is enough."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ratchet.config.fields import (
    Count,
    Name,
    Number,
    Positive,
    PositiveCount,
    Section,
    Share,
    convert_to_tuple,
    parse_number,
)

Direction = Literal["minimize", "maximize"]

DIRECTIONS: dict[str, Direction] = {
    "validation_loss": "minimize",
    "accuracy": "maximize",
    "exact_match": "maximize",
    "token_f1": "maximize",
    "memory_bytes": "minimize",
    "adapter_bytes": "minimize",
    "train_seconds": "minimize",
    "trained_tokens": "minimize",
}
"""What a trial can be judged by, and which way is better. The three with `maximize` are measured by letting the trained
model answer validation rows; all others come from the run itself."""


def _parse_value(value: Any) -> Any:
    value = parse_number(value)
    return tuple(value) if isinstance(value, list) else value


def _parse_values(value: Any) -> Any:
    return tuple(_parse_value(one) for one in value) if isinstance(value, list) else value


def _parse_conditions(value: Any) -> Any:
    return {key: _parse_values(one) for key, one in value.items()} if isinstance(value, dict) else value


def _require_study_name(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", value):
        raise ValueError("a name of a study has up to 64 letters, digits, - and _ (.2 and so on is added by --fork)")
    return value


Value = bool | int | float | str | tuple[str, ...] | None
"""Of a knob, as it stands in params.yaml."""


class SweepParameter(Section):
    """Values that one setting may take: a range (low, high), a list (choices), or what follows from another (tie)."""

    low: Number | None = None
    """Smallest value; a whole number where the setting is one."""
    high: Number | None = None
    """Largest value."""
    log: bool = False
    """Search the range on a logarithmic scale."""
    step: Annotated[float, BeforeValidator(parse_number), Field(gt=0, allow_inf_nan=False)] | None = None
    """Only every so many between low and high."""
    choices: Annotated[
        tuple[Annotated[Value, BeforeValidator(_parse_value)], ...], BeforeValidator(convert_to_tuple)
    ] = ()
    """The values to choose from."""
    tie: Name | None = None
    """Follows from another setting: `2 * train.rank`, `train.rank / 2` or `train.rank`."""
    when: Annotated[dict[Name, tuple[Value, ...] | Value], BeforeValidator(_parse_conditions)] = Field(
        default_factory=dict
    )
    """Searched only where other settings have these values (one, or a list of them); else as it is in params.yaml."""

    @model_validator(mode="after")
    def _is_one_kind(self) -> "SweepParameter":
        kinds = [self.low is not None or self.high is not None, bool(self.choices), self.tie is not None]
        if sum(kinds) != 1:
            raise ValueError("give either low and high, or choices, or a tie")
        if (self.log or self.step is not None) and not kinds[0]:
            raise ValueError("log and step belong to low and high")
        if kinds[0]:
            _check_range(self)
        if len(set(map(repr, self.choices))) < len(self.choices):
            raise ValueError("choices: the same value twice")
        return self


def _check_range(knob: SweepParameter) -> None:
    low, high = knob.low, knob.high
    if low is None or high is None:
        raise ValueError("give both low and high")
    if low > high:
        raise ValueError(f"low: {low:g} is above high ({high:g})")
    if knob.log and low <= 0:
        raise ValueError(f"low: {low:g} has no logarithm; it must be above 0 where log is true")
    if knob.log and knob.step is not None:
        raise ValueError("step: a logarithmic range has none; leave one of both out")


class ObjectiveSettings(Section):
    """One thing that a trial is judged by."""

    metric: Name = "validation_loss"
    """validation_loss, accuracy, exact_match, token_f1, memory_bytes, adapter_bytes, train_seconds, trained_tokens."""
    direction: Literal["auto", "minimize", "maximize"] = "auto"
    """`auto`: what is better by nature."""

    @property
    def better(self) -> Direction:
        """Which way is better."""
        return DIRECTIONS[self.metric] if self.direction == "auto" else self.direction


class SamplerSettings(Section):
    """Which values are tried next."""

    kind: Literal["tpe", "random", "gp", "cmaes", "grid"] = "tpe"
    """Tree-structured Parzen estimator, random, Gaussian process, CMA-ES, or every point of a grid in its order."""
    seed: Count = 0
    """Of the sampler: with one worker the same seed gives the same trials."""
    startup: PositiveCount = 8
    """Trials with random values before tpe and gp begin to learn from them."""
    points: Annotated[int, BeforeValidator(parse_number), Field(ge=2)] = 4
    """Of a range without step, in a grid."""


class PrunerSettings(Section):
    """When a trial is ended early; looks at validation loss."""

    kind: Literal["asha", "hyperband", "median", "none"] = "asha"
    """Asynchronous successive halving (Li et al. 2020), Hyperband (Li et al. 2018), worse than the median, or never."""
    first: Share = 0.05
    """Fraction of the longest training after which a trial may be pruned for the first time."""
    reduction: Annotated[int, BeforeValidator(parse_number), Field(ge=2)] = 3
    """One trial in so many goes on at each rung of asha and hyperband; rungs are so many times as far apart."""
    startup: Count = 4
    """Finished trials before `median` prunes."""


class FinalistSettings(Section):
    """The best trials once more, with other seeds, before one is called better than the others."""

    top: Count = 3
    """So many of the best trials; 0 or 1 names the best trial without a comparison."""
    seeds: PositiveCount = 3
    """Trainings of each, that of the sweep counted."""
    rows: Count = 0
    """Validation rows on which they are compared (a fixed sample by content); 0 takes all."""
    confidence: Annotated[float, BeforeValidator(parse_number), Field(gt=0.5, lt=1)] = 0.95
    """With which the best must be better than each of the others to be the winner alone; else the cheapest wins."""
    wilcoxon: Share | None = None
    """One that is worse than the leader at this p (Wilcoxon's signed-rank test) gets no further seeds; null: all do."""


class Sweep(Section):
    """Many trainings, chosen by a study: `ratchet sweep` (a command, no stage)."""

    name: Annotated[str, BeforeValidator(_require_study_name)] = "sweep"
    """Of the study."""
    space: dict[Name, SweepParameter] = Field(
        default_factory=lambda: {
            "train.rank": SweepParameter(low=4, high=64, log=True),
            "train.alpha": SweepParameter(tie="2 * train.rank"),
            "train.learning_rate": SweepParameter(low=1e-4, high=1e-2, log=True),
        }
    )
    """Settings of section train, by dotted key, and the values that each may take."""
    objectives: Annotated[tuple[ObjectiveSettings, ...], BeforeValidator(convert_to_tuple), Field(min_length=1)] = (
        ObjectiveSettings(),
    )
    """What trials are judged by; of several the Pareto front is sought, and nothing is pruned."""
    trials: PositiveCount = 20
    """In all, however often the sweep is started again; those that a fork has taken over come on top."""
    hours: Positive | None = None
    """No trial is begun once all of them together have trained so long."""
    tokens: PositiveCount | None = None
    """No trial is begun once all of them together have learned from so many answer tokens."""
    sampler: SamplerSettings = SamplerSettings()
    """Which values are tried next."""
    pruner: PrunerSettings = PrunerSettings()
    """When a trial is ended early."""
    finalists: FinalistSettings = FinalistSettings()
    """The best trials once more, with other seeds."""
    stop_after: PositiveCount = 3
    """Trials that fail for the same cause before the sweep stops with the diagnosis."""
    rows: Count = 0
    """Validation rows that a trial answers, where an objective asks for answers; 0 takes all."""

    @model_validator(mode="after")
    def _fits_together(self) -> "Sweep":
        for aim in self.objectives:
            if aim.metric not in DIRECTIONS:
                known = ", ".join(DIRECTIONS)
                raise ValueError(f"objectives: no evaluation reports {aim.metric!r}; there are: {known}")
        if len({aim.metric for aim in self.objectives}) < len(self.objectives):
            raise ValueError("objectives: the same metric twice")
        if len(self.objectives) > 1 and self.pruner.kind != "none":
            raise ValueError(
                f"pruner.kind: {self.pruner.kind} orders trials by one figure, and there are {len(self.objectives)} "
                "objectives; set it to none"
            )
        if self.sampler.kind == "cmaes" and len(self.objectives) > 1:
            raise ValueError("sampler.kind: cmaes knows one objective only; take tpe, gp or random")
        return self

"""Section `sweep` of params.yaml: the search space, the sampler and pruner, and the budget."""

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from ratchet.config.fields import (
    Confidence,
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
    "preference_accuracy": "maximize",
    "memory_bytes": "minimize",
    "adapter_bytes": "minimize",
    "train_seconds": "minimize",
    "trained_tokens": "minimize",
}
"""Metrics that an objective may use. Those with `maximize` are measured on validation rows after the training; the
others come from the run itself."""

MAX_GP_PARAMETERS = 5
"""Maximum number of ranges for which `auto` takes a Gaussian process. With more, it needs more trials than a sweep has
to find out which of them matter."""


def _parse_value(value: Any) -> Any:
    return convert_to_tuple(parse_number(value))


def _parse_values(value: Any) -> Any:
    return tuple(map(_parse_value, value)) if isinstance(value, list) else value


def _parse_conditions(value: Any) -> Any:
    return {key: _parse_values(values) for key, values in value.items()} if isinstance(value, dict) else value


def _require_study_name(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", value):
        raise ValueError("expected up to 64 letters, digits, - and _ (--fork adds .2 and so on)")
    return value


Value = bool | int | float | str | tuple[str, ...] | None
"""A value of a setting, as written in params.yaml."""


class SweepParameter(Section):
    """The values of one setting: a range (low, high), a list (choices), or derived from another setting (tie)."""

    low: Number | None = None
    """Smallest value."""
    high: Number | None = None
    """Largest value."""
    log: bool = False
    """Search the range on a logarithmic scale."""
    step: Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(parse_number)] | None = None
    """Distance between the values of the range. null: any value in between."""
    choices: Annotated[
        tuple[Annotated[Value, BeforeValidator(_parse_value)], ...], BeforeValidator(convert_to_tuple)
    ] = ()
    """List of values."""
    tie: Name | None = None
    """Derived from another setting: `2 * train.rank`, `train.rank / 2` or `train.rank`."""
    when: Annotated[dict[Name, tuple[Value, ...] | Value], BeforeValidator(_parse_conditions)] = Field(
        default_factory=dict
    )
    """Search this setting only if other settings have these values (one or a list); else use that of params.yaml."""

    @property
    def has_one_value(self) -> bool:
        """Whether the list or range has only one value. A tied parameter counts as varied."""
        return len(self.choices) == 1 or (self.low is not None and self.low == self.high)

    @model_validator(mode="after")
    def _check_combinations(self) -> "SweepParameter":
        kinds = [self.low is not None or self.high is not None, bool(self.choices), self.tie is not None]
        if sum(kinds) != 1:
            raise ValueError("expected either low and high, or choices, or tie")
        if (self.log or self.step is not None) and not kinds[0]:
            raise ValueError("log and step: need low and high; remove them, or set a range")
        if kinds[0]:
            self._check_range()
        if len(set(map(repr, self.choices))) < len(self.choices):
            raise ValueError("choices: found the same value twice; remove one")
        return self

    def _check_range(self) -> None:
        low, high = self.low, self.high
        if low is None or high is None:
            raise ValueError(f"{'low' if low is None else 'high'}: missing; set both low and high")
        if low > high:
            raise ValueError(f"low: found {low:g}; expected at most high ({high:g})")
        if self.log and low <= 0:
            raise ValueError(f"low: found {low:g}; expected a number > 0 because log is true")
        if self.log and self.step is not None:
            raise ValueError("step: a logarithmic range has no step; remove step or log")


class ObjectiveSettings(Section):
    """An objective of the sweep."""

    metric: Name = "validation_loss"
    """validation_loss, accuracy, exact_match, token_f1, preference_accuracy, memory_bytes, adapter_bytes,
    train_seconds, trained_tokens."""
    direction: Literal["auto", "minimize", "maximize"] = "auto"
    """minimize, maximize, or `auto`: the direction in which the metric improves."""

    @property
    def resolved_direction(self) -> Direction:
        """The direction, with `auto` resolved."""
        return DIRECTIONS[self.metric] if self.direction == "auto" else self.direction


class SamplerSettings(Section):
    """Optuna sampler: which values are tried next."""

    kind: Literal["auto", "tpe", "random", "gp", "cmaes", "grid"] = "auto"
    """Tree-structured Parzen estimator, random, Gaussian process, CMA-ES, or every point of a grid in order. auto: gp
    for up to five numeric settings that every trial has, otherwise tpe."""
    seed: Count = 0
    """Seed of the sampler. With one worker, the same seed gives the same trials."""
    n_startup_trials: PositiveCount = 8
    """Random trials before tpe and gp start to model the results; with freeze_thaw, trials spread over the space."""
    grid_points: ClassVar[int] = 4
    """Points of a grid in each range without a step."""


class PrunerSettings(Section):
    """Pruner: when a trial ends early, by its validation loss."""

    kind: Literal["auto", "freeze_thaw", "asha", "hyperband", "median", "none"] = "auto"
    """Freeze-thaw with predicted losses (Swersky et al. 2014), asynchronous successive halving (Li et al. 2020),
    Hyperband (Li et al. 2018), the median rule, or none. auto: freeze_thaw where it is possible, otherwise asha; none
    with several objectives."""
    min_resource_fraction: Share = 0.1
    """Fraction of the longest training before a trial can be pruned for the first time."""
    reduction_factor: Annotated[int, Field(ge=2), BeforeValidator(parse_number)] = 3
    """asha and hyperband: one trial in this many continues at each rung, and the next rung is this many times later."""
    n_startup_trials: Count = 4
    """Finished trials before `median` starts to prune."""


class FinalistSettings(Section):
    """Final round: the best trials are trained with more seeds and compared."""

    top_k: Count = 3
    """Number of finalists. 0 or 1: the best trial wins without a comparison."""
    seeds: PositiveCount = 3
    """Seeds for each finalist, that of the sweep included."""
    rows: Count = 0
    """Validation rows for the comparison (a fixed sample by content). 0: all."""
    confidence: Confidence = 0.95
    """Confidence with which the best must beat every other finalist to win; otherwise the cheapest of them wins."""
    wilcoxon_p_threshold: Share | None = None
    """Train no more seeds of a finalist that is worse than the leader at this p (Wilcoxon signed-rank). null: all."""


class Sweep(Section):
    """Hyperparameter search with Optuna: `ratchet sweep`."""

    name: Annotated[str, BeforeValidator(_require_study_name)] = "sweep"
    """Name of the study."""
    space: dict[Name, SweepParameter] = Field(
        default_factory=lambda: {
            "train.rank": SweepParameter(low=4, high=64, log=True),
            "train.alpha": SweepParameter(tie="2 * train.rank"),
            "train.learning_rate": SweepParameter(low=1e-4, high=1e-2, log=True),
        }
    )
    """Search space: settings of section train, by dotted name, and their values."""
    objectives: Annotated[tuple[ObjectiveSettings, ...], BeforeValidator(convert_to_tuple), Field(min_length=1)] = (
        ObjectiveSettings(),
    )
    """Objectives. With several, the Pareto front is searched and nothing is pruned."""
    concurrent_trials: Literal["auto"] | Annotated[PositiveCount, Field(le=64)] = "auto"
    """Trials that one worker trains together, in one pass of the base, as memory allows. auto: 1, until groups are
    measured on a GPU."""
    trials: PositiveCount = 20
    """Total number of trials, over all starts of the sweep. Trials that a fork takes over are not counted."""
    max_hours: Positive | None = None
    """After this much training time in total, in hours, train no more, unless no trial is complete. null: no limit."""
    max_tokens: PositiveCount | None = None
    """After this many trained answer tokens in total, train no more, unless no trial is complete. null: no limit."""
    sampler: SamplerSettings = SamplerSettings()
    """Optuna sampler: which values are tried next."""
    pruner: PrunerSettings = PrunerSettings()
    """Pruner: when a trial ends early, by its validation loss."""
    finalists: FinalistSettings = FinalistSettings()
    """Final round: the best trials are trained with more seeds and compared."""
    max_repeated_failures: PositiveCount = 3
    """Trials that fail for the same cause before the sweep stops."""
    generation_rows: Count = 0
    """Validation rows that a trial answers, if an objective needs answers. 0: all."""

    @property
    def resolved_sampler(self) -> SamplerSettings:
        """The sampler, with `auto` resolved."""
        if self.sampler.kind != "auto":
            return self.sampler
        return self.sampler.model_copy(update={"kind": "gp" if self._has_few_ranges else "tpe"})

    @property
    def resolved_pruner(self) -> PrunerSettings:
        """The pruner, with `auto` resolved."""
        if self.pruner.kind != "auto":
            return self.pruner
        if len(self.objectives) > 1:
            return self.pruner.model_copy(update={"kind": "none"})
        return self.pruner.model_copy(update={"kind": "asha" if self.find_freeze_thaw_obstacle() else "freeze_thaw"})

    @property
    def _has_few_ranges(self) -> bool:
        """Whether only ranges that every trial has are searched, and few of them."""
        searched = [parameter for parameter in self.space.values() if parameter.tie is None]
        is_range = all(parameter.low is not None and not parameter.when for parameter in searched)
        return is_range and 0 < len(searched) <= MAX_GP_PARAMETERS

    def find_freeze_thaw_obstacle(self) -> str | None:
        """Return why freeze_thaw is not possible; None if it is."""
        if not self._has_few_ranges:
            return f"it needs a space of at most {MAX_GP_PARAMETERS} ranges without choices and without when"
        if "train.epochs" in self.space:
            return "it needs trainings of the same length, and the space has train.epochs"
        if [(aim.metric, aim.resolved_direction) for aim in self.objectives] != [("validation_loss", "minimize")]:
            return "it predicts validation_loss, which must be the only objective"
        if self.sampler.kind not in ("auto", "gp"):
            return f"it proposes values itself, with a Gaussian process; found sampler.kind {self.sampler.kind}"
        return None

    @model_validator(mode="after")
    def _check_combinations(self) -> "Sweep":
        for objective in self.objectives:
            if objective.metric not in DIRECTIONS:
                known = ", ".join(DIRECTIONS)
                raise ValueError(f"objectives: unknown metric {objective.metric!r}; expected one of: {known}")
        if len({objective.metric for objective in self.objectives}) < len(self.objectives):
            raise ValueError("objectives: found the same metric twice; remove one")
        if self.pruner.kind == "freeze_thaw" and (obstacle := self.find_freeze_thaw_obstacle()):
            raise ValueError(f"pruner.kind: found freeze_thaw; {obstacle}; set it to auto")
        if len(self.objectives) > 1 and self.pruner.kind not in ("auto", "none"):
            raise ValueError(
                f"pruner.kind: found {self.pruner.kind}, which needs a single objective, but there are "
                f"{len(self.objectives)}; set it to auto or none"
            )
        if self.sampler.kind == "cmaes" and len(self.objectives) > 1:
            raise ValueError("sampler.kind: cmaes needs a single objective; set tpe, gp or random")
        return self

"""Trials that share one training count once: those that were continued."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import TrialState, create_trial

from ratchet.storage.records.sweep import SweepObjective, Trial
from ratchet.tuning.parameter_scale import encode_value, to_distribution
from ratchet.tuning.search_space import SearchSpace


@dataclass(frozen=True)
class TrialLineage:
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


def group_by_lineage(history: Iterable[Trial]) -> list[TrialLineage]:
    """Every training of a study once, by the number of the trial that began it."""
    found: dict[int, list[Trial]] = {}
    first: dict[int, int] = {}
    for trial in sorted(history, key=lambda trial: trial.number):
        first[trial.number] = trial.number if trial.continues is None else first[trial.continues]
        found.setdefault(first[trial.number], []).append(trial)
    return [TrialLineage(tuple(trials)) for trials in found.values()]


# A study in memory, filled from the records of trials: what Optuna's samplers look at when they propose values.

WORST = 1e300
"""Stands for a loss that is not finite: worse than any other, and medians of it are still numbers."""

INFEASIBLE = "infeasible"
"""The one constraint that a Gaussian process is given: above 0 where something was violated."""


def create_empty_study(objectives: int) -> optuna.Study:
    """An empty study in memory, everything to be minimised; Optuna says nothing about it."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(storage=optuna.storages.InMemoryStorage(), directions=["minimize"] * objectives)


def replace_non_finite(curve: Mapping[int, float]) -> dict[int, float]:
    """The curve with `WORST` where there is no number."""
    return {rows: value if math.isfinite(value) else WORST for rows, value in curve.items()}


def minimized_objectives(trial: Trial, measures: Sequence[SweepObjective]) -> tuple[float, ...]:
    """Objectives of a complete trial, so that less is better."""
    pairs = zip(trial.objectives, measures, strict=True)
    return tuple(value if measure.direction == "minimize" else -value for value, measure in pairs)


def is_infeasible(trial: Trial) -> bool:
    """Whether the values cannot be trained with; a result that is no number counts, for none can be learned from."""
    unusable = trial.state == "complete" and not all(map(math.isfinite, trial.objectives))
    return trial.state == "infeasible" or unusable


def constraint_violations(trial: Trial) -> dict[str, float]:
    """By how much an infeasible trial violated what; 1.0 where nobody knows."""
    found = {name: value for name, value in trial.constraints.items() if value > 0}
    return found or {"unknown": 1.0}


def build_in_memory_study(
    space: SearchSpace, measures: Sequence[SweepObjective], history: Sequence[Trial], kind: str
) -> optuna.Study:
    """The trials of `history` as the sampler of this kind (`tpe` or `gp`) understands them.

    A training that several trials share counts once (see `TrialLineage`). Failed trials say nothing about their values
    and are left out; running ones are RUNNING with their values, so that no other worker tries the same values
    meanwhile (Ginsbourger et al. 2010, "constant liar"). All objectives are turned so that less is better, like the
    curves.

    For TPE a pruned trial is PRUNED with its curve, and an infeasible one PRUNED with its violated constraints. A
    Gaussian process would overlook both: they are COMPLETE with what they came to, else (other objectives, infeasible
    ones) with the worst that any came to; 0 where none came to anything, for then all are alike. An infeasible one
    also violates a constraint, a surface of its own at +1 and -1 (Gardner et al. 2014), which keeps proposals away.
    As long as nothing was feasible that surface is flat, and what is sought first is the least violation.
    """
    study = create_empty_study(len(measures))
    known = [line for line in group_by_lineage(history) if line.told.state != "failed"]
    over = [line for line in known if line.told.state != "running"]
    seen = [values for line in over if (values := _final_objectives(line, measures)) is not None]
    worst = tuple(max(column) for column in zip(*seen, strict=True)) if seen else (0.0,) * len(measures)
    hopeless = all(is_infeasible(line.told) for line in over)
    constrained = any(is_infeasible(line.told) for line in over)
    for line in known:
        params, distributions = _split_params(space, line.told.values)
        if line.told.state == "running":
            content: dict[str, Any] = {"state": TrialState.RUNNING}
        elif kind == "tpe":
            content = _tpe_trial_fields(line, measures)
        elif hopeless:
            content = {
                "state": TrialState.COMPLETE,
                "values": [sum(constraint_violations(line.told).values())] * len(measures),
            }
        else:
            content = {"state": TrialState.COMPLETE, "values": _final_objectives(line, measures) or worst}
            if constrained:
                content["constraints"] = {INFEASIBLE: 1.0 if is_infeasible(line.told) else -1.0}
        study.add_trial(create_trial(params=params, distributions=distributions, **content))
    return study


def _split_params(space: SearchSpace, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
    """The free values as Optuna stores them, and what each was chosen from."""
    free = space.free(values)
    distributions = {name: to_distribution(space.dimension(name)) for name in free}
    return {name: encode_value(value) for name, value in free.items()}, distributions


def _tpe_trial_fields(line: TrialLineage, measures: Sequence[SweepObjective]) -> dict[str, Any]:
    """One that is over, for TPE: it ranks the pruned by how far they came, and the infeasible behind everything.

    With several objectives Optuna has no order for curves, and refuses them.
    """
    if is_infeasible(line.told):
        return {"state": TrialState.PRUNED, "constraints": constraint_violations(line.told)}
    if line.told.state == "complete":
        return {"state": TrialState.COMPLETE, "values": minimized_objectives(line.told, measures)}
    return {
        "state": TrialState.PRUNED,
        "intermediate_values": replace_non_finite(line.curve) if len(measures) == 1 else {},
    }


def _final_objectives(line: TrialLineage, measures: Sequence[SweepObjective]) -> tuple[float, ...] | None:
    """What one that is over came to, in the unit of the objectives; None where there is no such figure.

    A pruned one came to its last validation loss where that is what is sought; training on would have lowered it, so
    this flatters nobody.
    """
    if is_infeasible(line.told):
        return None
    if line.told.state == "complete":
        return minimized_objectives(line.told, measures)
    sought = [(measure.metric, measure.direction) for measure in measures] == [("validation_loss", "minimize")]
    last = next(reversed(line.curve.values()), math.nan)
    return (last,) if sought and math.isfinite(last) else None

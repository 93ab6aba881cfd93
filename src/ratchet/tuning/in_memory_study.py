"""Builds an Optuna study in memory from trial records, for Optuna's samplers and pruners.

Trials that share one training (a pruned or failed trial and its continuations) count once.
"""

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
    """One training: the trial that began it, and the trials that continued it after it was pruned or had failed."""

    trials: tuple[Trial, ...]
    """Trials by number."""

    @property
    def first(self) -> int:
        """Number of the trial that began the training."""
        return self.trials[0].number

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of its trials."""
        return tuple(trial.number for trial in self.trials)

    @cached_property
    def curve(self) -> dict[int, float]:
        """Validation loss in nats per token by processed rows, of all its trials, in order of rows."""
        return dict(sorted(point for trial in self.trials for point in trial.curve.items()))

    @property
    def decisive(self) -> Trial:
        """The trial with the result: the last one that was completed, pruned or infeasible.

        While a pruned training is being continued, its result is still that it was pruned. A continuation that failed
        does not say anything about the values.
        """
        settled = [trial for trial in self.trials if trial.state in ("complete", "pruned", "infeasible")]
        return settled[-1] if settled else self.trials[-1]

    @property
    def competes(self) -> bool:
        """Whether others are compared with it; a failed or infeasible training is not, however good its curve was."""
        return self.trials[-1].state not in ("failed", "infeasible")


def group_by_lineage(history: Iterable[Trial]) -> list[TrialLineage]:
    """Return the trainings of a study, by the number of the trial that began them."""
    found: dict[int, list[Trial]] = {}
    first: dict[int, int] = {}
    for trial in sorted(history, key=lambda trial: trial.number):
        first[trial.number] = trial.number if trial.continues is None else first[trial.continues]
        found.setdefault(first[trial.number], []).append(trial)
    return [TrialLineage(tuple(trials)) for trials in found.values()]


# The study in memory.

WORST = 1e300
"""Replaces a loss that is not finite: worse than any other, and medians with it are still numbers."""

INFEASIBLE = "infeasible"
"""Name of the constraint for a Gaussian process: above 0 if something was violated."""


def create_empty_study(objectives: int) -> optuna.Study:
    """Return an empty study in memory that minimises all objectives; Optuna does not log."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(storage=optuna.storages.InMemoryStorage(), directions=["minimize"] * objectives)


def replace_non_finite(curve: Mapping[int, float]) -> dict[int, float]:
    """Return the curve with `WORST` for values that are not finite."""
    return {rows: value if math.isfinite(value) else WORST for rows, value in curve.items()}


def minimized_objectives(trial: Trial, objectives: Sequence[SweepObjective]) -> tuple[float, ...]:
    """Return the objectives of a complete trial with a sign so that less is better."""
    pairs = zip(trial.objectives, objectives, strict=True)
    return tuple(value if objective.direction == "minimize" else -value for value, objective in pairs)


def is_infeasible(trial: Trial) -> bool:
    """Return whether the values cannot be trained with; a result that is not finite counts as infeasible."""
    unusable = trial.state == "complete" and not all(map(math.isfinite, trial.objectives))
    return trial.state == "infeasible" or unusable


def constraint_violations(trial: Trial) -> dict[str, float]:
    """Return how much an infeasible trial violated each constraint; 1.0 if it is unknown."""
    found = {name: value for name, value in trial.constraints.items() if value > 0}
    return found or {"unknown": 1.0}


def build_in_memory_study(
    space: SearchSpace, objectives: Sequence[SweepObjective], history: Sequence[Trial], kind: str
) -> optuna.Study:
    """Return the trials of `history` as a study for a sampler of this kind (`tpe` or `gp`).

    A training that several trials share counts once (`TrialLineage`). Failed trials are left out, because they say
    nothing about their values. Running trials are RUNNING with their values, so that no other worker tries the same
    (Ginsbourger et al. 2010, "constant liar"). Less is better for all objectives, as for the curves.

    For TPE, a pruned trial is PRUNED with its curve, and an infeasible one PRUNED with its violated constraints. A
    Gaussian process would ignore both, so they are COMPLETE with their last loss, or (other objectives, infeasible
    trials) with the worst value of any trial; 0 if there is none. An infeasible trial also violates a constraint, a
    surface of its own at +1 and -1 (Gardner et al. 2014), which keeps proposals away. While no trial is feasible that
    surface would be flat, so the sum of violations is minimised first.
    """
    study = create_empty_study(len(objectives))
    known = [line for line in group_by_lineage(history) if line.decisive.state != "failed"]
    over = [line for line in known if line.decisive.state != "running"]
    results = [values for line in over if (values := _final_objectives(line, objectives)) is not None]
    worst = tuple(max(column) for column in zip(*results, strict=True)) if results else (0.0,) * len(objectives)
    nothing_feasible = all(is_infeasible(line.decisive) for line in over)
    has_infeasible = any(is_infeasible(line.decisive) for line in over)
    for line in known:
        params, distributions = _split_params(space, line.decisive.values)
        if line.decisive.state == "running":
            content: dict[str, Any] = {"state": TrialState.RUNNING}
        elif kind == "tpe":
            content = _tpe_trial_fields(line, objectives)
        elif nothing_feasible:
            content = {
                "state": TrialState.COMPLETE,
                "values": [sum(constraint_violations(line.decisive).values())] * len(objectives),
            }
        else:
            content = {"state": TrialState.COMPLETE, "values": _final_objectives(line, objectives) or worst}
            if has_infeasible:
                content["constraints"] = {INFEASIBLE: 1.0 if is_infeasible(line.decisive) else -1.0}
        study.add_trial(create_trial(params=params, distributions=distributions, **content))
    return study


def _split_params(space: SearchSpace, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
    """Return the searched values as Optuna stores them, and their distributions."""
    free = space.select_drawn(values)
    distributions = {name: to_distribution(space.dimension(name)) for name in free}
    return {name: encode_value(value) for name, value in free.items()}, distributions


def _tpe_trial_fields(line: TrialLineage, objectives: Sequence[SweepObjective]) -> dict[str, Any]:
    """Return the fields of a trial that is over, for TPE, which ranks pruned trials by their progress, infeasible last.

    With several objectives Optuna rejects curves.
    """
    if is_infeasible(line.decisive):
        return {"state": TrialState.PRUNED, "constraints": constraint_violations(line.decisive)}
    if line.decisive.state == "complete":
        return {"state": TrialState.COMPLETE, "values": minimized_objectives(line.decisive, objectives)}
    return {
        "state": TrialState.PRUNED,
        "intermediate_values": replace_non_finite(line.curve) if len(objectives) == 1 else {},
    }


def _final_objectives(line: TrialLineage, objectives: Sequence[SweepObjective]) -> tuple[float, ...] | None:
    """Return the result of a training that is over, in the unit of the objectives; None if there is none.

    The result of a pruned training is its last validation loss, if that is the objective. Further training would have
    lowered it, so it is not too optimistic.
    """
    if is_infeasible(line.decisive):
        return None
    if line.decisive.state == "complete":
        return minimized_objectives(line.decisive, objectives)
    is_loss = [(objective.metric, objective.direction) for objective in objectives] == [("validation_loss", "minimize")]
    last = next(reversed(line.curve.values()), math.nan)
    return (last,) if is_loss and math.isfinite(last) else None

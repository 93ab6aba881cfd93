"""Decides whether a sweep must end, which of its trials are best, and which step of the final round is next.

A sweep must end if its budget is used up, or a failure repeats. The final round trains the best trials (the finalists)
with further seeds. It trains each seed for all finalists that are not dropped, so that all of them have the same seeds
when they are compared. All functions except `write_objective` are pure functions of the study's history: after a kill,
or on another machine, the same history gives the same next step.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ratchet.config.settings import Settings
from ratchet.config.sweep import Sweep
from ratchet.errors import DataError
from ratchet.quality_gate import finalists as statistics
from ratchet.quality_gate.finalists import FinalistComparator, FinalistScores
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.evaluation import (
    VALIDATION_LOSS,
    VALIDATION_METRICS,
    ObjectiveSet,
    ValidationJob,
    ValidationMetric,
    ValidationScores,
)
from ratchet.storage.records.sweep import Finalist, FinalRound, SweepObjective, Trial

STOPPED = "stopped"
"""Key of the note of a study with the reason why failures stopped it; the note is empty after the sweep was resumed."""

FORGIVEN = "forgiven"
"""Key of the note of a study with a trial number. Failures of trials before this number do not count any more, because
the user has resumed the sweep."""

FINAL_FAILURE = "a training of the final round failed"
"""First words of the note STOPPED if not the search failed."""

RETRIED = "retried"
"""Key of the note with the number of trials at the last start of the command at which one had failed. Failed trials
before this number are tried once more."""

ALL_INFEASIBLE = 3
"""A sweep without any feasible trial stops after this number times `sweep.max_repeated_failures` trials."""

SEED = "train.seed"
"""Dotted key of the seed."""


# Budget and failures.


def count_trials(history: Iterable[Trial]) -> int:
    """Count trials for the budget, without those that continue an earlier trial, and those that a person requested."""
    return sum(trial.continues is None and trial.request is None for trial in history)


def check_limits(sweep: Sweep, history: Sequence[Trial]) -> str | None:
    """Return the limit of hours or tokens that is reached, after which no trial is continued; None if none is."""
    superseded = {trial.continues for trial in history if trial.is_over}  # a continued training counts once
    costs = [trial.cost for trial in history if trial.number not in superseded]
    hours, tokens = sum(cost.train_seconds for cost in costs) / 3600, sum(cost.trained_tokens for cost in costs)
    if sweep.max_hours is not None and hours >= sweep.max_hours:
        return f"{hours:.2f} hours trained of {sweep.max_hours:g}"
    if sweep.max_tokens is not None and tokens >= sweep.max_tokens:
        return f"{tokens:,} tokens trained of {sweep.max_tokens:,}"
    return None


def diagnose_failures(sweep: Sweep, history: Sequence[Trial]) -> str | None:
    """Return the reason to stop the sweep: a repeated failure, or no feasible trial; None if it may continue.

    `history` has the trials since the sweep was last resumed after failures.
    """
    superseded = {trial.continues for trial in history}  # a run that was tried again counts once
    failed = [trial for trial in history if trial.state == "failed" and trial.number not in superseded]
    for trial in reversed(failed):
        same = [other for other in failed if _failure_signature(other) == _failure_signature(trial)]
        if len(same) >= sweep.max_repeated_failures:
            numbers = ", ".join(str(other.number) for other in same)
            return (
                f"{len(same)} trials failed for the same reason ({trial.cause.replace('_', ' ') or 'unknown'}; trials "
                f"{numbers}): {trial.reason}"
            )
    over = [trial for trial in history if trial.is_over and trial.state != "failed"]
    infeasible = [trial for trial in over if trial.state == "infeasible"]
    if len(over) == len(infeasible) >= ALL_INFEASIBLE * sweep.max_repeated_failures:
        return f"none of {len(over)} trials was feasible; the last one: {infeasible[-1].reason}"
    return None


def is_repeated_failure(trial: Trial, earlier: Trial | None) -> bool:
    """Return whether the earlier trial of the same run failed for the same reason, so that a retry is useless."""
    return (
        earlier is not None and _failure_signature(trial) == _failure_signature(earlier) and earlier.state == "failed"
    )


def _failure_signature(trial: Trial) -> tuple[str, str]:
    """Return cause and first line of a failure, without numbers and run ids, which differ each time."""
    first = (trial.reason.splitlines() or [""])[0]
    return trial.cause, re.sub(r"\b(?=[0-9a-f]*\d)[0-9a-f]{6,}\b|\d+(\.\d+)?", "#", first)


# The best trials: by one objective, or on the Pareto front of several.


def sweep_objectives(sweep: Sweep) -> tuple[SweepObjective, ...]:
    """Return the objectives of the trials."""
    return tuple(SweepObjective(metric=aim.metric, direction=aim.resolved_direction) for aim in sweep.objectives)


def eligible_trials(trials: Iterable[Trial]) -> list[Trial]:
    """Return the trials that can be the best: complete, with finite objectives, and only one trial for each run."""
    by_run: dict[str, Trial] = {}
    for trial in sorted(trials, key=lambda trial: trial.number):
        is_finite = bool(trial.objectives) and all(map(math.isfinite, trial.objectives))
        if trial.state == "complete" and trial.run_id is not None and is_finite:
            by_run.setdefault(trial.run_id, trial)
    return list(by_run.values())


def pareto_front(trials: Iterable[Trial], objectives: Sequence[SweepObjective]) -> list[Trial]:
    """Return the trials that no other trial dominates, by number."""
    candidates = eligible_trials(trials)
    values = {trial.number: trial.minimized_objectives(objectives) for trial in candidates}

    def is_dominated(own: Sequence[float]) -> bool:
        return any(other != own and all(a <= b for a, b in zip(other, own, strict=True)) for other in values.values())

    return [trial for trial in candidates if not is_dominated(values[trial.number])]


def best_trials(trials: Iterable[Trial], objectives: Sequence[SweepObjective], count: int) -> list[Trial]:
    """Return the best trials by the first objective; with several objectives, only trials of the Pareto front.

    Of equal trials, the earlier one is better.
    """
    candidates = pareto_front(trials, objectives) if len(objectives) > 1 else eligible_trials(trials)
    return sorted(candidates, key=lambda trial: (trial.minimized_objectives(objectives)[0], trial.number))[:count]


def leader_numbers(trials: Iterable[Trial], objectives: Sequence[SweepObjective]) -> tuple[int, ...]:
    """Return the number of the best trial; with several objectives, the numbers of the Pareto front."""
    leaders = pareto_front(trials, objectives) if len(objectives) > 1 else best_trials(trials, objectives, 1)
    return tuple(trial.number for trial in leaders)


# The final round.


@dataclass(frozen=True)
class FinalistTraining:
    """A completed or failed training of a finalist in the final round."""

    number: int
    """Number of the trial."""
    index: int
    """Index of the seed; 0 is the trial's own run, which is trained again if a group has trained it."""
    run_id: str
    failed: str = ""
    """Reason of a failure, for example that the training diverged; the finalist is then dropped. Empty if the training
    succeeded."""


TrainingBatch = tuple[tuple[int, int], ...]
"""Trainings to do next, in this order, as pairs of trial number and seed index. Any number may run at the same time."""

Step = TrainingBatch | ValidationJob | FinalRound
"""The next step of the final round. If it is a ValidationJob, the caller scores its runs (`scheduler.score_runs`), and
passes the results as `scores` in the next call of `plan_next_step`."""


def plan_next_step(
    sweep: Sweep,
    trials: Sequence[Trial],
    trainings: Sequence[FinalistTraining],
    scores: Mapping[str, ValidationScores],
    grouped: Collection[int] = (),
) -> Step:
    """Return the next step of the final round.

    Args:
        sweep: settings.
        trials: trials of the search; all of them must be over.
        trainings: trainings of the final round that are over.
        scores: scores by run id.
        grouped: numbers of the trials that a group has trained. Their own runs are trained first; if that fails, the
            next best trial takes the place of the finalist.

    Raises:
        DataError: no trial is complete, or runs were scored on different rows.
    """
    objectives = sweep_objectives(sweep)
    failures = {(training.number, training.index): training.failed for training in trainings if training.failed}
    candidates = [trial for trial in trials if (trial.number, 0) not in failures]
    chosen = best_trials(candidates, objectives, max(1, sweep.finalists.top_k))
    failed = "; ".join(f"trial {number}: {reason}" for (number, index), reason in failures.items() if not index)
    remark = f"; not trained alone without failures: {failed}" if failed else ""
    if not chosen and failed:
        raise DataError(f"no finalist could be trained alone, after a group had trained it: {failed}")
    if not chosen:
        raise DataError(f"none of the {len(trials)} trials is complete; there are no finalists to compare")
    runs = {(trial.number, 0): str(trial.run_id) for trial in chosen if trial.number not in grouped}
    runs |= {(training.number, training.index): training.run_id for training in trainings if not training.failed}
    if len(chosen) == 1:
        if (chosen[0].number, 0) not in runs:
            return ((chosen[0].number, 0),)
        trial, objective, value = chosen[0], objectives[0], chosen[0].objectives[0]
        cause = (
            f"sweep.finalists.top_k is {sweep.finalists.top_k}" if sweep.finalists.top_k < 2 else "it is the only one"
        )
        finalist = Finalist(
            number=trial.number, values=trial.values, run_ids=(str(trial.run_id),), means=(value,), mean=value,
            cost=trial.cost,
        )  # fmt: skip
        return FinalRound(
            metric=objective.metric, direction=objective.direction, rows=0, finalists=(finalist,), comparisons=(),
            winner=trial.number,
            reason=f"trial {trial.number} is the best of the search; it was not compared because {cause}{remark}",
        )  # fmt: skip
    step = _FinalRound(sweep, chosen, runs, failures, scores).next()
    return step.model_copy(update={"reason": step.reason + remark}) if isinstance(step, FinalRound) else step


def select_comparison_objective(sweep: Sweep) -> tuple[ValidationMetric, SweepObjective]:
    """Return the objective that compares finalists: the first one if it is measured by row, else validation loss."""
    first = sweep.objectives[0]
    for metric in VALIDATION_METRICS:
        if metric == first.metric:
            return metric, SweepObjective(metric=metric, direction=first.resolved_direction)
    return VALIDATION_LOSS, SweepObjective(metric=VALIDATION_LOSS, direction="minimize")


def values_for_seed(settings: Settings, trial: Trial, index: int) -> dict[str, Any]:
    """Return the values of a finalist for a seed index: the trial's own seed plus the index."""
    seed = int(trial.values.get(SEED, settings.train.seed))
    return {**trial.values, SEED: seed + index} if index else dict(trial.values)


def write_objective(layout: ProjectLayout, study: str, ids: Iterable[str]) -> None:
    """Record that models were selected by these rows, so that the gate refuses to judge by them.

    The rows are added to the recorded ones. Raises DamagedFileError if the file is invalid.
    """
    path = layout.objectives / f"{study}.json"
    known = set(ObjectiveSet.load(path).sample_ids) if path.exists() else set[str]()
    objective_set = ObjectiveSet(name=f"sweep {study}", sample_ids=tuple(sorted(known.union(ids))))
    if len(objective_set.sample_ids) > len(known):
        files.make_directory(path.parent)
        objective_set.save(path)


@dataclass(frozen=True)
class _FinalRound:
    """State of a final round with at least two finalists."""

    sweep: Sweep
    chosen: Sequence[Trial]
    runs: Mapping[tuple[int, int], str]
    """Run ids of completed trainings, by trial number and seed index."""
    failures: Mapping[tuple[int, int], str]
    """Reasons of failed trainings, by trial number and seed index."""
    scores: Mapping[str, ValidationScores]

    def next(self) -> Step:
        """Return the next step."""
        finalists = self.sweep.finalists
        dropped, missing = dict[int, str](), list[tuple[int, int]]()
        for index in range(finalists.seeds):
            for trial in self.chosen:
                if failure := self.failures.get((trial.number, index)):
                    dropped.setdefault(trial.number, f"could not be trained with another seed: {failure}")
            alive = [trial for trial in self.chosen if trial.number not in dropped]
            if index and len(alive) < 2:
                break  # the only finalist that is left wins: further seeds would change nothing
            missing += [(trial.number, index) for trial in alive if (trial.number, index) not in self.runs]
            if finalists.wilcoxon_p_threshold is None or index + 1 == finalists.seeds:
                continue
            if (step := self._find_missing_step(missing, alive, index + 1)) is not None:
                return step
            remaining = [self._collect_scores(trial, index + 1) for trial in alive]
            dropped |= statistics.find_trailing(self._comparator, remaining, finalists.wilcoxon_p_threshold)
        if (step := self._find_missing_step(missing, self.chosen, finalists.seeds)) is not None:
            return step
        scores = [self._collect_scores(trial, finalists.seeds, dropped.get(trial.number, "")) for trial in self.chosen]
        return statistics.choose_winner(self._comparator, scores)

    def _runs_of(self, trial: Trial, seeds: int) -> list[str]:
        return [self.runs[trial.number, index] for index in range(seeds) if (trial.number, index) in self.runs]

    def _find_missing_step(
        self, missing: Sequence[tuple[int, int]], trials: Sequence[Trial], seeds: int
    ) -> TrainingBatch | ValidationJob | None:
        """Return the next step before these trials can be compared by their first `seeds` seeds; None if they can."""
        if missing:
            return tuple(missing)
        metric, _ = select_comparison_objective(self.sweep)
        rows = self.sweep.finalists.rows
        runs = [run for trial in trials for run in self._runs_of(trial, seeds)]
        known = {run for run, scores in self.scores.items() if metric in scores.values and scores.rows == rows}
        unscored = tuple(dict.fromkeys(run for run in runs if run not in known))
        return ValidationJob(run_ids=unscored, metrics=(metric,), rows=rows) if unscored else None

    @cached_property
    def _first(self) -> ValidationScores:
        """Scores of the first run; all other runs must have the same rows."""
        return self.scores[self.runs[self.chosen[0].number, 0]]

    @cached_property
    def _scored_rows(self) -> list[int]:
        """Indices of validation rows with trained tokens; other rows have no loss."""
        return [row for row, tokens in enumerate(self._first.tokens) if tokens]

    @cached_property
    def _comparator(self) -> FinalistComparator:
        metric, objective = select_comparison_objective(self.sweep)
        return FinalistComparator(
            objective=objective,
            confidence=self.sweep.finalists.confidence,
            weights=[float(self._first.tokens[row]) for row in self._scored_rows]
            if metric == VALIDATION_LOSS
            else None,
            groups=[self._first.groups[row] for row in self._scored_rows],
        )

    def _collect_scores(self, trial: Trial, seeds: int, dropped: str = "") -> FinalistScores:
        runs, first = self._runs_of(trial, seeds), self._first
        metric, _ = select_comparison_objective(self.sweep)
        values = []
        for run in runs:
            scores = self.scores[run]
            if (scores.ids, scores.tokens) != (first.ids, first.tokens):
                raise DataError(
                    f"run {run} was scored on other validation rows than run {first.run_id}: the data has changed; "
                    "restore it (`dvc checkout`), or start a new study (`ratchet sweep --fork`)"
                )
            values.append([scores.values[metric][row] for row in self._scored_rows])
        return FinalistScores(
            number=trial.number, values=trial.values, run_ids=tuple(runs), scores=values, cost=trial.cost,
            dropped=dropped,
        )  # fmt: skip

"""Decides what a sweep worker does next: a trial of the search, or a step of the final round.

A decision depends only on the history of trials, and is made under the study's lock. Completed runs are scored on
validation rows in a separate process (`score_runs`), because this module does not import torch.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ratchet import errors
from ratchet.config.params_file import get_value
from ratchet.config.settings import Settings
from ratchet.data import token_files
from ratchet.data.batches import BatchPlan
from ratchet.errors import EXIT_INTERRUPTED, DataError, InterruptedRunError, LockHeldError, RatchetError, SettingsError
from ratchet.runs.directory import RunDirectory, RunPaths, RunSpec
from ratchet.runs.supervisor import supervise
from ratchet.storage.digests import code_version
from ratchet.storage.files import FileLock
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.evaluation import (
    VALIDATION_METRICS,
    ValidationJob,
    ValidationLaunch,
    ValidationMetric,
    ValidationScores,
    load_validation_scores,
)
from ratchet.storage.records.sweep import FinalRound, SweepObjective, TrainingCost, Trial
from ratchet.storage.records.training import TrainReport
from ratchet.training.run_spec import build_launch, build_run_spec
from ratchet.tuning import final_round, pruners, samplers
from ratchet.tuning.leases import SweepWorker
from ratchet.tuning.search_space import SearchDimension, SearchSpace, apply_values
from ratchet.tuning.study import TrialStore
from ratchet.tuning.trial import UNKNOWN, Idle, TrialTask, objective_value

SCORER = (sys.executable, "-m", "ratchet.evaluation.validation_worker")
"""Command of the process that scores."""

POLL_S = 0.1
"""Seconds between two checks for a request to stop."""

STOP_TIMEOUT_S = 30.0
"""Seconds after which the scoring process is killed if it has not ended on request; it may have to end a batch."""

MAX_ERROR_LENGTH = 400
"""Maximum number of characters of an unexpected error message."""

EPOCHS = "train.epochs"
"""Dotted key of the number of epochs."""

FINAL_ROUND_NOTE = "final_round"
"""Key of the note of a study that contains its FinalRound, after the winner was decided."""

WorkItem = Callable[[], None]
"""Work that a worker does outside the study's lock, before it asks for the next decision."""


@dataclass
class TrialScheduler:
    """Scheduler of the trials of a study's search."""

    layout: ProjectLayout
    settings: Settings
    store: TrialStore
    worker: SweepWorker
    check_stop: Callable[[], None]
    """Function that is called while a process scores; it raises an exception after a request to stop."""

    @cached_property
    def space(self) -> SearchSpace:
        """Search space of the study."""
        return SearchSpace.from_settings(self.settings)

    @cached_property
    def objectives(self) -> tuple[SweepObjective, ...]:
        """Objectives of the trials."""
        return final_round.sweep_objectives(self.settings.sweep)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each training row."""
        return token_files.read_lengths(self.layout.data, "train")

    @cached_property
    def longest_rows(self) -> int:
        """Number of rows that the longest training processes, which is the training with the most epochs in the
        space."""
        # A derived parameter has its extremes where its source has them.
        extremes = [self.space.draw(partial(_extreme_value, side)) for side in (0, -1)]
        candidates = [values.get(EPOCHS, self.settings.train.epochs) for values in extremes]
        candidates += [_extreme_value(-1, d) for d in self.space.dimensions() if d.name == EPOCHS]
        epochs = max(map(float, candidates))
        return max(1, round(epochs * len(self.lengths)))

    def next(self) -> TrialTask | Idle:
        """Take over a trial, continue a pruned one, or begin a new one."""
        with self.store.locked():
            if (trial := self.store.take_over(self.worker, self.settings.machine.lease_timeout_s)) is not None:
                return self._make_task(trial)
            while True:
                history = self.store.trials()
                decision = self._decide(history)
                if decision is not None:
                    return decision

    def _decide(self, history: list[Trial]) -> TrialTask | Idle | None:
        """Decide from the history; None if the new trial was infeasible, so that the decision must be repeated."""
        sweep, added = self.settings.sweep, history[self.store.carried :]
        idle: Idle = "wait" if any(not trial.is_over for trial in history) else "over"
        notes = self.store.notes()
        if notes.get(final_round.STOPPED):
            return idle
        if text := final_round.diagnose_failures(
            sweep, added[max(0, notes.get(final_round.FORGIVEN, 0) - self.store.carried) :]
        ):
            self.store.note(final_round.STOPPED, text)
            return idle
        earlier = self._find_resumable(history, notes.get(final_round.FORGIVEN, 0))
        if earlier is None:
            values = self._propose_values(history)
            if values is not None:
                return self._begin_trial(values, self.run_id(values))
            earlier = pruners.find_most_promising(history) if self._needs_more(history) else None
        if earlier is None:
            return idle
        return self._begin_trial(history[earlier].values, history[earlier].run_id, continues=earlier)

    def _find_resumable(self, history: list[Trial], forgiven: int) -> int | None:
        """Return the number of a failed trial to retry, or else of a pruned trial to promote.

        None if there is neither, or if the limit of hours or tokens is reached.
        """
        if final_round.check_limits(self.settings.sweep, history[self.store.carried :]):
            return None
        if (failed := _find_retryable_trial(history, forgiven)) is not None:
            return failed
        return pruners.find_promotable(self.settings.sweep.pruner, history, self.longest_rows)

    def _propose_values(self, history: list[Trial]) -> dict[str, Any] | None:
        """Return the values of the next trial; None if the budget is used up, or all values of the space were tried."""
        sweep = self.settings.sweep
        if final_round.check_budget(sweep, history[self.store.carried :]):
            return None
        return samplers.propose(
            self.space,
            sweep.sampler,
            self.objectives,
            history,
            len(history),
            lambda values: self._is_tried(history, values),
            current=self.current,
        )

    def _needs_more(self, history: list[Trial]) -> bool:
        """Return whether too few trials for a final round are complete or running."""
        sweep = self.settings.sweep
        required = (
            1 if final_round.check_limits(sweep, history[self.store.carried :]) else max(1, sweep.finalists.top_k)
        )
        running = sum(not trial.is_over for trial in history)
        return len(final_round.eligible_trials(history)) + running < required

    @cached_property
    def current(self) -> dict[str, Any]:
        """Values in params.yaml of the settings in the space; if the space contains them, they are the first trial."""
        return {axis.name: get_value(self.settings, axis.name) for axis in self.space.axes()}

    @cached_property
    def _spec(self) -> RunSpec:
        """Run spec of the project; data and base are the same for all trials."""
        return build_run_spec(self.layout, self.settings)

    def run_id(self, values: Mapping[str, Any]) -> str | None:
        """Return the run id of these values; None if they are invalid settings."""
        try:
            train = apply_values(self.settings, values).train
            return self._spec.model_copy(update={"train": train}).run_id
        except SettingsError:
            return None

    def _is_tried(self, history: list[Trial], values: Mapping[str, Any]) -> bool:
        """Return whether values were tried. Invalid values have no run, so they are compared directly."""
        run_id, plain = self.run_id(values), dict(values)
        return any(trial.values == plain if trial.run_id is None else trial.run_id == run_id for trial in history)

    def _begin_trial(
        self, values: Mapping[str, Any], run_id: str | None, continues: int | None = None
    ) -> TrialTask | None:
        params = self.space.to_params(values)
        try:
            settings = apply_values(self.settings, values)
            self._rows_per_step(settings)
        except SettingsError as error:
            self.store.add(_make_infeasible_trial(values, error), params)
            return None
        number = self.store.begin(values, params, run_id, self.worker, continues)
        return self._make_task(self.store.trials()[number])

    def _rows_per_step(self, settings: Settings) -> float:
        """Return rows per optimizer step. Raises SettingsError if rows do not fit into the packs."""
        sequences = BatchPlan(self.lengths, settings.train).sequences
        return settings.train.batch_size * len(self.lengths) / sequences

    def _make_task(self, trial: Trial) -> TrialTask:
        settings = apply_values(self.settings, trial.values)
        trains_to_the_end = self._trains_to_the_end(trial)

        def decide_pruning(current: Trial) -> str | None:
            if trains_to_the_end:
                return None
            return pruners.decide_pruning(self.settings.sweep.pruner, self.store.trials(), current, self.longest_rows)

        def compute_objectives(report: TrainReport, cost: TrainingCost) -> tuple[float, ...]:
            return self._compute_objectives(settings, report, cost)

        return TrialTask(self.store, trial, settings, compute_objectives, self._rows_per_step(settings), decide_pruning)

    def _trains_to_the_end(self, trial: Trial) -> bool:
        """Return whether the trial continues a pruned trial only because no untried values were left.

        Such a trial was not promoted, so it must not be pruned again. The method uses only the history before the
        trial, so that a worker that takes the trial over decides the same. The decisions may still differ if trials of
        this history have reported more validations in between; both decisions are then correct.
        """
        earlier = self.store.trials()[: trial.number]
        forgiven = self.store.notes().get(final_round.FORGIVEN, 0)
        if trial.continues is None or trial.continues == self._find_resumable(earlier, forgiven):
            return False
        return self._propose_values(earlier) is None

    def _compute_objectives(self, settings: Settings, report: TrainReport, cost: TrainingCost) -> tuple[float, ...]:
        """Return the objectives in order; a separate process measures those that the run does not report."""
        sweep = self.settings.sweep
        reported = {aim.metric: objective_value(aim, report, cost) for aim in sweep.objectives}
        missing = [metric for metric, value in reported.items() if value is None]
        scored = score_run(self.layout, settings, report.run_id, missing, self.check_stop) if missing else {}
        return tuple(scored[name] if value is None else value for name, value in reported.items())


def _find_retryable_trial(history: Sequence[Trial], before: int) -> int | None:
    """Return the number of the first failed trial below `before`, to retry it after the user has fixed the cause.

    Only the newest trial of each run counts. None if no trial must be retried.
    """
    latest = {trial.run_id: trial for trial in history if trial.run_id is not None}
    failed = (trial.number for trial in latest.values() if trial.state == "failed" and trial.number < before)
    return min(failed, default=None)


def _extreme_value(side: int, dimension: SearchDimension) -> Any:
    """Return the smallest (side 0) or largest (side -1) value of a dimension.

    If not all choices are numbers, it is the first or last choice.
    """
    if dimension.kind != "choice":
        return (dimension.low, dimension.high)[side]
    numbers = [value for value in dimension.choices if isinstance(value, int | float) and not isinstance(value, bool)]
    return sorted(numbers)[side] if len(numbers) == len(dimension.choices) else dimension.choices[side]


def _make_infeasible_trial(values: Mapping[str, Any], error: SettingsError) -> Trial:
    """Return an infeasible trial for invalid values, because the sampler learns from such values too."""
    now = time.time()
    return Trial(
        number=0, values=dict(values), run_id=None, state="infeasible", constraints={"settings": UNKNOWN},
        cause="data", reason=str(error), started=now, ended=now,
    )  # fmt: skip


# The final round of a study: further seeds of the best trials, their scores, and the winner.


def final_study_name(study: str) -> str:
    """Return the name of the study for trainings of this study's finalists with further seeds."""
    return f"{study}.finals"


def open_final_store(
    search: TrialStore, identity: Mapping[str, Any], settings: Settings, space: SearchSpace
) -> TrialStore:
    """Open the study for trainings of finalists with further seeds."""
    _, objective = final_round.select_comparison_objective(settings.sweep)
    final_identity = {**identity, "finals_of": search.study, "objectives": [[objective.metric, objective.direction]]}
    return TrialStore.open(search.storage, final_study_name(search.study), final_identity, space)


@dataclass
class FinalRoundScheduler:
    """Scheduler of the final round: trainings with further seeds of the best trials, until the winner is known."""

    layout: ProjectLayout
    settings: Settings
    search: TrialStore
    seeds: TrialStore
    worker: SweepWorker
    check_stop: Callable[[], None]
    """Function that is called while a process scores; it raises an exception after a request to stop."""
    _scores: dict[str, ValidationScores] = field(default_factory=dict)

    def next(self) -> TrialTask | WorkItem | Idle:
        """Take over a training, begin the next one, score runs, or store the winner."""
        with self.search.locked():
            history = self.search.trials()
            if (idle := self._check_idle(history)) is not None:
                return idle
            if (trial := self.seeds.take_over(self.worker, self.settings.machine.lease_timeout_s)) is not None:
                return self._make_task(trial)
            step = final_round.plan_next_step(self.settings.sweep, history, self._trainings(history), self._scores)
            if isinstance(step, FinalRound):
                self.search.note(FINAL_ROUND_NOTE, step.model_dump(mode="json"))
                return "over"
            if isinstance(step, ValidationJob):
                return partial(self._score, step, history)
            return self._begin_trial(step, history)

    def _check_idle(self, history: list[Trial]) -> Idle | None:
        """Return `wait` if the search is not over, `over` if there is no final round, and None if there is one."""
        if any(not trial.is_over for trial in history):
            return "wait"
        if len(self.settings.sweep.objectives) > 1:  # a Pareto front has no winner: the user chooses
            return "over"
        has_complete = any(trial.state == "complete" for trial in history)
        return "over" if self.search.notes().get(final_round.STOPPED) or not has_complete else None

    def _begin_trial(self, step: final_round.FinalistTrainingBatch, history: list[Trial]) -> TrialTask | Idle:
        """Begin the first training that no worker runs; `wait` if other workers run all of them."""
        running = {trial.run_id for trial in self.seeds.trials() if not trial.is_over}
        for number, index in step.trainings:
            values = final_round.values_for_seed(self.settings, history[number], index)
            run_id = build_run_spec(self.layout, apply_values(self.settings, values)).run_id
            if run_id not in running:
                seed_trial = self.seeds.begin(values, ({}, {}), run_id, self.worker)
                return self._make_task(self.seeds.trials()[seed_trial])
        return "wait"

    def _trainings(self, history: list[Trial]) -> list[final_round.FinalistTraining]:
        """Return the trainings with further seeds that are over, including failed ones."""
        by_run = {trial.run_id: trial for trial in self.seeds.trials() if trial.is_over}
        trainings = []
        for trial in history:
            if trial.state != "complete":
                continue
            for index in range(1, self.settings.sweep.finalists.seeds):
                values = final_round.values_for_seed(self.settings, trial, index)
                seed = by_run.get(build_run_spec(self.layout, apply_values(self.settings, values)).run_id)
                if seed is not None and seed.run_id is not None:
                    failed = "" if seed.state == "complete" else seed.reason or seed.state
                    trainings.append(final_round.FinalistTraining(trial.number, index, seed.run_id, failed))
        return trainings

    def _make_task(self, trial: Trial) -> TrialTask:
        settings = apply_values(self.settings, trial.values)
        return TrialTask(self.seeds, trial, settings, self._compute_objectives, float(settings.train.batch_size), None)

    def _compute_objectives(self, report: TrainReport, cost: TrainingCost) -> tuple[float, ...]:
        metric, _ = final_round.select_comparison_objective(self.settings.sweep)
        job = ValidationJob(run_ids=(report.run_id,), metrics=(metric,), rows=self.settings.sweep.finalists.rows)
        [scores] = score_runs(self.layout, self.settings, job, self.check_stop)
        return (scores.metrics[metric],)

    def _score(self, job: ValidationJob, history: list[Trial]) -> None:
        """Score runs. Only one worker of this machine scores at a time; the other workers then read its scores."""
        lock = FileLock(self.layout.stage_lock(f"scores-{self.search.study}"), f"the scores of {self.search.study}")
        while True:
            try:
                lock.acquire(wait_s=1.0)
                break
            except LockHeldError:
                self.check_stop()
        try:
            for run_id in job.run_ids:
                self._ensure_trained_here(run_id, history)
            for scores in score_runs(self.layout, self.settings, job, self.check_stop):
                self._scores[scores.run_id] = scores
        finally:
            lock.release()

    def _ensure_trained_here(self, run_id: str, history: list[Trial]) -> None:
        """Train a run on this machine if only another machine has trained it; the result is the same."""
        if RunPaths(self.layout.runs / run_id).is_finished():
            return
        trial = next(trial for trial in (*history, *self.seeds.trials()) if trial.run_id == run_id)
        settings = apply_values(self.settings, trial.values)
        run = RunDirectory.open(self.layout.runs, build_run_spec(self.layout, settings))
        try:
            supervise(run, build_launch(self.layout, settings), [], code_version())
        finally:
            run.close()


# Scores of completed runs on validation rows.


def _ignore_wait() -> None:
    """Do nothing."""


def score_runs(
    layout: ProjectLayout, settings: Settings, job: ValidationJob, check_stop: Callable[[], None] = _ignore_wait
) -> list[ValidationScores]:
    """Return the scores of the job's runs, in the order of the job; no process starts if all scores are cached.

    Args:
        layout: the project.
        settings: `machine` (device, threads, evaluation_batch_size) and evaluate.max_new_tokens are read.
        job: runs, metrics and rows.
        check_stop: called several times a second. If it raises, the scoring process is ended and leaves no incomplete
            file.

    Raises:
        RatchetError: the process failed; the exception has the class that the process reported.
        InterruptedRunError: the scoring process was stopped.
    """
    # Remove the address of the database: it may contain a password, and all users can see a process's arguments.
    machine = settings.machine.model_copy(update={"study_storage": None})
    launch = ValidationLaunch(job=job, max_new_tokens=settings.evaluate.max_new_tokens, machine=machine)
    launch.require_measurable(DatasetCard.load(layout.dataset_card))
    results = _read_stored_scores(layout, launch)
    if None in results:
        _run_scorer(layout, launch, check_stop)
        results = _read_stored_scores(layout, launch)
    if missing := [run_id for run_id, scores in zip(job.run_ids, results, strict=True) if scores is None]:
        raise RatchetError(f"run {missing[0]}: was scored, but its scores cannot be read; check the disk")
    return [scores for scores in results if scores is not None]


def score_run(
    layout: ProjectLayout,
    settings: Settings,
    run_id: str,
    metrics: Sequence[str],
    check_stop: Callable[[], None] = _ignore_wait,
) -> Mapping[str, float]:
    """Return metrics of one run on sweep.generation_rows validation rows.

    Raises the errors of `score_runs`, and SettingsError for unknown metrics.
    """
    job = ValidationJob(
        run_ids=(run_id,), metrics=tuple(map(parse_row_metric, metrics)), rows=settings.sweep.generation_rows
    )
    [scores] = score_runs(layout, settings, job, check_stop)
    return {str(metric): value for metric, value in scores.metrics.items()}


def parse_row_metric(metric: str) -> ValidationMetric:
    """Return the metric as a type. Raises SettingsError if it cannot be measured row by row."""
    for known in VALIDATION_METRICS:
        if known == metric:
            return known
    raise SettingsError(f"{metric}: cannot be measured by row; expected one of {', '.join(VALIDATION_METRICS)}")


def _read_stored_scores(layout: ProjectLayout, launch: ValidationLaunch) -> list[ValidationScores | None]:
    request_digest = launch.request_digest(DatasetCard.load(layout.dataset_card))
    results = []
    for run_id in launch.job.run_ids:
        paths = RunPaths(layout.runs / run_id)
        if not paths.result.is_dir():
            raise DataError(f"run {run_id}: no result in {paths.root}; only completed runs can be scored")
        report = TrainReport.load(paths.result / "train.json")
        results.append(load_validation_scores(paths.root, request_digest, report.adapter_digest))
    return results


def _run_scorer(layout: ProjectLayout, launch: ValidationLaunch, check_stop: Callable[[], None]) -> None:
    # Use a file, not a pipe: a full pipe would block the process.
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            [*SCORER, str(layout.root), launch.model_dump_json(), str(os.getpid())],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True,
        )  # fmt: skip
        try:
            while (code := _wait(process, POLL_S)) is None:
                check_stop()
        finally:
            _terminate(process)
        if code:
            raise _read_failure(code, stderr, launch.job)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _terminate(process: subprocess.Popen[bytes]) -> None:
    """Ask the process to end, and kill it if it does not."""
    try:
        process.terminate()
        _wait(process, STOP_TIMEOUT_S)
    finally:  # also if a second request interrupts the wait
        process.kill()
        process.wait()


def _read_failure(code: int, stderr: IO[bytes], job: ValidationJob) -> RatchetError:
    """Return the exception that the last line on stderr describes."""
    stderr.seek(0)
    lines = [line for line in stderr.read().decode(errors="replace").splitlines() if line.strip()]
    last = lines[-1] if lines else "nothing on stderr"
    name, _, text = last.partition(": ")
    if code < 0:
        return RatchetError(f"scoring of {', '.join(job.run_ids)}: ended by signal {-code}; {last[:MAX_ERROR_LENGTH]}")
    if code == EXIT_INTERRUPTED:
        return InterruptedRunError(f"scoring of {', '.join(job.run_ids)}: stopped; run it again")
    error_class = getattr(errors, name, None)
    if isinstance(error_class, type) and issubclass(error_class, RatchetError):
        return error_class(text)
    return RatchetError(f"scoring of {', '.join(job.run_ids)}: exit code {code}: {last[:MAX_ERROR_LENGTH]}")

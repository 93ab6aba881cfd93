"""Decides what a sweep worker does next: a trial of the search, or a step of the final round.

A decision depends only on the history of trials, and is made under the study's lock. Completed runs are scored on
validation rows in a separate process (`score_runs`), because this module does not import torch.
"""

import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ratchet import errors
from ratchet.config.params_file import get_value
from ratchet.config.settings import Settings
from ratchet.config.sweep import PrunerSettings, SamplerSettings
from ratchet.data import token_files
from ratchet.data.batches import BatchPlan
from ratchet.errors import (
    EXIT_INTERRUPTED,
    DataError,
    InputError,
    InterruptedRunError,
    LockHeldError,
    RatchetError,
    SettingsError,
)
from ratchet.models.start_adapter import INIT_ADAPTER
from ratchet.runs.device_lock import DeviceLock
from ratchet.runs.directory import RunDirectory, RunPaths, RunSpec
from ratchet.runs.fork_server import ForkServer, Program
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
from ratchet.storage.records.sweep import FinalRound, TrainingCost, Trial, TrialRequest
from ratchet.storage.records.training import TrainReport
from ratchet.training.run_spec import build_launch, build_run_spec, resolve_train
from ratchet.tuning import final_round, pruners, samplers
from ratchet.tuning.freeze_thaw import Continuation, FreezeThawSearch, NewTrial, has_reached_rung
from ratchet.tuning.leases import SweepWorker
from ratchet.tuning.search_space import SearchSpace, apply_values, longest_epochs
from ratchet.tuning.study import TrialStore
from ratchet.tuning.trial import UNKNOWN, Idle, TrialTask, objective_value
from ratchet.tuning.trial_requests import find_requested_work

SCORER_MODULE = "ratchet.evaluation.validation_worker"
"""Module of the process that scores."""

POLL_S = 0.1
"""Seconds between two checks for a request to stop."""

STOP_TIMEOUT_S = 30.0
"""Seconds after which the scoring process is killed if it has not ended on request; it may have to end a batch."""

MAX_ERROR_LENGTH = 400
"""Maximum number of characters of an unexpected error message."""

FINAL_ROUND_NOTE = "final_round"
"""Key of the note of a study that contains its FinalRound, after the winner was decided."""
DECIDED_AFTER = "decided_after"
"""Key of the note with the number of trials from which the winner was chosen. With more trials, this winner is out of
date."""

WorkItem = Callable[[], None]
"""Work that a worker does outside the study's lock, before it asks for the next decision."""


@dataclass
class TrialScheduler:
    """Scheduler of the trials of a study's search."""

    layout: ProjectLayout
    settings: Settings
    store: TrialStore
    worker: SweepWorker
    server: ForkServer
    """Starts trainings and processes that score."""
    check_stop: Callable[[], None]
    """Function that is called while a process scores; it raises an exception after a request to stop."""
    is_grouped: bool = False
    """Whether new trials are trained in a group of trials, if that is possible."""
    device_lock: DeviceLock = field(default_factory=lambda: DeviceLock(None))
    _last_choice: tuple[list[Trial], NewTrial | Continuation | None] | None = None
    """Last choice of a freeze-thaw search, with its history."""

    @cached_property
    def space(self) -> SearchSpace:
        """Search space of the study."""
        return SearchSpace.from_settings(self.settings)

    @cached_property
    def _sampler(self) -> SamplerSettings:
        return self.settings.sweep.resolved_sampler

    @cached_property
    def _pruner(self) -> PrunerSettings:
        return self.settings.sweep.resolved_pruner

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each training row; with two rows for each pair of answers."""
        return token_files.read_lengths(self.layout.data, "train", self.settings.train.objective)

    @property
    def examples(self) -> int:
        """Number of training rows, or of pairs."""
        return len(self.lengths) // self.settings.train.rows_per_example

    @cached_property
    def longest_rows(self) -> int:
        """Number of rows that the longest training processes, which is the training with the most epochs in the
        space."""
        return max(1, round(longest_epochs(self.space, self.settings) * self.examples))

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
        first_counted = max(0, notes.get(final_round.FORGIVEN, 0) - self.store.carried)
        if text := final_round.diagnose_failures(sweep, added[first_counted:]):
            self.store.note(final_round.STOPPED, text)
            return idle
        step: TrialRequest | NewTrial | Continuation | None = self.find_requested_step(history)
        if step is None:
            step = self._choose_step(history, notes)
        if step is None:
            return idle
        if isinstance(step, TrialRequest):
            return self._begin_trial(step.values, self.run_id(step.values), request=step)
        if isinstance(step, Continuation):
            earlier = history[step.number]
            return self._begin_trial(earlier.values, earlier.run_id, continues=step.number)
        return self._begin_trial(step.values, self.run_id(step.values))

    def find_requested_step(self, history: list[Trial]) -> TrialRequest | Continuation | None:
        """Return the clone to begin, or else the trial to continue, that a person has requested; None if there is none
        now. As for any other trial, the sweep must be below its limits of hours and tokens."""
        if final_round.check_limits(self.settings.sweep, self._added(history)):
            return None
        work = find_requested_work(history, self.store.requests())
        return Continuation(work) if isinstance(work, int) else work

    def take_over(self, number: int) -> TrialTask | None:
        """Take over this trial if no worker runs it; None if a worker does, or if it is over."""
        trial = self.store.take_over(self.worker, self.settings.machine.lease_timeout_s, number)
        return None if trial is None else self._make_task(trial)

    def _choose_step(self, history: list[Trial], notes: Mapping[str, Any]) -> NewTrial | Continuation | None:
        """Return the training to begin or to continue; None if there is none now. `notes` are those of the study."""
        earlier = self._find_resumable(history, notes)
        if earlier is not None:
            return Continuation(earlier)
        if self._pruner.kind == "freeze_thaw" and history:
            if self._last_choice is None or self._last_choice[0] != history:  # a waiting worker asks every second
                self._last_choice = history, self._make_freeze_thaw_search(history).choose()
            return self._last_choice[1]
        values = self._propose_values(history)
        if values is not None:
            return NewTrial(values)
        if self._count_missing_trainings(history) > 0:
            earlier = pruners.find_most_promising(history)
        return None if earlier is None else Continuation(earlier)

    def _count_missing_trainings(self, history: list[Trial], without: int | None = None) -> int:
        """Return how many complete trainings the final round still needs if all running trials complete.

        The trial `without` does not count as running. If the result is positive and no trial may begin any more, a
        pruned trial is continued.
        """
        sweep = self.settings.sweep
        required = 1 if final_round.check_limits(sweep, self._added(history)) else max(1, sweep.finalists.top_k)
        running = sum(not trial.is_over for trial in history if trial.number != without)
        return required - len(final_round.eligible_trials(history)) - running

    def _make_freeze_thaw_search(self, history: list[Trial], trial_at_rung: int | None = None) -> FreezeThawSearch:
        return FreezeThawSearch(
            self.space,
            self._sampler,
            history,
            self.longest_rows,
            self._make_tried_check(history),
            may_begin=self._may_begin(history),
            may_improve=final_round.check_limits(self.settings.sweep, self._added(history)) is None,
            missing_trainings=self._count_missing_trainings(history, trial_at_rung),
            trial_at_rung=trial_at_rung,
            is_best_kept=self.settings.train.final_checkpoint == "best",
        )

    def _find_resumable(self, history: list[Trial], notes: Mapping[str, Any]) -> int | None:
        """Return the number of a failed trial to retry, or else of a pruned trial to promote.

        None if there is neither, or if the limit of hours or tokens is reached.
        """
        if final_round.check_limits(self.settings.sweep, history[self.store.carried :]):
            return None
        # Only the newest trial of each run counts.
        latest = {trial.run_id: trial for trial in history if trial.run_id is not None}
        failed = [
            trial.number for trial in latest.values()
            if trial.state == "failed" and not trial.decision and self._may_retry(trial, history, notes)
        ]  # fmt: skip
        return min(failed) if failed else pruners.find_promotable(self._pruner, history, self.longest_rows)

    def _may_retry(self, failed: Trial, history: list[Trial], notes: Mapping[str, Any]) -> bool:
        if failed.number < notes.get(final_round.FORGIVEN, 0):  # the sweep had stopped; the user has fixed the cause
            return True
        earlier = None if failed.continues is None else history[failed.continues]
        is_repeated = final_round.is_repeated_failure(failed, earlier)
        return failed.number < notes.get(final_round.RETRIED, 0) and not is_repeated

    def _propose_values(self, history: list[Trial]) -> dict[str, Any] | None:
        """Return the values of the next trial; None if the budget is used up, or all values of the space were tried."""
        if not self._may_begin(history):
            return None
        return samplers.propose(
            self.space,
            self._sampler,
            final_round.sweep_objectives(self.settings.sweep),
            history,
            len(history),
            self._make_tried_check(history),
            current={axis.name: get_value(self.settings, axis.name) for axis in self.space.axes()},
        )

    def _may_begin(self, history: list[Trial]) -> bool:
        sweep, added = self.settings.sweep, self._added(history)
        return final_round.count_trials(added) < sweep.trials and not final_round.check_limits(sweep, added)

    def _make_tried_check(self, history: list[Trial]) -> Callable[[Mapping[str, Any]], bool]:
        """Return a function that returns whether a trial has these values."""

        def is_tried(values: Mapping[str, Any]) -> bool:
            # Invalid values have no run, and a trial may have been trained in a group or alone.
            run_id, plain = self.run_id(values), dict(values)
            return any(trial.values == plain or (run_id is not None and trial.run_id == run_id) for trial in history)

        return is_tried

    def _added(self, history: list[Trial]) -> list[Trial]:
        """Return the trials without those that a fork has copied."""
        return history[self.store.carried :]

    @cached_property
    def _spec(self) -> RunSpec:
        """Run spec of the project; data and base are the same for all trials."""
        return build_run_spec(self.layout, self.settings)

    def run_id(self, values: Mapping[str, Any]) -> str | None:
        """Return the run id of these values; None if they are invalid settings, or the weights from which the training
        starts are missing."""
        try:
            return self.require_run_id(values)
        except InputError:
            return None

    def require_run_id(self, values: Mapping[str, Any]) -> str:
        """Return the run id of these values. Raises SettingsError if they are invalid settings, and DataError if the
        weights from which the training starts are missing."""
        chosen, spec = apply_values(self.settings, values).train, self._spec
        train, _ = resolve_train(self.layout, chosen, spec.data_digest, spec.base_digest)
        is_grouped = True if self.is_grouped and train.grouping_obstacle is None else None
        return self._spec.model_copy(update={"train": train, "is_grouped": is_grouped}).run_id

    def _begin_trial(
        self,
        values: Mapping[str, Any],
        run_id: str | None,
        continues: int | None = None,
        request: TrialRequest | None = None,
    ) -> TrialTask | None:
        params = self.space.to_params(values)
        try:
            settings = apply_values(self.settings, values)
            self._rows_per_step(settings)
            if run_id is None:
                run_id = self.require_run_id(values)
        except InputError as error:
            now, is_infeasible = time.time(), isinstance(error, SettingsError)
            refused = Trial(
                number=0, values=dict(values), run_id=None, state="infeasible" if is_infeasible else "failed",
                constraints={"settings": UNKNOWN} if is_infeasible else {}, cause="data", reason=str(error),
                started=now, ended=now, request=request,
            )  # fmt: skip
            self.store.add(refused, params)  # the sampler learns from invalid values too
            return None
        number = self.store.begin(values, params, run_id, self.worker, continues, request)
        return self._make_task(self.store.trials()[number])

    def _rows_per_step(self, settings: Settings) -> float:
        """Return rows per optimizer step. Raises SettingsError if rows do not fit into the packs."""
        sequences = BatchPlan(self.lengths, settings.train).sequences
        return settings.train.batch_size * self.examples / sequences

    def _make_task(self, trial: Trial) -> TrialTask:
        settings = apply_values(self.settings, trial.values)
        # The losses of a trial that starts from trained weights say nothing about those of others.
        trains_to_the_end = INIT_ADAPTER in trial.values or self._trains_to_the_end(trial)

        def decide_pruning(current: Trial) -> str | None:
            if trains_to_the_end:
                return None
            history = self.store.trials()
            if self._pruner.kind != "freeze_thaw":
                if max(current.curve) < max(history[current.number].curve, default=0):
                    return None  # an earlier worker has reported this validation, and decided when it was new
                return pruners.decide_pruning(self._pruner, history, current, self.longest_rows)
            if not has_reached_rung(self._pruner.min_resource_fraction, history, current, self.longest_rows):
                return None
            history[current.number] = current
            return self._make_freeze_thaw_search(history, current.number).reason_to_pause()

        objectives, rows_per_step = partial(self._compute_objectives, settings), self._rows_per_step(settings)
        return TrialTask(self.store, trial, settings, objectives, rows_per_step, decide_pruning)

    def _trains_to_the_end(self, trial: Trial) -> bool:
        """Return whether the trial continues a pruned trial only because no untried values were left.

        Such a trial was not promoted, so it must not be pruned again. The method uses only the history before the
        trial, so that a worker that takes the trial over decides the same. The decisions may still differ if trials of
        this history have reported more validations in between; both decisions are then correct. With freeze-thaw, each
        rung decides.
        """
        if self._pruner.kind == "freeze_thaw":
            return False
        earlier = self.store.trials()[: trial.number]
        if trial.continues is not None and earlier[trial.continues].is_ended_by_person:  # a person has resumed it
            return False
        if trial.continues is None or trial.continues == self._find_resumable(earlier, self.store.notes()):
            return False
        return self._propose_values(earlier) is None

    def _compute_objectives(self, settings: Settings, report: TrainReport, cost: TrainingCost) -> tuple[float, ...]:
        """Return the objectives in order; a separate process measures those that the run does not report."""
        sweep = self.settings.sweep
        reported = {aim.metric: objective_value(aim, report, cost) for aim in sweep.objectives}
        missing = [parse_row_metric(metric) for metric, value in reported.items() if value is None]
        measured: dict[str, float] = {}
        if missing:
            job = ValidationJob(run_ids=(report.run_id,), metrics=tuple(missing), rows=sweep.generation_rows)
            [scores] = score_runs(self.layout, settings, job, self.server, self.check_stop, self.device_lock)
            measured = {str(metric): value for metric, value in scores.metrics.items()}
        return tuple(measured[name] if value is None else value for name, value in reported.items())


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
    server: ForkServer
    """Starts trainings and processes that score."""
    check_stop: Callable[[], None]
    """Function that is called while a process scores; it raises an exception after a request to stop."""
    device_lock: DeviceLock = field(default_factory=lambda: DeviceLock(None))
    _scores: dict[str, ValidationScores] = field(default_factory=dict)

    def next(self) -> TrialTask | WorkItem | Idle:
        """Take over a training, begin the next one, score runs, or store the winner."""
        with self.search.locked():
            history = self.search.trials()
            if any(not trial.is_over for trial in history):
                return "wait"
            searched, history = history, [self._with_own_run(trial) for trial in history]
            grouped = {trial.number for trial, own in zip(searched, history, strict=True) if trial.run_id != own.run_id}
            has_front = len(self.settings.sweep.objectives) > 1  # it has no winner: the user chooses
            seed_trials = self.seeds.trials()
            is_stopped = bool(self.search.notes().get(final_round.STOPPED)) or self._stop_after_failure(seed_trials)
            if has_front or is_stopped or not any(trial.state == "complete" for trial in history):
                return "over"
            if (trial := self.seeds.take_over(self.worker, self.settings.machine.lease_timeout_s)) is not None:
                return self._make_task(trial)
            trainings = self._trainings(history, grouped, seed_trials)
            step = final_round.plan_next_step(self.settings.sweep, history, trainings, self._scores, grouped)
            if isinstance(step, FinalRound):
                self.search.note(FINAL_ROUND_NOTE, step.model_dump(mode="json"))
                self.search.note(DECIDED_AFTER, len(history))
                return "over"
            if isinstance(step, ValidationJob):
                return partial(self._score, step, history)
            return self._begin_trial(step, history)

    def _begin_trial(self, step: final_round.TrainingBatch, history: list[Trial]) -> TrialTask | Idle:
        """Begin the first training that no worker runs; `wait` if other workers run all of them."""
        running = {trial.run_id for trial in self.seeds.trials() if not trial.is_over}
        for number, index in step:
            values = final_round.values_for_seed(self.settings, history[number], index)
            run_id = build_run_spec(self.layout, apply_values(self.settings, values)).run_id
            if run_id not in running:
                seed_trial = self.seeds.begin(values, ({}, {}), run_id, self.worker)
                return self._make_task(self.seeds.trials()[seed_trial])
        return "wait"

    @staticmethod
    def _list_failures(seed_trials: Iterable[Trial]) -> list[Trial]:
        """Return the failed trainings that the repeated command tries again, the newest of each run."""
        latest, earlier = dict[str | None, Trial](), dict[str | None, Trial | None]()
        for trial in seed_trials:
            earlier[trial.run_id], latest[trial.run_id] = latest.get(trial.run_id), trial
        return [
            trial
            for run_id, trial in latest.items()
            if trial.state == "failed" and not final_round.is_repeated_failure(trial, earlier[run_id])
        ]

    def _stop_after_failure(self, seed_trials: Iterable[Trial]) -> bool:
        """Stop the study if a training has failed since the command was started; return whether.

        A full disk or a bug says nothing about the finalist, so the winner is not decided without it.
        """
        first = self.seeds.notes().get(final_round.RETRIED, 0)
        for failed in self._list_failures(seed_trials):
            if failed.number >= first:
                cause = failed.cause.replace("_", " ") or "unknown"
                text = f"{final_round.FINAL_FAILURE} ({cause}): {failed.reason}"
                self.search.note(final_round.STOPPED, text)
                return True
        return False

    def _trainings(
        self, history: list[Trial], grouped: Collection[int], seed_trials: Sequence[Trial]
    ) -> list[final_round.FinalistTraining]:
        """Return the trainings of the final round that are over, including those that failed and are not retried."""
        by_run = {trial.run_id: trial for trial in seed_trials if trial.is_over}
        for pending in self._list_failures(seed_trials):
            del by_run[pending.run_id]
        trainings = []
        for trial in history:
            if trial.state != "complete":
                continue
            for index in range(0 if trial.number in grouped else 1, self.settings.sweep.finalists.seeds):
                values = final_round.values_for_seed(self.settings, trial, index)
                try:
                    run_id = build_run_spec(self.layout, apply_values(self.settings, values)).run_id
                except DataError:  # see _with_own_run
                    continue
                seed = by_run.get(run_id)
                if seed is not None and seed.run_id is not None:
                    failed = "" if seed.state == "complete" else seed.reason or seed.state
                    trainings.append(final_round.FinalistTraining(trial.number, index, seed.run_id, failed))
        return trainings

    def _with_own_run(self, trial: Trial) -> Trial:
        """Return the trial with the run that is trained alone. The search may have trained it in a group, which rounds
        differently; then the final round trains it again, so that what is compared and adopted does not depend on
        the group."""
        if trial.state != "complete":
            return trial
        try:
            spec = build_run_spec(self.layout, apply_values(self.settings, trial.values))
        except DataError:  # the weights from which it started are on another machine
            return trial
        return trial.model_copy(update={"run_id": spec.run_id})

    def _make_task(self, trial: Trial) -> TrialTask:
        settings = apply_values(self.settings, trial.values)
        return TrialTask(self.seeds, trial, settings, self._compute_objectives, float(settings.train.batch_size), None)

    def _compute_objectives(self, report: TrainReport, cost: TrainingCost) -> tuple[float, ...]:
        metric, _ = final_round.select_comparison_objective(self.settings.sweep)
        job = ValidationJob(run_ids=(report.run_id,), metrics=(metric,), rows=self.settings.sweep.finalists.rows)
        [scores] = score_runs(self.layout, self.settings, job, self.server, self.check_stop, self.device_lock)
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
                if not RunPaths(self.layout.runs / run_id).is_finished():  # only another machine has trained it
                    trial = next(trial for trial in (*history, *self.seeds.trials()) if trial.run_id == run_id)
                    settings = apply_values(self.settings, trial.values)
                    run = RunDirectory.open(self.layout.runs, build_run_spec(self.layout, settings))
                    try:  # the result is the same
                        launch = build_launch(self.layout, settings)
                        with self.device_lock.hold(is_exclusive=True, check_stop=self.check_stop):
                            supervise(run, launch, [], code_version(), server=self.server)
                    finally:
                        run.close()
            scores = score_runs(self.layout, self.settings, job, self.server, self.check_stop, self.device_lock)
            self._scores |= {run_scores.run_id: run_scores for run_scores in scores}
        finally:
            lock.release()


# Scores of completed runs on validation rows.


def score_runs(
    layout: ProjectLayout,
    settings: Settings,
    job: ValidationJob,
    server: ForkServer,
    check_stop: Callable[[], None],
    device_lock: DeviceLock,
) -> list[ValidationScores]:
    """Return the scores of the job's runs, in the order of the job; no process starts if all scores are cached.

    The process needs memory that a training group uses, so it waits until the trainings of the group have ended.
    `check_stop` is called several times a second. If it raises, the scoring process is ended and leaves no incomplete
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
        with device_lock.hold(is_exclusive=True, check_stop=check_stop):
            _run_scorer(layout, launch, server, check_stop)
        results = _read_stored_scores(layout, launch)
    if missing := [run_id for run_id, scores in zip(job.run_ids, results, strict=True) if scores is None]:
        raise RatchetError(f"run {missing[0]}: was scored, but its scores cannot be read; check the disk")
    return [scores for scores in results if scores is not None]


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


def _run_scorer(
    layout: ProjectLayout, launch: ValidationLaunch, server: ForkServer, check_stop: Callable[[], None]
) -> None:
    # Use a file, not a pipe: a full pipe would block the process.
    with tempfile.TemporaryFile() as output:
        arguments = (str(layout.root), launch.model_dump_json(), None)
        process = server.start(Program(SCORER_MODULE, arguments, os.environ), output.fileno())
        try:
            while (code := process.wait_for(POLL_S)) is None:
                check_stop()
        finally:
            process.stop(STOP_TIMEOUT_S)
        if code:
            raise _read_failure(code, output, launch.job)


def _read_failure(code: int, output: IO[bytes], job: ValidationJob) -> RatchetError:
    """Return the exception that the last line of the output describes."""
    output.seek(0)
    lines = [line for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    # The file also has what the process and its libraries have printed.
    named = [line for line in lines if hasattr(errors, line.partition(": ")[0])]
    last = (named or lines or ["it printed nothing"])[-1]
    name, _, text = last.partition(": ")
    if code < 0:
        return RatchetError(f"scoring of {', '.join(job.run_ids)}: ended by signal {-code}; {last[:MAX_ERROR_LENGTH]}")
    if code == EXIT_INTERRUPTED:
        return InterruptedRunError(f"scoring of {', '.join(job.run_ids)}: stopped; run it again")
    error_class = getattr(errors, name, None)
    if isinstance(error_class, type) and issubclass(error_class, RatchetError):
        return error_class(text)
    return RatchetError(f"scoring of {', '.join(job.run_ids)}: exit code {code}: {last[:MAX_ERROR_LENGTH]}")

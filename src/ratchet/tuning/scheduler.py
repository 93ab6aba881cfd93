"""What a worker of the search does next: decided under the study's lock, by the history alone."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratchet.config.params_file import get_value
from ratchet.config.schema import Settings
from ratchet.data import token_files
from ratchet.data.batches import BatchPlan
from ratchet.errors import LockHeldError, SettingsError
from ratchet.runs.directory import Run, RunPaths, RunSpec
from ratchet.runs.supervisor import supervise
from ratchet.storage.code_version import code_version
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.locks import FileLock
from ratchet.storage.records.base import TrainReport
from ratchet.storage.records.evaluation import HeldOutJob, HeldOutScores
from ratchet.storage.records.sweep import FinalRound, SweepObjective, TrainingCost, Trial
from ratchet.training.run_spec import build_launch, build_run_spec
from ratchet.tuning import final_round, pruners, samplers, validation_scores
from ratchet.tuning.leases import SweepWorker
from ratchet.tuning.parameters import SearchDimension
from ratchet.tuning.search_space import SearchSpace, apply_values
from ratchet.tuning.trial import UNKNOWN, Idle, TrialTask, objective_value
from ratchet.tuning.trial_serialization import select_searched
from ratchet.tuning.trial_store import TrialStore

EPOCHS = "train.epochs"

Answers = Callable[[Settings, str, Sequence[str]], Mapping[str, float]]
"""Figures of the model that a run has trained, from its answers to validation rows: settings, run id, metrics."""


@dataclass
class TrialScheduler:
    """The search of a study: values, trials, runs."""

    layout: ProjectLayout
    settings: Settings
    register: TrialStore
    worker: SweepWorker
    answers: Answers

    @cached_property
    def space(self) -> SearchSpace:
        return SearchSpace.of(self.settings)

    @cached_property
    def measures(self) -> tuple[SweepObjective, ...]:
        """What trials are judged by."""
        return final_round.objective_measures(self.settings.sweep)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each training row."""
        return token_files.read_lengths(self.layout.data, "train")

    @cached_property
    def longest_rows(self) -> int:
        """Rows that the longest training learns from: with the most epochs that the space has."""
        drawn = [
            self.space.draw(partial(_extreme_value, side)) for side in (0, -1)
        ]  # a tie has its extremes where others have
        found = [values.get(EPOCHS, self.settings.train.epochs) for values in drawn]
        found += [_extreme_value(-1, one) for one in self.space.dimensions() if one.name == EPOCHS]
        epochs = max(map(float, found))
        return max(1, round(epochs * len(self.lengths)))

    def next(self) -> TrialTask | Idle:
        """Take a trial over, go on with a pruned one, or begin another."""
        with self.register.locked():
            if (left := self.register.take_over(self.worker, self.settings.machine.lease_s)) is not None:
                return self._assignment(left)
            while True:
                history = self.register.trials()
                found = self._decide(history)
                if found is not None:
                    return found

    def _decide(self, history: list[Trial]) -> TrialTask | Idle | None:
        """One look at the history; None where a trial was over at once, and one more look is due."""
        sweep, own = self.settings.sweep, history[self.register.carried :]
        idle: Idle = "wait" if any(not trial.is_over for trial in history) else "over"
        notes = self.register.notes()
        if notes.get(final_round.STOPPED):
            return idle
        if text := final_round.diagnose_failures(
            sweep, own[max(0, notes.get(final_round.FORGIVEN, 0) - self.register.carried) :]
        ):
            self.register.note(final_round.STOPPED, text)
            return idle
        earlier = self._to_go_on_with(history, notes.get(final_round.FORGIVEN, 0))
        if earlier is None:
            values = self._proposal(history)
            if values is not None:
                return self._begun(values, self.run_id(values))
            earlier = pruners.find_most_promising(history) if self._needs_more(history) else None
        if earlier is None:
            return idle
        return self._begun(history[earlier].values, history[earlier].run_id, continues=earlier)

    def _to_go_on_with(self, history: list[Trial], forgiven: int) -> int | None:
        """A failed trial whose cause was mended, else the pruned one that has won its place on the next rung meanwhile.

        None once hours or tokens are spent.
        """
        if final_round.check_limits(self.settings.sweep, history[self.register.carried :]):
            return None
        if (failed := _find_retryable_trial(history, forgiven)) is not None:
            return failed
        return pruners.find_promotable(self.settings.sweep.pruner, history, self.longest_rows)

    def _proposal(self, history: list[Trial]) -> dict[str, Any] | None:
        """Values of the next trial; None where the budget is spent, or all of a finite space is tried."""
        sweep = self.settings.sweep
        if final_round.check_budget(sweep, history[self.register.carried :]):
            return None
        return samplers.propose(
            self.space, sweep.sampler, self.measures, history, len(history), lambda some: self._tried(history, some),
            current=self.current,
        )  # fmt: skip

    def _needs_more(self, history: list[Trial]) -> bool:
        """Whether too few trainings are, or may still become, complete to name a winner among them."""
        sweep = self.settings.sweep
        wanted = 1 if final_round.check_limits(sweep, history[self.register.carried :]) else max(1, sweep.finalists.top)
        under_way = sum(not trial.is_over for trial in history)
        return len(final_round.eligible_trials(history)) + under_way < wanted

    @cached_property
    def current(self) -> dict[str, Any]:
        """The values that params.yaml has now: the first to be tried, where the space holds them."""
        return {axis.knob: get_value(self.settings, axis.knob) for axis in self.space.axes()}

    @cached_property
    def _spec(self) -> RunSpec:
        """Of the project as it stands; data and base are the same for all trials."""
        return build_run_spec(self.layout, self.settings)

    def run_id(self, values: Mapping[str, Any]) -> str | None:
        """The run of these values; None where the settings refuse them."""
        try:
            train = apply_values(self.settings, values).train
            return self._spec.model_copy(update={"train": train}).run_id
        except SettingsError:
            return None

    def _tried(self, history: list[Trial], values: Mapping[str, Any]) -> bool:
        """Refused values have no run, even those that only the rows refuse, and which would have one."""
        run_id, wanted = self.run_id(values), dict(values)
        return any(trial.values == wanted if trial.run_id is None else trial.run_id == run_id for trial in history)

    def _begun(self, values: Mapping[str, Any], run_id: str | None, continues: int | None = None) -> TrialTask | None:
        free = select_searched(self.space, values)
        try:
            settings = apply_values(self.settings, values)
            self._rows_per_step(settings)
        except SettingsError as error:
            self.register.add(_make_infeasible_trial(values, error), free)
            return None
        number = self.register.begin(values, free, run_id, self.worker, continues)
        return self._assignment(self.register.trials()[number])

    def _rows_per_step(self, settings: Settings) -> float:
        """Raises SettingsError where the rows do not fit into such packs."""
        sequences = BatchPlan(self.lengths, settings.train).sequences
        return settings.train.batch_rows * len(self.lengths) / sequences

    def _assignment(self, trial: Trial) -> TrialTask:
        settings = apply_values(self.settings, trial.values)
        to_the_end = self._is_for_the_end(trial)

        def judge(now: Trial) -> str | None:
            if to_the_end:
                return None
            return pruners.decide_pruning(self.settings.sweep.pruner, self.register.trials(), now, self.longest_rows)

        def figures(report: TrainReport, spent: TrainingCost) -> tuple[float, ...]:
            return self._figures(settings, report, spent)

        return TrialTask(self.register, trial, settings, figures, self._rows_per_step(settings), judge)

    def _is_for_the_end(self, trial: Trial) -> bool:
        """Whether it goes on with another although that has not won its place: nothing else was left to be tried.

        Asked of the history before it, so that whoever takes the trial over comes to the same answer; unless others
        that were under way then have told more meanwhile, and in that case either will do.
        """
        earlier = self.register.trials()[: trial.number]
        forgiven = self.register.notes().get(final_round.FORGIVEN, 0)
        if trial.continues is None or trial.continues == self._to_go_on_with(earlier, forgiven):
            return False
        return self._proposal(earlier) is None

    def _figures(self, settings: Settings, report: TrainReport, spent: TrainingCost) -> tuple[float, ...]:
        """In the order of the objectives; what the run does not say itself is measured, by a process of its own."""
        sweep = self.settings.sweep
        own = {aim.metric: objective_value(aim, report, spent) for aim in sweep.objectives}
        asked = [metric for metric, value in own.items() if value is None]
        given = self.answers(settings, report.run_id, asked) if asked else {}
        return tuple(given[name] if value is None else value for name, value in own.items())


def _find_retryable_trial(history: Sequence[Trial], before: int) -> int | None:
    """The first failed trial that is to be tried again: of those before this number, for the cause was mended."""
    latest = {trial.run_id: trial for trial in history if trial.run_id is not None}
    failed = (trial.number for trial in latest.values() if trial.state == "failed" and trial.number < before)
    return min(failed, default=None)


def _extreme_value(side: int, dimension: SearchDimension) -> Any:
    """The smallest (0) or largest (-1) value; of words the first or last."""
    if dimension.kind != "choice":
        return (dimension.low, dimension.high)[side]
    numbers = [value for value in dimension.choices if isinstance(value, int | float) and not isinstance(value, bool)]
    return sorted(numbers)[side] if len(numbers) == len(dimension.choices) else dimension.choices[side]


def _make_infeasible_trial(values: Mapping[str, Any], error: SettingsError) -> Trial:
    """Values that do not go together are knowledge, too."""
    now = time.time()
    return Trial(
        number=0, values=dict(values), run_id=None, state="infeasible", constraints={"settings": UNKNOWN},
        cause="data", reason=str(error), begun=now, ended=now,
    )  # fmt: skip


# The finals of a study, as work for its workers: further seeds of the best trials, scores, and the winner.

FINALS = "finals"
"""Note of a study: its Finals, once they are decided."""

Errand = Callable[[], None]
"""Something to be done outside the study's lock, before the next look."""


def final_study_name(study: str) -> str:
    """Name of the study that keeps the further seeds of this one's finalists."""
    return f"{study}.finals"


def open_final_store(
    search: TrialStore, identity: Mapping[str, Any], settings: Settings, space: SearchSpace
) -> TrialStore:
    """Where trainings of finalists with further seeds are entered: a study of its own, beside that of the search."""
    _, measure = final_round.select_comparison_measure(settings.sweep)
    own = {**identity, "finals_of": search.study, "objectives": [[measure.metric, measure.direction]]}
    return TrialStore.open(search.storage, final_study_name(search.study), own, space)


@dataclass
class FinalRoundScheduler:
    """Further seeds of the best trials, until the winner is known."""

    layout: ProjectLayout
    settings: Settings
    search: TrialStore
    seeds: TrialStore
    worker: SweepWorker
    look: Callable[[], None]
    """Called while a process scores; raises when this worker is asked to stop."""
    _scores: dict[str, HeldOutScores] = field(default_factory=dict)

    def next(self) -> TrialTask | Errand | Idle:
        """Take a training over, begin the next, have runs scored, or note who has won."""
        with self.search.locked():
            history = self.search.trials()
            if (idle := self._idle(history)) is not None:
                return idle
            if (left := self.seeds.take_over(self.worker, self.settings.machine.lease_s)) is not None:
                return self._assignment(left)
            step = final_round.plan_next_step(self.settings.sweep, history, self._trainings(history), self._scores)
            if isinstance(step, FinalRound):
                self.search.note(FINALS, step.model_dump(mode="json"))
                return "over"
            if isinstance(step, HeldOutJob):
                return partial(self._score, step, history)
            return self._begun(step, history)

    def _idle(self, history: list[Trial]) -> Idle | None:
        """Why there are no finals: not yet, or never."""
        if any(not trial.is_over for trial in history):
            return "wait"
        if (
            len(self.settings.sweep.objectives) > 1
        ):  # a front has no winner: which of it is wanted is for a person to say
            return "over"
        complete = any(trial.state == "complete" for trial in history)
        return "over" if self.search.notes().get(final_round.STOPPED) or not complete else None

    def _begun(self, step: final_round.FinalistTrainingBatch, history: list[Trial]) -> TrialTask | Idle:
        """The first of the trainings that nobody has begun yet."""
        under_way = {trial.run_id for trial in self.seeds.trials() if not trial.is_over}
        for number, index in step.wanted:
            values = final_round.values_for_seed(self.settings, history[number], index)
            run_id = build_run_spec(self.layout, apply_values(self.settings, values)).run_id
            if run_id not in under_way:
                place = self.seeds.begin(values, {}, run_id, self.worker)
                return self._assignment(self.seeds.trials()[place])
        return "wait"

    def _trainings(self, history: list[Trial]) -> list[final_round.FinalistTraining]:
        """What was trained, or could not be, with further seeds."""
        over = {trial.run_id: trial for trial in self.seeds.trials() if trial.is_over}
        found = []
        for trial in history:
            if trial.state != "complete":
                continue
            for index in range(1, self.settings.sweep.finalists.seeds):
                values = final_round.values_for_seed(self.settings, trial, index)
                seed = over.get(build_run_spec(self.layout, apply_values(self.settings, values)).run_id)
                if seed is not None and seed.run_id is not None:
                    failed = "" if seed.state == "complete" else seed.reason or seed.state
                    found.append(final_round.FinalistTraining(trial.number, index, seed.run_id, failed))
        return found

    def _assignment(self, trial: Trial) -> TrialTask:
        settings = apply_values(self.settings, trial.values)
        return TrialTask(self.seeds, trial, settings, self._figures, float(settings.train.batch_rows), None)

    def _figures(self, report: TrainReport, spent: TrainingCost) -> tuple[float, ...]:
        metric, _ = final_round.select_comparison_measure(self.settings.sweep)
        job = HeldOutJob(run_ids=(report.run_id,), metrics=(metric,), rows=self.settings.sweep.finalists.rows)
        [found] = validation_scores.score_runs(self.layout, self.settings, job, self.look)
        return (found.figures[metric],)

    def _score(self, job: HeldOutJob, history: list[Trial]) -> None:
        """Have runs scored; one worker of this machine at a time, for the others then find what it has written."""
        lock = FileLock(self.layout.stage_lock(f"scores-{self.search.study}"), f"the scores of {self.search.study}")
        while True:
            try:
                lock.acquire(wait_s=1.0)
                break
            except LockHeldError:
                self.look()
        try:
            for run_id in job.run_ids:
                self._require_here(run_id, history)
            for one in validation_scores.score_runs(self.layout, self.settings, job, self.look):
                self._scores[one.run_id] = one
        finally:
            lock.release()

    def _require_here(self, run_id: str, history: list[Trial]) -> None:
        """A run that another machine has trained is trained here once more: it is the same run."""
        if RunPaths(self.layout.runs / run_id).is_finished():
            return
        trial = next(one for one in (*history, *self.seeds.trials()) if one.run_id == run_id)
        settings = apply_values(self.settings, trial.values)
        run = Run.open(self.layout.runs, build_run_spec(self.layout, settings))
        try:
            supervise(run, build_launch(self.layout, settings), [], code_version())
        finally:
            run.close()

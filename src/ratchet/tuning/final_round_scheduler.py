"""The finals of a study, as work for its workers: further seeds of the best trials, scores, and the winner."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ratchet.config.schema import Settings
from ratchet.errors import BusyError
from ratchet.runs.directory import Run, RunPaths
from ratchet.runs.supervisor import supervise
from ratchet.storage.code_version import code_version
from ratchet.storage.layout import Layout
from ratchet.storage.locks import Lock
from ratchet.storage.records.base import TrainReport
from ratchet.storage.records.sweep import Cost, Finals, Trial
from ratchet.storage.records.validation import HeldOut, HeldOutJob
from ratchet.training.run_spec import launch_of, spec_of
from ratchet.tuning import budget, final_round, validation_scores
from ratchet.tuning.leases import Worker
from ratchet.tuning.search_space import Space, settings_with
from ratchet.tuning.trial import Assignment, Idle
from ratchet.tuning.trial_store import Register

FINALS = "finals"
"""Note of a study: its Finals, once they are decided."""

Errand = Callable[[], None]
"""Something to be done outside the study's lock, before the next look."""


def finals_of(study: str) -> str:
    """Name of the study that keeps the further seeds of this one's finalists."""
    return f"{study}.finals"


def register_of(search: Register, identity: Mapping[str, Any], settings: Settings, space: Space) -> Register:
    """Where trainings of finalists with further seeds are entered: a study of its own, beside that of the search."""
    _, measure = final_round.measure_of(settings.sweep)
    own = {**identity, "finals_of": search.study, "objectives": [[measure.metric, measure.direction]]}
    return Register.open(search.storage, finals_of(search.study), own, space)


@dataclass
class Finale:
    """Further seeds of the best trials, until the winner is known."""

    layout: Layout
    settings: Settings
    search: Register
    seeds: Register
    worker: Worker
    look: Callable[[], None]
    """Called while a process scores; raises when this worker is asked to stop."""
    _scores: dict[str, HeldOut] = field(default_factory=dict)

    def next(self) -> Assignment | Errand | Idle:
        """Take a training over, begin the next, have runs scored, or note who has won."""
        with self.search.locked():
            history = self.search.trials()
            if (idle := self._idle(history)) is not None:
                return idle
            if (left := self.seeds.take_over(self.worker, self.settings.machine.lease_s)) is not None:
                return self._assignment(left)
            step = final_round.plan(self.settings.sweep, history, self._trainings(history), self._scores)
            if isinstance(step, Finals):
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
        return "over" if self.search.notes().get(budget.STOPPED) or not complete else None

    def _begun(self, step: final_round.Train, history: list[Trial]) -> Assignment | Idle:
        """The first of the trainings that nobody has begun yet."""
        under_way = {trial.run_id for trial in self.seeds.trials() if not trial.is_over}
        for number, index in step.wanted:
            values = final_round.values_of(self.settings, history[number], index)
            run_id = spec_of(self.layout, settings_with(self.settings, values)).run_id
            if run_id not in under_way:
                place = self.seeds.begin(values, {}, run_id, self.worker)
                return self._assignment(self.seeds.trials()[place])
        return "wait"

    def _trainings(self, history: list[Trial]) -> list[final_round.Training]:
        """What was trained, or could not be, with further seeds."""
        over = {trial.run_id: trial for trial in self.seeds.trials() if trial.is_over}
        found = []
        for trial in history:
            if trial.state != "complete":
                continue
            for index in range(1, self.settings.sweep.finalists.seeds):
                values = final_round.values_of(self.settings, trial, index)
                seed = over.get(spec_of(self.layout, settings_with(self.settings, values)).run_id)
                if seed is not None and seed.run_id is not None:
                    failed = "" if seed.state == "complete" else seed.reason or seed.state
                    found.append(final_round.Training(trial.number, index, seed.run_id, failed))
        return found

    def _assignment(self, trial: Trial) -> Assignment:
        settings = settings_with(self.settings, trial.values)
        return Assignment(self.seeds, trial, settings, self._figures, float(settings.train.batch_rows), None)

    def _figures(self, report: TrainReport, spent: Cost) -> tuple[float, ...]:
        metric, _ = final_round.measure_of(self.settings.sweep)
        job = HeldOutJob(run_ids=(report.run_id,), metrics=(metric,), rows=self.settings.sweep.finalists.rows)
        [found] = validation_scores.ask(self.layout, self.settings, job, self.look)
        return (found.figures[metric],)

    def _score(self, job: HeldOutJob, history: list[Trial]) -> None:
        """Have runs scored; one worker of this machine at a time, for the others then find what it has written."""
        lock = Lock(self.layout.stage_lock(f"scores-{self.search.study}"), f"the scores of {self.search.study}")
        while True:
            try:
                lock.acquire(wait_s=1.0)
                break
            except BusyError:
                self.look()
        try:
            for run_id in job.run_ids:
                self._require_here(run_id, history)
            for one in validation_scores.ask(self.layout, self.settings, job, self.look):
                self._scores[one.run_id] = one
        finally:
            lock.release()

    def _require_here(self, run_id: str, history: list[Trial]) -> None:
        """A run that another machine has trained is trained here once more: it is the same run."""
        if RunPaths(self.layout.runs / run_id).is_finished():
            return
        trial = next(one for one in (*history, *self.seeds.trials()) if one.run_id == run_id)
        settings = settings_with(self.settings, trial.values)
        run = Run.open(self.layout.runs, spec_of(self.layout, settings))
        try:
            supervise(run, launch_of(self.layout, settings), [], code_version())
        finally:
            run.close()

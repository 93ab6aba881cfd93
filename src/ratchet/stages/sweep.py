"""`ratchet sweep`: runs many supervised trainings, whose hyperparameters an Optuna study chooses. Loads no torch.

Worker processes (tuning/sweep_worker.py) share the study, on this machine and on others. This module starts and
monitors the workers, reports the trials to the terminal and MLflow, and writes the report.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.console.sweep_table import LiveSweepTable, SweepLogPrinter, count_finished, count_progress
from ratchet.errors import DataError, InterruptedRunError, LockHeldError, RunFailedError, SettingsError, StorageError
from ratchet.models import start_adapter
from ratchet.redaction import SETTING_PREFIX
from ratchet.reports import plots, sweep_page
from ratchet.runs.directory import RunPaths, storage_errors
from ratchet.runs.fork_server import ForkServer
from ratchet.runs.signals import StopSignal
from ratchet.stages.project import Project, ignore_progress, require_tracked_settings
from ratchet.stages.team import require_run_quota
from ratchet.storage import files
from ratchet.storage.actors import current_actor
from ratchet.storage.files import FileLock
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.progress import report_progress
from ratchet.storage.records.base import Record
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.evaluation import VALIDATION_LOSS, VALIDATION_METRICS, ValidationJob, ValidationLaunch
from ratchet.storage.records.sweep import RequestAction, SweepReport, Trial, TrialRequest
from ratchet.tracking import telemetry
from ratchet.tracking.loggers import CreateLogger, LoggerCallbackGroup, create_callback, load_loggers
from ratchet.tracking.mlflow.client import MlflowTracker
from ratchet.tracking.mlflow.run_logger import MlflowRunCallback
from ratchet.tracking.mlflow.sweeps import MlflowSweepTracker
from ratchet.tuning import final_round, ray_cluster, samplers, scheduler, trial_requests, worker_pool
from ratchet.tuning import report as adoption
from ratchet.tuning.cost_estimate import estimate_sweep
from ratchet.tuning.leases import SweepWorker
from ratchet.tuning.report import AdoptedTrial
from ratchet.tuning.scheduler import TrialScheduler
from ratchet.tuning.search_space import SearchSpace
from ratchet.tuning.storage import retry_storage
from ratchet.tuning.study_session import FinalRoundProgress, StudySession
from ratchet.tuning.tracking_sync import Status, SweepTrackingSync, TrialProgressReader
from ratchet.tuning.trial import run_trial
from ratchet.tuning.trial_summary import compute_savings
from ratchet.tuning.worker_pool import LocalWorkerLauncher, WorkerKillInjector, WorkerLauncher, WorkerPool

POLL_S = 0.5
CHAOS_GAP_S = (6.0, 25.0)
"""Range, in seconds, from which the time between two kills of workers (`--chaos`) is drawn."""
LATE_RUNG = 1.5
"""A first rung that is compared later than this many times its share of a training is reported."""
DATA_WAIT_S = 3600.0
"""Longest time that a second `ratchet sweep` waits while the first `ratchet sweep` prepares the data."""
PAGE = "page.html"
STDERR = 2
"""File descriptor for the output of `dvc repro`. Standard output has the result, and `sys.stderr` of a notebook may
have no descriptor."""


class SweepResult(Record):
    """Result of a sweep."""

    report: SweepReport
    page: Path


class TrialRequestResult(Record):
    """A request about a trial, which is stored in the study."""

    request: TrialRequest
    trial: Trial
    """The trial after the request; for a clone, its source."""


def sweep(  # noqa: PLR0913 (keyword arguments of a public function)
    project: Project,
    *,
    workers: int = 1,
    fork: bool = False,
    engine: Literal["local", "ray"] = "local",
    chaos: int = 0,
    create_display: Callable[[], LiveSweepTable | SweepLogPrinter] | None = None,
    on_progress: Callable[[str], None] = ignore_progress,
) -> SweepResult:
    """Search hyperparameters: run trials until the study is complete. Call it again to resume.

    Args:
        project: section sweep of its settings has the search space.
        workers: number of workers; each runs one trial, or `sweep.concurrent_trials`, at a time.
        fork: start a new study from the trials of the old study, after a change of sweep settings.
        engine: `local`: worker processes on this machine; `ray`: on the Ray cluster of machine.ray.
        chaos: number of workers to kill at random times, as a test.
        create_display: creates a display of the running sweep; None: there is no display.
        on_progress: receives lines about the progress.

    Raises:
        SettingsError: the space cannot be searched, or differs from that of the study.
        DataError: there are no data to train on.
        StorageError: the folder of the runs cannot be created.
        InterruptedRunError: stopped on request after checkpoints were saved.
        RunFailedError: trials or workers fail repeatedly; the message has the diagnosis.
    """
    layout, settings = project.layout, project.settings
    if workers < 1:
        raise SettingsError(f"--workers: found {workers}; expected 1 or more")
    if chaos < 0:
        raise SettingsError(f"--chaos: found {chaos}; expected 0 or more workers to kill")
    SearchSpace.from_settings(settings)  # an invalid space is refused before the stages run
    load_loggers(settings)  # a logger without its library is refused too
    with storage_errors(layout.runs):  # refused before any slow work
        layout.runs.mkdir(parents=True, exist_ok=True)
    if settings.machine.replica is not None:
        on_progress(
            "machine.replica: trials are not copied there; `ratchet train` copies the winner when it adopts its run"
        )
    if engine == "ray":
        if settings.machine.study_storage is None:  # before any slow work
            raise SettingsError(
                "--engine ray: workers on several machines share the study through a database; set "
                "machine.study_storage to its URL, such as postgresql://ratchet@db.example/studies"
            )
        ray_cluster.connect(settings.machine.ray.address)
    run_outdated_stages(project, on_progress)
    require_objective_data(layout, settings)
    with StudySession.open(layout, settings, fork, create=True) as session:
        command = _SweepCommand(session, on_progress, workers, chaos, is_ray=engine == "ray")
        command.run(create_display() if create_display else None)
        return _write_result(layout, session)


def report_sweep(project: Project, fork: bool = False) -> SweepResult:
    """Write the report of the study without running more trials. Raises DataError if there is no study."""
    SearchSpace.from_settings(project.settings)
    with StudySession.open(project.layout, project.settings, fork, create=False) as session:
        return _write_result(project.layout, session)


def adopt_trial(project: Project, number: int | None = None) -> AdoptedTrial:
    """Write the hyperparameters of a trial, by default of the winner, into params.yaml.

    Raises:
        DataError: there is no winner yet, or no complete trial with that number.
        SettingsError: params.yaml cannot be changed without touching other keys.
    """
    SearchSpace.from_settings(project.settings)
    with StudySession.open(project.layout, project.settings, fork=False, create=False) as session:
        return adoption.adopt_trial(project.layout, project.settings, session.report(), number)


def control_trial(
    project: Project,
    action: RequestAction,
    number: int,
    changes: Mapping[str, Any] | None = None,
    is_warm: bool = False,
) -> TrialRequestResult:
    """Store a request of a person about a trial in the study. The workers of a running sweep find it within seconds.

    A trial that is to stop or pause, and that no worker runs, ends in this call. `changes` are the changed values of a
    clone, by dotted key. With `is_warm`, the clone starts from the best weights of the trial.

    Raises:
        DataError: there is no study or no such trial, the state of the trial does not allow the action, or its weights
            are not on this machine.
        SettingsError: the changed values cannot be used, or the study has other settings than params.yaml.
    """
    layout, settings = project.layout, project.settings
    if action not in trial_requests.DECISIONS:
        raise SettingsError(f"found the action {action!r}; expected one of: {', '.join(trial_requests.DECISIONS)}")
    if (changes or is_warm) and action != "clone":
        what = "changed values" if changes else "trained weights"
        raise SettingsError(f"found {what} for the action {action!r}; expected them for `clone` only")
    SearchSpace.from_settings(settings)
    with ForkServer() as server, StudySession.open(layout, settings, fork=False, create=False) as session:
        store, actor = session.store, current_actor(layout.root)
        trials = TrialScheduler(layout, settings, store, SweepWorker.current(), server, _do_nothing)
        start = None
        if is_warm:
            source = trial_requests.find_newest(store.study, store.trials(), action, number)
            if source.run_id is None:
                raise DataError(f"--clone {number}: trial {number} has not trained, so it has no weights; omit --warm")
            start = start_adapter.keep_best_weights(layout, RunPaths(layout.runs / source.run_id))
        with store.locked():
            history, requests = store.trials(), store.requests()
            if action == "clone":
                request = trial_requests.make_clone_request(
                    store.study, session.space, history, requests, trials.require_run_id, number, changes or {}, actor,
                    start,
                )  # fmt: skip
            else:
                request = trial_requests.make_request(store.study, history, requests, action, number, actor)
            if request not in requests:
                store.add_request(request)
            task = None
            if trial_requests.DECISIONS[action] and _was_run_here(history[request.trial], trials.worker.host):
                task = trials.take_over(request.trial)
        if task is not None:
            run_trial(task, layout, trials.worker, StopSignal(), lambda *_: nullcontext(server), request)
        return TrialRequestResult(request=request, trial=store.trials()[request.trial])


def _was_run_here(trial: Trial, host: str) -> bool:
    """Return whether all workers of a trial ran on this machine. The cost of others is in runs on their disks."""
    return all(execution.worker.rpartition("/")[0] == host for execution in trial.executions)


def _write_result(layout: ProjectLayout, session: StudySession) -> SweepResult:
    report, folder = session.report(), layout.sweep(session.store.study)
    write_report(folder, report)
    return SweepResult(report=report, page=folder / PAGE)


def run_outdated_stages(project: Project, on_progress: Callable[[str], None]) -> None:
    """Run stages base and prepare if their inputs have changed, so that all trials learn from the same rows.

    In a project without DVC, nothing is done. Raises DataError if a stage fails, and SettingsError if an environment
    variable has another setting of these stages.
    """
    layout = project.layout
    if not (layout.root / ".dvc").is_dir():
        return
    require_tracked_settings(layout, project.settings, sections=("base", "prepare"))
    machine = params_file.name_variable("machine.")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(SETTING_PREFIX) or name.startswith(machine)
    }  # the stages would refuse variables of the sections that they do not read
    # DVC refuses to run twice at the same time, so a second `ratchet sweep` waits for the first one.
    on_progress("bringing base and data up to date (`dvc repro prepare`)")
    with FileLock(layout.stage_lock("sweep"), "the preparation of a sweep").acquire(wait_s=DATA_WAIT_S):
        command = [sys.executable, "-m", "dvc", "repro", "-q", "prepare"]
        done = subprocess.run(command, cwd=layout.root, env=environment, stdout=STDERR, check=False)
    if done.returncode:
        raise DataError("the stages before the sweep failed (see above): `dvc repro prepare` must pass first")


def require_objective_data(layout: ProjectLayout, settings: Settings) -> None:
    """Raise SettingsError if the data lack something that an objective needs, before any training."""
    measured = set(VALIDATION_METRICS) - {VALIDATION_LOSS}
    metrics = [objective.metric for objective in settings.sweep.objectives if objective.metric in measured]
    if not metrics:
        return
    job = ValidationJob(run_ids=(), metrics=tuple(map(scheduler.parse_row_metric, metrics)))
    launch = ValidationLaunch(job=job, max_new_tokens=settings.evaluate.max_new_tokens, machine=settings.machine)
    launch.require_measurable(DatasetCard.load(layout.dataset_card))


class _SweepCommand:
    """Runs the workers of a sweep and reports their progress, from the start of the command to its end."""

    def __init__(
        self, session: StudySession, on_progress: Callable[[str], None], workers: int, chaos: int, is_ray: bool
    ) -> None:
        self._session, self._on_progress = session, on_progress
        self._worker_count, self._kill_count, self._is_ray = workers, chaos, is_ray
        self._layout, self._settings = session.layout, session.settings
        self._study = session.store.study
        telemetry.annotate(sweep=self._study)
        self._folder = self._layout.sweep(self._study)

    def run(self, display: LiveSweepTable | SweepLogPrinter | None) -> None:
        """Start workers and wait until the study is complete. Raises the exceptions of `sweep`."""
        for library, installed in samplers.library_versions().items():
            if (recorded := self._session.store.versions.get(library, installed)) != installed:
                note = f"the study was started with {library} {recorded}, installed is {installed}"
                self._on_progress(f"{note}: it may propose other values")
        if cause := self._session.resume_after_failures():
            self._on_progress(f"the sweep had stopped: {cause}; resuming")
        if not self._session.store.trials():
            self._report_estimate()
        begun = final_round.count_trials(self._session.store.trials()[self._session.store.carried :])
        if (missing := self._settings.sweep.trials - begun) > 0:
            require_run_quota(Project.from_parts(self._layout, self._settings), new_runs=missing)
        pool = self._create_pool()
        status: Status = "FAILED"
        with ExitStack() as stack:
            stop = stack.enter_context(StopSignal().installed())
            syncs = self._start_tracking(stack)
            try:
                status = self._watch(pool, display, stop)
            finally:
                pool.stop(self._settings.machine.grace_period_s)
                self._finish_tracking(syncs, status)
        if status == "KILLED":
            ended = sum(trial.is_over for trial in self._session.store.trials())
            raise InterruptedRunError(
                f"sweep {self._study}: stopped on request, {ended} trials have ended; checkpoints are saved, "
                "run it again to resume"
            )
        if status == "FAILED":
            raise RunFailedError(
                f"sweep {self._study}: {self._session.report(with_importances=False).stopped}\n"
                "  fix the cause and run the command again: the sweep resumes and does not count these failures"
            )

    def _report_estimate(self) -> None:
        settings = self._settings
        estimate = estimate_sweep(self._layout, settings, self._session.space, self._worker_count)
        self._on_progress(estimate.format())
        pruner, first = settings.sweep.resolved_pruner, estimate.first_pruning
        if settings.sweep.pruner.kind == "auto" and pruner.kind == "asha":
            self._on_progress(
                "sweep.pruner.kind: auto: asha prunes the trials, because freeze_thaw is not possible: "
                f"{settings.sweep.find_freeze_thaw_obstacle()}"
            )
        if pruner.kind != "none" and first > LATE_RUNG * pruner.min_resource_fraction:
            name = "validate_every_steps" if settings.train.validate_every_epochs is None else "validate_every_epochs"
            self._on_progress(
                f"the first rung, {pruner.min_resource_fraction:.0%} of a training, is compared at {first:.0%}: a "
                f"smaller train.{name} (now {getattr(settings.train, name)}) saves training"
            )

    def _create_pool(self) -> WorkerPool:
        from ratchet.data import token_files

        settings, root = self._settings, self._layout.root
        if self._is_ray:
            machine = ray_cluster.adapt_machine_to_nodes(settings.machine)
        else:
            machine = worker_pool.divide_threads(settings.machine, self._worker_count)
        worker_params = self._folder / "params.yaml"  # the project's file may change while workers run
        files.make_directory(self._folder)
        validation_ids = token_files.open_split(self._layout.data, "validation")["id"]
        final_round.write_objective(self._layout, self._study, validation_ids)
        text = params_file.dump(settings.model_copy(update={"machine": machine}))
        files.write_atomic(worker_params, text)
        kills = WorkerKillInjector(self._kill_count, settings.sweep.sampler.seed, CHAOS_GAP_S)
        engine: WorkerLauncher = LocalWorkerLauncher([str(root), str(worker_params)])
        if self._is_ray:
            engine = ray_cluster.RayWorkerLauncher(machine.ray, root, text, self._on_progress)
        return WorkerPool(engine, self._worker_count, self._folder, kills, self._on_progress)

    def _watch(self, pool: WorkerPool, display: LiveSweepTable | SweepLogPrinter | None, stop: StopSignal) -> Status:
        progress = TrialProgressReader(self._layout.runs)
        final_round_progress, done = FinalRoundProgress(self._session), 0
        self._last = self._session.report(with_importances=False)
        try:
            while (pool.poll() or self._restart_workers(pool)) and not stop.is_requested:
                # If the storage fails, the workers wait for it, and report the failure at the end.
                with suppress(StorageError, LockHeldError):
                    self._last = self._session.report(with_importances=False)
                    for line in final_round_progress.list_news(self._last):
                        self._on_progress(line)
                done = count_progress(self._last, done)
                report_progress("trials", done, self._last.planned_trials)
                if display is not None:
                    display.show(self._last, progress.read(self._last), pool.alive_count)
                stop.wait(POLL_S, _do_nothing)
            wait_s = self._settings.machine.storage_timeout_s
            self._last = retry_storage(lambda: self._session.report(with_importances=False), wait_s, _do_nothing)
            if not stop.is_requested:
                report_progress("trials", count_finished(self._last), self._last.planned_trials)
        finally:
            if display is not None:
                display.close(self._last)
        if pool.kill_count:
            self._on_progress(f"{pool.kill_count} workers were killed as requested (--chaos)")
        if stop.is_requested:
            return "KILLED"
        new_trials = self._last.trials[self._session.store.carried :]
        if not self._last.stopped and final_round.count_trials(new_trials) < self._settings.sweep.trials:
            self._on_progress(
                final_round.check_limits(self._settings.sweep, new_trials)
                or "every point of the search space has been tried"
            )
        if trial_requests.find_requested_work(self._last.trials, self._last.requests) is not None:
            limit = self._last.stopped or final_round.check_limits(self._settings.sweep, new_trials)
            why = f": {limit}" if limit else "; run `ratchet sweep` again"
            self._on_progress(f"a clone or a resumed trial was requested, and has not begun{why}")
        return "FAILED" if self._last.stopped else "FINISHED"

    def _restart_workers(self, pool: WorkerPool) -> bool:
        """Start the workers again if a person has requested a trial that none of them has begun; return whether."""
        with suppress(StorageError, LockHeldError):
            store = self._session.store
            worker = SweepWorker.current()
            trials = TrialScheduler(self._layout, self._settings, store, worker, ForkServer(), _do_nothing)
            if store.notes().get(final_round.STOPPED) or trials.find_requested_step(store.trials()) is None:
                return False
            for slot in pool.slots:
                slot.is_done = False
            return True
        return False

    def _start_tracking(self, stack: ExitStack) -> list[SweepTrackingSync]:
        """Start to report the sweep to the loggers, unless another command on this machine reports it."""
        lock = FileLock(self._layout.stage_lock(f"sweep-{self._study}"), f"sweep {self._study}")
        try:
            stack.enter_context(lock.acquire())
        except LockHeldError:
            self._on_progress(f"another command on this machine reports study {self._study} to its loggers")
            return []
        syncs = []
        if "mlflow" in self._settings.machine.loggers:
            syncs.append(self._create_mlflow_sync())
        if loggers := load_loggers(self._settings):
            syncs.append(self._create_logger_sync(loggers))
        for sync in syncs:
            sync.start()
        return syncs

    def _create_mlflow_sync(self) -> SweepTrackingSync:
        settings = self._settings
        tracking = MlflowTracker.open(self._layout, settings)
        self._sweep_tracker = sweep_tracker = MlflowSweepTracker(tracking, _savings_metrics)

        def create_mlflow_callback(run_id: str, trial: Trial) -> MlflowRunCallback:
            paths = RunPaths(self._layout.runs / run_id)
            return tracking.create_callback(paths, self._settings, plots.draw_loss_curve, reconcile=False)

        def reconcile() -> None:
            is_running = partial(is_sweep_running, self._layout)
            for note in (*tracking.reconcile(self._layout.runs), *sweep_tracker.reconcile(is_running)):
                self._on_progress(note)

        return SweepTrackingSync(self._layout.runs, self._report, create_mlflow_callback, sweep_tracker, reconcile)

    def _create_logger_sync(self, loggers: Mapping[str, CreateLogger]) -> SweepTrackingSync:
        """Create the thread that logs trials to the loggers other than MLflow. They show no study, only its runs."""

        def create_group(run_id: str, trial: Trial) -> LoggerCallbackGroup:
            run, name_in_study = RunPaths(self._layout.runs / run_id), (self._study, trial.number)
            return LoggerCallbackGroup(
                [create_callback(name, create, run, self._settings, name_in_study) for name, create in loggers.items()]
            )

        return SweepTrackingSync(self._layout.runs, self._report, create_group, None, receiver=", ".join(loggers))

    def _report(self) -> SweepReport:
        return self._session.report(with_importances=False)

    def _finish_tracking(self, syncs: Sequence[SweepTrackingSync], status: Status) -> None:
        """Write the report and send it with the remaining data to the loggers."""
        if not syncs:
            return
        try:
            report = self._session.report()
        except (StorageError, LockHeldError):  # the storage has failed: MLflow receives the last report
            report = self._last
        written = {"": write_report(self._folder, report)}
        for sync in syncs:
            finish = partial(self._sweep_tracker.finish, report, written, status) if sync.has_tracker else None
            sync.close(self._settings.machine.tracking_timeout_s, finish)


def write_report(folder: Path, report: SweepReport) -> list[Path]:
    """Write page and record of a sweep, and return their paths."""
    page, record = folder / PAGE, folder / "report.json"
    files.make_directory(folder)
    report.save(record)
    sweep_page.write(report, page)
    return [page, record]


def is_sweep_running(layout: ProjectLayout, study: str) -> bool:
    """Return whether a command of this project runs the study."""
    return FileLock(layout.stage_lock(f"sweep-{study}"), study).is_held()


def _savings_metrics(report: SweepReport) -> dict[str, float]:
    """Compute the metrics of the whole sweep for MLflow."""
    savings = compute_savings(report)
    tokens, trained = float(savings.tokens), float(savings.trained_tokens)
    return {"saved/tokens": tokens, "saved/seconds": savings.seconds, "tokens": trained}


def _do_nothing() -> None:
    """Ignore a heartbeat."""

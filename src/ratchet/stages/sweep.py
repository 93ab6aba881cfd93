"""Many supervised runs chosen by a study → winning values. A command, no stage; imports no torch.

Workers are processes (tuning/worker.py) that share the study with any others, on this machine and elsewhere. Here
they are started and watched, their trials shown in MLflow and in the terminal, and what came of it is written down.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ratchet.config import params_file
from ratchet.config.schema import Machine, Settings
from ratchet.errors import DataError, InterruptedRunError, LockHeldError, RunFailedError, SettingsError, StorageError
from ratchet.reports import plots, sweep_page, sweep_plots
from ratchet.runs.directory import RunPaths
from ratchet.runs.signals import StopSignal
from ratchet.runs.status import RunProgress
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.locks import FileLock
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.evaluation import LOSS, MEASURED, HeldOutJob, HeldOutLaunch
from ratchet.storage.records.sweep import SweepReport, Trial
from ratchet.tracking.mlflow.client import MlflowTracker
from ratchet.tracking.mlflow.run_logger import MlflowRunCallback
from ratchet.tracking.mlflow.sweeps import MlflowSweepTracker
from ratchet.tuning import final_round, journal_storage, ray_cluster, samplers, validation_scores, worker_pool
from ratchet.tuning import report as adoption
from ratchet.tuning.search_space import SearchSpace
from ratchet.tuning.storage_retry import retry_storage
from ratchet.tuning.study import FinalRoundProgress, StudySession
from ratchet.tuning.tracking_payload import Status, count_states
from ratchet.tuning.tracking_sync import SweepTrackingSync, TrialProgressReader
from ratchet.tuning.trial_summary import compute_savings
from ratchet.tuning.worker_pool import LocalWorkerLauncher, WorkerKillInjector, WorkerLauncher, WorkerPool

LOOK_S = 0.5
CHAOS_GAP_S = (6.0, 25.0)
DATA_WAIT_S = 3600.0
PAGE = "page.html"
SHOWN = 5
"""Of a Pareto front, in the terminal."""


@dataclass(frozen=True)
class SweepOptions:
    """What the command line says."""

    workers: int = 1
    fork: bool = False
    chaos: int = 0
    """Workers to kill on purpose."""
    report: bool = False
    """Only write down what came of it until now."""
    adopt: bool = False
    adopted: int | None = None
    """Trial to adopt instead of the winner."""
    engine: str = "local"
    """Where workers run: `local`, or `ray`."""


class SweepDisplay(Protocol):
    """Shows a sweep to whoever started it."""

    def show(self, report: SweepReport, progress: Mapping[int, RunProgress], workers: int) -> None:
        """Show where it stands; called about twice a second."""

    def close(self, report: SweepReport) -> None:
        """Leave the last state on the screen."""


def sweep(
    layout: ProjectLayout,
    settings: Settings,
    options: SweepOptions,
    board: Callable[[], SweepDisplay],
    say: Callable[[str], None],
) -> str:
    """Run the command; returns what came of it, for people.

    Args:
        layout: the project.
        settings: of params.yaml.
        options: of the command line.
        board: makes what shows the sweep while it runs.
        say: told what happens beside it.

    Raises:
        SettingsError: a space that cannot be searched, or is not the one that the study was begun with.
        DataError: nothing to search on, or nothing to adopt.
        InterruptedRunError: asked to stop; checkpoints are sealed, and repeating the command goes on.
        RunFailedError: trials, or workers, fail again and again; the message is the diagnosis.
    """
    if options.workers < 1:
        raise SettingsError(f"--workers: {options.workers} is none; give 1 or more")
    if options.chaos < 0:
        raise SettingsError(f"--chaos: {options.chaos} is no number of workers to kill")
    SearchSpace.of(settings)  # a mistake in it is told before anything takes minutes
    is_work = not (options.adopt or options.report)
    if is_work:
        if settings.machine.mirror is not None:
            say("machine.mirror: trials are not copied there; the winner is, when `ratchet train` takes it as its run")
        if options.engine == "ray":
            require_cluster(settings.machine)
        run_outdated_stages(layout, say)
        require_objective_data(layout, settings)
    with StudySession.open(layout, settings, options.fork, make=is_work) as desk:
        if options.adopt:
            return adoption.adopt_trial(layout, settings, desk.report(), options.adopted)
        folder = layout.sweep(desk.register.study)
        if options.report:
            report = desk.report()
            write_report(folder, report)
            return f"{describe(report)}\n  page: {folder / PAGE}"
        _SweepSession(desk, options, say).run(board())  # the board says what came of it
    return f"  page: {folder / PAGE}\n  `ratchet sweep --adopt` writes the winner's values into params.yaml"


def repair_journal(layout: ProjectLayout) -> str:
    """Cut the journal of studies where it is damaged; see studies.journal. Returns what was done, for people.

    Raises LockHeldError when a sweep runs here.
    """
    for path in sorted(layout.stage_lock("sweep").parent.glob("sweep-*")):
        if (lock := FileLock(path, f"sweep {path.name.removeprefix('sweep-')}")).held_elsewhere():
            raise LockHeldError(f"{lock.what} runs here and writes to the journal; stop it, then repeat")
    return journal_storage.repair(layout.study_journal)


def run_outdated_stages(layout: ProjectLayout, say: Callable[[str], None]) -> None:
    """Run stages base and prepare if anything they depend on has changed: all trials learn from the same rows.

    A project without DVC is taken as it is. Raises DataError when a stage fails.
    """
    if not (layout.root / ".dvc").is_dir():
        return
    # DVC refuses to run twice at once; a worker that joins waits until the first has seen to it.
    say("bringing base and data up to date (`dvc repro prepare`)")
    with FileLock(layout.stage_lock("sweep"), "the preparation of a sweep").acquire(wait_s=DATA_WAIT_S):
        command = [sys.executable, "-m", "dvc", "repro", "-q", "prepare"]
        done = subprocess.run(command, cwd=layout.root, check=False)
    if done.returncode:
        raise DataError("the stages before the sweep failed (see above): `dvc repro prepare` must pass first")


def require_cluster(machine: Machine) -> None:
    """Raise SettingsError where workers cannot be placed on a cluster, before anything takes minutes."""
    if machine.studies is None:
        raise SettingsError(
            "--engine ray: workers on several machines share the study through a database; set machine.studies to one, "
            "such as postgresql://ratchet@db.example/studies (docs/scale.md)"
        )
    ray_cluster.connect(machine.ray.address)


def require_objective_data(layout: ProjectLayout, settings: Settings) -> None:
    """Raise SettingsError where an objective asks for what these data have not, before anything is trained."""
    asked = [aim.metric for aim in settings.sweep.objectives if aim.metric in MEASURED and aim.metric != LOSS]
    if not asked:
        return
    job = HeldOutJob(run_ids=(), metrics=tuple(map(validation_scores.parse_row_metric, asked)))
    launch = HeldOutLaunch(job=job, max_new_tokens=settings.evaluate.max_new_tokens, machine=settings.machine)
    launch.require_measurable(DatasetCard.load(layout.dataset_card))


class _SweepSession:
    """Workers, and what is told of them, from the start of the command to its end."""

    def __init__(self, desk: StudySession, options: SweepOptions, say: Callable[[str], None]) -> None:
        self._desk, self._options, self._say = desk, options, say
        self._layout, self._settings = desk.layout, desk.settings
        self._study = desk.register.study
        self._folder = self._layout.sweep(self._study)

    def run(self, board: SweepDisplay) -> None:
        """Start workers and stay until nothing is left to do. Raises as `sweep`."""
        for library, now in samplers.library_versions().items():
            if (then := self._desk.register.versions.get(library, now)) != now:
                self._say(f"the study was begun with {library} {then}, this is {now}: it may propose other values")
        if earlier := self._desk.forgive():
            self._say(f"it had been stopped: {earlier}; going on")
        team = self._team()
        status: Status = "FAILED"
        with ExitStack() as stack:
            stop = stack.enter_context(StopSignal().installed())
            clerk = self._clerk(stack)
            try:
                status = self._watched(team, board, stop)
            finally:
                team.stop(self._settings.machine.grace_s)
                if clerk is not None:
                    self._conclude(clerk, status)
        if status == "KILLED":
            over = sum(trial.is_over for trial in self._desk.register.trials())
            raise InterruptedRunError(
                f"sweep {self._study}: stopped on request, {over} trials are over; checkpoints are sealed, repeat it "
                "to go on"
            )
        if status == "FAILED":
            raise RunFailedError(
                f"sweep {self._study}: {self._desk.report(whole=False).stopped}\n"
                "  mend the cause and repeat the command: it goes on, and these failures are forgiven"
            )

    def _team(self) -> WorkerPool:
        from ratchet.data import token_files

        chosen, settings = self._options, self._settings
        is_ray = chosen.engine == "ray"
        machine = (
            ray_cluster.adapt_machine_to_nodes(settings.machine)
            if is_ray
            else worker_pool.divide_threads(settings.machine, chosen.workers)
        )
        written = self._folder / "params.yaml"  # workers read this one: the project's may change meanwhile
        files.make_directory(self._folder)
        final_round.write_objective(
            self._layout, self._study, token_files.open_split(self._layout.data, "validation")["id"]
        )
        text = params_file.dump(settings.model_copy(update={"machine": machine}))
        files.write_atomic(written, text)
        kills = WorkerKillInjector(chosen.chaos, settings.sweep.sampler.seed, CHAOS_GAP_S) if chosen.chaos else None
        root = self._layout.root
        engine: WorkerLauncher = (
            ray_cluster.RayWorkerLauncher(machine.ray, root, text, self._say)
            if is_ray
            else LocalWorkerLauncher([str(root), str(written)])
        )
        return WorkerPool(engine, chosen.workers, self._folder, kills, self._say)

    def _watched(self, team: WorkerPool, board: SweepDisplay, stop: StopSignal) -> Status:
        standings = TrialProgressReader(self._layout.runs)
        news = FinalRoundProgress(self._desk)
        self._last = self._desk.report(whole=False)
        try:
            while team.look() and not stop.asked:
                with suppress(StorageError, LockHeldError):  # workers wait for the study, and say so in the end
                    self._last = self._desk.report(whole=False)
                    for line in news.of(self._last):
                        self._say(line)
                board.show(self._last, standings.of(self._last), team.alive)
                stop.wait(LOOK_S, _do_nothing)
            wait_s = self._settings.machine.storage_wait_s
            self._last = retry_storage(lambda: self._desk.report(whole=False), wait_s, _do_nothing)
        finally:
            board.close(self._last)
        if team.killed:
            self._say(f"{team.killed} workers were killed on purpose")
        if stop.asked:
            return "KILLED"
        if not self._last.stopped and final_round.count_trials(self._last.trials) < self._last.wanted_trials:
            own = self._last.trials[self._desk.register.carried :]
            self._say(final_round.check_limits(self._settings.sweep, own) or "every point of the space has been tried")
        return "FAILED" if self._last.stopped else "FINISHED"

    def _clerk(self, stack: ExitStack) -> SweepTrackingSync | None:
        """Shows the sweep in MLflow, if no other command here does so already."""
        lock = FileLock(self._layout.stage_lock(f"sweep-{self._study}"), f"sweep {self._study}")
        try:
            stack.enter_context(lock.acquire())
        except LockHeldError:
            self._say(f"joining: another command here shows study {self._study} in MLflow")
            return None
        settings = self._settings
        tracking = MlflowTracker(self._layout, settings.promote.model_name, settings.machine.tracking)
        self._shown = MlflowSweepTracker(tracking, _savings_metrics)
        shown = self._shown

        def observer(run_id: str, trial: Trial) -> MlflowRunCallback:
            paths = RunPaths(self._layout.runs / run_id)
            return tracking.observer(paths, self._settings, plots.draw_loss_curve, reconcile=False)

        def tidy_up() -> None:
            for note in (*tracking.reconcile(self._layout.runs), *shown.reconcile(self._is_alive)):
                self._say(note)

        clerk = SweepTrackingSync(self._layout.runs, lambda: self._desk.report(whole=False), observer, shown, tidy_up)
        clerk.start()
        return clerk

    def _is_alive(self, study: str) -> bool:
        """Whether a command of this project works on a study, ours included."""
        return FileLock(self._layout.stage_lock(f"sweep-{study}"), study).held_elsewhere()

    def _conclude(self, clerk: SweepTrackingSync, status: Status) -> None:
        """Write down what came of it, and send the rest to MLflow."""
        try:
            report = self._desk.report()
        except (StorageError, LockHeldError):  # why the sweep ends; MLflow is told what was known before
            report = self._last
        made = write_report(self._folder, report)
        artifacts = {"": made[:2], "plots": made[2:]}
        clerk.close(self._settings.machine.tracking_grace_s, partial(self._shown.finish, report, artifacts, status))


def describe(report: SweepReport) -> str:
    """What came of a sweep, in a few lines."""
    states = count_states(report.trials)
    each = ", ".join(f"{count} {state}" for state, count in states.items())
    saved = compute_savings(report)
    lines = [f"sweep {report.study}: {states.total()} trials ({each})"]
    for number in report.best[:SHOWN]:
        trial = report.trials[number]
        figures = ", ".join(
            f"{one.metric} {value:.6g}" for one, value in zip(report.objectives, trial.objectives, strict=True)
        )
        chosen = ", ".join(f"{knob} {_format_value(value)}" for knob, value in trial.values.items())
        lines.append(f"  {'best' if len(report.best) == 1 else 'front'}: trial {number}: {figures} ({chosen})")
    if report.finals:
        lines.append(f"  winner: {report.finals.reason}")
    pruning = f"{saved.tokens:,} saved ({saved.pruned.tokens:,} by pruning)"
    lines.append(f"  learned from {saved.trained_tokens:,} answer tokens; {pruning}")
    return "\n".join(lines)


def _format_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write_report(folder: Path, report: SweepReport) -> list[Path]:
    """Write page, record and pictures of a sweep; returns where they are: page and record first."""
    page, record = folder / PAGE, folder / "report.json"
    files.make_directory(folder)
    report.save(record)
    sweep_page.write(report, sweep_plots.draw_all(report), page)
    return [page, record, *sweep_plots.write(report, folder / "plots")]


def _savings_metrics(report: SweepReport) -> dict[str, float]:
    """For MLflow, beside what it shows of the trials."""
    saved = compute_savings(report)
    return {"saved/tokens": float(saved.tokens), "saved/seconds": saved.seconds, "tokens": float(saved.trained_tokens)}


def _do_nothing() -> None:
    """Nobody looks."""

"""Stage train: supervise a run and link its sealed result. Only the worker process loads torch.

`ratchet train --profile` measures the first steps in a run directory of its own.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from ratchet.config.machine import Machine
from ratchet.config.settings import Settings
from ratchet.errors import InputError, InterruptedRunError, LockHeldError, SettingsError
from ratchet.reports import dvc_files, plots
from ratchet.reports.training_page import format_profile, write_train_page
from ratchet.runs import status
from ratchet.runs.callbacks import RunCallback
from ratchet.runs.directory import RunDirectory, RunPaths, RunSpec, storage_errors
from ratchet.runs.fork_server import ForkServer
from ratchet.runs.log import print_message
from ratchet.runs.replication_protocol import ReplicatorProtocol
from ratchet.runs.supervisor import supervise
from ratchet.stages.project import Project, require_extras
from ratchet.stages.team import require_run_quota
from ratchet.storage import files
from ratchet.storage.digests import code_version
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import Record
from ratchet.storage.records.training import (
    MIN_PROFILE_STEPS,
    PAGE,
    PROFILE,
    TRACE,
    AdapterAnalysis,
    MemoryForecast,
    TrainingProfile,
    TrainReport,
    require_steps,
)
from ratchet.training.rows_process import record_rows
from ratchet.training.run_spec import build_launch, build_run_spec, pin_champion

WORK = ".work"
"""Folder for the run directories of unfinished profiles."""


class TrainResult(Record):
    """Result of the stage."""

    report: TrainReport
    was_trained_before: bool
    """Whether the run was complete before, so that nothing was trained."""
    page: Path
    """HTML page of the run."""
    is_output: bool = True
    """Whether the result is the stage's output. It is not if the run has other settings than params.yaml."""


def train(
    project: Project,
    create_callbacks: Callable[[RunPaths], Sequence[RunCallback]],
    publish: Callable[[RunPaths, Path], None],
    pipeline: Project | None = None,
) -> TrainResult:
    """Run the stage: start or resume the run until its result is sealed, then link the result as the stage's output.

    Args:
        project: a project in which stages base and prepare have run.
        pipeline: the project with the settings of params.yaml, if `project` has others. If they define another run, the
            stage's output is left unchanged: DVC and later stages take it for the result of params.yaml.
        create_callbacks: creates the callbacks of the run.
        publish: receives the run and its HTML page when the run is complete.

    Raises:
        MissingLibraryError: this stage or a later one needs an optional library that is not installed.
        LockHeldError: another process trains this run, or runs this stage.
        DataError, SettingsError: see `pin_champion`.
        QuotaError: the run is new, and the tenant's quota has no room.
        InterruptedRunError, InputError, RunFailedError, ReplicaError: see `supervise`.
    """
    layout, settings = project.layout, pin_champion(project.layout, project.settings)
    require_extras(settings)
    launch, spec = build_launch(layout, settings), build_run_spec(layout, settings)
    require_run_quota(project, spec.run_id)
    is_output = pipeline is None or _is_run_of(layout, pipeline.settings, spec)
    with project.lock("train") if is_output else nullcontext():
        run = _open_run(layout, spec)
        try:
            was_trained_before = run.paths.is_finished()
            callbacks = create_callbacks(run.paths)
            replicator = _create_replicator(run, settings.machine)
            with ForkServer() as server:
                supervise(run, launch, callbacks, code_version(), replicator=replicator, server=server)
            record_rows(layout, run.paths, spec, settings.train)  # at the end, because the start must not wait for it
            if is_output:
                with files.sealed_directory(layout.train, "train") as scratch:
                    files.link_tree(run.paths.result, scratch)
                    _write_dvc_files(run.paths, scratch)
            if not was_trained_before or not run.paths.page.exists():
                write_page(run.paths)
            publish(run.paths, run.paths.page)
        finally:
            run.close()
    report = TrainReport.load(run.paths.result / layout.train_report.name)
    return TrainResult(report=report, was_trained_before=was_trained_before, page=run.paths.page, is_output=is_output)


def _is_run_of(layout: ProjectLayout, settings: Settings, spec: RunSpec) -> bool:
    """Return whether settings define this run."""
    try:
        return build_run_spec(layout, pin_champion(layout, settings, records=False)) == spec
    except InputError:  # they define no run yet, such as one that starts from the champion of a project without one
        return False


def _open_run(layout: ProjectLayout, spec: RunSpec) -> RunDirectory:
    """Open the directory of the run. An experiment of DVC waits while another experiment trains the same run.

    It then uses the result of the other one, or resumes its run.
    """
    is_waiting = False
    while True:
        try:
            return RunDirectory.open(layout.runs, spec)
        except LockHeldError:
            if not layout.is_temporary:
                raise
            if not is_waiting:
                print_message(f"run {spec.run_id}: another process trains it; this experiment waits for its result")
            is_waiting = True


def _write_dvc_files(paths: RunPaths, scratch: Path) -> None:
    """Write metrics and plots for DVC. They are not in the result of the run, so results of earlier versions get them
    too."""
    report = TrainReport.load(scratch / "train.json")
    figures = {
        "validation_loss": report.validation_loss[report.best_step], "training_loss": report.final_train_loss,
        "steps": report.steps,
    }  # fmt: skip
    dvc_files.write_metrics(scratch, figures)
    dvc_files.write_loss_curves(paths.journal, scratch)


def _create_replicator(run: RunDirectory, machine: Machine) -> ReplicatorProtocol | None:
    """Create the replicator of the run; None without a replica, so that no storage library is imported."""
    if machine.replica is None:
        return None
    if machine.active_rendezvous is not None:
        from ratchet.runs.replication.replicator import MultiNodeReplicator

        return MultiNodeReplicator(run, machine)
    from ratchet.runs.replication.replicator import RunReplicator

    return RunReplicator(run, machine)


def profile_training(project: Project, steps: int) -> str:
    """Measure the first steps of the run in a separate run directory. Returns the page as text.

    The run, MLflow and the stage's output do not change. An earlier profile of the run is replaced.

    Raises:
        SettingsError: `steps` or the planned training is too short.
        DataError, DamagedFileError: the data were changed after they were prepared.
        LockHeldError: another process profiles or trains in this project.
        InterruptedRunError, InputError, RunFailedError: see `supervise`.
    """
    from ratchet.data import token_files  # loads pyarrow, which otherwise only the worker needs
    from ratchet.data.batches import BatchPlan

    layout, settings = project.layout, project.settings
    if steps < MIN_PROFILE_STEPS:
        raise SettingsError(
            f"--profile {steps}: it takes {MIN_PROFILE_STEPS} optimizer steps at least: one to warm up, two for a "
            "median, one to trace"
        )
    with project.lock("train"):
        settings = pin_champion(layout, settings, records=False)
        launch = build_launch(layout, settings).model_copy(update={"profile_steps": steps})
        spec = build_run_spec(layout, settings)
        files.verify_sealed(layout.data, "data")
        # A training that is too short is refused before its worker loads the model for minutes.
        lengths = token_files.read_lengths(layout.data, "train", settings.train.objective)
        require_steps(BatchPlan(lengths, settings.train).steps)
        if settings.machine.replica is not None:
            print_message("a profile is not copied to machine.replica")
        work, target = RunPaths(layout.profiles / WORK / spec.run_id), layout.profiles / spec.run_id
        _remove_profile(work)
        run = RunDirectory.open(work.root.parent, spec)
        try:
            supervise(run, launch, [], code_version())
            text = format_profile(TrainingProfile.load(work.result / PROFILE))
            with storage_errors(target), files.sealed_directory(target, "profile") as scratch:
                for name in (PROFILE, TRACE):
                    files.link_or_copy(work.result / name, scratch / name)
                files.write_atomic(scratch / PAGE, text)
            _remove_profile(work, run)
        except InterruptedRunError:
            text = f"profile of run {spec.run_id}: interrupted; nothing of it is kept, the run is as it was"
            raise InterruptedRunError(text) from None
        finally:
            run.close()
    return f"{text}\n  {target / PAGE}\n  {target / TRACE}: open it in https://ui.perfetto.dev or chrome://tracing"


def _remove_profile(work: RunPaths, run: RunDirectory | None = None) -> None:
    """Remove the run directory of an unfinished profile. Raises LockHeldError while another process uses it."""
    if work.root.exists():
        with storage_errors(work.root), work.lock().acquire() if run is None else nullcontext():
            files.remove_sealed(work.root)


def write_page(paths: RunPaths) -> None:
    """Write the page of a finished run. It has data of this machine, so it is not an output of a stage."""
    report = TrainReport.load(paths.result / "train.json")
    analysis = AdapterAnalysis.load(paths.result / "analysis.json")
    forecast = MemoryForecast.load(paths.forecast) if paths.forecast.exists() else None
    measured = status.read_progress(paths).memory.peaks
    train = RunSpec.load(paths.spec).train
    loss = plots.build_loss_figure(paths.journal, train)
    page = write_train_page(report, analysis, forecast, measured, loss, train.loss_description)
    files.write_atomic(paths.page, page)

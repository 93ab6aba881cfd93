"""Settings → a supervised run → sealed adapter and report. Imports no torch: the worker does."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path

from ratchet.config.schema import Machine, Settings
from ratchet.errors import InterruptedRunError, SettingsError
from ratchet.reports import plots
from ratchet.reports.training_page import format_profile, write_train_page
from ratchet.runs import status
from ratchet.runs.callbacks import RunCallback
from ratchet.runs.directory import Run, RunPaths, storage_errors
from ratchet.runs.log import print_message
from ratchet.runs.replication_protocol import ReplicatorProtocol
from ratchet.runs.supervisor import supervise
from ratchet.storage import files
from ratchet.storage.code_version import code_version
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import TrainReport
from ratchet.storage.records.training import (
    LEAST_STEPS,
    PAGE,
    PROFILE,
    TRACE,
    AdapterAnalysis,
    MemoryForecast,
    TrainingProfile,
    require_steps,
)
from ratchet.training.run_spec import build_launch, build_run_spec

WORK = ".work"
"""Below the profiles: run directories in which one is being made, or where making one failed."""


def train(
    layout: ProjectLayout,
    settings: Settings,
    observers: Callable[[RunPaths], Sequence[RunCallback]],
    publish: Callable[[RunPaths, Path], None],
) -> str:
    """Run the stage: start or go on with the run, until its result is sealed, then publish it as the stage's out.

    Args:
        observers: makes the observers of the run, given where it is.
        publish: told of the page that the run has got, now or before.

    Raises:
        LockHeldError: another process trains this run.
        InterruptedRunError, InputError, RunFailedError, MirrorError: see `supervise`.
    """
    launch = build_launch(layout, settings)
    _require_mirror(settings.machine)
    run = Run.open(layout.runs, build_run_spec(layout, settings))
    try:
        trained_before = run.paths.is_finished()
        supervise(run, launch, observers(run.paths), code_version(), custody=_create_replicator(run, settings.machine))
        with files.sealed_directory(layout.train, "train") as scratch:
            files.link_tree(run.paths.result, scratch)
        if not trained_before or not run.paths.page.exists():
            write_page(run.paths)
        publish(run.paths, run.paths.page)
    finally:
        run.close()
    return f"{describe(TrainReport.load(layout.train_report), trained_before)}\n  page: {run.paths.page}"


def _require_mirror(machine: Machine) -> None:
    """Refuse a mirror that cannot be one before there is a run. Raises SettingsError."""
    if machine.mirror is not None:
        from ratchet.runs.replication.store import ReplicaStore, TransferLimits

        ReplicaStore(machine.mirror, TransferLimits(), lambda: False)


def _create_replicator(run: Run, machine: Machine) -> ReplicatorProtocol | None:
    """Who keeps the run's mirror, if it is to have one: with the library of the storage, which few need."""
    if machine.mirror is None:
        return None
    if machine.meeting_place is not None:
        from ratchet.runs.replication.multi_node_replicator import MultiNodeReplicator

        return MultiNodeReplicator(run, machine)
    from ratchet.runs.replication.replicator import RunReplicator

    return RunReplicator(run, machine)


def profile_training(layout: ProjectLayout, settings: Settings, steps: int) -> str:
    """Measure the first steps of the run that is meant, in a directory of its own; returns the page.

    Neither the run nor MLflow nor the stage's out is touched. An earlier profile of the run is replaced.

    Raises:
        SettingsError: too few steps, asked for or planned.
        DataError, DamagedFileError: the data are not as they were prepared.
        LockHeldError: somebody else profiles this run.
        InterruptedRunError, InputError, RunFailedError: see `supervise`.
    """
    if steps < LEAST_STEPS:
        raise SettingsError(
            f"--profile {steps}: it takes {LEAST_STEPS} optimizer steps at least: one to warm up, two for a median, "
            "one to trace"
        )
    launch = build_launch(layout, settings).model_copy(update={"profile_steps": steps})
    spec = build_run_spec(layout, settings)
    _require_steps(layout, settings)
    if settings.machine.mirror is not None:
        print_message("a profile is not copied to machine.mirror")
    work, target = RunPaths(layout.profiles / WORK / spec.run_id), layout.profiles / spec.run_id
    _remove_profile(work)
    run = Run.open(work.root.parent, spec)
    try:
        try:
            supervise(run, launch, [], code_version())
        except InterruptedRunError:
            raise InterruptedRunError(
                f"profile of run {spec.run_id}: interrupted; nothing of it is kept, the run is as it was"
            ) from None
        text = format_profile(TrainingProfile.load(work.result / PROFILE))
        with storage_errors(target), files.sealed_directory(target, "profile") as scratch:
            for name in (PROFILE, TRACE):
                files.link_or_copy(work.result / name, scratch / name)
            files.write_atomic(scratch / PAGE, text)
        _remove_profile(work, run)
    finally:
        run.close()
    return f"{text}\n  {target / PAGE}\n  {target / TRACE}: open it in https://ui.perfetto.dev or chrome://tracing"


def _require_steps(layout: ProjectLayout, settings: Settings) -> None:
    """Refuse a training that is too short before its worker loads the model, which can take minutes."""
    from ratchet.data import token_files  # pyarrow, which a training leaves to its worker
    from ratchet.data.batches import BatchPlan

    files.verify_sealed(layout.data, "data")
    require_steps(BatchPlan(token_files.read_lengths(layout.data, "train"), settings.train).steps)


def _remove_profile(work: RunPaths, run: Run | None = None) -> None:
    """Remove the directory that a profile is made in. Raises LockHeldError while somebody else makes one there."""
    if work.root.exists():
        with storage_errors(work.root), work.lock().acquire() if run is None else nullcontext():
            files.remove_sealed(work.root)


def write_page(paths: RunPaths) -> None:
    """Draw what a finished run did: loss, modules, memory. It tells of this machine too, so it is in no stage's out."""
    report, analysis = (
        TrainReport.load(paths.result / "train.json"),
        AdapterAnalysis.load(paths.result / "analysis.json"),
    )
    loss = BytesIO()
    plots.draw_loss_curve(paths.journal, loss)
    pictures = {"loss": loss.getvalue()}
    pictures |= {"gradients": plots.draw_gradient_map(analysis), "updates": plots.draw_updates(analysis)}
    forecast = MemoryForecast.load(paths.forecast) if paths.forecast.exists() else None
    measured = status.read_progress(paths).memory.peaks
    files.write_atomic(paths.page, write_train_page(report, analysis, forecast, measured, pictures))


def describe(report: TrainReport, trained_before: bool) -> str:
    """The report in a few lines, for the terminal."""
    head = f"run {report.run_id}: " + ("trained before, taken as it is" if trained_before else f"{report.steps} steps")
    early = f" (stopped early, {report.planned_steps} were planned)" if report.steps < report.planned_steps else ""
    share = report.trainable_parameters / report.total_parameters
    return (
        f"{head}{early}\n  validation loss {report.validation_loss[report.best_step]:.4f} at step {report.best_step}; "
        f"adapter of step {report.kept_step}, digest {report.adapter_digest[:12]}\n"
        f"  {report.trainable_parameters:,} of {report.total_parameters:,} parameters trained ({share:.1%}), "
        f"{report.trained_tokens:,} answer tokens learned from"
    )

"""Settings → a supervised run → sealed adapter and report. Imports no torch: the worker does."""

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path

from ratchet import files
from ratchet.config import Settings
from ratchet.layout import Layout
from ratchet.records import TrainReport
from ratchet.records_model import Analysis, MemoryForecast
from ratchet.run import status
from ratchet.run.directory import Run, RunPaths
from ratchet.run.observers import Observer
from ratchet.run.supervisor import supervise
from ratchet.services import plots
from ratchet.services.train_page import train_page
from ratchet.training.commission import launch_of, spec_of
from ratchet.version import code_version


def train(
    layout: Layout,
    settings: Settings,
    observers: Callable[[RunPaths], Sequence[Observer]],
    publish: Callable[[RunPaths, Path], None],
) -> str:
    """Run the stage: start or go on with the run, until its result is sealed, then publish it as the stage's out.

    Args:
        observers: makes the observers of the run, given where it is.
        publish: told of the page that a run which was trained now has got.

    Raises:
        BusyError: another process trains this run.
        InterruptedRunError, InputError, RunFailedError: see `supervise`.
    """
    launch = launch_of(layout, settings)
    run = Run.open(layout.runs, spec_of(layout, settings))
    try:
        trained_before = run.paths.is_finished()
        supervise(run, launch, observers(run.paths), code_version())
        with files.sealed_directory(layout.train, "train") as scratch:
            files.link_tree(run.paths.result, scratch)
        if not trained_before or not run.paths.page.exists():
            write_page(run.paths)
            publish(run.paths, run.paths.page)
    finally:
        run.close()
    return f"{describe(TrainReport.load(layout.train_report), trained_before)}\n  page: {run.paths.page}"


def write_page(paths: RunPaths) -> None:
    """Draw what a finished run did: loss, modules, memory. It tells of this machine too, so it is in no stage's out."""
    report, analysis = TrainReport.load(paths.result / "train.json"), Analysis.load(paths.result / "analysis.json")
    loss = BytesIO()
    plots.loss_curve(paths.journal, loss)
    pictures = {"loss": loss.getvalue()}
    pictures |= {"gradients": plots.gradient_map(analysis), "updates": plots.updates(analysis)}
    forecast = MemoryForecast.load(paths.forecast) if paths.forecast.exists() else None
    measured = status.of(paths).memory.peaks
    files.write_atomic(paths.page, train_page(report, analysis, forecast, measured, pictures))


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

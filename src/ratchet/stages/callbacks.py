"""Callbacks of a command: terminal, loggers, Prometheus, webhook. No callback can slow or stop a training."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.config import units
from ratchet.config.extensions import load_extension
from ratchet.config.settings import Settings
from ratchet.errors import DamagedFileError, RatchetError, SettingsError
from ratchet.registry import ledger
from ratchet.reports import plots
from ratchet.runs import tracking_payload
from ratchet.runs.callbacks import RunCallback
from ratchet.runs.directory import RunPaths
from ratchet.runs.log import print_message
from ratchet.runs.run import Run
from ratchet.stages.project import Project
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.gate import Promotion, Verdict
from ratchet.tracking import telemetry
from ratchet.tracking.loggers import create_callback, load_loggers
from ratchet.tracking.mlflow.client import MlflowTracker
from ratchet.tracking.mlflow.run_logger import MlflowRunCallback
from ratchet.tracking.mlflow.traces import EvaluatedAnswer
from ratchet.tracking.webhook import Webhook, WebhookCallback

if TYPE_CHECKING:
    from ratchet.tracking.prometheus import PrometheusExporter


def log_stage(
    layout: ProjectLayout,
    settings: Settings,
    run_id: str,
    *,
    figures: Mapping[str, float],
    artifacts: Mapping[str, Sequence[Path]],
    tags: Mapping[str, str],
) -> None:
    """Add a later stage's figures, files and tags to the run in MLflow, if MLflow is among `machine.loggers`."""
    telemetry.annotate(run_id=run_id)
    if "mlflow" not in settings.machine.loggers:
        return
    tracking = MlflowTracker.open(layout, settings)
    run = tracking.create_callback(RunPaths(layout.runs / run_id), settings, plots.draw_loss_curve)
    tracking.report(run, figures, artifacts, tags, settings.machine.tracking_timeout_s)


def log_answers(layout: ProjectLayout, settings: Settings, run_id: str, answers: Sequence[EvaluatedAnswer]) -> None:
    """Add generated answers to the run in MLflow, as traces, if MLflow is among `machine.loggers`."""
    if "mlflow" not in settings.machine.loggers:
        return
    MlflowTracker.open(layout, settings).report_answers(run_id, answers, settings.machine.tracking_timeout_s)


class TrainingCallbacks:
    """Creates the callbacks of a training."""

    def __init__(
        self,
        project: Project,
        create_console: Callable[[RunPaths], RunCallback] | None,
        exporter: "PrometheusExporter | None",
    ) -> None:
        self._project, self._create_console, self._exporter = project, create_console, exporter
        self._webhook = Webhook.from_environment(project.settings.machine, project.layout.name)
        self._extensions = {
            name: load_extension("ratchet.callbacks", name, "machine.callbacks")
            for name in project.settings.machine.callbacks
        }
        self._loggers = load_loggers(project.settings)
        self._mlflow_callbacks: dict[str, MlflowRunCallback] = {}
        self._tracking = MlflowTracker.open(project.layout, project.settings)

    def for_run(self, run: RunPaths) -> Sequence[RunCallback]:
        """Create the callbacks of a run."""
        settings, machine = self._project.settings, self._project.settings.machine
        callbacks = [create_callback(name, create, run, settings) for name, create in self._loggers.items()]
        if "mlflow" in machine.loggers:
            callbacks.append(tracking_payload.wrap_callback(self._mlflow_callback(run), run.journal, machine))
        if self._create_console is not None:
            callbacks.insert(0, self._create_console(run))
        if self._exporter is not None:
            callbacks.append(self._exporter.create_callback(run.root.name, self._project.layout.name))
        if self._webhook is not None:
            callbacks.append(WebhookCallback(self._webhook, run.root.name))
        if (reporter := telemetry.create_callback(run.root.name)) is not None:
            callbacks.append(reporter)
        for name, create in self._extensions.items():
            try:
                callback = create(Run(run))
                callback.name, callback.on_events, callback.on_end  # noqa: B018 (an attribute may be missing)
            except Exception as error:
                raise SettingsError(f"machine.callbacks: {name} failed: {type(error).__name__}: {error}") from error
            callbacks.append(callback)
        return callbacks

    def publish(self, run: RunPaths, page: Path) -> None:
        """Log the page of a finished run to MLflow, if it is a logger, and its curves as an interactive page.

        The timeout is `machine.tracking_timeout_s`, as at the end of a training. The next `ratchet train` sends the
        data that did not arrive in time.
        """
        if "mlflow" not in self._project.settings.machine.loggers:
            return
        callback, grace_s = self._mlflow_callback(run), self._project.settings.machine.tracking_timeout_s
        if not tracking_payload.should_report(run.journal, self._project.settings.machine):
            return
        if callback.is_busy:  # the timeout has passed already
            print_message(f"the page is not in MLflow after {grace_s:g} s; `ratchet train` sends it")
        else:
            self._tracking.publish(callback, page, partial(_draw_curves, self._project.layout, run.root.name), grace_s)

    def _mlflow_callback(self, run: RunPaths) -> MlflowRunCallback:
        name = run.root.name
        if name not in self._mlflow_callbacks:
            self._mlflow_callbacks[name] = self._tracking.create_callback(
                run, self._project.settings, plots.draw_loss_curve
            )
        return self._mlflow_callbacks[name]


def _draw_curves(layout: ProjectLayout, run_id: str, folder: Path) -> Sequence[Path]:
    """Write the page of `ratchet report` without the parts that later stages add. Errors are reported, not raised."""
    from ratchet.reports import comparison, run_page
    from ratchet.reports.comparison import ComparisonIndex, EvaluationIndex
    from ratchet.reports.run_page import RunProvenance

    target = folder / "curves.html"
    try:
        index = ComparisonIndex(layout)
        evaluations = EvaluationIndex(layout, index)
        side = comparison.read_side(layout, index.subject(run_id), index, evaluations, comparison.MOST_POINTS)
        run_page.write(side, None, RunProvenance({}, None, None, None), target)
    except (RatchetError, OSError) as error:
        print_message(f"run {run_id}: its curves are not logged to MLflow: {error}")
        return []
    return [target]


@contextmanager
def open_callbacks(
    project: Project, create_console: Callable[[RunPaths], RunCallback] | None = None
) -> Iterator[TrainingCallbacks]:
    """Open the callbacks of a training for the duration of the block.

    Args:
        project: the project.
        create_console: creates the callback that shows a run in the terminal; None: the terminal shows nothing.

    Raises:
        SettingsError: the port for Prometheus is in use, or the webhook's address is not valid.
        StorageError: the file for node_exporter cannot be written.
    """
    machine = project.settings.machine
    if machine.metrics_port is None and machine.metrics_file is None:
        yield TrainingCallbacks(project, create_console, None)
        return
    from ratchet.tracking.prometheus import PrometheusExporter  # loads prometheus_client, which few projects use

    exporter = PrometheusExporter(machine)
    try:
        yield TrainingCallbacks(project, create_console, exporter)
    finally:
        exporter.close()


@contextmanager
def notify_verdict(project: Project) -> Iterator[None]:
    """Report the verdict to the webhook and to Prometheus' file after the block.

    Raises SettingsError for an invalid address before the block runs.
    """
    machine = project.settings.machine
    webhook = Webhook.from_environment(machine, project.layout.name)
    yield
    verdict = Verdict.load(project.layout.verdict)
    if machine.metrics_file is not None:
        from ratchet.tracking.prometheus import write_verdict

        write_verdict(Path(machine.metrics_file), verdict)
    if webhook is not None:
        text = f"gate: {verdict.decision} for model {verdict.model_digest[:12]} of run {verdict.run_id}"
        webhook.send("gated", text, run=verdict.run_id, decision=verdict.decision, model_digest=verdict.model_digest)


@contextmanager
def notify_promotions(project: Project) -> Iterator[None]:
    """Report every change of the champion to the webhook after the block, also changes that a killed command began.

    Raises SettingsError for an invalid address before the block runs.
    """
    webhook = Webhook.from_environment(project.settings.machine, project.layout.name)
    count_before = len(_read_promotions(project.layout))
    try:
        yield
    finally:
        for entry in _read_promotions(project.layout)[count_before:]:
            telemetry.annotate(run_id=entry.run_id)
            if webhook is None:
                continue
            how = "again, by rollback" if entry.action == "rollback" else "now"
            forced = ""
            if entry.forced:
                missing = entry.approvals.missing if entry.approvals else 0
                forced = f", without {units.format_count(missing, 'approval')}" if missing else ", against the verdict"
            name = project.settings.promote.model_name
            text = f"version {entry.version} of {name} is champion {how}{forced} ({entry.actor})"
            webhook.send(
                "promoted", text, action=entry.action, version=entry.version, previous_version=entry.previous_version,
                actor=entry.actor, model_digest=entry.model_digest, reason=entry.reason,
            )  # fmt: skip


def _read_promotions(layout: ProjectLayout) -> Sequence[Promotion]:
    """Read the ledger. Returns no entries if the ledger is damaged, because the command itself reports the damage."""
    try:
        return ledger.read_entries(layout.promotions)
    except DamagedFileError:
        return ()

"""Who is told of a training: terminal, MLflow, Prometheus, a webhook. None of them can slow it or stop it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.config.schema import Settings
from ratchet.console.callback import ConsoleCallback
from ratchet.errors import RatchetError
from ratchet.reports import plots
from ratchet.runs import tracking_payload
from ratchet.runs.callbacks import RunCallback
from ratchet.runs.directory import RunPaths
from ratchet.runs.log import print_message
from ratchet.storage.layout import ProjectLayout
from ratchet.tracking.mlflow.client import MlflowTracker
from ratchet.tracking.mlflow.run_logger import MlflowRunCallback
from ratchet.tracking.webhook import Webhook, WebhookCallback

if TYPE_CHECKING:
    from ratchet.tracking.prometheus import PrometheusExporter
from ratchet.errors import DamagedFileError
from ratchet.registry import ledger
from ratchet.storage.records.gate import Promotion, Verdict


class TrainingCallbacks:
    """Those who are told of a training."""

    def __init__(self, layout: ProjectLayout, settings: Settings, exposition: "PrometheusExporter | None") -> None:
        self._layout, self._settings, self._exposition = layout, settings, exposition
        self._project = layout.root.name
        self._webhook = Webhook.of_environment(settings.machine, self._project)
        self._shown: dict[str, MlflowRunCallback] = {}
        self._tracking = MlflowTracker(layout, settings.promote.model_name, settings.machine.tracking)

    def observers(self, run: RunPaths) -> Sequence[RunCallback]:
        """The observers of this run."""
        found: list[RunCallback] = [
            ConsoleCallback(run),
            tracking_payload.wrap_callback(self._tracked(run), run.journal, self._settings.machine),
        ]
        if self._exposition is not None:
            found.append(self._exposition.observer(run.root.name, self._project))
        if self._webhook is not None:
            found.append(WebhookCallback(self._webhook, run.root.name))
        return found

    def publish(self, run: RunPaths, page: Path) -> None:
        """Show the page of a run that has finished, and its curves as a page that answers to the mouse.

        MLflow is waited for no longer than at the end of a training; what it has not got is sent by the next one.
        """
        tracked, grace_s = self._tracked(run), self._settings.machine.tracking_grace_s
        if not tracking_payload.should_report(run.journal, self._settings.machine):
            return
        if tracked.is_busy:  # it has been waited for
            print_message(f"the page is not in MLflow after {grace_s:g} s; `ratchet train` sends it")
        else:
            self._tracking.publish(tracked, page, partial(_draw_curves, self._layout, run.root.name), grace_s)

    def _tracked(self, run: RunPaths) -> MlflowRunCallback:
        if run.root.name not in self._shown:
            self._shown[run.root.name] = self._tracking.observer(run, self._settings, plots.draw_loss_curve)
        return self._shown[run.root.name]


def _draw_curves(layout: ProjectLayout, run_id: str, folder: Path) -> Sequence[Path]:
    """The page of `ratchet report`, as far as a training that has just ended has one. What it lacks is a notice."""
    from ratchet.reports import comparison, run_page
    from ratchet.reports.comparison import ComparisonIndex, EvaluationIndex
    from ratchet.reports.run_page import RunProvenance

    target = folder / "curves.html"
    try:
        names = ComparisonIndex(layout)
        side = comparison.read_side(
            layout, names.subject(run_id), names, EvaluationIndex(layout, names), comparison.MOST_POINTS
        )
        run_page.write(side, None, RunProvenance({}, None, None, None), target)
    except (RatchetError, OSError) as error:
        print_message(f"run {run_id}: its curves are not logged to MLflow: {error}")
        return []
    return [target]


@contextmanager
def open_callbacks(layout: ProjectLayout, settings: Settings) -> Iterator[TrainingCallbacks]:
    """Those who are told of a training, for as long as it lasts.

    Raises:
        SettingsError: the port for Prometheus is taken, or the webhook's address is none.
        StorageError: the file for node_exporter cannot be written.
    """
    machine = settings.machine
    if machine.metrics_port is None and machine.metrics_file is None:
        yield TrainingCallbacks(layout, settings, None)
        return
    from ratchet.tracking.prometheus import PrometheusExporter  # and a library that few need

    exposition = PrometheusExporter(machine)
    try:
        yield TrainingCallbacks(layout, settings, exposition)
    finally:
        exposition.close()


# Who is told of what the gate has decided, and of changes of the champion: a webhook, and Prometheus of the former.


@contextmanager
def notify_verdict(layout: ProjectLayout, settings: Settings) -> Iterator[None]:
    """While the gate is at work: tell what it has decided, once it has. Raises SettingsError for a bad address."""
    webhook = Webhook.of_environment(settings.machine, layout.root.name)
    yield
    verdict = Verdict.load(layout.verdict)
    if settings.machine.metrics_file is not None:
        from ratchet.tracking.prometheus import write_verdict

        write_verdict(Path(settings.machine.metrics_file), verdict)
    if webhook is not None:
        text = f"gate: {verdict.decision} for model {verdict.model_digest[:12]} of run {verdict.run_id}"
        webhook.tell("gated", text, run=verdict.run_id, decision=verdict.decision, model_digest=verdict.model_digest)


@contextmanager
def notify_promotions(layout: ProjectLayout, settings: Settings) -> Iterator[None]:
    """While promotion, rollback or what finishes them is at work: tell of every change of the champion.

    Also of one that a command had begun which died. Raises SettingsError for a bad address, before anything is done.
    """
    webhook = Webhook.of_environment(settings.machine, layout.root.name)
    if webhook is None:
        yield
        return
    before = len(_read_promotions(layout))
    try:
        yield
    finally:
        for entry in _read_promotions(layout)[before:]:
            again = "again, by rollback" if entry.action == "rollback" else "now"
            forced = ", against the verdict" if entry.forced else ""
            text = f"version {entry.version} of {settings.promote.model_name} is champion {again}{forced} ({entry.by})"
            webhook.tell(
                "promoted", text, action=entry.action, version=entry.version, before=entry.before, by=entry.by,
                model_digest=entry.model_digest, reason=entry.reason,
            )  # fmt: skip


def _read_promotions(layout: ProjectLayout) -> Sequence[Promotion]:
    """The ledger; nothing of one that is damaged, which is for others to say."""
    try:
        return ledger.read_entries(layout.promotions)
    except DamagedFileError:
        return ()

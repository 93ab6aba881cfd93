"""Who is told of a training: terminal, MLflow, Prometheus, a webhook. None of them can slow it or stop it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.config.schema import Settings
from ratchet.console.callback import Console
from ratchet.errors import RatchetError
from ratchet.reports import plots
from ratchet.runs import tracking_payload
from ratchet.runs.callbacks import Observer
from ratchet.runs.directory import RunPaths
from ratchet.runs.log import say
from ratchet.storage.layout import Layout
from ratchet.tracking.mlflow.client import Tracking
from ratchet.tracking.mlflow.run_logger import RunObserver
from ratchet.tracking.webhook import RunNews, Webhook

if TYPE_CHECKING:
    from ratchet.tracking.prometheus import Exposition
from ratchet.errors import DamagedError
from ratchet.registry import ledger
from ratchet.storage.records.gate import Promotion, Verdict


class Observation:
    """Those who are told of a training."""

    def __init__(self, layout: Layout, settings: Settings, exposition: "Exposition | None") -> None:
        self._layout, self._settings, self._exposition = layout, settings, exposition
        self._project = layout.root.name
        self._webhook = Webhook.of_environment(settings.machine, self._project)
        self._shown: dict[str, RunObserver] = {}
        self._tracking = Tracking(layout, settings.promote.model_name, settings.machine.tracking)

    def observers(self, run: RunPaths) -> Sequence[Observer]:
        """The observers of this run."""
        found: list[Observer] = [
            Console(run),
            tracking_payload.observed(self._tracked(run), run.journal, self._settings.machine),
        ]
        if self._exposition is not None:
            found.append(self._exposition.observer(run.root.name, self._project))
        if self._webhook is not None:
            found.append(RunNews(self._webhook, run.root.name))
        return found

    def publish(self, run: RunPaths, page: Path) -> None:
        """Show the page of a run that has finished, and its curves as a page that answers to the mouse.

        MLflow is waited for no longer than at the end of a training; what it has not got is sent by the next one.
        """
        tracked, grace_s = self._tracked(run), self._settings.machine.tracking_grace_s
        if not tracking_payload.tells(run.journal, self._settings.machine):
            return
        if tracked.is_busy:  # it has been waited for
            say(f"the page is not in MLflow after {grace_s:g} s; `ratchet train` sends it")
        else:
            self._tracking.publish(tracked, page, partial(_curves, self._layout, run.root.name), grace_s)

    def _tracked(self, run: RunPaths) -> RunObserver:
        if run.root.name not in self._shown:
            self._shown[run.root.name] = self._tracking.observer(run, self._settings, plots.loss_curve)
        return self._shown[run.root.name]


def _curves(layout: Layout, run_id: str, folder: Path) -> Sequence[Path]:
    """The page of `ratchet report`, as far as a training that has just ended has one. What it lacks is a notice."""
    from ratchet.reports import comparison, run_page
    from ratchet.reports.comparison import Evaluations, Names
    from ratchet.reports.run_page import Origin

    target = folder / "curves.html"
    try:
        names = Names(layout)
        side = comparison.side(layout, names.subject(run_id), names, Evaluations(layout, names), comparison.MOST_POINTS)
        run_page.write(side, None, Origin({}, None, None, None), target)
    except (RatchetError, OSError) as error:
        say(f"run {run_id}: its curves are not logged to MLflow: {error}")
        return []
    return [target]


@contextmanager
def observation(layout: Layout, settings: Settings) -> Iterator[Observation]:
    """Those who are told of a training, for as long as it lasts.

    Raises:
        SettingsError: the port for Prometheus is taken, or the webhook's address is none.
        StorageError: the file for node_exporter cannot be written.
    """
    machine = settings.machine
    if machine.metrics_port is None and machine.metrics_file is None:
        yield Observation(layout, settings, None)
        return
    from ratchet.tracking.prometheus import Exposition  # and a library that few need

    exposition = Exposition(machine)
    try:
        yield Observation(layout, settings, exposition)
    finally:
        exposition.close()


# Who is told of what the gate has decided, and of changes of the champion: a webhook, and Prometheus of the former.


@contextmanager
def of_verdict(layout: Layout, settings: Settings) -> Iterator[None]:
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
def of_promotions(layout: Layout, settings: Settings) -> Iterator[None]:
    """While promotion, rollback or what finishes them is at work: tell of every change of the champion.

    Also of one that a command had begun which died. Raises SettingsError for a bad address, before anything is done.
    """
    webhook = Webhook.of_environment(settings.machine, layout.root.name)
    if webhook is None:
        yield
        return
    before = len(_promotions(layout))
    try:
        yield
    finally:
        for entry in _promotions(layout)[before:]:
            again = "again, by rollback" if entry.action == "rollback" else "now"
            forced = ", against the verdict" if entry.forced else ""
            text = f"version {entry.version} of {settings.promote.model_name} is champion {again}{forced} ({entry.by})"
            webhook.tell(
                "promoted", text, action=entry.action, version=entry.version, before=entry.before, by=entry.by,
                model_digest=entry.model_digest, reason=entry.reason,
            )  # fmt: skip


def _promotions(layout: Layout) -> Sequence[Promotion]:
    """The ledger; nothing of one that is damaged, which is for others to say."""
    try:
        return ledger.read(layout.promotions)
    except DamagedError:
        return ()

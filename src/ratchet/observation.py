"""Who is told of a training: terminal, MLflow, Prometheus, a webhook. None of them can slow it or stop it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.config import Settings
from ratchet.errors import RatchetError
from ratchet.layout import Layout
from ratchet.run import lead
from ratchet.run.directory import RunPaths
from ratchet.run.log import say
from ratchet.run.observers import Observer
from ratchet.services import plots
from ratchet.services.console import Console
from ratchet.services.tracking import Tracking
from ratchet.services.webhook import RunNews, Webhook
from ratchet.tracked.run import RunObserver

if TYPE_CHECKING:
    from ratchet.services.prometheus import Exposition


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
        found: list[Observer] = [Console(run), lead.observed(self._tracked(run), run.journal, self._settings.machine)]
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
        if not lead.tells(run.journal, self._settings.machine):
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
    from ratchet.history import comparison  # numpy and Arrow, which a training that is begun need not wait for
    from ratchet.history.evaluations import Evaluations
    from ratchet.history.subjects import Names
    from ratchet.pages.reported import Origin
    from ratchet.services import report_page

    target = folder / "curves.html"
    try:
        names = Names(layout)
        side = comparison.side(layout, names.subject(run_id), names, Evaluations(layout, names), comparison.MOST_POINTS)
        report_page.write(side, None, Origin({}, None, None, None), target)
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
    from ratchet.services.prometheus import (
        Exposition,
    )  # and a library that few need

    exposition = Exposition(machine)
    try:
        yield Observation(layout, settings, exposition)
    finally:
        exposition.close()

"""Who is told of a training: terminal, MLflow, Prometheus, a webhook. None of them can slow it or stop it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.config import Settings
from ratchet.layout import Layout
from ratchet.run import lead
from ratchet.run.directory import RunPaths
from ratchet.run.observers import Observer
from ratchet.services import plots
from ratchet.services.console import Console
from ratchet.services.tracking import RunObserver, Tracking
from ratchet.services.webhook import RunNews, Webhook

if TYPE_CHECKING:
    from ratchet.services.prometheus import Exposition


class Observation:
    """Those who are told of a training."""

    def __init__(self, layout: Layout, settings: Settings, exposition: "Exposition | None") -> None:
        self._settings, self._exposition = settings, exposition
        self._project = layout.root.name
        self._webhook = Webhook.of_environment(settings.machine, self._project)
        self._tracking = Tracking(layout, settings.promote.model_name, settings.machine.tracking)

    def observers(self, run: RunPaths) -> Sequence[Observer]:
        """The observers of this run."""
        found: list[Observer] = [Console(), lead.observed(self._tracked(run), run.journal, self._settings.machine)]
        if self._exposition is not None:
            found.append(self._exposition.observer(run.root.name, self._project))
        if self._webhook is not None:
            found.append(RunNews(self._webhook, run.root.name))
        return found

    def publish(self, run: RunPaths, page: Path) -> None:
        """Show the page of a run that has finished."""
        if lead.tells(run.journal, self._settings.machine):
            self._tracking.report(self._tracked(run), {}, {"": [page]}, {})

    def _tracked(self, run: RunPaths) -> RunObserver:
        return self._tracking.observer(run, self._settings, plots.loss_curve)


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

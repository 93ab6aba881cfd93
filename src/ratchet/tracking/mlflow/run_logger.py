"""Metric points: each is stored once, with the step and the time of the journal, however often it is sent."""

import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ratchet.config import params_file
from ratchet.config.schema import Settings
from ratchet.errors import DamagedError, DataError
from ratchet.runs import status as run_status
from ratchet.runs.callbacks import Status
from ratchet.runs.directory import RunPaths, RunSpec
from ratchet.runs.journal import Event, Reader
from ratchet.runs.log import say
from ratchet.runs.status import Memory
from ratchet.runs.tracking_payload import Figures, Point, end_of, parameters_of
from ratchet.storage import code_version, digests
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.dataset_card import DatasetCard
from ratchet.tracking.mlflow import logged_models
from ratchet.tracking.mlflow.experiments import ATTEMPTS_TAG, HOST_TAG, JOURNAL_TAG, Experiment, log_batch, run_tags

MAX_BATCH = 900
"""Metrics in one call, which takes 1,000 things in all."""
REPORT_STEP = 0
"""Figures of a whole run are points of their own, not of a training step."""
FROM_JOURNAL = ("train/", "validation/", "system/")
"""What keys begin with whose points have steps."""


class Stored:
    """Which steps MLflow has of one run. What is there is not sent again: steps that are done again after a crash, on
    this machine or on another, are told as they were the first time."""

    def __init__(self, experiment: Experiment, run: Any) -> None:
        """Asks for the keys that the run has, and for no others."""
        self._mlflow_id = run.info.run_id
        with experiment.connected() as client:
            keys = [key for key in run.data.metrics if key.startswith(FROM_JOURNAL)]
            histories = experiment.each([partial(client.get_metric_history, self._mlflow_id, key) for key in keys])
        self._steps = {key: {point.step for point in points} for key, points in zip(keys, histories, strict=True)}

    def send(self, client: Any, points: Iterable[Point], tags: Mapping[str, str]) -> None:
        """Store what is new of these points, and the tags."""
        from mlflow.entities import Metric

        new: dict[tuple[str, int], Any] = {}
        for point in points:
            if point.step not in self._steps.get(point.key, ()):
                new.setdefault(
                    (point.key, point.step), Metric(point.key, point.value, round(point.t * 1000), point.step)
                )
        metrics = list(new.values())
        for start in range(0, max(len(metrics), bool(tags)), MAX_BATCH):
            batch = metrics[start : start + MAX_BATCH]
            log_batch(client, self._mlflow_id, metrics=batch, tags=run_tags({} if start else tags))
            for metric in batch:
                self._steps.setdefault(metric.key, set()).add(metric.step)


def of_report(experiment: Experiment, client: Any, run: Any, figures: Mapping[str, float]) -> list[Any]:
    """Points for figures of the whole run, without those that MLflow shows already: a changed value is a later point.

    Args:
        experiment: of the run.
        client: MLflow's.
        run: as MLflow has it now.
        figures: by key.
    """
    from mlflow.entities import Metric

    changed = {key: value for key, value in figures.items() if run.data.metrics.get(key) != value}
    there = [key for key in changed if key in run.data.metrics]
    histories = experiment.each([partial(client.get_metric_history, run.info.run_id, key) for key in there])
    newest = {key: _newest(points) for key, points in zip(there, histories, strict=True)}
    now_ms = round(time.time() * 1000)
    return [Metric(key, value, max(now_ms, newest.get(key, 0) + 1), REPORT_STEP) for key, value in changed.items()]


def _newest(points: Sequence[Any]) -> int:
    return max((int(point.timestamp) for point in points if point.step == REPORT_STEP), default=0)


# Prepared data as MLflow's own dataset input, by the digest of what was learned from.

NAME_CHARACTERS = 400


def is_there(run: Any, card: DatasetCard) -> bool:
    """Whether MLflow's run has these data as an input."""
    inputs = run.inputs.dataset_inputs if run.inputs else []
    return any(one.dataset.digest == card.digest[: digests.SHORT] for one in inputs)


def log(client: Any, mlflow_id: str, card: DatasetCard) -> None:
    """Add it. MLflow keeps one for each name and digest."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    profile = {"rows_in": card.rows_in, "rows": card.rows_out, "splits": card.splits}
    profile |= {"dropped": {reason: drop.count for reason, drop in card.dropped.items()}}
    profile |= {"tokens": {name: lengths.total for name, lengths in card.lengths.items()}}
    dataset = Dataset(
        name=", ".join(Path(source).name for source in card.sources)[:NAME_CHARACTERS],
        digest=card.digest[: digests.SHORT],
        source_type="local",
        source=json.dumps({"uri": next(iter(card.sources), ""), "sha256": card.sources}),
        profile=json.dumps(profile),
    )
    client.log_inputs(mlflow_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])])


# One run in MLflow, fed by its journal: an observer of the supervisor, and what later commands send of it.
#
# All may be repeated and may die anywhere: a run is made once, a metric point carries the time at which its step was
# first done, and what says that everything is there is written last.

SETTINGS = "settings.yaml"

Draw = Callable[[Path, Path], None]


class RunObserver:
    """Shows one run in MLflow; an observer of the supervisor. Its state is MLflow's, read back at the first use."""

    name = "mlflow"
    patient = True

    def __init__(
        self, experiment: Experiment, paths: RunPaths, settings: Settings, draw: Draw, begin: Callable[[], None]
    ) -> None:
        """Touches nothing yet.

        Args:
            experiment: where it is shown.
            paths: the run.
            settings: of the project; what is trained is read from the run itself.
            draw: makes a PNG (second argument) of a journal (first).
            begin: called once, when the run is shown.
        """
        self._experiment, self._paths, self._settings, self._draw = experiment, paths, settings, draw
        self._begin: Callable[[], None] | None = begin
        self._mutex = threading.Lock()
        self.run_id = paths.root.name
        self._mlflow_id = ""
        self._status = ""
        self._attempts = 0
        self._card: DatasetCard | None = None
        self._stored: Stored
        self._figures = Figures()

    @property
    def is_busy(self) -> bool:
        """Whether another thread is at work for this run."""
        return self._mutex.locked()

    def forget(self) -> None:
        """Ask MLflow anew, at the next use, what it has of the run: another machine may have sent some of it."""
        with self._mutex:
            self._mlflow_id = ""

    def see(self, events: Sequence[Event]) -> None:
        """Send what is new in these events; giving the same ones again changes nothing."""
        with self._mutex:
            self._see(events)

    def finish(self, status: Status) -> None:
        """Store files and models, what there is to say, and the end."""
        with self._mutex:
            self._finish(status)

    def catch_up(self) -> None:
        """Send what MLflow has missed of a run that nobody trains now, and how it ended."""
        with self._mutex:
            self._see(list(Reader(self._paths.journal).read()))
            if not self._paths.lock().held_elsewhere():
                self._finish(end_of(self._paths))

    @property
    def is_here(self) -> bool:
        """Whether this machine has the run's directory: results of stages come by DVC to others, too."""
        return self._paths.spec.exists()

    def is_told(self, found: Any) -> bool:
        """Whether MLflow's run has all of the journal, and everything that belongs to a finished run."""
        told: str | None = found.data.tags.get(JOURNAL_TAG)
        return bool(found.info.status == "FINISHED") and told == str(_size(self._paths.journal))

    def _see(self, events: Sequence[Event]) -> None:
        with self._experiment.connected() as client:
            if not self._attach(client, events[0].t if events else time.time()):
                self._begun()
                return
            begun = [e for e in events if e.kind == "attempt" and e.attempt > self._attempts]
            if begun and self._status != "RUNNING":
                client.update_run(self._mlflow_id, status="RUNNING")
                self._status = "RUNNING"
            tags = {key: value for event in begun for key, value in self._tags_of_attempt(event).items()}
            self._stored.send(client, (point for event in events for point in self._figures.of(event)), tags)
            self._attempts = max([self._attempts, *(event.attempt for event in begun)])
            if self._begin is not None:
                self._first_seen(client)
            self._begun()

    def _finish(self, status: Status) -> None:
        with self._experiment.connected() as client:
            if not self._attach(client, time.time()):
                return
            run = client.get_run(self._mlflow_id)
            seen, progress = _size(self._paths.journal), run_status.of(self._paths)
            end = progress.finished or (progress.ends[-1] if progress.ends else "ended without a word")
            tags = {"ratchet.status": f"{end.replace('_', ' ')}; step {progress.step} of {progress.planned_steps}"}
            try:
                self._log_artifacts(client)
                if status == "FINISHED" and (self._paths.result / "train.json").exists():
                    logged_models.log(self._experiment, client, run, self._paths)
                tags[JOURNAL_TAG] = str(seen)
            finally:  # the status is true even when the disk has no room for a plot
                figures = of_report(self._experiment, client, run, _memory(progress.memory))
                log_batch(client, self._mlflow_id, metrics=figures, tags=run_tags(tags))
                client.set_terminated(self._mlflow_id, status, round((progress.last_t or time.time()) * 1000))
                self._status = status

    def _begun(self) -> None:
        if self._begin is not None:
            self._begin()
            self._begin = None

    def _attach(self, client: Any, start_t: float) -> bool:
        """Find or create the run, complete what its creation left out, and read how far it is; whether it lacks
        anything."""
        if self._mlflow_id:
            return True
        from mlflow.entities import Param

        spec = RunSpec.load(self._paths.spec)
        self._settings = self._settings.model_copy(update={"train": spec.train})  # the run's own
        run = self._experiment.find_or_create(spec.run_id, round(start_t * 1000))
        if self.is_told(run):
            return False
        mlflow_id, there = run.info.run_id, run.data.tags
        self._card = _card(self._experiment.layout.dataset_card, spec)
        wanted = parameters_of(spec, self._settings)
        missing = [Param(key, value) for key, value in wanted.items() if key not in run.data.params]
        tags = {key: value for key, value in self._tags(spec).items() if there.get(key) != value}
        calls: list[Callable[[], Any]] = []
        if missing or tags:
            calls.append(partial(log_batch, client, mlflow_id, params=missing, tags=run_tags(tags)))
        if (card := self._card) is not None and not is_there(run, card):
            calls.append(partial(self._log_dataset, client, mlflow_id, card))
        self._experiment.each(calls)
        self._stored = Stored(self._experiment, run)
        ours = there.get(HOST_TAG, socket.gethostname()) == socket.gethostname()
        self._attempts = int(there.get(ATTEMPTS_TAG, "0")) if ours else 0  # each machine counts its own
        self._mlflow_id, self._status = mlflow_id, run.info.status
        return True

    def _first_seen(self, client: Any) -> None:
        """Store the full settings now, for a run that is killed has no end. Points are worth more than this file."""
        from mlflow.exceptions import MlflowException

        try:
            client.log_text(self._mlflow_id, params_file.dump(self._settings), SETTINGS)
        except (MlflowException, OSError) as error:
            say(f"run {self.run_id}: {SETTINGS} is not in MLflow yet ({error}); tried again at its end")

    def _tags(self, spec: RunSpec) -> dict[str, str]:
        """What it was trained on, and with which it differs in nothing but the seed."""
        layout = self._experiment.layout
        alike = spec.model_dump(mode="json")
        alike["train"].pop("seed")
        tags = {"ratchet.base_digest": spec.base_digest, "ratchet.data_digest": spec.data_digest}
        tags["ratchet.seeds_of"] = digests.of_json(alike)[: digests.SHORT]
        if self._card is not None:
            tags["ratchet.data_card"] = layout.dataset_card.relative_to(layout.root).as_posix()
            tags["ratchet.data_card_digest"] = digests.of_file(layout.dataset_card)
        with suppress(DataError, DamagedError):  # another base, or none, is there now: nothing is said of it
            base = BaseCard.load(layout.base_card)
            if base.digest == spec.base_digest:
                tags["ratchet.base"] = base.source
                tags |= {"ratchet.base_revision": base.revision} if base.revision else {}
        return tags

    def _log_dataset(self, client: Any, mlflow_id: str, card: DatasetCard) -> None:
        with self._experiment.store.locked():  # MLflow looks for the dataset, and makes it; two at once both would
            log(client, mlflow_id, card)

    def _tags_of_attempt(self, event: Event) -> dict[str, str]:
        tags = {"ratchet.code_version": str(event.data.get("code_version", "")), ATTEMPTS_TAG: str(event.attempt)}
        tags["ratchet.status"] = f"attempt {event.attempt}"
        if event.data.get("pid") == os.getpid():  # what is checked out now belongs to our own attempt, to no older one
            tags |= code_version.revision_tags(self._experiment.layout.root) | {HOST_TAG: socket.gethostname()}
        return tags

    def _log_artifacts(self, client: Any) -> None:
        layout, result = self._experiment.layout, self._paths.result
        wanted: list[tuple[Path, str | None]] = [
            *((result / name, None) for name in ("train.json", "analysis.json", "README.md")),
            (self._paths.journal, None),
            *((path, "dataset") for path in (layout.dataset_card, layout.dataset_page) if self._card is not None),
        ]
        with tempfile.TemporaryDirectory() as scratch:
            image, settings = Path(scratch) / "loss.png", Path(scratch) / SETTINGS
            self._draw(self._paths.journal, image)
            settings.write_text(params_file.dump(self._settings), encoding="utf-8")
            wanted += [(image, "plots"), (settings, None)]
            there = [(path, folder) for path, folder in wanted if path.exists()]
            self._experiment.each(
                [partial(client.log_artifact, self._mlflow_id, str(path), folder) for path, folder in there]
            )


def _card(path: Path, spec: RunSpec) -> DatasetCard | None:
    """The card of the run's data; None if the data were prepared anew since, or are gone."""
    with suppress(DataError, DamagedError):
        card = DatasetCard.load(path)
        return card if card.digest == spec.data_digest else None
    return None


def _memory(memory: Memory) -> dict[str, float]:
    """Peaks as they were measured and foreseen: figures of the whole run."""
    figures = {f"memory/{phase}_bytes": float(count) for phase, count in memory.peaks.items()}
    if memory.peaks:
        figures["memory/peak_bytes"] = float(max(memory.peaks.values()))
    if memory.forecast:
        figures["memory/forecast_bytes"] = float(max(memory.forecast.values()))
    return figures


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0

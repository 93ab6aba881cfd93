"""MLflow runs: one for each training, fed by replaying its journal, found again by the tag `ratchet.run_id`.

All may be repeated and may die anywhere: a run is made once, under a lock; a metric point carries the time at which its
step was first done, so that sending it again changes nothing. MLflow's fluent functions (global state) are not used.
"""

import getpass
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ratchet import digest, params, version
from ratchet.card import DatasetCard
from ratchet.config import Settings
from ratchet.errors import TrackingError
from ratchet.layout import Layout
from ratchet.run import status as run_status
from ratchet.run.directory import RunPaths, RunSpec
from ratchet.run.journal import Event, Reader
from ratchet.run.observers import Status
from ratchet.run.shown import METRICS, end_of, figures_of, parameters_of
from ratchet.store import Store

MAX_BATCH = 1000  # metrics in one call of log_batch; MLflow refuses more
REPORT_STEP = 0  # figures of a whole run are points of their own, not of a training step

Draw = Callable[[Path, Path], None]
Artifacts = Mapping[str, Sequence[Path]]
RUN_TAG = "ratchet.run_id"
ATTEMPTS_TAG = "ratchet.attempts"
SWEEP_TAG = "ratchet.sweep"
HOST_TAG = "ratchet.host"  # of the last attempt: on a server that many use, each ends only what it began itself


class Tracking:
    """One experiment in the project's own MLflow store, or on a server; opened, and made, at the first use.

    Every method raises TrackingError when MLflow's files cannot be read or written.
    """

    def __init__(self, layout: Layout, experiment: str, server: str | None = None) -> None:
        self.layout = layout
        self.experiment = experiment
        self.store = Store(layout, server)
        self._experiment_id = ""

    def observer(self, paths: RunPaths, settings: Settings, draw: Draw, reconcile: bool = True) -> "RunObserver":
        """An observer of this run; touches nothing yet.

        Args:
            paths: the run.
            settings: of the project; what is trained is read from the run itself.
            draw: makes a PNG (second argument) of a journal (first).
            reconcile: whether it begins with ending what nobody trains; not in a sweep, where a trial may be between
                two workers.
        """
        return RunObserver(self, paths, settings, draw, reconcile)

    def reconcile(self, runs: Path, besides: str = "") -> list[str]:
        """End what is RUNNING in MLflow though nobody trains it; returns a line for each, or for one not in `runs`.

        Args:
            runs: folder of the run directories.
            besides: run id to leave alone: its own observer is at work.
        """
        notes = []
        with self.connected() as client:
            found = client.search_runs([self._experiment_id], "attributes.status = 'RUNNING'")
            for run in (r for r in found if r.data.tags.get(RUN_TAG, besides) != besides):
                paths = RunPaths(runs / run.data.tags[RUN_TAG])
                if self.store.server and run.data.tags.get(HOST_TAG) != socket.gethostname():
                    continue  # others use this server
                if not paths.journal.exists():
                    if SWEEP_TAG in run.data.tags:  # another machine may train it, or have trained it
                        continue
                    notes.append(f"run {paths.root.name}: RUNNING in MLflow, no directory in {runs}; left as it is")
                elif not paths.lock().held_elsewhere():
                    status = end_of(paths)
                    client.set_terminated(run.info.run_id, status, round(run_status.of(paths).last_t * 1000))
                    notes.append(f"run {paths.root.name}: was RUNNING in MLflow, nobody trains it; now {status}")
        return notes

    def log_report(
        self, run_id: str, metrics: Mapping[str, float], artifacts: Artifacts, tags: Mapping[str, str]
    ) -> None:
        """Add figures, files and tags of a later stage to a run; repeating it adds nothing.

        Args:
            run_id: Ratchet's, not MLflow's.
            metrics: by key, e.g. `test/candidate/accuracy`; a changed value is stored beside the old one and shown.
            artifacts: files, by folder within the run's artifacts (`""` is its root).
            tags: replace those that are there.
        """
        with self.connected() as client:
            found = self.find(run_id)
            if found is None:
                raise TrackingError(f"run {run_id} is not in {self.store.where}; send its journal first")
            mlflow_id = found.info.run_id
            points = [p for key, value in metrics.items() if (p := _report_point(client, mlflow_id, key, value))]
            client.log_batch(mlflow_id, metrics=points, tags=_run_tags(tags))
            for folder, paths in artifacts.items():
                for path in paths:
                    client.log_artifact(mlflow_id, str(path), folder or None)

    def report(
        self, run: "RunObserver", metrics: Mapping[str, float], artifacts: Artifacts, tags: Mapping[str, str]
    ) -> None:
        """`log_report` for a stage: sends first what MLflow has missed of the run; a dead MLflow is a notice.

        Figures are in the stage's own output as well, so nothing is lost: repeat the stage when MLflow is back.
        """
        try:
            found = self.find(run.run_id)
            if found is None or found.info.status != "FINISHED":
                run.catch_up()
            self.log_report(run.run_id, metrics, artifacts, tags)
        except TrackingError as error:
            print(f"ratchet: run {run.run_id}: not logged to MLflow: {error}", file=sys.stderr)

    def find(self, run_id: str) -> Any:
        """MLflow's run of Ratchet's run id, the oldest if there are more, or None."""
        with self.connected() as client:
            wanted = f"tags.`{RUN_TAG}` = '{run_id}'"
            found = client.search_runs([self._experiment_id], wanted, order_by=["attributes.start_time ASC"])
            return found[0] if found else None

    def find_or_create(self, run_id: str, start_ms: int) -> Any:
        """MLflow's run of this run id, made at the first time, by one process only."""
        with self.connected() as client, self.store.locked():
            tags = _tags_at_creation(run_id)
            if (found := self.find(run_id)) is not None:
                return found
            made = client.create_run(self._experiment_id, start_ms, tags, run_id)
            self.store.settle()
            if (first := self.find(run_id)).info.run_id != made.info.run_id:  # another machine made one as well:
                client.delete_run(made.info.run_id)  # all that did so agree on the oldest
            return first

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """MLflow's client, the experiment made; failures are TrackingErrors."""
        with self.store.connected() as client:
            if not self._experiment_id:
                with self.store.locked():
                    found = client.get_experiment_by_name(self.experiment)
                    uri = None if self.store.server else self.layout.artifacts.as_uri()  # a server has its own place
                    made = found.experiment_id if found else client.create_experiment(self.experiment, uri)
                    self._experiment_id = str(made)
            yield client


class RunObserver:
    """Shows one run in MLflow; an observer of the supervisor. Its state is MLflow's, read back at the first use."""

    name = "mlflow"
    patient = True

    def __init__(
        self, tracking: Tracking, paths: RunPaths, settings: Settings, draw: Draw, reconcile: bool = True
    ) -> None:
        self._tracking, self._paths, self._settings, self._draw = tracking, paths, settings, draw
        self._reconcile = reconcile
        self.run_id = paths.root.name
        self._mlflow_id = ""
        self._attempts = 0
        self._own_data = False
        self._sent: dict[str, set[int]] = {}  # steps stored, by metric key

    def forget(self) -> None:
        """Ask MLflow anew, at the next use, what it has of the run: another machine may have sent some of it."""
        self._mlflow_id = ""

    def see(self, events: Sequence[Event]) -> None:
        """Send what is new in these events; giving the same ones again changes nothing."""
        with self._tracking.connected() as client:
            self._attach(client, events[0].t if events else time.time())
            for event in events:
                if event.kind == "attempt" and event.attempt > self._attempts:
                    self._begin_attempt(client, event)
            self._send_points(client, events)

    def finish(self, status: Status) -> None:
        """Store files, what there is to say, and the end."""
        with self._tracking.connected() as client:
            self._attach(client, time.time())
            try:
                self._log_artifacts(client)
            finally:  # the status is true even when the disk has no room for a plot
                progress = run_status.of(self._paths)
                self._log_memory(client, progress.memory)
                end = progress.finished or (progress.ends[-1] if progress.ends else "ended without a word")
                text = f"{end.replace('_', ' ')}; step {progress.step} of {progress.planned_steps}"
                client.set_tag(self._mlflow_id, "ratchet.status", text)
                client.set_terminated(self._mlflow_id, status, round((progress.last_t or time.time()) * 1000))

    def catch_up(self) -> None:
        """Send what MLflow has missed of a run that nobody trains now, and how it ended."""
        self.see(list(Reader(self._paths.journal).read()))
        if not self._paths.lock().held_elsewhere():
            self.finish(end_of(self._paths))

    def _attach(self, client: Any, start_t: float) -> None:
        """Find or create the run, complete what its creation left out, and read how far it is."""
        if self._mlflow_id:
            return
        from mlflow.entities import Param

        spec = RunSpec.load(self._paths.spec)
        self._settings = self._settings.model_copy(update={"train": spec.train})  # the run's own
        run = self._tracking.find_or_create(spec.run_id, round(start_t * 1000))
        if self._reconcile:
            for note in self._tracking.reconcile(self._paths.root.parent, besides=spec.run_id):
                print(f"ratchet: {note}", file=sys.stderr)
        mlflow_id = run.info.run_id
        tags = {"ratchet.base_digest": spec.base_digest, "ratchet.data_digest": spec.data_digest}
        wanted = parameters_of(spec, self._settings)
        missing = [Param(key, value) for key, value in wanted.items() if key not in run.data.params]
        client.log_batch(mlflow_id, params=missing, tags=_run_tags(tags))
        card = DatasetCard.load(self._tracking.layout.dataset_card)
        self._own_data = card.digest == spec.data_digest  # else the data was prepared anew since: not the run's card
        if self._own_data:
            with self._tracking.store.locked():  # MLflow looks for the dataset, and makes it; two at once both would
                _log_dataset(client, mlflow_id, card)
        for key in METRICS:
            self._sent[key] = {point.step for point in client.get_metric_history(mlflow_id, key)}
        ours = run.data.tags.get(HOST_TAG, socket.gethostname()) == socket.gethostname()
        self._attempts = int(run.data.tags.get(ATTEMPTS_TAG, "0")) if ours else 0  # each machine counts its own
        self._mlflow_id = mlflow_id

    def _begin_attempt(self, client: Any, event: Event) -> None:
        tags = {"ratchet.code_version": str(event.data.get("code_version", "")), ATTEMPTS_TAG: str(event.attempt)}
        tags["ratchet.status"] = f"attempt {event.attempt}"
        if event.data.get("pid") == os.getpid():  # what is checked out now belongs to our own attempt, to no older one
            tags |= version.revision_tags(self._tracking.layout.root) | {HOST_TAG: socket.gethostname()}
        client.update_run(self._mlflow_id, status="RUNNING")
        client.log_batch(self._mlflow_id, tags=_run_tags(tags))
        self._attempts = event.attempt

    def _send_points(self, client: Any, events: Sequence[Event]) -> None:
        from mlflow.entities import Metric

        new: dict[str, set[int]] = {key: set() for key in METRICS}
        points = []
        for event in events:
            for key, value in figures_of(event).items():
                step = event.data["step"]
                if step not in self._sent[key] and step not in new[key]:  # done again after a crash, it is told once
                    new[key].add(step)
                    points.append(Metric(key, value, round(event.t * 1000), step))
        for start in range(0, len(points), MAX_BATCH):
            client.log_batch(self._mlflow_id, metrics=points[start : start + MAX_BATCH])
        for key, steps in new.items():
            self._sent[key] |= steps

    def _log_memory(self, client: Any, memory: run_status.Memory) -> None:
        """Peaks as they were measured and foreseen: figures of the whole run."""
        figures = {f"memory/{phase}_bytes": float(count) for phase, count in memory.peaks.items()}
        if memory.peaks:
            figures["memory/peak_bytes"] = float(max(memory.peaks.values()))
        if memory.forecast:
            figures["memory/forecast_bytes"] = float(max(memory.forecast.values()))
        points = [p for key, value in figures.items() if (p := _report_point(client, self._mlflow_id, key, value))]
        client.log_batch(self._mlflow_id, metrics=points)

    def _log_artifacts(self, client: Any) -> None:
        client.log_text(self._mlflow_id, params.dump(self._settings), "settings.yaml")
        layout = self._tracking.layout
        for path, folder in (
            (self._paths.result / "train.json", None),
            (self._paths.result / "analysis.json", None),
            (self._paths.result / "README.md", None),
            (self._paths.journal, None),
            *((path, "dataset") for path in (layout.dataset_card, layout.dataset_page) if self._own_data),
        ):
            if path.exists():
                client.log_artifact(self._mlflow_id, str(path), folder)
        with tempfile.TemporaryDirectory() as scratch:
            image = Path(scratch) / "loss.png"
            self._draw(self._paths.journal, image)
            client.log_artifact(self._mlflow_id, str(image), "plots")


def _tags_at_creation(run_id: str) -> dict[str, str]:
    tags = {RUN_TAG: run_id, "mlflow.source.name": "ratchet", "mlflow.source.type": "LOCAL"}
    with suppress(KeyError, OSError):  # a container's user may have no name
        tags["mlflow.user"] = getpass.getuser()
    return tags


def _run_tags(tags: Mapping[str, str]) -> list[Any]:
    from mlflow.entities import RunTag

    return [RunTag(key, value) for key, value in tags.items()]


def _log_dataset(client: Any, mlflow_id: str, card: DatasetCard) -> None:
    """The data as MLflow's own dataset input. MLflow keeps one for each name and digest."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    profile = {"rows_in": card.rows_in, "rows": card.rows_out, "splits": card.splits}
    profile |= {"dropped": {reason: drop.count for reason, drop in card.dropped.items()}}
    profile |= {"tokens": {name: lengths.total for name, lengths in card.lengths.items()}}
    dataset = Dataset(
        name=", ".join(Path(source).name for source in card.sources)[:400],
        digest=card.digest[: digest.SHORT],
        source_type="local",
        source=json.dumps({"uri": next(iter(card.sources), ""), "sha256": card.sources}),
        profile=json.dumps(profile),
    )
    client.log_inputs(mlflow_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])])


def _report_point(client: Any, mlflow_id: str, key: str, value: float) -> Any:
    """The point to store, or None when it is what MLflow shows already."""
    from mlflow.entities import Metric

    stored = [p for p in client.get_metric_history(mlflow_id, key) if p.step == REPORT_STEP]
    newest = max(stored, key=lambda p: p.timestamp, default=None)
    if newest is not None and newest.value == value:
        return None
    now_ms = round(time.time() * 1000)
    return Metric(key, value, now_ms if newest is None else max(now_ms, newest.timestamp + 1), REPORT_STEP)

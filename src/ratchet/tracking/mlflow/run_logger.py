"""Logs one run to MLflow: metrics, parameters, tags, files, the dataset, and its checkpoints as logged models.

Every call may be interrupted and repeated: a run is created only once, a metric point has the time at which its step
was first done, and tags and states that mean completeness are written last.
"""

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
from ratchet.config.settings import Settings
from ratchet.config.train import Train
from ratchet.errors import DamagedFileError, DataError
from ratchet.registry.ledger import ACTOR_TAG
from ratchet.runs import status as run_status
from ratchet.runs.callbacks import Status
from ratchet.runs.directory import RunPaths, RunSpec
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.runs.log import print_message
from ratchet.runs.status import MemoryStatus
from ratchet.runs.tracking_payload import (
    MetricPoint,
    MetricPointExtractor,
    StoredSteps,
    collect_parameters,
    read_final_status,
)
from ratchet.storage import digests
from ratchet.storage.actors import current_actor
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.training import TrainReport
from ratchet.tracking.mlflow.experiments import (
    ATTEMPTS_TAG,
    HOST_TAG,
    JOURNAL_TAG,
    RUN_TAG,
    Experiment,
    delete_if_allowed,
    log_batch,
    run_tags,
)

STEP_TAG, ROLE_TAG, FINAL_TAG, ADAPTER_TAG = (
    "ratchet.step", "ratchet.checkpoint", "ratchet.is_final", "ratchet.adapter_digest"
)  # fmt: skip
VERSIONS_TAG = "mlflow.modelVersions"
"""Tag in which MLflow's UI finds the registered versions of a logged model."""
EXTERNAL_TAG = "mlflow.model.isExternal"
"""Tag of a logged model without files. Weights are not sent: they are in the run's result and in the DVC remote."""
LOSS = "validation/loss"
OWN_PREFIXES = ("test/candidate/", "test/merged/")
"""Prefixes of metrics of the run's own model, which is its final adapter or the exported model with this adapter."""

MAX_BATCH = 900
"""Maximum number of metrics per call of log_batch, which takes at most 1,000 items (metrics, params, tags) in all."""
REPORT_STEP = 0
"""Step of metrics that describe a whole run."""
JOURNAL_PREFIXES = ("train/", "validation/", "system/")
"""Prefixes of metrics whose points have steps."""
NAME_CHARACTERS = 400
"""Maximum number of characters of a dataset's name."""
SETTINGS = "settings.yaml"

Draw = Callable[[Path, Path, Train], None]
"""Draws a journal (first argument) into a PNG file (second)."""


def log_models(experiment: Experiment, client: Any, run: Any, paths: RunPaths) -> None:
    """Log the best and the last checkpoint of a finished run as logged models. A second call changes nothing.

    MLflow must have the points of the run. If its result cannot be read, a message is printed and no model is logged.
    """
    try:
        report = TrainReport.load(paths.result / "train.json")
    except (DataError, DamagedFileError) as error:
        print_message(f"no logged models: {error}")
        return
    models = _models_by_step(experiment, client, run)
    roles: dict[int, list[str]] = {}
    for role, step in (("best", report.best_step), ("last", report.steps)):
        roles.setdefault(step, []).append(role)
    if missing_steps := [step for step in roles if step not in models]:
        create = partial(_create_logged_model, experiment, client, run, report)
        experiment.call_all([partial(create, step, roles[step]) for step in missing_steps])
        models = _models_by_step(experiment, client, run)
    for step in roles:
        if str(models[step].status) != "READY":
            _complete_logged_model(experiment, client, run, models[step], paths)


def find_logged_models(experiment: Experiment, client: Any, mlflow_id: str) -> list[Any]:
    """Return the logged models of MLflow's run of this id, oldest first."""
    order = [{"field_name": "creation_timestamp", "ascending": True}]
    query = f"source_run_id = '{mlflow_id}'"
    return list(client.search_logged_models([experiment.id], filter_string=query, order_by=order))


def attribute_metrics(experiment: Experiment, client: Any, run: Any, metrics: Sequence[Any]) -> list[Any]:
    """Attach the metrics of the run's own model to its logged model and to the prepared dataset."""
    from mlflow.entities import Metric

    if not any(metric.key.startswith(OWN_PREFIXES) for metric in metrics):
        return list(metrics)
    final = next(
        (m for m in find_logged_models(experiment, client, run.info.run_id) if m.tags.get(FINAL_TAG) == "true"), None
    )
    if final is None:
        return list(metrics)
    identity = {"model_id": final.model_id, **_dataset_identity(run)}
    return [
        Metric(m.key, m.value, m.timestamp, m.step, **identity) if m.key.startswith(OWN_PREFIXES) else m
        for m in metrics
    ]


def link_version(client: Any, experiment_id: str, adapter_digest: str, name: str, version: int) -> None:
    """Record the registered version of an adapter in the adapter's logged model, if MLflow has this logged model."""
    query = f"tags.`{ADAPTER_TAG}` = '{adapter_digest}'"
    for model in client.search_logged_models([experiment_id], filter_string=query):
        versions = json.loads(model.tags.get(VERSIONS_TAG, "[]"))
        entry = {"name": name, "version": str(version)}
        if not any(str(known.get("version")) == str(version) and known.get("name") == name for known in versions):
            client.set_logged_model_tags(model.model_id, {VERSIONS_TAG: json.dumps([*versions, entry])})


def _models_by_step(experiment: Experiment, client: Any, run: Any) -> dict[int, Any]:
    """Return one logged model per step. If a lost response led to two models of one step, delete the newer model."""
    models: dict[int, Any] = {}
    for model in find_logged_models(experiment, client, run.info.run_id):
        if (step := model.tags.get(STEP_TAG)) is None:
            continue  # Ratchet did not create it
        if models.setdefault(int(step), model) is not model:
            delete_if_allowed(partial(client.delete_logged_model, model.model_id))
    return models


def _create_logged_model(
    experiment: Experiment, client: Any, run: Any, report: TrainReport, step: int, roles: Sequence[str]
) -> None:
    tags = {RUN_TAG: report.run_id, STEP_TAG: str(step), ROLE_TAG: ",".join(roles), EXTERNAL_TAG: "true"}
    tags[FINAL_TAG] = str(step == report.kept_step).lower()
    tags["ratchet.path"] = f"result/checkpoints/{roles[0]}"
    if step == report.kept_step:
        tags |= {ADAPTER_TAG: report.adapter_digest, "ratchet.path": "result/adapter"}
    name = f"{report.run_id}-{'-'.join(roles)}-step-{step}"
    client.create_logged_model(experiment.id, name, run.info.run_id, tags, dict(run.data.params), "adapter")


def _complete_logged_model(experiment: Experiment, client: Any, run: Any, model: Any, paths: RunPaths) -> None:
    """Send everything that belongs to a model. The status READY marks completeness and is set last."""
    from mlflow.entities import LoggedModelOutput, Metric

    step = int(model.tags[STEP_TAG])
    losses = client.get_metric_history(run.info.run_id, LOSS) if LOSS in run.data.metrics else []
    identity = {"model_id": model.model_id, **_dataset_identity(run)}
    # The time of the point must equal the time of the run's point; otherwise the run would have the point twice.
    points = [Metric(LOSS, p.value, p.timestamp, p.step, **identity) for p in losses if p.step == step]
    described = [paths.result / "adapter" / "adapter_config.json"]
    described += [paths.result / "README.md"] if model.tags[FINAL_TAG] == "true" else []
    calls = [partial(client.log_model_artifact, model.model_id, str(path)) for path in described if path.exists()]
    if points:
        calls.append(partial(log_batch, client, run.info.run_id, metrics=points))
    if model.model_id not in {output.model_id for output in run.outputs.model_outputs}:
        calls.append(partial(client.log_outputs, run.info.run_id, [LoggedModelOutput(model.model_id, step)]))
    experiment.call_all(calls)
    client.finalize_logged_model(model.model_id, "READY")


def _dataset_identity(run: Any) -> dict[str, str]:
    """Return the arguments that attach a metric to the run's dataset; empty if MLflow does not know the data of the
    run."""
    inputs = run.inputs.dataset_inputs if run.inputs else []
    return {"dataset_name": inputs[0].dataset.name, "dataset_digest": inputs[0].dataset.digest} if inputs else {}


def build_report_points(experiment: Experiment, client: Any, run: Any, figures: Mapping[str, float]) -> list[Any]:
    """Build points for metrics of the whole run.

    A value that MLflow already shows gets no point. A changed value gets a point with a later time than the old value.
    """
    from mlflow.entities import Metric

    changed = {key: value for key, value in figures.items() if run.data.metrics.get(key) != value}
    existing = [key for key in changed if key in run.data.metrics]
    histories = experiment.call_all([partial(client.get_metric_history, run.info.run_id, key) for key in existing])
    newest_ms = {
        key: max((int(point.timestamp) for point in points if point.step == REPORT_STEP), default=0)
        for key, points in zip(existing, histories, strict=True)
    }
    now_ms = round(time.time() * 1000)
    return [Metric(key, value, max(now_ms, newest_ms.get(key, 0) + 1), REPORT_STEP) for key, value in changed.items()]


# The callback.


class MlflowRunCallback:
    """Callback that logs one run to MLflow. The logged state is only in MLflow, and is read at the first use."""

    name = "mlflow"
    is_deferred = True

    def __init__(
        self, experiment: Experiment, paths: RunPaths, settings: Settings, draw: Draw, begin: Callable[[], None]
    ) -> None:
        """Create the callback. Nothing is sent yet. Training settings are read from the run itself.

        `begin` is called once, after events were sent for the first time or MLflow was found to have the complete run.
        """
        self._experiment, self._paths, self._settings, self._draw = experiment, paths, settings, draw
        self._begin: Callable[[], None] | None = begin
        self._mutex = threading.Lock()
        self.run_id = paths.root.name
        self._mlflow_id = ""
        self._status = ""
        self._attempts = 0
        self._card: DatasetCard | None = None
        self._stored_steps = StoredSteps()
        self._extractor = MetricPointExtractor()

    @property
    def is_busy(self) -> bool:
        """Whether another thread is logging this run."""
        return self._mutex.locked()

    def forget(self) -> None:
        """Read MLflow's state again at the next use, because another machine may have logged a part of the run."""
        with self._mutex:
            self._mlflow_id = ""

    def on_events(self, events: Sequence[JournalEvent]) -> None:
        """Send these events. Events that were sent before change nothing."""
        with self._mutex:
            self._send(events)

    def on_end(self, status: Status) -> None:
        """Log files, models, and the end of the run."""
        with self._mutex:
            self._finish(status)

    def catch_up(self) -> None:
        """Send what MLflow lacks of a run that is not in training, and how the run ended."""
        with self._mutex:
            self._send(list(JournalReader(self._paths.journal).read()))
            if not self._paths.lock().is_held():
                self._finish(read_final_status(self._paths))

    @property
    def has_directory(self) -> bool:
        """Whether the directory of the run is on this machine. DVC fetches only the results of stages."""
        return self._paths.spec.exists()

    def is_complete(self, mlflow_run: Any) -> bool:
        """Return whether MLflow's run has the whole journal and everything that belongs to a finished run."""
        logged_bytes: str | None = mlflow_run.data.tags.get(JOURNAL_TAG)
        return bool(mlflow_run.info.status == "FINISHED") and logged_bytes == str(_file_size(self._paths.journal))

    def _send(self, events: Sequence[JournalEvent]) -> None:
        from mlflow.exceptions import MlflowException

        with self._experiment.connected() as client:
            if not self._attach(client, events[0].t if events else time.time()):
                self._call_begin()
                return
            new_attempts = [e for e in events if e.kind == "attempt_started" and e.attempt > self._attempts]
            if new_attempts and self._status != "RUNNING":
                client.update_run(self._mlflow_id, status="RUNNING")
                self._status = "RUNNING"
            tags = {key: value for event in new_attempts for key, value in self._attempt_tags(event).items()}
            self._send_points(client, (point for event in events for point in self._extractor.extract(event)), tags)
            self._attempts = max([self._attempts, *(event.attempt for event in new_attempts)])
            if self._begin is not None:  # log all settings early, because a run may be killed
                try:
                    client.log_text(self._mlflow_id, params_file.dump(self._settings), SETTINGS)
                except (MlflowException, OSError) as error:  # it must not delay metric points
                    print_message(
                        f"run {self.run_id}: {SETTINGS} is not in MLflow yet ({error}); retrying at the end of the run"
                    )
            self._call_begin()

    def _send_points(self, client: Any, points: Iterable[MetricPoint], tags: Mapping[str, str]) -> None:
        """Send the tags, and those points that MLflow does not have.

        MLflow stores a point once, with its step and its time in the journal, however often it is sent. If a step was
        repeated after a crash, on any machine, the first value of the step is kept.
        """
        from mlflow.entities import Metric

        new = self._stored_steps.select_new(points)
        for start in range(0, max(len(new), bool(tags)), MAX_BATCH):
            batch = new[start : start + MAX_BATCH]
            metrics = [Metric(point.key, point.value, round(point.t * 1000), point.step) for point in batch]
            log_batch(client, self._mlflow_id, metrics=metrics, tags=run_tags({} if start else tags))
            self._stored_steps.add(batch)

    def _finish(self, status: Status) -> None:
        with self._experiment.connected() as client:
            if not self._attach(client, time.time()):
                return
            run = client.get_run(self._mlflow_id)
            journal_bytes, progress = _file_size(self._paths.journal), run_status.read_progress(self._paths)
            end = progress.finished or (progress.attempt_ends[-1] if progress.attempt_ends else "killed")
            tags = {"ratchet.status": f"{end.replace('_', ' ')}; step {progress.step} of {progress.planned_steps}"}
            try:
                self._log_artifacts(client)
                if status == "FINISHED" and (self._paths.result / "train.json").exists():
                    log_models(self._experiment, client, run, self._paths)
                tags[JOURNAL_TAG] = str(journal_bytes)
            finally:  # MLflow must show the correct status even if the disk has no space for a plot
                figures = build_report_points(self._experiment, client, run, _memory_peaks(progress.memory))
                log_batch(client, self._mlflow_id, metrics=figures, tags=run_tags(tags))
                client.set_terminated(self._mlflow_id, status, round((progress.last_t or time.time()) * 1000))
                self._status = status

    def _call_begin(self) -> None:
        if self._begin is not None:
            self._begin()
            self._begin = None

    def _attach(self, client: Any, start_t: float) -> bool:
        """Find or create the run, complete an interrupted creation, and read its state. Return whether MLflow lacks
        anything of the run."""
        if self._mlflow_id:
            return True
        from mlflow.entities import Param

        spec = RunSpec.load(self._paths.spec)
        self._settings = self._settings.model_copy(update={"train": spec.train})
        run = self._experiment.find_or_create(spec.run_id, round(start_t * 1000))
        if self.is_complete(run):
            return False
        mlflow_id, existing_tags = run.info.run_id, run.data.tags
        self._card = None
        with suppress(DataError, DamagedFileError):  # the data may have been prepared again or removed
            current_card = DatasetCard.load(self._experiment.layout.dataset_card)
            self._card = current_card if current_card.digest == spec.data_digest else None
        parameters = collect_parameters(spec, self._settings)
        missing_params = [Param(key, value) for key, value in parameters.items() if key not in run.data.params]
        tags = {key: value for key, value in self._run_tags(spec).items() if existing_tags.get(key) != value}
        calls: list[Callable[[], Any]] = []
        if missing_params or tags:
            calls.append(partial(log_batch, client, mlflow_id, params=missing_params, tags=run_tags(tags)))
        inputs = run.inputs.dataset_inputs if run.inputs else []
        known_data = {item.dataset.digest for item in inputs}
        if (card := self._card) is not None and card.digest[: digests.SHORT] not in known_data:
            calls.append(partial(self._log_dataset, client, mlflow_id, card))
        self._experiment.call_all(calls)
        keys = [key for key in run.data.metrics if key.startswith(JOURNAL_PREFIXES)]
        histories = self._experiment.call_all([partial(client.get_metric_history, mlflow_id, key) for key in keys])
        self._stored_steps = StoredSteps(
            {key: [p.step for p in points] for key, points in zip(keys, histories, strict=True)}
        )
        is_own = existing_tags.get(HOST_TAG, socket.gethostname()) == socket.gethostname()
        self._attempts = int(existing_tags.get(ATTEMPTS_TAG, "0")) if is_own else 0  # each machine counts its attempts
        self._mlflow_id, self._status = mlflow_id, run.info.status
        return True

    def _run_tags(self, spec: RunSpec) -> dict[str, str]:
        """Return tags for data and base of the run, and for the group of runs that differ only in their seed."""
        layout = self._experiment.layout
        without_seed = spec.model_dump(mode="json")
        without_seed["train"].pop("seed")
        tags = {"ratchet.base_digest": spec.base_digest, "ratchet.data_digest": spec.data_digest}
        tags["ratchet.seed_group"] = digests.hash_json(without_seed)[: digests.SHORT]
        if self._card is not None:
            tags["ratchet.data_card"] = layout.dataset_card.relative_to(layout.root).as_posix()
            tags["ratchet.data_card_digest"] = digests.hash_file(layout.dataset_card)
        with suppress(DataError, DamagedFileError):  # the base may have been replaced or removed
            base = BaseCard.load(layout.base_card)
            if base.digest == spec.base_digest:
                tags["ratchet.base"] = base.source
                tags |= {"ratchet.base_revision": base.revision} if base.revision else {}
        return tags

    def _log_dataset(self, client: Any, mlflow_id: str, card: DatasetCard) -> None:
        """Add the dataset to the run as an input. MLflow stores one dataset per name and digest."""
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
        with self._experiment.store.locked():  # without the lock, two processes might both create the dataset
            client.log_inputs(mlflow_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])])

    def _attempt_tags(self, event: JournalEvent) -> dict[str, str]:
        tags = {"ratchet.code_version": str(event.data.get("code_version", "")), ATTEMPTS_TAG: str(event.attempt)}
        tags["ratchet.status"] = f"attempt {event.attempt}"
        if event.data.get("pid") == os.getpid():  # the current checkout belongs to attempts of this process only
            root = self._experiment.layout.root
            tags |= digests.revision_tags(root) | {HOST_TAG: socket.gethostname(), ACTOR_TAG: current_actor(root)}
        return tags

    def _log_artifacts(self, client: Any) -> None:
        layout, result = self._experiment.layout, self._paths.result
        artifacts: list[tuple[Path, str | None]] = [
            *((result / name, None) for name in ("train.json", "analysis.json", "README.md")),
            (self._paths.journal, None),
            *((path, "dataset") for path in (layout.dataset_card, layout.dataset_page) if self._card is not None),
        ]
        with tempfile.TemporaryDirectory() as scratch:
            image, settings = Path(scratch) / "loss.html", Path(scratch) / SETTINGS
            self._draw(self._paths.journal, image, self._settings.train)
            settings.write_text(params_file.dump(self._settings), encoding="utf-8")
            artifacts += [(image, "plots"), (settings, None)]
            log = partial(client.log_artifact, self._mlflow_id)
            self._experiment.call_all([partial(log, str(path), folder) for path, folder in artifacts if path.exists()])


def _memory_peaks(memory: MemoryStatus) -> dict[str, float]:
    """Return the measured and the forecast memory peaks in bytes, as metrics of the whole run."""
    figures = {f"memory/{phase}_bytes": float(count) for phase, count in memory.peaks.items()}
    if memory.peaks:
        figures["memory/peak_bytes"] = float(max(memory.peaks.values()))
    if memory.forecast:
        figures["memory/forecast_bytes"] = float(max(memory.forecast.values()))
    return figures


def _file_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0

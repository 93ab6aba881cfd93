"""Kept checkpoints as MLflow's logged models: the run they come from, their step, their figures, their digests.

No weights are sent: they lie in the run's result and, by DVC, in its remote. MLflow calls such a model external.
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
from ratchet.config.schema import Settings
from ratchet.errors import DamagedFileError, DataError
from ratchet.runs import status as run_status
from ratchet.runs.callbacks import Status
from ratchet.runs.directory import RunPaths, RunSpec
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.runs.log import print_message
from ratchet.runs.status import MemoryStatus
from ratchet.runs.tracking_payload import MetricPoint, MetricPointExtractor, collect_parameters, read_final_status
from ratchet.storage import code_version, digests
from ratchet.storage.records.base import BaseCard, TrainReport
from ratchet.storage.records.data import DatasetCard
from ratchet.tracking.mlflow.experiments import (
    ATTEMPTS_TAG,
    HOST_TAG,
    JOURNAL_TAG,
    RUN_TAG,
    Experiment,
    log_batch,
    run_tags,
)

STEP_TAG, ROLE_TAG, KEPT_TAG, ADAPTER_TAG = (
    "ratchet.step", "ratchet.checkpoint", "ratchet.kept", "ratchet.adapter_digest"
)  # fmt: skip
VERSIONS_TAG = "mlflow.modelVersions"
"""Where MLflow's pages look for the registered versions of a logged model."""
EXTERNAL_TAG = "mlflow.model.isExternal"
LOSS = "validation/loss"
OWN = ("test/candidate/", "test/merged/")
"""What keys begin with that tell of the kept adapter, or of the model it was exported as."""


def log_models(experiment: Experiment, client: Any, run: Any, paths: RunPaths) -> None:
    """Make best and last checkpoint of a finished run logged models; repeating it changes nothing.

    Args:
        experiment: of the run.
        client: MLflow's.
        run: as MLflow has it now, its points stored.
        paths: of the run. A result that cannot be read makes no models, and says so: all else is shown.
    """
    try:
        report = TrainReport.load(paths.result / "train.json")
    except (DataError, DamagedFileError) as error:
        print_message(f"no logged models: {error}")
        return
    found = _models_by_step(experiment, client, run)
    roles: dict[int, list[str]] = {}
    for role, step in (("best", report.best_step), ("last", report.steps)):
        roles.setdefault(step, []).append(role)
    missing = [(step, names) for step, names in roles.items() if step not in found]
    if missing:
        experiment.each(
            [partial(_create_logged_model, experiment, client, run, report, step, names) for step, names in missing]
        )
        found = _models_by_step(experiment, client, run)
    for step in roles:
        if str(found[step].status) != "READY":
            _complete_logged_model(experiment, client, run, found[step], paths)


def find_logged_models(experiment: Experiment, client: Any, mlflow_id: str) -> list[Any]:
    """The logged models of MLflow's run of this id, the oldest first."""
    order = [{"field_name": "creation_timestamp", "ascending": True}]
    wanted = f"source_run_id = '{mlflow_id}'"
    return list(client.search_logged_models([experiment.id], filter_string=wanted, order_by=order))


def attribute_metrics(experiment: Experiment, client: Any, run: Any, metrics: Sequence[Any]) -> list[Any]:
    """The metrics, those of the run's own model said to be of its logged model and of the data that were prepared."""
    from mlflow.entities import Metric

    if not any(metric.key.startswith(OWN) for metric in metrics):
        return list(metrics)
    kept = next(
        (m for m in find_logged_models(experiment, client, run.info.run_id) if m.tags.get(KEPT_TAG) == "true"), None
    )
    if kept is None:
        return list(metrics)
    about = {"model_id": kept.model_id, **_dataset_identity(run)}
    return [Metric(m.key, m.value, m.timestamp, m.step, **about) if m.key.startswith(OWN) else m for m in metrics]


def link_version(client: Any, experiment_id: str, adapter_digest: str, name: str, version: int) -> None:
    """Tell the logged model of an adapter that it is registered as this version; nothing happens if there is none."""
    wanted = f"tags.`{ADAPTER_TAG}` = '{adapter_digest}'"
    for model in client.search_logged_models([experiment_id], filter_string=wanted):
        told = json.loads(model.tags.get(VERSIONS_TAG, "[]"))
        entry = {"name": name, "version": str(version)}
        if not any(str(one.get("version")) == str(version) and one.get("name") == name for one in told):
            client.set_logged_model_tags(model.model_id, {VERSIONS_TAG: json.dumps([*told, entry])})


def _models_by_step(experiment: Experiment, client: Any, run: Any) -> dict[int, Any]:
    """One logged model for each step: of those that a lost answer has made twice, the older one stays."""
    found: dict[int, Any] = {}
    for model in find_logged_models(experiment, client, run.info.run_id):
        if (step := model.tags.get(STEP_TAG)) is None:
            continue  # somebody else's
        if found.setdefault(int(step), model) is not model:
            client.delete_logged_model(model.model_id)
    return found


def _create_logged_model(
    experiment: Experiment, client: Any, run: Any, report: TrainReport, step: int, roles: Sequence[str]
) -> None:
    tags = {RUN_TAG: report.run_id, STEP_TAG: str(step), ROLE_TAG: ",".join(roles), EXTERNAL_TAG: "true"}
    tags[KEPT_TAG] = str(step == report.kept_step).lower()
    tags["ratchet.place"] = f"result/checkpoints/{roles[0]}"
    if step == report.kept_step:
        tags |= {ADAPTER_TAG: report.adapter_digest, "ratchet.place": "result/adapter"}
    name = f"{report.run_id}-{'-'.join(roles)}-step-{step}"
    client.create_logged_model(experiment.id, name, run.info.run_id, tags, dict(run.data.params), "adapter")


def _complete_logged_model(experiment: Experiment, client: Any, run: Any, model: Any, paths: RunPaths) -> None:
    """Everything that belongs to a model; that it is READY comes last, and says so."""
    from mlflow.entities import LoggedModelOutput, Metric

    step = int(model.tags[STEP_TAG])
    losses = client.get_metric_history(run.info.run_id, LOSS) if LOSS in run.data.metrics else []
    about = {"model_id": model.model_id, **_dataset_identity(run)}
    # With the very time of the point of the run, or the run would have it twice.
    points = [Metric(LOSS, p.value, p.timestamp, p.step, **about) for p in losses if p.step == step]
    calls = [
        partial(client.log_model_artifact, model.model_id, str(path))
        for path in _list_described_files(paths, model.tags)
    ]
    if points:
        calls.append(partial(log_batch, client, run.info.run_id, metrics=points))
    if model.model_id not in {output.model_id for output in run.outputs.model_outputs}:
        calls.append(partial(client.log_outputs, run.info.run_id, [LoggedModelOutput(model.model_id, step)]))
    experiment.each(calls)
    client.finalize_logged_model(model.model_id, "READY")


def _list_described_files(paths: RunPaths, tags: Mapping[str, str]) -> list[Path]:
    names = [paths.result / "adapter" / "adapter_config.json"]
    names += [paths.result / "README.md"] if tags[KEPT_TAG] == "true" else []
    return [path for path in names if path.exists()]


def _dataset_identity(run: Any) -> dict[str, str]:
    """What the figures of a model are of; nothing where the run's data are not known to MLflow."""
    inputs = run.inputs.dataset_inputs if run.inputs else []
    return {"dataset_name": inputs[0].dataset.name, "dataset_digest": inputs[0].dataset.digest} if inputs else {}


# Metric points: each is stored once, with the step and the time of the journal, however often it is sent.

MAX_BATCH = 900
"""Metrics in one call, which takes 1,000 things in all."""
REPORT_STEP = 0
"""Figures of a whole run are points of their own, not of a training step."""
FROM_JOURNAL = ("train/", "validation/", "system/")
"""What keys begin with whose points have steps."""


class MetricPointSender:
    """Which steps MLflow has of one run. What is there is not sent again: steps that are done again after a crash, on
    this machine or on another, are told as they were the first time."""

    def __init__(self, experiment: Experiment, run: Any) -> None:
        """Asks for the keys that the run has, and for no others."""
        self._mlflow_id = run.info.run_id
        with experiment.connected() as client:
            keys = [key for key in run.data.metrics if key.startswith(FROM_JOURNAL)]
            histories = experiment.each([partial(client.get_metric_history, self._mlflow_id, key) for key in keys])
        self._steps = {key: {point.step for point in points} for key, points in zip(keys, histories, strict=True)}

    def send(self, client: Any, points: Iterable[MetricPoint], tags: Mapping[str, str]) -> None:
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


def build_report_points(experiment: Experiment, client: Any, run: Any, figures: Mapping[str, float]) -> list[Any]:
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
    newest = {key: _newest_timestamp_ms(points) for key, points in zip(there, histories, strict=True)}
    now_ms = round(time.time() * 1000)
    return [Metric(key, value, max(now_ms, newest.get(key, 0) + 1), REPORT_STEP) for key, value in changed.items()]


def _newest_timestamp_ms(points: Sequence[Any]) -> int:
    return max((int(point.timestamp) for point in points if point.step == REPORT_STEP), default=0)


# Prepared data as MLflow's own dataset input, by the digest of what was learned from.

NAME_CHARACTERS = 400


def has_dataset(run: Any, card: DatasetCard) -> bool:
    """Whether MLflow's run has these data as an input."""
    inputs = run.inputs.dataset_inputs if run.inputs else []
    return any(one.dataset.digest == card.digest[: digests.SHORT] for one in inputs)


def log_dataset(client: Any, mlflow_id: str, card: DatasetCard) -> None:
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


class MlflowRunCallback:
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
        self._stored: MetricPointSender
        self._figures = MetricPointExtractor()

    @property
    def is_busy(self) -> bool:
        """Whether another thread is at work for this run."""
        return self._mutex.locked()

    def forget(self) -> None:
        """Ask MLflow anew, at the next use, what it has of the run: another machine may have sent some of it."""
        with self._mutex:
            self._mlflow_id = ""

    def see(self, events: Sequence[JournalEvent]) -> None:
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
            self._see(list(JournalReader(self._paths.journal).read()))
            if not self._paths.lock().held_elsewhere():
                self._finish(read_final_status(self._paths))

    @property
    def is_here(self) -> bool:
        """Whether this machine has the run's directory: results of stages come by DVC to others, too."""
        return self._paths.spec.exists()

    def is_told(self, found: Any) -> bool:
        """Whether MLflow's run has all of the journal, and everything that belongs to a finished run."""
        told: str | None = found.data.tags.get(JOURNAL_TAG)
        return bool(found.info.status == "FINISHED") and told == str(_file_size(self._paths.journal))

    def _see(self, events: Sequence[JournalEvent]) -> None:
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
            seen, progress = _file_size(self._paths.journal), run_status.read_progress(self._paths)
            end = progress.finished or (progress.ends[-1] if progress.ends else "ended without a word")
            tags = {"ratchet.status": f"{end.replace('_', ' ')}; step {progress.step} of {progress.planned_steps}"}
            try:
                self._log_artifacts(client)
                if status == "FINISHED" and (self._paths.result / "train.json").exists():
                    log_models(self._experiment, client, run, self._paths)
                tags[JOURNAL_TAG] = str(seen)
            finally:  # the status is true even when the disk has no room for a plot
                figures = build_report_points(self._experiment, client, run, _memory_peaks(progress.memory))
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
        self._card = _load_dataset_card(self._experiment.layout.dataset_card, spec)
        wanted = collect_parameters(spec, self._settings)
        missing = [Param(key, value) for key, value in wanted.items() if key not in run.data.params]
        tags = {key: value for key, value in self._tags(spec).items() if there.get(key) != value}
        calls: list[Callable[[], Any]] = []
        if missing or tags:
            calls.append(partial(log_batch, client, mlflow_id, params=missing, tags=run_tags(tags)))
        if (card := self._card) is not None and not has_dataset(run, card):
            calls.append(partial(self._log_dataset, client, mlflow_id, card))
        self._experiment.each(calls)
        self._stored = MetricPointSender(self._experiment, run)
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
            print_message(f"run {self.run_id}: {SETTINGS} is not in MLflow yet ({error}); tried again at its end")

    def _tags(self, spec: RunSpec) -> dict[str, str]:
        """What it was trained on, and with which it differs in nothing but the seed."""
        layout = self._experiment.layout
        alike = spec.model_dump(mode="json")
        alike["train"].pop("seed")
        tags = {"ratchet.base_digest": spec.base_digest, "ratchet.data_digest": spec.data_digest}
        tags["ratchet.seeds_of"] = digests.hash_json(alike)[: digests.SHORT]
        if self._card is not None:
            tags["ratchet.data_card"] = layout.dataset_card.relative_to(layout.root).as_posix()
            tags["ratchet.data_card_digest"] = digests.hash_file(layout.dataset_card)
        with suppress(DataError, DamagedFileError):  # another base, or none, is there now: nothing is said of it
            base = BaseCard.load(layout.base_card)
            if base.digest == spec.base_digest:
                tags["ratchet.base"] = base.source
                tags |= {"ratchet.base_revision": base.revision} if base.revision else {}
        return tags

    def _log_dataset(self, client: Any, mlflow_id: str, card: DatasetCard) -> None:
        with self._experiment.store.locked():  # MLflow looks for the dataset, and makes it; two at once both would
            log_dataset(client, mlflow_id, card)

    def _tags_of_attempt(self, event: JournalEvent) -> dict[str, str]:
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


def _load_dataset_card(path: Path, spec: RunSpec) -> DatasetCard | None:
    """The card of the run's data; None if the data were prepared anew since, or are gone."""
    with suppress(DataError, DamagedFileError):
        card = DatasetCard.load(path)
        return card if card.digest == spec.data_digest else None
    return None


def _memory_peaks(memory: MemoryStatus) -> dict[str, float]:
    """Peaks as they were measured and foreseen: figures of the whole run."""
    figures = {f"memory/{phase}_bytes": float(count) for phase, count in memory.peaks.items()}
    if memory.peaks:
        figures["memory/peak_bytes"] = float(max(memory.peaks.values()))
    if memory.forecast:
        figures["memory/forecast_bytes"] = float(max(memory.forecast.values()))
    return figures


def _file_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0

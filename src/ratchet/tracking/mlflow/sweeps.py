"""A sweep in MLflow: exactly two levels, the study a parent run and the run of each trial its child.

A child is the run that `tracking` shows by replaying a journal, found by its run id; here it gets a parent, a name,
what came of it as a trial, and a status that says so. All may be repeated and may die anywhere: the state of a trial is
written last, so one whose final state is there is complete, and metric points carry times that the report fixes.
"""

import math
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ratchet.errors import TrackingError
from ratchet.storage.records.sweep import SweepReport
from ratchet.tracking.mlflow.experiments import HOST_TAG, log_batch
from ratchet.tracking.mlflow.store import MlflowStore
from ratchet.tuning import tracking_payload
from ratchet.tuning.tracking_payload import (
    KEY_TAG,
    PARENT_TAG,
    ROLE_TAG,
    RUN_TAG,
    STATE_TAG,
    STUDY_TAG,
    TRIAL_TAG,
    ChildRun,
    Status,
)

Artifacts = Mapping[str, Sequence[Path]]

MAX_BATCH = 800  # metrics in one call of log_batch, which takes 1,000 things in all
ACTIVE = ("RUNNING", "FINISHED")  # no trial is made RUNNING again that is so, or whose training came to its end
PATIENCE = 3  # trials that cannot be shown before an update gives up: MLflow may take 20 s to fail


class ExperimentTracker(Protocol):
    """What is needed of the project's tracking."""

    experiment: str
    store: MlflowStore

    def connected(self) -> AbstractContextManager[Any]:
        """MLflow's client, the experiment made; failures are TrackingErrors."""

    def find_or_create(self, run_id: str, start_ms: int) -> Any:
        """MLflow's run of this run id, made at the first time, by one process only."""


@dataclass
class _ChildRunState:
    """What MLflow is known to show of a child."""

    mlflow_id: str
    tags: dict[str, str]
    points: int = -1
    """Of the curve, as sent by this process; -1: it has not looked yet."""

    def shows(self, child: ChildRun, tags: Mapping[str, str]) -> bool:
        """Whether there is nothing to send. What is over and has its state is complete."""
        told = all(self.tags.get(key, "") == value for key, value in tags.items())
        return told and (self.points == len(child.curve) or child.status is not None)


@dataclass
class MlflowSweepTracker:
    """Shows sweeps in the experiment of `tracking`; one object for one study, used by one thread.

    Every method raises TrackingError when MLflow cannot be read or written; nothing is lost by that, repeat it later.
    """

    tracking: ExperimentTracker
    figures: Callable[[SweepReport], Mapping[str, float]]
    """Further metrics of the parent, by key: what pruning saved."""
    _experiment_id: str = ""
    _parent_id: str = ""
    _known: dict[str, _ChildRunState] | None = None
    """By key of the child; None: not asked yet."""
    _shown: object = None
    """What the parent shows, as this process has sent it."""

    def settled(self, study: str) -> dict[str, int]:
        """By run id the trial whose end MLflow shows completely, journal and all; asks MLflow once."""
        with self.tracking.connected() as client:
            known = self._children(client, study)
        final = {key: one.tags for key, one in known.items() if one.tags.get(STATE_TAG, "running") != "running"}
        return {key: int(tags[TRIAL_TAG]) for key, tags in final.items() if tags.get(TRIAL_TAG, "").isdecimal()}

    def update(self, report: SweepReport, pending: Collection[str] = ()) -> None:
        """Show the report; costs nothing where nothing has changed.

        Args:
            report: of a study that is worked on: its parent is RUNNING.
            pending: ids of runs whose journal is not sent yet: those are not shown as over.
        """
        with self.tracking.connected() as client:
            self._update(client, report, pending)

    def finish(self, report: SweepReport, artifacts: Artifacts, status: Status) -> None:
        """Show what came of the study as a whole, add files to the parent and end it.

        Args:
            report: the last one; its trials are for `update`.
            artifacts: files, by folder within the parent's artifacts (`""` is its root).
            status: FINISHED; KILLED when it was asked to stop; FAILED when failures stopped it.
        """
        with self.tracking.connected() as client:
            try:
                self._show_parent(client, report, self._parent(client, report), at_work=False)
                for folder, paths in artifacts.items():
                    for path in paths:
                        client.log_artifact(self._parent_id, str(path), folder or None)
            finally:  # the status is true even when the disk has no room for a picture
                if self._parent_id:
                    client.set_terminated(self._parent_id, status, round(time.time() * 1000))

    def reconcile(self, alive: Callable[[str], bool]) -> list[str]:
        """End the parents of studies that nobody works on: their sweep was killed. Returns a line for each.

        Args:
            alive: whether anybody works on the study of this name.
        """
        notes = []
        with self.tracking.connected() as client:
            wanted = f"tags.`{ROLE_TAG}` = 'parent' and attributes.status = 'RUNNING'"
            for run in self._search(client, wanted):
                study = run.data.tags.get(STUDY_TAG, "")
                host = run.data.tags.get(HOST_TAG, socket.gethostname())  # of earlier versions: they told no host
                if self.tracking.store.server is not None and host != socket.gethostname():
                    continue  # others use this server
                if not alive(study):
                    client.set_terminated(run.info.run_id, "KILLED", round(time.time() * 1000))
                    notes.append(f"sweep {study}: was RUNNING in MLflow, nobody works on it; now KILLED")
        return notes

    def _update(self, client: Any, report: SweepReport, pending: Collection[str]) -> None:
        parent, known = self._parent(client, report), self._children(client, report.study)
        failures: list[TrackingError] = []
        for child in tracking_payload.build_child_runs(report):
            wanted = {**child.tags, PARENT_TAG: parent}
            if child.key not in pending:
                wanted[STATE_TAG] = child.state
            if child.key in known and known[child.key].shows(child, wanted):
                continue
            try:
                with self.tracking.connected():  # turns what MLflow raises into our error, for this child alone
                    known[child.key] = self._show(client, child, known.get(child.key), wanted)
            except TrackingError as error:
                known.pop(child.key, None)  # it may have been deleted; it is looked for anew
                failures.append(error)
                if len(failures) == PATIENCE:
                    break
        try:
            self._show_parent(client, report, parent, at_work=True)
        except Exception:
            self._parent_id, self._shown = "", None  # the same
            raise
        if failures:
            raise failures[0]

    def _parent(self, client: Any, report: SweepReport) -> str:
        """MLflow's run of the study, made at the first time, by one process only."""
        if not self._parent_id:
            wanted = f"tags.`{ROLE_TAG}` = 'parent' and tags.`{STUDY_TAG}` = '{report.study}'"
            with self.tracking.store.locked():
                found = next(self._search(client, wanted), None)
                if found is None:
                    tags = {STUDY_TAG: report.study, ROLE_TAG: "parent", "mlflow.source.name": "ratchet"}
                    start_ms = round(min((t.begun for t in report.trials), default=time.time()) * 1000)
                    found = client.create_run(self._experiment(client), start_ms, tags, report.study)
            self._parent_id = str(found.info.run_id)
        return self._parent_id

    def _children(self, client: Any, study: str) -> dict[str, _ChildRunState]:
        if self._known is None:
            found = {}
            for run in self._search(client, f"tags.`{STUDY_TAG}` = '{study}'"):
                tags = run.data.tags
                if key := tags.get(RUN_TAG) or tags.get(KEY_TAG):
                    found[key] = _ChildRunState(run.info.run_id, dict(tags))
            self._known = found
        return self._known

    def _show(
        self, client: Any, child: ChildRun, known: _ChildRunState | None, wanted: Mapping[str, str]
    ) -> _ChildRunState:
        """Bring one child up to date: figures first, then its status, and its state last."""
        run = client.get_run(known.mlflow_id) if known else self._found(client, child)
        mlflow_id, data, old = str(run.info.run_id), run.data, run.info.status
        missing = {key: value for key, value in child.values.items() if key not in data.params}
        at_ms = round(child.ended * 1000)
        points = [(key, value, at_ms, 0) for key, value in child.figures.items() if data.metrics.get(key) != value]
        unsent = list(child.curve.items())[max(0, known.points if known else 0) :]
        # The time is one that stays, or a point sent again would be another one.
        points += [("curve/validation_loss", loss, run.info.start_time, rows) for rows, loss in unsent]
        _log_points(client, mlflow_id, points, missing)
        if child.status is not None and STATE_TAG in wanted:
            if old not in (child.status, "FINISHED"):
                client.set_terminated(mlflow_id, child.status, at_ms)
        elif child.status is None and data.tags.get(STATE_TAG, "running") != "running" and old not in ACTIVE:
            client.update_run(mlflow_id, status="RUNNING")  # one that was pruned goes on
        if run.info.run_name != child.name:
            client.update_run(mlflow_id, name=child.name)
        _set_tags(client, mlflow_id, data.tags, wanted)
        return _ChildRunState(mlflow_id, {**data.tags, **wanted}, len(child.curve))

    def _found(self, client: Any, child: ChildRun) -> Any:
        """The child's run in MLflow, made if it is not there."""
        start_ms = round(child.begun * 1000)
        if child.run_id is not None:
            return self.tracking.find_or_create(child.run_id, start_ms)
        with self.tracking.store.locked():
            found = next(self._search(client, f"tags.`{KEY_TAG}` = '{child.key}'"), None)
            tags = {KEY_TAG: child.key, "mlflow.source.name": "ratchet"}
            return found or client.create_run(self._experiment(client), start_ms, tags, child.name)

    def _show_parent(self, client: Any, report: SweepReport, parent: str, *, at_work: bool) -> None:
        further = {key: float(value) for key, value in self.figures(report).items() if math.isfinite(value)}
        metrics, tags = tracking_payload.summary_metrics(report) | further, tracking_payload.parent_tags(report)
        tags |= {HOST_TAG: socket.gethostname()} if at_work else {}
        if (metrics, tags, at_work) == self._shown:
            return
        run = client.get_run(parent)
        over = sum(trial.is_over for trial in report.trials)
        at_ms = round(max((max(t.begun, t.ended or 0.0) for t in report.trials), default=0.0) * 1000)
        changed = {key: value for key, value in metrics.items() if run.data.metrics.get(key) != value}
        points = [
            (key, value, _point_time_ms(client, parent, key, over, at_ms), over) for key, value in changed.items()
        ]
        params = {
            key: value for key, value in tracking_payload.parent_params(report).items() if key not in run.data.params
        }
        _log_points(client, parent, points, params)
        _set_tags(client, parent, run.data.tags, tags)
        if at_work and run.info.status != "RUNNING":
            client.update_run(parent, status="RUNNING")
        self._shown = (metrics, tags, at_work)

    def _experiment(self, client: Any) -> str:
        if not self._experiment_id:
            self._experiment_id = str(client.get_experiment_by_name(self.tracking.experiment).experiment_id)
        return self._experiment_id

    def _search(self, client: Any, wanted: str) -> Iterator[Any]:
        """All runs of the experiment that fit, the oldest first: MLflow gives at most 1,000 at once."""
        token = None
        while True:
            order = ["attributes.start_time ASC"]
            page = client.search_runs([self._experiment(client)], wanted, order_by=order, page_token=token)
            yield from page
            token = page.token
            if not token:
                return


def _point_time_ms(client: Any, mlflow_id: str, key: str, over: int, at_ms: int) -> int:
    """Time of a figure of the study after `over` trials: of the report, so that the same report gives the same point.

    MLflow shows the point of the highest step and, of those, of the latest time: a value that changes although no trial
    has ended, as importances do that were computed anew, is to be later than the one it takes the place of.
    """
    alike = [int(point.timestamp) for point in client.get_metric_history(mlflow_id, key) if point.step == over]
    return max([at_ms, *(time_ms + 1 for time_ms in alike)])


def _log_points(
    client: Any, mlflow_id: str, points: Sequence[tuple[str, float, int, int]], params: Mapping[str, str]
) -> None:
    """Send metric points (key, value, time in ms, step) and params; points that are there already stay one."""
    from mlflow.entities import Metric, Param

    metrics = [Metric(*point) for point in points]
    if params:
        log_batch(client, mlflow_id, params=[Param(key, value) for key, value in params.items()])
    for start in range(0, len(metrics), MAX_BATCH):
        log_batch(client, mlflow_id, metrics=metrics[start : start + MAX_BATCH])


def _set_tags(client: Any, mlflow_id: str, there: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    from mlflow.entities import RunTag

    new = [RunTag(key, value) for key, value in wanted.items() if there.get(key, "") != value]
    if new:  # one call, one transaction
        log_batch(client, mlflow_id, tags=new)

"""Logs sweeps to MLflow: the study is a parent run, and each trial is a child run of it.

`client.py` logs a child by replaying a journal, and finds the child by its run id. This module adds a parent, a name,
and the outcome as a trial. Every call may be interrupted and repeated. The state of a trial is written last, so a final
state means that the trial is complete in MLflow. The times of metric points come from the report, so a repeated call
adds no points.
"""

import math
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.errors import TrackingError
from ratchet.storage.records.sweep import SweepReport
from ratchet.tracking.mlflow.client import MlflowTracker
from ratchet.tracking.mlflow.experiments import HOST_TAG, log_batch, run_tags
from ratchet.tuning import tracking_sync
from ratchet.tuning.tracking_sync import (
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

MAX_BATCH = 800
"""Maximum number of metrics per call of log_batch, which takes at most 1,000 items in all."""
ACTIVE = ("RUNNING", "FINISHED")
"""Statuses of MLflow's runs. A resumed trial whose run has one of them is not set to RUNNING."""
MAX_FAILURES = 3
"""Number of trials that could not be sent before an update gives up, because MLflow may take 20 s to fail."""


@dataclass
class _ChildRunState:
    """State of a child run in MLflow, as far as this process knows."""

    mlflow_id: str
    tags: dict[str, str]
    points: int = -1
    """Number of points of the curve that this process has sent. -1: unknown."""

    def shows(self, child: ChildRun, tags: Mapping[str, str]) -> bool:
        """Return whether MLflow has everything of the child.

        The curve of a child that has ended is not compared: its final state, which is written last, means that it is
        complete.
        """
        has_tags = all(self.tags.get(key, "") == value for key, value in tags.items())
        return has_tags and (self.points == len(child.curve) or child.status is not None)


@dataclass
class MlflowSweepTracker:
    """Tracker of one study, in the experiment of `tracking`. Only one thread may use it.

    Every method raises TrackingError if MLflow cannot be read or written. Nothing is lost then: call the method again.
    """

    tracking: MlflowTracker
    figures: Callable[[SweepReport], Mapping[str, float]]
    """Further metrics of the parent, by key, such as the savings of pruning."""
    _parent_id: str = ""
    _known: dict[str, _ChildRunState] | None = None
    """States of the children, by key of the child. None: not read yet."""
    _shown: object = None
    """Metrics, tags and activity that this process has sent for the parent."""

    def completed_trials(self, study: str) -> dict[str, int]:
        """Return trial numbers by run id, for trials whose end is complete in MLflow. MLflow is read once."""
        known = self._children(study)
        final = {key: child.tags for key, child in known.items() if child.tags.get(STATE_TAG, "running") != "running"}
        return {key: int(tags[TRIAL_TAG]) for key, tags in final.items() if tags.get(TRIAL_TAG, "").isdecimal()}

    def update(self, report: SweepReport, pending: Collection[str] = ()) -> None:
        """Send the changes of the report of an active study, and set its parent to RUNNING.

        Trials of runs in `pending` are not shown as ended yet, because their journals are not completely sent.
        """
        with self.tracking.connected() as client:
            parent, known = self._parent(client, report), self._children(report.study)
            failures: list[TrackingError] = []
            for child in tracking_sync.build_child_runs(report):
                tags = {**child.tags, PARENT_TAG: parent}
                if child.key not in pending:
                    tags[STATE_TAG] = child.state
                if child.key in known and known[child.key].shows(child, tags):
                    continue
                try:
                    with self.tracking.connected():  # converts MLflow's errors, for this child alone
                        known[child.key] = self._show(client, child, known.get(child.key), tags)
                except TrackingError as error:
                    known.pop(child.key, None)  # the child may have been deleted: search for it again
                    failures.append(error)
                    if len(failures) == MAX_FAILURES:
                        break
            try:
                self._show_parent(client, report, parent, is_active=True)
            except Exception:
                self._parent_id, self._shown = "", None  # the parent may have been deleted, too
                raise
            if failures:
                raise failures[0]

    def finish(self, report: SweepReport, artifacts: Artifacts, status: Status) -> None:
        """Send the summary of the last report (`update` sends its trials), add files to the parent and end it.

        Artifacts are files, by directory within the parent's artifacts (`""` is its root).
        """
        with self.tracking.connected() as client:
            try:
                self._show_parent(client, report, self._parent(client, report), is_active=False)
                for folder, paths in artifacts.items():
                    for path in paths:
                        client.log_artifact(self._parent_id, str(path), folder or None)
            finally:  # MLflow must show the correct status even if the disk has no space for a plot
                if self._parent_id:
                    client.set_terminated(self._parent_id, status, round(time.time() * 1000))

    def reconcile(self, alive: Callable[[str], bool]) -> list[str]:
        """End the parents of studies on which no process works. Return a line for each ended parent."""
        notices = []
        with self.tracking.connected() as client:
            query = f"tags.`{ROLE_TAG}` = 'parent' and attributes.status = 'RUNNING'"
            for run in self.tracking.search(query):
                study = run.data.tags.get(STUDY_TAG, "")
                host = run.data.tags.get(HOST_TAG, socket.gethostname())
                if self.tracking.store.server is not None and host != socket.gethostname():
                    continue  # started on another machine, which shares this server
                if not alive(study):
                    client.set_terminated(run.info.run_id, "KILLED", round(time.time() * 1000))
                    notices.append(f"sweep {study}: was RUNNING in MLflow, but is not active; now KILLED")
        return notices

    def _parent(self, client: Any, report: SweepReport) -> str:
        """Return MLflow's id of the parent, which is the run of the study. One process creates the parent, once."""
        if not self._parent_id:
            query = f"tags.`{ROLE_TAG}` = 'parent' and tags.`{STUDY_TAG}` = '{report.study}'"
            with self.tracking.store.locked():
                run = next(self.tracking.search(query), None)
                if run is None:
                    tags = {STUDY_TAG: report.study, ROLE_TAG: "parent", "mlflow.source.name": "ratchet"}
                    start_ms = round(min((t.started for t in report.trials), default=time.time()) * 1000)
                    run = client.create_run(self.tracking.id, start_ms, tags, report.study)
            self._parent_id = str(run.info.run_id)
        return self._parent_id

    def _children(self, study: str) -> dict[str, _ChildRunState]:
        if self._known is None:
            children = {}
            for run in self.tracking.search(f"tags.`{STUDY_TAG}` = '{study}'"):
                tags = run.data.tags
                if key := tags.get(RUN_TAG) or tags.get(KEY_TAG):
                    children[key] = _ChildRunState(run.info.run_id, dict(tags))
            self._known = children
        return self._known

    def _show(
        self, client: Any, child: ChildRun, known: _ChildRunState | None, tags: Mapping[str, str]
    ) -> _ChildRunState:
        """Update one child in MLflow: first its metrics, then its status, and last the tags with its state."""
        run = client.get_run(known.mlflow_id) if known else self._find_or_create_child(client, child)
        mlflow_id, data, old_status = str(run.info.run_id), run.data, run.info.status
        missing_params = {key: value for key, value in child.values.items() if key not in data.params}
        at_ms = round(child.ended * 1000)
        points = [(key, value, at_ms, 0) for key, value in child.metrics.items() if data.metrics.get(key) != value]
        unsent = list(child.curve.items())[max(0, known.points if known else 0) :]
        # The time must be the same at every call, because MLflow would store a point with another time again.
        points += [("curve/validation_loss", loss, run.info.start_time, rows) for rows, loss in unsent]
        _log_points(client, mlflow_id, points, missing_params)
        if child.status is not None and STATE_TAG in tags:
            if old_status not in (child.status, "FINISHED"):
                client.set_terminated(mlflow_id, child.status, at_ms)
        elif child.status is None and data.tags.get(STATE_TAG, "running") != "running" and old_status not in ACTIVE:
            client.update_run(mlflow_id, status="RUNNING")  # a pruned trial is resumed
        if run.info.run_name != child.name:
            client.update_run(mlflow_id, name=child.name)
        _set_tags(client, mlflow_id, data.tags, tags)
        return _ChildRunState(mlflow_id, {**data.tags, **tags}, len(child.curve))

    def _find_or_create_child(self, client: Any, child: ChildRun) -> Any:
        """Return the child's run in MLflow. Create it if it does not exist."""
        start_ms = round(child.started * 1000)
        if child.run_id is not None:
            return self.tracking.find_or_create(child.run_id, start_ms)
        with self.tracking.store.locked():
            found = next(self.tracking.search(f"tags.`{KEY_TAG}` = '{child.key}'"), None)
            tags = {KEY_TAG: child.key, "mlflow.source.name": "ratchet"}
            return found or client.create_run(self.tracking.id, start_ms, tags, child.name)

    def _show_parent(self, client: Any, report: SweepReport, parent: str, *, is_active: bool) -> None:
        extra_metrics = {key: float(value) for key, value in self.figures(report).items() if math.isfinite(value)}
        metrics, tags = tracking_sync.summary_metrics(report) | extra_metrics, tracking_sync.parent_tags(report)
        tags |= {HOST_TAG: socket.gethostname()} if is_active else {}
        if (metrics, tags, is_active) == self._shown:
            return
        run = client.get_run(parent)
        finished_trials = sum(trial.is_over for trial in report.trials)
        at_ms = round(max((max(t.started, t.ended or 0.0) for t in report.trials), default=0.0) * 1000)
        changed_metrics = {key: value for key, value in metrics.items() if run.data.metrics.get(key) != value}
        points = []
        for key, value in changed_metrics.items():
            # MLflow shows the point of the highest step and, among those, of the latest time. A value that changes
            # although no trial has ended, such as a recomputed importance, must be later than the value before. Equal
            # reports give equal points.
            history = client.get_metric_history(parent, key)
            times = [int(point.timestamp) + 1 for point in history if point.step == finished_trials]
            points.append((key, value, max([at_ms, *times]), finished_trials))
        params = {
            key: value for key, value in tracking_sync.parent_params(report).items() if key not in run.data.params
        }
        _log_points(client, parent, points, params)
        _set_tags(client, parent, run.data.tags, tags)
        if is_active and run.info.status != "RUNNING":
            client.update_run(parent, status="RUNNING")
        self._shown = (metrics, tags, is_active)


def _log_points(
    client: Any, mlflow_id: str, points: Sequence[tuple[str, float, int, int]], params: Mapping[str, str]
) -> None:
    """Send metric points (key, value, time in ms, step) and params. MLflow ignores points that it already has."""
    from mlflow.entities import Metric, Param

    metrics = [Metric(*point) for point in points]
    if params:
        log_batch(client, mlflow_id, params=[Param(key, value) for key, value in params.items()])
    for start in range(0, len(metrics), MAX_BATCH):
        log_batch(client, mlflow_id, metrics=metrics[start : start + MAX_BATCH])


def _set_tags(client: Any, mlflow_id: str, existing: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    new = {key: value for key, value in wanted.items() if existing.get(key, "") != value}
    if new:  # one call, one transaction
        log_batch(client, mlflow_id, tags=run_tags(new))

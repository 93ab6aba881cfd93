"""Logs trainings to MLflow, one MLflow run per training, found by the tag `ratchet.run_id`.

A run is filled by replaying the journal of its training. MLflow's fluent functions are not used, because they keep
global state.
"""

import socket
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ratchet.config.mlflow_environment import resolve_addresses
from ratchet.config.settings import Settings
from ratchet.errors import TrackingError
from ratchet.runs import status as run_status
from ratchet.runs import tracking_payload
from ratchet.runs.directory import RunPaths, list_runs
from ratchet.runs.log import print_message
from ratchet.runs.tracking_payload import read_final_status
from ratchet.storage import digests
from ratchet.storage.layout import ProjectLayout
from ratchet.tracking.mlflow import experiments, run_logger, traces
from ratchet.tracking.mlflow.experiments import HOST_TAG, RUN_TAG, SWEEP_TAG, Experiment, log_batch, run_tags
from ratchet.tracking.mlflow.run_logger import Draw, MlflowRunCallback
from ratchet.tracking.mlflow.traces import EvaluatedAnswer

Artifacts = Mapping[str, Sequence[Path]]
PAGE_TAG = "ratchet.report_digest"


class MlflowTracker(Experiment):
    """An experiment to which trainings are logged.

    Every method raises TrackingError if MLflow cannot be read or written.
    """

    @classmethod
    def open(cls, layout: ProjectLayout, settings: Settings) -> "MlflowTracker":
        """Open the experiment that the settings and the environment name. Raises SettingsError for the environment."""
        addresses = resolve_addresses(settings, layout.mlflow_database)
        if addresses.ignored is not None:
            print_message(addresses.ignored)
        return cls(layout, addresses.experiment, addresses.tracking)

    def create_callback(
        self, paths: RunPaths, settings: Settings, draw: Draw, reconcile: bool = True
    ) -> MlflowRunCallback:
        """Create a callback for this run, which first calls `reconcile`. Nothing is sent yet.

        In a sweep, `reconcile` is False, because a trial that is not in training may be waiting for its next worker.
        """

        def begin() -> None:
            for notice in self.reconcile(paths.root.parent, besides=paths.root.name) if reconcile else ():
                print_message(notice)

        return MlflowRunCallback(self, paths, settings, draw, begin)

    def reconcile(self, runs: Path, besides: str = "", end: Callable[[RunPaths], None] | None = None) -> list[str]:
        """End runs that MLflow shows as RUNNING but that are not in training. Return a line for each ended run.

        A run without a directory is left unchanged, but gets a line, too, unless it belongs to a sweep. The run with
        the id `besides` is skipped, because its own callback is active. `end` is called for each other run, to end it
        in MLflow; without it, only the status of the run is set.
        """
        notices = []
        with self.connected() as client:
            for run in list(self.search(f"attributes.status = 'RUNNING' and tags.`{RUN_TAG}` != ''")):
                run_id = run.data.tags[RUN_TAG]
                paths = RunPaths(runs / run_id)
                if run_id == besides or (self.store.server and run.data.tags.get(HOST_TAG) != socket.gethostname()):
                    continue  # started on another machine, which shares this server
                if not paths.journal.exists():
                    if SWEEP_TAG in run.data.tags:  # another machine may train it, or have trained it
                        continue
                    notices.append(
                        f"run {run_id}: RUNNING in MLflow, but without a directory in {runs}; left unchanged"
                    )
                elif not paths.lock().is_held():
                    status = read_final_status(paths)
                    if end is None:
                        client.set_terminated(
                            run.info.run_id, status, round(run_status.read_progress(paths).last_t * 1000)
                        )
                    else:
                        end(paths)
                    notices.append(f"run {run_id}: was RUNNING in MLflow, but is not in training; now {status}")
        return notices

    def send_missing(self, runs: Path, settings: Settings, draw: Draw) -> list[str]:
        """Call `reconcile`, and send what MLflow lacks: points, files and models of the runs that `reconcile` ends, and
        complete finished runs that MLflow does not have because it was unavailable.
        """

        def send(paths: RunPaths) -> None:
            self.create_callback(paths, settings, draw, reconcile=False).catch_up()

        notices = self.reconcile(runs, end=send)
        known_ids = {run.data.tags[RUN_TAG] for run in self.search(f"tags.`{RUN_TAG}` != ''")}
        for paths in list_runs(runs):
            is_missing = paths.root.name not in known_ids and paths.is_finished() and not paths.lock().is_held()
            if is_missing and tracking_payload.should_report(paths.journal, settings.machine):
                send(paths)
                notices.append(f"run {paths.root.name}: was missing in MLflow; sent")
        return notices

    def views(self, server: str) -> dict[str, str]:
        """Store the saved views of the experiment. Return the address of each view on the server, by name of the
        view."""
        experiments.write_views(self)
        runs = f"{server.rstrip('/')}/#/experiments/{self.id}/runs?workflowType=machine_learning"
        return {view.name: f"{runs}&viewStateShareKey={view.key}" for view in experiments.VIEWS}

    def log_report(
        self, run_id: str, metrics: Mapping[str, float], artifacts: Artifacts, tags: Mapping[str, str]
    ) -> None:
        """Add metrics, files and tags of a later stage to a run of Ratchet's run id. A second call adds nothing.

        A changed metric is added as a later point. Metrics of the run's own model are attached to its logged model too.
        Artifacts are files by directory within the run's artifacts (`""` is its root).
        """
        self._log_report(run_id, self.find(run_id), metrics, artifacts, tags)

    def _log_report(
        self, run_id: str, run: Any, metrics: Mapping[str, float], artifacts: Artifacts, tags: Mapping[str, str]
    ) -> None:
        with self.connected() as client:
            if run is None:
                raise TrackingError(f"run {run_id} is not in {self.store.where}; send its journal first")
            mlflow_id = run.info.run_id
            files = [(path, folder or None) for folder, paths in artifacts.items() for path in paths]
            self.call_all([partial(client.log_artifact, mlflow_id, str(path), folder) for path, folder in files])
            new_points = run_logger.build_report_points(self, client, run, metrics)
            changed_tags = {key: value for key, value in tags.items() if run.data.tags.get(key) != value}
            if new_points or changed_tags:  # tags are written last, because they mean that the files are complete
                new_points = run_logger.attribute_metrics(self, client, run, new_points)
                log_batch(client, mlflow_id, metrics=new_points, tags=run_tags(changed_tags))

    def report(
        self, run: MlflowRunCallback, metrics: Mapping[str, float], artifacts: Artifacts, tags: Mapping[str, str],
        grace_s: float,
    ) -> None:  # fmt: skip
        """Send what MLflow lacks of the run, then results of a stage. A failure of MLflow is only printed.

        The stage's own output has the metrics too, so nothing is lost: repeat the stage when MLflow is available again.
        The wait for a slow server is at most `grace_s` seconds.
        """

        def send() -> None:
            self._log_report(run.run_id, self._send_journal(run), metrics, artifacts, tags)

        _send_within_grace(run.run_id, "metrics of this stage are", send, grace_s)

    def report_answers(self, run_id: str, answers: Sequence[EvaluatedAnswer], grace_s: float) -> None:
        """Log generated answers as traces of a run that MLflow has; they replace its earlier ones. A failure of MLflow
        is only printed. The wait for a slow server is at most `grace_s` seconds.
        """

        def send() -> None:
            if (mlflow_run := self.find(run_id)) is not None:  # otherwise `report` has printed why it is missing
                with self.connected() as client:
                    traces.log_answers(self, client, mlflow_run, answers)

        _send_within_grace(run_id, "generated answers are", send, grace_s)

    def publish(
        self, run: MlflowRunCallback, page: Path, more: Callable[[Path], Sequence[Path]], grace_s: float
    ) -> None:
        """Add the HTML report to a finished run, unless the run has it already. A failure of MLflow is only printed.

        `more` writes further files into a directory, and returns them. The wait for a slow server is at most `grace_s`
        seconds.
        """

        def send() -> None:
            mlflow_run, tags = self._send_journal(run), {PAGE_TAG: digests.hash_file(page)}
            if mlflow_run is not None and mlflow_run.data.tags.get(PAGE_TAG) == tags[PAGE_TAG]:
                return
            with tempfile.TemporaryDirectory() as scratch:
                self._log_report(run.run_id, mlflow_run, {}, {"": [page], "plots": more(Path(scratch))}, tags)

        _send_within_grace(run.run_id, "its report is", send, grace_s)

    def _send_journal(self, run: MlflowRunCallback) -> Any:
        """Send what MLflow lacks of the journal. Return MLflow's run; None if there is neither such a run nor a
        directory."""
        mlflow_run = self.find(run.run_id)
        if run.has_directory and (mlflow_run is None or not run.is_complete(mlflow_run)):
            run.catch_up()
            mlflow_run = self.find(run.run_id)
        return mlflow_run


def _send_within_grace(run_id: str, content: str, send: Callable[[], None], grace_s: float) -> None:
    """Send to MLflow. Print a line if that fails, or is not complete after `grace_s` seconds."""
    failures: list[Exception] = []

    def run() -> None:
        try:
            send()
        except Exception as error:  # the caller's thread raises or prints it
            failures.append(error)

    thread = threading.Thread(target=run, name="tracking", daemon=True)
    thread.start()
    thread.join(grace_s)
    reason = f"not complete after {grace_s:g} s (machine.tracking_timeout_s); run the command again to send it"
    for error in [] if thread.is_alive() else failures:
        if not isinstance(error, TrackingError):
            raise error
        reason = str(error)
    if thread.is_alive() or failures:
        print_message(f"run {run_id}: {content} not logged to MLflow: {reason}")

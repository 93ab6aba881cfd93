"""MLflow runs: one per training, filled by replaying its journal, found by the tag `ratchet.run_id`.

MLflow's fluent functions (global state) are not used.
"""

import socket
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from ratchet.config.settings import Settings
from ratchet.errors import TrackingError
from ratchet.runs import status as run_status
from ratchet.runs import tracking_payload
from ratchet.runs.directory import RunPaths, list_runs
from ratchet.runs.log import print_message
from ratchet.runs.tracking_payload import read_final_status
from ratchet.storage import digests
from ratchet.storage.layout import ProjectLayout
from ratchet.tracking.mlflow import experiments, run_logger
from ratchet.tracking.mlflow.experiments import HOST_TAG, RUN_TAG, SWEEP_TAG, Experiment, log_batch, run_tags
from ratchet.tracking.mlflow.run_logger import Draw, MlflowRunCallback

Artifacts = Mapping[str, Sequence[Path]]
PAGE_TAG = "ratchet.report_digest"


class MlflowTracker:
    """One experiment in the project's own MLflow store, or on a server; opened, and created, at the first use.

    Every method raises TrackingError if MLflow cannot be read or written.
    """

    def __init__(self, layout: ProjectLayout, experiment: str, server: str | None = None) -> None:
        self.experiment = experiment
        self._place = Experiment(layout, experiment, server)
        self.store = self._place.store

    def create_callback(
        self, paths: RunPaths, settings: Settings, draw: Draw, reconcile: bool = True
    ) -> MlflowRunCallback:
        """Create a callback for this run. Nothing is sent yet.

        Args:
            paths: of the run.
            settings: of the project; training settings are read from the run itself.
            draw: draws the journal (first argument) into a PNG file (second).
            reconcile: whether it first ends runs that are not in training; not in a sweep, where a trial may be between
                two workers.
        """

        def begin() -> None:
            for note in self.reconcile(paths.root.parent, besides=paths.root.name) if reconcile else ():
                print_message(note)

        return MlflowRunCallback(self._place, paths, settings, draw, begin)

    def reconcile(self, runs: Path, besides: str = "", end: Callable[[RunPaths], None] | None = None) -> list[str]:
        """End runs that MLflow shows as RUNNING but that are not in training. Returns a line for each of them, and for
        each that has no directory.

        Args:
            runs: directory of the run directories.
            besides: run id to skip, because its own callback is active.
            end: called for such a run; None: only its status is set.
        """
        notes = []
        with self.connected() as client:
            for run in self._place.running_runs():
                run_id = run.data.tags[RUN_TAG]
                paths = RunPaths(runs / run_id)
                if run_id == besides or (self.store.server and run.data.tags.get(HOST_TAG) != socket.gethostname()):
                    continue  # started on another machine, which shares this server
                if not paths.journal.exists():
                    if SWEEP_TAG in run.data.tags:  # another machine may train it, or have trained it
                        continue
                    notes.append(f"run {run_id}: RUNNING in MLflow, but without a directory in {runs}; left unchanged")
                elif not paths.lock().is_held():
                    status = read_final_status(paths)
                    if end is None:
                        client.set_terminated(
                            run.info.run_id, status, round(run_status.read_progress(paths).last_t * 1000)
                        )
                    else:
                        end(paths)
                    notes.append(f"run {run_id}: was RUNNING in MLflow, but is not in training; now {status}")
        return notes

    def send_missing(self, runs: Path, settings: Settings, draw: Draw) -> list[str]:
        """Call `reconcile` and send what those runs lack (points, files, models), and finished runs that MLflow lacks
        entirely because it was unavailable. For the arguments see `reconcile` and `create_callback`."""

        def send(paths: RunPaths) -> None:
            self.create_callback(paths, settings, draw, reconcile=False).catch_up()

        notes, known = self.reconcile(runs, end=send), self._place.known_run_ids()
        for paths in list_runs(runs):
            is_missing = paths.root.name not in known and paths.is_finished() and not paths.lock().is_held()
            if is_missing and tracking_payload.should_report(paths.journal, settings.machine):
                send(paths)
                notes.append(f"run {paths.root.name}: was missing in MLflow; sent")
        return notes

    def views(self, server: str) -> dict[str, str]:
        """Store the saved views of the experiment. Returns their addresses on the server, by name."""
        experiments.write_views(self._place)
        return {view.name: experiments.view_url(server, self._place.id, view) for view in experiments.VIEWS}

    def log_report(
        self, run_id: str, metrics: Mapping[str, float], artifacts: Artifacts, tags: Mapping[str, str]
    ) -> None:
        """Add metrics, files and tags of a later stage to a run; repeating it adds nothing.

        Args:
            run_id: Ratchet's run id, not MLflow's.
            metrics: by key, such as `test/candidate/accuracy`. A changed value is added as a later point. Metrics of
                the run's own model are attached to its logged model too.
            artifacts: files, by directory within the run's artifacts (`""` is its root).
            tags: replace existing ones.
        """
        self._log_report(run_id, self.find(run_id), metrics, artifacts, tags)

    def _log_report(
        self, run_id: str, run: Any, metrics: Mapping[str, float], artifacts: Artifacts, tags: Mapping[str, str]
    ) -> None:
        """`log_report` for an MLflow run that was just read; None: the run does not exist."""
        with self.connected() as client:
            if run is None:
                raise TrackingError(f"run {run_id} is not in {self.store.where}; send its journal first")
            mlflow_id = run.info.run_id
            files = [(path, folder or None) for folder, paths in artifacts.items() for path in paths]
            self._place.call_all([partial(client.log_artifact, mlflow_id, str(path), folder) for path, folder in files])
            new = run_logger.build_report_points(self._place, client, run, metrics)
            changed = {key: value for key, value in tags.items() if run.data.tags.get(key) != value}
            if new or changed:  # tags are written last, because they mean that the files are complete
                new = run_logger.attribute_metrics(self._place, client, run, new)
                log_batch(client, mlflow_id, metrics=new, tags=run_tags(changed))

    def report(
        self, run: MlflowRunCallback, metrics: Mapping[str, float], artifacts: Artifacts, tags: Mapping[str, str],
        grace_s: float,
    ) -> None:  # fmt: skip
        """`log_report` for a stage: first sends what MLflow lacks of the run; a failure of MLflow is only printed.

        The stage's own output has the metrics too, so nothing is lost: repeat the stage when MLflow is available again.
        Waits for a slow server at most `grace_s`.
        """

        def send() -> None:
            self._log_report(run.run_id, self._send_journal(run), metrics, artifacts, tags)

        _send_within_grace(run.run_id, "metrics of this stage are", send, grace_s)

    def publish(
        self, run: MlflowRunCallback, page: Path, more: Callable[[Path], Sequence[Path]], grace_s: float
    ) -> None:
        """Add the HTML report of a finished run unless it is there; waits as `report` does.

        Args:
            run: of the report.
            page: HTML file.
            more: writes further files into the directory that it is given.
            grace_s: see `report`.
        """

        def send() -> None:
            found, tags = self._send_journal(run), {PAGE_TAG: digests.hash_file(page)}
            if found is not None and found.data.tags.get(PAGE_TAG) == tags[PAGE_TAG]:
                return
            with tempfile.TemporaryDirectory() as scratch:
                self._log_report(run.run_id, found, {}, {"": [page], "plots": more(Path(scratch))}, tags)

        _send_within_grace(run.run_id, "its report is", send, grace_s)

    def _send_journal(self, run: MlflowRunCallback) -> Any:
        """Send what MLflow lacks of the journal. Returns MLflow's run; None if there is neither a run nor a journal."""
        found = self.find(run.run_id)
        if run.has_directory and (found is None or not run.is_complete(found)):
            run.catch_up()
            found = self.find(run.run_id)
        return found

    def find(self, run_id: str) -> Any:
        """MLflow's run of Ratchet's run id (the oldest, if there are several), or None."""
        return self._place.find(run_id)

    def find_or_create(self, run_id: str, start_ms: int) -> Any:
        """MLflow's run of this run id; created once, by one process."""
        return self._place.find_or_create(run_id, start_ms)

    def connected(self) -> AbstractContextManager[Any]:
        """Yield MLflow's client with the experiment created; failures are TrackingErrors."""
        return self._place.connected()


def _send_within_grace(run_id: str, content: str, send: Callable[[], None], grace_s: float) -> None:
    """Send to MLflow; print a line if that fails or is not complete after `grace_s` seconds."""
    failures: list[Exception] = []

    def run() -> None:
        try:
            send()
        except Exception as error:  # raised or printed below
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

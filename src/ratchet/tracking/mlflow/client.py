"""MLflow runs: one for each training, fed by replaying its journal, found again by the tag `ratchet.run_id`.

MLflow's fluent functions (global state) are not used. What a run looks like there: docs/tracking.md.
"""

import socket
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from ratchet.config.schema import Settings
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
PAGE_TAG = "ratchet.page_digest"


class MlflowTracker:
    """One experiment in the project's own MLflow store, or on a server; opened, and made, at the first use.

    Every method raises TrackingError when MLflow's files cannot be read or written.
    """

    def __init__(self, layout: ProjectLayout, experiment: str, server: str | None = None) -> None:
        self.experiment = experiment
        self._place = Experiment(layout, experiment, server)
        self.store = self._place.store

    def observer(self, paths: RunPaths, settings: Settings, draw: Draw, reconcile: bool = True) -> MlflowRunCallback:
        """An observer of this run; touches nothing yet.

        Args:
            paths: the run.
            settings: of the project; what is trained is read from the run itself.
            draw: makes a PNG (second argument) of a journal (first).
            reconcile: whether it begins with ending what nobody trains; not in a sweep, where a trial may be between
                two workers.
        """

        def begin() -> None:
            for note in self.reconcile(paths.root.parent, besides=paths.root.name) if reconcile else ():
                print_message(note)

        return MlflowRunCallback(self._place, paths, settings, draw, begin)

    def reconcile(self, runs: Path, besides: str = "", end: Callable[[RunPaths], None] | None = None) -> list[str]:
        """End what is RUNNING in MLflow though nobody trains it; returns a line for each, or for one not in `runs`.

        Args:
            runs: folder of the run directories.
            besides: run id to leave alone: its own observer is at work.
            end: does it, given the run; None: its status alone is set.
        """
        notes = []
        with self.connected() as client:
            for run in self._place.running():
                run_id = run.data.tags[RUN_TAG]
                paths = RunPaths(runs / run_id)
                if run_id == besides or (self.store.server and run.data.tags.get(HOST_TAG) != socket.gethostname()):
                    continue  # others use this server
                if not paths.journal.exists():
                    if SWEEP_TAG in run.data.tags:  # another machine may train it, or have trained it
                        continue
                    notes.append(f"run {run_id}: RUNNING in MLflow, no directory in {runs}; left as it is")
                elif not paths.lock().held_elsewhere():
                    status = read_final_status(paths)
                    if end is None:
                        client.set_terminated(
                            run.info.run_id, status, round(run_status.read_progress(paths).last_t * 1000)
                        )
                    else:
                        end(paths)
                    notes.append(f"run {run_id}: was RUNNING in MLflow, nobody trains it; now {status}")
        return notes

    def complete(self, runs: Path, settings: Settings, draw: Draw) -> list[str]:
        """`reconcile`, and send what those runs lack: points, files, models; and finished runs that MLflow has never
        heard of, since it was away all the time. Arguments as there and for `observer`."""

        def send(paths: RunPaths) -> None:
            self.observer(paths, settings, draw, reconcile=False).catch_up()

        notes, known = self.reconcile(runs, end=send), self._place.known()
        for paths in list_runs(runs):
            unheard = paths.root.name not in known and paths.is_finished() and not paths.lock().held_elsewhere()
            if unheard and tracking_payload.should_report(paths.journal, settings.machine):
                send(paths)
                notes.append(f"run {paths.root.name}: MLflow did not have it; now it has")
        return notes

    def views(self, server: str) -> dict[str, str]:
        """Store our views of the experiment; where MLflow's pages at `server` show each, by name."""
        experiments.write_views(self._place)
        return {view.name: experiments.view_url(server, self._place.id, view) for view in experiments.VIEWS}

    def log_report(
        self, run_id: str, metrics: Mapping[str, float], artifacts: Artifacts, tags: Mapping[str, str]
    ) -> None:
        """Add figures, files and tags of a later stage to a run; repeating it adds nothing.

        Args:
            run_id: Ratchet's, not MLflow's.
            metrics: by key, e.g. `test/candidate/accuracy`; a changed value is stored beside the old one and shown.
                Those of the run's own model are its logged model's as well.
            artifacts: files, by folder within the run's artifacts (`""` is its root).
            tags: replace those that are there.
        """
        self._log_report(run_id, self.find(run_id), metrics, artifacts, tags)

    def _log_report(
        self, run_id: str, run: Any, metrics: Mapping[str, float], artifacts: Artifacts, tags: Mapping[str, str]
    ) -> None:
        """`log_report`, given MLflow's run as it is now; None: it has none."""
        with self.connected() as client:
            if run is None:
                raise TrackingError(f"run {run_id} is not in {self.store.where}; send its journal first")
            mlflow_id = run.info.run_id
            files = [(path, folder or None) for folder, paths in artifacts.items() for path in paths]
            self._place.each([partial(client.log_artifact, mlflow_id, str(path), folder) for path, folder in files])
            new = run_logger.build_report_points(self._place, client, run, metrics)
            changed = {key: value for key, value in tags.items() if run.data.tags.get(key) != value}
            if new or changed:  # tags come last: they say that the files are there
                new = run_logger.attribute_metrics(self._place, client, run, new)
                log_batch(client, mlflow_id, metrics=new, tags=run_tags(changed))

    def report(
        self, run: MlflowRunCallback, metrics: Mapping[str, float], artifacts: Artifacts, tags: Mapping[str, str],
        grace_s: float,
    ) -> None:  # fmt: skip
        """`log_report` for a stage: sends first what MLflow has missed of the run; a dead MLflow is a notice.

        Figures are in the stage's own output as well, so nothing is lost: repeat the stage when MLflow is back. A slow
        one is waited for no longer than `grace_s`.
        """

        def tell() -> None:
            self._log_report(run.run_id, self._caught_up(run), metrics, artifacts, tags)

        _send_within_grace(run.run_id, "figures of this stage are", tell, grace_s)

    def publish(
        self, run: MlflowRunCallback, page: Path, more: Callable[[Path], Sequence[Path]], grace_s: float
    ) -> None:
        """Add the page of a finished run, unless it is there; waits as `report` does.

        Args:
            run: of the page.
            page: an HTML file.
            more: makes further pages, in the folder that it is given.
            grace_s: as for `report`.
        """

        def tell() -> None:
            found, told = self._caught_up(run), {PAGE_TAG: digests.hash_file(page)}
            if found is not None and found.data.tags.get(PAGE_TAG) == told[PAGE_TAG]:
                return
            with tempfile.TemporaryDirectory() as scratch:
                self._log_report(run.run_id, found, {}, {"": [page], "plots": more(Path(scratch))}, told)

        _send_within_grace(run.run_id, "its page is", tell, grace_s)

    def _caught_up(self, run: MlflowRunCallback) -> Any:
        """MLflow's run, which has all that the journal says; None: there is none, nor a journal here."""
        found = self.find(run.run_id)
        if run.is_here and (found is None or not run.is_told(found)):
            run.catch_up()
            found = self.find(run.run_id)
        return found

    def find(self, run_id: str) -> Any:
        """MLflow's run of Ratchet's run id, the oldest if there are more, or None."""
        return self._place.find(run_id)

    def find_or_create(self, run_id: str, start_ms: int) -> Any:
        """MLflow's run of this run id, made at the first time, by one process only."""
        return self._place.find_or_create(run_id, start_ms)

    def connected(self) -> AbstractContextManager[Any]:
        """MLflow's client, the experiment made; failures are TrackingErrors."""
        return self._place.connected()


def _send_within_grace(run_id: str, what: str, tell: Callable[[], None], grace_s: float) -> None:
    """Tell MLflow; if it fails, or has not heard all of it after `grace_s` seconds, a line says so."""
    failed: list[Exception] = []

    def run() -> None:
        try:
            tell()
        except Exception as error:  # raised again, or told, where it is waited for
            failed.append(error)

    thread = threading.Thread(target=run, name="tracking", daemon=True)
    thread.start()
    thread.join(grace_s)
    why = f"no end of it after {grace_s:g} s (machine.tracking_grace_s); repeating the command sends it"
    for error in [] if thread.is_alive() else failed:
        if not isinstance(error, TrackingError):
            raise error
        why = str(error)
    if thread.is_alive() or failed:
        print_message(f"run {run_id}: {what} not logged to MLflow: {why}")

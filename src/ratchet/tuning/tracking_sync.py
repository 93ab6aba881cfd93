"""Sends the progress of a sweep to MLflow, in a thread of the sweep command; workers do not know MLflow.

It replays the journals of local runs to callbacks, as a supervisor does, and then updates the study. Runs that MLflow
has completely are not sent again. Data that MLflow does not accept now is sent later, at the latest at the next start
of the sweep.
"""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Protocol

from ratchet.errors import TrackingError, first_line
from ratchet.runs.callbacks import RunCallback
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.runs.log import print_message
from ratchet.runs.status import RunProgress
from ratchet.storage.records.sweep import SweepReport, Trial
from ratchet.tuning import tracking_payload
from ratchet.tuning.tracking_payload import ChildRun, Status

INTERVAL_S = 2.0
MAX_EVENTS = 5000
MAX_ENDS_PER_ROUND = 8
"""Completed trainings sent in one round, so that running ones are updated too. Each takes half a second."""
MAX_FAILURES_PER_ROUND = 3
"""After so many failures a round ends, because each may take 20 s."""


class SweepTracker(Protocol):
    """Where the study is shown (services.sweep_tracking)."""

    def completed_trials(self, study: str) -> Mapping[str, int]:
        """By run id the number of the trial whose end is shown completely."""

    def update(self, report: SweepReport, pending: Collection[str]) -> None:
        """Show the report; runs that are `pending` not as over."""


class _JournalFeed:
    """Replays one journal to one callback."""

    def __init__(self, callback: RunCallback, journal: Path) -> None:
        self._callback = callback
        self._reader = JournalReader(journal)
        self._events: list[JournalEvent] = []
        self._is_finished = False

    def send(self, is_late: Callable[[], bool]) -> bool:
        """Send new events; return False if time is up before all are sent. Events that failed are sent again."""
        while not is_late():
            if not self._events:
                self._events = list(islice(self._reader.read(), MAX_EVENTS))
                if not self._events:
                    return True
            self._callback.on_events(self._events)
            for event in self._events:
                if event.kind in ("attempt_started", "finished"):
                    self._is_finished = event.kind == "finished"
            self._events = []
        return False

    def on_end(self, status: Status) -> None:
        """Send the end: a complete training is FINISHED, whatever the state of the trial."""
        self._callback.on_end("FINISHED" if self._is_finished else status)


class SweepTrackingSync(threading.Thread):
    """Sends a sweep to MLflow while it runs.

    Args:
        runs: folder of the run directories.
        report: returns the current report; called in this thread.
        callback: creates the callback of a run from its id and trial.
        tracker: stores the study; used by this thread only.
        prepare: called in this thread first, for example to end runs that earlier sweeps left RUNNING.
    """

    def __init__(
        self,
        runs: Path,
        report: Callable[[], SweepReport],
        callback: Callable[[str, Trial], RunCallback],
        tracker: SweepTracker,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(name="sweep tracking", daemon=True)
        self._runs, self._report, self._callback, self._tracker = runs, report, callback, tracker
        self._prepare = prepare
        self._settled: dict[str, int] | None = None
        """By run id the number of the trial whose end was sent; None: MLflow was not queried yet."""
        self._feeds: dict[str, _JournalFeed] = {}
        self._failures: Counter[str] = Counter()
        self._reported: set[str] = set()
        self._pending: set[str] = set()
        self._closing = threading.Event()
        self._deadline_s = float("inf")
        self._conclude: Callable[[], None] | None = None
        self._is_concluded = False
        self._is_up_to_date = False
        """Whether the last round succeeded."""

    def run(self) -> None:
        while not self._closing.wait(INTERVAL_S):
            self._run_round(MAX_ENDS_PER_ROUND)
        self._drain()
        self._suspend()
        if self._conclude is not None and not self._is_late():
            self._is_concluded = self._try(self._conclude)

    def close(self, grace_s: float, conclude: Callable[[], None] | None = None) -> bool:
        """Send the rest for at most `grace_s`, then let the thread call `conclude`.

        Call it when no worker runs any more. Returns whether everything was sent; prints a message if not.
        """
        self._conclude = conclude
        self._is_concluded = conclude is None
        self._deadline_s = time.monotonic() + grace_s
        self._closing.set()
        self.join(grace_s)
        done = not self.is_alive() and self._is_up_to_date and not self._pending and self._is_concluded
        if not done:
            missing = f"{len(self._pending)} runs" if self._pending else "the study"
            print_message(f"MLflow does not have {missing} completely yet; the next start of this sweep sends the rest")
        return done

    def _is_late(self) -> bool:
        return time.monotonic() > self._deadline_s

    def _drain(self) -> None:
        """Send the rest while it decreases."""
        left = sys.maxsize
        while not self._is_late():
            self._run_round(sys.maxsize)
            if not 0 < len(self._pending) < left:
                return
            left = len(self._pending)

    def _run_round(self, ends: int) -> None:
        """Send new data once. A failure is reported once, and tried again in the next round."""
        self._is_up_to_date = self._try(partial(self._update, ends))
        if self._is_up_to_date and not self._failures:
            self._reported.clear()  # everything works again: the next failure is reported

    def _update(self, ends: int) -> None:
        if self._prepare is not None:
            self._prepare()
            self._prepare = None
        report = self._report()
        if self._settled is None:
            self._settled = dict(self._tracker.completed_trials(report.study))
        todo = [child for child in tracking_payload.build_child_runs(report) if self._is_open(child)]
        todo.sort(key=lambda child: (child.status is not None, self._failures[child.key]))
        self._pending = {child.key for child in todo if child.status is not None}
        failed = 0
        for child in todo:
            if self._is_late() or failed == MAX_FAILURES_PER_ROUND or ends == 0:
                break
            ends -= child.status is not None
            failed += not self._try(partial(self._feed, child), child.key)
        self._tracker.update(report, frozenset(self._pending))

    def _is_open(self, child: ChildRun) -> bool:
        """Return whether its journal is on this machine and has events that MLflow lacks."""
        settled = self._settled or {}
        if child.run_id is None or (child.status is not None and settled.get(child.key) == child.trial.number):
            return False
        return RunPaths(self._runs / child.run_id).journal.exists()

    def _feed(self, child: ChildRun) -> None:
        feed = self._feeds.get(child.key)
        if feed is None:
            journal = RunPaths(self._runs / child.key).journal
            feed = self._feeds[child.key] = _JournalFeed(self._callback(child.key, child.trial), journal)
        if feed.send(self._is_late) and child.status is not None:
            feed.on_end(child.status)
            del self._feeds[child.key]
            self._pending.discard(child.key)
            if self._settled is not None:
                self._settled[child.key] = child.trial.number

    def _suspend(self) -> None:
        """End the runs of released trials: no worker trains them until the sweep is resumed."""
        for key, feed in self._feeds.items():
            if self._is_late():
                return
            if key not in self._pending and not RunPaths(self._runs / key).lock().is_held():
                self._try(partial(feed.on_end, "KILLED"), key)

    def _try(self, act: Callable[[], None], key: str = "") -> bool:
        """Return whether an action succeeded; failures never end this thread or the sweep."""
        try:
            act()
        except Exception as error:  # callbacks and MLflow may raise any exception
            self._failures[key] += 1
            text = first_line(error) if isinstance(error, TrackingError) else f"{type(error).__name__}: {error}"
            if text not in self._reported:
                self._reported.add(text)
                print_message(f"{'' if not key else f'run {key}: '}{text}; the sweep continues, trying again")
            return False
        self._failures.pop(key, None)
        return True


class TrialProgressReader:
    """Reads the progress of running trials from journals on this machine; each call reads new events."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._followed: dict[str, tuple[JournalReader, RunProgress]] = {}

    def read(self, report: SweepReport) -> dict[int, RunProgress]:
        """Return the progress of running trials with known progress, by number."""
        running = {trial.run_id: trial.number for trial in report.trials if not trial.is_over and trial.run_id}
        self._followed = {run_id: one for run_id, one in self._followed.items() if run_id in running}
        found = {}
        for run_id, number in running.items():
            reader, progress = self._followed.setdefault(
                run_id, (JournalReader(RunPaths(self._runs / run_id).journal), RunProgress())
            )
            with suppress(OSError):  # an unreadable disk: new events are read next time
                for event in reader.read():
                    progress.update(event)
            if progress.last_t:
                found[number] = progress
        return found

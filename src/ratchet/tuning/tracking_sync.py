"""Keeps MLflow's picture of a sweep up to date, in a thread beside the workers, which know nothing of MLflow.

Journals of runs that are here are given to observers, as a supervisor does, and then the study as a whole is shown.
What MLflow shows completely already is not sent again; what it cannot take now is sent later, at the latest by the next
start of the sweep.
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

EVERY_S = 2.0
EVENTS_AT_ONCE = 5000
ENDS_A_ROUND = 8
"""Trainings that are over and sent in one round: those under way are to be seen, too. Each takes half a second."""
FAILURES_A_ROUND = 3
"""Then MLflow is asked again in the next round: each failure may take it 20 s."""


class SweepTracker(Protocol):
    """Where the study is shown (services.sweep_tracking)."""

    def settled(self, study: str) -> Mapping[str, int]:
        """By run id the number of the trial whose end is shown completely."""

    def update(self, report: SweepReport, pending: Collection[str]) -> None:
        """Show the report; runs that are `pending` not as over."""


class _JournalFeed:
    """What one observer has been told of one journal."""

    def __init__(self, observer: RunCallback, journal: Path) -> None:
        self._observer = observer
        self._reader = JournalReader(journal)
        self._events: list[JournalEvent] = []
        self._is_finished = False

    def give(self, is_late: Callable[[], bool]) -> bool:
        """Give the observer what is new; False if there is more, but no time. What it refuses, it is given again."""
        while not is_late():
            if not self._events:
                self._events = list(islice(self._reader.read(), EVENTS_AT_ONCE))
                if not self._events:
                    return True
            self._observer.see(self._events)
            for event in self._events:
                if event.kind in ("attempt", "finished"):
                    self._is_finished = event.kind == "finished"
            self._events = []
        return False

    def finish(self, status: Status) -> None:
        """Tell the end: a training that came to its own is FINISHED, whatever became of the trial afterwards."""
        self._observer.finish("FINISHED" if self._is_finished else status)


class SweepTrackingSync(threading.Thread):
    """Shows a sweep while it runs.

    Args:
        runs: folder of the run directories.
        report: the study as it stands; called in this thread.
        observer: makes the observer of a run (its id, and the trial that it belongs to).
        showing: shows the study; used by this thread only.
        prelude: to be done in this thread before anything else, such as ending what earlier sweeps left RUNNING.
    """

    def __init__(
        self,
        runs: Path,
        report: Callable[[], SweepReport],
        observer: Callable[[str, Trial], RunCallback],
        showing: SweepTracker,
        prelude: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(name="clerk", daemon=True)
        self._runs, self._report, self._observer, self._showing = runs, report, observer, showing
        self._prelude = prelude
        self._settled: dict[str, int] | None = None
        """By run id the number of the trial whose end has been sent; None: MLflow was not asked yet."""
        self._feeds: dict[str, _JournalFeed] = {}
        self._failures: Counter[str] = Counter()
        self._told: set[str] = set()
        self._pending: set[str] = set()
        self._closing = threading.Event()
        self._deadline_s = float("inf")
        self._conclude: Callable[[], None] | None = None
        self._concluded = False
        self._is_shown = False
        """Whether the last look succeeded."""

    def run(self) -> None:
        while not self._closing.wait(EVERY_S):
            self._round(ENDS_A_ROUND)
        self._drain()
        self._suspend()
        if self._conclude is not None and not self._is_late():
            self._concluded = self._tried(self._conclude)

    def close(self, grace_s: float, conclude: Callable[[], None] | None = None) -> bool:
        """Send what is left, for no longer than `grace_s`; then let the thread call `conclude`.

        To be called when no worker is at work any more. Returns whether everything was sent; says so if not.
        """
        self._conclude = conclude
        self._concluded = conclude is None
        self._deadline_s = time.monotonic() + grace_s
        self._closing.set()
        self.join(grace_s)
        done = not self.is_alive() and self._is_shown and not self._pending and self._concluded
        if not done:
            what = f"{len(self._pending)} runs" if self._pending else "the study"
            print_message(f"MLflow does not show {what} completely yet; the next start of this sweep sends it")
        return done

    def _is_late(self) -> bool:
        return time.monotonic() > self._deadline_s

    def _drain(self) -> None:
        """Send what is left, as long as it becomes less."""
        left = sys.maxsize
        while not self._is_late():
            self._round(sys.maxsize)
            if not 0 < len(self._pending) < left:
                return
            left = len(self._pending)

    def _round(self, ends: int) -> None:
        """Look once. What fails is told once, and tried again in the next round."""
        self._is_shown = self._tried(partial(self._look, ends))
        if self._is_shown and not self._failures:
            self._told.clear()  # all is well again: the next failure is news

    def _look(self, ends: int) -> None:
        if self._prelude is not None:
            self._prelude()
            self._prelude = None
        report = self._report()
        if self._settled is None:
            self._settled = dict(self._showing.settled(report.study))
        todo = [child for child in tracking_payload.build_child_runs(report) if self._is_open(child)]
        todo.sort(key=lambda child: (child.status is not None, self._failures[child.key]))
        self._pending = {child.key for child in todo if child.status is not None}
        failed = 0
        for child in todo:
            if self._is_late() or failed == FAILURES_A_ROUND or ends == 0:
                break
            ends -= child.status is not None
            failed += not self._tried(partial(self._feed, child), child.key)
        self._showing.update(report, frozenset(self._pending))

    def _is_open(self, child: ChildRun) -> bool:
        """Whether its journal is here and has more to tell than MLflow shows."""
        settled = self._settled or {}
        if child.run_id is None or (child.status is not None and settled.get(child.key) == child.trial.number):
            return False
        return RunPaths(self._runs / child.run_id).journal.exists()

    def _feed(self, child: ChildRun) -> None:
        feed = self._feeds.get(child.key)
        if feed is None:
            journal = RunPaths(self._runs / child.key).journal
            feed = self._feeds[child.key] = _JournalFeed(self._observer(child.key, child.trial), journal)
        if feed.give(self._is_late) and child.status is not None:
            feed.finish(child.status)
            del self._feeds[child.key]
            self._pending.discard(child.key)
            if self._settled is not None:
                self._settled[child.key] = child.trial.number

    def _suspend(self) -> None:
        """Trials that were given back are RUNNING for the study, but nobody trains them until the sweep goes on."""
        for key, feed in self._feeds.items():
            if self._is_late():
                return
            if key not in self._pending and not RunPaths(self._runs / key).lock().held_elsewhere():
                self._tried(partial(feed.finish, "KILLED"), key)

    def _tried(self, act: Callable[[], None], key: str = "") -> bool:
        """Whether it succeeded. Neither this thread nor the sweep ends because something cannot be shown."""
        try:
            act()
        except Exception as error:  # observers and MLflow may raise anything; what is ours is in the message
            self._failures[key] += 1
            text = first_line(error) if isinstance(error, TrackingError) else f"{type(error).__name__}: {error}"
            if text not in self._told:
                self._told.add(text)
                print_message(f"{'' if not key else f'run {key}: '}{text}; the sweep goes on, and this is tried again")
            return False
        self._failures.pop(key, None)
        return True


class TrialProgressReader:
    """Where running trials stand, by journals that are here; each call reads what is new."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._followed: dict[str, tuple[JournalReader, RunProgress]] = {}

    def of(self, report: SweepReport) -> dict[int, RunProgress]:
        """By number of the trial; of trials that run, where something is known of them."""
        running = {trial.run_id: trial.number for trial in report.trials if not trial.is_over and trial.run_id}
        self._followed = {run_id: one for run_id, one in self._followed.items() if run_id in running}
        found = {}
        for run_id, number in running.items():
            reader, progress = self._followed.setdefault(
                run_id, (JournalReader(RunPaths(self._runs / run_id).journal), RunProgress())
            )
            with suppress(OSError):  # a disk that cannot be read now: what is new is read the next time
                for event in reader.read():
                    progress.see(event)
            if progress.last_t:
                found[number] = progress
        return found

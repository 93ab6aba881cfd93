"""Sends the progress of a sweep to MLflow and other loggers, in threads of the sweep command; workers use neither.

The thread replays the journals of local runs to callbacks, as a supervisor does, and then updates the study. Pure
functions turn the sweep report into a parent run with metrics, and a child run for each training. Runs that MLflow has
completely are not sent again. Data that could not be sent to MLflow is sent later, at the latest at the next start of
the sweep.
"""

import json
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

from ratchet.config.units import format_count
from ratchet.errors import TrackingError, first_line
from ratchet.runs.callbacks import RunCallback
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.runs.log import print_message
from ratchet.runs.status import RunProgress
from ratchet.storage import digests
from ratchet.storage.records.sweep import SweepReport, Trial, TrialState
from ratchet.tuning.trial_requests import describe_clone

Status = Literal["FINISHED", "FAILED", "KILLED"]
PARENT_TAG = "mlflow.parentRunId"
STUDY_TAG = "ratchet.sweep"
ROLE_TAG = "ratchet.sweep_role"
RUN_TAG = "ratchet.run_id"
TRIAL_TAG = "ratchet.trial"
STATE_TAG = "ratchet.trial_state"
KEY_TAG = "ratchet.trial_key"

STATUS: dict[TrialState, Status] = {
    "complete": "FINISHED",
    "pruned": "KILLED",
    "infeasible": "FAILED",
    "failed": "FAILED",
}
"""MLflow status of an ended trial's child run. A run whose training is complete is FINISHED for any trial state."""

STATES: tuple[TrialState, ...] = ("running", *STATUS)
MAX_TEXT = 2000
"""Maximum number of characters of a tag; MLflow rejects more than 8,000."""

INTERVAL_S = 2.0
"""Seconds between two rounds."""

MAX_EVENTS = 5000
"""Maximum number of events that are sent at once."""

MAX_ENDS_PER_ROUND = 8
"""Maximum number of ended trainings that a round sends, so that running trainings are updated too. Sending an ended
training takes half a second."""

MAX_FAILURES_PER_ROUND = 3
"""Number of failures after which a round ends, because each failure may take 20 s."""


# A sweep report as MLflow runs.


@dataclass(frozen=True)
class ChildRun:
    """Child run of one training, to which one or several trials belong."""

    key: str
    """Run id; for a trial without a run, its study and number."""
    run_id: str | None
    trial: Trial
    """The newest trial of the training."""
    name: str
    started: float
    ended: float
    """Unix times in seconds; `ended` is used only if there is a status."""
    status: Status | None
    """MLflow status of the run; None while the trial runs."""
    tags: Mapping[str, str]
    """Tags without the state, which is sent last."""
    state: TrialState
    values: Mapping[str, str]
    metrics: Mapping[str, float]
    """Metrics of the whole training."""
    curve: Mapping[int, float]
    """Validation loss by rows, ascending."""


def count_states(trials: Iterable[Trial]) -> Counter[TrialState]:
    """Count trials by state. A trial that was continued does not count, but its continuation does."""
    listed = list(trials)
    continued = {trial.continues for trial in listed}
    return Counter(trial.state for trial in listed if trial.number not in continued)


def build_child_runs(report: SweepReport) -> list[ChildRun]:
    """Return a child run for each training, and for each training of a finalist with a further seed.

    A trial and its continuations are one training.
    """
    groups: dict[str, list[Trial]] = {}
    for trial in report.trials:
        groups.setdefault(trial.run_id or f"{report.study}/{trial.number}", []).append(trial)
    trial_runs = [_build_trial_run(report, key, trials) for key, trials in groups.items()]
    return trial_runs + _build_finalist_runs(report)


def _build_trial_run(report: SweepReport, key: str, trials: Sequence[Trial]) -> ChildRun:
    trial = trials[-1]
    # If there are many checkpoints, only the newest ones fit.
    last = sorted(trial.checkpoints.items())[-MAX_TEXT // (digests.SHORT + 16) :]
    tags = {
        STUDY_TAG: report.study,
        ROLE_TAG: "trial",
        TRIAL_TAG: str(trial.number),
        "ratchet.trials": ",".join(str(other.number) for other in trials if other is not trial),
        "ratchet.trial_reason": trial.reason,
        "ratchet.trial_cause": trial.cause,
        "ratchet.trial_clone": describe_clone(trials[0]),
        "ratchet.trial_commands": _list_commands(trial),
        "ratchet.workers": ", ".join(dict.fromkeys(execution.worker for execution in trial.executions)),
        "ratchet.checkpoints": json.dumps({str(s): value[: digests.SHORT] for s, value in last}) if last else "",
    }
    metrics = {f"trial/{m.metric}": value for m, value in zip(report.objectives, trial.objectives, strict=False)}
    started = min(other.started for other in trials)
    curve = sorted((rows, loss) for other in trials for rows, loss in other.curve.items())
    return ChildRun(
        key=key,
        run_id=trial.run_id,
        trial=trial,
        name=f"trial {trial.number}",
        started=started,
        ended=trial.ended or started,
        status=STATUS[trial.state] if trial.is_over else None,
        tags={name: _truncate_text(value) for name, value in tags.items()},
        state=trial.state,
        values={name: format_setting(value) for name, value in trial.values.items()},
        metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
        curve={rows: loss for rows, loss in curve if math.isfinite(loss)},
    )


def _list_commands(trial: Trial) -> str:
    """Return the commands that control the trial."""
    actions = ["--clone {} --set KEY=VALUE"]
    if trial.decision == "paused":
        actions = ["--resume {}", "--stop {}", *actions]
    elif trial.state in ("running", "pruned", "failed") and not trial.decision:
        actions = ["--stop {}", "--pause {}", *actions]
    return "; ".join(f"ratchet sweep {action.format(trial.number)}" for action in actions)


def _build_finalist_runs(report: SweepReport) -> list[ChildRun]:
    """Return the child runs of finalists' trainings with further seeds."""
    if report.final_round is None:
        return []
    runs, metric = [], f"finalist/{report.final_round.metric}"
    for finalist in report.final_round.finalists:
        trial = report.trials[finalist.number]
        at = trial.ended or trial.started
        tags = {STUDY_TAG: report.study, ROLE_TAG: "finalist", TRIAL_TAG: str(finalist.number)}
        values = {name: format_setting(value) for name, value in finalist.values.items()}
        for seed, (run_id, mean) in enumerate(zip(finalist.run_ids[1:], finalist.means[1:], strict=False), start=2):
            metrics = {metric: mean} if math.isfinite(mean) else {}
            name = f"trial {finalist.number}, seed {seed}"
            runs.append(
                ChildRun(run_id, run_id, trial, name, at, at, "FINISHED", tags, "complete", values, metrics, {})
            )
    return runs


def summary_metrics(report: SweepReport) -> dict[str, float]:
    """Return the metrics of the parent run: best value of each objective, importances, and trials by state."""
    by_state = count_states(report.trials)
    metrics = {f"trials/{state}": float(by_state[state]) for state in STATES}
    metrics |= {f"importance/{parameter}": share for parameter, share in report.importances.items()}
    front = [values for number in report.best if (values := report.trials[number].objectives)]
    for place, objective in enumerate(report.objectives if front else ()):
        best = min if objective.direction == "minimize" else max
        metrics[f"best/{objective.metric}"] = best(values[place] for values in front)
    return {key: value for key, value in metrics.items() if math.isfinite(value)}


def parent_tags(report: SweepReport) -> dict[str, str]:
    """Return the progress and the best runs of the study as tags of the parent run; an unknown tag is empty."""

    winner = "" if report.winner is None else report.trials[report.winner].run_id or ""
    tags = {
        "ratchet.sweep_trials": f"{count_states(report.trials).total()} of {report.planned_trials}",
        "ratchet.best_trial": ",".join(map(str, report.best)),
        "ratchet.best_run": ",".join(report.trials[number].run_id or "" for number in report.best),
        "ratchet.winner_trial": "" if report.winner is None else str(report.winner),
        "ratchet.winner_run": winner,
        "ratchet.winner_reason": report.final_round.reason if report.final_round else "",
        "ratchet.sweep_stopped": report.stopped,
    }
    return {name: _truncate_text(value) for name, value in tags.items()}


def parent_params(report: SweepReport) -> dict[str, str]:
    """Return the parameters of the parent run, which identify the study and never change."""
    flat = {"sampler": report.sampler, "pruner": report.pruner, "storage": report.storage}
    flat["objectives"] = ", ".join(f"{m.direction} {m.metric}" for m in report.objectives)
    flat |= {"data.digest": report.data_digest[: digests.SHORT], "base.digest": report.base_digest[: digests.SHORT]}
    flat |= {f"versions.{name}": version for name, version in report.versions.items()}
    for axis in report.axes:
        if axis.kind == "tie":
            text = f"= {axis.tie}"
        elif axis.kind == "choice":
            text = " | ".join(format_setting(choice) for choice in axis.choices)
        else:
            text = f"{axis.low:g} to {axis.high:g}{', log' if axis.log else ''}"
        flat[f"space.{axis.name}"] = text
    return {key: _truncate_text(value) for key, value in flat.items()}


def format_setting(value: Any) -> str:
    """Return a setting as text, in the same form as in the parameters of every run."""
    return _truncate_text(",".join(map(str, value)) if isinstance(value, list | tuple) else str(value))


def _truncate_text(text: str) -> str:
    """Return text that MLflow's database accepts: limited in length, without invalid characters."""
    return text[:MAX_TEXT].encode(errors="replace").decode()


# The thread.


class SweepTracker(Protocol):
    """The study in MLflow (`tracking` has the implementation)."""

    def completed_trials(self, study: str) -> Mapping[str, int]:
        """Return, for each run id that MLflow has completely, the number of its trial."""

    def update(self, report: SweepReport, pending: Collection[str]) -> None:
        """Send the report. Runs in `pending` stay open in MLflow, because MLflow still lacks some of their data."""


class _JournalFeed:
    """Replay of a journal to a callback."""

    def __init__(self, callback: RunCallback, journal: Path) -> None:
        self._callback = callback
        self._reader = JournalReader(journal)
        self._events: list[JournalEvent] = []
        self._is_finished = False

    def send(self, is_late: Callable[[], bool]) -> bool:
        """Send new events; return False if the time is over before all are sent.

        If the callback raises an exception, the next call sends the same events again.
        """
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
        """Send the end of the run. A complete training is FINISHED for any state of the trial."""
        self._callback.on_end("FINISHED" if self._is_finished else status)


class SweepTrackingSync(threading.Thread):
    """Thread that sends a sweep to MLflow, or its trials to other loggers, while it runs.

    Only this thread calls `callback` and `tracker`. It calls `prepare` first, for example to end runs that earlier
    sweeps left RUNNING. Without a `tracker`, only the runs are sent. `receiver` is the name in messages.
    """

    def __init__(
        self,
        runs: Path,
        report: Callable[[], SweepReport],
        callback: Callable[[str, Trial], RunCallback],
        tracker: SweepTracker | None,
        prepare: Callable[[], None] | None = None,
        receiver: str = "MLflow",
    ) -> None:
        super().__init__(name="sweep tracking", daemon=True)
        self._receiver = receiver
        self._runs, self._report, self._callback, self._tracker = runs, report, callback, tracker
        self._prepare = prepare
        self._settled: dict[str, int] | None = None
        """Number of the trial whose end was sent, by run id; None: MLflow was not queried yet."""
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

    @property
    def has_tracker(self) -> bool:
        """Whether the study is sent too."""
        return self._tracker is not None

    def run(self) -> None:
        """Send new data until `close` is called, then the rest."""
        while not self._closing.wait(INTERVAL_S):
            self._run_round(MAX_ENDS_PER_ROUND)
        # Send the rest in rounds, as long as each round reduces the number of runs that MLflow lacks.
        remaining = sys.maxsize
        while not self._is_late():
            self._run_round(sys.maxsize)
            if not 0 < len(self._pending) < remaining:
                break
            remaining = len(self._pending)
        # End the runs of released trials in MLflow, because no worker trains them until the sweep is resumed.
        for key, feed in self._feeds.items():
            if self._is_late():
                break
            if key not in self._pending and not RunPaths(self._runs / key).lock().is_held():
                self._try(partial(feed.on_end, "KILLED"), key)
        if self._conclude is not None and not self._is_late():
            self._is_concluded = self._try(self._conclude)

    def close(self, grace_s: float, conclude: Callable[[], None] | None = None) -> bool:
        """Let the thread send the rest and then call `conclude`, for at most `grace_s` seconds in total.

        Call this method when no worker runs any more. It returns whether everything was sent. If not, it prints a
        message.
        """
        self._conclude = conclude
        self._is_concluded = conclude is None
        self._deadline_s = time.monotonic() + grace_s
        self._closing.set()
        self.join(grace_s)
        done = not self.is_alive() and self._is_up_to_date and not self._pending and self._is_concluded
        if not done:
            missing = format_count(len(self._pending), "run") if self._pending else "the study"
            text = f"{self._receiver} does not have {missing} completely yet"
            print_message(f"{text}; the next start of this sweep sends the rest")
        return done

    def _is_late(self) -> bool:
        return time.monotonic() > self._deadline_s

    def _run_round(self, ends: int) -> None:
        """Send new data once. Print a failure once, and try again in the next round."""
        self._is_up_to_date = self._try(partial(self._update, ends))
        if self._is_up_to_date and not self._failures:
            self._reported.clear()  # everything works again: print the next failure

    def _update(self, ends: int) -> None:
        if self._prepare is not None:
            self._prepare()
            self._prepare = None
        report = self._report()
        if self._settled is None:
            self._settled = {} if self._tracker is None else dict(self._tracker.completed_trials(report.study))
        todo = [child for child in build_child_runs(report) if self._is_open(child)]
        todo.sort(key=lambda child: (child.status is not None, self._failures[child.key]))
        self._pending = {child.key for child in todo if child.status is not None}
        failed = 0
        for child in todo:
            if self._is_late() or failed == MAX_FAILURES_PER_ROUND or ends == 0:
                break
            ends -= child.status is not None
            failed += not self._try(partial(self._feed, child), child.key)
        if self._tracker is not None:
            self._tracker.update(report, frozenset(self._pending))

    def _is_open(self, child: ChildRun) -> bool:
        """Return whether the run's journal is on this machine, and MLflow may lack some of its events."""
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

    def _try(self, action: Callable[[], None], key: str = "") -> bool:
        """Run an action and return whether it succeeded. A failure does not end this thread or the sweep."""
        try:
            action()
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
    """Reader of the progress of running trials from journals on this machine."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._followed: dict[str, tuple[JournalReader, RunProgress]] = {}

    def read(self, report: SweepReport) -> dict[int, RunProgress]:
        """Read new events, and return the known progress of running trials, by number."""
        running = {trial.run_id: trial.number for trial in report.trials if not trial.is_over and trial.run_id}
        self._followed = {run_id: item for run_id, item in self._followed.items() if run_id in running}
        known = {}
        for run_id, number in running.items():
            reader, progress = self._followed.setdefault(
                run_id, (JournalReader(RunPaths(self._runs / run_id).journal), RunProgress())
            )
            with suppress(OSError):  # the next call reads the events
                for event in reader.read():
                    progress.update(event)
            if progress.last_t:
                known[number] = progress
        return known

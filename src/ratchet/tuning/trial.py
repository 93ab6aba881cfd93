"""Runs a trial: supervises its run, reports validations, prunes, and stores the result.

The supervisor is the same as for `ratchet train`, with one more callback, which may prune the run. The result (curve,
cost, cause of a failure) is read from the run directory.
"""

import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from ratchet.config.settings import Settings
from ratchet.config.sweep import ObjectiveSettings, SweepParameter
from ratchet.errors import (
    DataError,
    InputError,
    InterruptedRunError,
    LockHeldError,
    RatchetError,
    RunFailedError,
    StorageError,
    first_line,
)
from ratchet.runs.callbacks import Status
from ratchet.runs.directory import RunDirectory, RunPaths, RunSpec
from ratchet.runs.group_connection import WorkerServer
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.runs.log import print_message
from ratchet.runs.restart_policy import FailureClass
from ratchet.runs.signals import StopSignal
from ratchet.runs.status import RunProgress
from ratchet.runs.supervisor import supervise
from ratchet.storage import digests
from ratchet.storage.digests import code_version
from ratchet.storage.files import MANIFEST
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.sweep import TrainingCost, Trial, TrialRequest
from ratchet.storage.records.training import TrainReport
from ratchet.training.run_spec import build_launch, build_run_spec
from ratchet.tuning.leases import SweepWorker, TrialLeaseLostError
from ratchet.tuning.storage import retry_storage
from ratchet.tuning.study import TrialStore
from ratchet.tuning.trial_requests import DECISIONS, describe_request, find_decision

INFEASIBLE: dict[FailureClass, str] = {"too_large": "memory", "out_of_memory": "memory", "diverged": "diverged"}
"""Name of the constraint that a failure violates, by failure class. Failures of other classes are no evidence about the
trial's values."""

UNKNOWN = 1.0
"""Violation of a constraint whose amount is unknown."""

BUSY_POLL_S = 2.0
"""Seconds between two attempts to open a run that another process trains (`dvc repro`, another study)."""

REQUEST_POLL_S = 1.0
"""Seconds between two checks whether a person has requested to stop or pause the trial."""

SUPERVISOR_ERRORS = (RunFailedError, InputError, StorageError)
"""Errors with which the supervisor reports a failure whose cause is in the journal. Only these exact classes count,
because their subclasses have other causes."""

Idle = Literal["wait", "over"]
"""State without work. `wait`: running trials may need another worker later; `over`: all work is done."""

PruneDecision = Callable[[Trial], str | None]
"""Returns the reason to prune a trial with this curve; None: the trial continues."""

TakeServer = Callable[[RunSpec, Callable[[], None]], AbstractContextManager[WorkerServer]]
"""Returns a context in which the trainings of a run may be started, and what starts them. While it waits, it
calls the second argument, which raises InterruptedRunError if the run must not wait any longer."""

ObjectiveFunction = Callable[[TrainReport, TrainingCost], tuple[float, ...]]
"""Computes the objectives of a completed training."""


def raise_if_requested(stop: StopSignal) -> None:
    """Raise InterruptedRunError if a stop of this worker was requested."""
    if stop.is_requested:
        raise InterruptedRunError("stopped on request")


@dataclass
class TrialRunCallback:
    """Callback of a trial's run: it reports validations to the study, and decides whether to prune the run."""

    store: TrialStore
    trial: Trial
    rows_per_step: float
    decide_pruning: PruneDecision | None
    """None: the trial is not pruned."""
    stop: StopSignal
    name: str = "trial"
    curve: dict[int, float] = field(default_factory=dict)
    pruned_reason: str | None = None
    """Reason why the trial was pruned; None: not pruned."""
    request: TrialRequest | None = None
    """Request of a person to stop or pause the trial."""
    is_lost: bool = False
    """Whether another worker has taken over the trial."""
    _planned_steps: int = 0
    _has_reported: bool = False
    """Whether it was reported that requests cannot be read."""

    def on_events(self, events: Sequence[JournalEvent]) -> None:
        """Report each validation to the study, and then decide about pruning. A repeated validation changes nothing."""
        for event in events:
            if event.kind == "worker_ready":
                self._planned_steps = event.data["planned_steps"]
            if event.kind != "validation" or self.pruned_reason is not None:
                continue
            step, loss = event.data["step"], event.data["loss"]
            rows = round(step * self.rows_per_step)
            if rows in self.curve:
                continue
            curve = self.curve | {rows: loss}
            self.store.report(self.trial.number, rows, loss)
            if self.decide_pruning is not None and step < self._planned_steps:
                self.pruned_reason = self.decide_pruning(self.trial.model_copy(update={"curve": curve}))
            self.curve = curve

    def on_end(self, status: Status) -> None:
        """Do nothing: the result is read from the run directory."""

    def on_stop_signal(self) -> None:
        """Stop the worker after this trial."""
        self.stop.request()

    def prune_reason(self) -> str | None:
        """Return the reason to end the run now; None: it continues."""
        if self.is_lost:
            return "another worker has taken this trial over"
        return self.pruned_reason or (describe_request(self.request) if self.request else None)

    def check_waiting(self) -> None:
        """Raise InterruptedRunError if the trial must not wait for its training any longer."""
        if self.is_lost:
            raise InterruptedRunError("another worker has taken this trial over")
        if self.request is not None:
            raise InterruptedRunError(describe_request(self.request))
        raise_if_requested(self.stop)

    def read_request(self) -> None:
        """Read whether a person has requested to stop or pause the trial. After a failure, the next call reads again.

        A request that was read stays, because the run may end already: a trial that was resumed is continued later.
        """
        try:
            request = find_decision(self.store.requests(), self.trial.number)
        except Exception as error:  # the heartbeat of the trial must continue
            if not self._has_reported:
                print_message(f"trial {self.trial.number}: requests cannot be read: {first_line(error)}")
            self._has_reported = True
            return
        self._has_reported = False
        if self.request is None and request is not None and DECISIONS[request.action]:
            self.request = request


class TrialHeartbeat(threading.Thread):
    """Thread that renews the lease of a trial, sets `is_lost` of the callback if the lease is lost, and reads requests
    of people."""

    def __init__(self, callback: TrialRunCallback, worker: SweepWorker, lease_timeout_s: float) -> None:
        super().__init__(name=f"lease-{callback.trial.number}", daemon=True)
        self._callback, self._worker, self._interval_s = callback, worker, lease_timeout_s / 4
        self._ended = threading.Event()

    def run(self) -> None:
        renewal_s = time.monotonic() + self._interval_s
        while not self._ended.wait(max(0.0, min(REQUEST_POLL_S, renewal_s - time.monotonic()))):
            self._callback.read_request()
            if time.monotonic() < renewal_s:
                continue
            renewal_s = time.monotonic() + self._interval_s
            try:
                self._callback.store.renew(self._callback.trial.number, self._worker)
            except TrialLeaseLostError:
                self._callback.is_lost = True
                return
            except Exception as error:  # the database is unreachable: keep the trial until the lease is lost
                print_message(f"trial {self._callback.trial.number}: {first_line(error)}")

    def __enter__(self) -> "TrialHeartbeat":
        self._callback.read_request()  # a trial whose end was requested is not trained at all
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()


@dataclass(frozen=True)
class TrialTask:
    """A trial that this worker holds, with everything needed to run it."""

    store: TrialStore
    trial: Trial
    settings: Settings
    """Settings with the trial's values."""
    compute_objectives: ObjectiveFunction
    rows_per_step: float
    """Rows per optimizer step; with packing, the average."""
    decide_pruning: PruneDecision | None


def run_trial(
    task: TrialTask,
    layout: ProjectLayout,
    worker: SweepWorker,
    stop: StopSignal,
    take_server: TakeServer,
    request: TrialRequest | None = None,
) -> None:
    """Train or continue a trial, and store its result in the study.

    If the training fails, the trial is infeasible or failed, and the sweep continues. During the run, its supervisor
    handles signals; `stop` has the other requests to stop this process. With the `request` of a person to stop or
    pause it, the trial ends without training.

    Raises:
        InterruptedRunError: a stop was requested; a checkpoint is sealed, and the trial is released.
        TrialLeaseLostError: another worker has the trial; nothing was stored.
    """
    trial, number = task.trial, task.trial.number
    try:
        launch, spec = build_launch(layout, task.settings), build_trial_spec(layout, task)
    except InputError as error:
        ended = {"state": "failed", "cause": "data", "reason": str(error), "ended": time.time()}
        if trial.run_id is not None:  # limits count what an earlier trial of this run has cost
            paths = RunPaths(layout.runs / trial.run_id)
            ended["cost"] = compute_cost(paths, read_run_summary(paths))
        task.store.finish(number, trial.model_copy(update=ended), worker)
        return
    # A trial runs on one machine; other machines run other trials.
    launch = launch.model_copy(update={"machine": launch.machine.model_copy(update={"nodes": "1"})})
    paths = RunPaths(layout.runs / spec.run_id)
    decide_pruning = None if paths.is_finished() else task.decide_pruning  # a finished run costs nothing more
    callback = TrialRunCallback(task.store, trial, task.rows_per_step, decide_pruning, stop, request=request)
    with TrialHeartbeat(callback, worker, task.settings.machine.lease_timeout_s):
        try:
            run = _open_run(layout, task, spec, callback)
            try:
                with take_server(spec, callback.check_waiting) as server:
                    supervise(run, launch, [callback], code_version(), pruner=callback, server=server)
            finally:
                run.close()
            if callback.pruned_reason is None:
                report = TrainReport.load(paths.result / "train.json")
                objectives = task.compute_objectives(report, compute_cost(paths, read_run_summary(paths)))
                outcome = _ended_trial(
                    callback, paths, state="complete", objectives=objectives, adapter_digest=report.adapter_digest
                )
            else:  # the run ended before it could be stopped: the trial's state must not depend on that
                outcome = _ended_trial(callback, paths, state="pruned", reason=callback.pruned_reason)
        except InterruptedRunError:
            if callback.is_lost:
                raise TrialLeaseLostError(f"trial {number}: another worker has taken it over") from None
            if (reason := callback.prune_reason()) is None:
                # If the release fails, other workers detect that this process has ended.
                with suppress(StorageError, LockHeldError):
                    task.store.release(number, worker)
                raise
            request = None if callback.pruned_reason else callback.request
            cause = DECISIONS[request.action] if request else ""
            outcome = _ended_trial(callback, paths, state="pruned", reason=reason, cause=cause)
        except Exception as error:  # a trial may fail in any way, and other trials must continue
            if not isinstance(error, RatchetError | OSError):
                traceback.print_exception(error)
            outcome = _failed_trial(callback, paths, error, task.settings.sweep.space)
    if callback.is_lost:
        raise TrialLeaseLostError(f"trial {number}: another worker has taken it over")
    wait_s, check_stop = launch.machine.storage_timeout_s, partial(raise_if_requested, stop)
    retry_storage(lambda: task.store.finish(number, outcome, worker), wait_s, check_stop)


def build_trial_spec(layout: ProjectLayout, task: TrialTask) -> RunSpec:
    """Return the spec of a trial's run. An earlier start of the trial may have decided that a group trains it.

    Raises:
        SettingsError: the values are invalid.
        DataError: data, base, or the weights from which the training starts, are missing or are not those of the trial.
    """
    spec = build_run_spec(layout, task.settings)
    grouped = spec.model_copy(update={"is_grouped": True})
    for candidate in (spec, grouped):
        if candidate.run_id == task.trial.run_id:
            return candidate
    raise DataError(
        f"trial {task.trial.number} is run {task.trial.run_id}, but data, base and the weights of train.init_adapter "
        f"now define run {spec.run_id}; restore them, or start a new study (`ratchet sweep --fork`)"
    )


def _open_run(layout: ProjectLayout, task: TrialTask, spec: RunSpec, callback: TrialRunCallback) -> RunDirectory:
    """Open the run; wait while another process trains it."""
    is_reported = False
    while True:
        try:
            return RunDirectory.open(layout.runs, spec)
        except LockHeldError as error:
            if not is_reported:
                print_message(f"trial {task.trial.number} waits: {error}")
                is_reported = True
        callback.check_waiting()
        time.sleep(BUSY_POLL_S)


def _ended_trial(callback: TrialRunCallback, paths: RunPaths, **fields: Any) -> Trial:
    """Return the trial with its curve, cost and checkpoints; `fields` replace others."""
    result = {
        "curve": callback.curve,
        "cost": compute_cost(paths, read_run_summary(paths)),
        "checkpoints": checkpoint_digests(paths),
        "ended": time.time(),
    }
    return callback.trial.model_copy(update=result | fields)


def _failed_trial(
    callback: TrialRunCallback, paths: RunPaths, error: Exception, space: Mapping[str, SweepParameter]
) -> Trial:
    """Return the trial with the failure in the journal, or else with the error itself.

    It is infeasible if other trials may succeed with other values: a limit was exceeded, or the base cannot have a
    value, such as this rank. With a parameter that has only one value, every trial would fail.
    """
    summary = read_run_summary(paths)
    cause: FailureClass = "storage" if isinstance(error, OSError) else "bug"
    if type(error) in SUPERVISOR_ERRORS and summary.cause is not None:
        cause = summary.cause
    constraints = summary.constraints if cause == summary.cause else {}
    text = summary.text if cause == summary.cause and summary.text else f"{type(error).__name__}: {error}"
    varied = [
        name for name, parameter in space.items() if name in callback.trial.values and not parameter.has_one_value
    ]
    if cause == "data" and any(text.startswith(f"{name}: ") for name in varied):
        constraints = {"settings": UNKNOWN}
    state = "infeasible" if constraints else "failed"
    return _ended_trial(callback, paths, state=state, constraints=constraints, cause=cause, reason=text)


# The result of a run, read from its directory.


@dataclass
class TrialRunSummary:
    """Summary of a run's journal."""

    progress: RunProgress = field(default_factory=RunProgress)
    trainable_parameters: int = 0
    cause: FailureClass | None = None
    """Class of the last failure; None without a failure."""
    text: str = ""
    """Message of the last failure."""
    violation: float = UNKNOWN
    """Amount by which the last failure violates its constraint: for memory, needed / available bytes - 1."""

    def update(self, event: JournalEvent) -> None:
        """Add an event. The last failure of the last attempt counts."""
        self.progress.update(event)
        if event.kind == "attempt_started":
            self.cause, self.text, self.violation = None, "", UNKNOWN
        elif event.kind in ("worker_error", "worker_exited"):
            self.cause = event.data.get("failure_class", "bug")
            self.text = str(event.data.get("text", ""))
            needed, available = event.data.get("needed_bytes"), event.data.get("available_bytes")
            if isinstance(needed, int) and isinstance(available, int) and 0 < available < needed:
                self.violation = needed / available - 1
        elif event.kind == "worker_ready":
            self.trainable_parameters = int(event.data.get("trainable_parameters", 0))

    @property
    def constraints(self) -> dict[str, float]:
        """Constraints that the values violate; empty if the failure was not caused by them."""
        name = INFEASIBLE.get(self.cause) if self.cause else None
        return {name: self.violation} if name else {}


def read_run_summary(paths: RunPaths) -> TrialRunSummary:
    """Read the summary of a run from its journal."""
    summary = TrialRunSummary()
    for event in JournalReader(paths.journal).read():
        summary.update(event)
    return summary


def compute_cost(paths: RunPaths, summary: TrialRunSummary) -> TrainingCost:
    """Return the cost of the training so far."""
    progress = summary.progress
    done, planned, tokens = progress.step, progress.planned_steps, progress.trained_tokens
    return TrainingCost(
        trained_tokens=tokens,
        planned_tokens=round(tokens * planned / done) if done else 0,
        steps=done,
        planned_steps=planned,
        train_seconds=round(progress.train_s, 3),
        memory_bytes=max(progress.memory.peaks.values(), default=0),
        adapter_bytes=sum(path.stat().st_size for path in (paths.result / "adapter").glob("*.safetensors")),
        trainable_parameters=summary.trainable_parameters,
        attempts=progress.attempts,
    )


def objective_value(aim: ObjectiveSettings, report: TrainReport, cost: TrainingCost) -> float | None:
    """Return an objective of a completed training; None if the objective needs answers to validation rows."""
    if aim.metric == "validation_loss":
        return report.validation_loss[report.kept_step]
    if aim.metric == "trained_tokens":
        return float(report.trained_tokens)
    if aim.metric in ("memory_bytes", "adapter_bytes", "train_seconds"):
        return float(getattr(cost, aim.metric))
    return None


def checkpoint_digests(paths: RunPaths) -> dict[int, str]:
    """Return the manifest digest of each readable checkpoint, by step."""
    by_step = {}
    for step in paths.checkpoint_steps():
        with suppress(OSError):
            by_step[step] = digests.hash_file(paths.checkpoint(step) / MANIFEST)[: digests.SHORT]
    return by_step

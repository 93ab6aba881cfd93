"""What came of a trial's run, read from its directory: curve, cost, figures, and why it ended without a result."""

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from ratchet.config.schema import Settings
from ratchet.config.sweep import ObjectiveSettings
from ratchet.errors import (
    InputError,
    InterruptedRunError,
    LockHeldError,
    RatchetError,
    RunFailedError,
    StorageError,
    first_line,
)
from ratchet.runs.callbacks import Status
from ratchet.runs.directory import Run, RunPaths
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.runs.log import print_message
from ratchet.runs.restart_policy import FailureClass
from ratchet.runs.status import RunProgress
from ratchet.runs.supervisor import supervise
from ratchet.storage import digests
from ratchet.storage.code_version import code_version
from ratchet.storage.files import MANIFEST
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import TrainReport
from ratchet.storage.records.sweep import TrainingCost, Trial
from ratchet.training.run_spec import build_launch, build_run_spec
from ratchet.tuning.leases import SweepWorker, TrialLeaseLostError
from ratchet.tuning.storage_retry import retry_storage
from ratchet.tuning.trial_store import TrialStore

INFEASIBLE: dict[FailureClass, str] = {"too_large": "memory", "out_of_memory": "memory", "diverged": "diverged"}
"""Ends that say something about the values: which constraint they violate. All other failures say nothing of them."""

UNKNOWN = 1.0
"""By how much a constraint is violated, where that is not known."""


@dataclass
class TrialRunSummary:
    """A fold over the journal of one run."""

    progress: RunProgress = field(default_factory=RunProgress)
    trainable_parameters: int = 0
    cause: FailureClass | None = None
    text: str = ""
    violation: float = UNKNOWN

    def see(self, event: JournalEvent) -> None:
        """Fold one event in; of failures the last counts."""
        self.progress.see(event)
        if event.kind == "attempt":
            self.cause, self.text, self.violation = None, "", UNKNOWN
        elif event.kind in ("failure", "died"):
            self._fail(event.data)
        elif event.kind == "ready":
            self.trainable_parameters = int(event.data.get("trainable_parameters", 0))

    def _fail(self, data: dict[str, Any]) -> None:
        self.cause = data.get("class", "bug")
        self.text = str(data.get("text", ""))
        needed, available = data.get("needed_bytes"), data.get("available_bytes")
        if isinstance(needed, int) and isinstance(available, int) and 0 < available < needed:
            self.violation = needed / available - 1

    @property
    def constraints(self) -> dict[str, float]:
        """What these values violate; nothing where the failure is not theirs."""
        name = INFEASIBLE.get(self.cause) if self.cause else None
        return {name: self.violation} if name else {}


def read_run_summary(paths: RunPaths) -> TrialRunSummary:
    """Where the run stands."""
    ending = TrialRunSummary()
    for event in JournalReader(paths.journal).read():
        ending.see(event)
    return ending


def compute_cost(paths: RunPaths, ending: TrialRunSummary) -> TrainingCost:
    """What the training came to until now."""
    progress = ending.progress
    done, planned = progress.step, progress.planned_steps
    tokens = progress.trained_tokens
    adapter = paths.result / "adapter"
    weights = sorted(adapter.glob("*.safetensors")) if adapter.is_dir() else []
    return TrainingCost(
        trained_tokens=tokens,
        planned_tokens=round(tokens * planned / done) if done else 0,
        steps=done,
        planned_steps=planned,
        train_seconds=round(progress.train_s, 3),
        memory_bytes=max(progress.memory.peaks.values(), default=0),
        adapter_bytes=sum(path.stat().st_size for path in weights),
        trainable_parameters=ending.trainable_parameters,
        attempts=progress.attempts,
    )


def objective_value(aim: ObjectiveSettings, report: TrainReport, spent: TrainingCost) -> float | None:
    """The figure of a finished training; None for one that only answers to the validation rows give."""
    if aim.metric == "validation_loss":
        return report.validation_loss[report.kept_step]
    if aim.metric == "trained_tokens":
        return float(report.trained_tokens)
    own = {
        "memory_bytes": spent.memory_bytes,
        "adapter_bytes": spent.adapter_bytes,
        "train_seconds": spent.train_seconds,
    }
    return float(own[aim.metric]) if aim.metric in own else None


def checkpoint_digests(paths: RunPaths) -> dict[int, str]:
    """Digest of the manifest of each checkpoint that is there, by step; those that cannot be read are left out."""
    found = {}
    for step in paths.checkpoint_steps():
        manifest: Path = paths.checkpoint(step) / MANIFEST
        try:
            found[step] = digests.hash_bytes(manifest.read_bytes())[: digests.SHORT]
        except OSError:
            continue
    return found


# A trial is a run: the same supervisor, watched by one more observer, which may find it not worth going on with.

BUSY_POLL_S = 2.0
"""Somebody else trains the same run (`dvc repro`, another study): its result will be ours as well."""

TOLD_BY_SUPERVISOR = (RunFailedError, InputError, StorageError)
"""Errors whose cause is in the journal; their subclasses come from elsewhere."""

Idle = Literal["wait", "over"]
"""`wait`: others have trials that may yet become ours; `over`: nothing is left to do."""

Judge = Callable[[Trial], str | None]
"""Why a trial with this curve is to end now; None: it goes on."""
Figures = Callable[[TrainReport, TrainingCost], tuple[float, ...]]
"""What a finished training is judged by."""


class WorkerStopCheck(Protocol):
    """Whether this worker is to end."""

    def signalled(self) -> None:
        """A signal has asked for it."""

    def look(self) -> None:
        """Raise InterruptedRunError when it is."""


@dataclass
class TrialRunCallback:
    """Observer and arbiter of a trial's run: reports validations to the study, and ends what is not worth more."""

    register: TrialStore
    trial: Trial
    rows_per_step: float
    judge: Judge | None
    """None: nothing is ended early."""
    asked: WorkerStopCheck
    name: str = "trial"
    curve: dict[int, float] = field(default_factory=dict)
    reason: str | None = None
    """Why it was pruned."""
    lost: bool = False
    """Another worker has taken the trial over."""
    _planned: int = 0

    def see(self, events: Sequence[JournalEvent]) -> None:
        """Report validations; told again, they change nothing. What comes after the decision to prune is not told."""
        for event in events:
            if event.kind == "ready":
                self._planned = event.data["planned_steps"]
            elif event.kind == "validation" and self.reason is None:
                self._validated(event.data["step"], event.data["loss"])

    def _validated(self, step: int, loss: float) -> None:
        rows = round(step * self.rows_per_step)
        if rows in self.curve:
            return
        curve = self.curve | {rows: loss}
        self.register.report(self.trial.number, rows, loss)
        if self.judge is not None and step < self._planned:
            self.reason = self.judge(self.trial.model_copy(update={"curve": curve}))
        self.curve = curve

    def finish(self, status: Status) -> None:
        """Nothing to do: what came of the run is read from its directory."""

    def signalled(self) -> None:
        """After this trial no other is to come."""
        self.asked.signalled()

    def verdict(self) -> str | None:
        """Why the run is to end now."""
        return "another worker has taken this trial over" if self.lost else self.reason


class TrialHeartbeat(threading.Thread):
    """Gives the signs of life that keep a trial ours; tells the watch when it is not any more."""

    def __init__(self, watch: TrialRunCallback, worker: SweepWorker, lease_s: float) -> None:
        super().__init__(name=f"lease-{watch.trial.number}", daemon=True)
        self._watch, self._worker, self._every_s = watch, worker, lease_s / 4
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(self._every_s):
            try:
                self._watch.register.renew(self._watch.trial.number, self._worker)
            except TrialLeaseLostError:
                self._watch.lost = True
                return
            except Exception as error:  # the database is away: we hold on until it says that we do not
                print_message(f"trial {self._watch.trial.number}: {first_line(error)}")

    def __enter__(self) -> "TrialHeartbeat":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()


@dataclass(frozen=True)
class TrialTask:
    """A trial that this worker holds, and what it needs to know to carry it out."""

    register: TrialStore
    trial: Trial
    settings: Settings
    """With the trial's values."""
    figures: Figures
    rows_per_step: float
    """Rows that a step learns from; of packs, on average."""
    judge: Judge | None


def run_trial(work: TrialTask, layout: ProjectLayout, worker: SweepWorker, asked: WorkerStopCheck) -> None:
    """Train, or go on with, a trial and tell the study what came of it.

    One that cannot be trained ends as infeasible or failed: whatever happens to it, the sweep goes on.

    Args:
        work: the trial.
        layout: the project.
        worker: who carries it out.
        asked: whether this process is to end; the supervisor of the run has its signals meanwhile.

    Raises:
        InterruptedRunError: this worker was asked to stop; a checkpoint is sealed, and the trial given back.
        TrialLeaseLostError: another worker has the trial; nothing was told.
    """
    trial, number = work.trial, work.trial.number
    launch, spec = build_launch(layout, work.settings), build_run_spec(layout, work.settings)
    # A trial has one machine: other workers of the sweep have trials of their own.
    launch = launch.model_copy(update={"machine": launch.machine.model_copy(update={"nodes": "1"})})
    paths = RunPaths(layout.runs / spec.run_id)
    judge = None if paths.is_finished() else work.judge  # what is trained already costs nothing more
    watch = TrialRunCallback(work.register, trial, work.rows_per_step, judge, asked)
    with TrialHeartbeat(watch, worker, work.settings.machine.lease_s):
        try:
            run = _open_run(layout, work, watch)
            try:
                supervise(run, launch, [watch], code_version(), arbiter=watch)
            finally:
                run.close()
            outcome = _finished_trial(work, watch, paths)
        except InterruptedRunError:
            if watch.lost:
                raise TrialLeaseLostError(f"trial {number}: another worker has taken it over") from None
            if watch.reason is None:
                with suppress(StorageError, LockHeldError):  # then it is found that this process is gone
                    work.register.release(number, worker)
                raise
            outcome = _pruned_trial(watch, paths)
        except Exception as error:  # fault isolation: a trial may fail in any way, and others are to go on
            if not isinstance(error, RatchetError | OSError):
                traceback.print_exception(error)
            outcome = _failed_trial(watch, paths, error)
    if watch.lost:
        raise TrialLeaseLostError(f"trial {number}: another worker has taken it over")
    retry_storage(lambda: work.register.finish(number, outcome, worker), launch.machine.storage_wait_s, asked.look)


def _open_run(layout: ProjectLayout, work: TrialTask, watch: TrialRunCallback) -> Run:
    """The run, once nobody else trains it."""
    spec, told = build_run_spec(layout, work.settings), False
    while True:
        try:
            return Run.open(layout.runs, spec)
        except LockHeldError as error:
            if not told:
                print_message(f"trial {work.trial.number} waits: {error}")
                told = True
        if watch.lost:
            raise InterruptedRunError("another worker has taken this trial over")
        watch.asked.look()
        time.sleep(BUSY_POLL_S)


def _finished_trial(work: TrialTask, watch: TrialRunCallback, paths: RunPaths) -> Trial:
    if watch.reason is not None:  # it was decided before the run came to its end
        return _pruned_trial(watch, paths)
    report = TrainReport.load(paths.result / "train.json")
    spent = compute_cost(paths, read_run_summary(paths))
    figures = work.figures(report, spent)
    return _ended_trial(watch, paths, spent, state="complete", objectives=figures, adapter_digest=report.adapter_digest)


def _pruned_trial(watch: TrialRunCallback, paths: RunPaths) -> Trial:
    return _ended_trial(
        watch, paths, compute_cost(paths, read_run_summary(paths)), state="pruned", reason=watch.reason or ""
    )


def _failed_trial(watch: TrialRunCallback, paths: RunPaths, error: Exception) -> Trial:
    """What the run's journal says about its end; where it says nothing, the error itself."""
    found = read_run_summary(paths)
    spent = compute_cost(paths, found)
    cause: FailureClass = "storage" if isinstance(error, OSError) else "bug"
    if type(error) in TOLD_BY_SUPERVISOR and found.cause is not None:
        cause = found.cause
    constraints = found.constraints if cause == found.cause else {}
    text = found.text if cause == found.cause and found.text else f"{type(error).__name__}: {error}"
    return _ended_trial(
        watch, paths, spent, state="infeasible" if constraints else "failed", constraints=constraints, cause=cause,
        reason=text,
    )  # fmt: skip


def _ended_trial(watch: TrialRunCallback, paths: RunPaths, spent: TrainingCost, **fields: Any) -> Trial:
    told = {"curve": watch.curve, "cost": spent, "checkpoints": checkpoint_digests(paths), "ended": time.time()}
    return watch.trial.model_copy(update=told | fields)

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
from ratchet.config.sweep import Aim
from ratchet.errors import (
    BusyError,
    InputError,
    InterruptedRunError,
    RatchetError,
    RunFailedError,
    StorageError,
    first_line,
)
from ratchet.runs.callbacks import Status
from ratchet.runs.directory import Run, RunPaths
from ratchet.runs.journal import Event, Reader
from ratchet.runs.log import say
from ratchet.runs.restart_policy import FailureClass
from ratchet.runs.status import Progress
from ratchet.runs.supervisor import supervise
from ratchet.storage import digests
from ratchet.storage.code_version import code_version
from ratchet.storage.files import MANIFEST
from ratchet.storage.layout import Layout
from ratchet.storage.records.base import TrainReport
from ratchet.storage.records.sweep import Cost, Trial
from ratchet.training.run_spec import launch_of, spec_of
from ratchet.tuning.leases import LeaseLostError, Worker
from ratchet.tuning.storage_retry import patiently
from ratchet.tuning.trial_store import Register

INFEASIBLE: dict[FailureClass, str] = {"too_large": "memory", "out_of_memory": "memory", "diverged": "diverged"}
"""Ends that say something about the values: which constraint they violate. All other failures say nothing of them."""

UNKNOWN = 1.0
"""By how much a constraint is violated, where that is not known."""


@dataclass
class Ending:
    """A fold over the journal of one run."""

    progress: Progress = field(default_factory=Progress)
    trainable_parameters: int = 0
    cause: FailureClass | None = None
    text: str = ""
    violation: float = UNKNOWN

    def see(self, event: Event) -> None:
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


def read(paths: RunPaths) -> Ending:
    """Where the run stands."""
    ending = Ending()
    for event in Reader(paths.journal).read():
        ending.see(event)
    return ending


def cost(paths: RunPaths, ending: Ending) -> Cost:
    """What the training came to until now."""
    progress = ending.progress
    done, planned = progress.step, progress.planned_steps
    tokens = progress.trained_tokens
    adapter = paths.result / "adapter"
    weights = sorted(adapter.glob("*.safetensors")) if adapter.is_dir() else []
    return Cost(
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


def figure(aim: Aim, report: TrainReport, spent: Cost) -> float | None:
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


def checkpoints(paths: RunPaths) -> dict[int, str]:
    """Digest of the manifest of each checkpoint that is there, by step; those that cannot be read are left out."""
    found = {}
    for step in paths.checkpoint_steps():
        manifest: Path = paths.checkpoint(step) / MANIFEST
        try:
            found[step] = digests.of_bytes(manifest.read_bytes())[: digests.SHORT]
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
Figures = Callable[[TrainReport, Cost], tuple[float, ...]]
"""What a finished training is judged by."""


class Asked(Protocol):
    """Whether this worker is to end."""

    def signalled(self) -> None:
        """A signal has asked for it."""

    def look(self) -> None:
        """Raise InterruptedRunError when it is."""


@dataclass
class Watch:
    """Observer and arbiter of a trial's run: reports validations to the study, and ends what is not worth more."""

    register: Register
    trial: Trial
    rows_per_step: float
    judge: Judge | None
    """None: nothing is ended early."""
    asked: Asked
    name: str = "trial"
    curve: dict[int, float] = field(default_factory=dict)
    reason: str | None = None
    """Why it was pruned."""
    lost: bool = False
    """Another worker has taken the trial over."""
    _planned: int = 0

    def see(self, events: Sequence[Event]) -> None:
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


class Hold(threading.Thread):
    """Gives the signs of life that keep a trial ours; tells the watch when it is not any more."""

    def __init__(self, watch: Watch, worker: Worker, lease_s: float) -> None:
        super().__init__(name=f"lease-{watch.trial.number}", daemon=True)
        self._watch, self._worker, self._every_s = watch, worker, lease_s / 4
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(self._every_s):
            try:
                self._watch.register.renew(self._watch.trial.number, self._worker)
            except LeaseLostError:
                self._watch.lost = True
                return
            except Exception as error:  # the database is away: we hold on until it says that we do not
                say(f"trial {self._watch.trial.number}: {first_line(error)}")

    def __enter__(self) -> "Hold":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()


@dataclass(frozen=True)
class Assignment:
    """A trial that this worker holds, and what it needs to know to carry it out."""

    register: Register
    trial: Trial
    settings: Settings
    """With the trial's values."""
    figures: Figures
    rows_per_step: float
    """Rows that a step learns from; of packs, on average."""
    judge: Judge | None


def carry_out(work: Assignment, layout: Layout, worker: Worker, asked: Asked) -> None:
    """Train, or go on with, a trial and tell the study what came of it.

    One that cannot be trained ends as infeasible or failed: whatever happens to it, the sweep goes on.

    Args:
        work: the trial.
        layout: the project.
        worker: who carries it out.
        asked: whether this process is to end; the supervisor of the run has its signals meanwhile.

    Raises:
        InterruptedRunError: this worker was asked to stop; a checkpoint is sealed, and the trial given back.
        LeaseLostError: another worker has the trial; nothing was told.
    """
    trial, number = work.trial, work.trial.number
    launch, spec = launch_of(layout, work.settings), spec_of(layout, work.settings)
    # A trial has one machine: other workers of the sweep have trials of their own.
    launch = launch.model_copy(update={"machine": launch.machine.model_copy(update={"nodes": "1"})})
    paths = RunPaths(layout.runs / spec.run_id)
    judge = None if paths.is_finished() else work.judge  # what is trained already costs nothing more
    watch = Watch(work.register, trial, work.rows_per_step, judge, asked)
    with Hold(watch, worker, work.settings.machine.lease_s):
        try:
            run = _opened(layout, work, watch)
            try:
                supervise(run, launch, [watch], code_version(), arbiter=watch)
            finally:
                run.close()
            outcome = _of_result(work, watch, paths)
        except InterruptedRunError:
            if watch.lost:
                raise LeaseLostError(f"trial {number}: another worker has taken it over") from None
            if watch.reason is None:
                with suppress(StorageError, BusyError):  # then it is found that this process is gone
                    work.register.release(number, worker)
                raise
            outcome = _pruned(watch, paths)
        except Exception as error:  # fault isolation: a trial may fail in any way, and others are to go on
            if not isinstance(error, RatchetError | OSError):
                traceback.print_exception(error)
            outcome = _failed(watch, paths, error)
    if watch.lost:
        raise LeaseLostError(f"trial {number}: another worker has taken it over")
    patiently(lambda: work.register.finish(number, outcome, worker), launch.machine.storage_wait_s, asked.look)


def _opened(layout: Layout, work: Assignment, watch: Watch) -> Run:
    """The run, once nobody else trains it."""
    spec, told = spec_of(layout, work.settings), False
    while True:
        try:
            return Run.open(layout.runs, spec)
        except BusyError as error:
            if not told:
                say(f"trial {work.trial.number} waits: {error}")
                told = True
        if watch.lost:
            raise InterruptedRunError("another worker has taken this trial over")
        watch.asked.look()
        time.sleep(BUSY_POLL_S)


def _of_result(work: Assignment, watch: Watch, paths: RunPaths) -> Trial:
    if watch.reason is not None:  # it was decided before the run came to its end
        return _pruned(watch, paths)
    report = TrainReport.load(paths.result / "train.json")
    spent = cost(paths, read(paths))
    figures = work.figures(report, spent)
    return _outcome(watch, paths, spent, state="complete", objectives=figures, adapter_digest=report.adapter_digest)


def _pruned(watch: Watch, paths: RunPaths) -> Trial:
    return _outcome(watch, paths, cost(paths, read(paths)), state="pruned", reason=watch.reason or "")


def _failed(watch: Watch, paths: RunPaths, error: Exception) -> Trial:
    """What the run's journal says about its end; where it says nothing, the error itself."""
    found = read(paths)
    spent = cost(paths, found)
    cause: FailureClass = "storage" if isinstance(error, OSError) else "bug"
    if type(error) in TOLD_BY_SUPERVISOR and found.cause is not None:
        cause = found.cause
    constraints = found.constraints if cause == found.cause else {}
    text = found.text if cause == found.cause and found.text else f"{type(error).__name__}: {error}"
    return _outcome(
        watch, paths, spent, state="infeasible" if constraints else "failed", constraints=constraints, cause=cause,
        reason=text,
    )  # fmt: skip


def _outcome(watch: Watch, paths: RunPaths, spent: Cost, **fields: Any) -> Trial:
    told = {"curve": watch.curve, "cost": spent, "checkpoints": checkpoints(paths), "ended": time.time()}
    return watch.trial.model_copy(update=told | fields)

"""A trial is a run: the same supervisor, watched by one more observer, which may find it not worth going on with."""

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ratchet.config import Settings
from ratchet.errors import (
    BusyError,
    InputError,
    InterruptedRunError,
    RatchetError,
    RunFailedError,
    StorageError,
    first_line,
)
from ratchet.layout import Layout
from ratchet.records import TrainReport
from ratchet.records_sweep import Cost, Trial
from ratchet.run.directory import Run, RunPaths
from ratchet.run.journal import Event
from ratchet.run.log import say
from ratchet.run.observers import Status
from ratchet.run.recovery import FailureClass
from ratchet.run.supervisor import supervise
from ratchet.studies.leases import LeaseLostError, Worker
from ratchet.studies.register import Register
from ratchet.sweeping import ending
from ratchet.sweeping.patience import patiently
from ratchet.training.commission import launch_of, spec_of
from ratchet.version import code_version

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
    spent = ending.cost(paths, ending.read(paths))
    figures = work.figures(report, spent)
    return _outcome(watch, paths, spent, state="complete", objectives=figures, adapter_digest=report.adapter_digest)


def _pruned(watch: Watch, paths: RunPaths) -> Trial:
    return _outcome(watch, paths, ending.cost(paths, ending.read(paths)), state="pruned", reason=watch.reason or "")


def _failed(watch: Watch, paths: RunPaths, error: Exception) -> Trial:
    """What the run's journal says about its end; where it says nothing, the error itself."""
    found = ending.read(paths)
    spent = ending.cost(paths, found)
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
    told = {"curve": watch.curve, "cost": spent, "checkpoints": ending.checkpoints(paths), "ended": time.time()}
    return watch.trial.model_copy(update=told | fields)

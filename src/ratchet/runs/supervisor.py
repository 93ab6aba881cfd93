"""Supervise one run: start workers, watch them, restart or give up, until there is a result. Imports no torch."""

import os
import time
from collections.abc import Sequence
from typing import NoReturn

from ratchet.errors import (
    EXIT_INPUT,
    EXIT_INTERRUPTED,
    EXIT_PEERS,
    InputError,
    InterruptedRunError,
    RunFailedError,
    StorageError,
)
from ratchet.runs.callbacks import CallbackList, RunCallback, RunPruner, Status
from ratchet.runs.directory import LaunchSpec, Run, storage_errors
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.runs.log import print_message
from ratchet.runs.preemption import PreemptionMonitor
from ratchet.runs.rendezvous import RendezvousServer
from ratchet.runs.replication_protocol import ReplicationSession, ReplicatorProtocol
from ratchet.runs.restart_policy import (
    EarlierFailure,
    FailureClass,
    GiveUp,
    WorkerExit,
    classify_exit,
    compute_exclusion_s,
    decide,
)
from ratchet.runs.signals import StopSignal
from ratchet.runs.status import RunProgress, describe_amount
from ratchet.runs.supervisor_log import log_supervision
from ratchet.runs.system_metrics import SystemMetricsSampler
from ratchet.runs.worker_process import run_attempt


def supervise(
    run: Run,
    launch: LaunchSpec,
    observers: Sequence[RunCallback],
    code_version: str,
    arbiter: RunPruner | None = None,
    custody: ReplicatorProtocol | None = None,
) -> None:
    """Bring a run to its sealed result.

    Args:
        run: opened by the caller, who also closes it.
        launch: how and where the worker runs; written into the run directory.
        observers: told every event of the journal, from its beginning.
        code_version: recorded for every attempt; a change within a run is noted.
        arbiter: may end the run early.
        custody: keeps a second copy of the run; it is done when its result is in the copy.

    Raises:
        InterruptedRunError: asked to stop (SIGTERM, SIGINT, a spot notice, the arbiter), a checkpoint is sealed; or
            the copy lacks something.
        LeaseHeldError, MirrorError, SettingsError: see `ReplicatorProtocol.take`.
        InputError: the worker found settings, data or base model unusable.
        RunFailedError: gave up, with the cause.
        StorageError: the run directory cannot be written.
    """
    with storage_errors(run.paths.root):
        launch.save(run.paths.launch)
    care = ReplicationSession(custody, run, launch.machine)
    with log_supervision(run, launch.machine) as logbook, care.held():
        told = [*observers, logbook]
        audience = CallbackList(told, run.journal)  # told from the beginning of what may have come from the copy
        audience.start()
        _supervise_with_callbacks(audience, run, launch, code_version, arbiter, care)


def _supervise_with_callbacks(
    audience: CallbackList,
    run: Run,
    launch: LaunchSpec,
    code_version: str,
    arbiter: RunPruner | None,
    care: ReplicationSession,
) -> None:
    """Bring a run that we may write to its result, before an audience that is told how it ends."""
    machine = launch.machine
    status: Status = "FAILED"
    try:
        with StopSignal(arbiter.signalled if arbiter else None).installed() as stop:
            try:
                if not run.paths.is_finished():
                    _Supervisor(run, launch, stop, arbiter, care).until_result(code_version)
                care.finish(stop)
            except InterruptedRunError as error:
                status = "KILLED"  # and still deaf to further requests, until all have been told what there is time for
                outcome = care.leave(stop, error)
                audience.end(status, min(machine.tracking_grace_s, machine.grace_s))
                raise outcome from None
        status = "FINISHED"
    finally:
        if status != "KILLED":
            audience.end(status, machine.tracking_grace_s)


class _JournalState:
    """What the supervisor knows from the journal: read once from the beginning, then only what is new."""

    def __init__(self, run: Run) -> None:
        self._reader = JournalReader(run.paths.journal)
        self.progress = RunProgress()
        self.words: JournalEvent | None = None
        """The last `failure` that a worker told."""
        self.samples = 0
        """Of what is used, so many were taken."""

    def update(self) -> None:
        try:
            for event in self._reader.read():
                self.progress.see(event)
                if event.kind == "system":
                    self.samples = max(self.samples, int(event.data.get("sample", 0)))
                elif event.kind == "failure" and not self._is_echo(event):
                    self.words = event
        except OSError as error:  # a disk that cannot be read now: what is new is read the next time
            print_message(f"{self._reader.path} cannot be read: {error}")

    def _is_echo(self, event: JournalEvent) -> bool:
        """Whether a rank only tells that others are gone, and one of those has told why."""
        before = self.words
        return event.data.get("class") == "peers" and before is not None and before.attempt == event.attempt


class _Supervisor:
    def __init__(
        self, run: Run, launch: LaunchSpec, stop: StopSignal, arbiter: RunPruner | None, care: ReplicationSession
    ) -> None:
        self._launch = launch
        self._run, self._stop, self._arbiter, self._care = run, stop, arbiter, care
        self._machine, self._retries = launch.machine, launch.retries
        self._record = _JournalState(run)
        notice = launch.machine.preemption_notice
        self._notice = PreemptionMonitor(notice) if notice else None
        self._meeting = RendezvousServer(launch.machine)
        self._failed_s: list[float] = []
        """When ranks of this machine failed by themselves."""

    def until_result(self, code_version: str) -> None:
        """Start workers until one seals the result, or recovery gives up."""
        run, record = self._run, self._record
        record.update()
        self._note_code_change(code_version)
        number, last_step = record.progress.attempts, record.progress.checkpoint_step
        deaths: list[EarlierFailure] = []
        if self._notice:
            self._notice.start()
        sampler = self._sampler()
        try:
            while True:
                self._end_if_asked()
                self._meeting.ensure()
                number += 1
                run.journal.attempt = number
                run.journal.append("attempt", pid=os.getpid(), code_version=code_version)
                end = run_attempt(run, self._machine, self._stop, self._look, self._launch.worker)
                record.update()
                # One that has told its end, and then dies or hangs while it takes itself apart, has done its work.
                if (end.exit_code == 0 or record.progress.finished) and run.paths.is_finished():
                    return
                end = self._with_words(end)
                if record.progress.checkpoint_step > last_step:
                    last_step = record.progress.checkpoint_step
                    deaths = []
                deaths.append(self._after_death(end, deaths))
        finally:
            if sampler:
                sampler.end()
            self._meeting.close()
            if self._notice:
                self._notice.stop()

    def _sampler(self) -> SystemMetricsSampler | None:
        """Notes what is used, from now on, unless nobody wants to know."""
        if not self._machine.system_every_s:
            return None
        sampler = SystemMetricsSampler(self._run.journal, self._machine, self._worker, self._record.samples)
        sampler.start()
        return sampler

    def _worker(self) -> int | None:
        """Its process, if there is one now."""
        worker = self._stop.worker
        return None if worker is None else worker.pid

    def _after_death(self, end: WorkerExit, before: list[EarlierFailure]) -> EarlierFailure:
        """Tell the end, and wait for the next attempt. Raises when there is to be none."""
        machine, stop = self._machine, self._stop
        decision = decide(end, before, self._retries, machine.retry_delay_s, stop.asked)
        cause = classify_exit(end)
        if cause == "preempted" and not self._record.progress.stopped:  # while it was loading, and had nothing to seal
            self._tell_stopped()
        if cause != "preempted":
            what = "Interrupted" if decision.failure == "preempted" else type(decision).__name__
            self._run.journal.append(
                "died", exit_code=end.exit_code, **{"class": cause}, decision=what, text=decision.text
            )
        if isinstance(decision, GiveUp):
            self._raise(decision)
        delay_s = max(decision.delay_s, self._left_out_s(cause))
        again = f"starting again in {delay_s:g} s"
        print_message(f"worker {cause.replace('_', ' ')}: {decision.text}; {again}")
        stop.wait(delay_s, self._look)
        return EarlierFailure(cause, decision.text)

    def _left_out_s(self, cause: FailureClass) -> float:
        """How long this machine stays away from the others, if there are any."""
        if cause == "peers" or self._machine.node_range[1] == 1:
            return 0.0
        self._failed_s.append(time.monotonic())
        return compute_exclusion_s(self._failed_s, self._failed_s[-1], self._machine.leave_out_s)

    def _with_words(self, end: WorkerExit) -> WorkerExit:
        """The end, with what the worker itself said about it."""
        words = self._record.words
        if words is None or words.attempt != self._run.journal.attempt:
            return end
        if words.data.get("class") == "peers" and end.exit_code != EXIT_PEERS:
            return end  # the others' words, not those of the rank that died
        failure: FailureClass = words.data.get("class", "bug")
        return WorkerExit(end.exit_code, failure, str(words.data.get("text", "")), end.oom_kills)

    def _look(self) -> None:
        """Is this run to end early, or this machine about to be taken away?"""
        if self._arbiter and not self._stop.asked and (verdict := self._arbiter.verdict()):
            self._run.journal.append("ended_early", text=verdict)
            self._stop.ask()
        self._care.look(self._stop)
        notice = self._notice
        if notice is None:
            return
        for text in notice.news():
            self._run.journal.append("notice", text=text)
            print_message(text)
        if notice.text and not self._stop.asked:
            self._run.journal.append("alert", text=notice.text)
            print_message(notice.text)
            self._stop.ask()

    def _end_if_asked(self) -> None:
        """Start no worker only to stop it."""
        self._look()
        if self._stop.asked:
            self._tell_stopped()
            self._raise(GiveUp("preempted", InterruptedRunError.exit_code, "stopped on request; repeat to go on"))

    def _kept_step(self) -> int:
        progress = self._record.progress
        told = progress.checkpoint_step
        return told if progress.stopped else self._launch.kept_step(self._run.paths.root, told)

    def _tell_stopped(self) -> None:
        self._run.journal.append("stopped", step=self._kept_step(), **self._launch.counted_in)
        self._record.update()

    def _note_code_change(self, code_version: str) -> None:
        before = self._record.progress.code_version
        if before and before != code_version:
            text = f"code version changed within the run, from {before} to {code_version}"
            self._run.journal.append("notice", text=text)
            print_message(text)

    def _raise(self, decision: GiveUp) -> NoReturn:
        paths, step = self._run.paths, self._kept_step()
        if decision.exit_code == EXIT_INTERRUPTED:
            raise InterruptedRunError(f"run {paths.root.name}: {decision.text} ({self._launch.kept(step)})")
        if decision.failure == "storage" and decision.exit_code == EXIT_INPUT:
            raise StorageError(decision.text)
        if decision.failure in ("data", "too_large"):
            raise InputError(decision.text)
        raise RunFailedError(
            f"run {paths.root.name}: {decision.failure.replace('_', ' ')}: {decision.text}\n"
            f"  what is kept: {describe_amount(step, self._launch.counted_in)}; worker output: {paths.worker_log}"
        )

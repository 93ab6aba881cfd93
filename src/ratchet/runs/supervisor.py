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
from ratchet.runs.directory import LaunchSpec, RunDirectory, storage_errors
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
    run: RunDirectory,
    launch: LaunchSpec,
    callbacks: Sequence[RunCallback],
    code_version: str,
    pruner: RunPruner | None = None,
    replicator: ReplicatorProtocol | None = None,
) -> None:
    """Run workers until the run has a sealed result.

    Args:
        run: opened by the caller, who also closes it.
        launch: how and where the worker runs; saved in the run directory.
        callbacks: receive every event of the journal, from its beginning.
        code_version: recorded for every attempt; a change within a run is noted in the journal.
        pruner: may end the run early.
        replicator: copies the run to a replica; supervision ends when the result is there.

    Raises:
        InterruptedRunError: asked to stop (SIGTERM, SIGINT, a preemption notice, the pruner) and a checkpoint is saved;
            or the replica is incomplete.
        LeaseHeldError, ReplicaError, SettingsError: see `ReplicatorProtocol.acquire`.
        InputError: the worker found settings, data or base model unusable.
        RunFailedError: gave up; the message names the cause.
        StorageError: the run directory cannot be written.
    """
    with storage_errors(run.paths.root):
        launch.save(run.paths.launch)
    replication = ReplicationSession(replicator, run, launch.machine)
    with log_supervision(run, launch.machine) as log_callback, replication.hold_lease():
        # Started only now: acquiring the lease may have fetched a longer journal from the replica.
        callback_list = CallbackList([*callbacks, log_callback], run.journal)
        callback_list.start()
        _supervise_with_callbacks(callback_list, run, launch, code_version, pruner, replication)


def _supervise_with_callbacks(
    callback_list: CallbackList,
    run: RunDirectory,
    launch: LaunchSpec,
    code_version: str,
    pruner: RunPruner | None,
    replication: ReplicationSession,
) -> None:
    """Run workers until there is a result, then end the callbacks with the outcome."""
    machine = launch.machine
    status: Status = "FAILED"
    try:
        with StopSignal(pruner.on_stop_signal if pruner else None).installed() as stop:
            try:
                if not run.paths.is_finished():
                    _Supervisor(run, launch, stop, pruner, replication).run_until_result(code_version)
                replication.wait_for_result(stop)
            except InterruptedRunError as error:
                status = "KILLED"  # further stop signals stay ignored until the callbacks have had their time
                outcome = replication.wait_after_stop(stop, error)
                callback_list.end(status, min(machine.tracking_timeout_s, machine.grace_period_s))
                raise outcome from None
        status = "FINISHED"
    finally:
        if status != "KILLED":
            callback_list.end(status, machine.tracking_timeout_s)


class _JournalState:
    """State of a run according to its journal. Reads the journal once from the beginning, then only new events."""

    def __init__(self, run: RunDirectory) -> None:
        self._reader = JournalReader(run.paths.journal)
        self.progress = RunProgress()
        self.worker_error: JournalEvent | None = None
        """The last event `worker_error`."""
        self.samples = 0
        """Number of system metric samples so far."""

    def update(self) -> None:
        try:
            for event in self._reader.read():
                self.progress.update(event)
                if event.kind == "system_metrics":
                    self.samples = max(self.samples, int(event.data.get("sample", 0)))
                elif event.kind == "worker_error" and not self._is_consequence(event):
                    self.worker_error = event
        except OSError as error:  # the next call reads what this one could not
            print_message(f"{self._reader.path} cannot be read: {error}")

    def _is_consequence(self, event: JournalEvent) -> bool:
        """Whether a rank only reports that its peers are gone, and a peer has already reported why."""
        before = self.worker_error
        return event.data.get("failure_class") == "peers" and before is not None and before.attempt == event.attempt


class _Supervisor:
    def __init__(
        self,
        run: RunDirectory,
        launch: LaunchSpec,
        stop: StopSignal,
        pruner: RunPruner | None,
        replication: ReplicationSession,
    ) -> None:
        self._launch = launch
        self._run, self._stop, self._pruner, self._replication = run, stop, pruner, replication
        self._machine = launch.machine
        self._journal_state = _JournalState(run)
        notice = launch.machine.preemption_notice
        self._preemption = PreemptionMonitor(notice) if notice else None
        self._rendezvous = RendezvousServer(launch.machine)
        self._failed_s: list[float] = []
        """When ranks of this machine failed by their own fault, by time.monotonic()."""

    def run_until_result(self, code_version: str) -> None:
        """Start workers until one seals the result. Raises when the restart policy gives up."""
        run, state = self._run, self._journal_state
        state.update()
        self._note_code_change(code_version)
        attempt, last_step = state.progress.attempts, state.progress.checkpoint_step
        failures: list[EarlierFailure] = []
        if self._preemption:
            self._preemption.start()
        sampler = self._start_sampler()
        try:
            while True:
                self._raise_if_asked_to_stop()
                self._rendezvous.ensure()
                attempt += 1
                run.journal.attempt = attempt
                run.journal.append("attempt_started", pid=os.getpid(), code_version=code_version)
                end = run_attempt(run, self._machine, self._stop, self._poll, self._launch.worker)
                state.update()
                # A worker that logged `finished` and then crashed or hung during shutdown counts as successful.
                if (end.exit_code == 0 or state.progress.finished) and run.paths.is_finished():
                    return
                end = self._add_worker_error(end)
                if state.progress.checkpoint_step > last_step:
                    last_step = state.progress.checkpoint_step
                    failures = []
                failures.append(self._handle_failure(end, failures))
        finally:
            if sampler:
                sampler.end()
            self._rendezvous.close()
            if self._preemption:
                self._preemption.stop()

    def _start_sampler(self) -> SystemMetricsSampler | None:
        """Start recording system metrics, unless the settings turn them off."""
        if not self._machine.system_metrics_interval_s:
            return None
        sampler = SystemMetricsSampler(self._run.journal, self._machine, self._worker_pid, self._journal_state.samples)
        sampler.start()
        return sampler

    def _worker_pid(self) -> int | None:
        worker = self._stop.worker
        return None if worker is None else worker.pid

    def _handle_failure(self, end: WorkerExit, before: list[EarlierFailure]) -> EarlierFailure:
        """Record the end of a worker and wait until the next attempt may start. Raises if there is to be none."""
        machine, stop = self._machine, self._stop
        decision = decide(end, before, self._launch.max_restarts, machine.restart_delay_s, stop.asked)
        failure = classify_exit(end)
        if (
            failure == "preempted" and not self._journal_state.progress.stopped
        ):  # stopped while loading: nothing to save
            self._log_interrupted()
        if failure != "preempted":
            name = "Interrupted" if decision.failure == "preempted" else type(decision).__name__
            self._run.journal.append(
                "worker_exited", exit_code=end.exit_code, failure_class=failure, decision=name, text=decision.text
            )
        if isinstance(decision, GiveUp):
            self._raise(decision)
        delay_s = max(decision.delay_s, self._cooldown_s(failure))
        print_message(f"worker {failure.replace('_', ' ')}: {decision.text}; restarting in {delay_s:g} s")
        stop.wait(delay_s, self._poll)
        return EarlierFailure(failure, decision.text)

    def _cooldown_s(self, failure: FailureClass) -> float:
        """How long this machine stays out of a training of several machines."""
        if failure == "peers" or self._machine.node_range[1] == 1:
            return 0.0
        self._failed_s.append(time.monotonic())
        return compute_exclusion_s(self._failed_s, self._failed_s[-1], self._machine.node_cooldown_s)

    def _add_worker_error(self, end: WorkerExit) -> WorkerExit:
        """Add what the worker itself reported about its end."""
        error = self._journal_state.worker_error
        if error is None or error.attempt != self._run.journal.attempt:
            return end
        if error.data.get("failure_class") == "peers" and end.exit_code != EXIT_PEERS:
            return end  # reported by other ranks, not by the one that died
        failure: FailureClass = error.data.get("failure_class", "bug")
        return WorkerExit(end.exit_code, failure, str(error.data.get("text", "")), end.oom_kills)

    def _poll(self) -> None:
        """Check the pruner, the lease and the preemption notice; ask the run to stop if one of them says so."""
        if self._pruner and not self._stop.asked and (reason := self._pruner.prune_reason()):
            self._run.journal.append("pruned", text=reason)
            self._stop.ask()
        self._replication.check_lease(self._stop)
        monitor = self._preemption
        if monitor is None:
            return
        for text in monitor.new_remarks():
            self._run.journal.append("notice", text=text)
            print_message(text)
        if monitor.notice and not self._stop.asked:
            self._run.journal.append("alert", text=monitor.notice)
            print_message(monitor.notice)
            self._stop.ask()

    def _raise_if_asked_to_stop(self) -> None:
        """Start no worker only to stop it."""
        self._poll()
        if self._stop.asked:
            self._log_interrupted()
            self._raise(
                GiveUp("preempted", InterruptedRunError.exit_code, "stopped on request; run it again to resume")
            )

    def _saved_step(self) -> int:
        progress = self._journal_state.progress
        step = progress.checkpoint_step
        return step if progress.stopped else self._launch.saved_step(self._run.paths.root, step)

    def _log_interrupted(self) -> None:
        self._run.journal.append("interrupted", step=self._saved_step(), **self._launch.work_unit)
        self._journal_state.update()

    def _note_code_change(self, code_version: str) -> None:
        before = self._journal_state.progress.code_version
        if before and before != code_version:
            text = f"code version changed within the run, from {before} to {code_version}"
            self._run.journal.append("notice", text=text)
            print_message(text)

    def _raise(self, decision: GiveUp) -> NoReturn:
        paths, step = self._run.paths, self._saved_step()
        if decision.exit_code == EXIT_INTERRUPTED:
            raise InterruptedRunError(f"run {paths.root.name}: {decision.text} ({self._launch.describe_saved(step)})")
        if decision.failure == "storage" and decision.exit_code == EXIT_INPUT:
            raise StorageError(decision.text)
        if decision.failure in ("data", "too_large"):
            raise InputError(decision.text)
        raise RunFailedError(
            f"run {paths.root.name}: {decision.failure.replace('_', ' ')}: {decision.text}\n"
            f"  saved: {describe_amount(step, self._launch.work_unit)}; worker output: {paths.worker_log}"
        )

"""Supervisor of a run: it starts workers, watches them, and restarts them or gives up, until there is a result.

The worker is a child process. It shares the run directory, the lock of the run and a page of memory (heartbeat.py) with
the supervisor. This module does not import torch.
"""

import logging
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NoReturn

from ratchet.config.machine import Machine
from ratchet.errors import (
    EXIT_BUG,
    EXIT_INPUT,
    EXIT_INTERRUPTED,
    EXIT_PEERS,
    InputError,
    InterruptedRunError,
    RatchetError,
    RunFailedError,
    StorageError,
)
from ratchet.redaction import redact
from ratchet.runs import log
from ratchet.runs.callbacks import CallbackList, RunCallback, RunPruner, Status
from ratchet.runs.directory import LaunchSpec, RunDirectory, storage_errors
from ratchet.runs.fork_server import Program
from ratchet.runs.group_connection import WorkerServer
from ratchet.runs.heartbeat import HangDetector, Heartbeat, dump_stacks_and_kill, read_process_state
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.runs.log import JsonLog, Level, LogTrimmer, print_message
from ratchet.runs.preemption import PreemptionMonitor
from ratchet.runs.progress_view import describe_notable_event
from ratchet.runs.rendezvous import RendezvousServer, count_local_ranks, has_agent
from ratchet.runs.replication_protocol import ReplicationSession, ReplicatorProtocol
from ratchet.runs.restart_policy import (
    FailureClass,
    GiveUp,
    Retry,
    WorkerExit,
    classify_exit,
    compute_exclusion_s,
    decide,
)
from ratchet.runs.signals import StopSignal
from ratchet.runs.status import RunProgress, describe_amount, describe_stop
from ratchet.runs.system_metrics import SystemMetricsSampler
from ratchet.runs.worker_process import SpawnedProcess, WorkerProcess

WORKER_MODULE = "ratchet.training.worker_main"
WORKER = (sys.executable, "-m", WORKER_MODULE)
AGENT = (sys.executable, "-m", "ratchet.training.elastic_agent")
POLL_S = 0.1
KILL_WAIT_S = 15.0
"""Time after which a killed process that has not ended is reported. Such a process may wait for a device (state D)."""


def supervise(  # noqa: PLR0913, PLR0917 (the run, and who takes part in it)
    run: RunDirectory,
    launch: LaunchSpec,
    callbacks: Sequence[RunCallback],
    code_version: str,
    pruner: RunPruner | None = None,
    replicator: ReplicatorProtocol | None = None,
    server: WorkerServer | None = None,
) -> None:
    """Run workers until the run has a sealed result, and until the result is in the replica, if there is a replicator.

    Workers are started by `server`. Without a server, and on machines with several ranks, they are programs.

    Raises:
        InterruptedRunError: the run was asked to stop (SIGTERM, SIGINT, a preemption notice, the pruner) and has saved
            a checkpoint; or the replica is incomplete.
        LeaseHeldError, ReplicaError, SettingsError: see `ReplicatorProtocol.acquire`.
        InputError: the worker found settings, data or base model unusable.
        RunFailedError: the supervisor gave up; the message names the cause.
        StorageError: the run directory cannot be written.
    """
    with storage_errors(run.paths.root):
        launch.save(run.paths.launch)
    replication = ReplicationSession(replicator, run, launch.machine)
    with log_supervision(run, launch.machine) as log_callback, replication.hold_lease():
        # The callbacks start after the lease is acquired, which may have fetched a longer journal from the replica.
        callback_list = CallbackList([*callbacks, log_callback], run.journal)
        callback_list.start()
        machine = launch.machine
        status: Status = "FAILED"
        try:
            with StopSignal(pruner.on_stop_signal if pruner else None).installed() as stop:
                try:
                    if not run.paths.is_finished():
                        _Supervisor(run, launch, stop, pruner, replication, server).run_until_result(code_version)
                    replication.wait_for_result(stop)
                except InterruptedRunError as error:
                    status = "KILLED"  # further stop signals are ignored until the callbacks have ended
                    outcome = replication.wait_after_stop(stop, error)
                    callback_list.end(status, min(machine.tracking_timeout_s, machine.grace_period_s))
                    raise outcome from None
            status = "FINISHED"
        finally:
            if status != "KILLED":
                callback_list.end(status, machine.tracking_timeout_s)


class _JournalState:
    """State of a run according to its journal. `update` reads all events the first time, and then only new events."""

    def __init__(self, run: RunDirectory) -> None:
        self._reader = JournalReader(run.paths.journal)
        self.progress = RunProgress()
        self.worker_error: JournalEvent | None = None
        """The last event `worker_error`, except of ranks that report lost peers after a peer has reported the cause."""
        self.samples = 0

    def update(self) -> None:
        try:
            for event in self._reader.read():
                self.progress.update(event)
                if event.kind == "system_metrics":
                    self.samples = max(self.samples, int(event.data.get("sample", 0)))
                elif event.kind == "worker_error":
                    is_first = self.worker_error is None or self.worker_error.attempt != event.attempt
                    if is_first or event.data.get("failure_class") != "peers":
                        self.worker_error = event
        except OSError as error:  # the next call reads the missing events
            print_message(f"{self._reader.path} cannot be read: {error}")


class _Supervisor:
    """Loop that starts workers, and the decisions between two attempts."""

    def __init__(
        self, run: RunDirectory, launch: LaunchSpec, stop: StopSignal, pruner: RunPruner | None,
        replication: ReplicationSession, server: WorkerServer | None,
    ) -> None:  # fmt: skip
        self._launch, self._server = launch, server
        self._run, self._stop, self._pruner, self._replication = run, stop, pruner, replication
        self._machine = launch.machine
        self._journal_state = _JournalState(run)
        notice = launch.machine.preemption_notice
        self._preemption = PreemptionMonitor(notice) if notice else None
        self._rendezvous = RendezvousServer(launch.machine)
        self._failed_s: list[float] = []
        """Times at which ranks of this machine failed by their own fault, by time.monotonic()."""

    def run_until_result(self, code_version: str) -> None:
        """Start workers until one seals the result. Raises when the restart policy gives up."""
        run, state = self._run, self._journal_state
        state.update()
        previous = state.progress.code_version
        if previous and previous != code_version:
            self._notify("notice", f"code version changed within the run, from {previous} to {code_version}")
        attempt, failures = state.progress.attempts, list[Retry]()
        # Pairs of start step and newest checkpoint that counted as progress. After a damaged checkpoint, an attempt
        # starts at an earlier step.
        advances = set[tuple[int, int]]()
        if self._preemption:
            self._preemption.start()
        sampler = None
        if self._machine.system_metrics_interval_s:
            sampler = SystemMetricsSampler(run.journal, self._machine, self._worker_pid, state.samples)
            sampler.start()
        try:
            while True:
                self._poll()
                if self._stop.is_requested:  # a worker would be started only to be stopped
                    self._log_interrupted()
                    self._raise(GiveUp("preempted", EXIT_INTERRUPTED, "stopped on request; run it again to resume"))
                self._rendezvous.ensure()
                attempt += 1
                run.journal.attempt = attempt
                run.journal.append("attempt_started", pid=os.getpid(), code_version=code_version)
                end = run_attempt(run, self._machine, self._stop, self._poll, self._launch.worker, self._server)
                state.update()
                # A worker that logged `finished` and then crashed or hung during shutdown counts as successful.
                if (end.exit_code == 0 or state.progress.finished) and run.paths.is_finished():
                    return
                end = self._add_worker_error(end)
                start, saved = state.progress.start_step, state.progress.checkpoint_step
                if start is not None and saved > start and (start, saved) not in advances:
                    advances.add((start, saved))
                    failures = []
                failures.append(self._handle_failure(end, failures))
        finally:
            if sampler:
                sampler.end()
            self._rendezvous.close()
            if self._preemption:
                self._preemption.stop()

    def _worker_pid(self) -> int | None:
        worker = self._stop.worker
        return None if worker is None else worker.pid

    def _handle_failure(self, end: WorkerExit, earlier: list[Retry]) -> Retry:
        """Record the end of a worker and wait until the next attempt may start. Raises if no attempt may follow."""
        machine, stop = self._machine, self._stop
        decision = decide(end, earlier, self._launch.max_restarts, machine.restart_delay_s, stop.is_requested)
        failure = classify_exit(end)
        if failure == "preempted":
            if not self._journal_state.progress.stopped:  # the worker stopped while loading and had nothing to save
                self._log_interrupted()
        else:
            name = "Interrupted" if decision.failure == "preempted" else type(decision).__name__
            self._run.journal.append(
                "worker_exited", exit_code=end.exit_code, failure_class=failure, decision=name, text=decision.text
            )
        if isinstance(decision, GiveUp):
            self._raise(decision)
        delay_s = decision.delay_s
        if failure != "peers" and machine.node_range[1] > 1:
            self._failed_s.append(time.monotonic())
            delay_s = max(delay_s, compute_exclusion_s(self._failed_s, self._failed_s[-1], machine.node_cooldown_s))
        print_message(f"worker {failure.replace('_', ' ')}: {decision.text}; restarting in {delay_s:g} s")
        stop.wait(delay_s, self._poll)
        return decision

    def _add_worker_error(self, end: WorkerExit) -> WorkerExit:
        """Add the worker's own report about its end, if there is one."""
        error = self._journal_state.worker_error
        if error is None or error.attempt != self._run.journal.attempt:
            return end
        if error.data.get("failure_class") == "peers" and end.exit_code != EXIT_PEERS:
            return end  # other ranks wrote the report, not the rank that died
        failure: FailureClass = error.data.get("failure_class", "bug")
        return WorkerExit(end.exit_code, failure, str(error.data.get("text", "")), end.oom_kills)

    def _poll(self) -> None:
        """Check the pruner, the lease and the preemption notice. Ask the run to stop if one of them requires it."""
        if self._pruner and not self._stop.is_requested and (reason := self._pruner.prune_reason()):
            self._run.journal.append("pruned", text=reason)
            self._stop.request()
        self._replication.check_lease(self._stop)
        monitor = self._preemption
        if monitor is None:
            return
        for text in monitor.new_remarks():
            self._notify("notice", text)
        if monitor.notice and not self._stop.is_requested:
            self._notify("alert", monitor.notice)
            self._stop.request()

    def _saved_step(self) -> int:
        progress = self._journal_state.progress
        step = progress.checkpoint_step
        return step if progress.stopped else self._launch.saved_step(self._run.paths.root, step)

    def _log_interrupted(self) -> None:
        self._run.journal.append("interrupted", step=self._saved_step(), **self._launch.work_unit)
        self._journal_state.update()

    def _notify(self, kind: Literal["notice", "alert"], text: str) -> None:
        self._run.journal.append(kind, text=text)
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


def run_attempt(
    run: RunDirectory, machine: Machine, stop: StopSignal, poll: Callable[[], None], module: str | None = None,
    server: WorkerServer | None = None,
) -> WorkerExit:  # fmt: skip
    """Start a worker and wait for its end. Kill it if it stalls."""
    count = count_local_ranks(machine)
    pages = [Heartbeat.create(machine.stall_timeout_s, machine.first_stall_timeout_s) for _ in range(count)]
    try:
        kills_before = count_oom_kills()
        try:
            worker = _start_worker(run, pages, has_agent(machine), module, server)
        except OSError as error:  # no space for its log, or no process available: both may be temporary
            return WorkerExit(EXIT_BUG, "storage", f"the worker could not be started: {error}")
        stop.worker = worker
        if stop.is_requested:
            stop.pass_on()
        try:
            detectors = [HangDetector(page, machine.grace_period_s) for page in pages]
            end = _watch_worker(worker, run, detectors, stop, poll)
        except BaseException:
            worker.abandon()  # it would train without a supervisor
            raise
        finally:
            stop.worker = None
        if worker.start_error:
            return WorkerExit(EXIT_BUG, "storage", f"the worker could not be started: {worker.start_error}")
        kills = max(after - before for after, before in zip(count_oom_kills(), kills_before, strict=True))
        if worker.died_with_others and not kills and end.failure is None:  # another of them may be the cause
            return WorkerExit(end.exit_code, "peers", "the process that trains this run with others died", kills)
        return WorkerExit(end.exit_code, end.failure, end.text, kills)
    finally:
        for page in pages:
            page.close()


def _start_worker(
    run: RunDirectory, pages: Sequence[Heartbeat], with_agent: bool, module: str | None, server: WorkerServer | None
) -> WorkerProcess:
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # required for deterministic cuBLAS
    root, attempt = str(run.paths.root), str(run.journal.attempt)
    # A worker has its own session, so Ctrl-C reaches only the supervisor, which passes it on once. It inherits the
    # lock, so the run stays locked until supervisor and worker are gone. If the supervisor dies, the kernel kills the
    # worker.
    with run.paths.worker_log.open("ab") as log:
        if server is not None and not with_agent:
            arguments = (root, attempt, None, pages[0].fd)
            program = Program(module or WORKER_MODULE, arguments, environment, str(run.paths.stacks))
            return server.start(program, log.fileno(), [run.lock.fd])
        entry = WORKER if module is None else (sys.executable, "-m", module)
        command = [*entry, root, attempt, str(os.getpid()), str(pages[0].fd)]
        if with_agent:
            command = [*AGENT, root, attempt, str(os.getpid()), Heartbeat.address_of(pages), str(len(pages))]
        return SpawnedProcess(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment,
            pass_fds=[run.lock.fd, pages[0].fd], start_new_session=True,
        )  # fmt: skip


def _watch_worker(
    worker: WorkerProcess, run: RunDirectory, detectors: Sequence[HangDetector], stop: StopSignal,
    poll: Callable[[], None],
) -> WorkerExit:  # fmt: skip
    while (exit_code := worker.wait_for(POLL_S)) is None:
        poll()
        # Every detector is called in each round, because a detector takes a gap between calls for a suspension.
        stalled = {
            rank: reason for rank, detector in enumerate(detectors) if (reason := detector.overdue(stop.requested_s))
        }
        if stalled:
            rank, reason = next(iter(stalled.items()))
            has_ranks = len(detectors) > 1
            subject = f"rank {rank} of this machine: " if has_ranks else ""
            stacks = dump_stacks_and_kill(worker, run.paths.stacks, rank if has_ranks else None)
            text = f"{subject}{reason}; {stacks}"
            run.journal.append("alert", text=f"worker killed: {text}")
            return _wait_for_killed(worker, run, text, stop)
    return WorkerExit(exit_code)


def _wait_for_killed(worker: WorkerProcess, run: RunDirectory, text: str, stop: StopSignal) -> WorkerExit:
    """Wait until a killed worker is gone. The worker holds the lock of the run until then, so no other worker may
    start."""
    killed_s, is_reported = time.monotonic(), False
    while (exit_code := worker.wait_for(POLL_S)) is None:
        if time.monotonic() - killed_s < KILL_WAIT_S:
            continue
        if not is_reported:
            is_reported = True
            state = read_process_state(worker.pid)
            run.journal.append("alert", text=f"process {worker.pid} was killed but does not end (state {state})")
        if stop.is_requested:
            return WorkerExit(-9, "stalled", f"{text}; process {worker.pid} was killed but does not end")
    # A worker that ended by itself in the meantime did not stall.
    return WorkerExit(exit_code, "stalled", text) if exit_code < 0 else WorkerExit(exit_code)


def count_oom_kills(
    vmstat: Path = Path("/proc/vmstat"), cgroup: Path = Path("/sys/fs/cgroup/memory.events")
) -> tuple[int, int]:
    """Count the processes killed for lack of memory so far, on this machine and in this cgroup; 0 if unknown.

    Linux: vm_event_item OOM_KILL in /proc/vmstat; "memory.events" in Documentation/admin-guide/cgroup-v2.rst.
    """
    counts = [0, 0]
    for index, path in enumerate((vmstat, cgroup)):
        with suppress(OSError):
            lines = path.read_text().splitlines()
            counts[index] = next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    return counts[0], counts[1]


# The log of a supervisor.

_MESSAGES: dict[str, tuple[Level, str]] = {
    "start_refused": ("error", "start refused: {text}"),
    "attempt_started": ("info", "starting a worker, code version {code_version}"),
    "worker_ready": ("info", "ready at step {start_step} of {planned_steps}, on {device}"),
    "memory_forecast": ("info", "{available_bytes:,} bytes of memory available"),
    "memory_peak": ("debug", "phase {phase} used {peak_bytes:,} bytes at its peak"),
    "validation": ("info", "validation loss {loss:.4f} at step {step}"),
    "checkpoint_saved": ("debug", "checkpoint of step {step} saved in {seconds:.3g} s"),
    "replicated": ("debug", "the {artifact} of step {step} is in the replica"),
    "alert": ("warning", "{text}"),
    "notice": ("info", "{text}"),
    "worker_error": ("error", "{text}"),
    "pruned": ("info", "pruned: {text}"),
    "finished": ("info", "finished at step {step} ({reason})"),
}
"""Level and text by event kind; the text refers to the event's data. Steps and samples are only in the journal."""


def _describe_event(event: JournalEvent) -> tuple[Level, str] | None:
    """Return level and text of an event; None for an event that is not logged."""
    if event.kind in _MESSAGES:
        level, text = _MESSAGES[event.kind]
        return level, text.format_map(event.data)
    if event.kind == "interrupted":
        return "info", describe_stop(event.data)
    if (notable := describe_notable_event(event)) is None:
        return None
    level = "warning"
    if event.kind == "worker_exited" and event.data["decision"] != "Retry":
        level = "error"
    elif event.kind == "loss_scale":
        level = "debug"
    elif event.data.get("action") == "grow":
        level = "info"
    return level, notable


class JournalLogCallback:
    """Callback that writes events from now on to a log. Earlier events were logged when they occurred."""

    name = "log"
    poll_s = 0.5  # reading each step at once costs a third of the supervisor's time

    def __init__(self, log: JsonLog, journal: Path) -> None:
        self._log, self._journal = log, journal
        self._began_t = round(time.time(), 3)
        self._began_inode, self._began_size = self._inode_and_size()

    @property
    def offset(self) -> int:
        """Size of the journal in bytes when this object was created; 0 if a journal from the replica has replaced the
        file since."""
        inode, _ = self._inode_and_size()
        return self._began_size if inode == self._began_inode else 0

    def _inode_and_size(self) -> tuple[int, int]:
        try:
            status = self._journal.stat()
        except OSError:
            return 0, 0
        return status.st_ino, status.st_size

    def on_events(self, events: Sequence[JournalEvent]) -> None:
        """Write the next events. An event that lacks a key of its kind is logged as damaged."""
        # Only a journal restored from a replica has events from before the start. For the own journal, times are not
        # compared, because the clock may be set back.
        is_replaced = self._inode_and_size()[0] != self._began_inode
        for event in events:
            if is_replaced and event.t < self._began_t:
                continue
            try:
                described = _describe_event(event)
            except (KeyError, TypeError, ValueError, AttributeError):
                described = "warning", f"damaged event {event.kind}"
            if described is None:
                continue
            level, text = described
            fields = {name: value for name, value in event.data.items() if name not in ("text", "forecast")}
            if "failure_class" in fields:
                fields.setdefault("reason", fields["failure_class"])
            self._log.write(level, "journal", text, **{"event": event.kind, "attempt": event.attempt} | fields)

    def on_end(self, status: Status) -> None:
        """Do nothing: all events are written."""


@contextmanager
def log_supervision(run: RunDirectory, machine: Machine) -> Iterator[JournalLogCallback]:
    """Keep a log of this process while it supervises the run, and limit the size of worker.log.

    The log includes messages of Python's `logging` and `warnings`. Secrets are redacted in the log and in the output of
    those modules. An exception that ends the supervision is logged and raised again.
    """
    own = JsonLog(
        run.paths.logs / "supervisor.jsonl", machine, lambda: {"attempt": run.journal.attempt}, log.print_message
    )
    trimmer = LogTrimmer(run.paths.worker_log, machine.log_max_bytes)
    previous, log.current = log.current, own
    trimmer.start()
    try:
        with _capture_logging(own):
            yield JournalLogCallback(own, run.paths.journal)
    except BaseException as error:
        level: Level = "info" if isinstance(error, InterruptedRunError) else "error"
        name, trace = type(error).__name__, None
        if not isinstance(error, RatchetError):
            trace = "".join(traceback.format_exception(error))
        own.write(level, "ratchet", str(error) if trace is None else f"{name}: {error}", reason=name, traceback=trace)
        raise
    finally:
        trimmer.end()
        log.current = previous
        own.close()


@contextmanager
def _capture_logging(own: JsonLog) -> Iterator[None]:
    """Copy `logging` and `warnings` of this process to the log, and redact secrets in all their output.

    Records are intercepted when they are created, because MLflow's records bypass the root logger.
    """
    make, show = logging.getLogRecordFactory(), warnings.showwarning

    def make_record(*args: Any, **fields: Any) -> logging.LogRecord:
        record = make(*args, **fields)
        with suppress(Exception):  # arguments that do not fit the format; the handler reports them
            record.msg, record.args = redact(record.getMessage()), None
            if record.exc_info:
                record.exc_text = redact("".join(traceback.format_exception(*record.exc_info)).rstrip())
            own.write(log.level_name(record.levelno), record.name, record.msg, traceback=record.exc_text)
        return record

    logging.setLogRecordFactory(make_record)
    warnings.showwarning = log.make_warning_hook(own)
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)
        warnings.showwarning = show

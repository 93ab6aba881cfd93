"""Supervisor of a run: it starts workers, watches them, and restarts them or gives up, until there is a result.

The worker is a child process. It shares the run directory, the lock of the run and a page of memory (heartbeat.py) with
the supervisor. This module does not import torch.
"""

import logging
import os
import select
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

from ratchet.config.machine import Machine
from ratchet.config.units import format_bytes
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
from ratchet.runs.heartbeat import HangDetector, Heartbeat, dump_stacks_and_kill, read_process_state
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.runs.log import JsonLog, Level, LogTrimmer, print_message
from ratchet.runs.preemption import PreemptionMonitor
from ratchet.runs.rendezvous import RendezvousServer, count_local_ranks, has_agent
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
from ratchet.runs.status import RunProgress, describe_amount, describe_stop
from ratchet.runs.system_metrics import SystemMetricsSampler

WORKER = (sys.executable, "-m", "ratchet.training.worker_main")
AGENT = (sys.executable, "-m", "ratchet.training.elastic_agent")
POLL_S = 0.1
KILL_WAIT_S = 15.0
"""Time after which a killed process that has not ended is reported. Such a process may wait for a device (state D)."""

LogMessage = tuple[Level, str]
"""Level and text of a log record."""


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
        run: run directory. The caller opens and closes it.
        launch: how and where the worker runs; saved in the run directory.
        callbacks: receive every event of the journal, from its beginning.
        code_version: version to record for every attempt. A change within a run is noted in the journal.
        pruner: may end the run early.
        replicator: copies the run to a replica; supervision ends when the result is in the replica.

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
        except OSError as error:  # the next call reads the missing events
            print_message(f"{self._reader.path} cannot be read: {error}")

    def _is_consequence(self, event: JournalEvent) -> bool:
        """Return whether a rank only reports that its peers are gone, after a peer has already reported the cause."""
        earlier = self.worker_error
        return event.data.get("failure_class") == "peers" and earlier is not None and earlier.attempt == event.attempt


class _Supervisor:
    """Loop that starts workers, and the decisions between two attempts."""

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
        """Times at which ranks of this machine failed by their own fault, by time.monotonic()."""

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

    def _handle_failure(self, end: WorkerExit, earlier: list[EarlierFailure]) -> EarlierFailure:
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
        delay_s = max(decision.delay_s, self._cooldown_s(failure))
        print_message(f"worker {failure.replace('_', ' ')}: {decision.text}; restarting in {delay_s:g} s")
        stop.wait(delay_s, self._poll)
        return EarlierFailure(failure, decision.text)

    def _cooldown_s(self, failure: FailureClass) -> float:
        """Compute how long this machine is excluded from a training of several machines, after this failure."""
        if failure == "peers" or self._machine.node_range[1] == 1:
            return 0.0
        self._failed_s.append(time.monotonic())
        return compute_exclusion_s(self._failed_s, self._failed_s[-1], self._machine.node_cooldown_s)

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
            self._run.journal.append("notice", text=text)
            print_message(text)
        if monitor.notice and not self._stop.is_requested:
            self._run.journal.append("alert", text=monitor.notice)
            print_message(monitor.notice)
            self._stop.request()

    def _raise_if_asked_to_stop(self) -> None:
        """Raise InterruptedRunError if the run was asked to stop, instead of starting a worker only to stop it."""
        self._poll()
        if self._stop.is_requested:
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
        previous = self._journal_state.progress.code_version
        if previous and previous != code_version:
            text = f"code version changed within the run, from {previous} to {code_version}"
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


def run_attempt(
    run: RunDirectory, machine: Machine, stop: StopSignal, poll: Callable[[], None], module: str | None = None
) -> WorkerExit:
    """Start a worker and wait for its end. Kill it if it stalls.

    Args:
        run: run directory, opened. Its journal has the number of this attempt.
        machine: settings with the deadlines.
        stop: signal handler, which passes a request to stop on to the worker.
        poll: called a few times a second.
        module: module to start as the worker; None: the worker of a training.
    """
    count = count_local_ranks(machine)
    pages = [Heartbeat.create(machine.stall_timeout_s, machine.first_stall_timeout_s) for _ in range(count)]
    try:
        kills_before = count_oom_kills()
        try:
            worker = _start_worker(run, pages, has_agent(machine), module)
        except OSError as error:  # no space for its log, or no process available: both may be temporary
            return WorkerExit(EXIT_BUG, "storage", f"the worker could not be started: {error}")
        stop.worker = worker
        if stop.is_requested:
            stop.pass_on()
        try:
            detectors = [HangDetector(page, machine.grace_period_s) for page in pages]
            end = _watch_worker(worker, run, detectors, stop, poll)
        finally:
            stop.worker = None
        kills = max(after - before for after, before in zip(count_oom_kills(), kills_before, strict=True))
        return WorkerExit(end.exit_code, end.failure, end.text, kills)
    finally:
        for page in pages:
            page.close()


def _start_worker(
    run: RunDirectory, pages: Sequence[Heartbeat], with_agent: bool, module: str | None
) -> subprocess.Popen[bytes]:
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # required for deterministic cuBLAS
    arguments = [str(run.paths.root), str(run.journal.attempt), str(os.getpid())]
    entry = WORKER if module is None else (sys.executable, "-m", module)
    command = [*entry, *arguments, str(pages[0].fd)]
    if with_agent:
        command = [*AGENT, *arguments, Heartbeat.address_of(pages), str(len(pages))]
    with run.paths.worker_log.open("ab") as log:
        # The worker has its own session, so Ctrl-C reaches only the supervisor, which passes it on once. The worker
        # inherits the lock, so the run stays locked until both processes are gone. If the supervisor dies, the kernel
        # kills the worker.
        return subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment,
            pass_fds=[run.lock.fd, pages[0].fd], start_new_session=True,
        )  # fmt: skip


def _watch_worker(
    worker: subprocess.Popen[bytes],
    run: RunDirectory,
    detectors: Sequence[HangDetector],
    stop: StopSignal,
    poll: Callable[[], None],
) -> WorkerExit:
    while (exit_code := _wait_for_worker(worker)) is None:
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


def _wait_for_killed(worker: subprocess.Popen[bytes], run: RunDirectory, text: str, stop: StopSignal) -> WorkerExit:
    """Wait until a killed worker is gone. The worker holds the lock of the run until then, so no other worker may
    start."""
    killed_s, is_reported = time.monotonic(), False
    while (exit_code := _wait_for_worker(worker)) is None:
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


def _wait_for_worker(worker: subprocess.Popen[bytes]) -> int | None:
    """Wait for the worker, at most POLL_S. Return its exit code, or None if it has not ended.

    This function sleeps on a descriptor of the process. Popen.wait with a timeout would poll eighty times a second.
    """
    if worker.poll() is None:
        try:
            fd = os.pidfd_open(worker.pid)
        except OSError:  # a kernel older than Linux 5.3, or no descriptor available
            time.sleep(POLL_S)
        else:
            try:
                select.select([fd], [], [], POLL_S)
            finally:
                os.close(fd)
    return worker.poll()


def count_oom_kills(
    vmstat: Path = Path("/proc/vmstat"), cgroup: Path = Path("/sys/fs/cgroup/memory.events")
) -> tuple[int, int]:
    """Count the processes killed for lack of memory so far, on this machine and in this cgroup; 0 if unknown.

    Linux: vm_event_item OOM_KILL in /proc/vmstat; "memory.events" in Documentation/admin-guide/cgroup-v2.rst.
    """
    return _read_counter(vmstat), _read_counter(cgroup)


def _read_counter(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


# The log of a supervisor.


def _format_worker_exited(data: Mapping[str, Any]) -> LogMessage:
    is_retried = data["decision"] == "Retry"
    consequence = "restarting" if is_retried else "not restarting"
    return "warning" if is_retried else "error", f"the worker ended: {data['text']}; {consequence}"


def _format_worker_ready(data: Mapping[str, Any]) -> LogMessage:
    ranks = f", {data['ranks']} ranks" if data.get("ranks", 1) > 1 else ""
    device = f"on {data.get('device', '?')}{ranks}"
    return "info", f"ready at step {data['start_step']} of {data['planned_steps']}, {device}"


def _format_validation(data: Mapping[str, Any]) -> LogMessage:
    best = ", the best so far" if data.get("improved") else ""
    return "info", f"validation loss {data['loss']:.4f} at step {data['step']}{best}"


def _format_checkpoint(data: Mapping[str, Any]) -> LogMessage:
    return "debug", f"checkpoint of step {data['step']} saved in {data['seconds']:.3g} s"


def _format_skipped(data: Mapping[str, Any]) -> LogMessage:
    step = data.get("rollback_step")
    rollback = f"; rolled back to the weights of step {step}" if step is not None else ""
    return "warning", f"step {data['step']} is skipped: {data['reason']}{rollback}"


def _format_budget(data: Mapping[str, Any]) -> LogMessage:
    tokens = data["budget"]["tokens"]
    limit = "as large as configured" if tokens is None else f"of at most {tokens:,} tokens"
    is_smaller = data["action"] == "shrink"
    return "warning" if is_smaller else "info", f"micro-batches of {data['phase']} {limit}, from step {data['step']} on"


def _format_memory(data: Mapping[str, Any]) -> LogMessage:
    return "debug", f"phase {data['phase']} used {format_bytes(data['peak_bytes'])} at its peak"


def _format_replicated(data: Mapping[str, Any]) -> LogMessage:
    return "debug", f"the {data['artifact']} of step {data['step']} is in the replica"


def _format_spike(data: Mapping[str, Any]) -> LogMessage:
    return "warning", f"step {data['step']} has an unusually large gradient: {data['grad_norm']:.4g}"


def _format_finished(data: Mapping[str, Any]) -> LogMessage:
    return "info", f"finished at step {data['step']} ({str(data['reason']).replace('_', ' ')})"


_FORMATTERS: dict[str, Callable[[Mapping[str, Any]], LogMessage]] = {
    "start_refused": lambda data: ("error", f"start refused: {data['text']}"),
    "attempt_started": lambda data: ("info", f"starting a worker, code version {data['code_version']}"),
    "worker_ready": _format_worker_ready,
    "memory_forecast": lambda data: ("info", f"{format_bytes(data['available_bytes'])} of memory available"),
    "memory_peak": _format_memory,
    "validation": _format_validation,
    "checkpoint_saved": _format_checkpoint,
    "replicated": _format_replicated,
    "step_skipped": _format_skipped,
    "step_repeated": lambda data: ("warning", f"step {data['step']} is repeated: {data['reason']}"),
    "gradient_spike": _format_spike,
    "microbatch_budget": _format_budget,
    "loss_scale": lambda data: ("debug", f"step {data['step']} is repeated with loss scale {data['loss_scale']:g}"),
    "alert": lambda data: ("warning", data["text"]),
    "notice": lambda data: ("info", data["text"]),
    "worker_error": lambda data: ("error", data["text"]),
    "worker_exited": _format_worker_exited,
    "interrupted": lambda data: ("info", describe_stop(data)),
    "pruned": lambda data: ("info", f"pruned: {data['text']}"),
    "finished": _format_finished,
}
"""Function that returns level and text, by event kind. Steps and samples are only in the journal."""


class JournalLogCallback:
    """Callback that writes events from now on to the log. Earlier events were logged when they occurred.

    Args:
        log: destination.
        journal: path of the journal.
    """

    name = "log"

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
        for event in events:
            formatter = _FORMATTERS.get(event.kind)
            if formatter is None or event.t < self._began_t:
                continue
            try:
                level, text = formatter(event.data)
            except (KeyError, TypeError, ValueError, AttributeError):
                level, text = "warning", f"damaged event {event.kind}"
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

    Args:
        run: run directory, opened.
        machine: settings of the log.
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
        _log_end(own, error)
        raise
    finally:
        trimmer.end()
        log.current = previous
        own.close()


def _log_end(own: JsonLog, error: BaseException) -> None:
    name = type(error).__name__
    if isinstance(error, InterruptedRunError):
        own.write("info", "ratchet", str(error), reason=name)
    elif isinstance(error, RatchetError):
        own.write("error", "ratchet", str(error), reason=name)
    else:
        trace = "".join(traceback.format_exception(error))
        own.write("error", "ratchet", f"{name}: {error}", reason=name, traceback=trace)


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

    def show_warning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
        line: str | None = None,
    ) -> None:  # fmt: skip
        own.write("warning", "warnings", str(message), reason=category.__name__, where=f"{filename}:{lineno}")
        with suppress(OSError):
            (file or sys.stderr).write(redact(warnings.formatwarning(message, category, filename, lineno, line)))

    logging.setLogRecordFactory(make_record)
    warnings.showwarning = show_warning
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)
        warnings.showwarning = show

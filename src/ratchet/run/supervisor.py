"""Supervise one run: start the worker, follow its journal for the observers, restart or give up. Imports no torch.

The worker is a child process that shares nothing with us but the run directory. Each observer lives in a thread of its
own with its own place in the journal: one that is slow, or fails, delays neither training nor the other observers.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Literal, Protocol

from ratchet.errors import EXIT_INTERRUPTED, InputError, InterruptedRunError, RunFailedError
from ratchet.run.directory import Launch, Run, RunPaths
from ratchet.run.journal import Event, Journal, Reader
from ratchet.run.recovery import End, FailureClass, GiveUp, Retry, decide
from ratchet.run.status import of as progress_of

POLL_S = 0.2
OBSERVER_RETRY_S = 5.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Observer(Protocol):
    """Somebody who is told what the journal says. Called in a thread of its own."""

    name: str

    def see(self, events: Sequence[Event]) -> None:
        """Take the next events. May raise: it is then given the same events again later, with newer ones after them."""

    def finish(self, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        """The run has ended for now; no more events come."""


class _Follower(threading.Thread):
    """Feeds one observer from the journal until told to stop and the journal is drained."""

    def __init__(self, observer: Observer, journal: Path, notices: Journal) -> None:
        super().__init__(name=f"observer-{observer.name}", daemon=True)
        self._observer = observer
        self._reader = Reader(journal)
        self._notices = notices
        self._status: Literal["FINISHED", "FAILED", "KILLED"] | None = None
        self._ended = threading.Event()
        self._pending: list[Event] = []
        self._complained = False

    def end(self, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        """Drain what is left, then finish with this status."""
        self._status = status
        self._ended.set()

    def run(self) -> None:
        while True:
            last_round = self._ended.is_set()
            try:
                self._pending += self._reader.read()
                if self._pending:
                    self._observer.see(self._pending)
                    self._pending = []
                if last_round:
                    self._observer.finish(self._status or "FAILED")
                    return
            except Exception as error:  # an observer's failure is reported, and must never become the run's
                self._complain(error)
                self._ended.wait(OBSERVER_RETRY_S)
                if last_round:
                    return
            self._ended.wait(POLL_S)

    def _complain(self, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            cause = " ".join(str(error).splitlines()[:2])
            self._notices.append(
                "notice", text=f"{self._observer.name} failed ({type(error).__name__}: {cause}); retried"
            )
            with contextlib.suppress(OSError):  # the terminal may be what is broken
                print(f"ratchet: {self._observer.name} failed ({cause}); training goes on", file=sys.stderr)


class StopRequest:
    """A signal handler that remembers having been called.

    A plain attribute on purpose: threading.Event locks, and a second signal while the first is in `set` then waits for
    ever for itself.
    """

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


class _Stop(StopRequest):
    """SIGTERM and SIGINT as a request that is passed on to the worker; a second one changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.worker: subprocess.Popen[bytes] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        super().__call__(number, frame)
        self.pass_on()

    def wait(self, seconds: float) -> None:
        """Sleep, but not on after a request."""
        deadline = time.monotonic() + seconds
        while not self.asked and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(POLL_S, left))

    def pass_on(self) -> None:
        if self.worker is not None and self.worker.poll() is None:
            self.worker.send_signal(signal.SIGTERM)

    @contextlib.contextmanager
    def installed(self) -> Iterator["_Stop"]:
        old = {number: signal.signal(number, self) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, before in old.items():
                signal.signal(number, before)


def die_with_parent(number: int) -> None:
    """Ask Linux to send this process a signal when the thread that started it ends (prctl(2), PR_SET_PDEATHSIG)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def supervise(run: Run, launch: Launch, observers: Sequence[Observer], code_version: str) -> None:
    """Bring a run to its sealed result.

    Args:
        run: opened by the caller, who also closes it.
        launch: how and where the worker runs; written into the run directory.
        observers: told every event of the journal, from its beginning.
        code_version: recorded for every attempt; a change within a run is noted.

    Raises:
        InterruptedRunError: asked to stop (SIGTERM, SIGINT); a checkpoint is sealed.
        InputError: the worker found settings, data or base model unusable.
        RunFailedError: gave up, with the cause.
    """
    launch.save(run.paths.launch)
    followers = [_Follower(o, run.paths.journal, run.journal) for o in observers]
    for follower in followers:
        follower.start()
    status: Literal["FINISHED", "FAILED", "KILLED"] = "FAILED"
    try:
        with _Stop().installed() as stop:
            if not run.paths.is_finished():
                _until_result(run, launch, stop, code_version)
        status = "FINISHED"
    except InterruptedRunError:
        status = "KILLED"
        raise
    finally:
        _drain(followers, status, launch.machine.tracking_grace_s)


def _drain(followers: Sequence[_Follower], status: Literal["FINISHED", "FAILED", "KILLED"], grace_s: float) -> None:
    for follower in followers:
        follower.end(status)
    deadline = time.monotonic() + grace_s
    for follower in followers:
        follower.join(max(0.0, deadline - time.monotonic()))
        if follower.is_alive():
            print(f"ratchet: {follower.name} is not done after {grace_s:g} s; it is sent later", file=sys.stderr)


def _until_result(run: Run, launch: Launch, stop: _Stop, code_version: str) -> None:
    """Start workers until one seals the result, or recovery gives up."""
    start = progress_of(run.paths)
    attempt, last_step, deaths = start.attempts, start.checkpoint_step, 0
    _note_code_change(run, code_version)
    while True:
        attempt += 1
        run.journal.attempt = attempt
        run.journal.append("attempt", pid=os.getpid(), code_version=code_version)
        end = _one_attempt(run, stop)
        if end.exit_code == 0 and run.paths.is_finished():
            return
        step = progress_of(run.paths).checkpoint_step
        deaths = 0 if step > last_step else deaths
        last_step = max(last_step, step)
        decision = decide(end, deaths, launch.machine.retries, launch.machine.retry_delay_s)
        deaths += 1
        if stop.asked and isinstance(decision, Retry):
            decision = GiveUp("preempted", EXIT_INTERRUPTED, f"asked to stop; the worker was {decision.text}")
        if decision.failure != "preempted":
            run.journal.append(
                "died", exit_code=end.exit_code, **{"class": decision.failure},
                decision=type(decision).__name__, text=decision.text,
            )  # fmt: skip
        if isinstance(decision, GiveUp):
            _raise(decision, run.paths, step)
        else:
            print(f"ratchet: worker {decision.text}; starting again in {decision.delay_s:g} s", file=sys.stderr)
            stop.wait(decision.delay_s)


def _note_code_change(run: Run, code_version: str) -> None:
    versions = [e.data.get("code_version") for e in Reader(run.paths.journal).read() if e.kind == "attempt"]
    if versions and versions[-1] != code_version:
        text = f"code version changed within the run, from {versions[-1]} to {code_version}"
        run.journal.append("notice", text=text)
        print(f"ratchet: {text}", file=sys.stderr)


def _one_attempt(run: Run, stop: _Stop) -> End:
    """One worker from start to end."""
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # cuBLAS is deterministic only with this
    arguments = [str(run.paths.root), str(run.journal.attempt), str(os.getpid())]
    command = [sys.executable, "-m", "ratchet.training.start", *arguments]
    with run.paths.worker_log.open("ab") as log:
        # A session of its own: Ctrl-C reaches us alone, and we pass it on once. The worker inherits the lock, so the
        # run stays locked until both of us are gone; if we die, the kernel kills it (see training/start.py).
        worker = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment,
            pass_fds=[run.lock.fd], start_new_session=True,
        )  # fmt: skip
    stop.worker = worker
    if stop.asked:
        stop.pass_on()
    exit_code = worker.wait()
    stop.worker = None
    failure, text = _last_words(run)
    return End(exit_code, failure, text)


def _last_words(run: Run) -> tuple[FailureClass | None, str]:
    """What the worker of this attempt said about its own failure."""
    failure: FailureClass | None = None
    text = ""
    for event in Reader(run.paths.journal).read():
        if event.kind == "failure" and event.attempt == run.journal.attempt:
            failure, text = event.data["class"], event.data["text"]
    return failure, text


def _raise(decision: GiveUp, paths: RunPaths, checkpoint_step: int) -> None:
    if decision.failure == "preempted":
        sealed = (
            f"a checkpoint of step {checkpoint_step} is sealed" if checkpoint_step else "it was before any checkpoint"
        )
        raise InterruptedRunError(f"run {paths.root.name}: {decision.text} ({sealed})")
    if decision.failure == "input":
        raise InputError(decision.text)
    raise RunFailedError(
        f"run {paths.root.name}: {decision.failure.replace('_', ' ')}: {decision.text}\n"
        f"  last checkpoint: step {checkpoint_step}; worker output: {paths.worker_log}"
    )

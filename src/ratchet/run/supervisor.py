"""Supervise one run: start workers, watch them, restart or give up, until there is a result. Imports no torch."""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ratchet.config import Machine
from ratchet.errors import EXIT_INPUT, InputError, InterruptedRunError, RunFailedError, StorageError
from ratchet.run.attempt import attempt
from ratchet.run.directory import Launch, Run, storage
from ratchet.run.journal import Event, Reader
from ratchet.run.notice import Notice
from ratchet.run.observers import Arbiter, Audience, Observer, Status
from ratchet.run.recovery import Death, End, FailureClass, GiveUp, classify, decide
from ratchet.run.signals import Stop
from ratchet.run.status import Progress


def supervise(
    run: Run, launch: Launch, observers: Sequence[Observer], code_version: str, arbiter: Arbiter | None = None
) -> None:
    """Bring a run to its sealed result.

    Args:
        run: opened by the caller, who also closes it.
        launch: how and where the worker runs; written into the run directory.
        observers: told every event of the journal, from its beginning.
        code_version: recorded for every attempt; a change within a run is noted.
        arbiter: may end the run early.

    Raises:
        InterruptedRunError: asked to stop (SIGTERM, SIGINT, a spot notice, the arbiter); a checkpoint is sealed.
        InputError: the worker found settings, data or base model unusable.
        RunFailedError: gave up, with the cause.
        StorageError: the run directory cannot be written.
    """
    with storage(run.paths.root):
        launch.save(run.paths.launch)
    audience = Audience(observers, run.journal)
    audience.start()
    machine = launch.machine
    status: Status = "FAILED"
    try:
        with Stop(arbiter.signalled if arbiter else None).installed() as stop:
            try:
                if not run.paths.is_finished():
                    _Supervision(run, machine, stop, arbiter).until_result(code_version)
            except InterruptedRunError:
                status = "KILLED"  # and still deaf to further requests, until all have been told what there is time for
                audience.end(status, min(machine.tracking_grace_s, machine.grace_s))
                raise
        status = "FINISHED"
    finally:
        if status != "KILLED":
            audience.end(status, machine.tracking_grace_s)


class _Record:
    """What the supervisor knows from the journal: read once from the beginning, then only what is new."""

    def __init__(self, run: Run) -> None:
        self._reader = Reader(run.paths.journal)
        self.progress = Progress()
        self.words: Event | None = None
        """The last `failure` that a worker told."""

    def update(self) -> None:
        try:
            for event in self._reader.read():
                self.progress.see(event)
                if event.kind == "failure":
                    self.words = event
        except OSError as error:  # a disk that cannot be read now: what is new is read the next time
            print(f"ratchet: {self._reader.path} cannot be read: {error}", file=sys.stderr)


class _Supervision:
    def __init__(self, run: Run, machine: Machine, stop: Stop, arbiter: Arbiter | None) -> None:
        self._run, self._machine, self._stop, self._arbiter = run, machine, stop, arbiter
        self._record = _Record(run)
        self._notice = Notice(machine.preemption_notice) if machine.preemption_notice else None
        self._complained = False

    def until_result(self, code_version: str) -> None:
        """Start workers until one seals the result, or recovery gives up."""
        run, record = self._run, self._record
        record.update()
        self._note_code_change(code_version)
        number, last_step = record.progress.attempts, record.progress.checkpoint_step
        deaths: list[Death] = []
        if self._notice:
            self._notice.start()
        try:
            while True:
                self._end_if_asked()
                number += 1
                run.journal.attempt = number
                run.journal.append("attempt", pid=os.getpid(), code_version=code_version)
                end = attempt(run, self._machine, self._stop, self._look)
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
            if self._notice:
                self._notice.stop()

    def _after_death(self, end: End, before: list[Death]) -> Death:
        """Tell the end, and wait for the next attempt. Raises when there is to be none."""
        machine, stop = self._machine, self._stop
        decision = decide(end, before, machine.retries, machine.retry_delay_s, stop.asked)
        cause = classify(end)
        if cause == "preempted" and not self._record.progress.stopped:  # while it was loading, and had nothing to seal
            self._run.journal.append("stopped", step=self._record.progress.checkpoint_step)
        if cause != "preempted":
            what = "Interrupted" if decision.failure == "preempted" else type(decision).__name__
            self._run.journal.append(
                "died", exit_code=end.exit_code, **{"class": cause}, decision=what, text=decision.text
            )
        if isinstance(decision, GiveUp):
            self._raise(decision)
        again = f"starting again in {decision.delay_s:g} s"
        print(f"ratchet: worker {cause.replace('_', ' ')}: {decision.text}; {again}", file=sys.stderr)
        stop.wait(decision.delay_s, self._look)
        return Death(cause, decision.text)

    def _with_words(self, end: End) -> End:
        """The end, with what the worker itself said about it."""
        words = self._record.words
        if words is None or words.attempt != self._run.journal.attempt:
            return end
        failure: FailureClass = words.data.get("class", "bug")
        return End(end.exit_code, failure, str(words.data.get("text", "")), end.oom_kills)

    def _look(self) -> None:
        """Is this run to end early, or this machine about to be taken away?"""
        if self._arbiter and not self._stop.asked and (verdict := self._arbiter.verdict()):
            self._run.journal.append("ended_early", text=verdict)
            self._stop.ask()
        notice = self._notice
        if notice is None:
            return
        if notice.complaint and not self._complained:
            self._complained = True
            self._run.journal.append("notice", text=notice.complaint)
            print(f"ratchet: {notice.complaint}", file=sys.stderr)
        if notice.text and not self._stop.asked:
            self._run.journal.append("alert", text=notice.text)
            print(f"ratchet: {notice.text}", file=sys.stderr)
            self._stop.ask()

    def _end_if_asked(self) -> None:
        """Start no worker only to stop it."""
        self._look()
        if self._stop.asked:
            self._run.journal.append("stopped", step=self._record.progress.checkpoint_step)
            self._raise(GiveUp("preempted", InterruptedRunError.exit_code, "stopped on request; repeat to go on"))

    def _note_code_change(self, code_version: str) -> None:
        before = self._record.progress.code_version
        if before and before != code_version:
            text = f"code version changed within the run, from {before} to {code_version}"
            self._run.journal.append("notice", text=text)
            print(f"ratchet: {text}", file=sys.stderr)

    def _raise(self, decision: GiveUp) -> NoReturn:
        paths, step = self._run.paths, self._record.progress.checkpoint_step
        if decision.failure == "preempted":
            sealed = f"a checkpoint of step {step} is sealed" if step else "it was before any checkpoint"
            raise InterruptedRunError(f"run {paths.root.name}: {decision.text} ({sealed})")
        if decision.failure == "storage" and decision.exit_code == EXIT_INPUT:
            raise StorageError(decision.text)
        if decision.failure in ("data", "too_large"):
            raise InputError(decision.text)
        raise RunFailedError(
            f"run {paths.root.name}: {decision.failure.replace('_', ' ')}: {decision.text}\n"
            f"  last checkpoint: step {step}; worker output: {paths.worker_log}"
        )

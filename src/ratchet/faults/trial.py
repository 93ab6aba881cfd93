"""Carry out one trial: start the command, deal the blows when they are due, repeat the command as its contract says."""

import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from ratchet.errors import EXIT_INTERRUPTED, EXIT_OK, DataError
from ratchet.faults import attack
from ratchet.faults.attack import POLL_S, Command
from ratchet.faults.chronicle import Chronicle, Clock, Moment
from ratchet.faults.outcome import journal_of
from ratchet.faults.plan import DOWN, Blow, Trial
from ratchet.layout import Layout
from ratchet.run.directory import RunPaths

MOVED = " moved elsewhere"
"""What the name of a project gains when it is moved; a space, as in many a home directory."""


@dataclass(frozen=True)
class Limits:
    """What a trial may take."""

    silence_s: float
    """Without a line in the journal; the trial is then ended and has failed."""
    grace_s: float
    """From a request to stop to the end of the worker: `machine.grace_s`."""


@dataclass
class Carried:
    """A trial that has been carried out."""

    seen: Chronicle = field(default_factory=Chronicle)
    root: Path = Path()
    """Where its project is now."""
    wall_s: float = 0.0


class _Due:
    """Waits for a moment of the worker that is at work."""

    def __init__(self, moment: Moment, started: bool) -> None:
        self._moment, self._started = moment, started
        self._reached_s = time.monotonic() if moment.loading else None

    def come(self, seen: Chronicle) -> bool:
        """Whether the moment is there, or over."""
        moment = self._moment
        at_work = seen.own_steps > 0 or not self._started
        if at_work and (moment.loading or seen.last_step > moment.step):
            return True
        if self._reached_s is None and at_work and seen.last_step == moment.step:
            self._reached_s = time.monotonic()
        return self._reached_s is not None and time.monotonic() >= self._reached_s + moment.delay_s


class _Conduct:
    """The state of one trial that is being carried out."""

    def __init__(self, trial: Trial, root: Path, clock: Clock | None, limits: Limits) -> None:
        self.trial, self.clock, self.limits = trial, clock, limits
        self.layout = Layout(root)
        self.seen = Chronicle()
        self.pending = list(trial.blows)
        self.began = time.monotonic()
        self._journal: Path | None = None

    def now(self) -> float:
        return time.monotonic() - self.began

    def read(self) -> bool:
        """Take in the journal, once there is one."""
        if self._journal is None:
            try:
                self._journal = journal_of(self.layout)
            except DataError:
                return False
        return self.seen.read(self._journal, self.now())

    def follow(self, command: Command) -> Blow | None:
        """Deal blows until the command has ended; the one that ended it, if one did."""
        worker: int | None = None
        struck: int | None = None
        dealt: Blow | None = None
        due: _Due | None = None
        heard = time.monotonic()
        while command.process.poll() is None:
            if self.read():
                heard = time.monotonic()
            found = command.worker()
            if found != worker:
                worker, due = found, None
                self.seen.ended(self.now())
                if worker is not None:
                    self.seen.begun(self.now())
                heard = time.monotonic()
            if time.monotonic() - heard > self.limits.silence_s:
                self.seen.problems.append(f"nothing happened for {self.limits.silence_s:.0f} s; the trial was ended")
                command.kill()
                break
            if worker not in (None, struck) and dealt is None and self.pending:
                due = due if due is not None else self._due()
                if due is not None and due.come(self.seen) and self._deal(self.pending[0], command):
                    blow = self.pending.pop(0)
                    due, struck = None, worker
                    # Whatever else the blow is, nothing more is dealt to this command when it is to end by it.
                    dealt = blow if blow.what not in ("kill worker", "stop worker") else None
            time.sleep(POLL_S)
        self.read()
        self.seen.ended(self.now())
        return dealt

    def _due(self) -> _Due | None:
        """When the next blow is to be dealt; None as long as what it waits for has not happened."""
        blow, seen = self.pending[0], self.seen
        if self.clock is None or seen.own_steps < blow.own_steps or seen.farthest_step < blow.past_step:
            return None
        started = seen.own_steps == 0
        step = seen.checkpoint_step if started else seen.last_step
        return _Due(self.clock.moment(step, started, blow.fraction), started)

    def _deal(self, blow: Blow, command: Command) -> bool:
        """Whether the blow met something."""
        if blow.what == "kill worker":
            met = command.signal_worker(signal.SIGKILL)
        elif blow.what == "stop worker":
            met = command.signal_worker(signal.SIGSTOP)
        elif blow.what in ("terminate", "terminate twice"):
            command.process.send_signal(signal.SIGTERM)
            if blow.what == "terminate twice":
                command.process.send_signal(signal.SIGTERM)
            met = True
        else:
            met = command.process.poll() is None
        if met:
            self.seen.hurt(self.now(), blow.what)
        if met and (blow.what == "kill supervisor" or blow.what in DOWN) and not command.kill():
            self.seen.problems.append("the worker outlived its supervisor")
        return met

    def accept(self, blow: Blow | None, exit_code: int) -> bool:
        """Whether the command is to be repeated; notes a problem when that is not what its contract says."""
        if self.seen.problems or exit_code == EXIT_OK:
            return False
        if blow is None:
            self.seen.problems.append(f"exit code {exit_code}: {self._last_output()}")
            return False
        if blow.what in ("terminate", "terminate twice"):
            self._stopped(exit_code)
        elif blow.what in DOWN:
            self._while_down(blow)
        return not self.seen.problems

    def _stopped(self, exit_code: int) -> None:
        """A command that was asked to stop has ended."""
        asked = next(at for at, what in reversed(self.seen.marks) if what.startswith("terminate"))
        took = self.seen.attempts[-1][-1] - asked
        self.seen.stops_s.append(took)
        if exit_code != EXIT_INTERRUPTED:
            self.seen.problems.append(f"exit code {exit_code} after SIGTERM: {self._last_output()}")
        elif took > self.limits.grace_s:
            self.seen.problems.append(
                f"{took:.1f} s from SIGTERM to the end of the worker, {self.limits.grace_s} given"
            )
        elif self.seen.own_steps and self.seen.checkpoint_step < self.seen.last_step:
            text = f"step {self.seen.last_step} was done, step {self.seen.checkpoint_step} sealed after SIGTERM"
            self.seen.problems.append(text)

    def _while_down(self, blow: Blow) -> None:
        if blow.what == "move the project":
            goal = self.layout.root.with_name(self.layout.root.name + MOVED)
            self.layout.root.rename(goal)
            self.layout = Layout(goal)
        else:
            paths = RunPaths(journal_of(self.layout).parent)
            self.seen.notes.append(attack.damage(blow.what, paths, blow.draw))
        self._journal = journal_of(self.layout)
        self.seen.reread(self._journal)

    def _last_output(self) -> str:
        lines = (self.layout.root / attack.OUTPUT).read_text(encoding="utf-8", errors="replace").split("\n")
        return " / ".join(line.strip() for line in lines[-6:] if line.strip())[:500]


def carry_out(trial: Trial, root: Path, clock: Clock | None, limits: Limits) -> Carried:
    """Train the project in `root` to the end, with all that the trial says.

    Args:
        trial: see plan.py.
        root: a project of its own for this trial.
        clock: of an undisturbed training; None when there is none yet, and then no blow is dealt.
        limits: what it may take.
    """
    conduct, faults = _Conduct(trial, root, clock, limits), trial.faults
    while True:
        with Command(conduct.layout.root, faults) as command:
            blow = conduct.follow(command)
        if not conduct.accept(blow, command.process.returncode):
            break
        faults = () if trial.heals else faults
    conduct.seen.missed = len(conduct.pending)
    return Carried(conduct.seen, conduct.layout.root, conduct.now())

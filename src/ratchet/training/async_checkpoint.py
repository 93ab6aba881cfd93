"""Decides when a checkpoint is due, and saves checkpoints in a background thread.

Only taking a snapshot blocks training; writing the snapshot to disk does not. At most one save is in progress. During a
save, the interval causes no further snapshot, so the real interval is never shorter than a save. A snapshot that must
be kept (a new best validation loss, the end) waits in memory. A failing disk (full, I/O errors, read-only) is reported
once, and saving is tried again until it works.
"""

import contextlib
import errno
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from ratchet.config.fields import parse_interval
from ratchet.errors import SettingsError
from ratchet.runs import replication_protocol
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import Journal
from ratchet.runs.log import print_message
from ratchet.training import checkpoint
from ratchet.training.train_state import TrainSnapshot, TrainState

PRIOR_S = 6 * 3600.0
"""Seconds of observation that the prior of the failure rate is worth: the prior assumes one failure in six hours."""
FIRST_INTERVAL_S = 30.0
"""Interval of `auto` until the first save shows the cost of a checkpoint."""
MAX_INTERVAL_S = 30 * 60.0
"""Longest interval of `auto`: a failure costs at most half an hour, even if failures are rare."""
MAX_COST_SHARE = 0.01
"""Share of the wall-clock time that checkpoints may cost. This limit takes precedence over MAX_INTERVAL_S."""
BACKGROUND_SHARE = 0.1
"""Assumed training time that a background save costs, as a share of the duration of the save. The share is small,
because the save hashes and writes on other processors. If it is too high, checkpoints are rarer than necessary."""
FIRST_RETRY_S = 1.0
MAX_RETRY_S = 30.0
POLL_S = 0.05
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def optimal_interval_s(cost_s: float, failure_s: float) -> float:
    """Return the time between two checkpoints that loses the least, in seconds; 0 if a checkpoint costs nothing.

    sqrt(2 C M) - C, where C is `cost_s` and M is `failure_s`: Young, "A first order approximation to the optimum
    checkpoint interval" (CACM 17(9), 1974) with the first term of Daly, "A higher order estimate of the optimum
    checkpoint interval for restart dumps" (FGCS 22(3), 2006), which is within 4 % of his full estimate as long as C is
    below a fiftieth of M.
    """
    return max(0.0, math.sqrt(2 * cost_s * failure_s) - cost_s)


def auto_interval_s(blocked_s: float, save_s: float, deaths: int, observed_s: float) -> float:
    """Return the interval of `auto`, in seconds.

    A checkpoint costs the time that it blocks training, plus BACKGROUND_SHARE of the save. Failures are assumed to be a
    Poisson process with a Gamma(1, PRIOR_S) prior of its rate; the mean time between failures is the inverse of the
    posterior mean of the rate. The interval is at most MAX_INTERVAL_S, unless checkpoints would then cost more than
    MAX_COST_SHARE of the time. Because of this share, the interval is at least ten times the duration of a save, so a
    save ends before the next save begins.

    Args:
        blocked_s: time that one checkpoint blocks training.
        save_s: duration of one save.
        deaths: failures of this run so far.
        observed_s: training time of this run so far, over all attempts.
    """
    cost_s = blocked_s + BACKGROUND_SHARE * save_s
    failure_s = (observed_s + PRIOR_S) / (deaths + 1)
    return max(min(MAX_INTERVAL_S, optimal_interval_s(cost_s, failure_s)), cost_s / MAX_COST_SHARE)


class CheckpointInterval:
    """Applies `machine.checkpoint_every` in one attempt. An interval is never shorter than a step.

    Args:
        setting: a number of steps, a time such as `30 s`, `10 min` or `1.5 h`, or `auto`.
        step: step at which the attempt begins.
        now_s: time on any monotonic clock; callers pass the time of the same clock to the methods.
        deaths: earlier failures of this run.
        observed_s: training time of earlier attempts.

    Raises:
        SettingsError: the setting is invalid.
    """

    def __init__(self, setting: str | int, step: int, now_s: float, deaths: int = 0, observed_s: float = 0.0) -> None:
        try:
            self._setting = parse_interval(setting)
        except ValueError as error:
            raise SettingsError(f"machine.checkpoint_every: found {setting!r}; {error}") from None
        self._start_s = self._last_s = now_s
        self._last_step = step
        self._deaths, self._observed_s = deaths, observed_s
        self._mean_blocked_s, self._count = 0.0, 0
        self._save_s = 0.0

    def seconds(self, now_s: float) -> float | None:
        """Return the current time between two checkpoints; None if it is set in steps."""
        if isinstance(self._setting, int):
            return None
        if isinstance(self._setting, float):
            return self._setting
        if not self._save_s:
            return FIRST_INTERVAL_S
        observed_s = self._observed_s + now_s - self._start_s
        return auto_interval_s(self._mean_blocked_s, self._save_s, self._deaths, observed_s)

    def is_due(self, step: int, now_s: float) -> bool:
        """Return whether a checkpoint of `step` is due: the step is new, and the interval is over.

        An interval of n steps is over at every multiple of n, even if a checkpoint was taken shortly before, and stays
        over until the next checkpoint is taken.
        """
        if step <= self._last_step:
            return False
        interval_s = self.seconds(now_s)
        if isinstance(self._setting, int):
            return step // self._setting > self._last_step // self._setting
        return interval_s is not None and now_s - self._last_s >= interval_s

    def record(self, step: int, now_s: float, blocked_s: float, save_s: float) -> None:
        """Record that a checkpoint was taken, for any reason."""
        self._last_step, self._last_s = step, now_s
        self._count += 1
        self._mean_blocked_s += (blocked_s - self._mean_blocked_s) / self._count
        self._save_s = save_s or self._save_s


class AsyncCheckpointer:
    """Seals snapshots in the order of their steps, in a background thread. `sealed` is the state of the newest
    checkpoint on disk; without a checkpoint, of step 0."""

    def __init__(
        self, paths: RunPaths, journal: Journal, identity: dict[str, Any], keep: int, sealed: TrainState
    ) -> None:
        self._paths, self._journal, self._identity, self._keep = paths, journal, identity, keep
        self.sealed = sealed
        self.save_s = 0.0
        """Duration of the last save in seconds; 0 before the first."""
        self.outage = ""
        self.kept_step = 0
        """Step whose checkpoint is kept in addition: the last common checkpoint of a group; 0: none."""
        self.progress = 0
        """Counter that grows while a save makes progress."""
        self._waiting: dict[int, tuple[TrainSnapshot, float]] = {}
        """Snapshots to save, with the seconds for which taking them blocked training, by step."""
        self._saving_step: int | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._retry_s = FIRST_RETRY_S
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="checkpointer", daemon=True)
        self._thread.start()

    @property
    def is_saving(self) -> bool:
        """Whether a save is in progress. Raises the error that ended the thread, if any."""
        with self._changed:
            if self._error is not None:
                raise self._error
            return self._saving_step is not None

    def submit(self, snapshot: TrainSnapshot, blocked_s: float) -> None:
        """Save a snapshot as soon as possible; drop waiting snapshots that its state does not require."""
        with self._changed:
            required = snapshot.state.required_steps | {self._saving_step}
            self._waiting = {step: item for step, item in self._waiting.items() if step in required}
            self._waiting[snapshot.state.step] = (snapshot, blocked_s)
            self._changed.notify_all()

    def drain(self, timeout_s: float, beat: Callable[[], None]) -> bool:
        """Wait until everything is sealed; return False `timeout_s` after the last progress. `beat` is called while the
        disk makes progress or reports errors."""
        self._retry_s = FIRST_RETRY_S
        seen, since_s = self.progress, time.monotonic()
        while self.is_saving or self._waiting:
            if self.progress != seen or self.outage:
                beat()
            if self.progress != seen and not self.outage:
                seen, since_s = self.progress, time.monotonic()
            if time.monotonic() - since_s > timeout_s:
                return False
            with self._changed:
                self._changed.wait(POLL_S)
        return True

    def close(self) -> None:
        """Finish a save in progress, and save nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self) -> None:
        """Wait until a save in progress has ended, after `close`."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while not self._waiting and not self._closed:
                        self._changed.wait()
                    if self._closed:
                        return
                    step = min(self._waiting)
                    item = self._waiting[step]
                    self._saving_step = step
                try:
                    self._save(*item)
                except OSError as error:
                    self._wait_out_error(error)
                else:
                    self._retry_s = FIRST_RETRY_S
                    if self.outage:
                        self.outage = ""
                        text = f"checkpoints are saved again; the newest is of step {self.sealed.step}"
                        self._journal.append("alert", text=text)
                    with self._changed:
                        if self._waiting[step] is item:  # otherwise a newer state of this step was submitted meanwhile
                            del self._waiting[step]
                        self._saving_step = None
                        self._changed.notify_all()
        except BaseException as error:  # the training thread raises it: see `is_saving`
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _save(self, snapshot: TrainSnapshot, blocked_s: float) -> None:
        started_s, state = time.monotonic(), snapshot.state
        self._journal.sync()  # events up to the checkpoint must not be lost with the machine
        if state != self.sealed:
            written = checkpoint.write(self._paths, snapshot, self._identity, self._beat)
            self.sealed = state
            self.save_s = time.monotonic() - started_s
            self._journal.append(
                "checkpoint_saved", step=state.step, is_best=state.best_step == state.step,
                size_bytes=written.size_bytes, bytes_written=written.bytes_written, bytes_linked=written.bytes_linked,
                blocked_s=round(blocked_s, 6), seconds=round(self.save_s, 4),
            )  # fmt: skip
        unsent_steps = replication_protocol.find_unsent_steps(self._paths)
        checkpoint.rotate(
            self._paths, self._keep, {state.best_step, state.rollback_step, self.kept_step} | unsent_steps
        )

    def _wait_out_error(self, error: OSError) -> None:
        """Report the first error of an outage, and wait before the next attempt.

        From a full disk, old checkpoints are removed even if the replica lacks them, because newer ones replace them.
        """
        if error.errno in DISK_FULL:
            in_flight = replication_protocol.find_steps_in_flight(self._paths)
            with contextlib.suppress(OSError):  # the first error is the one to report
                required = {self.sealed.best_step, self.sealed.rollback_step, self.kept_step} | in_flight
                checkpoint.rotate(self._paths, self._keep, required)
        if not self.outage:
            self.outage = str(error)
            where = self._paths.checkpoints
            text = f"no checkpoint can be saved in {where} ({error}); training continues, saving is tried again"
            self._journal.append("alert", text=text)
            print_message(text)
        with self._changed:
            self._saving_step = None  # a newer snapshot may replace this one
            self._changed.notify_all()
            self._changed.wait(self._retry_s)
        self._retry_s = min(MAX_RETRY_S, 2 * self._retry_s)

    def _beat(self) -> None:
        self.progress += 1


class NullCheckpointer:
    """Checkpointer of a rank that is not its machine's writer: it saves nothing. The writer saves the same
    snapshots."""

    is_saving = False
    save_s = 0.0
    outage = ""
    kept_step = 0

    def __init__(self, sealed: TrainState) -> None:
        self.sealed = sealed

    def submit(self, snapshot: TrainSnapshot, blocked_s: float) -> None:
        self.sealed = snapshot.state

    def drain(self, timeout_s: float, beat: Callable[[], None]) -> bool:
        return True

    def close(self) -> None:
        pass

    def join(self) -> None:
        pass

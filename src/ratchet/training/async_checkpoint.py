"""When the next checkpoint is due: after so many steps, after so long, or as often as is worth it. It has no clock."""

import contextlib
import errno
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
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
"""What is believed before anything is seen: one failure in six hours, of the weight of six hours of watching."""
FIRST_S = 30.0
"""Until the first checkpoint has told what one costs."""
LONGEST_S = 30 * 60.0
"""However rare failures are: nobody wants to lose more than half an hour."""
LARGEST_SHARE = 0.01
"""Of the wall clock that checkpoints may cost training."""
BACKGROUND_SHARE = 0.1
"""Of the time of a save in the background that training is taken to lose: it hashes and writes beside it, on other
processors where there are any. An assumption; where it is too high, checkpoints are rarer than they might be."""


def checkpoint_cost_s(block_s: float, save_s: float) -> float:
    """What one checkpoint costs training, in seconds: the time that it stands still, and a share of the save."""
    return block_s + BACKGROUND_SHARE * save_s


def mean_failure_interval_s(deaths: int, observed_s: float) -> float:
    """Mean time between failures, estimated from the run itself, in seconds.

    Failures as a Poisson process whose rate has a Gamma(1, PRIOR_S) prior: the inverse of the rate's posterior mean.
    """
    return (observed_s + PRIOR_S) / (deaths + 1)


def optimal_interval_s(cost_s: float, failure_s: float) -> float:
    """Time between two checkpoints that loses least, in seconds; 0 where a checkpoint costs nothing.

    sqrt(2 C M) - C: Young, "A first order approximation to the optimum checkpoint interval" (CACM 17(9), 1974) with
    the first term of Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (FGCS 22(3),
    2006), which is within 4 % of his full estimate as long as C is below a fiftieth of M.
    """
    return max(0.0, math.sqrt(2 * cost_s * failure_s) - cost_s)


def auto_interval_s(block_s: float, save_s: float, deaths: int, observed_s: float) -> float:
    """The interval of `auto`, in seconds.

    At most LONGEST_S; but in any case so long that checkpoints cost no more than LARGEST_SHARE of the time, which is at
    least ten times the duration of a save: one is over before the next begins.

    Args:
        block_s: time that training stands still for one checkpoint.
        save_s: whole duration of one save.
        deaths: failures of this run so far.
        observed_s: time that this run has been trained for so far, all attempts together.
    """
    cost = checkpoint_cost_s(block_s, save_s)
    return max(
        min(LONGEST_S, optimal_interval_s(cost, mean_failure_interval_s(deaths, observed_s))), cost / LARGEST_SHARE
    )


class CheckpointInterval:
    """`machine.checkpoint_every` for one attempt. Asked at every step, so it is never shorter than one.

    Args:
        setting: a number of steps, a time such as `30 s`, `10 min` or `1.5 h`, or `auto`.
        step: at which the attempt begins.
        now_s: on any clock that only goes forward; the same is meant below.
        deaths: failures of this run before.
        observed_s: time that earlier attempts have trained for.

    Raises:
        SettingsError: the setting is none of these.
    """

    def __init__(self, setting: str | int, step: int, now_s: float, deaths: int = 0, observed_s: float = 0.0) -> None:
        self._setting = _parse_interval(setting)
        self._start_s = self._last_s = now_s
        self._last_step = step
        self._deaths, self._observed_s = deaths, observed_s
        self._block_s, self._taken = 0.0, 0
        self._save_s = 0.0

    def seconds(self, now_s: float) -> float | None:
        """From one checkpoint to the next, as it is known by now; None when it is set in steps."""
        if isinstance(self._setting, int):
            return None
        if isinstance(self._setting, float):
            return self._setting
        if not self._save_s:
            return FIRST_S
        observed_s = self._observed_s + now_s - self._start_s
        return auto_interval_s(self._block_s, self._save_s, self._deaths, observed_s)

    def due(self, step: int, now_s: float) -> bool:
        """Whether a checkpoint of `step` is due: there is something new, and the interval is over.

        An interval of n steps is over at the multiples of n, whatever was saved in between; and stays so until
        something is saved.
        """
        if step <= self._last_step:
            return False
        wait_s = self.seconds(now_s)
        if isinstance(self._setting, int):
            return step // self._setting > self._last_step // self._setting
        return wait_s is not None and now_s - self._last_s >= wait_s

    def taken(self, step: int, now_s: float, block_s: float, save_s: float) -> None:
        """A checkpoint was taken, for whatever reason.

        Args:
            step: that it is of.
            now_s: now.
            block_s: time that training stood still for it.
            save_s: duration of the last save that is complete; 0 when there was none.
        """
        self._last_step, self._last_s = step, now_s
        self._taken += 1
        self._block_s += (block_s - self._block_s) / self._taken
        self._save_s = save_s or self._save_s


def _parse_interval(setting: str | int) -> int | float | None:
    """Steps as int, seconds as float, None for auto."""
    try:
        return parse_interval(setting)
    except ValueError as error:
        raise SettingsError(f"machine.checkpoint_every: {error}") from None


# Saving in a thread of its own: training is held up by the snapshot alone, and never by a disk.
#
# At most one save is in flight. While it is, a snapshot that is due by interval is not taken (the interval grows to
# the
# length of a save); one that must be kept (a new best, the end) waits in memory, at most one of each kind. A disk that
# takes no checkpoint (full, failing, read-only) is told of once, and tried again until it does.

FIRST_RETRY_S = 1.0
LAST_RETRY_S = 30.0
POLL_S = 0.05
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class _PendingSnapshot:
    snapshot: TrainSnapshot
    block_s: float


class AsyncCheckpointer:
    """Seals snapshots in the order of their steps.

    Args:
        paths: the run.
        journal: told of every sealed checkpoint and of every outage.
        identity: written beside each checkpoint (see checkpoint.py).
        keep: `machine.keep_checkpoints`.
        sealed: state of the newest checkpoint on disk; that of step 0 if there is none.
    """

    def __init__(
        self, paths: RunPaths, journal: Journal, identity: dict[str, Any], keep: int, sealed: TrainState
    ) -> None:
        self._paths, self._journal, self._identity, self._keep = paths, journal, identity, keep
        self.sealed = sealed
        """The newest state that is on disk."""
        self.save_s = 0.0
        """Duration of the last save."""
        self.outage = ""
        """Why nothing can be saved at the moment; empty when it can."""
        self.chunks = 0
        """Grows while a save makes progress."""
        self._waiting: dict[int, _PendingSnapshot] = {}
        self._in_flight: int | None = None
        self._failed: BaseException | None = None
        self._closed = False
        self._retry_s = FIRST_RETRY_S
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="saver", daemon=True)
        self._thread.start()

    @property
    def in_flight(self) -> bool:
        """Whether a save is under way. Raises what ended the thread, if anything did."""
        with self._changed:
            if self._failed is not None:
                raise self._failed
            return self._in_flight is not None

    def offer(self, snapshot: TrainSnapshot, block_s: float) -> None:
        """Save this one as soon as can be; older ones that it does not refer to need no saving any more."""
        with self._changed:
            needed = snapshot.state.refers_to | {self._in_flight}
            self._waiting = {step: item for step, item in self._waiting.items() if step in needed}
            self._waiting[snapshot.state.step] = _PendingSnapshot(snapshot, block_s)
            self._changed.notify_all()

    def drain(self, wait_s: float, beat: Callable[[], None]) -> bool:
        """Wait until everything is sealed; False when that took longer than `wait_s`.

        Args:
            wait_s: counted from the last sign of progress.
            beat: called while the disk makes progress, or says why it does not.
        """
        self._retry_s = FIRST_RETRY_S
        seen, since = self.chunks, time.monotonic()
        while self.in_flight or self._waiting:
            if self.chunks != seen or self.outage:
                beat()
            if self.chunks != seen and not self.outage:
                seen, since = self.chunks, time.monotonic()
            if time.monotonic() - since > wait_s:
                return False
            with self._changed:
                self._changed.wait(POLL_S)
        return True

    def close(self) -> None:
        """Save nothing more; what is under way is finished."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while not self._waiting and not self._closed:
                        self._changed.wait()
                    if self._closed:
                        return
                    step, item = min(self._waiting.items())
                    self._in_flight = step
                try:
                    self._save(item)
                except OSError as error:
                    self._make_room(error)
                    self._tell_outage(error)
                else:
                    self._tell_end_of_outage()
                    with self._changed:
                        del self._waiting[step]
                        self._in_flight = None
                        self._changed.notify_all()
        except BaseException as error:  # the training thread raises it: see `busy`
            with self._changed:
                self._failed = error
                self._changed.notify_all()

    def _save(self, item: _PendingSnapshot) -> None:
        started, state = time.monotonic(), item.snapshot.state
        self._journal.sync()  # what the checkpoint assumes to be told must not be lost with the machine
        if state != self.sealed:
            written = checkpoint.write(self._paths, item.snapshot, self._identity, self._beat)
            self.sealed = state
            self.save_s = time.monotonic() - started
            self._journal.append(
                "checkpoint", step=state.step, best=state.best_step == state.step, size_bytes=written.size_bytes,
                bytes_written=written.bytes_written, bytes_linked=written.bytes_linked,
                block_s=round(item.block_s, 6), seconds=round(self.save_s, 4),
            )  # fmt: skip
        checkpoint.rotate(
            self._paths,
            self._keep,
            {state.best_step, state.good_step} | replication_protocol.find_unsent_steps(self._paths),
        )

    def _make_room(self, error: OSError) -> None:
        """On a full disk old checkpoints go although the mirror has not got them: newer ones stand for them."""
        if error.errno in FULL:
            needed = {self.sealed.best_step, self.sealed.good_step} | replication_protocol.find_steps_in_flight(
                self._paths
            )
            with contextlib.suppress(OSError):  # the error that we have is the one to tell
                checkpoint.rotate(self._paths, self._keep, needed)

    def _beat(self) -> None:
        self.chunks += 1

    def _tell_outage(self, error: OSError) -> None:
        if not self.outage:
            self.outage = str(error)
            where = self._paths.checkpoints
            text = f"no checkpoint can be saved in {where} ({error}); training goes on, saving is tried again"
            self._journal.append("alert", text=text)
            print_message(text)
        with self._changed:
            self._in_flight = None  # a newer snapshot may take the place of this one
            self._changed.notify_all()
            self._changed.wait(self._retry_s)
        self._retry_s = min(LAST_RETRY_S, 2 * self._retry_s)

    def _tell_end_of_outage(self) -> None:
        self._retry_s = FIRST_RETRY_S
        if self.outage:
            self.outage = ""
            self._journal.append("alert", text=f"checkpoints are saved again, the newest is of step {self.sealed.step}")


class NullCheckpointer:
    """The saver of a rank whose machine has another one that saves."""

    in_flight = False
    save_s = 0.0
    outage = ""

    def __init__(self, sealed: TrainState) -> None:
        self.sealed = sealed
        """The newest state that was to be saved."""

    def offer(self, snapshot: TrainSnapshot, block_s: float) -> None:
        """Somebody else saves the same."""
        self.sealed = snapshot.state

    def drain(self, wait_s: float, beat: Callable[[], None]) -> bool:
        """There is nothing to wait for."""
        return True

    def close(self) -> None:
        """There is nothing to end."""

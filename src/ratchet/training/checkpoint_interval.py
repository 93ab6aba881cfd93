"""When the next checkpoint is due: after so many steps, after so long, or as often as is worth it. It has no clock."""

import math

from ratchet.config.fields import interval_from
from ratchet.errors import SettingsError

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


def cost_s(block_s: float, save_s: float) -> float:
    """What one checkpoint costs training, in seconds: the time that it stands still, and a share of the save."""
    return block_s + BACKGROUND_SHARE * save_s


def failure_s(deaths: int, observed_s: float) -> float:
    """Mean time between failures, estimated from the run itself, in seconds.

    Failures as a Poisson process whose rate has a Gamma(1, PRIOR_S) prior: the inverse of the rate's posterior mean.
    """
    return (observed_s + PRIOR_S) / (deaths + 1)


def best_s(cost_s: float, failure_s: float) -> float:
    """Time between two checkpoints that loses least, in seconds; 0 where a checkpoint costs nothing.

    sqrt(2 C M) - C: Young, "A first order approximation to the optimum checkpoint interval" (CACM 17(9), 1974) with
    the first term of Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (FGCS 22(3),
    2006), which is within 4 % of his full estimate as long as C is below a fiftieth of M.
    """
    return max(0.0, math.sqrt(2 * cost_s * failure_s) - cost_s)


def auto_s(block_s: float, save_s: float, deaths: int, observed_s: float) -> float:
    """The interval of `auto`, in seconds.

    At most LONGEST_S; but in any case so long that checkpoints cost no more than LARGEST_SHARE of the time, which is at
    least ten times the duration of a save: one is over before the next begins.

    Args:
        block_s: time that training stands still for one checkpoint.
        save_s: whole duration of one save.
        deaths: failures of this run so far.
        observed_s: time that this run has been trained for so far, all attempts together.
    """
    cost = cost_s(block_s, save_s)
    return max(min(LONGEST_S, best_s(cost, failure_s(deaths, observed_s))), cost / LARGEST_SHARE)


class Interval:
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
        self._setting = _parsed(setting)
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
        return auto_s(self._block_s, self._save_s, self._deaths, observed_s)

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


def _parsed(setting: str | int) -> int | float | None:
    """Steps as int, seconds as float, None for auto."""
    try:
        return interval_from(setting)
    except ValueError as error:
        raise SettingsError(f"machine.checkpoint_every: {error}") from None

"""What to do when a worker has ended: one pure function, tested by a table."""

import signal as signals
from dataclasses import dataclass
from typing import Literal

from ratchet.errors import EXIT_BUG, EXIT_INPUT, EXIT_INTERRUPTED, EXIT_OK

FailureClass = Literal["preempted", "killed", "out_of_memory", "diverged", "hardware", "storage", "input", "bug"]


@dataclass(frozen=True)
class End:
    """How a worker's process ended: exit code, or the signal that killed it; and what it said itself, if anything."""

    exit_code: int
    """As subprocess reports it: negative for a signal."""
    failure: FailureClass | None = None
    text: str = ""


@dataclass(frozen=True)
class Retry:
    """Start the same command again after a wait."""

    failure: FailureClass
    delay_s: float
    text: str


@dataclass(frozen=True)
class GiveUp:
    """Stop with this exit code."""

    failure: FailureClass
    exit_code: int
    text: str


def classify(end: End) -> FailureClass:
    """The cause, from what the worker said, else from how it ended."""
    if end.failure is not None:
        return end.failure
    if end.exit_code == EXIT_INTERRUPTED:
        return "preempted"
    if end.exit_code == EXIT_INPUT:
        return "input"
    if end.exit_code < 0:
        return "killed"
    return "bug"


# Only causes outside the program are worth the same attempt again: a bug, wrong input or divergence repeats itself.
_RETRIED: frozenset[FailureClass] = frozenset({"killed", "hardware", "storage"})


def decide(end: End, deaths_without_progress: int, retries: int, delay_s: float) -> Retry | GiveUp:
    """Retry or give up.

    Args:
        end: how the worker ended; never a success.
        deaths_without_progress: ends in a row since the last new checkpoint, this one not counted.
        retries: `machine.retries`.
        delay_s: `machine.retry_delay_s`; doubled for every death without progress, at most 60 s.
    """
    if end.exit_code == EXIT_OK and end.failure is None:
        return GiveUp("bug", EXIT_BUG, "the worker ended with success but sealed no result")
    failure = classify(end)
    text = end.text or _cause(end)
    if failure == "preempted":
        return GiveUp(failure, EXIT_INTERRUPTED, "stopped on request; repeat to go on")
    if failure == "input":
        return GiveUp(failure, EXIT_INPUT, text)
    if failure not in _RETRIED:
        return GiveUp(failure, EXIT_BUG, text)
    if deaths_without_progress >= retries:
        return GiveUp(failure, EXIT_BUG, f"{text}; gave up after {retries} restarts without a new checkpoint")
    return Retry(failure, min(60.0, delay_s * 2.0 ** min(deaths_without_progress, 100)), text)


def _cause(end: End) -> str:
    if end.exit_code < 0:
        known = {number.value: number.name for number in signals.Signals}
        name = known.get(-end.exit_code, f"signal {-end.exit_code}")  # real-time signals have no names
        hint = " (the system may have run out of memory: see `dmesg`)" if -end.exit_code == signals.SIGKILL else ""
        return f"killed by {name}{hint}"
    return f"exit code {end.exit_code}"

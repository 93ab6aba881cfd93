"""What to do when a worker has ended: one pure function, tested by a table."""

import re
import signal as signals
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ratchet.errors import EXIT_BUG, EXIT_INPUT, EXIT_INTERRUPTED, EXIT_PEERS

FailureClass = Literal[
    "out_of_memory",
    "too_large",
    "diverged",
    "preempted",
    "hardware",
    "stalled",
    "storage",
    "data",
    "killed",
    "bug",
    "peers",
    "rendezvous",
    "endpoint",
]
"""`peers`: other ranks are gone; `rendezvous`: their machines did not come; `too_large`: refused by the memory
forecast, before anything was loaded; `endpoint`: a server that is asked does not answer."""

LONGEST_DELAY_S = 60.0
PEERS_TIMES = 50
"""Restarts in a row, without a new checkpoint, because others were gone."""


@dataclass(frozen=True)
class WorkerExit:
    """How a worker's process ended: exit code, or the signal that killed it; and what is known about the cause."""

    exit_code: int
    """As subprocess reports it: negative for a signal."""
    failure: FailureClass | None = None
    """What the worker said itself; `stalled` when we killed it."""
    text: str = ""
    oom_kills: int = 0
    """Processes that the system killed for memory while the worker ran."""


@dataclass(frozen=True)
class EarlierFailure:
    """An earlier end of the run."""

    failure: FailureClass
    text: str


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


def describe_cause(failure: str, text: str) -> str:
    """Why an attempt ended: its class, unless what is said of it begins with that."""
    words = failure.replace("_", " ")
    return text if text.startswith(words) else f"{words}, {text}"


def classify_exit(end: WorkerExit) -> FailureClass:
    """The cause, from what is known, else from how it ended."""
    if end.failure is not None:
        return end.failure
    if end.exit_code == EXIT_INTERRUPTED:
        return "preempted"
    if end.exit_code == EXIT_INPUT:
        return "data"
    if end.exit_code == EXIT_PEERS:
        return "peers"
    if end.exit_code == -signals.SIGKILL and end.oom_kills:
        return "out_of_memory"
    return "killed" if end.exit_code < 0 else "bug"


def decide(
    end: WorkerExit, before: Sequence[EarlierFailure], retries: int | None, delay_s: float, stopping: bool = False
) -> Retry | GiveUp:
    """Retry or give up.

    Causes outside the program are worth the same attempt again. Divergence, unusable data, and memory that the worker
    could not make do with, are not. A bug is, once: it shows that it is one by coming back.

    Args:
        end: how the worker ended, without a result.
        before: deaths since the last new checkpoint, oldest first, this one not among them.
        retries: `machine.retries`; None for what is never tried again, whatever the settings say.
        delay_s: `machine.retry_delay_s`; doubled for every death without progress, at most 60 s.
        stopping: the run was asked to stop: what would be tried again ends here, as interrupted.
    """
    failure, text = classify_exit(end), end.text or _describe_exit(end)
    if final := _decide_final(end, failure, text):
        return final
    if stopping:
        return GiveUp("preempted", EXIT_INTERRUPTED, f"asked to stop, and the worker ended: {text}; repeat to go on")
    if failure == "peers" and len(before) < PEERS_TIMES:
        return Retry(failure, delay_s, text)  # nothing was wrong here
    before = [death for death in before if death.failure != "peers"]
    bugs = [death for death in before if death.failure == "bug"]
    if retries is None or len(before) >= retries or (failure == "bug" and bugs):
        return GiveUp(failure, EXIT_BUG, text if retries is None else _describe_history(text, before))
    return Retry(failure, min(LONGEST_DELAY_S, delay_s * 2.0 ** min(len(before), 100)), text)


def _decide_final(end: WorkerExit, failure: FailureClass, text: str) -> GiveUp | None:
    """What another attempt would not change."""
    if failure in ("preempted", "rendezvous", "endpoint"):
        text = "stopped on request" if failure == "preempted" else text
        return GiveUp(failure, EXIT_INTERRUPTED, f"{text}; repeat to go on")
    # A disk that the worker has waited for, as long as it was told to, needs a person as well.
    if failure in ("data", "too_large") or (failure == "storage" and end.exit_code == EXIT_INPUT):
        return GiveUp(failure, EXIT_INPUT, text)
    if failure == "diverged" or (failure == "out_of_memory" and end.failure is not None):
        return GiveUp(failure, EXIT_BUG, text)
    return None


def compute_exclusion_s(failed_s: Sequence[float], now_s: float, window_s: float) -> float:
    """How long a machine stays away from a training of several: two failures of its own so close together are its own
    fault, and each of them has cost all others a restart.

    Args:
        failed_s: when its ranks failed, ascending.
        now_s: by the same clock.
        window_s: `machine.leave_out_s`.
    """
    recent = [at for at in failed_s if now_s - at <= window_s]
    return window_s if window_s and len(recent) >= 2 else 0.0


def _describe_history(text: str, before: Sequence[EarlierFailure]) -> str:
    """The last cause, and the others when there were others."""
    if not before:
        return f"{text}; no restart is allowed (machine.retries: 0)"
    causes = {_strip_numbers(death.text): death.text for death in before}
    others = [cause for like, cause in causes.items() if like != _strip_numbers(text)]
    times = f"{len(before)} restart{'s' if len(before) > 1 else ''} without a new checkpoint"
    if not others:
        return f"{text}; the same again after a restart; gave up after {times}"
    return f"{text}; gave up after {times}; before that: {'; '.join(others)}"


def _strip_numbers(text: str) -> str:
    """The text without its numbers: times and process ids differ each time."""
    return re.sub(r"\d+(\.\d+)?", "#", text)


def _describe_exit(end: WorkerExit) -> str:
    if end.exit_code == 0:
        return "the worker ended with success but sealed no result"
    if end.exit_code > 0:
        return f"exit code {end.exit_code}"
    known = {number.value: number.name for number in signals.Signals}
    name = known.get(-end.exit_code, f"signal {-end.exit_code}")  # real-time signals have no names
    if -end.exit_code != signals.SIGKILL:
        return f"killed by {name}"
    if end.oom_kills:
        return (
            f"killed by {name} while the system ran out of memory; lower machine.micro_batch_rows, set "
            "machine.activation_checkpointing, or end what else uses memory"
        )
    return f"killed by {name} (by a person, a scheduler, or a system short of memory: see `dmesg`)"

"""Restart policy: decides what to do when a worker has ended. Pure functions, tested by a table."""

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
"""`peers`: other ranks are gone. `rendezvous`: the machines did not meet. `too_large`: refused by the memory forecast
before anything was loaded. `endpoint`: a model server does not answer."""

MAX_DELAY_S = 60.0
MAX_PEERS_RESTARTS = 50
"""Restarts in a row, without a new checkpoint, because other ranks were gone."""


@dataclass(frozen=True)
class WorkerExit:
    """How the process of a worker ended, and what is known of the cause."""

    exit_code: int
    """As subprocess reports it: negative for a signal."""
    failure: FailureClass | None = None
    """Reported by the worker; `stalled` if the supervisor killed it."""
    text: str = ""
    oom_kills: int = 0
    """Processes that the kernel killed for memory while the worker ran."""


@dataclass(frozen=True)
class EarlierFailure:
    """An earlier failure of the run."""

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
    """Why an attempt ended: its class and text, without naming the class twice."""
    words = failure.replace("_", " ")
    return text if text.startswith(words) else f"{words}, {text}"


def classify_exit(end: WorkerExit) -> FailureClass:
    """The failure class: as reported, otherwise from the exit code."""
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

    Causes outside the program are worth another attempt. Divergence, unusable data, and memory that the worker could
    not cope with are not. A bug gets one retry, which shows whether it is reproducible.

    Args:
        end: how the worker ended, without a result.
        before: failures since the last new checkpoint, oldest first, without this one.
        retries: `machine.max_restarts`; None: never retry, whatever the settings say.
        delay_s: `machine.restart_delay_s`; doubled for every failure without progress, at most 60 s.
        stopping: the run was asked to stop, so that what would be retried ends as interrupted.
    """
    failure, text = classify_exit(end), end.text or _describe_exit(end)
    if final := _decide_final(end, failure, text):
        return final
    if stopping:
        text = f"asked to stop, and the worker ended: {text}; run it again to resume"
        return GiveUp("preempted", EXIT_INTERRUPTED, text)
    if failure == "peers" and len(before) < MAX_PEERS_RESTARTS:
        return Retry(failure, delay_s, text)  # not this machine's fault
    before = [earlier for earlier in before if earlier.failure != "peers"]
    bugs = [earlier for earlier in before if earlier.failure == "bug"]
    if retries is None or len(before) >= retries or (failure == "bug" and bugs):
        return GiveUp(failure, EXIT_BUG, text if retries is None else _describe_history(text, before))
    return Retry(failure, min(MAX_DELAY_S, delay_s * 2.0 ** min(len(before), 100)), text)


def _decide_final(end: WorkerExit, failure: FailureClass, text: str) -> GiveUp | None:
    """Decide failures that another attempt would not change; None for the others."""
    if failure in ("preempted", "rendezvous", "endpoint"):
        text = "stopped on request" if failure == "preempted" else text
        return GiveUp(failure, EXIT_INTERRUPTED, f"{text}; run it again to resume")
    # Storage that the worker has already waited for, as long as the settings allow, also needs a person.
    if failure in ("data", "too_large") or (failure == "storage" and end.exit_code == EXIT_INPUT):
        return GiveUp(failure, EXIT_INPUT, text)
    if failure == "diverged" or (failure == "out_of_memory" and end.failure is not None):
        return GiveUp(failure, EXIT_BUG, text)
    return None


def compute_exclusion_s(failed_s: Sequence[float], now_s: float, window_s: float) -> float:
    """How long a machine stays out of a training of several machines: two failures of its own within the window are its
    own fault, and each of them cost all others a restart.

    Args:
        failed_s: when its ranks failed, ascending, by a monotonic clock.
        now_s: by the same clock.
        window_s: `machine.node_cooldown_s`.
    """
    recent = [at for at in failed_s if now_s - at <= window_s]
    return window_s if window_s and len(recent) >= 2 else 0.0


def _describe_history(text: str, before: Sequence[EarlierFailure]) -> str:
    """The last cause, and earlier ones if they differ."""
    if not before:
        return f"{text}; no restart is allowed (machine.max_restarts: 0)"
    causes = {_strip_numbers(death.text): death.text for death in before}
    others = [cause for like, cause in causes.items() if like != _strip_numbers(text)]
    times = f"{len(before)} restart{'s' if len(before) > 1 else ''} without a new checkpoint"
    if not others:
        return f"{text}; failed the same way after a restart; gave up after {times}"
    return f"{text}; gave up after {times}; earlier causes: {'; '.join(others)}"


def _strip_numbers(text: str) -> str:
    """Remove numbers, because times and process ids differ each time."""
    return re.sub(r"\d+(\.\d+)?", "#", text)


def _describe_exit(end: WorkerExit) -> str:
    if end.exit_code == 0:
        return "the worker exited with code 0 but sealed no result"
    if end.exit_code > 0:
        return f"exit code {end.exit_code}"
    known = {number.value: number.name for number in signals.Signals}
    name = known.get(-end.exit_code, f"signal {-end.exit_code}")  # real-time signals have no names
    if -end.exit_code != signals.SIGKILL:
        return f"killed by {name}"
    if end.oom_kills:
        return (
            f"killed by {name} while the system ran out of memory; lower machine.micro_batch_size, set "
            "machine.activation_checkpointing, or stop other processes"
        )
    return f"killed by {name} (by a person, a scheduler, or a system short of memory; see `dmesg`)"

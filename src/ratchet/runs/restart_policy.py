"""Restart policy: decides whether to restart a worker that has ended. Pure functions, tested by a table."""

import re
import signal as signals
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ratchet.config.units import format_count, format_exit_code
from ratchet.errors import EXIT_BUG, EXIT_INPUT, EXIT_INTERRUPTED, EXIT_PEERS

FailureClass = Literal[
    "out_of_memory", "too_large", "diverged", "preempted", "hardware", "stalled", "storage", "data", "killed", "bug",
    "peers", "rendezvous", "endpoint",
]  # fmt: skip
"""Why an attempt ended.

    out_of_memory   Not even one row fits into memory. If the kernel killed the worker instead, it is restarted.
    too_large       The memory forecast refused the run before anything was loaded.
    diverged        There were more bad steps than train.guards allows.
    preempted       The run was asked to stop: a signal, Ctrl-C, or a preemption notice.
    hardware        The GPU reported an error, or weights in memory became NaN or infinite.
    stalled         The worker made no progress for machine.stall_timeout_s, and the supervisor killed it.
    storage         A file could not be read or written. If this lasts machine.storage_timeout_s, the command ends with
                    exit code 2.
    data            Settings, data or the base model cannot be used.
    killed          A signal ended the worker, and neither it nor the supervisor knows why.
    bug             Any other exception.
    peers           Other ranks are gone, or the process that trains several runs.
    rendezvous      The machines did not connect to each other within machine.rendezvous_timeout_s.
    endpoint        A model server did not answer.
"""

MAX_DELAY_S = 60.0
MAX_PEERS_RESTARTS = 50
"""A failure of class `peers` is retried while fewer failures than this, of any class, have occurred since the last new
checkpoint. Afterwards, `machine.max_restarts` decides."""


@dataclass(frozen=True)
class WorkerExit:
    """End of a worker process, and its cause as far as it is known."""

    exit_code: int
    """Exit code as subprocess reports it: negative for a signal."""
    failure: FailureClass | None = None
    """Failure class as the worker reported it; `stalled` if the supervisor killed the worker."""
    text: str = ""
    oom_kills: int = 0
    """Number of processes that the kernel killed for lack of memory while the worker ran."""


@dataclass(frozen=True)
class Retry:
    """Decision to start the same command again after a wait."""

    failure: FailureClass
    delay_s: float
    text: str


@dataclass(frozen=True)
class GiveUp:
    """Decision to stop with this exit code."""

    failure: FailureClass
    exit_code: int
    text: str


def describe_cause(failure: str, text: str) -> str:
    """Describe why an attempt ended, by its failure class and text, without naming the class twice."""
    name = failure.replace("_", " ")
    return text if text.startswith(name) else f"{name}, {text}"


def classify_exit(end: WorkerExit) -> FailureClass:
    """Return the failure class as the worker reported it, otherwise the class of the exit code."""
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
    end: WorkerExit, earlier: Sequence[Retry], retries: int | None, delay_s: float, stopping: bool = False
) -> Retry | GiveUp:
    """Decide whether to retry or give up.

    Causes outside the program justify another attempt. Divergence, unusable data, and a lack of memory that the worker
    itself reported do not justify one. A bug gets one retry, which shows whether it is reproducible.

    Args:
        end: end of the worker, without a result.
        earlier: decisions since the last new checkpoint, oldest first.
        retries: `machine.max_restarts`; None: never retry, whatever the settings say. Failures of class `peers` do not
            count and are retried in both cases (MAX_PEERS_RESTARTS).
        delay_s: `machine.restart_delay_s`; doubled for every earlier failure without progress, up to MAX_DELAY_S. It is
            not doubled after a failure of class `peers`.
        stopping: whether the run was asked to stop, so that it ends as interrupted instead of a retry.
    """
    failure, text = classify_exit(end), end.text or _describe_exit(end)
    if final := _decide_final(end, failure, text):
        return final
    if stopping:
        text = f"asked to stop, and the worker ended: {text}; run it again to resume"
        return GiveUp("preempted", EXIT_INTERRUPTED, text)
    if failure == "peers" and len(earlier) < MAX_PEERS_RESTARTS:
        return Retry(failure, delay_s, text)  # another machine, or another run of the process, is the cause
    if failure != "peers":
        earlier = [failed for failed in earlier if failed.failure != "peers"]
    bugs = [failed for failed in earlier if failed.failure == "bug"]
    if retries is None or len(earlier) >= retries or (failure == "bug" and bugs):
        return GiveUp(failure, EXIT_BUG, text if retries is None else _describe_history(text, earlier))
    return Retry(failure, min(MAX_DELAY_S, delay_s * 2.0 ** min(len(earlier), 100)), text)


def _decide_final(end: WorkerExit, failure: FailureClass, text: str) -> GiveUp | None:
    """Give up after a failure that another attempt would not change; None for other failures."""
    if failure in ("preempted", "rendezvous", "endpoint"):
        text = "stopped on request" if failure == "preempted" else text
        return GiveUp(failure, EXIT_INTERRUPTED, f"{text}; run it again to resume")
    # A storage failure with EXIT_INPUT needs a person: the worker has waited as long as the settings allow.
    if failure in ("data", "too_large") or (failure == "storage" and end.exit_code == EXIT_INPUT):
        return GiveUp(failure, EXIT_INPUT, text)
    if failure == "diverged" or (failure == "out_of_memory" and end.failure is not None):
        return GiveUp(failure, EXIT_BUG, text)
    return None


def compute_exclusion_s(failed_s: Sequence[float], now_s: float, window_s: float) -> float:
    """Compute how long a machine is excluded from a training of several machines: `window_s` (Machine.node_cooldown_s)
    after two failures of its own ranks within that time, because each of them makes all other machines restart too.

    `failed_s` and `now_s` are times by one monotonic clock.
    """
    recent = [at for at in failed_s if now_s - at <= window_s]
    return window_s if window_s and len(recent) >= 2 else 0.0


def _describe_history(text: str, earlier: Sequence[Retry]) -> str:
    """Describe the last cause, and earlier causes if they differ."""
    if not earlier:
        return f"{text}; no restart is allowed (machine.max_restarts: 0)"
    causes = {_strip_numbers(failure.text): failure.text for failure in earlier}
    other_causes = [cause for stripped, cause in causes.items() if stripped != _strip_numbers(text)]
    times = f"{format_count(len(earlier), 'restart')} without a new checkpoint"
    if not other_causes:
        return f"{text}; failed the same way after a restart; gave up after {times}"
    return f"{text}; gave up after {times}; earlier causes: {'; '.join(other_causes)}"


def _strip_numbers(text: str) -> str:
    """Replace numbers, because times and process ids differ between attempts."""
    return re.sub(r"\d+(\.\d+)?", "#", text)


def _describe_exit(end: WorkerExit) -> str:
    if end.exit_code == 0:
        return "the worker exited with code 0 but sealed no result"
    text = format_exit_code(end.exit_code)
    if -end.exit_code != signals.SIGKILL:
        return text
    if end.oom_kills:
        return (
            f"{text} while the system ran out of memory; lower machine.micro_batch_size, set "
            "machine.activation_checkpointing, or stop other processes"
        )
    return f"{text} (by a person, a scheduler, or a system short of memory; see `dmesg`)"

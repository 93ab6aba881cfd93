"""Fault injection inside a worker, for tests and `ratchet chaos`.

A worker reads `RATCHET_FAULTS` (a JSON list of `InjectedFault`) once. Without the variable, no method does anything.
This module injects faults that are only possible inside the process; injectors.py sends signals and damages files from
outside.
"""

import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from ratchet.errors import SettingsError
from ratchet.storage import files
from ratchet.storage.records.base import Record

Phase = Literal["train", "validation", "generate"]
VARIABLE = "RATCHET_FAULTS"


class InjectedFault(Record):
    """A fault of a worker. Counts are per process, so the fault occurs again in a restarted worker."""

    kind: Literal["non_finite", "spike", "memory", "disk", "hang", "die", "freeze", "slow", "weights", "slow_disk"]
    """
    non_finite  the loss of this step is multiplied by NaN
    spike       the loss of this step is multiplied by 1e4
    memory      micro-batches of more than `tokens` padded tokens do not fit, from this step on
    disk        operations on checkpoints and shards of answers fail with `errno`, from this step on
    hang        the training thread sleeps forever in this step
    die         the process kills itself in this step, each time
    freeze      the process stops itself in this step, with SIGSTOP
    slow        every micro-batch takes `seconds` longer, from this step on
    weights     a weight becomes NaN after this step
    slow_disk   every operation on checkpoints and shards of answers takes `seconds` longer, from this step on
    """
    step: int = 1
    """First optimizer step of the fault, from 1."""
    times: int = 1
    """Number of times that the fault occurs in a process; 0: always."""
    steps: int = 1
    """Number of steps with a `memory` fault, to which `times` does not apply; 0: all steps from `step` on."""
    tokens: int = 0
    phase: Phase = "train"
    errno: Literal["ENOSPC", "EIO", "EROFS"] = "ENOSPC"
    seconds: float = 0.0
    rank: int | None = None
    """The only rank that has the fault; None: all ranks."""
    mark: str = ""
    """Name of a file in the working directory that is created when the fault occurs. If the file exists, the fault does
    not occur, so a restarted worker passes the step."""


class FaultInjector:
    """The injected faults of this process. The argument `step` is the step in progress, from 1."""

    def __init__(self, faults: tuple[InjectedFault, ...] = ()) -> None:
        self._faults = faults
        self._counts = [0] * len(faults)
        self._lock = threading.Lock()

    @classmethod
    def from_environment(cls) -> "FaultInjector":
        """Read `RATCHET_FAULTS`. Raises SettingsError if it is not a list of faults."""
        text = os.environ.get(VARIABLE, "[]")
        try:
            faults = (InjectedFault.model_validate(item) for item in json.loads(text))
            rank = int(os.environ.get("RANK", "0"))
            return cls(tuple(fault for fault in faults if fault.rank in (None, rank)))
        except (ValueError, TypeError) as error:
            raise SettingsError(f"{VARIABLE}: not a list of faults ({' '.join(str(error).split()[:20])})") from None

    def loss_factor(self, step: int) -> float:
        """Return the factor for the loss of this step; 1.0 without a fault."""
        if self._due("non_finite", step):
            return float("nan")
        return 1e4 if self._due("spike", step) else 1.0

    def memory(self, phase: Phase, step: int, tokens: int) -> None:
        """Raise MemoryError if a fault requires that a micro-batch of this number of padded tokens does not fit."""
        for fault in self._faults:
            if fault.kind == "memory" and fault.phase == phase and tokens > fault.tokens:
                last = fault.step + fault.steps - 1 if fault.steps else step
                if fault.step <= step <= last:
                    raise MemoryError(f"injected: {tokens} tokens in step {step}, {fault.tokens} fit")

    def in_step(self, step: int) -> None:
        """Hang, die, stop or wait in this step, if a fault requires it."""
        if self._due("die", step):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._due("freeze", step):
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(sum(fault.seconds for fault in self._faults if fault.kind == "slow" and step >= fault.step))
        if self._due("hang", step):
            while True:
                time.sleep(3600)

    def poisons(self, step: int) -> bool:
        """Return whether a weight should become NaN after this step."""
        return self._due("weights", step) is not None

    def watch_disk(self, step: Callable[[], int]) -> None:
        """Make operations on checkpoints and shards fail or slow down; `step` returns the step in progress."""
        if not any(fault.kind in ("disk", "slow_disk") for fault in self._faults):
            return

        def before(operation: files.Operation, path: Path) -> None:
            if not {"checkpoints", "shards"} & set(path.parts):
                return
            for fault in self._faults:
                if fault.kind == "slow_disk" and step() >= fault.step:
                    time.sleep(fault.seconds)
            if due := self._due("disk", step(), later=True):
                code = getattr(errno, due.errno)
                raise OSError(code, f"injected: {os.strerror(code)}", str(path))

        files.before = before

    def _due(self, kind: str, step: int, later: bool = False) -> InjectedFault | None:
        """Return the first fault of this kind that is due in this step, and count it. With `later`, faults of earlier
        steps are due too."""
        with self._lock:
            for number, fault in enumerate(self._faults):
                has_begun = fault.step <= step if later else fault.step == step
                may_recur = fault.times == 0 or self._counts[number] < fault.times
                if fault.kind == kind and has_begun and may_recur and _claim_mark(fault.mark):
                    self._counts[number] += 1
                    return fault
        return None


def _claim_mark(mark: str) -> bool:
    """Create the mark, if there is one. Return False if it already exists."""
    if mark:
        try:
            Path(mark).touch(exist_ok=False)
        except FileExistsError:
            return False
    return True

"""Faults made inside a worker, for tests and `ratchet chaos`: the seam through which nature is imitated.

A worker reads `RATCHET_FAULTS` (a JSON list of `Fault`) once. Without it every method does nothing. What can be done from
outside (signals, damage to files) is done from outside (attack.py); here is what only the inside can do.
"""

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Literal

from ratchet import files
from ratchet.errors import SettingsError
from ratchet.records import Record

VARIABLE = "RATCHET_FAULTS"


class Fault(Record):
    """One thing that goes wrong in a worker. Counts are of this process: a restarted worker meets it again."""

    kind: Literal["non_finite", "spike", "memory", "disk", "hang", "die", "weights", "slow_disk"]
    """
    non_finite  the loss of this step is multiplied by NaN
    spike       the loss of this step is multiplied by 1e4
    memory      micro-batches of more than `tokens` padded tokens do not fit, from this step on
    disk        operations on checkpoints fail with `errno`, from this step on
    hang        the training thread sleeps for ever in this step
    die         the process kills itself in this step, each time
    weights     a weight becomes NaN after this step
    slow_disk   every operation on checkpoints takes `seconds` longer
    """
    step: int = 1
    """Optimizer step (from 1) at which it begins."""
    times: int = 1
    """How often, in one process; 0: always."""
    steps: int = 1
    """For `memory`: of how many steps; 0: all that follow. `times` is not counted."""
    tokens: int = 0
    phase: Literal["train", "validation"] = "train"
    errno: Literal["ENOSPC", "EIO", "EROFS"] = "ENOSPC"
    seconds: float = 0.0

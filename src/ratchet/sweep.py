"""Many supervised runs chosen by a study → winning values. A command, no stage; imports no torch.

Workers are processes (sweeping/worker.py) that share the study with any others, on this machine and elsewhere. Here
they are started and watched, their trials shown in MLflow and in the terminal, and the end is written down.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ratchet import files, params
from ratchet.config import Settings
from ratchet.errors import DataError, InterruptedRunError, RunFailedError
from ratchet.layout import Layout
from ratchet.lock import Lock
from ratchet.records_sweep import SweepReport
from ratchet.run.signals import Stop
from ratchet.sweeping import adoption
from ratchet.sweeping.crew import Crew, Kills
from ratchet.sweeping.desk import Desk

LOOK_S = 0.5
CHAOS_GAP_S = (6.0, 25.0)


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    workers: int = 1
    fork: bool = False
    repair: bool = False
    report: bool = False
    adopt: bool = False
    adopted: int | None = None
    """Trial to adopt instead of the winner."""
    chaos: int = 0
    """Workers to kill on purpose."""

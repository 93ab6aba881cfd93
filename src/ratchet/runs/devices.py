"""How many ranks a training has on this machine. Asks the driver's files, not torch: the supervisor does without it."""

import os
import re
from pathlib import Path

from ratchet.config.schema import Machine

VISIBLE = "CUDA_VISIBLE_DEVICES"


def ranks_here(machine: Machine) -> int:
    """`machine.gpus`; `auto`: one for each GPU that this process may see, one where there is none."""
    if machine.gpus != "auto":
        return machine.gpus
    return 1 if machine.device == "cpu" else max(1, visible_gpus())


def visible_gpus(devices: Path = Path("/dev")) -> int:
    """GPUs of NVIDIA that CUDA would show (CUDA C++ Programming Guide, CUDA_VISIBLE_DEVICES: those before the first
    that is none)."""
    there = sum(bool(re.fullmatch(r"nvidia[0-9]+", path.name)) for path in devices.glob("nvidia*"))
    chosen = os.environ.get(VISIBLE)
    if chosen is None or not there:
        return there
    names = [name.strip() for name in chosen.split(",")]
    shown = names[: names.index("-1")] if "-1" in names else names
    return len([name for name in shown if name])


def has_agent(machine: Machine) -> bool:
    """Whether ranks are started by an agent: there are several, here or elsewhere."""
    return ranks_here(machine) > 1 or machine.node_range != (1, 1)

"""Cases for out-of-memory errors: detection, release of memory, and suggested alternatives."""

import re
from typing import Any

import families
from ratchet.config.train import Train
from ratchet.models import model_spec
from ratchet.models.memory.forecast import MemoryWorkload

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
PLAN = model_spec.from_config(families.FAMILIES["llama"](num_hidden_layers=6))
LONG = MemoryWorkload(1, 2000, 1000, packed=False, device="cuda")


def settings(**changes: Any) -> Train:
    return Train(**{"rank": 16, "quantization": "none", "compute_dtype": "float32", **changes})


def savings(advice: str) -> dict[str, float]:
    """Return the saved bytes by setting, in the order of the text."""
    found = re.findall(r"([\w.]+: [\w.]+|[\w.]+ \(and .*?\): \d+) \(([\d.]+) (\w+) less\)", advice)
    return {what: float(number) * UNITS[unit] for what, number, unit in found}

"""What a checkpoint says of itself in JSON, read with suspicion: whatever is found there, no error but DamagedError."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ratchet.errors import DamagedError
from ratchet.training.state import State

FORMAT = 3
"""2 had no file of the adapter's own tensors, and a state without gradient norms."""
STATE = "state.json"
IDENTITY = "identity.json"

_GARBAGE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Sealed:
    """The JSON side of a checkpoint."""

    state: State
    optimizer: dict[str, Any]
    """The optimizer's other values."""
    identity: dict[str, Any]
    """`spec` of the run, and what it was `made_by`."""


def read_sealed(path: Path) -> Sealed:
    """State and identity of a checkpoint; its bytes are not compared with the manifest.

    Raises:
        DamagedError: they are not such, or of another format.
    """
    document = read_json(path / STATE)
    found = document.get("format", 1)
    if found != FORMAT:
        raise DamagedError(f"{path / STATE}: format {found}, this version goes on from format {FORMAT} only")
    identity = read_json(path / IDENTITY)
    try:
        state, rest = _state(document["state"]), document["optimizer"]
        if not isinstance(rest["groups"], list) or not isinstance(rest["values"], dict):
            raise TypeError("optimizer")
        for key in ("spec", "made_by"):
            if not isinstance(identity[key], dict):
                raise TypeError(key)
    except _GARBAGE as error:
        raise DamagedError(f"{path}: its state is unreadable ({type(error).__name__}: {error})") from None
    if path.name.startswith("step-") and path.name != f"step-{state.step:08d}":
        raise DamagedError(f"{path}: is of step {state.step}")
    return Sealed(state, rest, identity)


def read_json(path: Path) -> dict[str, Any]:
    """An object of JSON, without NaN. Raises DamagedError for anything else, and for a file that cannot be read."""
    try:
        value = json.loads(path.read_bytes(), parse_constant=_no_number)
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise DamagedError(f"{path}: not an object of JSON")
    return value


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON")


def _state(raw: dict[str, Any]) -> State:
    state = State.from_json(raw)
    for found, model in ((state, State()), (state.budget, State().budget), (state.validation_budget, State().budget)):
        for entry in fields(model):
            value, example = getattr(found, entry.name), getattr(model, entry.name)
            allowed = {type(example)} | ({int} if example is None or type(example) is float else set())
            if type(value) not in allowed:
                raise TypeError(f"{entry.name} is {value!r}")
    return state

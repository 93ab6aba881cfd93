"""Memory stays constant during a long training: the process keeps no data of a completed step."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from ratchet.models.memory import capacity
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import Journal, JournalEvent
from ratchet.training.trainer import TrainingLoop
from small_loop import ROWS, SHAPE, SMALL, loop_of

EVERY_STEPS = 100
"""Number of steps between two checkpoints and between two validations."""
TENSORS = 4
"""Allowed difference in the number of tensors between two steps."""
OBJECTS = 400
"""Allowed difference in the number of objects that Python's garbage collector tracks: far below one per step, but more
than validations leave behind."""
RESIDENT_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Held:
    """Objects and memory that the process holds between two steps."""

    tensors: int
    objects: int
    resident_bytes: int

    @classmethod
    def now(cls) -> "Held":
        gc.collect()
        found = gc.get_objects()
        # The check uses the type, because reading an object's class may load the object of a lazy proxy.
        return cls(sum(issubclass(type(one), torch.Tensor) for one in found), len(found), capacity.resident_bytes())

    def leaked(self, later: "Held") -> list[str]:
        """Return the counts that grew by more than the allowed difference."""
        allowed = Held(TENSORS, OBJECTS, RESIDENT_BYTES)
        more = {name: getattr(later, name) - getattr(self, name) for name in vars(allowed)}
        return [f"{count} {name}" for name, count in more.items() if count > getattr(allowed, name)]


class Watched(Journal):
    """A journal that calls a function for each step event, in the training thread."""

    def __init__(self, path: Path, look: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(path, 1)
        self._look = look

    def append(self, kind: str, **data: Any) -> JournalEvent:
        event = super().append(kind, **data)
        if kind == "step":
            self._look(data)
        return event


def held_at(
    root: Path, steps: tuple[int, int], each_step: Callable[[dict[str, Any]], None] = lambda _: None
) -> list[Held]:
    """Train beyond the later step and return the objects held at both steps. Neither step is near a checkpoint, because
    a checkpoint is a copy in memory."""
    found = []

    def look(step: dict[str, Any]) -> None:
        each_step(step)
        if step["step"] in steps:
            found.append(Held.now())

    rows = 4  # one micro-batch
    changes = {"batch_size": rows, "epochs": (steps[1] + 1) * rows / ROWS, "validate_every_steps": EVERY_STEPS}
    thin = transformers.LlamaConfig(**SHAPE | {"num_hidden_layers": 1})
    task = loop_of(root, SMALL.model_copy(update=changes), micro=rows, config=thin).context
    machine = task.machine.model_copy(update={"checkpoint_every": EVERY_STEPS})
    journal = Watched(RunPaths(root).journal, look)
    loop = TrainingLoop(replace(task, machine=machine, journal=journal))
    assert loop.run().step == steps[1] + 1
    return found

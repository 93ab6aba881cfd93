"""What every kind of run has: a spec whose digest is its id, and a start that says how and where its worker runs.

A training is one kind (directory.py: RunSpec and Launch), a generation another (generating/spec.py). Supervisor,
journal, lock and recovery know no more of a run than stands here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from ratchet.config import train as config_train
from ratchet.config.schema import Machine
from ratchet.storage import digests
from ratchet.storage.records.base import Record


class Spec(Record):
    """Everything that decides what comes of a run."""

    folders: ClassVar[tuple[str, ...]] = ("checkpoints",)
    """Made in the run directory before any worker starts."""

    @property
    def run_id(self) -> str:
        """Identity by content: same inputs, same run, whoever starts it."""
        return id_of(self.model_dump(mode="json"))


def counted(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What of a spec, as JSON, decides: of a training without a teacher nothing that is said of teachers."""
    found, train = dict(spec), spec.get("train")
    if isinstance(train, dict):
        found["train"] = config_train.counted(train)
    if found.get("teaching") is None:
        found.pop("teaching", None)
    return found


def id_of(spec: Mapping[str, Any]) -> str:
    """The id of the run of a spec, given as JSON, also of one that a newer version may have written."""
    return digests.of_json(counted(spec))[: digests.SHORT]


class Start(Record):
    """How and where this attempt runs; rewritten at every start, so that a project may move between attempts."""

    worker: ClassVar[str | None] = None
    """Module that is started as the worker; None: that of a training (run/attempt.py)."""

    machine: Machine

    @property
    def retries(self) -> int | None:
        """Attempts after one that died without progress; None: none, whatever the settings say."""
        return self.machine.retries

    counted_in: ClassVar[Mapping[str, str]] = {}
    """`unit` of the run's work, where that is not steps; stands in its journal's `stopped`."""

    def kept_step(self, root: Path, told: int) -> int:
        """How much of the work in a run directory is safe, where the journal has told of so much."""
        return told

    def kept(self, step: int) -> str:
        """What of the run's work is safe after `step` of it, in words."""
        return f"a checkpoint of step {step} is sealed" if step else "it was before any checkpoint"

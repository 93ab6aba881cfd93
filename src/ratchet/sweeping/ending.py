"""What came of a trial's run, read from its directory: curve, cost, figures, and why it ended without a result."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ratchet import digest
from ratchet.config_sweep import Aim
from ratchet.files import MANIFEST
from ratchet.records import TrainReport
from ratchet.records_sweep import Cost
from ratchet.run.directory import RunPaths
from ratchet.run.journal import Event, Reader
from ratchet.run.recovery import FailureClass
from ratchet.run.status import Progress

INFEASIBLE: dict[FailureClass, str] = {"too_large": "memory", "out_of_memory": "memory", "diverged": "diverged"}
"""Ends that say something about the values: which constraint they violate. All other failures say nothing of them."""

UNKNOWN = 1.0
"""By how much a constraint is violated, where that is not known."""


@dataclass
class Ending:
    """A fold over the journal of one run."""

    progress: Progress = field(default_factory=Progress)
    trainable_parameters: int = 0
    cause: FailureClass | None = None
    text: str = ""
    violation: float = UNKNOWN

    def see(self, event: Event) -> None:
        """Fold one event in; of failures the last counts."""
        self.progress.see(event)
        if event.kind == "attempt":
            self.cause, self.text, self.violation = None, "", UNKNOWN
        elif event.kind in ("failure", "died"):
            self._fail(event.data)
        elif event.kind == "ready":
            self.trainable_parameters = int(event.data.get("trainable_parameters", 0))

    def _fail(self, data: dict[str, Any]) -> None:
        self.cause = data.get("class", "bug")
        self.text = str(data.get("text", ""))
        needed, available = data.get("needed_bytes"), data.get("available_bytes")
        if isinstance(needed, int) and isinstance(available, int) and 0 < available < needed:
            self.violation = needed / available - 1

    @property
    def constraints(self) -> dict[str, float]:
        """What these values violate; nothing where the failure is not theirs."""
        name = INFEASIBLE.get(self.cause) if self.cause else None
        return {name: self.violation} if name else {}


def read(paths: RunPaths) -> Ending:
    """Where the run stands."""
    ending = Ending()
    for event in Reader(paths.journal).read():
        ending.see(event)
    return ending


def cost(paths: RunPaths, ending: Ending) -> Cost:
    """What the training came to until now."""
    progress = ending.progress
    done, planned = progress.step, progress.planned_steps
    tokens = progress.trained_tokens
    adapter = paths.result / "adapter"
    weights = sorted(adapter.glob("*.safetensors")) if adapter.is_dir() else []
    return Cost(
        trained_tokens=tokens,
        planned_tokens=round(tokens * planned / done) if done else 0,
        steps=done,
        planned_steps=planned,
        train_seconds=round(progress.train_s, 3),
        memory_bytes=max(progress.memory.peaks.values(), default=0),
        adapter_bytes=sum(path.stat().st_size for path in weights),
        trainable_parameters=ending.trainable_parameters,
        attempts=progress.attempts,
    )


def figure(aim: Aim, report: TrainReport, spent: Cost) -> float | None:
    """The figure of a finished training; None for one that only answers to the validation rows give."""
    if aim.metric == "validation_loss":
        return report.validation_loss[report.kept_step]
    if aim.metric == "trained_tokens":
        return float(report.trained_tokens)
    own = {
        "memory_bytes": spent.memory_bytes,
        "adapter_bytes": spent.adapter_bytes,
        "train_seconds": spent.train_seconds,
    }
    return float(own[aim.metric]) if aim.metric in own else None


def checkpoints(paths: RunPaths) -> dict[int, str]:
    """Digest of the manifest of each checkpoint that is there, by step; those that cannot be read are left out."""
    found = {}
    for step in paths.checkpoint_steps():
        manifest: Path = paths.checkpoint(step) / MANIFEST
        try:
            found[step] = digest.of_bytes(manifest.read_bytes())[: digest.SHORT]
        except OSError:
            continue
    return found

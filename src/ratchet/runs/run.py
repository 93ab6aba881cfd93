"""A training run as users see it: its status, metrics, checkpoints and adapter, read from the run directory."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ratchet.runs import status
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import JournalReader, ReplayFilter
from ratchet.storage.records.training import TrainReport

if TYPE_CHECKING:
    import pandas as pd


class Run:
    """A training run on disk. Each access to a property reads the run directory, so values follow a run in training."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths

    @property
    def id(self) -> str:
        """RunId: digest of everything that affects what the run learns."""
        return self._paths.root.name

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._paths.root

    @property
    def status(self) -> Literal["finished", "training", "stopped"]:
        """`finished`: the result is complete. `training`: a process trains the run. `stopped`: start the run again to
        resume it."""
        if self._paths.is_finished():
            return "finished"
        return "training" if self._paths.lock().is_held() else "stopped"

    @property
    def step(self) -> int:
        """Number of the last optimizer step."""
        return status.read_progress(self._paths).step

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Directories of the checkpoints, by step."""
        return {step: self._paths.checkpoint(step) for step in self._paths.checkpoint_steps()}

    @property
    def adapter_dir(self) -> Path | None:
        """Directory of the trained adapter in peft's format; None until the run is finished."""
        return self._paths.result / "adapter" if self._paths.is_finished() else None

    @property
    def report(self) -> TrainReport | None:
        """Report of the training; None until the run is finished."""
        return TrainReport.load(self._paths.result / "train.json") if self._paths.is_finished() else None

    def metrics(self) -> "pd.DataFrame":
        """Return the metrics of each optimizer step: loss, learning_rate, grad_norm, trained_tokens, validation_loss.

        Losses are in nats per answer token. A missing value, such as the validation loss of most steps, is NaN.
        """
        import pandas as pd

        names = ("loss", "learning_rate", "grad_norm", "trained_tokens")
        rows: dict[int, dict[str, float]] = {}
        replay_filter = ReplayFilter()
        for event in JournalReader(self._paths.journal).read():
            if event.kind not in ("step", "validation") or not replay_filter.is_new(event):
                continue
            row = rows.setdefault(event.data["step"], {})
            if event.kind == "step":
                row |= {name: event.data[name] for name in names}
            else:
                row["validation_loss"] = event.data["loss"]
        frame = pd.DataFrame.from_dict(rows, orient="index", columns=[*names, "validation_loss"]).sort_index()
        return frame.rename_axis("step")

    def __repr__(self) -> str:
        return f"Run({self.id!r}, status={self.status!r}, step={self.step})"

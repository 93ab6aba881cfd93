"""All that is known of one training: its settings, its course, its result; whatever is there of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from ratchet import digest
from ratchet.history import course
from ratchet.history.course import Course
from ratchet.records import Record, TrainReport
from ratchet.records_model import Analysis, MemoryForecast
from ratchet.run.directory import Launch, RunPaths, RunSpec

T = TypeVar("T", bound=Record)


@dataclass(frozen=True)
class Account:
    """One training. What its directory lacks is None."""

    paths: RunPaths
    spec: RunSpec | None
    launch: Launch | None
    """Of the last attempt."""
    report: TrainReport | None
    analysis: Analysis | None
    forecast: MemoryForecast | None
    course: Course
    running: bool

    @property
    def run_id(self) -> str:
        """Of the training."""
        return self.paths.root.name

    @property
    def is_here(self) -> bool:
        """Whether there is a directory of this run."""
        return self.paths.root.is_dir()

    @property
    def state(self) -> str:
        """Where it stands, for people."""
        progress = self.course.progress
        if not self.is_here:
            return "its directory is not here"
        if self.report is not None:
            return "finished" if self.report.steps >= self.report.planned_steps else "finished (stopped early)"
        if self.running:
            return "running"
        if not self.course.lines:
            return "not begun"
        return "stopped on request" if progress.stopped else "not finished"

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """What decides what is learned, by dotted key."""
        if self.spec is None:
            return {}
        found = {f"train.{key}": value for key, value in _flat(self.spec.train.model_dump(mode="json")).items()}
        found |= {"data": self.spec.data_digest[: digest.SHORT], "base": self.spec.base_digest[: digest.SHORT]}
        return found | {"recipe version": self.spec.recipe_version}

    @cached_property
    def manner(self) -> Mapping[str, Any]:
        """How it was carried out, as far as it may round figures otherwise or cost something; no addresses."""
        ready = self.course.ready
        found = {name: ready[key] for key, name in _READY.items() if ready.get(key) is not None}
        if self.launch is not None:
            machine = self.launch.machine
            found |= {
                "base model": self.launch.base.source,
                "rows at once": machine.micro_batch_rows,
                "tokens at once": machine.micro_batch_tokens,
                "checkpoint every": machine.checkpoint_every,
            }
        return found | ({"code": version} if (version := self.course.progress.code_version) else {})

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and lowest validation loss: of the report, else of the journal."""
        if self.report is not None and self.report.best_step in self.report.validation_loss:
            return self.report.best_step, self.report.validation_loss[self.report.best_step]
        return self.course.best

    @property
    def tokens_per_s(self) -> float | None:
        """Input tokens in a second of a step, over all steps."""
        return self.course.input_tokens / self.course.step_s if self.course.step_s else None

    @property
    def peak_bytes(self) -> int | None:
        """The most that any phase was measured to hold."""
        return max(self.course.progress.memory.peaks.values(), default=None)

    @property
    def forecast_bytes(self) -> int | None:
        """What the forecast said of that."""
        return self.forecast.peak.total_bytes if self.forecast else None

    @property
    def trainable_parameters(self) -> int | None:
        """That learn; of the report, else as the last worker said."""
        if self.report is not None:
            return self.report.trainable_parameters
        found = self.course.ready.get("trainable_parameters")
        return found if isinstance(found, int) else None


_READY = {
    "device": "device", "compute_dtype": "computed in", "threads": "threads", "ranks": "ranks", "torch": "torch",
}  # fmt: skip
"""What a worker says of itself, and what it is called."""


def read(paths: RunPaths) -> Account:
    """The account of a run, also of one that is not finished, or not there.

    Raises:
        DamagedError: a file is not as it was written, or of a newer version; it names the file.
    """
    paths.require_known_format()
    return Account(
        paths=paths,
        spec=_load(RunSpec, paths.spec),
        launch=_load(Launch, paths.launch),
        report=_load(TrainReport, paths.result / "train.json"),
        analysis=_load(Analysis, paths.result / "analysis.json"),
        forecast=_load(MemoryForecast, paths.forecast),
        course=course.read(paths.journal),
        running=paths.root.is_dir() and paths.lock().held_elsewhere(),
    )


def _load(kind: type[T], path: Path) -> T | None:
    return kind.load(path) if path.exists() else None


def _flat(node: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return flat

"""Curves of any length in bounded memory: mean, least and greatest of each bucket of steps."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ratchet.reports.journal_columns import Columns, JournalBlock, Numbers, read_blocks
from ratchet.runs.directory import RunPaths, RunSpec, TrainingLaunchSpec
from ratchet.runs.journal import JournalEvent
from ratchet.runs.status import RunProgress
from ratchet.storage import digests
from ratchet.storage.records.base import Record, TrainReport
from ratchet.storage.records.training import AdapterAnalysis, MemoryForecast

MOST = 1024
"""Buckets; when more are needed, each becomes twice as wide."""


@dataclass(frozen=True)
class HistoryCurve:
    """A curve. Of each bucket: the last step, and where it stands on the other axes; and its values."""

    width: int
    """Steps of a bucket; 1: nothing was summarised."""
    step: Numbers
    tokens: Numbers
    """Answer tokens learned from until then."""
    seconds: Numbers
    """Spent in steps and validations until then."""
    mean: Columns
    low: Columns
    high: Columns
    """By name of the value."""

    def __len__(self) -> int:
        return len(self.step)


class BucketedSeries:
    """Buckets of steps, all of one width; `add` puts further steps in. Steps must rise from one call to the next."""

    def __init__(self, names: Sequence[str], most: int = MOST) -> None:
        self._names, self._most, self.width = tuple(names), most, 1
        self._count = np.zeros(most)
        self._ends = {axis: np.zeros(most) for axis in ("step", "tokens", "seconds")}
        self._sums = {name: np.zeros(most) for name in names}
        self._low = {name: np.full(most, np.nan) for name in names}
        self._high = {name: np.full(most, np.nan) for name in names}

    def add(self, axes: Columns, values: Columns) -> None:
        """Put steps in.

        Args:
            axes: step (from 0 on, rising), tokens, seconds of each.
            values: by name, of each step.
        """
        if not len(axes["step"]):
            return
        steps = axes["step"].astype(np.int64)
        while steps[-1] // self.width >= self._most:
            self._widen()
        bucket = steps // self.width
        starts = np.flatnonzero(np.r_[True, bucket[1:] != bucket[:-1]])
        ends = np.r_[starts[1:], len(bucket)]
        place = bucket[starts]
        self._count[place] += ends - starts
        for axis, found in self._ends.items():
            found[place] = axes[axis][ends - 1]
        for name in self._names:
            self._sums[name][place] += np.add.reduceat(values[name], starts)
            for kept, join in ((self._low[name], np.fmin), (self._high[name], np.fmax)):
                kept[place] = join(kept[place], join.reduceat(values[name], starts))

    def _widen(self) -> None:
        """Join each bucket with its neighbour."""
        half = self._most // 2
        self.width *= 2
        second = self._count[1::2] > 0
        for found in self._ends.values():
            found[:half] = np.where(second, found[1::2], found[::2])
        for found in (self._count, *self._sums.values()):
            found[:half] = found[::2] + found[1::2]
        for name in self._names:
            self._low[name][:half] = np.fmin(self._low[name][::2], self._low[name][1::2])
            self._high[name][:half] = np.fmax(self._high[name][::2], self._high[name][1::2])
        for found in (self._count, *self._ends.values(), *self._sums.values()):
            found[half:] = 0.0
        for found in (*self._low.values(), *self._high.values()):
            found[half:] = np.nan

    def line(self, most: int | None = None) -> HistoryCurve:
        """The curve as it is, or of so many buckets at most (two at least)."""
        while most is not None and (self._count > 0).sum() > max(2, most):
            self._widen()
        there = self._count > 0
        mean = {name: found[there] / self._count[there] for name, found in self._sums.items()}
        return HistoryCurve(
            self.width, self._ends["step"][there], self._ends["tokens"][there], self._ends["seconds"][there], mean,
            {name: found[there] for name, found in self._low.items()},
            {name: found[there] for name, found in self._high.items()},
        )  # fmt: skip


def average_curves(lines: Sequence[HistoryCurve], points: int) -> HistoryCurve:
    """Several runs as one: at each of so many steps their mean, and one standard deviation on either side of it.

    It reaches as far as all of them do. Between its points a line is straight.

    Args:
        lines: two at least, none of them empty.
        points: of the result.
    """
    first, last = max(line.step[0] for line in lines), min(line.step[-1] for line in lines)
    grid = np.unique(np.linspace(first, max(first, last), points).round())

    def at(line: HistoryCurve, values: Numbers) -> Numbers:
        found: Numbers = np.interp(grid, line.step, values)
        return found

    axes = {name: np.mean([at(line, getattr(line, name)) for line in lines], axis=0) for name in ("tokens", "seconds")}
    mean, low, high = {}, {}, {}
    for name in lines[0].mean:
        stacked = np.stack([at(line, line.mean[name]) for line in lines])
        mean[name], spread = stacked.mean(axis=0), stacked.std(axis=0, ddof=1)
        low[name], high[name] = mean[name] - spread, mean[name] + spread
    return HistoryCurve(max(line.width for line in lines), grid, axes["tokens"], axes["seconds"], mean, low, high)


def empty_curve(names: Sequence[str]) -> HistoryCurve:
    """A curve without a point."""
    nothing = np.zeros(0)
    values: Mapping[str, Numbers] = dict.fromkeys(names, nothing)
    return HistoryCurve(1, nothing, nothing, nothing, values, values, values)


# How a training went: its curves, what happened to it and what it came to, from one pass over its journal.

MOST_MARKS = 40
"""Of one kind that are kept; all are counted."""

STEP_VALUES = ("loss", "grad_norm", "learning_rate", "input_tokens", "step_s")
VALIDATION_VALUES = ("loss",)

TEXT_SHOWN = 300
"""Characters of what a mark says."""


@dataclass(frozen=True)
class HistoryEvent:
    """Something that happened to a training."""

    step: int
    """After which it happened."""
    kind: str
    """`resumed`, `skipped`, `rolled back`, `repeated`, `spike`, `shrunk`, `grown`, `died`, `stopped` or `alert`."""
    text: str


@dataclass
class RunHistory:
    """What a journal tells; `see` folds one more block in."""

    steps: BucketedSeries = field(default_factory=lambda: BucketedSeries(STEP_VALUES))
    validations: BucketedSeries = field(default_factory=lambda: BucketedSeries(VALIDATION_VALUES))
    progress: RunProgress = field(default_factory=RunProgress)
    """Of everything but steps, validations and checkpoints."""
    ready: Mapping[str, Any] = field(default_factory=dict)
    """What the last worker said of itself."""
    marks: list[HistoryEvent] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Marks by kind, those included that were not kept."""
    lines: int = 0
    damaged: int = 0
    step: int = 0
    """The last one that was done."""
    loss: float | None = None
    """Of that step."""
    trained_tokens: float = 0.0
    input_tokens: float = 0.0
    step_s: float = 0.0
    """Spent in steps, each counted once."""
    seconds: float = 0.0
    """The same, with validations."""
    again: int = 0
    """Steps that were done again after an attempt had ended."""
    validation: tuple[int, float] | None = None
    """Step and loss of the last one."""
    best: tuple[int, float] | None = None
    """Step and loss of the lowest one."""
    checkpoints: int = 0
    blocked_s: float = 0.0
    """For which training stood still while checkpoints were made."""

    def see(self, block: JournalBlock) -> None:
        """Fold some lines in."""
        self.lines += block.lines
        self.damaged += block.damaged
        steps, validations = block.columns["step"], block.columns["validation"]
        before = np.r_[float(self.step), steps["step"]]
        for event, count in block.others:
            self._happened(event, int(before[count]))
        self._steps(steps, validations)
        saved = block.columns["checkpoint"]
        self.checkpoints += len(saved["step"])
        # Format 1 had no block_s: it saved in the training thread.
        waits = np.where(np.isfinite(saved["block_s"]), saved["block_s"], np.nan_to_num(saved["seconds"]))
        self.blocked_s += float(waits.sum())

    def _steps(self, raw: Columns, raw_validations: Columns) -> None:
        new = _find_new_steps(raw["step"], self.step)
        steps = {name: values[new] for name, values in raw.items()}
        self.again += int((~new).sum())
        last = self.validation[0] if self.validation else -1
        checked = _find_new_steps(raw_validations["step"], last)
        validations = {name: values[checked] for name, values in raw_validations.items()}
        trained, inputs, taken = (np.nan_to_num(steps[name]) for name in ("trained_tokens", "input_tokens", "step_s"))
        # A validation's time stands before the step that follows it.
        pauses, spent = np.nan_to_num(validations["seconds"]), np.append(taken, 0.0)
        follows = np.searchsorted(steps["step"], validations["step"], side="right")
        np.add.at(spent, follows, pauses)
        tokens, seconds = self.trained_tokens + np.cumsum(trained), self.seconds + np.cumsum(spent)
        self.steps.add({"step": steps["step"], "tokens": tokens, "seconds": seconds[:-1]}, steps)
        until = np.r_[self.trained_tokens, tokens][follows]
        self.validations.add(
            {
                "step": validations["step"],
                "tokens": until,
                "seconds": seconds[follows] - np.append(taken, 0.0)[follows],
            },
            validations,
        )
        if len(steps["step"]):
            self.step, self.loss = int(steps["step"][-1]), float(steps["loss"][-1])
        self.trained_tokens += float(trained.sum())
        self.input_tokens += float(inputs.sum())
        self.step_s += float(taken.sum())
        self.seconds = float(seconds[-1])
        self._validated(validations["step"], validations["loss"])

    def _validated(self, steps: Numbers, losses: Numbers) -> None:
        if not len(steps):
            return
        self.validation = int(steps[-1]), float(losses[-1])
        lowest = int(np.argmin(losses))
        if self.best is None or losses[lowest] < self.best[1]:
            self.best = int(steps[lowest]), float(losses[lowest])

    def _happened(self, event: JournalEvent, step: int) -> None:
        """An event that is no column; `step` is the last one before it."""
        self.progress.see(event)
        data = event.data
        if event.kind == "ready":
            self.ready = data
            start = data.get("start_step")
            if event.attempt > 1 and isinstance(start, int):
                self._mark(start, "resumed", f"attempt {event.attempt} went on after step {start:,}")
        elif event.kind == "skipped":
            kind = "rolled back" if data.get("action") == "roll_back" else "skipped"
            self._mark(_event_step(data, step), kind, str(data.get("reason", "")))
        elif event.kind == "budget":
            kind = "grown" if data.get("action") == "grow" else "shrunk"
            self._mark(_event_step(data, step), kind, f"micro-batches of phase {data.get('phase', '?')}")
        elif event.kind in ("repeated", "spike"):
            self._mark(_event_step(data, step), event.kind, str(data.get("reason", "")))
        elif event.kind == "died":
            kind = str(data.get("class", "")).replace("_", " ")
            self._mark(step, "died", f"attempt {event.attempt}: {kind}, {data.get('text', '')}")
        elif event.kind in ("stopped", "ended_early", "alert"):
            kind = "alert" if event.kind == "alert" else "stopped"
            self._mark(_event_step(data, step), kind, str(data.get("text", "on request")))

    def _mark(self, step: int, kind: str, text: str) -> None:
        self.counts[kind] += 1
        if self.counts[kind] <= MOST_MARKS:
            self.marks.append(HistoryEvent(step, kind, text[:TEXT_SHOWN]))


def _event_step(data: Mapping[str, Any], otherwise: int) -> int:
    step = data.get("step")
    return step if isinstance(step, int) else otherwise


def _find_new_steps(steps: Numbers, last: float) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """Which of these were not told before: a resumed run does some again, with equal numbers."""
    reached = np.maximum.accumulate(np.r_[float(last), steps])
    found: np.ndarray[Any, np.dtype[np.bool_]] = steps > reached[:-1]
    return found


def read_history(journal: Path) -> RunHistory:
    """The course of a training; a journal that is not there tells of one that has not begun."""
    course = RunHistory()
    for block in read_blocks(journal):
        course.see(block)
    return course


# All that is known of one training: its settings, its course, its result; whatever is there of them.

T = TypeVar("T", bound=Record)


@dataclass(frozen=True)
class RunSummary:
    """One training. What its directory lacks is None."""

    paths: RunPaths
    spec: RunSpec | None
    launch: TrainingLaunchSpec | None
    """Of the last attempt."""
    report: TrainReport | None
    analysis: AdapterAnalysis | None
    forecast: MemoryForecast | None
    course: RunHistory
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
        found = {
            f"train.{key}": value for key, value in _flatten_settings(self.spec.train.model_dump(mode="json")).items()
        }
        found |= {"data": self.spec.data_digest[: digests.SHORT], "base": self.spec.base_digest[: digests.SHORT]}
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


def read_run_summary(paths: RunPaths) -> RunSummary:
    """The account of a run, also of one that is not finished, or not there.

    Raises:
        DamagedFileError: a file is not as it was written, or of a newer version; it names the file.
    """
    paths.require_known_format()
    return RunSummary(
        paths=paths,
        spec=_load_record(RunSpec, paths.spec),
        launch=_load_record(TrainingLaunchSpec, paths.launch),
        report=_load_record(TrainReport, paths.result / "train.json"),
        analysis=_load_record(AdapterAnalysis, paths.result / "analysis.json"),
        forecast=_load_record(MemoryForecast, paths.forecast),
        course=read_history(paths.journal),
        running=paths.root.is_dir() and paths.lock().held_elsewhere(),
    )


def _load_record(kind: type[T], path: Path) -> T | None:
    return kind.load(path) if path.exists() else None


def _flatten_settings(node: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat |= _flatten_settings(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return flat

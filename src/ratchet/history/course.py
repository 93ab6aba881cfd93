"""How a training went: its curves, what happened to it and what it came to, from one pass over its journal."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ratchet.history.columns import Block, Columns, Numbers, blocks
from ratchet.history.series import Series
from ratchet.run.journal import Event
from ratchet.run.status import Progress

MOST_MARKS = 40
"""Of one kind that are kept; all are counted."""

STEP_VALUES = ("loss", "grad_norm", "learning_rate", "input_tokens", "step_s")
VALIDATION_VALUES = ("loss",)

TEXT_SHOWN = 300
"""Characters of what a mark says."""


@dataclass(frozen=True)
class Mark:
    """Something that happened to a training."""

    step: int
    """After which it happened."""
    kind: str
    """`resumed`, `skipped`, `rolled back`, `repeated`, `spike`, `shrunk`, `grown`, `died`, `stopped` or `alert`."""
    text: str


@dataclass
class Course:
    """What a journal tells; `see` folds one more block in."""

    steps: Series = field(default_factory=lambda: Series(STEP_VALUES))
    validations: Series = field(default_factory=lambda: Series(VALIDATION_VALUES))
    progress: Progress = field(default_factory=Progress)
    """Of everything but steps, validations and checkpoints."""
    ready: Mapping[str, Any] = field(default_factory=dict)
    """What the last worker said of itself."""
    marks: list[Mark] = field(default_factory=list)
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

    def see(self, block: Block) -> None:
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
        new = _new(raw["step"], self.step)
        steps = {name: values[new] for name, values in raw.items()}
        self.again += int((~new).sum())
        last = self.validation[0] if self.validation else -1
        checked = _new(raw_validations["step"], last)
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

    def _happened(self, event: Event, step: int) -> None:
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
            self._mark(_step_of(data, step), kind, str(data.get("reason", "")))
        elif event.kind == "budget":
            kind = "grown" if data.get("action") == "grow" else "shrunk"
            self._mark(_step_of(data, step), kind, f"micro-batches of phase {data.get('phase', '?')}")
        elif event.kind in ("repeated", "spike"):
            self._mark(_step_of(data, step), event.kind, str(data.get("reason", "")))
        elif event.kind == "died":
            kind = str(data.get("class", "")).replace("_", " ")
            self._mark(step, "died", f"attempt {event.attempt}: {kind}, {data.get('text', '')}")
        elif event.kind in ("stopped", "ended_early", "alert"):
            kind = "alert" if event.kind == "alert" else "stopped"
            self._mark(_step_of(data, step), kind, str(data.get("text", "on request")))

    def _mark(self, step: int, kind: str, text: str) -> None:
        self.counts[kind] += 1
        if self.counts[kind] <= MOST_MARKS:
            self.marks.append(Mark(step, kind, text[:TEXT_SHOWN]))


def _step_of(data: Mapping[str, Any], otherwise: int) -> int:
    step = data.get("step")
    return step if isinstance(step, int) else otherwise


def _new(steps: Numbers, last: float) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """Which of these were not told before: a resumed run does some again, with equal numbers."""
    reached = np.maximum.accumulate(np.r_[float(last), steps])
    found: np.ndarray[Any, np.dtype[np.bool_]] = steps > reached[:-1]
    return found


def read(journal: Path) -> Course:
    """The course of a training; a journal that is not there tells of one that has not begun."""
    course = Course()
    for block in blocks(journal):
        course.see(block)
    return course

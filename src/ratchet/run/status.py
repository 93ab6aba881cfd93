"""Where a run stands: a fold over its journal. Needs neither torch nor any service."""

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from ratchet.run.directory import RunPaths
from ratchet.run.journal import Event, Reader, Replay

RATE_WINDOW = 50
"""Steps over which the current speed is averaged."""


@dataclass
class Progress:
    """Running summary of a journal; `see` folds one more event in."""

    step: int = 0
    planned_steps: int = 0
    loss: float | None = None
    learning_rate: float | None = None
    validation_loss: float | None = None
    validation_step: int = 0
    best_loss: float | None = None
    best_step: int = 0
    checkpoint_step: int = 0
    checkpoint_t: float | None = None
    attempts: int = 0
    last_t: float = 0.0
    trained_tokens: int = 0
    finished: str | None = None
    stopped: bool = False
    ends: list[str] = field(default_factory=list)
    """Why earlier attempts ended, one line each."""
    notices: list[str] = field(default_factory=list)
    damaged_events: int = 0
    _open_attempt: bool = False
    _step_s: deque[float] = field(default_factory=lambda: deque(maxlen=RATE_WINDOW))
    _tokens: deque[int] = field(default_factory=lambda: deque(maxlen=RATE_WINDOW))
    _replay: Replay = field(default_factory=Replay)

    def see(self, event: Event) -> None:
        """Fold one event in; one that lacks what its kind has is counted as damaged."""
        try:
            self._fold(event)
        except (KeyError, TypeError):
            self.damaged_events += 1

    def _fold(self, event: Event) -> None:
        self.last_t = event.t
        data = event.data
        new = self._replay.new(event)
        if event.kind == "attempt":
            if self.attempts and self._open_attempt:
                self.ends.append(f"attempt {self.attempts}: ended without a word, killed together with its supervisor")
            self._open_attempt = True
            self.attempts, self.stopped, self.finished = event.attempt, False, None
        elif event.kind == "ready":
            self.planned_steps = data["planned_steps"]
            self.step = data["start_step"]
        elif event.kind == "step":
            self.step, self.loss, self.learning_rate = data["step"], data["loss"], data["learning_rate"]
            self._step_s.append(data["step_s"])
            self._tokens.append(data["input_tokens"])
            self.trained_tokens += data["trained_tokens"] if new else 0
        elif event.kind == "validation":
            self.validation_loss, self.validation_step = data["loss"], data["step"]
            if self.best_loss is None or data["improved"]:
                self.best_loss, self.best_step = data["loss"], data["step"]
        elif event.kind == "checkpoint":
            self.checkpoint_step, self.checkpoint_t = data["step"], event.t
        elif event.kind == "died":
            self._open_attempt = False
            self.ends.append(f"attempt {event.attempt}: {data['class']}, {data['text']}")
        elif event.kind == "stopped":
            self.stopped, self._open_attempt = True, False
            self.ends.append(f"attempt {event.attempt}: stopped on request at step {data['step']}")
        elif event.kind == "notice":
            self.notices.append(data["text"])
        elif event.kind == "finished":
            self.finished, self._open_attempt = data["reason"], False

    @property
    def steps_per_s(self) -> float | None:
        """Recent speed, or None before the first step."""
        total = sum(self._step_s)
        return len(self._step_s) / total if total else None

    @property
    def tokens_per_s(self) -> float | None:
        """Recent speed in input tokens a second."""
        total = sum(self._step_s)
        return sum(self._tokens) / total if total else None

    @property
    def remaining_s(self) -> float | None:
        """Estimate of the time left, in seconds, from the recent speed of steps (validation not counted)."""
        rate = self.steps_per_s
        return max(0, self.planned_steps - self.step) / rate if rate and not self.finished else None


def replay(events: Iterable[Event]) -> Progress:
    """Fold a whole journal."""
    progress = Progress()
    for event in events:
        progress.see(event)
    return progress


def of(paths: RunPaths) -> Progress:
    """Where the run in this directory stands."""
    return replay(Reader(paths.journal).read())


def describe(paths: RunPaths) -> str:
    """What `ratchet status` prints: a few lines for people."""
    reader = Reader(paths.journal)
    p = replay(reader.read())
    running = paths.lock().held_elsewhere()
    if p.finished:
        state = f"finished ({p.finished.replace('_', ' ')})"
    elif running:
        state = "running"
    else:
        state = "stopped on request" if p.stopped else "not running"
        state += "; repeat the command that started it (`dvc repro`) and it goes on"
    lines = [f"run {paths.root.name}: {state}", f"  step        {p.step} of {p.planned_steps or '?'}"]
    if p.loss is not None:
        lines.append(f"  loss        {p.loss:.4f} (learning rate {p.learning_rate:.2e})")
    if p.validation_loss is not None:
        lines.append(
            f"  validation  {p.validation_loss:.4f} at step {p.validation_step}; "
            f"best {p.best_loss:.4f} at step {p.best_step}"
        )
    if p.steps_per_s and p.tokens_per_s:
        lines.append(f"  rate        {p.steps_per_s:.2f} steps/s, {p.tokens_per_s:,.0f} tokens/s")
    if running and (left := p.remaining_s) is not None:
        lines.append(f"  time left   about {duration(left)}")
    if p.checkpoint_t is not None:
        age = duration(max(0.0, time.time() - p.checkpoint_t))
        lines.append(f"  checkpoint  step {p.checkpoint_step}, sealed {age} ago")
    lines.append(f"  attempts    {p.attempts}")
    lines += [f"              {end}" for end in p.ends[-5:]]
    lines += [f"  notice      {text}" for text in p.notices[-5:]]
    if damaged := reader.damaged_lines + p.damaged_events:
        lines.append(f"  notice      {damaged} damaged journal line(s) skipped")
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Seconds for people: `42 s`, `3 min 05 s`, `2 h 07 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"

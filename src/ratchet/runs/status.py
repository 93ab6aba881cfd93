"""Which share of the time a run has made progress in: a fold over its journal.

Goodput is the time spent in steps and validations that count, each of them once, over the time since the run began.
What is lost are start-ups, waits for a machine, steps done again, and training that stood still for checkpoints.
"""

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ratchet.config import units
from ratchet.runs import replication_protocol
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import JournalEvent, JournalReader, ReplayFilter
from ratchet.runs.restart_policy import describe_cause


@dataclass
class Goodput:
    """Running account; `see` folds one more event in."""

    began_t: float | None = None
    """Unix time of the first attempt."""
    last_t: float = 0.0
    steps: dict[int, float] = field(default_factory=dict)
    """Seconds of each step that counts: the last time that it was done."""
    validations: dict[int, float] = field(default_factory=dict)
    done_again_s: float = 0.0
    """Spent in steps and validations that had to be done again."""
    _over: bool = False

    def see(self, event: JournalEvent) -> None:
        """Fold one event in; one that lacks what its kind has says nothing."""
        if event.kind == "attempt" and self.began_t is None:
            self.began_t = event.t
        if event.kind in ("attempt", "finished"):
            self._over = event.kind == "finished"
        if not self._over or event.kind == "finished":  # what is told of a finished run takes none of its time
            self.last_t = max(self.last_t, event.t)
        kind = {"step": (self.steps, "step_s"), "validation": (self.validations, "seconds")}.get(event.kind)
        if kind is None:
            return
        counted, key = kind
        step, seconds = event.data.get("step"), event.data.get(key)
        if isinstance(step, int) and isinstance(seconds, int | float):
            self.done_again_s += counted.get(step, 0.0)
            counted[step] = float(seconds)

    @property
    def useful_s(self) -> float:
        """Spent in what counts."""
        return sum(self.steps.values()) + sum(self.validations.values())

    def wall_s(self, now_t: float | None = None) -> float:
        """Since the run began, until its last event, or until `now_t` of a run that goes on."""
        until = self.last_t if now_t is None else now_t
        return max(0.0, until - self.began_t) if self.began_t is not None else 0.0

    def share(self, now_t: float | None = None) -> float | None:
        """Goodput between 0 and 1; None before anything was done."""
        wall = self.wall_s(now_t)
        return min(1.0, self.useful_s / wall) if wall else None


# Memory of a run: what it held at most, and what was foreseen.


@dataclass
class MemoryStatus:
    """What a run holds, and what was foreseen, in bytes."""

    peaks: dict[str, int] = field(default_factory=dict)
    """Measured, by phase."""
    forecast: dict[str, int] = field(default_factory=dict)
    """The same, as forecast."""
    device_bytes: int = 0
    """Of all that the device has."""

    def describe(self) -> str:
        """One line; empty when nothing was measured."""
        if not self.peaks:
            return ""
        phase, peak = max(self.peaks.items(), key=lambda one: one[1])
        size = f"{units.format_bytes(peak)} of {units.format_bytes(self.device_bytes)}"
        text = f"{size} at most, in phase {phase.replace('_', ' ')}"
        if not self.forecast:
            return text
        foreseen = max(self.forecast.values())
        return f"{text}; forecast {units.format_bytes(foreseen)} ({round(100 * (foreseen / peak - 1)):+d} %)"


# Where a run stands: a fold over its journal. Needs neither torch nor any service.

RATE_WINDOW = 50
"""Steps over which the current speed is averaged."""

SHOWN = 5
"""Of ends, alerts and notices, so many of the last ones are shown."""


@dataclass
class CheckpointCosts:
    """What checkpoints have cost."""

    count: int = 0
    block_s: list[float] = field(default_factory=list)
    """How long training stood still for each."""
    bytes_written: int = 0
    bytes_linked: int = 0
    """Of files that an earlier checkpoint has already: not written again."""

    def describe(self, train_s: float) -> str:
        """One line; `train_s` is the time spent in steps and validations, blocks not counted."""
        blocked = sum(self.block_s)
        share = 100 * blocked / (blocked + train_s) if blocked + train_s else 0.0
        return (
            f"{self.count} saved: training blocked p50 {compute_quantile(self.block_s, 0.5) * 1e3:.1f} ms, "
            f"p99 {compute_quantile(self.block_s, 0.99) * 1e3:.1f} ms, {share:.2f} % of the time; "
            f"{format_size(self.bytes_written)} written, {format_size(self.bytes_linked)} linked"
        )


@dataclass
class RunProgress:
    """Running summary of a journal; `see` folds one more event in."""

    step: int = 0
    planned_steps: int = 0
    among: str = ""
    """See `describe_ranks`, of the last attempt."""
    loss: float | None = None
    learning_rate: float | None = None
    validation_loss: float | None = None
    validation_step: int = 0
    best_loss: float | None = None
    best_step: int = 0
    checkpoint_step: int = 0
    checkpoint_t: float | None = None
    mirrored_step: int = 0
    """Of the newest checkpoint, or the result, that is in the mirror."""
    saves: CheckpointCosts = field(default_factory=CheckpointCosts)
    attempts: int = 0
    code_version: str = ""
    last_t: float = 0.0
    trained_tokens: int = 0
    train_s: float = 0.0
    """Spent in steps and validations, those that were done again included."""
    finished: str | None = None
    stopped: bool = False
    refused: str | None = None
    """Why the last start came to no attempt."""
    ends: list[str] = field(default_factory=list)
    """Why earlier attempts ended, one line each."""
    killed_for_memory: bool = False
    """Whether the last attempt that ended did so for want of memory."""
    lost_steps: int = 0
    """Steps that were done again because an attempt ended between two checkpoints."""
    skipped: dict[int, str] = field(default_factory=dict)
    """Steps that were left out, or undone by going back: what was found."""
    repeats: int = 0
    spikes: int = 0
    budgets: dict[str, tuple[int | None, int]] = field(default_factory=dict)
    """By phase: tokens of the largest micro-batch (None: no limit any more), and since which step."""
    memory: MemoryStatus = field(default_factory=MemoryStatus)
    alerts: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    damaged_events: int = 0
    _open_attempt: bool = False
    _reached_step: int = 0
    _step_s: deque[float] = field(default_factory=lambda: deque(maxlen=RATE_WINDOW))
    _tokens: deque[int] = field(default_factory=lambda: deque(maxlen=RATE_WINDOW))
    _replay: ReplayFilter = field(default_factory=ReplayFilter)

    def see(self, event: JournalEvent) -> None:
        """Fold one event in; one that lacks what its kind has is counted as damaged."""
        try:
            if event.kind == "step":  # nearly all of them: a long journal is folded while somebody waits
                self._step(event)
            else:
                self._fold(event)
        except (KeyError, TypeError, ValueError, AttributeError):
            self.damaged_events += 1

    def _step(self, event: JournalEvent) -> None:
        data = event.data
        self.last_t = event.t
        new = self._replay.new(event)
        self.step, self.loss, self.learning_rate = data["step"], data["loss"], data["learning_rate"]
        self._step_s.append(data["step_s"])
        self._tokens.append(data["input_tokens"])
        self.trained_tokens += data["trained_tokens"] if new else 0
        self.train_s += data["step_s"]
        self._reached_step = data["step"]

    def _fold(self, event: JournalEvent) -> None:
        if event.kind == "system":  # the machine is alive, which says nothing of the training
            return
        self.last_t = event.t
        data = event.data
        self._replay.new(event)
        if event.kind in ("skipped", "validation", "repeated", "spike", "budget"):
            self._learn(event)
        elif event.kind == "ready":
            self.planned_steps, self.among = data["planned_steps"], describe_ranks(data)
            self.step = data["start_step"]
            if self._reached_step > self.step:
                self.lost_steps += self._reached_step - self.step
            self._reached_step = self.step
        elif event.kind == "checkpoint":
            self._save(event)
        elif event.kind == "answered":  # of a generation, whose steps are answers that are kept
            self.step = self.checkpoint_step = data["step"]
        elif event.kind == "mirror":
            self.mirrored_step = max(self.mirrored_step, data["step"])
        elif event.kind == "memory":
            self.memory.device_bytes = data["device_bytes"]
            self.memory.peaks[data["phase"]] = max(data["peak_bytes"], self.memory.peaks.get(data["phase"], 0))
        elif event.kind == "forecast":
            self.memory.forecast = {p["phase"]: sum(p["parts"].values()) for p in data["forecast"]["phases"]}
        elif event.kind == "alert":
            self.alerts.append(data["text"])
        elif event.kind in ("notice", "ended_early"):
            self.notices.append(data["text"])
        else:
            self._begin_or_end(event)

    def _begin_or_end(self, event: JournalEvent) -> None:
        data = event.data
        if event.kind == "refused":
            self.refused = str(data["text"])
        elif event.kind == "attempt":
            if self.attempts and self._open_attempt:
                self.ends.append(f"attempt {self.attempts}: ended without a word, killed together with its supervisor")
            self._open_attempt = True
            self.attempts, self.stopped, self.finished, self.refused = event.attempt, False, None, None
            self.code_version = str(data.get("code_version", ""))
        elif event.kind == "died":
            self._open_attempt = False
            self.killed_for_memory = data["class"] == "out_of_memory"
            self.ends.append(f"attempt {event.attempt}: {describe_cause(data['class'], data['text'])}")
        elif event.kind == "stopped":
            self.stopped, self._open_attempt = True, False
            self.ends.append(f"attempt {event.attempt}: {describe_stop(data)}")
            if "unit" in data:  # of a generation, whose every answer is kept
                self.step = self.checkpoint_step = data["step"]
        elif event.kind == "finished":
            self.finished, self._open_attempt = data["reason"], False

    def _learn(self, event: JournalEvent) -> None:
        data = event.data
        step: int = data["step"]
        if event.kind == "skipped":
            back = f", back to the weights of step {data['to_step']}" if data.get("to_step") is not None else ""
            self.skipped[step] = f"{data['reason']}{back}; rows {', '.join(map(str, data['rows'][:8]))}"
            self.step = self._reached_step = step
        elif event.kind == "validation":
            self.validation_loss, self.validation_step = data["loss"], step
            self.train_s += data["seconds"]
            if self.best_loss is None or data["improved"]:
                self.best_loss, self.best_step = data["loss"], step
        elif event.kind == "repeated":
            self.repeats += 1
        elif event.kind == "spike":
            self.spikes += 1
        else:
            self.budgets[data["phase"]] = (data["budget"]["tokens"], step)

    def _save(self, event: JournalEvent) -> None:
        data, saves = event.data, self.saves
        self.checkpoint_step, self.checkpoint_t = data["step"], event.t
        saves.count += 1
        saves.block_s.append(data.get("block_s", data["seconds"]))  # format 1 saved in the training thread
        saves.bytes_written += data.get("bytes_written", data["size_bytes"])
        saves.bytes_linked += data.get("bytes_linked", 0)

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


def replay_events(events: Iterable[JournalEvent]) -> RunProgress:
    """Fold a whole journal."""
    progress = RunProgress()
    for event in events:
        progress.see(event)
    return progress


def read_progress(paths: RunPaths) -> RunProgress:
    """Where the run in this directory stands."""
    return replay_events(JournalReader(paths.journal).read())


def describe_ranks(ready: Mapping[str, Any]) -> str:
    """How many ranks an attempt has, and what they share, by the data of its event `ready`; nothing of one rank."""
    count = ready.get("ranks", 1)
    shares = ", which share the base" if ready.get("shares_base") else ""
    return f", {count} ranks{shares}" if count > 1 else ""


def describe_amount(step: int, counted_in: Mapping[str, Any]) -> str:
    """So much of a run's work: `up to step 35`, or `35 answers` where that is its unit (Start.counted_in)."""
    return f"{step:,} {counted_in['unit']}" if "unit" in counted_in else f"up to step {step}"


def describe_stop(stopped: Mapping[str, Any]) -> str:
    """What the data of an event `stopped` say."""
    place = f"after {describe_amount(stopped['step'], stopped)}" if "unit" in stopped else f"at step {stopped['step']}"
    return f"stopped on request {place}"


def describe_run(paths: RunPaths) -> str:
    """What `ratchet status` prints: a few lines for people. Raises DamagedFileError for a run of a newer version."""
    paths.require_known_format()
    reader = JournalReader(paths.journal)
    p = replay_events(reader.read())
    running = paths.lock().held_elsewhere()
    steps = f"{p.step} of {p.planned_steps or '?'}{p.among}"
    lines = [f"run {paths.root.name}: {describe_state(p, running)}", f"  step        {steps}"]
    lines += _describe_learning(p)
    if running and (left := p.remaining_s) is not None:
        lines.append(f"  time left   about {format_duration(left)}")
    lines += _describe_trouble(p)
    if memory := p.memory.describe():
        lines.append(f"  memory      {memory}")
    if p.checkpoint_t is not None:
        age = format_duration(max(0.0, time.time() - p.checkpoint_t))
        lines.append(f"  checkpoint  step {p.checkpoint_step}, sealed {age} ago")
        lines.append(f"              {p.saves.describe(p.train_s)}")
    if noted := replication_protocol.read_replication_state(paths):
        lines.append(f"  mirror      {noted.describe(p.checkpoint_step)}")
    return "\n".join([*lines, *describe_events(p, reader.damaged_lines)])


def describe_events(p: RunProgress, damaged_lines: int) -> list[str]:
    """Attempts, alerts and notices, the last of each."""
    again = f"; {p.lost_steps} step{'s' * (p.lost_steps != 1)} done again" if p.lost_steps else ""
    lines = [f"  attempts    {p.attempts}{again}"]
    lines += [f"              {end}" for end in p.ends[-SHOWN:]]
    lines += [f"  alert       {text}" for text in p.alerts[-SHOWN:]]
    lines += [f"  notice      {text}" for text in p.notices[-SHOWN:]]
    if damaged := damaged_lines + p.damaged_events:
        lines.append(f"  notice      {damaged} damaged journal line(s) skipped")
    return lines


def describe_state(p: RunProgress, running: bool, command: str = "dvc repro") -> str:
    """What a run is doing, in a line; `command`: what starts it."""
    if p.finished:
        return f"finished ({p.finished.replace('_', ' ')})"
    if running:
        return "running"
    found = "stopped on request" if p.stopped else "not running"
    if p.refused:
        return f"{found}; the last start was refused: {p.refused}"
    return f"{found}; repeat the command that started it (`{command}`) and it goes on"


def _describe_learning(p: RunProgress) -> list[str]:
    lines = []
    if p.loss is not None:
        lines.append(f"  loss        {p.loss:.4f} (learning rate {p.learning_rate:.2e})")
    if p.validation_loss is not None:
        lines.append(
            f"  validation  {p.validation_loss:.4f} at step {p.validation_step}; "
            f"best {p.best_loss:.4f} at step {p.best_step}"
        )
    if p.steps_per_s and p.tokens_per_s:
        lines.append(f"  rate        {p.steps_per_s:.2f} steps/s, {p.tokens_per_s:,.0f} tokens/s")
    return lines


def _describe_trouble(p: RunProgress) -> list[str]:
    """Steps that were not as they should be, and what they led to."""
    lines = []
    if p.skipped:
        step, what = max(p.skipped.items())
        lines.append(f"  skipped     {len(p.skipped)} of the steps; the last is {step}: {what}")
    if p.repeats or p.spikes:
        lines.append(f"  doubtful    {p.repeats} steps computed twice, {p.spikes} with a spike in the gradient norm")
    for phase, (tokens, step) in p.budgets.items():
        limit = "not limited any more" if tokens is None else f"limited to {tokens:,} padded tokens"
        lines.append(f"  shrunk      micro-batch of {phase} {limit}, since step {step}")
    return lines


def compute_quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of the values does not exceed (nearest rank); 0 of none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0


def format_size(count: float) -> str:
    """Bytes for people: `512 B`, `3.4 MB` (powers of 1,000)."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 999.95 and len(units) > 1:
        count /= 1000
        units.pop(0)
    return f"{count:.0f} B" if units[0] == "B" else f"{count:.1f} {units[0]}"


def format_duration(seconds: float) -> str:
    """Seconds for people: `42 s`, `3 min 05 s`, `2 h 07 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"

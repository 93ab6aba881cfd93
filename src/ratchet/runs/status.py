"""Status of a run, folded from its journal: progress, goodput, memory, cost of checkpoints. Imports no torch.

Goodput is the time of the steps and validations that count, each of them once, divided by the time since the run began.
The rest is start-up, waiting for a machine, repeated steps, and training that was blocked by checkpoints.
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
    """Goodput of a run; `update` adds one event."""

    began_t: float | None = None
    """Unix time of the first attempt."""
    last_t: float = 0.0
    steps: dict[int, float] = field(default_factory=dict)
    """Seconds of each step that counts: its last execution."""
    validations: dict[int, float] = field(default_factory=dict)
    repeated_s: float = 0.0
    """Time of steps and validations that had to be repeated."""
    _is_finished: bool = False

    def update(self, event: JournalEvent) -> None:
        """Add one event; an event that lacks a key of its kind is ignored."""
        if event.kind == "attempt_started" and self.began_t is None:
            self.began_t = event.t
        if event.kind in ("attempt_started", "finished"):
            self._is_finished = event.kind == "finished"
        if not self._is_finished or event.kind == "finished":  # later events take none of the run's time
            self.last_t = max(self.last_t, event.t)
        found = {"step": (self.steps, "step_s"), "validation": (self.validations, "seconds")}.get(event.kind)
        if found is None:
            return
        counted, key = found
        step, seconds = event.data.get("step"), event.data.get(key)
        if isinstance(step, int) and isinstance(seconds, int | float):
            self.repeated_s += counted.get(step, 0.0)
            counted[step] = float(seconds)

    @property
    def useful_s(self) -> float:
        """Time of the steps and validations that count."""
        return sum(self.steps.values()) + sum(self.validations.values())

    def wall_s(self, now_t: float | None = None) -> float:
        """Time since the run began, until its last event, or until `now_t` if it is active."""
        until = self.last_t if now_t is None else now_t
        return max(0.0, until - self.began_t) if self.began_t is not None else 0.0

    def share(self, now_t: float | None = None) -> float | None:
        """Goodput between 0 and 1; None before any work is done."""
        wall = self.wall_s(now_t)
        return min(1.0, self.useful_s / wall) if wall else None


@dataclass
class MemoryStatus:
    """Measured and forecast memory of a run, in bytes."""

    peaks: dict[str, int] = field(default_factory=dict)
    """Measured, by phase."""
    forecast: dict[str, int] = field(default_factory=dict)
    """Forecast, by phase."""
    device_bytes: int = 0
    """Memory of the device in all."""

    def describe(self) -> str:
        """One line; empty if nothing was measured."""
        if not self.peaks:
            return ""
        phase, peak = max(self.peaks.items(), key=lambda one: one[1])
        size = f"{units.format_bytes(peak)} of {units.format_bytes(self.device_bytes)}"
        text = f"{size} at most, in phase {phase.replace('_', ' ')}"
        if not self.forecast:
            return text
        forecast = max(self.forecast.values())
        return f"{text}; forecast {units.format_bytes(forecast)} ({round(100 * (forecast / peak - 1)):+d} %)"


RATE_WINDOW = 50
"""Steps over which the current speed is averaged."""

SHOWN = 5
"""How many of the last attempts, alerts and notices are shown."""


@dataclass
class CheckpointCosts:
    """Time and bytes that checkpoints cost."""

    count: int = 0
    blocked_s: list[float] = field(default_factory=list)
    """How long training was blocked by each."""
    bytes_written: int = 0
    bytes_linked: int = 0
    """Size of files that an earlier checkpoint already had: hard-linked instead of written again."""

    def describe(self, train_s: float) -> str:
        """One line; `train_s` is the time of steps and validations, without blocked time."""
        blocked = sum(self.blocked_s)
        share = 100 * blocked / (blocked + train_s) if blocked + train_s else 0.0
        return (
            f"{self.count} saved: training blocked p50 {compute_quantile(self.blocked_s, 0.5) * 1e3:.1f} ms, "
            f"p99 {compute_quantile(self.blocked_s, 0.99) * 1e3:.1f} ms, {share:.2f} % of the time; "
            f"{format_size(self.bytes_written)} written, {format_size(self.bytes_linked)} linked"
        )


@dataclass
class RunProgress:
    """Progress of a run; `update` adds one event of its journal."""

    step: int = 0
    planned_steps: int = 0
    ranks_text: str = ""
    """Ranks of the last attempt as text (`describe_ranks`)."""
    loss: float | None = None
    learning_rate: float | None = None
    validation_loss: float | None = None
    validation_step: int = 0
    best_loss: float | None = None
    best_step: int = 0
    checkpoint_step: int = 0
    checkpoint_t: float | None = None
    replicated_step: int = 0
    """Step of the newest checkpoint, or the result, that is in the replica."""
    checkpoint_costs: CheckpointCosts = field(default_factory=CheckpointCosts)
    attempts: int = 0
    code_version: str = ""
    last_t: float = 0.0
    trained_tokens: int = 0
    train_s: float = 0.0
    """Time of steps and validations, repeated ones included."""
    finished: str | None = None
    stopped: bool = False
    refusal: str | None = None
    """Why the last start was refused."""
    attempt_ends: list[str] = field(default_factory=list)
    """Why earlier attempts ended, one line each."""
    killed_for_memory: bool = False
    """Whether the last attempt that ended ran out of memory."""
    lost_steps: int = 0
    """Steps that were repeated because an attempt ended between two checkpoints."""
    skipped_steps: dict[int, str] = field(default_factory=dict)
    """Steps that were skipped or rolled back, and why."""
    repeats: int = 0
    spikes: int = 0
    budgets: dict[str, tuple[int | None, int]] = field(default_factory=dict)
    """By phase: tokens of the largest micro-batch (None: no longer limited), and the step from which it holds."""
    memory: MemoryStatus = field(default_factory=MemoryStatus)
    alerts: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    damaged_events: int = 0
    _open_attempt: bool = False
    _reached_step: int = 0
    _step_s: deque[float] = field(default_factory=lambda: deque(maxlen=RATE_WINDOW))
    _tokens: deque[int] = field(default_factory=lambda: deque(maxlen=RATE_WINDOW))
    _replay: ReplayFilter = field(default_factory=ReplayFilter)

    def update(self, event: JournalEvent) -> None:
        """Add one event; an event that lacks a key of its kind is counted as damaged."""
        try:
            if event.kind == "step":  # nearly all events of a long journal
                self._step(event)
            else:
                self._fold(event)
        except (KeyError, TypeError, ValueError, AttributeError):
            self.damaged_events += 1

    def _step(self, event: JournalEvent) -> None:
        data = event.data
        self.last_t = event.t
        is_new = self._replay.is_new(event)
        self.step, self.loss, self.learning_rate = data["step"], data["loss"], data["learning_rate"]
        self._step_s.append(data["step_s"])
        self._tokens.append(data["input_tokens"])
        self.trained_tokens += data["trained_tokens"] if is_new else 0
        self.train_s += data["step_s"]
        self._reached_step = data["step"]

    def _fold(self, event: JournalEvent) -> None:
        if event.kind == "system_metrics":  # shows that the machine is alive, not that training progresses
            return
        self.last_t = event.t
        data = event.data
        self._replay.is_new(event)
        if event.kind in ("step_skipped", "validation", "step_repeated", "gradient_spike", "microbatch_budget"):
            self._learn(event)
        elif event.kind == "worker_ready":
            self.planned_steps, self.ranks_text = data["planned_steps"], describe_ranks(data)
            self.step = data["start_step"]
            if self._reached_step > self.step:
                self.lost_steps += self._reached_step - self.step
            self._reached_step = self.step
        elif event.kind == "checkpoint_saved":
            self._save(event)
        elif event.kind == "generation_progress":  # the steps of a generation are saved answers
            self.step = self.checkpoint_step = data["step"]
        elif event.kind == "replicated":
            self.replicated_step = max(self.replicated_step, data["step"])
        elif event.kind == "memory_peak":
            self.memory.device_bytes = data["device_bytes"]
            self.memory.peaks[data["phase"]] = max(data["peak_bytes"], self.memory.peaks.get(data["phase"], 0))
        elif event.kind == "memory_forecast":
            self.memory.forecast = {p["phase"]: sum(p["parts"].values()) for p in data["forecast"]["phases"]}
        elif event.kind == "alert":
            self.alerts.append(data["text"])
        elif event.kind in ("notice", "pruned"):
            self.notices.append(data["text"])
        else:
            self._begin_or_end(event)

    def _begin_or_end(self, event: JournalEvent) -> None:
        data = event.data
        if event.kind == "start_refused":
            self.refusal = str(data["text"])
        elif event.kind == "attempt_started":
            if self.attempts and self._open_attempt:
                self.attempt_ends.append(f"attempt {self.attempts}: killed together with its supervisor")
            self._open_attempt = True
            self.attempts, self.stopped, self.finished, self.refusal = event.attempt, False, None, None
            self.code_version = str(data.get("code_version", ""))
        elif event.kind == "worker_exited":
            self._open_attempt = False
            self.killed_for_memory = data["failure_class"] == "out_of_memory"
            self.attempt_ends.append(f"attempt {event.attempt}: {describe_cause(data['failure_class'], data['text'])}")
        elif event.kind == "interrupted":
            self.stopped, self._open_attempt = True, False
            self.attempt_ends.append(f"attempt {event.attempt}: {describe_stop(data)}")
            if "unit" in data:  # a generation, where every answer is saved
                self.step = self.checkpoint_step = data["step"]
        elif event.kind == "finished":
            self.finished, self._open_attempt = data["reason"], False

    def _learn(self, event: JournalEvent) -> None:
        data = event.data
        step: int = data["step"]
        if event.kind == "step_skipped":
            to_step = data.get("rollback_step")
            back = f", rolled back to the weights of step {to_step}" if to_step is not None else ""
            self.skipped_steps[step] = f"{data['reason']}{back}; rows {', '.join(map(str, data['rows'][:8]))}"
            self.step = self._reached_step = step
        elif event.kind == "validation":
            self.validation_loss, self.validation_step = data["loss"], step
            self.train_s += data["seconds"]
            if self.best_loss is None or data["improved"]:
                self.best_loss, self.best_step = data["loss"], step
        elif event.kind == "step_repeated":
            self.repeats += 1
        elif event.kind == "gradient_spike":
            self.spikes += 1
        else:
            self.budgets[data["phase"]] = (data["budget"]["tokens"], step)

    def _save(self, event: JournalEvent) -> None:
        data, saves = event.data, self.checkpoint_costs
        self.checkpoint_step, self.checkpoint_t = data["step"], event.t
        saves.count += 1
        saves.blocked_s.append(data.get("blocked_s", data["seconds"]))  # format 1 saved in the training thread
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
        """Estimate of the time left, in seconds, from the recent speed of steps; validations are not included."""
        rate = self.steps_per_s
        return max(0, self.planned_steps - self.step) / rate if rate and not self.finished else None


def replay_events(events: Iterable[JournalEvent]) -> RunProgress:
    """Fold a whole journal into a summary."""
    progress = RunProgress()
    for event in events:
        progress.update(event)
    return progress


def read_progress(paths: RunPaths) -> RunProgress:
    """Read the progress of the run in this directory."""
    return replay_events(JournalReader(paths.journal).read())


def describe_ranks(ready: Mapping[str, Any]) -> str:
    """Number of ranks as text, from the data of `worker_ready`; empty for one rank."""
    count = ready.get("ranks", 1)
    shares = ", which share the base" if ready.get("shares_base") else ""
    return f", {count} ranks{shares}" if count > 1 else ""


def describe_amount(step: int, work_unit: Mapping[str, Any]) -> str:
    """An amount of work as text: `up to step 35`, or `35 answers` if that is the unit (LaunchSpec.work_unit)."""
    return f"{step:,} {work_unit['unit']}" if "unit" in work_unit else f"up to step {step}"


def describe_stop(stopped: Mapping[str, Any]) -> str:
    """Describe the data of `interrupted`."""
    place = f"after {describe_amount(stopped['step'], stopped)}" if "unit" in stopped else f"at step {stopped['step']}"
    return f"stopped on request {place}"


def describe_run(paths: RunPaths) -> str:
    """A run in several lines. Raises DamagedFileError for a run of a newer version."""
    paths.require_known_format()
    reader = JournalReader(paths.journal)
    progress = replay_events(reader.read())
    return describe_progress(paths, progress, reader.damaged_lines)


def describe_progress(paths: RunPaths, p: RunProgress, damaged_lines: int) -> str:
    """A run whose journal was read, in several lines."""
    running = paths.lock().is_held()
    steps = f"{p.step} of {p.planned_steps or '?'}{p.ranks_text}"
    lines = [f"run {paths.root.name}: {describe_state(p, running)}", f"  step        {steps}"]
    lines += _describe_learning(p)
    if running and (left := p.remaining_s) is not None:
        lines.append(f"  time left   about {format_duration(left)}")
    lines += _describe_anomalies(p)
    if memory := p.memory.describe():
        lines.append(f"  memory      {memory}")
    if p.checkpoint_t is not None:
        age = format_duration(max(0.0, time.time() - p.checkpoint_t))
        lines.append(f"  checkpoint  step {p.checkpoint_step}, saved {age} ago")
        lines.append(f"              {p.checkpoint_costs.describe(p.train_s)}")
    if noted := replication_protocol.read_replication_state(paths):
        lines.append(f"  replica     {noted.describe(p.checkpoint_step)}")
    return "\n".join([*lines, *describe_events(p, damaged_lines)])


def describe_events(p: RunProgress, damaged_lines: int) -> list[str]:
    """Attempts, alerts and notices, the last ones of each."""
    again = f"; {p.lost_steps} step{'s' * (p.lost_steps != 1)} repeated" if p.lost_steps else ""
    lines = [f"  attempts    {p.attempts}{again}"]
    lines += [f"              {end}" for end in p.attempt_ends[-SHOWN:]]
    lines += [f"  alert       {text}" for text in p.alerts[-SHOWN:]]
    lines += [f"  notice      {text}" for text in p.notices[-SHOWN:]]
    if damaged := damaged_lines + p.damaged_events:
        lines.append(f"  notice      {damaged} damaged journal line(s) skipped")
    return lines


def describe_state(p: RunProgress, running: bool, command: str = "dvc repro") -> str:
    """State of a run in a line; `command` is the command that starts it."""
    if p.finished:
        return f"finished ({p.finished.replace('_', ' ')})"
    if running:
        return "running"
    found = "stopped on request" if p.stopped else "not running"
    if p.refusal:
        return f"{found}; the last start was refused: {p.refusal}"
    return f"{found}; run the same command again (`{command}`) to resume"


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


def _describe_anomalies(p: RunProgress) -> list[str]:
    """Steps that did not run as usual, and the consequences."""
    lines = []
    if p.skipped_steps:
        step, reason = max(p.skipped_steps.items())
        lines.append(f"  skipped     {len(p.skipped_steps)} of the steps; the last is {step}: {reason}")
    if p.repeats or p.spikes:
        lines.append(f"  doubtful    {p.repeats} steps computed twice, {p.spikes} with a spike in the gradient norm")
    for phase, (tokens, step) in p.budgets.items():
        limit = "no longer limited" if tokens is None else f"limited to {tokens:,} padded tokens"
        lines.append(f"  shrunk      micro-batch of {phase} {limit}, since step {step}")
    return lines


def compute_quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed (nearest rank); 0 if there are none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0


def format_size(count: float) -> str:
    """Format bytes: `512 B`, `3.4 MB` (powers of 1,000)."""
    suffixes = ["B", "kB", "MB", "GB", "TB"]
    while count >= 999.95 and len(suffixes) > 1:
        count /= 1000
        suffixes.pop(0)
    return f"{count:.0f} B" if suffixes[0] == "B" else f"{count:.1f} {suffixes[0]}"


def format_duration(seconds: float) -> str:
    """Format seconds: `42 s`, `3 min 05 s`, `2 h 07 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"

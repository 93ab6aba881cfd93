"""Status of a run, folded from its journal: progress, goodput, memory, cost of checkpoints.

Goodput is the time of useful work divided by the time since the run began. Useful work is the last execution of each
step and each validation. The rest of the time is start-up, waits for a machine, repeated steps, and time for which
checkpoints blocked training. This module does not import torch.
"""

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ratchet.config import units
from ratchet.config.units import format_bytes, format_count, format_duration
from ratchet.runs import replication_protocol
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import JournalEvent, JournalReader, ReplayFilter
from ratchet.runs.restart_policy import describe_cause

RATE_WINDOW = 50  # steps over which the current speed is averaged

SHOWN = 5  # latest attempts, alerts and notices


@dataclass
class Goodput:
    """Goodput of a run; `update` adds one event."""

    began_t: float | None = None
    """Unix time of the first attempt."""
    last_t: float = 0.0
    steps: dict[int, float] = field(default_factory=dict)
    validations: dict[int, float] = field(default_factory=dict)
    _is_finished: bool = False

    def update(self, event: JournalEvent) -> None:
        """Add one event; an event that lacks a key of its kind is ignored."""
        if event.kind == "attempt_started" and self.began_t is None:
            self.began_t = event.t
        if event.kind in ("attempt_started", "finished"):
            self._is_finished = event.kind == "finished"
        if not self._is_finished or event.kind == "finished":  # events after the end do not extend the run
            self.last_t = max(self.last_t, event.t)
        target = {"step": (self.steps, "step_s"), "validation": (self.validations, "seconds")}.get(event.kind)
        if target is None:
            return
        durations, key = target
        step, seconds = event.data.get("step"), event.data.get(key)
        if isinstance(step, int) and isinstance(seconds, int | float):
            durations[step] = float(seconds)

    @property
    def useful_s(self) -> float:
        """Duration in seconds of the last executions of all steps and validations."""
        return sum(self.steps.values()) + sum(self.validations.values())

    def wall_s(self, now_t: float | None = None) -> float:
        """Return the time from the start of the run to its last event, or to `now_t` if the run is active."""
        return 0.0 if self.began_t is None else max(0.0, (self.last_t if now_t is None else now_t) - self.began_t)

    def share(self, now_t: float | None = None) -> float | None:
        """Return the goodput, between 0 and 1; None before any work is done."""
        wall = self.wall_s(now_t)
        return min(1.0, self.useful_s / wall) if wall else None


@dataclass
class MemoryStatus:
    """Measured and forecast memory of a run, in bytes."""

    peaks: dict[str, int] = field(default_factory=dict)
    forecast: dict[str, int] = field(default_factory=dict)
    device_bytes: int = 0

    def describe(self) -> str:
        """Describe the memory in one line; empty if nothing was measured."""
        if not self.peaks:
            return ""
        phase, peak = max(self.peaks.items(), key=lambda item: item[1])
        size = f"{units.format_bytes(peak)} of {units.format_bytes(self.device_bytes)}"
        text = f"{size} at most, in phase {phase.replace('_', ' ')}"
        if not self.forecast:
            return text
        forecast = max(self.forecast.values())
        return f"{text}; forecast {units.format_bytes(forecast)} ({round(100 * (forecast / peak - 1)):+d} %)"


@dataclass
class CheckpointCosts:
    """Time and bytes that checkpoints cost."""

    count: int = 0
    blocked_s: list[float] = field(default_factory=list)
    """Seconds for which each checkpoint blocked training."""
    bytes_written: int = 0
    bytes_linked: int = 0
    """Size of unchanged files, which are hard links to files of an earlier checkpoint."""

    def describe(self, train_s: float) -> str:
        """Describe the costs in one line. `train_s` is the time of steps and validations, without blocked time."""
        blocked = sum(self.blocked_s)
        share = 100 * blocked / (blocked + train_s) if blocked + train_s else 0.0
        return (
            f"{self.count} saved: training blocked p50 {compute_quantile(self.blocked_s, 0.5) * 1e3:.1f} ms, "
            f"p99 {compute_quantile(self.blocked_s, 0.99) * 1e3:.1f} ms, {share:.2f} % of the time; "
            f"{format_bytes(self.bytes_written)} written, {format_bytes(self.bytes_linked)} linked"
        )


@dataclass
class RunProgress:
    """Progress of a run; `update` adds one event of its journal."""

    step: int = 0
    planned_steps: int = 0
    ranks_text: str = ""
    loss: float | None = None
    learning_rate: float | None = None
    validation_loss: float | None = None
    validation_step: int = 0
    best_loss: float | None = None
    best_step: int = 0
    checkpoint_step: int = 0
    checkpoint_t: float | None = None
    replicated_step: int = 0
    checkpoint_costs: CheckpointCosts = field(default_factory=CheckpointCosts)
    attempts: int = 0
    code_version: str = ""
    last_t: float = 0.0
    trained_tokens: int = 0
    train_s: float = 0.0
    """Duration in seconds of all steps and validations, repeated executions included."""
    finished: str | None = None
    """Reason for the end of a finished run; None if the run is not finished."""
    stopped: bool = False
    """Whether the last attempt stopped on request."""
    refusal: str | None = None
    """Reason why the last start was refused; None if the last start was not refused."""
    attempt_ends: list[str] = field(default_factory=list)
    """Causes of the ends of earlier attempts, one line each."""
    killed_for_memory: bool = False
    """Whether the last worker that exited ran out of memory, and none has been ready since. The next one then computes
    smaller micro-batches."""
    start_step: int | None = None
    """Step from which the last attempt began to train; None until its worker is ready."""
    lost_steps: int = 0
    skipped_steps: dict[int, str] = field(default_factory=dict)
    """Reason by step, for steps that were skipped or rolled back."""
    repeats: int = 0
    spikes: int = 0
    budgets: dict[str, tuple[int | None, int]] = field(default_factory=dict)
    """Limit by phase: tokens of the largest micro-batch (None: no longer limited), and the first step of the limit."""
    memory: MemoryStatus = field(default_factory=MemoryStatus)
    alerts: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    damaged_events: int = 0
    """Number of events that lack a key of their kind."""
    _open_attempt: bool = False
    _reached_step: int = 0
    _recent: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=RATE_WINDOW))
    """Seconds, input tokens and trained tokens of each recent step of this attempt."""
    _replay: ReplayFilter = field(default_factory=ReplayFilter)

    def update(self, event: JournalEvent) -> None:
        """Add one event; an event that lacks a key of its kind is counted as damaged."""
        try:
            if event.kind == "step":  # most events of a long journal
                data = event.data
                self.last_t = event.t
                is_new = self._replay.is_new(event)
                self.step = int(data["step"])
                self.loss, self.learning_rate = float(data["loss"]), float(data["learning_rate"])
                seconds, tokens = float(data["step_s"]), int(data["trained_tokens"])
                self._recent.append((seconds, int(data["input_tokens"]), tokens))
                self._reached_step = self.step
                self.train_s += seconds
                if is_new:
                    self.trained_tokens += tokens
            else:
                self._fold(event)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            self.damaged_events += 1

    def _fold(self, event: JournalEvent) -> None:
        if event.kind == "system_metrics":  # shows that the machine is alive, not that training progresses
            return
        self.last_t = event.t
        data = event.data
        self._replay.is_new(event)
        if event.kind in ("step_skipped", "validation", "step_repeated", "gradient_spike", "microbatch_budget"):
            self._add_anomaly_or_validation(event)
        elif event.kind == "checkpoint_saved":
            costs = self.checkpoint_costs
            self.checkpoint_step, self.checkpoint_t = int(data["step"]), event.t
            costs.count += 1
            # Journals of format 1 have no blocked_s, because the training thread saved each checkpoint itself.
            costs.blocked_s.append(data.get("blocked_s", data["seconds"]))
            costs.bytes_written += data.get("bytes_written", data["size_bytes"])
            costs.bytes_linked += data.get("bytes_linked", 0)
        elif event.kind == "generation_progress":  # the steps of a generation are saved answers
            self.step = self.checkpoint_step = int(data["step"])
        elif event.kind == "replicated":
            self.replicated_step = max(self.replicated_step, data["step"])
        elif event.kind == "memory_peak":
            self.memory.device_bytes = data["device_bytes"]
            self.memory.peaks[data["phase"]] = max(data["peak_bytes"], self.memory.peaks.get(data["phase"], 0))
        elif event.kind == "memory_forecast":
            phases = data["forecast"]["phases"]
            self.memory.forecast = {phase["phase"]: sum(phase["parts"].values()) for phase in phases}
        elif event.kind == "alert":
            self.alerts.append(str(data["text"]))
        elif event.kind in ("notice", "pruned"):
            self.notices.append(str(data["text"]))
        else:
            self._update_attempt(event)

    def _update_attempt(self, event: JournalEvent) -> None:
        data = event.data
        if event.kind == "start_refused":
            self.refusal = str(data["text"])
        elif event.kind == "attempt_started":
            if self.attempts and self._open_attempt:
                self.attempt_ends.append(f"attempt {self.attempts}: killed together with its supervisor")
            self._open_attempt = True
            self._recent.clear()
            self.attempts, self.stopped, self.finished, self.refusal = event.attempt, False, None, None
            self.start_step = None
            self.code_version = str(data.get("code_version", ""))
        elif event.kind == "worker_ready":
            self.planned_steps, self.ranks_text = int(data["planned_steps"]), describe_ranks(data)
            self.step = int(data["start_step"])
            if self.start_step is None:  # ranks that join later make the attempt's workers start again
                self.start_step = self.step
            self.killed_for_memory = False
            self.lost_steps += max(0, self._reached_step - self.step)
            self._reached_step = self.step
        elif event.kind == "worker_exited":
            self._open_attempt = False
            self.killed_for_memory = data["failure_class"] == "out_of_memory"
            self.attempt_ends.append(f"attempt {event.attempt}: {describe_cause(data['failure_class'], data['text'])}")
        elif event.kind == "interrupted":
            self.stopped, self._open_attempt = True, False
            self.attempt_ends.append(f"attempt {event.attempt}: {describe_stop(data)}")
            if "unit" in data:  # a generation, where every answer is saved
                self.step = self.checkpoint_step = int(data["step"])
        elif event.kind == "finished":
            self.finished, self._open_attempt = data["reason"], False

    def _add_anomaly_or_validation(self, event: JournalEvent) -> None:
        data = event.data
        step = int(data["step"])
        if event.kind == "step_skipped":
            rollback_step = data.get("rollback_step")
            rollback = f", rolled back to the weights of step {rollback_step}" if rollback_step is not None else ""
            self.skipped_steps[step] = f"{data['reason']}{rollback}; rows {', '.join(map(str, data['rows'][:8]))}"
            self.step = self._reached_step = step
        elif event.kind == "validation":
            self.validation_loss, self.validation_step = float(data["loss"]), step
            self.train_s += data["seconds"]
            if self.best_loss is None or data["improved"]:
                self.best_loss, self.best_step = self.validation_loss, step
        elif event.kind == "step_repeated":
            self.repeats += 1
        elif event.kind == "gradient_spike":
            self.spikes += 1
        else:
            self.budgets[data["phase"]] = (data["budget"]["tokens"], step)

    def _per_second(self, counts: Iterable[int]) -> float | None:
        total_s = sum(seconds for seconds, _, _ in self._recent)
        return sum(counts) / total_s if total_s > 0 else None

    @property
    def steps_per_s(self) -> float | None:
        """Recent speed of this attempt in steps/s; None before its first step."""
        return self._per_second(1 for _ in self._recent)

    @property
    def tokens_per_s(self) -> float | None:
        """Recent speed of this attempt in input tokens/s; None before its first step."""
        return self._per_second(tokens for _, tokens, _ in self._recent)

    @property
    def trained_tokens_per_s(self) -> float | None:
        """Recent speed of this attempt in trained tokens/s; None before its first step."""
        return self._per_second(tokens for _, _, tokens in self._recent)

    @property
    def remaining_s(self) -> float | None:
        """Estimated time left in seconds, from the recent speed of steps; validations are not included."""
        rate = self.steps_per_s
        return max(0, self.planned_steps - self.step) / rate if rate and not self.finished else None


def replay_events(events: Iterable[JournalEvent]) -> RunProgress:
    """Fold all events of a journal into the progress of its run."""
    progress = RunProgress()
    for event in events:
        progress.update(event)
    return progress


def read_progress(paths: RunPaths) -> RunProgress:
    """Read the progress of the run in this directory."""
    return replay_events(JournalReader(paths.journal).read())


def describe_ranks(ready: Mapping[str, Any]) -> str:
    """Describe the number of ranks from the data of `worker_ready`; empty for one rank."""
    count = ready.get("ranks", 1)
    shares = ", which share the base" if ready.get("shares_base") else ""
    return f", {count} ranks{shares}" if count > 1 else ""


def describe_amount(step: int, work_unit: Mapping[str, Any]) -> str:
    """Describe an amount of work: `up to step 35`, or `35 answers` if answers are the unit (LaunchSpec.work_unit)."""
    return f"{step:,} {work_unit['unit']}" if "unit" in work_unit else f"up to step {step}"


def describe_stop(stopped: Mapping[str, Any]) -> str:
    """Describe a stop on request, from the data of `interrupted`."""
    when = f"after {describe_amount(stopped['step'], stopped)}" if "unit" in stopped else f"at step {stopped['step']}"
    return f"stopped on request {when}"


def describe_progress(paths: RunPaths, progress: RunProgress, damaged_lines: int) -> str:
    """Describe a run in several lines, from the progress that was read from its journal."""
    running = paths.lock().is_held()
    steps = f"{progress.step} of {progress.planned_steps or '?'}{progress.ranks_text}"
    lines = [f"run {paths.root.name}: {describe_state(progress, running)}", f"  step        {steps}"]
    if progress.loss is not None:
        lines.append(f"  loss        {progress.loss:.4f} (learning rate {progress.learning_rate:.2e})")
    if progress.validation_loss is not None:
        lines.append(
            f"  validation  {progress.validation_loss:.4f} at step {progress.validation_step}; "
            f"best {progress.best_loss:.4f} at step {progress.best_step}"
        )
    if progress.steps_per_s and progress.tokens_per_s:
        lines.append(f"  rate        {progress.steps_per_s:.2f} steps/s, {progress.tokens_per_s:,.0f} tokens/s")
    if running and (remaining_s := progress.remaining_s) is not None:
        lines.append(f"  time left   about {format_duration(remaining_s)}")
    lines += _describe_anomalies(progress)
    if memory := progress.memory.describe():
        lines.append(f"  memory      {memory}")
    if progress.checkpoint_t is not None:
        age = format_duration(max(0.0, time.time() - progress.checkpoint_t))
        lines.append(f"  checkpoint  step {progress.checkpoint_step}, saved {age} ago")
        lines.append(f"              {progress.checkpoint_costs.describe(progress.train_s)}")
    if replica := replication_protocol.read_replication_state(paths):
        lines.append(f"  replica     {replica.describe(progress.checkpoint_step)}")
    return "\n".join([*lines, *describe_events(progress, damaged_lines)])


def describe_events(progress: RunProgress, damaged_lines: int) -> list[str]:
    """Describe the number of attempts, and the latest ends of attempts, alerts and notices."""
    repeated = f"; {format_count(progress.lost_steps, 'step')} repeated" if progress.lost_steps else ""
    lines = [f"  attempts    {progress.attempts}{repeated}"]
    lines += [f"              {end}" for end in progress.attempt_ends[-SHOWN:]]
    lines += [f"  alert       {text}" for text in progress.alerts[-SHOWN:]]
    lines += [f"  notice      {text}" for text in progress.notices[-SHOWN:]]
    if damaged := damaged_lines + progress.damaged_events:
        lines.append(f"  notice      {damaged} damaged journal line(s) skipped")
    return lines


def describe_state(
    progress: RunProgress, running: bool, command: str = "`dvc repro`; `ratchet sweep` for a trial"
) -> str:
    """Describe the state of a run in one line. `command` names the command that starts the run."""
    if progress.finished:
        return f"finished ({progress.finished.replace('_', ' ')})"
    if running:
        return "running"
    state = "stopped on request" if progress.stopped else "not running"
    if progress.refusal:
        return f"{state}; the last start was refused: {progress.refusal}"
    return f"{state}; run the same command again ({command}) to resume"


def _describe_anomalies(progress: RunProgress) -> list[str]:
    """Describe the steps that did not run as usual, and the consequences."""
    lines = []
    if progress.skipped_steps:
        step, reason = max(progress.skipped_steps.items())
        lines.append(f"  skipped     {len(progress.skipped_steps)} of the steps; the last is {step}: {reason}")
    if progress.repeats or progress.spikes:
        lines.append(
            f"  doubtful    {progress.repeats} steps computed twice, "
            f"{progress.spikes} with a spike in the gradient norm"
        )
    for phase, (tokens, step) in progress.budgets.items():
        limit = "no longer limited" if tokens is None else f"limited to {tokens:,} padded tokens"
        lines.append(f"  shrunk      micro-batch of {phase} {limit}, since step {step}")
    return lines


def compute_quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile by nearest rank: the smallest value that at least this share of the values does not exceed; 0
    without values."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0

"""Where the time of a training goes: its first steps, measured part by part, beside the floors of the machine.

Done in a worker like any other, in a run directory that is thrown away: same threads, same environment, same decisions
about memory. Nothing of it is gone on with.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from ratchet import files
from ratchet.errors import InterruptedRunError, StorageError
from ratchet.fields import interval_from
from ratchet.model import recomputation
from ratchet.model.device import pick_dtype
from ratchet.records_profile import PARTS, PROFILE, TRACE, Floors, Operator, Part, PartName, Profile, require_steps
from ratchet.run.directory import RESULT, storage
from ratchet.training import limits, optimizer
from ratchet.training.gradient import Task
from ratchet.training.interval import Interval
from ratchet.training.limits import Asked
from ratchet.training.loop import Loop
from ratchet.training.stopwatch import Lap, Stopwatch
from ratchet.training.utilisation import sheet_flops_s

WARM_SHARE, TRACED_STEPS = 0.1, 3
SNAPSHOTS = 3
"""One alone may meet a machine that does something else."""
SHOWN = 10
"""Operators."""


@dataclass(frozen=True)
class Measured:
    """One optimizer step."""

    lap: Lap
    step: int
    """Its number, from 0."""
    input_tokens: int
    trained_tokens: int
    at_borders: bool
    """Whether the GPU was waited for at every border."""


@dataclass(frozen=True)
class Seldom:
    """What is not done at every step, measured once, in seconds."""

    validation_s: float
    snapshot_s: float
    save_s: float


def take(task: Task, steps: int) -> None:
    """Measure so many steps, or all there are, and seal what was found as the result of the run.

    Raises:
        SettingsError: the training has too few steps.
        InterruptedRunError: asked to stop; nothing is kept.
        DivergedError, CorruptedError, MemoryExhaustedError: see `Learner.step`.
        StorageError: the disk takes nothing.
    """
    require_steps(task.plan.steps)
    watch = Stopwatch(task.device)
    loop = Loop(replace(task, spans=watch))
    try:
        with storage(task.paths.result), files.sealed_directory(task.paths.result, RESULT) as scratch:
            _Profiling(loop, watch, scratch / TRACE).profile(min(steps, task.plan.steps)).save(scratch / PROFILE)
    finally:
        loop.saver.close()


class _Profiling:
    def __init__(self, loop: Loop, watch: Stopwatch, trace: Path) -> None:
        self.loop, self.watch, self.trace = loop, watch, trace
        self.task, self.learner = loop.task, loop.learner
        self.operators: tuple[Operator, ...] = ()

    def profile(self, steps: int) -> Profile:
        task = self.task
        warm, traced = max(1, round(WARM_SHARE * steps)), min(TRACED_STEPS, (steps - 1) // 3)
        counted = steps - warm - traced
        task.monitor.enter("first_step")
        for _ in range(warm):
            self._step()
        task.monitor.enter("steady")
        measured = self._steps(counted // 2)
        task.monitor.close()  # the trace takes memory that no training does
        self._trace(traced)
        measured += self._steps(counted - counted // 2)
        seldom = self._seldom()
        typical = _typical(measured)
        asked = self._ask(typical)
        floors = self._floors(measured, typical, asked)
        return self._summed_up(measured, seldom, asked, floors, (warm, traced))

    # -------------------------------------------------------------------------------------------------- measuring

    def _steps(self, count: int) -> list[Measured]:
        """On a GPU every other one is left alone between its ends: waiting at borders costs time itself."""
        found = []
        for number in range(count):
            self.watch.waits_at_borders = self.task.device.type == "cuda" and number % 2 == 0
            found.append(self._step())
        return found

    def _step(self) -> Measured:
        before = self.learner.state
        self.watch.start()
        self.learner.step()
        lap = self.watch.stop()
        self._require_going_on()
        after = self.learner.state
        return Measured(
            lap, before.step, after.input_tokens - before.input_tokens, after.trained_tokens - before.trained_tokens,
            self.watch.waits_at_borders or self.task.device.type != "cuda",
        )  # fmt: skip

    def _require_going_on(self) -> None:
        if self.task.stop.asked:
            raise InterruptedRunError("profile: stopped on request")

    def _trace(self, steps: int) -> None:
        """Steps under torch's profiler: a trace, and the operators that took most time."""
        is_gpu = self.task.device.type == "cuda"
        self.watch.waits_at_borders, self.watch.marks = False, True
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
        with torch.profiler.profile(activities=kinds, acc_events=True) as profiler:
            for _ in range(steps):
                self._step()
        self.watch.marks = False
        self.task.heartbeat.beat("save")
        profiler.export_chrome_trace(str(self.trace))
        self.operators = _operators(profiler.key_averages(), steps, is_gpu)
        self.task.heartbeat.beat("step")

    def _seldom(self) -> Seldom:
        task, watch = self.task, self.watch
        watch.waits_at_borders = False
        watch.start()
        self.learner.validate()
        validation_s = watch.stop().seconds
        self._require_going_on()
        copies = [self.learner.snapshot() for _ in range(SNAPSHOTS)]
        taken, snapshot_s = copies[-1][0], statistics.median(seconds for _, seconds in copies)
        self.loop.saver.offer(taken, snapshot_s)
        if not self.loop.saver.drain(task.machine.storage_wait_s, lambda: task.heartbeat.beat("save")):
            raise StorageError(f"no checkpoint could be sealed ({self.loop.saver.outage}). Make room, and repeat")
        return Seldom(validation_s, snapshot_s, self.loop.saver.save_s)

    def _ask(self, typical: Measured) -> Asked:
        """Compute a step once more, untimed, and count what it takes. Nothing is learned from it."""
        state = self.learner.state
        with limits.watched(self.task.model) as asked:
            self.learner.gradients.step(typical.step, state.budget, state.loss_scale)
        self._require_going_on()
        self.learner.gradients.drop()
        return asked

    def _floors(self, measured: Sequence[Measured], typical: Measured, asked: Asked) -> Floors:
        task, lap = self.task, typical.lap
        dtype = pick_dtype(task.settings.compute_dtype, task.device)
        name = torch.cuda.get_device_name(task.device) if task.device.type == "cuda" else ""
        states = sum(tensor.nbytes for tensor in optimizer.flatten(self.learner.optimizer)[0].values())
        passes = 3 if recomputation.is_on(task.model) else 2
        shapes = limits.shapes_of(
            task.model, lap.padded_tokens // lap.micro_batches, typical.trained_tokens // lap.micro_batches
        )
        task.heartbeat.beat("load")  # may take as long as what was never done before
        return Floors(
            # Steps are not of one size: what was counted of one is taken for as many tokens as they have on average.
            flops=asked.flops * _mean(measured, lambda one: one.lap.padded_tokens) / lap.padded_tokens,
            shapes_flops_s=limits.product_flops_s(shapes, dtype, task.device),
            square_flops_s=limits.square_flops_s(dtype, task.device),
            sheet_flops_s=sheet_flops_s(name, dtype),
            moved_bytes=limits.moved_bytes(task.model, asked, lap.micro_batches, passes, states),
            bandwidth_bytes_s=limits.bandwidth_bytes_s(task.device),
        )

    # -------------------------------------------------------------------------------------------------- summing up

    def _summed_up(
        self, measured: Sequence[Measured], seldom: Seldom, asked: Asked, floors: Floors, others: tuple[int, int]
    ) -> Profile:
        task = self.task
        apart = [one for one in measured if one.at_borders]
        whole = [one for one in measured if not one.at_borders] or apart
        seconds = [one.lap.seconds for one in whole]
        step_s = statistics.median(seconds)
        quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [step_s] * 3
        steady = task.monitor.found.get("steady") or task.monitor.found["first_step"]
        return Profile(
            run_id=task.spec.run_id,
            device=task.made_by["device"],
            compute_dtype=task.made_by["compute_dtype"],
            threads=torch.get_num_threads(),
            torch=torch.__version__,
            warm_steps=others[0],
            measured_steps=len(measured),
            traced_steps=others[1],
            step_s=step_s,
            quartiles_s=(quartiles[0], quartiles[2]),
            synchronised_step_s=None if whole is apart else statistics.median(one.lap.seconds for one in apart),
            parts=_parts(apart, seldom, self._intervals(seldom, step_s)),
            operators=self.operators,
            micro_batches=_mean(measured, lambda one: one.lap.micro_batches),
            input_tokens=_mean(measured, lambda one: one.input_tokens),
            padded_tokens=_mean(measured, lambda one: one.lap.padded_tokens),
            trained_tokens=_mean(measured, lambda one: one.trained_tokens),
            floors=floors,
            saved_activation_bytes=asked.most_saved_bytes,
            peak_bytes=steady.peak_bytes,
            save_s=seldom.save_s,
            notes=_notes(task),
        )

    def _intervals(self, seldom: Seldom, step_s: float) -> dict[PartName, float]:
        """Steps between two snapshots and two validations; with a validation that improves comes a snapshot, too."""
        task = self.task
        validation = min(task.settings.validate_every_steps, task.plan.steps)
        setting = task.machine.checkpoint_every
        steps = interval_from(setting)
        if not isinstance(steps, int):
            interval = Interval(setting, 0, 0.0)
            interval.taken(0, 0.0, seldom.snapshot_s, seldom.save_s)
            steps = max(1, int((interval.seconds(0.0) or 0.0) / step_s))
        return {"evaluation": validation, "snapshot": min(steps, validation)}


def _typical(measured: Sequence[Measured]) -> Measured:
    """The step whose size is in the middle."""
    return sorted(measured, key=lambda one: (one.lap.padded_tokens, one.step))[len(measured) // 2]


def _mean(measured: Sequence[Measured], what: Callable[[Measured], float]) -> float:
    return statistics.fmean(map(what, measured))


def _parts(measured: Sequence[Measured], seldom: Seldom, every: dict[PartName, float]) -> tuple[Part, ...]:
    each: dict[PartName, float] = {
        name: statistics.median(one.lap.spans.get(name, 0.0) for one in measured) for name in PARTS
    }
    each["snapshot"], each["evaluation"] = seldom.snapshot_s, seldom.validation_s
    each["waiting"] = statistics.median(one.lap.rest_s for one in measured)
    whole = sum(each[name] / every.get(name, 1.0) for name in PARTS)
    return tuple(
        Part(
            name=name,
            each_s=each[name],
            every_steps=every.get(name, 1.0),
            share=each[name] / every.get(name, 1) / whole,
        )
        for name in PARTS
    )


def _operators(averages: Any, steps: int, is_gpu: bool) -> tuple[Operator, ...]:
    """Names that stand for our own spans (`record_function`) are no operators."""

    def self_s(event: Any) -> float:
        return float(event.self_device_time_total if is_gpu else event.self_cpu_time_total) * 1e-6

    events = [event for event in averages if event.key not in PARTS and not event.is_user_annotation]
    whole = sum(map(self_s, events)) or 1.0
    return tuple(
        Operator(name=event.key, calls=event.count / steps, self_s=self_s(event) / steps, share=self_s(event) / whole)
        for event in sorted(events, key=self_s, reverse=True)[:SHOWN]
    )


def _notes(task: Task) -> tuple[str, ...]:
    notes = [
        "Operations are those that were executed: products and attention, counted by torch (every position with every "
        "other, of which causal kernels skip up to half), the adapter's included."
    ]
    if recomputation.is_on(task.model):
        notes.append(
            "Activations are recomputed: the operations have the second forward pass in them, and of what is kept for "
            "the backward pass only the part outside the recomputed blocks is counted."
        )
    return tuple(notes)

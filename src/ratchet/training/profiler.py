"""What this machine can do at best (matrix products, moving bytes), and what a step asks of it."""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn
from torch.profiler import ProfilerActivity
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from ratchet.config.fields import parse_interval
from ratchet.errors import InterruptedRunError, StorageError
from ratchet.models import activation_checkpointing
from ratchet.models.device import Model, pick_dtype
from ratchet.models.memory import capacity, parameters
from ratchet.runs.directory import RESULT, storage_errors
from ratchet.storage import files
from ratchet.storage.records.training import (
    PARTS,
    PROFILE,
    TRACE,
    OperatorTime,
    PartName,
    RooflineLimits,
    StepPart,
    TrainingProfile,
    require_steps,
)
from ratchet.training import optimizer
from ratchet.training.async_checkpoint import CheckpointInterval
from ratchet.training.mfu import datasheet_flops_s, iterate_matrices
from ratchet.training.step_timer import StepTimer, StepTimings
from ratchet.training.train_step import TrainingContext
from ratchet.training.trainer import TrainingLoop

Shape = list[int]

BLOCK_S, BLOCKS = 0.02, 5
"""A rate is the median of so many blocks, each of at least so many seconds."""
COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}
"""What is copied to measure bandwidth: many times the caches. At most an eighth of the memory at hand."""
SQUARE = {"cpu": 1024, "cuda": 8192}


def measure_seconds(work: Callable[[], object], device: torch.device) -> float:
    """How long one call takes when many follow each other, in seconds."""

    def block(calls: int) -> float:
        _synchronize(device)
        begun_s = time.perf_counter()
        for _ in range(calls):
            work()
        _synchronize(device)
        return time.perf_counter() - begun_s

    block(2)  # the first call may compile
    calls = 1
    while (spent_s := block(calls)) < BLOCK_S:
        calls *= 2
    return statistics.median([spent_s, *(block(calls) for _ in range(BLOCKS - 1))]) / calls


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_product_flops_s(shapes: Counter[tuple[int, int, int]], dtype: torch.dtype, device: torch.device) -> float:
    """Operations a second over products [rows, inputs] x [inputs, outputs], as often as each shape comes."""
    flops = spent_s = 0.0
    for (rows, inputs, outputs), count in shapes.items():
        left = torch.randn(rows, inputs, device=device).to(dtype)
        right = torch.randn(outputs, inputs, device=device).to(dtype)
        flops += 2.0 * rows * inputs * outputs * count
        spent_s += count * measure_seconds(partial(torch.mm, left, right.t()), device)
    return flops / spent_s


def measure_square_flops_s(dtype: torch.dtype, device: torch.device) -> float:
    """Operations a second of a large square product: what the machine does at best."""
    side = SQUARE[device.type]
    return measure_product_flops_s(Counter([(side, side, side)]), dtype, device)


def measure_bandwidth_bytes_s(device: torch.device) -> float:
    """Bytes a second of a large copy, read and written counted."""
    size = min(COPY_BYTES[device.type], capacity.measure_device(device).available_bytes // 8)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2.0 * size / measure_seconds(lambda: target.copy_(source), device)


def count_product_shapes(model: Model, rows: int, learned: int) -> Counter[tuple[int, int, int]]:
    """Products of a micro-batch with the frozen matrices, forward and back, those of the adapter left out.

    Args:
        model: with its adapter.
        rows: padded tokens of the micro-batch.
        learned: of them, positions that are learned from; only there the head computes.
    """
    head = model.get_output_embeddings()
    found: Counter[tuple[int, int, int]] = Counter()
    for module, inputs, outputs in iterate_matrices(model):
        m = max(1, learned) if module is head else max(1, rows)
        found[m, inputs, outputs] += 1  # what it gives
        found[m, outputs, inputs] += 1  # the gradient of what it takes; the matrix itself has none
    return found


@dataclass
class StepWorkload:
    """What one computation of a step asks of the machine."""

    flops: int = 0
    saved_bytes: int = 0
    """Of tensors kept for backward passes, all micro-batches together."""
    most_saved_bytes: int = 0
    """At any one time."""
    _held: Counter[int] = field(default_factory=Counter)
    """By address of storages, how often each is kept now."""
    _held_bytes: int = 0

    def keep(self, tensor: Tensor) -> "_SavedTensor":
        """A tensor is kept; those that share their memory count once."""
        return _SavedTensor(self, tensor)


class _SavedTensor:
    """A tensor that waits for the backward pass; forgotten when the graph is."""

    def __init__(self, asked: StepWorkload, tensor: Tensor) -> None:
        self.tensor, self._asked = tensor, asked
        self._storage = tensor.untyped_storage()
        self._place, self._bytes = self._storage.data_ptr(), self._storage.nbytes()
        if not asked._held[self._place]:
            asked.saved_bytes += self._bytes
            asked._held_bytes += self._bytes
            asked.most_saved_bytes = max(asked.most_saved_bytes, asked._held_bytes)
        asked._held[self._place] += 1

    def __del__(self) -> None:
        self._asked._held[self._place] -= 1
        if not self._asked._held[self._place]:
            self._asked._held_bytes -= self._bytes


@contextmanager
def count_workload(model: Model) -> Iterator[StepWorkload]:
    """Count what is computed inside: operations of products and attention, and tensors kept beside the model's own.

    torch counts attention as if every position saw every other; causal kernels skip up to half of that. Of what
    activation checkpointing keeps only the part outside the recomputed blocks is seen.
    """
    asked = StepWorkload()
    own = {tensor.untyped_storage().data_ptr() for tensor in parameters.list_unique_tensors(model)}

    def pack(tensor: Tensor) -> Tensor | _SavedTensor:
        is_own = tensor.untyped_storage().data_ptr() in own
        return tensor if is_own else asked.keep(tensor)

    def unpack(kept: Tensor | _SavedTensor) -> Tensor:
        return kept.tensor if isinstance(kept, _SavedTensor) else kept

    counter = FlopCounterMode(display=False, custom_mapping=_flop_formulas())
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), counter:
        yield asked
    asked.flops = counter.get_total_flops()


def _flop_formulas() -> dict[Any, Any]:
    """Of what torch (2.13) counts as nothing: fused attention on CPUs, and the product with a matrix in 4 bits."""

    def forward(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    def backward(gradient: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
        return int(sdpa_backward_flop_count(gradient, query, key, value))

    def four_bits(left: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
        return 2 * math.prod(left) * out_shape[-1]

    aten = torch.ops.aten
    return {
        torch.ops.bitsandbytes.gemm_4bit: four_bits,
        aten._scaled_dot_product_flash_attention_for_cpu: forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }


def estimate_moved_bytes(
    model: Model, asked: StepWorkload, micro_batches: int, passes: int, states_bytes: int
) -> dict[str, float]:
    """Bytes that a step must move between memory and processor, by what they are.

    Args:
        model: with its adapter.
        asked: of the step.
        micro_batches: of the step.
        passes: over the weights for each of them: forward, backward, and once more where activations are recomputed.
        states_bytes: of the optimizer.
    """
    layers = [module for module, _, _ in iterate_matrices(model)]
    read = {id(module.weight) for module in layers}
    rows = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} - read  # few of them are looked up
    stored = sum(tensor.nbytes for tensor in parameters.list_unique_tensors(model) if id(tensor) not in rows)
    plain = sum(
        m.in_features * m.out_features * (m.compute_dtype or torch.float32).itemsize
        for m in layers if isinstance(m, Linear4bit)
    )  # fmt: skip
    learned = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return {
        "weights as stored, read": float(stored * passes * micro_batches),
        "weights out of 4 bits, written and read": 2.0 * plain * passes * micro_batches,
        "activations kept, written and read": 2.0 * asked.saved_bytes,
        "adapter, its gradient and the optimizer's state, read and written": 2.0 * (2 * learned + states_bytes),
    }


# Where the time of a training goes: its first steps, measured part by part, beside the floors of the machine.
#
# Done in a worker like any other, in a run directory that is thrown away: same threads, same environment, same
# decisions
# about memory. Nothing of it is gone on with.

WARM_SHARE, TRACED_STEPS = 0.1, 3
SNAPSHOTS = 3
"""One alone may meet a machine that does something else."""
SHOWN = 10
"""Operators."""


@dataclass(frozen=True)
class StepMeasurement:
    """One optimizer step."""

    lap: StepTimings
    step: int
    """Its number, from 0."""
    input_tokens: int
    trained_tokens: int
    at_borders: bool
    """Whether the GPU was waited for at every border."""


@dataclass(frozen=True)
class PeriodicCosts:
    """What is not done at every step, measured once, in seconds."""

    validation_s: float
    snapshot_s: float
    save_s: float


def profile_training(task: TrainingContext, steps: int) -> None:
    """Measure so many steps, or all there are, and seal what was found as the result of the run.

    Raises:
        SettingsError: the training has too few steps.
        InterruptedRunError: asked to stop; nothing is kept.
        DivergenceError, NonFiniteStateError, MemoryExhaustedError: see `StepExecutor.step`.
        StorageError: the disk takes nothing.
    """
    require_steps(task.plan.steps)
    watch = StepTimer(task.device)
    loop = TrainingLoop(replace(task, spans=watch))
    try:
        with storage_errors(task.paths.result), files.sealed_directory(task.paths.result, RESULT) as scratch:
            _TrainingProfiler(loop, watch, scratch / TRACE).profile(min(steps, task.plan.steps)).save(scratch / PROFILE)
    finally:
        loop.saver.close()


class _TrainingProfiler:
    def __init__(self, loop: TrainingLoop, watch: StepTimer, trace: Path) -> None:
        self.loop, self.watch, self.trace = loop, watch, trace
        self.task, self.learner = loop.task, loop.learner
        self.operators: tuple[OperatorTime, ...] = ()

    def profile(self, steps: int) -> TrainingProfile:
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
        typical = _select_median_step(measured)
        asked = self._ask(typical)
        floors = self._floors(measured, typical, asked)
        return self._summed_up(measured, seldom, asked, floors, (warm, traced))

    # -------------------------------------------------------------------------------------------------- measuring

    def _steps(self, count: int) -> list[StepMeasurement]:
        """On a GPU every other one is left alone between its ends: waiting at borders costs time itself."""
        found = []
        for number in range(count):
            self.watch.waits_at_borders = self.task.device.type == "cuda" and number % 2 == 0
            found.append(self._step())
        return found

    def _step(self) -> StepMeasurement:
        before = self.learner.state
        self.watch.start()
        self.learner.step()
        lap = self.watch.stop()
        self._require_going_on()
        after = self.learner.state
        return StepMeasurement(
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
        self.operators = _list_operators(profiler.key_averages(), steps, is_gpu)
        self.task.heartbeat.beat("step")

    def _seldom(self) -> PeriodicCosts:
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
        return PeriodicCosts(validation_s, snapshot_s, self.loop.saver.save_s)

    def _ask(self, typical: StepMeasurement) -> StepWorkload:
        """Compute a step once more, untimed, and count what it takes. Nothing is learned from it."""
        state = self.learner.state
        with count_workload(self.task.model) as asked:
            self.learner.gradients.step(typical.step, state.budget, state.loss_scale)
        self._require_going_on()
        self.learner.gradients.drop()
        return asked

    def _floors(
        self, measured: Sequence[StepMeasurement], typical: StepMeasurement, asked: StepWorkload
    ) -> RooflineLimits:
        task, lap = self.task, typical.lap
        dtype = pick_dtype(task.settings.compute_dtype, task.device)
        name = torch.cuda.get_device_name(task.device) if task.device.type == "cuda" else ""
        states = sum(tensor.nbytes for tensor in optimizer.flatten_state(self.learner.optimizer)[0].values())
        passes = 3 if activation_checkpointing.is_enabled(task.model) else 2
        shapes = count_product_shapes(
            task.model, lap.padded_tokens // lap.micro_batches, typical.trained_tokens // lap.micro_batches
        )
        task.heartbeat.beat("load")  # may take as long as what was never done before
        return RooflineLimits(
            # Steps are not of one size: what was counted of one is taken for as many tokens as they have on average.
            flops=asked.flops * _compute_mean(measured, lambda one: one.lap.padded_tokens) / lap.padded_tokens,
            shapes_flops_s=measure_product_flops_s(shapes, dtype, task.device),
            square_flops_s=measure_square_flops_s(dtype, task.device),
            sheet_flops_s=datasheet_flops_s(name, dtype),
            moved_bytes=estimate_moved_bytes(task.model, asked, lap.micro_batches, passes, states),
            bandwidth_bytes_s=measure_bandwidth_bytes_s(task.device),
        )

    # -------------------------------------------------------------------------------------------------- summing up

    def _summed_up(
        self,
        measured: Sequence[StepMeasurement],
        seldom: PeriodicCosts,
        asked: StepWorkload,
        floors: RooflineLimits,
        others: tuple[int, int],
    ) -> TrainingProfile:
        task = self.task
        apart = [one for one in measured if one.at_borders]
        whole = [one for one in measured if not one.at_borders] or apart
        seconds = [one.lap.seconds for one in whole]
        step_s = statistics.median(seconds)
        quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [step_s] * 3
        steady = task.monitor.found.get("steady") or task.monitor.found["first_step"]
        return TrainingProfile(
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
            parts=_build_parts(apart, seldom, self._intervals(seldom, step_s)),
            operators=self.operators,
            micro_batches=_compute_mean(measured, lambda one: one.lap.micro_batches),
            input_tokens=_compute_mean(measured, lambda one: one.input_tokens),
            padded_tokens=_compute_mean(measured, lambda one: one.lap.padded_tokens),
            trained_tokens=_compute_mean(measured, lambda one: one.trained_tokens),
            floors=floors,
            saved_activation_bytes=asked.most_saved_bytes,
            peak_bytes=steady.peak_bytes,
            save_s=seldom.save_s,
            notes=_write_notes(task),
        )

    def _intervals(self, seldom: PeriodicCosts, step_s: float) -> dict[PartName, float]:
        """Steps between two snapshots and two validations; with a validation that improves comes a snapshot, too."""
        task = self.task
        validation = min(task.settings.validate_every_steps, task.plan.steps)
        setting = task.machine.checkpoint_every
        steps = parse_interval(setting)
        if not isinstance(steps, int):
            interval = CheckpointInterval(setting, 0, 0.0)
            interval.taken(0, 0.0, seldom.snapshot_s, seldom.save_s)
            steps = max(1, int((interval.seconds(0.0) or 0.0) / step_s))
        return {"evaluation": validation, "snapshot": min(steps, validation)}


def _select_median_step(measured: Sequence[StepMeasurement]) -> StepMeasurement:
    """The step whose size is in the middle."""
    return sorted(measured, key=lambda one: (one.lap.padded_tokens, one.step))[len(measured) // 2]


def _compute_mean(measured: Sequence[StepMeasurement], what: Callable[[StepMeasurement], float]) -> float:
    return statistics.fmean(map(what, measured))


def _build_parts(
    measured: Sequence[StepMeasurement], seldom: PeriodicCosts, every: dict[PartName, float]
) -> tuple[StepPart, ...]:
    each: dict[PartName, float] = {
        name: statistics.median(one.lap.spans.get(name, 0.0) for one in measured) for name in PARTS
    }
    each["snapshot"], each["evaluation"] = seldom.snapshot_s, seldom.validation_s
    each["waiting"] = statistics.median(one.lap.rest_s for one in measured)
    whole = sum(each[name] / every.get(name, 1.0) for name in PARTS)
    return tuple(
        StepPart(
            name=name,
            each_s=each[name],
            every_steps=every.get(name, 1.0),
            share=each[name] / every.get(name, 1) / whole,
        )
        for name in PARTS
    )


def _list_operators(averages: Any, steps: int, is_gpu: bool) -> tuple[OperatorTime, ...]:
    """Names that stand for our own spans (`record_function`) are no operators."""

    def self_s(event: Any) -> float:
        return float(event.self_device_time_total if is_gpu else event.self_cpu_time_total) * 1e-6

    events = [event for event in averages if event.key not in PARTS and not event.is_user_annotation]
    whole = sum(map(self_s, events)) or 1.0
    return tuple(
        OperatorTime(
            name=event.key, calls=event.count / steps, self_s=self_s(event) / steps, share=self_s(event) / whole
        )
        for event in sorted(events, key=self_s, reverse=True)[:SHOWN]
    )


def _write_notes(task: TrainingContext) -> tuple[str, ...]:
    notes = [
        "Operations are those that were executed: products and attention, counted by torch (every position with every "
        "other, of which causal kernels skip up to half), the adapter's included."
    ]
    if activation_checkpointing.is_enabled(task.model):
        notes.append(
            "Activations are recomputed: the operations have the second forward pass in them, and of what is kept for "
            "the backward pass only the part outside the recomputed blocks is counted."
        )
    return tuple(notes)

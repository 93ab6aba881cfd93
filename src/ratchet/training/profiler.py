"""Profiles a training: measures its first steps part by part, and the limits of the machine for comparison.

The profiler runs in a worker, in a temporary run directory, with the same threads, environment and memory decisions as
a training. No training resumes from this directory.
"""

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
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from ratchet.config.fields import parse_interval
from ratchet.errors import InterruptedRunError, StorageError
from ratchet.models import adapters
from ratchet.models.cpu_kernels.attention import count_operations
from ratchet.models.device import Model, get_gpu_name, pick_dtype
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
from ratchet.training.context import TrainingContext
from ratchet.training.step_timer import StepTimer, StepTimings, datasheet_flops_per_s, iterate_matrices
from ratchet.training.trainer import TrainingLoop

Shape = list[int]

WARM_SHARE, TRACED_STEPS = 0.1, 3
"""Share of the steps that only warm up, and number of steps that run under torch's profiler."""
SNAPSHOTS = 3
"""Number of snapshots. Their median duration counts, because another process may disturb one of them."""
MAX_OPERATORS = 10
BLOCK_S, BLOCKS = 0.02, 5
"""Minimum duration in seconds of a block of calls, and number of blocks. The median of the blocks counts."""
COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}
"""Number of bytes that are copied to measure the bandwidth, by type of device: much more than caches hold. At most an
eighth of the available memory is used."""
SQUARE_SIDE = {"cpu": 1024, "cuda": 8192}
"""Number of rows and of columns of the square matrices whose product shows the practical peak rate, by type of
device."""


# The limits of the machine.


def measure_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that one call takes within a series of calls: the median of BLOCKS blocks of calls."""

    def run_block(calls: int) -> float:
        _synchronize(device)
        started_s = time.perf_counter()
        for _ in range(calls):
            work()
        _synchronize(device)
        return time.perf_counter() - started_s

    run_block(2)  # the first call may compile
    calls = 1
    while (spent_s := run_block(calls)) < BLOCK_S:
        calls *= 2
    return statistics.median([spent_s, *(run_block(calls) for _ in range(BLOCKS - 1))]) / calls


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_product_flops_per_s(
    shapes: Counter[tuple[int, int, int]], dtype: torch.dtype, device: torch.device
) -> float:
    """Return the operations per second over all products [rows, inputs] x [inputs, outputs]; `shapes` has the number of
    products by (rows, inputs, outputs)."""
    flops = spent_s = 0.0
    for (rows, inputs, outputs), count in shapes.items():
        left = torch.randn(rows, inputs, device=device).to(dtype)
        right = torch.randn(outputs, inputs, device=device).to(dtype)
        flops += 2.0 * rows * inputs * outputs * count
        spent_s += count * measure_seconds(partial(torch.mm, left, right.t()), device)
    return flops / spent_s


def count_product_shapes(model: Model, rows: int, trained: int) -> Counter[tuple[int, int, int]]:
    """Count the products of a micro-batch with the frozen matrices, forward and backward, without the adapter.

    `rows` is its padded tokens; the head computes only its `trained` positions.
    """
    head = model.get_output_embeddings()
    shapes: Counter[tuple[int, int, int]] = Counter()
    for module, inputs, outputs in iterate_matrices(model):
        positions = max(1, trained) if module is head else max(1, rows)
        shapes[positions, inputs, outputs] += 1  # the output
        shapes[positions, outputs, inputs] += 1  # the gradient of the input; a frozen matrix itself has no gradient
    return shapes


@dataclass
class StepWorkload:
    """Operations and saved tensors of one computation of a step."""

    flops: int = 0
    saved_bytes: int = 0
    """Bytes of tensors saved for backward passes, over all micro-batches."""
    peak_saved_bytes: int = 0
    """Largest size of the saved tensors at any time."""
    _references: Counter[int] = field(default_factory=Counter)
    """Number of saved tensors that use a storage, by address of the storage."""
    _current_bytes: int = 0

    def save(self, tensor: Tensor) -> "_SavedTensor":
        """Count a saved tensor; tensors with the same storage count once."""
        return _SavedTensor(self, tensor)


class _SavedTensor:
    """A tensor saved for the backward pass; counted until the graph is freed."""

    def __init__(self, workload: StepWorkload, tensor: Tensor) -> None:
        self.tensor, self._workload = tensor, workload
        self._storage = tensor.untyped_storage()
        self._address, self._bytes = self._storage.data_ptr(), self._storage.nbytes()
        if not workload._references[self._address]:
            workload.saved_bytes += self._bytes
            workload._current_bytes += self._bytes
            workload.peak_saved_bytes = max(workload.peak_saved_bytes, workload._current_bytes)
        workload._references[self._address] += 1

    def __del__(self) -> None:
        self._workload._references[self._address] -= 1
        if not self._workload._references[self._address]:
            self._workload._current_bytes -= self._bytes


@contextmanager
def count_workload(model: Model) -> Iterator[StepWorkload]:
    """Count the operations of products and attention in the context, and the tensors saved for the backward pass.

    The model's own tensors do not count as saved. torch counts attention as if every position attended to every other
    position; causal kernels skip up to half of these operations. With activation checkpointing, only tensors outside of
    the recomputed blocks are counted.
    """
    workload = StepWorkload()
    own_storages = {tensor.untyped_storage().data_ptr() for tensor in parameters.list_unique_tensors(model)}

    def pack(tensor: Tensor) -> Tensor | _SavedTensor:
        is_own = tensor.untyped_storage().data_ptr() in own_storages
        return tensor if is_own else workload.save(tensor)

    def unpack(saved: Tensor | _SavedTensor) -> Tensor:
        return saved.tensor if isinstance(saved, _SavedTensor) else saved

    counter = FlopCounterMode(display=False, custom_mapping=_flop_formulas())
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), counter:
        yield workload
    workload.flops = counter.get_total_flops()


def _flop_formulas() -> dict[Any, Any]:
    """Return formulas for operations that torch (2.13) does not count: fused attention on CPUs, 4-bit products, and
    products that are added in place."""

    def attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    def attention_backward(gradient: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
        return int(sdpa_backward_flop_count(gradient, query, key, value))

    def product_4bit(left: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
        return 2 * math.prod(left) * out_shape[-1]

    def added_product(_: Shape, left: Shape, right: Shape, **__: Any) -> int:
        return 2 * math.prod(left) * right[-1]

    def kernel_attention(query: Shape, _key: Shape, _value: Shape, spans: list[int], *_: Any, **__: Any) -> int:
        return count_operations(spans, query[1], query[3], is_backward=False)

    def kernel_attention_backward(_: Shape, saved: list[Shape], spans: list[int], *__: Any, **___: Any) -> int:
        return count_operations(spans, saved[0][1], saved[0][3], is_backward=True)

    aten = torch.ops.aten
    return {
        torch.ops.ratchet.attention: kernel_attention,
        torch.ops.ratchet.attention_backward: kernel_attention_backward,
        torch.ops.bitsandbytes.gemm_4bit: product_4bit,
        aten.addmm_: added_product,
        torch.ops.ratchet.add_product: added_product,
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
    }


def estimate_moved_bytes(
    model: Model, workload: StepWorkload, micro_batches: int, passes: int, states_bytes: int
) -> dict[str, float]:
    """Return the bytes that a step must move between memory and processor, by kind. `passes` over the weights: forward,
    backward, and one more with recomputed activations."""
    layers = [module for module, _, _ in iterate_matrices(model)]
    layer_weights = {id(module.weight) for module in layers}
    embeddings = {
        id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)
    } - layer_weights  # left out: a step reads few of their rows
    stored = sum(tensor.nbytes for tensor in parameters.list_unique_tensors(model) if id(tensor) not in embeddings)
    dequantized = sum(
        m.in_features * m.out_features * (m.compute_dtype or torch.float32).itemsize
        for m in layers if isinstance(m, Linear4bit)
    )  # fmt: skip
    trainable = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return {
        "weights as stored, read": float(stored * passes * micro_batches),
        "dequantised weights, written and read": 2.0 * dequantized * passes * micro_batches,
        "saved activations, written and read": 2.0 * workload.saved_bytes,
        "adapter, gradient and optimizer state, read and written": 2.0 * (2 * trainable + states_bytes),
    }


# The profile of a training.


@dataclass(frozen=True)
class StepMeasurement:
    """One measured optimizer step."""

    timings: StepTimings
    step: int
    input_tokens: int
    trained_tokens: int
    is_synchronized: bool
    """Whether the GPU was synchronised at the edges of all spans, so that the spans are known."""


def profile_training(context: TrainingContext, steps: int) -> None:
    """Measure `steps` steps, or all steps of a shorter training, and seal the profile as the result of the run.

    Raises:
        SettingsError: the training has too few steps.
        InterruptedRunError: a stop was requested; nothing is saved.
        DivergenceError, NonFiniteStateError, MemoryExhaustedError: see `StepExecutor.step`.
        StorageError: the disk is full or failing.
    """
    require_steps(context.batch_plan.steps)
    timer = StepTimer(context.device)
    loop = TrainingLoop(replace(context, spans=timer))
    try:
        with storage_errors(context.paths.result), files.sealed_directory(context.paths.result, RESULT) as scratch:
            profiler = _TrainingProfiler(loop, timer, scratch / TRACE)
            profiler.profile(min(steps, context.batch_plan.steps)).save(scratch / PROFILE)
    finally:
        loop.checkpointer.close()


class _TrainingProfiler:
    """Runs the measurements of a profile in order, in a training that has not begun."""

    def __init__(self, loop: TrainingLoop, timer: StepTimer, trace_path: Path) -> None:
        self.loop, self.timer, self.trace_path = loop, timer, trace_path
        self.context, self.executor = loop.context, loop.executor

    def profile(self, steps: int) -> TrainingProfile:
        context = self.context
        warm, traced = max(1, round(WARM_SHARE * steps)), min(TRACED_STEPS, (steps - 1) // 3)
        counted = steps - warm - traced
        context.memory_monitor.enter("first_step")
        for _ in range(warm):
            self._step()
        context.memory_monitor.enter("steady")
        measured = self._measure_steps(counted // 2)
        context.memory_monitor.close()  # the trace takes memory that training does not
        operators = self._trace(traced)
        measured += self._measure_steps(counted - counted // 2)
        costs_s, save_s = self._measure_periodic_costs()
        # The step of median size is computed again, without timing or applying it, to count its operations.
        typical = sorted(measured, key=lambda step: (step.timings.padded_tokens, step.step))[len(measured) // 2]
        with count_workload(context.model) as workload:
            self.executor.compute_gradients(typical.step + 1)
        self._raise_if_stopped()
        self.executor.optimizer.zero_grad(set_to_none=True)
        limits = self._measure_limits(measured, typical, workload)

        synchronized = [step for step in measured if step.is_synchronized]
        undisturbed = [step for step in measured if not step.is_synchronized] or synchronized
        seconds = [step.timings.seconds for step in undisturbed]
        step_s = statistics.median(seconds)
        quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [step_s] * 3
        synchronised_step_s = statistics.median(step.timings.seconds for step in synchronized)
        peaks = context.memory_monitor.peaks
        return TrainingProfile(
            run_id=context.spec.run_id,
            device=context.environment["device"],
            compute_dtype=context.environment["compute_dtype"],
            threads=torch.get_num_threads(),
            torch=torch.__version__,
            warmup_steps=warm,
            measured_steps=len(measured),
            traced_steps=traced,
            step_s=step_s,
            quartiles_s=(quartiles[0], quartiles[2]),
            synchronised_step_s=None if undisturbed is synchronized else synchronised_step_s,
            parts=_build_parts(synchronized, costs_s, self._compute_intervals(costs_s["snapshot"], save_s, step_s)),
            operators=operators,
            micro_batches=statistics.fmean(step.timings.micro_batches for step in measured),
            input_tokens=statistics.fmean(step.input_tokens for step in measured),
            padded_tokens=statistics.fmean(step.timings.padded_tokens for step in measured),
            trained_tokens=statistics.fmean(step.trained_tokens for step in measured),
            limits=limits,
            saved_activation_bytes=workload.peak_saved_bytes,
            peak_bytes=(peaks.get("steady") or peaks["first_step"]).peak_bytes,
            save_s=save_s,
            notes=_NOTES if adapters.uses_activation_checkpointing(context.model) else _NOTES[:1],
        )

    def _measure_steps(self, count: int) -> list[StepMeasurement]:
        """Measure steps. On a GPU, only every second step is synchronised at its spans, because synchronising costs
        time."""
        measured = []
        for number in range(count):
            self.timer.synchronizes_spans = self.context.device.type == "cuda" and number % 2 == 0
            measured.append(self._step())
        return measured

    def _step(self) -> StepMeasurement:
        state = self.executor.state
        self.timer.start()
        self.executor.step()
        timings = self.timer.stop()
        self._raise_if_stopped()
        new_state = self.executor.state
        return StepMeasurement(
            timings, state.step, new_state.input_tokens - state.input_tokens,
            new_state.trained_tokens - state.trained_tokens,
            self.timer.synchronizes_spans or self.context.device.type != "cuda",
        )  # fmt: skip

    def _raise_if_stopped(self) -> None:
        if self.context.shutdown.is_requested:
            raise InterruptedRunError("profile: stopped on request")

    def _trace(self, steps: int) -> tuple[OperatorTime, ...]:
        """Run steps under torch's profiler, write the trace, and return the operators that took the most time."""
        is_gpu = self.context.device.type == "cuda"
        self.timer.synchronizes_spans, self.timer.marks_spans = False, True
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
        with torch.profiler.profile(activities=kinds, acc_events=True) as profiler:
            for _ in range(steps):
                self._step()
        self.timer.marks_spans = False
        self.context.heartbeat.beat("save")
        profiler.export_chrome_trace(str(self.trace_path))
        self.context.heartbeat.beat("step")
        return list_operators(profiler.key_averages(), steps, is_gpu)

    def _measure_periodic_costs(self) -> tuple[dict[PartName, float], float]:
        """Return the seconds of a validation and of a snapshot, and the seconds of a save."""
        context, timer = self.context, self.timer
        timer.synchronizes_spans = False
        timer.start()
        self.executor.validate()
        validation_s = timer.stop().seconds
        self._raise_if_stopped()
        copies = [self.executor.snapshot() for _ in range(SNAPSHOTS)]
        snapshot, snapshot_s = copies[-1][0], statistics.median(seconds for _, seconds in copies)
        self.loop.checkpointer.submit(snapshot, snapshot_s)
        if not self.loop.checkpointer.drain(context.machine.storage_timeout_s, lambda: context.heartbeat.beat("save")):
            raise StorageError(
                f"no checkpoint could be saved ({self.loop.checkpointer.outage}). Free disk space, then run the same "
                "command again"
            )
        return {"evaluation": validation_s, "snapshot": snapshot_s}, self.loop.checkpointer.save_s

    def _measure_limits(
        self, measured: Sequence[StepMeasurement], typical: StepMeasurement, workload: StepWorkload
    ) -> RooflineLimits:
        context, timings = self.context, typical.timings
        dtype = pick_dtype(context.settings.compute_dtype, context.device)
        name = get_gpu_name(context.device)
        states = sum(tensor.nbytes for tensor in optimizer.flatten_state(self.executor.optimizer)[0].values())
        passes = 3 if adapters.uses_activation_checkpointing(context.model) else 2
        rows, trained = (count // timings.micro_batches for count in (timings.padded_tokens, typical.trained_tokens))
        shapes = count_product_shapes(context.model, rows, trained)
        mean_tokens = statistics.fmean(step.timings.padded_tokens for step in measured)
        side = SQUARE_SIDE[context.device.type]
        size = min(COPY_BYTES[context.device.type], capacity.measure_device(context.device).available_bytes // 8)
        context.heartbeat.beat("load")  # the measurements may take long
        source = torch.ones(size, dtype=torch.uint8, device=context.device)
        target = torch.zeros_like(source)
        copy_s = measure_seconds(lambda: target.copy_(source), context.device)
        return RooflineLimits(
            # Steps differ in size, so the operations of the typical step are scaled to the average number of tokens.
            flops=workload.flops * mean_tokens / timings.padded_tokens,
            model_flops_per_s=measure_product_flops_per_s(shapes, dtype, context.device),
            square_flops_per_s=measure_product_flops_per_s(Counter([(side, side, side)]), dtype, context.device),
            datasheet_flops_per_s=datasheet_flops_per_s(name, dtype),
            moved_bytes=estimate_moved_bytes(context.model, workload, timings.micro_batches, passes, states),
            bandwidth_bytes_per_s=2.0 * size / copy_s,  # bytes that are read and bytes that are written
        )

    def _compute_intervals(self, snapshot_s: float, save_s: float, step_s: float) -> dict[PartName, float]:
        """Return the numbers of steps between two validations and between two snapshots.

        Snapshots count at least as often as validations, because every new best validation loss causes a snapshot.
        """
        context = self.context
        validation = min(context.batch_plan.validation_interval, context.batch_plan.steps)
        setting = context.machine.checkpoint_every
        steps = parse_interval(setting)
        if not isinstance(steps, int):
            interval = CheckpointInterval(setting, 0, 0.0)
            interval.record(0, 0.0, snapshot_s, save_s)
            steps = max(1, int((interval.seconds(0.0) or 0.0) / step_s))
        return {"evaluation": validation, "snapshot": min(steps, validation)}


def _build_parts(
    measured: Sequence[StepMeasurement], costs_s: dict[PartName, float], intervals: dict[PartName, float]
) -> tuple[StepPart, ...]:
    """Return the duration of each part, and its share of the training time."""
    durations_s: dict[PartName, float] = {
        name: statistics.median(step.timings.spans.get(name, 0.0) for step in measured) for name in PARTS
    }
    durations_s |= costs_s
    durations_s["waiting"] = statistics.median(step.timings.rest_s for step in measured)
    per_step_s = {name: durations_s[name] / intervals.get(name, 1.0) for name in PARTS}
    total_s = sum(per_step_s.values())
    return tuple(
        StepPart(
            name=name,
            duration_s=durations_s[name],
            every_steps=intervals.get(name, 1.0),
            share=per_step_s[name] / total_s,
        )
        for name in PARTS
    )


def list_operators(averages: Any, steps: int, is_gpu: bool) -> tuple[OperatorTime, ...]:
    """Return the operators that took the most time: on a GPU, the time of their kernels.

    Spans, which `record_function` adds to the trace, are left out, and so are the kernels' own entries: their time is
    also that of the operators that start them (torch/autograd/profiler_util.py).

    Args:
        averages: `key_averages` of torch's profiler.
        steps: number of profiled steps.
    """

    def self_s(event: Any) -> float:
        return float(event.self_device_time_total if is_gpu else event.self_cpu_time_total) * 1e-6

    operators = (event for event in averages if event.device_type == DeviceType.CPU)
    events = [event for event in operators if event.key not in PARTS and not event.is_user_annotation]
    total = sum(map(self_s, events)) or 1.0
    return tuple(
        OperatorTime(
            name=event.key, calls=event.count / steps, self_s=self_s(event) / steps, share=self_s(event) / total
        )
        for event in sorted(events, key=self_s, reverse=True)[:MAX_OPERATORS]
    )


_NOTES = (
    "Operations are the executed products and attention, including the adapter's, as torch counts them. torch counts "
    "attention of every position to every other; causal kernels skip up to half of it.",
    "Activations are recomputed: the operations include the second forward pass, and only tensors outside the "
    "recomputed blocks are counted as saved activations.",
)
"""Notes of a profile; the second applies if activations are recomputed."""

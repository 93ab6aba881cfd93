"""Forecasts the memory that a training needs, phase by phase, before weights are loaded.

Weights, constants, adapters and optimizer are calculated; the parts that depend on the model's code are measured by
running that code without data (trace.py).

A sharded base splits every matrix of a decoder layer among the ranks and gathers a layer's matrices when it is
computed, forward and backward (FSDP2: training/sharding.py). Embedding, head, final norm, vectors, quantization
constants and trainable parameters stay whole on every rank.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ratchet.config.machine import Machine
from ratchet.config.train import GradientCompressionSettings, Train
from ratchet.config.units import MIB, format_bytes
from ratchet.models import targets, weights
from ratchet.models.device import pick_dtype
from ratchet.models.gradient_compression import GradientReducer
from ratchet.models.memory import capacity, meta_model, parameters, trace
from ratchet.models.memory.meta_model import ExtrapolatedMetaModel
from ratchet.models.memory.parameters import BaseTensorSizes
from ratchet.models.memory.trace import GRANULE_BYTES, AllocationTrace, BatchShape, Device, MallocSimulator
from ratchet.models.model_spec import ModelSpec, find_blocks
from ratchet.models.teacher import OnlineTeacher, derive_teacher_settings
from ratchet.storage.records.training import UNSHARDED, MemoryForecast, Phase, PhaseMemory

GATHERED_LAYERS = 3
"""Number of layers whose gathered matrices need memory at the same time: the current layer, the next layer, and the
flat buffer that receives the next layer."""
GATHERS_PER_MICRO_BATCH = 2
"""Number of gathers of a layer per micro-batch: forward and backward."""

MIN_8BIT_ELEMENTS = 4096
"""Minimum elements of a tensor whose optimizer states bitsandbytes keeps in 8 bits (optimizer.py, min_8bit_size)."""
OPTIMIZER_BLOCK = 256
"""Number of 8-bit states per constant of 4 bytes."""
QUANTIZATION_BYTES_PER_WEIGHT = 20
"""Bytes per weight of a matrix that is quantized on a CPU: 4 as read, 4 as loaded, and 12 for quantization."""
OPERATORS_BYTES = 16 * MIB
"""Bytes of library pages that are first touched when operators run; measured with models of negligible size."""
CUDA_CONTEXT_BYTES = 500 * MIB
"""Bytes of kernels and stacks of a process on a GPU: 300 to 600 MiB, depending on GPU and driver. The value is assumed,
not measured."""
CUBLAS_BYTES = 32 * MIB
"""Bytes of cuBLAS's workspace on Hopper; older GPUs need 8 MiB (torch's notes on CUBLAS_WORKSPACE_CONFIG)."""
DEFAULT_MAX_TOKENS = 131_072
"""Maximum number of tokens of a row that is tried for a model without a stated limit."""
_COLLECTIVES = (dist.all_reduce, dist.all_gather, dist.all_to_all_single)
Parts = dict[str, int]


@dataclass(frozen=True)
class MemoryWorkload:
    """The largest micro-batches of a training."""

    rows: int
    row_tokens: int
    """Tokens of the longest sequence; the other sequences are padded to this length."""
    learned_tokens: int
    """Trained tokens of a row, averaged over the micro-batch; logits are computed for them."""
    packed: bool
    """True if a sequence holds several rows."""
    device: Device
    validation_rows: int = 0
    validation_tokens: int = 1
    validation_learned_tokens: int = 1
    new_tokens: int = 0
    """Number of embedding rows that are trained."""
    ranks: int = 1
    """World size: number of processes that compute a step together, on all machines."""
    local_ranks: int = 1
    """Number of processes that share this memory: on CPUs, the ranks of one machine; 1 if each rank has a GPU."""
    teacher: ModelSpec | None = None
    """Teacher that is also in memory and evaluates every micro-batch (train.distill)."""
    reserved_bytes: int = 0
    """Bytes that are reserved for other trainings of the same process."""
    rows_per_example: int = 1
    """2 if the two answers of a pair are rows, which are computed together."""

    def single_row(self) -> "MemoryWorkload":
        """Return the workload with one row, or one pair of answers, at a time."""
        rows = self.rows_per_example
        return replace(self, rows=rows, validation_rows=min(rows, self.validation_rows))

    def count_step_rows(self, batch_size: int) -> int:
        """Return the largest number of rows that one rank computes in a step (train.batch_size)."""
        return -(-batch_size // self.ranks) * self.rows_per_example

    def on_ranks(self, ranks: int, local_ranks: int, batch_size: int) -> "MemoryWorkload":
        """Return the workload of one rank: its micro-batch is not larger than its part of a step.

        Args:
            local_ranks: ranks that share this machine's memory; 1 if each has a GPU.
        """
        workload = replace(self, ranks=ranks, local_ranks=local_ranks)
        return replace(workload, rows=min(self.rows, workload.count_step_rows(batch_size)))


def forecast(spec: ModelSpec, settings: Train, machine: Machine, work: MemoryWorkload) -> MemoryForecast:
    """Forecast the peak memory of a training process, phase by phase.

    Raises SettingsError if the settings do not fit the model.

    Args:
        machine: activation_checkpointing and shard_base are used; `auto` counts as false.
    """
    return MemoryForecastBuilder(spec, settings, machine, work).forecast()


@dataclass
class MemoryForecastBuilder:
    """Builds forecasts for one model and its settings; expensive models are built once."""

    spec: ModelSpec
    settings: Train
    machine: Machine
    work: MemoryWorkload

    def with_work(self, work: MemoryWorkload) -> "MemoryForecastBuilder":
        """Return a builder for other micro-batches with the same ranks, which reuses the models."""
        copied = copy.copy(self)
        copied.work = work
        return copied

    def __post_init__(self) -> None:
        device, ranks = self.work.device, self.work.ranks
        self.on_gpu = device == "cuda"
        if self.on_gpu and self.settings.compute_dtype == "auto" and not torch.cuda.is_available():
            self.dtype = torch.bfloat16
        else:
            self.dtype = pick_dtype(self.settings.compute_dtype, torch.device(device))
        self.meta_model = self._build_model()
        self.granule_bytes = GRANULE_BYTES[device]
        self.teacher: OnlineTeacher | None = None
        self.teacher_sizes: BaseTensorSizes | None = None
        if (teacher := self.work.teacher) is not None:
            model, self.teacher_sizes = meta_model.build_frozen(
                teacher, derive_teacher_settings(self.settings), self.dtype, device
            )
            directory = teacher.directory or Path()
            self.teacher = OnlineTeacher(model, teacher.embedding_rows, self.settings.distill, directory)
        self.gradients = self._sum_over_trainable(lambda parameter: self._round_up(parameter.nbytes))
        self.adapters = self.gradients
        if self.settings.adapter == "adalora":  # sensitivity, its mean and its deviation for every element
            self.adapters *= 4
        if self.settings.initialization == "pissa":  # the initial matrices are kept
            self.adapters *= 2
        self.optimizer = self._sum_over_trainable(self._state_bytes)
        self.communication = measure_communication_memory(
            self.meta_model.trainable_parameters(), self.settings.gradient_compression, ranks, device
        )
        is_sharded = is_base_sharded(self.machine, ranks)
        self.shard_sizes = compute_shard_sizes(self.meta_model, ranks, self.granule_bytes) if is_sharded else None

    def _build_model(self, whole: bool = False) -> ExtrapolatedMetaModel:
        return meta_model.build(
            self.spec, self.settings, self.dtype, self.work.device, self.work.new_tokens, whole
        )  # fmt: skip

    def _sum_over_trainable(self, size: Callable[[Tensor], int]) -> int:
        return self.meta_model.sum_over_blocks(
            lambda model: sum(size(parameter) for parameter in model.parameters() if parameter.requires_grad)
        )

    def forecast(self) -> MemoryForecast:
        """Compute the forecast."""
        at_rest = self._weight_parts() | {"adapters": self.adapters}
        if self.settings.has_reference:
            at_rest |= {"reference": self.gradients}  # a copy of the trained weights has the size of their gradients
        with_optimizer = at_rest | {"optimizer": self.optimizer, "communication": self.communication.held_bytes}
        with_snapshots = with_optimizer if self.on_gpu else with_optimizer | {"snapshots": self._snapshot_bytes()}
        first, steady, evaluation = self._trace_phases()
        reducing = {"gradients": self.gradients, "communication": self.communication.peak_bytes}
        updating = {"gradients": self.gradients, "temporary": self._update_bytes()}
        copying = {} if self.on_gpu else {"temporary": self._gathering_bytes()}
        at_first_step = at_rest | {"communication": self.communication.buffer_bytes}
        phases: dict[Phase, Parts] = {
            "baseline": {},
            "loaded": self._loaded_parts(),
            "adapters": self._attached_parts(),
            "first_step": _choose_largest(at_first_step | first, at_rest | reducing, with_optimizer | updating),
            "steady": _choose_largest(*(with_snapshots | parts for parts in (steady, reducing, updating, copying))),
            "evaluation": with_snapshots | evaluation,
        }
        phase_memories = []
        resident = capacity.resident_bytes()
        for name, parts in phases.items():
            if self.on_gpu:
                baseline = {"CUDA context": CUDA_CONTEXT_BYTES + CUBLAS_BYTES}
            else:
                baseline = {"libraries": resident + (OPERATORS_BYTES if parts else 0)}
            nonzero = {part: count for part, count in (baseline | parts).items() if count}
            phase_memories.append(PhaseMemory(phase=name, parts=nonzero))
        peak = max(phase.total_bytes for phase in phase_memories)
        return MemoryForecast(
            device=self.work.device,
            ranks=self.work.ranks,
            rows=self.work.rows,
            row_tokens=self.work.row_tokens,
            learned_tokens=self.work.learned_tokens,
            activation_checkpointing=self.machine.activation_checkpointing is True,
            shard_base=self.shard_sizes is not None,
            phases=tuple(phase_memories),
            host_bytes=self._host_bytes() if self.on_gpu else peak,
            trainable_parameters=parameters.count_trainable_parameters(self.spec, self.settings, self.work.new_tokens),
            total_parameters=parameters.count_total_parameters(self.spec, self.settings, self.work.new_tokens),
            notes=self._notes(),
        )

    # Calculated parts.

    def _weight_parts(self) -> Parts:
        """Return the parts of base and teacher during training."""
        sizes = self.meta_model.base_sizes
        rounding = sizes.allocated_bytes(self.granule_bytes) - sizes.total_bytes
        remote = self.shard_sizes.remote_bytes if self.shard_sizes else 0
        return {
            "weights": sizes.quantized_bytes + sizes.plain_bytes + rounding - remote,
            "quantization constants": sizes.constants_bytes,
            **self._teacher_parts(),
        }

    def _teacher_parts(self) -> Parts:
        return {"teacher": self.teacher_sizes.allocated_bytes(self.granule_bytes)} if self.teacher_sizes else {}

    def _loaded_parts(self) -> Parts:
        """Return the parts while the base is loaded, with the tensor being read, or memory freed but not yet trimmed.

        A base that will be sharded is loaded whole into host memory.
        """
        if self.on_gpu:
            if self.shard_sizes:
                return self._teacher_parts()
            return self._weight_parts() | {"reading": self._largest_source_bytes()}
        unsharded = {UNSHARDED: self.shard_sizes.remote_bytes} if self.shard_sizes else {}
        return self._weight_parts() | unsharded | {"reading": self._reading_bytes()}

    def _attached_parts(self) -> Parts:
        """Return the parts after the adapter is attached, while a base to be sharded is split by layer."""
        parts = self._weight_parts() | {"adapters": self.adapters}
        if self.shard_sizes and self.on_gpu:
            return parts | {"gathered layers": self.shard_sizes.layer_bytes}
        return parts | ({UNSHARDED: self.shard_sizes.remote_bytes} if self.shard_sizes else {})

    def _reading_bytes(self) -> int:
        """Return the host memory that loading needs in addition to the base."""
        models = [self.meta_model.models[-1], *([self.teacher.model] if self.teacher else [])]
        matrices = [m for model in models for m in model.modules() if isinstance(m, Linear4bit)]
        largest = max((m.in_features * m.out_features for m in matrices), default=0)
        return max(weights.TRIM_EVERY_BYTES, QUANTIZATION_BYTES_PER_WEIGHT * largest)

    def _largest_source_bytes(self) -> int:
        """Return the size of the largest tensor in the files of base and teacher."""
        return max(sizes.largest_source_bytes for sizes in (self.meta_model.base_sizes, self.teacher_sizes) if sizes)

    def _state_bytes(self, parameter: Tensor) -> int:
        """Return the bytes of two moments: in the parameter's dtype, or with bitsandbytes in 8 bits if large."""
        elements = parameter.numel()
        if self.settings.optimizer == "adamw":
            return 2 * self._round_up(parameter.nbytes)
        if elements < MIN_8BIT_ELEMENTS:
            return 2 * self._round_up(4 * elements)
        return 2 * (self._round_up(elements) + self._round_up(4 * -(-elements // OPTIMIZER_BLOCK)))

    def _update_bytes(self) -> int:
        """Return the bytes of the optimizer's temporary tensors, for one matrix at a time."""
        largest = max((p.nbytes for m in self.meta_model.models for p in m.parameters() if p.requires_grad), default=0)
        is_8bit = self.settings.optimizer != "adamw"
        if self.on_gpu:
            return 0 if is_8bit else 2 * largest
        return (7 if is_8bit else 2) * largest  # on CPUs bitsandbytes computes in float32 with torch tensors

    def _snapshot_bytes(self) -> int:
        """Return the bytes of the copy that is being saved during training, and of the copy for a rollback."""
        copies = 2 if self.settings.guards.uses_roll_back else 1
        return copies * (self.adapters + self.optimizer + self.work.ranks * self.communication.unsent_bytes)

    def _gathering_bytes(self) -> int:
        """Return the bytes for collecting unsent parts: of all ranks as bytes, and of the last rank also as tensors."""
        return (self.work.ranks + 2) * self.communication.unsent_bytes

    def _round_up(self, count: int) -> int:
        return -(-count // self.granule_bytes) * self.granule_bytes

    # Traced parts.

    def _trace_phases(self) -> tuple[Parts, Parts, Parts]:
        """Return the parts of the first step, later steps and validation, without parts that exist all the time."""
        work, checkpointing = self.work, self.machine.activation_checkpointing is True
        models = self.meta_model.models

        def build_batch(rows: int, tokens: int, learned_per_row: int, packed: bool) -> BatchShape:
            return BatchShape(rows, tokens, rows * max(1, min(learned_per_row, tokens - 1)), packed, work.device)

        batch = build_batch(work.rows, work.row_tokens, work.learned_tokens, work.packed)
        validation_batch = build_batch(
            work.validation_rows, work.validation_tokens, work.validation_learned_tokens, packed=False
        )
        # Gradients exist already when the later micro-batches of a step run.
        is_accumulated = work.count_step_rows(self.settings.batch_size) > work.rows
        step_traces = [
            trace.trace_micro_batch(model, batch, is_accumulated, checkpointing, self.teacher) for model in models
        ]
        evaluation_traces = (
            [trace.trace_evaluation(model, validation_batch) for model in models] if work.validation_rows else []
        )
        step = self.meta_model.find_highest_peak(step_traces)
        evaluation = self.meta_model.find_highest_peak(evaluation_traces)
        gathered = {"gathered layers": GATHERED_LAYERS * self.shard_sizes.layer_bytes} if self.shard_sizes else {}
        if self.on_gpu:
            return step | gathered, step | gathered, evaluation | gathered
        step_events, evaluation_events = map(self.meta_model.repeat_events, (step_traces, evaluation_traces))
        if step_events is None or evaluation_events is None:
            self.meta_model = self._build_model(whole=True)
            return self._trace_phases()
        heap = MallocSimulator(weights.TRIM_EVERY_BYTES)
        first_resident, steady_resident = (heap.replay(step_events) for _ in range(2))
        evaluation_resident = heap.replay(evaluation_events) if evaluation_traces else 0
        # Freed memory of gathered layers is trimmed only once per this number of bytes.
        untrimmed = min(weights.TRIM_EVERY_BYTES, 2 * self.shard_sizes.whole_bytes) if self.shard_sizes else 0
        results = []
        for live, resident in (
            (step, first_resident), (step, steady_resident), (evaluation, evaluation_resident)
        ):  # fmt: skip
            # The allocator holds memory beyond live memory.
            overhead = max(0, resident + untrimmed - sum(live.values()))
            results.append(live | {"allocator": overhead} | gathered)
        return results[0], results[1], results[2]

    # The device.

    def _host_bytes(self) -> int:
        """Return the host memory of a training on a GPU: this process, plus data that is read or saved."""
        loading = weights.TRIM_EVERY_BYTES + self._largest_source_bytes()
        if self.shard_sizes:  # one rank of a machine loads at a time
            loading = self.meta_model.base_sizes.total_bytes + self._reading_bytes()
        return capacity.resident_bytes() + max(loading, self._snapshot_bytes() + self._gathering_bytes())

    def _notes(self) -> tuple[str, ...]:
        notes = []
        if self.on_gpu:
            notes.append("CUDA context and cuBLAS: assumed; CUDA libraries in host memory are not counted")
            if not torch.cuda.is_available() and self.settings.compute_dtype == "auto":
                notes.append("compute_dtype auto: assumed bfloat16, because no GPU is present")
            if self.work.ranks > 1:
                notes.append("communication: memory inside NCCL is not counted")
        if self.shard_sizes:
            traffic = GATHERS_PER_MICRO_BATCH * self.shard_sizes.whole_bytes
            traffic = traffic * (self.work.ranks - 1) // self.work.ranks
            notes.append(f"the base is sharded: each rank receives {format_bytes(traffic)} of it per micro-batch")
        if self.settings.optimizer == "paged_adamw_8bit":
            notes.append("optimizer: counted on the device; paged states may move to host memory")
        if layers := self.meta_model.base_sizes.unquantized_layers:
            notes.append(f"not quantized to 4 bits as requested: {len(layers)} layers such as {layers[0]}")
        return tuple(notes)


def _choose_largest(*candidates: Parts) -> Parts:
    return max(candidates, key=lambda parts: sum(parts.values()))


# Fallbacks for `auto` settings, which need less memory and more time.


@dataclass(frozen=True)
class MemoryFallback:
    """A way to train with less memory."""

    machine: Machine
    cost: str
    """Description of the fallback and its cost, for users."""


def list_fallbacks(settings: Train, machine: Machine, ranks: int) -> Iterator[MemoryFallback]:
    """Yield the fallbacks that `auto` allows: cheapest first, all together last."""
    options: list[tuple[dict[str, bool], str]] = []
    if machine.activation_checkpointing == "auto":
        options.append(
            ({"activation_checkpointing": True}, "activations are recomputed, which takes a third more time")
        )
    if machine.shard_base == "auto" and ranks > 1 and targets.sharding_obstacle(settings) is None:
        cost = f"the base is sharded among {ranks} ranks, so its layers are sent for every forward and backward pass"
        options.append(({"shard_base": True}, cost))
    if len(options) == 2:
        options.append((options[0][0] | options[1][0], f"{options[0][1]}; {options[1][1]}"))
    for values, cost in options:
        yield MemoryFallback(machine.model_copy(update=values), cost)


def choose_fallback(
    spec: ModelSpec, settings: Train, machine: Machine, work: MemoryWorkload, available_bytes: int
) -> MemoryFallback | None:  # fmt: skip
    """Return the cheapest fallback with which one row at a time fits into `available_bytes` per rank.

    Returns None if no fallback fits.
    """
    single = work.single_row()
    for fallback in list_fallbacks(settings, machine, work.ranks):
        needed = forecast(spec, settings, fallback.machine, single)
        if needed.needed_bytes(work.local_ranks) <= available_bytes:
            return fallback
    return None


# Largest sizes that fit: rows, tokens of a row, rank.


@dataclass(frozen=True)
class LargestFittingSizes:
    """Largest fitting value of each size with the other sizes unchanged; None if not even the smallest fits."""

    micro_batch_size: int | None
    row_tokens: int | None
    rank: int | None


def find_largest_sizes(
    builder: MemoryForecastBuilder, needed_bytes: int, available_bytes: int
) -> LargestFittingSizes:  # fmt: skip
    """Find the most rows, tokens of a row and rank that fit into `available_bytes`, each with the others unchanged.

    Rows are limited by a rank's part of a step, tokens by the model's context, the rank by the smallest side of a
    matrix. Tokens are accurate to 1 %.
    """
    spec, settings, work = builder.spec, builder.settings, builder.work

    def compute_needed(workload: MemoryWorkload) -> int:
        return builder.with_work(workload).forecast().needed_bytes(work.local_ranks)

    def with_examples(count: int) -> int:
        rows = count * work.rows_per_example
        return compute_needed(replace(work, rows=rows, validation_rows=min(rows, work.validation_rows or rows)))

    def with_tokens(tokens: int) -> int:
        def scale(count: int) -> int:
            return max(1, int(tokens / work.row_tokens * count))

        changed = replace(work, row_tokens=tokens, learned_tokens=scale(work.learned_tokens))
        validation_learned = scale(work.validation_learned_tokens)
        changed = replace(changed, validation_learned_tokens=validation_learned)
        return compute_needed(replace(changed, validation_tokens=scale(work.validation_tokens)))

    def with_rank(rank: int) -> int:
        train = settings.model_copy(update={"rank": rank})
        return forecast(spec, train, builder.machine, work).needed_bytes(work.local_ranks)

    chosen = targets.choose(spec.layers, settings.target_modules, spec.others)
    longest = spec.context_length or DEFAULT_MAX_TOKENS
    search = partial(_search_greatest_fitting, start_bytes=needed_bytes, available_bytes=available_bytes)
    examples, most = work.rows // work.rows_per_example, work.count_step_rows(settings.batch_size)
    return LargestFittingSizes(
        micro_batch_size=search(with_examples, start=examples, limit=most // work.rows_per_example),
        row_tokens=search(with_tokens, start=work.row_tokens, limit=longest, minimum=2, tolerance=0.01),
        rank=search(with_rank, start=settings.rank, limit=min(min(layer.inputs, layer.outputs) for layer in chosen)),
    )


def _search_greatest_fitting(  # noqa: PLR0913 (the function to invert, a known value, and where to search)
    compute_needed: Callable[[int], int],
    *,
    start: int,
    start_bytes: int,
    available_bytes: int,
    limit: int,
    minimum: int = 1,
    tolerance: float = 0.0,
) -> int | None:
    """Return the greatest number up to `limit` that fits; None if not even `minimum` fits.

    The needed memory grows nearly proportionally to the number, so the search interpolates between known values. It
    begins with `start`, whose memory is known.
    """
    low, high = minimum, max(minimum, limit)
    known = {start: start_bytes}

    def compute(number: int) -> int:
        if number not in known:
            known[number] = compute_needed(number)
        return known[number]

    if low < start <= high and start_bytes <= available_bytes:
        low = start
    elif low < start < high:
        high = start
    if compute(low) > available_bytes:
        return None
    if compute(high) <= available_bytes:
        return high
    while high - low > (step := max(1, int(tolerance * low))):
        share = (available_bytes - compute(low)) / max(1, compute(high) - compute(low))
        guess = min(max(low + int(share * (high - low)), low + 1), high - 1)
        # If the needed memory is linear in the number, the answer is between these two numbers.
        for number in (guess, guess + step if compute(guess) <= available_bytes else guess - step):
            if low < number < high:
                low, high = (number, high) if compute(number) <= available_bytes else (low, number)
    return low


# Sizes of a sharded base.


@dataclass(frozen=True)
class BaseShardSizes:
    """Sizes of the sharded part of the base, in bytes."""

    whole_bytes: int
    remote_bytes: int
    """Bytes that this rank does not keep; its shards have padding."""
    layer_bytes: int
    """Bytes of the gathered matrices of the largest layer."""


def is_base_sharded(machine: Machine, ranks: int) -> bool:
    """Return True if the ranks share the base; `machine.shard_base: auto` counts as false."""
    return machine.shard_base is True and ranks > 1


def compute_shard_sizes(base: ExtrapolatedMetaModel, ranks: int, granule_bytes: int) -> BaseShardSizes:
    """Compute shard sizes with an allocator that rounds to multiples of `granule_bytes`."""

    def sum_matrices(size: Callable[[Tensor], int]) -> int:
        return base.sum_over_blocks(
            lambda model: sum(
                -(-size(matrix) // granule_bytes) * granule_bytes
                for block in find_blocks(model)[1]
                for matrix in iterate_shardable_matrices(block)
            )
        )

    def share_bytes(matrix: Tensor) -> int:
        """Return the bytes of a shard: matrices are split by rows, and padding makes all shards equal."""
        rows = int(matrix.shape[0])
        return -(-rows // ranks) * (int(matrix.nbytes) // rows)

    layers = (block for model in base.models for block in find_blocks(model)[1])
    gathered = (sum(ranks * share_bytes(matrix) for matrix in iterate_shardable_matrices(layer)) for layer in layers)
    whole = sum_matrices(lambda matrix: matrix.nbytes)
    return BaseShardSizes(whole, whole - sum_matrices(share_bytes), max(gathered, default=0))


def iterate_shardable_matrices(layer: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a decoder layer that are sharded: frozen, with at least two dimensions."""
    return (parameter for parameter in layer.parameters() if not parameter.requires_grad and parameter.dim() >= 2)


# Memory of gradient reduction: the real code reduces tensors without data, as in trace.py.


@dataclass(frozen=True)
class CommunicationMemory:
    """Memory of a rank's GradientReducer, in bytes."""

    buffer_bytes: int = 0
    """Memory at the start: the flat buffer."""
    held_bytes: int = 0
    """Memory between two sums, which adds the unsent parts of the last two sums (`undo` needs both)."""
    peak_bytes: int = 0
    """Peak during a sum, which adds data gathered from other ranks and temporary tensors."""
    unsent_bytes: int = 0
    """Unsent part of one sum on this rank; snapshots hold the unsent parts of all ranks."""


def measure_communication_memory(
    parameters: Sequence[nn.Parameter], settings: GradientCompressionSettings, ranks: int, device: Device
) -> CommunicationMemory:
    """Measure one rank's memory for these trainable parameters on the meta device; zero if no reducer is needed."""
    if not parameters or (ranks == 1 and settings.method == "none"):
        return CommunicationMemory()
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    gradients = (nn.Parameter(parameter.grad) for parameter in parameters if parameter.grad is not None)
    tensors = nn.ParameterList([*parameters, *gradients])
    allocations = AllocationTrace(tensors, BatchShape(1, 1, 1, packed=False, device=device), records_graph=False)
    try:
        with _MetaCollectives(), allocations:
            group = _MetaProcessGroup(ranks) if ranks > 1 else None
            reducer = GradientReducer([("", parameter) for parameter in parameters], group, settings, lambda _: None)
            buffer = allocations.total_bytes()
            for _ in range(2):
                reducer.sum()
            held = allocations.total_bytes()
        highest = max(peak.total_bytes for peak in allocations.peaks.values())
        unsent = sum(tensor.nbytes for tensor in reducer.state().values())
    finally:
        for parameter in parameters:
            parameter.grad = None
    return CommunicationMemory(buffer, held, highest, unsent if ranks > 1 else 0)


@dataclass(frozen=True)
class _MetaProcessGroup:
    """The part of torch's process group that the GradientReducer uses."""

    ranks: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


class _MetaCollectives(TorchFunctionMode):  # type: ignore[misc]  # torch gives it no type
    """Mode that overrides the collectives of torch.distributed and skips them; buffers of received data still exist."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _COLLECTIVES:
            return None
        return func(*args, **(kwargs or {}))

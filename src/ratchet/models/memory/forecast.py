"""How much memory a training will need, phase by phase, before a weight is loaded: see docs/memory.md.

What arithmetic knows is counted (weights and their constants, adapters, optimizer); what depends on the model's code is
found by running that code without data (trace.py, communication.py).
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from bitsandbytes.nn import Linear4bit

from ratchet.config.schema import Machine
from ratchet.config.train import Train
from ratchet.config.units import MIB, format_bytes
from ratchet.models import targets, weights
from ratchet.models.loading import Model, pick_dtype
from ratchet.models.memory import capacity, meta_model, parameters, trace
from ratchet.models.memory import ranks as communication
from ratchet.models.memory import ranks as sharding
from ratchet.models.memory.malloc import MallocSimulator
from ratchet.models.memory.parameters import BaseTensorSizes
from ratchet.models.memory.trace import GRANULE_BYTES, BatchShape, Device
from ratchet.models.model_spec import ModelSpec
from ratchet.models.teacher import OnlineTeacher, derive_teacher_settings
from ratchet.storage.records.training import UNSHARDED, MemoryForecast, Phase, PhaseMemory

SMALLEST_8BIT = 4096
"""Elements from which on bitsandbytes keeps optimizer states in 8 bits (optimizer.py, min_8bit_size)."""
OPTIMIZER_BLOCK = 256
"""Such states to a constant of 4 bytes."""
QUANTIZING_BYTES = 20
"""Of a weight that is being quantised on a CPU: as it is read and as it is loaded (4 each), and quantised (12)."""
OPERATORS_BYTES = 16 * MIB
"""Pages of libraries that are first touched when they are used; measured with models of no size."""
CUDA_CONTEXT_BYTES = 500 * MIB
"""Kernels and stacks of a process on a GPU; between 300 and 600 MiB by GPU and driver. Assumed, not measured by us."""
CUBLAS_BYTES = 32 * MIB
"""Work space of cuBLAS on Hopper, 8 MiB on older GPUs (torch's notes on CUBLAS_WORKSPACE_CONFIG)."""

Parts = dict[str, int]


@dataclass(frozen=True)
class MemoryWorkload:
    """The largest micro-batches of a training."""

    rows: int
    """Sequences of a micro-batch."""
    row_tokens: int
    """Of the longest; the others are padded to it."""
    learned_tokens: int
    """Of a row, on the average of the micro-batch: where it is learned from, and logits are computed."""
    packed: bool
    """Several rows to a sequence."""
    device: Device
    validation_rows: int = 0
    validation_tokens: int = 1
    """Of the longest validation row."""
    validation_learned_tokens: int = 1
    new_tokens: int = 0
    """Rows of the embedding that learn."""
    ranks: int = 1
    """Processes that compute a step together, on all machines."""
    sharing: int = 1
    """Processes of the like that live in the same memory: ranks of one machine, on CPUs."""
    teacher: ModelSpec | None = None
    """That is in memory too, and asked about every micro-batch (train.distill)."""

    def single_row(self) -> "MemoryWorkload":
        """The same with a row at a time."""
        return replace(self, rows=1, validation_rows=min(1, self.validation_rows))

    def of_step(self, batch_rows: int) -> int:
        """Rows of a step that one rank computes, where a step has `batch_rows`: the largest part."""
        return -(-batch_rows // self.ranks)

    def among(self, ranks: int, sharing: int, batch_rows: int) -> "MemoryWorkload":
        """The same of one of so many ranks: no micro-batch is larger than its part of a step.

        Args:
            ranks: on all machines.
            sharing: those of them that share this machine's memory; 1 where each has a GPU.
            batch_rows: of a step (train.batch_rows).
        """
        other = replace(self, ranks=ranks, sharing=sharing)
        return replace(other, rows=min(self.rows, other.of_step(batch_rows)))


def forecast(blueprint: ModelSpec, settings: Train, machine: Machine, work: MemoryWorkload) -> MemoryForecast:
    """What a training process of this kind will hold at most, phase by phase.

    Args:
        blueprint: of the base.
        settings: section train.
        machine: activation_checkpointing and shard_base are read; `auto` is taken for false.
        work: the micro-batches, and how many ranks there are.

    Raises:
        SettingsError: the settings do not fit the model.
    """
    return MemoryForecastBuilder(blueprint, settings, machine, work).forecast()


def resolve_compute_dtype(settings: Train, device: Device) -> torch.dtype:
    """The type of matrix products; where the GPU is not at hand, `auto` is taken for bfloat16."""
    if device == "cuda" and settings.compute_dtype == "auto" and not torch.cuda.is_available():
        return torch.bfloat16
    return pick_dtype(settings.compute_dtype, torch.device(device))


@dataclass
class MemoryForecastBuilder:
    """One forecast in the making."""

    blueprint: ModelSpec
    settings: Train
    machine: Machine
    work: MemoryWorkload

    def of(self, work: MemoryWorkload) -> "MemoryForecastBuilder":
        """The same for other micro-batches of as many ranks, with the models that are there."""
        other = copy.copy(self)
        other.work = work
        return other

    def __post_init__(self) -> None:
        device, ranks = self.work.device, self.work.ranks
        self.on_gpu = device == "cuda"
        self.dtype = resolve_compute_dtype(self.settings, device)
        self.replica = meta_model.build(self.blueprint, self.settings, self.dtype, device, self.work.new_tokens)
        self.granule = GRANULE_BYTES[device]
        self.teacher: OnlineTeacher | None = None
        self.frozen: BaseTensorSizes | None = None
        if self.work.teacher is not None:
            self.teacher, self.frozen = self._held(self.work.teacher)
        self.adapters = self.replica.sum_of(self._adapter_bytes)
        self.optimizer = self.replica.sum_of(self._optimizer_bytes)
        self.gradients = self.replica.sum_of(self._gradient_bytes)
        self.sums = communication.measure_communication_memory(
            self.replica.learning(), self.settings.compression, ranks, device
        )
        shared = sharding.is_base_sharded(self.machine, ranks)
        self.shards = sharding.compute_shard_sizes(self.replica, ranks, self.granule) if shared else None

    def forecast(self) -> MemoryForecast:
        """Phase by phase."""
        resting = self._weights() | {"adapters": self.adapters}
        held = resting | {"optimizer": self.optimizer, "communication": self.sums.held_bytes}
        kept = held if self.on_gpu else held | {"snapshots": self._snapshot_bytes()}
        first, steady, evaluation = self._at_work()
        summing = {"gradients": self.gradients, "communication": self.sums.peak_bytes}
        updating = {"gradients": self.gradients, "temporary": self._update_bytes()}
        copying = {} if self.on_gpu else {"temporary": self._gathering_bytes()}
        libraries = self._baseline()
        used = {name: count + (0 if self.on_gpu else OPERATORS_BYTES) for name, count in libraries.items()}
        begun = resting | {"communication": self.sums.buffer_bytes}
        phases: list[tuple[Phase, Parts]] = [
            ("baseline", {}),
            ("loaded", self._loaded()),
            ("adapters", self._attached()),
            ("first_step", _elementwise_greatest(begun | first, resting | summing, held | updating)),
            ("steady", _elementwise_greatest(kept | steady, kept | summing, kept | updating, kept | copying)),
            ("evaluation", kept | evaluation),
        ]
        found = tuple(
            PhaseMemory(phase=name, parts=_drop_zeros((used if parts else libraries) | parts)) for name, parts in phases
        )
        peak = max(one.total_bytes for one in found)
        return MemoryForecast(
            device=self.work.device,
            ranks=self.work.ranks,
            rows=self.work.rows,
            row_tokens=self.work.row_tokens,
            learned_tokens=self.work.learned_tokens,
            activation_checkpointing=self.machine.activation_checkpointing is True,
            shard_base=self.shards is not None,
            phases=found,
            host_bytes=self._host_bytes() if self.on_gpu else peak,
            trainable_parameters=parameters.count_trainable_parameters(
                self.blueprint, self.settings, self.work.new_tokens
            ),
            total_parameters=parameters.count_total_parameters(self.blueprint, self.settings, self.work.new_tokens),
            notes=self._notes(),
        )

    # ------------------------------------------------------------------------------------------------ what is counted

    def _weights(self) -> Parts:
        """Base and teacher as they lie there while training."""
        stored = self.replica.stored
        rounding = stored.allocated_bytes(self.granule) - stored.total_bytes
        elsewhere = self.shards.elsewhere_bytes if self.shards else 0
        return {
            "weights": stored.quantized_bytes + stored.plain_bytes + rounding - elsewhere,
            "constants of quantisation": stored.constants_bytes,
            **self._teacher_weights(),
        }

    def _teacher_weights(self) -> Parts:
        return {"teacher": self.frozen.allocated_bytes(self.granule)} if self.frozen else {}

    def _loaded(self) -> Parts:
        """While the base is loaded, with a tensor under way, or freed memory not yet given back. A base that is to be
        shared is loaded whole, into the host's memory."""
        if self.on_gpu:
            if self.shards:
                return self._teacher_weights()
            return self._weights() | {"reading": self._largest_source_bytes()}
        whole = {UNSHARDED: self.shards.elsewhere_bytes} if self.shards else {}
        return self._weights() | whole | {"reading": self._reading_bytes()}

    def _attached(self) -> Parts:
        """When the adapter has been made; a base that is to be shared is then divided, a layer at a time."""
        found = self._weights() | {"adapters": self.adapters}
        if self.shards and self.on_gpu:
            return found | {"gathered layers": self.shards.layer_bytes}
        return found | ({UNSHARDED: self.shards.elsewhere_bytes} if self.shards else {})

    def _reading_bytes(self) -> int:
        """In the host's memory beside a base that is loaded there."""
        models = [self.replica.models[-1], *([self.teacher.model] if self.teacher else [])]
        matrices = [m for model in models for m in model.modules() if isinstance(m, Linear4bit)]
        most = max((m.in_features * m.out_features for m in matrices), default=0)
        return max(weights.TRIM_EVERY_BYTES, QUANTIZING_BYTES * most)

    def _largest_source_bytes(self) -> int:
        """Of a tensor as it comes from a file, of base and teacher."""
        return max(one.largest_source_bytes for one in (self.replica.stored, self.frozen) if one)

    def _held(self, blueprint: ModelSpec) -> tuple[OnlineTeacher, BaseTensorSizes]:
        """The teacher without its weights, and what these take."""
        model, stored = meta_model.build_frozen(blueprint, derive_teacher_settings(self.settings), self.dtype)
        return OnlineTeacher(
            model, blueprint.embedding_rows, self.settings.distill, blueprint.directory or Path()
        ), stored

    def _adapter_bytes(self, model: Model) -> int:
        learning = sum(self._rounded(p.nbytes) for p in model.parameters() if p.requires_grad)
        if self.settings.adapter == "adalora":  # sensitivity, and its mean and deviation, of every element
            learning += 3 * learning
        if self.settings.initialization == "pissa":  # what they began as is kept
            learning *= 2
        return learning

    def _gradient_bytes(self, model: Model) -> int:
        return sum(self._rounded(p.nbytes) for p in model.parameters() if p.requires_grad)

    def _optimizer_bytes(self, model: Model) -> int:
        return sum(self._state_bytes(p) for p in model.parameters() if p.requires_grad)

    def _state_bytes(self, parameter: torch.Tensor) -> int:
        """Two moments: AdamW of torch keeps them in the parameter's type, bitsandbytes' in 8 bits if there are many."""
        elements = parameter.numel()
        if self.settings.optimizer == "adamw":
            return 2 * self._rounded(parameter.nbytes)
        if elements < SMALLEST_8BIT:
            return 2 * self._rounded(4 * elements)
        return 2 * (self._rounded(elements) + self._rounded(4 * -(-elements // OPTIMIZER_BLOCK)))

    def _update_bytes(self) -> int:
        """Temporary tensors of the optimizer, a matrix at a time."""
        largest = max((p.nbytes for m in self.replica.models for p in m.parameters() if p.requires_grad), default=0)
        eight_bits = self.settings.optimizer != "adamw"
        if self.on_gpu:
            return 0 if eight_bits else 2 * largest
        return (7 if eight_bits else 2) * largest  # on CPUs bitsandbytes computes in float32, with tensors of torch

    def _snapshot_bytes(self) -> int:
        """Copies that are being saved while training goes on, and the one to go back to."""
        copies = 2 if self.settings.guards.roll_back else 1
        return copies * (self.adapters + self.optimizer + self.work.ranks * self.sums.unsent_bytes)

    def _gathering_bytes(self) -> int:
        """While a snapshot takes what all ranks have left unsent: as bytes, and beside them as tensors of the last."""
        return (self.work.ranks + 2) * self.sums.unsent_bytes

    def _rounded(self, count: int) -> int:
        return -(-count // self.granule) * self.granule

    # -------------------------------------------------------------------------------------------------- what is traced

    def _batch(self, rows: int, tokens: int, learned: int, packed: bool) -> BatchShape:
        return BatchShape(rows, tokens, rows * max(1, min(learned, tokens - 1)), packed, self.work.device)

    def _at_work(self) -> tuple[Parts, Parts, Parts]:
        """First step, later steps, validation: each without what lies there all the time."""
        work, checkpointing = self.work, self.machine.activation_checkpointing is True
        models = self.replica.models
        batch = self._batch(work.rows, work.row_tokens, work.learned_tokens, work.packed)
        checked = self._batch(
            work.validation_rows, work.validation_tokens, work.validation_learned_tokens, packed=False
        )
        # Of several micro-batches in a step the later ones find gradients there; of one alone, none.
        several = work.of_step(self.settings.batch_rows) > work.rows
        sums = [trace.trace_micro_batch(model, batch, several, checkpointing, self.teacher) for model in models]
        seen = [trace.trace_evaluation(model, checked) for model in models] if work.validation_rows else []
        step, evaluation = self.replica.highest(sums), self.replica.highest(seen)
        gathered = {"gathered layers": sharding.GATHERED * self.shards.layer_bytes} if self.shards else {}
        if self.on_gpu:
            return step | gathered, step | gathered, evaluation | gathered
        heaps = [MallocSimulator(weights.TRIM_EVERY_BYTES) for _ in models]
        started, went_on = (self.replica.resident_bytes(heaps, sums) for _ in range(2))
        ended = self.replica.resident_bytes(heaps, seen) if seen else 0
        # What was gathered is given back so often, and not before.
        left = min(weights.TRIM_EVERY_BYTES, 2 * self.shards.whole_bytes) if self.shards else 0
        found = (step, started), (step, went_on), (evaluation, ended)
        first, steady, checking = (_add_heap_overhead(live, resident + left) | gathered for live, resident in found)
        return first, steady, checking

    # ------------------------------------------------------------------------------------------------------- the device

    def _baseline(self) -> Parts:
        if self.on_gpu:
            return {"CUDA context": CUDA_CONTEXT_BYTES + CUBLAS_BYTES}
        return {"libraries": capacity.resident_bytes()}

    def _host_bytes(self) -> int:
        """Of a training on a GPU: this process as it is, what is read and what is saved."""
        under_way = weights.TRIM_EVERY_BYTES + self._largest_source_bytes()
        if self.shards:  # by one rank of a machine at a time
            under_way = self.replica.stored.total_bytes + self._reading_bytes()
        return capacity.resident_bytes() + max(under_way, self._snapshot_bytes() + self._gathering_bytes())

    def _notes(self) -> tuple[str, ...]:
        notes = []
        if self.on_gpu:
            notes.append("CUDA context and cuBLAS: assumed; libraries of CUDA in the host's memory are not counted")
            if not torch.cuda.is_available() and self.settings.compute_dtype == "auto":
                notes.append("compute_dtype auto: taken for bfloat16, no GPU is at hand")
            if self.work.ranks > 1:
                notes.append("communication: what NCCL holds itself is not counted")
        if self.shards:
            travels = sharding.PASSES * self.shards.whole_bytes * (self.work.ranks - 1) // self.work.ranks
            notes.append(f"the base is shared: {format_bytes(travels)} of it travel to each rank for a micro-batch")
        if self.settings.optimizer == "paged_adamw_8bit":
            notes.append("optimizer: counted on the device; paged states may move to the host's memory")
        if left := self.replica.stored.left_plain:
            notes.append(f"not in 4 bits, though asked for: {len(left)} layers such as {left[0]}")
        return tuple(notes)


def _add_heap_overhead(live: Parts, resident_bytes: int) -> Parts:
    """With what the allocator holds beyond what lives."""
    return live | {"allocator": max(0, resident_bytes - sum(live.values()))}


def _elementwise_greatest(*found: Parts) -> Parts:
    return max(found, key=lambda parts: sum(parts.values()))


def _drop_zeros(parts: Parts) -> Parts:
    return {name: count for name, count in parts.items() if count}


# Ways to train that need less memory and more time, for settings that leave them to be chosen (`auto`).


@dataclass(frozen=True)
class MemoryFallback:
    """One of them."""

    machine: Machine
    cost: str
    """What it does and what that takes, for people."""


def list_fallbacks(settings: Train, machine: Machine, ranks: int) -> Iterator[MemoryFallback]:
    """All that are left to be chosen: what costs least comes first, all at once last."""
    found = []
    if machine.activation_checkpointing == "auto":
        cost = "activations are recomputed, which takes a third more time"
        found.append(({"activation_checkpointing": True}, cost))
    if machine.shard_base == "auto" and ranks > 1 and targets.sharding_obstacle(settings) is None:
        cost = f"the base is shared among {ranks} ranks, so that its layers travel for every pass forward and backward"
        found.append(({"shard_base": True}, cost))
    for values, cost in found:
        yield MemoryFallback(machine.model_copy(update=values), cost)
    if len(found) > 1:
        together = {name: value for values, _ in found for name, value in values.items()}
        yield MemoryFallback(machine.model_copy(update=together), "; ".join(cost for _, cost in found))


def choose_fallback(
    blueprint: ModelSpec, settings: Train, machine: Machine, work: MemoryWorkload, available_bytes: int
) -> MemoryFallback | None:  # fmt: skip
    """The cheapest of `list_fallbacks` with which a row at a time fits into so much for each rank.

    None when no fallback does.
    """
    single = work.single_row()
    for way in list_fallbacks(settings, machine, work.ranks):
        found = forecast(blueprint, settings, way.machine, single)
        if found.needed_bytes(work.sharing) <= available_bytes:
            return way
    return None


# The most that would fit: rows, tokens of a row, rank.

LONGEST_TOKENS = 131_072
"""Longest row that is tried for models that name no limit."""


@dataclass(frozen=True)
class LargestFittingSizes:
    """The most that fits of each, with the others as they are; None where not even the least does."""

    micro_batch_rows: int | None
    row_tokens: int | None
    rank: int | None


def find_largest_sizes(
    blueprint: ModelSpec, settings: Train, machine: Machine, work: MemoryWorkload, available_bytes: int
) -> LargestFittingSizes:  # fmt: skip
    """The most rows, tokens of a row, and rank whose need is within `available_bytes`: each alone, the others as given.

    Rows go up to what a rank computes of a step, tokens to what the model was made for, the rank to the smallest side
    of a matrix. Tokens are found to within 1 %.
    """

    need = MemoryForecastBuilder(blueprint, settings, machine, work)

    def needed(other: MemoryWorkload) -> int:
        return need.of(other).forecast().needed_bytes(work.sharing)

    def with_rows(rows: int) -> int:
        return needed(replace(work, rows=rows, validation_rows=min(rows, work.validation_rows or rows)))

    def with_tokens(tokens: int) -> int:
        share = tokens / work.row_tokens
        learned, checked, seen = (
            max(1, int(share * count))
            for count in (work.learned_tokens, work.validation_learned_tokens, work.validation_tokens)
        )
        longer = replace(work, row_tokens=tokens, learned_tokens=learned)
        return needed(replace(longer, validation_tokens=seen, validation_learned_tokens=checked))

    def with_rank(rank: int) -> int:
        changed = settings.model_copy(update={"rank": rank})
        return forecast(blueprint, changed, machine, work).needed_bytes(work.sharing)

    chosen = targets.choose(blueprint.layers, settings.targets, blueprint.others)
    longest = getattr(blueprint.config.get_text_config(), "max_position_embeddings", None) or LONGEST_TOKENS
    return LargestFittingSizes(
        micro_batch_rows=_search_greatest_fitting(with_rows, available_bytes, work.of_step(settings.batch_rows)),
        row_tokens=_search_greatest_fitting(with_tokens, available_bytes, int(longest), least=2, tolerance=0.01),
        rank=_search_greatest_fitting(
            with_rank, available_bytes, min(min(layer.inputs, layer.outputs) for layer in chosen)
        ),
    )


def _search_greatest_fitting(
    need: Callable[[int], int], available_bytes: int, limit: int, least: int = 1, tolerance: float = 0.0
) -> int | None:
    """The greatest number up to `limit` that needs no more than there is; None when not even `least` does.

    Needs grow with the number, and nearly in proportion: so the next one tried lies on the line between those known.
    """
    low, high = least, max(least, limit)
    at_low = need(low)
    if at_low > available_bytes:
        return None
    at_high = need(high)
    if at_high <= available_bytes:
        return high
    while high - low > (step := max(1, int(tolerance * low))):
        share = (available_bytes - at_low) / max(1, at_high - at_low)
        guess = min(max(low + int(share * (high - low)), low + 1), high - 1)
        # Where it lies on the line, the answer is between these two.
        for number in (guess, guess + step) if (found := need(guess)) <= available_bytes else (guess, guess - step):
            if not low < number < high:
                continue
            found = found if number == guess else need(number)
            if found <= available_bytes:
                low, at_low = number, found
            else:
                high, at_high = number, found
    return low

"""How much memory a training will need, phase by phase, before a weight is loaded: see docs/memory.md.

What arithmetic knows is counted (weights and their constants, adapters, optimizer); what depends on the model's code is
found by running that code without data (trace.py).
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from bitsandbytes.nn import Linear4bit

from ratchet.config import Machine
from ratchet.config_train import Train
from ratchet.model import capacity, replica, storage, targets, trace, weights
from ratchet.model.blueprint import Blueprint
from ratchet.model.heap import Heap
from ratchet.model.ledger import GRANULE_BYTES, Batch, Device
from ratchet.model.quantized import Model, pick_dtype
from ratchet.records_model import MemoryForecast, Phase, PhaseMemory
from ratchet.sizes import MIB

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

LONGEST_TOKENS = 131_072
"""Longest row that is tried for models that name no limit."""

Parts = dict[str, int]


@dataclass(frozen=True)
class Work:
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
    sharing: int = 1
    """Processes of the like that live in the same memory: ranks of one machine, on CPUs."""

    def single_row(self) -> "Work":
        """The same with a row at a time."""
        return replace(self, rows=1, validation_rows=min(1, self.validation_rows))


@dataclass(frozen=True)
class Largest:
    """The most that fits of each, with the others as they are; None where not even the least does."""

    micro_batch_rows: int | None
    row_tokens: int | None
    rank: int | None


def forecast(blueprint: Blueprint, settings: Train, machine: Machine, work: Work) -> MemoryForecast:
    """What a training process of this kind will hold at most, phase by phase.

    Args:
        blueprint: of the base.
        settings: section train.
        machine: activation_checkpointing is read; `auto` is taken for false.
        work: the micro-batches.

    Raises:
        SettingsError: the settings do not fit the model.
    """
    return _Need(blueprint, settings, machine, work).forecast()


def largest(
    blueprint: Blueprint, settings: Train, machine: Machine, work: Work, available_bytes: int
) -> Largest:  # fmt: skip
    """The most rows, tokens of a row, and rank whose peak is within `available_bytes`: each alone, the others as given.

    Rows go up to train.batch_rows, tokens to what the model was made for, the rank to the smallest side of a matrix.
    Tokens are found to within 1 %.
    """

    need = _Need(blueprint, settings, machine, work)

    def peak(other: Work) -> int:
        return need.of(other).forecast().peak.total_bytes

    def with_rows(rows: int) -> int:
        return peak(replace(work, rows=rows, validation_rows=min(rows, work.validation_rows or rows)))

    def with_tokens(tokens: int) -> int:
        share = tokens / work.row_tokens
        learned, checked, seen = (
            max(1, int(share * count))
            for count in (work.learned_tokens, work.validation_learned_tokens, work.validation_tokens)
        )
        longer = replace(work, row_tokens=tokens, learned_tokens=learned)
        return peak(replace(longer, validation_tokens=seen, validation_learned_tokens=checked))

    def with_rank(rank: int) -> int:
        return forecast(blueprint, settings.model_copy(update={"rank": rank}), machine, work).peak.total_bytes

    chosen = targets.choose(blueprint.layers, settings.targets, blueprint.others)
    longest = getattr(blueprint.config.get_text_config(), "max_position_embeddings", None) or LONGEST_TOKENS
    return Largest(
        micro_batch_rows=_greatest(with_rows, available_bytes, settings.batch_rows),
        row_tokens=_greatest(with_tokens, available_bytes, int(longest), least=2, tolerance=0.01),
        rank=_greatest(with_rank, available_bytes, min(min(layer.inputs, layer.outputs) for layer in chosen)),
    )


def _greatest(
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


def dtype_of(settings: Train, device: Device) -> torch.dtype:
    """The type of matrix products; where the GPU is not at hand, `auto` is taken for bfloat16."""
    if device == "cuda" and settings.compute_dtype == "auto" and not torch.cuda.is_available():
        return torch.bfloat16
    return pick_dtype(settings.compute_dtype, torch.device(device))


@dataclass
class _Need:
    """One forecast in the making."""

    blueprint: Blueprint
    settings: Train
    machine: Machine
    work: Work

    def of(self, work: Work) -> "_Need":
        """The same for other micro-batches, with the models that are there."""
        other = copy.copy(self)
        other.work = work
        return other

    def __post_init__(self) -> None:
        self.on_gpu = self.work.device == "cuda"
        self.dtype = dtype_of(self.settings, self.work.device)
        self.replica = replica.build(self.blueprint, self.settings, self.dtype, self.work.device, self.work.new_tokens)
        self.granule = GRANULE_BYTES[self.work.device]
        self.adapters = self.replica.sum_of(self._adapter_bytes)
        self.optimizer = self.replica.sum_of(self._optimizer_bytes)
        self.gradients = self.replica.sum_of(self._gradient_bytes)

    def forecast(self) -> MemoryForecast:
        """Phase by phase."""
        base = self._weights()
        resting = base | {"adapters": self.adapters}
        held = resting | {"optimizer": self.optimizer} | ({} if self.on_gpu else self._snapshots())
        first, steady, evaluation = self._at_work()
        updating = {"gradients": self.gradients, "temporary": self._update_bytes()}
        libraries = self._baseline()
        used = {name: count + (0 if self.on_gpu else OPERATORS_BYTES) for name, count in libraries.items()}
        phases: list[tuple[Phase, Parts]] = [
            ("baseline", {}),
            ("loaded", base | self._reading()),
            ("adapters", resting),
            ("first_step", _greater(resting | first, resting | {"optimizer": self.optimizer} | updating)),
            ("steady", _greater(held | steady, held | updating)),
            ("evaluation", held | evaluation),
        ]
        found = tuple(
            PhaseMemory(phase=name, parts=_without_zeros((used if parts else libraries) | parts))
            for name, parts in phases
        )
        peak = max(one.total_bytes for one in found)
        return MemoryForecast(
            device=self.work.device,
            rows=self.work.rows,
            row_tokens=self.work.row_tokens,
            learned_tokens=self.work.learned_tokens,
            activation_checkpointing=self.machine.activation_checkpointing is True,
            phases=found,
            host_bytes=self._host_bytes() if self.on_gpu else peak,
            trainable_parameters=storage.trainable_parameters(self.blueprint, self.settings, self.work.new_tokens),
            total_parameters=storage.total_parameters(self.blueprint, self.settings, self.work.new_tokens),
            notes=self._notes(),
        )

    # ------------------------------------------------------------------------------------------------ what is counted

    def _weights(self) -> Parts:
        """The base as it lies there."""
        stored = self.replica.stored
        rounding = stored.allocated_bytes(self.granule) - stored.total_bytes
        return {
            "weights": stored.quantized_bytes + stored.plain_bytes + rounding,
            "constants of quantisation": stored.constants_bytes,
        }

    def _reading(self) -> Parts:
        """Beside the weights while they are loaded: a tensor under way, or freed memory not yet given back."""
        if self.on_gpu:
            return {"reading": self.replica.stored.largest_source_bytes}
        matrices = [m for m in self.replica.models[-1].modules() if isinstance(m, Linear4bit)]
        most = max((m.in_features * m.out_features for m in matrices), default=0)
        return {"reading": max(weights.TRIM_EVERY_BYTES, QUANTIZING_BYTES * most)}

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

    def _snapshots(self) -> Parts:
        """Copies that are being saved while training goes on, and the one to go back to."""
        copies = 2 if self.settings.guards.roll_back else 1
        return {"snapshots": copies * (self.adapters + self.optimizer)}

    def _rounded(self, count: int) -> int:
        return -(-count // self.granule) * self.granule

    # -------------------------------------------------------------------------------------------------- what is traced

    def _batch(self, rows: int, tokens: int, learned: int, packed: bool) -> Batch:
        return Batch(rows, tokens, rows * max(1, min(learned, tokens - 1)), packed, self.work.device)

    def _at_work(self) -> tuple[Parts, Parts, Parts]:
        """First step, later steps, validation: each without what lies there all the time."""
        work, checkpointing = self.work, self.machine.activation_checkpointing is True
        models = self.replica.models
        batch = self._batch(work.rows, work.row_tokens, work.learned_tokens, work.packed)
        checked = self._batch(
            work.validation_rows, work.validation_tokens, work.validation_learned_tokens, packed=False
        )
        # Of several micro-batches in a step the later ones find gradients there; of one alone, none.
        sums = [trace.step(model, batch, self.settings.batch_rows > work.rows, checkpointing) for model in models]
        seen = [trace.evaluation(model, checked) for model in models] if work.validation_rows else []
        step, evaluation = self.replica.highest(sums), self.replica.highest(seen)
        if self.on_gpu:
            return step, step, evaluation
        heaps = [Heap(weights.TRIM_EVERY_BYTES) for _ in models]
        started, went_on = (self.replica.resident_bytes(heaps, sums) for _ in range(2))
        ended = self.replica.resident_bytes(heaps, seen) if seen else 0
        return _with_heap(step, started), _with_heap(step, went_on), _with_heap(evaluation, ended)

    # ------------------------------------------------------------------------------------------------------- the device

    def _baseline(self) -> Parts:
        if self.on_gpu:
            return {"CUDA context": CUDA_CONTEXT_BYTES + CUBLAS_BYTES}
        return {"libraries": capacity.resident_bytes()}

    def _host_bytes(self) -> int:
        """Of a training on a GPU: this process as it is, what is read and what is saved."""
        under_way = weights.TRIM_EVERY_BYTES + self.replica.stored.largest_source_bytes
        return capacity.resident_bytes() + max(under_way, sum(self._snapshots().values()))

    def _notes(self) -> tuple[str, ...]:
        notes = []
        if self.on_gpu:
            notes.append("CUDA context and cuBLAS: assumed; libraries of CUDA in the host's memory are not counted")
            if not torch.cuda.is_available() and self.settings.compute_dtype == "auto":
                notes.append("compute_dtype auto: taken for bfloat16, no GPU is at hand")
        if self.settings.optimizer == "paged_adamw_8bit":
            notes.append("optimizer: counted on the device; paged states may move to the host's memory")
        if left := self.replica.stored.left_plain:
            notes.append(f"not in 4 bits, though asked for: {len(left)} layers such as {left[0]}")
        return tuple(notes)


def _with_heap(live: Parts, resident_bytes: int) -> Parts:
    """With what the allocator holds beyond what lives."""
    return live | {"allocator": max(0, resident_bytes - sum(live.values()))}


def _greater(one: Parts, other: Parts) -> Parts:
    return one if sum(one.values()) >= sum(other.values()) else other


def _without_zeros(parts: Parts) -> Parts:
    return {name: count for name, count in parts.items() if count}

"""Memory that runs out: recognising it, giving it back, and saying what would need less."""

import gc
from collections.abc import Iterator
from dataclasses import replace

import torch

from ratchet.config.schema import Machine
from ratchet.config.train import Train
from ratchet.config.units import format_bytes as size
from ratchet.models import targets
from ratchet.models.memory import forecast
from ratchet.models.memory.forecast import MemoryWorkload
from ratchet.models.model_spec import ModelSpec

__all__ = ["describe_alternatives", "is_out_of_memory", "release_memory", "size"]

_EXHAUSTED = (
    "DefaultCPUAllocator: can't allocate memory",  # torch 2.13, c10/core/impl/alloc_cpu.cpp
    "DefaultCPUAllocator: not enough memory",  # the same on Windows
    "CUDA error: out of memory",  # what is allocated past torch's own allocator: pinned and paged memory
    "CUDA out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on whatever device; every other failure is none that a smaller batch would mend."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _EXHAUSTED)


def release_memory() -> None:
    """Give back what nothing refers to any more. To be called outside the `except` block: a traceback holds frames."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def describe_alternatives(blueprint: ModelSpec, settings: Train, machine: Machine, work: MemoryWorkload) -> str:
    """What to change when micro-batches of this work do not fit, with what each change would save, best first.

    Args:
        blueprint: of the base.
        settings: section train as it is.
        machine: activation_checkpointing and shard_base are read.
        work: what does not fit, usually a single row.
    """
    expected = forecast.forecast(blueprint, settings, machine, work)
    peak, total = expected.peak, expected.needed_bytes(work.sharing)
    parts = ", ".join(f"{name} {size(count)}" for name, count in peak.parts.items())
    found = [f"Needed by our forecast: {size(peak.total_bytes)} ({parts})."]
    savings = [
        (total - forecast.forecast(blueprint, *changed).needed_bytes(work.sharing), what)
        for what, changed in _alternatives(settings, machine, work)
    ]
    listed = [f"{what} ({size(saved)} less)" for saved, what in sorted(savings, key=lambda s: -s[0]) if saved > 0]
    if listed:
        found.append(f"Change one or several of these: {'; '.join(listed)}.")
    else:
        found.append("Take a smaller base model, or a machine with more memory.")
    found.append("With changes to `machine` this run goes on; others begin a new one.")
    return " ".join(found)


def _alternatives(
    settings: Train, machine: Machine, work: MemoryWorkload
) -> Iterator[tuple[str, tuple[Train, Machine, MemoryWorkload]]]:
    """Settings that may need less memory, each as it is written in params.yaml."""
    if work.row_tokens >= 4:
        length = work.row_tokens // 2
        name = "prepare.max_tokens"
        if settings.batching == "packed":
            name = f"train.pack_tokens (and if need be {name})"
        yield f"{name}: {length}", (settings, machine, _shorten_rows(work, length))
    if machine.activation_checkpointing is not True:
        changed = machine.model_copy(update={"activation_checkpointing": True})
        yield "machine.activation_checkpointing: true", (settings, changed, work)
    if settings.rank > 1:
        half = settings.model_copy(update={"rank": settings.rank // 2})
        yield f"train.rank: {half.rank}", (half, machine, work)
    if settings.quantization == "none" and settings.initialization == "zero":
        nf4 = settings.model_copy(update={"quantization": "nf4"})
        yield "train.quantization: nf4", (nf4, machine, work)
    if work.teacher is not None:
        yield from _teacher_alternatives(settings, machine, work)
    if settings.optimizer == "adamw":
        eight = settings.model_copy(update={"optimizer": "adamw_8bit"})
        yield "train.optimizer: adamw_8bit", (eight, machine, work)
    if targets.sharding_obstacle(settings) is None:
        yield _sharding_alternative(settings, machine, work)


def _teacher_alternatives(
    settings: Train, machine: Machine, work: MemoryWorkload
) -> Iterator[tuple[str, tuple[Train, Machine, MemoryWorkload]]]:
    """A teacher in memory could be smaller, or not there."""
    distill = settings.distill
    if distill.quantization == "none":
        four = settings.model_copy(update={"distill": distill.model_copy(update={"quantization": "nf4"})})
        yield "train.distill.quantization: nf4", (four, machine, work)
    yield "train.distill.asked: before", (settings, machine, replace(work, teacher=None))


def _sharding_alternative(
    settings: Train, machine: Machine, work: MemoryWorkload
) -> tuple[str, tuple[Train, Machine, MemoryWorkload]]:
    """The base shared among the ranks that there are, or, where it is or there is one, among twice as many."""
    shared = machine.model_copy(update={"shard_base": True})
    if work.ranks > 1 and machine.shard_base is not True:
        return "machine.shard_base: true", (settings, shared, work)
    ranks, where = 2 * work.ranks, "machine.nodes" if work.device == "cpu" else "machine.gpus, machine.nodes"
    return f"{ranks} ranks ({where}) with machine.shard_base: true", (settings, shared, replace(work, ranks=ranks))


def _shorten_rows(work: MemoryWorkload, length: int) -> MemoryWorkload:
    return replace(
        work,
        row_tokens=length,
        learned_tokens=max(1, work.learned_tokens // 2),
        validation_tokens=min(work.validation_tokens, length),
        validation_learned_tokens=min(work.validation_learned_tokens, length - 1),
    )

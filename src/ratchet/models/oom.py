"""Detects out-of-memory errors, releases memory, and suggests settings that need less."""

import gc
from collections.abc import Iterator
from dataclasses import replace

import torch

from ratchet.config.machine import Machine
from ratchet.config.train import Train
from ratchet.config.units import format_bytes
from ratchet.models import targets
from ratchet.models.memory import forecast
from ratchet.models.memory.forecast import MemoryWorkload
from ratchet.models.model_spec import ModelSpec

_OUT_OF_MEMORY_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",  # torch 2.13, c10/core/impl/alloc_cpu.cpp
    "DefaultCPUAllocator: not enough memory",  # the same on Windows
    "CUDA error: out of memory",  # allocations outside torch's allocator: pinned and paged memory
    "CUDA out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an out-of-memory error of any device, which a smaller batch may avoid."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)


def release_memory() -> None:
    """Release unreferenced memory. Call this outside an `except` block, because its traceback keeps frames alive."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def describe_alternatives(spec: ModelSpec, settings: Train, machine: Machine, work: MemoryWorkload) -> str:
    """Describe changes of settings that reduce the memory of a micro-batch, and what each saves, best first.

    Args:
        spec: spec of the base.
        settings: current section train.
        machine: section machine, of which activation_checkpointing and shard_base are used.
        work: the workload that does not fit, usually a single row.
    """
    expected = forecast.forecast(spec, settings, machine, work)
    peak, total = expected.peak, expected.needed_bytes(work.local_ranks)
    parts = ", ".join(f"{name} {format_bytes(count)}" for name, count in peak.parts.items())
    sentences = [f"The forecast needs {format_bytes(peak.total_bytes)} ({parts})."]
    savings = [
        (total - forecast.forecast(spec, *arguments).needed_bytes(work.local_ranks), change)
        for change, arguments in _alternatives(settings, machine, work)
    ]
    suggestions = [
        f"{change} ({format_bytes(saved)} less)" for saved, change in sorted(savings, key=lambda s: -s[0]) if saved > 0
    ]
    if suggestions:
        sentences.append(f"Change one or more of these settings: {'; '.join(suggestions)}.")
    else:
        sentences.append("Use a smaller base model, or a machine with more memory.")
    sentences.append("After changes to `machine` this run resumes; other changes start a new run.")
    return " ".join(sentences)


def _alternatives(
    settings: Train, machine: Machine, work: MemoryWorkload
) -> Iterator[tuple[str, tuple[Train, Machine, MemoryWorkload]]]:
    """Yield changes that may need less memory, each as (text as in params.yaml, changed settings)."""
    if work.row_tokens >= 4:
        length = work.row_tokens // 2
        name = "prepare.max_tokens"
        if settings.batching == "packed":
            name = f"train.pack_tokens (and {name} if necessary)"
        yield f"{name}: {length}", (settings, machine, _shorten_rows(work, length))
    if machine.activation_checkpointing is not True:
        changed = machine.model_copy(update={"activation_checkpointing": True})
        yield "machine.activation_checkpointing: true", (settings, changed, work)
    if settings.rank > 1:
        halved = settings.model_copy(update={"rank": settings.rank // 2})
        yield f"train.rank: {halved.rank}", (halved, machine, work)
    if settings.quantization == "none" and settings.initialization == "zero":
        nf4 = settings.model_copy(update={"quantization": "nf4"})
        yield "train.quantization: nf4", (nf4, machine, work)
    if work.teacher is not None:
        yield from _teacher_alternatives(settings, machine, work)
    if settings.optimizer == "adamw":
        eight_bit = settings.model_copy(update={"optimizer": "adamw_8bit"})
        yield "train.optimizer: adamw_8bit", (eight_bit, machine, work)
    if targets.sharding_obstacle(settings) is None:
        yield _sharding_alternative(settings, machine, work)


def _teacher_alternatives(
    settings: Train, machine: Machine, work: MemoryWorkload
) -> Iterator[tuple[str, tuple[Train, Machine, MemoryWorkload]]]:
    """Yield changes with which the teacher needs less memory or no memory."""
    distill = settings.distill
    if distill.quantization == "none":
        quantized = settings.model_copy(update={"distill": distill.model_copy(update={"quantization": "nf4"})})
        yield "train.distill.quantization: nf4", (quantized, machine, work)
    yield "train.distill.mode: offline", (settings, machine, replace(work, teacher=None))


def _sharding_alternative(
    settings: Train, machine: Machine, work: MemoryWorkload
) -> tuple[str, tuple[Train, Machine, MemoryWorkload]]:
    """Return the change that shards the base among the current ranks, or among twice as many ranks.

    Twice as many ranks are needed if the base is already sharded, or if there is one rank.
    """
    sharded = machine.model_copy(update={"shard_base": True})
    if work.ranks > 1 and machine.shard_base is not True:
        return "machine.shard_base: true", (settings, sharded, work)
    ranks, setting = 2 * work.ranks, "machine.nodes" if work.device == "cpu" else "machine.gpus, machine.nodes"
    return f"{ranks} ranks ({setting}) with machine.shard_base: true", (settings, sharded, replace(work, ranks=ranks))


def _shorten_rows(work: MemoryWorkload, length: int) -> MemoryWorkload:
    return replace(
        work,
        row_tokens=length,
        learned_tokens=max(1, work.learned_tokens // 2),
        validation_tokens=min(work.validation_tokens, length),
        validation_learned_tokens=min(work.validation_learned_tokens, length - 1),
    )

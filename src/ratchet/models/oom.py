"""Detects out-of-memory errors and lost GPUs, releases memory, and suggests settings that need less."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ratchet.config.machine import Machine
from ratchet.config.train import Train
from ratchet.config.units import format_bytes
from ratchet.models import targets
from ratchet.models.device import is_device_lost, is_out_of_memory
from ratchet.models.memory import forecast
from ratchet.models.memory.forecast import MemoryWorkload
from ratchet.models.model_spec import ModelSpec

__all__ = ["describe_alternatives", "is_device_lost", "is_out_of_memory", "release_memory"]


def release_memory() -> None:
    """Release unreferenced memory. Call this outside an `except` block, because its traceback keeps frames alive."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def describe_alternatives(spec: ModelSpec, settings: Train, machine: Machine, work: MemoryWorkload) -> str:
    """Describe changes of settings that reduce the memory of a micro-batch, and what each saves, best first.

    Args:
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

    def train(**update: Any) -> tuple[Train, Machine, MemoryWorkload]:
        return settings.model_copy(update=update), machine, work

    if work.row_tokens >= 4:
        length = work.row_tokens // 2
        name = "prepare.max_tokens"
        if settings.batching == "packed":
            name = f"train.pack_tokens (and {name} if necessary)"
        shortened = replace(
            work,
            row_tokens=length,
            learned_tokens=max(1, work.learned_tokens // 2),
            validation_tokens=min(work.validation_tokens, length),
            validation_learned_tokens=min(work.validation_learned_tokens, length - 1),
        )
        yield f"{name}: {length}", (settings, machine, shortened)
    if machine.activation_checkpointing is not True:
        changed = machine.model_copy(update={"activation_checkpointing": True})
        yield "machine.activation_checkpointing: true", (settings, changed, work)
    if settings.rank > 1:
        yield f"train.rank: {settings.rank // 2}", train(rank=settings.rank // 2)
    if settings.quantization == "none" and settings.initialization == "zero":
        yield "train.quantization: nf4", train(quantization="nf4")
    if work.teacher is not None:
        if settings.distill.quantization == "none":
            distill = settings.distill.model_copy(update={"quantization": "nf4"})
            yield "train.distill.quantization: nf4", train(distill=distill)
        yield "train.distill.mode: offline", (settings, machine, replace(work, teacher=None))
    if settings.optimizer == "adamw":
        yield "train.optimizer: adamw_8bit", train(optimizer="adamw_8bit")
    if targets.sharding_obstacle(settings) is None:
        sharded = machine.model_copy(update={"shard_base": True})
        if work.ranks > 1 and machine.shard_base is not True:
            yield "machine.shard_base: true", (settings, sharded, work)
        else:
            setting = "machine.nodes" if work.device == "cpu" else "machine.gpus, machine.nodes"
            text = f"{2 * work.ranks} ranks ({setting}) with machine.shard_base: true"
            yield text, (settings, sharded, replace(work, ranks=2 * work.ranks))

"""The memory forecast: exact calculations, and extrapolation to long models against a full trace."""

from dataclasses import replace
from typing import Any

from transformers import LlamaConfig

import families
from ratchet.config.machine import Machine
from ratchet.config.train import Train
from ratchet.models import model_spec
from ratchet.models.memory import forecast
from ratchet.models.memory.forecast import LargestFittingSizes, MemoryForecastBuilder, MemoryWorkload
from ratchet.models.model_spec import ModelSpec
from ratchet.storage.records.training import MemoryForecast

CPU = MemoryWorkload(
    2, 48, 30, packed=False, device="cpu", validation_rows=2, validation_tokens=40, validation_learned_tokens=20
)
GPU = replace(CPU, device="cuda")


def llama(hidden: int, inner: int, layers: int, **more: Any) -> ModelSpec:
    """Return the spec of a model with the architecture of Llama 2, without grouped-query attention."""
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=hidden // 128, max_position_embeddings=4096, tie_word_embeddings=False, **more,
    )  # fmt: skip
    return model_spec.from_config(config)


def of(
    family: str, work: MemoryWorkload = GPU, machine: Machine | None = None, layers: int = 2, **train: Any
) -> MemoryForecast:
    names = {"gpt2": "n_layer"}
    plan = model_spec.from_config(families.FAMILIES[family](**{names.get(family, "num_hidden_layers"): layers}))
    return forecast.forecast(plan, Train(**{"rank": 4, **train}), machine or Machine(), work)


def find_largest_sizes(
    spec: ModelSpec, settings: Train, machine: Machine, work: MemoryWorkload, available: int
) -> LargestFittingSizes:
    builder = MemoryForecastBuilder(spec, settings, machine, work)
    return forecast.find_largest_sizes(builder, builder.forecast().needed_bytes(work.local_ranks), available)

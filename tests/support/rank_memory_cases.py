"""The forecast of the memory of ranks for the sum of gradients, compared with the memory that is measured over gloo."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from compression_memory import measured
from gloo_ranks import on_ranks
from ratchet.config.machine import Machine
from ratchet.config.train import GradientCompressionSettings, Train
from ratchet.models import adapters, model_spec
from ratchet.models.memory import forecast
from ratchet.models.memory.forecast import MemoryWorkload
from ratchet.storage.records.training import MemoryForecast
from small_loop import SHAPE

CONFIG = transformers.LlamaConfig(**SHAPE | {"num_hidden_layers": 20})
"""A config with more layers than the forecast executes. The forecast must assign the layers that it skips to
buckets."""
WAYS: list[dict[str, Any]] = [
    {"method": "none"}, {"method": "bf16"}, {"method": "fp16"}, {"method": "int8", "block_size": 64},
    {"method": "powersgd", "rank": 2},
]  # fmt: skip
NAMES = [way["method"] for way in WAYS]
WORK = MemoryWorkload(1, 16, 8, packed=False, device="cpu", validation_rows=1, validation_tokens=16)


def train(way: dict[str, Any]) -> Train:
    compression = GradientCompressionSettings.model_validate({"bucket_bytes": 5000} | way)
    return Train(quantization="none", rank=8, target_modules=("q_proj", "v_proj"), gradient_compression=compression)


def shapes() -> list[tuple[int, ...]]:
    """Return the shapes of the trainable parameters of a real model."""
    model = adapters.attach(transformers.AutoModelForCausalLM.from_config(CONFIG), train(WAYS[0]), "base")
    return [tuple(parameter.shape) for _, parameter in adapters.trainable_parameters(model)]


def held_by(world: int, folder: Path) -> list[list[tuple[int, int, int]]]:
    ways = [train(way).gradient_compression for way in WAYS]
    return on_ranks(world, folder, measured, shapes(), ways, world == 1)


def expected(way: dict[str, Any], ranks: int) -> MemoryForecast:
    work = WORK.on_ranks(ranks, ranks, 16)
    return forecast.forecast(model_spec.from_config(CONFIG), train(way), Machine(), work)


@pytest.fixture(scope="module", params=[2, 3])
def held(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[Any]]:
    return request.param, held_by(request.param, tmp_path_factory.mktemp("held"))

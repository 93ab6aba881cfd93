"""Adapters that change the output of tiny models of the real classes, and peft's own merges of these adapters."""

from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from transformers.pytorch_utils import Conv1D

import families
from ratchet.config.train import Train
from ratchet.models import adapters, loading
from ratchet.models.base_model import BaseReference
from ratchet.models.device import Model

CPU = torch.device("cpu")
ROWS = [list(range(3, 40)), list(range(50, 90)), [7, 9, 11, 90, 5]]


def settings(**changes: Any) -> Train:
    return Train(**{"rank": 4, "alpha": 16, "quantization": "none", **changes})


def write_base(directory: Path, family: str, **changes: Any) -> Path:
    """Write a tiny model. Its weights and biases are large enough for an adapter to change the output."""
    model = families.make(family, **changes)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.05)
    model.save_pretrained(directory)
    return directory


def write_adapter(directory: Path, base: Path, chosen: Train, seed: int = 3, strength: float = 0.2) -> Path:
    """Write an adapter with random parameters. Strength 0 gives an untrained adapter."""
    model = adapters.attach(loading.load(base, None, chosen, CPU), chosen, "base", steps=10)
    disturb(model, seed, strength)
    directory.mkdir()
    adapters.save(model, directory, BaseReference("base"))
    return directory


def disturb(model: Model, seed: int = 3, strength: float = 0.2) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapters.trainable_parameters(model):
            drawn = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
            if "magnitude" in name:
                parameter.mul_(1 + 1.5 * strength * drawn)
            else:
                parameter.add_(drawn, alpha=strength)


def merged_by_peft(base: Path, adapter_directory: Path, chosen: Train, dtype: torch.dtype = torch.float32) -> Model:
    """Merge an adapter with peft. The weights are dequantized before the adapter is attached, because peft then adds in
    float32, which is exact."""
    plain = loading.load(base, None, chosen.model_copy(update={"quantization": "none"}), CPU).float()
    four = loading.load(base, None, chosen, CPU) if chosen.quantization != "none" else None
    with torch.no_grad():
        for name, module in four.named_modules() if four is not None else ():
            if isinstance(module, Linear4bit):
                weight = dequantize_4bit(module.weight.data, module.weight.quant_state)
                target = plain.get_submodule(name)
                target.weight.copy_(weight.T if isinstance(target, Conv1D) else weight)
    return adapters.load(plain, adapter_directory).merge_and_unload().to(dtype).eval()

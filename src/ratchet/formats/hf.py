"""Hugging Face directories: safetensors, config, tokenizer with chat template."""

from pathlib import Path
from typing import Any

import torch

from ratchet.model import quantized, source
from ratchet.model.quantized import Model


def write(model: Model, tokenizer: Any, directory: Path) -> None:
    """Save a plain model so that `AutoModelForCausalLM` opens it with neither peft nor bitsandbytes installed."""
    model.config.use_cache = True
    model.config.name_or_path = ""  # a path of this machine, and no fact about the model
    tokenizer.name_or_path = ""
    model.save_pretrained(str(directory), safe_serialization=True)
    tokenizer.save_pretrained(str(directory))


def reopen(directory: Path, dtype: torch.dtype, device: torch.device) -> tuple[Model, Any]:
    """Model and tokenizer from disk, as a user would load them."""
    return quantized.load_plain(directory, dtype, device), source.load_tokenizer(directory)

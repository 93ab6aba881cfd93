"""Hugging Face directories: safetensors, config, tokenizer with chat template."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ratchet.model import quantized, source
from ratchet.model.quantized import Model


def write(model: Model, tokenizer: Any, ends: Sequence[int], directory: Path) -> None:
    """Save a plain model so that `AutoModelForCausalLM` opens it with neither peft nor bitsandbytes installed.

    Args:
        ends: token ids that end an answer; they become the model's own, so that every runtime stops there.
    """
    if model.generation_config:
        model.generation_config.eos_token_id = ends[0] if len(ends) == 1 else list(ends)
    model.config.use_cache = True
    model.config.name_or_path = ""  # a path of this machine, and no fact about the model
    tokenizer.name_or_path = ""
    model.save_pretrained(str(directory), safe_serialization=True)
    tokenizer.save_pretrained(str(directory))


def reopen(directory: Path, dtype: torch.dtype, device: torch.device) -> tuple[Model, Any]:
    """Model and tokenizer from disk, as a user would load them."""
    return quantized.load_plain(directory, dtype, device), source.load_tokenizer(directory)

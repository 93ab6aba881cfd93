"""Hugging Face directories: safetensors, config, tokenizer with chat template."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ratchet.model import quantized, source
from ratchet.model.quantized import Model

CARD = "README.md"


def write(model: Model, tokenizer: Any, ends: Sequence[int], card: str, directory: Path) -> None:
    """Save a plain model so that `AutoModelForCausalLM` opens it with neither peft nor bitsandbytes installed.

    Args:
        model: with a row for every token of the tokenizer.
        tokenizer: as in training: its chat template and its added tokens are written.
        ends: token ids that end an answer; they become the model's own, so that every runtime stops there.
        card: text of the model card.
        directory: need not be there.
    """
    if model.generation_config:
        model.generation_config.eos_token_id = ends[0] if len(ends) == 1 else list(ends)
    model.config.use_cache = True
    model.config.name_or_path = ""  # a path of this machine, and no fact about the model
    tokenizer.name_or_path = ""
    model.save_pretrained(str(directory), safe_serialization=True)
    tokenizer.save_pretrained(str(directory))
    (directory / CARD).write_text(card, encoding="utf-8")


def reopen(directory: Path, dtype: torch.dtype, device: torch.device, remote_code: bool = False) -> tuple[Model, Any]:
    """Model and tokenizer from disk, as a user would load them; with `remote_code`, code that lies there may run."""
    model = quantized.load_plain(directory, dtype, device, remote_code)
    return model, source.load_tokenizer(directory, remote_code=remote_code)

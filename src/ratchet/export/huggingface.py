"""Hugging Face directories: safetensors, config, tokenizer with chat template."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ratchet.models import base_model, loading
from ratchet.models.loading import Model
from ratchet.storage import files

CARD = "README.md"
_PATHS = ("_name_or_path", "name_or_path")
"""In a config: where somebody had the model; a path of a machine, and no fact about it."""


def complete_directory(directory: Path, tokenizer: Any, ends: Sequence[int], card: str) -> None:
    """Make a directory of merged weights and config one that `AutoModelForCausalLM` and a chat server open.

    Neither peft nor bitsandbytes nor this package is needed for it.

    Args:
        directory: with weights, config.json and perhaps generation_config.json; these are rewritten.
        tokenizer: as in training: its chat template and its added tokens are written.
        ends: token ids that end an answer; they become the model's own, so that every runtime stops there.
        card: text of the model card.
    """
    config = _read_json(directory / "config.json")
    config = {key: value for key, value in config.items() if key not in _PATHS} | {"use_cache": True}
    config.pop("quantization_config", None)
    _write_json(directory / "config.json", config)
    generation = directory / "generation_config.json"
    if generation.exists():
        end = ends[0] if len(ends) == 1 else list(ends)
        _write_json(generation, _read_json(generation) | {"eos_token_id": end})
    tokenizer.name_or_path = ""
    tokenizer.save_pretrained(str(directory))
    files.write_atomic(directory / CARD, card)


def _read_json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """As transformers writes it: people compare configs by eye."""
    files.write_atomic(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def reopen_model(
    directory: Path, dtype: torch.dtype, device: torch.device, remote_code: bool = False
) -> tuple[Model, Any]:
    """Model and tokenizer from disk, as a user would load them; with `remote_code`, code that lies there may run."""
    model = loading.load_plain(directory, dtype, device, remote_code)
    return model, base_model.load_tokenizer(directory, remote_code=remote_code)

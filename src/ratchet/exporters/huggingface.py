"""Completes and loads Hugging Face model directories: safetensors, config, tokenizer with chat template."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ratchet.models import base_model, loading
from ratchet.models.loading import Model
from ratchet.storage import files

MODEL_CARD = "README.md"
_PATH_KEYS = ("_name_or_path", "name_or_path")
"""Config keys with the path of the model on one machine; an export does not contain them."""


def complete_directory(directory: Path, tokenizer: Any, end_ids: Sequence[int], card: str) -> None:
    """Add tokenizer, card and final configs to merged weights, so that `AutoModelForCausalLM` and servers can load it.

    Loading needs neither peft nor bitsandbytes nor this package.

    Args:
        directory: contains weights, config.json and perhaps generation_config.json; both configs are rewritten.
        tokenizer: the tokenizer used in training; its chat template and added tokens are written.
        end_ids: token ids that end an answer; they become the model's eos_token_id, so that every runtime stops there.
        card: text of the model card.
    """
    config = _read_json(directory / "config.json")
    config = {key: value for key, value in config.items() if key not in _PATH_KEYS} | {"use_cache": True}
    config.pop("quantization_config", None)
    _write_json(directory / "config.json", config)
    generation = directory / "generation_config.json"
    if generation.exists():
        end = end_ids[0] if len(end_ids) == 1 else list(end_ids)
        _write_json(generation, _read_json(generation) | {"eos_token_id": end})
    tokenizer.name_or_path = ""
    tokenizer.save_pretrained(str(directory))
    files.write_atomic(directory / MODEL_CARD, card)


def _read_json(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_bytes())
    return document


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """Write JSON in transformers' layout, so that diffs against other configs stay readable."""
    files.write_atomic(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def reopen_model(
    directory: Path, dtype: torch.dtype, device: torch.device, remote_code: bool = False
) -> tuple[Model, Any]:
    """Load model and tokenizer from disk as a user would. `remote_code` allows code in the directory to run."""
    model = loading.load_plain(directory, dtype, device, remote_code)
    return model, base_model.load_tokenizer(directory, remote_code=remote_code)

"""Writes the merged model as a Hugging Face directory in INT8: LLM.int8 of bitsandbytes, for transformers and vLLM.

    model.safetensors   int8 matrices of the linear layers with one scale per row (SCB); embeddings, norms and the head
                        as in the merged model
    config.json         with quantization_config; all else as in `hf`

Source: Dettmers et al., "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale", NeurIPS 2022.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ratchet.errors import BaseModelError, first_line
from ratchet.exporters.verification.parity import TorchRuntime
from ratchet.models import base_model
from ratchet.models.device import Model

_WEIGHTS = (".safetensors", ".safetensors.index.json")
_WRITTEN = ("config.json", "generation_config.json", "README.md")
"""Files that are not copied from the merged model: two are written with the weights; the card is about `hf`."""


class Int8Runtime(TorchRuntime):
    """Runs the directory in transformers, with bitsandbytes."""

    name = f"{TorchRuntime.name}, bitsandbytes {version('bitsandbytes')}"


def write_int8(merged: Path, target: Path, dtype: torch.dtype, device: torch.device, shard_bytes: int) -> None:
    """Quantize a merged model and write it. The model is in memory as a whole, in 8 bits.

    Args:
        merged: the Hugging Face directory of the merged model.
        target: the directory to fill.
        dtype: type of everything that stays unquantized, and of the computation.
        device: device that quantizes.
        shard_bytes: largest size of a weight file, unless a single tensor is larger.

    Raises:
        BaseModelError: transformers cannot quantize a model of this kind.
    """
    from transformers import BitsAndBytesConfig

    model = _load(merged, device, dtype=dtype, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    model.save_pretrained(target, max_shard_size=shard_bytes)
    for path in sorted(merged.iterdir()):
        if path.name not in _WRITTEN and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, target / path.name)


@contextmanager
def open_runtime(directory: Path, device: torch.device, remote_code: bool) -> Iterator[Int8Runtime]:
    """Open the directory as a user of transformers does."""
    tokenizer = base_model.load_tokenizer(directory, remote_code=remote_code)
    yield Int8Runtime(_load(directory, device), tokenizer)


def _load(directory: Path, device: torch.device, **options: Any) -> Model:
    from transformers import AutoModelForCausalLM

    try:
        model: Model = AutoModelForCausalLM.from_pretrained(
            directory, local_files_only=True, use_safetensors=True, device_map={"": device}, **options
        )
    except (ValueError, RuntimeError, NotImplementedError, ImportError) as error:
        raise BaseModelError(
            f"export.bitsandbytes.types: {directory} cannot be loaded in 8 bits ({first_line(error)}); remove int8"
        ) from error
    return model.requires_grad_(False).eval()

"""Weights that come as pickles (pytorch_model.bin) to safetensors, shard by shard, running no code of theirs.

A pickle is a program. torch's reader with `weights_only` interprets the part of it that builds tensors, and refuses
the rest. Files are mapped into memory, so that a shard need not fit into it; those that torch wrote before version 1.6
are read whole.
"""

import json
import shutil
import warnings
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ratchet.errors import BaseModelError
from ratchet.models import base_model

_INDEX_BEFORE = base_model.PICKLE_INDEX
_ONE_FILE = "pytorch_model.bin"


def convert(directory: Path, target: Path, tied: Collection[str] = (), code: bool = False) -> None:
    """Make a model directory with safetensors of one with pickles; the same weights give the same bytes.

    Args:
        directory: the model with pickles.
        target: a new directory.
        tied: weights that the model takes from others: where a file holds one as the very memory of another, it is
            left out. Others that share memory are written each for itself.
        code: whether Python code that the model brings along is copied too.

    Raises:
        BaseModelError: there are no such files, a shard is missing or damaged, or holds more than tensors.
    """
    before = _files(directory)
    target.mkdir()
    for name in base_model.names_beside_weights(directory, code):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(directory / name, target / name)
    places: dict[str, str] = {}
    size_bytes = 0
    for number, name in enumerate(before, start=1):
        after = base_model.WEIGHTS if len(before) == 1 else f"model-{number:05d}-of-{len(before):05d}.safetensors"
        tensors = _apart(_read(directory / name), tied)
        save_file(tensors, target / after, metadata={"format": "pt"})  # what transformers writes, and asks for
        places |= dict.fromkeys(tensors, after)
        size_bytes += sum(tensor.nbytes for tensor in tensors.values())
        del tensors
    if len(before) > 1:
        index = {"metadata": {"total_size": size_bytes}, "weight_map": dict(sorted(places.items()))}
        (target / base_model.INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _files(directory: Path) -> list[str]:
    """Pickles that hold the model, in order."""
    if (directory / _INDEX_BEFORE).exists():
        return base_model.shards(directory / _INDEX_BEFORE)
    if (directory / _ONE_FILE).exists():
        return [_ONE_FILE]
    raise BaseModelError(
        f"{directory}: no weights: neither {base_model.WEIGHTS} nor {_ONE_FILE}, nor an index of shards"
    )


def _read(file: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it may not know newer protocols: then it raises as well
            held: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # of a damaged file torch raises half a dozen unrelated types
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        if type(error).__name__ != "UnpicklingError":
            raise BaseModelError(f"{file}: damaged or cut short ({lines[0]}); bring the original file") from None
        refusal = [line for line in lines if "Unsupported" in line] or lines
        raise BaseModelError(
            f"{file}: refused: it holds more than tensors, and what it would run to make it is not run ({refusal[0]}); "
            "take the model from where it is published as safetensors"
        ) from None
    strange = [key for key, value in held.items() if not isinstance(value, Tensor)] if isinstance(held, dict) else [""]
    if strange:
        raise BaseModelError(
            f"{file}: no weights by name, but {type(held).__name__}"
            + (f" with {strange[0]}: {type(held[strange[0]]).__name__}" if strange[0] else "")
            + "; bring the file as transformers writes it"
        )
    return {str(key): value for key, value in held.items()}


def _apart(tensors: dict[str, Tensor], tied: Collection[str]) -> dict[str, Tensor]:
    """Tensors that share no memory, for the format knows no sharing."""
    seen: dict[int, str] = {}
    views: set[tuple[Any, ...]] = set()
    apart: dict[str, Tensor] = {}
    for name in sorted(tensors, key=lambda name: (name in tied, name)):  # what others are tied to comes first
        tensor = tensors[name]
        view = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if name in tied and view in views:
            continue
        views.add(view)
        memory = tensor.untyped_storage().data_ptr()
        apart[name] = (tensor.clone() if memory in seen and tensor.numel() else tensor).contiguous()
        seen.setdefault(memory, name)
    return apart

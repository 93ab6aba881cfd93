"""Reads the base's weights and writes the merged model's safetensors files, tensor by tensor.

Names: while loading, transformers renames tensors (checkpoints with another prefix, names of old versions) and combines
some tensors (experts that are stored one by one become one tensor). This module maps names in files to parameters and
back. It runs the functions of transformers' own loader and writer (core_model_loading) on meta tensors. The plan of the
merge (merger.py) then checks that the loader can read the planned files.

Files and index have the names that transformers writes and reads.
"""

import copy
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Params4bit
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from ratchet.errors import BaseModelError
from ratchet.exporters.merge.recipe import MergeRecipe
from ratchet.models import loading, safetensors_format, vocabulary, weights
from ratchet.models.device import Model
from ratchet.storage import files

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ReadTensor = Callable[[str, str], Tensor]
"""Function that reads a stored tensor, given the tensor's name and the name of its group's first parameter."""


class UnknownNamesError(BaseModelError):
    """The names in the files cannot be mapped to parameters, so the complete model must be merged in memory."""


# Names of stored tensors and parameters.


@dataclass(frozen=True)
class TensorGroup:
    """Stored tensors and the parameters that they form together; usually one tensor and one parameter."""

    first_parameter: str
    """Name of the group's parameter, or of its first parameter."""
    stored: tuple[tuple[str, str], ...]
    """For each stored tensor: the converter's pattern that its name matched, and its name in the files."""
    converter: Any = field(default=None, compare=False)
    """transformers' converter if values are combined or split; None if a tensor is only renamed."""

    def parameters(self, model: Model, read: ReadTensor) -> dict[str, Tensor]:
        """Compute the model's parameters by name.

        Args:
            model: the model, on any device.
            read: called for each stored tensor when it is needed.
        """
        if self.converter is None:
            return {self.first_parameter: read(self.stored[0][1], self.first_parameter)}
        converter = copy.deepcopy(self.converter)
        for pattern, name in self.stored:
            converter.add_tensor(
                self.first_parameter, name, pattern, lambda name=name: read(name, self.first_parameter)
            )
        converted = converter.convert(self.first_parameter, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def group_tensors(model: Model, stored: Iterable[str]) -> list[TensorGroup]:
    """Group stored tensors by parameter, in transformers' loading order.

    The conversions are recorded in the model, so that `convert_to_stored` can revert them.

    Args:
        model: the model, on the meta device.
        stored: names of the tensors in the files. Names without a parameter in the model are ignored.

    Raises:
        UnknownNamesError: two tensors map to the same parameter.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [conversion for conversion in mapping if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in mapping if isinstance(conversion, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    parameters, prefix = model.state_dict(), model.base_model_prefix
    groups: dict[str, TensorGroup] = {}
    for name in sorted(stored, key=dot_natural_key):
        parameter, pattern = rename_source_key(name, renamings, converters, prefix, parameters)
        if parameter not in parameters and name in parameters:
            parameter, pattern = rename_source_key(name, [], [], prefix, parameters)
        if parameter not in parameters:
            continue
        group = groups.get(parameter)
        if group is not None and (pattern is None or group.converter is not by_pattern[pattern]):
            raise UnknownNamesError(f"{name} and {group.stored[0][1]} both map to parameter {parameter}")
        group = group or TensorGroup(parameter, (), by_pattern[pattern] if pattern is not None else None)
        groups[parameter] = replace(group, stored=(*group.stored, (pattern or name, name)))
    # transformers' loader records the conversions in the same attribute.
    model._weight_conversions = [conversion for conversion in mapping if conversion.was_used()]
    return list(groups.values())


def convert_to_stored(model: Model, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert the parameters of complete groups to the tensors and names that transformers writes."""
    converted: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return converted


def stored_names(model: Model, tensors: dict[str, Tensor]) -> dict[str, str] | None:
    """Map each parameter to its name in transformers' files; None if writing does more than rename."""
    if any(isinstance(conversion, WeightConverter) for conversion in model._weight_conversions):
        return None
    names = {id(tensor): name for name, tensor in convert_to_stored(model, tensors).items()}
    return {name: names[id(tensor)] for name, tensor in tensors.items()}


# Reading the base's weights.


@dataclass(frozen=True)
class TokenRowInitialization:
    """Additional rows of a tensor with one row per token."""

    count: int
    """Number of rows of the grown tensor."""
    stored: int
    """Number of rows in the files."""
    pieces: vocabulary.Pieces
    """Pieces from which each additional row is initialized."""


@dataclass(frozen=True)
class BaseStorageFormat:
    """Types and layouts in which the base's parameters are stored, and in which training loaded them."""

    dtypes: Mapping[str, torch.dtype]
    """Type of every saved parameter and buffer."""
    quantized: frozenset[str]
    """Parameters that training quantizes to 4 bits."""
    prequantized: frozenset[str]
    """Stored tensors that are already 4-bit in the files."""
    transposed: frozenset[str]
    """Parameters stored as [inputs, outputs]; they are transposed for quantization."""
    token_rows: Mapping[str, TokenRowInitialization]
    """Parameters with one row per token."""


class BaseWeightReader:
    """Reads stored tensors and converts them to the values that updates are added to."""

    def __init__(self, recipe: MergeRecipe, storage: BaseStorageFormat) -> None:
        self._recipe = recipe
        self._storage = storage
        self._tensors = weights.WeightReader(recipe.base).tensors()
        self._compute_dtype = loading.pick_dtype(recipe.train.compute_dtype, recipe.device)

    def read(self, name: str, parameter: str) -> Tensor:
        """Read a stored tensor in the type of its parameter, as a new tensor.

        Args:
            name: name in the files.
            parameter: name of the parameter that consists of this tensor or contains it.
        """
        stored = self._tensors[name][...].to(self._recipe.device)
        if name in self._storage.prequantized:
            return self._dequantize_stored(name, parameter, stored)
        return stored.to(self._storage.dtypes[parameter])

    def as_trained(self, name: str, tensor: Tensor) -> Tensor:
        """Return a complete parameter in float32 as training used it: with new token rows, and rounded to 4 bits if
        quantized. Integer buffers stay unchanged."""
        if not tensor.is_floating_point():
            return tensor
        if name in self._storage.quantized:
            return self._round_to_4bit(name, tensor)
        rows = self._storage.token_rows.get(name)
        return tensor.float() if rows is None else self._add_token_rows(rows, tensor)

    def _round_to_4bit(self, name: str, tensor: Tensor) -> Tensor:
        """Quantize to 4 bits as transformers 5 does (integrations.bitsandbytes, Bnb4bitQuantize), and dequantize as
        bitsandbytes does for each matrix product."""
        is_transposed, train = name in self._storage.transposed, self._recipe.train
        quantized: Any = Params4bit(
            tensor.T if is_transposed else tensor,
            requires_grad=False,
            quant_type=train.quantization,
            compress_statistics=train.double_quantization,
            quant_storage=getattr(torch, train.quantization_storage),
        ).to(self._recipe.device)
        del tensor
        value: Tensor = dequantize_4bit(quantized.data, quantized.quant_state).float()
        return value.T if is_transposed else value

    def _dequantize_stored(self, name: str, parameter: str, stored: Tensor) -> Tensor:
        """Dequantize a weight that is 4-bit in the files, as its layer does."""
        parts = {key: tensor[...] for key, tensor in self._tensors.items() if key.startswith(f"{name}.")}
        quantized: Any = Params4bit.from_prequantized(stored, parts, device=self._recipe.device)
        quantized.quant_state.dtype = self._compute_dtype  # bitsandbytes' kernel returns this type
        value: Tensor = dequantize_4bit(quantized.data, quantized.quant_state).to(self._storage.dtypes[parameter])
        return value.T if parameter in self._storage.transposed else value

    def _add_token_rows(self, rows: TokenRowInitialization, tensor: Tensor) -> Tensor:
        """Add rows for new tokens, initialized as in `vocabulary.grow_embeddings`, in the base's compute type."""
        if not rows.pieces:
            return tensor.float()
        grown = torch.zeros(rows.count, *tensor.shape[1:], dtype=self._compute_dtype, device=tensor.device)
        grown[: rows.stored] = tensor
        vocabulary.initialize_rows(grown, rows.pieces, rows.stored)
        if tensor.dtype == grown.dtype:
            return grown.float()
        value = torch.zeros(grown.shape, dtype=torch.float32, device=tensor.device)
        value[: rows.stored] = tensor
        ids = sorted(rows.pieces)
        value[ids] = grown[ids].float()
        return value


# Writing the merged model's weights.


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Size of the data in the file."""
        return math.prod(self.shape) * int(self.dtype.itemsize)


def shard_files_size_bytes(entries: Sequence[TensorEntry], shard_bytes: int) -> int:
    """Return the total size of the files that `write_shards` writes, with headers and index."""
    shards = _divide_into_shards(entries, shard_bytes)
    names = _file_names(len(shards))
    index = len(_encode_index(shards, names)) if len(shards) > 1 else 0
    return index + sum(len(_encode_header(shard)) + _sum_entry_bytes(shard) for shard in shards)


def write_shards(
    directory: Path,
    entries: Sequence[TensorEntry],
    tensors: Iterator[tuple[str, Tensor]],
    shard_bytes: int,
    on_progress: Callable[[int], None],
) -> None:
    """Write one file, or several files and their index. File contents are fsynced; the directory entry is not.

    Args:
        directory: an existing directory.
        entries: all tensors, larger element types first, so that each tensor is aligned to its element size.
        tensors: names and values of the same tensors, in the same order, on the CPU; one at a time is in memory.
        shard_bytes: largest size of a file's data, unless a single tensor is larger.
        on_progress: called after each chunk with the bytes written so far.

    Raises:
        RuntimeError: a tensor differs from its entry, or the machine is big-endian.
    """
    shards = _divide_into_shards(entries, shard_bytes)
    names = _file_names(len(shards))
    written = 0

    def blocks(shard: Sequence[TensorEntry]) -> Iterator[list[bytes | memoryview]]:
        nonlocal written
        yield [_encode_header(shard)]
        for entry in shard:
            for chunk in _tensor_chunks(entry, *next(tensors)):
                size = len(chunk)
                yield [chunk]
                written += size
                on_progress(written)

    with files.sync_in_background() as sync:
        for name, shard in zip(names, shards, strict=True):
            files.write_blocks(directory / name, blocks(shard), sync=sync)
    if len(shards) > 1:
        files.write_atomic(directory / INDEX_FILE, _encode_index(shards, names))


def _divide_into_shards(entries: Sequence[TensorEntry], shard_bytes: int) -> list[list[TensorEntry]]:
    """Fill each shard until the next tensor would exceed its size."""
    shards: list[list[TensorEntry]] = [[]]
    left = shard_bytes
    for entry in entries:
        if shards[-1] and entry.size_bytes > left:
            shards.append([])
            left = shard_bytes
        shards[-1].append(entry)
        left -= entry.size_bytes
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _encode_index(shards: Sequence[Sequence[TensorEntry]], names: Sequence[str]) -> bytes:
    weight_map = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
    metadata = {"total_size": sum(map(_sum_entry_bytes, shards))}
    return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True).encode()


def _sum_entry_bytes(shard: Sequence[TensorEntry]) -> int:
    return sum(entry.size_bytes for entry in shard)


def _encode_header(shard: Sequence[TensorEntry]) -> bytes:
    entries = ((entry.name, entry.dtype, entry.shape) for entry in shard)
    return safetensors_format.encode_header(entries, {"format": "pt"}, sort_names=False)


def _tensor_chunks(entry: TensorEntry, name: str, tensor: Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes in chunks. Each chunk is released when the next chunk is requested. So a caller that still
    refers to the last chunk does not keep the tensor in memory."""
    if (name, tuple(tensor.shape), tensor.dtype) != (entry.name, entry.shape, entry.dtype):
        raise RuntimeError(f"found {name} {tuple(tensor.shape)} {tensor.dtype}; expected {entry}")
    with safetensors_format.view_bytes(tensor) as view:
        for begin in range(0, len(view), safetensors_format.CHUNK_BYTES):
            with view[begin : begin + safetensors_format.CHUNK_BYTES] as chunk:
                yield chunk

"""Writes safetensors files tensor by tensor: the header first, then each tensor as it is computed.

The format (README of huggingface/safetensors): 8 bytes with the header's length N as a little-endian integer; N bytes
of JSON with dtype, shape and data offsets for each name; then the tensors' bytes, row-major and little-endian, without
gaps. Files and index have the names that transformers writes and reads.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ratchet.storage import files

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CHUNK_BYTES = 16 * 2**20
"""Bytes per write."""

_DTYPE_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
}  # fmt: skip


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
    """Total size of the files that `write_shards` writes, with headers and index."""
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
        tensors: the same tensors with their names, in the same order, on the CPU; one is in memory at a time.
        shard_bytes: largest size of a file's data, unless a single tensor is larger.
        on_progress: called after each chunk with the bytes written so far.

    Raises:
        RuntimeError: a tensor differs from its entry, or the machine is big-endian.
    """
    if sys.byteorder != "little":
        raise RuntimeError("safetensors files are little-endian, but this machine is big-endian")
    shards = _divide_into_shards(entries, shard_bytes)
    names = _file_names(len(shards))
    written = 0
    for name, shard in zip(names, shards, strict=True):

        def blocks(shard: Sequence[TensorEntry] = shard) -> Iterator[list[bytes | memoryview]]:
            nonlocal written
            yield [_encode_header(shard)]
            for entry in shard:
                for chunk in _tensor_chunks(_check_tensor(entry, next(tensors))):
                    size = len(chunk)
                    yield [chunk]
                    written += size
                    on_progress(written)

        files.write_blocks(directory / name, blocks())
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
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for entry in shard:
        end = begin + entry.size_bytes
        entries[entry.name] = {"dtype": _DTYPE_NAMES[entry.dtype], "shape": entry.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _check_tensor(entry: TensorEntry, named_tensor: tuple[str, Tensor]) -> Tensor:
    name, tensor = named_tensor
    if (name, tuple(tensor.shape), tensor.dtype) != (entry.name, entry.shape, entry.dtype):
        raise RuntimeError(f"found {name} {tuple(tensor.shape)} {tensor.dtype}; expected {entry}")
    return tensor


def _tensor_chunks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes in chunks. A chunk is released when the next one is requested, so that a caller that
    keeps the last chunk does not keep the tensor in memory."""
    flat = tensor.detach().contiguous().reshape(-1)
    with memoryview(flat.view(torch.uint8).numpy()) as view:
        for begin in range(0, len(view), CHUNK_BYTES):
            with view[begin : begin + CHUNK_BYTES] as chunk:
                yield chunk

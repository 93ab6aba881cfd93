"""Writing safetensors files tensor by tensor: the header first, then what is computed while it is written.

The format (README of huggingface/safetensors): 8 bytes, the length N of the header as a little-endian integer; N bytes
of JSON, for each name its dtype, shape and place in what follows; the tensors' bytes, row-major and little-endian,
without gaps. Names of files and index are those that transformers writes and reads.
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

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CHUNK_BYTES = 16 * 2**20
"""Written at once."""

_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Of its numbers."""
        return math.prod(self.shape) * int(self.dtype.itemsize)


def shard_files_size_bytes(entries: Sequence[TensorEntry], shard_bytes: int) -> int:
    """Of all files that `write_shards` makes of them."""
    found = _divide_into_shards(entries, shard_bytes)
    names = _file_names(len(found))
    index = len(_encode_index(found, names)) if len(found) > 1 else 0
    return index + sum(len(_encode_header(shard)) + _sum_entry_bytes(shard) for shard in found)


def write_shards(
    directory: Path,
    entries: Sequence[TensorEntry],
    tensors: Iterator[tuple[str, Tensor]],
    shard_bytes: int,
    beat: Callable[[int], None],
) -> None:
    """Write one file, or several and their index; durable but for their names.

    Args:
        directory: where; it is there.
        entries: what will come, the larger numbers first: then each tensor begins at a multiple of its numbers' size.
        tensors: the same tensors by name, one by one in this order, on the CPU. Only one is held at a time.
        shard_bytes: size that no file's numbers exceed, unless a single tensor does.
        beat: called after each block with the bytes written so far.

    Raises:
        RuntimeError: a tensor is not what was announced.
    """
    if sys.byteorder != "little":
        raise RuntimeError("tensors lie in memory as big-endian numbers here, and safetensors hold little-endian ones")
    found = _divide_into_shards(entries, shard_bytes)
    names = _file_names(len(found))
    done = 0
    for name, shard in zip(names, found, strict=True):

        def blocks(shard: Sequence[TensorEntry] = shard) -> Iterator[list[bytes | memoryview]]:
            nonlocal done
            yield [_encode_header(shard)]
            for entry in shard:
                for piece in _tensor_chunks(_check_tensor(entry, next(tensors))):
                    size = len(piece)
                    yield [piece]
                    done += size
                    beat(done)

        files.write_blocks(directory / name, blocks())
    if len(found) > 1:
        files.write_atomic(directory / INDEX, _encode_index(found, names))


def _divide_into_shards(entries: Sequence[TensorEntry], shard_bytes: int) -> list[list[TensorEntry]]:
    """Entries file by file: one is filled until the next tensor would be too much."""
    found: list[list[TensorEntry]] = [[]]
    room = shard_bytes
    for entry in entries:
        if found[-1] and entry.size_bytes > room:
            found.append([])
            room = shard_bytes
        found[-1].append(entry)
        room -= entry.size_bytes
    return found


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _encode_index(found: Sequence[Sequence[TensorEntry]], names: Sequence[str]) -> bytes:
    placed = {entry.name: name for name, shard in zip(names, found, strict=True) for entry in shard}
    total = sum(map(_sum_entry_bytes, found))
    return (json.dumps({"metadata": {"total_size": total}, "weight_map": placed}, indent=2, sort_keys=True)).encode()


def _sum_entry_bytes(shard: Sequence[TensorEntry]) -> int:
    return sum(entry.size_bytes for entry in shard)


def _encode_header(shard: Sequence[TensorEntry]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for entry in shard:
        end = begin + entry.size_bytes
        entries[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": entry.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _check_tensor(entry: TensorEntry, found: tuple[str, Tensor]) -> Tensor:
    name, tensor = found
    if (name, tuple(tensor.shape), tensor.dtype) != (entry.name, entry.shape, entry.dtype):
        raise RuntimeError(f"{name} {tuple(tensor.shape)} {tensor.dtype} came where {entry} was announced")
    return tensor


def _tensor_chunks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor as it lies in memory, some at a time; each is valid until the next is asked for, so that
    whoever still holds the last does not hold the tensor."""
    numbers = tensor.detach().contiguous().reshape(-1)
    with memoryview(numbers.view(torch.uint8).numpy()) as view:
        for begin in range(0, len(view), CHUNK_BYTES):
            with view[begin : begin + CHUNK_BYTES] as piece:
                yield piece

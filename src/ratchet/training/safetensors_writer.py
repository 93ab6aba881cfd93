"""Tensors to a safetensors file, streaming: no second copy of them, equal tensors give equal bytes.

The format (README of huggingface/safetensors): 8 bytes, the length N of the header as a little-endian integer; N bytes
of JSON, for each name its dtype, shape and place in what follows; the tensors' bytes, row-major and little-endian,
without gaps. `safetensors` reads it back. Its own writer takes no path to a seam, and hashes nothing.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ratchet.storage import files

CHUNK_BYTES = 16 * 2**20
"""Written at once."""

_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
    torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64", torch.uint64: "U64", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip


def _nothing() -> None:
    """Nobody listens."""


def digest_and_size(tensors: Mapping[str, Tensor], beat: Callable[[], None] = _nothing) -> tuple[str, int]:
    """SHA-256 and size in bytes of the file that `write` makes of these tensors.

    Raises:
        TypeError: the format has no name for a tensor's dtype.
    """
    sha, size = hashlib.sha256(), 0
    for block in _blocks(tensors):
        for piece in block:
            sha.update(piece)
            size += len(piece)
        beat()
    return sha.hexdigest(), size


def write(path: Path, tensors: Mapping[str, Tensor], beat: Callable[[], None] = _nothing) -> None:
    """Write a new file and fsync it (its name is for the caller to make durable).

    Args:
        path: the file.
        tensors: on the CPU; one that is not contiguous is copied.
        beat: called after each chunk of at most CHUNK_BYTES.
    """
    files.write_blocks(path, _blocks(tensors), beat)


def _blocks(tensors: Mapping[str, Tensor]) -> Iterator[list[bytes | memoryview]]:
    """The file in pieces: as many in one block as make up at most CHUNK_BYTES."""
    if sys.byteorder != "little":
        raise RuntimeError("tensors lie in memory as big-endian numbers here, and checkpoints hold little-endian ones")
    # The largest numbers first: then each tensor begins at a multiple of its numbers' size, as readers need.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    block: list[bytes | memoryview] = [_header(tensors, order)]
    room = CHUNK_BYTES - len(block[0])
    for name in order:
        view = _bytes_of(tensors[name])
        while len(view):
            if room <= 0:
                yield block
                block, room = [], CHUNK_BYTES
            block.append(view[:room])
            view, room = view[room:], room - len(block[-1])
    yield block


def _bytes_of(tensor: Tensor) -> memoryview:
    numbers = tensor.detach().contiguous().reshape(-1)
    view: memoryview = memoryview(numbers.view(torch.uint8).numpy())
    return view


def _header(tensors: Mapping[str, Tensor], order: list[str]) -> bytes:
    entries, begin = {}, 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name}: safetensors has no name for {tensor.dtype}")
        end = begin + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text

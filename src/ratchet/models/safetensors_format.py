"""Encodes safetensors files piece by piece, so that their writers can fsync, hash and count what they write.

Format (README of huggingface/safetensors): 8 bytes with the header's length N as a little-endian integer; N bytes of
JSON with dtype, shape and data offsets for each name; then the tensors' bytes, row-major and little-endian, without
gaps. The library's own writer is not used, because it writes whole files at once: it can neither inject faults, nor
compute the digest of a file, nor write tensors that are computed one at a time.
"""

import json
import math
import sys
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

CHUNK_BYTES = 16 * 2**20
"""Maximum number of bytes per write."""
_DTYPE_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
    torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64", torch.uint64: "U64", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip


def encode_header(
    entries: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: dict[str, str] | None, sort_names: bool
) -> bytes:
    """Return length and header of a file with these names, dtypes and shapes, in the order of their data.

    Readers require that each tensor begins at a multiple of its element size, so larger elements must come first.

    Raises:
        TypeError: safetensors has no name for a dtype.
        RuntimeError: this machine is big-endian.
    """
    if sys.byteorder != "little":
        raise RuntimeError("safetensors files are little-endian, but this machine is big-endian")
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    begin = 0
    for name, dtype, shape in entries:
        if dtype not in _DTYPE_NAMES:
            raise TypeError(f"{name}: safetensors has no name for {dtype}")
        end = begin + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, sort_keys=sort_names, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def view_bytes(tensor: Tensor) -> memoryview:
    """Return the data of a tensor on the CPU as bytes, without a copy if it is contiguous."""
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())

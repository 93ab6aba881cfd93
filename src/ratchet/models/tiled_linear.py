"""4-bit linear layers on a CPU, which dequantize their weights in tiles.

bitsandbytes 0.50 dequantizes a whole matrix in the forward pass, and again in the backward pass. glibc returns blocks
above 32 MiB to the system when they are freed (mallopt(3), M_MMAP_THRESHOLD), so each of these matrices costs a page
fault for every 4 KiB: ten times as long as the dequantization itself. A tile is small enough to be reused, and to stay
in the cache until its product is computed. A tile never divides the dimension over which a product adds, so the results
have the same bits unless the library chooses another kernel for the smaller product, as it does for a few rows.
"""

from collections.abc import Iterator
from typing import Any

import bitsandbytes
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, dequantize_blockwise
from bitsandbytes.nn import Linear4bit
from torch import Tensor

from ratchet.config import units

LARGEST_KEPT_BYTES = 32 * units.MIB
"""glibc keeps freed blocks up to this size for the next allocation. Smaller matrices gain nothing from tiles."""

TILE_BYTES = 8 * units.MIB


class TiledLinear4bit(Linear4bit):  # type: ignore[misc]  # bitsandbytes has no types
    """`Linear4bit` on a CPU, or on the meta device to forecast one. Set as the class of loaded layers."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ W.T + bias for x of shape [..., inputs], in the type of `x`."""
        layer: Any = self
        if not layer.compute_type_is_set:
            layer.set_compute_type(x)
            layer.compute_type_is_set = True
        dtype = self.compute_dtype or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return multiply(x.to(dtype), self.packed, self.constants, bias).to(x.dtype)

    def multiply_transposed(self, gradient: Tensor) -> Tensor:
        """Return gradient @ W for a gradient of shape [rows, outputs], in its type."""
        return multiply_transposed(gradient, self.packed, self.constants)

    @property
    def packed(self) -> Tensor:
        """The weights, two in a byte."""
        packed: Tensor = self.weight.data
        return packed

    @property
    def constants(self) -> QuantState:
        """Quantization constants, shape and type of the weights."""
        return self.weight.quant_state


def multiply(x: Tensor, packed: Tensor, state: QuantState, bias: Tensor | None) -> Tensor:
    """Return x @ W.T + bias for x of shape [..., inputs] and a frozen 4-bit matrix W of shape [outputs, inputs]."""
    if state.shape[1] != x.shape[-1] or not _is_tiled(x, state):
        output: Tensor = bitsandbytes.matmul_4bit(x, packed, bias=bias, quant_state=state)
        return output
    rows: Tensor = _TiledProduct.apply(x.flatten(0, -2), packed.view(torch.uint8), state, bias)
    return rows if x.dim() == 2 else rows.view(*x.shape[:-1], -1)


def multiply_transposed(gradient: Tensor, packed: Tensor, state: QuantState) -> Tensor:
    """Return gradient @ W for a gradient of shape [rows, outputs] and a 4-bit matrix W of shape [outputs, inputs]."""
    if not _is_tiled(gradient, state):
        return torch.mm(gradient, dequantize_4bit(packed.view(-1, 1), state).to(gradient.dtype))
    weight = _PackedMatrix(packed.view(torch.uint8), state, gradient.dtype)
    output = gradient.new_empty(gradient.shape[0], weight.inputs)
    for first, last in _divide(weight.inputs, weight.outputs, weight.block_size, gradient):
        torch.mm(gradient, weight.unpack_columns(first, last), out=output[:, first:last])
    return output


def _is_tiled(rows: Tensor, state: QuantState) -> bool:
    """Return whether a product of these rows with the matrix or its transpose is computed in tiles."""
    is_large = state.shape.numel() * rows.element_size() > LARGEST_KEPT_BYTES
    has_whole_blocks = state.shape[1] % state.blocksize == 0
    return rows.device.type in ("cpu", "meta") and is_large and has_whole_blocks and rows.numel() > 0


class _TiledProduct(torch.autograd.Function):  # type: ignore[misc]  # torch gives it no type
    """Product of rows with a frozen 4-bit matrix. Computes no gradient of matrix and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, state: QuantState, bias: Tensor | None) -> Tensor:
        ctx.packed, ctx.state = packed, state
        weight = _PackedMatrix(packed, state, x.dtype)
        output = x.new_empty(x.shape[0], weight.outputs)
        for first, last in _divide(weight.outputs, weight.inputs, 1, x):
            tile, columns = weight.unpack_rows(first, last), output[:, first:last]
            if bias is None:
                torch.mm(x, tile.t(), out=columns)
            else:
                torch.addmm(bias[first:last], x, tile.t(), out=columns)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return multiply_transposed(gradient, ctx.packed, ctx.state), None, None, None


def _divide(length: int, width: int, multiple: int, like: Tensor) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a dimension that divide a matrix into tiles. On the meta device, one tile stands for all."""
    step = max(TILE_BYTES // (width * like.element_size()) // multiple, 1) * multiple
    for first in range(0, step if like.is_meta else length, step):
        yield first, min(first + step, length)


class _PackedMatrix:
    """A 4-bit matrix as rows of bytes (two values each) and of constants (one for each block)."""

    def __init__(self, packed: Tensor, state: QuantState, dtype: torch.dtype) -> None:
        self.outputs, self.inputs = state.shape
        self.block_size, self._kind, self._dtype = state.blocksize, state.quant_type, dtype
        constants = state.absmax
        if state.nested:
            constants = dequantize_blockwise(constants, state.state2) + state.offset
        self._bytes = packed.view(self.outputs, self.inputs // 2)
        self._constants = constants.float().view(self.outputs, self.inputs // self.block_size)

    def unpack_rows(self, first: int, last: int) -> Tensor:
        """Return rows of the matrix, of shape [last - first, inputs]."""
        return self._dequantize(self._bytes[first:last], self._constants[first:last])

    def unpack_columns(self, first: int, last: int) -> Tensor:
        """Return columns of the matrix, of shape [outputs, last - first]. Both must be multiples of the block size."""
        constants = self._constants[:, first // self.block_size : last // self.block_size]
        return self._dequantize(self._bytes[:, first // 2 : last // 2].contiguous(), constants.contiguous())

    def _dequantize(self, packed: Tensor, constants: Tensor) -> Tensor:
        result: Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
            packed.view(-1, 1), constants.view(-1), self.block_size, self._kind,
            (packed.shape[0], packed.shape[1] * 2), self._dtype,
        )  # fmt: skip
        return result

"""Norms, gated units and adapted layers with a backward pass of their own, for less time and memory per training step.

Between its products, a decoder block mostly reads and writes memory. autograd runs one operator after the other over
whole tensors, and keeps intermediate results for the backward pass. The functions of this module

- compute elementwise operators with Ratchet's kernels (`cpu_kernels`) if they are available, else in tiles that stay
  in the cache of a CPU core; a GPU computes whole tensors;
- keep their inputs, and compute intermediate results again;
- add the two gradients of an adapted layer's input within the second product.

They compute what the classes of transformers and peft compute, up to rounding. Without Ratchet's kernels and on one
thread, the forward pass has the same bits. They have no second derivatives.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from ratchet.models.cpu_kernels import operators
from ratchet.models.tiled_linear import TiledLinear4bit

TILE_BYTES = 128 * 1024
"""Bytes of a tile, for each thread. A backward pass works on five tiles, which fit into a core's second cache (1 MiB
or more on current server CPUs)."""
MAX_COUNTED_TILES = 16
"""The tiles of a tensor with more of them are left out of a forecast of memory."""
VECTOR = 64
"""A tile is a multiple of this many elements, because kernels compute the last elements of a tensor, which fill no
vector register, by another formula."""
_CODE_ATTRIBUTES = ("co_code", "co_names", "co_consts", "co_varnames")

_is_meta_cpu = False
"""Whether tensors on the meta device represent those of a CPU."""


@contextmanager
def represent_device(device: str) -> Iterator[None]:
    """Let tensors on the meta device, which have no contents, represent those of this device."""
    global _is_meta_cpu  # noqa: PLW0603
    before, _is_meta_cpu = _is_meta_cpu, device == "cpu"
    try:
        yield
    finally:
        _is_meta_cpu = before


def is_on_cpu(tensor: Tensor) -> bool:
    """Return whether a tensor is on a CPU, or on the meta device while that represents a CPU (`represent_device`)."""
    return bool(_is_meta_cpu if tensor.is_meta else tensor.device.type == "cpu")


def fuse(model: nn.Module) -> None:
    """Replace the forward pass of norms and of feed-forward layers that compute what Llama's classes compute."""
    for module in model.modules():
        if _computes_as(module, LlamaMLP) and isinstance(module.act_fn, nn.SiLU | SiLUActivation):
            module.forward = MethodType(_feed_forward, module)
        elif _computes_as(module, LlamaRMSNorm):
            module.forward = MethodType(_normalize, module)


def _computes_as(module: nn.Module, model_class: type[nn.Module]) -> bool:
    """Return whether both forward functions have the same code, which transformers copies from family to family."""
    return "forward" not in vars(module) and has_equal_code(type(module).forward, model_class.forward)


def has_equal_code(function: Any, expected: Any) -> bool:
    """Return whether two functions have the same code, apart from the functions that they call."""
    code, expected_code = getattr(function, "__code__", None), expected.__code__
    return code is not None and all(getattr(code, name) == getattr(expected_code, name) for name in _CODE_ATTRIBUTES)


def _feed_forward(layer: Any, x: Tensor) -> Tensor:
    output: Tensor = layer.down_proj(_GatedUnit.apply(layer.gate_proj(x), layer.up_proj(x)))
    return output


def _normalize(layer: Any, x: Tensor) -> Tensor:
    if layer.weight.requires_grad:  # only a frozen weight has no gradient
        output: Tensor = type(layer).forward(layer, x)
    else:
        output = _RootMeanSquareNorm.apply(x, layer.weight, layer.variance_epsilon)
    return output


def _divide(rows: Tensor) -> Iterator[slice]:
    """Yield the ranges of rows that divide a matrix into tiles. Where a CPU's memory is traced, one tile represents
    all, and none where it is too little to matter."""
    length, width = rows.shape
    step = max(length, 1)
    if is_on_cpu(rows):
        unit = VECTOR // math.gcd(VECTOR, width)
        wanted = torch.get_num_threads() * TILE_BYTES // (width * rows.element_size())
        step = max(wanted // unit, 1) * unit
        if rows.is_meta:
            length = 0 if length > MAX_COUNTED_TILES * step else min(length, step)
    for first in range(0, length, step):
        yield slice(first, first + step)


class _GatedUnit(torch.autograd.Function):  # type: ignore[misc]  # torch gives it no type
    """silu(gate) * up, of tensors of the same shape [..., width]."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        if is_on_cpu(gate) and gate.shape == up.shape and operators.is_suitable(gate, up):
            kernel_output: Tensor = torch.ops.ratchet.gated_unit(gate, up)
            return kernel_output
        output = gate.new_empty(gate.shape)
        gate_rows, up_rows, output_rows = (tensor.flatten(0, -2) for tensor in (gate, up, output))
        for tile in _divide(output_rows):
            torch.mul(functional.silu(gate_rows[tile]), up_rows[tile], out=output_rows[tile])
        return output

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        if is_on_cpu(gate) and gate.shape == up.shape and operators.is_suitable(gate, up):
            gradients: tuple[Tensor, Tensor] = torch.ops.ratchet.gated_unit_backward(gradient.contiguous(), gate, up)
            return gradients
        gate_gradient, up_gradient = gate.new_empty(gate.shape), up.new_empty(up.shape)
        gate_rows, up_rows, gradient_rows = (tensor.flatten(0, -2) for tensor in (gate, up, gradient))
        gate_gradient_rows, up_gradient_rows = gate_gradient.flatten(0, -2), up_gradient.flatten(0, -2)
        for tile in _divide(gate_rows):
            torch.mul(gradient_rows[tile], functional.silu(gate_rows[tile]), out=up_gradient_rows[tile])
            torch.ops.aten.silu_backward.grad_input(
                gradient_rows[tile] * up_rows[tile], gate_rows[tile], grad_input=gate_gradient_rows[tile]
            )
        return gate_gradient, up_gradient


class _RootMeanSquareNorm(torch.autograd.Function):  # type: ignore[misc]  # torch gives it no type
    """weight * x / sqrt(mean(x²) + epsilon) over the last dimension, computed in float32 (Zhang and Sennrich 2019,
    arXiv 1910.07467). The weight is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        if is_on_cpu(x) and weight.shape == x.shape[-1:] and operators.is_suitable(x, weight):
            kernel_output: Tensor
            kernel_output, row_factors = torch.ops.ratchet.norm(x, weight, epsilon)
            ctx.save_for_backward(x, weight, row_factors)
            return kernel_output
        output = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))
        rows, output_rows = x.flatten(0, -2), output.flatten(0, -2)
        factors = rows.new_empty((rows.shape[0], 1), dtype=torch.float32)
        for tile in _divide(rows):
            values = rows[tile].float()
            torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + epsilon, out=factors[tile])
            torch.mul(weight, (values * factors[tile]).to(x.dtype), out=output_rows[tile])
        ctx.save_for_backward(x, weight, factors)
        return output

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """With f the factor of a row, n its width and g = gradient * weight: f g - x f³ sum(g x) / n."""
        x, weight, factors = ctx.saved_tensors
        if factors.dim() == 1:  # the kernel returned factors [rows]; those of torch are [rows, 1]
            return torch.ops.ratchet.norm_backward(gradient.contiguous(), x, weight, factors), None, None
        x_gradient = x.new_empty(x.shape)
        rows, gradient_rows, x_gradient_rows = (tensor.flatten(0, -2) for tensor in (x, gradient, x_gradient))
        for tile in _divide(rows):
            values, factor = rows[tile].float(), factors[tile]
            weighted = (gradient_rows[tile] * weight).float()
            shares = (weighted * values).sum(-1, keepdim=True).mul_(factor.pow(3)).div_(-x.shape[-1])
            x_gradient_rows[tile] = (weighted * factor).addcmul_(values, shares)
        return x_gradient, None, None


def has_fused_backward(base: Any, x: Tensor) -> bool:
    """Return whether `LowRankLinear` knows the gradient of this layer of a base: plain layers, and 4-bit layers on a
    CPU, sharded or not. Those of a GPU are bitsandbytes' own, because the two would round differently."""
    if "forward" in vars(base):
        return False
    if isinstance(base, TiledLinear4bit):
        return x.device.type != "cuda" and bool((base.compute_dtype or x.dtype) == x.dtype)
    return type(base) is nn.Linear and bool(base.weight.dtype == x.dtype)


class LowRankLinear(torch.autograd.Function):  # type: ignore[misc]  # torch gives it no type
    """base(x) + scale (x A^T) B^T, with a frozen linear layer `base`, plain or in 4 bits.

    x is [rows, inputs], A is [rank, inputs], B is [outputs, rank].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: nn.Module, a: Tensor, b: Tensor, scale: float) -> Tensor:
        low_rank = torch.mm(x, a.t())
        output = operators.add_product(base(x), low_rank, b.t(), scale)
        ctx.save_for_backward(x, a, b, low_rank)
        ctx.base, ctx.scale = base, scale
        return output

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor, Tensor, None]:
        x, a, b, low_rank = ctx.saved_tensors
        low_rank_gradient = torch.mm(gradient, b).mul_(ctx.scale)
        a_gradient = torch.mm(low_rank_gradient.t(), x)
        b_gradient = torch.mm(low_rank.t(), gradient).t().contiguous().mul_(ctx.scale)  # faster than its transpose
        x_gradient = None
        if ctx.needs_input_grad[0]:
            is_4bit = isinstance(ctx.base, TiledLinear4bit)
            x_gradient = ctx.base.multiply_transposed(gradient) if is_4bit else torch.mm(gradient, ctx.base.weight)
            operators.add_product(x_gradient, low_rank_gradient, a)
        return x_gradient, None, a_gradient, b_gradient, None

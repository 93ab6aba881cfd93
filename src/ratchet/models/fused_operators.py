"""Norms, gated units and adapted layers with a backward pass of their own, for less time and memory per training step.

Between its products, a decoder block mostly reads and writes memory. autograd runs one operator after the other over
whole tensors, and keeps intermediate results for the backward pass. The functions of this module

- compute elementwise operators in tiles that stay in the cache of a CPU core; a GPU computes whole tensors;
- keep their inputs, and compute intermediate results again;
- add the two gradients of an adapted layer's input within the second product.

They compute what the classes of transformers and peft compute, with the same bits in the forward pass and, up to
rounding, the same gradients.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from ratchet.models import tiled_linear
from ratchet.models.tiled_linear import TiledLinear4bit

TILE_BYTES = 128 * 1024
"""Bytes of a tile. A backward pass works on five of them, which fit into a core's second cache (1 MiB or more on
current server CPUs)."""
NEGLIGIBLE = 16
"""A tile of a tensor with more than this many tiles is not counted in a forecast of memory."""
_COMPARED = ("co_code", "co_names", "co_consts", "co_varnames")

_meta_is_cpu = False
"""Whether tensors on the meta device represent a CPU's."""


@contextmanager
def represent(device: str) -> Iterator[None]:
    """Let tensors on the meta device, which have no contents, represent those of this device."""
    global _meta_is_cpu  # noqa: PLW0603
    before, _meta_is_cpu = _meta_is_cpu, device == "cpu"
    try:
        yield
    finally:
        _meta_is_cpu = before


def fuse(model: nn.Module) -> None:
    """Replace the forward pass of frozen norms and of feed-forward layers that compute what Llama's classes compute."""
    for module in model.modules():
        if _computes_as(module, LlamaMLP) and isinstance(module.act_fn, nn.SiLU | SiLUActivation):
            module.forward = MethodType(_feed_forward, module)
        elif _computes_as(module, LlamaRMSNorm) and not module.weight.requires_grad:
            module.forward = MethodType(_normalize, module)


def _computes_as(module: nn.Module, model_class: type[nn.Module]) -> bool:
    """Return whether both forward functions have the same code, which transformers copies from family to family."""
    code, expected = (getattr(kind.forward, "__code__", None) for kind in (type(module), model_class))
    if code is None or "forward" in vars(module):
        return False
    return all(getattr(code, name) == getattr(expected, name) for name in _COMPARED)


def _feed_forward(layer: Any, x: Tensor) -> Tensor:
    output: Tensor = layer.down_proj(_GatedUnit.apply(layer.gate_proj(x), layer.up_proj(x)))
    return output


def _normalize(layer: Any, x: Tensor) -> Tensor:
    output: Tensor = _RootMeanSquareNorm.apply(x, layer.weight, layer.variance_epsilon)
    return output


def _divide(rows: Tensor) -> Iterator[slice]:
    """Yield the ranges of rows that divide a matrix into tiles. Where a CPU's memory is traced, one tile represents
    all, and none where it is too little to matter."""
    length, is_meta = rows.shape[0], rows.is_meta and _meta_is_cpu
    row_bytes = rows.shape[1] * rows.element_size()
    step = max(TILE_BYTES // row_bytes, 1) if is_meta or rows.device.type == "cpu" else max(length, 1)
    if is_meta:
        length = 0 if length > NEGLIGIBLE * step else min(length, step)
    for first in range(0, length, step):
        yield slice(first, first + step)


class _GatedUnit(torch.autograd.Function):  # type: ignore[misc]  # torch gives it no type
    """silu(gate) * up, of tensors of the same shape [..., width]."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        output = gate.new_empty(gate.shape)
        gates, ups, outputs = (tensor.flatten(0, -2) for tensor in (gate, up, output))
        for rows in _divide(outputs):
            torch.mul(functional.silu(gates[rows]), ups[rows], out=outputs[rows])
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        of_gate, of_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
        gates, ups, gradients = (tensor.flatten(0, -2) for tensor in (gate, up, gradient))
        for_gates, for_ups = of_gate.flatten(0, -2), of_up.flatten(0, -2)
        for rows in _divide(gates):
            torch.mul(gradients[rows], functional.silu(gates[rows]), out=for_ups[rows])
            of_silu = gradients[rows] * ups[rows]
            torch.ops.aten.silu_backward.grad_input(of_silu, gates[rows], grad_input=for_gates[rows])
        return of_gate, of_up


class _RootMeanSquareNorm(torch.autograd.Function):  # type: ignore[misc]  # torch gives it no type
    """weight * x / sqrt(mean(x²) + epsilon) over the last dimension, computed in float32 (Zhang and Sennrich 2019,
    arXiv 1910.07467). The weight is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        output = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))
        rows, outputs = x.flatten(0, -2), output.flatten(0, -2)
        factors = rows.new_empty((rows.shape[0], 1), dtype=torch.float32)
        for tile in _divide(rows):
            values = rows[tile].float()
            torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + epsilon, out=factors[tile])
            torch.mul(weight, (values * factors[tile]).to(x.dtype), out=outputs[tile])
        ctx.save_for_backward(x, weight, factors)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """With f the factor of a row, n its width and g = gradient * weight: f g - x f³ sum(g x) / n."""
        x, weight, factors = ctx.saved_tensors
        result = x.new_empty(x.shape)
        rows, gradients, results = (tensor.flatten(0, -2) for tensor in (x, gradient, result))
        for tile in _divide(rows):
            values, factor = rows[tile].float(), factors[tile]
            weighted = gradients[tile] * weight
            shares = (weighted * values).sum(-1, keepdim=True).mul_(factor.pow(3)).div_(-x.shape[-1])
            results[tile] = (weighted * factor).addcmul_(values, shares)
        return result, None, None


def has_fused_backward(base: Any, x: Tensor) -> bool:
    """Return whether `LowRankLinear` knows the gradient of this layer of a base."""
    if "forward" in vars(base):
        return False
    if type(base) is TiledLinear4bit:
        return bool((base.compute_dtype or x.dtype) == x.dtype)
    return type(base) is nn.Linear and bool(base.weight.dtype == x.dtype)


class LowRankLinear(torch.autograd.Function):  # type: ignore[misc]  # torch gives it no type
    """base(x) + scale (x A^T) B^T, with a frozen linear layer `base`, plain or in 4 bits.

    x is [rows, inputs], A is [rank, inputs], B is [outputs, rank].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: nn.Module, a: Tensor, b: Tensor, scale: float) -> Tensor:
        low_rank = torch.mm(x, a.t())
        output: Tensor = base(x).addmm_(low_rank, b.t(), alpha=scale)
        ctx.save_for_backward(x, a, b, low_rank)
        ctx.base, ctx.scale = base, scale
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor, Tensor, None]:
        x, a, b, low_rank = ctx.saved_tensors
        of_low_rank = torch.mm(gradient, b).mul_(ctx.scale)
        of_a = torch.mm(of_low_rank.t(), x)
        of_b = torch.mm(gradient.t(), low_rank).mul_(ctx.scale)
        of_x = None
        if ctx.needs_input_grad[0]:
            weight = ctx.base.weight
            if isinstance(ctx.base, TiledLinear4bit):
                of_x = tiled_linear.multiply_transposed(gradient, weight.data, weight.quant_state)
            else:
                of_x = torch.mm(gradient, weight)
            of_x.addmm_(of_low_rank, a)
        return of_x, None, of_a, of_b, None

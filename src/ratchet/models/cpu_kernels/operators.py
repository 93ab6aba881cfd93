"""Gated units, norms, rotary embeddings, and products that are added in place: float32 on a CPU, by the kernels of
`kernels.cpp`.

Each of the first three is one pass over memory, where torch needs several. The results differ from torch's by rounding,
and are the same with every number of threads.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ratchet.models.cpu_kernels import library
from ratchet.models.cpu_kernels.attention import make_like
from ratchet.models.cpu_kernels.library import Heads, count_threads
from ratchet.models.cpu_products import is_onednn_faster

UNIT = 16
"""The width of a tensor must be a multiple of this."""
MAX_ADDED_INNER = 128
"""Products with more columns on the left are added by torch's kernel."""
THREAD_ELEMENTS = 2**17
"""Elements of a tensor for which one more thread is started."""

Rotate = Callable[..., tuple[Tensor, Tensor]]
"""`apply_rotary_pos_emb` of transformers: queries, keys, cosines, sines, the dimension of heads."""


def is_suitable(*tensors: Tensor) -> bool:
    """Return whether the kernels can compute these tensors [..., width]."""
    return library.load_kernels().is_available and all(
        tensor.dtype is torch.float32 and tensor.shape[-1] % UNIT == 0 and tensor.is_contiguous() for tensor in tensors
    )


def _call(name: str, *arguments: Tensor | Heads | int | float, parts: int, elements: int) -> None:
    """Call a kernel. Its last argument is the number of threads."""
    given = [_convert(argument) for argument in arguments]
    threads = count_threads(parts, elements, THREAD_ELEMENTS)
    getattr(library.get_kernels(), name)(*given, ctypes.c_int64(threads))


def _convert(argument: Tensor | Heads | int | float) -> Any:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, Heads):
        return ctypes.byref(argument)
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int64(argument)


def _gated_unit(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    output = torch.empty_like(gate)
    if not gate.is_meta:
        count = gate.numel()
        _call("ratchet_gated_unit", gate, up, output, count, parts=count // UNIT, elements=count)
    return output


def _gated_unit_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    results = torch.empty_like(gate), torch.empty_like(up)
    if not gate.is_meta:
        count = gate.numel()
        _call(
            "ratchet_gated_unit_backward", gradient, gate, up, *results, count, parts=count // UNIT, elements=count
        )  # fmt: skip
    return results


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """weight * x * factor, and the factors [rows]."""
    width, rows = x.shape[-1], x.shape[:-1].numel()
    output, factors = torch.empty_like(x), x.new_empty(rows)
    if not x.is_meta:
        _call(
            "ratchet_norm", x, weight, float(epsilon), output, factors, rows, width, parts=rows, elements=x.numel()
        )  # fmt: skip
    return output, factors


def _norm_backward(gradient: Tensor, x: Tensor, weight: Tensor, factors: Tensor) -> Tensor:
    width, rows, result = x.shape[-1], len(factors), torch.empty_like(x)
    if not x.is_meta:
        inputs = (gradient, x, weight, factors, result)
        _call("ratchet_norm_backward", *inputs, rows, width, parts=rows, elements=x.numel())
    return result


def add_product(output: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
    """Add scale * left [rows, inner] @ right [inner, columns] to output [rows, columns], and return the output.

    torch's `addmm_` computes the product if inner exceeds MAX_ADDED_INNER. It computes all products on other CPUs than
    AMD's with AVX-512, because only there torch's MKL lacks AVX-512 (`is_onednn_faster`). The output shares no memory
    with left or right. Raises ValueError (the kernel) or RuntimeError (torch) if the shapes do not match.
    """
    is_narrow = left.shape[-1] <= MAX_ADDED_INNER and left.dtype is right.dtype is torch.float32
    if not (output.device.type == "cpu" and is_narrow and _is_added_faster() and is_suitable(output)):
        return output.addmm_(left, right, alpha=scale)
    torch.ops.ratchet.add_product(output, left if scale == 1 else left * scale, right)
    return output


@functools.cache
def _is_added_faster() -> bool:
    return is_onednn_faster()


def _add_product(output: Tensor, left: Tensor, right: Tensor) -> None:
    (rows, inner), columns = left.shape, right.shape[1]
    if output.shape != (rows, columns) or right.shape[0] != inner:
        raise ValueError(f"the product of {[*left.shape]} and {[*right.shape]} cannot be added to {[*output.shape]}")
    if not output.is_meta:
        inputs = left.contiguous(), right.contiguous()
        _call(
            "ratchet_add_product", *inputs, output, rows, inner, columns, parts=rows, elements=output.numel()
        )  # fmt: skip


def rotate(original: Rotate, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    """Apply rotary embeddings as `original` does, which computes what the kernel cannot.

    query and key are [sequences, heads, positions, width]; cos and sin are [sequences or 1, positions, width].
    """
    is_usual = unsqueeze_dim == 1 and cos.shape[-1] % (2 * UNIT) == 0 and is_suitable(cos, sin)
    for heads in (query, key):
        shape = (*heads.shape[::2], heads.shape[-1])
        is_usual = is_usual and heads.dtype is torch.float32 and heads.stride(-1) == 1
        is_usual = is_usual and cos.shape == sin.shape and cos.shape in (shape, (1, *shape[1:]))
    if not is_usual:
        return original(query, key, cos, sin, unsqueeze_dim)
    return _Rotation.apply(query, cos, sin), _Rotation.apply(key, cos, sin)


class _Rotation(torch.autograd.Function):  # type: ignore[misc]  # torch gives it no type
    """Heads, rotated by the angles of their positions."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        output: Tensor = torch.ops.ratchet.rotate(heads, cos, sin, False)
        return output

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if gradient.stride(-1) != 1:
            gradient = gradient.contiguous()
        return torch.ops.ratchet.rotate(gradient, *ctx.saved_tensors, True), None, None


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor, is_backward: bool) -> Tensor:
    sequences, count, positions, width = heads.shape
    output = make_like(heads)
    if not heads.is_meta:
        stride = 0 if len(cos) == 1 else cos.stride(0)
        sizes = (stride, sequences, count, positions, width, int(is_backward))
        _call(
            "ratchet_rotate", Heads.of(heads), Heads.of(output), cos, sin, *sizes, parts=sequences * positions,
            elements=heads.numel(),
        )  # fmt: skip
    return output


library.define_operators(
    {
        "gated_unit(Tensor gate, Tensor up) -> Tensor": _gated_unit,
        "gated_unit_backward(Tensor gradient, Tensor gate, Tensor up) -> (Tensor, Tensor)": _gated_unit_backward,
        "norm(Tensor x, Tensor weight, float epsilon) -> (Tensor, Tensor)": _norm,
        "norm_backward(Tensor gradient, Tensor x, Tensor weight, Tensor factors) -> Tensor": _norm_backward,
        "add_product(Tensor(a!) output, Tensor left, Tensor right) -> ()": _add_product,
        "rotate(Tensor heads, Tensor cos, Tensor sin, bool is_backward) -> Tensor": _rotate,
    }
)

"""Causal attention of rows in float32 on a CPU, by the kernels of `kernels.cpp`.

torch's fused attention is slow on CPUs: its products are small, and it computes all scores of a block of queries and
keys, also those above the diagonal. These kernels are 1.8 to 2.7 times as fast (docs/evidence_speed.md). They compute
the same bits for a row in every pack and with every number of threads.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ratchet.models.cpu_kernels import library
from ratchet.models.cpu_kernels.library import Heads, count_threads

WIDTH_UNIT, MAX_WIDTH = 16, 256
"""The width of a head must be a multiple of the first, and at most the second."""
THREAD_OPERATIONS = 4_000_000
"""Smallest number of floating-point operations for each thread."""

Span = tuple[int, int, int, bool]
"""Sequence, first position, end, and whether the positions are one row; otherwise each is a row of one token."""

_HEADS = ("query", "key", "value", "output", "gradient", "query_gradient", "key_gradient", "value_gradient")
_POINTERS = ("log_sums", "spans", "workspace")
_SIZES = ("span_count", "heads", "key_heads", "positions", "width", "workspace_floats", "threads")


class _Task(ctypes.Structure):
    """Arguments of a kernel: `struct Attention` in kernels.cpp."""

    _fields_ = (
        *((name, Heads) for name in _HEADS),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("scale", ctypes.c_float),
    )


def is_suitable(query: Tensor, key: Tensor, value: Tensor, rows: int) -> bool:
    """Return whether the kernels should compute attention of these heads [sequences, heads, positions, width], which
    have this number of rows.

    A thread of these kernels computes at least one row and one head of keys, while torch's also divide a row. So
    torch's kernel is used if it can keep more than twice as many threads busy.
    """
    width = query.shape[-1]
    return (
        2 * rows * key.shape[1] >= torch.get_num_threads()
        and library.load_kernels().is_available
        and query.dtype == key.dtype == value.dtype == torch.float32
        and key.shape == value.shape
        and query.shape[2:] == key.shape[2:]
        and query.shape[1] % key.shape[1] == 0
        and width % WIDTH_UNIT == 0
        and width <= MAX_WIDTH
    )


def attend(query: Tensor, key: Tensor, value: Tensor, spans: Sequence[Span], scale: float) -> Tensor:
    """Return causal attention within rows, with its gradient: [sequences, positions, heads, width].

    Args:
        query: float32 [sequences, heads, positions, width], on a CPU or without contents (meta).
        key: the same with a number of heads that divides that of the queries.
        value: as the keys.
        spans: the rows; they cover each position once.
        scale: factor of the scores.

    Raises:
        ValueError: the spans do not cover the positions.
    """
    if (covered := sum(end - start for _, start, end, _ in spans)) != query.shape[0] * query.shape[2]:
        raise ValueError(f"rows have {covered} positions; expected all of {query.shape[0]} x {query.shape[2]}")
    heads = (part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, value))
    output: Tensor = _CausalAttention.apply(*heads, [number for span in spans for number in span], scale)
    return output


class _CausalAttention(torch.autograd.Function):  # type: ignore[misc]  # torch gives it no type
    """softmax(scale query key^T) value of each row and head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, spans: list[int], scale: float) -> Tensor:
        output: Tensor
        output, log_sums = torch.ops.ratchet.attention(query, key, value, spans, scale)
        ctx.save_for_backward(query, key, value, output, log_sums)
        ctx.spans, ctx.scale = spans, scale
        return output

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        if gradient.stride(-1) != 1:
            gradient = gradient.contiguous()
        gradients = torch.ops.ratchet.attention_backward(gradient, [*ctx.saved_tensors], ctx.spans, ctx.scale)
        return (*gradients, None, None)


def _attention(query: Tensor, key: Tensor, value: Tensor, spans: list[int], scale: float) -> tuple[Tensor, Tensor]:
    sequences, heads, positions, width = query.shape
    output = query.new_empty(sequences, positions, heads, width)
    log_sums = query.new_empty(sequences, heads, positions)
    _compute((query, key, value, output.transpose(1, 2)), log_sums, spans, scale)
    return output, log_sums


def _attention_backward(
    gradient: Tensor, saved: list[Tensor], spans: list[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`saved`: queries, keys, values, output and log-sum-exp of the forward pass."""
    query, key, value, output, log_sums = saved
    results = make_like(query), make_like(key), make_like(value)
    inputs = (query, key, value, output.transpose(1, 2), gradient.transpose(1, 2))
    _compute((*inputs, *results), log_sums, spans, scale)
    return results


def make_like(heads: Tensor) -> Tensor:
    """Return new heads [sequences, heads, positions, width], laid out as [sequences, positions, heads, width]."""
    sequences, count, positions, width = heads.shape
    return heads.new_empty(sequences, positions, count, width).transpose(1, 2)


def _compute(tensors: Sequence[Tensor], log_sums: Tensor, spans: list[int], scale: float) -> None:
    """Run the forward pass on the first four of _HEADS, or the backward pass on all."""
    query, key, is_backward = tensors[0], tensors[1], len(tensors) == len(_HEADS)
    threads, floats = plan_workspace(query, key, spans, is_backward)
    workspace = query.new_empty(threads * floats)
    if query.is_meta:
        return
    task = _Task(*map(Heads.of, tensors), scale=scale)
    table = (ctypes.c_int64 * len(spans))(*spans)
    pointers = (log_sums.data_ptr(), ctypes.addressof(table), workspace.data_ptr())
    sizes = (len(spans) // 4, query.shape[1], key.shape[1], *query.shape[2:], floats, threads)
    for name, number in zip(_POINTERS + _SIZES, pointers + sizes, strict=True):
        setattr(task, name, number)
    library.get_kernels().ratchet_attention(ctypes.byref(task), int(is_backward))


def plan_workspace(query: Tensor, key: Tensor, spans: Sequence[int], is_backward: bool) -> tuple[int, int]:
    """Return the number of threads, and of float32 numbers that each needs. `spans` has the four numbers of one span
    after the other."""
    heads, key_heads, width = query.shape[1], key.shape[1], query.shape[-1]
    operations = count_operations(spans, heads, width, is_backward) // 2  # those above the diagonal are left out
    parts = len(spans) // 4 * key_heads
    if query.is_meta:  # a pack has more rows than are known, and may keep all threads busy
        parts = max(parts, torch.get_num_threads())
    threads = count_threads(parts, operations, THREAD_OPERATIONS)
    longest = max(end - start for start, end in zip(spans[1::4], spans[2::4], strict=True))
    count = library.get_kernels().ratchet_attention_workspace
    count.restype = ctypes.c_int64
    return threads, int(count(ctypes.c_int64(longest), ctypes.c_int64(width), int(is_backward)))


def count_operations(spans: Sequence[int], heads: int, width: int, is_backward: bool) -> int:
    """Return the operations of attention of each position of a row to every other, as torch counts them: two products
    forward, five backward. `spans` as in `plan_workspace`."""
    rows = zip(spans[1::4], spans[2::4], spans[3::4], strict=True)
    squares = sum((end - start) ** 2 for start, end, is_row in rows if is_row)
    return (5 if is_backward else 2) * 2 * heads * width * squares


library.define_operators(
    {
        "attention(Tensor query, Tensor key, Tensor value, int[] spans, float scale) -> (Tensor, Tensor)": _attention,
        "attention_backward(Tensor gradient, Tensor[] saved, int[] spans, float scale) -> (Tensor, Tensor, Tensor)": (
            _attention_backward
        ),
    }
)

"""Matrices of an ONNX graph in 8 bits: blocks of 32 numbers, each block with a float32 scale of its own.

Written with operators of the standard (DequantizeLinear of opset 21 before each product), so any runtime that knows
ONNX computes the same; onnxruntime fuses the two into one kernel that quantises activations in blocks, too, while it
runs. Its quantisation tool (one scale for a column, one for all activations of a product) was ten times further from
the model: on the bundled project a mean divergence of 8e-4 nats, where blocks of 32 have 8e-5.

In 8 bits are the matrices of all products, the head included, and the token embedding. A head that is tied to it is
stored a second time: read through a transposition it is not fused, and answers took four times as long. Everything else
(norms, biases, positions) stays float32, and so do matrices whose inner width is no multiple of 16.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper

from ratchet.export.onnx import tracing
from ratchet.export.onnx.tracing import OnnxTensor

BLOCK = 32
"""Numbers that share a scale; half as many where the width is no multiple of it."""

_SLICE_NUMBERS = 2**22
"""Quantised at once: what is needed beside the matrix and its 8 bits stays small."""


def block_width(inner: int) -> int | None:
    """Numbers that share a scale in a matrix of this inner width; None: it stays float32."""
    return next((size for size in (BLOCK, BLOCK // 2) if inner % size == 0), None)


def quantize_graph(model: ModelProto, tensors: Iterable[OnnxTensor]) -> list[OnnxTensor]:
    """Put the matrices of a float32 graph into 8 bits; returns the tensors that it then reads, and others."""
    known = {one.name: one for one in tensors}
    turned = {
        node.output[0]: node.input[0]
        for node in model.graph.node
        if node.op_type == "Transpose" and node.input[0] in known
    }
    found: dict[str, OnnxTensor] = {}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if node.op_type == "Transpose" and node.output[0] in turned:
            continue  # put back below where somebody still needs it
        source = _matrix_name(node, known, turned)
        if source is None:
            nodes.append(node)
            continue
        matrix = known[source]
        made, parts = (
            _quantize_product(node, matrix, node.input[1] in turned)
            if node.op_type == "MatMul"
            else _quantize_embedding(node, matrix)
        )
        nodes += made
        found |= {one.name: one for one in parts}
    tracing.replace_nodes(model.graph, _with_transposed(nodes, turned))
    return [*known.values(), *found.values()]


def _matrix_name(node: NodeProto, known: dict[str, OnnxTensor], turned: dict[str, str]) -> str | None:
    """Name of the weight that a product or the look-up of tokens reads, if it can be put into 8 bits."""
    if node.op_type == "MatMul":
        name = turned.get(node.input[1], node.input[1])
        inner = -1 if node.input[1] in turned else 0
    elif node.op_type == "Gather" and node.input[1] == "input_ids":
        name, inner = node.input[0], -1
    else:
        return None
    matrix = known.get(name)
    fits = matrix is not None and len(matrix.shape) == 2 and matrix.type == np.float32
    return name if matrix is not None and fits and block_width(matrix.shape[inner]) else None


def _with_transposed(nodes: Sequence[NodeProto], turned: dict[str, str]) -> list[NodeProto]:
    """Nodes with the transpositions that they still read, each before its first reader."""
    found: list[NodeProto] = []
    there: set[str] = set()
    for node in nodes:
        for name in node.input:
            if name in turned and name not in there:
                there.add(name)
                found.append(helper.make_node("Transpose", [turned[name]], [name], f"turn_{name}", perm=[1, 0]))
        found.append(node)
    return found


def _quantize_product(node: NodeProto, matrix: OnnxTensor, is_turned: bool) -> tuple[list[NodeProto], list[OnnxTensor]]:
    """A product with a matrix [inner, outer] in 8 bits, cut along its first axis."""
    values = (lambda: matrix.values().T) if is_turned else matrix.values
    shape = matrix.shape[::-1] if is_turned else matrix.shape
    kept, scale = _quantized_tensors(f"{matrix.name}.product", shape, 0, values)
    wide = f"{node.output[0]}_weight"
    block = block_width(shape[0])
    restored = helper.make_node(
        "DequantizeLinear", [kept.name, scale.name], [wide], f"{node.name}_weight", axis=0, block_size=block
    )
    product = helper.make_node("MatMul", [node.input[0], wide], list(node.output), node.name)
    return [restored, product], [kept, scale]


def _quantize_embedding(node: NodeProto, matrix: OnnxTensor) -> tuple[list[NodeProto], list[OnnxTensor]]:
    """Rows of an embedding [tokens, width] in 8 bits, of which only those that are asked for become float32."""
    kept, scale = _quantized_tensors(f"{matrix.name}.rows", matrix.shape, 1, matrix.values)
    made = [
        helper.make_node(
            "Gather", [one.name, node.input[1]], [f"{node.output[0]}_{part}"], f"{node.name}_{part}", axis=0
        )
        for part, one in (("rows", kept), ("scales", scale))
    ]
    restored = helper.make_node(
        "DequantizeLinear",
        [made[0].output[0], made[1].output[0]],
        list(node.output),
        node.name,
        axis=2,
        block_size=block_width(matrix.shape[1]),
    )
    return [*made, restored], [kept, scale]


def _quantized_tensors(
    name: str, shape: tuple[int, ...], axis: int, values: Callable[[], NDArray[Any]]
) -> tuple[OnnxTensor, OnnxTensor]:
    """The 8 bits and the scales of a matrix; both are computed at once, when the first is written."""
    block = block_width(shape[axis]) or BLOCK
    scales = tuple(size // block if place == axis else size for place, size in enumerate(shape))
    once = _LazyQuantizer(values, axis, block)
    return (
        OnnxTensor(f"{name}.int8", shape, np.int8, once.values),
        OnnxTensor(f"{name}.scale", scales, np.float32, once.scales),
    )


class _LazyQuantizer:
    """Quantises when the values are asked for, and keeps the scales, which are small, until they are."""

    def __init__(self, values: Callable[[], NDArray[Any]], axis: int, block: int) -> None:
        self._values = values
        self._axis = axis
        self._block = block
        self._scales: NDArray[np.float32] | None = None

    def values(self) -> NDArray[np.int8]:
        found, self._scales = quantize_matrix(self._values(), self._axis, self._block)
        return found

    def scales(self) -> NDArray[np.float32]:
        found = self._scales
        self._scales = None
        return quantize_matrix(self._values(), self._axis, self._block)[1] if found is None else found


def quantize_matrix(matrix: NDArray[Any], axis: int, block: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """A matrix in blocks along an axis, symmetric: value = number x scale, number from -127 to 127, no zero point.

    Args:
        matrix: of two axes, float32.
        axis: along which `block` numbers share a scale.
        block: divides the length of that axis.

    Returns:
        The numbers, shaped as the matrix, and the scales, shorter by `block` along the axis.
    """
    upright = matrix if axis == 1 else matrix.T
    rows, width = upright.shape
    numbers = np.empty((rows, width), dtype=np.int8)
    scales = np.empty((rows, width // block), dtype=np.float32)
    stride = max(1, _SLICE_NUMBERS // width)
    for start in range(0, rows, stride):
        piece = np.ascontiguousarray(upright[start : start + stride], dtype=np.float32).reshape(
            -1, width // block, block
        )
        scale = np.abs(piece).max(axis=2, keepdims=True) / np.float32(127)
        scales[start : start + stride] = scale[..., 0]
        rounded = np.rint(piece / np.where(scale == 0, np.float32(1), scale))
        numbers[start : start + stride] = np.clip(rounded, -127, 127).astype(np.int8).reshape(-1, width)
    return (numbers, scales) if axis == 1 else (numbers.T, scales.T)

"""Quantizes the matrices of an ONNX graph to 8 bits, in blocks of 32 numbers with a float32 scale each.

The graph uses standard operators (DequantizeLinear of opset 21 before each product), so every ONNX runtime computes the
same. onnxruntime fuses the two into one kernel that also quantizes activations in blocks at run time. onnxruntime's own
quantization tool (one scale per column, and one for all activations of a product) was ten times less accurate: on the
bundled project its mean divergence is 8e-4 nats, with blocks of 32 it is 8e-5.

The matrices of all products, including the head, and the token embedding are quantized. A head that is tied to the
embedding is stored a second time, because a transposed read is not fused, and answers took four times as long.
Everything else (norms, biases, positions) stays float32, as do matrices whose inner width is not a multiple of 16.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper

from ratchet.exporters.onnx import tracing
from ratchet.exporters.onnx.tracing import OnnxTensor

BLOCK = 32
"""Numbers that share a scale; half of this if the width is not a multiple of it."""

_SLICE_NUMBERS = 2**22
"""Numbers quantized at once, to limit temporary memory."""


def block_width(inner: int) -> int | None:
    """Numbers that share a scale in a matrix with this inner width; None: the matrix stays float32."""
    return next((size for size in (BLOCK, BLOCK // 2) if inner % size == 0), None)


def quantize_graph(model: ModelProto, tensors: Iterable[OnnxTensor]) -> list[OnnxTensor]:
    """Quantize the matrices of a float32 graph in place.

    Returns:
        The tensors that the graph then reads, and unused ones.
    """
    by_name = {one.name: one for one in tensors}
    transposed = {
        node.output[0]: node.input[0]
        for node in model.graph.node
        if node.op_type == "Transpose" and node.input[0] in by_name
    }
    quantized: dict[str, OnnxTensor] = {}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if node.op_type == "Transpose" and node.output[0] in transposed:
            continue  # inserted again below if a node still reads it
        source = _matrix_name(node, by_name, transposed)
        if source is None:
            nodes.append(node)
            continue
        matrix = by_name[source]
        new_nodes, new_tensors = (
            _quantize_product(node, matrix, node.input[1] in transposed)
            if node.op_type == "MatMul"
            else _quantize_embedding(node, matrix)
        )
        nodes += new_nodes
        quantized |= {one.name: one for one in new_tensors}
    tracing.replace_nodes(model.graph, _insert_transpositions(nodes, transposed))
    return [*by_name.values(), *quantized.values()]


def _matrix_name(node: NodeProto, by_name: dict[str, OnnxTensor], transposed: dict[str, str]) -> str | None:
    """Name of the weight that a product or the token lookup reads, if it can be quantized."""
    if node.op_type == "MatMul":
        name = transposed.get(node.input[1], node.input[1])
        inner = -1 if node.input[1] in transposed else 0
    elif node.op_type == "Gather" and node.input[1] == "input_ids":
        name, inner = node.input[0], -1
    else:
        return None
    matrix = by_name.get(name)
    is_float_matrix = matrix is not None and len(matrix.shape) == 2 and matrix.type == np.float32
    return name if matrix is not None and is_float_matrix and block_width(matrix.shape[inner]) else None


def _insert_transpositions(nodes: Sequence[NodeProto], transposed: dict[str, str]) -> list[NodeProto]:
    """Insert the transpositions that nodes still read, each before its first reader."""
    result: list[NodeProto] = []
    inserted: set[str] = set()
    for node in nodes:
        for name in node.input:
            if name in transposed and name not in inserted:
                inserted.add(name)
                result.append(
                    helper.make_node("Transpose", [transposed[name]], [name], f"transpose_{name}", perm=[1, 0])
                )
        result.append(node)
    return result


def _quantize_product(
    node: NodeProto, matrix: OnnxTensor, is_transposed: bool
) -> tuple[list[NodeProto], list[OnnxTensor]]:
    """Quantize the matrix [inner, outer] of a product in blocks along its first axis."""
    values = (lambda: matrix.values().T) if is_transposed else matrix.values
    shape = matrix.shape[::-1] if is_transposed else matrix.shape
    numbers, scales = _quantized_tensors(f"{matrix.name}.product", shape, 0, values)
    dequantized = f"{node.output[0]}_weight"
    block = block_width(shape[0])
    dequantize = helper.make_node(
        "DequantizeLinear", [numbers.name, scales.name], [dequantized], f"{node.name}_weight", axis=0, block_size=block
    )
    product = helper.make_node("MatMul", [node.input[0], dequantized], list(node.output), node.name)
    return [dequantize, product], [numbers, scales]


def _quantize_embedding(node: NodeProto, matrix: OnnxTensor) -> tuple[list[NodeProto], list[OnnxTensor]]:
    """Quantize the rows of an embedding [tokens, width]; only the rows that are read are dequantized."""
    numbers, scales = _quantized_tensors(f"{matrix.name}.rows", matrix.shape, 1, matrix.values)
    gathers = [
        helper.make_node(
            "Gather", [one.name, node.input[1]], [f"{node.output[0]}_{part}"], f"{node.name}_{part}", axis=0
        )
        for part, one in (("rows", numbers), ("scales", scales))
    ]
    dequantize = helper.make_node(
        "DequantizeLinear",
        [gathers[0].output[0], gathers[1].output[0]],
        list(node.output),
        node.name,
        axis=2,
        block_size=block_width(matrix.shape[1]),
    )
    return [*gathers, dequantize], [numbers, scales]


def _quantized_tensors(
    name: str, shape: tuple[int, ...], axis: int, values: Callable[[], NDArray[Any]]
) -> tuple[OnnxTensor, OnnxTensor]:
    """Numbers and scales of a matrix; both are computed when the numbers are written."""
    block = block_width(shape[axis]) or BLOCK
    scale_shape = tuple(size // block if index == axis else size for index, size in enumerate(shape))
    quantizer = _LazyQuantizer(values, axis, block)
    return (
        OnnxTensor(f"{name}.int8", shape, np.int8, quantizer.values),
        OnnxTensor(f"{name}.scale", scale_shape, np.float32, quantizer.scales),
    )


class _LazyQuantizer:
    """Quantizes when the numbers are requested, and stores the scales, which are small, until they are requested."""

    def __init__(self, values: Callable[[], NDArray[Any]], axis: int, block: int) -> None:
        self._values = values
        self._axis = axis
        self._block = block
        self._scales: NDArray[np.float32] | None = None

    def values(self) -> NDArray[np.int8]:
        numbers, self._scales = quantize_matrix(self._values(), self._axis, self._block)
        return numbers

    def scales(self) -> NDArray[np.float32]:
        scales = self._scales
        self._scales = None
        return quantize_matrix(self._values(), self._axis, self._block)[1] if scales is None else scales


def quantize_matrix(matrix: NDArray[Any], axis: int, block: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantize a matrix symmetrically in blocks along an axis: value = number * scale, with numbers from -127 to 127.

    Args:
        matrix: a float32 matrix.
        axis: axis along which `block` numbers share a scale.
        block: a divisor of the length of that axis.

    Returns:
        Numbers with the shape of the matrix, and scales with 1 / `block` of its length along the axis.
    """
    by_rows = matrix if axis == 1 else matrix.T
    rows, width = by_rows.shape
    numbers = np.empty((rows, width), dtype=np.int8)
    scales = np.empty((rows, width // block), dtype=np.float32)
    stride = max(1, _SLICE_NUMBERS // width)
    for start in range(0, rows, stride):
        chunk = np.ascontiguousarray(by_rows[start : start + stride], dtype=np.float32).reshape(
            -1, width // block, block
        )
        scale = np.abs(chunk).max(axis=2, keepdims=True) / np.float32(127)
        scales[start : start + stride] = scale[..., 0]
        rounded = np.rint(chunk / np.where(scale == 0, np.float32(1), scale))
        numbers[start : start + stride] = np.clip(rounded, -127, 127).astype(np.int8).reshape(-1, width)
    return (numbers, scales) if axis == 1 else (numbers.T, scales.T)

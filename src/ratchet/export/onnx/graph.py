"""A traced graph made into one that is handed on: without traces of the machine, its weights in a file beside it.

The same model gives the same bytes: what torch notes for its developers (stack traces with paths, names of its own
symbols, shapes of every intermediate result) is left out, and tensors lie in the order in which the graph reads them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from ratchet.storage import files
from ratchet.storage.records.export import Progress

FILE, DATA = "model.onnx", "model.onnx.data"
BATCH, LENGTH, PAST, TOTAL = "batch", "length", "past", "past + length"
"""Names of the dimensions that are free."""

_ALIGNMENT_BYTES = 4096
"""Where tensors begin, so that a runtime can map them into memory: pages (ONNX's external data)."""
_INLINE_BYTES = 1024
"""Tensors up to this size lie in the graph itself."""


@dataclass(frozen=True)
class Tensor:
    """A tensor that will be written: computed when its turn comes, and forgotten after it."""

    name: str
    shape: tuple[int, ...]
    type: Any
    """Of its numbers, as numpy knows it."""
    values: Callable[[], NDArray[Any]]

    @property
    def size_bytes(self) -> int:
        """What it takes in the file."""
        return int(np.prod(self.shape, dtype=np.int64)) * int(np.dtype(self.type).itemsize)


def clean(model: ModelProto) -> None:
    """Take out what is for developers or of this machine, and name the free dimensions of inputs and outputs."""
    graph = model.graph
    del model.metadata_props[:], graph.metadata_props[:], graph.value_info[:]
    model.doc_string = graph.doc_string = ""
    model.domain, graph.name = "", "step"
    for function in model.functions:
        _clean_nodes(function.node)
        del function.metadata_props[:], function.value_info[:]
        function.doc_string = ""
    _clean_nodes(graph.node)
    for tensor in graph.initializer:
        tensor.doc_string = ""
        del tensor.metadata_props[:]
    for value in (*graph.input, *graph.output):
        value.doc_string = ""
        del value.metadata_props[:]
        _name_dimensions(value)


def _clean_nodes(nodes: Iterable[NodeProto]) -> None:
    for node in nodes:
        node.doc_string = ""
        del node.metadata_props[:]
        for attribute in node.attribute:
            attribute.doc_string = ""
            for inner in (attribute.g, *attribute.graphs) if attribute.type in _GRAPHS else ():
                del inner.metadata_props[:], inner.value_info[:]
                inner.doc_string = ""
                _clean_nodes(inner.node)


_GRAPHS = (AttributeProto.GRAPH, AttributeProto.GRAPHS)


def _name_dimensions(value: ValueInfoProto) -> None:
    names: dict[int, str] = {0: BATCH, 1: LENGTH}
    if value.name == "attention_mask":
        names = {0: BATCH, 1: TOTAL}
    elif value.name.startswith("past_key_values."):
        names = {0: BATCH, 2: PAST}
    elif value.name.startswith("present."):
        names = {0: BATCH, 2: TOTAL}
    for place, dimension in enumerate(value.type.tensor_type.shape.dim):
        if place in names:
            dimension.dim_param = names[place]


def demote(model: ModelProto, names: Iterable[str]) -> None:
    """Take weights from the inputs of a graph: they will be tensors of its file."""
    wanted = set(names)
    kept = [value for value in model.graph.input if value.name not in wanted]
    del model.graph.input[:]
    model.graph.input.extend(kept)


def reads(graph: GraphProto) -> dict[str, list[NodeProto]]:
    """Nodes that read each value, in order."""
    found: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in dict.fromkeys(node.input):
            found.setdefault(name, []).append(node)
    return found


def fold_transposed(graph: GraphProto, weights: Iterable[str]) -> set[str]:
    """Drop the transposition of matrices that are read in no other way: they are stored transposed instead.

    torch's linear layers multiply with the transpose. Left in the graph, every start of a runtime would transpose all
    weights, and hold them twice. A head that is tied to the embedding stays as it is: the embedding is read by rows.

    Returns:
        Names of the weights to be stored transposed.
    """
    readers = reads(graph)
    turned = {}
    for name in weights:
        nodes = readers.get(name, [])
        if nodes and all(node.op_type == "Transpose" and _order(node) == [1, 0] for node in nodes):
            turned[name] = [node.output[0] for node in nodes]
    renamed = {output: name for name, outputs in turned.items() for output in outputs}
    kept = [node for node in graph.node if node.output[0] not in renamed]
    for node in kept:
        for place, name in enumerate(node.input):
            node.input[place] = renamed.get(name, name)
    replace_nodes(graph, kept)
    return set(turned)


def _order(node: NodeProto) -> list[int]:
    return list(next((one.ints for one in node.attribute if one.name == "perm"), ()))


def split_products(graph: GraphProto, weights: Iterable[str]) -> None:
    """Write `Gemm` of a weight as a product and a sum, which is what the layers of GPT-2 are."""
    wanted = set(weights)
    kept: list[NodeProto] = []
    for node in graph.node:
        plain = node.op_type == "Gemm" and all(
            (one.name in ("alpha", "beta") and one.f == 1.0) or (one.name in ("transA", "transB") and one.i == 0)
            for one in node.attribute
        )
        if plain and node.input[1] in wanted and len(node.input) == 3:
            between = f"{node.output[0]}_product"
            kept.append(helper.make_node("MatMul", list(node.input[:2]), [between], f"{node.name}_product"))
            kept.append(helper.make_node("Add", [between, node.input[2]], list(node.output), node.name))
        else:
            kept.append(node)
    replace_nodes(graph, kept)


def replace_nodes(graph: GraphProto, nodes: Sequence[NodeProto]) -> None:
    """Give a graph other nodes, in their order."""
    copies = []
    for node in nodes:
        copy = NodeProto()
        copy.CopyFrom(node)
        copies.append(copy)
    del graph.node[:]
    graph.node.extend(copies)


def in_order(graph: GraphProto, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Tensors in the order in which the graph reads them; what it does not read is left out."""
    place: dict[str, int] = {}
    for node in graph.node:
        for name in node.input:
            place.setdefault(name, len(place))
    return sorted((one for one in tensors if one.name in place), key=lambda one: place[one.name])


def write(model: ModelProto, tensors: Sequence[Tensor], directory: Path, progress: Progress) -> None:
    """The graph and, beside it, its weights: one after the other, none longer in memory than it is written."""
    offset = 0
    for tensor in tensors:
        entry = model.graph.initializer.add()
        entry.name = tensor.name
        entry.data_type = helper.np_dtype_to_tensor_dtype(np.dtype(tensor.type))
        entry.dims.extend(tensor.shape)
        if tensor.size_bytes <= _INLINE_BYTES:
            entry.raw_data = _bytes(tensor)
            continue
        offset = _aligned(offset)
        entry.data_location = TensorProto.EXTERNAL
        for key, value in (("location", DATA), ("offset", str(offset)), ("length", str(tensor.size_bytes))):
            entry.external_data.add(key=key, value=value)
        offset += tensor.size_bytes
    files.write_blocks(directory / DATA, _blocks(tensors, offset, progress))
    files.write_blocks(directory / FILE, [[model.SerializeToString(deterministic=True)]])


def _blocks(tensors: Sequence[Tensor], total_bytes: int, progress: Progress) -> Iterator[Sequence[bytes | memoryview]]:
    written = 0
    for tensor in tensors:
        if tensor.size_bytes <= _INLINE_BYTES:
            continue
        gap = _aligned(written) - written
        written += gap + tensor.size_bytes
        yield [bytes(gap), _bytes(tensor)]
        progress("writing weights for onnxruntime", written, total_bytes)


def _bytes(tensor: Tensor) -> bytes | memoryview:
    """Its numbers, in the order of bytes that the format asks for."""
    values = np.asarray(tensor.values(), dtype=np.dtype(tensor.type).newbyteorder("<"), order="C")
    if values.shape != tensor.shape:
        raise ValueError(f"{tensor.name}: {values.shape} where the graph expects {tensor.shape}")
    return values.tobytes() if values.nbytes <= _INLINE_BYTES else values.reshape(-1).view(np.uint8).data


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

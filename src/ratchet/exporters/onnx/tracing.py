"""Traces a model's decoding step to an ONNX graph without weights, cleans the graph, and writes it with its weights.

torch.export traces the real transformers class on example tensors. The parameters are memory that is reserved but never
touched, and become inputs of the traced graph, so that no optimization of the graph can fold their values into it. The
weights that replace them come from the model's files, tensor by tensor.

One graph serves prefill and decoding: batch, length and past are dynamic, and the past may be empty.

The same model gives the same bytes: debugging data of torch (stack traces with paths, names of symbols, shapes of
intermediate results) is removed, and tensors are stored in the order in which the graph reads them.
"""

import copy
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.initialization import no_init_weights

from ratchet.errors import BaseModelError, first_line
from ratchet.models import model_spec
from ratchet.storage import files
from ratchet.storage.records.export import Progress

GRAPH_FILE, DATA_FILE = "model.onnx", "model.onnx.data"
BATCH, LENGTH, PAST, TOTAL = "batch", "length", "past", "past + length"
"""Names of the dynamic dimensions."""

_ALIGNMENT_BYTES = 4096
"""Alignment of tensors, so that a runtime can map them into memory: one page (ONNX's external data)."""
_INLINE_BYTES = 1024
"""Tensors up to this size are stored in the graph itself."""


@dataclass(frozen=True)
class OnnxTensor:
    """A tensor to be written; its values are computed when they are written, and then released."""

    name: str
    shape: tuple[int, ...]
    type: Any
    """numpy type of its values."""
    values: Callable[[], NDArray[Any]]

    @property
    def size_bytes(self) -> int:
        """Size of the data in the file."""
        return int(np.prod(self.shape, dtype=np.int64)) * int(np.dtype(self.type).itemsize)


def clean_graph(model: ModelProto) -> None:
    """Remove debugging data and facts about the machine, and name the dynamic dimensions of inputs and outputs."""
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
            for inner in (attribute.g, *attribute.graphs) if attribute.type in _GRAPH_TYPES else ():
                del inner.metadata_props[:], inner.value_info[:]
                inner.doc_string = ""
                _clean_nodes(inner.node)


_GRAPH_TYPES = (AttributeProto.GRAPH, AttributeProto.GRAPHS)


def _name_dimensions(value: ValueInfoProto) -> None:
    names: dict[int, str] = {0: BATCH, 1: LENGTH}
    if value.name == "attention_mask":
        names = {0: BATCH, 1: TOTAL}
    elif value.name.startswith("past_key_values."):
        names = {0: BATCH, 2: PAST}
    elif value.name.startswith("present."):
        names = {0: BATCH, 2: TOTAL}
    for index, dimension in enumerate(value.type.tensor_type.shape.dim):
        if index in names:
            dimension.dim_param = names[index]


def remove_weight_inputs(model: ModelProto, names: Iterable[str]) -> None:
    """Remove weights from a graph's inputs, because the graph will contain them as tensors."""
    removed = set(names)
    remaining = [value for value in model.graph.input if value.name not in removed]
    del model.graph.input[:]
    model.graph.input.extend(remaining)


def index_readers(graph: GraphProto) -> dict[str, list[NodeProto]]:
    """Map each value to the nodes that read it, in order."""
    readers: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in dict.fromkeys(node.input):
            readers.setdefault(name, []).append(node)
    return readers


def fold_transpositions(graph: GraphProto, weights: Iterable[str]) -> set[str]:
    """Remove the transposition of matrices that are only read transposed; these are stored transposed instead.

    torch's linear layers multiply with the transpose. A transposition in the graph would run at every start of a
    runtime and hold all weights twice. A head that is tied to the embedding stays unchanged, because the embedding is
    read by rows.

    Returns:
        Names of the weights to be stored transposed.
    """
    readers = index_readers(graph)
    outputs_by_weight = {}
    for name in weights:
        nodes = readers.get(name, [])
        if nodes and all(node.op_type == "Transpose" and _read_permutation(node) == [1, 0] for node in nodes):
            outputs_by_weight[name] = [node.output[0] for node in nodes]
    renamed = {output: name for name, outputs in outputs_by_weight.items() for output in outputs}
    remaining = [node for node in graph.node if node.output[0] not in renamed]
    for node in remaining:
        for index, name in enumerate(node.input):
            node.input[index] = renamed.get(name, name)
    replace_nodes(graph, remaining)
    return set(outputs_by_weight)


def _read_permutation(node: NodeProto) -> list[int]:
    return list(next((one.ints for one in node.attribute if one.name == "perm"), ()))


def split_products(graph: GraphProto, weights: Iterable[str]) -> None:
    """Replace each `Gemm` of a weight, as in the layers of GPT-2, by a product and a sum."""
    names = set(weights)
    nodes: list[NodeProto] = []
    for node in graph.node:
        is_plain_gemm = node.op_type == "Gemm" and all(
            (one.name in ("alpha", "beta") and one.f == 1.0) or (one.name in ("transA", "transB") and one.i == 0)
            for one in node.attribute
        )
        if is_plain_gemm and node.input[1] in names and len(node.input) == 3:
            product = f"{node.output[0]}_product"
            nodes.append(helper.make_node("MatMul", list(node.input[:2]), [product], f"{node.name}_product"))
            nodes.append(helper.make_node("Add", [product, node.input[2]], list(node.output), node.name))
        else:
            nodes.append(node)
    replace_nodes(graph, nodes)


def replace_nodes(graph: GraphProto, nodes: Sequence[NodeProto]) -> None:
    """Replace all nodes of a graph, in order."""
    copies = []
    for node in nodes:
        copy = NodeProto()
        copy.CopyFrom(node)
        copies.append(copy)
    del graph.node[:]
    graph.node.extend(copies)


def sort_tensors(graph: GraphProto, tensors: Iterable[OnnxTensor]) -> list[OnnxTensor]:
    """Return the tensors that the graph reads, in the order of reading."""
    order: dict[str, int] = {}
    for node in graph.node:
        for name in node.input:
            order.setdefault(name, len(order))
    return sorted((one for one in tensors if one.name in order), key=lambda one: order[one.name])


def write_graph(model: ModelProto, tensors: Sequence[OnnxTensor], directory: Path, progress: Progress) -> None:
    """Write the graph and a file with its weights; one tensor is in memory at a time."""
    offset = 0
    for tensor in tensors:
        entry = model.graph.initializer.add()
        entry.name = tensor.name
        entry.data_type = helper.np_dtype_to_tensor_dtype(np.dtype(tensor.type))
        entry.dims.extend(tensor.shape)
        if tensor.size_bytes <= _INLINE_BYTES:
            entry.raw_data = _tensor_bytes(tensor)
            continue
        offset = _align_offset(offset)
        entry.data_location = TensorProto.EXTERNAL
        for key, value in (("location", DATA_FILE), ("offset", str(offset)), ("length", str(tensor.size_bytes))):
            entry.external_data.add(key=key, value=value)
        offset += tensor.size_bytes
    files.write_blocks(directory / DATA_FILE, _blocks(tensors, offset, progress))
    files.write_blocks(directory / GRAPH_FILE, [[model.SerializeToString(deterministic=True)]])


def _blocks(
    tensors: Sequence[OnnxTensor], total_bytes: int, progress: Progress
) -> Iterator[Sequence[bytes | memoryview]]:
    written = 0
    for tensor in tensors:
        if tensor.size_bytes <= _INLINE_BYTES:
            continue
        gap = _align_offset(written) - written
        written += gap + tensor.size_bytes
        yield [bytes(gap), _tensor_bytes(tensor)]
        progress("writing weights for onnxruntime", written, total_bytes)


def _tensor_bytes(tensor: OnnxTensor) -> bytes | memoryview:
    """The values as little-endian bytes, as the format requires."""
    values = np.asarray(tensor.values(), dtype=np.dtype(tensor.type).newbyteorder("<"), order="C")
    if values.shape != tensor.shape:
        raise ValueError(f"{tensor.name}: found shape {values.shape}; the graph expects {tensor.shape}")
    return values.tobytes() if values.nbytes <= _INLINE_BYTES else values.reshape(-1).view(np.uint8).data


def _align_offset(offset: int) -> int:
    return -(-offset // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


# ---------------------------------------------------------------------------------------------------------- tracing

OPSET = 21
"""ONNX 1.16 of 2024: the first version whose DequantizeLinear supports blocks."""

_STEP = "step."
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_EXAMPLE_BATCH, _EXAMPLE_LENGTH, _EXAMPLE_PAST = 2, 3, 5
"""Above 1 and all different; otherwise tracing treats them as constants, or as the same dimension."""


@dataclass(frozen=True)
class TracedGraph:
    """A traced decoding step without weights."""

    model: ModelProto
    """Its inputs include weights and buffers under their names in the model."""
    weights: dict[str, tuple[int, ...]]
    """Shapes of the model's parameters; tied parameters appear once."""
    buffers: dict[str, torch.Tensor]
    """Values that the model computes once, such as the frequencies of positions."""
    names: dict[str, str]
    """Every name of a parameter, mapped to its name in `weights`; tied parameters have several names."""


class _DecodingStepModule(nn.Module):  # type: ignore[misc]  # torch is untyped
    """The model with a cache of plain tensors: key and value of each layer, [batch, heads, past, head size].

    The cache keeps positions that have left a sliding window. Masks are made for absolute positions, so the step is
    correct beyond the window, and one graph serves layers of both kinds.
    """

    def __init__(self, model: Any, takes_positions: bool) -> None:
        super().__init__()
        self.step = model
        self.takes_positions = takes_positions

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past: list[list[torch.Tensor]],
    ) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
        cache = DynamicCache()
        for layer, (key, value) in enumerate(past):
            cache.update(key, value, layer)
        positions = {"position_ids": position_ids} if self.takes_positions else {}
        output = self.step(
            input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True, **positions
        )
        return output.logits, [[layer.keys, layer.values] for layer in cache.layers]


def trace_model(directory: Path) -> TracedGraph:
    """Trace the decoding step of the model whose config is in a directory, in float32.

    Raises:
        BaseModelError: torch cannot trace the model; the message contains the first line of the reason.
    """
    spec = model_spec.load(directory)
    spec.require_causal()
    try:
        with _silence_tracing(), torch.no_grad():
            return _trace_step(spec)
    except Exception as error:  # the model's own code, torch's tracer and its translator may raise anything
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            raise
        raise BaseModelError(
            f"{directory}: torch cannot export a {spec.class_name} to ONNX: {_root_cause(error)}; remove all types "
            "from export.onnx.types, or export to GGUF"
        ) from error


def _trace_step(spec: model_spec.ModelSpec) -> TracedGraph:
    shapes = _cache_shapes(spec)
    inputs, dynamic_shapes = _example_inputs(shapes)
    model = _build_unloaded_model(spec)
    step = _DecodingStepModule(model, "position_ids" in inspect.signature(model.forward).parameters)
    program = torch.export.export(step, (), inputs, dynamic_shapes=dynamic_shapes, strict=False)
    written: Any = torch.onnx.export(
        program,
        (),
        kwargs=inputs,
        input_names=["input_ids", "attention_mask", "position_ids", *cache_names("past_key_values", len(shapes))],
        output_names=["logits", *cache_names("present", len(shapes))],
        opset_version=OPSET,
        optimize=False,
        verbose=False,
    )
    names = _canonical_names(model)
    graph = written.model.graph
    input_names = {f"{_STEP}{name}": name for name, _ in model.named_buffers()}
    input_names |= {f"{_STEP}{name}": first for name, first in names.items()}
    for name in [name for name in graph.initializers if name in input_names]:  # others are constants of the code
        value = graph.initializers.pop(name)
        value.const_value = None
        value.name = input_names[name]
        graph.inputs.append(value)
    written.optimize()
    return TracedGraph(
        model=written.model_proto,
        weights={name: tuple(one.shape) for name, one in model.named_parameters()},
        buffers=dict(model.named_buffers()),
        names=names,
    )


def _canonical_names(model: Any) -> dict[str, str]:
    """Map every name of a parameter to its first name; tied parameters have several names."""
    first = {id(one): name for name, one in model.named_parameters()}
    return {name: first[id(one)] for name, one in model.named_parameters(remove_duplicate=False)}


def _build_unloaded_model(spec: model_spec.ModelSpec) -> Any:
    """Build the model with computed buffers; its parameters are reserved address space that is never written."""
    with no_init_weights(), model_spec.use_plain_linears(spec.config):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(spec.config), dtype=torch.float32, attn_implementation="eager"
        )
    model.tie_weights()
    return model.float().eval().requires_grad_(False)


def _cache_shapes(spec: model_spec.ModelSpec) -> list[list[tuple[int, int]]]:
    """Heads and head size of keys and values in each layer, from the cache of a step on the meta device."""
    cache = DynamicCache()
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    model = spec.model(torch.float32, "eager")
    model(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, use_cache=True)
    return [[(one.shape[1], one.shape[3]) for one in (layer.keys, layer.values)] for layer in cache.layers]


def _example_inputs(shapes: list[list[tuple[int, int]]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return example inputs for tracing, and their dynamic dimensions."""
    batch, length, past = _EXAMPLE_BATCH, _EXAMPLE_LENGTH, _EXAMPLE_PAST
    inputs = {
        "input_ids": torch.zeros(batch, length, dtype=torch.int64),
        "attention_mask": torch.ones(batch, past + length, dtype=torch.int64),
        "position_ids": torch.arange(past, past + length).repeat(batch, 1),
        "past": [[torch.zeros(batch, heads, past, size) for heads, size in layer] for layer in shapes],
    }
    dynamic = torch.export.Dim.DYNAMIC
    rows, cached = {0: dynamic, 1: dynamic}, {0: dynamic, 2: dynamic}
    dynamic_shapes = {
        "input_ids": rows,
        "attention_mask": rows,
        "position_ids": rows,
        "past": [[cached for _ in layer] for layer in shapes],
    }
    return inputs, dynamic_shapes


def cache_names(prefix: str, layers: int) -> list[str]:
    """Names of the cache's tensors, as in other exporters and servers."""
    return [f"{prefix}.{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]


@contextmanager
def _silence_tracing() -> Iterator[None]:
    """Suppress developer messages of torch and transformers; errors stay.

    torch lists missing torchvision operators, and warns about a deprecated class that it uses itself and about long
    frequencies that Phi-3 stores besides the short ones (both are constants). transformers warns that the attention
    implementation cannot be changed later.
    """
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "transformers")]
    loggers += [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("torch.onnx.")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*isinstance.treespec.*")
        warnings.filterwarnings("ignore", category=UserWarning, message="The tensor attribute .*inv_freq was assigned")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _root_cause(error: BaseException) -> str:
    """The first line of the innermost cause, without color codes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return _COLORS.sub("", first_line(error))

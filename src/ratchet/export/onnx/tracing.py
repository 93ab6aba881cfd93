"""A traced graph made into one that is handed on: without traces of the machine, its weights in a file beside it.

The same model gives the same bytes: what torch notes for its developers (stack traces with paths, names of its own
symbols, shapes of every intermediate result) is left out, and tensors lie in the order in which the graph reads them.
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

FILE, DATA = "model.onnx", "model.onnx.data"
BATCH, LENGTH, PAST, TOTAL = "batch", "length", "past", "past + length"
"""Names of the dimensions that are free."""

_ALIGNMENT_BYTES = 4096
"""Where tensors begin, so that a runtime can map them into memory: pages (ONNX's external data)."""
_INLINE_BYTES = 1024
"""Tensors up to this size lie in the graph itself."""


@dataclass(frozen=True)
class OnnxTensor:
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


def clean_graph(model: ModelProto) -> None:
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


def remove_weight_inputs(model: ModelProto, names: Iterable[str]) -> None:
    """Take weights from the inputs of a graph: they will be tensors of its file."""
    wanted = set(names)
    kept = [value for value in model.graph.input if value.name not in wanted]
    del model.graph.input[:]
    model.graph.input.extend(kept)


def index_readers(graph: GraphProto) -> dict[str, list[NodeProto]]:
    """Nodes that read each value, in order."""
    found: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in dict.fromkeys(node.input):
            found.setdefault(name, []).append(node)
    return found


def fold_transpositions(graph: GraphProto, weights: Iterable[str]) -> set[str]:
    """Drop the transposition of matrices that are read in no other way: they are stored transposed instead.

    torch's linear layers multiply with the transpose. Left in the graph, every start of a runtime would transpose all
    weights, and hold them twice. A head that is tied to the embedding stays as it is: the embedding is read by rows.

    Returns:
        Names of the weights to be stored transposed.
    """
    readers = index_readers(graph)
    turned = {}
    for name in weights:
        nodes = readers.get(name, [])
        if nodes and all(node.op_type == "Transpose" and _read_permutation(node) == [1, 0] for node in nodes):
            turned[name] = [node.output[0] for node in nodes]
    renamed = {output: name for name, outputs in turned.items() for output in outputs}
    kept = [node for node in graph.node if node.output[0] not in renamed]
    for node in kept:
        for place, name in enumerate(node.input):
            node.input[place] = renamed.get(name, name)
    replace_nodes(graph, kept)
    return set(turned)


def _read_permutation(node: NodeProto) -> list[int]:
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


def sort_tensors(graph: GraphProto, tensors: Iterable[OnnxTensor]) -> list[OnnxTensor]:
    """Tensors in the order in which the graph reads them; what it does not read is left out."""
    place: dict[str, int] = {}
    for node in graph.node:
        for name in node.input:
            place.setdefault(name, len(place))
    return sorted((one for one in tensors if one.name in place), key=lambda one: place[one.name])


def write_graph(model: ModelProto, tensors: Sequence[OnnxTensor], directory: Path, progress: Progress) -> None:
    """The graph and, beside it, its weights: one after the other, none longer in memory than it is written."""
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
        for key, value in (("location", DATA), ("offset", str(offset)), ("length", str(tensor.size_bytes))):
            entry.external_data.add(key=key, value=value)
        offset += tensor.size_bytes
    files.write_blocks(directory / DATA, _blocks(tensors, offset, progress))
    files.write_blocks(directory / FILE, [[model.SerializeToString(deterministic=True)]])


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
    """Its numbers, in the order of bytes that the format asks for."""
    values = np.asarray(tensor.values(), dtype=np.dtype(tensor.type).newbyteorder("<"), order="C")
    if values.shape != tensor.shape:
        raise ValueError(f"{tensor.name}: {values.shape} where the graph expects {tensor.shape}")
    return values.tobytes() if values.nbytes <= _INLINE_BYTES else values.reshape(-1).view(np.uint8).data


def _align_offset(offset: int) -> int:
    return -(-offset // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


# A model's forward step as an ONNX graph, traced without its weights.
#
# torch.export follows the step of the real transformers class on tensors that stand for shapes; the parameters are
# memory that is reserved and never touched, and leave the traced graph as inputs, so that no pass over the graph can
# fold a number of theirs into it. What is written in their place comes from the model's files, tensor by tensor.
#
# One graph serves prefill and decoding: batch, length and past are free, and the past may be empty.

OPSET = 21
"""ONNX 1.16 of 2024: the first whose DequantizeLinear knows blocks."""

_STEP = "step."
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_EXAMPLE_BATCH, _EXAMPLE_LENGTH, _EXAMPLE_PAST = 2, 3, 5
"""All above 1 and different, or the trace would take them for constants or for one another."""


@dataclass(frozen=True)
class TracedGraph:
    """A step without its weights."""

    model: ModelProto
    """Weights are inputs of its graph, by their names in the model; so are buffers."""
    weights: dict[str, tuple[int, ...]]
    """Shapes of the model's parameters; tied ones once."""
    buffers: dict[str, torch.Tensor]
    """What the model computes once, such as the frequencies of its positions."""
    names: dict[str, str]
    """Every name that a parameter has in the model, and that in `weights`: tied ones have several."""


class _DecodingStepModule(nn.Module):  # type: ignore[misc]  # torch is not followed
    """The model with a cache of plain tensors: key and value of each layer, [batch, heads, past, head size].

    The cache never drops what left a sliding window: masks are made for absolute positions, so the step is right beyond
    it, and one graph does for layers of both kinds.
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
        places = {"position_ids": position_ids} if self.takes_positions else {}
        found = self.step(
            input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True, **places
        )
        return found.logits, [[layer.keys, layer.values] for layer in cache.layers]


def trace_model(directory: Path) -> TracedGraph:
    """The step of the model whose config lies in a directory, in float32.

    Raises:
        BaseModelError: torch cannot trace it; the message has the first line of its reason.
    """
    plan = model_spec.load(directory)
    plan.require_causal()
    try:
        with _silence_tracing(), torch.no_grad():
            return _trace_step(plan)
    except Exception as error:  # the model's own code, torch's tracer and its translator: each may raise anything
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            raise
        raise BaseModelError(
            f"{directory}: torch cannot export a {plan.class_name} to ONNX: {_root_cause(error)}; "
            "leave export.onnx.types empty, or export to GGUF"
        ) from error


def _trace_step(plan: model_spec.ModelSpec) -> TracedGraph:
    shapes = _cache_shapes(plan)
    inputs, free = _example_inputs(shapes)
    model = _build_hollow_model(plan)
    step = _DecodingStepModule(model, "position_ids" in inspect.signature(model.forward).parameters)
    program = torch.export.export(step, (), inputs, dynamic_shapes=free, strict=False)
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
    known = {f"{_STEP}{name}": name for name, _ in model.named_buffers()}
    known |= {f"{_STEP}{name}": first for name, first in names.items()}
    for name in [name for name in graph.initializers if name in known]:  # others are constants of the code
        value = graph.initializers.pop(name)
        value.const_value = None
        value.name = known[name]
        graph.inputs.append(value)
    written.optimize()
    return TracedGraph(
        model=written.model_proto,
        weights={name: tuple(one.shape) for name, one in model.named_parameters()},
        buffers=dict(model.named_buffers()),
        names=names,
    )


def _canonical_names(model: Any) -> dict[str, str]:
    """Every name of every parameter, and the one of them that stands for it: tied ones have several."""
    first = {id(one): name for name, one in model.named_parameters()}
    return {name: first[id(one)] for name, one in model.named_parameters(remove_duplicate=False)}


def _build_hollow_model(plan: model_spec.ModelSpec) -> Any:
    """The model with buffers as they are computed, and parameters that are address space without memory."""
    with no_init_weights(), model_spec.use_plain_linears(plan.config):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(plan.config), dtype=torch.float32, attn_implementation="eager"
        )
    model.tie_weights()
    return model.float().eval().requires_grad_(False)


def _cache_shapes(plan: model_spec.ModelSpec) -> list[list[tuple[int, int]]]:
    """Heads and head size of keys and of values, layer by layer: what a step without data leaves in its cache."""
    cache = DynamicCache()
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    model = plan.model(torch.float32, "eager")
    model(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, use_cache=True)
    return [[(one.shape[1], one.shape[3]) for one in (layer.keys, layer.values)] for layer in cache.layers]


def _example_inputs(shapes: list[list[tuple[int, int]]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs to trace with, and which of their dimensions are free."""
    batch, length, past = _EXAMPLE_BATCH, _EXAMPLE_LENGTH, _EXAMPLE_PAST
    inputs = {
        "input_ids": torch.zeros(batch, length, dtype=torch.int64),
        "attention_mask": torch.ones(batch, past + length, dtype=torch.int64),
        "position_ids": torch.arange(past, past + length).repeat(batch, 1),
        "past": [[torch.zeros(batch, heads, past, size) for heads, size in layer] for layer in shapes],
    }
    dynamic = torch.export.Dim.DYNAMIC
    rows, cached = {0: dynamic, 1: dynamic}, {0: dynamic, 2: dynamic}
    free = {
        "input_ids": rows,
        "attention_mask": rows,
        "position_ids": rows,
        "past": [[cached for _ in layer] for layer in shapes],
    }
    return inputs, free


def cache_names(prefix: str, layers: int) -> list[str]:
    """Names of the cache's tensors, as other people's servers know them."""
    return [f"{prefix}.{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]


@contextmanager
def _silence_tracing() -> Iterator[None]:
    """Without what torch and transformers say to their developers; errors stay.

    torch lists the operators of torchvision that it lacks, and warns of a class of its own that it still uses, and of
    long frequencies that Phi-3 keeps beside the short ones (they are constants). transformers warns of attention that
    cannot be changed later, which nobody asks for.
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
    """The first line of what went wrong at the bottom, without colours."""
    while error.__cause__ is not None:
        error = error.__cause__
    return _COLOURS.sub("", first_line(error))

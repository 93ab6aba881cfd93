"""Exports a merged model to a directory for onnxruntime: a graph of the decoding step, its weights, and a tokenizer.

    model.onnx              the decoding step: input_ids [batch, length], attention_mask [batch, past + length],
                            position_ids [batch, length], past_key_values.N.key and .value [batch, heads, past, head
                            size]; logits [batch, length, vocabulary], present.N.key and .value
    model.onnx.data         its weights as ONNX external data, each aligned to a page
    config.json, generation_config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja   as in `hf`

One graph serves prefill and decoding: batch, length and past are dynamic. The past may be empty, and rows may be padded
on the left. An export traces the decoding step to a graph without weights, cleans the graph, quantizes it if requested,
and writes it with its weights.

Tracing: torch.export traces the real transformers class on example tensors. The parameters are memory that is reserved
but never touched. They become inputs of the traced graph, so that no optimization can fold their values into the graph.
Later the weights from the model's files replace these inputs, tensor by tensor.

Cleaning: the same model gives the same bytes on any machine at any time. Debugging data of torch (stack traces with
paths, names of symbols, shapes of intermediate results) is removed, and tensors are stored in the order in which the
graph reads them.

Quantizing: matrices get 8 bits per number, in blocks of 32 numbers with a float32 scale each. The graph uses standard
operators (DequantizeLinear of opset 21 before each product), so every ONNX runtime computes the same. onnxruntime fuses
the two operators into one kernel that also quantizes activations in blocks at run time. onnxruntime's own quantization
tool (one scale per column, and one for all activations of a product) was ten times less accurate: on the bundled
project its mean divergence is 8e-4 nats; with blocks of 32 it is 8e-5.

The matrices of all products, including the head, and the token embedding are quantized. A head that is tied to the
embedding is stored a second time, because a transposed read is not fused, and answers took four times as long.
Everything else (norms, biases, positions) stays float32, as do matrices whose inner width is not a multiple of 16.
"""

import copy
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.initialization import no_init_weights

from ratchet.config.export import OnnxType
from ratchet.errors import BaseModelError, SettingsError, first_line
from ratchet.models import base_model, loading, model_spec, weights
from ratchet.storage import files
from ratchet.storage.records.export import Progress

SUPPORTED_MODEL_TYPES = (
    "llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "apertus",
    "arcee", "biogpt", "bloom", "codegen", "cohere", "cohere2", "ernie4_5", "exaone4", "falcon", "glm", "glm4", "gpt2",
    "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "granite", "helium", "hunyuan_v1_dense", "mpt", "nemotron", "olmo",
    "olmo2", "olmo3", "opt", "persimmon", "seed_oss", "smollm3", "stablelm", "starcoder2", "xglm",
)  # fmt: skip
"""Model types whose exported step was compared with transformers in onnxruntime, with and without a past."""
OPSET = 21
"""ONNX 1.16 of 2024: the first version whose DequantizeLinear supports blocks."""
GRAPH_FILE, DATA_FILE = "model.onnx", "model.onnx.data"
BATCH, LENGTH, PAST, TOTAL = "batch", "length", "past", "past + length"
"""Names of the dynamic dimensions."""
BLOCK = 32
"""Number of values that share a scale; half as many if the matrix's inner width is not a multiple of this number."""
_TOKENIZER = "tokenizer.json"
_COMPANION_FILES = ("config.json", "generation_config.json", _TOKENIZER, "tokenizer_config.json", "chat_template.jinja")
_ALIGNMENT_BYTES = 4096
"""Alignment of tensors in the data file: one page, so that a runtime can map the tensors into memory (ONNX's external
data)."""
_INLINE_BYTES = 1024
"""Largest size of a tensor that is stored in the graph file instead of the data file."""
_SLICE_NUMBERS = 2**22
"""Number of values quantized at once, to limit temporary memory."""
_STEP = "step."
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_EXAMPLE_BATCH, _EXAMPLE_LENGTH, _EXAMPLE_PAST = 2, 3, 5
"""Sizes of the example inputs. They are above 1, because tracing treats a size of 1 as a constant, and all different,
because tracing treats equal sizes as the same dimension."""


def require_exportable(directory: Path) -> None:
    """Check from config.json alone that the model can be exported.

    Raises:
        SettingsError: the model type is not supported; the message lists the supported ones.
        BaseModelError: config.json is missing or invalid.
    """
    config = base_model.read_config(directory)
    kind = config["model_type"]
    if kind not in SUPPORTED_MODEL_TYPES:
        named = ", ".join(config.get("architectures") or ()) or "no class named"
        raise SettingsError(
            f"export.onnx.types: {directory / 'config.json'}: found model type {kind} ({named}); ONNX export supports "
            f"{', '.join(sorted(SUPPORTED_MODEL_TYPES))}; remove all types from export.onnx.types"
        )
    if "dynamic" in _rope_types(config):
        raise SettingsError(
            f"export.onnx.types: {directory / 'config.json'}: found rope_type dynamic, whose frequencies depend on the "
            "length of the input, which an ONNX graph cannot express; remove all types from export.onnx.types"
        )


def write_onnx(directory: Path, target: Path, type: OnnxType, progress: Progress) -> None:
    """Export a merged model, with one weight at a time in memory.

    Args:
        directory: config, weights of any type, and tokenizer, as in the export's `hf` directory.
        target: the directory to create. It may be incomplete after an error, so create it in a directory that is sealed
            later.
        type: type of the weights: `fp32`, `fp16` or `int8`.
        progress: called during tracing, and with the bytes written and their total.

    Raises:
        SettingsError: the model type is not supported.
        BaseModelError: the model cannot be traced, its files are incomplete, or tokenizer.json is missing.
    """
    require_exportable(directory)
    if not (directory / _TOKENIZER).is_file():
        raise BaseModelError(
            f"{directory}: found no {_TOKENIZER}, which tools other than transformers need; use a base with a fast "
            "tokenizer, or remove all types from export.onnx.types"
        )
    progress("tracing the model for ONNX", 0, 1)
    traced = trace_model(directory)
    progress("tracing the model for ONNX", 1, 1)
    tensors = _clean_traced_graph(traced, OnnxWeightReader(directory, traced))
    if type == "int8":
        tensors = quantize_graph(traced.model, tensors)
    elif type == "fp16":
        tensors = store_as_float16(traced.model.graph, tensors)
    files.make_directory(target)
    write_graph(traced.model, sort_tensors(traced.model.graph, tensors), target, progress)
    for name in _COMPANION_FILES:
        if (directory / name).is_file():
            files.write_blocks(target / name, [[(directory / name).read_bytes()]])


def _rope_types(config: Mapping[str, Any]) -> list[Any]:
    """Return the types of rotary positions in a config: one for all layers, or one for each kind of layer."""
    types = []
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        for parameters in (value, *value.values()) if isinstance(value, dict) else ():
            if isinstance(parameters, dict):
                types.append(parameters.get("rope_type", parameters.get("type")))
    return types


# Tracing.


@dataclass(frozen=True)
class TracedGraph:
    """A traced decoding step without weights."""

    model: ModelProto
    """The graph; its inputs include weights and buffers under their names in the model."""
    weights: dict[str, tuple[int, ...]]
    """Shapes of the model's parameters; tied parameters appear once."""
    buffers: dict[str, torch.Tensor]
    """Values that the model computes once, such as the frequencies of positions."""
    names: dict[str, str]
    """Name in `weights` of each name of a parameter; tied parameters have several names."""


class _DecodingStepModule(nn.Module):  # type: ignore[misc]  # torch is untyped
    """The model with a cache of plain tensors: key and value of each layer, [batch, heads, past, head size].

    The cache keeps positions that have left a sliding window. Masks use absolute positions, so the step is correct
    beyond the window, and one graph serves layers with and without a window.
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
    """Trace the decoding step of the model in a directory, in float32, from its config alone.

    Raises:
        BaseModelError: torch cannot trace the model; the message contains the first line of torch's error.
    """
    spec = model_spec.load(directory)
    spec.require_causal()
    try:
        with _silence_tracing(), torch.no_grad():
            return _trace_step(spec)
    except Exception as error:  # the model's own code, torch's tracer and its translator may raise anything
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            raise
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise BaseModelError(
            f"{directory}: torch cannot export a {spec.class_name} to ONNX: {_COLORS.sub('', first_line(cause))}; "
            "remove all types from export.onnx.types, or export to GGUF"
        ) from error


def _trace_step(spec: model_spec.ModelSpec) -> TracedGraph:
    shapes = _cache_shapes(spec)
    inputs, dynamic_shapes = _example_inputs(shapes)
    # The parameters are reserved address space that is never written to.
    with no_init_weights(), model_spec.use_plain_linears(spec.config):
        model: Any = AutoModelForCausalLM.from_config(
            copy.deepcopy(spec.config), dtype=torch.float32, attn_implementation="eager"
        )
    model.tie_weights()
    model = model.float().eval().requires_grad_(False)
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
    # Tied parameters have several names; each is mapped to the first.
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    names = {name: first_names[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
    graph = written.model.graph
    input_names = {f"{_STEP}{name}": name for name, _ in model.named_buffers()}
    input_names |= {f"{_STEP}{name}": first for name, first in names.items()}
    for name in [name for name in graph.initializers if name in input_names]:  # the others are constants of the code
        value = graph.initializers.pop(name)
        value.const_value = None
        value.name = input_names[name]
        graph.inputs.append(value)
    written.optimize()
    return TracedGraph(
        model=written.model_proto,
        weights={name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        buffers=dict(model.named_buffers()),
        names=names,
    )


def _cache_shapes(spec: model_spec.ModelSpec) -> list[list[tuple[int, int]]]:
    """Return heads and head size of keys and values in each layer, from the cache of a step on the meta device."""
    cache = DynamicCache()
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    model = spec.model(torch.float32, "eager")
    model(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, use_cache=True)
    return [[(tensor.shape[1], tensor.shape[3]) for tensor in (layer.keys, layer.values)] for layer in cache.layers]


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
    dynamic_shapes: dict[str, Any] = dict.fromkeys(("input_ids", "attention_mask", "position_ids"), rows)
    return inputs, dynamic_shapes | {"past": [[cached for _ in layer] for layer in shapes]}


def cache_names(prefix: str, layers: int) -> list[str]:
    """Return the names of the cache's tensors, which are the same in other exporters and servers."""
    return [f"{prefix}.{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]


@contextmanager
def _silence_tracing() -> Iterator[None]:
    """Suppress developer messages of torch and transformers, but not their errors.

    torch lists missing torchvision operators. It warns about a deprecated class that it uses itself, and about Phi-3,
    which stores long frequencies in addition to short ones (both are constants). transformers warns that the attention
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


# Weights.


@dataclass(frozen=True)
class OnnxTensor:
    """A tensor to be written. Its values are computed when they are written, and then released."""

    name: str
    shape: tuple[int, ...]
    type: Any
    """numpy type of the values."""
    values: Callable[[], NDArray[Any]]

    @property
    def size_bytes(self) -> int:
        """Size of the data in the file."""
        return int(np.prod(self.shape, dtype=np.int64)) * int(np.dtype(self.type).itemsize)


class OnnxWeightReader:
    """Reads parameters from the model's files when they are needed.

    If names of tensors in the files differ from names of parameters, as in old checkpoints, the complete model is
    loaded, because only transformers knows the mapping.
    """

    def __init__(self, directory: Path, traced: TracedGraph) -> None:
        names: dict[str, list[str]] = {name: [] for name in traced.weights}
        for name, canonical_name in traced.names.items():
            names[canonical_name].append(name)
        self._parameters: dict[str, Any] = {}
        stored = weights.WeightReader(directory).tensors()
        for canonical_name, all_names in names.items():
            stored_name = next((name for name in all_names if name in stored), None)
            if stored_name is not None and tuple(stored[stored_name].get_shape()) == traced.weights[canonical_name]:
                self._parameters[canonical_name] = stored[stored_name]
        self.is_streamed = len(self._parameters) == len(names)
        if not self.is_streamed:
            model = loading.load_plain(directory, torch.float32, torch.device("cpu"))
            self._parameters = dict(model.named_parameters())

    def array(self, name: str, is_transposed: bool = False) -> NDArray[Any]:
        """Read one parameter in float32."""
        values: NDArray[Any] = self._parameters[name][...].detach().to(torch.float32).numpy()
        return values.T if is_transposed else values


def _clean_traced_graph(traced: TracedGraph, reader: OnnxWeightReader) -> list[OnnxTensor]:
    """Clean the traced graph; return the weights and buffers that it reads."""
    graph = traced.model.graph
    inputs = {value.name for value in graph.input}
    names = [name for name in traced.weights if name in inputs]
    buffers = {name: buffer.numpy() for name, buffer in traced.buffers.items() if name in inputs}
    clean_graph(traced.model)
    remaining = [value for value in graph.input if value.name not in {*names, *buffers}]
    del graph.input[:]  # the graph will contain weights and buffers as tensors
    graph.input.extend(remaining)
    split_products(graph, names)
    transposed = fold_transpositions(graph, names)
    tensors = [
        OnnxTensor(name, buffer.shape, buffer.dtype, partial(np.asarray, buffer)) for name, buffer in buffers.items()
    ]
    for name in names:
        is_transposed = name in transposed
        shape = traced.weights[name][::-1] if is_transposed else traced.weights[name]
        tensors.append(OnnxTensor(name, shape, np.float32, partial(reader.array, name, is_transposed)))
    return tensors


# Cleaning the graph.


def clean_graph(model: ModelProto) -> None:
    """Remove debugging data and data about the machine, and name the dynamic dimensions of inputs and outputs."""
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
        names = {0: BATCH, 1: LENGTH}
        if value.name == "attention_mask":
            names = {0: BATCH, 1: TOTAL}
        elif value.name.startswith("past_key_values."):
            names = {0: BATCH, 2: PAST}
        elif value.name.startswith("present."):
            names = {0: BATCH, 2: TOTAL}
        for index, dimension in enumerate(value.type.tensor_type.shape.dim):
            if index in names:
                dimension.dim_param = names[index]


def _clean_nodes(nodes: Iterable[NodeProto]) -> None:
    for node in nodes:
        node.doc_string = ""
        del node.metadata_props[:]
        for attribute in node.attribute:
            attribute.doc_string = ""
            for inner in (attribute.g,) if attribute.HasField("g") else attribute.graphs:
                del inner.metadata_props[:], inner.value_info[:]
                inner.doc_string = ""
                _clean_nodes(inner.node)


def split_products(graph: GraphProto, weight_names: Iterable[str]) -> None:
    """Replace each `Gemm` of a weight, as in the layers of GPT-2, by a product and a sum."""
    names = set(weight_names)
    nodes: list[NodeProto] = []
    for node in graph.node:
        is_plain_gemm = node.op_type == "Gemm" and all(
            (attribute.name in ("alpha", "beta") and attribute.f == 1.0)
            or (attribute.name in ("transA", "transB") and attribute.i == 0)
            for attribute in node.attribute
        )
        if is_plain_gemm and node.input[1] in names and len(node.input) == 3:
            product = f"{node.output[0]}_product"
            nodes.append(helper.make_node("MatMul", list(node.input[:2]), [product], f"{node.name}_product"))
            nodes.append(helper.make_node("Add", [product, node.input[2]], list(node.output), node.name))
        else:
            nodes.append(node)
    replace_nodes(graph, nodes)


def fold_transpositions(graph: GraphProto, weight_names: Iterable[str]) -> set[str]:
    """Remove the transposition of matrices that are only read transposed; these matrices are stored transposed instead.

    torch's linear layers multiply with the transpose. A transposition in the graph would run at every start of a
    runtime, with all weights in memory twice. A head that is tied to the embedding stays unchanged, because the
    embedding is read by rows.

    Returns:
        Names of the weights to be stored transposed.
    """
    readers: dict[str, list[NodeProto]] = {name: [] for name in weight_names}
    for node in graph.node:
        for name in dict.fromkeys(node.input):
            if name in readers:
                readers[name].append(node)
    transposed = {
        name
        for name, nodes in readers.items()
        if nodes
        and all(node.op_type == "Transpose" and [list(a.ints) for a in node.attribute] == [[1, 0]] for node in nodes)
    }
    renamed = {node.output[0]: name for name in transposed for node in readers[name]}
    remaining = [node for node in graph.node if node.output[0] not in renamed]
    for node in remaining:
        for index, name in enumerate(node.input):
            node.input[index] = renamed.get(name, name)
    replace_nodes(graph, remaining)
    return transposed


def replace_nodes(graph: GraphProto, nodes: Sequence[NodeProto]) -> None:
    """Replace all nodes of a graph, in order."""
    copies = [copy.deepcopy(node) for node in nodes]  # a node dies with the list that contains it
    del graph.node[:]
    graph.node.extend(copies)


def sort_tensors(graph: GraphProto, tensors: Iterable[OnnxTensor]) -> list[OnnxTensor]:
    """Return the tensors that the graph reads, in the order of reading."""
    order: dict[str, int] = {}
    for node in graph.node:
        for name in node.input:
            order.setdefault(name, len(order))
    return sorted((tensor for tensor in tensors if tensor.name in order), key=lambda tensor: order[tensor.name])


# Weights in float16.


def store_as_float16(graph: GraphProto, tensors: Iterable[OnnxTensor]) -> list[OnnxTensor]:
    """Store the float32 matrices of a graph as float16, each with a Cast before its first reader.

    The computation stays float32: activations of some families (Gemma, Qwen2) exceed the range of float16, and
    onnxruntime has no float16 kernels for most operators on a CPU.

    Returns:
        The tensors that the graph then reads.
    """
    result: list[OnnxTensor] = []
    casts: list[NodeProto] = []
    for tensor in tensors:
        if tensor.type != np.float32 or len(tensor.shape) < 2:
            result.append(tensor)
            continue
        half = f"{tensor.name}.fp16"
        casts.append(helper.make_node("Cast", [half], [tensor.name], f"cast_{tensor.name}", to=TensorProto.FLOAT))
        result.append(OnnxTensor(half, tensor.shape, np.float16, partial(_read_as_float16, tensor)))
    replace_nodes(graph, [*casts, *graph.node])
    return result


def _read_as_float16(tensor: OnnxTensor) -> NDArray[np.float16]:
    """Round a matrix to float16. Raises BaseModelError if a value is too large."""
    with np.errstate(over="ignore"):
        values = tensor.values().astype(np.float16)
    if not np.isfinite(values).all():
        raise BaseModelError(
            f"export.onnx.types: {tensor.name} has a weight above 65504, which float16 cannot represent; remove fp16"
        )
    return values


# Quantizing the graph.


def quantize_graph(model: ModelProto, tensors: Iterable[OnnxTensor]) -> list[OnnxTensor]:
    """Quantize the matrices of a float32 graph in place.

    Returns:
        The tensors that the graph then reads, and tensors that it no longer reads.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    transposed = {
        node.output[0]: node.input[0]
        for node in model.graph.node
        if node.op_type == "Transpose" and node.input[0] in by_name
    }
    quantized: dict[str, OnnxTensor] = {}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if node.op_type == "Transpose" and node.output[0] in transposed:
            continue  # `_insert_transpositions` inserts it again if a node still reads it
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
        quantized |= {tensor.name: tensor for tensor in new_tensors}
    replace_nodes(model.graph, _insert_transpositions(nodes, transposed))
    return [*by_name.values(), *quantized.values()]


def _matrix_name(node: NodeProto, by_name: dict[str, OnnxTensor], transposed: dict[str, str]) -> str | None:
    """Return the name of the weight that a product or the token lookup reads; None if it cannot be quantized."""
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
            "Gather", [tensor.name, node.input[1]], [f"{node.output[0]}_{part}"], f"{node.name}_{part}", axis=0
        )
        for part, tensor in (("rows", numbers), ("scales", scales))
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
    """Return the numbers and scales of a matrix, which is quantized when the numbers are written.

    The scales, which are small, are kept until they are written. Scales that are written first are computed for
    themselves.
    """
    block = block_width(shape[axis]) or BLOCK
    scale_shape = tuple(size // block if index == axis else size for index, size in enumerate(shape))
    kept_scales: list[NDArray[np.float32]] = []

    def read_numbers() -> NDArray[np.int8]:
        numbers, scales = quantize_matrix(values(), axis, block)
        kept_scales[:] = [scales]
        return numbers

    def read_scales() -> NDArray[np.float32]:
        return kept_scales.pop() if kept_scales else quantize_matrix(values(), axis, block)[1]

    return (
        OnnxTensor(f"{name}.int8", shape, np.int8, read_numbers),
        OnnxTensor(f"{name}.scale", scale_shape, np.float32, read_scales),
    )


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


def block_width(inner: int) -> int | None:
    """Return how many numbers share a scale in a matrix with this inner width; None if the matrix stays float32."""
    return next((size for size in (BLOCK, BLOCK // 2) if inner % size == 0), None)


# Writing the graph.


def write_graph(model: ModelProto, tensors: Sequence[OnnxTensor], directory: Path, progress: Progress) -> None:
    """Write the graph and a file with its weights, with one tensor at a time in memory."""
    offset = 0
    for tensor in tensors:
        entry = model.graph.initializer.add()
        entry.name = tensor.name
        entry.data_type = helper.np_dtype_to_tensor_dtype(np.dtype(tensor.type))
        entry.dims.extend(tensor.shape)
        if tensor.size_bytes <= _INLINE_BYTES:
            entry.raw_data = _tensor_bytes(tensor)
            continue
        offset += -offset % _ALIGNMENT_BYTES
        entry.data_location = TensorProto.EXTERNAL
        for key, value in (("location", DATA_FILE), ("offset", str(offset)), ("length", str(tensor.size_bytes))):
            entry.external_data.add(key=key, value=value)
        offset += tensor.size_bytes

    def blocks() -> Iterator[Sequence[bytes | memoryview]]:
        written = 0
        for tensor in tensors:
            if tensor.size_bytes > _INLINE_BYTES:
                gap = -written % _ALIGNMENT_BYTES
                written += gap + tensor.size_bytes
                yield [bytes(gap), _tensor_bytes(tensor)]
                progress("writing weights for onnxruntime", written, offset)

    files.write_blocks(directory / DATA_FILE, blocks())
    files.write_blocks(directory / GRAPH_FILE, [[model.SerializeToString(deterministic=True)]])


def _tensor_bytes(tensor: OnnxTensor) -> bytes | memoryview:
    """Return the values as little-endian bytes, as the format requires."""
    values = np.asarray(tensor.values(), dtype=np.dtype(tensor.type).newbyteorder("<"), order="C")
    if values.shape != tensor.shape:
        raise ValueError(f"{tensor.name}: found shape {values.shape}; expected {tensor.shape} as in the graph")
    return values.tobytes() if values.nbytes <= _INLINE_BYTES else values.reshape(-1).view(np.uint8).data

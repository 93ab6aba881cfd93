"""The weights of a merged model, in float32, one at a time."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ratchet.config.export import OnnxType
from ratchet.errors import BaseModelError, SettingsError
from ratchet.export.onnx import int8, tracing
from ratchet.export.onnx import tracing as onnx_graph
from ratchet.export.onnx.tracing import OnnxTensor, TracedGraph
from ratchet.models import base_model, loading, weights
from ratchet.storage import files
from ratchet.storage.records.export import Progress


class OnnxWeightReader:
    """Reads a parameter from the model's files when it is asked for.

    Where the files name their tensors otherwise than the model's class does, which old checkpoints do, the model is
    loaded as a whole, for only transformers knows what became of each.
    """

    def __init__(self, directory: Path, traced: TracedGraph) -> None:
        reader = weights.WeightReader(directory)
        names: dict[str, list[str]] = {name: [] for name in traced.weights}
        for name, first in traced.names.items():
            names[first].append(name)
        self._stored: dict[str, Any] = {}
        stored = reader.tensors()
        for first, all_names in names.items():
            place = next((name for name in all_names if name in stored), None)
            if place is not None and tuple(stored[place].get_shape()) == traced.weights[first]:
                self._stored[first] = stored[place]
        self.streamed = len(self._stored) == len(names)
        if not self.streamed:
            model = loading.load_plain(directory, torch.float32, torch.device("cpu"))
            self._stored = dict(model.named_parameters())

    def array(self, name: str) -> NDArray[Any]:
        """One parameter."""
        found: NDArray[Any] = self._stored[name][...].detach().to(torch.float32).numpy()
        return found


# Directories for onnxruntime: one graph for prompt and answer, with a cache, and the tokenizer beside it.
#
#     model.onnx              the step: input_ids [batch, length], attention_mask [batch, past + length], position_ids
#                             [batch, length], past_key_values.N.key and .value [batch, heads, past, head size];
#                             logits [batch, length, vocabulary], present.N.key and .value
#     model.onnx.data         its weights, in ONNX's external data, each at the start of a page
#     config.json, generation_config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja   as in `hf`
#
# The past may be empty, and rows may be padded on the left. Nothing in these files depends on the machine or the time.

CARRIED = (
    "llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "apertus",
    "arcee", "biogpt", "bloom", "codegen", "cohere", "cohere2", "ernie4_5", "exaone4", "falcon", "glm", "glm4", "gpt2",
    "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "granite", "helium", "hunyuan_v1_dense", "mpt", "nemotron", "olmo",
    "olmo2", "olmo3", "opt", "persimmon", "seed_oss", "smollm3", "stablelm", "starcoder2", "xglm",
)  # fmt: skip
"""Model types whose exported step was compared with transformers' own, with and without a past, in onnxruntime."""

_BESIDE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_TOKENIZER = "tokenizer.json"
_NODE_BYTES = 6000
"""More than the graph takes for one tensor of the model."""


def require_exportable(directory: Path) -> None:
    """Ask, from config.json alone, whether a model of this kind can be exported.

    Raises:
        SettingsError: it cannot; says which can.
        BaseModelError: there is no config that could be read.
    """
    config = _read_config(directory)
    kind = str(config.get("model_type"))
    if kind not in CARRIED:
        named = ", ".join(config.get("architectures") or ()) or "no class named"
        raise SettingsError(
            f"export.onnx.types: {directory / 'config.json'} is a {kind} ({named}), which is not carried to ONNX; "
            f"carried are {', '.join(sorted(CARRIED))}: leave export.onnx.types empty"
        )
    if any(one == "dynamic" for one in _rope_types(config)):
        raise SettingsError(
            f"export.onnx.types: {directory / 'config.json'}: rope_type dynamic changes a model's frequencies with the "
            "length of what it reads, which a graph cannot; leave export.onnx.types empty"
        )


def write_onnx(directory: Path, target: Path, type: OnnxType, progress: Progress) -> None:
    """Export a merged model. Of weights, one at a time is in memory.

    Args:
        directory: config, weights in any type, and tokenizer, as `formats.hf` leaves them.
        target: a directory that is made; on an error it may be incomplete, so it belongs into one that is sealed.
        type: of the weights: `fp32`, or `int8` (see onnx_int8).
        progress: told of tracing, and of bytes written.

    Raises:
        SettingsError: this kind of model is not carried.
        BaseModelError: it cannot be traced, its files are incomplete, or it has no tokenizer.json.
    """
    require_exportable(directory)
    if not (directory / _TOKENIZER).is_file():
        raise BaseModelError(
            f"{directory}: no {_TOKENIZER}, without which nobody but transformers could use the model; use a base with "
            "a fast tokenizer, or leave export.onnx.types empty"
        )
    progress("tracing the model for ONNX", 0, 1)
    traced = tracing.trace_model(directory)
    progress("tracing the model for ONNX", 1, 1)
    tensors = _clean_traced_graph(traced, OnnxWeightReader(directory, traced))
    if type == "int8":
        tensors = int8.quantize_graph(traced.model, tensors)
    files.make_directory(target)
    onnx_graph.write_graph(traced.model, onnx_graph.sort_tensors(traced.model.graph, tensors), target, progress)
    for name in _BESIDE:
        if (directory / name).is_file():
            files.write_blocks(target / name, [[(directory / name).read_bytes()]])


def _clean_traced_graph(traced: TracedGraph, weights: OnnxWeightReader) -> list[OnnxTensor]:
    """Clean the traced graph, and say what it reads that its inputs no longer give."""
    graph = traced.model.graph
    asked = {value.name for value in graph.input}
    names = [name for name in traced.weights if name in asked]
    buffers = {name: buffer.numpy() for name, buffer in traced.buffers.items() if name in asked}
    onnx_graph.clean_graph(traced.model)
    onnx_graph.remove_weight_inputs(traced.model, {*names, *buffers})
    onnx_graph.split_products(graph, names)
    turned = onnx_graph.fold_transpositions(graph, names)
    return [
        *(_weight_tensor(name, traced.weights[name], weights, name in turned) for name in names),
        *(_buffer_tensor(name, buffer) for name, buffer in buffers.items()),
    ]


def _weight_tensor(name: str, shape: tuple[int, ...], weights: OnnxWeightReader, is_turned: bool) -> OnnxTensor:
    if is_turned:
        return OnnxTensor(name, shape[::-1], np.float32, lambda: weights.array(name).T)
    return OnnxTensor(name, shape, np.float32, lambda: weights.array(name))


def _buffer_tensor(name: str, values: NDArray[Any]) -> OnnxTensor:
    return OnnxTensor(name, values.shape, values.dtype, lambda: values)


def onnx_size_bytes(directory: Path, type: OnnxType) -> int:
    """What `write_onnx` will take at most, from the headers of the model's files."""
    shapes = base_model.read_tensor_shapes(directory)
    found = sum(_stored_bytes(shape, type) for shape in shapes.values())
    if type == "int8" and _read_config(directory).get("tie_word_embeddings", True):
        matrices = [shape for shape in shapes.values() if len(shape) == 2]
        found += max((_stored_bytes(shape, type) for shape in matrices), default=0)
    beside = sum(path.stat().st_size for name in _BESIDE if (path := directory / name).is_file())
    return found + beside + _NODE_BYTES * len(shapes)


def _stored_bytes(shape: tuple[int, ...], type: OnnxType) -> int:
    numbers = int(np.prod(shape, dtype=np.int64))
    block = int8.block_width(shape[-1]) if len(shape) == 2 else None
    return 4 * numbers if type == "fp32" or block is None else numbers + 4 * (numbers // block)


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BaseModelError(f"{path}: cannot be read ({error}); bring the model's original config.json") from None
    if not isinstance(found, dict):
        raise BaseModelError(f"{path}: no JSON object; bring the model's original config.json")
    return found


def _rope_types(config: Mapping[str, Any]) -> list[Any]:
    """Kinds of rotary positions that a config names: one for all layers, or one for each kind of layer."""
    found = []
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        for one in (value, *value.values()) if isinstance(value, dict) else ():
            if isinstance(one, dict):
                found.append(one.get("rope_type", one.get("type")))
    return found

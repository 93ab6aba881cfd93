"""Exports a merged model to a directory for onnxruntime: one graph for prompt and answer with a cache, and a tokenizer.

    model.onnx              the decoding step: input_ids [batch, length], attention_mask [batch, past + length],
                            position_ids [batch, length], past_key_values.N.key and .value [batch, heads, past, head
                            size]; logits [batch, length, vocabulary], present.N.key and .value
    model.onnx.data         its weights as ONNX external data, each aligned to a page
    config.json, generation_config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja   as in `hf`

The past may be empty, and rows may be padded on the left. The files do not depend on the machine or the time.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ratchet.config.export import OnnxType
from ratchet.errors import BaseModelError, SettingsError
from ratchet.exporters.onnx import int8, tracing
from ratchet.exporters.onnx.tracing import OnnxTensor, TracedGraph
from ratchet.models import base_model, loading, weights
from ratchet.storage import files
from ratchet.storage.records.export import Progress


class OnnxWeightReader:
    """Reads parameters from the model's files when they are needed.

    If tensors in the files have other names than parameters of the model, as in old checkpoints, the model is loaded as
    a whole, because only transformers knows the mapping.
    """

    def __init__(self, directory: Path, traced: TracedGraph) -> None:
        names: dict[str, list[str]] = {name: [] for name in traced.weights}
        for name, first in traced.names.items():
            names[first].append(name)
        self._parameters: dict[str, Any] = {}
        stored = weights.WeightReader(directory).tensors()
        for first, all_names in names.items():
            stored_name = next((name for name in all_names if name in stored), None)
            if stored_name is not None and tuple(stored[stored_name].get_shape()) == traced.weights[first]:
                self._parameters[first] = stored[stored_name]
        self.is_streamed = len(self._parameters) == len(names)
        if not self.is_streamed:
            model = loading.load_plain(directory, torch.float32, torch.device("cpu"))
            self._parameters = dict(model.named_parameters())

    def array(self, name: str) -> NDArray[Any]:
        """Read one parameter in float32."""
        values: NDArray[Any] = self._parameters[name][...].detach().to(torch.float32).numpy()
        return values


SUPPORTED_MODEL_TYPES = (
    "llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "apertus",
    "arcee", "biogpt", "bloom", "codegen", "cohere", "cohere2", "ernie4_5", "exaone4", "falcon", "glm", "glm4", "gpt2",
    "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "granite", "helium", "hunyuan_v1_dense", "mpt", "nemotron", "olmo",
    "olmo2", "olmo3", "opt", "persimmon", "seed_oss", "smollm3", "stablelm", "starcoder2", "xglm",
)  # fmt: skip
"""Model types whose exported step was compared with transformers in onnxruntime, with and without a past."""

_TOKENIZER = "tokenizer.json"
_COMPANION_FILES = ("config.json", "generation_config.json", _TOKENIZER, "tokenizer_config.json", "chat_template.jinja")
_NODE_BYTES = 6000
"""Upper bound of the graph's size per tensor of the model."""


def require_exportable(directory: Path) -> None:
    """Check from config.json alone that the model can be exported.

    Raises:
        SettingsError: the model type is not supported; the message lists the supported ones.
        BaseModelError: config.json is missing or invalid.
    """
    config = _read_config(directory)
    kind = str(config.get("model_type"))
    if kind not in SUPPORTED_MODEL_TYPES:
        named = ", ".join(config.get("architectures") or ()) or "no class named"
        raise SettingsError(
            f"export.onnx.types: {directory / 'config.json'}: found model type {kind} ({named}); ONNX export supports "
            f"{', '.join(sorted(SUPPORTED_MODEL_TYPES))}; remove all types from export.onnx.types"
        )
    if any(one == "dynamic" for one in _rope_types(config)):
        raise SettingsError(
            f"export.onnx.types: {directory / 'config.json'}: found rope_type dynamic, whose frequencies depend on the "
            "length of the input, which an ONNX graph cannot express; remove all types from export.onnx.types"
        )


def write_onnx(directory: Path, target: Path, type: OnnxType, progress: Progress) -> None:
    """Export a merged model; one weight is in memory at a time.

    Args:
        directory: config, weights of any type, and tokenizer, as in the export's `hf` directory.
        target: the directory to create. It may be incomplete after an error, so create it inside a sealed one.
        type: type of the weights: `fp32` or `int8`.
        progress: called during tracing, and with the bytes written and their total.

    Raises:
        SettingsError: the model type is not supported.
        BaseModelError: the model cannot be traced, its files are incomplete, or tokenizer.json is missing.
    """
    require_exportable(directory)
    if not (directory / _TOKENIZER).is_file():
        raise BaseModelError(
            f"{directory}: found no {_TOKENIZER}, which other tools than transformers need; use a base with a fast "
            "tokenizer, or remove all types from export.onnx.types"
        )
    progress("tracing the model for ONNX", 0, 1)
    traced = tracing.trace_model(directory)
    progress("tracing the model for ONNX", 1, 1)
    tensors = _clean_traced_graph(traced, OnnxWeightReader(directory, traced))
    if type == "int8":
        tensors = int8.quantize_graph(traced.model, tensors)
    files.make_directory(target)
    tracing.write_graph(traced.model, tracing.sort_tensors(traced.model.graph, tensors), target, progress)
    for name in _COMPANION_FILES:
        if (directory / name).is_file():
            files.write_blocks(target / name, [[(directory / name).read_bytes()]])


def _clean_traced_graph(traced: TracedGraph, weights: OnnxWeightReader) -> list[OnnxTensor]:
    """Clean the traced graph, and return the tensors that it reads and that are not its inputs."""
    graph = traced.model.graph
    inputs = {value.name for value in graph.input}
    names = [name for name in traced.weights if name in inputs]
    buffers = {name: buffer.numpy() for name, buffer in traced.buffers.items() if name in inputs}
    tracing.clean_graph(traced.model)
    tracing.remove_weight_inputs(traced.model, {*names, *buffers})
    tracing.split_products(graph, names)
    transposed = tracing.fold_transpositions(graph, names)
    return [
        *(_weight_tensor(name, traced.weights[name], weights, name in transposed) for name in names),
        *(_buffer_tensor(name, buffer) for name, buffer in buffers.items()),
    ]


def _weight_tensor(name: str, shape: tuple[int, ...], weights: OnnxWeightReader, is_transposed: bool) -> OnnxTensor:
    if is_transposed:
        return OnnxTensor(name, shape[::-1], np.float32, lambda: weights.array(name).T)
    return OnnxTensor(name, shape, np.float32, lambda: weights.array(name))


def _buffer_tensor(name: str, values: NDArray[Any]) -> OnnxTensor:
    return OnnxTensor(name, values.shape, values.dtype, lambda: values)


def onnx_size_bytes(directory: Path, type: OnnxType) -> int:
    """Upper bound of the size of the files that `write_onnx` writes, from the headers of the model's files."""
    shapes = base_model.read_tensor_shapes(directory)
    size_bytes = sum(_stored_bytes(shape, type) for shape in shapes.values())
    if type == "int8" and _read_config(directory).get("tie_word_embeddings", True):
        matrices = [shape for shape in shapes.values() if len(shape) == 2]
        size_bytes += max((_stored_bytes(shape, type) for shape in matrices), default=0)
    size_bytes += sum(path.stat().st_size for name in _COMPANION_FILES if (path := directory / name).is_file())
    return size_bytes + _NODE_BYTES * len(shapes)


def _stored_bytes(shape: tuple[int, ...], type: OnnxType) -> int:
    count = int(np.prod(shape, dtype=np.int64))
    block = int8.block_width(shape[-1]) if len(shape) == 2 else None
    return 4 * count if type == "fp32" or block is None else count + 4 * (count // block)


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BaseModelError(f"{path}: cannot be read ({error}); restore the model's original config.json") from None
    if not isinstance(config, dict):
        raise BaseModelError(f"{path}: expected a JSON object; restore the model's original config.json")
    return config


def _rope_types(config: Mapping[str, Any]) -> list[Any]:
    """Types of rotary positions in a config: one for all layers, or one for each kind of layer."""
    types = []
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        for one in (value, *value.values()) if isinstance(value, dict) else ():
            if isinstance(one, dict):
                types.append(one.get("rope_type", one.get("type")))
    return types

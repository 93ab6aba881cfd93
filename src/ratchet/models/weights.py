"""Checks, reads and converts the weights in a model's files, and returns weights of a loaded model as dense tensors.

The checks are stricter than those of transformers, which only warns of a missing weight and initializes it at random,
and which quantizes a linear layer even if its shape differs from the config. Both are errors here.
"""

import copy
import ctypes
import json
import shutil
import warnings
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import TrainableTokensWrapper
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from ratchet.errors import BaseModelError
from ratchet.models import adapter_format, base_model
from ratchet.models.device import Model
from ratchet.models.model_spec import ModelSpec
from ratchet.storage.progress import report_progress
from ratchet.storage.records.base import StoredQuantization

TRANSPOSED = (Conv1D, nn.Embedding)
"""Layers that store their weight as [inputs, outputs]; the inputs of an embedding are tokens."""

TRIM_EVERY_BYTES = 64 * 2**20
"""Number of bytes read between two calls of `trim_heap`."""

_SINGLE_PICKLE = "pytorch_model.bin"


def check_stored_tensors(path: Path, spec: ModelSpec, stored: StoredQuantization | None) -> tuple[str, ...]:
    """Compare names and shapes of all stored tensors with the model's, from headers only.

    The loader of transformers makes the comparison, with tensors on the meta device. So the names of old and foreign
    checkpoints are converted in the same way as when the weights are loaded. Returns stored tensors that the model does
    not use. Raises BaseModelError if a file is damaged, or a tensor is missing or has another shape.
    """
    shapes = plain_shapes(path, spec, stored)
    meta_model = spec.model(torch.float32)
    try:
        report = loading_report(meta_model, shapes)
    except (ValueError, KeyError, RuntimeError) as error:
        raise BaseModelError(
            f"{path}: these weights do not fit a {spec.class_name}: {str(error).splitlines()[0]}"
        ) from error
    if report["mismatched_keys"]:
        name, found, expected = min(report["mismatched_keys"])
        raise BaseModelError(
            f"{path}: {name}: found {_format_shape(found)}, but config.json expects {_format_shape(expected)}"
            f"{_count_suffix(len(report['mismatched_keys']))}; use config and weights of the same model"
        )
    if report["missing_keys"]:
        raise BaseModelError(
            f"{path}: {min(report['missing_keys'])} is in none of the files"
            f"{_count_suffix(len(report['missing_keys']))}; "
            "transformers would initialize it at random: restore all files of the model"
        )
    return tuple(sorted(report["unexpected_keys"]))


def loading_report(meta_model: Model, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the report of transformers' loader for tensors of these names and shapes (missing_keys, ...)."""
    config = meta_model.config
    if hasattr(config, "quantization_config"):  # unquantized shapes are compared
        del config.quantization_config
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # Ratchet's error message has the content of transformers' report
    try:
        _, report = type(meta_model).from_pretrained(
            None,
            config=config,
            state_dict={name: torch.empty(shape, device="meta") for name, shape in shapes.items()},
            dtype=torch.float32,
            device_map={"": "meta"},
            ignore_mismatched_sizes=True,  # the report names the tensor; an error would not
            output_loading_info=True,
        )
    finally:
        logging.set_verbosity(verbosity)
    result: dict[str, Any] = report
    return result


def tied_names(spec: ModelSpec) -> frozenset[str]:
    """Return the names of weights that need not be stored, because they are tied to others; usually the output head."""
    return frozenset(spec.model(torch.float32).all_tied_weights_keys)


def plain_shapes(path: Path, spec: ModelSpec, stored: StoredQuantization | None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all stored tensors by name; for 4-bit weights the unquantized shape, without constants.

    Raises BaseModelError if a file is damaged.
    """
    shapes = base_model.read_tensor_shapes(path)
    if stored is None:
        return shapes
    # A 4-bit Conv1D is stored as an ordinary linear layer, which is transposed.
    transposed = tuple(layer.name for layer in spec.layers if layer.kind == "conv1d")
    unpacked = unpacked_shapes(path, stored)
    for weight, shape in unpacked.items():
        if any(layer.endswith(weight.removesuffix(".weight")) for layer in transposed):
            unpacked[weight] = shape[::-1]
    prefixes = tuple(f"{weight}." for weight in unpacked)
    return {name: shape for name, shape in shapes.items() if not name.startswith(prefixes)} | unpacked


def unpacked_shapes(path: Path, stored: StoredQuantization) -> dict[str, tuple[int, ...]]:
    """Return the original shape [outputs, inputs] of every stored 4-bit weight.

    bitsandbytes stores this shape in a small tensor next to the weight.
    """
    suffix = f".quant_state.bitsandbytes__{stored.kind}"
    shapes = {}
    for name in base_model.list_weight_files(path):
        with safe_open(str(path / name), framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (not a dict)
                if key.endswith(suffix):
                    shapes[key.removesuffix(suffix)] = tuple(
                        json.loads(bytes(tensors.get_tensor(key).tolist()))["shape"]
                    )
    return shapes


def _format_shape(shape: Any) -> str:
    return " x ".join(map(str, shape)) or "a single number"


def _count_suffix(count: int) -> str:
    return f" (and {count - 1} more)" if count > 1 else ""


def require_finite(path: Path) -> None:
    """Check that all weights are finite. Call this once, when the base is pinned; later its digest is sufficient.

    Raises BaseModelError if a number is NaN or infinite.
    """
    tensors = WeightReader(path).tensors()
    for number, (name, stored) in enumerate(tensors.items(), start=1):
        report_progress("tensors checked for NaN", number, len(tensors))
        tensor = stored[...]
        if tensor.is_floating_point() and tensor.element_size() > 1 and not bool(torch.isfinite(tensor).all()):
            raise BaseModelError(f"{path}: {name} holds NaN or infinite numbers; restore the original weights")


class WeightReader:
    """Reader of the tensors in a model's files, one by one on request, without memory mapping.

    transformers instead maps the files into memory, which has two disadvantages. All tensors that were read count as
    memory of the process until loading ends, or longer if a tensor is used in place. And a file that is replaced during
    a training would change the model or kill the process. The reader regularly returns freed memory to the system,
    because the C library would keep it (measured: a third of the size of a model of 160M parameters).
    """

    def __init__(self, path: Path) -> None:
        self._files: list[Any] = [
            safe_open(str(path / name), framework="pt", device="cpu", backend="pread")
            for name in base_model.list_weight_files(path)
        ]
        self._read_bytes = 0

    def tensors(self) -> dict[str, "LazyTensor"]:
        """Return all tensors by name, without reading them."""
        return {name: LazyTensor(file.get_slice(name), self) for file in self._files for name in file.keys()}  # noqa: SIM118

    def read(self, stored: Any, index: Any) -> Tensor:
        """Read a part of a stored tensor. Concurrent threads may lose counts, which is harmless."""
        tensor: Tensor = stored[index]
        self._read_bytes += tensor.nbytes
        if self._read_bytes >= TRIM_EVERY_BYTES:
            self._read_bytes = 0
            trim_heap()
        return tensor


class LazyTensor:
    """A stored tensor that is read with `[...]`; it has the interface of safetensors' slices, for transformers."""

    def __init__(self, stored: Any, reader: WeightReader) -> None:
        self._stored = stored
        self._reader = reader

    def __getitem__(self, index: Any) -> Tensor:
        return self._reader.read(self._stored, index)

    def get_shape(self) -> list[int]:
        return list(self._stored.get_shape())

    def get_dtype(self) -> str:
        return str(self._stored.get_dtype())


def trim_heap() -> None:
    """Return freed memory to the system if the C library supports it (glibc's malloc_trim)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# Weights of a loaded model.


def dense_weight(module: Any) -> Tensor:
    """Return the frozen weight of a layer, with or without an adapter around it, in float32 as [outputs, inputs].

    A 4-bit weight is dequantized to the compute dtype, as in bitsandbytes' matrix product, even if it was quantized
    from another dtype. The part that PiSSA subtracted is added back. A float32 weight is not copied. A sharded weight
    is gathered, so every rank must call this. Raises BaseModelError if the weight is quantized by an unknown method.
    """
    layer = unwrap_to_base(module)
    if isinstance(layer, Linear4bit):
        state = copy.copy(getattr(layer.weight, "quant_state", layer.quant_state))
        state.dtype = layer.compute_dtype or state.dtype
        return dequantize_4bit(gather_full_weight(layer.weight.data), state).float()
    if not layer.weight.is_floating_point() or layer.weight.itemsize < torch.float16.itemsize:
        raise BaseModelError(
            f"weight of a {type(layer).__name__} layer: found {layer.weight.dtype}; only bitsandbytes 4-bit weights "
            "can be dequantized; use the model from before it was quantized"
        )
    stored = gather_full_weight(layer.weight.detach()).float()
    weight = stored.T if isinstance(layer, TRANSPOSED) else stored
    pissa_offset = adapter_format.pissa_offset(module) if isinstance(module, LoraLayer) else None
    return weight if pissa_offset is None else weight + pissa_offset.to(weight.device)


def gather_full_weight(weight: Any) -> Tensor:
    """Return a full weight. If it is sharded across ranks, it is gathered, so every rank must call this."""
    full: Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return full


def unwrap_to_base(module: Any) -> Any:
    """Return the base model's module inside all adapters."""
    while (inner := wrapped_module(module)) is not None:
        module = inner
    return module


def wrapped_module(module: Any) -> Any:
    """Return the module that an adapter wraps; None for a module of the base model."""
    if isinstance(module, TrainableTokensWrapper):
        return module.token_adapter
    return module.base_layer if isinstance(module, BaseTunerLayer) else None


# Conversion of pickles (pytorch_model.bin) to safetensors, shard by shard, without running their code.
#
# A pickle is a program. torch's reader with `weights_only` interprets only operations that build tensors, and refuses
# all others. Files are memory-mapped, so a shard need not fit into memory. Files written before torch 1.6 are no zip
# files, so they are read at once.


def convert_pickles(directory: Path, target: Path, tied: Collection[str] = (), include_code: bool = False) -> None:
    """Convert a model directory with pickles to one with safetensors; the same weights give the same bytes.

    Raises BaseModelError if there are no pickles, or a shard is missing, damaged, or contains more than tensors.

    Args:
        tied: names of tied weights. A tied weight is omitted if another weight in the file is the same tensor; all
            other weights that share memory are written separately.
    """
    if (directory / base_model.PICKLE_INDEX).exists():
        pickles = base_model.list_shards(directory / base_model.PICKLE_INDEX)
    elif (directory / _SINGLE_PICKLE).exists():
        pickles = [_SINGLE_PICKLE]
    else:
        raise BaseModelError(
            f"{directory}: no weights: found neither {base_model.WEIGHTS} nor {_SINGLE_PICKLE}, nor an index of shards"
        )
    target.mkdir()
    for name in base_model.list_companion_files(directory, include_code):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(directory / name, target / name)
    weight_map: dict[str, str] = {}
    size_bytes = 0
    for number, name in enumerate(pickles, start=1):
        file_name = base_model.WEIGHTS if len(pickles) == 1 else f"model-{number:05d}-of-{len(pickles):05d}.safetensors"
        tensors = _separate_shared_tensors(_read_pickle(directory / name), tied)
        save_file(tensors, target / file_name, metadata={"format": "pt"})  # transformers requires this entry
        weight_map |= dict.fromkeys(tensors, file_name)
        size_bytes += sum(tensor.nbytes for tensor in tensors.values())
        del tensors
        report_progress("pickles converted", number, len(pickles))
    if len(pickles) > 1:
        index = {"metadata": {"total_size": size_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (target / base_model.INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _read_pickle(file: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for unknown newer protocols torch warns before it raises an error
            content: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # for a damaged file torch raises half a dozen unrelated types
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        if type(error).__name__ != "UnpicklingError":
            raise BaseModelError(f"{file}: damaged or truncated ({lines[0]}); restore the original file") from None
        refusal = [line for line in lines if "Unsupported" in line] or lines
        raise BaseModelError(
            f"{file}: refused: it holds more than tensors, and its code is not run ({refusal[0]}); use a source that "
            "publishes the model as safetensors"
        ) from None
    found = None
    if not isinstance(content, dict):
        found = type(content).__name__
    elif invalid := [key for key, value in content.items() if not isinstance(value, Tensor)]:
        found = f"{type(content).__name__} with {invalid[0]}: {type(content[invalid[0]]).__name__}"
    if found is not None:
        raise BaseModelError(
            f"{file}: expected tensors by name, found {found}; use the file as written by transformers"
        )
    return {str(key): value for key, value in content.items()}


def _separate_shared_tensors(tensors: dict[str, Tensor], tied: Collection[str]) -> dict[str, Tensor]:
    """Copy tensors that share memory, because safetensors does not support sharing; omit tied copies."""
    storages: set[int] = set()
    views: set[tuple[Any, ...]] = set()
    separate: dict[str, Tensor] = {}
    for name in sorted(tensors, key=lambda name: (name in tied, name)):  # tied names come last
        tensor = tensors[name]
        view = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if name in tied and view in views:
            continue
        views.add(view)
        memory = tensor.untyped_storage().data_ptr()
        separate[name] = (tensor.clone() if memory in storages and tensor.numel() else tensor).contiguous()
        storages.add(memory)
    return separate

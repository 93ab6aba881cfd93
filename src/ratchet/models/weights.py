"""The weights in a model's files: whether they are all there, checked before any is read, and reading them frugally.

transformers only warns of a weight that its files lack, and begins it at random; that a linear layer has another shape
than the config says it does not notice at all while it quantises. Both are refused here.
"""

import ctypes
import json
import shutil
import warnings
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import logging

from ratchet.errors import BaseModelError
from ratchet.models import base_model
from ratchet.models.device import Model
from ratchet.models.model_spec import ModelSpec
from ratchet.storage.records.base import StoredQuantization

TRIM_EVERY_BYTES = 64 * 2**20
"""Read between two times that freed memory is given back."""


def check_stored_tensors(path: Path, plan: ModelSpec, stored: StoredQuantization | None) -> tuple[str, ...]:
    """Compare names and shapes of all stored tensors with what the model has, from headers alone.

    transformers itself does it, with tensors on the meta device: so the names of old and foreign checkpoints mean what
    they will mean when they are loaded.

    Args:
        path: directory of the weights.
        plan: what the model is.
        stored: how the files' own weights are quantised.

    Returns:
        Stored tensors that the model does not use.

    Raises:
        BaseModelError: a file is damaged, or a tensor is missing or of another shape; names it.
    """
    shapes = plain_shapes(path, plan, stored)
    skeleton = plan.model(torch.float32)
    try:
        report = loading_report(skeleton, shapes)
    except (ValueError, KeyError, RuntimeError) as error:
        raise BaseModelError(
            f"{path}: these weights do not make a {plan.class_name}: {str(error).splitlines()[0]}"
        ) from error
    if report["mismatched_keys"]:
        name, found, wanted = min(report["mismatched_keys"])
        raise BaseModelError(
            f"{path}: {name} is {_format_shape(found)}, and config.json asks for {_format_shape(wanted)}"
            f"{_count_suffix(len(report['mismatched_keys']))}; bring the config and the weights of one model"
        )
    if report["missing_keys"]:
        raise BaseModelError(
            f"{path}: {min(report['missing_keys'])} is in none of the files"
            f"{_count_suffix(len(report['missing_keys']))}; "
            "transformers would begin it at random: bring all files of the model"
        )
    return tuple(sorted(report["unexpected_keys"]))


def loading_report(skeleton: Model, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """What transformers' loader says of tensors of these names and shapes: missing_keys, mismatched_keys, ...

    Args:
        skeleton: its class and its config are meant.
        shapes: of what would be in the files, by name.
    """
    with _suppress_loading_report():
        _, report = type(skeleton).from_pretrained(
            None,
            config=_without_quantization_config(skeleton.config),
            state_dict={name: torch.empty(shape, device="meta") for name, shape in shapes.items()},
            dtype=torch.float32,
            device_map={"": "meta"},
            ignore_mismatched_sizes=True,  # raises no error without a name; they are in the report
            output_loading_info=True,
        )
    found: dict[str, Any] = report
    return found


def tied_names(plan: ModelSpec) -> frozenset[str]:
    """Weights that the model takes from others, and does not need to be stored: mostly the output head."""
    return frozenset(plan.model(torch.float32).all_tied_weights_keys)


def _without_quantization_config(config: Any) -> Any:
    """Without the note that the weights are quantised: shapes are compared as they were before."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def plain_shapes(path: Path, plan: ModelSpec, stored: StoredQuantization | None) -> dict[str, tuple[int, ...]]:
    """Shapes of all stored tensors; of those in 4 bits as they were before, without what belongs to them.

    Raises:
        BaseModelError: a file is damaged.
    """
    shapes = base_model.read_tensor_shapes(path)
    if stored is None:
        return shapes
    turned = tuple(layer.name for layer in plan.layers if layer.kind == "conv1d")  # stored as an ordinary linear layer
    found = unpacked_shapes(path, stored)
    for weight, shape in found.items():
        if any(layer.endswith(weight.removesuffix(".weight")) for layer in turned):
            found[weight] = shape[::-1]
    parts = tuple(f"{weight}." for weight in found)
    return {name: shape for name, shape in shapes.items() if not name.startswith(parts)} | found


def unpacked_shapes(path: Path, stored: StoredQuantization) -> dict[str, tuple[int, ...]]:
    """Of every weight that is in 4 bits in the files what bitsandbytes says that its shape was, [outputs, inputs]: it
    keeps that in a small tensor beside it."""
    note = f".quant_state.bitsandbytes__{stored.kind}"
    found = {}
    for name in base_model.list_weight_files(path):
        with safe_open(str(path / name), framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (not a dict)
                if key.endswith(note):
                    found[key.removesuffix(note)] = tuple(json.loads(bytes(tensors.get_tensor(key).tolist()))["shape"])
    return found


def _format_shape(shape: Any) -> str:
    return " x ".join(map(str, shape)) or "a single number"


def _count_suffix(count: int) -> str:
    return f" (and {count - 1} more)" if count > 1 else ""


@contextmanager
def _suppress_loading_report() -> Iterator[None]:
    """Without transformers' own table of what does not fit: the message says it."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def require_finite(path: Path) -> None:
    """Look at every number of the weights once, when the base is pinned: later its digest vouches for them.

    Raises:
        BaseModelError: one is NaN or infinite.
    """
    for name, stored in WeightReader(path).tensors().items():
        tensor = stored[...]
        if tensor.is_floating_point() and tensor.element_size() > 1 and not bool(torch.isfinite(tensor).all()):
            raise BaseModelError(f"{path}: {name} holds NaN or infinite numbers; bring the original weights")


class WeightReader:
    """Reads the tensors of a model's files one by one, when they are asked for, into memory of their own.

    transformers maps the files into memory instead: all that was read then counts as the process's own until loading
    ends, and as long as it lives if one tensor is used as it lies there; and a file that is replaced while a model is
    trained would change it or kill the process. What is freed between tensors is given back to the system now and
    then: the C library keeps it otherwise (a third of the size of a model of 160M parameters, measured).
    """

    def __init__(self, path: Path) -> None:
        self._files: list[Any] = [
            safe_open(str(path / name), framework="pt", device="cpu", backend="pread")
            for name in base_model.list_weight_files(path)
        ]
        self._read_bytes = 0

    def tensors(self) -> dict[str, "LazyTensor"]:
        """All tensors by name, none of them read."""
        return {name: LazyTensor(file.get_slice(name), self) for file in self._files for name in file.keys()}  # noqa: SIM118

    def has_read(self, tensor: torch.Tensor) -> None:
        """Count; threads may lose some of the count, which costs nothing."""
        self._read_bytes += tensor.nbytes
        if self._read_bytes >= TRIM_EVERY_BYTES:
            self._read_bytes = 0
            trim_heap()


class LazyTensor:
    """A stored tensor that transformers may ask for its shape and type, and reads with `[...]`."""

    def __init__(self, stored: Any, reader: WeightReader) -> None:
        self._stored = stored
        self._reader = reader

    def __getitem__(self, place: Any) -> torch.Tensor:
        self._reader.has_read(tensor := self._stored[place])
        return tensor

    def get_shape(self) -> list[int]:
        """As safetensors' own slices answer."""
        return list(self._stored.get_shape())

    def get_dtype(self) -> str:
        """As safetensors' own slices answer."""
        return str(self._stored.get_dtype())


def trim_heap() -> None:
    """Return freed memory to the system, where the C library has a word for it (glibc's malloc_trim)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# Weights that come as pickles (pytorch_model.bin) to safetensors, shard by shard, running no code of theirs.
#
# A pickle is a program. torch's reader with `weights_only` interprets the part of it that builds tensors, and refuses
# the rest. Files are mapped into memory, so that a shard need not fit into it; those that torch wrote before version
# 1.6
# are read whole.

_INDEX_BEFORE = base_model.PICKLE_INDEX
_ONE_FILE = "pytorch_model.bin"


def convert_pickles(directory: Path, target: Path, tied: Collection[str] = (), code: bool = False) -> None:
    """Make a model directory with safetensors of one with pickles; the same weights give the same bytes.

    Args:
        directory: the model with pickles.
        target: a new directory.
        tied: weights that the model takes from others: where a file holds one as the very memory of another, it is
            left out. Others that share memory are written each for itself.
        code: whether Python code that the model brings along is copied too.

    Raises:
        BaseModelError: there are no such files, a shard is missing or damaged, or holds more than tensors.
    """
    before = _list_pickles(directory)
    target.mkdir()
    for name in base_model.list_companion_files(directory, code):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(directory / name, target / name)
    places: dict[str, str] = {}
    size_bytes = 0
    for number, name in enumerate(before, start=1):
        after = base_model.WEIGHTS if len(before) == 1 else f"model-{number:05d}-of-{len(before):05d}.safetensors"
        tensors = _separate_shared_tensors(_read_pickle(directory / name), tied)
        save_file(tensors, target / after, metadata={"format": "pt"})  # what transformers writes, and asks for
        places |= dict.fromkeys(tensors, after)
        size_bytes += sum(tensor.nbytes for tensor in tensors.values())
        del tensors
    if len(before) > 1:
        index = {"metadata": {"total_size": size_bytes}, "weight_map": dict(sorted(places.items()))}
        (target / base_model.INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _list_pickles(directory: Path) -> list[str]:
    """Pickles that hold the model, in order."""
    if (directory / _INDEX_BEFORE).exists():
        return base_model.list_shards(directory / _INDEX_BEFORE)
    if (directory / _ONE_FILE).exists():
        return [_ONE_FILE]
    raise BaseModelError(
        f"{directory}: no weights: neither {base_model.WEIGHTS} nor {_ONE_FILE}, nor an index of shards"
    )


def _read_pickle(file: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it may not know newer protocols: then it raises as well
            held: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # of a damaged file torch raises half a dozen unrelated types
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        if type(error).__name__ != "UnpicklingError":
            raise BaseModelError(f"{file}: damaged or cut short ({lines[0]}); bring the original file") from None
        refusal = [line for line in lines if "Unsupported" in line] or lines
        raise BaseModelError(
            f"{file}: refused: it holds more than tensors, and what it would run to make it is not run ({refusal[0]}); "
            "take the model from where it is published as safetensors"
        ) from None
    strange = [key for key, value in held.items() if not isinstance(value, Tensor)] if isinstance(held, dict) else [""]
    if strange:
        raise BaseModelError(
            f"{file}: no weights by name, but {type(held).__name__}"
            + (f" with {strange[0]}: {type(held[strange[0]]).__name__}" if strange[0] else "")
            + "; bring the file as transformers writes it"
        )
    return {str(key): value for key, value in held.items()}


def _separate_shared_tensors(tensors: dict[str, Tensor], tied: Collection[str]) -> dict[str, Tensor]:
    """Tensors that share no memory, for the format knows no sharing."""
    seen: dict[int, str] = {}
    views: set[tuple[Any, ...]] = set()
    apart: dict[str, Tensor] = {}
    for name in sorted(tensors, key=lambda name: (name in tied, name)):  # what others are tied to comes first
        tensor = tensors[name]
        view = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if name in tied and view in views:
            continue
        views.add(view)
        memory = tensor.untyped_storage().data_ptr()
        apart[name] = (tensor.clone() if memory in seen and tensor.numel() else tensor).contiguous()
        seen.setdefault(memory, name)
    return apart
